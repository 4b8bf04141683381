//! What `inspect` tells about a model.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{FAMILIES, ModelError, ModelFiles, Tensor, Towers, Weights};

/// A model in numbers; nothing here reads a weight.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSummary {
    pub name: String,
    /// config.json's `model_type`.
    pub family: String,
    /// Whether this program can run it; when not, the sentence says why.
    pub supported: Result<(), String>,
    /// Parameters as they were before quantization.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub weight_bytes: u64,
    /// Bytes by storage type, `BF16` or `Q4_1`.
    pub dtypes: BTreeMap<String, u64>,
    pub quantization: Option<Quantization>,
    /// Of a model with an encoder, these are the decoder's.
    pub layers: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub context_length: Option<u32>,
    pub vocab_size: Option<u32>,
    /// Layers that see all of the context.
    pub full_layers: u32,
    /// Layers that see a window alone, and the window's tokens.
    pub window_layers: u32,
    pub window_tokens: Option<u32>,
    /// Of a model that hears.
    pub encoder: Option<EncoderSummary>,
    pub chat_template: bool,
    /// What a row can give it.
    pub inputs: &'static [&'static str],
    pub stop_tokens: Vec<u32>,
}

/// The half of a speech model that hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncoderSummary {
    pub layers: u32,
    pub heads: u32,
    pub mel_bins: u32,
    /// Tokens that it gives for a window, which the decoder attends to.
    pub tokens: u32,
}

impl EncoderSummary {
    /// Seconds of a window: a token stands for two frames, and a frame for 10 ms (arXiv:2212.04356, 2.2).
    pub fn window_seconds(&self) -> f64 {
        f64::from(self.tokens) * 0.02
    }
}

/// MLX's affine quantization, as `config.json` states it.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantization {
    pub bits: u32,
    /// Elements that share a scale.
    pub group_size: u32,
    pub mode: String,
    /// Layers that differ: bits and group size, or `None` for one left as it was.
    pub overrides: BTreeMap<String, Option<(u32, u32)>>,
}

impl Quantization {
    /// From `quantization` (or its older name `quantization_config`) of an MLX checkpoint; `None` where it has no `bits`.
    pub fn from_config(config: &Value) -> Option<Self> {
        let stated = config.get("quantization").or_else(|| config.get("quantization_config"))?.as_object()?;
        let number = |value: &Value, name: &str| value.get(name)?.as_u64().and_then(|number| u32::try_from(number).ok());
        let all = Value::Object(stated.clone());
        let (bits, group_size) = (number(&all, "bits")?, number(&all, "group_size")?);
        let mut overrides = BTreeMap::new();
        for (name, value) in stated {
            match value {
                Value::Bool(false) => {
                    overrides.insert(name.clone(), None);
                }
                Value::Object(_) => {
                    let differs = (number(value, "bits").unwrap_or(bits), number(value, "group_size").unwrap_or(group_size));
                    overrides.insert(name.clone(), Some(differs));
                }
                _ => {}
            }
        }
        let mode = stated.get("mode").and_then(Value::as_str).unwrap_or("affine").to_owned();
        Some(Self { bits, group_size, mode, overrides })
    }

    fn bits_of(&self, layer: &str) -> u32 {
        match self.overrides.get(layer) {
            Some(Some((bits, _))) => *bits,
            _ => self.bits,
        }
    }
}

impl ModelSummary {
    /// Reads the headers of the weights; `chat_template` says whether the model has one.
    pub fn new(files: &ModelFiles, chat_template: bool) -> Result<Self, ModelError> {
        let tensors = files.tensors()?;
        let quantization = Quantization::from_config(files.config());
        let count =
            |name: &str| files.text_config(name).and_then(Value::as_u64).map(|count| u32::try_from(count).unwrap_or(u32::MAX));
        let encoder = (files.family() == "whisper").then(|| EncoderSummary {
            layers: count("encoder_layers").unwrap_or(0),
            heads: count("encoder_attention_heads").unwrap_or(0),
            mel_bins: count("num_mel_bins").unwrap_or(0),
            tokens: count("max_source_positions").unwrap_or(0),
        });
        // Hugging Face's Whisper states the encoder's layers under the general name too.
        let [layers, heads, hidden_size] = match encoder {
            Some(_) => ["decoder_layers", "decoder_attention_heads", "d_model"],
            None => ["num_hidden_layers", "num_attention_heads", "hidden_size"],
        }
        .map(|name| count(name).unwrap_or(0));
        let window_tokens = count("sliding_window");
        let window_layers = if window_tokens.is_some() { window_layers(files, layers) } else { 0 };
        let mut dtypes = BTreeMap::new();
        for tensor in &tensors {
            *dtypes.entry(tensor.dtype.clone()).or_insert(0) += tensor.bytes;
        }
        Ok(Self {
            name: files.name.clone(),
            family: files.family().to_owned(),
            supported: supported(files),
            parameters: parameters(&tensors, quantization.as_ref(), files),
            weight_bytes: tensors.iter().map(|tensor| tensor.bytes).sum(),
            dtypes,
            quantization,
            layers,
            heads,
            kv_heads: count("num_key_value_heads").unwrap_or(heads),
            head_dim: count("head_dim").or_else(|| hidden_size.checked_div(heads)).unwrap_or(0),
            context_length: files.context_length(),
            vocab_size: count("vocab_size"),
            full_layers: layers.saturating_sub(window_layers),
            window_layers,
            window_tokens: window_tokens.filter(|_| window_layers > 0),
            inputs: if encoder.is_some() { &["audio"] } else { Towers::new(files)?.inputs() },
            encoder,
            chat_template,
            stop_tokens: files.stop_tokens(),
        })
    }

