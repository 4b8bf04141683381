//! The towers against mlx-vlm on the same libmlx: what `fixtures/make_gemma4_tower_goldens.py` wrote.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::Instant,
};

use mlx_rs::{Array, Dtype, ops};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    audio::{self, AudioConfig, AudioTower, RecordingFeatures},
    vision::{self, ImagePatches, VisionConfig, VisionTower},
};
use crate::{
    engine::{
        models::golden_test::root,
        weights::{Loader, Policy, WeightError},
    },
    media::{Features, UsmFeatures},
};

/// Relative root mean square error of a tower in float32.
const ERROR_MAX: f64 = 1e-6;
/// What a planted fault must be away at least.
const FAULT_MIN: f64 = 0.1;
const BINS: usize = 128;
const PLAIN: Policy = Policy { dtype: Some(Dtype::Float32), dequantize: true, merge: false, host: false };
const PACKED: Policy = Policy { host: true, ..PLAIN };

#[derive(Deserialize)]
struct Golden {
    images: Vec<(i32, i32)>,
    recordings: Vec<(usize, usize, u32)>,
    float32: Soft,
    as_stored: Soft,
}

#[derive(Deserialize)]
struct Soft {
    images: Vec<Vec<f32>>,
    recordings: Vec<Vec<f32>>,
}

fn golden(name: &str) -> Golden {
    serde_json::from_slice(&fs::read(root().join(format!("goldens/gemma4_towers/{name}.json"))).unwrap()).unwrap()
}

/// The checkpoint, where `fixtures/make_gemma4.py` has written it.
fn checkpoint(test: &str, name: &str) -> Option<PathBuf> {
    let shipped = root().join("fixtures/checkpoints");
    let made = env::var_os("MLXBATCH_FIXTURES").map(PathBuf::from);
    let found = [Some(shipped), made].into_iter().flatten().map(|folder| folder.join("gemma4").join(name)).find(|it| it.is_dir());
    if found.is_none() {
        eprintln!("skipped: {test}, gemma4/{name} is not in the folder that MLXBATCH_FIXTURES names (make test-models makes it)");
    }
    found
}

struct Towers {
    folder: tempfile::TempDir,
    config: Value,
}

impl Towers {
    /// The towers' tensors alone, each changed by `change`.
    fn of(checkpoint: &Path, change: impl Fn(String, Array) -> (String, Array)) -> Self {
        mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
        let config = serde_json::from_slice(&fs::read(checkpoint.join("config.json")).unwrap()).unwrap();
        let tensors: Vec<(String, Array)> = Array::load_safetensors(checkpoint.join("model.safetensors"))
            .unwrap()
            .into_iter()
            .filter(|(name, _)| !name.starts_with("model.language_model"))
            .map(|(name, tensor)| change(name, tensor))
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let named = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
        Array::save_safetensors(named, None, folder.path().join("model.safetensors")).unwrap();
        Self { folder, config }
    }

    fn load(&self, policy: Policy, edit: impl FnOnce(&mut Value)) -> Result<(VisionTower, AudioTower), WeightError> {
        let mut config = self.config.clone();
        edit(&mut config);
        let mut loader = Loader::open(&[self.folder.path().join("model.safetensors")], &config, policy)?;
        let text_hidden = config["text_config"]["hidden_size"].as_i64().unwrap() as i32;
        let vision = vision::load(&VisionConfig::deserialize(&config["vision_config"]).unwrap(), &mut loader, text_hidden)?;
        let audio = audio::load(&AudioConfig::deserialize(&config["audio_config"]).unwrap(), &mut loader, text_hidden)?;
        loader.finish()?;
        Ok((vision, audio))
    }

    fn refusal(&self, edit: impl FnOnce(&mut Value)) -> String {
        match self.load(PLAIN, edit) {
            Ok(_) => panic!("it was loaded"),
            Err(error) => error.to_string(),
        }
    }
}

fn as_it_is(name: String, tensor: Array) -> (String, Array) {
    (name, tensor)
}

/// In 0 ..= 1, as the script has it.
fn value(index: usize, seed: usize) -> f32 {
    let index = index as u64;
    (((37 * index * index + 11 * index + 7919 * seed as u64) % 1009) as f64 / 1008.0) as f32
}

