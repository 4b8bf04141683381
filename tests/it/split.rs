//! Real speech into windows.

use mlxbatch::job::Long;
use mlxbatch::media::{Splitter, Window};

use crate::prompt::models;

const SECOND: usize = 16_000;

/// The clips of a LibriVox reading, as `fixtures/fetch_speech.sh` fetches them: 16 kHz, mono, 16 bits behind a header of 44 bytes.
fn clips(test: &str) -> Option<Vec<Vec<f32>>> {
    let folder = models(test, "speech/0930.wav")?.parent().unwrap().to_owned();
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|kind| kind == "wav"));
    files.sort();
    let clips = files.iter().map(|path| {
        let bytes = std::fs::read(path).unwrap();
        assert_eq!((&bytes[..4], &bytes[36..40], bytes[24]), (&b"RIFF"[..], &b"data"[..], 0x80));
        bytes[44..].chunks_exact(2).map(|sample| f32::from(i16::from_le_bytes([sample[0], sample[1]])) / 32_768.0).collect()
    });
    Some(clips.collect())
}

/// 0 .. `end`, from a linear congruential generator.
fn draw(state: &mut u32, end: usize) -> usize {
    *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    (*state >> 16) as usize * end / 65_536
}

/// Five minutes of clips in some order, with gaps between them, and noise over all.
fn reading(clips: &[Vec<f32>], seed: u32, gap_ms: (usize, usize), noise: f32) -> Vec<f32> {
    let mut state = seed;
    let mut samples = Vec::new();
    while samples.len() < 300 * SECOND {
        samples.extend_from_slice(&clips[draw(&mut state, clips.len())]);
        let gap_ms = gap_ms.0 + draw(&mut state, gap_ms.1 - gap_ms.0 + 1);
        samples.resize(samples.len() + gap_ms * 16, 0.0);
    }
    for sample in &mut samples {
        *sample += noise * (draw(&mut state, 65_536) as f32 / 32_768.0 - 1.0);
    }
    samples
}

fn split(samples: &[f32]) -> Vec<Window> {
    let mut splitter = Splitter::new(Long::Split);
    let mut windows = Vec::new();
    for piece in samples.chunks(4_096) {
        splitter.push(piece);
        windows.extend(&mut splitter);
    }
    splitter.finish();
    windows.extend(&mut splitter);
    assert_eq!(windows.iter().map(|window| window.samples.as_slice()).collect::<Vec<_>>().concat(), samples);
    windows
}

fn rms_db(samples: &[f32]) -> f32 {
    10.0 * (samples.iter().map(|sample| sample * sample).sum::<f32>() / samples.len() as f32).log10()
}

/// How much quieter than the speech around them the 100 ms around each cut are, at least; and how many cuts there are.
fn quietness_db(samples: &[f32]) -> (f32, usize) {
    let windows = split(samples);
    let cuts: Vec<usize> = windows.iter().skip(1).map(|window| window.start_sample as usize).collect();
    let quietness = cuts.iter().map(|cut| {
        let (near, around) = (cut - 800..cut + 800, cut - 10 * SECOND..(cut + 10 * SECOND).min(samples.len()));
        rms_db(&samples[around]) - rms_db(&samples[near])
    });
    (quietness.fold(f32::INFINITY, f32::min), cuts.len())
}

#[test]
fn real_speech_is_cut_in_its_pauses() {
    let Some(clips) = clips("real_speech_is_cut_in_its_pauses") else { return };
    assert_eq!(clips.len(), 5);
    for seed in 1..=4 {
        // Gaps as between sentences; none, so that the clips' own pauses are left, whose noise is 20 dB under speech; more noise.
        for (gap_ms, noise, bound_db) in [((300, 1200), 0.0, 15.0), ((0, 0), 0.0, 15.0), ((200, 600), 0.012, 12.0)] {
            let samples = reading(&clips, seed, gap_ms, noise);
            let (quietness_db, cuts) = quietness_db(&samples);
            println!("seed {seed}, gaps {gap_ms:?}, noise {noise}: {cuts} cuts, at least {quietness_db:.1} dB under the speech");
            assert!(quietness_db >= bound_db, "seed {seed}, gaps {gap_ms:?}, noise {noise}: a cut {quietness_db:.1} dB down");
            assert!((10..=16).contains(&cuts), "{cuts} cuts in five minutes");
        }
    }
}

/// The test above would notice: cuts made by the clock are in the middle of words.
#[test]
fn cuts_by_the_clock_are_loud() {
    let Some(clips) = clips("cuts_by_the_clock_are_loud") else { return };
    let samples = reading(&clips, 1, (300, 1200), 0.0);
    let loud = (1..10).filter(|cut| {
        let cut = cut * 30 * SECOND;
        rms_db(&samples) - rms_db(&samples[cut - 800..cut + 800]) < 15.0
    });
    assert!(loud.count() >= 5);
}
