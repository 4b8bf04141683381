//! Rows onto disk: a folder of Parquet parts that survives a kill at any instant.
//!
//! [`Folder::open`] creates the folder or goes on with an earlier run's, and tells which rows are [`Done`]. [`Folder::push`] takes
//! rows as they complete; a full part is written, synced and renamed before the next begins. [`Folder::finish`] ends the run.
//!
//! **Closing a part** goes in this order, and a kill between any two steps leaves a folder that the next run understands:
//!
//! 1. `part-N.parquet.tmp` is written and synced. A leftover `.tmp` is deleted by the next run.
//! 2. The part's failed rows are appended to `failed.jsonl`, and it is synced. The part's own metadata says where they begin and
//!    end, so that lines whose part never came to be are cut off by the next run.
//! 3. The `.tmp` is renamed and the folder synced: from here on the part's rows are done.
//! 4. Where the part widened the type of a kept column, the earlier parts are rewritten one by one, each by rename. The parts say
//!    their types themselves, so that the next run goes on with what is left of it.
//!
//! The file format is described in `docs/output.md`.

mod closed;
mod columns;
#[cfg(test)]
mod crash_tests;
mod done;
mod error;
mod failed;
mod files;
#[cfg(test)]
pub(crate) mod fixture;
mod folder;
mod heard;
mod kept;
mod logprobs;
mod record;
mod resume;
mod schema;
#[cfg(test)]
mod tests;

pub use closed::{ClosedPart, PartError, part_files};
pub use done::{Done, RowState};
pub use error::SinkError;
pub use files::{EVENTS_FILE, FAILED_FILE, JOB_FILE, RECORD_FILE, SUCCESS_FILE};
pub use folder::{End, Folder, PartClosed};
pub use record::Provenance;
pub use schema::SCHEMA_VERSION;

pub use crate::transcribe::Segment;

use serde_json::{Map, Value};

use crate::{engine::Logprobs, score::Score};

/// A row of the results; see docs/output.md for what each column means.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub id: String,
    pub row: u64,
    pub source: String,
    pub input_hash: u64,
    pub outcome: Outcome,
    pub reference: Option<String>,
    /// How the text compares with the reference, where there are both.
    pub score: Option<Score>,
    /// The manifest's columns: those kept go into the results, all of a failed row go into `failed.jsonl`.
    pub columns: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    Ok(Box<Completion>),
    Failed { stage: Stage, error: String },
}

#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    pub text: String,
    /// `stop` or `length`.
    pub finish_reason: crate::schedule::FinishReason,
    pub prompt_tokens: u32,
    /// Of the prompt's, those that stand for images.
    pub image_tokens: u32,
    pub cached_tokens: u32,
    pub completion_tokens: u32,
    pub token_ids: Vec<u32>,
    /// Of these tokens, where the row asked for them.
    pub logprobs: Option<Logprobs>,
    pub timing: Timing,
    /// Of a row with a recording.
    pub heard: Option<Heard>,
    /// Sentences on what a reader of the result should know, such as a recording that was cut off.
    pub notes: Vec<String>,
}

/// What a row's recording was, and what was said in it when.
#[derive(Debug, Clone, PartialEq)]
pub struct Heard {
    /// Decoded length; in a prompt, of what was heard.
    pub audio_seconds: f64,
    /// Positions that the recording takes in the model: encoder positions, or soft tokens.
    pub audio_tokens: u32,
    /// A code such as `en`.
    pub language: Option<String>,
    /// In order of time, counted from the start of the recording; none where timestamps are off.
    pub segments: Vec<Segment>,
}

/// Where a row failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    Manifest,
    Media,
    Prompt,
    Admission,
    Engine,
}

impl Stage {
    pub const ALL: [Stage; 5] = [Stage::Manifest, Stage::Media, Stage::Prompt, Stage::Admission, Stage::Engine];

    /// As the column `error_stage` has it.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Manifest => "manifest",
            Stage::Media => "media",
            Stage::Prompt => "prompt",
            Stage::Admission => "admission",
            Stage::Engine => "engine",
        }
    }
}

/// Milliseconds from the row's own clock.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Timing {
    /// Reading, decoding and resampling its media, and computing features.
    pub media_ms: f64,
    /// The steps in which its media were encoded.
    pub encode_ms: f64,
    pub queue_ms: f64,
    pub prefill_ms: f64,
    /// Admission to the first token read.
    pub ttft_ms: f64,
    /// First token read to the last.
    pub decode_ms: f64,
    pub total_ms: f64,
    /// Mean number of rows decoded together with it, itself included.
    pub rows_in_batch: f64,
    /// Microseconds since the Unix epoch, at admission.
    pub started_at_us: i64,
}
