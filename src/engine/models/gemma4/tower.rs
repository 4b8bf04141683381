//! What both towers share.

use mlx_rs::{Array, Dtype, fast, transforms};

use super::super::{LAYERS_MAX, Linear, SIZE_MAX};
use crate::engine::{
    EngineError,
    weights::{Loader, WeightError},
};

/// Refuses a size that no model has: sizes are there to be multiplied by each other.
pub fn check_size(name: &str, size: i32) -> Result<(), WeightError> {
    if (1..=SIZE_MAX).contains(&size) {
        return Ok(());
    }
    Err(WeightError::Config(format!("{name} is {size}; it must be 1 to {SIZE_MAX}: is this the model's own config.json?")))
}

/// As [`check_size`], of `num_hidden_layers`.
pub fn check_layers(name: &str, layers: usize) -> Result<(), WeightError> {
    if (1..=LAYERS_MAX).contains(&layers) {
        return Ok(());
    }
    Err(WeightError::Config(format!("{name} is {layers}; it must be 1 to {LAYERS_MAX}: is this the model's own config.json?")))
}

/// Root mean square normalization in float32 whatever comes in; the weight is not rounded with the rest either.
pub fn rms_norm_float32(x: &Array, weight: Option<&Array>, eps: f32) -> Result<Array, EngineError> {
    let weight = weight.map(|weight| weight.as_dtype(Dtype::Float32)).transpose()?;
    Ok(fast::rms_norm(x.as_dtype(Dtype::Float32)?, weight.as_ref(), eps)?.as_dtype(x.dtype())?)
}

/// What a tower computes on a GPU, piece by piece: one is built while the one before it is computed, and no more.
///
/// On NVIDIA's GPUs MLX gives back what a graph of up to a hundred operations has computed when all of it is done, and a tower's
/// results are large.
#[derive(Default)]
pub struct Pace {
    underway: Option<Array>,
}

impl Pace {
    pub fn next(&mut self, hidden: &Array) -> Result<(), EngineError> {
        transforms::async_eval([hidden])?;
        if let Some(before) = self.underway.replace(hidden.clone()) {
            before.eval()?;
        }
        Ok(())
    }
}

/// What a tower gives into the text model's hidden states: `projection(x / rms(x))`, (…, tower) -> (…, text hidden).
///
/// Source: `MultimodalEmbedder` of mlx-vlm's `gemma4.py`.
pub struct Embedder {
    projection: Linear,
    eps: f32,
}

impl Embedder {
    pub fn load(loader: &mut Loader, module: &str, tower: i32, text_hidden: i32, eps: f32) -> Result<Self, WeightError> {
        let projection = loader.linear(&format!("{module}.embedding_projection"), tower, text_hidden, false)?;
        Ok(Self { projection, eps })
    }

    pub fn forward(&self, x: &Array) -> Result<Array, EngineError> {
        self.projection.forward(&fast::rms_norm(x, None, self.eps)?)
    }
}
