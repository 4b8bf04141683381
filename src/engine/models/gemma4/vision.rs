//! Gemma 4's vision tower: patches of images of any shape into soft tokens, a square of patches each.
//!
//! Sources: mlx-vlm `gemma4/vision.py`; transformers `modeling_gemma4.py`, which decides where they differ.

use mlx_rs::{
    Array, Dtype,
    fast::{self, ScaledDotProductAttentionMask},
    ops, transforms,
};
use serde::Deserialize;

use super::{
    super::{RmsNorm, SIZE_MAX, layers::gelu_tanh},
    clipped::ClippedLinear,
    tower::{Embedder, Pace, check_layers, check_size, rms_norm_float32},
};
use crate::{
    engine::{
        EngineError, device, ffi, host,
        models::Linear,
        weights::{Loader, WeightError},
    },
    schedule::EncodePrice,
};

/// Of the norms of queries, keys and values, whose configuration does not state it.
const HEAD_NORM_EPS: f32 = 1e-6;
pub(super) const CHANNELS: i32 = 3;
/// Patches of an image at most: four times what 1,120 soft tokens, the most that the reference's processor takes, have of them.
const PATCHES_MAX: i32 = 1 << 15;
/// Head sizes that the GPUs' own attention is made for; smaller ones are filled up with zeros.
const FUSED_HEAD_DIMS: [i32; 3] = [64, 80, 128];

/// `vision_config` of config.json; what it leaves out is as in the reference.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct VisionConfig {
    pub hidden_size: i32,
    pub intermediate_size: i32,
    pub num_hidden_layers: usize,
    pub num_attention_heads: i32,
    pub num_key_value_heads: i32,
    pub head_dim: i32,
    pub hidden_activation: String,
    pub rms_norm_eps: f32,
    pub attention_bias: Option<bool>,
    pub rope_parameters: Option<RopeParameters>,
    pub patch_size: i32,
    pub position_embedding_size: i32,
    pub pooling_kernel_size: i32,
    pub use_clipped_linears: bool,
    pub standardize: bool,
}

#[derive(Debug, Clone, Deserialize)]
pub struct RopeParameters {
    pub rope_theta: f32,
}

impl Default for VisionConfig {
    fn default() -> Self {
        Self {
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 16,
            num_attention_heads: 12,
            num_key_value_heads: 12,
            head_dim: 64,
            hidden_activation: "gelu_pytorch_tanh".into(),
            rms_norm_eps: 1e-6,
            attention_bias: None,
            rope_parameters: None,
            patch_size: 16,
            position_embedding_size: 10_240,
            pooling_kernel_size: 3,
            use_clipped_linears: false,
            standardize: false,
        }
    }
}

impl VisionConfig {
    /// What the arithmetic below relies on.
    pub fn check(&self) -> Result<(), WeightError> {
        let refuse = |problem: String| Err(WeightError::Config(problem));
        for (name, size) in [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("position_embedding_size", self.position_embedding_size),
        ] {
            check_size(&format!("vision_config.{name}"), size)?;
        }
        check_layers("vision_config.num_hidden_layers", self.num_hidden_layers)?;
        for (name, size, size_max) in [("patch_size", self.patch_size, 256), ("pooling_kernel_size", self.pooling_kernel_size, 64)]
        {
            if !(1..=size_max).contains(&size) {
                return refuse(format!("vision_config.{name} is {size}; it must be 1 to {size_max}"));
            }
        }
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if heads % kv_heads != 0 {
            return refuse(format!("vision_config has {heads} heads (num_attention_heads), which {kv_heads} keys do not divide"));
        }
        if heads.checked_mul(self.head_dim).is_none_or(|width| width > SIZE_MAX) {
            return refuse(format!("vision_config has {heads} heads of {} numbers (head_dim)", self.head_dim));
        }
        if self.head_dim % 4 != 0 {
            return refuse(format!(
                "vision_config.head_dim is {}; two axes turn pairs of its numbers, so 4 must divide it",
                self.head_dim
            ));
        }
        if self.hidden_activation != "gelu_pytorch_tanh" {
            return refuse(format!(
                "vision_config.hidden_activation '{}' is not yet supported ('gelu_pytorch_tanh' is)",
                self.hidden_activation
            ));
        }
        if self.attention_bias == Some(true) {
            return refuse("vision_config.attention_bias = true is not yet supported".into());
        }
        if !(self.rope_theta() > 1.0 && self.rope_theta().is_finite()) {
            return refuse(format!("vision_config.rope_parameters.rope_theta is {}; it must be above 1", self.rope_theta()));
        }
        Ok(())
    }

