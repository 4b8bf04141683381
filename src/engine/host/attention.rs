//! Attention of queries over their own rows' keys and values: nothing is padded, nothing masked.
//!
//! A decoding row's queries go over its keys one by one. A prompt chunk's go in blocks over tiles of keys, as products with panels:
//! each tile is transposed once for a block.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::{
    elementwise::softmax,
    panel::multiply_block,
    simd::{Line, PANEL},
};

/// The shape of attention. Query head h looks at key head h / (heads / kv_heads).
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// On the scores.
    pub scale: f32,
}

/// What the queries of one row, or of one chunk, see.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// (kv_heads, stride, head_dim) each.
    pub keys: &'a [f32],
    pub values: &'a [f32],
    pub stride: usize,
    /// Keys that the first query sees, itself included; each further one of a chunk sees one more.
    pub first: usize,
    /// Keys that a query sees at most, the newest.
    pub window: Option<usize>,
}

/// Prompt tokens whose queries are computed together.
const BLOCK_TOKENS: usize = 16;
/// Products that are worth another thread.
const PARALLEL_MIN: usize = 1 << 16;
/// Queries that a kernel multiplies at once.
const QUERIES_MAX: usize = 12;
/// Values unpacked at once.
const VALUES_MAX: usize = 128;

impl Attention {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// One query row each: `queries` have `query_stride` numbers a row, of which the first are (heads, head_dim); gives
    /// (rows, heads × head_dim).
    pub fn rows(&self, queries: &[f32], query_stride: usize, seen: &[Seen<'_>], attended: &mut [f32]) {
        let arch = Arch::new();
        let width = self.group() * self.head_dim;
        let one = |(index, attended): (usize, &mut [f32])| {
            let (row, head) = (index / self.kv_heads, index % self.kv_heads);
            let seen = &seen[row];
            let from = head * seen.stride * self.head_dim;
            let count = seen.first * self.head_dim;
            let mut scores = vec![0.0; self.group() * seen.first];
            arch.dispatch(OfRow {
                queries: &queries[row * query_stride + head * width..][..width],
                keys: &seen.keys[from..from + count],
                values: &seen.values[from..from + count],
                head_dim: self.head_dim,
                scale: self.scale,
                scores: &mut scores,
                attended,
            });
        };
        let products: usize = seen.iter().map(|seen| seen.first).sum::<usize>() * self.heads * self.head_dim;
        if products < PARALLEL_MIN {
            attended.chunks_exact_mut(width).enumerate().for_each(one);
        } else {
            attended.par_chunks_exact_mut(width).enumerate().for_each(one);
        }
    }

    /// A chunk's queries, as for [`Attention::rows`], each of which sees what the one before it sees and itself.
    pub fn chunk(&self, queries: &[f32], query_stride: usize, seen: Seen<'_>, attended: &mut [f32]) {
        let arch = Arch::new();
        let width = self.heads * self.head_dim;
        let block = |(block, attended): (usize, &mut [f32])| {
            let first = block * BLOCK_TOKENS;
            for head in 0..self.kv_heads {
                self.block(arch, head, &queries[first * query_stride..], query_stride, seen, first, attended);
            }
        };
        let tokens = attended.len() / width.max(1);
        if tokens * (seen.first + tokens) * width < PARALLEL_MIN {
            attended.chunks_mut(BLOCK_TOKENS * width).enumerate().for_each(block);
        } else {
            attended.par_chunks_mut(BLOCK_TOKENS * width).enumerate().for_each(block);
        }
    }

    /// Tokens `before ..` of a chunk, as many as `attended` has, and the query heads of key head `head`.
    #[expect(clippy::too_many_arguments, reason = "what a block is of, and where it goes")]
    fn block(
        &self,
        arch: Arch,
        head: usize,
        queries: &[f32],
        query_stride: usize,
        seen: Seen<'_>,
        before: usize,
        attended: &mut [f32],
    ) {
        let (dims, group, width) = (self.head_dim, self.group(), self.heads * self.head_dim);
        let count = attended.len() / width * group;
        // Query q of the block: token q / group, head q % group.
        let visible = |query: usize| seen.first + before + query / group;
        let start = seen.window.map_or(0, |window| visible(0).saturating_sub(window));
        let end = visible(count - 1);
        let length = end - start;
        let from = head * seen.stride * dims;
        let (keys, values) =
            (&seen.keys[from + start * dims..from + end * dims], &seen.values[from + start * dims..from + end * dims]);

        let mut packed = vec![0.0; QUERIES_MAX * dims.max(length.min(VALUES_MAX))];
        let mut scores = vec![0.0f32; count * length];
        let mut lines = vec![Line::ZERO; dims.max(VALUES_MAX)];
        let mut all_packed = vec![0.0; count * dims];
        for first in (0..count).step_by(QUERIES_MAX) {
            let rows = QUERIES_MAX.min(count - first);
            let own = &mut all_packed[first * dims..][..rows * dims];
            for row in 0..rows {
                let query = first + row;
                let query = &queries[query / group * query_stride + (head * group + query % group) * dims..][..dims];
                for (to, from) in own[row..].iter_mut().step_by(rows).zip(query) {
                    *to = from * self.scale;
                }
            }
        }
        for (tile, keys) in keys.chunks(PANEL * dims).enumerate() {
            let tokens = keys.len() / dims;
            for (token, key) in keys.chunks_exact(dims).enumerate() {
                for (line, number) in lines.iter_mut().zip(key) {
                    line.0[token] = *number;
                }
            }
            for first in (0..count).step_by(QUERIES_MAX) {
                let rows = QUERIES_MAX.min(count - first);
                let mut sums = [Line::ZERO; QUERIES_MAX];
                multiply_block(arch, &lines[..dims], &all_packed[first * dims..][..rows * dims], &mut sums[..rows]);
                for (row, sums) in sums[..rows].iter().enumerate() {
                    scores[(first + row) * length + tile * PANEL..][..tokens].copy_from_slice(&sums.0[..tokens]);
                }
            }
        }
        for (query, scores) in scores.chunks_exact_mut(length).enumerate() {
            let last = visible(query);
            let own = seen.window.map_or(0, |window| last.saturating_sub(window)) - start..last - start;
            scores[..own.start].fill(0.0);
            scores[own.end..].fill(0.0);
            arch.dispatch(Softmax(&mut scores[own]));
        }
        for column in (0..dims).step_by(PANEL) {
            let columns = PANEL.min(dims - column);
            let mut sums = vec![Line::ZERO; count];
            for (tile, values) in values.chunks(VALUES_MAX * dims).enumerate() {
                let tokens = values.len() / dims;
                for (line, value) in lines.iter_mut().zip(values.chunks_exact(dims)) {
                    line.0[..columns].copy_from_slice(&value[column..column + columns]);
                }
                for first in (0..count).step_by(QUERIES_MAX) {
                    let rows = QUERIES_MAX.min(count - first);
                    let own = &mut packed[..rows * tokens];
                    for row in 0..rows {
                        let scores = &scores[(first + row) * length + tile * VALUES_MAX..][..tokens];
                        for (to, from) in own[row..].iter_mut().step_by(rows).zip(scores) {
                            *to = *from;
                        }
                    }
                    multiply_block(arch, &lines[..tokens], own, &mut sums[first..first + rows]);
                }
            }
            for (query, sums) in sums.iter().enumerate() {
                let at = query / group * width + (head * group + query % group) * dims + column;
                attended[at..at + columns].copy_from_slice(&sums.0[..columns]);
            }
        }
    }
}

struct Softmax<'a>(&'a mut [f32]);

