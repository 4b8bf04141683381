//! One file a family, named as config.json's `model_type`.

mod ahead;
mod decoder;
mod experts;
mod gemma3_text;
mod gemma4;
mod host_decoder;
mod layers;
mod llama;
mod quantized;
mod qwen2;
mod qwen3;
mod rope;
mod whisper;

#[cfg(test)]
mod golden_test;
#[cfg(test)]
mod kernel_test;
#[cfg(test)]
mod logprobs_test;
#[cfg(test)]
mod prefix_test;
#[cfg(test)]
mod whisper_golden_test;

pub use experts::ExpertLinear;
pub use layers::{Embedding, LayerNorm, Linear, RmsNorm};
pub use quantized::{Mode, Quantized, QuantizedMatrix};

use std::path::PathBuf;

use mlx_rs::Array;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{
    EngineError,
    cache::{Cache, CrossLayout, LayerLayout, Step},
    ffi,
    weights::{Loader, WeightError},
};
use crate::schedule::{EncodePrice, Medium};

/// Sizes in config.json beyond this are a mistake.
const SIZE_MAX: i32 = 1 << 20;
/// And so are more layers than this: the deepest model here has 60.
const LAYERS_MAX: usize = 256;

/// A causal language model, or the decoder of a model with an encoder. The cache is an argument, never a field.
pub trait Model {
    /// What each layer keeps, in order.
    fn cache_layout(&self) -> Vec<LayerLayout>;

    /// (N) token ids, placed as `step` says -> (N, hidden), normalized.
    fn forward(&self, tokens: &Array, step: &Step, cache: &mut Cache) -> Result<Array, EngineError>;

    /// (N, hidden) -> (N, vocabulary)
    fn logits(&self, hidden: &Array) -> Result<Array, EngineError>;

    fn vocabulary(&self) -> u32;

    /// What a pass takes beside cache and logits, with activations of `dtype_bytes`.
    fn scratch(&self, dtype_bytes: u64) -> Scratch;

    /// [`Cache::copy_prefix`], by what the device has for it.
    fn copy_prefix(&self, cache: &mut Cache, from: i32, slots: &[i32], tokens: i32) -> Result<(), EngineError> {
        cache.copy_prefix(from, slots, tokens)
    }

    /// Whether a pass may hold tokens of no sequence, so that passes come in few sizes.
    fn pads(&self) -> bool {
        false
    }

    /// Whether keys and values depend on the tokens up to theirs alone, so that another sequence that starts with those can take
    /// them over.
    fn shares_prefixes(&self) -> bool;

    /// What hears for this model; its decoder attends to what [`Cache::store_cross`] was given.
    fn encoder(&self) -> Option<&dyn Encoder> {
        None
    }

    /// What sees and hears for this model: its soft tokens stand where a prompt has placeholders
    /// ([`Step::with_soft_tokens`](super::cache::Step::with_soft_tokens)).
    fn towers(&self) -> Option<&dyn Towers> {
        None
    }
}

/// [`Towers::encode_prices`] of the model that config.json describes, before its weights are loaded.
pub fn encode_prices(config: &Value, on_gpu: bool, float32: bool) -> [EncodePrice; 2] {
    match config.get("model_type").and_then(Value::as_str) {
        Some("gemma4" | "gemma4_unified") => gemma4::encode_prices(config, on_gpu, float32),
        _ => Default::default(),
    }
}

/// Bytes that a pass takes for what it computes on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scratch {
    /// Of a pass with prompts, for each of its tokens, and for each pair of a prompt token and one of its own context.
    pub prefill_bytes_per_token: u64,
    pub prefill_bytes_per_pair: u64,
    /// Of either, for each slot.
    pub bytes_per_slot: u64,
    /// Of a pass without prompts, for each slot.
    pub decode_bytes_per_slot: u64,
}

/// What makes soft tokens of images and recordings.
pub trait Towers {
    /// Soft tokens of each medium, (its tokens, hidden) each. What a medium gives does not depend on the others. On the CPU it is
    /// computed before this returns.
    fn encode(&self, media: &[&Medium]) -> Result<Vec<Array>, EngineError>;

    /// Scratch of encoding an image, and a recording.
    fn encode_prices(&self, dtype_bytes: u64) -> [EncodePrice; 2];

