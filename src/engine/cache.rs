//! Keys and values, in slots.
//!
//! A layer's keys (and values) are one array of `(slots, kv_heads, slot_tokens, head_dim)`. A sequence keeps one slot from its
//! admission to its end and its positions start at 0, so that joining and leaving copy nothing. A layer with a sliding window keeps
//! a ring of `min(window, slot_tokens)` tokens: position p lies at `p % ring`. Rope is applied before a key is stored, so the order
//! within a ring does not matter.

use mlx_rs::{Array, Dtype, fast, ops};

use super::{EngineError, ffi};

/// What one layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerLayout {
    pub kv_heads: i32,
    pub head_dim: i32,
    /// Tokens that a query sees at most, itself included.
    pub window: Option<i32>,
}

/// Where the tokens of one forward pass stand.
pub enum Step {
    /// One sequence's tokens at positions `start .. start + length`, of a prompt of `prompt_tokens`.
    Prefill { slot: i32, start: i32, length: i32, prompt_tokens: i32 },
    /// One token each of several sequences.
    Decode(DecodeRows),
}

/// The rows of a decode step; shared by all layers.
pub struct DecodeRows {
    /// (rows) int32 each.
    slots: Array,
    positions: Array,
    rows: i32,
    /// Slots `0 .. span` hold all rows.
    span: i32,
    last_position: i32,
    /// Set where the rows are not exactly the slots `0 .. rows`: for each slot of the span, a row to stand in for it.
    stand_ins: Option<Array>,
    /// Positions by slot of the span, `(span, 1, 1, 1)`; none where all are equal and no mask is needed.
    span_positions: Option<Array>,
}

impl DecodeRows {
    /// `rows` are (slot, position) in ascending order of slots.
    pub fn new(rows: &[(u32, u32)]) -> Self {
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
        Self {
            slots: Array::from_slice(&slots, &[count]),
            positions: Array::from_slice(&positions, &[count]),
            rows: count,
            span,
            last_position,
            stand_ins,
            span_positions: (!equal).then(|| Array::from_slice(&by_slot, &[span, 1, 1, 1])),
        }
    }

    pub fn positions(&self) -> &Array {
        &self.positions
    }

    pub fn last_position(&self) -> i32 {
        self.last_position
    }

    pub fn slots(&self) -> &Array {
        &self.slots
    }
}

