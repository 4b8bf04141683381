//! Log-probabilities against numbers worked out in double precision.

use mlx_rs::memory;

use super::*;
use crate::engine::{price::LOGPROBS_BYTES, sample::uniform};

const VOCABULARY: usize = 700;

/// A row of logits from about -40 to 40, of which the first 30 are the largest in turn, by pairs that are equal.
fn row(seed: u64) -> Vec<f32> {
    let mut logits: Vec<f32> = (0..VOCABULARY).map(|token| 60.0 * (uniform(seed, token as u32) - 0.6)).collect();
    for rank in 0..30u32 {
        logits[(seed as usize * 31 + rank as usize * 17) % VOCABULARY] = 40.0 - (rank / 2) as f32 * 0.5;
    }
    logits
}

fn array(rows: &[Vec<f32>]) -> Array {
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    let flat: Vec<f32> = rows.iter().flatten().copied().collect();
    Array::from_slice(&flat, &[rows.len() as i32, rows[0].len() as i32])
}

/// All tokens by their log-probabilities, the likeliest first, of equals the one with the lower id.
fn exact(logits: &[f32]) -> Vec<(u32, f64)> {
    let wide: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    let max = wide.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let whole = max + wide.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln();
    let mut tokens: Vec<(u32, f64)> = (0..).zip(wide.iter().map(|logit| logit - whole)).collect();
    tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    tokens
}

/// What each row is given; none where it does not ask.
fn given(logits: &Array, sampled: &[i32], top_k: &[Option<u32>]) -> Vec<Option<Logprobs>> {
    let sampled = Array::from_slice(sampled, &[sampled.len() as i32]);
    let step = StepLogprobs::of(logits, &sampled, top_k.iter().copied()).unwrap();
    assert_eq!(step.is_some(), top_k.iter().any(Option::is_some));
    let of_row = |(row, top_k): (usize, &Option<u32>)| {
        let mut own = Logprobs::new(top_k.as_ref()?.min(&(logits.dim(1) as u32)).to_owned() as usize);
        step.as_ref()?.add_to(row, &mut own).unwrap();
        Some(own)
    };
    top_k.iter().enumerate().map(of_row).collect()
}

fn check(logits: &[f32], sampled: i32, own: &Logprobs) {
    let expected = exact(logits);
    let near = |got: f32, expected: f64| {
        assert!(got <= 0.0, "{got} is above certainty");
        let equal = expected == f64::NEG_INFINITY && got == f32::NEG_INFINITY;
        assert!(equal || (f64::from(got) - expected).abs() < 1e-5, "{got} is not {expected}");
    };
    assert_eq!(own.sampled.len(), 1);
    assert_eq!(own.sampled[0].token_id, sampled as u32);
    near(own.sampled[0].logprob, expected.iter().find(|(token, _)| *token == sampled as u32).unwrap().1);
    assert_eq!(own.top.len(), own.top_k);
    for (got, (token, logprob)) in own.top.iter().zip(&expected) {
        assert_eq!(got.token_id, *token, "{:?} is not the head of {:?}", own.top, &expected[..own.top_k]);
        near(got.logprob, *logprob);
    }
}

#[test]
fn they_are_the_softmax_of_the_logits() {
    let rows: Vec<Vec<f32>> = (0..7).map(row).collect();
    // Odd numbers cut a pair of equals apart.
    let top_k = [Some(5), None, Some(0), Some(20), Some(1), None, Some(13)];
    let sampled = [3, 699, 0, 31, 250, 7, 186];
    for dtype in [Dtype::Float32, Dtype::Bfloat16, Dtype::Float16] {
        let logits = array(&rows).as_dtype(dtype).unwrap();
        // What the model says is what its number format holds.
        let held = logits.as_dtype(Dtype::Float32).unwrap();
        let held: Vec<Vec<f32>> = on_host::<f32>(&held).unwrap().chunks(VOCABULARY).map(<[f32]>::to_vec).collect();
        for (index, own) in given(&logits, &sampled, &top_k).iter().enumerate() {
            assert_eq!(own.as_ref().map(|own| own.top_k as u32), top_k[index]);
            if let Some(own) = own {
                check(&held[index], sampled[index], own);
            }
        }
    }
}

#[test]
fn a_row_among_others_has_what_it_has_alone() {
    let rows: Vec<Vec<f32>> = (0..9).map(row).collect();
    let sampled: Vec<i32> = (0..9).map(|row| row * 53 + 1).collect();
    let top_k: Vec<Option<u32>> = (0..9).map(|row| (row % 4 > 0).then_some(row * 2)).collect();
    let together = given(&array(&rows), &sampled, &top_k);
    assert!(together.iter().flatten().count() >= 6);
    for (index, together) in together.into_iter().enumerate() {
        let alone = given(&array(&rows[index..=index]), &sampled[index..=index], &top_k[index..=index]).remove(0);
        assert_eq!(alone, together, "to the last bit");
    }
}

#[test]
fn corners() {
    // A certain token, of which rounding must not make more than that; and tokens that cannot be.
    let mut certain = vec![f32::NEG_INFINITY; 50];
    (certain[7], certain[9]) = (33.333_332, -3.0);
    let own = given(&array(std::slice::from_ref(&certain)), &[7], &[Some(3)]).remove(0).unwrap();
    check(&certain, 7, &own);
    assert_eq!(own.top.iter().map(|token| token.token_id).collect::<Vec<_>>(), [7, 9, 0]);
    // All alike, and fewer than asked for.
    let few = vec![1.5f32; 6];
    let own = given(&array(std::slice::from_ref(&few)), &[4], &[Some(20)]).remove(0).unwrap();
    check(&few, 4, &own);
    assert_eq!(own.top.len(), 6);
    assert_eq!(own.bytes(), 7 * 8);
    // Nobody asks.
    assert!(given(&array(&[few]), &[4], &[None])[0].is_none());
}

/// Beside the logits, and beside what choosing the tokens takes.
#[test]
fn the_price_counts_what_they_take() {
    let (rows, vocabulary) = (16, 20_000);
    let row: Vec<f32> = (0..vocabulary).map(|token| 20.0 * uniform(1, token)).collect();
    let logits = array(&vec![row; rows]);
    logits.eval().unwrap();
    let sampled = Array::from_slice(&vec![5; rows], &[rows as i32]);
    sampled.eval().unwrap();
    let take = |asking: usize| {
        memory::clear_cache().unwrap();
        memory::reset_peak_memory().unwrap();
        let before = memory::active_memory().unwrap();
        let step = StepLogprobs::of(&logits, &sampled, (0..rows).map(|row| (row < asking).then_some(5))).unwrap();
        mlx_rs::transforms::eval(step.iter().flat_map(StepLogprobs::arrays)).unwrap();
        // The peak is 0 where nothing was allocated.
        memory::peak_memory().unwrap().saturating_sub(before) as f64 / f64::from(vocabulary)
    };
    let (all, none) = (take(rows), take(0));
    let priced = rows as f64 * LOGPROBS_BYTES as f64;
    assert!(all <= priced * 1.01 && all > priced * 0.9, "{all:.1} bytes, {priced} are priced");
    assert_eq!(none, 0.0);
}
