//! Qwen3, dense: llama with the heads of q and k normalized.
//!
//! Sources: arXiv:2505.09388; transformers `modeling_qwen3.py`; mlx-lm `models/qwen3.py`.

use serde::Deserialize;
use serde_json::Value;

use super::{
    Model,
    decoder::{Decoder, DecoderOptions, LayerOptions},
    layers::Activation,
    parse, refuse_window,
    rope::RopeOptions,
    rope_theta,
};
use crate::engine::weights::{Loader, WeightError};

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

impl Config {
    fn kv_heads(&self) -> i32 {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    fn head_dim(&self) -> i32 {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }
}

pub fn load(config: &Value, loader: Loader) -> Result<Box<dyn Model>, WeightError> {
    let config: Config = parse(config)?;
    refuse_window(config.use_sliding_window)?;
    let head_dim = config.head_dim();
    let layers = (0..config.num_hidden_layers).map(|_| LayerOptions {
        rope: RopeOptions {
            head_dim,
            base: rope_theta(config.rope_theta, config.rope_parameters.as_ref()).unwrap_or(10_000.0),
            traditional: false,
            scaling: config.rope_scaling.as_ref().or(config.rope_parameters.as_ref()),
            max_position_embeddings: config.max_position_embeddings,
            factors: None,
        },
        window: None,
    });
    let options = DecoderOptions {
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        vocab_size: config.vocab_size,
        heads: config.num_attention_heads,
        kv_heads: config.kv_heads(),
        head_dim,
        rms_norm_eps: config.rms_norm_eps,
        norm_offset: 0.0,
        embedding_scale: None,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: true,
        sandwich_norms: false,
        activation: Activation::Silu,
        attention_scale: (head_dim as f32).powf(-0.5),
        tied: config.tie_word_embeddings,
        layers: layers.collect(),
    };
    Decoder::load(options, loader)
}
