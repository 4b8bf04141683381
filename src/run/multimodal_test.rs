//! Gemma 4 from files and sounds to tokens, against mlx-vlm's greedy streams: what `fixtures/make_gemma4_goldens.py` wrote.

use std::{
    collections::{BTreeMap, VecDeque},
    env, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use image::{ImageFormat, RgbImage};
use serde::Deserialize;
use serde_json::Value;

use super::open::weight_files;
use crate::{
    engine::{self, Engine, MlxEngine, MlxOptions, WeightForm, memory as mlx_memory},
    job::{self, Audio},
    manifest::{self, MediumKind},
    media::{MediaSource, signal},
    model::{self, ModelFiles, Towers},
    prompt::{Sensed, Senses},
    schedule::{Limits, Medium, MediumContent, Plan, Request, Scheduler, SequenceId},
};

#[derive(Deserialize)]
struct Golden {
    pictures: BTreeMap<String, (u32, u32)>,
    sounds: BTreeMap<String, (String, usize)>,
    cases: BTreeMap<String, Case>,
    float32: BTreeMap<String, Stream>,
    /// In the format that the file has.
    as_stored: Option<BTreeMap<String, Short>>,
}

#[derive(Deserialize)]
struct Short {
    tokens: Vec<u32>,
    /// How far the likeliest logit is above the next, at each token.
    margins: Vec<f32>,
}

#[derive(Deserialize)]
struct Case {
    parts: Vec<Value>,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Stream {
    tokens: Vec<u32>,
}

/// As `picture` of fixtures/gemma4_oracle.py has it, in a PNG file.
fn picture(width: u32, height: u32) -> Vec<u8> {
    let pixel = |x: u32, y: u32| {
        let squares = ((x / 8 + y / 8) % 2) * 85;
        let (red, green) = (x * 255 / (width - 1).max(1), (y * 255 / (height - 1).max(1) + squares) % 256);
        image::Rgb([red, green, (x * x + 3 * y * y) / 64 % 256].map(|number| number as u8))
    };
    let mut file = std::io::Cursor::new(Vec::new());
    RgbImage::from_fn(width, height, pixel).write_to(&mut file, ImageFormat::Png).unwrap();
    file.into_inner()
}

/// A WAV file of float32 at 16 kHz.
fn sound(samples: &[f32]) -> Vec<u8> {
    let bytes = 4 * samples.len() as u32;
    let mut file = b"RIFF".to_vec();
    file.extend((36 + bytes).to_le_bytes());
    file.extend(b"WAVEfmt ");
    for word in [16u32, 0x0001_0003, 16_000, 64_000, 0x0020_0004] {
        file.extend(word.to_le_bytes());
    }
    file.extend(b"data");
    file.extend(bytes.to_le_bytes());
    file.extend(samples.iter().flat_map(|sample| sample.to_le_bytes()));
    file
}

struct Subject {
    name: &'static str,
    golden: Golden,
    files: ModelFiles,
    towers: Towers,
}

impl Subject {
    fn open(name: &'static str) -> Option<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let fixtures = env::var_os("MLXBATCH_FIXTURES").map_or(root.join(".fixtures"), PathBuf::from);
        let folder = fixtures.join("gemma4").join(name);
        if !folder.is_dir() {
            println!("skipped: {} is not there: run `make fixtures`", folder.display());
            return None;
        }
        let golden = serde_json::from_slice(&fs::read(root.join(format!("goldens/gemma4/{name}.json"))).unwrap()).unwrap();
        let files = model::locate(folder.to_str().unwrap()).unwrap();
        let towers = Towers::new(&files).unwrap();
        Some(Self { name, golden, files, towers })
    }

    fn engine(&self, dtype: job::Dtype) -> MlxEngine {
        self.engine_on(job::Device::Cpu, dtype)
    }

    fn engine_on(&self, device: job::Device, dtype: job::Dtype) -> MlxEngine {
        let options = MlxOptions { device, dtype, plain: false, weights: WeightForm::Auto, rows: 8 };
        MlxEngine::load(&weight_files(&self.files), self.files.config(), options).unwrap()
    }

    fn sense(&self, part: &Value) -> Option<Sensed> {
        let (kind, name) = match part["type"].as_str() {
            Some("image") => (MediumKind::Image, part["image"].as_str().unwrap()),
            Some("audio") => (MediumKind::Audio, part["audio"].as_str().unwrap()),
            _ => return None,
        };
        let bytes = match kind {
            MediumKind::Image => {
                let (width, height) = self.golden.pictures[name];
                picture(width, height)
            }
            MediumKind::Audio => {
                let (of, samples) = &self.golden.sounds[name];
                sound(&signal(of, *samples))
            }
        };
        let source = MediaSource::Bytes { name: name.to_owned(), bytes: bytes.into() };
        Some(Senses::new(self.towers.clone(), Audio::default()).sense(&manifest::Medium { kind, source }).unwrap())
    }

    /// With media where the reference's ids have placeholders.
    fn request(&self, case: &str, sequence: u64) -> Request {
        let Case { parts, ids } = &self.golden.cases[case];
        let mut at = 0;
        let mut media = Vec::new();
        for Sensed { content, soft_tokens, identity, kind, .. } in parts.iter().filter_map(|part| self.sense(part)) {
            let token = match kind {
                MediumKind::Image => self.towers.image.as_ref().unwrap().placeholder.token,
                MediumKind::Audio => self.towers.audio.as_ref().unwrap().placeholder.token,
            };
            let first = at + ids[at..].iter().position(|id| *id == token).unwrap();
            at = first + soft_tokens as usize;
            assert!(ids[first..at].iter().all(|id| *id == token) && ids[at] != token, "{case}: other soft tokens");
            media.push(Medium { first: first as u32, tokens: soft_tokens, content, identity });
        }
        let (sees, hears) = (case.contains("image"), case.contains("audio"));
        let both_ways = self.towers.image.as_ref().is_some_and(|image| image.both_ways);
        Request {
            sequence: SequenceId(sequence),
            prompt: ids.clone(),
            max_tokens: self.golden.float32[case].tokens.len() as u32,
            stop_tokens: Arc::new([]),
            generation: Arc::default(),
            seed: 0,
            window: None,
            media,
            whole_spans: both_ways && sees && !hears,
        }
    }

    /// Greedy tokens of each request, so many together, in chunks; a row is brought only so many steps behind the one before.
    fn run(&self, requests: Vec<Request>, how: How, plant: impl Fn(&mut Request)) -> Vec<Vec<u32>> {
        self.run_on(&mut self.engine(job::Dtype::Float32), requests, how, plant).0
    }

    /// Beside the tokens the most bytes that the budget counted for a layout.
    fn run_on(
        &self,
        engine: &mut MlxEngine,
        requests: Vec<Request>,
        how: How,
        plant: impl Fn(&mut Request),
    ) -> (Vec<Vec<u32>>, u64) {
        let limits = Limits {
            rows: how.rows,
            prefill_chunk: how.chunk,
            prompt_concurrency: 4,
            kv_bytes_max: 1 << 30,
            price: engine.price(),
            context_length: 4096,
            prefix_tokens_min: how.prefix_tokens_min,
            span_tokens_max: self.towers.image.as_ref().map_or(0, |image| image.rule.soft_tokens_max),
        };
        let mut predicted_bytes = 0;
        let mut scheduler = Scheduler::new(limits);
        let mut rows = vec![Vec::new(); requests.len()];
        let mut left = VecDeque::from(requests);
        let mut launched = VecDeque::<Plan>::new();
        let mut step = 0;
        while !left.is_empty() || !scheduler.is_idle() {
            let due = step % how.apart == 0 || scheduler.is_idle();
            if due
                && scheduler.wants() > 0
                && let Some(mut request) = left.pop_front()
            {
                plant(&mut request);
                scheduler.add(Arc::new(request)).unwrap();
            }
            step += 1;
            let plan = scheduler.plan();
            let idle = plan.is_empty();
            if !idle {
                predicted_bytes = predicted_bytes.max(scheduler.counters().kv_bytes);
                engine.launch(&plan).unwrap();
                launched.push_back(plan);
            }
            if (idle || launched.len() == 2)
                && let Some(plan) = launched.pop_front()
            {
                let sampled = engine.collect().unwrap();
                for row in scheduler.commit(&plan, &sampled).unwrap() {
                    rows[row.sequence.0 as usize] = row.tokens;
                }
            }
        }
        (rows, predicted_bytes)
    }
}

#[derive(Clone, Copy)]
struct How {
    rows: u32,
    chunk: u32,
    apart: u32,
    prefix_tokens_min: Option<u32>,
}

const ALONE: How = How { rows: 1, chunk: 512, apart: 1, prefix_tokens_min: None };

const NAMES: [&str; 14] = [
    "e2b",
    "dense",
    "moe",
    "e2b-4bit-g64",
    "e2b-4bit-g32",
    "e2b-mxfp4",
    "e2b-mxfp8",
    "e2b-nvfp4",
    "e2b-mixed",
    "e2b-sidecar",
    "moe-4bit-g64",
    "moe-mxfp4",
    "unified",
    "unified-4bit-g64",
];

fn agree(subject: &Subject, cases: &[&String], rows: &[Vec<u32>], how: &str) {
    for (case, tokens) in cases.iter().zip(rows) {
        let golden = &subject.golden.float32[*case].tokens;
        let first = tokens.iter().zip(golden).position(|(ours, theirs)| ours != theirs);
        assert_eq!((first, tokens.len()), (None, golden.len()), "{} {case}, {how}: the first token that differs", subject.name);
    }
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn every_prompt_has_the_references_tokens_alone() {
    for subject in NAMES.into_iter().filter_map(Subject::open) {
        let cases: Vec<&String> = subject.golden.cases.keys().collect();
        for (how, chunk) in [("whole", 512), ("in chunks of 7", 7)] {
            let requests = (0..).zip(&cases).map(|(row, case)| subject.request(case, row)).collect();
            let rows = subject.run(requests, How { chunk, ..ALONE }, |_| {});
            agree(&subject, &cases, &rows, how);
        }
    }
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn rows_of_text_images_and_sounds_together_are_themselves_alone() {
    for subject in
        ["e2b", "dense", "moe", "e2b-4bit-g64", "e2b-sidecar", "unified", "unified-4bit-g64"].into_iter().filter_map(Subject::open)
    {
        // Each case twice, in two orders.
        let mut cases: Vec<&String> = subject.golden.cases.keys().collect();
        let again: Vec<&String> = cases.iter().rev().copied().collect();
        cases.extend(again);
        for (rows, chunk, apart, prefix_tokens_min) in [(2, 512, 3, None), (4, 64, 7, None), (8, 40, 1, None), (8, 512, 2, Some(8))]
        {
            let requests = (0..).zip(&cases).map(|(row, case)| subject.request(case, row)).collect();
            let tokens = subject.run(requests, How { rows, chunk, apart, prefix_tokens_min }, |_| {});
            agree(&subject, &cases, &tokens, &format!("{rows} rows, chunks of {chunk}, {apart} steps apart"));
        }
    }
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn planted_faults_turn_the_gate_red() {
    let Some(dense) = Subject::open("dense") else { return };
    let same = |subject: &Subject, case: &str, plant: fn(&mut Request)| {
        let rows = subject.run(vec![subject.request(case, 0)], ALONE, plant);
        rows[0] == subject.golden.float32[case].tokens
    };
    assert!(same(&dense, "image", |_| {}) && same(&dense, "image_audio", |_| {}), "without a fault");
    assert!(!same(&dense, "image", |request| request.whole_spans = false), "an image whose tokens do not see each other both ways");
    assert!(!same(&dense, "image_audio", |request| request.whole_spans = true), "the overlay beside a recording");
    let turned = |request: &mut Request| request.media.iter_mut().for_each(|medium| medium.first -= 1);
    assert!(!same(&dense, "image", turned), "soft tokens a place too early");
    let Some(e2b) = Subject::open("e2b") else { return };
    assert!(same(&e2b, "two_images", |_| {}), "without a fault");
    let turned = |request: &mut Request| {
        let MediumContent::Image(mut patches) = (*request.media[1].content).clone() else { panic!("no image") };
        patches.values.reverse();
        request.media[1].content = Arc::new(MediumContent::Image(patches));
    };
    assert!(!same(&e2b, "two_images", turned), "the second image turned round");
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn faults_planted_without_towers_turn_the_gate_red() {
    let Some(unified) = Subject::open("unified") else { return };
    assert_eq!(unified.towers.inputs(), ["text", "image", "audio"]);
    let same = |case: &str, plant: fn(&mut Request)| {
        let rows = unified.run(vec![unified.request(case, 0)], ALONE, plant);
        rows[0] == unified.golden.float32[case].tokens
    };
    for case in ["image", "two_images", "edge_audio", "audio_image"] {
        assert!(same(case, |_| {}), "{case} without a fault");
    }
    assert!(!same("image", |request| request.whole_spans = false), "an image whose tokens do not see each other both ways");
    assert!(!same("audio_image", |request| request.whole_spans = true), "the overlay beside a recording");
    let columns_for_rows = |request: &mut Request| {
        let MediumContent::Image(mut patches) = (*request.media[0].content).clone() else { panic!("no image") };
        std::mem::swap(&mut patches.columns, &mut patches.rows);
        request.media[0].content = Arc::new(MediumContent::Image(patches));
    };
    assert!(!same("image", columns_for_rows), "columns for rows");
    let padded_in_front = |request: &mut Request| {
        let MediumContent::Waveform(mut frames) = (*request.media[0].content).clone() else { panic!("no samples") };
        let last = frames.values.len() - frames.bins;
        let padding = frames.values.iter().rev().take_while(|sample| **sample == 0.0).count();
        assert!(padding > 0, "the last frame is full");
        frames.values[last..].rotate_right(padding);
        request.media[0].content = Arc::new(MediumContent::Waveform(frames));
    };
    assert!(!same("edge_audio", padded_in_front), "the last frame padded in front");
}

/// In bfloat16 sums end in other bits with products of another shape: a stream may part where two tokens are as good as equal.
const MARGIN_MAX: f32 = 0.25;

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn in_bfloat16_streams_part_at_close_calls_alone() {
    let (mut equal, mut all) = (0, 0);
    for subject in ["e2b", "dense", "unified"].into_iter().filter_map(Subject::open) {
        let golden = subject.golden.as_stored.as_ref().unwrap();
        let cases: Vec<&String> = golden.keys().collect();
        let requests = (0..).zip(&cases).map(|(row, case)| Request { max_tokens: 16, ..subject.request(case, row) }).collect();
        let (rows, _) = subject.run_on(&mut subject.engine(job::Dtype::Bfloat16), requests, ALONE, |_| {});
        for (case, tokens) in cases.into_iter().zip(rows) {
            let Short { tokens: theirs, margins } = &golden[case];
            all += 1;
            match tokens.iter().zip(theirs).position(|(ours, theirs)| ours != theirs) {
                None => equal += 1,
                Some(at) => {
                    println!("{} {case}: parts at token {at}, where the gap is {}", subject.name, margins[at]);
                    assert!(margins[at] <= MARGIN_MAX, "{} {case}: token {at}, {} apart", subject.name, margins[at]);
                }
            }
        }
    }
    println!("{equal} of {all} equal over 16 tokens");
}

/// On a GPU sums end in other bits, and products of float32 are rounded to fewer (TF32) unless MLX_ENABLE_TF32=0 says otherwise.
#[test]
#[ignore = "needs a GPU and the checkpoints of `make fixtures`"]
fn on_a_gpu_rows_have_the_references_tokens() {
    if !engine::device_memory(job::Device::Gpu).0 {
        println!("skipped: there is no GPU here");
        return;
    }
    let (mut equal, mut all) = (0, 0);
    // MLX's rope for CUDA refuses heads of 16 numbers for more than 128 tokens at once, which the others' images are.
    for subject in ["e2b"].into_iter().filter_map(Subject::open) {
        let mut engine = subject.engine_on(job::Device::Gpu, job::Dtype::Float32);
        let cases: Vec<&String> = subject.golden.cases.keys().collect();
        for rows in [1, 8] {
            engine.reset().unwrap();
            let requests = (0..).zip(&cases).map(|(row, case)| subject.request(case, row)).collect();
            let how = How { rows, chunk: 40, apart: 2, prefix_tokens_min: None };
            let (tokens, _) = subject.run_on(&mut engine, requests, how, |_| {});
            for (case, tokens) in cases.iter().zip(tokens) {
                let golden = &subject.golden.float32[*case].tokens;
                let first = tokens.iter().zip(golden).position(|(ours, theirs)| ours != theirs);
                all += 1;
                equal += u32::from(first.is_none());
                if let Some(first) = first {
                    println!("{} {case}, {rows} rows: parts at token {first} of {}", subject.name, golden.len());
                }
            }
        }
    }
    println!("{equal} of {all} streams equal");
    assert!(all == 0 || 20 * equal >= 19 * all, "{equal} of {all}");
}

/// One medium behind the beginning of a prompt.
fn lone_medium(subject: &Subject, kind: MediumKind, bytes: Vec<u8>, sequence: u64) -> Request {
    let source = MediaSource::Bytes { name: "alone".to_owned(), bytes: bytes.into() };
    let senses = Senses::new(subject.towers.clone(), Audio::default());
    let Sensed { content, soft_tokens, identity, .. } = senses.sense(&manifest::Medium { kind, source }).unwrap();
    let (case, token) = match kind {
        MediumKind::Image => ("image", subject.towers.image.as_ref().unwrap().placeholder.token),
        MediumKind::Audio => ("audio", subject.towers.audio.as_ref().unwrap().placeholder.token),
    };
    let mut request = subject.request(case, sequence);
    let first = request.media[0].first;
    request.prompt.truncate(first as usize);
    request.prompt.extend(std::iter::repeat_n(token, soft_tokens as usize));
    request.prompt.push(request.prompt[0]);
    request.media = vec![Medium { first, tokens: soft_tokens, content, identity }];
    request.max_tokens = 4;
    request
}

/// The budget's prediction beside MLX's peak.
#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn memory_is_predicted() {
    let recording = |seconds: usize| (MediumKind::Audio, sound(&signal("noise", 16_000 * seconds)));
    let media = [
        ("recordings of 30 s", recording(30)),
        ("recordings of 5 s", recording(5)),
        ("large images", (MediumKind::Image, picture(1600, 1200))),
        ("small images", (MediumKind::Image, picture(320, 200))),
    ];
    for subject in ["e2b", "dense"].into_iter().filter_map(Subject::open) {
        let mut engine = subject.engine(job::Dtype::Float32);
        for (what, (kind, bytes)) in &media {
            for (rows, chunk) in [(1, 512), (4, 512)] {
                let requests = (0..4).map(|row| lone_medium(&subject, *kind, bytes.clone(), row)).collect();
                engine.reset().unwrap();
                mlx_memory::reset_peak().unwrap();
                let before = mlx_memory::active_bytes().unwrap();
                let how = How { rows, chunk, apart: 1, prefix_tokens_min: None };
                let (_, predicted) = subject.run_on(&mut engine, requests, how, |_| {});
                let measured = mlx_memory::peak_bytes().unwrap() - before;
                let over = 100.0 * (predicted as f64 / measured as f64 - 1.0);
                println!("{}, {rows} rows, {what}: predicted {predicted}, measured {measured}: {over:+.1}%", subject.name);
                // Pixels and scores are most of what a tiny tower takes of an image: `tower_test` holds one of full size to 10%.
                let over_max = if *kind == MediumKind::Image { 60.0 } else { 10.0 };
                assert!(over > -10.0 && over <= over_max, "{} {what}: {over:+.1}%", subject.name);
            }
        }
    }
}
