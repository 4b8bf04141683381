//! One window from its first pass to its transcript.

use std::{io::Write as _, sync::Arc};

use flate2::{Compression, write::ZlibEncoder};

use super::{Language, TIMESTAMP_SECONDS, Transcriber};
use crate::media::Features;

/// Seconds of a frame of features.
const FRAME_SECONDS: f64 = 0.01;

/// Frames between two timestamps.
const FRAMES_PER_TIMESTAMP: usize = 2;

/// What no temperature made likelier than so many times `logprob_threshold` is nothing that was said: at the default, a token in
/// twenty on average. Music in an unknown language gives such text at temperature 1.
const NONSENSE: f32 = 3.0;

/// Passes of a window at most, temperatures not counted: each goes on by a timestamp at least, and more than so many segments do
/// not fit into 30 seconds of speech.
const PLACES_MAX: usize = 64;

/// A decoding of a window from a place in it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pass {
    /// Frame of the window that it begins at.
    pub seek: usize,
    /// Index into the temperatures of the job.
    pub attempt: usize,
    pub language: Language,
}

/// What a pass gave.
#[derive(Debug, Clone, PartialEq)]
pub struct Heard {
    /// Every token sampled, the end included where there was one.
    pub tokens: Vec<u32>,
    /// The pass ran out of tokens.
    pub cut: bool,
    pub sum_logprob: f32,
    pub no_speech_prob: f32,
}

/// A stretch of speech.
#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    /// Seconds from the start of the window, or of the recording in a row's result.
    pub start: f64,
    pub end: f64,
    pub text: String,
    /// Mean log-probability of the tokens of the pass that wrote it.
    pub avg_logprob: f32,
    pub compression_ratio: f32,
    pub no_speech_prob: f32,
    pub temperature: f32,
}

/// What was said in a window.
#[derive(Debug, Clone, PartialEq)]
pub struct Transcript {
    pub language: Language,
    pub segments: Vec<Segment>,
    /// As the model wrote it, blanks at its start included.
    pub text: String,
    /// Tokens of the text, its timestamps included.
    pub token_ids: Vec<u32>,
    /// Sampled over all passes.
    pub completion_tokens: u32,
    /// A pass ran out of tokens.
    pub cut: bool,
    /// Passes whose text was kept though no temperature brought it over the thresholds.
    pub uncertain: u32,
    /// Passes whose text was so unlikely that it was left out.
    pub nonsense: u32,
}

impl Transcript {
    /// Of a window in which nobody speaks.
    pub fn silent(language: Language) -> Self {
        Self {
            language,
            segments: Vec::new(),
            text: String::new(),
            token_ids: Vec::new(),
            completion_tokens: 0,
            cut: false,
            uncertain: 0,
            nonsense: 0,
        }
    }
}

/// What comes after a pass.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    Pass(Pass),
    Done(Box<Transcript>),
}

/// A window under way.
#[derive(Debug)]
pub struct WindowTranscript {
    features: Arc<Features>,
    seek: usize,
    attempt: usize,
    places: usize,
    language: Language,
    transcript: Transcript,
}

impl WindowTranscript {
    /// `features` are the window's own frames, without padding.
    pub fn new(features: Arc<Features>, language: Language) -> Self {
        Self { features, seek: 0, attempt: 0, places: 1, language, transcript: Transcript::silent(language) }
    }

    pub fn features(&self) -> &Arc<Features> {
        &self.features
    }

    /// The token of what was found once a pass has found it.
    pub fn language(&self) -> Language {
        self.language
    }

    pub fn pass(&self) -> Pass {
        Pass { seek: self.seek, attempt: self.attempt, language: self.language }
    }

