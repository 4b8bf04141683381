//! The towers against mlx-vlm on the same libmlx: what `fixtures/make_gemma4_tower_goldens.py` wrote.

use std::{
    collections::HashMap,
    env, fs,
    path::{Path, PathBuf},
};

use mlx_rs::{Array, Dtype, random};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    audio::{self, AudioConfig, AudioTower, RecordingFeatures},
    vision::{self, ImagePatches, VisionConfig, VisionTower},
};
use crate::{
    engine::{
        memory,
        models::{
            golden_test::root,
            kernel_test::{on_cuda, save},
        },
        weights::{Loader, Policy, WeightError},
    },
    media::{Features, UsmFeatures},
};

/// Relative root mean square error of a tower in float32, over all images or recordings.
pub(super) const ERROR_MAX: f64 = 1e-6;
/// Of a single one: those of a token or two are few numbers.
pub(super) const ONE_ERROR_MAX: f64 = 1.5e-6;
/// How far away what is computed in bfloat16 may be, whose own rounding is 4e-3.
const BFLOAT16_ERROR_MAX: f64 = 0.02;
/// How far away a tower without its clipping must be at least, and one with any other planted fault.
const UNCLIPPED_MIN: f64 = 0.1;
pub(super) const FAULT_MIN: f64 = 0.01;
const BINS: usize = 128;
pub(super) const PLAIN: Policy = Policy { dtype: Some(Dtype::Float32), dequantize: true, merge: false, host: false };
pub(super) const PACKED: Policy = Policy { host: true, ..PLAIN };
pub(super) const BFLOAT16: Policy = Policy { dtype: Some(Dtype::Bfloat16), ..PLAIN };

#[derive(Deserialize)]
struct Golden {
    images: Vec<(i32, i32)>,
    recordings: Vec<(usize, usize, u32)>,
    float32: Soft,
    as_stored: Soft,
}

#[derive(Deserialize)]
pub(super) struct Soft {
    pub(super) images: Vec<Vec<f32>>,
    pub(super) recordings: Vec<Vec<f32>>,
}

fn golden(name: &str) -> Golden {
    serde_json::from_slice(&fs::read(root().join(format!("goldens/gemma4_towers/{name}.json"))).unwrap()).unwrap()
}

/// The checkpoint, where `fixtures/make_gemma4.py` has written it.
pub(super) fn checkpoint(test: &str, name: &str) -> Option<PathBuf> {
    let shipped = root().join("fixtures/checkpoints");
    let made = env::var_os("MLXBATCH_FIXTURES").map(PathBuf::from);
    let found = [Some(shipped), made].into_iter().flatten().map(|folder| folder.join("gemma4").join(name)).find(|it| it.is_dir());
    if found.is_none() {
        eprintln!("skipped: {test}, gemma4/{name} is not in the folder that MLXBATCH_FIXTURES names (make test-models makes it)");
    }
    found
}

pub(super) struct Towers {
    pub(super) folder: tempfile::TempDir,
    pub(super) config: Value,
}

