//! A recording into windows that a model hears at once.
//!
//! [`Splitter`] takes samples as they are decoded and gives windows of at most 30 s. Windows follow each other without a gap or an
//! overlap: whatever was pushed is in exactly one of them. [`pause`] says where a window ends.

mod pause;

#[cfg(test)]
mod tests;

use super::{HOP_SAMPLES, N_SAMPLES};
use crate::job::Long;
use pause::{Cut, Loudness};

const SECOND_SAMPLES: usize = 100 * HOP_SAMPLES;
/// What must be buffered beyond a window before it is cut, so that less than this is never left for the last one.
const AHEAD_SAMPLES: usize = 10 * SECOND_SAMPLES;
/// Where a window's end is looked for, before its 30 s: the first stretch that has a pause gives it.
const STRETCHES_SECONDS: [(usize, usize); 3] = [(20, 30), (10, 20), (1, 10)];
/// How far from the middle the rest of a recording is cut that is a little longer than a window.
const MIDDLE_SAMPLES: usize = 5 * SECOND_SAMPLES;

/// A stretch of a recording.
#[derive(Debug, Clone, PartialEq)]
pub struct Window {
    /// Its first sample, counted from the recording's start.
    pub start_sample: u64,
    /// Mono at 16 kHz; from 1 to 480,000.
    pub samples: Vec<f32>,
}

/// Cuts mono samples at 16 kHz into windows.
///
/// Push, take windows until there is none, and so on while [`wants_more`](Self::wants_more); then [`finish`](Self::finish) and take
/// the rest. It holds 40 s and what was pushed last. As an iterator it is not fused: there may be windows after a `None`.
///
/// A recording of at most 30 s is one window as it is; one without a sample has none. A longer one is cut in a pause (split), or
/// after 30 s, of which only the first window is given (truncate).
#[derive(Debug)]
pub struct Splitter {
    long: Long,
    buffer: Vec<f32>,
    /// Samples in front of `buffer` that are in windows already.
    given: usize,
    /// Of the next window.
    start_sample: u64,
    finished: bool,
    truncated_samples: u64,
}

impl Splitter {
    pub fn new(long: Long) -> Self {
        Self { long, buffer: Vec::new(), given: 0, start_sample: 0, finished: false, truncated_samples: 0 }
    }

    pub fn push(&mut self, samples: &[f32]) {
        let taken = match self.long {
            Long::Split => samples.len(),
            Long::Truncate => samples.len().min((N_SAMPLES - self.buffer.len()).saturating_sub(self.start_sample as usize)),
        };
        self.buffer.extend_from_slice(&samples[..taken]);
        self.truncated_samples += (samples.len() - taken) as u64;
    }

    /// The recording has ended.
    pub fn finish(&mut self) {
        self.finished = true;
    }

    /// Whether there may be windows after another push, of which none is there yet. With truncate it stays true to the end: what is
    /// left off is counted.
    pub fn wants_more(&self) -> bool {
        !self.finished
            && match self.long {
                Long::Split => self.buffered().len() <= N_SAMPLES + AHEAD_SAMPLES,
                Long::Truncate => self.buffered().len() < N_SAMPLES,
            }
    }

    /// Seconds that truncate has left off so far; all of them once the recording has ended.
    pub fn truncated_seconds(&self) -> f64 {
        self.truncated_samples as f64 / SECOND_SAMPLES as f64
    }

    fn buffered(&self) -> &[f32] {
        &self.buffer[self.given..]
    }

    /// Samples of the next window, if it can be told already.
    fn window_samples(&self) -> Option<usize> {
        let buffered = self.buffered();
        match (self.long, buffered.len()) {
            (_, 0) => None,
            (_, rest) if self.finished && rest <= N_SAMPLES => Some(rest),
            (Long::Truncate, rest) => (rest == N_SAMPLES).then_some(rest),
            (Long::Split, rest) if rest > N_SAMPLES + AHEAD_SAMPLES => Some(end_of_full_window(buffered)),
            (Long::Split, _) => self.finished.then(|| middle_of_rest(buffered)),
        }
    }
}

impl Iterator for Splitter {
    type Item = Window;

    fn next(&mut self) -> Option<Window> {
        let samples = self.window_samples()?;
        let window = Window { start_sample: self.start_sample, samples: self.buffered()[..samples].to_vec() };
        self.start_sample += samples as u64;
        self.given += samples;
        // Moving the rest to the front is cheap where it is short; a long one is not moved for every window.
        if self.buffered().len() <= N_SAMPLES + AHEAD_SAMPLES || self.given * 2 >= self.buffer.len() {
            self.buffer.drain(..self.given);
            self.given = 0;
        }
        Some(window)
    }
}

/// Of more than 40 s: as late as there is a pause.
fn end_of_full_window(samples: &[f32]) -> usize {
    let loudness = Loudness::of(&samples[..N_SAMPLES + AHEAD_SAMPLES]);
    let stretches = STRETCHES_SECONDS.map(|(start, end)| start * SECOND_SAMPLES..end * SECOND_SAMPLES);
    loudness.cut(&Cut { stretches: &stretches, best: N_SAMPLES })
}

/// Of the last 30 to 40 s: near the middle, so that none of the two windows is a scrap.
fn middle_of_rest(samples: &[f32]) -> usize {
    let middle = samples.len() / 2;
    let earliest = samples.len() - N_SAMPLES;
    let near = earliest.max(middle - MIDDLE_SAMPLES)..N_SAMPLES.min(middle + MIDDLE_SAMPLES);
    let anywhere = earliest.max(SECOND_SAMPLES)..N_SAMPLES.min(samples.len() - SECOND_SAMPLES);
    Loudness::of(samples).cut(&Cut { stretches: &[near, anywhere], best: middle })
}
