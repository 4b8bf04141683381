//! Kernels of our own for CUDA, where MLX's operations leave most of a decode step's time unused: attention over rows of
//! different lengths without a mask, with the rope and the write into the cache in the same kernel, and a gated feed-forward's
//! middle. Measured in docs/benchmarks.md; the plain operations stay as the reference (`MlxOptions::plain`).
//!
//! **Writing in place.** MLX's arrays do not change once computed, and its custom kernels have no output that is also an
//! input. These kernels write into the cache's buffers, which they are given as inputs. That is sound because
//! - one stream computes everything, and whatever reads a position of a slot was either launched by a later step than what wrote it
//!   (steps are evaluated one by one, in order) or takes an output of the kernel that wrote it;
//! - a slot changes hands only when every step that computes its former row has been collected;
//! - MLX copies no array of the cache meanwhile: the cache holds them, and changes of layout wait for the last step.

mod cross;

use mlx_rs::{Array, Dtype, ops};

pub use cross::CrossKernels;

use super::{
    EngineError,
    cache::{Cache, Step},
    ffi::{self, CudaKernel, Launch},
};

/// Keys that one block of a decode step attends to; rows with more have several, and their parts are added up.
const SPLIT: i32 = 1024;
/// Shared memory, in float32 numbers, that the warps of a block add up in.
const SHARED_NUMBERS_MAX: i32 = 10_240;
/// A tensor product has 16 query rows.
const PRODUCT_ROWS: i32 = 16;
const CHUNK_WARPS: i32 = 4;

/// What kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    pub heads: i32,
    pub kv_heads: i32,
    pub head_dim: i32,
    pub dtype: Dtype,
    /// Rope turns neighbours, rather than halves, into each other.
    pub traditional: bool,
    /// Heads of queries and keys are normalized.
    pub normed: bool,
}

impl Geometry {
    fn is_supported(&self) -> bool {
        matches!(self.dtype, Dtype::Bfloat16 | Dtype::Float16)
            && self.heads % self.kv_heads == 0
            && self.heads / self.kv_heads <= PRODUCT_ROWS
            && self.head_dim % 64 == 0
            && self.head_dim <= 256
    }

    /// Warps of a block that attends together.
    fn warps(&self) -> i32 {
        (SHARED_NUMBERS_MAX / (self.heads / self.kv_heads * self.head_dim)).clamp(1, 8)
    }

    /// What stands before the kernels' sources.
    fn settings(&self) -> String {
        let Self { heads, kv_heads, head_dim, dtype, traditional, normed } = *self;
        let bfloat16 = dtype == Dtype::Bfloat16;
        let element = if bfloat16 { "__nv_bfloat16" } else { "__half" };
        format!(
            "using T = {element};\n\
             constexpr bool BFLOAT16 = {bfloat16}, TRADITIONAL = {traditional}, NORMED = {normed};\n\
             constexpr int HEADS = {heads}, KV_HEADS = {kv_heads}, HEAD_DIM = {head_dim};\n\
             constexpr int SPLIT = {SPLIT}, WARPS = {};\n",
            self.warps()
        )
    }
}

/// A thread for each of `threads`.
fn blocks_of(threads: i64) -> Result<Launch, EngineError> {
    const THREADS: i64 = 256;
    let blocks = (threads + THREADS - 1) / THREADS;
    if i32::try_from(blocks * THREADS).is_err() {
        return Err(EngineError::Mlx(format!("{threads} threads are more than one launch takes; take fewer rows at once")));
    }
    Ok(Launch { blocks: [blocks as i32, 1, 1], threads: THREADS as i32 })
}

/// A layer's own part in the kernels.
pub struct Rotary {
    /// float32: inverse frequencies (head_dim / 2), the factor on the input, the norm's epsilon, the scale of scores.
    constants: Array,
    /// (head_dim) each; of any size where heads are not normalized.
    q_norm: Array,
    k_norm: Array,
}

