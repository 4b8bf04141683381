//! Keys and values, in slots.
//!
//! A layer's keys (and values) are one array of `(slots, kv_heads, slot_tokens, head_dim)`. A sequence keeps one slot from its
//! admission to its end and its positions start at 0, so that joining and leaving copy nothing. A layer with a sliding window keeps
//! a ring of `min(window, slot_tokens)` tokens: position p lies at `p % ring`. Rope is applied before a key is stored, so the order
//! within a ring does not matter. What a decoder sees of an encoder's output is kept beside it, by the same slots: [`cross`].

mod cross;

use std::{
    cell::{Cell, OnceCell},
    time::{Duration, Instant},
};

use mlx_rs::{Array, Dtype, fast, ops, transforms};

pub use cross::CrossLayout;

use super::{EngineError, ffi};
use cross::CrossCache;

/// What one layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerLayout {
    pub kv_heads: i32,
    pub head_dim: i32,
    /// Tokens that a query sees at most, itself included.
    pub window: Option<i32>,
}

/// Where the tokens of one forward pass stand: those of prompt chunks first, chunk after chunk, then one of each decoding row.
pub struct Step {
    places: Places,
    /// Tokens between prompts and decoding rows that nobody looks at.
    padding: i32,
    /// Made when it is first needed, as are the positions: kernels of our own do without.
    decode: OnceCell<DecodeRows>,
    positions: OnceCell<Array>,
    /// Time that building the pass spent waiting for the device.
    waited: Cell<Duration>,
}

/// A step in plain numbers.
pub struct Places {
    pub chunks: Vec<Chunk>,
    /// (slot, position) of the decoding rows.
    pub rows: Vec<(u32, u32)>,
    /// For each token, how far its sequence reaches: a prompt's whole length, or its own position and itself.
    reaches: Vec<i32>,
}

impl Places {
    /// Each token's position, and how far its sequence reaches. Of a step without padding.
    pub fn tokens(&self) -> impl Iterator<Item = (i32, i32)> {
        let of_chunks = self.chunks.iter().flat_map(|chunk| chunk.start..chunk.start + chunk.length);
        of_chunks.chain(self.rows.iter().map(|row| row.1 as i32)).zip(self.reaches.iter().copied())
    }
}

/// One sequence's prompt tokens at positions `start .. start + length`, of a prompt of `prompt_tokens`.
#[derive(Debug, Clone, Copy)]
pub struct Chunk {
    pub slot: i32,
    pub start: i32,
    pub length: i32,
    pub prompt_tokens: i32,
}

impl Step {
    /// `rows` are (slot, position) of the decoding rows, in ascending order of slots.
    pub fn new(chunks: Vec<Chunk>, rows: &[(u32, u32)]) -> Self {
        Self::padded(chunks, 0, rows)
    }

    /// With `padding` tokens of no sequence between the prompts' and the decoding rows'.
    pub fn padded(chunks: Vec<Chunk>, padding: i32, rows: &[(u32, u32)]) -> Self {
        let mut reaches = Vec::new();
        for chunk in &chunks {
            reaches.extend(std::iter::repeat_n(chunk.prompt_tokens, chunk.length as usize));
        }
        reaches.extend(std::iter::repeat_n(1, padding as usize));
        reaches.extend(rows.iter().map(|row| row.1 as i32 + 1));
        let (decode, positions, waited) = (OnceCell::new(), OnceCell::new(), Cell::default());
        Self { places: Places { chunks, rows: rows.to_vec(), reaches }, padding, decode, positions, waited }
    }

    pub fn padding(&self) -> i32 {
        self.padding
    }

    /// Waits for an array, and counts the time.
    pub fn wait_for(&self, array: &Array) -> Result<(), EngineError> {
        let since = Instant::now();
        array.eval()?;
        self.waited.set(self.waited.get() + since.elapsed());
        Ok(())
    }

    pub fn waited(&self) -> Duration {
        self.waited.get()
    }

