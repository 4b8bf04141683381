//! Recordings in every format and codec, compared with the sound that they were made of; `fixtures/make_audio.py` made them.

mod damaged;
mod formats;
mod resampling;
mod traps;
mod waves;

use std::f64::consts::PI;
use std::path::PathBuf;
use std::sync::Arc;

use mlxbatch::job::Channels;
use mlxbatch::media::{MediaError, MediaSource, Recording, SAMPLE_RATE};

/// Of every fixture.
const SECONDS: f64 = 0.5;

/// What was heard of a recording.
#[derive(Debug)]
struct Heard {
    samples: Vec<f32>,
    notes: Vec<String>,
    seconds: f64,
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/audio").join(name)
}

fn hear(source: &MediaSource, channels: Channels) -> Result<Heard, MediaError> {
    let mut recording = Recording::open(source, channels, SAMPLE_RATE)?;
    let mut samples = Vec::new();
    while let Some(stretch) = recording.next()? {
        assert!(!stretch.is_empty() && stretch.len() <= 10 * SAMPLE_RATE as usize, "a stretch of {}", stretch.len());
        samples.extend(stretch);
    }
    assert!(recording.next()?.is_none(), "the end stays the end");
    assert!(samples.iter().all(|sample| sample.is_finite()));
    Ok(Heard { samples, notes: recording.notes(), seconds: recording.seconds() })
}

fn hear_file(name: &str) -> Result<Heard, MediaError> {
    hear(&MediaSource::File(fixture(name)), Channels::Mix)
}

fn hear_bytes(bytes: Vec<u8>) -> Result<Heard, MediaError> {
    hear(&MediaSource::Bytes { name: "bytes".to_owned(), bytes: Arc::from(bytes) }, Channels::Mix)
}

fn refusal(result: Result<Heard, MediaError>) -> String {
    result.expect_err("a refusal").to_string()
}

/// The sound of the fixtures: the formula of `fixtures/make_audio.py`.
fn speech(rate: u32) -> Vec<f32> {
    let frames = (SECONDS * f64::from(rate)).round() as usize;
    let at = |frame: usize| {
        let t = frame as f64 / f64::from(rate);
        let loudness = (PI * t / SECONDS).sin() * (3.0 * PI * t / SECONDS).sin().powi(2);
        let mut sound = 0.0;
        for harmonic in 1..25 {
            let harmonic = f64::from(harmonic);
            let frequency = 140.0 * harmonic;
            let formants: f64 = [(600.0, 1.0), (1200.0, 0.6), (2500.0, 0.4)]
                .iter()
                .map(|(at, gain)| gain / (1.0 + ((frequency - at) / 180.0f64).powi(2)))
                .sum();
            sound += formants * (2.0 * PI * frequency * t + harmonic * harmonic).sin();
        }
        (0.12 * loudness * sound) as f32
    };
    (0..frames).map(at).collect()
}

/// How far what is heard lies over its difference from `gain` times what was meant, in dB. Of unequal lengths the rest counts as
/// a difference.
fn decibels(heard: &[f32], meant: &[f32], gain: f64) -> f64 {
    let (mut signal, mut error) = (0.0, 0.0);
    for frame in 0..heard.len().max(meant.len()) {
        let meant = gain * f64::from(meant.get(frame).copied().unwrap_or(0.0));
        let heard = f64::from(heard.get(frame).copied().unwrap_or(0.0));
        signal += meant * meant;
        error += (heard - meant).powi(2);
    }
    10.0 * (signal / error.max(1e-30)).log10()
}
