//! `mlxbatch` runs a model over a whole data set on your own machine.
//!
//! A job flows through the modules in the order they are declared here; each imports only from those before it:
//!
//! ```text
//! Item -> Request -> Plan -> Sampled -> Finished -> Row
//! ```
//!
//! [`job`] says what was asked, [`manifest`] reads rows into [`manifest::Item`]s, [`model`] says what a model's files hold,
//! [`prompt`] turns an item into a [`schedule::Request`], [`schedule`] decides what each step computes, [`engine`] computes it,
//! [`sink`] keeps the rows, [`report`] tells people. Only [`run`] sees all of them.

pub mod args;
pub mod engine;
pub mod job;
pub mod manifest;
pub mod model;
pub mod prompt;
pub mod report;
pub mod run;
pub mod schedule;
pub mod sink;