    /// (N) int32: the position of each token.
    pub fn positions(&self) -> &Array {
        self.positions.get_or_init(|| {
            let Places { chunks, rows, .. } = &self.places;
            let of_chunks = chunks.iter().flat_map(|chunk| chunk.start..chunk.start + chunk.length);
            let of_padding = std::iter::repeat_n(0, self.padding as usize);
            let positions: Vec<i32> = of_chunks.chain(of_padding).chain(rows.iter().map(|row| row.1 as i32)).collect();
            Array::from_slice(&positions, &[positions.len() as i32])
        })
    }

    fn decode(&self) -> Option<&DecodeRows> {
        let rows = &self.places.rows;
        (!rows.is_empty()).then(|| self.decode.get_or_init(|| DecodeRows::new(rows)))
    }

    pub fn reaches(&self) -> &[i32] {
        &self.places.reaches
    }

    pub fn places(&self) -> &Places {
        &self.places
    }
}

/// The rows of a decode step; shared by all layers.
struct DecodeRows {
    /// (rows) int32 each.
    slots: Array,
    positions: Array,
    rows: i32,
    /// (first slot, slots): neighbours without a gap, in order.
    runs: Vec<(i32, i32)>,
    /// Slots `0 .. span` hold all rows.
    span: i32,
    last_position: i32,
    /// Set where the rows are not exactly the slots `0 .. rows`: for each slot of the span, a row to stand in for it.
    stand_ins: Option<Array>,
    /// Positions by slot of the span, `(span, 1, 1, 1)`.
    span_positions: Array,
    /// All rows stand at the same position.
    equal: bool,
}

impl DecodeRows {
    fn new(rows: &[(u32, u32)]) -> Self {
        let slots: Vec<i32> = rows.iter().map(|row| row.0 as i32).collect();
        let positions: Vec<i32> = rows.iter().map(|row| row.1 as i32).collect();
        let count = rows.len() as i32;
        let span = slots.iter().max().map_or(0, |slot| slot + 1);
        let last_position = positions.iter().copied().max().unwrap_or(0);
        let mut stand_ins = None;
        let mut by_slot = positions.clone();
        if span != count {
            let mut row_of_slot = vec![0; span as usize];
            by_slot = vec![last_position; span as usize];
            for (row, (&slot, &position)) in slots.iter().zip(&positions).enumerate() {
                row_of_slot[slot as usize] = row as i32;
                by_slot[slot as usize] = position;
            }
            stand_ins = Some(Array::from_slice(&row_of_slot, &[span]));
        }
        let equal = by_slot.iter().all(|&position| position == last_position);
        let mut runs: Vec<(i32, i32)> = Vec::new();
        for &slot in &slots {
            match runs.last_mut() {
                Some((first, length)) if *first + *length == slot => *length += 1,
                _ => runs.push((slot, 1)),
            }
        }
        Self {
            slots: Array::from_slice(&slots, &[count]),
            positions: Array::from_slice(&positions, &[count]),
            rows: count,
            runs,
            span,
            last_position,
            stand_ins,
            span_positions: Array::from_slice(&by_slot, &[span, 1, 1, 1]),
            equal,
        }
    }
}

/// The cache of all layers.
pub struct Cache {
    layouts: Vec<LayerLayout>,
    layers: Vec<Layer>,
    dtype: Dtype,
    slots: i32,
    slot_tokens: i32,
    /// Decoding reads keys in multiples of this many tokens.
    key_step: i32,
    /// See [`Cache::counters`].
    counters: Array,
    /// Masks of the decode step under way, by key length: layers of one kind share one.
    masks: Vec<(i32, Array)>,
    /// Of a model with an encoder.
    cross: Option<CrossCache>,
}

struct Layer {
    keys: Array,
    values: Array,
}

/// A layer's keys and values, (slots, kv_heads, ring, head_dim) each.
pub struct LentLayer<'a> {
    pub kv_heads: usize,
    pub ring: usize,
    pub head_dim: usize,
    pub keys: &'a mut [f32],
    pub values: &'a mut [f32],
}

