//! config.json of a Gemma 4.

use serde::Deserialize;
use serde_json::Value;

use super::super::{LAYERS_MAX, SIZE_MAX, parse, rope_theta};
use crate::engine::weights::WeightError;

/// Every so many layers one has full attention, where the configuration does not list them.
const FULL_EVERY: usize = 6;

pub struct Config {
    pub text: TextConfig,
    image_token_id: Option<i32>,
    audio_token_id: Option<i32>,
    video_token_id: Option<i32>,
}

/// Whether a configuration is of the form without towers, or of its text model alone.
pub fn is_unified(config: &Value) -> bool {
    matches!(config.get("model_type").and_then(Value::as_str), Some("gemma4_unified" | "gemma4_unified_text"))
}

/// What `text_config` says; defaults are transformers', and [`TextConfig::unified`] of the form without towers.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct TextConfig {
    pub vocab_size: i32,
    pub vocab_size_per_layer_input: i32,
    pub hidden_size: i32,
    pub intermediate_size: i32,
    pub num_hidden_layers: usize,
    pub num_attention_heads: i32,
    pub num_key_value_heads: i32,
    pub head_dim: i32,
    /// Of layers with full attention.
    pub global_head_dim: Option<i32>,
    pub num_global_key_value_heads: Option<i32>,
    /// Layers with full attention have one product for keys and values.
    pub attention_k_eq_v: bool,
    pub rms_norm_eps: f32,
    pub sliding_window: i32,
    pub layer_types: Option<Vec<String>>,
    pub rope_parameters: Option<Value>,
    pub max_position_embeddings: i64,
    /// So many layers at the end look up keys and values of the last layer before them that is of their kind.
    pub num_kv_shared_layers: Option<usize>,
    /// Those have twice the `intermediate_size`.
    pub use_double_wide_mlp: bool,
    /// Numbers that each layer takes in of a token besides the hidden state; 0 for none.
    pub hidden_size_per_layer_input: Option<i32>,
    pub enable_moe_block: bool,
    pub num_experts: Option<i32>,
    pub top_k_experts: Option<i32>,
    pub moe_intermediate_size: Option<i32>,
    pub final_logit_softcapping: Option<f32>,
    pub tie_word_embeddings: Option<bool>,
    pub use_bidirectional_attention: Option<String>,
    /// What full layers have where `rope_parameters` does not say; of no file.
    #[serde(skip, default = "full_rope")]
    full_rope: Value,
}

fn full_rope() -> Value {
    serde_json::json!({ "rope_type": "proportional", "partial_rotary_factor": 0.25 })
}

impl Default for TextConfig {
    fn default() -> Self {
        Self {
            vocab_size: 262_144,
            vocab_size_per_layer_input: 262_144,
            hidden_size: 2304,
            intermediate_size: 9216,
            num_hidden_layers: 30,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: 256,
            global_head_dim: Some(512),
            num_global_key_value_heads: None,
            attention_k_eq_v: false,
            rms_norm_eps: 1e-6,
            sliding_window: 512,
            layer_types: None,
            rope_parameters: None,
            max_position_embeddings: 131_072,
            num_kv_shared_layers: None,
            use_double_wide_mlp: false,
            hidden_size_per_layer_input: Some(256),
            enable_moe_block: false,
            num_experts: None,
            top_k_experts: None,
            moe_intermediate_size: None,
            final_logit_softcapping: None,
            tie_word_embeddings: Some(true),
            use_bidirectional_attention: None,
            full_rope: full_rope(),
        }
    }
}

/// One layer, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSizes {
    pub full: bool,
    pub head_dim: i32,
    pub kv_heads: i32,
    pub intermediate: i32,
    /// One product gives keys and values.
    pub keys_are_values: bool,
    pub keys: KeysOf,
}

/// Whose keys and values a layer attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeysOf {
    /// Its own; `kept` where later layers look them up too.
    Own { kept: bool },
    /// Those of an earlier layer.
    Layer(usize),
}

/// Experts of each layer.
#[derive(Debug, Clone, Copy)]
pub struct MixtureSizes {
    pub experts: i32,
    pub taken: i32,
    pub intermediate: i32,
}

impl Config {
    /// Of a whole model, or of a text model alone.
    pub fn read(config: &Value) -> Result<Self, WeightError> {
        let id = |key: &str, default: i32| match config.get(key) {
            Some(Value::Null) => None,
            Some(id) => id.as_i64().and_then(|id| i32::try_from(id).ok()),
            None => Some(default),
        };
        let Some(text) = config.get("text_config") else {
            let text = TextConfig::read(config, is_unified(config))?;
            return Ok(Self { text, image_token_id: None, audio_token_id: None, video_token_id: None });
        };
        Ok(Self {
            text: TextConfig::read(text, is_unified(config))?,
            image_token_id: id("image_token_id", 258_880),
            audio_token_id: id("audio_token_id", 258_881),
            video_token_id: config.get("video_token_id").and_then(|_| id("video_token_id", 0)),
        })
    }

