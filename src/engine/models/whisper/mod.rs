//! Whisper: an encoder that hears 30 seconds, and a decoder that attends to it.
//!
//! Sources: arXiv:2212.04356; openai/whisper `whisper/model.py`; mlx-examples `whisper/mlx_whisper/whisper.py`; transformers
//! `modeling_whisper.py`.

mod fused;
#[cfg(test)]
mod fused_tests;

use mlx_rs::{Array, Dtype, fast, ops, transforms};
use serde::Deserialize;
use serde_json::Value;

use fused::Fused;

use super::{
    Embedding, Encoder, LAYERS_MAX, LayerNorm, Linear, Model, SIZE_MAX, Scratch, hear_plainly,
    layers::{gelu, split_heads},
    parse,
};
use crate::engine::{
    EngineError,
    cache::{Cache, CrossLayout, LayerLayout, Step},
    device, ffi, host,
    weights::{Loader, WeightError},
};

/// PyTorch's, which neither layout states.
const LAYER_NORM_EPS: f32 = 1e-5;
const KERNEL: i32 = 3;
/// The longest wave of the encoder's positions is this many times 2π tokens long.
const TIMESCALE_MAX: f32 = 10_000.0;

#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    pub d_model: i32,
    pub encoder_layers: usize,
    pub encoder_attention_heads: i32,
    pub encoder_ffn_dim: Option<i32>,
    pub decoder_layers: usize,
    pub decoder_attention_heads: i32,
    pub decoder_ffn_dim: Option<i32>,
    pub num_mel_bins: i32,
    pub max_source_positions: i32,
    pub max_target_positions: i32,
    pub vocab_size: i32,
    pub activation_function: Option<String>,
    #[serde(default)]
    pub scale_embedding: bool,
}

pub struct Whisper {
    config: Config,
    encoder: AudioEncoder,
    embed_tokens: Embedding,
    /// (max_target_positions, hidden)
    embed_positions: Array,
    layers: Vec<DecoderLayer>,
    layer_norm: LayerNorm,
    fused: Option<Fused>,
}

impl Model for Whisper {
    fn cache_layout(&self) -> Vec<LayerLayout> {
        let (kv_heads, head_dim) = (self.config.decoder_attention_heads, self.config.decoder_head_dim());
        vec![LayerLayout { kv_heads, head_dim, window: None }; self.layers.len()]
    }

    fn forward(&self, tokens: &Array, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let positions = self.embed_positions.take_axis(step.positions(), 0)?;
        let mut hidden = self.embed_tokens.forward(tokens)?.add(positions)?;
        if let Some(fused) = &self.fused {
            return fused.forward(self, &hidden, step, cache);
        }
        for (index, layer) in self.layers.iter().enumerate() {
            hidden = layer.forward(&hidden, index, step, cache)?;
        }
        self.layer_norm.forward(&hidden)
    }

    fn logits(&self, hidden: &Array) -> Result<Array, EngineError> {
        self.embed_tokens.as_linear(hidden)
    }

    fn vocabulary(&self) -> u32 {
        self.config.vocab_size as u32
    }

    fn scratch(&self, dtype_bytes: u64) -> Scratch {
        if let Some(fused) = &self.fused {
            return fused.scratch(&self.config, dtype_bytes);
        }
        Scratch {
            prefill_bytes_per_token: dtype_bytes * (12 * self.config.d_model + 3 * self.config.decoder_ffn_dim()) as u64,
            // Scores and their softmax.
            prefill_bytes_per_pair: self.config.decoder_attention_heads as u64 * 4 * 2,
            bytes_per_slot: 0,
            decode_bytes_per_slot: 0,
        }
    }

    fn pads(&self) -> bool {
        self.fused.is_some()
    }

    fn shares_prefixes(&self) -> bool {
        // What is heard comes before them.
        false
    }

    fn encoder(&self) -> Option<&dyn Encoder> {
        Some(self)
    }
}

impl Encoder for Whisper {
    fn input(&self) -> (i32, i32) {
        (2 * self.config.max_source_positions, self.config.num_mel_bins)
    }