/// The patches of the script's image.
fn patches((columns, rows): (i32, i32), seed: usize) -> Vec<f32> {
    let (columns, rows, patch) = (columns as usize, rows as usize, 16);
    let mut values = Vec::new();
    for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
        for (y, x) in (0..patch).flat_map(|y| (0..patch).map(move |x| (y, x))) {
            let pixel = (row * patch + y) * columns * patch + column * patch + x;
            values.extend((0..3).map(|color| value(3 * pixel + color, seed)));
        }
    }
    values
}

fn features(frames: usize, valid_frames: usize, seed: usize) -> UsmFeatures {
    let values = (0..frames * BINS)
        .map(|index| if index < valid_frames * BINS { value(index, 100 + seed) * 9.0 - 7.0 } else { 0.0 })
        .collect();
    UsmFeatures { features: Features { frames, bins: BINS, values }, valid_frames }
}

fn numbers(tokens: &Array) -> Vec<f32> {
    tokens.as_dtype(Dtype::Float32).unwrap().contiguous().unwrap().try_as_slice::<f32>().unwrap().to_vec()
}

fn away(ours: &[f32], golden: &[f32]) -> f64 {
    assert_eq!(ours.len(), golden.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = ours.iter().zip(golden).map(|(a, b)| square(a - b)).sum();
    (error / golden.iter().map(|b| square(*b)).sum::<f64>().max(1e-30)).sqrt()
}

/// Each image's soft tokens: alone, or all in one call.
fn see(tower: &VisionTower, sizes: &[(i32, i32)], together: bool) -> Vec<Vec<f32>> {
    let values: Vec<Vec<f32>> = sizes.iter().enumerate().map(|(seed, size)| patches(*size, seed)).collect();
    let images: Vec<ImagePatches<'_>> =
        values.iter().zip(sizes).map(|(values, &(columns, rows))| ImagePatches { values, columns, rows }).collect();
    if !together {
        return images.iter().map(|image| numbers(&tower.encode(&[*image]).unwrap())).collect();
    }
    let all = tower.encode(&images).unwrap();
    let (tokens, width) = (numbers(&all), all.dim(1) as usize);
    let mut rest = &tokens[..];
    let each = images.iter().map(|image| rest.split_off(..tower.soft_tokens(image) as usize * width).unwrap().to_vec()).collect();
    assert!(rest.is_empty());
    each
}

/// Each recording's soft tokens.
fn hear(tower: &AudioTower, recordings: &[(UsmFeatures, u32)], together: bool) -> Vec<Vec<f32>> {
    let recordings: Vec<RecordingFeatures<'_>> =
        recordings.iter().map(|(features, soft_tokens)| RecordingFeatures { features, soft_tokens: *soft_tokens }).collect();
    if !together {
        return recordings.iter().map(|recording| numbers(&tower.encode(&[*recording]).unwrap())).collect();
    }
    let all = tower.encode(&recordings).unwrap();
    let (tokens, width) = (numbers(&all), all.dim(1) as usize);
    let mut rest = &tokens[..];
    let each = recordings.iter().map(|it| rest.split_off(..it.soft_tokens as usize * width).unwrap().to_vec()).collect();
    assert!(rest.is_empty());
    each
}

fn recordings(golden: &Golden) -> Vec<(UsmFeatures, u32)> {
    let each = golden.recordings.iter().enumerate();
    each.map(|(seed, &(frames, valid, soft_tokens))| (features(frames, valid, seed), soft_tokens)).collect()
}

fn worst(ours: &[Vec<f32>], golden: &[Vec<f32>]) -> f64 {
    assert_eq!(ours.len(), golden.len());
    ours.iter().zip(golden).fold(0.0, |worst, (ours, golden)| worst.max(away(ours, golden)))
}

#[test]
fn towers_agree_with_mlx_vlm_alone_and_together() {
    for name in ["e2b", "dense"] {
        let Some(checkpoint) = checkpoint("towers_agree_with_mlx_vlm_alone_and_together", name) else { return };
        let (towers, golden) = (Towers::of(&checkpoint, as_it_is), golden(name));
        for policy in [PLAIN, PACKED] {
            let (vision, audio) = towers.load(policy, |_| {}).unwrap();
            for together in [false, true] {
                let seen = worst(&see(&vision, &golden.images, together), &golden.float32.images);
                let heard = worst(&hear(&audio, &recordings(&golden), together), &golden.float32.recordings);
                eprintln!("{name}, host {}, together {together}: seen {seen:.2e}, heard {heard:.2e}", policy.host);
                assert!(seen <= ERROR_MAX && heard <= ERROR_MAX, "{name}: images are {seen:e} away, recordings {heard:e}");
            }
        }
    }
}
