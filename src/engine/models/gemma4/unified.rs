//! Gemma 4 without towers (`gemma4_unified`, the 12B): patches of images and samples of recordings go into the text model's hidden
//! states by a projection each, so that what an image or a recording gives never depends on another.
//!
//! Sources: mlx-vlm `gemma4_unified/gemma4_unified.py`; transformers `modeling_gemma4_unified.py`. All is computed in float32
//! whatever the weights are stored in, as mlx-vlm does, which never rounds pixels or samples; so the weights are kept in it.

use mlx_rs::Array;
use serde::Deserialize;

use super::{
    super::{LayerNorm, SIZE_MAX},
    tower::{Embedder, check_size},
    vision::{CHANNELS, ImagePatches, places},
};
use crate::{
    engine::{
        EngineError, device, ffi,
        models::Linear,
        weights::{Loader, WeightError},
    },
    media::Features,
    schedule::EncodePrice,
};

/// Of the norms around patches, whose configuration does not state it: PyTorch's and MLX's own.
const LAYER_NORM_EPS: f32 = 1e-5;
/// A patch has thousands of numbers: products on the CPU's cores sum each of so many parts by itself, which rounds less.
const DENSE_PARTS: i32 = 3;
/// Frames of a recording at most: 30 s.
const FRAMES_MAX: usize = 750;

/// `vision_config` of config.json; what it leaves out is as in the reference.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct VisionConfig {
    pub patch_size: i32,
    pub pooling_kernel_size: i32,
    /// The side of what becomes a soft token; the product of both where it is not stated.
    pub model_patch_size: Option<i32>,
    pub mm_embed_dim: i32,
    pub mm_posemb_size: i32,
    pub output_proj_dims: Option<i32>,
    pub rms_norm_eps: f32,
}

impl Default for VisionConfig {
    fn default() -> Self {
        Self {
            patch_size: 16,
            pooling_kernel_size: 3,
            model_patch_size: None,
            mm_embed_dim: 3840,
            mm_posemb_size: 1120,
            output_proj_dims: None,
            rms_norm_eps: 1e-6,
        }
    }
}

impl VisionConfig {
    /// What the arithmetic below relies on.
    pub fn check(&self) -> Result<(), WeightError> {
        let refuse = |problem: String| Err(WeightError::Config(problem));
        for (name, size, size_max) in [("patch_size", self.patch_size, 256), ("pooling_kernel_size", self.pooling_kernel_size, 64)]
        {
            if !(1..=size_max).contains(&size) {
                return refuse(format!("vision_config.{name} is {size}; it must be 1 to {size_max}"));
            }
        }
        let side = self.side();
        if let Some(stated) = self.model_patch_size.filter(|stated| *stated != side) {
            return refuse(format!(
                "vision_config.model_patch_size is {stated}; images are cut into patches of patch_size × pooling_kernel_size = {side}"
            ));
        }
        if self.pixels() > SIZE_MAX {
            return refuse(format!("vision_config has patches of {side} × {side} pixels; {SIZE_MAX} numbers are possible"));
        }
        check_size("vision_config.mm_embed_dim", self.mm_embed_dim)?;
        check_size("vision_config.mm_posemb_size", self.mm_posemb_size)?;
        if let Some(stated) = self.output_proj_dims.filter(|stated| *stated != self.mm_embed_dim) {
            return refuse(format!(
                "vision_config.output_proj_dims is {stated}, and what is projected has mm_embed_dim = {} numbers",
                self.mm_embed_dim
            ));
        }
        Ok(())
    }

    /// In pixels, of a patch.
    fn side(&self) -> i32 {
        self.patch_size * self.pooling_kernel_size
    }

    /// Numbers of a patch.
    fn pixels(&self) -> i32 {
        CHANNELS * self.side() * self.side()
    }

    /// Scratch of embedding an image: a norm of its pixels as MLX computes one on the CPU, or what comes of them.
    pub fn encode_price(&self) -> EncodePrice {
        let (pixels, width) = (self.pixels() as u64, self.mm_embed_dim as u64);
        EncodePrice { bytes_per_token: 4 * (4 * pixels).max(6 * width), ..EncodePrice::default() }
    }
}

/// `audio_config` of config.json; what it leaves out is as in the reference.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct AudioConfig {
    /// Samples that a soft token is made of: newer configurations state this alone.
    pub audio_embed_dim: i32,
    pub output_proj_dims: Option<i32>,
    pub rms_norm_eps: f32,
}

