//! What a job file means: the validated [`Job`].
//!
//! A file becomes a job in this order: `document` parses TOML and puts `--set` into it, `reader` takes keys out one by one and
//! gathers every problem, `read` says which keys there are, `error` shows what was wrong. `generation` alone knows the keys of
//! `[generation]`, for the file as for a row's columns (`overrides`), `speech` those of `[audio]` and `[transcription]`.
//! `effective` writes a job back.

mod document;
mod effective;
mod error;
mod generation;
mod overrides;
mod read;
mod reader;
mod speech;
mod value;

#[cfg(test)]
mod tests;

pub use error::{JobError, Place, Problem};
pub use generation::Generation;

use std::path::PathBuf;

/// A validated job. Paths are resolved against the job file's folder.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// The file it was read from.
    pub file: PathBuf,
    pub name: String,
    /// Folder that receives the results.
    pub output: PathBuf,
    pub model: Model,
    pub input: Input,
    pub prompt: Prompt,
    pub generation: Generation,
    pub batching: Batching,
    pub audio: Audio,
    pub transcription: Transcription,
    pub results: Results,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// As written, with a relative path resolved against the job file where that path exists: a folder, a `.gguf` file, a hub id
    /// (`org/name`), or `fake`, which needs no model and serves to try a manifest or to measure everything but the model.
    pub path: String,
    pub device: Device,
    pub dtype: Dtype,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    Auto,
    Gpu,
    Cpu,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    Auto,
    Float32,
    Bfloat16,
    Float16,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    /// Files or globs, resolved; empty when `folder` is given.
    pub manifest: Vec<String>,
    pub folder: Option<PathBuf>,
    pub glob: Option<String>,
    pub columns: Columns,
}

/// Which manifest column plays which part.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns {
    /// Default `id`.
    pub id: String,
    /// Default `prompt`.
    pub prompt: String,
    /// Default `messages`.
    pub messages: String,
    /// Default `reference`.
    pub reference: String,
    /// Default `audio`.
    pub audio: String,
    /// Default `image`; it has one, or a list of them.
    pub image: String,
    /// Default `language`.
    pub language: String,
}

impl Default for Columns {
    fn default() -> Self {
        let [id, prompt, messages, reference, audio, image, language] =
            ["id", "prompt", "messages", "reference", "audio", "image", "language"].map(str::to_owned);
        Self { id, prompt, messages, reference, audio, image, language }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    pub system: Option<String>,
    /// minijinja source over the row's columns; without one the prompt column is the user's message.
    pub template: Option<String>,
    pub thinking: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Batching {
    /// Rows decoded together at most.
    pub rows: u32,
    pub kv_budget: KvBudget,
    /// Prompt tokens of a step at most, those of all its rows together; a longer prompt is computed in chunks of so many.
    pub prefill_chunk: Option<u32>,
    /// Rows that compute prompt tokens in one step at most.
    pub prompt_concurrency: Option<u32>,
    pub order: Order,
    /// Whether what prompts share at the head is computed once.
    pub prefix_cache: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvBudget {
    Auto,
    Bytes(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Length,
    Manifest,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Results {
    pub token_ids: bool,
    pub keep_columns: Vec<String>,
    pub rows_per_part: u32,
    /// A part is closed after this long even when it is not full, so that a kill loses little.
    pub seconds_per_part: u32,
}

/// How recordings become windows of what a model hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Audio {
    pub long: Long,
    pub channels: Channels,
}

/// What becomes of a recording that is longer than a model hears at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Long {
    /// Cut at silence into windows, whose results are joined.
    Split,
    /// Cut off, with a note in the row.
    Truncate,
}

/// Which channels of a recording are heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channels {
    /// Their mean; where it cancels, the louder one.
    Mix,
    Left,
    Right,
}

/// What a speech model is asked to write. Names, defaults and meanings are those of OpenAI's `whisper.transcribe`.
#[derive(Debug, Clone, PartialEq)]
pub struct Transcription {
    pub task: SpeechTask,
    /// A code such as `en`, or none: it is detected.
    pub language: Option<String>,
    /// Text in segments, with their times.
    pub timestamps: bool,
    /// What is taken to have been said before.
    pub initial_prompt: Option<String>,
    /// Tried one after another until a result passes the two thresholds that follow; never empty.
    pub temperatures: Vec<f32>,
    /// Text that compresses better than this repeats itself.
    pub compression_ratio_threshold: Option<f32>,
    /// Mean log-probability of a token under which a result is tried again.
    pub logprob_threshold: Option<f32>,
    /// Probability of no speech over which a result under `logprob_threshold` is taken for silence.
    pub no_speech_threshold: Option<f32>,
    /// Token ids never written; -1 stands for what is not speech, as the reference lists it.
    pub suppress_tokens: Vec<i64>,
    pub suppress_blank: bool,
    /// Seconds at most before the first segment of a window.
    pub max_initial_timestamp: f32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpeechTask {
    /// In the language that is spoken.
    Transcribe,
    /// Into English.
    Translate,
}

impl Default for Audio {
    fn default() -> Self {
        Self { long: Long::Split, channels: Channels::Mix }
    }
}

impl Default for Transcription {
    fn default() -> Self {
        Self {
            task: SpeechTask::Transcribe,
            language: None,
            timestamps: true,
            initial_prompt: None,
            temperatures: vec![0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
            compression_ratio_threshold: Some(2.4),
            logprob_threshold: Some(-1.0),
            no_speech_threshold: Some(0.6),
            suppress_tokens: vec![-1],
            suppress_blank: true,
            max_initial_timestamp: 1.0,
        }
    }
}