impl WithSimd for Softmax<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        softmax(self.0);
    }
}

/// The query heads of one key head over a row's keys and values.
struct OfRow<'a> {
    /// (group, head_dim)
    queries: &'a [f32],
    /// (tokens, head_dim)
    keys: &'a [f32],
    values: &'a [f32],
    head_dim: usize,
    scale: f32,
    /// (group, tokens)
    scores: &'a mut [f32],
    /// (group, head_dim)
    attended: &'a mut [f32],
}

impl WithSimd for OfRow<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let dims = self.head_dim;
        let tokens = self.keys.len() / dims;
        let heads = self.queries.chunks_exact(dims).zip(self.scores.chunks_exact_mut(tokens));
        for ((query, scores), attended) in heads.zip(self.attended.chunks_exact_mut(dims)) {
            let (lanes, rest) = S::as_simd_f32s(query);
            for (key, score) in self.keys.chunks_exact(dims).zip(scores.iter_mut()) {
                let (key_lanes, key_rest) = S::as_simd_f32s(key);
                let mut sum = simd.splat_f32s(0.0);
                for (&query, &key) in lanes.iter().zip(key_lanes) {
                    sum = simd.mul_add_f32s(query, key, sum);
                }
                let rest: f32 = rest.iter().zip(key_rest).map(|(query, key)| query * key).sum();
                *score = self.scale * (simd.reduce_sum_f32s(sum) + rest);
            }
            softmax(scores);
            attended.fill(0.0);
            // Four vectors of sums stay in registers.
            for column in (0..dims).step_by(4 * S::F32_LANES) {
                let columns = (4 * S::F32_LANES).min(dims - column);
                let mut sums = [simd.splat_f32s(0.0); 4];
                for (value, &score) in self.values.chunks_exact(dims).zip(scores.iter()) {
                    let (value, _) = S::as_simd_f32s(&value[column..column + columns]);
                    let score = simd.splat_f32s(score);
                    for (sum, &value) in sums.iter_mut().zip(value) {
                        *sum = simd.mul_add_f32s(score, value, *sum);
                    }
                }
                let (to, rest) = S::as_mut_simd_f32s(&mut attended[column..column + columns]);
                to.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum);
                let first = column + columns - rest.len();
                for (value, score) in self.values.chunks_exact(dims).zip(scores.iter()) {
                    for (to, value) in rest.iter_mut().zip(&value[first..]) {
                        *to += score * value;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|index| ((index * 7919 + seed * 104_729) % 2003) as f32 * 2e-3 - 2.0).collect()
    }

    /// What one query head sees, in double precision: keys `from .. to` of its key head.
    fn exact(query: &[f32], keys: &[f32], values: &[f32], seen: std::ops::Range<usize>, scale: f32) -> Vec<f64> {
        let dims = query.len();
        let dot = |token: usize| -> f64 {
            let key = &keys[token * dims..][..dims];
            f64::from(scale) * query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>()
        };
        let scores: Vec<f64> = seen.clone().map(dot).collect();
        let largest = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
        let mut attended = vec![0.0; dims];
        for (token, score) in seen.zip(scores) {
            for (to, &value) in attended.iter_mut().zip(&values[token * dims..][..dims]) {
                *to += (score - largest).exp() / sum * f64::from(value);
            }
        }
        attended
    }

    #[test]
    fn rows_and_chunks_see_what_they_should() {
        for (heads, kv_heads, head_dim) in [(4, 2, 64), (9, 3, 16), (3, 3, 20), (2, 1, 256), (4, 4, 8)] {
            let scale = 1.0 / head_dim as f32;
            let attention = Attention { heads, kv_heads, head_dim, scale };
            let (stride, width, query_stride) = (300, heads * head_dim, heads * head_dim + 24);
            let (keys, values) = (numbers(kv_heads * stride * head_dim, 1), numbers(kv_heads * stride * head_dim, 2));
            for (tokens, first, window) in
                [(1, 1, None), (37, 1, None), (150, 151, None), (40, 9, Some(7)), (60, 30, Some(64)), (5, 200, Some(130))]
            {
                let queries = numbers(tokens * query_stride, 3);
                let seen = Seen { keys: &keys, values: &values, stride, first, window };
                let mut of_chunk = vec![f32::NAN; tokens * width];
                attention.chunk(&queries, query_stride, seen, &mut of_chunk);
                let mut of_rows = vec![f32::NAN; tokens * width];
                let each: Vec<Seen<'_>> = (0..tokens).map(|token| Seen { first: first + token, ..seen }).collect();
                if window.is_none() {
                    attention.rows(&queries, query_stride, &each, &mut of_rows);
                }
                for token in 0..tokens {
                    let to = first + token;
                    let visible = window.map_or(0, |window: usize| to.saturating_sub(window))..to;
                    for head in 0..heads {
                        let own = head / (heads / kv_heads) * stride * head_dim;
                        let query = &queries[token * query_stride + head * head_dim..][..head_dim];
                        let exact = exact(query, &keys[own..], &values[own..], visible.clone(), scale);
                        let at = token * width + head * head_dim;
                        for (index, exact) in exact.iter().enumerate() {
                            let ours = of_chunk[at + index];
                            assert!((f64::from(ours) - exact).abs() < 1e-5, "{attention:?}, token {token}: {ours} is {exact}");
                            let ours = of_rows[at + index];
                            assert!(window.is_some() || (f64::from(ours) - exact).abs() < 1e-5, "alone: {ours} is {exact}");
                        }
                    }
                }
                // Alone, or among others: the same to the last bit.
                if window.is_none() {
                    let mut alone = vec![0.0; width];
                    attention.rows(&queries, query_stride, &each[..1], &mut alone);
                    assert_eq!(alone, of_rows[..width]);
                }
            }
        }
    }
}
