//! Triangular filters, equally wide on a mel scale.

use super::RATE_HZ;

/// What a hertz is in mel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Scale {
    /// Linear up to 1 kHz, then logarithmic. Source: Slaney, Auditory Toolbox (1998), as in librosa's `filters.mel`.
    Slaney,
    /// 2595 · log10(1 + f / 700). Source: Young et al., The HTK Book.
    Htk,
}

const SLANEY_LINEAR_HZ: f64 = 200.0 / 3.0;
const SLANEY_KNEE_HZ: f64 = 1000.0;
const SLANEY_KNEE_MEL: f64 = SLANEY_KNEE_HZ / SLANEY_LINEAR_HZ;

impl Scale {
    fn mel(self, hz: f64) -> f64 {
        match self {
            Self::Slaney if hz < SLANEY_KNEE_HZ => hz / SLANEY_LINEAR_HZ,
            Self::Slaney => SLANEY_KNEE_MEL + (hz / SLANEY_KNEE_HZ).ln() / slaney_step(),
            Self::Htk => 2595.0 * (1.0 + hz / 700.0).log10(),
        }
    }

    fn hz(self, mel: f64) -> f64 {
        match self {
            Self::Slaney if mel < SLANEY_KNEE_MEL => mel * SLANEY_LINEAR_HZ,
            Self::Slaney => SLANEY_KNEE_HZ * (slaney_step() * (mel - SLANEY_KNEE_MEL)).exp(),
            Self::Htk => 700.0 * (10f64.powf(mel / 2595.0) - 1.0),
        }
    }
}

/// Above its knee the scale grows by 27 mel while the frequency grows 6.4 times.
fn slaney_step() -> f64 {
    6.4f64.ln() / 27.0
}

/// The weights of each band that are not zero.
#[derive(Debug)]
pub(super) struct MelFilters {
    bands: Vec<Band>,
}

#[derive(Debug)]
struct Band {
    /// Bin of the spectrum that the first weight belongs to.
    first: usize,
    weights: Vec<f32>,
}

impl MelFilters {
    /// `bins` bands from 0 Hz to half the rate over the spectrum of a transform of `fft_samples`. With `normalized` each band's
    /// weights are divided by half its width, so that all have the same area (librosa's `norm = "slaney"`).
    pub(super) fn new(scale: Scale, bins: usize, fft_samples: usize, normalized: bool) -> Self {
        let top = scale.mel(RATE_HZ as f64 / 2.0);
        let edges: Vec<f64> = (0..bins + 2).map(|edge| scale.hz(top * edge as f64 / (bins + 1) as f64)).collect();
        let bands = edges.windows(3).map(|edges| {
            let (lower, center, upper) = (edges[0], edges[1], edges[2]);
            let scaling = if normalized { 2.0 / (upper - lower) } else { 1.0 };
            let weights = (0..=fft_samples / 2).map(|bin| {
                let hz = bin as f64 * RATE_HZ as f64 / fft_samples as f64;
                (((hz - lower) / (center - lower)).min((upper - hz) / (upper - center)).max(0.0) * scaling) as f32
            });
            let weights: Vec<f32> = weights.collect();
            let first = weights.iter().position(|weight| *weight > 0.0).unwrap_or(0);
            let end = weights.iter().rposition(|weight| *weight > 0.0).map_or(first, |last| last + 1);
            Band { first, weights: weights[first..end].to_vec() }
        });
        Self { bands: bands.collect() }
    }

    /// How much of each band is in `spectrum`; `out` has a place a band.
    pub(super) fn apply(&self, spectrum: &[f32], out: &mut [f32]) {
        for (out, band) in out.iter_mut().zip(&self.bands) {
            let spectrum = &spectrum[band.first..band.first + band.weights.len()];
            *out = band.weights.iter().zip(spectrum).map(|(weight, value)| weight * value).sum();
        }
    }

    /// All weights, zeros included: `bins` × `width`.
    #[cfg(test)]
    pub(super) fn dense(&self, width: usize) -> Vec<f32> {
        let mut dense = vec![0.0; self.bands.len() * width];
        for (row, band) in dense.chunks_exact_mut(width).zip(&self.bands) {
            row[band.first..band.first + band.weights.len()].copy_from_slice(&band.weights);
        }
        dense
    }
}