    fn cross_layout(&self) -> CrossLayout {
        CrossLayout {
            layers: self.layers.len(),
            heads: self.config.decoder_attention_heads,
            tokens: self.config.max_source_positions,
            head_dim: self.config.decoder_head_dim(),
        }
    }

    fn encode(&self, features: &Array) -> Result<Array, EngineError> {
        let (frames, bins) = self.input();
        if features.ndim() != 3 || features.shape()[1..] != [frames, bins] {
            return Err(EngineError::Mlx(format!(
                "the encoder takes features of {frames} frames × {bins} bins, and was given {:?}",
                features.shape()
            )));
        }
        match &self.fused {
            Some(fused) => fused.encode(&self.encoder, features),
            None => self.encoder.forward(features),
        }
    }

    fn cross(&self, layer: usize, encoded: &Array) -> Result<(Array, Array), EngineError> {
        let Some(layer) = self.layers.get(layer) else {
            return Err(EngineError::Mlx(format!("there is no layer {layer} among {}", self.layers.len())));
        };
        let CrossAttention { kv, heads, .. } = &layer.encoder_attn;
        let [keys, values] = kv.forward(encoded)?;
        Ok((heads_first(&keys, *heads)?, heads_first(&values, *heads)?))
    }

    fn hear(&self, encoded: &Array, slots: &[i32], cache: &mut Cache) -> Result<(), EngineError> {
        match &self.fused {
            Some(fused) => fused.hear(&self.layers, encoded, slots, cache),
            None => hear_plainly(self, encoded, slots, cache),
        }
    }

    fn encode_bytes(&self, rows: u64, dtype_bytes: u64) -> u64 {
        let config = &self.config;
        if self.fused.is_some() {
            return Fused::encode_bytes(config, rows, dtype_bytes);
        }
        let (hidden, ffn) = (config.d_model as u64, config.encoder_ffn_dim() as u64);
        let (tokens, heads) = (config.max_source_positions as u64, config.encoder_attention_heads as u64);
        // Features and what both convolutions unfold and give; or a layer's hidden states and its widest ones, with what comes of
        // them. Then scores with their softmax: of all heads and rows, or of one.
        let frames = 2 * tokens * (config.num_mel_bins as u64 * 4 + hidden * 5);
        let layer = tokens * (hidden * 8 + ffn * 4);
        let scores = match self.encoder.elementwise {
            Elementwise::Mlx => 2 * rows * heads * tokens * tokens,
            Elementwise::Host => 2 * tokens * tokens,
        };
        dtype_bytes * (rows * frames.max(layer) + scores)
    }
}

/// (B, T, heads × D) -> (B, heads, T, D)
fn heads_first(x: &Array, heads: i32) -> Result<Array, EngineError> {
    let (batch, tokens, width) = (x.dim(0), x.dim(1), x.dim(2));
    Ok(x.reshape(&[batch, tokens, heads, width / heads])?.transpose_axes(&[0, 2, 1, 3])?)
}

struct AudioEncoder {
    /// (hidden, 3, bins) and (hidden, 3, hidden), with (hidden) each.
    conv1: (Array, Array),
    conv2: (Array, Array),
    /// (max_source_positions, hidden)
    embed_positions: Array,
    layers: Vec<EncoderLayer>,
    layer_norm: LayerNorm,
    elementwise: Elementwise,
}

/// Who computes softmax and GELU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Elementwise {
    /// MLX, when the graph is evaluated.
    Mlx,
    /// [`host`], at once: float32 on the CPU, where it is several times as fast.
    Host,
}

impl Elementwise {
    fn of(weight: &Array) -> Result<Self, WeightError> {
        Ok(if device::is_cpu()? && weight.dtype() == Dtype::Float32 { Self::Host } else { Self::Mlx })
    }

    fn gelu(self, x: &Array) -> Result<Array, EngineError> {
        match self {
            Self::Mlx => gelu(x),
            Self::Host => ffi::multiply_then(x, std::f32::consts::FRAC_1_SQRT_2, host::gelu_each),
        }
    }
}

