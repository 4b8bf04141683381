//! Prompts whose head was copied against prompts that were computed whole, on real checkpoints in small.

use std::{collections::VecDeque, path::PathBuf, sync::Arc};

use mlx_rs::Dtype;
use serde_json::{Value, json};

use super::{
    Model,
    golden_test::{CPU, LOGITS_ERROR_MAX, decode, open, open_with, pass, prefill, root},
};
use crate::{
    engine::{Engine, MlxEngine, MlxOptions, WeightForm, cache::Cache},
    job,
    schedule::{Limits, Plan, Request, Scheduler, SequenceId},
};

/// Tokens that the rows share: far behind Gemma's window of 8, and neither a multiple of it nor of a chunk.
const HEAD: usize = 150;

fn folder(name: &str) -> PathBuf {
    root().join("fixtures/checkpoints").join(name)
}

/// The head, and `own` more tokens that no other row has in this order.
fn prompt(row: u32, own: usize) -> Vec<u32> {
    let head = (0..HEAD as u32).map(|index| 5 + (index * index * 31 + index * 7) % 500);
    head.chain((0..own as u32).map(|index| 5 + (row * 97 + index * 13 + row * index * 5) % 500)).collect()
}

fn config(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder(name).join("config.json")).unwrap()).unwrap()
}

/// The largest difference between the logits of rows that took over `tokens` of the head (`copied` of them in truth) and of rows
/// that computed those themselves, in units of their size: of the prompt's last token, and of a few decoded ones.
fn difference(model: &dyn Model, tokens: usize, copied: usize) -> f32 {
    let cache = || {
        let mut cache = Cache::new(model.cache_layout(), Dtype::Float32, 1).unwrap();
        cache.resize(6, 192).unwrap();
        cache
    };
    let (mut warm, mut cold) = (cache(), cache());
    prefill(model, &mut warm, 1, &prompt(0, 0), 64);
    // Neighbours, and one apart.
    let slots = [2, 3, 5];
    warm.copy_prefix(1, &slots, copied as i32).unwrap();
    let mut worst = 0.0f32;
    let mut compare = |warm: &[Vec<f32>], cold: &[Vec<f32>]| {
        for (warm, cold) in warm.iter().flatten().zip(cold.iter().flatten()) {
            worst = worst.max((warm - cold).abs() / cold.abs().max(1.0));
        }
    };
    let prompts: Vec<_> = slots.iter().map(|&slot| prompt(slot as u32, 9)).collect();
    let pieces = |from: usize| -> Vec<_> {
        let rows = slots.iter().zip(&prompts);
        rows.map(|(&slot, prompt)| (slot, from, &prompt[from..], prompt.len())).collect()
    };
    for (&slot, prompt) in slots.iter().zip(&prompts) {
        prefill(model, &mut cold, slot, &prompt[..tokens], 64);
    }
    compare(&pass(model, &mut warm, &pieces(tokens), &[]), &pass(model, &mut cold, &pieces(tokens), &[]));
    for step in 0..12 {
        let rows: Vec<_> =
            slots.iter().map(|&slot| (slot as u32, (HEAD + 9 + step) as u32, 7 + slot as u32 + step as u32)).collect();
        compare(&decode(model, &mut warm, &rows), &decode(model, &mut cold, &rows));
    }
    worst
}

#[test]
fn a_head_that_was_copied_gives_the_logits_of_one_that_was_computed() {
    for name in ["llama", "llama-4bit-g32", "qwen3", "gemma3_text"] {
        let model = open(&folder(name), CPU);
        assert!(model.shares_prefixes());
        let error = difference(&*model, HEAD, HEAD);
        assert!(error == 0.0, "{name}: {error:e} away, where the same was computed in the same chunks");
        let fault = difference(&*model, HEAD, HEAD - 1);
        assert!(fault > 10.0 * LOGITS_ERROR_MAX, "{name}: blind to a copy that is one token short: {fault:e} away");
        if name != "gemma3_text" {
            let error = difference(&*model, 100, 100);
            assert!(error <= 10.0 * LOGITS_ERROR_MAX, "{name}: cut after 100 tokens: {error:e} away");
        }
    }
    // What the scheduler rules out: a ring that has gone round no longer holds what stood before the cut.
    let model = open(&folder("gemma3_text"), CPU);
    let cut = difference(&*model, 100, 100);
    assert!(cut > 10.0 * LOGITS_ERROR_MAX, "a ring that is cut goes unnoticed: {cut:e} away");
}

