//! Softmax and GELU on all cores, for what MLX's CPU backend computes in one thread and one number at a time on x86-64: of the
//! 260 ms that attention among 1,500 tokens takes there, 215 are the exponential.
//!
//! Plain slices in, plain slices out; `ffi::matmul_then` and `ffi::addmm_then` bring them here. Accuracy: a few units in the last
//! place of a float32.

use rayon::prelude::*;

/// Rows, or runs of numbers, that a thread takes at once.
const ROWS: usize = 16;
const RUN: usize = 1 << 14;
/// Numbers computed side by side.
const LANES: usize = 16;

/// Each row of `width` numbers into their softmax.
pub fn softmax_rows(numbers: &mut [f32], width: usize) {
    numbers.par_chunks_mut(ROWS * width.max(1)).for_each(|rows| {
        for row in rows.chunks_mut(width.max(1)) {
            softmax(row);
        }
    });
}

/// 0.5 x (1 + erf(x / √2)) of each number.
pub fn gelu_each(numbers: &mut [f32]) {
    numbers.par_chunks_mut(RUN).for_each(|run| {
        for x in run {
            *x = 0.5 * *x * (1.0 + erf(*x * std::f32::consts::FRAC_1_SQRT_2));
        }
    });
}

fn softmax(row: &mut [f32]) {
    // A maximum, and a sum, for each lane: the compiler reorders no floats by itself.
    let mut largest = [f32::NEG_INFINITY; LANES];
    let (lanes, rest) = row.as_chunks::<LANES>();
    for chunk in lanes {
        for (largest, &x) in largest.iter_mut().zip(chunk) {
            *largest = if x > *largest { x } else { *largest };
        }
    }
    let largest = largest.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sums = [0.0; LANES];
    let (lanes, rest) = row.as_chunks_mut::<LANES>();
    for chunk in lanes {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *x = exp(*x - largest);
            *sum += *x;
        }
    }
    let mut sum: f32 = sums.iter().sum();
    for x in rest {
        *x = exp(*x - largest);
        sum += *x;
    }
    let scale = 1.0 / sum;
    for x in row {
        *x *= scale;
    }
}

/// eˣ for x ≤ 88, 0 below −87: 2ⁿ × p(x − n ln 2), where p is of degree 6 (Cephes' `expf`, S. Moshier).
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Adding 1.5 × 2²³ rounds to an integer, which is then in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let p = p * r * r + r + 1.0;
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23));
    if x < -87.0 { 0.0 } else { p * power }
}

/// erf(x): below 1 in size its power series' best fit, beyond it 1 − e^(−q(x)) (N. Juffa's coefficients, stackoverflow 35148198).
#[inline(always)]
fn erf(x: f32) -> f32 {
    let (t, s) = (x.abs(), x * x);
    let r = -1.728_530_9e-5;
    let u = 3.831_975e-4;
    let r = r * t + u;
    r * s
}
