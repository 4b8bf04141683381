//! Gemma 4's audio tower, a Conformer of Google's Universal Speech Model: mel features into soft tokens, 40 ms each.
//!
//! Recordings of a batch are filled up to the longest with frames that count for nothing: convolutions see zeros there, as beyond a
//! recording's end, and attention does not look at them. So a recording's tokens are the same in any company.
//!
//! Sources: mlx-vlm `gemma4/audio.py`; transformers `modeling_gemma4.py`; arXiv:2303.01037. The tower computes in float32
//! whatever its weights are stored in, as mlx-vlm does, which never rounds the features.

use mlx_rs::{Array, fast, ops};
use serde::Deserialize;

use super::{
    conformer::{Layer, Window},
    tower::{Embedder, Pace, check_layers, check_size},
};
use crate::{
    engine::{
        EngineError, device,
        models::Linear,
        weights::{Loader, WeightError},
    },
    media::UsmFeatures,
    schedule::EncodePrice,
};

const BINS: i32 = 128;
/// Frames of a recording at most: the reference hears 30 s.
const FRAMES_MAX: usize = 3000;
/// Two convolutions halve them.
const FRAMES_PER_TOKEN: u64 = 4;
/// Of a convolution that halves time and bins.
const SUBSAMPLING_KERNEL: i32 = 3;

/// `audio_config` of config.json; what it leaves out is as in the reference.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct AudioConfig {
    pub hidden_size: i32,
    pub num_hidden_layers: usize,
    pub num_attention_heads: i32,
    pub hidden_act: String,
    pub subsampling_conv_channels: [i32; 2],
    pub conv_kernel_size: i32,
    pub residual_weight: f32,
    pub attention_chunk_size: i32,
    pub attention_context_left: i32,
    pub attention_context_right: i32,
    pub attention_logit_cap: f32,
    pub attention_invalid_logits_value: f32,
    pub use_clipped_linears: bool,
    pub rms_norm_eps: f32,
    pub gradient_clipping: f32,
    pub output_proj_dims: Option<i32>,
}

impl Default for AudioConfig {
    fn default() -> Self {
        Self {
            hidden_size: 1024,
            num_hidden_layers: 12,
            num_attention_heads: 8,
            hidden_act: "silu".into(),
            subsampling_conv_channels: [128, 32],
            conv_kernel_size: 5,
            residual_weight: 0.5,
            attention_chunk_size: 12,
            attention_context_left: 13,
            attention_context_right: 0,
            attention_logit_cap: 50.0,
            attention_invalid_logits_value: -1e9,
            use_clipped_linears: true,
            rms_norm_eps: 1e-6,
            gradient_clipping: 1e10,
            output_proj_dims: Some(1536),
        }
    }
}

