//! Logits into tokens, on the device.
//!
//! Filters and penalties mean what they mean in mlx-lm's `sample_utils.py`: bias, repetition, presence and frequency change the
//! logits; top-p, min-p and top-k look at the untempered distribution; temperature comes last. A row's randomness is one uniform
//! number a token, from its own seed, looked up in the cumulative distribution: its neighbours have no part in it.

use mlx_rs::{Array, Dtype, ops};

use super::{EngineError, ffi};
use crate::job::Generation;

/// One row of the logits.
pub struct SampleRow<'a> {
    pub generation: &'a Generation,
    /// The row's seed.
    pub seed: u64,
    /// Which token of the completion this is, from 0.
    pub index: u32,
    /// The last tokens before it, prompt included, `penalty_context` at most; the newest may be missing.
    pub context: &'a [u32],
    /// Set where the newest token is missing: it is this row of `newest`.
    pub newest: Option<i32>,
}

/// (rows, vocabulary) -> (rows) int32. `newest` are tokens that only the device knows.
pub fn sample(logits: &Array, rows: &[SampleRow<'_>], newest: Option<&Array>) -> Result<Array, EngineError> {
    let all: Vec<usize> = (0..rows.len()).collect();
    if rows.iter().all(|row| is_greedy(row.generation) && !is_adjusted(row.generation)) {
        return argmax(logits);
    }
    let logits = adjust(&logits.as_dtype(Dtype::Float32)?, rows, newest)?;
    let kinds: [fn(&Generation) -> bool; 3] = [
        is_greedy,
        |generation| !is_greedy(generation) && !needs_order(generation),
        |generation| !is_greedy(generation) && needs_order(generation),
    ];
    let mut tokens = Vec::new();
    let mut order = Vec::with_capacity(rows.len());
    for (kind, of_kind) in kinds.iter().enumerate() {
        let members: Vec<usize> = all.iter().copied().filter(|&row| of_kind(rows[row].generation)).collect();
        if members.is_empty() {
            continue;
        }
        let own = if members.len() == rows.len() {
            logits.clone()
        } else {
            let index: Vec<i32> = members.iter().map(|&row| row as i32).collect();
            logits.take_axis(Array::from_slice(&index, &[index.len() as i32]), 0)?
        };
        let members_rows: Vec<&SampleRow<'_>> = members.iter().map(|&row| &rows[row]).collect();
        tokens.push(if kind == 0 { argmax(&own)? } else { draw(&own, &members_rows, kind == 2)? });
        order.extend(members);
    }
    if tokens.len() == 1 {
        return Ok(tokens.remove(0));
    }
    let mut inverse = vec![0i32; rows.len()];
    for (place, &row) in order.iter().enumerate() {
        inverse[row] = place as i32;
    }
    Ok(ops::concatenate(&tokens, 0)?.take_axis(Array::from_slice(&inverse, &[rows.len() as i32]), 0)?)
}

fn is_greedy(generation: &Generation) -> bool {
    generation.temperature == 0.0
}

fn is_adjusted(generation: &Generation) -> bool {
    !generation.logit_bias.is_empty() || is_penalized(generation)
}

pub fn is_penalized(generation: &Generation) -> bool {
    generation.penalty_context > 0
        && (generation.repetition_penalty != 1.0 || generation.presence_penalty != 0.0 || generation.frequency_penalty != 0.0)
}

fn needs_order(generation: &Generation) -> bool {
    generation.top_k > 0 || generation.top_p < 1.0
}

fn argmax(logits: &Array) -> Result<Array, EngineError> {
    Ok(ops::indexing::argmax_axis(logits, -1, false)?.as_dtype(Dtype::Int32)?)
}

/// Bias, then the three penalties, on the flattened logits.
fn adjust(logits: &Array, rows: &[SampleRow<'_>], newest: Option<&Array>) -> Result<Array, EngineError> {
    let vocabulary = logits.dim(1);
    let mut flat = logits.reshape(&[-1])?;
    let (mut places, mut amounts) = (Vec::new(), Vec::new());
    for (row, of_row) in rows.iter().enumerate() {
        for (&token, &bias) in of_row.generation.logit_bias.iter().filter(|(token, _)| **token < vocabulary as u32) {
            places.push(row as i32 * vocabulary + token as i32);
            amounts.push(bias);
        }
    }
    if !places.is_empty() {
        flat = add_at(&flat, &Array::from_slice(&places, &[places.len() as i32]), &amounts)?;
    }
    let penalized: Vec<usize> = (0..rows.len())
        .filter(|&row| is_penalized(rows[row].generation) && (!rows[row].context.is_empty() || rows[row].newest.is_some()))
        .collect();
    if penalized.is_empty() {
        return Ok(flat.reshape(logits.shape())?);
    }
    // (row, place in its context): ragged contexts are filled up with a token of their own, whose extra mentions count nothing.
    let width = penalized.iter().map(|&row| rows[row].context.len()).max().unwrap_or(0) + 1;
    let shape = [penalized.len() as i32, width as i32];
    let (mut known, mut known_mask, mut counted) = (Vec::new(), Vec::new(), Vec::new());
    let (mut offsets, mut sources) = (Vec::new(), Vec::new());
    for &row in &penalized {
        let SampleRow { context, newest, .. } = &rows[row];
        for place in 0..width {
            let token = context.get(place).or(context.first());
            let is_newest = newest.is_some() && (place == width - 1 || context.is_empty());
            known.push(token.copied().unwrap_or(0) as i32);
            known_mask.push(!is_newest);
            counted.push(if place < context.len() || (newest.is_some() && place == width - 1) { 1.0f32 } else { 0.0 });
        }
        offsets.push(row as i32 * vocabulary);
        sources.push(newest.unwrap_or(0));
    }
    let mut tokens = Array::from_slice(&known, &shape);
    if let Some(newest) = newest.filter(|_| penalized.iter().any(|&row| rows[row].newest.is_some())) {
        let newest = newest.take_axis(Array::from_slice(&sources, &[shape[0]]), 0)?.reshape(&[shape[0], 1])?;
        tokens = ops::select(Array::from_slice(&known_mask, &shape), tokens, newest)?;
    }
    let places = tokens.add(Array::from_slice(&offsets, &[shape[0], 1]))?.reshape(&[-1])?;
    let each = |value: fn(&Generation) -> f32| -> Vec<f32> {
        penalized.iter().flat_map(|&row| std::iter::repeat_n(value(rows[row].generation), width)).collect()
    };
    let count = [places.dim(0)];
    let repetition = each(|generation| generation.repetition_penalty);
    if repetition.iter().any(|&penalty| penalty != 1.0) {
        let repetition = Array::from_slice(&repetition, &count);
        let seen = flat.take_axis(&places, 0)?;
        let lowered = ops::select(seen.lt(Array::from_f32(0.0))?, seen.multiply(&repetition)?, seen.divide(&repetition)?)?;
        flat = flat.put_along_axis(&places, lowered, 0)?;
    }
    let presence = each(|generation| generation.presence_penalty);
    if presence.iter().any(|&penalty| penalty != 0.0) {
        let lowered = flat.take_axis(&places, 0)?.subtract(Array::from_slice(&presence, &count))?;
        flat = flat.put_along_axis(&places, lowered, 0)?;
    }
    let frequency = each(|generation| generation.frequency_penalty);
    if frequency.iter().any(|&penalty| penalty != 0.0) {
        let amounts: Vec<f32> = frequency.iter().zip(&counted).map(|(penalty, counted)| -penalty * counted).collect();
        flat = add_at(&flat, &places, &amounts)?;
    }
    Ok(flat.reshape(logits.shape())?)
}

fn add_at(flat: &Array, places: &Array, amounts: &[f32]) -> Result<Array, EngineError> {
    let updates = Array::from_slice(amounts, &[amounts.len() as i32, 1]);
    ffi::scatter_add(flat, &[places], &updates, &[0])
}

/// Inverse-transform sampling: the first token whose cumulative probability exceeds the row's uniform number.
fn draw(logits: &Array, rows: &[&SampleRow<'_>], ordered: bool) -> Result<Array, EngineError> {
    let vocabulary = logits.dim(1);
    let column = |value: &dyn Fn(&SampleRow<'_>) -> f32| -> Array {
        let values: Vec<f32> = rows.iter().map(|row| value(row)).collect();
        Array::from_slice(&values, &[rows.len() as i32, 1])
    };
    let mut threshold = None;
    if rows.iter().any(|row| row.generation.min_p > 0.0) {
        let floor = column(&|row| row.generation.min_p.ln());
        threshold = Some(logits.max_axis(-1, true)?.add(floor)?);
    }
    if ordered {
        let ascending = ops::sort_axis(logits, -1)?;
        let probabilities = ops::softmax_axis(&ascending, -1, true)?;
        let above = probabilities.cumsum(-1, true, false)?;
        // Twice the whole mass is never above a token: top_p 1 drops none.
        let kept_mass = column(&|row| if row.generation.top_p < 1.0 { row.generation.top_p } else { 2.0 });
        let dropped = above.ge(&kept_mass)?.sum_axis(-1, true)?.as_dtype(Dtype::Int32)?;
        let by_rank: Vec<i32> = rows
            .iter()
            .map(|row| match i32::try_from(row.generation.top_k) {
                Ok(top_k) if top_k > 0 => (vocabulary - top_k).max(0),
                _ => 0,
            })
            .collect();
        let place = ops::maximum(dropped, Array::from_slice(&by_rank, &[rows.len() as i32, 1]))?;
        let place = ops::minimum(place, Array::from_int(vocabulary - 1))?;
        let cut = ops::indexing::take_along_axis(&ascending, place, -1)?;
        threshold = Some(match threshold {
            Some(threshold) => ops::maximum(threshold, cut)?,
            None => cut,
        });
    }
    let kept = match threshold {
        Some(threshold) => ops::select(logits.ge(threshold)?, logits, Array::from_f32(f32::NEG_INFINITY))?,
        None => logits.clone(),
    };
    let tempered = kept.divide(column(&|row| row.generation.temperature))?;
    look_up(&tempered, &column(&|row| uniform(row.seed, row.index)))
}

/// (rows, vocabulary) logits, (rows, 1) uniform numbers -> (rows) int32: the token at which each row's cumulative probability
/// passes its number.
pub fn look_up(logits: &Array, uniform: &Array) -> Result<Array, EngineError> {
    let vocabulary = logits.dim(1);
    let cumulative = ops::softmax_axis(logits, -1, true)?.cumsum(-1, false, true)?;
    let whole = ffi::slice(&cumulative, &[0, vocabulary - 1], &[logits.dim(0), vocabulary])?;
    let token = cumulative.le(whole.multiply(uniform)?)?.sum_axis(-1, false)?.as_dtype(Dtype::Int32)?;
    Ok(ops::minimum(token, Array::from_int(vocabulary - 1))?)
}

/// A number in [0, 1) with 24 bits from a row's seed and a token's place in its completion: two rounds of SplitMix64's finalizer
/// (Steele, Lea and Flood, 2014).
pub fn uniform(seed: u64, index: u32) -> f32 {
    let mix = |value: u64| {
        let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    };
    let bits = mix(mix(seed).wrapping_add(u64::from(index).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    (bits >> 40) as f32 / (1u64 << 24) as f32
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use serde::Deserialize;
    use serde_json::{Map, Value};

    use super::*;

    #[derive(Deserialize)]
    struct Golden {
        logits: Vec<Vec<f32>>,
        penalized: Vec<Penalized>,
        kept: Vec<Kept>,
    }

    #[derive(Deserialize)]
    struct Penalized {
        row: usize,
        settings: Map<String, Value>,
        context: Vec<u32>,
        logits: Vec<f32>,
    }

    #[derive(Deserialize)]
    struct Kept {
        row: usize,
        settings: Map<String, Value>,
        tokens: Vec<u32>,
    }

    fn golden() -> Golden {
        mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/sampling.json");
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    fn generation(settings: &Map<String, Value>) -> Generation {
        Generation::default().overridden_by(settings).unwrap()
    }

    fn array(rows: &[&[f32]]) -> Array {
        let flat: Vec<f32> = rows.iter().flat_map(|row| row.iter().copied()).collect();
        Array::from_slice(&flat, &[rows.len() as i32, rows[0].len() as i32])
    }

    fn tokens(array: &Array) -> Vec<i32> {
        array.eval().unwrap();
        array.try_as_slice::<i32>().unwrap().to_vec()
    }

    /// The last `penalty_context` tokens, the newest of them left to the device where `on_device`.
    fn row<'a>(generation: &'a Generation, context: &'a [u32], on_device: Option<i32>, index: u32) -> SampleRow<'a> {
        let from = context.len().saturating_sub(generation.penalty_context as usize);
        let to = context.len() - usize::from(on_device.is_some());
        SampleRow { generation, seed: 5, index, context: &context[from.min(to)..to], newest: on_device }
    }

    #[test]
    fn penalties_are_mlx_lms() {
        let golden = golden();
        for case in &golden.penalized {
            let generation = generation(&case.settings);
            // The same row beside others that have other contexts, its newest token known to the host or to the device alone.
            let other = Generation { repetition_penalty: 1.7, penalty_context: 2, ..Generation::default() };
            let plain = Generation::default();
            for on_device in [false, true] {
                let newest = Array::from_slice(&[9i32, *case.context.last().unwrap() as i32], &[2]);
                let own = row(&generation, &case.context, on_device.then_some(1), 0);
                let rows = [row(&other, &[1, 2, 3], None, 0), row(&plain, &[4], None, 0), own];
                let logits = array(&[&golden.logits[0], &golden.logits[1], &golden.logits[case.row]]);
                let adjusted = adjust(&logits, &rows, Some(&newest)).unwrap();
                adjusted.eval().unwrap();
                let adjusted = adjusted.try_as_slice::<f32>().unwrap();
                assert_eq!(&adjusted[64..128], &golden.logits[1], "a row without penalties is left alone");
                for (ours, theirs) in adjusted[128..].iter().zip(&case.logits) {
                    assert!((ours - theirs).abs() <= 1e-5, "{:?} over {:?}: {ours} is not {theirs}", case.settings, case.context);
                }
            }
        }
        assert!(golden.penalized.len() > 50);
    }

    #[test]
    fn filters_keep_what_mlx_lm_keeps() {
        let golden = golden();
        for case in &golden.kept {
            let generation = Generation { temperature: 0.7, ..generation(&case.settings) };
            // Drawn so often, every kept token that matters comes up, and none that was dropped may.
            let count = 600;
            let rows: Vec<SampleRow<'_>> = (0..count).map(|index| row(&generation, &[], None, index)).collect();
            let logits = &golden.logits[case.row];
            let drawn = tokens(&sample(&array(&vec![logits.as_slice(); count as usize]), &rows, None).unwrap());
            let weight = |token: u32| (logits[token as usize] / 0.7).exp();
            let whole: f32 = case.tokens.iter().map(|&token| weight(token)).sum();
            for token in 0..64u32 {
                let times = drawn.iter().filter(|&&drawn| drawn == token as i32).count() as f32;
                let expected = if case.tokens.contains(&token) { count as f32 * weight(token) / whole } else { 0.0 };
                let spread = 5.0 * expected.sqrt() + if expected > 0.0 { 3.0 } else { 0.0 };
                assert!(
                    (times - expected).abs() <= spread,
                    "{:?}: token {token} {times} times, {expected} expected",
                    case.settings
                );
            }
        }
    }

    #[test]
    fn a_row_among_others_draws_what_it_draws_alone() {
        let golden = golden();
        let all: Vec<Generation> = [
            Generation::default(),
            Generation { temperature: 1.0, ..Generation::default() },
            Generation { temperature: 0.8, top_k: 7, top_p: 0.9, ..Generation::default() },
            Generation { temperature: 1.3, min_p: 0.1, presence_penalty: 0.5, ..Generation::default() },
            Generation { repetition_penalty: 2.0, ..Generation::default() },
        ]
        .into();
        let context = [3, 9, 27];
        let rows: Vec<SampleRow<'_>> = (0..30).map(|index| row(&all[index % 5], &context, None, index as u32)).collect();
        let logits: Vec<&[f32]> = (0..30).map(|index| golden.logits[index % 3].as_slice()).collect();
        let together = tokens(&sample(&array(&logits), &rows, None).unwrap());
        let alone: Vec<i32> = (0..30)
            .map(|index| {
                let own = row(&all[index % 5], &context, None, index as u32);
                tokens(&sample(&array(&[logits[index]]), &[own], None).unwrap())[0]
            })
            .collect();
        assert_eq!(together, alone);
        let distinct: std::collections::BTreeSet<i32> = together.into_iter().collect();
        assert!(distinct.len() > 5, "too alike to prove anything: {distinct:?}");
    }

    #[test]
    fn uniform_numbers_are_even_and_depend_on_seed_and_place() {
        let mut buckets = [0; 16];
        for index in 0..16_000 {
            let number = uniform(42, index);
            assert!((0.0..1.0).contains(&number));
            buckets[(number * 16.0) as usize] += 1;
        }
        assert!(buckets.iter().all(|count| (850..1150).contains(count)), "{buckets:?}");
        assert_ne!(uniform(1, 0), uniform(2, 0));
        assert_ne!(uniform(1, 0), uniform(1, 1));
    }
}