    /// Takes what the pass gave that [`WindowTranscript::pass`] told.
    pub fn take(&mut self, transcriber: &Transcriber, heard: Heard) -> Next {
        let settings = transcriber.settings();
        self.transcript.completion_tokens += heard.tokens.len() as u32;
        let mut tokens = heard.tokens;
        if self.language == Language::Detect {
            let preamble = if transcriber.detects_alone() { 1 } else { 1 + transcriber.preamble_behind_language() };
            let Some(&language) = tokens.first() else { return self.done(transcriber) };
            self.language = Language::Known(language);
            self.transcript.language = self.language;
            if transcriber.detects_alone() {
                return Next::Pass(self.pass());
            }
            tokens.drain(..preamble.min(tokens.len()));
        }
        if !heard.cut {
            tokens.pop();
        }
        let text = transcriber.text(&tokens);
        let avg_logprob = heard.sum_logprob / (tokens.len() + 1) as f32;
        let compression_ratio = compression_ratio(text.trim());
        let no_speech_prob = heard.no_speech_prob;
        let over = |value: f32, threshold: Option<f32>| threshold.is_some_and(|threshold| value > threshold);
        let unlikely = settings.logprob_threshold.is_some_and(|threshold| avg_logprob < threshold);
        let silent = over(no_speech_prob, settings.no_speech_threshold);
        // Silence is not tried again.
        let again = (over(compression_ratio, settings.compression_ratio_threshold) || unlikely) && !(silent && unlikely);
        if again && self.attempt + 1 < settings.temperatures.len() {
            self.attempt += 1;
            return Next::Pass(self.pass());
        }
        self.transcript.cut |= heard.cut;
        let temperature = settings.temperatures.get(self.attempt).copied().unwrap_or(0.0);
        let frames = self.features.frames.saturating_sub(self.seek);
        // What is likely is kept, however silent it is said to be.
        let mut next_seek = self.seek + frames;
        let silent = silent && !over(avg_logprob, settings.logprob_threshold);
        let nonsense = settings.logprob_threshold.is_some_and(|threshold| avg_logprob < NONSENSE * threshold);
        self.transcript.nonsense += u32::from(nonsense && !silent);
        if !silent && !nonsense {
            let stretch = |start: f64, end: f64, tokens: &[u32]| {
                let text = transcriber.text(tokens);
                (Segment { start, end, text, avg_logprob, compression_ratio, no_speech_prob, temperature }, tokens.to_vec())
            };
            self.transcript.uncertain += u32::from(again);
            let (stretches, ahead) = split(&tokens, transcriber.timestamp_begin(), self.seek, frames, stretch);
            if let Some(ahead) = ahead {
                next_seek = self.seek + ahead;
            }
            for (segment, tokens) in stretches {
                // One that is instantaneous or has no text is none.
                if segment.start != segment.end && !segment.text.trim().is_empty() {
                    self.transcript.token_ids.extend(tokens);
                    self.transcript.segments.push(segment);
                }
            }
        }
        self.seek = next_seek.max(self.seek + 1);
        self.attempt = 0;
        self.places += 1;
        if self.seek >= self.features.frames || self.places > PLACES_MAX {
            return self.done(transcriber);
        }
        Next::Pass(self.pass())
    }

    fn done(&mut self, transcriber: &Transcriber) -> Next {
        self.transcript.text = transcriber.text(&self.transcript.token_ids);
        Next::Done(Box::new(self.transcript.clone()))
    }
}

impl Transcriber {
    /// The text of tokens, timestamps and special ones left out.
    fn text(&self, tokens: &[u32]) -> String {
        let end = self.rules.end_of_text;
        let spoken: Vec<u32> = tokens.iter().copied().filter(|token| *token < end).collect();
        self.tokens.decode(&spoken)
    }

    fn timestamp_begin(&self) -> Option<u32> {
        self.rules.timestamps.map(|timestamps| timestamps.begin)
    }

    fn preamble_behind_language(&self) -> usize {
        usize::from(self.speech.task.is_some()) + usize::from(self.speech.no_timestamps.is_some())
    }
}

/// A pass's tokens at their timestamps, and how many frames on the next pass begins; none where it is the end of the window.
fn split<T>(
    tokens: &[u32],
    begin: Option<u32>,
    seek: usize,
    frames: usize,
    stretch: impl Fn(f64, f64, &[u32]) -> T,
) -> (Vec<T>, Option<usize>) {
    let offset = seek as f64 * FRAME_SECONDS;
    let place = |token: u32| begin.and_then(|begin| token.checked_sub(begin)).unwrap_or(0) as usize;
    let seconds = |token: u32| offset + place(token) as f64 * TIMESTAMP_SECONDS;
    let is_timestamp = |token: &u32| begin.is_some_and(|begin| *token >= begin);
    let mut ends: Vec<usize> =
        (1..tokens.len()).filter(|&index| is_timestamp(&tokens[index - 1]) && is_timestamp(&tokens[index])).collect();
    if ends.is_empty() {
        // One stretch, up to its last timestamp if it has one that says anything.
        let last = tokens.iter().rev().find(|token| is_timestamp(token)).filter(|token| place(**token) > 0);
        let end = last.map_or(offset + frames as f64 * FRAME_SECONDS, |token| seconds(*token));
        return (vec![stretch(offset, end, tokens)], None);
    }
    // A timestamp alone at the end says that nobody speaks behind it.
    let ends_alone = matches!(tokens, [.., before, last] if !is_timestamp(before) && is_timestamp(last));
    if ends_alone {
        ends.push(tokens.len());
    }
    let mut stretches = Vec::with_capacity(ends.len());
    let mut start = 0;
    for end in ends {
        let own = &tokens[start..end];
        if let (Some(&first), Some(&last)) = (own.first(), own.last()) {
            stretches.push(stretch(seconds(first), seconds(last), own));
        }
        start = end;
    }
    let ahead = (!ends_alone).then(|| place(tokens[start - 1]) * FRAMES_PER_TIMESTAMP);
    (stretches, ahead)
}

/// Bytes of a text over those of what zlib makes of it.
pub fn compression_ratio(text: &str) -> f32 {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    // Writing into memory does not fail.
    let compressed = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish());
    compressed.map_or(0.0, |compressed| text.len() as f32 / compressed.len() as f32)
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
