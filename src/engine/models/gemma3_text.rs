//! Gemma 3, text: sliding and full layers with a rope each, norms before and after both halves of a layer, weights stored less 1.
//!
//! Sources: arXiv:2503.19786; transformers `modeling_gemma3.py`; mlx-lm `models/gemma3_text.py`.

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

pub fn load(config: &Value, loader: Loader) -> Result<Box<dyn Model>, WeightError> {
    let config: Config = parse(config)?;
    if config.sliding_window_pattern == 0 || config.sliding_window <= 0 {
        return Err(WeightError::Config("sliding_window and sliding_window_pattern must be at least 1".into()));
    }
    let layers = (0..config.num_hidden_layers).map(|layer| {
        let full = config.is_full(layer);
        let (base, scaling) = config.rope(full);
        let rope = RopeOptions {
            head_dim: config.head_dim,
            base,
            traditional: false,
            scaling,
            max_position_embeddings: Some(config.max_position_embeddings),
            factors: None,
        };
        LayerOptions { rope, window: (!full).then_some(config.sliding_window) }
    });
    let options = DecoderOptions {
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        vocab_size: config.vocab_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        rms_norm_eps: config.rms_norm_eps,
        norm_offset: 1.0,
        embedding_scale: Some((config.hidden_size as f32).sqrt()),
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: true,
        sandwich_norms: true,
        activation: Activation::GeluTanh,
        attention_scale: config.query_pre_attn_scalar.powf(-0.5),
        tied: None,
        layers: layers.collect(),
    };
    Decoder::load(options, loader)
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
