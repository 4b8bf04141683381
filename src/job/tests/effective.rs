//! Defaults, paths, `--set`, and the way back into TOML.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::{LEAST, read, read_with};
use crate::job::{
    Audio, Batching, Channels, Columns, Device, Dtype, Generation, Input, Job, KvBudget, Long, Model, Order, Prompt, Results,
    SpeechTask, Transcription,
};

fn least() -> Job {
    Job {
        file: "/jobs/job.toml".into(),
        name: "job".to_owned(),
        output: "/jobs/out/job".into(),
        model: Model { path: "fake".to_owned(), device: Device::Auto, dtype: Dtype::Auto },
        input: Input {
            manifest: vec!["/jobs/rows.jsonl".to_owned()],
            folder: None,
            glob: None,
            columns: Columns {
                id: "id".to_owned(),
                prompt: "prompt".to_owned(),
                messages: "messages".to_owned(),
                reference: "reference".to_owned(),
                audio: "audio".to_owned(),
                image: "image".to_owned(),
                language: "language".to_owned(),
            },
        },
        prompt: Prompt { system: None, template: None, thinking: false },
        generation: Generation::default(),
        batching: Batching {
            rows: 32,
            kv_budget: KvBudget::Auto,
            prefill_chunk: None,
            prompt_concurrency: None,
            order: Order::Length,
            prefix_cache: true,
        },
        audio: Audio::default(),
        transcription: Transcription::default(),
        results: Results { token_ids: false, keep_columns: Vec::new(), rows_per_part: 10_000, seconds_per_part: 300 },
    }
}

#[test]
fn defaults() {
    assert_eq!(read(LEAST).unwrap(), least());
}

#[test]
fn every_key() {
    let job = read(
        r#"
        [job]
        name = "all"
        task = "generate"
        output = "../results"
        [model]
        path = "HuggingFaceTB/SmolLM2-135M-Instruct"
        device = "cpu"
        dtype = "bfloat16"
        [input]
        folder = "./texts"
        glob = "**/*.txt"
        columns = { id = "utt", prompt = "question", messages = "chat", reference = "answer", audio = "path", image = "photo",
            language = "locale" }
        [prompt]
        system = "Be brief."
        template = "{{ question }}"
        thinking = true
        [generation]
        max_tokens = 1_000
        temperature = 1
        top_p = 0.9
        top_k = 40
        min_p = 0.05
        repetition_penalty = 1.1
        penalty_context = 64
        presence_penalty = -0.5
        frequency_penalty = 0.25
        logit_bias = { 5 = -100, "7" = 1.5 }
        stop = "END"
        stop_token_ids = [2, 0x3]
        ignore_eos = true
        seed = 9223372036854775807
        logprobs = 20
        [batching]
        rows = 4
        kv_budget = "1.5 GiB"
        kv_bits = 16
        prefill_chunk = 128
        prompt_concurrency = 2
        order = "manifest"
        prefix_cache = false
        [audio]
        long = "truncate"
        channels = "right"
        [transcription]
        task = "translate"
        language = "Welsh"
        timestamps = false
        initial_prompt = "Glossary: MLX."
        temperatures = [0, 0.5]
        compression_ratio_threshold = false
        logprob_threshold = -0.5
        no_speech_threshold = false
        suppress_tokens = [-1, 50_257]
        suppress_blank = false
        max_initial_timestamp = 2
        [results]
        token_ids = true
        keep_columns = ["speaker"]
        rows_per_part = 7
        seconds_per_part = 9
        "#,
    );
    let expected = Job {
        file: "/jobs/job.toml".into(),
        name: "all".to_owned(),
        output: "/results".into(),
        model: Model { path: "HuggingFaceTB/SmolLM2-135M-Instruct".to_owned(), device: Device::Cpu, dtype: Dtype::Bfloat16 },
        input: Input {
            manifest: Vec::new(),
            folder: Some("/jobs/texts".into()),
            glob: Some("**/*.txt".to_owned()),
            columns: Columns {
                id: "utt".to_owned(),
                prompt: "question".to_owned(),
                messages: "chat".to_owned(),
                reference: "answer".to_owned(),
                audio: "path".to_owned(),
                image: "photo".to_owned(),
                language: "locale".to_owned(),
            },
        },
        prompt: Prompt { system: Some("Be brief.".to_owned()), template: Some("{{ question }}".to_owned()), thinking: true },
        generation: Generation {
            max_tokens: 1000,
            temperature: 1.0,
            top_p: 0.9,
            top_k: 40,
            min_p: 0.05,
            repetition_penalty: 1.1,
            penalty_context: 64,
            presence_penalty: -0.5,
            frequency_penalty: 0.25,
            logit_bias: BTreeMap::from([(5, -100.0), (7, 1.5)]),
            stop: vec!["END".to_owned()],
            stop_token_ids: vec![2, 3],
            ignore_eos: true,
            seed: i64::MAX as u64,
            logprobs: Some(20),
        },
        batching: Batching {
            rows: 4,
            kv_budget: KvBudget::Bytes(3 << 29),
            prefill_chunk: Some(128),
            prompt_concurrency: Some(2),
            order: Order::Manifest,
            prefix_cache: false,
        },
        audio: Audio { long: Long::Truncate, channels: Channels::Right },
        transcription: Transcription {
            task: SpeechTask::Translate,
            language: Some("Welsh".to_owned()),
            timestamps: false,
            initial_prompt: Some("Glossary: MLX.".to_owned()),
            temperatures: vec![0.0, 0.5],
            compression_ratio_threshold: None,
            logprob_threshold: Some(-0.5),
            no_speech_threshold: None,
            suppress_tokens: vec![-1, 50_257],
            suppress_blank: false,
            max_initial_timestamp: 2.0,
        },
        results: Results { token_ids: true, keep_columns: vec!["speaker".to_owned()], rows_per_part: 7, seconds_per_part: 9 },
    };
    assert_eq!(job.unwrap(), expected);
}

