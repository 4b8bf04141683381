//! Every family against mlx-lm on the same libmlx: logits and greedy tokens that `fixtures/make_goldens.py` wrote.

use std::{
    collections::VecDeque,
    env, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::{Model, load};
use crate::{
    engine::{
        Engine, MlxEngine, MlxOptions, WeightForm,
        cache::{Cache, Chunk, Step},
        weights::{Loader, Policy},
    },
    job,
    schedule::{Limits, Plan, Request, Scheduler, SequenceId},
};

#[derive(Deserialize)]
struct Golden {
    float32: Vec<Stream>,
    as_stored: Option<Vec<Stream>>,
}

#[derive(Deserialize)]
pub(super) struct Stream {
    pub(super) prompt: Vec<u32>,
    pub(super) tokens: Vec<u32>,
    pub(super) logits: Vec<Logits>,
}

#[derive(Deserialize)]
pub(super) struct Logits {
    pub(super) step: usize,
    every_16th: Vec<f32>,
    max: f32,
    logsumexp: f64,
    norm: f64,
}

/// How far logits may be from the oracle's, in units of their size.
pub(super) const LOGITS_ERROR_MAX: f32 = 1e-5;

pub(super) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn is_checkpoint(folder: &Path) -> bool {
    folder.join("config.json").is_file() || folder.with_extension("gguf").is_file()
}

/// As weights are kept on the CPU.
pub(super) const CPU: Policy = Policy { dtype: Some(Dtype::Float32), dequantize: true, merge: false, host: false };

pub(super) fn open(folder: &Path, policy: Policy) -> Box<dyn Model> {
    let gguf = folder.with_extension("gguf");
    let config = if gguf.is_file() {
        crate::model::locate(gguf.to_str().unwrap()).unwrap().config().clone()
    } else {
        serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
    };
    open_with(folder, &config, policy)
}

pub(super) fn open_with(folder: &Path, config: &Value, policy: Policy) -> Box<dyn Model> {
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    let gguf = folder.with_extension("gguf");
    let files = if gguf.is_file() {
        vec![gguf]
    } else {
        let mut files: Vec<PathBuf> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
            .collect();
        files.sort();
        files
    };
    load(config, Loader::open(&files, config, policy).unwrap()).unwrap()
}

pub(super) fn logits_of(model: &dyn Model, hidden: &Array) -> Vec<f32> {
    let logits = model.logits(hidden).unwrap();
    let logits = logits.as_dtype(Dtype::Float32).unwrap();
    logits.eval().unwrap();
    logits.try_as_slice::<f32>().unwrap().to_vec()
}

pub(super) fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a))).unwrap() as u32
}

/// A chunk of a prompt: slot, where it starts, its tokens, and the length of the whole prompt.
pub(super) type Piece<'a> = (i32, usize, &'a [u32], usize);