impl Cache {
    /// With a `key_step` over 1, decoding attends over keys up to the next multiple of it, the rest masked: on CUDA every new
    /// length costs a plan of its own, and MLX fails when it has too many.
    pub fn new(layouts: Vec<LayerLayout>, dtype: Dtype, key_step: i32) -> Result<Self, EngineError> {
        let layers = layouts
            .iter()
            .map(|layout| {
                let shape = [0, layout.kv_heads, 0, layout.head_dim];
                Ok(Layer { keys: ops::zeros_dtype(&shape, dtype)?, values: ops::zeros_dtype(&shape, dtype)? })
            })
            .collect::<Result<_, EngineError>>()?;
        let counters = ops::zeros::<i32>(&[0])?;
        Ok(Self { layouts, layers, dtype, slots: 0, slot_tokens: 0, key_step, counters, masks: Vec::new(), cross: None })
    }

    #[cfg(test)]
    pub fn key_step(&self) -> i32 {
        self.key_step
    }

    pub fn layout(&self) -> (i32, i32) {
        (self.slots, self.slot_tokens)
    }

    /// Keys and values of a layer, (slots, kv_heads, slot_tokens or ring, head_dim) each.
    pub fn layer(&self, layer: usize) -> (&Array, &Array) {
        let Layer { keys, values } = &self.layers[layer];
        (keys, values)
    }

    /// int32 zeros, one for each key head of each slot: kernels that share a row count in them, and leave them at 0.
    pub fn counters(&self) -> &Array {
        &self.counters
    }