#[test]
fn settings_override_the_file() {
    let text = format!("{LEAST}[generation]\nmax_tokens = 8\nstop = [\"a\"]\n");
    let settings = [
        "generation.max_tokens=64",
        "generation.max_tokens = 65",
        "generation.temperature=0.5",
        "generation.stop=[\"x\", \"y=z\"]",
        "generation.logit_bias.12=-1",
        "generation.logit_bias.\"13\"=2",
        "batching.kv_budget=6GiB",
        "batching.order=manifest",
        "input.columns.prompt=question",
        "prompt.system=",
        "prompt.template=[INST] {{ question }} = ?",
        "job.output=\"/elsewhere\"",
    ];
    let job = read_with(&text, &settings).unwrap();
    assert_eq!(job.generation.max_tokens, 65);
    assert_eq!(job.generation.temperature, 0.5);
    assert_eq!(job.generation.stop, ["x", "y=z"]);
    assert_eq!(job.generation.logit_bias, BTreeMap::from([(12, -1.0), (13, 2.0)]));
    assert_eq!(job.batching.kv_budget, KvBudget::Bytes(6 << 30));
    assert_eq!(job.batching.order, Order::Manifest);
    assert_eq!(job.input.columns.prompt, "question");
    assert_eq!(job.prompt.system.as_deref(), Some(""));
    assert_eq!(job.prompt.template.as_deref(), Some("[INST] {{ question }} = ?"));
    assert_eq!(job.output, Path::new("/elsewhere"));
}

