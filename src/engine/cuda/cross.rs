//! What the decoder of a model with an encoder takes beside the kernels of every decoder: attention over an encoded input, which is
//! stored by slot, and sums with the norm behind them in one operation.

use mlx_rs::{Array, Dtype};

use super::{Geometry, blocks_of};
use crate::engine::{
    EngineError,
    cache::{Cache, Step},
    ffi::{self, CudaKernel, Launch},
};

/// Threads that normalize a row.
const NORM_THREADS: i32 = 128;
/// Numbers of a row that a thread keeps in registers at most.
const NORM_EACH_MAX: i32 = 32;

/// See the [module](self).
pub struct CrossKernels {
    attend_cross: CudaKernel,
    store_cross: CudaKernel,
    add_and_norm: CudaKernel,
    gelu: CudaKernel,
    geometry: Geometry,
}

impl CrossKernels {
    /// `width` is that of hidden states, `epsilon` the norms'. None where the kernels do not fit.
    pub fn new(geometry: Geometry, width: i32, epsilon: f32) -> Result<Option<Self>, EngineError> {
        if !geometry.is_supported() || width > NORM_THREADS * NORM_EACH_MAX || !ffi::cuda_available() {
            return Ok(None);
        }
        let settings = geometry.settings()
            + &format!("constexpr int WIDTH = {width}, THREADS = {NORM_THREADS};\nconstexpr float EPSILON = {epsilon:e}f;\n");
        let header = settings.clone() + include_str!("attention.cuh");
        let kernel = CudaKernel::new;
        Ok(Some(Self {
            attend_cross: kernel(
                "attend_cross",
                &[c"queries", c"places", c"constants", c"keys", c"values"],
                &[c"out"],
                include_str!("attend_cross.cu"),
                &header,
            )?,
            store_cross: kernel(
                "store_cross",
                &[c"encoded", c"slots", c"keys", c"values"],
                &[c"done"],
                include_str!("store_cross.cu"),
                &settings,
            )?,
            add_and_norm: kernel(
                "add_and_norm",
                &[c"x", c"y", c"weight", c"bias"],
                &[c"total", c"normed"],
                include_str!("add_and_norm.cu"),
                &settings,
            )?,
            gelu: kernel("gelu", &[c"x"], &[c"out"], include_str!("gelu.cu"), &settings)?,
            geometry,
        }))
    }

    /// (N, 2) int32: slot and position of every token of a step; of what pads it, the first slot.
    pub fn places(step: &Step) -> Array {
        let of_chunks = step.places().chunks.iter();
        let mut places: Vec<i32> = of_chunks
            .flat_map(|chunk| (chunk.start..chunk.start + chunk.length).flat_map(|position| [chunk.slot, position]))
            .collect();
        places.extend(std::iter::repeat_n(0, 2 * step.padding() as usize));
        places.extend(step.places().rows.iter().flat_map(|&(slot, position)| [slot as i32, position as i32]));
        Array::from_slice(&places, &[places.len() as i32 / 2, 2])
    }

    /// Attends over all that is stored for each token's slot: queries (N, heads × D) -> (N, heads × D). `scale` is (1) float32.
    pub fn attend(
        &self,
        layer: usize,
        queries: &Array,
        scale: &Array,
        cache: &Cache,
        places: &Array,
    ) -> Result<Array, EngineError> {
        let Geometry { heads, kv_heads, head_dim, dtype, .. } = self.geometry;
        let (keys, values) = cache.cross_layer(layer)?;
        let tokens = places.dim(0);
        let launch = Launch { blocks: [kv_heads, tokens, 1], threads: self.geometry.warps() * 32 };
        let out = (&[tokens, heads * head_dim][..], dtype);
        Ok(self.attend_cross.apply(&[queries, places, scale, keys, values], &[out], launch)?.remove(0))
    }

    /// Stores keys and values of a layer in place: encoded (inputs × tokens, 2 × kv_heads × D), keys first; slots (inputs) int32.
    /// Gives what must be evaluated for that.
    pub fn store(&self, layer: usize, encoded: &Array, slots: &Array, cache: &Cache) -> Result<Array, EngineError> {
        let (keys, values) = cache.cross_layer(layer)?;
        let launch = blocks_of(i64::from(encoded.dim(0)) * i64::from(encoded.dim(1)) / 8)?;
        Ok(self.store_cross.apply(&[encoded, slots, keys, values], &[(&[1], Dtype::Int32)], launch)?.remove(0))
    }

    /// `x + y`, and that normalized: (N, width) each.
    pub fn add_and_norm(&self, x: &Array, y: &Array, weight: &Array, bias: &Array) -> Result<(Array, Array), EngineError> {
        let (shape, dtype) = (x.shape(), self.geometry.dtype);
        let launch = Launch { blocks: [x.dim(0), 1, 1], threads: NORM_THREADS };
        let mut out = self.add_and_norm.apply(&[x, y, weight, bias], &[(shape, dtype), (shape, dtype)], launch)?;
        let total = out.remove(0);
        Ok((total, out.remove(0)))
    }

    /// (N, a multiple of 8) -> the same
    pub fn gelu(&self, x: &Array) -> Result<Array, EngineError> {
        let launch = blocks_of(i64::from(x.dim(0)) * i64::from(x.dim(1)) / 8)?;
        Ok(self.gelu.apply(&[x], &[(x.shape(), self.geometry.dtype)], launch)?.remove(0))
    }
}
