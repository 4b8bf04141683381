//! The decoder that llama, Qwen and Gemma's text models share. A family's file says which options make it that family.
//!
//! Sources: arXiv:2302.13971; transformers `modeling_{llama,qwen2,qwen3,gemma3}.py`; the files of the same names in mlx-lm.

mod fused;
#[cfg(test)]
mod fused_tests;

use mlx_rs::{Array, Dtype, ops};

use fused::Fused;

use super::{
    Embedding, Linear, Model, RmsNorm, Scratch,
    host_decoder::HostDecoder,
    layers::{self, Activation, GateUp, GatedMlp, Output},
    rope::{Rope, RopeOptions},
};
use crate::engine::{
    EngineError,
    cache::{Cache, LayerLayout, Step},
    ffi,
    weights::{Loader, WeightError},
};

/// What makes a decoder one of a family. Sizes are in numbers.
pub struct DecoderOptions<'a> {
    pub hidden_size: i32,
    pub intermediate_size: i32,
    pub vocab_size: i32,
    pub heads: i32,
    pub kv_heads: i32,
    pub head_dim: i32,
    pub rms_norm_eps: f32,
    /// What norms add to their stored weights: Gemma's checkpoints leave out 1.
    pub norm_offset: f32,
    /// On what the embedding gives.
    pub embedding_scale: Option<f32>,
    /// Of the products that give queries, keys and values, and of the one behind attention.
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    /// Heads of queries and keys are normalized.
    pub qk_norm: bool,
    /// Norms behind attention and behind the feed-forward half too, before each is added.
    pub sandwich_norms: bool,
    pub activation: Activation,
    /// On the scores of attention.
    pub attention_scale: f32,
    /// Whether the embedding is the output matrix too; the file decides where the configuration does not.
    pub tied: Option<bool>,
    pub layers: Vec<LayerOptions<'a>>,
}

pub struct LayerOptions<'a> {
    pub rope: RopeOptions<'a>,
    /// Tokens that a query sees at most.
    pub window: Option<i32>,
}

pub struct Decoder {
    pub(super) embed_tokens: Embedding,
    embedding_scale: Option<f32>,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: RmsNorm,
    pub(super) output: Output,
    hidden_size: i32,
    pub(super) intermediate_size: i32,
    vocab_size: i32,
    /// Where the device has kernels for this model.
    fused: Option<Fused>,
}

pub(super) struct Layer {
    pub(super) input_norm: RmsNorm,
    pub(super) attention: Attention,
    pub(super) post_attention_norm: Option<RmsNorm>,
    pub(super) feedforward_norm: RmsNorm,
    pub(super) mlp: GatedMlp,
    pub(super) post_feedforward_norm: Option<RmsNorm>,
}

pub(super) struct Attention {
    pub(super) qkv: Qkv,
    pub(super) o_proj: Linear,
    pub(super) q_norm: Option<RmsNorm>,
    pub(super) k_norm: Option<RmsNorm>,
    pub(super) rope: Rope,
    pub(super) heads: i32,
    pub(super) kv_heads: i32,
    pub(super) head_dim: i32,
    pub(super) scale: f32,
    pub(super) window: Option<i32>,
}

/// The products that give queries, keys and values: one where a device gains from fewer and wider ones.
pub(super) enum Qkv {
    Merged(Linear),
    Separate { q_proj: Linear, k_proj: Linear, v_proj: Linear },
}

impl Decoder {
    /// In the form that suits the device.
    pub fn load(options: DecoderOptions<'_>, mut loader: Loader) -> Result<Box<dyn Model>, WeightError> {
        let decoder = Self::build(options, &mut loader)?;
        if !loader.on_host() {
            return Ok(Box::new(decoder));
        }
        Ok(match HostDecoder::new(decoder).map_err(|error| WeightError::Mlx(error.to_string()))? {
            Ok(on_host) => Box::new(on_host),
            Err(decoder) => decoder,
        })
    }

