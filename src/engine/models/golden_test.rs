//! Every family against mlx-lm on the same libmlx: logits and greedy tokens that `fixtures/make_goldens.py` wrote.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::{Model, load};
use crate::engine::{
    cache::{Cache, DecodeRows, Step},
    weights::{Loader, Policy},
};

#[derive(Deserialize)]
struct Golden {
    float32: Vec<Stream>,
    as_stored: Option<Vec<Stream>>,
}

#[derive(Deserialize)]
struct Stream {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    logits: Vec<Logits>,
}

#[derive(Deserialize)]
struct Logits {
    step: usize,
    every_16th: Vec<f32>,
    max: f32,
    logsumexp: f64,
    norm: f64,
}

/// How far logits may be from the oracle's, in units of their size.
const LOGITS_ERROR_MAX: f32 = 1e-5;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// A committed checkpoint, or one that `make fixtures` made.
fn checkpoint(name: &str) -> Option<PathBuf> {
    let committed = root().join("fixtures/checkpoints").join(name);
    let made = env::var_os("MLXBATCH_FIXTURES").map(|folder| PathBuf::from(folder).join(name));
    [Some(committed), made].into_iter().flatten().find(|folder| folder.join("config.json").is_file())
}

fn open(folder: &Path, dequantize: bool) -> Box<dyn Model> {
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    let config: Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    let gguf = folder.with_extension("gguf");
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .collect();
    files.sort();
    if gguf.is_file() {
        files = vec![gguf];
    }
    let policy = Policy { dtype: Some(Dtype::Float32), dequantize };
    load(&config, Loader::open(&files, &config, policy).unwrap()).unwrap()
}

fn logits_of(model: &dyn Model, hidden: &Array) -> Vec<f32> {
    let logits = model.logits(hidden).unwrap();
    assert_eq!(logits.dtype(), Dtype::Float32);
    logits.eval().unwrap();
    logits.try_as_slice::<f32>().unwrap().to_vec()
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a))).unwrap() as u32
}

/// Prefills `prompt` into `slot` in chunks; gives the last position's logits.
fn prefill(model: &dyn Model, cache: &mut Cache, slot: i32, prompt: &[u32], chunk: usize) -> Vec<f32> {
    let mut last = None;
    for (index, piece) in prompt.chunks(chunk).enumerate() {
        let tokens: Vec<i32> = piece.iter().map(|&token| token as i32).collect();
        let length = piece.len() as i32;
        cache.begin_step();
        let step = Step::Prefill { slot, start: (index * chunk) as i32, length };
        let hidden = model.forward(&Array::from_slice(&tokens, &[length]), &step, cache).unwrap();
        last = Some(crate::engine::ffi::slice(&hidden, &[length - 1, 0], &[length, hidden.dim(1)]).unwrap());
    }
    logits_of(model, &last.unwrap())
}

/// One step for `rows` of (slot, position, token); gives each row's logits.
fn decode(model: &dyn Model, cache: &mut Cache, rows: &[(u32, u32, u32)]) -> Vec<Vec<f32>> {
    let places: Vec<(u32, u32)> = rows.iter().map(|row| (row.0, row.1)).collect();
    let tokens: Vec<i32> = rows.iter().map(|row| row.2 as i32).collect();
    cache.begin_step();
    let hidden =
        model.forward(&Array::from_slice(&tokens, &[rows.len() as i32]), &Step::Decode(DecodeRows::new(&places)), cache).unwrap();
    logits_of(model, &hidden).chunks(model.vocabulary() as usize).map(<[f32]>::to_vec).collect()
}

fn error_against(golden: &Logits, logits: &[f32]) -> f32 {
    let wide = logits.iter().map(|&logit| f64::from(logit));
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let logsumexp = max + wide.clone().map(|logit| (logit - max).exp()).sum::<f64>().ln();
    let norm = wide.map(|logit| logit * logit).sum::<f64>().sqrt();
    let size = golden.max.abs().max(1.0);
    let mut error = (golden.max - max as f32).abs() / size;
    error = error.max((golden.logsumexp - logsumexp).abs() as f32 / size).max(((golden.norm - norm) / golden.norm).abs() as f32);
    assert_eq!(golden.every_16th.len(), logits.len().div_ceil(16));
    golden.every_16th.iter().zip(logits.iter().step_by(16)).fold(error, |error, (a, b)| error.max((a - b).abs() / size))
}

/// The largest error over the streams, each alone; panics where a token differs.
fn alone(model: &dyn Model, streams: &[Stream], chunk: usize) -> f32 {
    let mut worst = 0.0f32;
    for stream in streams {
        let mut cache = Cache::new(model.cache_layout(), Dtype::Float32).unwrap();
        cache.resize(1, (stream.prompt.len() + stream.tokens.len()).next_multiple_of(64) as i32).unwrap();
        let mut logits = prefill(model, &mut cache, 0, &stream.prompt, chunk);
        for (step, &token) in stream.tokens.iter().enumerate() {
            if let Some(golden) = stream.logits.iter().find(|golden| golden.step == step) {
                worst = worst.max(error_against(golden, &logits));
            }
            assert_eq!(argmax(&logits), token, "prompt of {}, step {step}", stream.prompt.len());
            logits = decode(model, &mut cache, &[(0, (stream.prompt.len() + step) as u32, token)]).remove(0);
        }
    }
    worst
}

