//! Products with one panel: 32 columns of a weight, all their inputs.
//!
//! An output is a chain of fused multiply-adds over its inputs in their order, in one lane. The few-row kernels unpack a weight in
//! registers; with more rows it is unpacked once into a block that stays in the first-level cache, and multiplied by all of them.

use pulp::{Arch, Simd, WithSimd};

use super::simd::{Line, PANEL, pair, pair_of_words, set_pair};

/// How numbers are packed in 32-bit words.
pub trait Code: Copy + Send + Sync {
    /// Numbers of a word, the first in its lowest bits.
    const PER_WORD: usize;
    /// Whether numbers are `code × scale + bias`, with a scale and a bias for each group.
    const SCALED: bool;
    /// Number `index` of each word.
    fn number<S: Simd>(simd: S, words: S::u32s, index: usize) -> S::f32s;
}

/// Unsigned integers of `B` bits.
#[derive(Debug, Clone, Copy)]
pub struct Bits<const B: u32>;
#[derive(Debug, Clone, Copy)]
pub struct Bfloat16;
#[derive(Debug, Clone, Copy)]
pub struct Float16;
#[derive(Debug, Clone, Copy)]
pub struct Float32;

impl<const B: u32> Code for Bits<B> {
    const PER_WORD: usize = (u32::BITS / B) as usize;
    const SCALED: bool = true;
    #[inline(always)]
    fn number<S: Simd>(simd: S, words: S::u32s, index: usize) -> S::f32s {
        let shifted = if index == 0 { words } else { simd.wrapping_dyn_shr_u32s(words, simd.splat_u32s(index as u32 * B)) };
        let code = simd.and_u32s(shifted, simd.splat_u32s((1 << B) - 1));
        // 2²³ + code has the code in its lowest bits.
        let sum = simd.transmute_f32s_u32s(simd.or_u32s(code, simd.splat_u32s(0x4b00_0000)));
        simd.sub_f32s(sum, simd.splat_f32s(8_388_608.0))
    }
}

impl Code for Bfloat16 {
    const PER_WORD: usize = 2;
    const SCALED: bool = false;
    #[inline(always)]
    fn number<S: Simd>(simd: S, words: S::u32s, index: usize) -> S::f32s {
        simd.transmute_f32s_u32s(match index {
            0 => simd.wrapping_dyn_shl_u32s(words, simd.splat_u32s(16)),
            _ => simd.and_u32s(words, simd.splat_u32s(0xffff_0000)),
        })
    }
}

/// Finite numbers: infinities would become 65,536.
impl Code for Float16 {
    const PER_WORD: usize = 2;
    const SCALED: bool = false;
    #[inline(always)]
    fn number<S: Simd>(simd: S, words: S::u32s, index: usize) -> S::f32s {
        let halves = if index == 0 { words } else { simd.wrapping_dyn_shr_u32s(words, simd.splat_u32s(16)) };
        let sign = simd.and_u32s(simd.wrapping_dyn_shl_u32s(halves, simd.splat_u32s(16)), simd.splat_u32s(0x8000_0000));
        let rest = simd.wrapping_dyn_shl_u32s(simd.and_u32s(halves, simd.splat_u32s(0x7fff)), simd.splat_u32s(13));
        // An exponent counts from 15 in a half and from 127 in a float: 2¹¹² makes up for it, subnormal numbers included.
        let scale = simd.splat_f32s(f32::from_bits((127 + 112) << 23));
        simd.mul_f32s(simd.transmute_f32s_u32s(simd.or_u32s(sign, rest)), scale)
    }
}

impl Code for Float32 {
    const PER_WORD: usize = 1;
    const SCALED: bool = false;
    #[inline(always)]
    fn number<S: Simd>(simd: S, words: S::u32s, _: usize) -> S::f32s {
        simd.transmute_f32s_u32s(words)
    }
}

/// Scale and bias of a group, for each column.
pub type Scale = [Line<f32>; 2];

const UNSCALED: [Scale; 1] = [[Line::ZERO; 2]];

/// 32 columns.
#[derive(Clone, Copy)]
pub struct Panel<'a> {
    /// (inputs / PER_WORD)
    pub words: &'a [Line<u32>],
    /// (inputs / group size)
    pub scales: &'a [Scale],
    /// Words of a group: all of them where numbers are not scaled.
    pub group_words: usize,
}

impl<'a> Panel<'a> {
    fn groups<C: Code>(self) -> impl Iterator<Item = (&'a [Line<u32>], &'a Scale)> {
        let scales: &'a [Scale] = if C::SCALED { self.scales } else { &UNSCALED };
        self.words.chunks_exact(self.group_words).zip(scales)
    }