impl Rotary {
    pub fn new(
        inverse_frequencies: &[f32],
        factor: f32,
        attention_scale: f32,
        norms: Option<(&Array, &Array, f32)>,
        dtype: Dtype,
    ) -> Result<Self, EngineError> {
        let mut constants = inverse_frequencies.to_vec();
        constants.extend([factor, norms.map_or(0.0, |norms| norms.2), attention_scale]);
        let constants = Array::from_slice(&constants, &[constants.len() as i32]);
        let (q_norm, k_norm) = match norms {
            Some((q_norm, k_norm, _)) => (q_norm.as_dtype(dtype)?, k_norm.as_dtype(dtype)?),
            None => (ops::zeros_dtype(&[1], dtype)?, ops::zeros_dtype(&[1], dtype)?),
        };
        mlx_rs::transforms::eval([&constants, &q_norm, &k_norm])?;
        Ok(Self { constants, q_norm, k_norm })
    }
}

/// See the [module](self).
pub struct Kernels {
    rotate_and_store: CudaKernel,
    attend_chunks: CudaKernel,
    attend_rows: CudaKernel,
    gate: CudaKernel,
    copy_prefix: CudaKernel,
    geometry: Geometry,
    intermediate: i32,
}

/// Where a step's tokens go, for all layers.
pub struct Places {
    /// Of prompt tokens: (tokens, 2) int32, slot and position; (tiles, 4) int32 as `attend_chunks` takes them.
    chunks: Option<(Array, Array)>,
    /// Of decoding rows: (rows, 2) int32.
    rows: Option<Array>,
    chunk_tokens: i32,
    padding: i32,
    row_count: i32,
    last_position: i32,
}

impl Kernels {
    /// None where they do not fit: another device, another number format, heads of another form.
    pub fn new(geometry: Geometry, intermediate: i32, gelu: bool) -> Result<Option<Self>, EngineError> {
        if !geometry.is_supported() || intermediate % 8 != 0 || !ffi::cuda_available() {
            return Ok(None);
        }
        let settings =
            geometry.settings() + &format!("constexpr bool GELU = {gelu};\nconstexpr int INTERMEDIATE = {intermediate};\n");
        let header = settings.clone() + include_str!("attention.cuh");
        let kernel = CudaKernel::new;
        Ok(Some(Self {
            rotate_and_store: kernel(
                "rotate_and_store",
                &[c"qkv", c"places", c"constants", c"q_norm", c"k_norm", c"keys", c"values"],
                &[c"out"],
                include_str!("rotate_and_store.cu"),
                &header,
            )?,
            attend_chunks: kernel(
                "attend_chunks",
                &[c"queries", c"tiles", c"constants", c"keys", c"values"],
                &[c"out"],
                include_str!("attend_chunks.cu"),
                &header,
            )?,
            attend_rows: kernel(
                "attend_rows",
                &[c"qkv", c"places", c"constants", c"q_norm", c"k_norm", c"keys", c"values", c"counters"],
                &[c"out", c"parts"],
                include_str!("attend_rows.cu"),
                &header,
            )?,
            copy_prefix: kernel(
                "copy_prefix",
                &[c"keys", c"values", c"slots"],
                &[c"done"],
                include_str!("copy_prefix.cu"),
                &settings,
            )?,
            gate: kernel("gate", &[c"gate_up"], &[c"out"], include_str!("gate.cu"), &settings)?,
            geometry,
            intermediate,
        }))
    }

    pub fn heads(&self) -> u64 {
        self.geometry.heads as u64
    }

    pub fn dtype(&self) -> Dtype {
        self.geometry.dtype
    }

    pub fn places(&self, step: &Step) -> Places {
        let padding = step.padding();
        let mut places = Places { chunks: None, rows: None, chunk_tokens: 0, padding, row_count: 0, last_position: 0 };
        let (mut of_tokens, mut tiles) = (Vec::new(), Vec::new());
        let tile_tokens = CHUNK_WARPS * (PRODUCT_ROWS * self.geometry.kv_heads / self.geometry.heads);
        for chunk in &step.places().chunks {
            let first = places.chunk_tokens;
            of_tokens.extend((chunk.start..chunk.start + chunk.length).flat_map(|position| [chunk.slot, position]));
            tiles.extend(
                (0..chunk.length)
                    .step_by(tile_tokens as usize)
                    .flat_map(|done| [first + done, tile_tokens.min(chunk.length - done), chunk.slot, chunk.start + done]),
            );
            places.chunk_tokens += chunk.length;
        }
        if places.chunk_tokens > 0 {
            let of_tokens = Array::from_slice(&of_tokens, &[places.chunk_tokens, 2]);
            places.chunks = Some((of_tokens, Array::from_slice(&tiles, &[tiles.len() as i32 / 4, 4])));
        }
        let rows: Vec<i32> = step.places().rows.iter().flat_map(|&(slot, position)| [slot as i32, position as i32]).collect();
        if !rows.is_empty() {
            places.row_count = rows.len() as i32 / 2;
            places.last_position = step.places().rows.iter().map(|row| row.1 as i32).max().unwrap_or(0);
            places.rows = Some(Array::from_slice(&rows, &[places.row_count, 2]));
        }
        places
    }

