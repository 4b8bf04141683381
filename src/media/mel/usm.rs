//! What Gemma 4's audio tower hears. Source: `audio_feature_extractor.py` of mlx-vlm's `gemma4`, after transformers' own.

use std::sync::Arc;

use realfft::{RealFftPlanner, RealToComplex};

use super::filters::{MelFilters, Scale};
use super::{HOP_SAMPLES, N_SAMPLES, RATE_HZ};
use crate::media::Features;

const BINS: usize = 128;
const FRAME_SAMPLES: usize = 320;
const FFT_SAMPLES: usize = 512;
/// Silence in front, so that the first frame's middle is the first sample.
const SILENCE_SAMPLES: usize = FRAME_SAMPLES / 2;
/// A recording is filled up with silence to a multiple of this.
const MULTIPLE_SAMPLES: usize = 128;

/// What the reference fixes; tests change one at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Recipe {
    pub(super) hop_samples: usize,
    /// Samples that must be there for a frame, one more than it is computed from: the reference unfolds for a pre-emphasis that it
    /// then leaves out.
    pub(super) unfolded_samples: usize,
    pub(super) scale: Scale,
    /// Added to each band.
    pub(super) floor: f64,
    pub(super) hann: fn(usize) -> f32,
}

pub(super) const RECIPE: Recipe = Recipe {
    hop_samples: HOP_SAMPLES,
    unfolded_samples: FRAME_SAMPLES + 1,
    scale: Scale::Htk,
    floor: 1e-3,
    hann: hann_of_single_precision,
};

/// Log-mel spectrograms of Google's Universal Speech Model: 20 ms frames under a periodic Hann window, magnitude, 128 bands on
/// HTK's scale, natural logarithm of the band + 0.001, nothing normalized.
pub struct UsmMel {
    recipe: Recipe,
    filters: MelFilters,
    hann: Vec<f32>,
    fft: Arc<dyn RealToComplex<f64>>,
}

/// Frames, and how many of them count.
#[derive(Debug, Clone, PartialEq)]
pub struct UsmFeatures {
    /// Frames × 128. Those that do not count are zeros.
    pub features: Features,
    /// Frames in front that are all of recording: the reference's mask is true for these.
    pub valid_frames: usize,
}

impl UsmMel {
    pub fn new() -> Self {
        Self::with(RECIPE)
    }

    pub(super) fn with(recipe: Recipe) -> Self {
        Self {
            recipe,
            filters: MelFilters::new(recipe.scale, BINS, FFT_SAMPLES, false),
            hann: (0..FRAME_SAMPLES).map(recipe.hann).collect(),
            fft: RealFftPlanner::new().plan_fft_forward(FFT_SAMPLES),
        }
    }

