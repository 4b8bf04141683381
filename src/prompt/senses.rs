//! Media of a row, decoded into what its model's towers are given.

use std::sync::Arc;

use crate::job::{Audio, Long};
use crate::manifest::{Medium, MediumKind};
use crate::media::{Features, MediaSource, N_SAMPLES, Picture, Recording, SAMPLE_RATE, UsmMel, soft_tokens};
use crate::model::Towers;
use crate::schedule::MediumContent;

/// What a tower is given, and how many tokens it makes of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sensed {
    pub content: Arc<MediumContent>,
    pub soft_tokens: u32,
    /// Hash of the content.
    pub identity: u128,
    pub kind: MediumKind,
    /// Seconds heard; 0 of an image.
    pub seconds: f64,
    /// What a reader of the result should know, such as what was left out.
    pub notes: Vec<String>,
}

/// Decodes. Shared by threads.
pub struct Senses {
    towers: Towers,
    audio: Audio,
    mel: UsmMel,
}

impl std::fmt::Debug for Senses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Senses").field("towers", &self.towers).field("audio", &self.audio).finish_non_exhaustive()
    }
}

impl Senses {
    pub fn new(towers: Towers, audio: Audio) -> Self {
        Self { towers, audio, mel: UsmMel::new() }
    }

    /// Reads and decodes one medium; takes as long as that does. The error is a sentence with the file's name.
    pub fn sense(&self, medium: &Medium) -> Result<Sensed, String> {
        let sensed = match medium.kind {
            MediumKind::Image => self.see(&medium.source),
            MediumKind::Audio => self.hear(&medium.source),
        };
        sensed.map_err(|error| medium.source.fault(&error))
    }

    fn see(&self, source: &MediaSource) -> Result<Sensed, String> {
        let tower = self.towers.image.as_ref().ok_or("the model sees no images")?;
        let patches = Picture::open(source).and_then(|picture| tower.rule.patches(picture)).map_err(|error| error.to_string())?;
        let identity = identity(MediumKind::Image, [patches.columns, patches.rows], &patches.values);
        let soft_tokens = patches.soft_tokens;
        let content = Arc::new(MediumContent::Image(patches));
        Ok(Sensed { content, soft_tokens, identity, kind: MediumKind::Image, seconds: 0.0, notes: Vec::new() })
    }

    fn hear(&self, source: &MediaSource) -> Result<Sensed, String> {
        let tower = self.towers.audio.as_ref().ok_or("the model hears no recordings")?;
        let mut recording = Recording::open(source, self.audio.channels, SAMPLE_RATE).map_err(|error| error.to_string())?;
        let mut samples = Vec::new();
        // One more than are heard, to know that there are.
        while samples.len() <= N_SAMPLES
            && let Some(more) = recording.next().map_err(|error| error.to_string())?
        {
            samples.extend_from_slice(&more);
        }
        let mut notes = recording.notes();
        if samples.len() > N_SAMPLES {
            if self.audio.long == Long::Split {
                return Err("the recording is longer than the 30 s that the model hears of one; cut it, set audio.long = \
                            \"truncate\" to have its beginning heard, or transcribe it with a speech model such as openai/whisper-base"
                    .to_owned());
            }
            notes.push("heard up to 30.0 s: what is behind is left out (audio.long)".to_owned());
            samples.truncate(N_SAMPLES);
        }
        let seconds = samples.len() as f64 / f64::from(SAMPLE_RATE);
        let (content, soft_tokens, identity) = match tower.samples_per_token {
            Some(samples_per_token) => waveform(&samples, samples_per_token as usize, tower.soft_tokens_max)?,
            None => self.mel(&samples, tower.soft_tokens_max)?,
        };
        Ok(Sensed { content: Arc::new(content), soft_tokens, identity, kind: MediumKind::Audio, seconds, notes })
    }

    /// What a tower hears of samples, its soft tokens, and its identity.
    fn mel(&self, samples: &[f32], soft_tokens_max: u32) -> Result<(MediumContent, u32, u128), String> {
        let features = self.mel.features(samples);
        let soft_tokens = soft_tokens(samples.len()).min(soft_tokens_max);
        if features.valid_frames == 0 || soft_tokens == 0 {
            return Err("the recording is too short: the model hears none of it under 11 ms; leave it out".to_owned());
        }
        let shape = [features.features.frames as u32, features.valid_frames as u32];
        let identity = identity(MediumKind::Audio, shape, &features.features.values);
        Ok((MediumContent::Audio(features), soft_tokens, identity))
    }
}

/// The same where samples are heard as they are: a soft token a frame, the last one begun included.
fn waveform(samples: &[f32], samples_per_token: usize, soft_tokens_max: u32) -> Result<(MediumContent, u32, u128), String> {
    if samples.is_empty() || soft_tokens_max == 0 {
        return Err("the recording is empty: the model hears none of it; leave it out".to_owned());
    }
    let heard = samples.len().min((soft_tokens_max as usize).saturating_mul(samples_per_token));
    let features = Features::of_samples(&samples[..heard], samples_per_token);
    let soft_tokens = features.frames as u32;
    let identity = identity(MediumKind::Audio, [soft_tokens, features.bins as u32], &features.values);
    Ok((MediumContent::Waveform(features), soft_tokens, identity))
}

fn identity(kind: MediumKind, shape: [u32; 2], values: &[f32]) -> u128 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(kind.name().as_bytes());
    shape.iter().for_each(|side| {
        hasher.update(&side.to_le_bytes());
    });
    let mut bytes = Vec::with_capacity(4 * 4096);
    for values in values.chunks(4096) {
        bytes.clear();
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        hasher.update(&bytes);
    }
    let hash = hasher.finalize();
    hash.as_bytes().iter().take(16).rev().fold(0, |identity, &byte| identity << 8 | u128::from(byte))
}
