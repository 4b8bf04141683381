//! Tells people what happens.
//!
//! The run says what happens as [`Event`]s and knows nothing of how it looks. A [`Reporter`] shows them on standard error, as a
//! bar, as lines or as JSON, and keeps them in `events.jsonl`. Standard output is left to results. [`Tally`] counts rows into a
//! [`Summary`], for the end of a run and for `mlxbatch summary` alike.

mod bar;
mod compared;
mod event;
mod log;
mod reporter;
mod spread;
mod summary;
mod tally;
mod words;

pub use compared::{Compared, ComparedRow, Texts};
pub use event::{Event, Progress};
pub use log::EventLog;
pub use reporter::{ProgressMode, Reporter};
pub use summary::{ErrorsLeftOff, Heard, StageTimes, Summary};
pub use tally::{Measured, Tally};
