//! The vector instructions and the threads that this machine has.

use std::sync::LazyLock;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// Numbers side by side in a panel: all lanes of two vectors of AVX-512, of four of AVX2, of eight of NEON.
pub const PANEL: usize = 32;

/// One row of a panel, in whole cache lines.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct Line<T>(pub [T; PANEL]);

impl Line<f32> {
    pub const ZERO: Self = Self([0.0; PANEL]);
}

/// Whether there are vector instructions to compute with, and `MLXBATCH_HOST` is not 0; otherwise MLX does it all.
pub fn wanted() -> bool {
    vector_lanes() > 1 && std::env::var_os("MLXBATCH_HOST").is_none_or(|value| value != "0")
}

/// float32 numbers of a vector.
pub fn vector_lanes() -> usize {
    static LANES: LazyLock<usize> = LazyLock::new(|| Arch::new().dispatch(Lanes));
    *LANES
}

struct Lanes;

impl WithSimd for Lanes {
    type Output = usize;
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        S::F32_LANES
    }
}

/// Threads of its own: those that decode and parse are busy for longer than a product may wait for them.
static POOL: LazyLock<Option<rayon::ThreadPool>> =
    LazyLock::new(|| rayon::ThreadPoolBuilder::new().thread_name(|index| format!("host-{index}")).build().ok());

/// Runs `work` on the pool, whose threads then share it without a switch between threads for each product.
pub fn install<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    match &*POOL {
        Some(pool) => pool.install(work),
        None => work(),
    }
}

/// Numbers that are worth another thread.
const PARALLEL_MIN: usize = 1 << 15;

/// Changes rows of `stride` numbers, each with its index.
pub fn each_row(numbers: &mut [f32], stride: usize, change: impl Fn(usize, &mut [f32]) + Sync) {
    if numbers.len() < PARALLEL_MIN {
        numbers.chunks_exact_mut(stride).enumerate().for_each(|(index, row)| change(index, row));
    } else {
        let rows = numbers.par_chunks_exact_mut(stride).enumerate();
        rows.with_min_len(PARALLEL_MIN / 4 / stride).for_each(|(index, row)| change(index, row));
    }
}

/// Two vectors of a line: numbers `2 × at × lanes` on.
#[inline(always)]
pub fn pair<S: Simd>(line: &Line<f32>, at: usize) -> [S::f32s; 2] {
    let vectors = S::as_simd_f32s(&line.0).0;
    [vectors[2 * at], vectors[2 * at + 1]]
}

#[inline(always)]
pub fn pair_of_words<S: Simd>(line: &Line<u32>, at: usize) -> [S::u32s; 2] {
    let vectors = S::as_simd_u32s(&line.0).0;
    [vectors[2 * at], vectors[2 * at + 1]]
}

#[inline(always)]
pub fn set_pair<S: Simd>(line: &mut Line<f32>, at: usize, pair: [S::f32s; 2]) {
    let vectors = S::as_mut_simd_f32s(&mut line.0).0;
    vectors[2 * at] = pair[0];
    vectors[2 * at + 1] = pair[1];
}