/// One pass over chunks and decoding rows of (slot, position, token); gives the logits of each chunk's last token and of each row.
pub(super) fn pass(model: &dyn Model, cache: &mut Cache, pieces: &[Piece<'_>], rows: &[(u32, u32, u32)]) -> Vec<Vec<f32>> {
    let mut tokens = Vec::new();
    let mut outputs = Vec::new();
    let mut chunks = Vec::new();
    for (slot, start, piece, prompt_tokens) in pieces {
        tokens.extend(piece.iter().map(|&token| token as i32));
        outputs.push(tokens.len() as i32 - 1);
        let (start, length, prompt_tokens) = (*start as i32, piece.len() as i32, *prompt_tokens as i32);
        chunks.push(Chunk { slot: *slot, start, length, prompt_tokens });
    }
    // As on a GPU, where keys are read in steps: passes come in few sizes.
    let padding = if cache.key_step() > 1 && model.encoder().is_none() { 3 } else { 0 };
    tokens.resize(tokens.len() + padding as usize, 0);
    for row in rows {
        outputs.push(tokens.len() as i32);
        tokens.push(row.2 as i32);
    }
    let places: Vec<(u32, u32)> = rows.iter().map(|row| (row.0, row.1)).collect();
    cache.begin_step();
    let tokens = Array::from_slice(&tokens, &[tokens.len() as i32]);
    let hidden = model.forward(&tokens, &Step::padded(chunks, padding, &places), cache).unwrap();
    let hidden = hidden.take_axis(Array::from_slice(&outputs, &[outputs.len() as i32]), 0).unwrap();
    logits_of(model, &hidden).chunks(model.vocabulary() as usize).map(<[f32]>::to_vec).collect()
}

/// Prefills `prompt` into `slot` in chunks; gives the last position's logits.
pub(super) fn prefill(model: &dyn Model, cache: &mut Cache, slot: i32, prompt: &[u32], chunk: usize) -> Vec<f32> {
    let mut last = Vec::new();
    for (index, piece) in prompt.chunks(chunk).enumerate() {
        last = pass(model, cache, &[(slot, index * chunk, piece, prompt.len())], &[]).remove(0);
    }
    last
}

pub(super) fn decode(model: &dyn Model, cache: &mut Cache, rows: &[(u32, u32, u32)]) -> Vec<Vec<f32>> {
    pass(model, cache, &[], rows)
}

pub(super) fn error_against(golden: &Logits, logits: &[f32]) -> f32 {
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
    let key_step = 1;
    let mut worst = 0.0f32;
    for stream in streams {
        let mut cache = Cache::new(model.cache_layout(), Dtype::Float32, key_step).unwrap();
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
fn together(model: &dyn Model, streams: &[Stream], key_step: i32) -> f32 {
    let mut worst = 0.0f32;
    let mut cache = Cache::new(model.cache_layout(), Dtype::Float32, key_step).unwrap();
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
    for step in 0..=steps + 1 {
        match step {
            // All the rows resident by then fit in what the layout becomes.
            9 => cache.resize(6, 128).unwrap(),
            30 => cache.resize(6, 192).unwrap(),
            60 => cache.resize(6, 128).unwrap(),
            _ => {}
        }
        // A prompt is computed in two chunks, in the two steps before its row joins, beside the rows that decode.
        let mut pieces: Vec<Piece<'_>> = Vec::new();
        let mut batch = Vec::new();
        for row in &mut rows {
            let prompt = &row.stream.prompt[..];
            let cut = prompt.len() / 2;
            if step == row.joins && cut > 0 {
                pieces.push((row.slot as i32, 0, &prompt[..cut], prompt.len()));
            }
            if step == row.joins + 1 {
                pieces.push((row.slot as i32, cut, &prompt[cut..], prompt.len()));
            }
            if step <= row.joins + 1 || row.done == row.stream.tokens.len() {
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
        if batch.is_empty() && pieces.is_empty() {
            continue;
        }
        let logits = pass(model, &mut cache, &pieces, &batch);
        let slots = pieces.iter().map(|piece| piece.0 as u32).chain(batch.iter().map(|place| place.0));
        for (slot, of_row) in slots.zip(logits) {
            rows.iter_mut().find(|row| row.slot == slot).unwrap().logits = of_row;
        }
    }
    assert!(rows.iter().all(|row| row.done == row.stream.tokens.len()));
    worst
}

fn golden(name: &str) -> Golden {
    let path = root().join("goldens").join(if name.starts_with("gguf/") { "" } else { "models" }).join(format!("{name}.json"));
    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap()
}

fn check(name: &str, folder: &Path) {
    let golden = golden(name);
    assert!(golden.float32.iter().all(|stream| stream.tokens.len() >= 64));
    let model = open(folder, CPU);
    for chunk in [64, 5, 1] {
        let error = alone(&*model, &golden.float32, chunk);
        assert!(error <= LOGITS_ERROR_MAX, "{name}: chunks of {chunk}: logits are {error:e} away");
    }
    // As a CPU reads keys, and as a GPU does.
    for key_step in [1, 64] {
        let error = together(&*model, &golden.float32, key_step);
        assert!(error <= LOGITS_ERROR_MAX, "{name}: together, keys in steps of {key_step}: logits are {error:e} away");
    }
    let on_host = open(folder, Policy { host: true, ..CPU });
    for chunk in [64, 5, 1] {
        let error = alone(&*on_host, &golden.float32, chunk);
        assert!(error <= LOGITS_ERROR_MAX, "{name}: on the host: chunks of {chunk}: logits are {error:e} away");
    }
    let error = together(&*on_host, &golden.float32, 1);
    assert!(error <= LOGITS_ERROR_MAX, "{name}: on the host: together: logits are {error:e} away");
    let error = alone(&*open(folder, Policy { merge: true, ..CPU }), &golden.float32, 64);
    assert!(error <= LOGITS_ERROR_MAX, "{name}: merged products: logits are {error:e} away");
    if let Some(streams) = &golden.as_stored {
        let policy = Policy { dequantize: false, merge: true, ..CPU };
        let error = alone(&*open(folder, policy), streams, 64);
        assert!(error <= LOGITS_ERROR_MAX, "{name}: as stored: logits are {error:e} away");
    }
}

/// Goldens of folders, and of GGUF files as `gguf/name`.
fn names() -> Vec<String> {
    let mut names = Vec::new();
    for (folder, prefix) in [("goldens/models", ""), ("goldens/gguf", "gguf/")] {
        for entry in fs::read_dir(root().join(folder)).unwrap() {
            names.push(format!("{prefix}{}", entry.unwrap().path().file_stem().unwrap().display()));
        }
    }
    names.sort();
    names
}

#[test]
fn committed_checkpoints_agree_with_mlx_lm() {
    let committed: Vec<(String, PathBuf)> = names()
        .into_iter()
        .map(|name| (name.clone(), root().join("fixtures/checkpoints").join(name)))
        .filter(|(_, folder)| is_checkpoint(folder))
        .collect();
    assert!(committed.len() >= 4, "too few checkpoints are committed: {committed:?}");
    for (name, folder) in committed {
        check(&name, &folder);
    }
}

/// On the CPU's cores a row's logits are the same to the last bit in any company: prompts side by side in one pass, beside rows
/// that decode, in another slot of a larger cache.
#[test]
fn rows_on_the_host_do_not_depend_on_their_company() {
    let mut seen = 0;
    for name in names() {
        let folder = root().join("fixtures/checkpoints").join(&name);
        if !is_checkpoint(&folder) {
            continue;
        }
        seen += 1;
        let model = open(&folder, Policy { host: true, ..CPU });
        let golden = golden(&name);
        let streams = &golden.float32;
        const CHUNK: usize = 7;
        /// Logits of every step that samples, of rows that each joins `step` steps after the one before it.
        fn drive(model: &dyn Model, streams: &[&Stream], slots: &[u32], layout: (i32, i32), apart: usize) -> Vec<Vec<Vec<f32>>> {
            let mut cache = Cache::new(model.cache_layout(), Dtype::Float32, 1).unwrap();
            cache.resize(layout.0, layout.1).unwrap();
            let mut logits = vec![Vec::new(); streams.len()];
            for step in 0..200 {
                let (mut pieces, mut rows, mut who) = (Vec::<Piece<'_>>::new(), Vec::new(), Vec::new());
                for (index, (stream, &slot)) in streams.iter().zip(slots).enumerate() {
                    let (prompt, Some(own)) = (&stream.prompt, usize::checked_sub(step, index * apart)) else { continue };
                    let chunks = prompt.len().div_ceil(CHUNK);
                    if own < chunks {
                        let piece = &prompt[own * CHUNK..prompt.len().min((own + 1) * CHUNK)];
                        pieces.push((slot as i32, own * CHUNK, piece, prompt.len()));
                        who.push((index, own + 1 == chunks));
                    } else if let Some(&token) = stream.tokens.get(own - chunks) {
                        rows.push((slot, (prompt.len() + own - chunks) as u32, token, index));
                    }
                }
                rows.sort_unstable();
                who.extend(rows.iter().map(|row| (row.3, true)));
                if who.is_empty() {
                    continue;
                }
                let rows: Vec<(u32, u32, u32)> = rows.iter().map(|row| (row.0, row.1, row.2)).collect();
                for ((index, samples), of_row) in who.into_iter().zip(pass(model, &mut cache, &pieces, &rows)) {
                    if samples {
                        logits[index].push(of_row);
                    }
                }
            }
            logits
        }
        let all: Vec<&Stream> = streams.iter().chain(streams).take(6).collect();
        let together = drive(&*model, &all, &[4, 1, 2, 0, 3, 5], (7, 256), 3);
        for (stream, together) in all.iter().zip(together) {
            let alone = drive(&*model, &[stream], &[0], (1, 192), 0).remove(0);
            assert_eq!(alone.len(), stream.tokens.len() + 1);
            assert!(alone == together, "{name}: a row among others is not what it is alone");
        }
    }
    assert!(seen >= 4);
}

/// Needs `make fixtures`; part of `make test-models`.
#[test]
fn made_checkpoints_agree_with_mlx_lm() {
    let Some(made) = env::var_os("MLXBATCH_FIXTURES").map(PathBuf::from) else {
        eprintln!("skipped: made_checkpoints_agree_with_mlx_lm, MLXBATCH_FIXTURES is not set (make test-models sets it)");
        return;
    };
    let mut failures = Vec::new();
    for name in names() {
        let folder = made.join(&name);
        if name == "gguf/llama-q5_0" {
            // The one type among them that MLX does not read: it must be told so, with a way out.
            let refused = std::panic::catch_unwind(|| open(&folder, CPU)).map(|_| ()).expect_err("Q5_0 is not read");
            let text = text_of(&*refused);
            assert!(text.contains("MLX reads tensors of the types F32, F16, Q4_0, Q4_1 and Q8_0"), "{text}");
            continue;
        }
        if !is_checkpoint(&folder) {
            failures.push(format!("{name}: no such checkpoint among the fixtures"));
        } else if let Err(panic) = std::panic::catch_unwind(|| check(&name, &folder)) {
            failures.push(format!("{name}: {}", text_of(&*panic)));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

pub(super) fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).into())).unwrap_or_default()
}

/// The gate above must turn red for each single fault: in what the model is made of, and in how it is driven.
#[test]
fn planted_faults_turn_the_gate_red() {
    let with = |name: &str, key: &str, value: Value| {
        let folder = root().join("fixtures/checkpoints").join(name);
        let mut config: Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
        assert!(config.get(key).is_some(), "{name} has no {key}");
        config[key] = value;
        let model = open_with(&folder, &config, CPU);
        let golden = golden(name);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| alone(&*model, &golden.float32, 64)))
    };
    let faults: [(&str, &str, Value); 13] = [
        ("llama", "rope_theta", 10_001.0.into()),
        ("llama", "rms_norm_eps", 2e-5.into()),
        ("qwen3", "rope_theta", 10_001.0.into()),
        ("qwen3", "rms_norm_eps", 1e-5.into()),
        ("gemma3_text", "sliding_window", 9.into()),
        ("gemma3_text", "sliding_window_pattern", 2.into()),
        ("gemma3_text", "rope_local_base_freq", 10_010.0.into()),
        ("gemma3_text", "query_pre_attn_scalar", 16.into()),
        ("gemma4_text", "sliding_window", 9.into()),
        ("gemma4_text", "sliding_window", 7.into()),
        ("gemma4_text", "rms_norm_eps", 1e-5.into()),
        ("gemma4_text", "final_logit_softcapping", 30.01.into()),
        ("gemma4_text", "rope_parameters", Value::Null),
    ];
    let _quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    for (name, key, value) in faults {
        if let Ok(error) = with(name, key, value.clone())
            && error <= LOGITS_ERROR_MAX
        {
            missed.push(format!("{name} with {key} = {value}: {error:e}"));
        }
    }
    // How a sequence is driven: a position off by one, a prompt less its first token, another row's slot.
    let golden = golden("gemma3_text");
    let model = open(&root().join("fixtures/checkpoints/gemma3_text"), CPU);
    let stream = &golden.float32[2];
    let key_step = 1;
    let drive = |skip: usize, shift: u32, slot: u32| {
        let mut cache = Cache::new(model.cache_layout(), Dtype::Float32, key_step).unwrap();
        cache.resize(2, 128).unwrap();
        prefill(&*model, &mut cache, 1, &[9, 8, 7], 64);
        let mut logits = prefill(&*model, &mut cache, 0, &stream.prompt[skip..], 64);
        for (step, &token) in stream.tokens.iter().enumerate().take(9) {
            if let Some(golden) = stream.logits.iter().find(|golden| golden.step == step && step > 0)
                && error_against(golden, &logits) > LOGITS_ERROR_MAX
            {
                return true;
            }
            let position = (stream.prompt.len() - skip + step) as u32 + shift;
            logits = decode(&*model, &mut cache, &[(slot, position, token)]).remove(0);
        }
        false
    };
    assert!(!drive(0, 0, 0), "driven rightly the gate is green");
    for (fault, (skip, shift, slot)) in
        [("position off by one", (0, 1, 0)), ("first token left out", (1, 0, 0)), ("another row's slot", (0, 0, 1))]
    {
        if !drive(skip, shift, slot) {
            missed.push(fault.into());
        }
    }
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "the gate is blind to: {missed:?}");
}

#[derive(Deserialize)]
struct SmolLm2 {
    max_tokens: usize,
    stop_tokens: Vec<u32>,
    prompts: Vec<SmolLm2Prompt>,
}

#[derive(Deserialize)]
struct SmolLm2Prompt {
    prompt_ids: Vec<u32>,
    tokens: Vec<u32>,
}

/// A real model, through scheduler and engine: mlx-lm's greedy tokens, alone, and with 8 rows together in shuffled order under a
/// budget that makes them queue.
#[test]
fn smollm2_agrees_with_mlx_lm_token_for_token() {
    let file = env::var_os("MLXBATCH_MODELS").map(|folder| PathBuf::from(folder).join("SmolLM2-135M-Instruct.Q4_1.gguf"));
    let Some(file) = file.filter(|file| file.is_file()) else {
        eprintln!("skipped: smollm2_agrees_with_mlx_lm_token_for_token, the model is not there (make test-models fetches it)");
        return;
    };
    let golden: SmolLm2 = serde_json::from_slice(&fs::read(root().join("goldens/smollm2-greedy.json")).unwrap()).unwrap();
    assert!(golden.prompts.len() >= 20);
    let files = crate::model::locate(file.to_str().unwrap()).unwrap();
    let options =
        MlxOptions { device: job::Device::Cpu, dtype: job::Dtype::Auto, plain: false, weights: WeightForm::Auto, rows: 8 };
    let mut engine = MlxEngine::load(&[file], files.config(), options).unwrap();
    let price = engine.price();
    let request = |index: usize| Request {
        sequence: SequenceId(index as u64),
        prompt: golden.prompts[index].prompt_ids.clone(),
        max_tokens: golden.max_tokens as u32,
        stop_tokens: golden.stop_tokens.as_slice().into(),
        generation: Arc::default(),
        seed: 0,
        window: None,
        media: Vec::new(),
        whole_spans: false,
    };
    let mut check = |order: &[usize], rows: u32, prefill_chunk: u32, kv_bytes_max: u64| {
        let limits = Limits {
            rows,
            prefill_chunk,
            prompt_concurrency: 3,
            kv_bytes_max,
            price: price.clone(),
            context_length: 2048,
            prefix_tokens_min: None,
            span_tokens_max: 0,
        };
        let mut scheduler = Scheduler::new(limits);
        let (mut left, mut launched, mut finished) = (order.iter(), VecDeque::<Plan>::new(), 0);
        while finished < order.len() {
            while scheduler.wants() > 0
                && let Some(&index) = left.next()
            {
                scheduler.add(Arc::new(request(index))).unwrap();
            }
            let plan = scheduler.plan();
            let idle = plan.is_empty();
            if !idle {
                engine.launch(&plan).unwrap();
                launched.push_back(plan);
            }
            if idle || launched.len() == 2 {
                let plan = launched.pop_front().unwrap();
                let sampled = engine.collect().unwrap();
                for row in scheduler.commit(&plan, &sampled).unwrap() {
                    let expected = &golden.prompts[row.sequence.0 as usize].tokens;
                    assert_eq!(&row.tokens, expected, "prompt {} at {rows} rows", row.sequence.0);
                    finished += 1;
                }
            }
        }
    };
    let count = golden.prompts.len();
    let in_order: Vec<usize> = (0..count).collect();
    check(&in_order, 1, 16, u64::MAX);
    // 7 is coprime to the number of prompts: every prompt once, none beside those it stood beside.
    let shuffled: Vec<usize> = (0..count).map(|index| (index * 7 + 3) % count).collect();
    assert_ne!(count % 7, 0);
    check(&shuffled, 8, 512, u64::MAX);
    let longest = golden.prompts.iter().map(|prompt| prompt.prompt_ids.len() + golden.max_tokens).max().unwrap() as u32;
    let budget = price.cache_bytes(3, price.slot_tokens(longest)) + price.prefill_bytes(16, price.slot_tokens(longest));
    check(&shuffled, 8, 16, budget);
}