/// All streams in one batch, joining and leaving at different steps, slots with gaps, the cache growing and shrinking on the way.
fn together(model: &dyn Model, streams: &[Stream]) -> f32 {
    let mut worst = 0.0f32;
    let mut cache = Cache::new(model.cache_layout(), Dtype::Float32).unwrap();
    // (stream, slot, joins at step, tokens so far, last logits): the streams twice, the second time in other slots.
    struct Row<'a> {
        stream: &'a Stream,
        slot: u32,
        joins: usize,
        done: usize,
        logits: Vec<f32>,
    }
    let mut rows: Vec<Row<'_>> = (0..2 * streams.len())
        .map(|index| Row {
            stream: &streams[index % streams.len()],
            slot: [4, 1, 2, 0, 3, 5][index % 6],
            joins: index * 7,
            done: 0,
            logits: Vec::new(),
        })
        .collect();
    cache.resize(5, 64).unwrap();
    let steps = rows.iter().map(|row| row.joins + row.stream.tokens.len()).max().unwrap();
    for step in 0..=steps {
        match step {
            // All the rows resident by then fit in what the layout becomes.
            9 => cache.resize(6, 128).unwrap(),
            30 => cache.resize(6, 192).unwrap(),
            60 => cache.resize(6, 128).unwrap(),
            _ => {}
        }
        let mut batch = Vec::new();
        for row in rows.iter_mut() {
            if step == row.joins {
                row.logits = prefill(model, &mut cache, row.slot as i32, &row.stream.prompt, 16);
            }
            if step < row.joins || row.done == row.stream.tokens.len() {
                continue;
            }
            if let Some(golden) = row.stream.logits.iter().find(|golden| golden.step == row.done) {
                worst = worst.max(error_against(golden, &row.logits));
            }
            let token = row.stream.tokens[row.done];
            assert_eq!(argmax(&row.logits), token, "slot {}, step {} of its own", row.slot, row.done);
            batch.push((row.slot, (row.stream.prompt.len() + row.done) as u32, token));
            row.done += 1;
        }
        batch.sort_unstable();
        if batch.is_empty() {
            continue;
        }
        let logits = decode(model, &mut cache, &batch);
        for (place, of_row) in batch.iter().zip(logits) {
            rows.iter_mut().find(|row| row.slot == place.0).unwrap().logits = of_row;
        }
    }
    assert!(rows.iter().all(|row| row.done == row.stream.tokens.len()));
    worst
}

fn golden(name: &str) -> Golden {
    let path = root().join("goldens/models").join(format!("{name}.json"));
    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap()
}

fn check(name: &str, folder: &Path) {
    let golden = golden(name);
    assert!(golden.float32.iter().all(|stream| stream.tokens.len() >= 64));
    let model = open(folder, true);
    let dynamic = name.contains("dynamic");
    // The base of a dynamic rope depends on how far a pass reaches, so only whole prompts are comparable to the oracle.
    let chunks: &[usize] = if dynamic { &[64] } else { &[64, 5, 1] };
    for &chunk in chunks {
        let error = alone(&*model, &golden.float32, chunk);
        assert!(error <= LOGITS_ERROR_MAX, "{name}: chunks of {chunk}: logits are {error:e} away");
    }
    if !dynamic {
        let error = together(&*model, &golden.float32);
        assert!(error <= LOGITS_ERROR_MAX, "{name}: together: logits are {error:e} away");
    }
    if let Some(streams) = &golden.as_stored {
        let error = alone(&*open(folder, false), streams, 64);
        assert!(error <= LOGITS_ERROR_MAX, "{name}: as stored: logits are {error:e} away");
    }
}

fn names() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(root().join("goldens/models"))
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn committed_checkpoints_agree_with_mlx_lm() {
    let committed: Vec<String> =
        names().into_iter().filter(|name| root().join("fixtures/checkpoints").join(name).is_dir()).collect();
    assert!(committed.len() >= 3, "too few checkpoints are committed: {committed:?}");
    for name in committed {
        check(&name, &root().join("fixtures/checkpoints").join(&name));
    }
}

/// Needs `make fixtures`; part of `make test-models`.
#[test]
fn made_checkpoints_agree_with_mlx_lm() {
    if env::var_os("MLXBATCH_FIXTURES").is_none() {
        eprintln!("skipped: made_checkpoints_agree_with_mlx_lm, MLXBATCH_FIXTURES is not set (make test-models sets it)");
        return;
    }
    let mut failures = Vec::new();
    for name in names() {
        let Some(folder) = checkpoint(&name).or_else(|| checkpoint(&format!("gguf/{name}"))) else {
            failures.push(format!("{name}: no such checkpoint among the fixtures"));
            continue;
        };
        if let Err(panic) = std::panic::catch_unwind(|| check(&name, &folder)) {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            failures.push(format!("{name}: {text}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
