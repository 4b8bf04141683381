use std::ops::Range;

use proptest::prelude::*;

use super::{AHEAD_SAMPLES, Splitter, Window};
use crate::job::Long;
use crate::media::mel::signals::{numbers, signal};
use crate::media::{HOP_SAMPLES, N_SAMPLES};

const SECOND: usize = 16_000;

/// Windows of a recording that comes in pieces.
fn windows(long: Long, samples: &[f32], piece: usize) -> (Vec<Window>, f64) {
    let mut splitter = Splitter::new(long);
    let mut windows = Vec::new();
    for piece in samples.chunks(piece) {
        assert!(splitter.wants_more());
        splitter.push(piece);
        windows.extend(&mut splitter);
        assert!(splitter.buffer.len() <= N_SAMPLES + AHEAD_SAMPLES + piece.len(), "more is held than a window and a piece");
    }
    splitter.finish();
    windows.extend(&mut splitter);
    assert!(!splitter.wants_more() && splitter.next().is_none());
    (windows, splitter.truncated_seconds())
}

fn split(samples: &[f32]) -> Vec<Window> {
    let (windows, truncated_seconds) = windows(Long::Split, samples, 4096);
    assert_eq!(truncated_seconds, 0.0);
    tiles(&windows, samples);
    windows
}

/// Every sample is in exactly one window, in order, and no window is too long or empty.
fn tiles(windows: &[Window], samples: &[f32]) {
    let mut end = 0;
    for window in windows {
        assert_eq!(window.start_sample, end as u64);
        assert!((1..=N_SAMPLES).contains(&window.samples.len()), "{} samples", window.samples.len());
        let expected = &samples[end..end + window.samples.len()];
        assert!(window.samples.iter().zip(expected).all(|(found, expected)| found.to_bits() == expected.to_bits()));
        end += window.samples.len();
    }
    assert_eq!(end, samples.len());
}

fn cuts(windows: &[Window]) -> Vec<usize> {
    windows.iter().skip(1).map(|window| window.start_sample as usize).collect()
}

/// Something like speech: syllables of 0.1 to 0.25 s, gaps of 0.02 to 0.09 s between them as stop consonants leave, and a pause of
/// 0.25 to 0.8 s after each 4 to 20 syllables. Also the pauses.
fn babble(seed: u32, seconds: usize, loudness: f32, noise: f32) -> (Vec<f32>, Vec<Range<usize>>) {
    let mut draws = numbers(seed).map(|value| (value + 32_768) as usize);
    let mut draw = |from: usize, to: usize| from + draws.next().unwrap() * (to - from) / 65_536;
    let mut samples = Vec::new();
    let mut pauses = Vec::new();
    while samples.len() < seconds * SECOND {
        for _ in 0..draw(4, 20) {
            let (length, period) = (draw(1_600, 4_000), draw(70, 160));
            let swell = |at: usize| (at.min(length - at) as f32 / 800.0).min(1.0);
            samples.extend((0..length).map(|at| loudness * swell(at) * ((at % period) as f32 / period as f32 - 0.5)));
            samples.resize(samples.len() + draw(320, 1_440), 0.0);
        }
        let start = samples.len();
        samples.resize(start + draw(4_000, 12_800), 0.0);
        pauses.push(start..samples.len());
    }
    samples.truncate(seconds * SECOND);
    for (sample, value) in samples.iter_mut().zip(numbers(seed + 1)) {
        *sample += noise * value as f32 / 32_768.0;
    }
    (samples, pauses)
}

fn cuts_are_in(pauses: &[Range<usize>], windows: &[Window]) {
    for cut in cuts(windows) {
        let inside = |pause: &Range<usize>| pause.start + SECOND / 50 <= cut && cut + SECOND / 50 <= pause.end;
        let near: Vec<_> = pauses.iter().filter(|pause| pause.start.abs_diff(cut) < 12 * SECOND).collect();
        assert!(pauses.iter().any(inside), "cut before {cut}, in no pause; near it are {near:?}");
    }
}

#[test]
fn thirty_seconds_are_one_window() {
    for samples in [1, 159, 16_000, N_SAMPLES - 1, N_SAMPLES] {
        for long in [Long::Split, Long::Truncate] {
            let samples = signal("bursts", samples);
            let (windows, truncated_seconds) = windows(long, &samples, 1000);
            assert_eq!(windows, [Window { start_sample: 0, samples }]);
            assert_eq!(truncated_seconds, 0.0);
        }
    }
}

#[test]
fn no_samples_have_no_window() {
    for long in [Long::Split, Long::Truncate] {
        assert_eq!(windows(long, &[], 1), (Vec::new(), 0.0));
    }
}