    /// The ids that stand in prompts for what towers make.
    pub fn placeholders(&self) -> Vec<i32> {
        [self.image_token_id, self.audio_token_id, self.video_token_id].into_iter().flatten().collect()
    }
}

impl TextConfig {
    fn read(config: &Value, unified: bool) -> Result<Self, WeightError> {
        let config: Self = if unified { parse(&Self::unified(config))? } else { parse(config)? };
        config.check().map_err(WeightError::Config)?;
        Ok(config)
    }

    /// With what transformers' `Gemma4UnifiedTextConfig` takes for granted.
    fn unified(config: &Value) -> Value {
        let mut config = config.clone();
        if let Some(stated) = config.as_object_mut() {
            for (name, value) in [
                ("hidden_size_per_layer_input", 0.into()),
                ("sliding_window", 1024.into()),
                ("max_position_embeddings", 262_144.into()),
                ("use_bidirectional_attention", "vision".into()),
            ] {
                stated.entry(name).or_insert(value);
            }
        }
        config
    }

    fn check(&self) -> Result<(), String> {
        let mut sizes = vec![
            ("vocab_size", self.vocab_size, SIZE_MAX),
            ("hidden_size", self.hidden_size, SIZE_MAX),
            ("intermediate_size", self.intermediate_size, SIZE_MAX),
            ("num_attention_heads", self.num_attention_heads, 4096),
            ("num_key_value_heads", self.num_key_value_heads, 4096),
            ("num_global_key_value_heads", self.num_global_key_value_heads.unwrap_or(1), 4096),
            ("head_dim", self.head_dim, 4096),
            ("global_head_dim", self.global_head_dim.unwrap_or(1), 4096),
            ("sliding_window", self.sliding_window, i32::MAX),
        ];
        if self.per_layer_inputs() != 0 {
            sizes.push(("vocab_size_per_layer_input", self.vocab_size_per_layer_input, SIZE_MAX));
            sizes.push(("hidden_size_per_layer_input", self.per_layer_inputs(), 1 << 16));
        }
        if let Some(wrong) = sizes.iter().find(|(_, size, size_max)| !(1..=*size_max).contains(size)) {
            return Err(format!("{} of a Gemma 4 is {}; it must be 1 to {}", wrong.0, wrong.1, wrong.2));
        }
        if !(1..=LAYERS_MAX).contains(&self.num_hidden_layers) {
            return Err(format!("num_hidden_layers of a Gemma 4 is {}; it must be 1 to {LAYERS_MAX}", self.num_hidden_layers));
        }
        if let Some(other) = self.use_bidirectional_attention.as_deref().filter(|kind| *kind != "vision") {
            return Err(format!("use_bidirectional_attention = \"{other}\" is not yet supported (\"vision\" and null are)"));
        }
        self.mixture()?;
        self.layers().map(|_| ())
    }

    pub fn per_layer_inputs(&self) -> i32 {
        self.hidden_size_per_layer_input.unwrap_or(0)
    }

    pub fn mixture(&self) -> Result<Option<MixtureSizes>, String> {
        if !self.enable_moe_block {
            return Ok(None);
        }
        let size = |name: &str, size: Option<i32>| {
            size.filter(|size| (1..=SIZE_MAX).contains(size))
                .ok_or(format!("enable_moe_block needs {name}, 1 to {SIZE_MAX}, and it is {size:?}"))
        };
        let mixture = MixtureSizes {
            experts: size("num_experts", self.num_experts)?,
            taken: size("top_k_experts", self.top_k_experts)?,
            intermediate: size("moe_intermediate_size", self.moe_intermediate_size)?,
        };
        if mixture.taken > mixture.experts || mixture.experts > 1 << 16 {
            return Err(format!("top_k_experts is {} of {} experts", mixture.taken, mixture.experts));
        }
        Ok(Some(mixture))
    }

    pub fn layers(&self) -> Result<Vec<LayerSizes>, String> {
        let count = self.num_hidden_layers;
        let mut full = Vec::with_capacity(count);
        match &self.layer_types {
            None => full.extend((0..count).map(|layer| (layer + 1).is_multiple_of(FULL_EVERY) || layer + 1 == count)),
            Some(types) if types.len() != count => {
                return Err(format!("layer_types has {} entries for {count} layers", types.len()));
            }
            Some(types) => {
                for kind in types {
                    full.push(match kind.as_str() {
                        "full_attention" => true,
                        "sliding_attention" => false,
                        other => {
                            return Err(format!("layer_types names '{other}'; sliding_attention and full_attention are known"));
                        }
                    });
                }
            }
        }
        let shared = self.num_kv_shared_layers.unwrap_or(0);
        let Some(owners) = count.checked_sub(shared).filter(|&owners| owners > 0) else {
            return Err(format!("num_kv_shared_layers is {shared} of {count} layers: none is left to have keys of its own"));
        };
        let last_of = |kind: bool| (0..owners).rev().find(|&layer| full[layer] == kind);
        let mut layers = Vec::with_capacity(count);
        for (layer, &is_full) in full.iter().enumerate() {
            let own = layer < owners;
            let keys = if own {
                KeysOf::Own { kept: last_of(is_full) == Some(layer) && full[owners..].contains(&is_full) }
            } else {
                let owner =
                    last_of(is_full).ok_or(format!("layer {layer} shares keys with earlier ones of its kind, and none is"))?;
                KeysOf::Layer(owner)
            };
            let keys_are_values = self.attention_k_eq_v && is_full;
            let global_kv_heads = self.num_global_key_value_heads.filter(|_| keys_are_values);
            let kv_heads = global_kv_heads.unwrap_or(self.num_key_value_heads);
            if self.num_attention_heads % kv_heads != 0 {
                return Err(format!("{} heads do not divide into {kv_heads} of keys", self.num_attention_heads));
            }
            let head_dim = self.global_head_dim.filter(|_| is_full).unwrap_or(self.head_dim);
            let wide = self.use_double_wide_mlp && !own;
            layers.push(LayerSizes {
                full: is_full,
                head_dim,
                kv_heads,
                intermediate: self.intermediate_size * if wide { 2 } else { 1 },
                keys_are_values,
                keys,
            });
        }
        Ok(layers)
    }

