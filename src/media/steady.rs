//! Whether a window can have speech in it at all.
//!
//! Speech comes in syllables: its loudness rises and falls by tens of decibels several times a second. A window whose loudness
//! hardly moves holds silence, hiss, hum, a tone or a machine, out of which a speech model makes up words. This tells such
//! windows, and errs towards speech: music, babble, and a single word in half a minute of noise are not steady.

use super::Features;

/// Loudness that does not move by so much is steady.
const RANGE_DB_MIN: f32 = 6.0;
/// Loudness is a mean over so many frames of 10 ms: less than a syllable.
const SMOOTH_FRAMES: usize = 5;
/// Frames at both ends see the sound begin and end.
const EDGE_FRAMES: usize = 4;
/// Decibels of one unit of Whisper's features, which are a quarter of the decimal logarithm of power.
const UNIT_DB: f32 = 40.0;

impl Features {
    /// Of Whisper's log-mel features without padding: whether their loudness, the mean over bands, stays within 6 dB. A window of
    /// less than a fifth of a second is not judged.
    pub fn is_steady(&self) -> bool {
        if self.bins == 0 || self.frames < 2 * EDGE_FRAMES + 3 * SMOOTH_FRAMES {
            return false;
        }
        let loudness: Vec<f32> =
            self.values.chunks_exact(self.bins).map(|bands| bands.iter().sum::<f32>() / self.bins as f32).collect();
        let inner = &loudness[EDGE_FRAMES..self.frames - EDGE_FRAMES];
        let (mut least, mut most) = (f32::INFINITY, f32::NEG_INFINITY);
        for stretch in inner.windows(SMOOTH_FRAMES) {
            let mean = stretch.iter().sum::<f32>() / SMOOTH_FRAMES as f32;
            (least, most) = (least.min(mean), most.max(mean));
        }
        (most - least) * UNIT_DB < RANGE_DB_MIN
    }
}

#[cfg(test)]
mod tests {
    use super::super::WhisperMel;

    fn noise(seed: u32) -> impl Iterator<Item = f32> {
        let mut state = seed;
        std::iter::repeat_with(move || {
            // Twelve uniform numbers make one that is nearly normal.
            let uniform = |state: &mut u32| {
                *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (*state >> 8) as f32 / (1 << 24) as f32
            };
            (0..12).map(|_| uniform(&mut state)).sum::<f32>() - 6.0
        })
    }

    fn is_steady(samples: &[f32]) -> bool {
        WhisperMel::new(80).log_mel(samples).is_steady()
    }

    fn seconds(count: usize) -> std::ops::Range<usize> {
        0..count * 16_000
    }

    #[test]
    fn what_does_not_move_is_steady() {
        assert!(is_steady(&vec![0.0; 160_000]), "silence");
        for loudness in [1e-5, 1e-3, 0.05, 0.3] {
            for length in [1, 12, 30] {
                let hiss: Vec<f32> = noise(7).take(length * 16_000).map(|value| value * loudness).collect();
                assert!(is_steady(&hiss), "{length} s of noise at {loudness}");
            }
        }
        let hum: Vec<f32> = seconds(12).map(|at| 0.2 * (at as f32 * 0.019_635).sin()).collect();
        assert!(is_steady(&hum), "50 Hz");
        let tone: Vec<f32> = seconds(12).map(|at| 0.3 * (at as f32 * 0.4).sin()).collect();
        assert!(is_steady(&tone), "a kilohertz");
    }

    #[test]
    fn a_word_in_noise_is_not() {
        for (noise_loudness, word_loudness) in [(0.0, 0.01), (0.001, 0.01), (0.05, 0.2)] {
            let mut samples: Vec<f32> = noise(3).take(480_000).map(|value| value * noise_loudness).collect();
            // A fifth of a second of a voice: harmonics of 140 Hz.
            for (at, sample) in samples[200_000..203_200].iter_mut().enumerate() {
                let voice: f32 = (1..20).map(|harmonic| (at as f32 * harmonic as f32 * 0.055).sin() / harmonic as f32).sum();
                *sample += word_loudness * voice;
            }
            assert!(!is_steady(&samples), "a voice at {word_loudness} in noise at {noise_loudness}");
        }
    }

    #[test]
    fn what_is_too_short_is_not_judged() {
        assert!(!is_steady(&[]));
        assert!(!is_steady(&[0.0; 2000]));
    }
}