    /// Scratch of encoding an image, beside its soft tokens: by what its widest states take, or its scores. Numbers of states were
    /// counted on towers of the reference's sizes.
    pub fn encode_price(&self, device: Compute, dtype_bytes: u64) -> EncodePrice {
        let (hidden, middle) = (self.hidden_size as u64, self.intermediate_size as u64);
        let (heads, head_dim) = (self.num_attention_heads as u64, self.head_dim as u64);
        let of_heads = heads * head_dim;
        let pixels = (CHANNELS * self.patch_size * self.patch_size) as u64;
        // An MLP's, or queries, keys and values as they are turned; on the CPU in float32, whatever they come from.
        let (states, state_bytes) = match device {
            // Of half a layer and the half before it, and what is clipped.
            Compute::Gpu if self.use_clipped_linears => (6 * middle + 48 * of_heads, dtype_bytes),
            Compute::Gpu => (4 * middle + 32 * of_heads, dtype_bytes),
            Compute::Cpu | Compute::Host => ((4 * middle + 4 * hidden + head_dim).max(15 * of_heads + 3 * head_dim), 4),
        };
        let states = (states * state_bytes).max(2 * 4 * pixels + 4 * hidden * state_bytes);
        let (attention, pair) = match device {
            // A head at a time.
            Compute::Host => (4 * 8 * of_heads, 4),
            Compute::Cpu => (dtype_bytes * (14 * of_heads + head_dim), dtype_bytes * heads),
            // The GPU's own attention takes neither larger heads nor float32: scores are stored.
            Compute::Gpu if dtype_bytes == 4 || self.head_dim > FUSED_HEAD_DIMS[2] => (dtype_bytes * 27 * of_heads, 4 * heads),
            Compute::Gpu => (0, 0),
        };
        let patches_per_token = (self.pooling_kernel_size * self.pooling_kernel_size) as u64;
        EncodePrice {
            bytes_per_token: patches_per_token * states,
            attention_bytes_per_token: patches_per_token * attention,
            attention_bytes_per_pair: patches_per_token * patches_per_token * pair,
        }
    }

    fn rope_theta(&self) -> f32 {
        self.rope_parameters.as_ref().map_or(100.0, |rope| rope.rope_theta)
    }
}

/// An image cut into patches, row by row from the top left.
#[derive(Debug, Clone, Copy)]
pub struct ImagePatches<'a> {
    /// `rows` × `columns` patches of `patch_size` × `patch_size` × 3 numbers in 0 ..= 1, the color varying fastest.
    pub values: &'a [f32],
    /// Multiples of the pooling kernel, as the reference's processor resizes images.
    pub columns: i32,
    pub rows: i32,
}

impl ImagePatches<'_> {
    pub(super) fn patches(&self) -> i32 {
        self.columns * self.rows
    }

    /// Whether there are as many numbers as patches of this size have, squares of `kernel` patches, and no more than `limit` each
    /// way.
    pub(super) fn check(&self, patch_size: i32, kernel: i32, limit: i32) -> Result<(), EngineError> {
        let refuse = |problem: String| Err(EngineError::Mlx(format!("the model cannot see this image: {problem}")));
        let (columns, rows) = (self.columns, self.rows);
        if columns < 1 || rows < 1 || columns > limit || rows > limit {
            return refuse(format!("it has {columns} × {rows} patches, and the model knows 1 to {limit} each way"));
        }
        if columns % kernel != 0 || rows % kernel != 0 {
            return refuse(format!("its {columns} × {rows} patches do not divide into squares of {kernel} × {kernel}"));
        }
        let Some(patches) = columns.checked_mul(rows).filter(|patches| *patches <= PATCHES_MAX) else {
            return refuse(format!("it has {columns} × {rows} patches, {PATCHES_MAX} are possible"));
        };
        let numbers = patches as usize * (CHANNELS * patch_size * patch_size) as usize;
        if self.values.len() != numbers {
            return refuse(format!("{columns} × {rows} patches are {numbers} numbers, and it has {}", self.values.len()));
        }
        Ok(())
    }
}

pub struct VisionTower {
    config: VisionConfig,
    input_proj: Linear,
    /// (position_embedding_size, hidden) of columns, and of rows.
    positions: [Array; 2],
    layers: Vec<Layer>,
    /// Bias and scale of the soft tokens, (hidden) each.
    standard: Option<(Array, Array)>,
    embedder: Embedder,
    dtype: Dtype,
    device: Compute,
}