impl AudioConfig {
    /// What the arithmetic below relies on.
    pub fn check(&self) -> Result<(), WeightError> {
        let refuse = |problem: String| Err(WeightError::Config(problem));
        for (name, size) in [
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_attention_heads),
            ("subsampling_conv_channels[0]", self.subsampling_conv_channels[0]),
            ("subsampling_conv_channels[1]", self.subsampling_conv_channels[1]),
            ("output_proj_dims", self.output()),
        ] {
            check_size(&format!("audio_config.{name}"), size)?;
        }
        check_layers("audio_config.num_hidden_layers", self.num_hidden_layers)?;
        for (name, size, size_min) in [
            ("conv_kernel_size", self.conv_kernel_size, 1),
            ("attention_chunk_size", self.attention_chunk_size, 1),
            ("attention_context_left", self.attention_context_left, 1),
            ("attention_context_right", self.attention_context_right, 0),
        ] {
            if !(size_min..=1024).contains(&size) {
                return refuse(format!("audio_config.{name} is {size}; it must be {size_min} to 1024"));
            }
        }
        if self.hidden_size % self.num_attention_heads != 0 || self.hidden_size % 2 != 0 {
            return refuse(format!(
                "audio_config.hidden_size is {}, an even multiple of {} heads is needed",
                self.hidden_size, self.num_attention_heads
            ));
        }
        if self.hidden_act != "silu" {
            return refuse(format!("audio_config.hidden_act '{}' is not yet supported ('silu' is)", self.hidden_act));
        }
        for (name, bound) in [("attention_logit_cap", self.attention_logit_cap), ("gradient_clipping", self.gradient_clipping)] {
            if bound.is_nan() || bound <= 0.0 {
                return refuse(format!("audio_config.{name} is {bound}; it must be above 0"));
            }
        }
        Ok(())
    }

    /// Scratch of encoding a recording, beside its soft tokens.
    pub fn encode_price(&self) -> EncodePrice {
        let [first, second] = self.subsampling_conv_channels.map(|channels| channels as u64);
        let bins = BINS as u64;
        let kernel = (SUBSAMPLING_KERNEL * SUBSAMPLING_KERNEL) as u64;
        // What each convolution takes, unfolds and gives, as numbers a frame.
        let first_stage = bins * 4 + bins / 4 * (kernel + 3 * first);
        let second_stage = bins / 4 * 2 * first + bins / 16 * (kernel * first + 3 * second);
        let flat = bins / 16 * second;
        // Four frames a token: the widest of a layer with what comes of it; or queries, keys and values and what is seen of each.
        let (hidden, heads) = (self.hidden_size as u64, self.num_attention_heads as u64);
        let (chunk, context) = (self.window().chunk as u64, self.window().span() as u64);
        let attention = hidden * 8 + 3 * hidden * context.div_ceil(chunk) + 3 * heads * context;
        let layer = (hidden * 2 + (4 * hidden * 4).max(attention)).div_ceil(4);
        let numbers = (first_stage + second_stage + flat).max(layer + flat);
        EncodePrice { bytes_per_token: FRAMES_PER_TOKEN * 4 * numbers, ..EncodePrice::default() }
    }

    /// Numbers of what the tower gives, before it is embedded.
    fn output(&self) -> i32 {
        self.output_proj_dims.unwrap_or(self.hidden_size)
    }

    pub(super) fn window(&self) -> Window {
        Window { chunk: self.attention_chunk_size, past: self.attention_context_left - 1, future: self.attention_context_right }
    }
}

/// A recording, and how many places it has in the prompt.
#[derive(Debug, Clone, Copy)]
pub struct RecordingFeatures<'a> {
    pub features: &'a UsmFeatures,
    /// [`media::soft_tokens`](crate::media::soft_tokens) of its samples.
    pub soft_tokens: u32,
}

pub struct AudioTower {
    config: AudioConfig,
    subsampling: [Subsampling; 2],
    input_proj_linear: Linear,
    layers: Vec<Layer>,
    output_proj: Option<Linear>,
    embedder: Embedder,
    on_cpu: bool,
}

/// Tokens of so many frames: both convolutions take every second place.
fn halved(length: usize) -> usize {
    length.div_ceil(2)
}

