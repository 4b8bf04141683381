use std::{io, path::PathBuf};

use thiserror::Error;

use super::PartError;

/// What ends a run on the side of its results. Rows of closed parts are safe in every case.
#[derive(Debug, Error)]
pub enum SinkError {
    /// The disk is full or gone, or a permission is missing; the source names the file.
    #[error("failed to {doing}; the rows of closed parts are safe, and running the job again goes on after them")]
    Io { doing: &'static str, source: io::Error },
    #[error("failed to write {file}; the rows of closed parts are safe, and running the job again goes on after them")]
    Write { file: PathBuf, source: parquet::errors::ParquetError },
    #[error(
        "{folder} is being written by another run{holder}: wait for it, stop it, or give this run another output with --output"
    )]
    Locked { folder: PathBuf, holder: String },
    #[error(
        "{folder} holds {file} but no run.json, so it is no earlier run's results: give another folder with --output, or empty it"
    )]
    Foreign { folder: PathBuf, file: String },
    #[error("the run.json in {folder} was not written by mlxbatch, so nothing there is removed: give another folder with --output")]
    ForeignRecord { folder: PathBuf },
    #[error(
        "{folder} holds results of a run that differs from this one: {reasons}. Run with --fresh to discard them, \
         or give another folder with --output"
    )]
    Changed { folder: PathBuf, reasons: String },
    #[error(
        "{file} cannot be read as the record of a run ({reason}): run with --fresh to start over, or give another folder with --output"
    )]
    Record { file: PathBuf, reason: String },
    #[error(
        "{file} was found among the parts of this run, but it belongs to another ({reason}): move it away, or run with --fresh"
    )]
    Stray { file: PathBuf, reason: String },
    #[error("a part of the earlier run cannot be read: move it away to have its rows done again, or run with --fresh")]
    Part(#[from] PartError),
    #[error("row {row} is in {first} and again in {second}: move one of the two away, or run with --fresh")]
    RowTwice { row: u64, first: String, second: String },
    #[error("results.keep_columns names `{name}`, {reason}")]
    KeptColumn { name: String, reason: &'static str },
    /// A fault of the program: each row is given once.
    #[error("row {row} was given to the results a second time")]
    Duplicate { row: u64 },
    /// A fault of the program: a complete run has a result for each row.
    #[error("the run ended as complete with {rows} rows in the results, of {expected}")]
    Incomplete { rows: u64, expected: u64 },
    /// A part could not be closed before; whatever was in hand is done again by the next run.
    #[error("the results take no more rows after a part could not be closed")]
    Broken,
    #[cfg(test)]
    #[error("stopped before {0:?}")]
    Stopped(super::folder::Step),
}

impl SinkError {
    pub(super) fn io(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| SinkError::Io { doing, source }
    }
}
