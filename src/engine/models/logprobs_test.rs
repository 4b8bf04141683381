//! Log-probabilities through scheduler and engine, against those of mlx-lm on the same libmlx
//! (`fixtures/make_logprobs_goldens.py`), and a row's alone against the same row's among others.

use std::{collections::VecDeque, fs, sync::Arc};

use mlx_rs::{Array, Dtype};
use serde::Deserialize;

use super::golden_test::{CPU, decode, open, prefill, root};
use crate::{
    engine::{Engine, Logprobs, MlxEngine, MlxOptions, WeightForm, cache::Cache, logprobs::StepLogprobs},
    job::{self, Generation},
    schedule::{Limits, Plan, Request, Scheduler, SequenceId},
};

#[derive(Deserialize)]
struct Golden {
    streams: Vec<Stream>,
}

#[derive(Deserialize)]
struct Stream {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    top: Vec<Top>,
}

#[derive(Deserialize)]
struct Top {
    token_ids: Vec<u32>,
    logprobs: Vec<f32>,
}

const NAMES: [&str; 3] = ["gemma3_text", "llama", "qwen3"];
/// As far as logits of some ten may be from the oracle's.
const ERROR_MAX: f32 = 5e-5;

fn golden(name: &str) -> Golden {
    let path = root().join("goldens/logprobs").join(format!("{name}.json"));
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn engine(name: &str) -> MlxEngine {
    let folder = root().join("fixtures/checkpoints").join(name);
    let config = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    let options =
        MlxOptions { device: job::Device::Cpu, dtype: job::Dtype::Float32, plain: false, weights: WeightForm::Auto, rows: 8 };
    MlxEngine::load(&[folder.join("model.safetensors")], &config, options).unwrap()
}

fn request(row: usize, prompt: &[u32], max_tokens: u32, generation: Generation) -> Request {
    Request {
        sequence: SequenceId(row as u64),
        prompt: prompt.to_vec(),
        max_tokens,
        stop_tokens: Arc::new([]),
        generation: Arc::new(generation),
        seed: 3 + row as u64,
        window: None,
        media: Vec::new(),
        whole_spans: false,
    }
}

struct Given {
    tokens: Vec<u32>,
    cached_tokens: u32,
    logprobs: Option<Logprobs>,
}

/// What a run gives each of `requests`.
fn run(engine: &mut MlxEngine, requests: &[Request], prefill_chunk: u32, prefix_tokens_min: Option<u32>) -> Vec<Given> {
    engine.reset().unwrap();
    let limits = Limits {
        rows: 5,
        prefill_chunk,
        prompt_concurrency: 4,
        kv_bytes_max: u64::MAX,
        price: engine.price(),
        context_length: 256,
        prefix_tokens_min,
        span_tokens_max: 0,
    };
    let mut scheduler = Scheduler::new(limits);
    let mut left = requests.iter();
    let mut given: Vec<(u64, Given)> = Vec::new();
    let mut launched = VecDeque::<Plan>::new();
    while left.len() > 0 || !scheduler.is_idle() {
        for row in left.by_ref().take(scheduler.wants()) {
            scheduler.add(Arc::new(row.clone())).unwrap();
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
                let logprobs = engine.take_logprobs(row.sequence);
                given.push((row.sequence.0, Given { tokens: row.tokens, cached_tokens: row.cached_tokens, logprobs }));
            }
        }
    }
    given.sort_by_key(|(row, _)| *row);
    given.into_iter().map(|(_, given)| given).collect()
}

/// The largest difference from what mlx-lm says. Panics where there is something else altogether: another token, or one that is
/// likelier than the oracle's of its rank by more than rounding.
fn difference(stream: &Stream, own: &Logprobs) -> f32 {
    let tokens: Vec<u32> = own.sampled.iter().map(|token| token.token_id).collect();
    assert_eq!(tokens, stream.tokens);
    assert_eq!(own.top.len(), own.top_k * tokens.len());
    let mut worst = 0.0f32;
    for (index, (sampled, top)) in own.sampled.iter().zip(&stream.top).enumerate() {
        worst = worst.max((sampled.logprob - stream.logprobs[index]).abs());
        let likeliest = &own.top[index * own.top_k..(index + 1) * own.top_k];
        for (rank, token) in likeliest.iter().enumerate() {
            worst = worst.max((token.logprob - top.logprobs[rank]).abs());
            // By its rank the right one, unless another is as likely.
            let same = |other: &usize| top.token_ids[*other] == token.token_id;
            let place = (0..top.token_ids.len()).find(same);
            let as_likely = place.map_or(f32::INFINITY, |place| (top.logprobs[place] - top.logprobs[rank]).abs());
            worst = worst.max(as_likely);
        }
    }
    worst
}

/// Whatever a row samples with; as long as the likeliest token is the one that is sampled.
fn greedy_in_disguise(stream: &Stream) -> [Generation; 3] {
    let never = stream.top.iter().flat_map(|top| &top.token_ids).find(|token| !stream.tokens.contains(token)).unwrap();
    let plain = Generation { logprobs: Some(5), ..Generation::default() };
    [
        Generation { logprobs: Some(19), ..plain.clone() },
        Generation { temperature: 0.7, top_k: 1, ..plain.clone() },
        Generation { logit_bias: [(*never, -50.0)].into(), presence_penalty: 5e-4, ..plain },
    ]
}

