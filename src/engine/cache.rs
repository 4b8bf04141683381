//! Keys and values, in slots.
//!
//! A layer's keys (and values) are one array of `(slots, kv_heads, slot_tokens, head_dim)`. A sequence keeps one slot from its
//! admission to its end and its positions start at 0, so that joining and leaving copy nothing. A layer with a sliding window keeps
//! a ring of `min(window, slot_tokens)` tokens: position p lies at `p % ring`. Rope is applied before a key is stored, so the order
//! within a ring does not matter. What a decoder sees of an encoder's output is kept beside it, by the same slots: [`cross`].
//! Where a pass's tokens stand is a [`Step`]; how they attend is in [`attend`].

mod attend;
mod cross;
mod step;

use mlx_rs::{Array, Dtype, ops, transforms};

pub use cross::CrossLayout;
pub use step::{Chunk, Places, SoftTokens, Span, Step};

use super::{EngineError, ffi};
use attend::ChunkKeys;
use cross::CrossCache;

/// What one layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerLayout {
    pub kv_heads: i32,
    pub head_dim: i32,
    /// Tokens that a query sees at most, itself included.
    pub window: Option<i32>,
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
    /// Those of the pass's chunks, by index and window.
    chunk_masks: Vec<((usize, i32), Array)>,
    /// What the pass has stored of layers that others look up, by layer.
    kept: Vec<(usize, Vec<ChunkKeys>)>,
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
        let (masks, chunk_masks, kept) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { layouts, layers, dtype, slots: 0, slot_tokens: 0, key_step, counters, masks, chunk_masks, kept, cross: None })
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
        self.chunk_masks.clear();
        self.kept.clear();
    }
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
