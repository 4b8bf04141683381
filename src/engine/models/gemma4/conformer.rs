//! The layers of Gemma 4's audio tower: feed-forward, attention within chunks, convolution, feed-forward (arXiv:2005.08100).
//!
//! Sources: mlx-vlm `gemma4/audio.py`; transformers `modeling_gemma4.py`.

use mlx_rs::{Array, Dtype, ops};

use super::{super::RmsNorm, super::layers::silu, audio::AudioConfig, clipped::ClippedLinear};
use crate::engine::{
    EngineError, ffi,
    weights::{Loader, WeightError},
};

/// Of the norms whose configuration does not state it.
const NORM_EPS: f32 = 1e-6;
/// The longest wave of relative positions is this many times 2π tokens long.
const TIMESCALE_MAX: f64 = 10_000.0;

/// What a token sees: of those before it, itself among them, `past`; of those behind it, `future` - 1. Computed by chunks, with
/// as much of what is around a chunk as any token in it may see.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    pub chunk: i32,
    pub past: i32,
    pub future: i32,
}

/// What a batch's rows have in common in every layer.
pub struct Places {
    /// 1 for the tokens of each row that count and 0 for the rest, (B, T, 1).
    pub counts: Array,
    /// What each token of a chunk sees of its context, (B, 1, chunks, chunk, span).
    seen: Array,
    /// Where a chunk's context is in a sequence with `past` places more in front, (chunks × span).
    context: Array,
    chunks: i32,
}

impl Window {
    /// Tokens of a chunk's context.
    pub fn span(self) -> i32 {
        self.past + self.chunk + self.future
    }

    /// Of rows of `tokens` tokens, of which `valid` count in each.
    pub fn places(self, valid: &[usize], tokens: i32, counts: Array) -> Places {
        let (chunks, span) = ((tokens + self.chunk - 1) / self.chunk, self.span());
        let mut seen = Vec::with_capacity(valid.len() * (chunks * self.chunk * span) as usize);
        for &valid in valid {
            for start in (0..chunks).map(|chunk| chunk * self.chunk) {
                for query in 0..self.chunk {
                    seen.extend((0..span).map(|key| {
                        let (behind, place) = (query + self.past - key, start + key - self.past);
                        let near = if behind < 0 { -behind < self.future } else { behind < self.past };
                        near && place >= 0 && (place as usize) < valid
                    }));
                }
            }
        }
        let context: Vec<i32> = (0..chunks).flat_map(|chunk| (0..span).map(move |key| chunk * self.chunk + key)).collect();
        Places {
            counts,
            seen: Array::from_slice(&seen, &[valid.len() as i32, 1, chunks, self.chunk, span]),
            context: Array::from_slice(&context, &[context.len() as i32]),
            chunks,
        }
    }
}

pub struct Layer {
    feed_forward1: FeedForward,
    norm_pre_attn: RmsNorm,
    self_attn: Attention,
    norm_post_attn: RmsNorm,
    lconv1d: LightConv,
    feed_forward2: FeedForward,
    norm_out: RmsNorm,
    bound: Bound,
}

impl Layer {
    pub fn load(loader: &mut Loader, module: &str, config: &AudioConfig) -> Result<Self, WeightError> {
        let feed_forward1 = FeedForward::load(loader, &format!("{module}.feed_forward1"), config)?;
        let feed_forward2 = FeedForward::load(loader, &format!("{module}.feed_forward2"), config)?;
        let self_attn = Attention::load(loader, &format!("{module}.self_attn"), config)?;
        let lconv1d = LightConv::load(loader, &format!("{module}.lconv1d"), config)?;
        let mut norm = |name: &str| loader.rms_norm(&format!("{module}.{name}"), config.hidden_size, NORM_EPS);
        Ok(Self {
            feed_forward1,
            norm_pre_attn: norm("norm_pre_attn")?,
            self_attn,
            norm_post_attn: norm("norm_post_attn")?,
            lconv1d,
            feed_forward2,
            norm_out: norm("norm_out")?,
            bound: Bound::of(config),
        })
    }

