//! What a transcript's tokens are held to, on the device.
//!
//! The rules are those of `decoding.py` in OpenAI's whisper: what is never written, what does not come first, timestamps in pairs
//! that never go back, and a timestamp wherever timestamps together are likelier than any one other token. Where mlx-whisper
//! differs, docs/fidelity.md says so.

use mlx_rs::{Array, Dtype, ops};

use super::{
    EngineError, ffi,
    sample::{look_up, uniform},
};
use crate::schedule::{SpeechRules, SpeechWindow, TimestampRules};

/// One row of the logits.
pub struct SpeechRow<'a> {
    pub window: &'a SpeechWindow,
    pub temperature: f32,
    /// The row's seed.
    pub seed: u64,
    /// Which token of those sampled this is, from 0.
    pub index: u32,
    /// Tokens sampled before it; the newest may be missing.
    pub known: &'a [u32],
    /// The slot where the newest token stands when it is missing.
    pub newest: Option<i32>,
}

/// Tokens, and what the model thought of them, (rows) each.
pub struct Chosen {
    pub tokens: Array,
    /// Log-probability under the rules, at temperature 1.
    pub logprobs: Array,
}

/// What rows know before a step is built; what only the device knows is the newest token of some.
struct Known {
    /// The transcript has no token yet.
    first: bool,
    /// The token before the newest is a timestamp, or there is none.
    penultimate_is_timestamp: bool,
    /// The last timestamp before the newest token, or -1.
    last_timestamp: i32,
    /// The newest token where the host has it, or -1.
    newest: i32,
}

