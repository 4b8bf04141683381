//! Gemma 4: a text model that reads what towers make of images and recordings as tokens of its own.
//!
//! Sources: transformers `modeling_gemma4.py`; mlx-vlm `models/gemma4/`; mlx-lm `models/gemma4_text.py`.

mod config;
mod layer;
mod text;
#[cfg(test)]
mod text_test;

use mlx_rs::{Array, ops};
use serde_json::Value;

use super::{Model, Scratch};
use crate::engine::{
    EngineError,
    cache::{Cache, LayerLayout, SoftTokens, Step},
    ffi,
    weights::{Loader, WeightError},
};
pub use config::Config;
use text::TextModel;

pub struct Gemma4 {
    text: TextModel,
    /// What stands in a prompt for images, recordings and films.
    placeholders: Vec<i32>,
}

/// Of `gemma4`, and of `gemma4_text`, which has neither towers nor placeholders.
pub fn load(config: &Value, mut loader: Loader) -> Result<Gemma4, WeightError> {
    let config = Config::read(config)?;
    // Recorded bounds that files have for the text model too count in towers alone.
    loader.ignore_where(|name| {
        let bound = [".input_min", ".input_max", ".output_min", ".output_max"].iter().any(|bound| name.ends_with(bound));
        bound && !name.starts_with("vision_tower.") && !name.starts_with("audio_tower.")
    });
    let text = TextModel::load(&config.text, &mut loader)?;
    // Until there is something that computes them.
    const TOWERS: [&str; 4] = ["vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."];
    loader.ignore_where(|name| TOWERS.iter().any(|tower| name.starts_with(tower)));
    loader.finish()?;
    Ok(Gemma4 { text, placeholders: config.placeholders() })
}

impl Gemma4 {
    /// The ids by which per-layer inputs are looked up: 0 wherever a prompt has no token of its own (mlx-vlm's
    /// `get_input_embeddings`). A placeholder that was sampled is a token like any other.
    fn per_layer_ids(&self, tokens: &Array, step: &Step) -> Result<Array, EngineError> {
        let prompt_tokens: i32 = step.places().chunks.iter().map(|chunk| chunk.length).sum();
        if prompt_tokens == 0 {
            return Ok(tokens.clone());
        }
        let mut ids = tokens.clone();
        if !self.placeholders.is_empty() {
            let in_prompt: Vec<bool> = (0..tokens.dim(0)).map(|place| place < prompt_tokens).collect();
            let placeholders = Array::from_slice(&self.placeholders, &[self.placeholders.len() as i32, 1]);
            let stands_in = tokens.eq(placeholders)?.any_axes(&[0], false)?;
            let stands_in = stands_in.logical_and(Array::from_slice(&in_prompt, &[tokens.dim(0)]))?;
            ids = ops::select(&stands_in, Array::from_int(0).as_dtype(tokens.dtype())?, &ids)?;
        }
        if let Some(SoftTokens { places, .. }) = step.soft_tokens() {
            let count = places.len() as i32;
            let zeros = ops::zeros_dtype(&[count, 1], ids.dtype())?;
            ids = ffi::scatter(&ids, &[&Array::from_slice(places, &[count])], &zeros, &[0])?;
        }
        Ok(ids)
    }
}

impl Model for Gemma4 {
    fn cache_layout(&self) -> Vec<LayerLayout> {
        self.text.cache_layout()
    }

    fn forward(&self, tokens: &Array, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let mut hidden = self.text.embed(tokens)?;
        if let Some(SoftTokens { places, embeddings }) = step.soft_tokens() {
            let (count, width) = (places.len() as i32, hidden.dim(1));
            if embeddings.shape() != [count, width] || places.iter().any(|&place| place < 0 || place >= hidden.dim(0)) {
                let (shape, tokens) = (embeddings.shape(), hidden.dim(0));
                let reason = format!("{count} soft tokens of {shape:?} among {tokens} tokens of ({tokens}, {width}) do not fit");
                return Err(EngineError::Mlx(reason));
            }
            // Rounded as everything the embedding gives, and not scaled: the towers' projections end in the space behind the scale.
            let rows = embeddings.as_dtype(hidden.dtype())?.reshape(&[count, 1, width])?;
            hidden = ffi::scatter(&hidden, &[&Array::from_slice(places, &[count])], &rows, &[0])?;
        }
        let ids = self.per_layer_ids(tokens, step)?;
        self.text.forward(hidden, &ids, step, cache)
    }

    fn logits(&self, hidden: &Array) -> Result<Array, EngineError> {
        self.text.logits(hidden)
    }

    fn vocabulary(&self) -> u32 {
        self.text.vocabulary()
    }

    fn scratch(&self, dtype_bytes: u64) -> Scratch {
        self.text.scratch(dtype_bytes)
    }

    fn shares_prefixes(&self) -> bool {
        true
    }
}