    /// (B, T, hidden) -> (B, T, hidden)
    pub fn forward(&self, x: &Array, places: &Places) -> Result<Array, EngineError> {
        let hidden = self.feed_forward1.forward(x)?;
        let attended = self.self_attn.forward(&self.norm_pre_attn.forward(&self.bound.hold(&hidden)?)?, places)?;
        let hidden = hidden.add(self.norm_post_attn.forward(&self.bound.hold(&attended)?)?)?;
        let hidden = self.lconv1d.forward(&hidden.multiply(&places.counts)?)?;
        let hidden = self.feed_forward2.forward(&hidden)?;
        self.norm_out.forward(&self.bound.hold(&hidden)?)
    }
}

/// `gradient_clipping`: activations are kept within it.
struct Bound {
    min: Array,
    max: Array,
}

impl Bound {
    fn of(config: &AudioConfig) -> Self {
        Self { min: Array::from_f32(-config.gradient_clipping), max: Array::from_f32(config.gradient_clipping) }
    }

    fn hold(&self, x: &Array) -> Result<Array, EngineError> {
        Ok(ops::clip(x, (&self.min, &self.max))?)
    }
}

struct FeedForward {
    pre_layer_norm: RmsNorm,
    ffw_layer_1: ClippedLinear,
    ffw_layer_2: ClippedLinear,
    post_layer_norm: RmsNorm,
    residual_weight: Array,
    bound: Bound,
}

impl FeedForward {
    fn load(loader: &mut Loader, module: &str, config: &AudioConfig) -> Result<Self, WeightError> {
        let (hidden, clipped) = (config.hidden_size, config.use_clipped_linears);
        Ok(Self {
            pre_layer_norm: loader.rms_norm(&format!("{module}.pre_layer_norm"), hidden, NORM_EPS)?,
            ffw_layer_1: ClippedLinear::load(loader, &format!("{module}.ffw_layer_1"), hidden, 4 * hidden, clipped)?,
            ffw_layer_2: ClippedLinear::load(loader, &format!("{module}.ffw_layer_2"), 4 * hidden, hidden, clipped)?,
            post_layer_norm: loader.rms_norm(&format!("{module}.post_layer_norm"), hidden, NORM_EPS)?,
            residual_weight: Array::from_f32(config.residual_weight),
            bound: Bound::of(config),
        })
    }

    fn forward(&self, x: &Array) -> Result<Array, EngineError> {
        let wide = self.ffw_layer_1.forward(&self.pre_layer_norm.forward(&self.bound.hold(x)?)?)?;
        let narrow = self.ffw_layer_2.forward(&silu(&wide)?)?;
        let fed = self.post_layer_norm.forward(&self.bound.hold(&narrow)?)?;
        Ok(x.add(fed.multiply(&self.residual_weight)?)?)
    }
}

/// Attention by content and by distance (arXiv:1901.02860, appendix B), within a [`Window`].
struct Attention {
    q_proj: ClippedLinear,
    k_proj: ClippedLinear,
    v_proj: ClippedLinear,
    post: ClippedLinear,
    /// What queries are multiplied with, (head_dim).
    query_scale: Array,
    key_scale: Array,
    /// What a query is multiplied with for each distance, from `past` tokens before it to `future` behind, (heads, head_dim,
    /// distances), float32.
    distances: Array,
    softcap: Array,
    invalid: Array,
    window: Window,
    heads: i32,
    head_dim: i32,
}

