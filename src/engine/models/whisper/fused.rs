//! Whisper by the kernels of [`cuda`](crate::engine::cuda): of a layer of the decoder twelve operations, and of the encoder nine,
//! whichever windows share a pass.

use mlx_rs::{Array, fast, ops, transforms};

use super::{AudioEncoder, Config, DecoderLayer, Whisper, scale};
use crate::engine::{
    EngineError,
    cache::{Cache, Step},
    cuda::{CrossKernels, Geometry, Kernels, Rotary},
    ffi,
    models::{
        LayerNorm, Linear, Scratch,
        ahead::{Ahead, LAYERS_HELD, TOKENS_MIN},
    },
};

/// Windows that are encoded in one piece: so few, the host hands over without waiting for the device.
const WINDOWS_HELD: u64 = 2;

/// See the [module](self).
pub struct Fused {
    kernels: Kernels,
    cross: CrossKernels,
    /// Of a rope that does not turn: positions are in the hidden states.
    rotary: Rotary,
    /// (1) float32
    cross_scale: Array,
}

impl Fused {
    /// None where the kernels do not fit the model or the device.
    pub fn new(whisper: &Whisper) -> Result<Option<Self>, EngineError> {
        let config = &whisper.config;
        let merged =
            whisper.layers.iter().all(|layer| layer.self_attn.qkv.merged().is_some() && layer.encoder_attn.kv.merged().is_some())
                && whisper.encoder.layers.iter().all(|layer| layer.self_attn.qkv.merged().is_some());
        let widths = [config.d_model, config.encoder_ffn_dim(), config.decoder_ffn_dim()];
        if !merged || widths.iter().any(|width| width % 8 != 0) {
            return Ok(None);
        }
        let (head_dim, dtype) = (config.decoder_head_dim(), whisper.embed_positions.dtype());
        let heads = config.decoder_attention_heads;
        let geometry = Geometry { heads, kv_heads: heads, head_dim, dtype, traditional: false, normed: false };
        let kernels = Kernels::new(geometry, config.decoder_ffn_dim(), false)?;
        let cross = CrossKernels::new(geometry, config.d_model, whisper.layer_norm.eps)?;
        let (Some(kernels), Some(cross)) = (kernels, cross) else { return Ok(None) };
        let still = vec![0.0; head_dim as usize / 2];
        let rotary = Rotary::new(&still, 1.0, scale(head_dim), None, dtype)?;
        let cross_scale = Array::from_slice(&[scale(head_dim)], &[1]);
        cross_scale.eval()?;
        Ok(Some(Self { kernels, cross, rotary, cross_scale }))
    }

    /// [`Whisper::forward`](super::Model::forward) behind the embedding.
    pub fn forward(&self, whisper: &Whisper, hidden: &Array, step: &Step, cache: &Cache) -> Result<Array, EngineError> {
        let (places, all) = (self.kernels.places(step), CrossKernels::places(step));
        let layers = &whisper.layers;
        let Some(first) = layers.first() else { return whisper.layer_norm.forward(hidden) };
        let mut hidden = hidden.clone();
        let mut normed = first.self_attn_layer_norm.forward(&hidden)?;
        let mut ahead = Ahead::new(TOKENS_MIN);
        for (index, layer) in layers.iter().enumerate() {
            let qkv = whole(layer.self_attn.qkv.merged())?.forward(&normed)?;
            let attended = self.kernels.attend(index, &qkv, &self.rotary, cache, &places)?;
            (hidden, normed) = self.add(&hidden, &layer.self_attn.out_proj, &attended, &layer.encoder_attn_layer_norm)?;
            let queries = layer.encoder_attn.q_proj.forward(&normed)?;
            let heard = self.cross.attend(index, &queries, &self.cross_scale, cache, &all)?;
            (hidden, normed) = self.add(&hidden, &layer.encoder_attn.out_proj, &heard, &layer.final_layer_norm)?;
            let middle = self.cross.gelu(&layer.mlp.fc1.forward(&normed)?)?;
            let next = layers.get(index + 1).map_or(&whisper.layer_norm, |next| &next.self_attn_layer_norm);
            (hidden, normed) = self.add(&hidden, &layer.mlp.fc2, &middle, next)?;
            ahead.hand_over(&normed, |done| step.wait_for(done))?;
        }
        Ok(normed)
    }