/// `logits` (rows, vocabulary), `newest` (slots) int32.
///
/// All rows have the same rules: those of one job.
pub fn choose(logits: &Array, rows: &[SpeechRow<'_>], newest: &Array) -> Result<Chosen, EngineError> {
    let Some(rules) = rows.first().map(|row| &row.window.rules) else {
        return Err(EngineError::Plan { step: 0, reason: "no row to choose for".into() });
    };
    let count = rows.len() as i32;
    let vocabulary = logits.dim(1);
    let logits = logits.as_dtype(Dtype::Float32)?.add(barred(&rules.suppressed, rules.timestamps, vocabulary))?;
    let logits = bar_first(&logits, rows, rules)?;
    let (choice, filtered) = match rules.timestamps {
        None => (pick(&logits)?, logits.clone()),
        Some(timestamps) => {
            let known: Vec<Known> = rows.iter().map(|row| Known::of(row, timestamps)).collect();
            let newest = newest_of(rows, &known, newest)?;
            with_timestamps(&logits, rules, timestamps, &known, &newest)?
        }
    };
    let (mut tokens, mut logprobs) = choice;
    let warm: Vec<i32> = (0..count).filter(|&row| rows[row as usize].temperature > 0.0).collect();
    if !warm.is_empty() {
        let places = Array::from_slice(&warm, &[warm.len() as i32]);
        let own = filtered.take_axis(&places, 0)?;
        let column = |value: &dyn Fn(&SpeechRow<'_>) -> f32| {
            let values: Vec<f32> = warm.iter().map(|&row| value(&rows[row as usize])).collect();
            Array::from_slice(&values, &[warm.len() as i32, 1])
        };
        let tempered = own.divide(column(&|row| row.temperature))?;
        let drawn = look_up(&tempered, &column(&|row| uniform(row.seed, row.index)))?;
        let normal = ops::indexing::take_along_axis(&own, drawn.reshape(&[-1, 1])?, -1)?
            .subtract(ops::logsumexp_axis(&own, -1, true)?)?
            .reshape(&[-1, 1])?;
        tokens = ffi::scatter(&tokens, &[&places], &drawn.reshape(&[-1, 1])?, &[0])?;
        logprobs = ffi::scatter(&logprobs, &[&places], &normal, &[0])?;
    }
    settle(tokens, logprobs, &logits_of_languages(&logits, rows, rules)?, rows)
}

impl Known {
    fn of(row: &SpeechRow<'_>, timestamps: TimestampRules) -> Self {
        let preamble = row.window.preamble_tokens();
        let said = row.known.get(preamble as usize..).unwrap_or_default();
        let (earlier, newest) = match (row.newest, said.split_last()) {
            (Some(_), _) => (said, -1),
            (None, Some((newest, earlier))) => (earlier, *newest as i32),
            (None, None) => (said, -1),
        };
        let is_timestamp = |token: &&u32| **token >= timestamps.begin;
        Self {
            first: row.index <= preamble,
            penultimate_is_timestamp: earlier.last().is_none_or(|token| *token >= timestamps.begin),
            last_timestamp: earlier.iter().rev().find(is_timestamp).map_or(-1, |token| *token as i32),
            newest,
        }
    }
}

/// The newest token of each row, (rows, 1) int32; -1 before the first of a transcript.
fn newest_of(rows: &[SpeechRow<'_>], known: &[Known], newest: &Array) -> Result<Array, EngineError> {
    let shape = [rows.len() as i32, 1];
    let on_host: Vec<i32> = known.iter().map(|known| known.newest).collect();
    let on_host = Array::from_slice(&on_host, &shape);
    let missing: Vec<bool> = rows.iter().zip(known).map(|(row, known)| row.newest.is_some() && !known.first).collect();
    if missing.iter().all(|missing| !missing) {
        return Ok(on_host);
    }
    let slots: Vec<i32> = rows.iter().map(|row| row.newest.unwrap_or(0)).collect();
    let on_device = newest.take_axis(Array::from_slice(&slots, &[shape[0]]), 0)?.reshape(&shape)?;
    Ok(ops::select(Array::from_slice(&missing, &shape), on_device, on_host)?)
}

/// -inf where nothing may be sampled, (1, vocabulary).
fn barred(suppressed: &[u32], timestamps: Option<TimestampRules>, vocabulary: i32) -> Array {
    let mut barred = vec![0.0f32; vocabulary as usize];
    for &token in suppressed.iter().chain(timestamps.as_ref().map(|timestamps| &timestamps.no_timestamps)) {
        if let Some(place) = barred.get_mut(token as usize) {
            *place = f32::NEG_INFINITY;
        }
    }
    Array::from_slice(&barred, &[1, vocabulary])
}

/// Bars [`SpeechRules::suppressed_first`] in rows whose transcript begins.
fn bar_first(logits: &Array, rows: &[SpeechRow<'_>], rules: &SpeechRules) -> Result<Array, EngineError> {
    let first: Vec<bool> = rows.iter().map(|row| row.index <= row.window.preamble_tokens()).collect();
    if rules.suppressed_first.is_empty() || !first.contains(&true) {
        return Ok(logits.clone());
    }
    let vocabulary = logits.dim(1);
    let mut barred = vec![false; vocabulary as usize];
    for &token in &rules.suppressed_first {
        if let Some(place) = barred.get_mut(token as usize) {
            *place = true;
        }
    }
    let first = Array::from_slice(&first, &[rows.len() as i32, 1]);
    let barred = first.logical_and(Array::from_slice(&barred, &[1, vocabulary]))?;
    Ok(ops::select(barred, Array::from_f32(f32::NEG_INFINITY), logits)?)
}

/// The likeliest token of each row, and its log-probability.
fn pick(logits: &Array) -> Result<(Array, Array), EngineError> {
    let token = ops::indexing::argmax_axis(logits, -1, false)?.as_dtype(Dtype::Int32)?;
    let logprob = logits.max_axis(-1, false)?.subtract(ops::logsumexp_axis(logits, -1, false)?)?;
    Ok((token, logprob))
}

/// The likeliest token under the rules for timestamps, its log-probability, and the logits as the rules leave them.
///
/// The vocabulary is three stretches, of which rules forbid whole ones row by row: text, special tokens (the end of the text
/// first), timestamps.
fn with_timestamps(
    logits: &Array,
    rules: &SpeechRules,
    timestamps: TimestampRules,
    known: &[Known],
    newest: &Array,
) -> Result<((Array, Array), Array), EngineError> {
    let rows = known.len() as i32;
    let vocabulary = logits.dim(1);
    let (end, begin) = (rules.end_of_text as i32, timestamps.begin as i32);
    let lowest = Array::from_f32(f32::NEG_INFINITY);
    let column = |values: Vec<bool>| Array::from_slice(&values, &[rows, 1]);
    let first = column(known.iter().map(|known| known.first).collect());
    let penultimate = column(known.iter().map(|known| known.penultimate_is_timestamp).collect());
    let last: Vec<i32> = known.iter().map(|known| known.last_timestamp).collect();
    let last = Array::from_slice(&last, &[rows, 1]);

    // Timestamps stand in pairs, but for one before the end.
    let after_timestamp = newest.ge(Array::from_int(begin))?;
    let opens = after_timestamp.logical_and(&penultimate)?;
    let closes = after_timestamp.logical_and(penultimate.logical_not()?)?;
    // They never go back, and a segment has a length.
    let latest = ops::select(&after_timestamp, newest, &last)?;
    let least = ops::select(&closes, &latest, latest.add(Array::from_int(1))?)?;
    let stamps: Vec<i32> = (begin..vocabulary).collect();
    let stamps = Array::from_slice(&stamps, &[1, vocabulary - begin]);
    let mut forbidden = stamps.lt(&least)?.logical_or(&opens)?;
    if let Some(initial_max) = timestamps.initial_max {
        let late = stamps.gt(Array::from_int(begin + initial_max as i32))?;
        forbidden = forbidden.logical_or(first.logical_and(late)?)?;
    }

    let text = ffi::slice(logits, &[0, 0], &[rows, end])?;
    let special = ffi::slice(logits, &[0, end], &[rows, begin])?;
    let stamp = ops::select(&forbidden, &lowest, ffi::slice(logits, &[0, begin], &[rows, vocabulary])?)?;
    let no_text = closes.logical_or(&first)?;
    let barred = |bars: &Array, value: Array| -> Result<Array, EngineError> { Ok(ops::select(bars, &lowest, value)?) };
    let best_text = barred(&no_text, text.max_axis(-1, true)?)?;
    let best_special = barred(&first, special.max_axis(-1, true)?)?;
    let best_word = ops::maximum(&best_text, &best_special)?;
    let sum_text = barred(&no_text, ops::logsumexp_axis(&text, -1, true)?)?;
    let sum_special = barred(&first, ops::logsumexp_axis(&special, -1, true)?)?;
    let sum_word = ops::logaddexp(&sum_text, &sum_special)?;
    let sum_stamp = ops::logsumexp_axis(&stamp, -1, true)?;
    let best_stamp = stamp.max_axis(-1, true)?;
    let forced = sum_stamp.gt(&best_word)?;
    let sum = ops::select(&forced, &sum_stamp, ops::logaddexp(&sum_word, &sum_stamp)?)?;

    let argmax = |array: &Array, from: i32| -> Result<Array, EngineError> {
        Ok(ops::indexing::argmax_axis(array, -1, true)?.as_dtype(Dtype::Int32)?.add(Array::from_int(from))?)
    };
    let word = ops::select(best_special.gt(&best_text)?, argmax(&special, end)?, argmax(&text, 0)?)?;
    let takes_stamp = forced.logical_or(best_stamp.gt(&best_word)?)?;
    let token = ops::select(&takes_stamp, argmax(&stamp, begin)?, word)?.reshape(&[rows])?;
    let best = ops::select(&takes_stamp, &best_stamp, &best_word)?;
    let logprob = best.subtract(sum)?.reshape(&[rows])?;

    let filtered =
        ops::concatenate(&[barred(&no_text.logical_or(&forced)?, text)?, barred(&first.logical_or(&forced)?, special)?, stamp], 1)?;
    Ok(((token, logprob), filtered))
}

/// The likeliest language of each row, (rows) int32; zeros where no row detects one now.
fn logits_of_languages(logits: &Array, rows: &[SpeechRow<'_>], rules: &SpeechRules) -> Result<Array, EngineError> {
    if rules.languages.is_empty() || !rows.iter().any(|row| row.window.detect_language && row.index == 0) {
        return Ok(ops::zeros::<i32>(&[rows.len() as i32])?);
    }
    let languages: Vec<i32> = rules.languages.iter().map(|&token| token as i32).collect();
    let languages = Array::from_slice(&languages, &[languages.len() as i32]);
    let likeliest = ops::indexing::argmax_axis(logits.take_axis(&languages, 1)?, -1, false)?;
    Ok(languages.take_axis(likeliest, 0)?)
}

/// Puts a detected language and the tokens that follow it in the place of what was chosen; their log-probability is 0, as they
/// are not of the transcript.
fn settle(tokens: Array, logprobs: Array, languages: &Array, rows: &[SpeechRow<'_>]) -> Result<Chosen, EngineError> {
    if rows.iter().all(|row| row.index >= row.window.preamble_tokens()) {
        return Ok(Chosen { tokens, logprobs });
    }
    let count = [rows.len() as i32];
    let detects: Vec<bool> = rows.iter().map(|row| row.window.detect_language && row.index == 0).collect();
    let forced: Vec<i32> = rows
        .iter()
        .map(|row| {
            let place = row.index.checked_sub(u32::from(row.window.detect_language));
            place.and_then(|place| row.window.forced.get(place as usize)).map_or(-1, |&token| token as i32)
        })
        .collect();
    let spoken: Vec<f32> = rows.iter().map(|row| f32::from(row.index >= row.window.preamble_tokens())).collect();
    let forced = Array::from_slice(&forced, &count);
    let tokens = ops::select(forced.ge(Array::from_int(0))?, &forced, tokens)?;
    let tokens = ops::select(Array::from_slice(&detects, &count), languages, tokens)?;
    let spoken = Array::from_slice(&spoken, &count).gt(Array::from_f32(0.5))?;
    Ok(Chosen { tokens, logprobs: ops::select(spoken, logprobs, Array::from_f32(0.0))? })
}

/// The probability of `token` in each row of the logits, (rows) float32.
pub fn probability(logits: &Array, token: u32) -> Result<Array, EngineError> {
    let logits = logits.as_dtype(Dtype::Float32)?;
    let own = ffi::slice(&logits, &[0, token as i32], &[logits.dim(0), token as i32 + 1])?;
    Ok(own.subtract(ops::logsumexp_axis(&logits, -1, true)?)?.exp()?.reshape(&[-1])?)
}

#[cfg(test)]
#[path = "speech_tests.rs"]
mod tests;