/// Who computes what is not a product, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compute {
    /// MLX on a GPU.
    Gpu,
    /// MLX on the CPU, an image and a head at a time.
    Cpu,
    /// [`host`]: float32 on the CPU.
    Host,
}

impl Compute {
    pub fn of(on_gpu: bool, float32: bool) -> Self {
        match (on_gpu, float32) {
            (true, _) => Self::Gpu,
            (false, true) => Self::Host,
            (false, false) => Self::Cpu,
        }
    }
}

impl VisionTower {
    /// Soft tokens that stand for an image: one for each square of patches.
    pub fn soft_tokens(&self, image: &ImagePatches<'_>) -> i32 {
        image.patches() / (self.config.pooling_kernel_size * self.config.pooling_kernel_size)
    }

    /// Images into soft tokens, one image's after the other's: (all soft tokens, text hidden), in the dtype of the weights. An
    /// image sees itself alone. On the CPU it is computed before this returns.
    pub fn encode(&self, images: &[ImagePatches<'_>]) -> Result<Array, EngineError> {
        for image in images {
            image.check(self.config.patch_size, self.config.pooling_kernel_size, self.config.position_embedding_size)?;
        }
        if images.is_empty() {
            return Err(EngineError::Mlx("the vision tower was given no image".into()));
        }
        let mut hidden = self.embed(images)?;
        let counts: Vec<i32> = images.iter().map(ImagePatches::patches).collect();
        let rope = self.rope(images)?;
        let mut pace = Pace::default();
        for layer in &self.layers {
            hidden = layer.forward(&hidden, &rope, &counts, self.device, &mut pace)?;
        }
        let tokens = self.embedder.forward(&self.pool(&hidden, images)?)?;
        if self.device != Compute::Gpu {
            tokens.eval()?;
        }
        Ok(tokens)
    }

    pub fn encode_price(&self, dtype_bytes: u64) -> EncodePrice {
        self.config.encode_price(self.device, dtype_bytes)
    }

    /// (all patches, hidden)
    fn embed(&self, images: &[ImagePatches<'_>]) -> Result<Array, EngineError> {
        let width = CHANNELS * self.config.patch_size * self.config.patch_size;
        let pixels: Vec<Array> = images.iter().map(|image| Array::from_slice(image.values, &[image.patches(), width])).collect();
        // 0 ..= 1 into -1 ..= 1
        let pixels = ops::concatenate(&pixels, 0)?.subtract(Array::from_f32(0.5))?.multiply(Array::from_f32(2.0))?;
        let patches = self.input_proj.forward(&pixels.as_dtype(self.dtype)?)?;
        let [columns, rows] = places(images);
        let [of_column, of_row] = &self.positions;
        Ok(patches.add(of_column.take_axis(columns, 0)?.add(of_row.take_axis(rows, 0)?)?)?)
    }

    /// Cosines and sines by which heads are turned, (all patches, 1, 2, head_dim / 4) each: for each patch by its column, then by
    /// its row.
    fn rope(&self, images: &[ImagePatches<'_>]) -> Result<(Array, Array), EngineError> {
        let quarter = self.config.head_dim / 4;
        let exponents = ops::arange::<_, f32>(None, quarter, None)?.multiply(Array::from_f32((1.0 / f64::from(quarter)) as f32))?;
        let timescales = ops::power(Array::from_f32(self.config.rope_theta()), exponents)?;
        let angles = places(images).map(|place| -> Result<Array, EngineError> {
            Ok(place.as_dtype(Dtype::Float32)?.reshape(&[-1, 1])?.divide(&timescales)?)
        });
        let [columns, rows] = angles;
        // (patches, quarter) twice -> (patches, 1, 2, quarter)
        let angles = ops::stack(&[columns?, rows?], 1)?.reshape(&[-1, 1, 2, quarter])?;
        Ok((ops::cos(&angles)?.as_dtype(self.dtype)?, ops::sin(&angles)?.as_dtype(self.dtype)?))
    }

    /// (all patches, hidden) -> (all soft tokens, hidden): means of squares, in float32, back in the tower's dtype at the end.
    fn pool(&self, hidden: &Array, images: &[ImagePatches<'_>]) -> Result<Array, EngineError> {
        let (kernel, width) = (self.config.pooling_kernel_size, self.config.hidden_size);
        let share = Array::from_f32(1.0 / (kernel * kernel) as f32);
        let mut pooled = Vec::with_capacity(images.len());
        let mut start = 0;
        for image in images {
            let own = ffi::slice(hidden, &[start, 0], &[start + image.patches(), width])?;
            start += image.patches();
            let own = own.as_dtype(Dtype::Float32)?.multiply(&share)?;
            // (rows × columns, hidden) -> (rows / k, k, columns / k, k, hidden)
            let squares = own.reshape(&[image.rows / kernel, kernel, image.columns / kernel, kernel, width])?;
            pooled.push(squares.sum_axes(&[1, 3], false)?.reshape(&[-1, width])?);
        }
        // What pooling gives is rounded, and neither scaling nor standardizing is.
        let pooled = ops::concatenate(&pooled, 0)?.as_dtype(self.dtype)?.as_dtype(Dtype::Float32)?;
        let mut tokens = pooled.multiply(Array::from_f32(f64::from(width).sqrt() as f32))?;
        if let Some((bias, scale)) = &self.standard {
            let (bias, scale) = (bias.as_dtype(Dtype::Float32)?, scale.as_dtype(Dtype::Float32)?);
            tokens = tokens.subtract(bias)?.multiply(scale)?;
        }
        Ok(tokens.as_dtype(self.dtype)?)
    }
}

/// Column and row of each patch of all images.
pub(super) fn places(images: &[ImagePatches<'_>]) -> [Array; 2] {
    let (mut columns, mut rows) = (Vec::new(), Vec::new());
    for image in images {
        for row in 0..image.rows {
            columns.extend(0..image.columns);
            rows.extend((0..image.columns).map(|_| row));
        }
    }
    [columns, rows].map(|places| Array::from_slice(&places, &[places.len() as i32]))
}

struct Layer {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: Mlp,
    post_feedforward_layernorm: RmsNorm,
}

impl Layer {
    fn forward(
        &self,
        x: &Array,
        rope: &(Array, Array),
        counts: &[i32],
        device: Compute,
        pace: &mut Pace,
    ) -> Result<Array, EngineError> {
        let attended = self.self_attn.forward(&self.input_layernorm.forward(x)?, rope, counts, device)?;
        let hidden = x.add(self.post_attention_layernorm.forward(&attended)?)?;
        if device == Compute::Gpu {
            pace.next(&hidden)?;
        }
        let fed = self.mlp.forward(&self.pre_feedforward_layernorm.forward(&hidden)?, device)?;
        let hidden = hidden.add(self.post_feedforward_layernorm.forward(&fed)?)?;
        // MLX keeps what a graph on the CPU has computed until all of it is.
        if device == Compute::Gpu {
            pace.next(&hidden)?
        } else {
            hidden.eval()?
        }
        Ok(hidden)
    }
}

struct Attention {
    q_proj: ClippedLinear,
    k_proj: ClippedLinear,
    v_proj: ClippedLinear,
    o_proj: ClippedLinear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
}

impl Attention {
    /// (all patches, hidden), of which each image has as many as `counts` says.
    fn forward(&self, x: &Array, rope: &(Array, Array), counts: &[i32], device: Compute) -> Result<Array, EngineError> {
        let patches = x.dim(0);
        let split = |projected: Array, heads: i32| projected.reshape(&[patches, heads, self.head_dim]);
        let queries = split(self.q_proj.forward(x)?, self.heads)?;
        let keys = split(self.k_proj.forward(x)?, self.kv_heads)?;
        let values = split(self.v_proj.forward(x)?, self.kv_heads)?;
        let queries = turn(&rms_norm_float32(&queries, Some(&self.q_norm.weight), self.q_norm.eps)?, rope)?;
        let keys = turn(&rms_norm_float32(&keys, Some(&self.k_norm.weight), self.k_norm.eps)?, rope)?;
        let values = rms_norm_float32(&values, None, HEAD_NORM_EPS)?;
        if device != Compute::Gpu {
            transforms::eval([&queries, &keys, &values])?;
        }
        let mut attended = Vec::new();
        let mut start = 0;
        // Images of one size that follow each other are one batch.
        for same in counts.chunk_by(|a, b| device == Compute::Gpu && a == b) {
            let (images, own) = (same.len() as i32, same[0]);
            let end = start + images * own;
            // (patches, heads, D) -> (images, heads, own patches, D)
            let part = |array: &Array, heads: i32| -> Result<Array, EngineError> {
                let part = ffi::slice(array, &[start, 0, 0], &[end, heads, self.head_dim])?;
                Ok(part.reshape(&[images, own, heads, self.head_dim])?.transpose_axes(&[0, 2, 1, 3])?)
            };
            let (queries, keys, values) = (part(&queries, self.heads)?, part(&keys, self.kv_heads)?, part(&values, self.kv_heads)?);
            let seen = match device {
                Compute::Gpu => self.attend_fused(&queries, &keys, &values)?,
                Compute::Cpu => fast::scaled_dot_product_attention(queries, keys, values, 1.0, None::<Mask<'_>>, None)?,
                Compute::Host => self.attend_on_host(&queries, &keys, &values)?,
            };
            // (images, heads, own patches, D) -> (patches, heads × D)
            let seen = seen.transpose_axes(&[0, 2, 1, 3])?.reshape(&[images * own, self.heads * self.head_dim])?;
            if device != Compute::Gpu {
                seen.eval()?;
            }
            attended.push(seen);
            start = end;
        }
        self.o_proj.forward(&ops::concatenate(&attended, 0)?)
    }

    fn attend_fused(&self, queries: &Array, keys: &Array, values: &Array) -> Result<Array, EngineError> {
        let head_dim = self.head_dim;
        let fused = FUSED_HEAD_DIMS.into_iter().find(|dim| head_dim <= *dim).unwrap_or(head_dim);
        let attend = |[queries, keys, values]: [&Array; 3]| {
            fast::scaled_dot_product_attention(queries, keys, values, 1.0, None::<Mask<'_>>, None)
        };
        if fused == head_dim {
            return Ok(attend([queries, keys, values])?);
        }
        let widen = |array: &Array| ops::pad(array, &[(0, 0), (0, 0), (0, 0), (0, fused - head_dim)][..], None, None);
        let seen = attend([&widen(queries)?, &widen(keys)?, &widen(values)?])?;
        ffi::slice(&seen, &[0, 0, 0, 0], &[seen.dim(0), seen.dim(1), seen.dim(2), head_dim])
    }

    /// One image's, a head at a time, so that the scores of no more than one are there at once.
    fn attend_on_host(&self, queries: &Array, keys: &Array, values: &Array) -> Result<Array, EngineError> {
        let patches = queries.dim(2);
        let own = |array: &Array, head: i32| -> Result<Array, EngineError> {
            let head = ffi::slice(array, &[0, head, 0, 0], &[1, head + 1, patches, self.head_dim])?;
            Ok(head.reshape(&[patches, self.head_dim])?)
        };
        let shared = self.heads / self.kv_heads;
        let mut heads = Vec::with_capacity(self.heads as usize);
        for head in 0..self.heads {
            let softmax = |scores: &mut [f32]| host::softmax_rows(scores, patches as usize);
            let weights = ffi::matmul_then(&own(queries, head)?, &own(keys, head / shared)?.transpose()?, softmax)?;
            let seen = weights.matmul(own(values, head / shared)?)?;
            seen.eval()?;
            heads.push(seen);
        }
        Ok(ops::stack(&heads, 0)?.reshape(&[1, self.heads, patches, self.head_dim])?)
    }
}

type Mask<'a> = ScaledDotProductAttentionMask<'a>;

/// Turns the first half of each head by its patch's column and the second by its row, pairs being half a half apart.
fn turn(x: &Array, (cosines, sines): &(Array, Array)) -> Result<Array, EngineError> {
    let (patches, heads, head_dim) = (x.dim(0), x.dim(1), x.dim(2));
    let quarter = head_dim / 4;
    // (patches, heads, D) -> (patches, heads, axis, first or second of a pair, quarter)
    let pairs = x.reshape(&[patches, heads, 2, 2, quarter])?;
    let one = |which: i32| -> Result<Array, EngineError> {
        let one = ffi::slice(&pairs, &[0, 0, 0, which, 0], &[patches, heads, 2, which + 1, quarter])?;
        Ok(one.reshape(&[patches, heads, 2, quarter])?)
    };
    let (first, second) = (one(0)?, one(1)?);
    let turned_first = first.multiply(cosines)?.subtract(second.multiply(sines)?)?;
    let turned_second = second.multiply(cosines)?.add(first.multiply(sines)?)?;
    Ok(ops::stack(&[turned_first, turned_second], 3)?.reshape(&[patches, heads, head_dim])?)
}

struct Mlp {
    gate_proj: ClippedLinear,
    up_proj: ClippedLinear,
    down_proj: ClippedLinear,
}

impl Mlp {
    fn forward(&self, x: &Array, device: Compute) -> Result<Array, EngineError> {
        let (gate, up) = (self.gate_proj.forward(x)?, self.up_proj.forward(x)?);
        if device == Compute::Host {
            let width = gate.dim(1);
            let mut both = ops::concatenate(&[gate, up], 1)?;
            host::gelu_tanh_gated(ffi::lend(&mut both)?, width as usize);
            return self.down_proj.forward(&ffi::slice(&both, &[0, 0], &[both.dim(0), width])?.contiguous()?);
        }
        self.down_proj.forward(&gelu_tanh(&gate)?.multiply(up)?)
    }
}

/// Takes `vision_tower.*` and `embed_vision.*`.
pub fn load(config: &VisionConfig, loader: &mut Loader, text_hidden: i32) -> Result<VisionTower, WeightError> {
    config.check()?;
    let tower = "vision_tower";
    let hidden = config.hidden_size;
    let patch = CHANNELS * config.patch_size * config.patch_size;
    let input_proj = loader.linear(&format!("{tower}.patch_embedder.input_proj"), patch, hidden, false)?;
    let size = config.position_embedding_size;
    let table = loader.tensor(&format!("{tower}.patch_embedder.position_embedding_table"), &[2, size, hidden])?;
    let axis = |axis: i32| -> Result<Array, WeightError> {
        let own = table.take_axis(Array::from_slice(&[axis], &[1]), 0)?.reshape(&[size, hidden])?;
        loader.settle(&own)?;
        Ok(own)
    };
    let positions = [axis(0)?, axis(1)?];
    let mut layers = Vec::new();
    for index in 0..config.num_hidden_layers {
        layers.push(layer(loader, &format!("{tower}.encoder.layers.{index}"), config)?);
    }
    let standard = match config.standardize {
        true => Some((
            loader.tensor(&format!("{tower}.std_bias"), &[hidden])?,
            loader.tensor(&format!("{tower}.std_scale"), &[hidden])?,
        )),
        false => None,
    };
    let embedder = Embedder::load(loader, "embed_vision", hidden, text_hidden, config.rms_norm_eps)?;
    let dtype = table.dtype();
    let device = Compute::of(!device::is_cpu()?, dtype == Dtype::Float32);
    Ok(VisionTower { config: config.clone(), input_proj, positions, layers, standard, embedder, dtype, device })
}

fn layer(loader: &mut Loader, module: &str, config: &VisionConfig) -> Result<Layer, WeightError> {
    let (hidden, middle, clipped) = (config.hidden_size, config.intermediate_size, config.use_clipped_linears);
    let (heads, kv_heads, head_dim) = (config.num_attention_heads, config.num_key_value_heads, config.head_dim);
    let mut linear =
        |name: &str, input: i32, output: i32| ClippedLinear::load(loader, &format!("{module}.{name}"), input, output, clipped);
    let q_proj = linear("self_attn.q_proj", hidden, heads * head_dim)?;
    let k_proj = linear("self_attn.k_proj", hidden, kv_heads * head_dim)?;
    let v_proj = linear("self_attn.v_proj", hidden, kv_heads * head_dim)?;
    let o_proj = linear("self_attn.o_proj", heads * head_dim, hidden)?;
    let gate_proj = linear("mlp.gate_proj", hidden, middle)?;
    let up_proj = linear("mlp.up_proj", hidden, middle)?;
    let down_proj = linear("mlp.down_proj", middle, hidden)?;
    let mut norm = |name: &str, size: i32, eps: f32| loader.rms_norm(&format!("{module}.{name}"), size, eps);
    let q_norm = norm("self_attn.q_norm", head_dim, HEAD_NORM_EPS)?;
    let k_norm = norm("self_attn.k_norm", head_dim, HEAD_NORM_EPS)?;
    Ok(Layer {
        input_layernorm: norm("input_layernorm", hidden, config.rms_norm_eps)?,
        self_attn: Attention { q_proj, k_proj, v_proj, o_proj, q_norm, k_norm, heads, kv_heads, head_dim },
        post_attention_layernorm: norm("post_attention_layernorm", hidden, config.rms_norm_eps)?,
        pre_feedforward_layernorm: norm("pre_feedforward_layernorm", hidden, config.rms_norm_eps)?,
        mlp: Mlp { gate_proj, up_proj, down_proj },
        post_feedforward_layernorm: norm("post_feedforward_layernorm", hidden, config.rms_norm_eps)?,
    })
}