    /// Stores the step's keys and values, and attends: qkv (N, (heads + 2 kv_heads) × D) -> (N, heads × D).
    ///
    /// No chunk may reach beyond its layer's window.
    pub fn attend(&self, layer: usize, qkv: &Array, rotary: &Rotary, cache: &Cache, places: &Places) -> Result<Array, EngineError> {
        let Geometry { heads, kv_heads, head_dim, dtype, .. } = self.geometry;
        let (keys, values) = cache.layer(layer);
        let width = heads * head_dim;
        let Rotary { constants, q_norm, k_norm } = rotary;
        let mut attended = Vec::with_capacity(2);
        if let Some((of_tokens, tiles)) = &places.chunks {
            let warps = places.chunk_tokens * (heads + 2 * kv_heads);
            // What pads a step stays as the buffer was: nobody looks at it.
            let tokens = places.chunk_tokens + places.padding;
            let queries = self.rotate_and_store.apply(
                &[qkv, of_tokens, constants, q_norm, k_norm, keys, values],
                &[(&[tokens, width], dtype)],
                Launch { blocks: [(warps + 7) / 8, 1, 1], threads: 256 },
            )?;
            attended.extend(self.attend_chunks.apply(
                &[&queries[0], tiles, constants, keys, values],
                &[(&[tokens, width], dtype)],
                Launch { blocks: [kv_heads, tiles.dim(0), 1], threads: CHUNK_WARPS * 32 },
            )?);
        }
        if places.chunks.is_none() && places.padding > 0 {
            attended.push(ops::zeros_dtype(&[places.padding, width], dtype)?);
        }
        if let Some(of_rows) = &places.rows {
            let rows = places.row_count;
            let stored = (places.last_position + 1).min(keys.dim(2));
            let splits = (stored + SPLIT - 1) / SPLIT;
            let parts = [if splits > 1 { rows * kv_heads * splits * (heads / kv_heads) * (head_dim + 2) } else { 1 }];
            let out = self.attend_rows.apply(
                &[qkv, of_rows, constants, q_norm, k_norm, keys, values, cache.counters()],
                &[(&[rows, width], dtype), (&parts, Dtype::Float32)],
                Launch { blocks: [kv_heads, rows, splits], threads: self.geometry.warps() * 32 },
            )?;
            attended.extend(out.into_iter().next());
        }
        if attended.len() == 1 { Ok(attended.remove(0)) } else { Ok(ops::concatenate(&attended, 0)?) }
    }

    /// Copies positions `0 .. tokens` of the slot `from` to `slots`, of a ring all where it has gone round. Gives what must be
    /// evaluated for that.
    pub fn copy_prefix(&self, cache: &Cache, layer: usize, from: i32, slots: &[i32], tokens: i32) -> Result<Array, EngineError> {
        const THREADS: i32 = 256;
        let (keys, values) = cache.layer(layer);
        let kept = tokens.min(keys.dim(2));
        let mut numbers = vec![from, kept];
        numbers.extend(slots);
        let numbers = Array::from_slice(&numbers, &[numbers.len() as i32]);
        let eights = kept * self.geometry.head_dim / 8;
        let launch =
            Launch { blocks: [(eights + THREADS - 1) / THREADS, self.geometry.kv_heads, slots.len() as i32], threads: THREADS };
        Ok(self.copy_prefix.apply(&[keys, values, &numbers], &[(&[1], Dtype::Int32)], launch)?.remove(0))
    }

    /// (N, 2 × intermediate), gates and then ups -> (N, intermediate)
    pub fn gate(&self, gate_up: &Array) -> Result<Array, EngineError> {
        let rows = gate_up.dim(0);
        let launch = blocks_of(i64::from(rows) * i64::from(self.intermediate / 8))?;
        Ok(self.gate.apply(&[gate_up], &[(&[rows, self.intermediate], self.geometry.dtype)], launch)?.remove(0))
    }
}
