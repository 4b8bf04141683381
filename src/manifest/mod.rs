//! Rows of a data set, read one at a time.

use serde_json::{Map, Value};

/// One good row.
#[derive(Debug, Clone, PartialEq)]
pub struct Item {
    /// Position over all files of the manifest, from 0; bad rows count.
    pub row: u64,
    /// From the id column, or derived from the source.
    pub id: String,
    /// `file:line`, or the path of a file of its own.
    pub source: String,
    /// The first 8 bytes of the blake3 hash of what the row was read from.
    pub input_hash: u64,
    /// Every column, in the order of the manifest.
    pub columns: Map<String, Value>,
}

/// One row that cannot be used: it becomes a failed row.
#[derive(Debug, Clone, PartialEq)]
pub struct BadRow {
    pub row: u64,
    pub id: String,
    pub source: String,
    pub input_hash: u64,
    /// A sentence that names the fault and the remedy; the source is told beside it.
    pub error: String,
    /// What could be read of it.
    pub columns: Map<String, Value>,
}
