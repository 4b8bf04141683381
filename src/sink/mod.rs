//! Rows onto disk.

use serde_json::{Map, Value};

/// A row of the results; see docs/output.md for what each column means.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub id: String,
    pub row: u64,
    pub source: String,
    pub input_hash: u64,
    pub outcome: Outcome,
    pub reference: Option<String>,
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
    pub cached_tokens: u32,
    pub completion_tokens: u32,
    pub token_ids: Vec<u32>,
    pub timing: Timing,
}

/// Where a row failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    Manifest,
    Media,
    Prompt,
    Admission,
    Engine,
}

/// Milliseconds from the row's own clock.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Timing {
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
