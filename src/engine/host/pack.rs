//! Rows of activations, in the order in which products read them.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::simd::vector_lanes;

/// Numbers that are worth another thread.
const PARALLEL_MIN: usize = 1 << 15;

/// Rows in blocks that a product's registers hold the sums of, each block as (inputs, rows).
#[derive(Debug, Default)]
pub struct Packed {
    numbers: Vec<f32>,
    rows: usize,
    inputs: usize,
}

/// Rows that a kernel multiplies at once at most: their sums fill two thirds of the registers, or three quarters.
fn block_rows_max() -> usize {
    if vector_lanes() == 8 { 6 } else { 12 }
}

impl Packed {
    /// Takes the first `inputs` numbers of each row of `x`, whose rows are `stride` apart.
    pub fn pack(&mut self, x: &[f32], stride: usize, inputs: usize) {
        self.rows = x.len().checked_div(stride).unwrap_or(0);
        self.inputs = inputs;
        self.numbers.resize(self.rows * inputs, 0.0);
        if self.rows == 1 {
            self.numbers.copy_from_slice(&x[..inputs]);
            return;
        }
        let mut blocks = Vec::new();
        let (mut numbers, mut x) = (&mut self.numbers[..], x);
        for rows in block_rows(self.rows) {
            let (own, rest) = numbers.split_at_mut(rows * inputs);
            let (from, behind) = x.split_at(rows * stride);
            blocks.push((rows, own, from));
            (numbers, x) = (rest, behind);
        }
        let fill = |(rows, own, from): (usize, &mut [f32], &[f32])| {
            for (row, from) in from.chunks_exact(stride).enumerate() {
                for (to, from) in own[row..].iter_mut().step_by(rows).zip(&from[..inputs]) {
                    *to = *from;
                }
            }
        };
        if self.rows * inputs < PARALLEL_MIN {
            blocks.into_iter().for_each(fill);
        } else {
            blocks.into_par_iter().for_each(fill);
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Rows of each block, and its numbers, (inputs, rows).
    pub fn blocks(&self) -> impl Iterator<Item = (usize, &[f32])> {
        let mut numbers = &self.numbers[..];
        block_rows(self.rows).map(move |rows| {
            let (own, rest) = numbers.split_at(rows * self.inputs);
            numbers = rest;
            (rows, own)
        })
    }
}

/// Blocks as even as can be.
fn block_rows(rows: usize) -> impl Iterator<Item = usize> {
    let count = rows.div_ceil(block_rows_max()).max(1);
    let (least, more) = (rows / count, rows % count);
    (0..count).map(move |block| least + usize::from(block < more)).filter(|&rows| rows > 0)
}

/// Root mean square normalization of rows as long as `weight` (arXiv:1910.07467), from `x` into `normed`.
pub fn norm_rows(x: &[f32], weight: &[f32], eps: f32, normed: &mut [f32]) {
    let (arch, width) = (Arch::new(), weight.len().max(1));
    let norm = |(x, normed): (&[f32], &mut [f32])| arch.dispatch(Norm { x, weight, eps, normed });
    if x.len() < PARALLEL_MIN {
        x.chunks_exact(width).zip(normed.chunks_exact_mut(width)).for_each(norm);
    } else {
        let rows = x.par_chunks_exact(width).zip(normed.par_chunks_exact_mut(width));
        rows.with_min_len(PARALLEL_MIN / 4 / width).for_each(norm);
    }
}

struct Norm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    normed: &'a mut [f32],
}

impl WithSimd for Norm<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let (lanes, rest) = self.x.as_chunks::<16>();
        let mut squares = [0.0f32; 16];
        for chunk in lanes {
            for (square, &x) in squares.iter_mut().zip(chunk) {
                *square += x * x;
            }
        }
        let sum = squares.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>();
        let factor = 1.0 / (sum / self.x.len() as f32 + self.eps).sqrt();
        for ((normed, &x), &weight) in self.normed.iter_mut().zip(self.x).zip(self.weight) {
            *normed = x * factor * weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_its_place() {
        for rows in [1usize, 2, 5, 12, 13, 32, 100] {
            let (stride, inputs) = (9, 7);
            let x: Vec<f32> = (0..rows * stride).map(|index| index as f32).collect();
            let mut packed = Packed::default();
            packed.pack(&x, stride, inputs);
            let mut first = 0;
            for (rows, numbers) in packed.blocks() {
                assert!(rows <= block_rows_max());
                for row in 0..rows {
                    for input in 0..inputs {
                        assert_eq!(numbers[input * rows + row], ((first + row) * stride + input) as f32);
                    }
                }
                first += rows;
            }
            assert_eq!(first, rows);
        }
        let mut none = Packed::default();
        none.pack(&[], 4, 4);
        assert_eq!((none.rows(), none.blocks().count()), (0, 0));
    }

    #[test]
    fn norms_are_those_of_each_row() {
        let (rows, width) = (70, 600);
        let x: Vec<f32> = (0..rows * width).map(|index| ((index * 7919) % 1009) as f32 * 0.01 - 5.0).collect();
        let weight: Vec<f32> = (0..width).map(|index| 0.5 + index as f32 * 0.001).collect();
        let mut normed = vec![0.0; x.len()];
        norm_rows(&x, &weight, 1e-5, &mut normed);
        for (x, normed) in x.chunks(width).zip(normed.chunks(width)) {
            let mean = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / width as f64;
            for ((&x, &weight), &normed) in x.iter().zip(&weight).zip(normed) {
                let exact = f64::from(x) / (mean + 1e-5).sqrt() * f64::from(weight);
                assert!((f64::from(normed) - exact).abs() <= 1e-6, "{normed} is {exact}");
            }
        }
    }
}
