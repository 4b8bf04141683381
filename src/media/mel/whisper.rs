//! What Whisper hears. Source: `audio.py` and `transcribe.py` of mlx-whisper, which are OpenAI's.

use std::sync::Arc;

use realfft::{RealFftPlanner, RealToComplex};

use super::filters::{MelFilters, Scale};
use super::{FRAMES, HOP_SAMPLES};
use crate::media::Features;

/// Samples of a frame, which stands in the middle of them.
const FRAME_SAMPLES: usize = 400;

/// What the reference fixes; tests change one at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Recipe {
    pub(super) hop_samples: usize,
    pub(super) scale: Scale,
    /// Least power of a band.
    pub(super) floor: f32,
    /// Decades of power under a recording's loudest band that are told apart.
    pub(super) range: f32,
}

pub(super) const RECIPE: Recipe = Recipe { hop_samples: HOP_SAMPLES, scale: Scale::Slaney, floor: 1e-10, range: 8.0 };

/// Log-mel spectrograms as Whisper was trained on: 25 ms frames under a periodic Hann window, power, Slaney's mel bands, log10.
pub struct WhisperMel {
    bins: usize,
    recipe: Recipe,
    filters: MelFilters,
    hann: Vec<f32>,
    fft: Arc<dyn RealToComplex<f32>>,
}

impl WhisperMel {
    /// `bins` is 80, or 128 for large-v3 and what was made from it.
    pub fn new(bins: usize) -> Self {
        Self::with(bins, RECIPE)
    }

    pub(super) fn with(bins: usize, recipe: Recipe) -> Self {
        let turn = std::f64::consts::TAU / FRAME_SAMPLES as f64;
        Self {
            bins,
            recipe,
            filters: MelFilters::new(recipe.scale, bins, FRAME_SAMPLES, true),
            hann: (0..FRAME_SAMPLES).map(|at| (0.5 - 0.5 * (turn * at as f64).cos()) as f32).collect(),
            fft: RealFftPlanner::new().plan_fft_forward(FRAME_SAMPLES),
        }
    }

    /// The encoder's input for a window of at most 30 s, from its start: [`window`](Self::window) of [`log_mel`](Self::log_mel).
    pub fn features(&self, samples: &[f32]) -> Features {
        self.window(&self.log_mel(samples), 0)
    }

    /// `samples.len() / 160` frames, rounded down: less than 10 ms is nothing to hear. As in the reference, 30 s of silence are
    /// taken to follow, so that the last frames fade into it, and the loudest band of all, behind the last frame too, sets the
    /// floor. A frame that holds a number which is not finite counts as silent.
    pub fn log_mel(&self, samples: &[f32]) -> Features {
        self.spectrogram(samples, samples.len() / self.recipe.hop_samples)
    }

    /// The first 30 s of `samples` with silence behind them, which is what the reference detects the language on and what
    /// transformers' extractor gives. Unlike [`features`](Self::features), which has zeros behind the last frame, as `transcribe`.
    pub fn features_with_silence(&self, samples: &[f32]) -> Features {
        self.spectrogram(samples, FRAMES)
    }

    /// The encoder's input from frame `seek` on: always 3000 frames, zeros behind the last one of `log_mel`.
    pub fn window(&self, log_mel: &Features, seek: usize) -> Features {
        log_mel.padded(seek)
    }

    /// The first `frames` frames of `samples` followed by silence.
    fn spectrogram(&self, samples: &[f32], frames: usize) -> Features {
        let hop = self.recipe.hop_samples;
        // Frames that see a sample. All others are silent: their bands have the least power.
        let heard = if samples.is_empty() { 0 } else { (samples.len() - 1 + FRAME_SAMPLES / 2) / hop + 1 };
        let silent = self.recipe.floor.log10();
        let mut values = vec![silent; heard.max(frames) * self.bins];
        let mut input = self.fft.make_input_vec();
        let mut spectrum = self.fft.make_output_vec();
        let mut scratch = self.fft.make_scratch_vec();
        let mut power = vec![0.0; spectrum.len()];
        let mut loudest = silent;
        for (frame, row) in values.chunks_exact_mut(self.bins).take(heard).enumerate() {
            fill(&mut input, samples, frame * hop);
            if input.iter().all(|sample| *sample == 0.0) {
                continue;
            }
            for (sample, weight) in input.iter_mut().zip(&self.hann) {
                *sample *= weight;
            }
            let done = self.fft.process_with_scratch(&mut input, &mut spectrum, &mut scratch);
            debug_assert!(done.is_ok(), "it fails on buffers of other lengths than its own alone");
            for (power, value) in power.iter_mut().zip(&spectrum) {
                *power = value.norm_sqr();
            }
            self.filters.apply(&power, row);
            for band in row {
                *band = if band.is_finite() { band.max(self.recipe.floor).log10() } else { silent };
                loudest = loudest.max(*band);
            }
        }
        values.truncate(frames * self.bins);
        let floor = loudest - self.recipe.range;
        for value in &mut values {
            *value = (value.max(floor) + 4.0) / 4.0;
        }
        Features { frames, bins: self.bins, values }
    }
}

/// The samples of the frame whose middle is sample `middle`: mirrored at the recording's start, silence behind its end.
fn fill(input: &mut [f32], samples: &[f32], middle: usize) {
    let half = input.len() / 2;
    let mirrored = half.saturating_sub(middle);
    for (at, out) in input[..mirrored].iter_mut().enumerate() {
        *out = samples.get(half - middle - at).copied().unwrap_or(0.0);
    }
    let rest = &mut input[mirrored..];
    let start = (middle + mirrored - half).min(samples.len());
    let there = rest.len().min(samples.len() - start);
    rest[..there].copy_from_slice(&samples[start..start + there]);
    rest[there..].fill(0.0);
}