impl AudioTower {
    /// Recordings into soft tokens, one recording's after the other's: (all soft tokens, text hidden), float32. On the CPU it is
    /// computed before this returns.
    ///
    /// A prompt may have a place more than the tower has tokens of the recording that count. As in mlx-vlm, that place has zeros
    /// where the features have frames for it, and the recording's first token where they have not.
    pub fn encode(&self, recordings: &[RecordingFeatures<'_>]) -> Result<Array, EngineError> {
        for recording in recordings {
            check(recording)?;
        }
        if recordings.is_empty() {
            return Err(EngineError::Mlx("the audio tower was given no recording".into()));
        }
        let (subsampled, valid) = self.subsample_all(recordings)?;
        let tokens = subsampled.dim(1);
        let mut hidden = self.input_proj_linear.forward(&subsampled)?;
        let mut pace = Pace::default();
        if !self.on_cpu {
            pace.next(&hidden)?;
        }
        let places = self.config.window().places(&valid, tokens, mask(&valid, tokens, 3));
        for layer in &self.layers {
            hidden = layer.forward(&hidden, &places)?;
            // MLX keeps what a graph on the CPU has computed until all of it is.
            if self.on_cpu { hidden.eval()? } else { pace.next(&hidden)? }
        }
        if let Some(output_proj) = &self.output_proj {
            hidden = output_proj.forward(&hidden)?;
        }
        let embedded = self.embedder.forward(&hidden.multiply(&places.counts)?)?;
        let embedded = embedded.reshape(&[-1, embedded.dim(2)])?.take_axis(prompt_places(recordings, tokens), 0)?;
        if self.on_cpu {
            embedded.eval()?;
        }
        Ok(embedded)
    }

    /// (B, T, bins / 4 × channels), and how many tokens of each row count.
    fn subsample_all(&self, recordings: &[RecordingFeatures<'_>]) -> Result<(Array, Vec<usize>), EngineError> {
        if !self.on_cpu {
            return self.subsample(recordings);
        }
        // There is nothing to gain from convolutions of several rows there, and their sums would depend on how many there are.
        let (mut rows, mut valid) = (Vec::with_capacity(recordings.len()), Vec::with_capacity(recordings.len()));
        for recording in recordings {
            let (row, own) = self.subsample(std::slice::from_ref(recording))?;
            row.eval()?;
            rows.push(row);
            valid.extend(own);
        }
        let tokens = rows.iter().map(|row| row.dim(1)).max().unwrap_or(0);
        let filled: Result<Vec<Array>, _> =
            rows.iter().map(|row| ops::pad(row, &[(0, 0), (0, tokens - row.dim(1)), (0, 0)][..], None, None)).collect();
        Ok((ops::concatenate(&filled?, 0)?, valid))
    }

    fn subsample(&self, recordings: &[RecordingFeatures<'_>]) -> Result<(Array, Vec<usize>), EngineError> {
        let frames = recordings.iter().map(|recording| recording.features.features.frames).max().unwrap_or(0).max(1);
        let mut valid: Vec<usize> = recordings.iter().map(|recording| recording.features.valid_frames).collect();
        let mut hidden = mel(recordings, frames);
        for subsampling in &self.subsampling {
            // What counts is in front; the rest is zeros before each convolution.
            hidden = subsampling.forward(&hidden.multiply(mask(&valid, hidden.dim(1), 4))?)?;
            valid.iter_mut().for_each(|valid| *valid = halved(*valid));
        }
        // (B, T, bins / 4, channels) -> (B, T, bins / 4 × channels)
        Ok((hidden.reshape(&[hidden.dim(0), hidden.dim(1), hidden.dim(2) * hidden.dim(3)])?, valid))
    }

    pub fn encode_price(&self) -> EncodePrice {
        self.config.encode_price()
    }
}

fn check(recording: &RecordingFeatures<'_>) -> Result<(), EngineError> {
    let UsmFeatures { features, valid_frames } = recording.features;
    let refuse = |problem: String| Err(EngineError::Mlx(format!("the audio tower cannot take these features: {problem}")));
    if features.bins != BINS as usize {
        return refuse(format!("they have {} bins, {BINS} are needed", features.bins));
    }
    if features.frames > FRAMES_MAX {
        return refuse(format!("they have {} frames, {FRAMES_MAX} are possible", features.frames));
    }
    if *valid_frames > features.frames || features.values.len() != features.frames * features.bins {
        let (frames, numbers) = (features.frames, features.values.len());
        return refuse(format!("{valid_frames} of {frames} frames count, and there are {numbers} numbers"));
    }
    if recording.soft_tokens as usize > halved(halved(FRAMES_MAX)) {
        return refuse(format!("they are to fill {} places of a prompt", recording.soft_tokens));
    }
    Ok(())
}

/// (B, frames, bins, 1), filled up with zeros.
fn mel(recordings: &[RecordingFeatures<'_>], frames: usize) -> Array {
    let width = frames * BINS as usize;
    let mut values = vec![0.0f32; recordings.len() * width];
    for (row, recording) in values.chunks_exact_mut(width).zip(recordings) {
        let own = &recording.features.features.values;
        row[..own.len()].copy_from_slice(own);
    }
    Array::from_slice(&values, &[recordings.len() as i32, frames as i32, BINS, 1])
}

/// 1 at each row's first `valid` places and 0 behind them, (B, length, 1, …) of `axes` axes.
fn mask(valid: &[usize], length: i32, axes: usize) -> Array {
    let values: Vec<f32> = valid.iter().flat_map(|valid| (0..length as usize).map(move |at| f32::from(at < *valid))).collect();
    let mut shape = vec![1; axes];
    shape[..2].copy_from_slice(&[valid.len() as i32, length]);
    Array::from_slice(&values, &shape)
}

/// Which of (B × tokens) stands at each place of the prompts.
fn prompt_places(recordings: &[RecordingFeatures<'_>], tokens: i32) -> Array {
    let mut places = Vec::new();
    for (row, recording) in recordings.iter().enumerate() {
        // One that has none has a single one that does not count.
        let own = halved(halved(recording.features.features.frames)).max(1) as u32;
        places.extend((0..recording.soft_tokens).map(|place| row as i32 * tokens + (place % own) as i32));
    }
    Array::from_slice(&places, &[places.len() as i32])
}

/// A convolution of 3 × 3 that takes every second frame and bin, and a norm without a bias over its channels.
struct Subsampling {
    /// (output, 3, 3, input)
    conv: Array,
    /// (output)
    norm: Array,
    eps: f32,
}

impl Subsampling {
    /// (B, T, bins, input) -> (B, T / 2, bins / 2, output), rounded up
    fn forward(&self, x: &Array) -> Result<Array, EngineError> {
        let conv = ops::conv2d(x, &self.conv, (2, 2), (1, 1), None, None)?;
        let normalized = fast::layer_norm(conv, &self.norm, None, self.eps)?;
        Ok(ops::maximum(normalized, Array::from_f32(0.0))?)
    }
}

/// Takes `audio_tower.*` and `embed_audio.*`.
pub fn load(config: &AudioConfig, loader: &mut Loader, text_hidden: i32) -> Result<AudioTower, WeightError> {
    config.check()?;
    let tower = "audio_tower";
    let (hidden, [first, second]) = (config.hidden_size, config.subsampling_conv_channels);
    let mut subsampling = |index: usize, input: i32, output: i32| -> Result<Subsampling, WeightError> {
        let module = format!("{tower}.subsample_conv_projection.layer{index}");
        Ok(Subsampling {
            conv: loader.conv2d(&format!("{module}.conv"), input, output, SUBSAMPLING_KERNEL)?,
            norm: loader.tensor(&format!("{module}.norm.weight"), &[output])?,
            eps: config.rms_norm_eps,
        })
    };
    let subsampling = [subsampling(0, 1, first)?, subsampling(1, first, second)?];
    let projection = format!("{tower}.subsample_conv_projection.input_proj_linear");
    let input_proj_linear = loader.linear(&projection, BINS / 4 * second, hidden, false)?;
    let mut layers = Vec::new();
    for index in 0..config.num_hidden_layers {
        layers.push(Layer::load(loader, &format!("{tower}.layers.{index}"), config)?);
    }
    let output_proj = match config.output_proj_dims {
        Some(output) => Some(loader.linear(&format!("{tower}.output_proj"), hidden, output, true)?),
        None => None,
    };
    let embedder = Embedder::load(loader, "embed_audio", config.output(), text_hidden, config.rms_norm_eps)?;
    Ok(AudioTower {
        config: config.clone(),
        subsampling,
        input_proj_linear,
        layers,
        output_proj,
        embedder,
        on_cpu: device::is_cpu()?,
    })
}