    /// Every array that the cache holds, for evaluation.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        let cross = self.cross.iter().flat_map(CrossCache::layers);
        self.layers.iter().chain(cross).flat_map(|layer| [&layer.keys, &layer.values])
    }

    /// Every layer's keys and values, lent to a pass that computes on the CPU's cores. Nothing else may be under way.
    pub fn lend(&mut self) -> Result<Vec<LentLayer<'_>>, EngineError> {
        let lent = self.layers.iter_mut().zip(&self.layouts).map(|(layer, layout)| {
            Ok(LentLayer {
                kv_heads: layout.kv_heads as usize,
                ring: layer.keys.dim(2) as usize,
                head_dim: layout.head_dim as usize,
                keys: ffi::lend(&mut layer.keys)?,
                values: ffi::lend(&mut layer.values)?,
            })
        });
        lent.collect()
    }

    /// Takes another layout, keeping what both hold. One layer at a time, so that old and new stand side by side only once.
    pub fn resize(&mut self, slots: i32, slot_tokens: i32) -> Result<(), EngineError> {
        if (slots, slot_tokens) == (self.slots, self.slot_tokens) {
            return Ok(());
        }
        for (layer, layout) in self.layers.iter_mut().zip(&self.layouts) {
            let ring = layout.window.map_or(slot_tokens, |window| window.min(slot_tokens));
            let shape = [slots, layout.kv_heads, ring, layout.head_dim];
            for array in [&mut layer.keys, &mut layer.values] {
                resize(array, &shape)?;
            }
        }
        if let Some(cross) = &mut self.cross {
            cross.resize(slots)?;
        }
        let kv_heads = self.layouts.iter().map(|layout| layout.kv_heads).max().unwrap_or(0);
        self.counters = ops::zeros::<i32>(&[slots * kv_heads])?;
        self.counters.eval()?;
        (self.slots, self.slot_tokens) = (slots, slot_tokens);
        Ok(())
    }

    /// Copies positions `0 .. tokens` of the slot `from` to each of `slots`, in ascending order. Of a ring that has gone round all
    /// is copied: `tokens` must then be all that `from` holds.
    pub fn copy_prefix(&mut self, from: i32, slots: &[i32], tokens: i32) -> Result<(), EngineError> {
        let mut prefixes = Vec::with_capacity(2 * self.layers.len());
        for (layer, layout) in self.layers.iter().zip(&self.layouts) {
            let kept = tokens.min(layer.keys.dim(2));
            for array in [&layer.keys, &layer.values] {
                let prefix = ffi::slice(array, &[from, 0, 0, 0], &[from + 1, layout.kv_heads, kept, layout.head_dim])?;
                // Into a buffer of its own, whatever its strides are: see below.
                prefixes.push(ffi::slice_update(&ops::zeros_dtype(prefix.shape(), self.dtype)?, &prefix, &[0; 4])?);
            }
        }
        // Read before the first write: a write into a buffer that a read still holds is a copy of all of it.
        transforms::eval(&prefixes)?;
        let neighbours = slots.chunk_by(|slot, next| slot + 1 == *next);
        for (first, count) in neighbours.map(|run| (run[0], run.len() as i32)) {
            let arrays = self.layers.iter_mut().flat_map(|layer| [&mut layer.keys, &mut layer.values]);
            for (array, prefix) in arrays.zip(&prefixes) {
                let [_, kv_heads, kept, head_dim] = *prefix.shape() else { continue };
                let rows = ops::broadcast_to(prefix, &[count, kv_heads, kept, head_dim])?;
                *array = ffi::slice_update(array, &rows, &[first, 0, 0, 0])?;
            }
        }
        Ok(())
    }

    /// Must be called before each step: drops what was shared by the layers of the step before.
    pub fn begin_step(&mut self) {
        self.masks.clear();
    }

    /// Stores the step's keys and values, and attends.
    ///
    /// `queries` (N, heads, 1, D), `keys` and `values` (N, kv_heads, 1, D); gives (N, heads × D).
    ///
    /// Whatever of the cache is read is read after all of it is written, where that can be: what reads a buffer holds it until it
    /// has run, and a write into a held buffer is a copy.
    pub fn attend(
        &mut self,
        layer: usize,
        queries: &Array,
        keys: &Array,
        values: &Array,
        scale: f32,
        step: &Step,
    ) -> Result<Array, EngineError> {
        let heads = queries.dim(1);
        let LayerLayout { kv_heads, head_dim, window } = self.layouts[layer];
        let mut chunks = Vec::with_capacity(step.places.chunks.len());
        let mut first = 0;
        for chunk in &step.places.chunks {
            // (L, heads, 1, D) -> (1, heads, L, D)
            let rows = |array: &Array, heads: i32| -> Result<Array, EngineError> {
                let own = if chunk.length == array.dim(0) {
                    array.clone()
                } else {
                    ffi::slice(array, &[first, 0, 0, 0], &[first + chunk.length, heads, 1, head_dim])?
                };
                Ok(own.transpose_axes(&[2, 1, 0, 3])?)
            };
            let past = self.past(layer, chunk)?;
            chunks.push(ChunkTensors {
                chunk: *chunk,
                queries: rows(queries, heads)?,
                keys: rows(keys, kv_heads)?,
                values: rows(values, kv_heads)?,
                past,
            });
            first += chunk.length;
        }
        first += step.padding;
        for tensors in &chunks {
            self.store_chunk(layer, tensors)?;
        }
        if let Some(rows) = step.decode() {
            self.store_rows(layer, &tail(keys, first)?, &tail(values, first)?, rows)?;
        }
        let mut attended = Vec::with_capacity(chunks.len() + 1);
        for tensors in &chunks {
            // (1, heads, L, D) -> (L, heads * D)
            let of_chunk = self.attend_chunk(layer, tensors, scale, window)?;
            attended.push(of_chunk.transpose_axes(&[0, 2, 1, 3])?.reshape(&[tensors.chunk.length, heads * head_dim])?);
        }
        if step.padding > 0 {
            attended.push(ops::zeros_dtype(&[step.padding, heads * head_dim], queries.dtype())?);
        }
        if let Some(rows) = step.decode() {
            attended.push(self.attend_rows(layer, &tail(queries, first)?, scale, rows)?);
        }
        if attended.len() == 1 { Ok(attended.remove(0)) } else { Ok(ops::concatenate(&attended, 0)?) }
    }

    /// What a chunk that leaves its window behind still sees of the ring, before the chunk overwrites it.
    fn past(&self, layer: usize, chunk: &Chunk) -> Result<Option<(Array, Array)>, EngineError> {
        let Some(window) = self.layouts[layer].window.filter(|&window| chunk.start + chunk.length > window) else {
            return Ok(None);
        };
        let tokens = chunk.start.min(window - 1);
        if tokens == 0 {
            return Ok(None);
        }
        let stored = &self.layers[layer];
        let ring = stored.keys.dim(2);
        let of = |array: &Array| -> Result<Array, EngineError> {
            let pieces = ring_slices(array, chunk.slot, chunk.start - tokens, tokens, ring)?;
            Ok(ops::concatenate(&pieces, 2)?)
        };
        Ok(Some((of(&stored.keys)?, of(&stored.values)?)))
    }

    fn store_chunk(&mut self, layer: usize, tensors: &ChunkTensors) -> Result<(), EngineError> {
        let Chunk { slot, start, length, .. } = tensors.chunk;
        let LayerLayout { kv_heads, head_dim, .. } = self.layouts[layer];
        let stored = &mut self.layers[layer];
        let ring = stored.keys.dim(2);
        // Of a chunk longer than the ring only its end stays.
        let end = start + length;
        let mut position = end - length.min(ring);
        while position < end {
            let at = position % ring;
            let count = (end - position).min(ring - at);
            let from = position - start;
            for (array, new) in [(&mut stored.keys, &tensors.keys), (&mut stored.values, &tensors.values)] {
                let piece = if count == length {
                    new.clone()
                } else {
                    ffi::slice(new, &[0, 0, from, 0], &[1, kv_heads, from + count, head_dim])?
                };
                *array = ffi::slice_update(array, &piece, &[slot, 0, at, 0])?;
            }
            position += count;
        }
        Ok(())
    }

    fn attend_chunk(&self, layer: usize, tensors: &ChunkTensors, scale: f32, window: Option<i32>) -> Result<Array, EngineError> {
        let ChunkTensors { chunk: Chunk { slot, start, length, .. }, queries, keys, values, past } = tensors;
        let (slot, start, length) = (*slot, *start, *length);
        let end = start + length;
        if let Some(window) = window.filter(|&window| end > window) {
            let past_tokens = past.as_ref().map_or(0, |(keys, _)| keys.dim(2));
            let mask = window_mask(start, length, past_tokens, window);
            let (keys, values) = match past {
                Some((past_keys, past_values)) => {
                    (ops::concatenate(&[past_keys, keys], 2)?, ops::concatenate(&[past_values, values], 2)?)
                }
                None => (keys.clone(), values.clone()),
            };
            return Ok(fast::scaled_dot_product_attention(queries, keys, values, scale, &mask, None)?);
        }
        let causal = (length > 1).then_some(fast::ScaledDotProductAttentionMask::Causal);
        if start == 0 {
            return Ok(fast::scaled_dot_product_attention(queries, keys, values, scale, causal, None)?);
        }
        let LayerLayout { kv_heads, head_dim, .. } = self.layouts[layer];
        let seen = |array: &Array| ffi::slice(array, &[slot, 0, 0, 0], &[slot + 1, kv_heads, end, head_dim]);
        let stored = &self.layers[layer];
        let (keys, values) = (seen(&stored.keys)?, seen(&stored.values)?);
        Ok(fast::scaled_dot_product_attention(queries, keys, values, scale, causal, None)?)
    }

    fn store_rows(&mut self, layer: usize, keys: &Array, values: &Array, rows: &DecodeRows) -> Result<(), EngineError> {
        let LayerLayout { kv_heads, head_dim, .. } = self.layouts[layer];
        let stored = &mut self.layers[layer];
        let ring = stored.keys.dim(2);
        let at =
            if rows.last_position < ring { rows.positions.clone() } else { rows.positions.remainder(Array::from_int(ring))? };
        for (array, new) in [(&mut stored.keys, keys), (&mut stored.values, values)] {
            // (B, kv_heads, 1, D) -> (B, 1, kv_heads, 1, D)
            let updates = new.reshape(&[rows.rows, 1, kv_heads, 1, head_dim])?;
            *array = ffi::scatter(array, &[&rows.slots, &at], &updates, &[0, 2])?;
        }
        Ok(())
    }

    fn attend_rows(&mut self, layer: usize, queries: &Array, scale: f32, rows: &DecodeRows) -> Result<Array, EngineError> {
        let LayerLayout { kv_heads, head_dim, .. } = self.layouts[layer];
        let heads = queries.dim(1);
        let stored = &self.layers[layer];
        let ring = stored.keys.dim(2);
        let needed = (rows.last_position + 1).min(ring);
        let seen = ((needed + self.key_step - 1) / self.key_step * self.key_step).min(ring);
        let span_of = |array: &Array| -> Result<Array, EngineError> {
            if array.dim(0) == rows.span && ring == seen {
                return Ok(array.clone());
            }
            ffi::slice(array, &[0; 4], &[rows.span, kv_heads, seen, head_dim])
        };
        let (all_keys, all_values) = (span_of(&stored.keys)?, span_of(&stored.values)?);
        // The queries that share a key head become its rows: (B, heads, 1, D) -> (B, kv_heads, heads / kv_heads, D)
        let mut queries = queries.reshape(&[rows.rows, kv_heads, heads / kv_heads, head_dim])?;
        if let Some(stand_ins) = &rows.stand_ins {
            queries = queries.take_axis(stand_ins, 0)?;
        }
        let attended = if rows.equal && seen == needed {
            fast::scaled_dot_product_attention(queries, all_keys, all_values, scale, None, None)?
        } else {
            let mask = mask_of(&mut self.masks, seen, &rows.span_positions)?;
            fast::scaled_dot_product_attention(queries, all_keys, all_values, scale, mask, None)?
        };
        let attended = if rows.stand_ins.is_some() { attended.take_axis(&rows.slots, 0)? } else { attended };
        Ok(attended.reshape(&[rows.rows, heads * head_dim])?)
    }
}