impl Towers {
    /// The towers' tensors alone, each changed by `change`.
    pub(super) fn of(checkpoint: &Path, change: impl Fn(String, Array) -> (String, Array)) -> Self {
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

pub(super) fn as_it_is(name: String, tensor: Array) -> (String, Array) {
    (name, tensor)
}

/// In 0 ..= 1, as the script has it.
pub(super) fn value(index: usize, seed: usize) -> f32 {
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

pub(super) fn numbers(tokens: &Array) -> Vec<f32> {
    tokens.as_dtype(Dtype::Float32).unwrap().contiguous().unwrap().try_as_slice::<f32>().unwrap().to_vec()
}

pub(super) fn away(ours: &[f32], golden: &[f32]) -> f64 {
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

pub(super) fn check(place: &str, ours: &[Vec<f32>], golden: &[Vec<f32>], error_max: f64, one_error_max: f64) {
    assert_eq!(ours.len(), golden.len());
    let all = away(&ours.concat(), &golden.concat());
    let one = ours.iter().zip(golden).fold(0.0, |worst: f64, (ours, golden)| worst.max(away(ours, golden)));
    println!("{place}: {all:.2e} away, one of them {one:.2e}");
    assert!(all <= error_max && one <= one_error_max, "{place}: {all:e} away, one of them {one:e}");
}

#[test]
fn towers_agree_with_mlx_vlm_alone_and_together() {
    for name in ["e2b", "dense"] {
        let Some(checkpoint) = checkpoint("towers_agree_with_mlx_vlm_alone_and_together", name) else { return };
        let (towers, golden) = (Towers::of(&checkpoint, as_it_is), golden(name));
        for policy in [PLAIN, PACKED] {
            let (vision, audio) = towers.load(policy, |_| {}).unwrap();
            for together in [false, true] {
                let place = |what| format!("{name}, {what}, packed {}, together {together}", policy.host);
                let (seen, heard) = (see(&vision, &golden.images, together), hear(&audio, &recordings(&golden), together));
                check(&place("images"), &seen, &golden.float32.images, ERROR_MAX, ONE_ERROR_MAX);
                check(&place("recordings"), &heard, &golden.float32.recordings, ERROR_MAX, ONE_ERROR_MAX);
            }
        }
    }
}

/// Of the products that a run on the CPU computes no sum depends on what else is in the batch.
#[test]
fn on_the_cpu_company_changes_no_bit() {
    let Some(checkpoint) = checkpoint("on_the_cpu_company_changes_no_bit", "e2b") else { return };
    let golden = golden("e2b");
    let (vision, audio) = Towers::of(&checkpoint, as_it_is).load(PACKED, |_| {}).unwrap();
    assert_eq!(see(&vision, &golden.images, true), see(&vision, &golden.images, false));
    let recordings = recordings(&golden);
    assert_eq!(hear(&audio, &recordings, true), hear(&audio, &recordings, false));
    // What does not count is zero to the bit, and a place too many has the first token again.
    let width = 32;
    let heard = hear(&audio, &recordings, true);
    assert_eq!((heard[4].len(), heard[3].len(), heard[8].len()), (13 * width, 13 * width, 2 * width));
    assert!(heard[4][12 * width..].iter().chain(&heard[8]).all(|number| *number == 0.0));
    assert_eq!(heard[3][12 * width..], heard[3][..width]);
}

/// Vision computes in bfloat16 throughout, hearing in float32 with bfloat16 weights, as in the reference.
#[test]
fn halves_are_near() {
    for name in ["e2b", "dense"] {
        let Some(checkpoint) = checkpoint("halves_are_near", name) else { return };
        let (towers, golden) = (Towers::of(&checkpoint, as_it_is), golden(name));
        let (vision, audio) = towers.load(Policy { dtype: None, ..PLAIN }, |_| {}).unwrap();
        for together in [false, true] {
            let (seen, heard) = (see(&vision, &golden.images, together), hear(&audio, &recordings(&golden), together));
            check(&format!("{name}, images"), &seen, &golden.as_stored.images, BFLOAT16_ERROR_MAX, BFLOAT16_ERROR_MAX);
            check(&format!("{name}, recordings"), &heard, &golden.as_stored.recordings, ERROR_MAX, ONE_ERROR_MAX);
        }
    }
}

#[test]
fn planted_faults_are_seen() {
    let Some(checkpoint) = checkpoint("planted_faults_are_seen", "e2b") else { return };
    let (towers, golden) = (Towers::of(&checkpoint, as_it_is), golden("e2b"));
    let float32 = &golden.float32;
    let all = |ours: &[Vec<f32>], golden: &[Vec<f32>]| away(&ours.concat(), &golden.concat());

    let edit = |table: &'static str, key: &'static str, to: Value| {
        let (vision, audio) = towers.load(PLAIN, |config| config[table][key] = to).unwrap();
        let seen = all(&see(&vision, &golden.images, true), &float32.images);
        (seen, all(&hear(&audio, &recordings(&golden), true), &float32.recordings))
    };
    let (seen, _) = edit("vision_config", "use_clipped_linears", json!(false));
    let (_, heard) = edit("audio_config", "use_clipped_linears", json!(false));
    println!("unclipped: images {seen:.3} away, recordings {heard:.3}");
    assert!(seen >= UNCLIPPED_MIN && heard >= UNCLIPPED_MIN, "images are {seen} away, recordings {heard}");

    let (rope, _) = edit("vision_config", "rope_parameters", json!({ "rope_theta": 1e4 }));
    let causal = [12, 14].map(|left| edit("audio_config", "attention_context_left", json!(left)).1);
    let (_, future) = edit("audio_config", "attention_context_right", json!(2));
    let (_, cap) = edit("audio_config", "attention_logit_cap", json!(0.5));
    let (vision, audio) = towers.load(PLAIN, |_| {}).unwrap();
    // Columns taken for rows.
    let (columns, rows) = golden.images[1];
    let image = ImagePatches { values: &patches((columns, rows), 1), columns: rows, rows: columns };
    let turned = away(&numbers(&vision.encode(&[image]).unwrap()), &float32.images[1]);
    // One of 51 frames more or less, of which 48 count; and padding in front.
    let masked = [47, 49].map(|valid| away(&hear(&audio, &[(features(51, valid, 4), 13)], false)[0], &float32.recordings[4]));
    let mut in_front = features(51, 48, 4);
    in_front.features.values.rotate_right(3 * BINS);
    in_front.valid_frames = 51;
    let in_front = away(&hear(&audio, &[(in_front, 13)], false)[0], &float32.recordings[4]);
    for (fault, away) in [
        ("rope", rope),
        ("a token less of the past", causal[0]),
        ("a token more of the past", causal[1]),
        ("a token of the future", future),
        ("softcap", cap),
        ("columns for rows", turned),
        ("a frame less", masked[0]),
        ("a frame more", masked[1]),
        ("padding in front", in_front),
    ] {
        println!("{fault}: {away:.3} away");
        assert!(away >= FAULT_MIN, "{fault} is {away} away");
    }
}

/// What mlx-vlm's own conversion writes: no `model.` in front, and convolutions in MLX's layout.
#[test]
fn converted_files_are_the_same() {
    let Some(checkpoint) = checkpoint("converted_files_are_the_same", "e2b") else { return };
    let golden = golden("e2b");
    let converted = |name: String, tensor: Array| {
        let moved: &[i32] = match tensor.ndim() {
            4 => &[0, 2, 3, 1],
            3 if name.contains("conv1d") => &[0, 2, 1],
            _ => return (name.replacen("model.", "", 1), tensor),
        };
        (name.replacen("model.", "", 1), tensor.transpose_axes(moved).unwrap().contiguous().unwrap())
    };
    let (vision, audio) = Towers::of(&checkpoint, as_it_is).load(PLAIN, |_| {}).unwrap();
    let (other_vision, other_audio) = Towers::of(&checkpoint, converted).load(PLAIN, |_| {}).unwrap();
    assert_eq!(see(&vision, &golden.images, true), see(&other_vision, &golden.images, true));
    assert_eq!(hear(&audio, &recordings(&golden), true), hear(&other_audio, &recordings(&golden), true));
}

#[test]
fn tensors_and_configurations_that_do_not_fit_are_refused() {
    let Some(checkpoint) = checkpoint("tensors_and_configurations_that_do_not_fit_are_refused", "e2b") else { return };
    let renamed = |name: String, tensor: Array| {
        let lost = ["vision_tower.encoder.layers.1.mlp.up_proj.input_max", "audio_tower.layers.0.lconv1d.conv_norm.weight"];
        if lost.iter().any(|lost| name.ends_with(lost)) { (format!("{name}.strange"), tensor) } else { (name, tensor) }
    };
    let text = Towers::of(&checkpoint, renamed).refusal(|config| config["audio_config"]["conv_kernel_size"] = json!(7));
    for problem in [
        "vision_tower.encoder.layers.1.mlp.up_proj.input_max is missing",
        "audio_tower.layers.0.lconv1d.conv_norm.weight is missing",
        "audio_tower.layers.1.lconv1d.depthwise_conv1d.weight has shape [32, 1, 5], the configuration says [32, 7, 1]",
        "audio_tower.layers.0.lconv1d.conv_norm.weight.strange is not part of this family",
    ] {
        assert!(text.contains(problem), "{problem:?} is not in:\n{text}");
    }
    let towers = Towers::of(&checkpoint, as_it_is);
    for (table, key, to, problem) in [
        ("vision_config", "hidden_size", json!(0), "vision_config.hidden_size is 0; it must be 1 to 1048576"),
        ("vision_config", "num_hidden_layers", json!(100_000), "vision_config.num_hidden_layers is 100000; it must be 1 to 256"),
        ("vision_config", "num_key_value_heads", json!(3), "2 heads (num_attention_heads), which 3 keys do not divide"),
        ("vision_config", "head_dim", json!(18), "head_dim is 18; two axes turn pairs of its numbers"),
        ("vision_config", "head_dim", json!(1 << 20), "2 heads of 1048576 numbers"),
        ("vision_config", "patch_size", json!(4096), "patch_size is 4096; it must be 1 to 256"),
        ("vision_config", "hidden_activation", json!("relu"), "'relu' is not yet supported ('gelu_pytorch_tanh' is)"),
        ("vision_config", "attention_bias", json!(true), "attention_bias = true is not yet supported"),
        ("vision_config", "rope_parameters", json!({ "rope_theta": 0.0 }), "rope_theta is 0; it must be above 1"),
        ("audio_config", "num_attention_heads", json!(5), "hidden_size is 32, an even multiple of 5 heads is needed"),
        ("audio_config", "hidden_act", json!("gelu"), "'gelu' is not yet supported ('silu' is)"),
        ("audio_config", "attention_chunk_size", json!(0), "attention_chunk_size is 0; it must be 1 to 1024"),
        ("audio_config", "subsampling_conv_channels", json!([128, -8]), "subsampling_conv_channels[1] is -8"),
        ("audio_config", "output_proj_dims", json!(0), "output_proj_dims is 0"),
        ("audio_config", "attention_logit_cap", json!(0.0), "attention_logit_cap is 0; it must be above 0"),
    ] {
        let text = towers.refusal(|config| config[table][key] = to);
        assert!(text.contains(problem), "{problem:?} is not in:\n{text}");
    }
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let Some(checkpoint) = checkpoint("inputs_that_do_not_fit_are_refused", "e2b") else { return };
    let (vision, audio) = Towers::of(&checkpoint, as_it_is).load(PLAIN, |_| {}).unwrap();
    let values = patches((3, 3), 0);
    for (columns, rows, values, problem) in [
        (3, 3, &values[1..], "3 × 3 patches are 6912 numbers, and it has 6911"),
        (3, 4, &values[..], "3 × 4 patches do not divide into squares of 3 × 3"),
        (0, 3, &values[..], "0 × 3 patches, and the model knows 1 to 1024 each way"),
        (1026, 3, &values[..], "1026 × 3 patches, and the model knows 1 to 1024 each way"),
        (510, 510, &values[..], "510 × 510 patches, 32768 are possible"),
    ] {
        let error = vision.encode(&[ImagePatches { values, columns, rows }]).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
    assert!(vision.encode(&[]).is_err() && audio.encode(&[]).is_err());
    let mut narrow = features(4, 4, 0);
    narrow.features.bins = 64;
    let mut short = features(4, 4, 0);
    short.features.values.pop();
    let mut many = features(4, 4, 0);
    many.valid_frames = 5;
    for (features, soft_tokens, problem) in [
        (narrow, 1, "they have 64 bins, 128 are needed"),
        (short, 1, "4 of 4 frames count, and there are 511 numbers"),
        (many, 1, "5 of 4 frames count"),
        (features(3001, 1, 0), 750, "they have 3001 frames, 3000 are possible"),
        (features(4, 4, 0), 751, "they are to fill 751 places of a prompt"),
    ] {
        let recording = RecordingFeatures { features: &features, soft_tokens };
        let error = audio.encode(&[recording]).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
}

/// A vision tower of the reference's sizes, but for its number of layers, with random weights.
fn tower_of_full_size(policy: Policy, num_hidden_layers: usize, intermediate_size: i32) -> VisionTower {
    let config = VisionConfig { num_hidden_layers, intermediate_size, ..VisionConfig::default() };
    let (hidden, middle, head_dim, text_hidden) = (config.hidden_size, config.intermediate_size, config.head_dim, 1536);
    let heads = config.num_attention_heads * head_dim;
    let shapes = [
        ("vision_tower.patch_embedder.input_proj.weight".to_owned(), vec![hidden, 768]),
        ("vision_tower.patch_embedder.position_embedding_table".to_owned(), vec![2, config.position_embedding_size, hidden]),
        ("embed_vision.embedding_projection.weight".to_owned(), vec![text_hidden, hidden]),
    ];
    let linears = [
        ("self_attn.q_proj", heads, hidden),
        ("self_attn.k_proj", heads, hidden),
        ("self_attn.v_proj", heads, hidden),
        ("self_attn.o_proj", hidden, heads),
        ("mlp.gate_proj", middle, hidden),
        ("mlp.up_proj", middle, hidden),
        ("mlp.down_proj", hidden, middle),
    ];
    let norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"];
    let layers = (0..num_hidden_layers).flat_map(|layer| {
        let layer = format!("vision_tower.encoder.layers.{layer}");
        let linears = linears.map(|(name, output, input)| (format!("{layer}.{name}.linear.weight"), vec![output, input]));
        let norms = norms.map(|name| (format!("{layer}.{name}_layernorm.weight"), vec![hidden]));
        let head_norms = ["q_norm", "k_norm"].map(|name| (format!("{layer}.self_attn.{name}.weight"), vec![head_dim]));
        linears.into_iter().chain(norms).chain(head_norms)
    });
    let shapes = shapes.into_iter().chain(layers);
    let tensors: HashMap<String, Array> =
        shapes.map(|(name, shape)| (name, random::normal::<f32>(&shape, None, Some(0.02), None).unwrap())).collect();
    let folder = tempfile::tempdir().unwrap();
    save(&tensors, folder.path());
    let mut loader = Loader::open(&[folder.path().join("model.safetensors")], &json!({}), policy).unwrap();
    vision::load(&config, &mut loader, text_hidden).unwrap()
}

/// The budget's prediction beside MLX's peak, at most so many percent over it, of a tower whose widest states are its MLP's, and of
/// one whose are its attention's.
fn predict_scratch(layers: usize, policies: &[(Policy, u64, f64)]) {
    for &(policy, bytes, over_max) in policies {
        for intermediate_size in [3072, 64] {
            let tower = tower_of_full_size(policy, layers, intermediate_size);
            let image = |columns, rows| (patches((columns, rows), 1), columns, rows);
            for (values, columns, rows) in [image(60, 42), image(30, 21)] {
                let image = ImagePatches { values: &values, columns, rows };
                let predicted = tower.encode_price(bytes).bytes(tower.soft_tokens(&image) as u32);
                // What is done once is done.
                let encode = || tower.encode(&[image]).unwrap().eval().unwrap();
                encode();
                let before = memory::settled_bytes().unwrap();
                memory::reset_peak().unwrap();
                encode();
                let measured = memory::peak_bytes().unwrap() - before;
                let over = 100.0 * (predicted as f64 / measured as f64 - 1.0);
                println!(
                    "{columns} × {rows} patches of {bytes} bytes a number, {intermediate_size} wide: predicted {predicted}, \
                     measured {measured}: {over:+.1}%"
                );
                assert!(over >= -10.0 && over <= over_max, "{over:+.1}%");
            }
        }
    }
}

#[test]
#[ignore = "takes half a minute"]
fn an_images_scratch_is_predicted() {
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    // What lives together depends on how far the host has come where others compute too.
    predict_scratch(1, &[(PACKED, 4, 25.0), (BFLOAT16, 2, 25.0)]);
}

#[test]
fn an_images_scratch_is_predicted_on_cuda() {
    if on_cuda() {
        // Nobody computes in float32 there but to compare.
        predict_scratch(4, &[(PLAIN, 4, 60.0), (BFLOAT16, 2, 10.0)]);
    }
}
