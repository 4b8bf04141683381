//! Functions of each number, which MLX's CPU backend computes in one thread and one number at a time on x86-64: of the 260 ms that
//! attention among 1,500 tokens takes there, 215 are the exponential.

use pulp::{Arch, Simd, WithSimd};
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

/// 0.5 x (1 + erf(x / √2)) of each x, given x / √2.
pub fn gelu_each(numbers: &mut [f32]) {
    numbers.par_chunks_mut(RUN).for_each(|run| {
        for x in run {
            *x = std::f32::consts::FRAC_1_SQRT_2 * *x * (1.0 + erf(*x));
        }
    });
}

/// `activation(gate) × up` into the gates of rows of (gates, ups), `width` each.
pub fn silu_gated(rows: &mut [f32], width: usize) {
    gated(rows, width, |gate| gate / (1.0 + exp((-gate).min(EXP_MAX))));
}

/// As [`silu_gated`]: 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))) is x / (1 + e⁻²ᵘ), u being what tanh is of.
pub fn gelu_tanh_gated(rows: &mut [f32], width: usize) {
    gated(rows, width, |gate| {
        let u = (2.0 / std::f32::consts::PI).sqrt() * (gate + 0.044_715 * gate * gate * gate);
        gate / (1.0 + exp((-2.0 * u).min(EXP_MAX)))
    });
}

#[inline(always)]
fn gated(rows: &mut [f32], width: usize, activation: impl Fn(f32) -> f32 + Copy + Sync + Send) {
    let arch = Arch::new();
    let one = |row: &mut [f32]| arch.dispatch(Gated { row, width, activation });
    if rows.len() < RUN {
        rows.chunks_exact_mut(2 * width).for_each(one);
    } else {
        rows.par_chunks_exact_mut(2 * width).with_min_len(RUN / 4 / width).for_each(one);
    }
}

struct Gated<'a, F> {
    row: &'a mut [f32],
    width: usize,
    activation: F,
}

impl<F: Fn(f32) -> f32> WithSimd for Gated<'_, F> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let (gates, ups) = self.row.split_at_mut(self.width);
        for (gate, up) in gates.iter_mut().zip(ups) {
            *gate = (self.activation)(*gate) * *up;
        }
    }
}

#[inline(always)]
pub(super) fn softmax(row: &mut [f32]) {
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

/// What [`exp`] takes at most.
const EXP_MAX: f32 = 88.0;

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

/// erf(x) to 1.5e-7: formula 7.1.26 of Abramowitz and Stegun, as MLX has it.
#[inline(always)]
fn erf(x: f32) -> f32 {
    let t = 1.0 / (0.327_591_1 * x.abs() + 1.0);
    let p = 1.061_405_4 * t - 1.453_152;
    let p = p * t + 1.421_413_7;
    let p = p * t - 0.284_496_74;
    let p = p * t + 0.254_829_6;
    (1.0 - p * t * exp(-x * x)).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential() {
        for step in 0..200_000 {
            let x = -100.0 + step as f32 * 9e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs();
            assert!(error <= 2e-7 * exact || x < -87.0 && error <= 2e-38, "e^{x}: {error:e}");
        }
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY)), (1.0, 0.0));
    }

    #[test]
    fn error_function() {
        // mpmath's erf.
        for (x, exact) in [(0.0, 0.0), (0.1, 0.112_462_92), (0.5, 0.520_499_9), (1.0, 0.842_700_8), (2.0, 0.995_322_3), (9.0, 1.0)]
        {
            assert!((erf(x) - exact).abs() <= 3e-7 && (erf(-x) + exact).abs() <= 3e-7, "erf({x}) is {}", erf(x));
        }
    }

    #[test]
    fn softmax_of_every_width() {
        for width in [1usize, 15, 16, 17, 100, 1500] {
            let own: Vec<f32> = (0..3 * width).map(|index| ((index * 7919) % 1009) as f32 * 0.05 - 20.0).collect();
            let mut numbers = own.clone();
            softmax_rows(&mut numbers, width);
            for (row, own) in numbers.chunks(width).zip(own.chunks(width)) {
                let largest = own.iter().copied().fold(f32::MIN, f32::max);
                let powers: Vec<f64> = own.iter().map(|&x| f64::from(x - largest).exp()).collect();
                let sum: f64 = powers.iter().sum();
                let exact = powers.iter().map(|power| power / sum);
                let error = row.iter().zip(exact).fold(0.0f64, |error, (&ours, exact)| error.max((f64::from(ours) - exact).abs()));
                assert!(error <= 1e-6, "width {width}: {error:e}");
            }
        }
        softmax_rows(&mut [], 0);
    }
}