    /// (B, frames, bins) -> (B, tokens, hidden)
    pub fn encode(&self, encoder: &AudioEncoder, features: &Array) -> Result<Array, EngineError> {
        let convolve = |x: &Array, (weight, bias): &(Array, Array), stride: i32| -> Result<Array, EngineError> {
            let hidden = ops::conv1d(x, weight, stride, 1, None, None)?.add(bias)?;
            let flat = hidden.reshape(&[-1, hidden.dim(2)])?;
            Ok(self.cross.gelu(&flat)?.reshape(hidden.shape())?)
        };
        let features = features.as_dtype(encoder.embed_positions.dtype())?;
        let hidden = convolve(&convolve(&features, &encoder.conv1, 1)?, &encoder.conv2, 2)?.add(&encoder.embed_positions)?;
        let [batch, tokens, width] = *hidden.shape() else {
            return Err(EngineError::Mlx("the encoder's hidden states have three axes".into()));
        };
        let Some(first) = encoder.layers.first() else { return encoder.layer_norm.forward(&hidden) };
        let mut hidden = hidden.reshape(&[batch * tokens, width])?;
        let mut normed = first.self_attn_layer_norm.forward(&hidden)?;
        let mut ahead = Ahead::new(tokens * (WINDOWS_HELD as i32 + 1));
        for (index, layer) in encoder.layers.iter().enumerate() {
            let own = &layer.self_attn;
            // (B × T, 3 × hidden) -> (B, heads, T, D), three times the same numbers seen otherwise
            let qkv = whole(own.qkv.merged())?.forward(&normed)?.reshape(&[batch, tokens, 3, own.heads, own.head_dim])?;
            let part = |index: i32| -> Result<Array, EngineError> {
                let part = ffi::slice(&qkv, &[0, 0, index, 0, 0], &[batch, tokens, index + 1, own.heads, own.head_dim])?;
                Ok(part.squeeze_axes(&[2])?.transpose_axes(&[0, 2, 1, 3])?)
            };
            let attended = fast::scaled_dot_product_attention(part(0)?, part(1)?, part(2)?, scale(own.head_dim), None, None)?;
            // Back into rows, in a buffer of its own: the kernels take no strides.
            let attended = attended.transpose_axes(&[0, 2, 1, 3])?.reshape(&[batch * tokens, width])?;
            (hidden, normed) = self.add(&hidden, &own.out_proj, &attended, &layer.final_layer_norm)?;
            let middle = self.cross.gelu(&layer.mlp.fc1.forward(&normed)?)?;
            let next = encoder.layers.get(index + 1).map_or(&encoder.layer_norm, |next| &next.self_attn_layer_norm);
            (hidden, normed) = self.add(&hidden, &layer.mlp.fc2, &middle, next)?;
            ahead.hand_over(&normed, |done| Ok(done.eval()?))?;
        }
        Ok(normed.reshape(&[batch, tokens, width])?)
    }

    /// [`Encoder::hear`](super::Encoder::hear), in place.
    pub fn hear(&self, layers: &[DecoderLayer], encoded: &Array, slots: &[i32], cache: &Cache) -> Result<(), EngineError> {
        let [batch, tokens, width] = *encoded.shape() else {
            return Err(EngineError::Mlx("encoded inputs have three axes".into()));
        };
        if batch as usize != slots.len() {
            return Err(EngineError::Mlx(format!("{batch} inputs for {} slots", slots.len())));
        }
        let flat = encoded.reshape(&[batch * tokens, width])?;
        let slots = Array::from_slice(slots, &[batch]);
        for (index, layer) in layers.iter().enumerate() {
            let kv = whole(layer.encoder_attn.kv.merged())?.forward(&flat)?;
            transforms::async_eval([&self.cross.store(index, &kv, &slots, cache)?])?;
        }
        Ok(())
    }

    pub fn scratch(&self, config: &Config, dtype_bytes: u64) -> Scratch {
        let (hidden, ffn) = (config.d_model as u64, config.decoder_ffn_dim() as u64);
        // Projections, turned queries and attention with its assembly; the queries to what is heard, and what comes of them; sums
        // and norms.
        let layer = dtype_bytes * (17 * hidden + 2 * ffn);
        let prefill = LAYERS_HELD * layer;
        // One step computed, one launched behind it.
        let decode = 2 * config.decoder_layers as u64 * layer;
        Scratch {
            prefill_bytes_per_token: prefill,
            prefill_bytes_per_pair: 0,
            bytes_per_slot: prefill.min(decode),
            decode_bytes_per_slot: decode.saturating_sub(prefill),
        }
    }

    pub fn encode_bytes(config: &Config, rows: u64, dtype_bytes: u64) -> u64 {
        let (hidden, ffn, tokens) = (config.d_model as u64, config.encoder_ffn_dim() as u64, config.max_source_positions as u64);
        let frames = 2 * tokens * (config.num_mel_bins as u64 * 4 + hidden * 5);
        let layer = tokens * (12 * hidden + 2 * ffn);
        // Keys and values of every layer of the decoder, on their way into the cache.
        let heard = tokens * 2 * hidden * config.decoder_layers as u64;
        let layers = config.encoder_layers as u64;
        let held = (LAYERS_HELD * rows).max(WINDOWS_HELD.min(rows) * layers);
        dtype_bytes * (rows * (frames + heard) + held * layer)
    }

    fn add(&self, x: &Array, linear: &Linear, y: &Array, norm: &LayerNorm) -> Result<(Array, Array), EngineError> {
        self.cross.add_and_norm(x, &linear.forward(y)?, &norm.weight, &norm.bias)
    }
}

/// What [`Fused::new`] has seen to.
fn whole(merged: Option<&Linear>) -> Result<&Linear, EngineError> {
    merged.ok_or_else(|| EngineError::Mlx("products that the kernels take as one are apart".into()))
}
