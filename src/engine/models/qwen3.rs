//! Qwen3, dense: llama with the heads of q and k normalized.
//!
//! Sources: arXiv:2505.09388; transformers `modeling_qwen3.py`; mlx-lm `models/qwen3.py`.

use mlx_rs::Array;
use serde::Deserialize;
use serde_json::Value;

use super::{
    Embedding, Linear, Model, RmsNorm,
    layers::{self, Activation, GatedMlp, Output},
    parse, refuse_window,
    rope::{Rope, RopeOptions},
    rope_theta,
};
use crate::engine::{
    EngineError,
    cache::{Cache, LayerLayout, Step},
    weights::{Loader, WeightError},
};

#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    pub hidden_size: i32,
    pub num_hidden_layers: usize,
    pub intermediate_size: i32,
    pub num_attention_heads: i32,
    pub num_key_value_heads: Option<i32>,
    pub head_dim: Option<i32>,
    pub rms_norm_eps: f32,
    pub vocab_size: i32,
    pub max_position_embeddings: Option<i64>,
    pub rope_theta: Option<f64>,
    pub rope_scaling: Option<Value>,
    pub rope_parameters: Option<Value>,
    /// Absent means tied, as mlx-lm has it, unless the file holds an output matrix.
    pub tie_word_embeddings: Option<bool>,
    #[serde(default)]
    pub use_sliding_window: bool,
}

pub struct Qwen3 {
    config: Config,
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    output: Output,
}

impl Model for Qwen3 {
    fn cache_layout(&self) -> Vec<LayerLayout> {
        let (kv_heads, head_dim) = (self.config.kv_heads(), self.config.head_dim());
        vec![LayerLayout { kv_heads, head_dim, window: None }; self.layers.len()]
    }

    fn forward(&self, tokens: &Array, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let mut hidden = self.embed_tokens.forward(tokens)?;
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
        let heads = (self.config.num_attention_heads + 2 * self.config.kv_heads()) * self.config.head_dim();
        dtype_bytes * (6 * self.config.hidden_size + 3 * self.config.intermediate_size + 2 * heads) as u64
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
    mlp: GatedMlp,
}

impl Layer {
    fn forward(&self, x: &Array, index: usize, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let hidden = x.add(self.attention.forward(&self.input_layernorm.forward(x)?, index, step, cache)?)?;
        Ok(hidden.add(self.mlp.forward(&self.post_attention_layernorm.forward(&hidden)?)?)?)
    }
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
}

impl Attention {
    fn forward(&self, x: &Array, layer: usize, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let split = |projected: Array, heads: i32| layers::split_heads(&projected, heads, self.head_dim);
        let queries = self.q_norm.forward(&split(self.q_proj.forward(x)?, self.heads)?)?;
        let keys = self.k_norm.forward(&split(self.k_proj.forward(x)?, self.kv_heads)?)?;
        let queries = self.rope.forward(&queries, step)?;
        let keys = self.rope.forward(&keys, step)?;
        let values = split(self.v_proj.forward(x)?, self.kv_heads)?;
        let scale = (self.head_dim as f32).powf(-0.5);
        self.o_proj.forward(&cache.attend(layer, &queries, &keys, &values, scale, step)?)
    }
}

impl Config {
    fn kv_heads(&self) -> i32 {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    fn head_dim(&self) -> i32 {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }
}

pub fn load(config: &Value, mut loader: Loader) -> Result<Qwen3, WeightError> {
    let config: Config = parse(config)?;
    refuse_window(config.use_sliding_window)?;
    let (hidden, head_dim) = (config.hidden_size, config.head_dim());
    let (queries, keys) = (config.num_attention_heads * head_dim, config.kv_heads() * head_dim);
    let embed_tokens = loader.embedding("model.embed_tokens", config.vocab_size, hidden)?;
    let mut layers = Vec::with_capacity(config.num_hidden_layers);
    for index in 0..config.num_hidden_layers {
        let module = |name: &str| format!("model.layers.{index}.{name}");
        let rope = Rope::new(RopeOptions {
            head_dim,
            base: rope_theta(config.rope_theta, config.rope_parameters.as_ref()).unwrap_or(10_000.0),
            traditional: false,
            scaling: config.rope_scaling.as_ref().or(config.rope_parameters.as_ref()),
            max_position_embeddings: config.max_position_embeddings,
            factors: None,
        })
        .map_err(WeightError::Config)?;
        layers.push(Layer {
            input_layernorm: loader.rms_norm(&module("input_layernorm"), hidden, config.rms_norm_eps)?,
            attention: Attention {
                q_proj: loader.linear(&module("self_attn.q_proj"), hidden, queries, false)?,
                k_proj: loader.linear(&module("self_attn.k_proj"), hidden, keys, false)?,
                v_proj: loader.linear(&module("self_attn.v_proj"), hidden, keys, false)?,
                o_proj: loader.linear(&module("self_attn.o_proj"), queries, hidden, false)?,
                q_norm: loader.rms_norm(&module("self_attn.q_norm"), head_dim, config.rms_norm_eps)?,
                k_norm: loader.rms_norm(&module("self_attn.k_norm"), head_dim, config.rms_norm_eps)?,
                rope,
                heads: config.num_attention_heads,
                kv_heads: config.kv_heads(),
                head_dim,
            },
            post_attention_layernorm: loader.rms_norm(&module("post_attention_layernorm"), hidden, config.rms_norm_eps)?,
            mlp: GatedMlp::load(&mut loader, &module("mlp"), hidden, config.intermediate_size, false, Activation::Silu)?,
        });
    }
    let norm = loader.rms_norm("model.norm", hidden, config.rms_norm_eps)?;
    let output = Output::load(&mut loader, config.tie_word_embeddings, hidden, config.vocab_size)?;
    loader.finish()?;
    Ok(Qwen3 { config, embed_tokens, layers, norm, output })
}
