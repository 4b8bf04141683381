//! Whisper against mlx-whisper on the same libmlx: what `fixtures/make_whisper_goldens.py` wrote.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::{
    Model,
    golden_test::{LOGITS_ERROR_MAX, Piece, Stream, argmax, decode, error_against, pass, prefill, root, text_of},
    load,
};
use crate::engine::{
    cache::Cache,
    weights::{Loader, Policy},
};

#[derive(Deserialize)]
struct Golden {
    float32: Vec<Heard>,
}

#[derive(Deserialize)]
struct Heard {
    window: i64,
    encoded: Vec<f32>,
    #[serde(flatten)]
    stream: Stream,
}

/// How far a number of the encoder's output, whose size is about 1, may be from the oracle's.
const ENCODED_ERROR_MAX: f32 = 1e-5;
const SLOTS: i32 = 5;

fn golden(name: &str) -> Vec<Heard> {
    let file = root().join("goldens/whisper").join(format!("{name}.json"));
    let golden: Golden = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    assert_eq!(golden.float32.len(), 3);
    golden.float32
}

fn open(folder: &Path, edit: impl FnOnce(&mut Value)) -> Box<dyn Model> {
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    let files = crate::model::locate(folder.to_str().unwrap()).unwrap();
    let mut config = files.config().clone();
    edit(&mut config);
    let policy = Policy { dtype: Some(Dtype::Float32), dequantize: true, merge: false, host: false };
    load(&config, Loader::open(files.weight_files(), &config, policy).unwrap()).unwrap()
}

/// As the script has it.
fn features(window: i64, (frames, bins): (i32, i32)) -> Array {
    let value = |index: i64| ((37 * index * index + 11 * index + 7919 * window) % 1009) as f64 / 1009.0 * 2.0 - 1.0;
    let values: Vec<f32> = (0..i64::from(frames * bins)).map(|index| value(index) as f32).collect();
    Array::from_slice(&values, &[1, frames, bins])
}

fn encode(model: &dyn Model, window: i64) -> Array {
    let encoder = model.encoder().unwrap();
    encoder.encode(&features(window, encoder.input())).unwrap()
}

fn encoded_error(golden: &[f32], encoded: &Array) -> f32 {
    let encoded = encoded.try_as_slice::<f32>().unwrap();
    assert_eq!(golden.len(), encoded.len());
    golden.iter().zip(encoded).fold(0.0, |error, (a, b)| error.max((a - b).abs()))
}

fn cache(model: &dyn Model, key_step: i32, slots: i32) -> Cache {
    let layout = model.encoder().unwrap().cross_layout();
    let mut cache = Cache::new(model.cache_layout(), Dtype::Float32, key_step).unwrap().with_cross(layout).unwrap();
    cache.resize(slots, 64).unwrap();
    cache
}

/// Writes what each layer sees of row `row` of `encoded` into `slot`.
fn hear(model: &dyn Model, cache: &mut Cache, slot: i32, encoded: &Array, row: i32) {
    let encoder = model.encoder().unwrap();
    for layer in 0..encoder.cross_layout().layers {
        let (keys, values) = encoder.cross(layer, encoded).unwrap();
        let own = |array: &Array| array.take_axis(Array::from_slice(&[row], &[1]), 0).unwrap();
        cache.store_cross(layer, slot, &own(&keys), &own(&values)).unwrap();
    }
}

/// The largest error of the logits, each window alone; panics where a token differs.
fn alone(model: &dyn Model, golden: &[Heard], chunk: usize) -> f32 {
    let mut worst = 0.0f32;
    for heard in golden {
        let stream = &heard.stream;
        let mut cache = cache(model, 1, 1);
        hear(model, &mut cache, 0, &encode(model, heard.window), 0);
        let mut logits = prefill(model, &mut cache, 0, &stream.prompt, chunk);
        for (step, &token) in stream.tokens.iter().enumerate() {
            if let Some(golden) = stream.logits.iter().find(|golden| golden.step == step) {
                worst = worst.max(error_against(golden, &logits));
            }
            assert_eq!(argmax(&logits), token, "window {}, step {step}", heard.window);
            if step + 1 < stream.tokens.len() {
                logits = decode(model, &mut cache, &[(0, (stream.prompt.len() + step) as u32, token)]).remove(0);
            }
        }
    }
    worst
}

