//! Gemma 4: a text model that reads what towers make of images and recordings as tokens of its own; or, in the form without
//! towers, what `unified` makes of patches and samples.
//!
//! Sources: transformers `modeling_gemma4.py`; mlx-vlm `models/gemma4/`; mlx-lm `models/gemma4_text.py`.

mod audio;
mod clipped;
mod config;
mod conformer;
mod layer;
mod text;
#[cfg(test)]
mod text_test;
mod tower;
#[cfg(test)]
mod tower_test;
mod unified;
#[cfg(test)]
mod unified_test;
mod vision;

use mlx_rs::{Array, ops};
use serde_json::Value;

use super::{Model, Scratch, Towers, parse};
use crate::{
    engine::{
        EngineError,
        cache::{Cache, LayerLayout, SoftTokens, Step},
        ffi,
        weights::{Loader, WeightError},
    },
    media::Features,
    schedule::{EncodePrice, Medium, MediumContent},
};
use audio::{AudioConfig, AudioTower, RecordingFeatures};
pub use config::Config;
use text::TextModel;
use unified::{AudioEmbedder, VisionEmbedder};
use vision::{Compute, ImagePatches, VisionConfig, VisionTower};

pub struct Gemma4 {
    text: TextModel,
    /// What stands in a prompt for images, recordings and films.
    placeholders: Vec<i32>,
    /// None where the weights have none, whatever config.json promises.
    vision: Option<Vision>,
    audio: Option<Audio>,
    hidden_size: i32,
}

/// What sees.
enum Vision {
    Tower(VisionTower),
    Embedder(VisionEmbedder),
}

/// What hears.
enum Audio {
    Tower(Box<AudioTower>),
    Embedder(AudioEmbedder),
}

/// Of `gemma4` and `gemma4_unified`, and of `gemma4_text` and `gemma4_unified_text`, which have neither towers nor placeholders.
pub fn load(config: &Value, mut loader: Loader) -> Result<Gemma4, WeightError> {
    let whole = config;
    let config = Config::read(whole)?;
    // Recorded bounds that files have for the text model too count in towers alone.
    loader.ignore_where(|name| {
        let bound = [".input_min", ".input_max", ".output_min", ".output_max"].iter().any(|bound| name.ends_with(bound));
        bound && !name.starts_with("vision_tower.") && !name.starts_with("audio_tower.")
    });
    let hidden_size = config.text.hidden_size;
    let text = TextModel::load(&config.text, &mut loader)?;
    // A tower is there where its tensors are.
    let section = |key: &str| whole.get(key).filter(|section| section.is_object());
    let has = |loader: &Loader, tower: &str| loader.has_where(|name| name.starts_with(tower));
    let unified = config::is_unified(whole);
    let (seeing, hearing) = if unified { ("vision_embedder.", "embed_audio.") } else { ("vision_tower.", "audio_tower.") };
    let vision = match section("vision_config").filter(|_| has(&loader, seeing)) {
        Some(own) if unified => Some(Vision::Embedder(unified::load_vision(&parse(own)?, &mut loader, hidden_size)?)),
        Some(own) => Some(Vision::Tower(vision::load(&parse(own)?, &mut loader, hidden_size)?)),
        None => None,
    };
    let audio = match section("audio_config").filter(|_| has(&loader, hearing)) {
        Some(own) if unified => Some(Audio::Embedder(unified::load_audio(&parse(own)?, &mut loader, hidden_size)?)),
        Some(own) => Some(Audio::Tower(Box::new(audio::load(&parse(own)?, &mut loader, hidden_size)?))),
        None => None,
    };
    // What is left of a tower that is not there, as converted files have it, is of no use.
    let (sees, hears) = (vision.is_some(), audio.is_some());
    loader.ignore_where(|name| {
        let is_of = |modules: [&str; 2]| modules.iter().any(|module| name.starts_with(module));
        (!sees && is_of([if unified { "vision_embedder." } else { "vision_tower." }, "embed_vision."]))
            || (!hears && is_of(["audio_tower.", "embed_audio."]))
    });
    loader.finish()?;
    Ok(Gemma4 { text, placeholders: config.placeholders(), vision, audio, hidden_size })
}

/// [`Towers::encode_prices`] by the configuration alone; 0 of a tower that it does not have, or that loading would refuse.
pub fn encode_prices(config: &Value, on_gpu: bool, float32: bool) -> [EncodePrice; 2] {
    let section = |key: &str| config.get(key).filter(|section| section.is_object());
    if config::is_unified(config) {
        let vision: Option<unified::VisionConfig> = section("vision_config").and_then(|own| parse(own).ok());
        let audio: Option<unified::AudioConfig> = section("audio_config").and_then(|own| parse(own).ok());
        let image = vision.filter(|config| config.check().is_ok()).map(|config| config.encode_price());
        let audio = audio.filter(|config| config.check().is_ok()).map(|config| config.encode_price());
        return [image.unwrap_or_default(), audio.unwrap_or_default()];
    }
    let vision: Option<VisionConfig> = section("vision_config").and_then(|own| parse(own).ok());
    let audio: Option<AudioConfig> = section("audio_config").and_then(|own| parse(own).ok());
    let image = vision.filter(|config| config.check().is_ok());
    let image = image.map(|config| config.encode_price(Compute::of(on_gpu, float32), if float32 { 4 } else { 2 }));
    let audio = audio.filter(|config| config.check().is_ok()).map(|config| config.encode_price());
    [image.unwrap_or_default(), audio.unwrap_or_default()]
}