#[test]
fn what_is_given_is_mlx_lms() {
    for name in NAMES {
        let golden = golden(name);
        let mut engine = engine(name);
        let settings: Vec<_> =
            golden.streams.iter().flat_map(|stream| greedy_in_disguise(stream).map(|generation| (stream, generation))).collect();
        let requests: Vec<Request> = settings
            .iter()
            .enumerate()
            .map(|(row, (stream, generation))| request(row, &stream.prompt, stream.tokens.len() as u32, generation.clone()))
            .collect();
        for prefill_chunk in [512, 5] {
            for (given, (stream, generation)) in run(&mut engine, &requests, prefill_chunk, None).iter().zip(&settings) {
                let error = difference(stream, given.logprobs.as_ref().unwrap());
                assert!(error < ERROR_MAX, "{name}, {generation:?}, prompt of {}: {error:e} away", stream.prompt.len());
            }
        }
    }
}

/// The gate above must turn red where log-probabilities are taken from other logits than the model's, or of other tokens.
#[test]
fn planted_faults_turn_the_gate_red() {
    let model = open(&root().join("fixtures/checkpoints/llama"), CPU);
    let golden = golden("llama");
    let stream = golden.streams.last().unwrap();
    let drive = |fault: &dyn Fn(&mut Vec<f32>)| {
        let mut cache = Cache::new(model.cache_layout(), Dtype::Float32, 1).unwrap();
        cache.resize(1, 128).unwrap();
        let mut own = Logprobs::new(5);
        let mut logits = prefill(&*model, &mut cache, 0, &stream.prompt, 64);
        for (step, &token) in stream.tokens.iter().enumerate() {
            fault(&mut logits);
            let width = logits.len() as i32;
            let (of_step, sampled) = (Array::from_slice(&logits, &[1, width]), Array::from_slice(&[token as i32], &[1]));
            StepLogprobs::of(&of_step, &sampled, [Some(5)].into_iter()).unwrap().unwrap().add_to(0, &mut own).unwrap();
            logits = decode(&*model, &mut cache, &[(0, (stream.prompt.len() + step) as u32, token)]).remove(0);
        }
        difference(stream, &own)
    };
    assert!(drive(&|_| {}) < ERROR_MAX, "driven rightly the gate is green");
    let kept = |logits: &mut Vec<f32>, count: usize| {
        let mut sorted = logits.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        logits.iter_mut().filter(|logit| **logit < sorted[count - 1]).for_each(|logit| *logit = f32::NEG_INFINITY);
    };
    let penalized = stream.tokens[0] as usize;
    type Fault<'a> = (&'static str, &'a dyn Fn(&mut Vec<f32>));
    let faults: [Fault<'_>; 5] = [
        ("after the temperature", &|logits| logits.iter_mut().for_each(|logit| *logit /= 0.99)),
        ("after top-k", &|logits| kept(logits, 100)),
        ("after a penalty", &|logits| logits[penalized] -= 5e-4),
        ("the next token's", &|logits| logits.rotate_right(1)),
        ("the last token left out", &|logits| *logits.last_mut().unwrap() = f32::NEG_INFINITY),
    ];
    let missed: Vec<&str> = faults.iter().filter(|(_, fault)| drive(*fault) < ERROR_MAX).map(|(name, _)| *name).collect();
    assert!(missed.is_empty(), "the gate is blind to: {missed:?}");
}

#[test]
fn a_row_has_the_same_alone_and_among_others() {
    let head: Vec<u32> = (0..100u32).map(|index| 5 + (index * index * 31 + index * 7) % 500).collect();
    let own = |row: u32| (0..3 + row).map(move |index| 5 + (row * 97 + index * 13 + row * index * 5) % 500);
    let requests: Vec<Request> = (0..8)
        .map(|row| {
            let prompt: Vec<u32> = head.iter().copied().chain(own(row)).collect();
            let logprobs = [None, Some(0), Some(5), Some(20)][row as usize % 4];
            let temperature = if row < 4 { 0.9 } else { 0.0 };
            let max_tokens = 12 + row;
            request(row as usize, &prompt, max_tokens, Generation { temperature, top_p: 0.95, logprobs, ..Generation::default() })
        })
        .collect();
    for name in NAMES {
        let mut engine = engine(name);
        let together = run(&mut engine, &requests, 64, None);
        let warm = run(&mut engine, &requests, 64, Some(64));
        let chunked = run(&mut engine, &requests, 7, None);
        assert!(warm.iter().all(|row| row.cached_tokens == 100), "the head is taken over");
        for (index, request) in requests.iter().enumerate() {
            let alone = run(&mut engine, std::slice::from_ref(request), 64, None).remove(0);
            let row = &together[index];
            assert_eq!(alone.logprobs, row.logprobs, "{name}: row {index} alone, to the last bit");
            assert_eq!(alone.logprobs.is_some(), request.generation.logprobs.is_some());
            let Some(own) = &alone.logprobs else { continue };
            assert_eq!(own.sampled.iter().map(|token| token.token_id).collect::<Vec<_>>(), alone.tokens);
            assert_eq!(own.top.len(), alone.tokens.len() * request.generation.logprobs.unwrap() as usize);
            for (how, other) in [("a head that was copied", &warm[index]), ("chunks of 7", &chunked[index])] {
                let other = other.logprobs.as_ref().unwrap();
                assert_eq!((other.sampled.len(), other.top.len()), (own.sampled.len(), own.top.len()));
                let pairs = own.sampled.iter().zip(&other.sampled).chain(own.top.iter().zip(&other.top));
                for (own, other) in pairs {
                    assert!((own.logprob - other.logprob).abs() < ERROR_MAX, "{name}, {how}: {own:?} and {other:?}");
                }
            }
        }
    }
}