    /// Bytes of keys and values that one token adds: in layers with full attention, and in layers with a window, where they
    /// are bounded by its length. `element_bytes` is 2 for 16-bit caches, 4 for float32.
    pub fn kv_bytes_per_token(&self, element_bytes: u64) -> (u64, u64) {
        let layer = 2 * u64::from(self.kv_heads) * u64::from(self.head_dim) * element_bytes;
        (layer * u64::from(self.full_layers), layer * u64::from(self.window_layers))
    }

    /// Bytes of keys and values that a row of a model with an encoder keeps of what was heard, however long it is.
    pub fn cross_bytes_per_row(&self, element_bytes: u64) -> u64 {
        let tokens = self.encoder.map_or(0, |encoder| u64::from(encoder.tokens));
        2 * u64::from(self.heads) * u64::from(self.head_dim) * element_bytes * tokens * u64::from(self.layers)
    }
}

/// Whether the model can be run, or a sentence that says why not.
fn supported(files: &ModelFiles) -> Result<(), String> {
    let family = files.family();
    if family.is_empty() {
        return Err("config.json has no model_type".to_owned());
    }
    if FAMILIES.contains(&family) {
        return Ok(());
    }
    if files.config().get("text_config").is_some() {
        return Err(format!("{family:?} takes more than text, which is not yet supported; these are: {}", FAMILIES.join(", ")));
    }
    Err(format!("the family {family:?} is not yet supported; these are: {}", FAMILIES.join(", ")))
}

/// How many of `layers` see a window alone: from `layer_types` where it is given, else by the family's rule.
fn window_layers(files: &ModelFiles, layers: u32) -> u32 {
    if let Some(Value::Array(types)) = files.text_config("layer_types") {
        let sliding = types.iter().filter(|kind| kind.as_str() == Some("sliding_attention")).count();
        return u32::try_from(sliding).unwrap_or(u32::MAX).min(layers);
    }
    match files.family() {
        "gemma3_text" | "gemma3" => {
            let pattern = files.text_config("sliding_window_pattern").and_then(Value::as_u64).unwrap_or(6).max(1);
            layers - u32::try_from(u64::from(layers) / pattern).unwrap_or(layers)
        }
        // Qwen states a window that is off unless `use_sliding_window` is set; from `max_window_layers` on it then counts.
        "qwen2" | "qwen3" => {
            let on = files.text_config("use_sliding_window").and_then(Value::as_bool).unwrap_or(false);
            let from = files.text_config("max_window_layers").and_then(Value::as_u64).unwrap_or(28);
            if on { layers.saturating_sub(u32::try_from(from).unwrap_or(u32::MAX)) } else { 0 }
        }
        "mistral" => layers,
        _ => 0,
    }
}