impl AudioEncoder {
    fn forward(&self, features: &Array) -> Result<Array, EngineError> {
        let features = features.as_dtype(self.embed_positions.dtype())?;
        let (weight, bias) = &self.conv1;
        let hidden = self.elementwise.gelu(&ops::conv1d(features, weight, 1, 1, None, None)?.add(bias)?)?;
        let (weight, bias) = &self.conv2;
        let hidden = self.elementwise.gelu(&ops::conv1d(hidden, weight, 2, 1, None, None)?.add(bias)?)?;
        let mut hidden = hidden.add(&self.embed_positions)?;
        for layer in &self.layers {
            hidden = layer.forward(&hidden, self.elementwise)?;
        }
        let encoded = self.layer_norm.forward(&hidden)?;
        if self.elementwise == Elementwise::Host {
            encoded.eval()?;
        }
        Ok(encoded)
    }
}

struct EncoderLayer {
    self_attn_layer_norm: LayerNorm,
    self_attn: SelfAttention,
    final_layer_norm: LayerNorm,
    mlp: Mlp,
}

impl EncoderLayer {
    fn forward(&self, x: &Array, elementwise: Elementwise) -> Result<Array, EngineError> {
        let hidden = x.add(self.self_attn.forward_all(&self.self_attn_layer_norm.forward(x)?, elementwise)?)?;
        Ok(hidden.add(self.mlp.forward(&self.final_layer_norm.forward(&hidden)?, elementwise)?)?)
    }
}

struct DecoderLayer {
    self_attn_layer_norm: LayerNorm,
    self_attn: SelfAttention,
    encoder_attn_layer_norm: LayerNorm,
    encoder_attn: CrossAttention,
    final_layer_norm: LayerNorm,
    mlp: Mlp,
}

impl DecoderLayer {
    fn forward(&self, x: &Array, index: usize, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let hidden = x.add(self.self_attn.forward(&self.self_attn_layer_norm.forward(x)?, index, step, cache)?)?;
        let heard = self.encoder_attn.forward(&self.encoder_attn_layer_norm.forward(&hidden)?, index, step, cache)?;
        let hidden = hidden.add(heard)?;
        Ok(hidden.add(self.mlp.forward(&self.final_layer_norm.forward(&hidden)?, Elementwise::Mlx)?)?)
    }
}

/// Products over one input: one where a device gains from fewer and wider ones.
enum Projections<const COUNT: usize> {
    Merged(Linear),
    Separate([Linear; COUNT]),
}

impl<const COUNT: usize> Projections<COUNT> {
    fn new(parts: [Linear; COUNT], merge: bool) -> Result<Self, WeightError> {
        let merged = if merge { Linear::merged(&parts.each_ref())? } else { None };
        Ok(merged.map_or(Self::Separate(parts), Self::Merged))
    }

    /// (…, hidden) -> (…, width) each
    fn forward(&self, x: &Array) -> Result<[Array; COUNT], EngineError> {
        let all = match self {
            Self::Separate(parts) => parts.iter().map(|part| part.forward(x)).collect::<Result<Vec<_>, _>>()?,
            Self::Merged(linear) => {
                let all = linear.forward(x)?;
                let (mut start, mut end) = (vec![0; all.ndim()], all.shape().to_vec());
                let (last, width) = (all.ndim() - 1, all.dim(-1) / COUNT as i32);
                let part = |index: i32| {
                    (start[last], end[last]) = (index * width, (index + 1) * width);
                    ffi::slice(&all, &start, &end)
                };
                (0..COUNT as i32).map(part).collect::<Result<Vec<_>, _>>()?
            }
        };
        all.try_into().map_err(|_| EngineError::Mlx("a product has another number of parts".into()))
    }

    fn merged(&self) -> Option<&Linear> {
        if let Self::Merged(linear) = self { Some(linear) } else { None }
    }
}

struct SelfAttention {
    qkv: Projections<3>,
    out_proj: Linear,
    heads: i32,
    head_dim: i32,
}