/// All windows twice in one cache, encoded together, joining and leaving at different steps, in slots with gaps that others have
/// left, while the cache grows and shrinks.
fn together(model: &dyn Model, golden: &[Heard], key_step: i32) -> f32 {
    struct Row<'a> {
        heard: &'a Heard,
        slot: u32,
        joins: usize,
        done: usize,
        logits: Vec<f32>,
    }
    let encoder = model.encoder().unwrap();
    let all: Vec<Array> = golden.iter().map(|heard| features(heard.window, encoder.input())).collect();
    let encoded = encoder.encode(&mlx_rs::ops::concatenate(&all, 0).unwrap()).unwrap();
    let mut cache = cache(model, key_step, SLOTS);
    let mut rows: Vec<Row<'_>> = [(4, 0), (1, 0), (0, 5), (2, 9), (3, 20), (4, 70)]
        .iter()
        .enumerate()
        .map(|(index, &(slot, joins))| Row { heard: &golden[index % 3], slot, joins, done: 0, logits: Vec::new() })
        .collect();
    let mut worst = 0.0f32;
    for step in 0.. {
        match step {
            12 => cache.resize(SLOTS + 3, 64).unwrap(),
            40 => cache.resize(SLOTS, 128).unwrap(),
            _ => {}
        }
        // Two rows that join in one step are one's whole prompt and half of the other's.
        let mut pieces: Vec<Piece<'_>> = Vec::new();
        let mut batch = Vec::new();
        for row in &mut rows {
            let stream = &row.heard.stream;
            let prompt = &stream.prompt[..];
            let cut = prompt.len() / 2;
            if step == row.joins {
                hear(model, &mut cache, row.slot as i32, &encoded, row.heard.window as i32);
                if cut > 0 {
                    pieces.push((row.slot as i32, 0, &prompt[..cut], prompt.len()));
                }
            }
            if step == row.joins + 1 {
                pieces.push((row.slot as i32, cut, &prompt[cut..], prompt.len()));
            }
            if step <= row.joins + 1 || row.done == stream.tokens.len() {
                continue;
            }
            if let Some(golden) = stream.logits.iter().find(|golden| golden.step == row.done) {
                worst = worst.max(error_against(golden, &row.logits));
            }
            let token = stream.tokens[row.done];
            assert_eq!(argmax(&row.logits), token, "slot {}, step {} of its own", row.slot, row.done);
            row.done += 1;
            if row.done < stream.tokens.len() {
                batch.push((row.slot, (prompt.len() + row.done - 1) as u32, token));
            }
        }
        if rows.iter().all(|row| row.done == row.heard.stream.tokens.len()) {
            return worst;
        }
        batch.sort_unstable();
        if batch.is_empty() && pieces.is_empty() {
            continue;
        }
        let logits = pass(model, &mut cache, &pieces, &batch);
        let slots = pieces.iter().map(|piece| piece.0 as u32).chain(batch.iter().map(|place| place.0));
        for (slot, of_row) in slots.zip(logits) {
            // The newest of a slot's rows: the ones before it are done.
            rows.iter_mut().rev().find(|row| row.slot == slot && step >= row.joins).unwrap().logits = of_row;
        }
    }
    worst
}

fn check(name: &str, folder: &Path) {
    let golden = golden(name);
    let model = open(folder, |_| {});
    for heard in &golden {
        let error = encoded_error(&heard.encoded, &encode(&*model, heard.window));
        assert!(error <= ENCODED_ERROR_MAX, "{name}, window {}: what the encoder gives is {error:e} away", heard.window);
    }
    for chunk in [64, 5, 1] {
        let error = alone(&*model, &golden, chunk);
        assert!(error <= LOGITS_ERROR_MAX, "{name}: chunks of {chunk}: logits are {error:e} away");
    }
    // As a CPU reads keys, and as a GPU does.
    for key_step in [1, 64] {
        let error = together(&*model, &golden, key_step);
        assert!(error <= LOGITS_ERROR_MAX, "{name}: together, keys in steps of {key_step}: logits are {error:e} away");
    }
}

#[test]
fn committed_checkpoints_agree_with_mlx_whisper() {
    for folder in ["whisper", "whisper-npz"] {
        check("whisper", &root().join("fixtures/checkpoints/speech").join(folder));
    }
}