#[test]
fn paths_are_relative_to_the_job_file() {
    let root = tempfile::tempdir().unwrap();
    let root = std::fs::canonicalize(root.path()).unwrap();
    let folder = root.join("jobs [1]");
    std::fs::create_dir_all(folder.join("org/name")).unwrap();
    std::fs::write(folder.join("rows[1].jsonl"), "").unwrap();
    let read = |model: &str, manifest: &str| {
        let text = format!("[job]\noutput = \"../out\"\n[model]\npath = \"{model}\"\n[input]\nmanifest = \"{manifest}\"\n");
        std::fs::write(folder.join("job.toml"), text).unwrap();
        let job = Job::read(&folder.join("job.toml"), &[]).unwrap();
        assert_eq!(job.output, root.join("out"));
        (job.model.path, job.input.manifest[0].clone())
    };
    let at = |path: &str| folder.join(path).to_str().unwrap().to_owned();
    let above = |path: &str| root.join(path).to_str().unwrap().to_owned();

    assert_eq!(read("org/name", "rows.jsonl"), (at("org/name"), at("rows.jsonl")));
    assert_eq!(read("org/other", "./a/../rows.jsonl"), ("org/other".to_owned(), at("a/../rows.jsonl")));
    assert_eq!(read("../models/x.gguf", "../../rows.jsonl").0, above("models/x.gguf"));
    assert_eq!(read("models/x.gguf", "/rows.jsonl"), (at("models/x.gguf"), "/rows.jsonl".to_owned()));
    // A file is itself, whatever its name means as a pattern.
    assert_eq!(read("fake", "rows[1].jsonl"), ("fake".to_owned(), at("rows[1].jsonl")));
    // The folder's name is no part of the pattern.
    let (path, pattern) = read("./fake", "data/*.jsonl");
    assert_eq!(path, at("fake"));
    let glob = globset::Glob::new(&pattern).unwrap().compile_matcher();
    assert!(glob.is_match(at("data/a.jsonl")), "{pattern}");
    assert!(!glob.is_match(above("jobs 1/data/a.jsonl")), "{pattern}");
}

#[test]
fn hash_changes_with_what_changes_a_row() {
    let hash = |text: &str| read(&format!("{LEAST}{text}")).unwrap().settings_hash();
    let unchanged = hash("");
    let texts = [
        "columns = { id = \"q\" }",
        "columns = { prompt = \"q\" }",
        "columns = { messages = \"q\" }",
        "columns = { reference = \"q\" }",
        "columns = { audio = \"q\" }",
        "columns = { language = \"q\" }",
        "[audio]\nlong = \"truncate\"",
        "[audio]\nchannels = \"left\"",
        "[transcription]\ntask = \"translate\"",
        "[transcription]\nlanguage = \"en\"",
        "[transcription]\ntimestamps = false",
        "[transcription]\ninitial_prompt = \"en\"",
        "[transcription]\ntemperatures = [0]",
        "[transcription]\ncompression_ratio_threshold = 2",
        "[transcription]\ncompression_ratio_threshold = false",
        "[transcription]\nlogprob_threshold = -2",
        "[transcription]\nlogprob_threshold = false",
        "[transcription]\nno_speech_threshold = 0.5",
        "[transcription]\nno_speech_threshold = false",
        "[transcription]\nsuppress_tokens = []",
        "[transcription]\nsuppress_blank = false",
        "[transcription]\nmax_initial_timestamp = 2",
        "[prompt]\nsystem = \"\"",
        "[prompt]\ntemplate = \"\"",
        "[prompt]\nthinking = true",
        "[generation]\nmax_tokens = 255",
        "[generation]\ntemperature = 0.1",
        "[generation]\ntop_p = 0.1",
        "[generation]\ntop_k = 1",
        "[generation]\nmin_p = 0.1",
        "[generation]\nrepetition_penalty = 1.1",
        "[generation]\npenalty_context = 1",
        "[generation]\npresence_penalty = 0.1",
        "[generation]\nfrequency_penalty = 0.1",
        "[generation]\nlogit_bias = { 1 = 0.1 }",
        "[generation]\nstop = \"a\"",
        "[generation]\nstop = [\"a\", \"b\"]",
        "[generation]\nstop = [\"a, b\"]",
        "[generation]\nstop_token_ids = [1]",
        "[generation]\nignore_eos = true",
        "[generation]\nseed = 1",
        "[generation]\nlogprobs = 0",
        "[generation]\nlogprobs = 5",
        "[results]\ntoken_ids = true",
        "[results]\nkeep_columns = [\"a\"]",
    ];
    let mut hashes: Vec<u64> = texts.iter().map(|text| hash(text)).collect();
    let with = |settings: &[&str]| read_with(LEAST, settings).unwrap().settings_hash();
    hashes.extend([unchanged, with(&["model.path=a/b"]), with(&["model.dtype=float16"])]);
    let count = hashes.len();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), count);

    let settings = [
        "job.name=x",
        "job.output=/x",
        "model.device=cpu",
        "input.manifest=other.csv",
        "batching.rows=1",
        "batching.kv_budget=1MiB",
        "batching.prefill_chunk=1",
        "batching.prompt_concurrency=1",
        "batching.order=manifest",
        "batching.prefix_cache=false",
        "results.rows_per_part=1",
        "results.seconds_per_part=1",
        "generation.temperature=-0.0",
        "input.columns.audio=audio",
        "audio.long=split",
        "transcription.temperatures=[0, 0.2, 0.4, 0.6, 0.8, 1]",
        "transcription.compression_ratio_threshold=2.4",
    ];
    for setting in settings {
        assert_eq!(with(&[setting]), unchanged, "{setting}");
    }
}