    /// Inputs `first .. first + count`, whole groups where numbers are scaled.
    fn part<C: Code>(self, first: usize, count: usize) -> Self {
        let words = &self.words[first / C::PER_WORD..(first + count) / C::PER_WORD];
        if !C::SCALED {
            return Self { words, group_words: words.len(), ..self };
        }
        let group = self.group_words * C::PER_WORD;
        Self { words, scales: &self.scales[first / group..(first + count) / group], ..self }
    }
}

/// The weights that two words hold at `index`.
#[inline(always)]
fn weights<S: Simd, C: Code>(simd: S, words: [S::u32s; 2], index: usize, scale: [S::f32s; 2], bias: [S::f32s; 2]) -> [S::f32s; 2] {
    let numbers = [C::number(simd, words[0], index), C::number(simd, words[1], index)];
    if !C::SCALED {
        return numbers;
    }
    [simd.mul_add_f32s(numbers[0], scale[0], bias[0]), simd.mul_add_f32s(numbers[1], scale[1], bias[1])]
}

/// Rows that are multiplied while weights are unpacked, rather than afterwards.
const FUSED_ROWS_MAX: usize = 4;

/// Inputs unpacked at once at most: 24 KiB of a panel.
pub const BLOCK: usize = 192;

/// Room for one panel's products.
#[derive(Debug, Default)]
pub struct Scratch {
    block: Vec<Line<f32>>,
    /// (rows)
    pub sums: Vec<Line<f32>>,
}

impl Scratch {
    pub fn reserve(&mut self, rows: usize) {
        self.sums.resize(rows, Line::ZERO);
        if rows > FUSED_ROWS_MAX {
            self.block.resize(BLOCK, Line::ZERO);
        }
    }
}

/// The products of the rows of `x`, blocks as of [`Packed::blocks`](super::Packed::blocks), with one panel, into `scratch.sums`.
pub fn multiply<C: Code>(arch: Arch, panel: Panel<'_>, x: &[(usize, &[f32])], scratch: &mut Scratch) {
    let Scratch { block, sums } = scratch;
    if sums.len() <= FUSED_ROWS_MAX {
        let x = x.first().map_or(&[][..], |(_, numbers)| numbers);
        match sums.len() {
            0 => {}
            1 => fused::<C, 1>(arch, panel, x, sums),
            2 => fused::<C, 2>(arch, panel, x, sums),
            3 => fused::<C, 3>(arch, panel, x, sums),
            _ => fused::<C, FUSED_ROWS_MAX>(arch, panel, x, sums),
        }
        return;
    }
    sums.fill(Line::ZERO);
    let inputs = panel.words.len() * C::PER_WORD;
    let group = if C::SCALED { panel.group_words * C::PER_WORD } else { C::PER_WORD };
    let step = (BLOCK / group).max(1) * group;
    let mut first = 0;
    while first < inputs {
        let count = step.min(inputs - first);
        let block = &mut block[..count];
        arch.dispatch(Unpack::<C> { panel: panel.part::<C>(first, count), block, code: std::marker::PhantomData });
        let mut left = &mut sums[..];
        for &(rows, numbers) in x {
            let (own, rest) = left.split_at_mut(rows);
            left = rest;
            multiply_block(arch, block, &numbers[first * rows..(first + count) * rows], own);
        }
        first += count;
    }
}

/// `sums += x @ block`, where `x` is (inputs, rows) for up to 12 rows.
pub fn multiply_block(arch: Arch, block: &[Line<f32>], x: &[f32], sums: &mut [Line<f32>]) {
    match sums.len() {
        0 => {}
        1 => tile::<1>(arch, block, x, sums),
        2 => tile::<2>(arch, block, x, sums),
        3 => tile::<3>(arch, block, x, sums),
        4 => tile::<4>(arch, block, x, sums),
        5 => tile::<5>(arch, block, x, sums),
        6 => tile::<6>(arch, block, x, sums),
        7 => tile::<7>(arch, block, x, sums),
        8 => tile::<8>(arch, block, x, sums),
        9 => tile::<9>(arch, block, x, sums),
        10 => tile::<10>(arch, block, x, sums),
        11 => tile::<11>(arch, block, x, sums),
        _ => tile::<12>(arch, block, x, sums),
    }
}

fn fused<C: Code, const ROWS: usize>(arch: Arch, panel: Panel<'_>, x: &[f32], sums: &mut [Line<f32>]) {
    if let Some(sums) = sums.first_chunk_mut::<ROWS>() {
        arch.dispatch(Fused::<C, ROWS> { panel, x: x.as_chunks().0, sums, code: std::marker::PhantomData });
    }
}