impl Default for AudioConfig {
    fn default() -> Self {
        Self { audio_embed_dim: 640, output_proj_dims: None, rms_norm_eps: 1e-6 }
    }
}

impl AudioConfig {
    pub fn check(&self) -> Result<(), WeightError> {
        check_size("audio_config.output_proj_dims", self.samples_per_token())
    }

    fn samples_per_token(&self) -> i32 {
        self.output_proj_dims.unwrap_or(self.audio_embed_dim)
    }

    /// Scratch of embedding a recording, beside its soft tokens.
    pub fn encode_price(&self) -> EncodePrice {
        EncodePrice { bytes_per_token: 4 * 2 * self.samples_per_token() as u64, ..EncodePrice::default() }
    }
}

/// Patches into soft tokens: `projection(norm(norm(dense(norm(patch))) + column + row))`.
pub struct VisionEmbedder {
    config: VisionConfig,
    pub(super) patch_ln1: LayerNorm,
    /// One, or several of equal shares of its inputs.
    patch_dense: Vec<Linear>,
    patch_ln2: LayerNorm,
    /// (mm_posemb_size, mm_embed_dim) of columns, and of rows.
    positions: [Array; 2],
    pos_norm: LayerNorm,
    embedder: Embedder,
    on_cpu: bool,
}

impl VisionEmbedder {
    /// Soft tokens that stand for an image: its patches.
    pub fn soft_tokens(&self, image: &ImagePatches<'_>) -> i32 {
        image.patches()
    }

    /// Images into soft tokens, one image's after the other's: (all soft tokens, text hidden), float32. On the CPU it is computed
    /// before this returns.
    pub fn encode(&self, images: &[ImagePatches<'_>]) -> Result<Array, EngineError> {
        for image in images {
            image.check(self.config.side(), 1, self.config.mm_posemb_size)?;
        }
        if images.is_empty() {
            return Err(EngineError::Mlx("the model was given no image to embed".into()));
        }
        let patches = images.iter().map(ImagePatches::patches).sum();
        let values: Vec<f32> = images.iter().flat_map(|image| image.values).copied().collect();
        let pixels = Array::from_slice(&values, &[patches, self.config.pixels()]);
        drop(values);
        let normed = self.settled(self.patch_ln1.forward(&pixels)?)?;
        drop(pixels);
        let embedded = self.dense(&normed)?;
        drop(normed);
        let embedded = self.settled(self.patch_ln2.forward(&embedded)?)?;
        let [columns, rows] = places(images);
        let [of_column, of_row] = &self.positions;
        let position = of_column.take_axis(columns, 0)?.add(of_row.take_axis(rows, 0)?)?;
        let placed = self.settled(self.pos_norm.forward(&embedded.add(position)?)?)?;
        self.settled(self.embedder.forward(&placed)?)
    }

    /// (patches, pixels) -> (patches, mm_embed_dim)
    fn dense(&self, normed: &Array) -> Result<Array, EngineError> {
        let [first, rest @ ..] = &self.patch_dense[..] else {
            return Err(EngineError::Mlx("the model has no projection of patches".into()));
        };
        if rest.is_empty() {
            return self.settled(first.forward(normed)?);
        }
        let (patches, width) = (normed.dim(0), normed.dim(1) / self.patch_dense.len() as i32);
        let own = |part: i32| -> Result<Array, EngineError> {
            Ok(ffi::slice(normed, &[0, part * width], &[patches, (part + 1) * width])?.contiguous()?)
        };
        let mut sum = self.settled(first.forward(&own(0)?)?)?;
        for (part, linear) in (1..).zip(rest) {
            sum = self.settled(linear.forward_add(&own(part)?, &sum)?)?;
        }
        Ok(sum)
    }

    /// On the CPU computed now: MLX keeps what a graph there has computed until all of it is.
    fn settled(&self, array: Array) -> Result<Array, EngineError> {
        if self.on_cpu {
            array.eval()?;
        }
        Ok(array)
    }

    pub fn encode_price(&self) -> EncodePrice {
        self.config.encode_price()
    }
}

/// Frames of samples into soft tokens, by a projection alone.
pub struct AudioEmbedder {
    config: AudioConfig,
    embedder: Embedder,
    on_cpu: bool,
}

impl AudioEmbedder {
    /// Recordings into soft tokens, one recording's after the other's: (all frames, text hidden), float32. On the CPU it is
    /// computed before this returns.
    pub fn encode(&self, recordings: &[&Features]) -> Result<Array, EngineError> {
        let width = self.config.samples_per_token();
        for recording in recordings {
            check(recording, width as usize)?;
        }
        if recordings.is_empty() {
            return Err(EngineError::Mlx("the model was given no recording to embed".into()));
        }
        let values: Vec<f32> = recordings.iter().flat_map(|recording| &recording.values).copied().collect();
        let frames: usize = recordings.iter().map(|recording| recording.frames).sum();
        let tokens = self.embedder.forward(&Array::from_slice(&values, &[frames as i32, width]))?;
        if self.on_cpu {
            tokens.eval()?;
        }
        Ok(tokens)
    }