/// Results on disk are matched by it: a change here makes every earlier run start anew.
#[test]
fn hash_stays_from_version_to_version() {
    assert_eq!(read(LEAST).unwrap().settings_hash(), 14_861_780_475_291_631_995);
}

#[test]
fn float32_survives() {
    for number in ["0.1", "0.7", "1e-6", "0.000001", "33.333333", "16.777217", "99.99999"] {
        let job = read_with(LEAST, &[&format!("generation.temperature={number}")]).unwrap();
        assert_eq!(job.generation.temperature, number.parse::<f32>().unwrap());
        assert_eq!(read(&job.effective_toml()).unwrap(), job);
    }
}

fn name() -> impl Strategy<Value = String> {
    "[^\\p{Cc}]{0,12}[^\\p{Cc}\\s]"
}

fn path() -> impl Strategy<Value = String> {
    name().prop_map(|name| format!("/{name}"))
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![any::<String>(), "[a'\"\\\\\r\n\t {}#\u{7f}\u{0}é]{0,20}"]
}

fn generation() -> impl Strategy<Value = Generation> {
    let penalties = (0.01..=100.0_f32, 1..=10_000_000_u32, -100.0..=100.0_f32, -100.0..=100.0_f32);
    let filters = (f32::MIN_POSITIVE..=1.0_f32, 0..=1_000_000_u32, 0.0..=1.0_f32);
    let temperature = prop_oneof![Just(0.0), 1e-6..=100.0_f32];
    let stops = (
        prop::collection::vec(text().prop_filter("a stop string is not empty", |text| !text.is_empty()), 0..4),
        prop::collection::vec(any::<u32>(), 0..4),
        prop::collection::btree_map(any::<u32>(), -100.0..=100.0_f32, 0..4),
    );
    let logprobs = prop::option::of(0..=20_u32);
    (1..=10_000_000_u32, temperature, filters, penalties, stops, (any::<bool>(), logprobs), 0..=i64::MAX as u64).prop_map(
        |(max_tokens, temperature, (top_p, top_k, min_p), penalties, (stop, stop_token_ids, logit_bias), others, seed)| {
            let (ignore_eos, logprobs) = others;
            let (repetition_penalty, penalty_context, presence_penalty, frequency_penalty) = penalties;
            Generation {
                max_tokens,
                temperature,
                top_p,
                top_k,
                min_p,
                repetition_penalty,
                penalty_context,
                presence_penalty,
                frequency_penalty,
                logit_bias,
                stop,
                stop_token_ids,
                ignore_eos,
                seed,
                logprobs,
            }
        },
    )
}

fn input() -> impl Strategy<Value = Input> {
    let manifest = prop::collection::vec(path().prop_map(|path| path + ".csv"), 1..3).prop_map(|manifest| (manifest, None, None));
    let folder = (path(), prop::option::of("[a-z*?./]{1,9}"))
        .prop_map(|(folder, glob)| (Vec::new(), Some(PathBuf::from(format!("/in{folder}"))), glob));
    (prop_oneof![manifest, folder], prop::collection::hash_set(name(), 7)).prop_map(|((manifest, folder, glob), names)| {
        let mut names = names.into_iter();
        let mut name = || names.next().unwrap();
        Input {
            manifest,
            folder,
            glob,
            columns: Columns {
                id: name(),
                prompt: name(),
                messages: name(),
                reference: name(),
                audio: name(),
                image: name(),
                language: name(),
            },
        }
    })
}

fn audio() -> impl Strategy<Value = Audio> {
    let long = prop::sample::select(vec![Long::Split, Long::Truncate]);
    let channels = prop::sample::select(vec![Channels::Mix, Channels::Left, Channels::Right]);
    (long, channels).prop_map(|(long, channels)| Audio { long, channels })
}

