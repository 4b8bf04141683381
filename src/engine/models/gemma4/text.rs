//! The text model: embeddings, what each layer takes in of a token besides the hidden state, layers, logits.

use mlx_rs::{Array, ops};

use super::{
    super::{Embedding, Linear, RmsNorm, Scratch, layers::Output},
    config::{KeysOf, LayerSizes, TextConfig},
    layer::Layer,
};
use crate::engine::{
    EngineError,
    cache::{Cache, LayerLayout, Step},
    device, ffi,
    weights::{Loader, WeightError},
};

/// On NVIDIA's GPUs MLX gives back what a graph of up to a hundred operations has computed when all of it is done: so many
/// times what is needed at once, measured with the sizes of E2B.
const LAYERS_IN_GRAPH: u64 = 4;

pub struct TextModel {
    embed_tokens: Embedding,
    per_layer: Option<PerLayerInputs>,
    layers: Vec<Layer>,
    norm: RmsNorm,
    output: Output,
    config: TextConfig,
    sizes: Vec<LayerSizes>,
    on_cpu: bool,
}

/// For each layer some numbers that depend on the token and on the hidden state that goes into the first layer.
struct PerLayerInputs {
    /// (vocabulary, layers × width)
    embed_tokens: Embedding,
    projection: Linear,
    norm: RmsNorm,
    layers: i32,
    width: i32,
}

impl TextModel {
    pub fn load(config: &TextConfig, loader: &mut Loader) -> Result<Self, WeightError> {
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let sizes = config.layers().map_err(WeightError::Config)?;
        let embed_tokens = loader.embedding("model.embed_tokens", config.vocab_size, hidden)?;
        let (layers, width) = (sizes.len() as i32, config.per_layer_inputs());
        let per_layer = match width {
            0 => None,
            width => Some(PerLayerInputs {
                embed_tokens: loader.embedding(
                    "model.embed_tokens_per_layer",
                    config.vocab_size_per_layer_input,
                    layers * width,
                )?,
                projection: loader.linear("model.per_layer_model_projection", hidden, layers * width, false)?,
                norm: loader.rms_norm("model.per_layer_projection_norm", width, eps)?,
                layers,
                width,
            }),
        };
        let mut loaded = Vec::with_capacity(sizes.len());
        for (index, &own) in sizes.iter().enumerate() {
            loaded.push(Layer::load(config, own, index, loader)?);
        }
        Ok(Self {
            embed_tokens,
            per_layer,
            layers: loaded,
            norm: loader.rms_norm("model.norm", hidden, eps)?,
            output: Output::load(loader, config.tie_word_embeddings, hidden, config.vocab_size)?,
            config: config.clone(),
            sizes,
            on_cpu: device::is_cpu()?,
        })
    }

    pub fn cache_layout(&self) -> Vec<LayerLayout> {
        // Layers without keys of their own are the last.
        self.layers.iter().map_while(Layer::layout).collect()
    }

    /// (N) token ids -> (N, hidden), scaled.
    pub fn embed(&self, tokens: &Array) -> Result<Array, EngineError> {
        scaled(&self.embed_tokens.forward(tokens)?, f64::from(self.config.hidden_size).sqrt())
    }

    /// (N, hidden) as [`TextModel::embed`] gives it -> (N, hidden), normalized. Per-layer inputs are looked up by `ids` (N).
    pub fn forward(&self, mut hidden: Array, ids: &Array, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let inputs = self.per_layer.as_ref().map(|per_layer| per_layer.forward(&hidden, ids)).transpose()?;
        for (index, layer) in self.layers.iter().enumerate() {
            let input = match &inputs {
                // (N, layers, width) -> (N, width)
                Some(inputs) => {
                    let (tokens, at, width) = (inputs.dim(0), index as i32, inputs.dim(2));
                    Some(ffi::slice(inputs, &[0, at, 0], &[tokens, at + 1, width])?.reshape(&[tokens, width])?)
                }
                None => None,
            };
            hidden = layer.forward(&hidden, input.as_ref(), index, step, cache)?;
        }
        cache.end_pass();
        self.norm.forward(&hidden)
    }

    /// (N, hidden) -> (N, vocabulary)
    pub fn logits(&self, hidden: &Array) -> Result<Array, EngineError> {
        let logits = self.output.forward(&self.embed_tokens, hidden)?;
        let Some(cap) = self.config.final_logit_softcapping else { return Ok(logits) };
        let cap = Array::from_f32(cap).as_dtype(logits.dtype())?;
        Ok(ops::tanh(logits.divide(&cap)?)?.multiply(cap)?)
    }

    pub fn vocabulary(&self) -> u32 {
        self.config.vocab_size as u32
    }

    pub fn scratch(&self, dtype_bytes: u64) -> Scratch {
        let config = &self.config;
        let heads = config.num_attention_heads;
        let widest = |of: &dyn Fn(&LayerSizes) -> i32| self.sizes.iter().map(of).max().unwrap_or(0);
        let attention = widest(&|layer| 3 * (heads * layer.head_dim + 2 * layer.kv_heads * layer.head_dim));
        let mlp = widest(&|layer| 3 * layer.intermediate);
        // Looked up, projected, and their sum.
        let per_layer = 3 * config.per_layer_inputs() * self.sizes.len() as i32;
        // Each token as often as it has experts, into them and out of them.
        let mixture = config.mixture().ok().flatten();
        let mixture = mixture.map_or(0, |of| of.taken * (3 * of.intermediate + 3 * config.hidden_size) + 2 * of.experts);
        // Of layers whose keys others look up: they stay until the pass has ended.
        let kept: i32 = self
            .sizes
            .iter()
            .filter(|layer| layer.keys == KeysOf::Own { kept: true })
            .map(|layer| 2 * layer.kv_heads * layer.head_dim)
            .sum();
        let numbers = 8 * config.hidden_size + attention + mlp + per_layer + mixture + kept;
        Scratch {
            prefill_bytes_per_token: dtype_bytes * numbers as u64 * if self.on_cpu { 1 } else { LAYERS_IN_GRAPH },
            // Scores and their softmax.
            prefill_bytes_per_pair: heads as u64 * 4 * 2,
            bytes_per_slot: 0,
            decode_bytes_per_slot: 0,
        }
    }
}

impl PerLayerInputs {
    /// (N, hidden) and (N) ids -> (N, layers, width)
    fn forward(&self, hidden: &Array, ids: &Array) -> Result<Array, EngineError> {
        let shape = [hidden.dim(0), self.layers, self.width];
        let of_tokens = scaled(&self.embed_tokens.forward(ids)?, f64::from(self.width).sqrt())?.reshape(&shape)?;
        let projected = scaled(&self.projection.forward(hidden)?, f64::from(hidden.dim(1)).powf(-0.5))?;
        let projected = self.norm.forward(&projected.reshape(&shape)?)?;
        scaled(&projected.add(of_tokens)?, 0.5f64.sqrt())
    }
}

/// By a factor in the format of what it scales, as MLX takes a number of Python's.
fn scaled(x: &Array, factor: f64) -> Result<Array, EngineError> {
    Ok(x.multiply(Array::from_f32(factor as f32).as_dtype(x.dtype())?)?)
}
