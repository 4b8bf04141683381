//! What a model costs on a device, as the scheduler's budget counts.

use mlx_rs::Dtype;

use super::{device, models::Model};
use crate::schedule::{EncodePrice, Price};

/// Slots grow in steps of this many tokens: each step of growth copies the cache once.
pub const SLOT_TOKENS_STEP: u32 = 64;

/// Windows of recordings, or images and recordings of prompts, encoded at once: on a GPU one alone does not fill it, on the CPU
/// more would only take more memory.
pub fn encoded_at_once(on_gpu: bool) -> usize {
    if on_gpu { 8 } else { 1 }
}

/// What a row that asks for log-probabilities takes for each token of the vocabulary: its logits negated, in float32, and their
/// order.
pub const LOGPROBS_BYTES: u64 = 8;

/// With keys and values of `dtype`. `greedy` where no row is sampled but by its likeliest token.
pub fn of(model: &dyn Model, dtype: Dtype, on_gpu: bool, greedy: bool) -> Price {
    let bytes = if dtype == Dtype::Float32 { 4 } else { 2 };
    let scratch = model.scratch(bytes);
    // A row's logits, twice where one step is computed behind another; of a sampled row their float32 copy and its cumulative
    // sums too.
    let logit_bytes = match (greedy, on_gpu) {
        (true, true) => 2 * bytes,
        (true, false) => bytes,
        (false, _) if model.encoder().is_some() => 16,
        (false, _) => 16 + LOGPROBS_BYTES,
    };
    let mut price = Price {
        full_bytes_per_token: 0,
        windows: Vec::new(),
        fixed_bytes_per_slot: u64::from(model.vocabulary()) * logit_bytes + scratch.bytes_per_slot,
        slot_tokens_step: SLOT_TOKENS_STEP,
        prefill_bytes_per_token: scratch.prefill_bytes_per_token,
        prefill_bytes_per_pair: scratch.prefill_bytes_per_pair,
        decode_bytes_per_slot: scratch.decode_bytes_per_slot,
        padding_tokens: if model.pads() { device::PADDING_MAX } else { 0 },
        window_bytes: 0,
        image: EncodePrice::default(),
        audio: EncodePrice::default(),
        media_at_once: encoded_at_once(on_gpu) as u32,
        soft_bytes_per_token: 0,
        prefixes: model.shares_prefixes(),
    };
    if let Some(encoder) = model.encoder() {
        price.fixed_bytes_per_slot += encoder.cross_layout().bytes_per_slot(bytes);
        price.window_bytes = encoder.encode_bytes(encoded_at_once(on_gpu) as u64, bytes);
    }
    if let Some(towers) = model.towers() {
        price.soft_bytes_per_token = towers.soft_token_bytes(bytes);
        [price.image, price.audio] = towers.encode_prices(bytes);
    }
    for layout in model.cache_layout() {
        let per_token = 2 * bytes * (layout.kv_heads * layout.head_dim) as u64;
        match layout.window {
            None => price.full_bytes_per_token += per_token,
            Some(window) => match price.windows.iter_mut().find(|(tokens, _)| *tokens == window as u32) {
                Some((_, total)) => *total += per_token,
                None => price.windows.push((window as u32, per_token)),
            },
        }
    }
    price
}