impl Attention {
    fn load(loader: &mut Loader, module: &str, config: &AudioConfig) -> Result<Self, WeightError> {
        let (hidden, clipped, heads) = (config.hidden_size, config.use_clipped_linears, config.num_attention_heads);
        let head_dim = hidden / heads;
        let mut linear = |name: &str| ClippedLinear::load(loader, &format!("{module}.{name}"), hidden, hidden, clipped);
        let (q_proj, k_proj, v_proj, post) = (linear("q_proj")?, linear("k_proj")?, linear("v_proj")?, linear("post")?);
        let per_dim_scale = loader.tensor(&format!("{module}.per_dim_scale"), &[head_dim])?;
        let scalar = |value: f64| Array::from_f32(value as f32).as_dtype(per_dim_scale.dtype());
        let ln_2 = std::f64::consts::LN_2;
        // Softplus of nothing is ln 2, of one ln (1 + e).
        let query_scale = ops::logaddexp(&per_dim_scale, scalar(0.0)?)?.multiply(scalar(f64::from(head_dim).powf(-0.5) / ln_2)?)?;
        let key_scale = Array::from_f32(((1.0 + std::f64::consts::E).ln() / ln_2) as f32);
        let window = config.window();
        let relative_k_proj = loader.tensor(&format!("{module}.relative_k_proj.weight"), &[hidden, hidden])?;
        let distances = timing_signal(window, hidden)?.as_dtype(relative_k_proj.dtype())?.matmul(relative_k_proj.t())?;
        // (distances, heads × D) -> (heads, D, distances)
        let distances = distances.reshape(&[-1, heads, head_dim])?.transpose_axes(&[1, 2, 0])?.as_dtype(Dtype::Float32)?;
        mlx_rs::transforms::eval([&query_scale, &distances])?;
        let (softcap, invalid) =
            (Array::from_f32(config.attention_logit_cap), Array::from_f32(config.attention_invalid_logits_value));
        Ok(Self { q_proj, k_proj, v_proj, post, query_scale, key_scale, distances, softcap, invalid, window, heads, head_dim })
    }

    /// (B, T, hidden) -> (B, T, hidden), of which the padding's are of no meaning.
    fn forward(&self, x: &Array, places: &Places) -> Result<Array, EngineError> {
        let (rows, tokens) = (x.dim(0), x.dim(1));
        let Window { chunk, past, future } = self.window;
        let (chunks, span, heads, head_dim) = (places.chunks, self.window.span(), self.heads, self.head_dim);
        let split = |projected: Array| projected.as_dtype(Dtype::Float32)?.reshape(&[rows, tokens, heads, head_dim]);
        let queries = split(self.q_proj.forward(x)?)?.multiply(&self.query_scale)?;
        let keys = split(self.k_proj.forward(x)?)?.multiply(&self.key_scale)?;
        let values = split(self.v_proj.forward(x)?)?;
        let rest = chunks * chunk - tokens;
        let pad =
            |array: &Array, before: i32, behind: i32| ops::pad(array, &[(0, 0), (before, behind), (0, 0), (0, 0)][..], None, None);
        // (B, T, heads, D) -> (B, heads, chunks, chunk, D)
        let queries = pad(&queries, 0, rest)?.reshape(&[rows, chunks, chunk, heads, head_dim])?.transpose_axes(&[0, 3, 1, 2, 4])?;
        // (B, T, heads, D) -> (B, chunks, span, heads, D)
        let around = |array: &Array| -> Result<Array, EngineError> {
            let around = pad(array, past, rest + future)?.take_axis(&places.context, 1)?;
            Ok(around.reshape(&[rows, chunks, span, heads, head_dim])?)
        };
        let by_content = queries.matmul(around(&keys)?.transpose_axes(&[0, 3, 1, 4, 2])?)?;
        let by_distance = queries.reshape(&[rows, heads, chunks * chunk, head_dim])?.matmul(&self.distances)?;
        let logits = by_content.add(self.align(&by_distance, chunks)?)?;
        let logits = ops::tanh(logits.divide(&self.softcap)?)?.multiply(&self.softcap)?;
        let logits = ops::select(&places.seen, logits, &self.invalid)?;
        let weights = ops::softmax_axis(logits, -1, None)?;
        // (B, heads, chunks, chunk, D) -> (B, chunks × chunk, hidden)
        let seen = weights.matmul(around(&values)?.transpose_axes(&[0, 3, 1, 2, 4])?)?.transpose_axes(&[0, 2, 3, 1, 4])?;
        let seen = seen.reshape(&[rows, chunks * chunk, heads * head_dim])?;
        let seen = ffi::slice(&seen, &[0, 0, 0], &[rows, tokens, heads * head_dim])?.contiguous()?;
        self.post.forward(&seen)
    }

