//! Features beside those of the references, which `fixtures/mel_goldens.py` computed on the same sounds.

use serde_json::Value;

use super::filters::{MelFilters, Scale};
use super::signals::signal;
use super::usm::{self, UsmMel, soft_tokens};
use super::whisper::{self, WhisperMel};
use super::{FRAMES, HOP_SAMPLES, N_SAMPLES};
use crate::media::Features;

const WHISPER_TOLERANCE: f64 = 1e-4;
const USM_TOLERANCE: f64 = 1e-5;

fn golden(name: &str) -> Value {
    let path = format!("{}/goldens/mel/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn index(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

/// Over all cases of a golden: the largest difference, infinite where the number of frames is another one.
#[derive(Default)]
struct Comparison {
    worst: f64,
    at: String,
    values: usize,
}

impl Comparison {
    fn note(&mut self, difference: f64, at: impl FnOnce() -> String) {
        self.values += 1;
        let difference = if difference.is_nan() { f64::INFINITY } else { difference };
        if difference > self.worst {
            (self.worst, self.at) = (difference, at());
        }
    }

    fn add(&mut self, case: &str, oracle: &Value, features: &Features, frames: usize) {
        assert_eq!(features.values.len(), features.frames * features.bins);
        if index(&oracle["frames"]) != frames {
            let expected = &oracle["frames"];
            return self.note(f64::INFINITY, || format!("{case}: {frames} frames, expected {expected}"));
        }
        if frames == 0 {
            return;
        }
        for (frame, row) in list(&oracle["at_frames"]).iter().zip(list(&oracle["values"])) {
            for (bin, value) in list(&oracle["at_bins"]).iter().zip(list(row)) {
                let found = f64::from(features.values[index(frame) * features.bins + index(bin)]);
                let value = value.as_f64().unwrap();
                self.note((found - value).abs(), || format!("{case}, frame {frame}, bin {bin}: {found}, expected {value}"));
            }
        }
        // Stretches as numpy's array_split makes them: the first ones are a frame longer.
        let means = list(&oracle["means"]);
        let mut start = 0;
        for (stretch, mean) in means.iter().enumerate() {
            let end = start + frames / means.len() + usize::from(stretch < frames % means.len());
            let values = &features.values[start * features.bins..end * features.bins];
            let found = values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len() as f64;
            let mean = mean.as_f64().unwrap();
            self.note((found - mean).abs(), || format!("{case}, mean of frames {start} .. {end}: {found}, expected {mean}"));
            start = end;
        }
    }

    fn is_within(&self, tolerance: f64) {
        println!("{} values, worst {:e} at {}", self.values, self.worst, self.at);
        assert!(self.values > 1000, "only {} values were compared", self.values);
        assert!(self.worst <= tolerance, "{:e} at {}", self.worst, self.at);
    }
}

fn cases(golden: &Value) -> impl Iterator<Item = (String, Vec<f32>, &Value)> {
    list(&golden["cases"]).iter().map(|case| {
        let (name, samples) = (case["signal"].as_str().unwrap(), index(&case["samples"]));
        (format!("{name} of {samples} samples"), signal(name, samples), case)
    })
}

fn compare_whisper(bins: usize, oracle: &str, recipe: whisper::Recipe) -> Comparison {
    let (golden, mel, mut comparison) = (golden(&format!("whisper-{bins}")), WhisperMel::with(bins, recipe), Comparison::default());
    for (case, samples, golden) in cases(&golden) {
        let oracle = &golden[oracle];
        if oracle == &golden["mlx_whisper"] {
            let features = mel.log_mel(&samples);
            comparison.add(&case, oracle, &features, features.frames);
        } else {
            // transformers' last frame is left out where it sees the window's end; the script says why.
            let features = mel.features_with_silence(&samples);
            assert_eq!(features.frames, FRAMES);
            comparison.add(&case, oracle, &features, index(&oracle["frames"]));
        }
    }
    comparison
}

fn compare_usm(oracle: &str, recipe: usm::Recipe) -> Comparison {
    let (golden, mel, mut comparison) = (golden("usm"), UsmMel::with(recipe), Comparison::default());
    for (case, samples, golden) in cases(&golden) {
        let oracle = &golden[oracle];
        let heard = mel.features(&samples);
        comparison.add(&case, oracle, &heard.features, heard.features.frames);
        if index(&oracle["valid_frames"]) != heard.valid_frames {
            let (found, expected) = (heard.valid_frames, &oracle["valid_frames"]);
            comparison.note(f64::INFINITY, || format!("{case}: {found} valid frames, expected {expected}"));
        }
    }
    comparison
}

#[test]
fn whisper_hears_what_mlx_whisper_hears() {
    for bins in [80, 128] {
        compare_whisper(bins, "mlx_whisper", whisper::RECIPE).is_within(WHISPER_TOLERANCE);
        compare_whisper(bins, "mlx_whisper_with_silence", whisper::RECIPE).is_within(WHISPER_TOLERANCE);
    }
}

#[test]
fn whisper_hears_what_transformers_hears() {
    for bins in [80, 128] {
        compare_whisper(bins, "transformers_with_silence", whisper::RECIPE).is_within(WHISPER_TOLERANCE);
    }
}

#[test]
fn slaneys_filters_are_those_that_mlx_whisper_ships() {
    for bins in [80, 128] {
        let (golden, filters) = (golden(&format!("whisper-{bins}")), MelFilters::new(Scale::Slaney, bins, 400, true).dense(201));
        let mut expected = vec![0.0; bins * 201];
        let rows = list(&golden["filters"]["first"]).iter().zip(list(&golden["filters"]["weights"]));
        for (row, (first, weights)) in expected.chunks_exact_mut(201).zip(rows) {
            for (weight, value) in row[index(first)..].iter_mut().zip(list(weights)) {
                *weight = value.as_f64().unwrap();
            }
        }
        for (found, expected) in filters.iter().zip(&expected) {
            assert!((f64::from(*found) - expected).abs() < 1e-8, "{found}, expected {expected}");
        }
    }
}

#[test]
fn gemma_hears_what_mlx_vlm_hears() {
    compare_usm("mlx_vlm", usm::RECIPE).is_within(USM_TOLERANCE);
}

#[test]
fn gemma_hears_what_transformers_hears_but_for_the_window() {
    let hann = |at| (0.5 - 0.5 * (std::f64::consts::TAU * at as f64 / 320.0).cos()) as f32;
    compare_usm("transformers", usm::Recipe { hann, ..usm::RECIPE }).is_within(USM_TOLERANCE);
    compare_usm("transformers", usm::RECIPE).is_within(2e-3);
}

#[test]
fn gemmas_window_is_numpys_to_the_bit() {
    for (at, bits) in list(&golden("usm")["window_bits"]).iter().enumerate() {
        let found = (usm::RECIPE.hann)(at);
        assert_eq!(u64::from(found.to_bits()), bits.as_u64().unwrap(), "{found} at {at}");
    }
}

#[test]
fn soft_tokens_are_counted_as_by_the_reference() {
    let golden = golden("usm");
    let rises: Vec<usize> = list(&golden["soft_tokens_rise_at"]).iter().map(index).collect();
    assert_eq!(rises.len(), 750);
    for samples in 0..=520_000 {
        let expected = rises.partition_point(|rise| *rise <= samples);
        assert_eq!(soft_tokens(samples) as usize, expected, "{samples} samples");
    }
    assert_eq!(soft_tokens(usize::MAX), 750);
}

/// A gate is trusted once it turned red.
#[test]
fn planted_faults_in_whispers_features_are_noticed() {
    let right = whisper::RECIPE;
    let faults = [
        ("hop", whisper::Recipe { hop_samples: HOP_SAMPLES + 1, ..right }),
        ("scale", whisper::Recipe { scale: Scale::Htk, ..right }),
        ("floor", whisper::Recipe { floor: 1e-9, ..right }),
        ("range", whisper::Recipe { range: 7.99, ..right }),
    ];
    for (fault, recipe) in faults {
        for oracle in ["mlx_whisper", "transformers_with_silence"] {
            let comparison = compare_whisper(80, oracle, recipe);
            assert!(comparison.worst > WHISPER_TOLERANCE, "a wrong {fault} goes unnoticed by {oracle}");
        }
    }
}

#[test]
fn planted_faults_in_gemmas_features_are_noticed() {
    let right = usm::RECIPE;
    let symmetric = |at| (0.5 - 0.5 * (std::f64::consts::TAU * at as f64 / 319.0).cos()) as f32;
    let faults = [
        ("hop", usm::Recipe { hop_samples: HOP_SAMPLES + 1, ..right }),
        ("unfolding", usm::Recipe { unfolded_samples: 320, ..right }),
        ("scale", usm::Recipe { scale: Scale::Slaney, ..right }),
        ("floor", usm::Recipe { floor: 0.00101, ..right }),
        ("window", usm::Recipe { hann: symmetric, ..right }),
    ];
    for (fault, recipe) in faults {
        let comparison = compare_usm("mlx_vlm", recipe);
        assert!(comparison.worst > USM_TOLERANCE, "a wrong {fault} goes unnoticed");
    }
}

#[test]
fn windows_start_where_the_decoder_went_on_and_are_filled_with_zeros() {
    let mel = WhisperMel::new(80);
    let log_mel = mel.log_mel(&signal("chirp", 37_123));
    assert_eq!((log_mel.frames, log_mel.bins), (232, 80));
    for seek in [0, 1, 231, 232, 5000] {
        let window = mel.window(&log_mel, seek);
        assert_eq!((window.frames, window.bins, window.values.len()), (FRAMES, 80, FRAMES * 80));
        let (content, rest) = window.values.split_at(232usize.saturating_sub(seek) * 80);
        assert_eq!(content, &log_mel.values[log_mel.values.len() - content.len()..]);
        assert!(rest.iter().all(|value| *value == 0.0));
    }
    assert_eq!(mel.features(&signal("chirp", 37_123)), mel.window(&log_mel, 0));
}

#[test]
fn a_longer_recording_than_a_window_is_cut_by_frames() {
    let mel = WhisperMel::new(80);
    let samples = signal("bursts", N_SAMPLES + 1600);
    let log_mel = mel.log_mel(&samples);
    assert_eq!(log_mel.frames, FRAMES + 10);
    let window = mel.window(&log_mel, 10);
    assert_eq!(window.values, log_mel.values[800..]);
    assert_eq!(mel.features_with_silence(&samples).frames, FRAMES);
    assert_eq!(UsmMel::new().features(&samples), UsmMel::new().features(&samples[..N_SAMPLES]));
}

#[test]
fn no_samples_give_no_frames() {
    let whisper = WhisperMel::new(128);
    assert_eq!(whisper.log_mel(&[]), Features { frames: 0, bins: 128, values: Vec::new() });
    assert!(whisper.features_with_silence(&[]).values.iter().all(|value| *value == -1.5));
    let usm = UsmMel::new().features(&[]);
    assert_eq!((usm.features.frames, usm.valid_frames, soft_tokens(0)), (0, 0, 0));
}

#[test]
fn numbers_that_are_not_finite_silence_their_frames_alone() {
    let clean = signal("noise", 16_000);
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
        let mut samples = clean.clone();
        samples[8000] = odd;
        let (whisper, usm) = (WhisperMel::new(80), UsmMel::new());
        let (found, expected) = (whisper.log_mel(&samples), whisper.log_mel(&clean));
        assert!(found.values.iter().all(|value| value.is_finite()));
        assert_eq!(found.values[..48 * 80], expected.values[..48 * 80]);
        assert_eq!(found.values[52 * 80..], expected.values[52 * 80..]);
        let (found, expected) = (usm.features(&samples).features, usm.features(&clean).features);
        assert!(found.values.iter().all(|value| value.is_finite()));
        assert_eq!(found.values[..48 * 128], expected.values[..48 * 128]);
    }
}

#[test]
fn many_threads_share_one_extractor() {
    use rayon::prelude::*;
    let (whisper, usm) = (WhisperMel::new(80), UsmMel::new());
    let samples = signal("bursts", 16_000);
    let expected = (whisper.log_mel(&samples), usm.features(&samples));
    (0..16).into_par_iter().for_each(|_| assert_eq!((whisper.log_mel(&samples), usm.features(&samples)), expected));
}
