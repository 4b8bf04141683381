//! The rules on the device against the same rules written out plainly, one row and one token at a time, as `decoding.py` of
//! OpenAI's whisper has them.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::media::Features;

const VOCABULARY: usize = 60;
const END: u32 = 40;
const BEGIN: u32 = 48;
const NO_TIMESTAMPS: u32 = 47;

fn window(timestamps: bool, detect_language: bool) -> SpeechWindow {
    let rules = SpeechRules {
        end_of_text: END,
        suppressed: vec![3, 7, 41, 44],
        suppressed_first: vec![5, END],
        languages: vec![42, 43],
        no_speech: Some(46),
        timestamps: timestamps.then_some(TimestampRules { begin: BEGIN, no_timestamps: NO_TIMESTAMPS, initial_max: Some(4) }),
    };
    let features = Arc::new(Features { frames: 0, bins: 0, values: Vec::new() });
    let forced = if detect_language { vec![44] } else { Vec::new() };
    SpeechWindow { features, rules: Arc::new(rules), start_of_transcript: 0, detect_language, forced }
}

/// What may be sampled behind `said`, by the reference: logits with -inf where nothing may.
fn filtered(logits: &[f32], said: &[u32], rules: &SpeechRules) -> Vec<f32> {
    let mut logits = logits.to_vec();
    let bar = |logits: &mut Vec<f32>, from: usize, to: usize| logits[from..to].fill(f32::NEG_INFINITY);
    if said.is_empty() {
        for &token in &rules.suppressed_first {
            logits[token as usize] = f32::NEG_INFINITY;
        }
    }
    for &token in &rules.suppressed {
        logits[token as usize] = f32::NEG_INFINITY;
    }
    let Some(timestamps) = rules.timestamps else { return logits };
    logits[timestamps.no_timestamps as usize] = f32::NEG_INFINITY;
    let (begin, end) = (timestamps.begin as usize, rules.end_of_text as usize);
    let is_timestamp = |token: u32| token >= timestamps.begin;
    let last_was_timestamp = said.last().is_some_and(|&token| is_timestamp(token));
    let penultimate_was_timestamp = said.len() < 2 || is_timestamp(said[said.len() - 2]);
    if last_was_timestamp {
        if penultimate_was_timestamp {
            bar(&mut logits, begin, VOCABULARY);
        } else {
            bar(&mut logits, 0, end);
        }
    }
    if let Some(&last) = said.iter().rev().find(|&&token| is_timestamp(token)) {
        let least = if last_was_timestamp && !penultimate_was_timestamp { last } else { last + 1 };
        bar(&mut logits, begin, (least as usize).min(VOCABULARY));
    }
    if said.is_empty() {
        bar(&mut logits, 0, begin);
        bar(&mut logits, begin + timestamps.initial_max.unwrap() as usize + 1, VOCABULARY);
    }
    let most = logits[..begin].iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if log_sum(&logits[begin..]) > most {
        bar(&mut logits, 0, begin);
    }
    logits
}

fn log_sum(logits: &[f32]) -> f32 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if most == f32::NEG_INFINITY { most } else { most + logits.iter().map(|value| (value - most).exp()).sum::<f32>().ln() }
}

fn likeliest(logits: &[f32]) -> usize {
    let mut best = 0;
    for (token, value) in logits.iter().enumerate() {
        if *value > logits[best] {
            best = token;
        }
    }
    best
}

/// A row: its logits, what it has said, whether its newest token is on the device alone, whether it detects the language.
#[derive(Debug, Clone)]
struct Case {
    logits: Vec<f32>,
    said: Vec<u32>,
    on_device: bool,
    detect: bool,
}

fn case() -> impl Strategy<Value = Case> {
    let token = prop_oneof![3 => 0..END, 2 => BEGIN..VOCABULARY as u32];
    let logits = prop::collection::vec((-80..80i32).prop_map(|value| value as f32 / 8.0), VOCABULARY);
    (logits, prop::collection::vec(token, 0..7), any::<bool>(), any::<bool>()).prop_map(|(logits, said, on_device, detect)| Case {
        logits,
        said,
        on_device,
        detect,
    })
}