    /// Base and scaling of a layer's rope.
    pub fn rope(&self, full: bool) -> (f64, Option<&Value>) {
        let own = self.rope_parameters.as_ref().and_then(|all| all.get(if full { "full_attention" } else { "sliding_attention" }));
        match own {
            Some(own) => (rope_theta(None, Some(own)).unwrap_or(1e4), Some(own)),
            None if full => (1e6, Some(&self.full_rope)),
            None => (1e4, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn shared_layers_take_the_last_of_their_kind() {
        let (sliding, full) = ("sliding_attention", "full_attention");
        let types = [sliding, full, sliding, full, sliding, sliding, full];
        let config = json!({
            "num_hidden_layers": 7, "num_kv_shared_layers": 3, "layer_types": types, "use_double_wide_mlp": true,
            "intermediate_size": 10, "attention_k_eq_v": true, "num_global_key_value_heads": 2, "num_key_value_heads": 4,
        });
        let layers = TextConfig::read(&config, false).unwrap().layers().unwrap();
        let keys: Vec<KeysOf> = layers.iter().map(|layer| layer.keys).collect();
        let own = |kept| KeysOf::Own { kept };
        let expected = [own(false), own(false), own(true), own(true), KeysOf::Layer(2), KeysOf::Layer(2), KeysOf::Layer(3)];
        assert_eq!(keys, expected);
        let widths: Vec<(i32, i32, i32)> =
            layers.iter().map(|layer| (layer.kv_heads, layer.head_dim, layer.intermediate)).collect();
        let (own_sliding, own_full) = ((4, 256, 10), (2, 512, 10));
        assert_eq!(widths[..4], [own_sliding, own_full, own_sliding, own_full]);
        assert_eq!(widths[5..], [(4, 256, 20), (2, 512, 20)]);
    }

    #[test]
    fn without_towers_other_things_go_without_saying() {
        let own = |text: Value| Config::read(&json!({ "model_type": "gemma4_unified", "text_config": text })).unwrap().text;
        let text = own(json!({}));
        assert_eq!((text.per_layer_inputs(), text.sliding_window), (0, 1024));
        assert_eq!(text.use_bidirectional_attention.as_deref(), Some("vision"));
        let text = own(json!({ "use_bidirectional_attention": null, "sliding_window": 7 }));
        assert_eq!((text.use_bidirectional_attention, text.sliding_window), (None, 7));
        let alone = Config::read(&json!({ "model_type": "gemma4_unified_text" })).unwrap();
        assert_eq!((alone.text.sliding_window, alone.placeholders().len()), (1024, 0));
        let other = Config::read(&json!({ "model_type": "gemma4", "text_config": {} })).unwrap().text;
        assert_eq!((other.per_layer_inputs(), other.sliding_window, other.use_bidirectional_attention), (256, 512, None));
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let refused = |config: Value| TextConfig::read(&config, false).map(|_| ()).unwrap_err().to_string();
        assert!(refused(json!({ "num_hidden_layers": 2, "num_kv_shared_layers": 2 })).contains("none is left"));
        assert!(refused(json!({ "num_hidden_layers": 2, "layer_types": ["full_attention"] })).contains("1 entries for 2 layers"));
        assert!(refused(json!({ "num_key_value_heads": 3 })).contains("8 heads do not divide into 3"));
        assert!(refused(json!({ "hidden_size": 0 })).contains("hidden_size of a Gemma 4 is 0"));
        assert!(refused(json!({ "enable_moe_block": true, "num_experts": 4 })).contains("needs top_k_experts"));
        assert!(refused(json!({ "use_bidirectional_attention": "all" })).contains("\"all\" is not yet supported"));
        let shared = json!({
            "num_hidden_layers": 2, "num_kv_shared_layers": 1, "layer_types": ["sliding_attention", "full_attention"],
        });
        assert!(refused(shared).contains("layer 1 shares keys"));
    }
}