/// What a run gave: of each row its tokens, and how many of its prompt's were copied.
fn run(engine: &mut MlxEngine, prefix_tokens_min: Option<u32>, plant: fn(&mut Plan)) -> Vec<(Vec<u32>, u32)> {
    let limits = Limits {
        rows: 5,
        prefill_chunk: 64,
        prompt_concurrency: 4,
        kv_bytes_max: u64::MAX,
        price: engine.price(),
        context_length: 256,
        prefix_tokens_min,
        span_tokens_max: 0,
    };
    let mut scheduler = Scheduler::new(limits);
    let request = |row: u32| Request {
        sequence: SequenceId(row.into()),
        prompt: prompt(row, 3 + row as usize),
        max_tokens: 24 + row,
        stop_tokens: Arc::new([]),
        generation: Arc::default(),
        seed: 0,
        window: None,
        media: Vec::new(),
        whole_spans: false,
    };
    let mut left = (0..8).map(request);
    let mut rows = vec![(Vec::new(), 0); left.len()];
    let mut launched = VecDeque::<Plan>::new();
    while left.len() > 0 || !scheduler.is_idle() {
        for row in left.by_ref().take(scheduler.wants()) {
            scheduler.add(Arc::new(row)).unwrap();
        }
        let mut plan = scheduler.plan();
        let idle = plan.is_empty();
        if !idle {
            plant(&mut plan);
            engine.launch(&plan).unwrap();
            launched.push_back(plan);
        }
        if idle || launched.len() == 2 {
            let plan = launched.pop_front().unwrap();
            let sampled = engine.collect().unwrap();
            for row in scheduler.commit(&plan, &sampled).unwrap() {
                rows[row.sequence.0 as usize] = (row.tokens, row.cached_tokens);
            }
        }
    }
    rows
}

fn engine(name: &str, config: &Value) -> MlxEngine {
    let options =
        MlxOptions { device: job::Device::Cpu, dtype: job::Dtype::Float32, plain: false, weights: WeightForm::Auto, rows: 8 };
    MlxEngine::load(&[folder(name).join("model.safetensors")], config, options).unwrap()
}

#[test]
fn rows_that_reuse_a_head_give_the_tokens_of_rows_that_do_not() {
    for name in ["llama", "qwen3", "gemma3_text"] {
        let run = |prefix_tokens_min, plant| run(&mut engine(name, &config(name)), prefix_tokens_min, plant);
        let cold = run(None, |_| {});
        assert!(cold.iter().all(|(tokens, cached)| tokens.len() >= 24 && *cached == 0));
        let warm = run(Some(64), |_| {});
        assert!(warm.iter().all(|(_, cached)| *cached == HEAD as u32), "{warm:?}");
        let tokens = |rows: &[(Vec<u32>, u32)]| rows.iter().map(|row| row.0.clone()).collect::<Vec<_>>();
        assert_eq!(tokens(&warm), tokens(&cold), "{name}");
        let short = run(Some(64), |plan| {
            let reused = plan.admitted.iter_mut().filter_map(|admission| admission.reuse.as_mut());
            reused.for_each(|reuse| reuse.tokens -= 8);
        });
        assert_ne!(tokens(&short), tokens(&cold), "{name}: blind to a copy that is 8 tokens short");
    }
}

#[test]
fn keys_that_depend_on_a_prompts_length_are_not_reused() {
    let mut config = config("llama");
    assert!(engine("llama", &config).price().prefixes);
    config["rope_scaling"] = json!({ "rope_type": "dynamic", "factor": 2.0 });
    config["max_position_embeddings"] = json!(64);
    assert!(!open_with(&folder("llama"), &config, CPU).shares_prefixes());
    let rows = run(&mut engine("llama", &config), Some(64), |_| {});
    assert!(rows.iter().all(|(_, cached)| *cached == 0), "{rows:?}");
}
