//! A GGUF file's tensors under Hugging Face names. MLX reads the file and keeps Q4_0, Q4_1 and Q8_0 quantized (affine, groups of
//! 32).
//!
//! Names and the row order of q and k: llama.cpp's `convert_hf_to_gguf.py` and `gguf-py/gguf/tensor_mapping.py`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use mlx_rs::{Array, io::GgufFile};
use serde_json::Value;

use super::{WeightError, reason};

/// (GGUF module, Hugging Face module) inside a layer; both end in `.weight`, `.bias`, `.scales` or `.biases`.
const LAYER_MODULES: [(&str, &str); 14] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
    ("rope_freqs", "self_attn.rope_freqs"),
];

pub fn read(path: &Path, config: &Value) -> Result<BTreeMap<String, Array>, WeightError> {
    let fail = |reason: String| WeightError::Read { path: PathBuf::from(path), reason };
    let family = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let number = |key: &str| config.get(key).and_then(Value::as_i64).unwrap_or(0) as i32;
    let (heads, kv_heads) = (number("num_attention_heads"), number("num_key_value_heads"));
    let file = GgufFile::load(path).map_err(|error| fail(explain(&reason(&error))))?;
    let mut tensors = BTreeMap::new();
    #[expect(clippy::iter_over_hash_type, reason = "what goes round ends in a sorted map")]
    for (name, array) in file.arrays().map_err(|error| fail(reason(&error)))? {
        let Some(renamed) = rename(&name, family) else {
            return Err(fail(format!("it holds a tensor '{name}', which no supported family has")));
        };
        let array = match family {
            // llama.cpp stores the two halves of a rotary pair side by side; Hugging Face and MLX store all first halves first.
            "llama" | "mistral" if name.contains("attn_q.") => halves_first(&array, heads)?,
            "llama" | "mistral" if name.contains("attn_k.") => halves_first(&array, kv_heads)?,
            // llama.cpp stores 1 + weight.
            "gemma3_text" if name.contains("norm") => array.subtract(Array::from_f32(1.0).as_dtype(array.dtype())?)?,
            _ => array,
        };
        tensors.insert(renamed, array);
    }
    Ok(tensors)
}

fn explain(reason: &str) -> String {
    if reason.contains("gguf_tensor_to_f16") {
        return format!(
            "{reason}; MLX reads tensors of the types F32, F16, Q4_0, Q4_1 and Q8_0: take another quantization of this model, or its \
             safetensors"
        );
    }
    reason.to_owned()
}

fn rename(name: &str, family: &str) -> Option<String> {
    let (module, part) = name.rsplit_once('.')?;
    let top = match module {
        "token_embd" => Some("model.embed_tokens"),
        "output_norm" => Some("model.norm"),
        "output" => Some("lm_head"),
        "rope_freqs" => Some("model.rope_freqs"),
        _ => None,
    };
    if let Some(top) = top {
        return Some(format!("{top}.{part}"));
    }
    let (layer, module) = module.strip_prefix("blk.")?.split_once('.')?;
    layer.parse::<u32>().ok()?;
    let mut renamed = LAYER_MODULES.iter().find(|(gguf, _)| *gguf == module)?.1;
    if family == "gemma3_text" && module == "ffn_norm" {
        renamed = "pre_feedforward_layernorm";
    }
    Some(format!("model.layers.{layer}.{renamed}.{part}"))
}

/// Rows (heads × pairs × 2, …) -> (heads × 2 × pairs, …); rows of packed words move alike.
fn halves_first(array: &Array, heads: i32) -> Result<Array, WeightError> {
    let shape = array.shape().to_vec();
    let rows = shape[0];
    if heads <= 0 || rows % (heads * 2) != 0 {
        return Err(WeightError::Config(format!("{rows} rows of attention do not divide into {heads} heads")));
    }
    let columns: i32 = shape[1..].iter().product();
    let pairs = rows / heads / 2;
    Ok(array.reshape(&[heads, pairs, 2, columns])?.swap_axes(1, 2)?.reshape(&shape)?)
}