struct CrossAttention {
    q_proj: Linear,
    /// Of what the encoder gives.
    kv: Projections<2>,
    out_proj: Linear,
    heads: i32,
    head_dim: i32,
}

fn scale(head_dim: i32) -> f32 {
    (head_dim as f32).powf(-0.5)
}

impl SelfAttention {
    /// The encoder's: every token sees every token, (B, T, hidden) -> (B, T, hidden).
    fn forward_all(&self, x: &Array, elementwise: Elementwise) -> Result<Array, EngineError> {
        let [queries, keys, values] = self.qkv.forward(x)?;
        let attended = match elementwise {
            Elementwise::Mlx => {
                let [queries, keys, values] = [queries, keys, values].map(|projected| heads_first(&projected, self.heads));
                let attended = fast::scaled_dot_product_attention(queries?, keys?, values?, scale(self.head_dim), None, None)?;
                // (B, heads, T, D) -> (B, T, heads × D)
                attended.transpose_axes(&[0, 2, 1, 3])?.reshape(x.shape())?
            }
            Elementwise::Host => self.attend_on_host(&queries, &keys, &values)?,
        };
        self.out_proj.forward(&attended)
    }

    /// One input and one head at a time, so that the scores of no more than one are there at once.
    fn attend_on_host(&self, queries: &Array, keys: &Array, values: &Array) -> Result<Array, EngineError> {
        let (batch, tokens) = (queries.dim(0), queries.dim(1));
        let queries = queries.multiply(Array::from_f32(scale(self.head_dim)))?;
        transforms::eval([&queries, keys, values])?;
        let mut attended = Vec::with_capacity(batch as usize);
        for row in 0..batch {
            let mut heads = Vec::with_capacity(self.heads as usize);
            for head in 0..self.heads {
                // (B, T, heads × D) -> (T, D)
                let own = |array: &Array| -> Result<Array, EngineError> {
                    let (start, end) = (head * self.head_dim, (head + 1) * self.head_dim);
                    Ok(ffi::slice(array, &[row, 0, start], &[row + 1, tokens, end])?.reshape(&[tokens, self.head_dim])?)
                };
                let softmax = |scores: &mut [f32]| host::softmax_rows(scores, tokens as usize);
                let weights = ffi::matmul_then(&own(&queries)?, &own(keys)?.transpose()?, softmax)?;
                let head = weights.matmul(own(values)?)?;
                head.eval()?;
                heads.push(head);
            }
            attended.push(ops::concatenate(&heads, 1)?);
        }
        Ok(ops::stack(&attended, 0)?)
    }

    fn forward(&self, x: &Array, layer: usize, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let split = |projected: Array| split_heads(&projected, self.heads, self.head_dim);
        let [queries, keys, values] = self.qkv.forward(x)?.map(split);
        self.out_proj.forward(&cache.attend(layer, &queries?, &keys?, &values?, scale(self.head_dim), step)?)
    }
}

impl CrossAttention {
    fn forward(&self, x: &Array, layer: usize, step: &Step, cache: &Cache) -> Result<Array, EngineError> {
        let queries = split_heads(&self.q_proj.forward(x)?, self.heads, self.head_dim)?;
        self.out_proj.forward(&cache.attend_cross(layer, &queries, scale(self.head_dim), step)?)
    }
}

struct Mlp {
    fc1: Linear,
    fc2: Linear,
}

impl Mlp {
    fn forward(&self, x: &Array, elementwise: Elementwise) -> Result<Array, EngineError> {
        self.fc2.forward(&elementwise.gelu(&self.fc1.forward(x)?)?)
    }
}

impl Config {
    fn decoder_head_dim(&self) -> i32 {
        self.d_model / self.decoder_attention_heads
    }

    fn encoder_ffn_dim(&self) -> i32 {
        self.encoder_ffn_dim.unwrap_or(4 * self.d_model)
    }

    fn decoder_ffn_dim(&self) -> i32 {
        self.decoder_ffn_dim.unwrap_or(4 * self.d_model)
    }