/// Elements of all tensors; MLX packs a quantized weight into 32-bit words, beside `.scales` and `.biases` that are no parameters.
fn parameters(tensors: &[Tensor], quantization: Option<&Quantization>, files: &ModelFiles) -> u64 {
    let packed = match files.weights {
        Weights::Gguf(_) => None,
        Weights::Safetensors { .. } | Weights::Npz { .. } => quantization,
    };
    let names: std::collections::HashSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    let mut total = 0u64;
    for tensor in tensors {
        let elements = tensor.shape.iter().fold(1u64, |product, &size| product.saturating_mul(size));
        let layer = tensor.name.rsplit_once('.').map_or("", |(layer, _)| layer);
        let elements = match packed {
            Some(quantization) if names.contains(format!("{layer}.scales").as_str()) => {
                if tensor.name.ends_with(".weight") {
                    elements.saturating_mul(32) / u64::from(quantization.bits_of(layer).max(1))
                } else if tensor.name.ends_with(".scales") || tensor.name.ends_with(".biases") {
                    0
                } else {
                    elements
                }
            }
            _ => elements,
        };
        total = total.saturating_add(elements);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with the given config and tensors (name, dtype, shape), its data all zero.
    fn model(config: &str, tensors: &[(&str, &str, &[u64])]) -> (tempfile::TempDir, ModelFiles) {
        let folder = tempfile::tempdir().unwrap();
        let mut header = serde_json::Map::new();
        let mut offset = 0;
        for (name, dtype, shape) in tensors {
            let bits = super::super::safetensors::bits_per_element(dtype).unwrap();
            let bytes = shape.iter().product::<u64>() * bits / 8;
            let entry = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + bytes]});
            header.insert((*name).to_owned(), entry);
            offset += bytes;
        }
        let header = serde_json::to_vec(&header).unwrap();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(&header);
        file.resize(file.len() + offset as usize, 0);
        std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        let files = super::super::locate(folder.path().to_str().unwrap()).unwrap();
        (folder, files)
    }

    #[test]
    fn quantized_weights_count_as_what_they_stand_for() {
        let config = r#"{"model_type":"llama","num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,
            "hidden_size":64,"vocab_size":10,"quantization":{"group_size":64,"bits":4,"b":{"bits":8,"group_size":32},"c":false}}"#;
        let tensors: &[(&str, &str, &[u64])] = &[
            ("a.weight", "U32", &[10, 8]),
            ("a.scales", "F16", &[10, 1]),
            ("a.biases", "F16", &[10, 1]),
            ("b.weight", "U32", &[10, 16]),
            ("b.scales", "F16", &[10, 2]),
            ("b.biases", "F16", &[10, 2]),
            ("c.weight", "F16", &[10, 64]),
        ];
        let (_folder, files) = model(config, tensors);
        let summary = ModelSummary::new(&files, false).unwrap();
        assert_eq!(summary.parameters, 3 * 640);
        let quantization = summary.quantization.clone().unwrap();
        assert_eq!((quantization.bits, quantization.group_size, quantization.mode.as_str()), (4, 64, "affine"));
        assert_eq!(quantization.overrides, BTreeMap::from([("b".to_owned(), Some((8, 32))), ("c".to_owned(), None)]));
        assert_eq!(summary.dtypes, BTreeMap::from([("U32".to_owned(), 960), ("F16".to_owned(), 1280 + 120)]));
        // 2 layers × keys and values × 2 heads × 16 × 2 bytes.
        assert_eq!(summary.kv_bytes_per_token(2), (256, 0));
        assert_eq!(summary.supported, Ok(()));
    }

    #[test]
    fn whisper_hears() {
        let config = r#"{"model_type":"whisper","d_model":384,"encoder_layers":4,"encoder_attention_heads":6,"decoder_layers":2,
            "decoder_attention_heads":6,"num_hidden_layers":4,"num_mel_bins":80,"max_source_positions":1500,
            "max_target_positions":448,"vocab_size":51865}"#;
        let (_folder, files) = model(config, &[]);
        let summary = ModelSummary::new(&files, false).unwrap();
        assert_eq!(summary.supported, Ok(()));
        assert_eq!((summary.layers, summary.heads, summary.head_dim, summary.context_length), (2, 6, 64, Some(448)));
        assert_eq!(summary.encoder, Some(EncoderSummary { layers: 4, heads: 6, mel_bins: 80, tokens: 1500 }));
        assert_eq!(summary.encoder.map(|encoder| encoder.window_seconds()), Some(30.0));
        // 2 layers × keys and values × 384 × 2 bytes, for a token and for all that was heard.
        assert_eq!((summary.kv_bytes_per_token(2), summary.cross_bytes_per_row(2)), ((3072, 0), 3072 * 1500));
        assert_eq!(summary.inputs, ["audio"]);
    }

    #[test]
    fn windows_are_told_apart() {
        let gemma = r#"{"model_type":"gemma3_text","num_hidden_layers":18,"num_attention_heads":4,"num_key_value_heads":1,
            "head_dim":256,"sliding_window":512,"sliding_window_pattern":6}"#;
        let (_folder, files) = model(gemma, &[]);
        let summary = ModelSummary::new(&files, true).unwrap();
        assert_eq!((summary.full_layers, summary.window_layers, summary.window_tokens), (3, 15, Some(512)));
        assert_eq!(summary.kv_bytes_per_token(2), (3 * 1024, 15 * 1024));

        let qwen = r#"{"model_type":"qwen2","num_hidden_layers":24,"sliding_window":32768,"use_sliding_window":false}"#;
        let (_folder, files) = model(qwen, &[]);
        let summary = ModelSummary::new(&files, true).unwrap();
        assert_eq!((summary.full_layers, summary.window_layers, summary.window_tokens), (24, 0, None));

        let typed = r#"{"model_type":"llama","num_hidden_layers":2,"sliding_window":8,
            "layer_types":["sliding_attention","full_attention"]}"#;
        let (_folder, files) = model(typed, &[]);
        assert_eq!(ModelSummary::new(&files, true).unwrap().window_layers, 1);
    }

    #[test]
    fn what_cannot_be_run_says_why() {
        let (_folder, files) = model(r#"{"model_type":"gemma3","text_config":{"num_hidden_layers":2}}"#, &[]);
        let summary = ModelSummary::new(&files, true).unwrap();
        assert!(summary.supported.unwrap_err().contains("takes more than text, which is not yet supported"));
        assert_eq!(summary.layers, 2);
    }
}
