//! The contract between the scheduler and an engine.

use std::sync::Arc;

use crate::{
    job::Generation,
    media::{Features, Patches, UsmFeatures},
};

/// Names a sequence from its request to its end; the row's position in the manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

impl SequenceId {
    /// From here on up ids are the scheduler's own, for the prefixes it has computed; rows have those below.
    pub const PREFIXES: Self = Self(1 << 63);

    /// What rows share at the head, computed once: a sequence that samples nothing.
    pub fn is_prefix(self) -> bool {
        self >= Self::PREFIXES
    }
}

/// A row ready to be computed.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub sequence: SequenceId,
    /// Token ids, never empty.
    pub prompt: Vec<u32>,
    /// At least 1; 0 of a prefix.
    pub max_tokens: u32,
    /// Tokens that end the sequence; they are sampled but are not part of its text.
    pub stop_tokens: Arc<[u32]>,
    pub generation: Arc<Generation>,
    /// Hash of job seed and row id: all of a row's randomness comes from it.
    pub seed: u64,
    /// Of a recording's window, which a speech model's encoder hears before the prompt is computed. Carried, not looked at.
    pub window: Option<Arc<SpeechWindow>>,
    /// What a multimodal model sees and hears in the prompt, in the order of the prompt, none overlapping another.
    pub media: Vec<Medium>,
    /// No chunk may begin or end inside a medium: its tokens see each other both ways.
    pub whole_spans: bool,
}

/// An image or a recording in a prompt, in which it has a run of placeholders.
#[derive(Debug, Clone, PartialEq)]
pub struct Medium {
    /// Index in the prompt of its first placeholder.
    pub first: u32,
    /// Placeholders, which are the soft tokens that its tower makes of it; at least 1.
    pub tokens: u32,
    /// Only its kind is looked at, for the price.
    pub content: Arc<MediumContent>,
    /// Hash of the content: media with the same are the same.
    pub identity: u128,
}

impl Medium {
    /// Index in the prompt of what follows it.
    pub fn end(&self) -> u32 {
        self.first.saturating_add(self.tokens)
    }

    /// Whether a cut before the prompt's token `at` parts it.
    pub fn is_parted(&self, at: u32) -> bool {
        self.first < at && at < self.end()
    }
}

/// What a tower is given.
#[derive(Debug, Clone, PartialEq)]
pub enum MediumContent {
    Image(Patches),
    Audio(UsmFeatures),
    /// A recording's samples, for a model without an audio tower: each frame becomes a soft token.
    Waveform(Features),
}

impl Request {
    /// Where the chunk ends that starts at `start`: `prefill_chunk` tokens on, or at the prompt's end. Where media are computed
    /// whole, before a medium that it would part; behind it, where it starts with that.
    pub fn chunk_end(&self, start: u32, prefill_chunk: u32) -> u32 {
        let end = start.saturating_add(prefill_chunk).min(self.prompt.len() as u32);
        match self.media.iter().find(|medium| self.whole_spans && medium.is_parted(end)) {
            Some(medium) if medium.first > start => medium.first,
            Some(medium) => medium.end(),
            None => end,
        }
    }

    /// Cache positions the sequence can fill: the last sampled token never enters the cache.
    pub fn reserved_tokens(&self) -> u32 {
        self.prompt.len() as u32 + self.max_tokens.saturating_sub(1)
    }
}

/// A window of a recording, and what the tokens that a speech model writes for it are held to.
#[derive(Debug, Clone, PartialEq)]
pub struct SpeechWindow {
    pub features: Arc<Features>,
    pub rules: Arc<SpeechRules>,
    /// Index in the prompt of the token that starts a transcript: the probability of no speech is read behind it.
    pub start_of_transcript: u32,
    /// The first token sampled is the likeliest of [`SpeechRules::languages`].
    pub detect_language: bool,
    /// Tokens that follow the detected language whatever the model says; empty where none is detected.
    pub forced: Vec<u32>,
}

impl SpeechWindow {
    /// Tokens sampled that are not yet of the transcript.
    pub fn preamble_tokens(&self) -> u32 {
        u32::from(self.detect_language) + self.forced.len() as u32
    }
}

/// Token ids that have a part of their own in speech; source: `decoding.py` of OpenAI's whisper.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SpeechRules {
    pub end_of_text: u32,
    /// Never sampled.
    pub suppressed: Vec<u32>,
    /// Not sampled as the first of a transcript.
    pub suppressed_first: Vec<u32>,
    pub languages: Vec<u32>,
    pub no_speech: Option<u32>,
    /// None where the transcript has no timestamps.
    pub timestamps: Option<TimestampRules>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimestampRules {
    /// The timestamp of 0.00 s; every id from it on is a timestamp.
    pub begin: u32,
    pub no_timestamps: u32,
    /// The last timestamp that may come first, counted from `begin`.
    pub initial_max: Option<u32>,
}

/// What one step does, in this order: release, change of layout, admit (and copy what is reused), prefill, decode.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plan {
    /// Counts from 0, one a plan.
    pub step: u64,
    pub released: Vec<Release>,
    pub admitted: Vec<Admission>,
    /// The cache's layout from this step on, which the budget has priced: slots × tokens a slot.
    pub slots: u32,
    pub slot_tokens: u32,
    /// In the order of the rows' admission; [`Limits::prefill_chunk`](super::Limits::prefill_chunk) tokens together at most, but
    /// for a chunk alone that is one medium.
    pub prefill: Vec<Prefill>,
    /// By slot.
    pub decode: Vec<Decode>,
}

impl Plan {
    /// Nothing to compute. Such a plan is neither launched nor committed; releases wait for one that computes something.
    pub fn is_empty(&self) -> bool {
        self.prefill.is_empty() && self.decode.is_empty()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    pub sequence: SequenceId,
    pub slot: u32,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Admission {
    pub request: Arc<Request>,
    /// Kept until the sequence's release.
    pub slot: u32,
    /// Cache positions set aside: exactly [`Request::reserved_tokens`].
    pub reserved_tokens: u32,
    /// What of the prompt is not computed but copied; at least its last token is computed.
    pub reuse: Option<Reuse>,
}

/// Positions `0 .. tokens` of a prefix that earlier steps have computed whole. `tokens` is less than all of it only where every
/// window holds all of it: a ring that has gone round cannot be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reuse {
    /// The prefix's slot.
    pub slot: u32,
    pub tokens: u32,
}

/// Computes prompt tokens `start .. start + length`; the last chunk samples the sequence's first token. No chunk of a prefix is its
/// last in this sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefill {
    pub sequence: SequenceId,
    pub slot: u32,
    pub start: u32,
    pub length: u32,
    pub last: bool,
}

/// Feeds the token sampled last, at `position`, and samples the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decode {
    pub sequence: SequenceId,
    pub slot: u32,
    pub position: u32,
}

/// A token that a step gave.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampled {
    pub sequence: SequenceId,
    pub token: u32,
    /// Set between engine and commit when the text so far ends in a stop string.
    pub stop_string: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    pub sequence: SequenceId,
    /// Every token sampled, a stop token included.
    pub tokens: Vec<u32>,
    pub reason: FinishReason,
    /// Prompt tokens that were copied rather than computed.
    pub cached_tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// `max_tokens` reached.
    Length,
}
