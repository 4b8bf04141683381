//! `mlxbatch` runs a model over a whole data set on your own machine.
//!
//! A row flows through plain owned types, never backwards:
//!
//! ```text
//! Item -> Request -> Plan -> Sampled -> Finished -> Row
//! ```
//!
//! Modules are declared in reading order, and each imports only from those before it, which `tests/it/tidy/` holds them to:
//! [`args`] is what was typed, [`job`] what it means; [`media`] decodes recordings; [`manifest`] reads rows into
//! [`manifest::Item`]s; [`model`] says what a model's files hold; [`schedule`] decides what each step computes; [`prompt`] turns an
//! item into a [`schedule::Request`]; [`engine`] computes plans; [`score`] compares texts; [`sink`] keeps the rows; [`report`]
//! tells people. Only [`run`] sees all of them.
//!
//! `docs/architecture.md` says more.

pub mod args;
pub mod job;
pub mod media;
pub mod manifest;
pub mod model;
pub mod schedule;
pub mod prompt;
pub mod transcribe;
pub mod engine;
pub mod score;
pub mod sink;
pub mod report;
pub mod run;