    pub fn encode_price(&self) -> EncodePrice {
        self.config.encode_price()
    }
}

fn check(recording: &Features, width: usize) -> Result<(), EngineError> {
    let Features { frames, bins, values } = recording;
    let refuse = |problem: String| Err(EngineError::Mlx(format!("the model cannot hear this recording: {problem}")));
    if *bins != width {
        return refuse(format!(
            "it is cut into frames of {bins} samples (audio_samples_per_token of processor_config.json), and the model embeds {width}"
        ));
    }
    if *frames == 0 || *frames > FRAMES_MAX {
        return refuse(format!("it has {frames} frames, 1 to {FRAMES_MAX} are possible"));
    }
    if values.len() != frames * bins {
        return refuse(format!("{frames} frames are {} samples, and it has {}", frames * bins, values.len()));
    }
    Ok(())
}

/// Takes `vision_embedder.*` and `embed_vision.*`.
pub fn load_vision(config: &VisionConfig, loader: &mut Loader, text_hidden: i32) -> Result<VisionEmbedder, WeightError> {
    config.check()?;
    let module = "vision_embedder";
    let (pixels, width, size) = (config.pixels(), config.mm_embed_dim, config.mm_posemb_size);
    let on_cpu = device::is_cpu()?;
    loader.in_float32(|loader| {
        let table = loader.tensor(&format!("{module}.pos_embedding"), &[size, 2, width])?;
        let axis = |axis: i32| -> Result<Array, WeightError> {
            let own = table.take_axis(Array::from_slice(&[axis], &[1]), 1)?.reshape(&[size, width])?;
            own.eval()?;
            Ok(own)
        };
        Ok(VisionEmbedder {
            config: config.clone(),
            positions: [axis(0)?, axis(1)?],
            patch_ln1: loader.layer_norm(&format!("{module}.patch_ln1"), pixels, LAYER_NORM_EPS)?,
            patch_dense: patch_dense(loader, &format!("{module}.patch_dense"), pixels, width)?,
            patch_ln2: loader.layer_norm(&format!("{module}.patch_ln2"), width, LAYER_NORM_EPS)?,
            pos_norm: loader.layer_norm(&format!("{module}.pos_norm"), width, LAYER_NORM_EPS)?,
            embedder: Embedder::load(loader, "embed_vision", width, text_hidden, config.rms_norm_eps)?,
            on_cpu,
        })
    })
}

fn patch_dense(loader: &mut Loader, module: &str, pixels: i32, width: i32) -> Result<Vec<Linear>, WeightError> {
    if !loader.on_host() || !loader.part_inputs(module, [width, pixels], DENSE_PARTS)? {
        return Ok(vec![loader.linear(module, pixels, width, true)?]);
    }
    (0..DENSE_PARTS).map(|part| loader.linear(&format!("{module}.{part}"), pixels / DENSE_PARTS, width, part == 0)).collect()
}

/// Takes `embed_audio.*`.
pub fn load_audio(config: &AudioConfig, loader: &mut Loader, text_hidden: i32) -> Result<AudioEmbedder, WeightError> {
    config.check()?;
    let on_cpu = device::is_cpu()?;
    let (width, eps) = (config.samples_per_token(), config.rms_norm_eps);
    let embedder = loader.in_float32(|loader| Embedder::load(loader, "embed_audio", width, text_hidden, eps))?;
    Ok(AudioEmbedder { config: config.clone(), embedder, on_cpu })
}
