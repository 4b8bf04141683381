//! Resampling against soxr at its very high quality (`fixtures/make_resample_goldens.py`).

use std::f64::consts::PI;

use mlxbatch::media::SAMPLE_RATE;

use super::{decibels, hear_bytes};

const SECONDS: f64 = 0.25;
const RATES: [u32; 8] = [8_000, 11_025, 22_050, 32_000, 44_100, 48_000, 96_000, 192_000];

/// The sweep of `fixtures/make_resample_goldens.py`.
fn sweep(rate: u32) -> Vec<f32> {
    let top = 0.85 * f64::from(rate.min(SAMPLE_RATE)) / 2.0;
    let at = |frame: usize| {
        let t = frame as f64 / f64::from(rate);
        let fade = (t.min(SECONDS - t) / (SECONDS / 10.0)).clamp(0.0, 1.0);
        let phase = 2.0 * PI * (40.0 * t + (top - 40.0) * t * t / (2.0 * SECONDS));
        (0.5 * (fade * PI / 2.0).sin().powi(2) * phase.sin()) as f32
    };
    (0..(SECONDS * f64::from(rate)).round() as usize).map(at).collect()
}

/// A WAV of 32-bit floating point.
fn wave(rate: u32, samples: &[f32]) -> Vec<u8> {
    let data: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    let numbers = [&rate.to_le_bytes()[..], &(rate * 4).to_le_bytes(), &4u16.to_le_bytes(), &32u16.to_le_bytes()].concat();
    let length = (data.len() as u32).to_le_bytes();
    [b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x03\0\x01\0", &numbers[..], b"data", &length, &data].concat()
}

fn resampled(rate: u32, samples: &[f32]) -> Vec<f32> {
    hear_bytes(wave(rate, samples)).unwrap().samples
}

#[test]
fn a_swept_sine_is_within_100_db_of_soxr() {
    for rate in RATES {
        let golden = std::fs::read(format!("{}/goldens/resample/{rate}.f32", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let golden: Vec<f32> = golden.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        let ours = resampled(rate, &sweep(rate));
        let near = decibels(&ours, &golden, 1.0);
        let late = decibels(&ours[1..], &golden, 1.0);
        println!("{rate} Hz: error {:.1} dB, {} samples", -near, ours.len());
        assert!(near > 100.0, "{rate} Hz: {near:.1} dB");
        assert!(late < 20.0, "the measure does not see a delay of one sample: {late:.1} dB");
        // 11,025 and 22,050 Hz have no whole number of samples in a quarter of a second.
        assert!(ours.len().abs_diff(golden.len()) <= 1, "{} and {}", ours.len(), golden.len());
    }
}

#[test]
fn what_the_lower_rate_cannot_hold_is_gone() {
    for rate in [22_050, 44_100, 48_000, 96_000] {
        let tone = |frequency: f64| -> Vec<f32> {
            (0..rate).map(|frame| (0.5 * (2.0 * PI * frequency * f64::from(frame) / f64::from(rate)).sin()) as f32).collect()
        };
        let loudness = |samples: &[f32]| {
            // Its ends are steps, which hold every frequency.
            let middle = &samples[2_000..14_000];
            10.0 * (middle.iter().map(|sample| f64::from(sample * sample)).sum::<f64>() / middle.len() as f64 / 0.125).log10()
        };
        for frequency in [8_100.0, 9_000.0, 10_500.0] {
            let left = loudness(&resampled(rate, &tone(frequency)));
            assert!(left < -100.0, "{frequency} Hz at {rate} Hz: {left:.1} dB");
        }
        let kept = loudness(&resampled(rate, &tone(7_400.0)));
        assert!(kept.abs() < 0.01, "7400 Hz at {rate} Hz: {kept:.3} dB");
    }
}

/// rubato#53, #58, #90, #108: cut tails, a delay, clips shorter than a chunk; at rates that have nothing in common with 16 kHz too.
#[test]
fn lengths_are_exact_and_the_last_sample_is_heard() {
    for rate in [8_000, 11_025, 16_001, 22_050, 37_800, 44_056, 44_100, 47_999, 48_000, 88_200] {
        for frames in [1, 2, 3, 100, 479, 480, 481, 1_000, 4_411, 50_000] {
            let mut samples = vec![0.0; frames];
            samples[frames - 1] = 1.0;
            let wanted = (frames as u64 * 32_000 + u64::from(rate)) / (2 * u64::from(rate));
            let Ok(heard) = hear_bytes(wave(rate, &samples)) else {
                assert_eq!(wanted, 0, "{frames} frames at {rate} Hz");
                continue;
            };
            assert_eq!(heard.samples.len() as u64, wanted, "{frames} frames at {rate} Hz");
            let place = (frames - 1) as f64 * 16_000.0 / f64::from(rate);
            // An impulse behind the last sample is heard in none.
            if place <= (wanted - 1) as f64 {
                let loudest = heard.samples.iter().enumerate().max_by(|one, other| one.1.total_cmp(other.1)).unwrap().0;
                assert!((loudest as f64 - place).abs() <= 0.5, "{frames} frames at {rate} Hz: at {loudest}, not {place}");
            }
        }
    }
}