/// What is heard of the rows: features by a tower, samples without one.
#[derive(Default)]
struct Recordings<'a> {
    features: Vec<RecordingFeatures<'a>>,
    waveforms: Vec<&'a Features>,
}

impl Vision {
    fn soft_tokens(&self, image: &ImagePatches<'_>) -> i32 {
        match self {
            Self::Tower(tower) => tower.soft_tokens(image),
            Self::Embedder(embedder) => embedder.soft_tokens(image),
        }
    }

    fn encode(&self, images: &[ImagePatches<'_>]) -> Result<Array, EngineError> {
        match self {
            Self::Tower(tower) => tower.encode(images),
            Self::Embedder(embedder) => embedder.encode(images),
        }
    }

    fn encode_price(&self, dtype_bytes: u64) -> EncodePrice {
        match self {
            Self::Tower(tower) => tower.encode_price(dtype_bytes),
            Self::Embedder(embedder) => embedder.encode_price(),
        }
    }
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

    fn towers(&self) -> Option<&dyn Towers> {
        (self.vision.is_some() || self.audio.is_some()).then_some(self)
    }
}

impl Towers for Gemma4 {
    fn encode(&self, media: &[&Medium]) -> Result<Vec<Array>, EngineError> {
        let missing = |what: &str| EngineError::Mlx(format!("the model has no weights for {what}"));
        let mut images = Vec::new();
        let mut recordings = Recordings::default();
        for medium in media {
            match &*medium.content {
                MediumContent::Image(patches) => images.push(ImagePatches {
                    values: &patches.values,
                    columns: patches.columns as i32,
                    rows: patches.rows as i32,
                }),
                MediumContent::Audio(features) => {
                    recordings.features.push(RecordingFeatures { features, soft_tokens: medium.tokens });
                }
                MediumContent::Waveform(frames) if frames.frames == medium.tokens as usize => recordings.waveforms.push(frames),
                MediumContent::Waveform(frames) => {
                    let (made, placed) = (frames.frames, medium.tokens);
                    return Err(EngineError::Mlx(format!(
                        "a recording becomes {made} soft tokens and has {placed} places in the prompt"
                    )));
                }
            }
        }
        let of_images = match (&self.vision, images.is_empty()) {
            (_, true) => None,
            (Some(vision), false) => {
                let places = media.iter().filter(|medium| matches!(*medium.content, MediumContent::Image(_)));
                if let Some((image, medium)) =
                    images.iter().zip(places).find(|(image, medium)| vision.soft_tokens(image) != medium.tokens as i32)
                {
                    let (made, placed) = (vision.soft_tokens(image), medium.tokens);
                    return Err(EngineError::Mlx(format!(
                        "an image becomes {made} soft tokens and has {placed} places in the prompt"
                    )));
                }
                Some(vision.encode(&images)?)
            }
            (None, false) => return Err(missing("images")),
        };
        let of_recordings = match (&self.audio, recordings.features.is_empty(), recordings.waveforms.is_empty()) {
            (_, true, true) => None,
            (Some(Audio::Tower(tower)), _, true) => Some(tower.encode(&recordings.features)?),
            (Some(Audio::Embedder(embedder)), true, _) => Some(embedder.encode(&recordings.waveforms)?),
            (Some(_), ..) => return Err(EngineError::Mlx("a recording was made ready for another kind of model".into())),
            (None, ..) => return Err(missing("recordings")),
        };
        let (mut images_done, mut recordings_done) = (0, 0);
        let mut each = Vec::with_capacity(media.len());
        for medium in media {
            let (all, done) = match &*medium.content {
                MediumContent::Image(_) => (&of_images, &mut images_done),
                MediumContent::Audio(_) | MediumContent::Waveform(_) => (&of_recordings, &mut recordings_done),
            };
            let tokens = medium.tokens as i32;
            let Some(all) = all.as_ref().filter(|all| *done + tokens <= all.dim(0)) else {
                return Err(EngineError::Mlx(format!("a tower made too few soft tokens: {tokens} have places in the prompt")));
            };
            each.push(ffi::slice(all, &[*done, 0], &[*done + tokens, self.hidden_size])?);
            *done += tokens;
        }
        Ok(each)
    }

    fn encode_prices(&self, dtype_bytes: u64) -> [EncodePrice; 2] {
        let image = self.vision.as_ref().map(|vision| vision.encode_price(dtype_bytes));
        let audio = self.audio.as_ref().map(|audio| match audio {
            Audio::Tower(tower) => tower.encode_price(),
            Audio::Embedder(embedder) => embedder.encode_price(),
        });
        [image.unwrap_or_default(), audio.unwrap_or_default()]
    }

    fn soft_token_bytes(&self, dtype_bytes: u64) -> u64 {
        self.hidden_size as u64 * dtype_bytes
    }
}