/// One chunk's part of a pass, (1, heads, L, D) each, and what it sees of a ring that it overwrites.
struct ChunkTensors {
    chunk: Chunk,
    queries: Array,
    keys: Array,
    values: Array,
    past: Option<(Array, Array)>,
}

/// `array` in another shape: what both hold is kept, the rest is zero.
fn resize(array: &mut Array, shape: &[i32; 4]) -> Result<(), EngineError> {
    let kept: Vec<i32> = array.shape().iter().zip(shape).map(|(&old, &new)| old.min(new)).collect();
    let mut resized = ops::zeros_dtype(shape, array.dtype())?;
    if kept.iter().all(|&extent| extent > 0) {
        resized = ffi::slice_update(&resized, &ffi::slice(array, &[0; 4], &kept)?, &[0; 4])?;
    }
    // What shrank is a view of the larger buffer, which would be kept with it, and which cannot be lent.
    let resized = resized.contiguous()?;
    resized.eval()?;
    *array = resized;
    Ok(())
}

/// The rows from `first` on.
fn tail(array: &Array, first: i32) -> Result<Array, EngineError> {
    if first == 0 {
        return Ok(array.clone());
    }
    let (heads, head_dim) = (array.dim(1), array.dim(3));
    ffi::slice(array, &[first, 0, 0, 0], &[array.dim(0), heads, 1, head_dim])
}