fn transcription() -> impl Strategy<Value = Transcription> {
    let texts = (prop::option::of("[^\\p{Cc}]{0,12}[^\\p{Cc}\\s]"), prop::option::of(text()));
    let thresholds = (
        prop::option::of(f32::MIN_POSITIVE..=100.0_f32),
        prop::option::of(-100.0..=0.0_f32),
        prop::option::of(0.0..=1.0_f32),
        0.0..=30.0_f32,
    );
    let temperatures = prop::collection::vec(0.0..=1.0_f32, 1..=16);
    let tokens = prop::collection::vec(-1..=i64::from(u32::MAX), 0..4);
    let task = prop::sample::select(vec![SpeechTask::Transcribe, SpeechTask::Translate]);
    let lists = (temperatures, tokens);
    (task, texts, thresholds, lists, any::<bool>(), any::<bool>()).prop_map(
        |(task, (language, initial_prompt), thresholds, (temperatures, suppress_tokens), timestamps, suppress_blank)| {
            let (compression_ratio_threshold, logprob_threshold, no_speech_threshold, max_initial_timestamp) = thresholds;
            Transcription {
                task,
                language,
                timestamps,
                initial_prompt,
                temperatures,
                compression_ratio_threshold,
                logprob_threshold,
                no_speech_threshold,
                suppress_tokens,
                suppress_blank,
                max_initial_timestamp,
            }
        },
    )
}

fn job() -> impl Strategy<Value = Job> {
    let model = (
        prop_oneof![path(), Just("fake".to_owned()), Just("org/name-1.5_x".to_owned())],
        prop::sample::select(vec![Device::Auto, Device::Gpu, Device::Cpu]),
        prop::sample::select(vec![Dtype::Auto, Dtype::Float32, Dtype::Bfloat16, Dtype::Float16]),
    );
    let prompt = (prop::option::of(text()), prop::option::of(text()), any::<bool>())
        .prop_map(|(system, template, thinking)| Prompt { system, template, thinking });
    let budget = prop_oneof![
        Just(KvBudget::Auto),
        (1..=1_u64 << 50).prop_map(KvBudget::Bytes),
        (0..=50_u32).prop_map(|bits| KvBudget::Bytes(1 << bits)),
    ];
    let order = prop::sample::select(vec![Order::Length, Order::Manifest]);
    let batching = (1..=65_536_u32, budget, 1..=1_000_000_u32, 1..=65_536_u32, order, any::<bool>()).prop_map(
        |(rows, kv_budget, prefill_chunk, prompt_concurrency, order, prefix_cache)| Batching {
            rows,
            kv_budget,
            prefill_chunk: Some(prefill_chunk),
            prompt_concurrency: Some(prompt_concurrency),
            order,
            prefix_cache,
        },
    );
    let results = (any::<bool>(), prop::collection::hash_set(name(), 0..4), 1..=10_000_000_u32, 1..=86_400_u32).prop_map(
        |(token_ids, keep_columns, rows_per_part, seconds_per_part)| Results {
            token_ids,
            keep_columns: keep_columns.into_iter().collect(),
            rows_per_part,
            seconds_per_part,
        },
    );
    let speech = (audio(), transcription());
    (name(), path(), model, input(), prompt, generation(), batching, speech, results).prop_map(
        |(name, output, (path, device, dtype), input, prompt, generation, batching, (audio, transcription), results)| Job {
            file: "/jobs/job.toml".into(),
            name,
            output: PathBuf::from(format!("/out{output}")),
            model: Model { path, device, dtype },
            input,
            prompt,
            generation,
            batching,
            audio,
            transcription,
            results,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn effective_job_is_the_job(job in job()) {
        let toml = job.effective_toml();
        let back = Job::parse(Path::new("/elsewhere/job.toml"), &toml, &[]);
        let back = back.map_err(|error| TestCaseError::fail(format!("{error}\n{toml}")))?;
        prop_assert_eq!(back.settings_hash(), job.settings_hash());
        prop_assert_eq!(back.effective_toml(), toml);
        prop_assert_eq!(Job { file: job.file.clone(), ..back }, job);
    }
}