fn tile<const ROWS: usize>(arch: Arch, block: &[Line<f32>], x: &[f32], sums: &mut [Line<f32>]) {
    if let Some(sums) = sums.first_chunk_mut::<ROWS>() {
        arch.dispatch(Tile::<ROWS> { block, x: x.as_chunks().0, sums });
    }
}

/// `$body` for each row below `$rows`, written out: sums stay in registers only where no loop is left to index them.
macro_rules! each_row {
    ($rows:ident, $row:ident, $body:block) => {
        each_row!(@ $rows, $row, $body, 0 1 2 3 4 5 6 7 8 9 10 11)
    };
    (@ $rows:ident, $row:ident, $body:block, $($index:literal)*) => {
        $(if $rows > $index {
            const $row: usize = $index;
            $body
        })*
    };
}

struct Fused<'a, C, const ROWS: usize> {
    panel: Panel<'a>,
    /// (inputs, rows)
    x: &'a [[f32; ROWS]],
    sums: &'a mut [Line<f32>; ROWS],
    code: std::marker::PhantomData<C>,
}

impl<C: Code, const ROWS: usize> WithSimd for Fused<'_, C, ROWS> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for at in 0..PANEL / (2 * S::F32_LANES) {
            let mut sums = [[simd.splat_f32s(0.0); 2]; ROWS];
            let x = self.x.chunks_exact(self.panel.group_words * C::PER_WORD);
            for ((words, [scale, bias]), x) in self.panel.groups::<C>().zip(x) {
                let (scale, bias) = (pair::<S>(scale, at), pair::<S>(bias, at));
                for (words, x) in words.iter().zip(x.chunks_exact(C::PER_WORD)) {
                    let words = pair_of_words::<S>(words, at);
                    #[expect(
                        clippy::needless_range_loop,
                        reason = "a count that the compiler knows is unrolled, and shifts with it"
                    )]
                    for index in 0..C::PER_WORD {
                        let weights = weights::<S, C>(simd, words, index, scale, bias);
                        add_products(simd, &mut sums, &x[index], weights);
                    }
                }
            }
            each_row!(ROWS, ROW, { set_pair::<S>(&mut self.sums[ROW], at, sums[ROW]) });
        }
    }
}

struct Tile<'a, const ROWS: usize> {
    block: &'a [Line<f32>],
    x: &'a [[f32; ROWS]],
    sums: &'a mut [Line<f32>; ROWS],
}

impl<const ROWS: usize> WithSimd for Tile<'_, ROWS> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for at in 0..PANEL / (2 * S::F32_LANES) {
            let mut sums = [[simd.splat_f32s(0.0); 2]; ROWS];
            each_row!(ROWS, ROW, { sums[ROW] = pair::<S>(&self.sums[ROW], at) });
            for (weights, x) in self.block.iter().zip(self.x) {
                add_products(simd, &mut sums, x, pair::<S>(weights, at));
            }
            each_row!(ROWS, ROW, { set_pair::<S>(&mut self.sums[ROW], at, sums[ROW]) });
        }
    }
}

#[inline(always)]
fn add_products<S: Simd, const ROWS: usize>(simd: S, sums: &mut [[S::f32s; 2]; ROWS], x: &[f32; ROWS], weights: [S::f32s; 2]) {
    each_row!(ROWS, ROW, {
        let x = simd.splat_f32s(x[ROW]);
        sums[ROW][0] = simd.mul_add_f32s(x, weights[0], sums[ROW][0]);
        sums[ROW][1] = simd.mul_add_f32s(x, weights[1], sums[ROW][1]);
    });
}

struct Unpack<'a, C> {
    panel: Panel<'a>,
    block: &'a mut [Line<f32>],
    code: std::marker::PhantomData<C>,
}

impl<C: Code> WithSimd for Unpack<'_, C> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for at in 0..PANEL / (2 * S::F32_LANES) {
            let blocks = self.block.chunks_exact_mut(self.panel.group_words * C::PER_WORD);
            for ((words, [scale, bias]), block) in self.panel.groups::<C>().zip(blocks) {
                let (scale, bias) = (pair::<S>(scale, at), pair::<S>(bias, at));
                for (words, lines) in words.iter().zip(block.chunks_exact_mut(C::PER_WORD)) {
                    let words = pair_of_words::<S>(words, at);
                    #[expect(
                        clippy::needless_range_loop,
                        reason = "a count that the compiler knows is unrolled, and shifts with it"
                    )]
                    for index in 0..C::PER_WORD {
                        set_pair::<S>(&mut lines[index], at, weights::<S, C>(simd, words, index, scale, bias));
                    }
                }
            }
        }
    }
}