impl Step {
    /// (sequences, tokens of each) of this pass: the first two extents of its activations' heads layout.
    pub fn extents(&self) -> (i32, i32) {
        match self {
            Self::Prefill { length, .. } => (1, *length),
            Self::Decode(rows) => (rows.rows, 1),
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
    /// Masks of the decode step under way, by key length: layers of one kind share one.
    masks: Vec<(i32, Array)>,
}

struct Layer {
    keys: Array,
    values: Array,
}

impl Cache {
    pub fn new(layouts: Vec<LayerLayout>, dtype: Dtype) -> Result<Self, EngineError> {
        let layers = layouts
            .iter()
            .map(|layout| {
                let shape = [0, layout.kv_heads, 0, layout.head_dim];
                Ok(Layer { keys: ops::zeros_dtype(&shape, dtype)?, values: ops::zeros_dtype(&shape, dtype)? })
            })
            .collect::<Result<_, EngineError>>()?;
        Ok(Self { layouts, layers, dtype, slots: 0, slot_tokens: 0, masks: Vec::new() })
    }

    pub fn layout(&self) -> (i32, i32) {
        (self.slots, self.slot_tokens)
    }

    /// Every array that the cache holds, for evaluation.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.layers.iter().flat_map(|layer| [&layer.keys, &layer.values])
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
                let kept: Vec<i32> = array.shape().iter().zip(shape).map(|(&old, new)| old.min(new)).collect();
                let mut resized = ops::zeros_dtype(&shape, self.dtype)?;
                if kept.iter().all(|&extent| extent > 0) {
                    resized = ffi::slice_update(&resized, &ffi::slice(array, &[0; 4], &kept)?, &[0; 4])?;
                }
                resized.eval()?;
                *array = resized;
            }
        }
        (self.slots, self.slot_tokens) = (slots, slot_tokens);
        Ok(())
    }

    /// Must be called before each step: drops what was shared by the layers of the step before.
    pub fn begin_step(&mut self) {
        self.masks.clear();
    }

    /// Stores the step's keys and values, and attends.
    ///
    /// `queries` (B, heads, L, D), `keys` and `values` (B, kv_heads, L, D), with B and L as [`Step::extents`] says; gives
    /// (B × L, heads × D).
    pub fn attend(
        &mut self,
        layer: usize,
        queries: &Array,
        keys: &Array,
        values: &Array,
        scale: f32,
        step: &Step,
    ) -> Result<Array, EngineError> {
        match step {
            Step::Prefill { slot, start, length, .. } => self.prefill(layer, queries, keys, values, scale, *slot, *start, *length),
            Step::Decode(rows) => self.decode(layer, queries, keys, values, scale, rows),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "three tensors and where they stand")]
    fn prefill(
        &mut self,
        layer: usize,
        queries: &Array,
        keys: &Array,
        values: &Array,
        scale: f32,
        slot: i32,
        start: i32,
        length: i32,
    ) -> Result<Array, EngineError> {
        let LayerLayout { kv_heads, head_dim, window } = self.layouts[layer];
        let stored = &mut self.layers[layer];
        let ring = stored.keys.dim(2);
        let end = start + length;
        let whole = window.is_none_or(|window| end <= window);
        let causal = (length > 1).then_some(fast::ScaledDotProductAttentionMask::Causal);
        let attended = if start == 0 && whole {
            // Nothing cached is read, so nothing holds the cache's buffer when it is written.
            fast::scaled_dot_product_attention(queries, keys, values, scale, causal, None)?
        } else if whole {
            let past = |array: &Array| ffi::slice(array, &[slot, 0, 0, 0], &[slot + 1, kv_heads, start, head_dim]);
            let keys = ops::concatenate(&[&past(&stored.keys)?, keys], 2)?;
            let values = ops::concatenate(&[&past(&stored.values)?, values], 2)?;
            fast::scaled_dot_product_attention(queries, keys, values, scale, causal, None)?
        } else {
            #[expect(clippy::expect_used, reason = "`whole` is true without a window")]
            let window = window.expect("a layer without a window is always whole");
            let past_tokens = start.min(window - 1);
            let past = |array: &Array, new: &Array| -> Result<Array, EngineError> {
                let mut pieces = ring_slices(array, slot, start - past_tokens, past_tokens, ring)?;
                pieces.push(new.clone());
                Ok(ops::concatenate(&pieces, 2)?)
            };
            let (keys, values) = (past(&stored.keys, keys)?, past(&stored.values, values)?);
            let mask = window_mask(start, length, past_tokens, window);
            fast::scaled_dot_product_attention(queries, keys, values, scale, &mask, None)?
        };
        // Of a chunk longer than the ring only its end stays.
        let kept = length.min(ring);
        let mut position = end - kept;
        while position < end {
            let at = position % ring;
            let count = (end - position).min(ring - at);
            let from = position - start;
            for (array, new) in [(&mut stored.keys, keys), (&mut stored.values, values)] {
                let piece = if count == length {
                    new.clone()
                } else {
                    ffi::slice(new, &[0, 0, from, 0], &[1, kv_heads, from + count, head_dim])?
                };
                *array = ffi::slice_update(array, &piece, &[slot, 0, at, 0])?;
            }
            position += count;
        }
        // (1, heads, L, D) -> (L, heads * D)
        let heads = queries.dim(1);
        Ok(attended.transpose_axes(&[0, 2, 1, 3])?.reshape(&[length, heads * head_dim])?)
    }

    fn decode(
        &mut self,
        layer: usize,
        queries: &Array,
        keys: &Array,
        values: &Array,
        scale: f32,
        rows: &DecodeRows,
    ) -> Result<Array, EngineError> {
        let LayerLayout { kv_heads, head_dim, .. } = self.layouts[layer];
        let heads = queries.dim(1);
        let stored = &mut self.layers[layer];
        let ring = stored.keys.dim(2);
        let at =
            if rows.last_position < ring { rows.positions.clone() } else { rows.positions.remainder(Array::from_int(ring))? };
        for (array, new) in [(&mut stored.keys, keys), (&mut stored.values, values)] {
            // (B, kv_heads, 1, D) -> (B, 1, kv_heads, 1, D)
            let updates = new.reshape(&[rows.rows, 1, kv_heads, 1, head_dim])?;
            *array = ffi::scatter(array, &[&rows.slots, &at], &updates, &[0, 2])?;
        }
        let seen = (rows.last_position + 1).min(ring);
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
        let attended = match &rows.span_positions {
            Some(positions) => {
                let mask = mask_of(&mut self.masks, seen, positions)?;
                fast::scaled_dot_product_attention(queries, all_keys, all_values, scale, mask, None)?
            }
            None => fast::scaled_dot_product_attention(queries, all_keys, all_values, scale, None, None)?,
        };
        let attended = if rows.stand_ins.is_some() { attended.take_axis(&rows.slots, 0)? } else { attended };
        Ok(attended.reshape(&[rows.rows, heads * head_dim])?)
    }
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