    /// What the arithmetic here and below relies on.
    fn check(&self) -> Result<(), WeightError> {
        let refuse = |problem: String| Err(WeightError::Config(problem));
        for (name, size) in [
            ("d_model", self.d_model),
            ("encoder_attention_heads", self.encoder_attention_heads),
            ("encoder_ffn_dim", self.encoder_ffn_dim()),
            ("decoder_attention_heads", self.decoder_attention_heads),
            ("decoder_ffn_dim", self.decoder_ffn_dim()),
            ("num_mel_bins", self.num_mel_bins),
            ("max_source_positions", self.max_source_positions),
            ("max_target_positions", self.max_target_positions),
            ("vocab_size", self.vocab_size),
        ] {
            if !(1..=SIZE_MAX).contains(&size) {
                return refuse(format!("{name} is {size}"));
            }
        }
        for (name, layers) in [("encoder_layers", self.encoder_layers), ("decoder_layers", self.decoder_layers)] {
            if !(1..=LAYERS_MAX).contains(&layers) {
                return refuse(format!("{name} is {layers}"));
            }
        }
        for heads in [self.encoder_attention_heads, self.decoder_attention_heads] {
            if self.d_model % heads != 0 || self.d_model % 2 != 0 || self.d_model < 4 {
                return refuse(format!("a width (d_model) of {} does not divide into {heads} heads", self.d_model));
            }
        }
        if let Some(activation) = self.activation_function.as_deref().filter(|activation| *activation != "gelu") {
            return refuse(format!("activation_function '{activation}' is not yet supported ('gelu' is)"));
        }
        if self.scale_embedding {
            return refuse("scale_embedding = true is not yet supported".into());
        }
        Ok(())
    }
}

/// The encoder's positions: sines of falling frequency, then their cosines, (length, channels). Computed in float32 as OpenAI's
/// code and mlx-whisper's do: at 1,500 positions another rounding of a frequency shows.
fn sinusoids(length: i32, channels: i32) -> Result<Array, WeightError> {
    let half = channels / 2;
    let increment = f64::from(TIMESCALE_MAX).ln() / f64::from(half - 1);
    let channel = ops::arange::<_, f32>(None, half, None)?;
    let frequencies = ops::exp(channel.multiply(Array::from_f32(-increment as f32))?)?;
    let position = ops::arange::<_, f32>(None, length, None)?.reshape(&[length, 1])?;
    let angles = position.multiply(frequencies.reshape(&[1, half])?)?;
    Ok(ops::concatenate(&[ops::sin(&angles)?, ops::cos(&angles)?], 1)?)
}

/// Queries, keys, which alone have no bias, values, and what is behind attention.
fn projections(loader: &mut Loader, module: &str, hidden: i32) -> Result<[Linear; 4], WeightError> {
    let mut linear = |name: &str, bias: bool| loader.linear(&format!("{module}.{name}"), hidden, hidden, bias);
    Ok([linear("q_proj", true)?, linear("k_proj", false)?, linear("v_proj", true)?, linear("out_proj", true)?])
}

fn self_attention(loader: &mut Loader, module: &str, hidden: i32, heads: i32) -> Result<SelfAttention, WeightError> {
    let [q_proj, k_proj, v_proj, out_proj] = projections(loader, module, hidden)?;
    let qkv = Projections::new([q_proj, k_proj, v_proj], loader.merges())?;
    Ok(SelfAttention { qkv, out_proj, heads, head_dim: hidden / heads })
}

fn cross_attention(loader: &mut Loader, module: &str, hidden: i32, heads: i32) -> Result<CrossAttention, WeightError> {
    let [q_proj, k_proj, v_proj, out_proj] = projections(loader, module, hidden)?;
    let kv = Projections::new([k_proj, v_proj], loader.merges())?;
    Ok(CrossAttention { q_proj, kv, out_proj, heads, head_dim: hidden / heads })
}

fn mlp(loader: &mut Loader, module: &str, hidden: i32, ffn: i32) -> Result<Mlp, WeightError> {
    let fc1 = loader.linear(&format!("{module}.fc1"), hidden, ffn, true)?;
    Ok(Mlp { fc1, fc2: loader.linear(&format!("{module}.fc2"), ffn, hidden, true)? })
}

