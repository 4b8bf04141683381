//! Recordings and images, from files to what a model hears and sees: plain buffers, no tensor.
//!
//! [`Recording`] streams a file as one channel of `f32` samples at a model's rate. `source` gives its bytes, `probe` says by their
//! content what they are, `wav` and `pcm` read what is not compressed, `decode` the rest (symphonia, libopus). `track` chooses what
//! is heard of a file with the help of `aac`, `vorbis`, `mp4` and `matroska`, which tell what symphonia does not; `trim` cuts off
//! what encoders add. `mix` makes one channel, `resample` one rate. Images are
//! `image`'s own.

mod aac;
mod codec;
mod decode;
mod error;
mod matroska;
mod mix;
mod mp4;
mod pcm;
mod probe;
mod recording;
mod resample;
mod silence;
mod source;
mod stored;
mod track;
mod trim;
mod vorbis;
mod wav;

pub use error::{MediaError, panic_words};
pub use recording::Recording;
pub use stored::{StoredError, stored_bytes};

mod image;
mod mel;
mod split;
mod steady;

pub use image::{BYTES_MAX as IMAGE_BYTES_MAX, ImageError, PIXELS_MAX, PatchRule, Patches, Picture, is_image_name};
#[cfg(test)]
pub(crate) use mel::signals::signal;
pub use mel::{FRAMES, HOP_SAMPLES, N_SAMPLES, UsmFeatures, UsmMel, WhisperMel, soft_tokens};
pub use split::{Splitter, Window};

use std::{path::PathBuf, sync::Arc};

/// What Whisper and every other speech model here hears, in Hz.
pub const SAMPLE_RATE: u32 = 16_000;

/// More channels than any microphone array in use.
const CHANNELS_MAX: usize = 64;
/// In Hz.
const RATE_MIN: u32 = 1_000;
/// In Hz.
const RATE_MAX: u32 = 384_000;

/// Where a row's recording or image is.
#[derive(Debug, Clone, PartialEq)]
pub enum MediaSource {
    File(PathBuf),
    /// What a manifest holds itself; `name` is what its row calls it, for messages.
    Bytes {
        name: String,
        bytes: Arc<[u8]>,
    },
}

impl MediaSource {
    /// The file's path, or what its row calls it.
    pub fn name(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Bytes { name, .. } => name.clone(),
        }
    }

    /// The sentence of a row whose recording or image cannot be used.
    pub fn fault(&self, error: &impl std::fmt::Display) -> String {
        format!("{}: {error}", self.name())
    }
}

/// What a model's encoder is given: `frames` × `bins` numbers, a frame after the other.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    pub frames: usize,
    pub bins: usize,
    pub values: Vec<f32>,
}

impl Features {
    /// A recording as it is, for a model that hears without an encoder: `bins` samples a frame, the last frame filled up with
    /// silence. A sample that is not finite counts as silence.
    ///
    /// Source: `Gemma4UnifiedAudioFeatureExtractor` of transformers.
    pub fn of_samples(samples: &[f32], bins: usize) -> Self {
        let bins = bins.max(1);
        let frames = samples.len().div_ceil(bins);
        let mut values: Vec<f32> = samples.iter().map(|sample| if sample.is_finite() { *sample } else { 0.0 }).collect();
        values.resize(frames * bins, 0.0);
        Self { frames, bins, values }
    }

    /// A Whisper encoder's input from frame `seek` on: always [`FRAMES`] frames, zeros behind the last one of these.
    pub fn padded(&self, seek: usize) -> Self {
        let start = seek.min(self.frames) * self.bins;
        let end = (start + FRAMES * self.bins).min(self.frames * self.bins);
        let mut values = Vec::with_capacity(FRAMES * self.bins);
        values.extend_from_slice(&self.values[start..end]);
        values.resize(FRAMES * self.bins, 0.0);
        Self { frames: FRAMES, bins: self.bins, values }
    }
}