/// Tokens and log-probabilities of the rows together.
fn choose_all(cases: &[Case], windows: &[SpeechWindow], temperature: f32) -> (Vec<i32>, Vec<f32>) {
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    let flat: Vec<f32> = cases.iter().flat_map(|case| case.logits.iter().copied()).collect();
    let logits = Array::from_slice(&flat, &[cases.len() as i32, VOCABULARY as i32]);
    // Slots in another order than rows, and one that no row has.
    let slot = |row: usize| cases.len() - row;
    let mut newest = vec![-7i32; cases.len() + 1];
    let mut known = Vec::new();
    for (row, case) in cases.iter().enumerate() {
        let mut tokens = if case.detect { vec![42, 44] } else { Vec::new() };
        tokens.extend(&case.said);
        let missing = case.on_device && !tokens.is_empty();
        let index = tokens.len() as u32;
        if missing {
            newest[slot(row)] = tokens.pop().unwrap() as i32;
        }
        known.push((tokens, index, missing));
    }
    let rows: Vec<SpeechRow<'_>> = known
        .iter()
        .enumerate()
        .map(|(row, (tokens, index, missing))| SpeechRow {
            window: &windows[row],
            temperature,
            seed: row as u64,
            index: *index,
            known: tokens,
            newest: missing.then_some(slot(row) as i32),
        })
        .collect();
    let chosen = choose(&logits, &rows, &Array::from_slice(&newest, &[newest.len() as i32])).unwrap();
    chosen.tokens.eval().unwrap();
    chosen.logprobs.eval().unwrap();
    (chosen.tokens.as_slice::<i32>().to_vec(), chosen.logprobs.as_slice::<f32>().to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn rules_are_the_references(cases in prop::collection::vec(case(), 1..6), timestamps in any::<bool>()) {
        let windows: Vec<SpeechWindow> = cases.iter().map(|case| window(timestamps, case.detect)).collect();
        let (tokens, logprobs) = choose_all(&cases, &windows, 0.0);
        for (row, case) in cases.iter().enumerate() {
            let expected = filtered(&case.logits, &case.said, &windows[row].rules);
            let token = likeliest(&expected);
            if expected[token] == f32::NEG_INFINITY {
                continue; // Nothing may follow; what comes then is the reference's accident.
            }
            prop_assert_eq!(tokens[row] as usize, token, "row {} of {:?}", row, &cases);
            let logprob = expected[token] - log_sum(&expected);
            prop_assert!((logprobs[row] - logprob).abs() < 1e-4, "{} instead of {logprob}", logprobs[row]);
        }
        // A warm row takes what the rules allow, and its log-probability is that at temperature 1.
        let (tokens, logprobs) = choose_all(&cases, &windows, 0.8);
        for (row, case) in cases.iter().enumerate() {
            let expected = filtered(&case.logits, &case.said, &windows[row].rules);
            if expected.iter().all(|value| *value == f32::NEG_INFINITY) {
                continue;
            }
            let own = expected[tokens[row] as usize];
            prop_assert!(own > f32::NEG_INFINITY, "row {row} took {}, which the rules forbid", tokens[row]);
            prop_assert!((logprobs[row] - (own - log_sum(&expected))).abs() < 1e-4);
        }
    }
}

#[test]
fn a_language_is_found_before_the_text_and_what_follows_it_is_settled() {
    let window = window(true, true);
    let mut logits = vec![0.0; VOCABULARY];
    (logits[12], logits[43], logits[42]) = (9.0, 3.0, 2.0);
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    let given = Array::from_slice(&[logits.clone(), logits].concat(), &[2, VOCABULARY as i32]);
    let row =
        |index: u32, known: &'static [u32]| SpeechRow { window: &window, temperature: 0.0, seed: 0, index, known, newest: None };
    let chosen = choose(&given, &[row(0, &[]), row(1, &[43])], &Array::from_slice(&[0i32], &[1])).unwrap();
    chosen.tokens.eval().unwrap();
    assert_eq!(chosen.tokens.as_slice::<i32>(), [43, 44], "the likelier of the languages, not of all tokens; then the task");
    assert_eq!(chosen.logprobs.as_slice::<f32>(), [0.0, 0.0], "neither is of the transcript");
}

#[test]
fn no_speech_is_a_probability() {
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    let logits = Array::from_slice(&[0.0f32, 0.0, 3f32.ln(), 0.0, 0.0, 0.0], &[2, 3]);
    let silent = probability(&logits, 2).unwrap();
    silent.eval().unwrap();
    let silent = silent.as_slice::<f32>();
    assert!((silent[0] - 0.6).abs() < 1e-6 && (silent[1] - 1.0 / 3.0).abs() < 1e-6, "{silent:?}");
}