fn encoder(loader: &mut Loader, config: &Config) -> Result<AudioEncoder, WeightError> {
    let (hidden, tokens) = (config.d_model, config.max_source_positions);
    let mut conv = |name: &str, input: i32| -> Result<(Array, Array), WeightError> {
        let module = format!("model.encoder.{name}");
        Ok((loader.conv1d(&module, input, hidden, KERNEL)?, loader.tensor(&format!("{module}.bias"), &[hidden])?))
    };
    let conv1 = conv("conv1", config.num_mel_bins)?;
    let conv2 = conv("conv2", hidden)?;
    // Hugging Face stores them; the other layout leaves them to be computed.
    let embed_positions = match loader.optional("model.encoder.embed_positions.weight", &[tokens, hidden])? {
        Some(stored) => stored,
        None => sinusoids(tokens, hidden)?.as_dtype(conv1.0.dtype())?,
    };
    loader.settle(&embed_positions)?;
    let mut layers = Vec::new();
    for index in 0..config.encoder_layers {
        let module = format!("model.encoder.layers.{index}");
        layers.push(EncoderLayer {
            self_attn_layer_norm: loader.layer_norm(&format!("{module}.self_attn_layer_norm"), hidden, LAYER_NORM_EPS)?,
            self_attn: self_attention(loader, &format!("{module}.self_attn"), hidden, config.encoder_attention_heads)?,
            final_layer_norm: loader.layer_norm(&format!("{module}.final_layer_norm"), hidden, LAYER_NORM_EPS)?,
            mlp: mlp(loader, &module, hidden, config.encoder_ffn_dim())?,
        });
    }
    let layer_norm = loader.layer_norm("model.encoder.layer_norm", hidden, LAYER_NORM_EPS)?;
    let elementwise = Elementwise::of(&conv1.0)?;
    Ok(AudioEncoder { conv1, conv2, embed_positions, layers, layer_norm, elementwise })
}

pub fn load(config: &Value, mut loader: Loader) -> Result<Whisper, WeightError> {
    let config: Config = parse(config)?;
    config.check()?;
    let hidden = config.d_model;
    // The output matrix is the embedding, whatever a file repeats.
    loader.ignore("proj_out.weight");
    let encoder = encoder(&mut loader, &config)?;
    let embed_tokens = loader.embedding("model.decoder.embed_tokens", config.vocab_size, hidden)?;
    let embed_positions = loader.tensor("model.decoder.embed_positions.weight", &[config.max_target_positions, hidden])?;
    let mut layers = Vec::new();
    for index in 0..config.decoder_layers {
        let module = format!("model.decoder.layers.{index}");
        let heads = config.decoder_attention_heads;
        layers.push(DecoderLayer {
            self_attn_layer_norm: loader.layer_norm(&format!("{module}.self_attn_layer_norm"), hidden, LAYER_NORM_EPS)?,
            self_attn: self_attention(&mut loader, &format!("{module}.self_attn"), hidden, heads)?,
            encoder_attn_layer_norm: loader.layer_norm(&format!("{module}.encoder_attn_layer_norm"), hidden, LAYER_NORM_EPS)?,
            encoder_attn: cross_attention(&mut loader, &format!("{module}.encoder_attn"), hidden, heads)?,
            final_layer_norm: loader.layer_norm(&format!("{module}.final_layer_norm"), hidden, LAYER_NORM_EPS)?,
            mlp: mlp(&mut loader, &module, hidden, config.decoder_ffn_dim())?,
        });
    }
    let layer_norm = loader.layer_norm("model.decoder.layer_norm", hidden, LAYER_NORM_EPS)?;
    let merges = loader.merges();
    loader.finish()?;
    let mut whisper = Whisper { config, encoder, embed_tokens, embed_positions, layers, layer_norm, fused: None };
    if merges {
        whisper.fused = Fused::new(&whisper).map_err(|error| WeightError::Mlx(error.to_string()))?;
    }
    Ok(whisper)
}
