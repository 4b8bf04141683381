//! What a multimodal model sees and hears: told by the tensors that are there, not by what its configuration promises.

use serde_json::Value;

use super::{ModelError, ModelFiles, Weights, safetensors};
use crate::media::{PatchRule, SAMPLE_RATE};

/// Where mlx-optiq keeps towers beside a quantized language model.
pub const SIDECAR: &str = "optiq_vision.safetensors";

/// Soft tokens of a recording at most: 30 seconds.
const AUDIO_TOKENS_MAX: u32 = 750;

/// Of a model without an audio tower, where its files do not say: 40 ms.
const SAMPLES_PER_TOKEN: u32 = 640;

/// The towers of a model; none of one that reads text alone.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Towers {
    pub image: Option<ImageTower>,
    pub audio: Option<AudioTower>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ImageTower {
    pub placeholder: Placeholder,
    pub rule: PatchRule,
    /// The tokens of an image see each other both ways, unless the prompt has a recording.
    pub both_ways: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct AudioTower {
    pub placeholder: Placeholder,
    pub soft_tokens_max: u32,
    /// Samples that a soft token is made of, where the model hears them as they are; none of a tower, which hears mel features.
    pub samples_per_token: Option<u32>,
}

/// The token ids of a medium in a prompt: `begin`, `token` once for each soft token, `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placeholder {
    pub token: u32,
    pub begin: u32,
    pub end: u32,
}

impl Towers {
    pub fn new(files: &ModelFiles) -> Result<Self, ModelError> {
        // Whisper hears by other means, and no other family has towers.
        if !files.family().starts_with("gemma4") {
            return Ok(Self::default());
        }
        let mut names: Vec<String> = files.tensors()?.into_iter().map(|tensor| tensor.name).collect();
        if let Weights::Safetensors { folder, .. } = &files.weights
            && folder.join(SIDECAR).is_file()
        {
            names.extend(safetensors::read(&folder.join(SIDECAR))?.into_iter().map(|tensor| tensor.name));
        }
        let has = |tower: &str| names.iter().any(|name| name.strip_prefix("model.").unwrap_or(name).starts_with(tower));
        let config = files.config();
        let id = |name: &str, default: u32| number(config.get(name)).unwrap_or(default);
        let processor = processor(files)?;
        // Without towers, patches and samples are embedded as they are.
        let unified = files.family() == "gemma4_unified";
        let (sees, hears) = if unified { ("vision_embedder.", "embed_audio.") } else { ("vision_tower.", "audio_tower.") };
        let both_ways = match config.get("text_config").and_then(|text| text.get("use_bidirectional_attention")) {
            None => unified,
            Some(kind) => kind.as_str() == Some("vision"),
        };
        let image = has(sees).then(|| ImageTower {
            placeholder: Placeholder {
                token: id("image_token_id", 258_880),
                begin: id("boi_token_id", 255_999),
                end: id("eoi_token_id", 258_882),
            },
            rule: if unified { patch_rule(&processor).of_whole_tokens() } else { patch_rule(&processor) },
            both_ways,
        });
        let audio = has(hears).then(|| AudioTower {
            placeholder: Placeholder {
                token: id("audio_token_id", 258_881),
                begin: id("boa_token_id", 256_000),
                end: id("eoa_token_id", id("eoa_token_index", 258_883)),
            },
            soft_tokens_max: number(processor.get("audio_seq_length")).unwrap_or(AUDIO_TOKENS_MAX).min(AUDIO_TOKENS_MAX),
            samples_per_token: unified.then(|| samples_per_token(&processor)),
        });
        Ok(Self { image, audio })
    }

    /// What a row can give the model.
    pub fn inputs(&self) -> &'static [&'static str] {
        match (&self.image, &self.audio) {
            (None, None) => &["text"],
            (Some(_), None) => &["text", "image"],
            (None, Some(_)) => &["text", "audio"],
            (Some(_), Some(_)) => &["text", "image", "audio"],
        }
    }
}

fn number(value: Option<&Value>) -> Option<u32> {
    value?.as_u64().and_then(|number| u32::try_from(number).ok())
}

/// What the reference's processor reads, in its order (`Gemma4Processor.from_pretrained`); null where there is neither file.
fn processor(files: &ModelFiles) -> Result<Value, ModelError> {
    for name in ["processor_config.json", "preprocessor_config.json"] {
        if let Some(text) = files.side_file(name)? {
            return serde_json::from_str(&text).map_err(|source| ModelError::Json { file: name.into(), source });
        }
    }
    Ok(Value::Null)
}

fn samples_per_token(processor: &Value) -> u32 {
    let stated = number(processor.get("feature_extractor").and_then(|extractor| extractor.get("audio_samples_per_token")));
    stated.filter(|samples| (1..=SAMPLE_RATE).contains(samples)).unwrap_or(SAMPLES_PER_TOKEN)
}

fn patch_rule(processor: &Value) -> PatchRule {
    let default = PatchRule::default();
    // A preprocessor_config.json is flat.
    let image = processor.get("image_processor").filter(|image| image.is_object()).unwrap_or(processor);
    let positive =
        |name: &str, default: u32| number(image.get(name)).filter(|number| (1..=4096).contains(number)).unwrap_or(default);
    PatchRule {
        patch_size: positive("patch_size", default.patch_size),
        pooling_kernel_size: positive("pooling_kernel_size", default.pooling_kernel_size),
        // The second is what processors of the form without towers may have in its place.
        soft_tokens_max: positive("max_soft_tokens", positive("num_soft_tokens", default.soft_tokens_max)),
        rescale_factor: image.get("rescale_factor").and_then(Value::as_f64).map_or(default.rescale_factor, |factor| factor as f32),
    }
}
