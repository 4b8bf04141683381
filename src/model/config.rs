//! A GGUF header's metadata, and a config.json of mlx-whisper, in the names of a Hugging Face `config.json`.
//!
//! Keys: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>; their meaning per architecture: llama.cpp's
//! `convert_hf_to_gguf.py` and `llama-model.cpp`; the names on the other side: transformers' configuration classes.

use serde_json::{Map, Value, json};

use super::gguf::{self, Gguf};

/// GGUF `general.architecture` to `model_type`, for what can be run.
const ARCHITECTURES: &[(&str, &str)] = &[("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma3", "gemma3_text")];

/// Every sixth layer of Gemma 3 has full attention; files do not always say so.
const GEMMA3_WINDOW_PATTERN: u64 = 6;

/// What OpenAI's code, and after it mlx-whisper, calls a Whisper's dimensions, in Hugging Face's names.
const WHISPER: &[(&str, &str)] = &[
    ("n_mels", "num_mel_bins"),
    ("n_audio_ctx", "max_source_positions"),
    ("n_audio_state", "d_model"),
    ("n_audio_head", "encoder_attention_heads"),
    ("n_audio_layer", "encoder_layers"),
    ("n_vocab", "vocab_size"),
    ("n_text_ctx", "max_target_positions"),
    ("n_text_head", "decoder_attention_heads"),
    ("n_text_layer", "decoder_layers"),
];

/// A config.json in the layout of mlx-whisper, which is known by its keys, in Hugging Face's names; any other as it is.
pub(super) fn from_openai(config: Value) -> Result<Value, String> {
    let Value::Object(own) = config else { return Ok(config) };
    let model_type = own.get("model_type").and_then(Value::as_str);
    if !WHISPER.iter().all(|(name, _)| own.contains_key(*name)) || !matches!(model_type, None | Some("whisper")) {
        return Ok(Value::Object(own));
    }
    if own.get("n_text_state").is_some_and(|state| Some(state) != own.get("n_audio_state")) {
        return Err("its encoder and decoder have different widths, which no Whisper has".to_owned());
    }
    let mut config = Map::new();
    config.insert("model_type".to_owned(), "whisper".into());
    for (name, value) in own {
        match WHISPER.iter().find(|(openai, _)| *openai == name) {
            Some((_, hugging_face)) => config.insert((*hugging_face).to_owned(), value),
            None => config.insert(name, value),
        };
    }
    Ok(Value::Object(config))
}

/// Builds the configuration; the error is a sentence without the file's name.
pub(super) fn from_gguf(gguf: &Gguf) -> Result<Value, String> {
    let architecture = gguf.string("general.architecture").ok_or("it has no general.architecture")?;
    let Some(&(_, model_type)) = ARCHITECTURES.iter().find(|(name, _)| *name == architecture) else {
        let known = ARCHITECTURES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        return Err(format!("its architecture {architecture:?} is not yet supported; these are: {known}"));
    };
    let keys = Keys { gguf, architecture };

    let layers = keys.required("block_count")?;
    let hidden_size = keys.required("embedding_length")?;
    let heads = keys.required("attention.head_count")?;
    let kv_heads = keys.unsigned("attention.head_count_kv")?.unwrap_or(heads);
    if heads == 0 || kv_heads == 0 || layers == 0 || hidden_size == 0 {
        return Err("it has a layer, head or width count of 0".to_owned());
    }
    let head_dim = keys.unsigned("attention.key_length")?.unwrap_or(hidden_size / heads);
    if keys.unsigned("attention.value_length")?.is_some_and(|value| value != head_dim) {
        return Err("its keys and values have different lengths, which no supported family has".to_owned());
    }
    let vocab_size = keys
        .unsigned("vocab_size")?
        .or_else(|| gguf.tensor("token_embd.weight").and_then(|tensor| tensor.shape.first().copied()))
        .or_else(|| gguf.strings("tokenizer.ggml.tokens").map(|tokens| tokens.len() as u64))
        .ok_or("it says nowhere how large its vocabulary is")?;

    let mut config = Map::new();
    let mut put = |name: &str, value: Value| config.insert(name.to_owned(), value);
    put("model_type", model_type.into());
    put("hidden_size", hidden_size.into());
    put("num_hidden_layers", layers.into());
    put("intermediate_size", keys.required("feed_forward_length")?.into());
    put("num_attention_heads", heads.into());
    put("num_key_value_heads", kv_heads.into());
    put("head_dim", head_dim.into());
    put("vocab_size", vocab_size.into());
    put("max_position_embeddings", keys.required("context_length")?.into());
    put("rms_norm_eps", round_to_f32(keys.float("attention.layer_norm_rms_epsilon").ok_or("it has no norm epsilon")?).into());
    let rope_theta = keys.float("rope.freq_base").unwrap_or(if model_type == "gemma3_text" { 1_000_000.0 } else { 10_000.0 });
    put("rope_theta", round_to_f32(rope_theta).into());
    if let Some(scaling) = keys.rope_scaling()? {
        put("rope_scaling", scaling);
    }
    put("tie_word_embeddings", gguf.tensor("output.weight").is_none().into());
    match model_type {
        "llama" => {
            put("attention_bias", gguf.tensor("blk.0.attn_q.bias").is_some().into());
            put("mlp_bias", gguf.tensor("blk.0.ffn_gate.bias").is_some().into());
        }
        "qwen2" => {
            put("attention_bias", true.into());
        }
        "qwen3" => {
            put("attention_bias", false.into());
        }
        _ => {
            put("attention_bias", false.into());
            put("sliding_window", keys.required("attention.sliding_window")?.into());
            let pattern = keys.unsigned("attention.sliding_window_pattern")?.unwrap_or(GEMMA3_WINDOW_PATTERN);
            put("sliding_window_pattern", pattern.into());
            put("rope_local_base_freq", round_to_f32(keys.float("rope.freq_base_swa").unwrap_or(10_000.0)).into());
            // The 27B model alone, known by its 62 layers, scales queries by its width rather than by the head's size.
            put("query_pre_attn_scalar", if layers == 62 { hidden_size / heads } else { head_dim }.into());
            put("hidden_activation", "gelu_pytorch_tanh".into());
        }
    }
    for (name, key) in [("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")] {
        if let Some(id) = gguf.unsigned(&format!("tokenizer.ggml.{key}_token_id")) {
            put(name, id.into());
        }
    }
    Ok(Value::Object(config))
}