    /// What the tower is given for `samples`, of which it hears 30 s at most. Under 161 samples no frame counts, under 129 there is
    /// none. A frame that holds a number which is not finite counts as silent.
    pub fn features(&self, samples: &[f32]) -> UsmFeatures {
        let samples = &samples[..samples.len().min(N_SAMPLES)];
        let (hop, unfolded) = (self.recipe.hop_samples, self.recipe.unfolded_samples);
        let frames_of = |samples: usize| (SILENCE_SAMPLES + samples).checked_sub(unfolded).map_or(0, |rest| rest / hop + 1);
        let frames = frames_of(samples.len().next_multiple_of(MULTIPLE_SAMPLES));
        let valid_frames = frames_of(samples.len());
        let silent = self.recipe.floor.ln() as f32;
        let mut values = vec![0.0; frames * BINS];
        let mut input = self.fft.make_input_vec();
        let mut spectrum = self.fft.make_output_vec();
        let mut scratch = self.fft.make_scratch_vec();
        let mut magnitude = vec![0.0; spectrum.len()];
        for (frame, row) in values.chunks_exact_mut(BINS).take(valid_frames).enumerate() {
            let missing = SILENCE_SAMPLES.saturating_sub(frame * hop);
            let start = (frame * hop).saturating_sub(SILENCE_SAMPLES);
            let heard = &samples[start..(frame * hop + FRAME_SAMPLES - SILENCE_SAMPLES).min(samples.len())];
            if heard.iter().all(|sample| *sample == 0.0) {
                row.fill(silent);
                continue;
            }
            // Products, spectrum and magnitude are rounded to 32 bits, as numpy does, but what is between is not: the transform of
            // a loud tone would leave more noise than the floor in the quiet bands.
            input.fill(0.0);
            for ((input, sample), weight) in input[missing..].iter_mut().zip(heard).zip(&self.hann[missing..]) {
                *input = f64::from(sample * weight);
            }
            let done = self.fft.process_with_scratch(&mut input, &mut spectrum, &mut scratch);
            debug_assert!(done.is_ok(), "it fails on buffers of other lengths than its own alone");
            for (magnitude, value) in magnitude.iter_mut().zip(&spectrum) {
                let (real, imaginary) = (f64::from(value.re as f32), f64::from(value.im as f32));
                *magnitude = (real * real + imaginary * imaginary).sqrt() as f32;
            }
            self.filters.apply(&magnitude, row);
            for band in row {
                let log = (f64::from(*band) + self.recipe.floor).ln() as f32;
                *band = if log.is_finite() { log } else { silent };
            }
        }
        UsmFeatures { features: Features { frames, bins: BINS, values }, valid_frames }
    }
}

impl Default for UsmMel {
    fn default() -> Self {
        Self::new()
    }
}

/// Tokens that stand for a recording of so many samples in the prompt: one a 40 ms begun, at most 750. Computed as the reference's
/// processor does, in its order and precision (`_compute_audio_num_tokens` in mlx-vlm's `processing_gemma4.py`).
pub fn soft_tokens(samples: usize) -> u32 {
    let duration_ms = samples as f64 / RATE_HZ as f64 * 1000.0;
    (duration_ms / 40.0).ceil().min(750.0) as u32
}

/// The window as the reference computes it, all in 32 bits, where an angle is off by up to 2.4e-7. That matters: a band where a
/// loud tone leaks through the window's own error is as loud as a tenth of the floor.
fn hann_of_single_precision(at: usize) -> f32 {
    0.5 - 0.5 * numpy_cosine(std::f32::consts::TAU * at as f32 / FRAME_SAMPLES as f32)
}

/// numpy's cosine of 32-bit numbers, which is not always the nearest one: fused multiply-adds over an angle brought to -π/4 ..= π/4
/// in three steps. Source: `loops_trigonometric.dispatch.cpp` in numpy.
fn numpy_cosine(angle: f32) -> f32 {
    const COSINE: [u32; 4] = [0x37CC_730B, 0xBAB6_036E, 0x3D2A_AA9E, 0xBF00_0000];
    const SINE: [u32; 4] = [0x363E_9DDE, 0xB950_35DD, 0x3C08_88CD, 0xBE2A_AAAB];
    const HALF_PI: [u32; 3] = [0xBFC9_0FD8, 0xB4A8_885A, 0xA7C2_34C4];
    // Adding what has a last place of 1 rounds to whole quarters, and fused with the product it does so once.
    const WHOLE: f32 = 12_582_912.0;
    let quarter = angle.mul_add(std::f32::consts::FRAC_2_PI, WHOLE) - WHOLE;
    let angle = HALF_PI.iter().fold(angle, |rest, part| quarter.mul_add(f32::from_bits(*part), rest));
    let square = angle * angle;
    let polynomial = |coefficients: [u32; 4]| {
        let [first, rest @ ..] = coefficients.map(f32::from_bits);
        rest.into_iter().fold(first, |sum, coefficient| sum.mul_add(square, coefficient))
    };
    let (cosine, sine) = (polynomial(COSINE).mul_add(square, 1.0), (polynomial(SINE) * square).mul_add(angle, angle));
    match quarter as i32 & 3 {
        0 => cosine,
        1 => -sine,
        2 => -cosine,
        _ => sine,
    }
}
