//! Gemma 3, text: sliding and full layers with a rope each, norms before and after both halves of a layer, weights stored less 1.
//!
//! Sources: arXiv:2503.19786; transformers `modeling_gemma3.py`; mlx-lm `models/gemma3_text.py`.

use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::{
    Embedding, Linear, Model, RmsNorm,
    layers::{self, Activation, GatedMlp, Output},
    parse,
    rope::{Rope, RopeOptions},
    rope_theta,
};
use crate::engine::{
    EngineError,
    cache::{Cache, LayerLayout, Step},
    weights::{Loader, WeightError},
};

/// Defaults are mlx-lm's: checkpoints leave out what equals them.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct Config {
    pub hidden_size: i32,
    pub num_hidden_layers: usize,
    pub intermediate_size: i32,
    pub num_attention_heads: i32,
    pub head_dim: i32,
    pub rms_norm_eps: f32,
    pub vocab_size: i32,
    pub num_key_value_heads: i32,
    pub rope_theta: f64,
    pub rope_local_base_freq: f64,
    pub query_pre_attn_scalar: f32,
    pub sliding_window: i32,
    /// Every so many layers one is full.
    #[serde(alias = "_sliding_window_pattern")]
    pub sliding_window_pattern: usize,
    pub max_position_embeddings: i64,
    pub rope_scaling: Option<Value>,
    /// Transformers 5 nests base and scaling here, by kind of layer.
    pub rope_parameters: Option<Value>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            hidden_size: 1152,
            num_hidden_layers: 26,
            intermediate_size: 6912,
            num_attention_heads: 4,
            head_dim: 256,
            rms_norm_eps: 1e-6,
            vocab_size: 262_144,
            num_key_value_heads: 1,
            rope_theta: 1e6,
            rope_local_base_freq: 1e4,
            query_pre_attn_scalar: 256.0,
            sliding_window: 512,
            sliding_window_pattern: 6,
            max_position_embeddings: 32_768,
            rope_scaling: None,
            rope_parameters: None,
        }
    }
}

impl Config {
    fn is_full(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.sliding_window_pattern)
    }

    /// Base and scaling of a layer's rope.
    fn rope(&self, full: bool) -> (f64, Option<&Value>) {
        let nested = self.rope_parameters.as_ref();
        let nested = nested.and_then(|parameters| parameters.get(if full { "full_attention" } else { "sliding_attention" }));
        let base = if full { self.rope_theta } else { self.rope_local_base_freq };
        (rope_theta(None, nested).unwrap_or(base), nested.or(self.rope_scaling.as_ref().filter(|_| full)))
    }
}

pub struct Gemma3 {
    config: Config,
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    output: Output,
}

impl Model for Gemma3 {
    fn cache_layout(&self) -> Vec<LayerLayout> {
        let Config { num_key_value_heads: kv_heads, head_dim, sliding_window, .. } = self.config;
        let window = |layer| (!self.config.is_full(layer)).then_some(sliding_window);
        (0..self.layers.len()).map(|layer| LayerLayout { kv_heads, head_dim, window: window(layer) }).collect()
    }

    fn forward(&self, tokens: &Array, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let hidden = self.embed_tokens.forward(tokens)?;
        // The reference rounds this factor to bfloat16, whatever the model computes in.
        let factor = Array::from_f32((self.config.hidden_size as f32).sqrt()).as_dtype(Dtype::Bfloat16)?;
        let mut hidden = hidden.multiply(factor.as_dtype(hidden.dtype())?)?;
        for (index, layer) in self.layers.iter().enumerate() {
            hidden = layer.forward(&hidden, index, step, cache)?;
        }
        self.norm.forward(&hidden)
    }

    fn logits(&self, hidden: &Array) -> Result<Array, EngineError> {
        self.output.forward(&self.embed_tokens, hidden)
    }

    fn vocabulary(&self) -> u32 {
        self.config.vocab_size as u32
    }

    fn activation_bytes_per_token(&self, dtype_bytes: u64) -> u64 {
        let heads = (self.config.num_attention_heads + 2 * self.config.num_key_value_heads) * self.config.head_dim;
        dtype_bytes * (8 * self.config.hidden_size + 3 * self.config.intermediate_size + 3 * heads) as u64
    }

    fn attention_heads(&self) -> u32 {
        self.config.num_attention_heads as u32
    }

    fn shares_prefixes(&self) -> bool {
        !self.layers.iter().any(|layer| layer.attention.rope.depends_on_length())
    }
}

struct Layer {
    input_layernorm: RmsNorm,
    attention: Attention,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: GatedMlp,
    post_feedforward_layernorm: RmsNorm,
}

impl Layer {
    fn forward(&self, x: &Array, index: usize, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let attended = self.attention.forward(&self.input_layernorm.forward(x)?, index, step, cache)?;
        let hidden = add_clipped(x, &self.post_attention_layernorm.forward(&attended)?)?;
        let fed = self.mlp.forward(&self.pre_feedforward_layernorm.forward(&hidden)?)?;
        add_clipped(&hidden, &self.post_feedforward_layernorm.forward(&fed)?)
    }
}

