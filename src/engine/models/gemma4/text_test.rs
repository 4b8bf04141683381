//! Soft tokens in a pass against mlx-lm's text model, as `fixtures/make_goldens.py` wrote into `goldens/models/gemma4_text.json`;
//! and checkpoints with towers against mlx-vlm, on prompts of text alone.

use std::{collections::BTreeMap, env, fs, path::PathBuf};

use mlx_rs::{Array, Dtype};
use serde::Deserialize;

use super::super::{
    Model,
    golden_test::{CPU, LOGITS_ERROR_MAX, Stream, argmax, decode, error_against, logits_of, open, prefill, root},
};
use crate::engine::{
    cache::{Cache, Chunk, Span, Step},
    weights::Policy,
};

#[derive(Deserialize)]
struct Golden {
    soft_tokens: BTreeMap<String, Stream>,
}

/// As the script has them: rows from elsewhere, and those that see each other.
const SPANS: [(i32, i32); 2] = [(6, 18), (22, 25)];

fn places() -> Vec<i32> {
    SPANS.iter().flat_map(|&(start, end)| start..end).collect()
}

fn soft_row(index: i32, hidden: i32) -> impl Iterator<Item = f32> {
    (0..hidden).map(move |column| ((31 * index + 17 * column + index * column) % 64 - 32) as f32 / 16.0)
}

/// The prompt in chunks that end at `cuts`, its soft tokens among them, beside a row that decodes where there is one.
fn soft_prefill(
    model: &dyn Model,
    cache: &mut Cache,
    prompt: &[u32],
    cuts: &[i32],
    spans: &[(i32, i32)],
    mut beside: Option<(u32, u32)>,
) -> Vec<f32> {
    const HIDDEN: i32 = 32;
    let (mut start, mut last) = (0, Vec::new());
    for &end in cuts {
        let mut tokens: Vec<i32> = prompt[start as usize..end as usize].iter().map(|&token| token as i32).collect();
        let output = tokens.len() as i32 - 1;
        let chunk = Chunk { slot: 1, start, length: end - start, prompt_tokens: prompt.len() as i32 };
        let (mut soft, mut values) = (Vec::new(), Vec::new());
        for (index, place) in places().into_iter().enumerate().filter(|(_, place)| (start..end).contains(place)) {
            soft.push(place - start);
            values.extend(soft_row(index as i32, HIDDEN));
        }
        let rows: Vec<(u32, u32)> = beside.into_iter().collect();
        tokens.extend(rows.iter().map(|_| 5));
        let mut step = Step::new(vec![chunk], &rows);
        let of_chunk = spans.iter().filter(|(first, _)| (start..end).contains(first));
        step = step.with_spans(of_chunk.map(|&(start, end)| Span { chunk: 0, start, end }).collect());
        if !soft.is_empty() {
            let shape = [soft.len() as i32, HIDDEN];
            step = step.with_soft_tokens(soft, Array::from_slice(&values, &shape));
        }
        cache.begin_step();
        let hidden = model.forward(&Array::from_slice(&tokens, &[tokens.len() as i32]), &step, cache).unwrap();
        last = logits_of(model, &hidden.take_axis(Array::from_slice(&[output], &[1]), 0).unwrap());
        start = end;
        beside = beside.map(|(slot, position)| (slot, position + 1));
    }
    last
}

/// The largest error over a stream; infinite where a token differs.
fn error_of(model: &dyn Model, stream: &Stream, cuts: &[i32], spans: &[(i32, i32)], beside: bool) -> f32 {
    let mut cache = Cache::new(model.cache_layout(), Dtype::Float32, 1).unwrap();
    cache.resize(3, 128).unwrap();
    if beside {
        prefill(model, &mut cache, 0, &[9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8], 64);
    }
    let mut logits = soft_prefill(model, &mut cache, &stream.prompt, cuts, spans, beside.then_some((0, 11)));
    let mut worst = 0.0f32;
    for (step, &token) in stream.tokens.iter().enumerate() {
        if let Some(golden) = stream.logits.iter().find(|golden| golden.step == step) {
            worst = worst.max(error_against(golden, &logits));
        }
        if argmax(&logits) != token {
            return f32::INFINITY;
        }
        logits = decode(model, &mut cache, &[(1, (stream.prompt.len() + step) as u32, token)]).remove(0);
    }
    worst
}

#[test]
fn soft_tokens_agree_with_mlx_lm() {
    let golden: Golden = serde_json::from_slice(&fs::read(root().join("goldens/models/gemma4_text.json")).unwrap()).unwrap();
    let every = |count: i32| (1..=30).filter(|cut| cut % count == 0 || *cut == 30).collect::<Vec<i32>>();
    let (causal, both_ways) = (&golden.soft_tokens["causal"], &golden.soft_tokens["both_ways"]);
    for policy in [CPU, Policy { host: true, ..CPU }, Policy { merge: true, ..CPU }] {
        let model = open(&root().join("fixtures/checkpoints/gemma4_text"), policy);
        for (cuts, beside) in [(every(64), false), (every(5), false), (every(1), false), (every(64), true), (every(7), true)] {
            let error = error_of(&*model, causal, &cuts, &[], beside);
            assert!(error <= LOGITS_ERROR_MAX, "causal, chunks to {cuts:?}, beside another {beside}: {error:e}");
        }
        // Within the window and behind it; a span is whole in its chunk.
        for (cuts, beside) in [(vec![30], false), (vec![6, 18, 30], false), (vec![3, 20, 22, 25, 30], true), (vec![30], true)] {
            let error = error_of(&*model, both_ways, &cuts, &SPANS, beside);
            assert!(error <= LOGITS_ERROR_MAX, "both ways, chunks to {cuts:?}, beside another {beside}: {error:e}");
        }
    }
}