    fn build(options: DecoderOptions<'_>, loader: &mut Loader) -> Result<Self, WeightError> {
        let DecoderOptions { hidden_size: hidden, heads, kv_heads, head_dim, .. } = options;
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        let norm = |loader: &mut Loader, module: &str, size: i32| -> Result<RmsNorm, WeightError> {
            let stored = loader.rms_norm(module, size, options.rms_norm_eps)?;
            if options.norm_offset == 0.0 {
                return Ok(stored);
            }
            let weight = stored.weight.add(Array::from_f32(options.norm_offset).as_dtype(stored.weight.dtype())?)?;
            loader.settle(&weight)?;
            Ok(RmsNorm { weight, ..stored })
        };
        let embed_tokens = loader.embedding("model.embed_tokens", options.vocab_size, hidden)?;
        let mut layers = Vec::with_capacity(options.layers.len());
        for (index, LayerOptions { rope, window }) in options.layers.into_iter().enumerate() {
            let module = |name: &str| format!("model.layers.{index}.{name}");
            let rope = Rope::new(rope).map_err(WeightError::Config)?;
            let input_norm = norm(loader, &module("input_layernorm"), hidden)?;
            let q_proj = loader.linear(&module("self_attn.q_proj"), hidden, queries, options.qkv_bias)?;
            let k_proj = loader.linear(&module("self_attn.k_proj"), hidden, keys, options.qkv_bias)?;
            let v_proj = loader.linear(&module("self_attn.v_proj"), hidden, keys, options.qkv_bias)?;
            let qkv = match loader.merges().then(|| Linear::merged(&[&q_proj, &k_proj, &v_proj])).transpose()?.flatten() {
                Some(merged) => Qkv::Merged(merged),
                None => Qkv::Separate { q_proj, k_proj, v_proj },
            };
            let of_heads =
                |loader: &mut Loader, name: &str| options.qk_norm.then(|| norm(loader, &module(name), head_dim)).transpose();
            let attention = Attention {
                qkv,
                o_proj: loader.linear(&module("self_attn.o_proj"), queries, hidden, options.output_bias)?,
                q_norm: of_heads(loader, "self_attn.q_norm")?,
                k_norm: of_heads(loader, "self_attn.k_norm")?,
                rope,
                heads,
                kv_heads,
                head_dim,
                scale: options.attention_scale,
                window,
            };
            // Where there is no norm behind attention, `post_attention_layernorm` is the one before the feed-forward half.
            let after_attention = norm(loader, &module("post_attention_layernorm"), hidden)?;
            let (post_attention_norm, feedforward_norm) = if options.sandwich_norms {
                (Some(after_attention), norm(loader, &module("pre_feedforward_layernorm"), hidden)?)
            } else {
                (None, after_attention)
            };
            let (intermediate, bias) = (options.intermediate_size, options.mlp_bias);
            layers.push(Layer {
                input_norm,
                attention,
                post_attention_norm,
                feedforward_norm,
                mlp: GatedMlp::load(loader, &module("mlp"), hidden, intermediate, bias, options.activation)?,
                post_feedforward_norm: match options.sandwich_norms {
                    true => Some(norm(loader, &module("post_feedforward_layernorm"), hidden)?),
                    false => None,
                },
            });
        }
        let norm = norm(loader, "model.norm", hidden)?;
        let output = Output::load(loader, options.tied, hidden, options.vocab_size)?;
        loader.finish()?;
        let mut decoder = Self {
            embed_tokens,
            embedding_scale: options.embedding_scale,
            layers,
            norm,
            output,
            hidden_size: hidden,
            intermediate_size: options.intermediate_size,
            vocab_size: options.vocab_size,
            fused: None,
        };
        if loader.merges() {
            decoder.fused = Fused::new(&decoder, options.activation).map_err(|error| WeightError::Mlx(error.to_string()))?;
        }
        Ok(decoder)
    }

    /// The reference rounds this factor to bfloat16, whatever the model computes in.
    pub(super) fn embedding_scale(&self) -> Result<Option<f32>, EngineError> {
        let Some(scale) = self.embedding_scale else { return Ok(None) };
        let rounded = Array::from_f32(scale).as_dtype(Dtype::Bfloat16)?.as_dtype(Dtype::Float32)?;
        Ok(ffi::numbers(&rounded)?.first().copied())
    }
}

impl Model for Decoder {
    fn cache_layout(&self) -> Vec<LayerLayout> {
        self.layers.iter().map(|Layer { attention: own, .. }| own.layout()).collect()
    }

    fn forward(&self, tokens: &Array, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let mut hidden = self.embed_tokens.forward(tokens)?;
        if let Some(scale) = self.embedding_scale {
            // The reference rounds this factor to bfloat16, whatever the model computes in.
            let scale = Array::from_f32(scale).as_dtype(Dtype::Bfloat16)?;
            hidden = hidden.multiply(scale.as_dtype(hidden.dtype())?)?;
        }
        if let Some(fused) = &self.fused
            && let Some(hidden) = fused.forward(self, &hidden, step, cache)?
        {
            return self.norm.forward(&hidden);
        }
        for (index, layer) in self.layers.iter().enumerate() {
            hidden = layer.forward(&hidden, index, step, cache)?;
        }
        self.norm.forward(&hidden)
    }

    fn logits(&self, hidden: &Array) -> Result<Array, EngineError> {
        self.output.forward(&self.embed_tokens, hidden)
    }

    fn vocabulary(&self) -> u32 {
        self.vocab_size as u32
    }

    fn scratch(&self, dtype_bytes: u64) -> Scratch {
        let (queries, keys) = self
            .layers
            .first()
            .map_or((0, 0), |Layer { attention: own, .. }| (own.heads * own.head_dim, own.kv_heads * own.head_dim));
        if let Some(fused) = &self.fused {
            let (hidden, intermediate) = (self.hidden_size, self.intermediate_size);
            let windows = self.layers.iter().any(|layer| layer.attention.window.is_some());
            let sizes = [hidden, queries, keys, intermediate].map(|size| size as u64 * dtype_bytes);
            return fused.scratch(sizes, self.layers.len(), windows);
        }
        let numbers = 8 * self.hidden_size + 3 * self.intermediate_size + 3 * (queries + 2 * keys);
        Scratch {
            prefill_bytes_per_token: dtype_bytes * numbers as u64,
            // Scores and their softmax.
            prefill_bytes_per_pair: self.layers.first().map_or(0, |layer| layer.attention.heads as u64) * 4 * 2,
            bytes_per_slot: 0,
            decode_bytes_per_slot: 0,
        }
    }