/// A sum that stays finite in float16, whose range Gemma's activations leave.
fn add_clipped(x: &Array, y: &Array) -> Result<Array, EngineError> {
    if x.dtype() != Dtype::Float16 {
        return Ok(x.add(y)?);
    }
    let sum = x.as_dtype(Dtype::Float32)?.add(y.as_dtype(Dtype::Float32)?)?;
    Ok(mlx_rs::ops::clip(&sum, (-65_504.0, 65_504.0))?.as_dtype(Dtype::Float16)?)
}

struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    rope: Rope,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    scale: f32,
}

impl Attention {
    fn forward(&self, x: &Array, layer: usize, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let split = |projected: Array, heads: i32| layers::split_heads(&projected, heads, self.head_dim);
        let queries = self.q_norm.forward(&split(self.q_proj.forward(x)?, self.heads)?)?;
        let keys = self.k_norm.forward(&split(self.k_proj.forward(x)?, self.kv_heads)?)?;
        let queries = self.rope.forward(&queries, step)?;
        let keys = self.rope.forward(&keys, step)?;
        let values = split(self.v_proj.forward(x)?, self.kv_heads)?;
        self.o_proj.forward(&cache.attend(layer, &queries, &keys, &values, self.scale, step)?)
    }
}

pub fn load(config: &Value, mut loader: Loader) -> Result<Gemma3, WeightError> {
    let config: Config = parse(config)?;
    if config.sliding_window_pattern == 0 || config.sliding_window <= 0 {
        return Err(WeightError::Config("sliding_window and sliding_window_pattern must be at least 1".into()));
    }
    let (hidden, head_dim, eps) = (config.hidden_size, config.head_dim, config.rms_norm_eps);
    let (queries, keys) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
    let embed_tokens = loader.embedding("model.embed_tokens", config.vocab_size, hidden)?;
    let mut layers = Vec::with_capacity(config.num_hidden_layers);
    for index in 0..config.num_hidden_layers {
        let module = |name: &str| format!("model.layers.{index}.{name}");
        let (base, scaling) = config.rope(config.is_full(index));
        let rope = Rope::new(RopeOptions {
            head_dim,
            base,
            traditional: false,
            scaling,
            max_position_embeddings: Some(config.max_position_embeddings),
            factors: None,
        })
        .map_err(WeightError::Config)?;
        layers.push(Layer {
            input_layernorm: norm(&mut loader, &module("input_layernorm"), hidden, eps)?,
            attention: Attention {
                q_proj: loader.linear(&module("self_attn.q_proj"), hidden, queries, false)?,
                k_proj: loader.linear(&module("self_attn.k_proj"), hidden, keys, false)?,
                v_proj: loader.linear(&module("self_attn.v_proj"), hidden, keys, false)?,
                o_proj: loader.linear(&module("self_attn.o_proj"), queries, hidden, false)?,
                q_norm: norm(&mut loader, &module("self_attn.q_norm"), head_dim, eps)?,
                k_norm: norm(&mut loader, &module("self_attn.k_norm"), head_dim, eps)?,
                rope,
                heads: config.num_attention_heads,
                kv_heads: config.num_key_value_heads,
                head_dim,
                scale: config.query_pre_attn_scalar.powf(-0.5),
            },
            post_attention_layernorm: norm(&mut loader, &module("post_attention_layernorm"), hidden, eps)?,
            pre_feedforward_layernorm: norm(&mut loader, &module("pre_feedforward_layernorm"), hidden, eps)?,
            mlp: GatedMlp::load(&mut loader, &module("mlp"), hidden, config.intermediate_size, false, Activation::GeluTanh)?,
            post_feedforward_layernorm: norm(&mut loader, &module("post_feedforward_layernorm"), hidden, eps)?,
        });
    }
    let norm = norm(&mut loader, "model.norm", hidden, eps)?;
    let output = Output::load(&mut loader, None, hidden, config.vocab_size)?;
    loader.finish()?;
    Ok(Gemma3 { config, embed_tokens, layers, norm, output })
}

/// Adds the 1 that Gemma's checkpoints leave out.
fn norm(loader: &mut Loader, module: &str, size: i32, eps: f32) -> Result<RmsNorm, WeightError> {
    let stored = loader.rms_norm(module, size, eps)?;
    let weight = stored.weight.add(Array::from_f32(1.0).as_dtype(stored.weight.dtype())?)?;
    weight.eval()?;
    Ok(RmsNorm { weight, eps })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ropes_are_read_as_transformers_5_nests_them() {
        let nested = json!({
            "rope_parameters": {
                "full_attention": { "rope_type": "linear", "factor": 8.0, "rope_theta": 5e5 },
                "sliding_attention": { "rope_type": "default", "rope_theta": 2e4 },
            }
        });
        let config: Config = parse(&nested).unwrap();
        assert_eq!(config.rope(false).0, 2e4);
        let (base, scaling) = config.rope(true);
        assert_eq!((base, scaling.unwrap()["factor"].as_f64()), (5e5, Some(8.0)));
        let flat: Config = parse(&json!({ "rope_scaling": { "rope_type": "linear", "factor": 8.0 } })).unwrap();
        assert_eq!(flat.rope(false), (1e4, None));
        assert_eq!((flat.rope(true).0, flat.rope(true).1.is_some()), (1e6, true));
    }
}
