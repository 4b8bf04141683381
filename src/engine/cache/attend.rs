//! Attention over the cache: chunks of prompts and decoding rows, in layers with keys of their own and in layers that look up
//! another's.

use mlx_rs::{Array, fast, ops};

use super::{
    Cache, Chunk, LayerLayout,
    step::{DecodeRows, Step},
};
use crate::engine::{EngineError, ffi};

impl Cache {
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
        let chunks = self.store(layer, keys, values, step)?;
        self.attend_stored(layer, queries, &chunks, scale, step)
    }

    /// [`Cache::attend`] in a layer whose keys and values others attend to as well, later in the same pass.
    pub fn attend_and_keep(
        &mut self,
        layer: usize,
        queries: &Array,
        keys: &Array,
        values: &Array,
        scale: f32,
        step: &Step,
    ) -> Result<Array, EngineError> {
        let chunks = self.store(layer, keys, values, step)?;
        let attended = self.attend_stored(layer, queries, &chunks, scale, step)?;
        self.kept.retain(|(other, _)| *other != layer);
        self.kept.push((layer, chunks));
        Ok(attended)
    }

    /// Attends to what [`Cache::attend_and_keep`] has stored for `layer` in this pass and before; stores nothing.
    ///
    /// `queries` (N, heads, 1, D); gives (N, heads × D).
    pub fn attend_kept(&mut self, layer: usize, queries: &Array, scale: f32, step: &Step) -> Result<Array, EngineError> {
        let Some(index) = self.kept.iter().position(|(kept, _)| *kept == layer) else {
            return Err(EngineError::Mlx(format!("layer {layer} of the cache has kept nothing in this pass")));
        };
        let (_, chunks) = self.kept.swap_remove(index);
        let attended = self.attend_stored(layer, queries, &chunks, scale, step);
        self.kept.push((layer, chunks));
        attended
    }

    /// Lets go of what [`Cache::attend_and_keep`] kept.
    pub fn end_pass(&mut self) {
        self.kept.clear();
    }

    fn store(&mut self, layer: usize, keys: &Array, values: &Array, step: &Step) -> Result<Vec<ChunkKeys>, EngineError> {
        let mut chunks = Vec::with_capacity(step.places().chunks.len());
        let mut first = 0;
        for chunk in &step.places().chunks {
            let (own_keys, own_values) = (chunk_of(keys, first, chunk.length)?, chunk_of(values, first, chunk.length)?);
            chunks.push(ChunkKeys { chunk: *chunk, keys: own_keys, values: own_values, past: self.past(layer, chunk)? });
            first += chunk.length;
        }
        first += step.padding();
        for tensors in &chunks {
            self.store_chunk(layer, tensors)?;
        }
        if let Some(rows) = step.decode() {
            self.store_rows(layer, &tail(keys, first)?, &tail(values, first)?, rows)?;
        }
        Ok(chunks)
    }

    fn attend_stored(
        &mut self,
        layer: usize,
        queries: &Array,
        chunks: &[ChunkKeys],
        scale: f32,
        step: &Step,
    ) -> Result<Array, EngineError> {
        let (heads, head_dim) = (queries.dim(1), queries.dim(3));
        let mut attended = Vec::with_capacity(chunks.len() + 1);
        let mut first = 0;
        for (index, tensors) in chunks.iter().enumerate() {
            let length = tensors.chunk.length;
            let own = chunk_of(queries, first, length)?;
            // (1, heads, L, D) -> (L, heads * D)
            let of_chunk = self.attend_chunk(layer, index, &own, tensors, scale, step)?;
            attended.push(of_chunk.transpose_axes(&[0, 2, 1, 3])?.reshape(&[length, heads * head_dim])?);
            first += length;
        }
        if step.padding() > 0 {
            attended.push(ops::zeros_dtype(&[step.padding(), heads * head_dim], queries.dtype())?);
        }
        first += step.padding();
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

    fn store_chunk(&mut self, layer: usize, tensors: &ChunkKeys) -> Result<(), EngineError> {
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

    fn attend_chunk(
        &mut self,
        layer: usize,
        index: usize,
        queries: &Array,
        tensors: &ChunkKeys,
        scale: f32,
        step: &Step,
    ) -> Result<Array, EngineError> {
        let ChunkKeys { chunk: Chunk { slot, start, length, .. }, keys, values, past } = tensors;
        let (slot, start, length) = (*slot, *start, *length);
        let end = start + length;
        let LayerLayout { kv_heads, head_dim, window } = self.layouts[layer];
        let attend = |keys: &Array, values: &Array, mask: Option<&Array>| match mask {
            Some(mask) => fast::scaled_dot_product_attention(queries, keys, values, scale, mask, None),
            None => {
                let causal = (length > 1).then_some(fast::ScaledDotProductAttentionMask::Causal);
                fast::scaled_dot_product_attention(queries, keys, values, scale, causal, None)
            }
        };
        if let Some(window) = window.filter(|&window| end > window) {
            let mask = self.window_mask(index, window, past.as_ref().map_or(0, |(keys, _)| keys.dim(2)), step);
            return Ok(match past {
                Some((past_keys, past_values)) => {
                    let keys = ops::concatenate(&[past_keys, keys], 2)?;
                    attend(&keys, &ops::concatenate(&[past_values, values], 2)?, Some(&mask))?
                }
                None => attend(keys, values, Some(&mask))?,
            });
        }
        let mask = match window {
            Some(window) if step.spans_of(index).next().is_some() => Some(self.window_mask(index, window, start, step)),
            _ => None,
        };
        if start == 0 {
            return Ok(attend(keys, values, mask.as_ref())?);
        }
        let seen = |array: &Array| ffi::slice(array, &[slot, 0, 0, 0], &[slot + 1, kv_heads, end, head_dim]);
        let stored = &self.layers[layer];
        Ok(attend(&seen(&stored.keys)?, &seen(&stored.values)?, mask.as_ref())?)
    }

    /// bool (length, past + length) of chunk `index`: a query sees itself, the `window - 1` tokens before it, and what stands
    /// behind it in its span. Layers with the same window share it.
    fn window_mask(&mut self, index: usize, window: i32, past: i32, step: &Step) -> Array {
        if let Some((_, mask)) = self.chunk_masks.iter().find(|(of, _)| *of == (index, window)) {
            return mask.clone();
        }
        let Chunk { start, length, .. } = step.places().chunks[index];
        let mut seen = Vec::with_capacity((length * (past + length)) as usize);
        for query in start..start + length {
            // The last that it sees.
            let span = step.spans_of(index).find(|(first, end)| (*first..*end).contains(&query));
            let last = span.map_or(query, |(_, end)| end - 1);
            seen.extend((start - past..start + length).map(|key| key <= last && query - key < window));
        }
        let mask = Array::from_slice(&seen, &[length, past + length]);
        self.chunk_masks.push(((index, window), mask.clone()));
        mask
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

/// One chunk's keys and values, (1, kv_heads, L, D) each, and what it sees of a ring that it overwrites.
pub(super) struct ChunkKeys {
    chunk: Chunk,
    keys: Array,
    values: Array,
    past: Option<(Array, Array)>,
}

/// The `length` rows from `first` on: (N, heads, 1, D) -> (1, heads, L, D)
fn chunk_of(array: &Array, first: i32, length: i32) -> Result<Array, EngineError> {
    let (heads, head_dim) = (array.dim(1), array.dim(3));
    let own = if length == array.dim(0) {
        array.clone()
    } else {
        ffi::slice(array, &[first, 0, 0, 0], &[first + length, heads, 1, head_dim])?
    };
    Ok(own.transpose_axes(&[2, 1, 0, 3])?)
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