    fn copy_prefix(&self, cache: &mut Cache, from: i32, slots: &[i32], tokens: i32) -> Result<(), EngineError> {
        match &self.fused {
            Some(fused) => fused.copy_prefix(cache, from, slots, tokens),
            None => cache.copy_prefix(from, slots, tokens),
        }
    }

    fn shares_prefixes(&self) -> bool {
        !self.layers.iter().any(|layer| layer.attention.rope.depends_on_length())
    }

    fn pads(&self) -> bool {
        self.fused.is_some()
    }
}

impl Layer {
    /// Whether every weight is packed for the CPU's cores.
    pub(super) fn on_host(&self) -> bool {
        let packed = |linears: &[&Linear]| linears.iter().all(|linear| matches!(linear, Linear::Host { .. }));
        let qkv = match &self.attention.qkv {
            Qkv::Merged(linear) => packed(&[linear]),
            Qkv::Separate { q_proj, k_proj, v_proj } => packed(&[q_proj, k_proj, v_proj]),
        };
        let gate_up = match &self.mlp.gate_up {
            GateUp::Merged { gate_up_proj, .. } => packed(&[gate_up_proj]),
            GateUp::Separate { gate_proj, up_proj } => packed(&[gate_proj, up_proj]),
        };
        qkv && gate_up && packed(&[&self.attention.o_proj, &self.mlp.down_proj])
    }

    fn forward(&self, x: &Array, index: usize, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let attended = self.attention.forward(&self.input_norm.forward(x)?, index, step, cache)?;
        let hidden = add_normed(x, attended, self.post_attention_norm.as_ref())?;
        let fed = self.mlp.forward(&self.feedforward_norm.forward(&hidden)?)?;
        add_normed(&hidden, fed, self.post_feedforward_norm.as_ref())
    }
}

/// `x + y`, or `x + norm(y)`.
fn add_normed(x: &Array, y: Array, norm: Option<&RmsNorm>) -> Result<Array, EngineError> {
    let Some(norm) = norm else { return Ok(x.add(y)?) };
    let y = norm.forward(&y)?;
    if x.dtype() != Dtype::Float16 {
        return Ok(x.add(y)?);
    }
    // A sum that stays finite in float16, whose range Gemma's activations leave.
    let sum = x.as_dtype(Dtype::Float32)?.add(y.as_dtype(Dtype::Float32)?)?;
    Ok(ops::clip(&sum, (-65_504.0, 65_504.0))?.as_dtype(Dtype::Float16)?)
}

impl Attention {
    fn layout(&self) -> LayerLayout {
        LayerLayout { kv_heads: self.kv_heads, head_dim: self.head_dim, window: self.window }
    }

    /// (N, hidden) -> (N, hidden)
    fn forward(&self, x: &Array, layer: usize, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let (queries, keys, values) = self.qkv.forward(x, self.heads, self.kv_heads, self.head_dim)?;
        let rotate = |heads: Array, norm: Option<&RmsNorm>| match norm {
            Some(norm) => self.rope.forward(&norm.forward(&heads)?, step),
            None => self.rope.forward(&heads, step),
        };
        let queries = rotate(queries, self.q_norm.as_ref())?;
        let keys = rotate(keys, self.k_norm.as_ref())?;
        self.o_proj.forward(&cache.attend(layer, &queries, &keys, &values, self.scale, step)?)
    }
}

impl Qkv {
    /// (N, hidden) -> queries (N, heads, 1, D), keys and values (N, kv_heads, 1, D).
    fn forward(&self, x: &Array, heads: i32, kv_heads: i32, head_dim: i32) -> Result<(Array, Array, Array), EngineError> {
        let split = |projected: &Array, heads: i32| layers::split_heads(projected, heads, head_dim);
        match self {
            Self::Separate { q_proj, k_proj, v_proj } => Ok((
                split(&q_proj.forward(x)?, heads)?,
                split(&k_proj.forward(x)?, kv_heads)?,
                split(&v_proj.forward(x)?, kv_heads)?,
            )),
            Self::Merged(qkv_proj) => {
                let projected = split(&qkv_proj.forward(x)?, heads + 2 * kv_heads)?;
                let part = |first: i32, count: i32| {
                    ffi::slice(&projected, &[0, first, 0, 0], &[projected.dim(0), first + count, 1, head_dim])
                };
                Ok((part(0, heads)?, part(heads, kv_heads)?, part(heads + kv_heads, kv_heads)?))
            }
        }
    }
}