/// Keys up to each slot's own position, of `seen` stored ones: bool (span, 1, 1, seen). A full ring is all within the window.
fn mask_of<'a>(masks: &'a mut Vec<(i32, Array)>, seen: i32, positions: &Array) -> Result<&'a Array, EngineError> {
    let index = match masks.iter().position(|(length, _)| *length == seen) {
        Some(index) => index,
        None => {
            let stored: Vec<i32> = (0..seen).collect();
            masks.push((seen, Array::from_slice(&stored, &[1, 1, 1, seen]).le(positions)?));
            masks.len() - 1
        }
    };
    Ok(&masks[index].1)
}

/// `count` tokens from `position` on, in order, out of a ring: one piece, or two where it wraps.
fn ring_slices(array: &Array, slot: i32, position: i32, count: i32, ring: i32) -> Result<Vec<Array>, EngineError> {
    let (kv_heads, head_dim) = (array.dim(1), array.dim(3));
    let mut pieces = Vec::with_capacity(3);
    let (mut position, end) = (position, position + count);
    while position < end {
        let at = position % ring;
        let count = (end - position).min(ring - at);
        pieces.push(ffi::slice(array, &[slot, 0, at, 0], &[slot + 1, kv_heads, at + count, head_dim])?);
        position += count;
    }
    Ok(pieces)
}

/// bool (length, past + length): a query sees itself and the `window - 1` tokens before it.
fn window_mask(start: i32, length: i32, past: i32, window: i32) -> Array {
    let mut seen = Vec::with_capacity((length * (past + length)) as usize);
    for query in start..start + length {
        seen.extend((start - past..start + length).map(|key| key <= query && query - key < window));
    }
    Array::from_slice(&seen, &[length, past + length])
}