#[test]
fn truncate_gives_thirty_seconds_and_counts_the_rest() {
    let samples = signal("noise", N_SAMPLES + 24_001);
    for piece in [1_000, N_SAMPLES, N_SAMPLES * 2] {
        let (windows, truncated_seconds) = windows(Long::Truncate, &samples, piece);
        assert_eq!(windows, [Window { start_sample: 0, samples: samples[..N_SAMPLES].to_vec() }]);
        assert_eq!(truncated_seconds, 24_001.0 / 16_000.0);
    }
}

#[test]
fn truncate_gives_its_window_before_the_end() {
    let mut splitter = Splitter::new(Long::Truncate);
    splitter.push(&vec![0.5; N_SAMPLES]);
    assert!(!splitter.wants_more());
    assert_eq!(splitter.next().unwrap().samples.len(), N_SAMPLES);
    assert!(splitter.wants_more() && splitter.buffer.is_empty());
}

#[test]
fn speech_is_cut_in_its_pauses() {
    for seed in 1..=6 {
        let (samples, pauses) = babble(seed, 200, 0.5, 0.002);
        let windows = split(&samples);
        cuts_are_in(&pauses, &windows);
        assert!(windows.len() <= 9, "{} windows for 200 s", windows.len());
        assert!(windows[..windows.len() - 2].iter().all(|window| window.samples.len() >= 20 * SECOND));
    }
}

#[test]
fn very_quiet_speech_is_cut_in_its_pauses() {
    let (samples, pauses) = babble(3, 120, 3e-4, 3e-6);
    cuts_are_in(&pauses, &split(&samples));
}

#[test]
fn speech_in_noise_is_cut_in_its_pauses() {
    for seed in 1..=6 {
        let (samples, pauses) = babble(seed, 120, 0.5, 0.1);
        cuts_are_in(&pauses, &split(&samples));
    }
}

#[test]
fn pauses_are_found_after_the_noise_has_changed() {
    let (mut samples, pauses) = babble(5, 150, 0.5, 1e-4);
    for (sample, value) in samples[50 * SECOND..].iter_mut().zip(numbers(9)) {
        *sample += 0.02 * value as f32 / 32_768.0;
    }
    cuts_are_in(&pauses, &split(&samples));
}

#[test]
fn an_offset_and_hum_hide_no_pause() {
    let (mut samples, pauses) = babble(7, 120, 0.2, 0.001);
    for (at, sample) in samples.iter_mut().enumerate() {
        *sample += 0.3 + 0.05 * (at as f32 * std::f32::consts::TAU * 50.0 / 16_000.0).sin();
    }
    cuts_are_in(&pauses, &split(&samples));
}

#[test]
fn clicks_end_no_pause() {
    let (mut samples, pauses) = babble(8, 120, 0.3, 0.001);
    for at in (0..samples.len()).step_by(2_900) {
        samples[at] = 0.9;
    }
    cuts_are_in(&pauses, &split(&samples));
}

#[test]
fn digital_silence_before_does_not_make_a_noisy_pause_loud() {
    let (mut samples, pauses) = babble(2, 150, 0.5, 0.002);
    samples[..18 * SECOND].fill(0.0);
    let windows = split(&samples);
    cuts_are_in(&pauses, &windows);
    assert!(windows[0].samples.len() >= 20 * SECOND, "the first window is {} samples", windows[0].samples.len());
}

#[test]
fn the_only_pause_is_found_far_from_the_end() {
    let mut samples = signal("noise", 60 * SECOND);
    samples[5 * SECOND..6 * SECOND].fill(0.0);
    let windows = split(&samples);
    assert!((5 * SECOND..6 * SECOND).contains(&cuts(&windows)[0]), "{:?}", cuts(&windows));
}

#[test]
fn a_longer_pause_is_preferred_and_a_later_one() {
    let with_pauses = |pauses: &[(usize, usize)]| {
        let mut samples = signal("noise", 100 * SECOND);
        for (start_ms, length_ms) in pauses {
            samples[start_ms * 16..(start_ms + length_ms) * 16].fill(0.0);
        }
        cuts(&split(&samples))[0] / 16
    };
    assert_eq!(with_pauses(&[(24_000, 800), (27_000, 220)]), 24_400);
    assert_eq!(with_pauses(&[(21_000, 300), (27_000, 300)]), 27_150);
    // It goes on behind the window's end.
    assert_eq!(with_pauses(&[(29_700, 2_000)]), 30_000);
    // It merely touches the window's end.
    assert_eq!(with_pauses(&[(25_000, 220), (29_990, 2_000)]), 25_110);
}

