//! The decoder's forward pass by the kernels of [`cuda`](crate::engine::cuda): eight operations a layer rather than twenty.

use mlx_rs::{Array, transforms};

use super::{Decoder, Layer, Qkv, add_normed};
use crate::engine::{
    EngineError,
    cache::{Cache, Step},
    cuda::{Geometry, Kernels, Places, Rotary},
    host::RotationKind,
    models::{
        Linear, RmsNorm, Scratch,
        ahead::{Ahead, LAYERS_HELD, TOKENS_MIN},
        layers::Activation,
    },
};

/// See the [module](self).
pub struct Fused {
    kernels: Kernels,
    /// One a layer.
    rotaries: Vec<Rotary>,
}

impl Fused {
    /// None where the kernels do not fit the model or the device.
    pub fn new(decoder: &Decoder, activation: Activation) -> Result<Option<Self>, EngineError> {
        let Some(first) = decoder.layers.first() else { return Ok(None) };
        let (own, dtype) = (&first.attention, decoder.norm.weight.dtype());
        let geometry = Geometry {
            heads: own.heads,
            kv_heads: own.kv_heads,
            head_dim: own.head_dim,
            dtype,
            traditional: own.rope.rotation()?.neighbours,
            normed: own.q_norm.is_some(),
        };
        let gelu = activation == Activation::GeluTanh;
        let Some(kernels) = Kernels::new(geometry, decoder.intermediate_size, gelu)? else { return Ok(None) };
        let mut rotaries = Vec::with_capacity(decoder.layers.len());
        for Layer { attention: own, mlp, .. } in &decoder.layers {
            let rotation = own.rope.rotation()?;
            let RotationKind::Fixed { frequencies, position_scale, scale } = rotation.kind else { return Ok(None) };
            let frequencies: Vec<f32> = frequencies.iter().map(|frequency| frequency * position_scale).collect();
            if mlp.merged().is_none() || !matches!(own.qkv, Qkv::Merged(_)) {
                return Ok(None);
            }
            let norms = own.q_norm.as_ref().zip(own.k_norm.as_ref());
            let norms = norms.map(|(q_norm, k_norm)| (&q_norm.weight, &k_norm.weight, q_norm.eps));
            rotaries.push(Rotary::new(&frequencies, scale, own.scale, norms, dtype)?);
        }
        Ok(Some(Self { kernels, rotaries }))
    }

    #[cfg(test)]
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    #[cfg(test)]
    pub fn rotary(&self, layer: usize) -> &Rotary {
        &self.rotaries[layer]
    }

    /// [`Decoder::forward`] behind the embedding and before the last norm. None where a number format is not the kernels'.
    pub fn forward(&self, decoder: &Decoder, hidden: &Array, step: &Step, cache: &mut Cache) -> Result<Option<Array>, EngineError> {
        if hidden.dtype() != self.kernels.dtype() {
            return Ok(None);
        }
        let places = self.kernels.places(step);
        let mut hidden = hidden.clone();
        let mut ahead = Ahead::new(TOKENS_MIN);
        for (index, (layer, rotary)) in decoder.layers.iter().zip(&self.rotaries).enumerate() {
            hidden = self.layer(layer, rotary, index, &hidden, step, &places, cache)?;
            ahead.hand_over(&hidden, |done| step.wait_for(done))?;
        }
        Ok(Some(hidden))
    }

    /// Given the bytes of a token's hidden state, queries, keys and gated space.
    pub fn scratch(&self, [hidden, queries, keys, intermediate]: [u64; 4], layers: usize, windows: bool) -> Scratch {
        let scores_per_pair = self.kernels.heads() * 4 * 2;
        // Two norms, two sums; projections, turned queries, attention and its assembly; gate, up and their product.
        let layer = 4 * hidden + 4 * queries + 2 * keys + 3 * intermediate;
        // What the host is ahead, and what it is at.
        let prefill = LAYERS_HELD * layer;
        // One step computed, one launched behind it.
        let decode = 2 * layers as u64 * (layer - 2 * queries);
        Scratch {
            prefill_bytes_per_token: prefill,
            // Where a window is left behind, the plain path's scores.
            prefill_bytes_per_pair: if windows { scores_per_pair } else { 0 },
            // Rows decode in the passes of prompts too.
            bytes_per_slot: prefill.min(decode),
            decode_bytes_per_slot: decode.saturating_sub(prefill),
        }
    }

    /// As [`Cache::copy_prefix`], in place.
    pub fn copy_prefix(&self, cache: &Cache, from: i32, slots: &[i32], tokens: i32) -> Result<(), EngineError> {
        let copies = (0..self.rotaries.len()).map(|layer| self.kernels.copy_prefix(cache, layer, from, slots, tokens));
        Ok(transforms::async_eval(copies.collect::<Result<Vec<_>, _>>()?.iter())?)
    }

    #[expect(clippy::too_many_arguments, reason = "a layer, its own part in the kernels, and the step")]
    fn layer(
        &self,
        layer: &Layer,
        rotary: &Rotary,
        index: usize,
        x: &Array,
        step: &Step,
        places: &Places,
        cache: &mut Cache,
    ) -> Result<Array, EngineError> {
        let own = &layer.attention;
        let normed = layer.input_norm.forward(x)?;
        // A ring that a chunk overwrites while its tokens still see it is the plain path's.
        let leaves = |window| step.places().chunks.iter().any(|chunk| chunk.start + chunk.length > window);
        let hidden = match &own.qkv {
            Qkv::Merged(qkv_proj) if !own.window.is_some_and(leaves) => {
                let attended = self.kernels.attend(index, &qkv_proj.forward(&normed)?, rotary, cache, places)?;
                add(x, &own.o_proj, &attended, layer.post_attention_norm.as_ref())?
            }
            _ => add_normed(x, own.forward(&normed, index, step, cache)?, layer.post_attention_norm.as_ref())?,
        };
        let normed = layer.feedforward_norm.forward(&hidden)?;
        match layer.mlp.merged() {
            Some((gate_up_proj, down_proj)) => {
                let middle = self.kernels.gate(&gate_up_proj.forward(&normed)?)?;
                add(&hidden, down_proj, &middle, layer.post_feedforward_norm.as_ref())
            }
            None => add_normed(&hidden, layer.mlp.forward(&normed)?, layer.post_feedforward_norm.as_ref()),
        }
    }
}

/// `x + linear(y)`, the product normalized where there is a norm.
fn add(x: &Array, linear: &Linear, y: &Array, norm: Option<&RmsNorm>) -> Result<Array, EngineError> {
    match norm {
        None => linear.forward_add(y, x),
        Some(_) => add_normed(x, linear.forward(y)?, norm),
    }
}
