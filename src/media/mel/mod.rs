//! Sound into what an encoder hears: the logarithm of how much of each mel band there is, a hundred frames a second.
//!
//! [`WhisperMel`] and [`UsmMel`] each do as their model's reference does, to where its own rounding begins: both encoders were
//! trained on exactly these numbers. Both take mono samples at 16 kHz in -1 ..= 1, and may be used by many threads at once.

mod filters;
mod usm;
mod whisper;

#[cfg(test)]
mod golden_tests;
#[cfg(test)]
pub(crate) mod signals;

pub use usm::{UsmFeatures, UsmMel, soft_tokens};
pub use whisper::WhisperMel;

/// Samples a second.
const RATE_HZ: usize = 16_000;
/// Samples from one frame to the next: 10 ms.
pub const HOP_SAMPLES: usize = 160;
/// Samples of a window: 30 s.
pub const N_SAMPLES: usize = 480_000;
/// Frames of a window.
pub const FRAMES: usize = N_SAMPLES / HOP_SAMPLES;