#[test]
fn faults_around_soft_tokens_are_seen() {
    let golden: Golden = serde_json::from_slice(&fs::read(root().join("goldens/models/gemma4_text.json")).unwrap()).unwrap();
    let model = open(&root().join("fixtures/checkpoints/gemma4_text"), CPU);
    let (causal, both_ways) = (&golden.soft_tokens["causal"], &golden.soft_tokens["both_ways"]);
    let seen = |fault: &str, stream: &Stream, spans: &[(i32, i32)]| {
        let error = error_of(&*model, stream, &[30], spans, false);
        assert!(error > LOGITS_ERROR_MAX, "not seen: {fault}");
    };
    seen("per-layer inputs that are not zeroed", &golden.soft_tokens["not_zeroed"], &[]);
    seen("an overlay where there is none, as with a recording in the prompt", causal, &SPANS);
    seen("no overlay where there is one", both_ways, &[]);
    seen("a span off by one at its end", both_ways, &[(6, 17), (22, 25)]);
    seen("a span off by one at its start", both_ways, &[(6, 18), (21, 25)]);
}

/// A golden of a checkpoint with towers, as far as it is about text.
#[derive(Deserialize)]
struct WithTowers {
    cases: BTreeMap<String, Case>,
    float32: BTreeMap<String, Run>,
}

#[derive(Deserialize)]
struct Case {
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Run {
    tokens: Vec<u32>,
    logits: Vec<SomeLogits>,
}

/// All of them, or every 16th.
#[derive(Deserialize)]
struct SomeLogits {
    step: usize,
    all: Option<Vec<f32>>,
    every_16th: Option<Vec<f32>>,
}

/// One of these checkpoints, `e2b`, is sharper than others: its weights, moved by half a unit of their last place, move the
/// oracle's own logits by 1.2e-5 here, and by 1.5e-5 at their worst.
const SHARP_LOGITS_ERROR_MAX: f32 = 2e-5;

/// Google's names and MLX's, towers in the file and beside it, every mode of quantization. Needs `make fixtures`.
#[test]
fn checkpoints_with_towers_agree_with_mlx_vlm_on_text() {
    let Some(made) = env::var_os("MLXBATCH_FIXTURES").map(|folder| PathBuf::from(folder).join("gemma4")) else {
        eprintln!(
            "skipped: checkpoints_with_towers_agree_with_mlx_vlm_on_text, MLXBATCH_FIXTURES is not set (make test-models sets it)"
        );
        return;
    };
    let mut seen = 0;
    for folder in fs::read_dir(made).unwrap().map(|entry| entry.unwrap().path()) {
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let golden = fs::read(root().join("goldens/gemma4").join(format!("{name}.json"))).unwrap();
        let golden: WithTowers = serde_json::from_slice(&golden).unwrap();
        let (prompt, Run { tokens, logits: goldens }) = (&golden.cases["text"].ids, &golden.float32["text"]);
        for (policy, chunk) in
            [(CPU, 64), (CPU, 5), (CPU, 1), (Policy { host: true, ..CPU }, 64), (Policy { merge: true, ..CPU }, 64)]
        {
            let model = open(&folder, policy);
            let mut cache = Cache::new(model.cache_layout(), Dtype::Float32, 1).unwrap();
            cache.resize(1, (prompt.len() + tokens.len()).next_multiple_of(64) as i32).unwrap();
            let mut logits = prefill(&*model, &mut cache, 0, prompt, chunk);
            for (step, &token) in tokens.iter().enumerate() {
                if let Some(golden) = goldens.iter().find(|golden| golden.step == step) {
                    let (of_oracle, every) = match (&golden.all, &golden.every_16th) {
                        (Some(all), _) => (all, 1),
                        (None, Some(some)) => (some, 16),
                        (None, None) => panic!("{name}: no logits at step {step}"),
                    };
                    assert_eq!(of_oracle.len(), logits.len().div_ceil(every));
                    let size = of_oracle.iter().fold(1.0f32, |size, logit| size.max(logit.abs()));
                    let pairs = of_oracle.iter().zip(logits.iter().step_by(every));
                    let error = pairs.fold(0.0f32, |error, (a, b)| error.max((a - b).abs())) / size;
                    assert!(error <= SHARP_LOGITS_ERROR_MAX, "{name}, chunks of {chunk}, step {step}: logits are {error:e} away");
                }
                assert_eq!(argmax(&logits), token, "{name}, chunks of {chunk}, step {step}");
                logits = decode(&*model, &mut cache, &[(0, (prompt.len() + step) as u32, token)]).remove(0);
            }
        }
        seen += 1;
    }
    assert!(seen >= 3, "too few checkpoints are made");
}

#[test]
fn soft_tokens_that_do_not_fit_are_refused() {
    let model = open(&root().join("fixtures/checkpoints/gemma4_text"), CPU);
    let mut cache = Cache::new(model.cache_layout(), Dtype::Float32, 1).unwrap();
    cache.resize(1, 64).unwrap();
    for (place, width) in [(2, 32), (0, 31), (-1, 32)] {
        let step = Step::new(vec![Chunk { slot: 0, start: 0, length: 2, prompt_tokens: 2 }], &[]);
        let step = step.with_soft_tokens(vec![place], Array::zeros::<f32>(&[1, width]).unwrap());
        cache.begin_step();
        let error = model.forward(&Array::from_slice(&[3, 4], &[2]), &step, &mut cache).unwrap_err().to_string();
        assert!(error.contains("do not fit"), "{error}");
    }
}