    /// Logits by distance to where the keys at these distances are: (B, heads, chunks × chunk, distances) -> (B, heads, chunks,
    /// chunk, span). Each query's are one place further right than those of the query before, which rows that are one number longer
    /// than the span become when they are cut anew.
    fn align(&self, logits: &Array, chunks: i32) -> Result<Array, EngineError> {
        let (rows, heads, distances) = (logits.dim(0), logits.dim(1), logits.dim(3));
        let (chunk, span) = (self.window.chunk, self.window.span());
        let rest = span + 1 - distances;
        let long = ops::pad(logits, &[(0, 0), (0, 0), (0, 0), (0, rest)][..], None, None)?;
        let flat = long.reshape(&[rows, heads, chunks, chunk * (span + 1)])?;
        let cut = ffi::slice(&flat, &[0, 0, 0, 0], &[rows, heads, chunks, chunk * span])?;
        Ok(cut.reshape(&[rows, heads, chunks, chunk, span])?)
    }
}

/// Sines of falling frequency and their cosines, for each distance from `past` down to -`future`: (distances, channels), float32.
fn timing_signal(window: Window, channels: i32) -> Result<Array, WeightError> {
    let half = channels / 2;
    let increment = TIMESCALE_MAX.ln() / f64::from((half - 1).max(1));
    let frequencies = ops::exp(ops::arange::<_, f32>(None, half, None)?.multiply(Array::from_f32(-increment as f32))?)?;
    let distances: Vec<f32> = (-window.future..=window.past).rev().map(|distance| distance as f32).collect();
    let angles = Array::from_slice(&distances, &[distances.len() as i32, 1]).multiply(frequencies.reshape(&[1, half])?)?;
    Ok(ops::concatenate(&[ops::sin(&angles)?, ops::cos(&angles)?], 1)?)
}

/// A gated convolution over a token and those before it, each channel by itself.
struct LightConv {
    pre_layer_norm: RmsNorm,
    linear_start: ClippedLinear,
    /// (hidden, kernel, 1)
    depthwise_conv1d: Array,
    conv_norm: RmsNorm,
    linear_end: ClippedLinear,
    bound: Bound,
}

impl LightConv {
    fn load(loader: &mut Loader, module: &str, config: &AudioConfig) -> Result<Self, WeightError> {
        let (hidden, clipped) = (config.hidden_size, config.use_clipped_linears);
        Ok(Self {
            pre_layer_norm: loader.rms_norm(&format!("{module}.pre_layer_norm"), hidden, config.rms_norm_eps)?,
            linear_start: ClippedLinear::load(loader, &format!("{module}.linear_start"), hidden, 2 * hidden, clipped)?,
            depthwise_conv1d: loader.conv1d(&format!("{module}.depthwise_conv1d"), 1, hidden, config.conv_kernel_size)?,
            conv_norm: loader.rms_norm(&format!("{module}.conv_norm"), hidden, config.rms_norm_eps)?,
            linear_end: ClippedLinear::load(loader, &format!("{module}.linear_end"), hidden, hidden, clipped)?,
            bound: Bound::of(config),
        })
    }

    fn forward(&self, x: &Array) -> Result<Array, EngineError> {
        let (rows, tokens, hidden) = (x.dim(0), x.dim(1), x.dim(2));
        let both = self.linear_start.forward(&self.pre_layer_norm.forward(x)?)?;
        let half = |which: i32| ffi::slice(&both, &[0, 0, which * hidden], &[rows, tokens, (which + 1) * hidden]);
        let gated = half(0)?.multiply(ops::sigmoid(half(1)?)?)?;
        let kernel = self.depthwise_conv1d.dim(1);
        let gated = ops::pad(gated, &[(0, 0), (kernel - 1, 0), (0, 0)][..], None, None)?;
        let convolved = ops::conv1d(gated, &self.depthwise_conv1d, 1, 0, None, hidden)?;
        let normalized = self.conv_norm.forward(&self.bound.hold(&convolved)?)?;
        Ok(self.linear_end.forward(&silu(&normalized)?)?.add(x)?)
    }
}