/// The shortest decimal that is the same 32-bit float: 1e-5 rather than 9.999999747378752e-6.
fn round_to_f32(value: f64) -> f64 {
    (value as f32).to_string().parse().unwrap_or(value)
}

/// Keys below the architecture's name.
struct Keys<'a> {
    gguf: &'a Gguf,
    architecture: &'a str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    /// A count; one given a layer must be the same for all of them.
    fn unsigned(&self, name: &str) -> Result<Option<u64>, String> {
        let key = self.key(name);
        let many: Option<Vec<u64>> = match self.gguf.metadata.get(&key) {
            Some(gguf::Value::Array(gguf::Array::Unsigned(values))) => Some(values.clone()),
            Some(gguf::Value::Array(gguf::Array::Signed(values))) => {
                values.iter().map(|&value| u64::try_from(value).ok()).collect()
            }
            _ => return Ok(self.gguf.unsigned(&key)),
        };
        match many.as_deref() {
            Some([first, rest @ ..]) if rest.iter().all(|value| value == first) => Ok(Some(*first)),
            _ => Err(format!("its {key} differs from layer to layer, which no supported family does")),
        }
    }

    fn required(&self, name: &str) -> Result<u64, String> {
        self.unsigned(name)?.ok_or_else(|| format!("it has no {}", self.key(name)))
    }

    fn float(&self, name: &str) -> Option<f64> {
        self.gguf.float(&self.key(name))
    }

    fn rope_scaling(&self) -> Result<Option<Value>, String> {
        let factor = self.float("rope.scaling.factor").or_else(|| self.float("rope.scale_linear"));
        let kind = self.gguf.string(&self.key("rope.scaling.type"));
        let kind = match (kind, factor) {
            (None, Some(factor)) if factor != 0.0 && factor != 1.0 => "linear",
            (None | Some("none"), _) => return Ok(None),
            (Some(kind @ ("linear" | "yarn")), _) => kind,
            (Some(other), _) => return Err(format!("its rope scaling {other:?} is not yet supported; linear and yarn are")),
        };
        let factor = factor.filter(|factor| factor.is_finite() && *factor > 0.0);
        let factor = factor.ok_or_else(|| format!("its {kind} rope scaling has no usable factor"))?;
        let mut scaling = json!({ "rope_type": kind, "type": kind, "factor": round_to_f32(factor) });
        if let Some(original) = self.unsigned("rope.scaling.original_context_length")? {
            scaling["original_max_position_embeddings"] = original.into();
        }
        // ggml multiplies attn_factor by YaRN's own attention factor (`ggml_rope_ext`); Hugging Face's replaces it.
        if let Some(attn_factor) = self.float("rope.scaling.attn_factor").filter(|attn_factor| *attn_factor != 1.0) {
            scaling["attention_factor"] = round_to_f32(attn_factor * (0.1 * factor.ln() + 1.0)).into();
        }
        for (name, key) in [("beta_fast", "rope.scaling.yarn_beta_fast"), ("beta_slow", "rope.scaling.yarn_beta_slow")] {
            if let Some(value) = self.float(key) {
                scaling[name] = round_to_f32(value).into();
            }
        }
        Ok(Some(scaling))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::model::gguf::{Array, Kind, Tensor, Value as Meta};

    fn gguf(architecture: &str, more: &[(&str, Meta)]) -> Gguf {
        let mut metadata = BTreeMap::from([("general.architecture".to_owned(), Meta::String(architecture.to_owned()))]);
        for (key, value) in [
            ("block_count", Meta::Unsigned(4)),
            ("embedding_length", Meta::Unsigned(64)),
            ("feed_forward_length", Meta::Unsigned(128)),
            ("attention.head_count", Meta::Unsigned(8)),
            ("attention.head_count_kv", Meta::Unsigned(2)),
            ("context_length", Meta::Unsigned(2048)),
            ("attention.layer_norm_rms_epsilon", Meta::Float(f64::from(1e-5f32))),
        ]
        .iter()
        .chain(more)
        {
            metadata.insert(format!("{architecture}.{key}"), value.clone());
        }
        let kind = Kind { id: 0, name: "F32", block_elements: 1, block_bytes: 4 };
        let tensor = Tensor { name: "token_embd.weight".into(), shape: vec![1000, 64], kind, offset: 0, bytes: 256_000 };
        Gguf { file: "m.gguf".into(), version: 3, metadata, tensors: vec![tensor], data_offset: 0, file_bytes: 256_000 }
    }

    #[test]
    fn llama() {
        let config = from_gguf(&gguf("llama", &[("rope.freq_base", Meta::Float(100_000.0))])).unwrap();
        let expected = json!({
            "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 1000,
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0, "tie_word_embeddings": true,
            "attention_bias": false, "mlp_bias": false,
        });
        assert_eq!(config, expected);
    }

    #[test]
    fn gemma3() {
        let more = [("attention.key_length", Meta::Unsigned(256)), ("attention.sliding_window", Meta::Unsigned(512))];
        let config = from_gguf(&gguf("gemma3", &more)).unwrap();
        assert_eq!(config["model_type"], "gemma3_text");
        assert_eq!(config["head_dim"], 256);
        assert_eq!((&config["sliding_window"], &config["sliding_window_pattern"]), (&json!(512), &json!(6)));
        assert_eq!(config["query_pre_attn_scalar"], 256);
        assert_eq!((&config["rope_theta"], &config["rope_local_base_freq"]), (&json!(1e6), &json!(1e4)));
    }

    #[test]
    fn yarn() {
        let more = [
            ("rope.scaling.type", Meta::String("yarn".into())),
            ("rope.scaling.factor", Meta::Float(4.0)),
            ("rope.scaling.original_context_length", Meta::Unsigned(512)),
        ];
        let config = from_gguf(&gguf("qwen2", &more)).unwrap();
        let expected = json!({"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512});
        assert_eq!(config["rope_scaling"], expected);
        let more = [("rope.scaling.type", Meta::String("longrope".into()))];
        assert!(from_gguf(&gguf("qwen3", &more)).unwrap_err().contains("longrope"));
    }

    #[test]
    fn whisper_in_the_names_of_mlx_whisper() {
        let mut own = json!({"n_mels": 80, "n_audio_ctx": 1500, "n_audio_state": 384, "n_audio_head": 6, "n_audio_layer": 4,
            "n_vocab": 51864, "n_text_ctx": 448, "n_text_state": 384, "n_text_head": 6, "n_text_layer": 4,
            "quantization": {"group_size": 64, "bits": 4}});
        let expected = json!({"model_type": "whisper", "num_mel_bins": 80, "max_source_positions": 1500, "d_model": 384,
            "encoder_attention_heads": 6, "encoder_layers": 4, "vocab_size": 51864, "max_target_positions": 448,
            "n_text_state": 384, "decoder_attention_heads": 6, "decoder_layers": 4,
            "quantization": {"group_size": 64, "bits": 4}});
        assert_eq!(from_openai(own.clone()).unwrap(), expected);
        own["model_type"] = "whisper".into();
        assert_eq!(from_openai(own.clone()).unwrap(), expected);
        own["n_text_state"] = 512.into();
        assert!(from_openai(own.clone()).unwrap_err().contains("different widths"));
        own["model_type"] = "parakeet".into();
        assert_eq!(from_openai(own.clone()).unwrap(), own);
        assert_eq!(from_openai(expected.clone()).unwrap(), expected);
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        assert!(from_gguf(&gguf("mamba", &[])).unwrap_err().contains("\"mamba\" is not yet supported"));
        let more = [("attention.head_count_kv", Meta::Array(Array::Unsigned(vec![2, 4])))];
        assert!(from_gguf(&gguf("llama", &more)).unwrap_err().contains("differs from layer to layer"));
        let more = [("attention.head_count", Meta::Unsigned(0))];
        assert!(from_gguf(&gguf("llama", &more)).unwrap_err().contains("count of 0"));
        let mut without = gguf("llama", &[]);
        without.metadata.remove("llama.context_length");
        assert!(from_gguf(&without).unwrap_err().contains("no llama.context_length"));
    }
}