#[test]
fn without_a_pause_the_quietest_place_is_taken() {
    let mut samples = signal("noise", 100 * SECOND);
    for sample in &mut samples[23 * SECOND..23 * SECOND + 800] {
        *sample *= 0.05;
    }
    let cut = cuts(&split(&samples))[0];
    assert!((23 * SECOND..=23 * SECOND + 800).contains(&cut), "{cut}");
}

#[test]
fn steady_sounds_are_cut_late() {
    for name in ["noise", "quiet", "tone", "silence", "constant"] {
        let windows = split(&signal(name, 100 * SECOND));
        assert!(windows[..2].iter().all(|window| window.samples.len() >= 25 * SECOND), "{name}: {:?}", cuts(&windows));
        assert_eq!(windows.len(), 4, "{name}");
    }
}

#[test]
fn music_is_cut_where_it_is_quiet() {
    // A note each half second, which dies away but never falls silent.
    let samples: Vec<f32> = signal("tone", 100 * SECOND)
        .iter()
        .enumerate()
        .map(|(at, sample)| sample * (-(((at % 8_000) as f32) / 4_000.0)).exp())
        .collect();
    let windows = split(&samples);
    assert_eq!(windows.len(), 4);
    for cut in cuts(&windows) {
        assert!(cut % 8_000 == 0 || cut % 8_000 > 6_400, "{cut} is at {} of a note", cut % 8_000);
    }
}

#[test]
fn a_little_more_than_a_window_is_cut_near_its_middle() {
    for seconds in [31, 35, 40] {
        let (samples, pauses) = babble(4, seconds, 0.5, 0.002);
        let windows = split(&samples);
        assert_eq!(windows.len(), 2);
        cuts_are_in(&pauses, &windows);
        assert!(windows.iter().all(|window| window.samples.len() >= 10 * SECOND), "{:?}", cuts(&windows));
    }
    let samples = signal("noise", N_SAMPLES + 1);
    assert!(split(&samples).iter().all(|window| window.samples.len() >= 10 * SECOND));
}

#[test]
fn no_window_is_a_scrap() {
    for seconds in (31..=75).step_by(4) {
        let windows = split(&signal("noise", seconds * SECOND));
        assert!(windows.iter().all(|window| window.samples.len() >= 9 * SECOND), "{seconds} s: {:?}", cuts(&windows));
    }
}

#[test]
fn what_is_not_a_number_is_not_heard() {
    for odd in [f32::NAN, f32::INFINITY, f32::MAX, f32::MIN_POSITIVE] {
        assert_eq!(split(&vec![odd; 70 * SECOND]).len(), 3);
        let (mut samples, _) = babble(6, 70, 0.5, 0.002);
        for sample in samples.iter_mut().step_by(997) {
            *sample = odd;
        }
        split(&samples);
    }
}

#[test]
fn how_samples_come_changes_nothing() {
    let (samples, _) = babble(11, 130, 0.5, 0.01);
    let expected = split(&samples);
    for piece in [333, HOP_SAMPLES, N_SAMPLES + AHEAD_SAMPLES, 130 * SECOND] {
        assert_eq!(windows(Long::Split, &samples, piece).0, expected, "in pieces of {piece}");
    }
}

#[test]
fn an_hour_at_once_is_not_moved_window_by_window() {
    let mut splitter = Splitter::new(Long::Split);
    splitter.push(&vec![0.0; 3600 * SECOND]);
    splitter.finish();
    let mut moved = 0;
    while splitter.next().is_some() {
        // Nothing given in front means that the rest has just been moved there.
        moved += if splitter.given == 0 { splitter.buffer.len() } else { 0 };
    }
    assert!(moved < 3600 * SECOND, "{moved} samples moved");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn windows_tile_any_recording(
        seed in 1u32..1000,
        stretches in prop::collection::vec((0usize..30 * SECOND, 0usize..5), 0..8),
        piece in prop_oneof![1_000usize..100_000, Just(N_SAMPLES), 1_000_000usize..2_000_000],
    ) {
        let mut samples = Vec::new();
        for (length, kind) in stretches {
            let scale = [0.0, 1e-6, 0.01, 1.0, f32::NAN][kind];
            samples.extend(numbers(seed).take(length).map(|value| scale * value as f32 / 32_768.0));
        }
        let (windows, _) = windows(Long::Split, &samples, piece);
        tiles(&windows, &samples);
        if samples.len() > N_SAMPLES {
            prop_assert!(windows.iter().all(|window| window.samples.len() >= SECOND));
            prop_assert!(windows.iter().rev().skip(1).all(|window| window.samples.len() >= SECOND));
        }
    }
}
