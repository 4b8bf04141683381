//! Llama and what is shaped like it: SmolLM2, Mistral, TinyLlama, Yi.
//!
//! Sources: arXiv:2302.13971; transformers `modeling_llama.py`; mlx-lm `models/llama.py`.

use serde::Deserialize;
use serde_json::Value;

use super::{
    Model,
    decoder::{Decoder, DecoderOptions, LayerOptions},
    layers::Activation,
    parse,
    rope::RopeOptions,
    rope_theta,
};
use crate::engine::weights::{Loader, WeightError};

#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    pub model_type: String,
    pub hidden_size: i32,
    pub num_hidden_layers: usize,
    pub intermediate_size: i32,
    pub num_attention_heads: i32,
    pub num_key_value_heads: Option<i32>,
    pub head_dim: Option<i32>,
    pub rms_norm_eps: f32,
    pub vocab_size: i32,
    pub max_position_embeddings: Option<i64>,
    #[serde(default)]
    pub attention_bias: bool,
    #[serde(default)]
    pub mlp_bias: bool,
    pub rope_theta: Option<f64>,
    #[serde(default)]
    pub rope_traditional: bool,
    pub rope_scaling: Option<Value>,
    pub rope_parameters: Option<Value>,
    /// Absent means tied, as mlx-lm has it, unless the file holds an output matrix.
    pub tie_word_embeddings: Option<bool>,
    pub layer_types: Option<Vec<String>>,
    pub sliding_window: Option<i32>,
}

impl Config {
    fn kv_heads(&self) -> i32 {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    fn head_dim(&self) -> i32 {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }

    fn window(&self, layer: usize) -> Option<i32> {
        match &self.layer_types {
            Some(kinds) => self.sliding_window.filter(|_| kinds.get(layer).is_some_and(|kind| kind == "sliding_attention")),
            // Mistral's window holds on every layer, as its authors and transformers have it; mlx-lm leaves it out.
            None => self.sliding_window.filter(|&window| self.model_type == "mistral" && window > 0),
        }
    }
}

pub fn load(config: &Value, mut loader: Loader) -> Result<Box<dyn Model>, WeightError> {
    let config: Config = parse(config)?;
    let head_dim = config.head_dim();
    let factors = loader.optional("model.rope_freqs.weight", &[head_dim / 2])?;
    let layers = (0..config.num_hidden_layers).map(|layer| LayerOptions {
        rope: RopeOptions {
            head_dim,
            base: rope_theta(config.rope_theta, config.rope_parameters.as_ref()).unwrap_or(10_000.0),
            traditional: config.rope_traditional,
            scaling: config.rope_scaling.as_ref().or(config.rope_parameters.as_ref()),
            max_position_embeddings: config.max_position_embeddings,
            factors: factors.clone(),
        },
        window: config.window(layer),
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
        qkv_bias: config.attention_bias,
        output_bias: config.attention_bias,
        mlp_bias: config.mlp_bias,
        qk_norm: false,
        sandwich_norms: false,
        activation: Activation::Silu,
        attention_scale: (head_dim as f32).powf(-0.5),
        tied: config.tie_word_embeddings,
        layers: layers.collect(),
    };
    Decoder::load(options, loader)
}