/// Needs `make fixtures`; part of `make test-models`.
#[test]
fn made_checkpoints_agree_with_mlx_whisper() {
    let Some(made) = env::var_os("MLXBATCH_FIXTURES").map(PathBuf::from) else {
        eprintln!("skipped: made_checkpoints_agree_with_mlx_whisper, MLXBATCH_FIXTURES is not set (make test-models sets it)");
        return;
    };
    let mut failures = Vec::new();
    for (name, folder) in [
        ("whisper", "whisper"),
        ("whisper", "whisper-mlx"),
        ("whisper", "whisper-npz"),
        ("whisper-4bit", "whisper-4bit"),
        ("whisper-bf16", "whisper-bf16"),
        ("whisper-bf16", "whisper-npz-bf16"),
    ] {
        if let Err(panic) = std::panic::catch_unwind(|| check(name, &made.join("speech").join(folder))) {
            failures.push(format!("{folder}: {}", text_of(&*panic)));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The gate above must turn red for each single fault: in what the model is made of, and in how it is driven.
#[test]
fn planted_faults_turn_the_gate_red() {
    let folder = root().join("fixtures/checkpoints/speech/whisper");
    let golden = golden("whisper");
    let quietly = |check: &dyn Fn() -> bool| std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).unwrap_or(false);
    let encodes = |model: &dyn Model| {
        golden.iter().all(|heard| encoded_error(&heard.encoded, &encode(model, heard.window)) <= ENCODED_ERROR_MAX)
    };
    let decodes = |model: &dyn Model| quietly(&|| alone(model, &golden, 64) <= LOGITS_ERROR_MAX);
    let _quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed: Vec<String> = Vec::new();

    let whole = open(&folder, |_| {});
    assert!(encodes(&*whole) && decodes(&*whole), "without a fault the gate is green");

    // A tensor in a place that is not its own, or nothing in its place.
    let config: Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    let faulty = |edit: &dyn Fn(&mut Loader)| {
        let policy = Policy { dtype: Some(Dtype::Float32), dequantize: true, merge: false, host: false };
        let mut loader = Loader::open(&[folder.join("model.safetensors")], &config, policy).unwrap();
        edit(&mut loader);
        load(&config, loader).unwrap()
    };
    let encoder_biases = [
        "conv1",
        "conv2",
        "layers.0.self_attn.q_proj",
        "layers.2.self_attn.v_proj",
        "layers.1.self_attn.out_proj",
        "layers.1.fc1",
        "layers.2.fc2",
        "layers.0.self_attn_layer_norm",
        "layers.2.final_layer_norm",
        "layer_norm",
    ];
    for module in encoder_biases {
        if encodes(&*faulty(&|loader| loader.zero(&format!("model.encoder.{module}.bias")))) {
            missed.push(format!("no bias in the encoder's {module}"));
        }
    }
    let decoder_biases = [
        "layers.0.self_attn.q_proj",
        "layers.1.self_attn.v_proj",
        "layers.0.self_attn.out_proj",
        "layers.0.encoder_attn.q_proj",
        "layers.1.encoder_attn.v_proj",
        "layers.1.encoder_attn.out_proj",
        "layers.1.encoder_attn_layer_norm",
        "layers.0.fc1",
        "layers.1.fc2",
        "layer_norm",
    ];
    for module in decoder_biases {
        if decodes(&*faulty(&|loader| loader.zero(&format!("model.decoder.{module}.bias")))) {
            missed.push(format!("no bias in the decoder's {module}"));
        }
    }
    for (key, value) in [("encoder_attention_heads", 2), ("encoder_attention_heads", 8)] {
        if encodes(&*open(&folder, |config| config[key] = value.into())) {
            missed.push(format!("{key} = {value}"));
        }
    }
    for heads in [1, 4] {
        if decodes(&*open(&folder, |config| config["decoder_attention_heads"] = heads.into())) {
            missed.push(format!("decoder_attention_heads = {heads}"));
        }
    }

    // How a row is driven: a position off by one, a first token left out, a neighbour's recording, a recording of another window.
    let heard = &golden[1];
    let stream = &heard.stream;
    let drive = |skip: usize, shift: u32, slot: i32, window: i64, key_step: i32| {
        let mut cache = cache(&*whole, key_step, 3);
        hear(&*whole, &mut cache, 0, &encode(&*whole, golden[0].window), 0);
        hear(&*whole, &mut cache, slot, &encode(&*whole, window), 0);
        let mut logits = prefill(&*whole, &mut cache, 1, &stream.prompt[skip..], 64);
        for (step, &token) in stream.tokens.iter().enumerate().take(9) {
            let golden = stream.logits.iter().find(|golden| golden.step == step);
            if golden.is_some_and(|golden| error_against(golden, &logits) > LOGITS_ERROR_MAX) {
                return false;
            }
            logits = decode(&*whole, &mut cache, &[(1, (stream.prompt.len() - skip + step) as u32 + shift, token)]).remove(0);
        }
        true
    };
    for key_step in [1, 64] {
        assert!(drive(0, 0, 1, heard.window, key_step), "driven rightly the gate is green");
        for (fault, (skip, shift, slot, window)) in [
            ("position off by one", (0, 1, 1, heard.window)),
            ("first token left out", (1, 0, 1, heard.window)),
            ("a neighbour's slot", (0, 0, 2, heard.window)),
            ("another window", (0, 0, 1, golden[2].window)),
        ] {
            if drive(skip, shift, slot, window, key_step) {
                missed.push(format!("{fault}, keys in steps of {key_step}"));
            }
        }
    }
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "the gate is blind to: {missed:?}");
}

#[test]
fn what_the_encoder_cannot_take_is_said() {
    let model = open(&root().join("fixtures/checkpoints/speech/whisper"), |_| {});
    let error = model.encoder().unwrap().encode(&features(0, (59, 80))).unwrap_err().to_string();
    assert!(error.contains("takes features of 60 frames × 80 bins, and was given [1, 59, 80]"), "{error}");
    let mut cache = cache(&*model, 1, 2);
    let keys = mlx_rs::ops::zeros::<f32>(&[1, 2, 30, 8]).unwrap();
    assert!(cache.store_cross(1, 1, &keys, &keys).is_ok());
    for (layer, slot) in [(2, 1), (0, 2), (0, -1)] {
        let error = cache.store_cross(layer, slot, &keys, &keys).unwrap_err().to_string();
        assert!(error.contains("cross-attention keeps [1, 2, 30, 8]"), "{error}");
    }
    let text_only = Cache::new(model.cache_layout(), Dtype::Float32, 1).unwrap();
    let step = crate::engine::cache::Step::new(Vec::new(), &[(0, 0)]);
    assert!(text_only.attend_cross(0, &keys, 1.0, &step).is_err());
}

/// Halves go another way through the encoder than float32 on the CPU.
#[test]
fn halves_are_near() {
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    let folder = root().join("fixtures/checkpoints/speech/whisper");
    let config: Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    for (dtype, error_max) in [(None, 0.02), (Some(Dtype::Float32), ENCODED_ERROR_MAX)] {
        let policy = Policy { dtype, dequantize: true, merge: false, host: false };
        let loader = Loader::open(&[folder.join("model.safetensors")], &config, policy).unwrap();
        let model = load(&config, loader).unwrap();
        for heard in golden("whisper") {
            let encoded = encode(&*model, heard.window);
            assert_eq!(encoded.dtype(), dtype.unwrap_or(Dtype::Float16));
            let error = encoded_error(&heard.encoded, &encoded.as_dtype(Dtype::Float32).unwrap());
            assert!(error <= error_max, "{dtype:?}: {error:e}");
        }
    }
}

#[derive(Deserialize)]
struct TinyEn {
    window: i64,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    encoded_every_499th: Vec<f32>,
    logits: Vec<TinyEnLogits>,
}

#[derive(Deserialize)]
struct TinyEnLogits {
    step: usize,
    every_997th: Vec<f32>,
}

/// A real model, as `mlxbatch convert` makes it of CTranslate2's: what mlx-whisper computes.
#[test]
fn whisper_tiny_en_agrees_with_mlx_whisper() {
    let source = env::var_os("MLXBATCH_MODELS").map(|folder| PathBuf::from(folder).join("whisper-tiny.en-ct2"));
    let Some(source) = source.filter(|source| source.is_dir()) else {
        eprintln!("skipped: whisper_tiny_en_agrees_with_mlx_whisper, the model is not there (make test-models fetches it)");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let converted = folder.path().join("whisper-tiny.en");
    crate::model::ctranslate2::convert(&source, &converted).unwrap();
    let golden: TinyEn = serde_json::from_slice(&fs::read(root().join("goldens/whisper-tiny.en.json")).unwrap()).unwrap();
    let model = open(&converted, |_| {});
    let encoded = encode(&*model, golden.window);
    let every = |numbers: &[f32], step: usize| numbers.iter().copied().step_by(step).collect::<Vec<f32>>();
    // In units of the largest.
    let far = |golden: &[f32], ours: &[f32]| {
        assert_eq!(golden.len(), ours.len());
        let size = golden.iter().fold(1.0f32, |size, a| size.max(a.abs()));
        golden.iter().zip(ours).fold(0.0f32, |error, (a, b)| error.max((a - b).abs() / size))
    };
    let error = far(&golden.encoded_every_499th, &every(encoded.try_as_slice::<f32>().unwrap(), 499));
    assert!(error <= 1e-4, "what the encoder gives is {error:e} away");
    let mut cache = cache(&*model, 1, 1);
    hear(&*model, &mut cache, 0, &encoded, 0);
    let mut logits = prefill(&*model, &mut cache, 0, &golden.prompt, 64);
    for (step, &token) in golden.tokens.iter().enumerate() {
        if let Some(golden) = golden.logits.iter().find(|golden| golden.step == step) {
            let error = far(&golden.every_997th, &every(&logits, 997));
            assert!(error <= 1e-4, "step {step}: logits are {error:e} away");
        }
        assert_eq!(argmax(&logits), token, "step {step}");
        logits = decode(&*model, &mut cache, &[(0, (golden.prompt.len() + step) as u32, token)]).remove(0);
    }
}