    /// Bytes of a soft token until its place in the prompt has been computed.
    fn soft_token_bytes(&self, dtype_bytes: u64) -> u64;
}

/// The half of a speech model that hears.
pub trait Encoder {
    /// Frames and bins of the features that it takes.
    fn input(&self) -> (i32, i32);

    /// What cross-attention keeps for each slot.
    fn cross_layout(&self) -> CrossLayout;

    /// (B, frames, bins) -> (B, tokens, hidden). On the CPU it is computed before this returns.
    fn encode(&self, features: &Array) -> Result<Array, EngineError>;

    /// Keys and values of the decoder's layer `layer`: (B, tokens, hidden) -> (B, heads, tokens, head_dim) each.
    fn cross(&self, layer: usize, encoded: &Array) -> Result<(Array, Array), EngineError>;

    /// Keeps what every layer of the decoder attends to of the inputs `encoded` (B, tokens, hidden), one in each of `slots`, in
    /// ascending order. A step's writes must all be built before its reads.
    fn hear(&self, encoded: &Array, slots: &[i32], cache: &mut Cache) -> Result<(), EngineError>;

    /// Bytes of scratch that encoding `rows` inputs at once takes, with activations of `dtype_bytes`.
    fn encode_bytes(&self, rows: u64, dtype_bytes: u64) -> u64;
}

/// [`Encoder::hear`] by [`Cache::store_cross`].
fn hear_plainly(encoder: &dyn Encoder, encoded: &Array, slots: &[i32], cache: &mut Cache) -> Result<(), EngineError> {
    for layer in 0..encoder.cross_layout().layers {
        let (keys, values) = encoder.cross(layer, encoded)?;
        for (row, &slot) in slots.iter().enumerate() {
            cache.store_cross(layer, slot, &row_of(&keys, row as i32)?, &row_of(&values, row as i32)?)?;
        }
    }
    Ok(())
}

/// Row `row` of (B, …) as (1, …).
fn row_of(array: &Array, row: i32) -> Result<Array, EngineError> {
    let (mut start, mut end) = (vec![0; array.ndim()], array.shape().to_vec());
    (start[0], end[0]) = (row, row + 1);
    ffi::slice(array, &start, &end)
}

/// Builds the family that `model_type` names.
pub fn load(config: &Value, loader: Loader) -> Result<Box<dyn Model>, WeightError> {
    match config.get("model_type").and_then(Value::as_str).unwrap_or_default() {
        "llama" | "mistral" => llama::load(config, loader),
        "qwen2" => qwen2::load(config, loader),
        "qwen3" => qwen3::load(config, loader),
        "whisper" => Ok(Box::new(whisper::load(config, loader)?)),
        "gemma3_text" => gemma3_text::load(config, loader),
        "gemma4" | "gemma4_text" | "gemma4_unified" | "gemma4_unified_text" => Ok(Box::new(gemma4::load(config, loader)?)),
        other => Err(WeightError::Config(format!("the family '{other}' is not yet supported"))),
    }
}

/// Whether the weights in `files` are those that loading the model takes, by what their headers say: every tensor that is missing,
/// misshapen or left over, in the words of loading. Nothing else of them is read. GGUF files and npz archives, which MLX and
/// [`Loader`] read whole, are not looked at.
pub fn check_weights(files: &[PathBuf], config: &Value) -> Result<(), WeightError> {
    if !files.iter().all(|file| file.extension().is_some_and(|extension| extension == "safetensors")) {
        return Ok(());
    }
    // No kernels are built for a GPU that computes nothing.
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    load(config, Loader::look(files, config)?).map(drop)
}

fn parse<T: DeserializeOwned>(config: &Value) -> Result<T, WeightError> {
    T::deserialize(config).map_err(|error| WeightError::Config(error.to_string()))
}

/// Qwen's checkpoints state a window that is off; no public one has it on, and mlx-lm would leave it out in silence.
fn refuse_window(use_sliding_window: bool) -> Result<(), WeightError> {
    if use_sliding_window {
        return Err(WeightError::Config("use_sliding_window = true is not yet supported for this family".into()));
    }
    Ok(())
}

/// Transformers 5 nests `rope_theta` and the scaling under `rope_parameters`.
fn rope_theta(own: Option<f64>, parameters: Option<&Value>) -> Option<f64> {
    own.or_else(|| parameters?.get("rope_theta")?.as_f64())
}
