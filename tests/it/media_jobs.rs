//! Jobs whose rows have images and recordings: the shipped ones, and rows of every mixture, through whole runs.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    kill::killed_often,
    program::{Ended, FAILED, OK, Project, Results, SOME_ROWS_FAILED, checkpoint, program, read_back},
    prompt::models,
    speech::{bursts, repository, wav},
};

/// A shipped job in a folder of its own, with what it reads in the places where it looks.
struct Shipped {
    folder: tempfile::TempDir,
    job: PathBuf,
}

impl Shipped {
    fn new(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("jobs")).unwrap();
        let beside = match name {
            "audio-describe" => Some("speech.jsonl"),
            "calibration" => Some("quickstart.jsonl"),
            _ => None,
        };
        let files = [Some(format!("{name}.toml")), beside.map(str::to_owned)];
        for file in files.into_iter().flatten() {
            fs::copy(repository(&format!("jobs/{file}")), folder.path().join("jobs").join(file)).unwrap();
        }
        let job = folder.path().join(format!("jobs/{name}.toml"));
        Self { folder, job }
    }

    fn put(&self, path: &str, content: &[u8]) {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn images(&self, names: &[&str]) {
        for name in names {
            self.put(&format!(".data/coco/val2017/{name}"), &fs::read(repository("fixtures/images").join(name)).unwrap());
        }
    }

    /// A recording at every place that the manifest names: `content` of its place in the manifest.
    fn recordings(&self, content: impl Fn(usize, &str) -> Vec<u8>) {
        let manifest = fs::read_to_string(repository("jobs/speech.jsonl")).unwrap();
        for (place, line) in manifest.lines().enumerate() {
            let row: Value = serde_json::from_str(line).unwrap();
            let path = row["audio"].as_str().unwrap().strip_prefix("../").unwrap();
            self.put(path, &content(place, path));
        }
    }

    fn check(&self, model: &str) -> Ended {
        let model = format!("model.path={model}");
        Ended::of(program(["check", self.job.to_str().unwrap(), "--json", "--set", &model]).output().unwrap())
    }

    fn run(&self, model: &str) -> Ended {
        let model = format!("model.path={model}");
        let sets = ["--set", &model, "--set", "model.dtype=float32", "--set", "model.device=cpu", "--json"];
        Ended::of(program(["run", self.job.to_str().unwrap()].iter().chain(&sets)).output().unwrap())
    }

    fn results(&self, name: &str) -> Results {
        Results::read(&self.folder.path().join("out").join(name))
    }
}

/// A folder that says of itself that it has both towers: enough for whatever needs no weights. `<start_of_turn>` stands for an
/// image, and `<end_of_turn>` for a recording.
fn model_without_weights() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = PathBuf::from(checkpoint("gemma4_text"));
    for name in ["model.safetensors", "tokenizer.json"] {
        fs::copy(text.join(name), folder.path().join(name)).unwrap();
    }
    let read = |name: &str| serde_json::from_str::<Value>(&fs::read_to_string(text.join(name)).unwrap()).unwrap();
    let (mut config, mut tokenizer) = (read("config.json"), read("tokenizer_config.json"));
    config["max_position_embeddings"] = json!(8192);
    for (name, token) in [("image_token_id", 3), ("audio_token_id", 4)] {
        config[name] = json!(token);
    }
    tokenizer["chat_template"] = json!(
        "{{ bos_token }}{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}\
         {% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}<start_of_turn>{% else %}<end_of_turn>{% endif %}\
         {% endfor %}{% endif %}{% endfor %}"
    );
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), tokenizer.to_string()).unwrap();
    let header = json!({
        "vision_tower.x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "audio_tower.x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    })
    .to_string();
    let towers = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 8]].concat();
    fs::write(folder.path().join("optiq_vision.safetensors"), towers).unwrap();
    folder
}

#[test]
fn the_shipped_jobs_with_media_run_dry() {
    let folder = model_without_weights();
    let model = folder.path().to_str().unwrap();
    let captions = Shipped::new("coco-captions");
    captions.images(&["grey.jpg", "turned6.jpg", "cmyk.jpg", "rgb8.png"]);
    let found = captions.check(model).with(OK).json();
    let stored: u64 = ["grey.jpg", "turned6.jpg", "cmyk.jpg"]
        .map(|name| fs::metadata(repository("fixtures/images").join(name)).unwrap().len())
        .iter()
        .sum();
    assert_eq!((&found["rows_good"], &found["images"], &found["image_bytes"]), (&json!(3), &json!(3), &json!(stored)), "{found}");
    let shown = found["prompts"][0]["prompt"].as_str().unwrap();
    assert_eq!(shown, "<bos><start_of_turn>Describe this image in one sentence.");
    let (prompt, row) = (found["prompt_tokens_max"].as_u64().unwrap(), found["row_tokens_max"].as_u64().unwrap());
    assert_eq!(row, prompt + 63 + 281, "max_tokens, the last never stored, and 280 soft tokens between two for one that was there");

    let text =
        Ended::of(program(["check", captions.job.to_str().unwrap(), "--set", &format!("model.path={model}")]).output().unwrap());
    let text = text.with(OK).stdout;
    assert!(text.contains("  images       3, ") && text.contains("each image and recording counted as one"), "{text}");

    let describe = Shipped::new("audio-describe");
    describe.recordings(|place, _| wav(&bursts(1.0, place)));
    let found = describe.check(model).with(OK).json();
    assert_eq!((&found["rows_good"], &found["recordings"], &found["images"]), (&json!(5), &json!(5), &json!(0)), "{found}");
    assert_eq!(found["recording_bytes"], 5 * (44 + 2 * 16_000));
    fs::remove_file(describe.folder.path().join(".models/speech/0890.wav")).unwrap();
    let found = describe.check(model).with(SOME_ROWS_FAILED).json();
    let sentence = found["bad_rows"][0][1].as_str().unwrap();
    assert!(sentence.ends_with("0890.wav: the file does not exist; correct its path, or make the file first"), "{found}");

    let calibration = Shipped::new("calibration");
    let found = calibration.check(model).with(OK).json();
    assert_eq!((&found["rows_good"], &found["images"], &found["recordings"]), (&json!(60), &json!(0), &json!(0)), "{found}");
    // A model that neither sees nor hears says so of every row, before anything is computed.
    let found = captions.check(&checkpoint("gemma4_text")).with(SOME_ROWS_FAILED).json();
    assert!(found["bad_rows"][0][1].as_str().unwrap().contains("gemma4_text sees none"), "{found}");
    assert_eq!(found["rows_bad"], 3);
}

/// `check` of a manifest, as text and as JSON.
fn checked(model: &Path, rows: &[Value], sections: &str) -> (String, Value) {
    let project = Project::new(model.to_str().unwrap(), rows, sections);
    fs::write(project.path("a.png"), fs::read(repository("fixtures/images/rgb8.png")).unwrap()).unwrap();
    fs::write(project.path("empty.png"), b"").unwrap();
    fs::create_dir(project.path("folder.wav")).unwrap();
    let text = project.ended(["check", "job.toml"]).stdout;
    (text, project.ended(["check", "job.toml", "--json"]).json())
}

#[test]
fn check_says_what_the_context_has_room_for() {
    let folder = model_without_weights();
    let rows = |words: [u64; 3]| words.map(|words| json!({"id": words, "image": "a.png", "prompt": "a ".repeat(words as usize)}));
    let (_, found) = checked(folder.path(), &rows([100, 200, 300]), "[generation]\nmax_tokens = 40\n");
    assert_eq!((&found["context_tokens"], &found["rows_perhaps_too_long"]), (&json!(8192), &json!(0)));
    let tokens = |row: usize| found["prompts"][row]["tokens"].as_u64().unwrap();
    // One with room for 100 soft tokens, where an image has 280 at most, and one with room for none.
    let words = (8192 - 40 - 100 - tokens(0)) * 100 / (tokens(1) - tokens(0)) + 100;
    let rows = rows([100, words, 2 * words]);
    let (text, found) = checked(folder.path(), &rows, "[generation]\nmax_tokens = 40\n");
    assert_eq!(
        (&found["rows_good"], &found["rows_bad"], &found["rows_perhaps_too_long"]),
        (&json!(2), &json!(1), &json!(1)),
        "{found}"
    );
    assert!(found["bad_rows"][0][1].as_str().unwrap().contains("the prompt has at least "), "{found}");
    assert!(text.contains("  too long?    1 row: over the context of 8192 tokens, if images"), "{text}");
}

#[test]
fn check_words_faults_of_media_as_a_run_does() {
    let folder = model_without_weights();
    let row = |id: &str, column: &str, path: &str| json!({"id": id, "prompt": "x", column: path});
    let rows = [
        row("missing", "image", "no.png"),
        row("empty", "image", "empty.png"),
        row("folder", "audio", "folder.wav"),
        row("url", "image", "https://x.org/a.png"),
    ];
    let (_, found) = checked(folder.path(), &rows, "");
    let expected = [
        "no.png: the file does not exist; correct its path, or make the file first",
        "empty.png: the file is empty (0 bytes); it was perhaps never downloaded or written",
        "folder.wav: the path is a folder; name the file in it",
        "`https://x.org/a.png` in `image` is a URL, and none is fetched; download it and write its path",
    ];
    for (place, expected) in expected.iter().enumerate() {
        assert!(found["bad_rows"][place][1].as_str().unwrap().ends_with(expected), "{found}");
    }
    assert_eq!(found["rows_bad"], 4);
}

/// Gives another last letter to a tensor whose name ends so.
fn rename_one(weights: &Path, name: &str) {
    let mut bytes = fs::read(weights).unwrap();
    let at = bytes.windows(name.len()).position(|window| window == name.as_bytes()).unwrap();
    bytes[at + name.len() - 1] = b'x';
    fs::write(weights, bytes).unwrap();
}

#[test]
fn check_finds_tensors_that_loading_would_miss() {
    let folder = model_without_weights();
    rename_one(&folder.path().join("model.safetensors"), "q_norm.weight");
    let project = Project::new(folder.path().to_str().unwrap(), &[json!({"id": 1, "prompt": "x"})], "");
    let found = project.ended(["check", "job.toml", "--json"]).with(FAILED).json();
    let fault = found["weights_fault"].as_str().unwrap();
    assert!(fault.contains("q_norm.weight is missing") && fault.contains("q_norm.weighx is not part of this family"), "{fault}");
    assert_eq!(found["rows_good"], 1, "rows are looked at all the same");
    let run = project.ended(["run", "job.toml"]).with(FAILED).stderr;
    assert!(fault.lines().all(|line| run.contains(line.trim())), "{fault}\n{run}");
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn check_finds_what_is_missing_of_a_tower() {
    let Some(model) = gemma4("check_finds_what_is_missing_of_a_tower", "e2b") else { return };
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(&model).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let rows = [json!({"id": 1, "prompt": "x"})];
    let project = Project::new(folder.path().to_str().unwrap(), &rows, "");
    assert!(project.ended(["check", "job.toml", "--json"]).with(OK).json()["weights_fault"].is_null());
    rename_one(&folder.path().join("model.safetensors"), "vision_tower.encoder.layers.0.self_attn.q_norm.weight");
    let found = project.ended(["check", "job.toml", "--json"]).with(FAILED).json();
    let fault = found["weights_fault"].as_str().unwrap();
    assert!(fault.contains("vision_tower.encoder.layers.0.self_attn.q_norm.weight is missing"), "{fault}");
    let run = project.ended(["run", "job.toml"]).with(FAILED).stderr;
    assert!(fault.lines().all(|line| run.contains(line.trim())), "{fault}\n{run}");
}

#[test]
fn a_template_with_single_braces_is_noted_and_typed_placeholders_are_told_apart() {
    let folder = model_without_weights();
    let row = json!({"id": 1, "q": "why <start_of_turn>?", "image": "a.png"});
    let (text, found) = checked(folder.path(), &[row], "[prompt]\ntemplate = \"{q} {{ q }}\"\n");
    let note =
        "prompt.template has {q}, which stays in the prompt as it is written: to have the column \"q\" filled in, write {{ q }}";
    assert_eq!(found["notes"], json!([note]));
    assert!(text.contains(&format!("  note         {note}\n")), "{text}");
    assert_eq!(found["prompts"][0]["prompt"], "<bos><start_of_turn>{q} why <start_of_turn>?");
    assert!(text.contains("| <bos><start_of_turn>{q} why ⟦<start_of_turn>⟧?\n  ⟦…⟧: text of the row that reads like"), "{text}");
    let project = Project::new("fake", &[json!({"id": 1, "q": "x"})], "[prompt]\ntemplate = \"{q} {{ q }}\"\n");
    let run = project.ended(["run", "job.toml"]).with(OK).stderr;
    assert_eq!(run.matches(note).count(), 1, "{run}");
}

/// A checkpoint of `fixtures/make_gemma4.py`.
fn gemma4(test: &str, name: &str) -> Option<String> {
    let folder = env::var_os("MLXBATCH_FIXTURES").map_or_else(|| repository(".fixtures"), PathBuf::from).join("gemma4").join(name);
    if !folder.is_dir() {
        println!("skipped: {test} needs {}: run `make fixtures`", folder.display());
        return None;
    }
    Some(folder.to_str().unwrap().to_owned())
}

/// Pictures of `fixtures/fetch_photographs.sh`.
fn photographs(test: &str) -> Vec<PathBuf> {
    let Some(last) = models(test, "photographs/retina.jpg") else { return Vec::new() };
    let mut found: Vec<PathBuf> = fs::read_dir(last.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

fn columns_sound(row: &Value) {
    let (prompt, completion) = (row["prompt_tokens"].as_u64().unwrap(), row["completion_tokens"].as_u64().unwrap());
    let soft = row["image_tokens"].as_u64().unwrap() + row["audio_tokens"].as_u64().unwrap();
    assert!(prompt > soft && completion > 0, "{row}");
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn images_of_a_folder_are_captioned() {
    let test = "images_of_a_folder_are_captioned";
    let Some(model) = gemma4(test, "e2b") else { return };
    let job = Shipped::new("coco-captions");
    let committed = ["cmyk.jpg", "grey.jpg", "progressive.jpg", "turned6.jpg", "ycbcr420.jpg", "ycck.jpg"];
    job.images(&committed);
    let mut good = committed.len();
    for path in photographs(test) {
        let name = path.file_stem().unwrap().to_str().unwrap();
        job.put(&format!(".data/coco/val2017/real/{name}.jpg"), &fs::read(&path).unwrap());
        good += 1;
    }
    let whole = fs::read(repository("fixtures/images/rgb8.png")).unwrap();
    job.put(".data/coco/val2017/cut.jpg", &whole[..whole.len() / 2]);
    job.put(".data/coco/val2017/page.jpg", b"<html><body>not found</body></html>");
    let summary = job.run(&model).with(SOME_ROWS_FAILED).json();
    assert_eq!((&summary["rows_ok"], &summary["rows_failed"]), (&json!(good), &json!(2)), "{summary}");
    let results = job.results("coco-captions");
    for row in results.rows.values().filter(|row| row["status"] == "ok") {
        columns_sound(row);
        assert!((1..=70).contains(&row["image_tokens"].as_u64().unwrap()) && row["audio_tokens"] == 0, "{row}");
        assert_eq!(row["path"], row["id"]);
        assert!(!row["text"].as_str().unwrap().contains('\n'), "{row}");
    }
    for (id, sentence) in [("cut.jpg", "cut.jpg: "), ("page.jpg", "page.jpg: ")] {
        let row = results.row(id);
        assert!(row["error_stage"] == "media" && row["error"].as_str().unwrap().contains(sentence), "{row}");
    }
    read_back(&job.folder.path().join("out/coco-captions"), good + 2);
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn recordings_of_a_manifest_are_described() {
    let test = "recordings_of_a_manifest_are_described";
    let Some(model) = gemma4(test, "e2b") else { return };
    let job = Shipped::new("audio-describe");
    let sounds = ["flac-44100-stereo.flac", "mp3-8000.mp3", "opus-48000.opus", "aac-22050.aac"];
    // Real speech where it has been fetched, and the shipped sounds where not; the last goes on for 32 seconds.
    job.recordings(|place, path| match models(test, &format!("speech/{}", path.rsplit('/').next().unwrap())) {
        _ if place == 4 => wav(&bursts(32.0, 1)),
        Some(clip) => fs::read(clip).unwrap(),
        None => fs::read(repository("fixtures/audio").join(sounds[place])).unwrap(),
    });
    let summary = job.run(&model).with(OK).json();
    assert_eq!((&summary["rows_ok"], &summary["audio"]["rows"]), (&json!(5), &json!(5)), "{summary}");
    assert_eq!(summary["rows_with_notes"], 1, "{summary}");
    assert!(summary["mean_ms"]["media_ms"].as_f64().unwrap() > 0.0, "{summary}");
    assert!(summary["mean_ms"]["encode_ms"].as_f64().unwrap() > 0.0, "{summary}");
    let results = job.results("audio-describe");
    for row in results.rows.values() {
        columns_sound(row);
        assert!(row["image_tokens"] == 0 && row["language"].is_null() && row["segments"] == json!([]), "{row}");
        let (tokens, seconds) = (row["audio_tokens"].as_f64().unwrap(), row["audio_seconds"].as_f64().unwrap());
        assert!((tokens - seconds * 25.0).abs() <= 1.0, "a soft token for 40 ms: {row}");
    }
    let long = results.row("0930");
    assert_eq!((&long["audio_tokens"], &long["audio_seconds"]), (&json!(750), &json!(30.0)), "{long}");
    assert_eq!(long["notes"], json!(["heard up to 30.0 s: what is behind is left out (audio.long)"]));
    read_back(&job.folder.path().join("out/audio-describe"), 5);
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn calibration_text_comes_with_its_token_ids() {
    let Some(model) = gemma4("calibration_text_comes_with_its_token_ids", "e2b") else { return };
    let job = Shipped::new("calibration");
    let summary = job.run(&model).with(OK).json();
    assert_eq!(summary["rows_ok"], 60, "{summary}");
    let mut distinct = std::collections::BTreeSet::new();
    for row in job.results("calibration").rows.values() {
        let ids = row["token_ids"].as_array().unwrap();
        assert_eq!(row["completion_tokens"], ids.len(), "{row}");
        assert!(row["category"].is_string() && !ids.is_empty(), "{row}");
        let logprobs = row["logprobs"].as_array().unwrap();
        assert!(logprobs.iter().map(|token| &token["token_id"]).eq(ids), "{row}");
        assert!(logprobs.iter().all(|token| token["top"].as_array().unwrap().len() == 5), "{row}");
        distinct.extend(ids.iter().map(|id| id.as_u64().unwrap()));
    }
    assert!(distinct.len() > 200, "only {} tokens of 512 were sampled", distinct.len());
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let bits = (0..3).fold(0u32, |bits, at| bits << 8 | u32::from(*three.get(at).unwrap_or(&0)));
        for at in 0..4 {
            let letter = char::from(LETTERS[(bits >> (18 - 6 * at)) as usize & 63]);
            text.push(if at <= three.len() { letter } else { '=' });
        }
    }
    text
}

const SAY: &str = "Say what there is.";

/// Rows of text, images, recordings and both, in columns and in messages, and rows that fail: (id, stage, part of the sentence).
fn mixture(project: &Project, test: &str) -> (Vec<Value>, Vec<(&'static str, &'static str, &'static str)>) {
    let image = |name: &str| repository("fixtures/images").join(name);
    let sound = |name: &str| repository("fixtures/audio").join(name);
    let bytes = |path: &Path| base64(&fs::read(path).unwrap());
    let (wide, tall) = (image("wide.png"), image("tall.png"));
    let whole = fs::read(image("rgba8.png")).unwrap();
    fs::write(project.path("cut.png"), &whole[..whole.len() / 2]).unwrap();
    fs::write(project.path("long.wav"), wav(&bursts(31.0, 2))).unwrap();
    fs::write(project.path("second.wav"), wav(&bursts(2.5, 3))).unwrap();
    let url = |url: String| json!({"type": "image_url", "image_url": {"url": url}});
    let of_parts = |parts: Value| json!([{"role": "user", "content": parts}]);
    let data = |path: &Path| url(format!("data:image/png;base64,{}", bytes(path)));
    let text = |text: &str| json!({"type": "text", "text": text});
    let heard = json!({"type": "input_audio", "input_audio": {"data": bytes(&sound("mp3-8000.mp3")), "format": "mp3"}});
    let mut rows = vec![
        json!({"id": "text", "prompt": SAY}),
        json!({"id": "image", "prompt": SAY, "image": wide}),
        json!({"id": "other_image", "prompt": SAY, "image": {"bytes": bytes(&tall)}}),
        json!({"id": "images", "prompt": SAY, "image": [wide, tall]}),
        json!({"id": "audio", "prompt": SAY, "audio": sound("flac-44100-stereo.flac")}),
        json!({"id": "both", "prompt": SAY, "image": wide, "audio": sound("flac-44100-stereo.flac")}),
        json!({"id": "two", "messages": of_parts(json!([data(&wide), url(tall.to_str().unwrap().into()), text(SAY)]))}),
        json!({"id": "parts", "messages": of_parts(json!([heard, text("and"), data(&tall), text("?")]))}),
        json!({"id": "second", "prompt": SAY, "audio": "second.wav"}),
        json!({"id": "cut", "prompt": SAY, "image": "cut.png"}),
        json!({"id": "remote", "messages": of_parts(json!([url("https://example.org/a.png".into()), text(SAY)]))}),
        json!({"id": "long", "prompt": SAY, "audio": "long.wav"}),
        json!({"id": "none", "prompt": SAY, "image": "none.png"}),
    ];
    for path in photographs(test) {
        rows.push(json!({"id": path.file_stem().unwrap().to_str().unwrap(), "prompt": SAY, "image": path}));
    }
    let failing = vec![
        ("cut", "media", "cut.png: "),
        ("remote", "manifest", "`https://example.org/a.png` in `messages` is a URL, and none is fetched"),
        ("long", "media", "longer than the 30 s that the model hears of one"),
        ("none", "media", "none.png"),
    ];
    (rows, failing)
}

fn project(model: &str, rows: &[Value], sections: &str) -> Project {
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    Project::with_manifest(model, &lines, &format!("[generation]\nmax_tokens = 24\n{sections}"))
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn rows_of_every_mixture_are_alone_what_they_are_among_others() {
    let test = "rows_of_every_mixture_are_alone_what_they_are_among_others";
    let Some(model) = gemma4(test, "e2b") else { return };
    let project = project(&model, &[], "[results]\ntoken_ids = true\n");
    let (rows, failing) = mixture(&project, test);
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    project.write("manifest.jsonl", &lines);
    for (out, more) in [("alone", "batching.rows=1"), ("together", "batching.rows=8"), ("chunked", "batching.prefill_chunk=40")] {
        project.run(&["--output", out, "--set", more]).with(SOME_ROWS_FAILED);
    }
    let alone = project.results("alone");
    project.results("together").assert_same(&alone, "8 rows");
    project.results("chunked").assert_same(&alone, "chunks of 40");
    assert_eq!(alone.failed().count(), failing.len());
    for (id, stage, sentence) in failing {
        // By its place: a row that the manifest itself has wrong goes by its line.
        let row = &alone.rows[&(rows.iter().position(|row| row["id"] == id).unwrap() as u64)];
        assert!(row["error_stage"] == stage && row["error"].as_str().unwrap().contains(sentence), "{row}");
        assert!(row["image_tokens"] == 0 && row["audio_tokens"] == 0, "{row}");
    }
    let count = |id: &str, column: &str| alone.row(id)[column].as_u64().unwrap();
    let prompt = |id: &str| count(id, "prompt_tokens");
    let (wide, tall, heard) =
        (count("image", "image_tokens"), count("other_image", "image_tokens"), count("audio", "audio_tokens"));
    assert!(wide > 0 && wide <= 70 && tall > 0 && tall <= 70 && (12..=13).contains(&heard), "{wide} {tall} {heard}");
    // Soft tokens stand between a token that begins and one that ends them.
    for (id, image_tokens, audio_tokens, media) in [
        ("text", 0, 0, 0),
        ("image", wide, 0, 1),
        ("other_image", tall, 0, 1),
        ("images", wide + tall, 0, 2),
        ("audio", 0, heard, 1),
        ("both", wide, heard, 2),
        ("two", wide + tall, 0, 2),
    ] {
        assert_eq!((count(id, "image_tokens"), count(id, "audio_tokens")), (image_tokens, audio_tokens), "{id}");
        assert_eq!(prompt(id), prompt("text") + image_tokens + audio_tokens + 2 * media, "{id}");
    }
    let times = project.ended(["show", "alone", "--json", "--columns", "id,status,media_ms,encode_ms,prefill_ms"]).with(OK).stdout;
    for row in times.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).filter(|row| row["status"] == "ok") {
        let [media, encode, prefill] = ["media_ms", "encode_ms", "prefill_ms"].map(|name| row[name].as_f64().unwrap());
        // A whole prompt is computed in one step here, which is told once.
        assert_eq!(
            (media > 0.0, encode > 0.0, prefill > 0.0),
            if row["id"] == "text" { (false, false, true) } else { (true, true, false) },
            "{row}"
        );
    }
    assert_eq!((count("parts", "image_tokens"), count("parts", "audio_tokens") > 0), (tall, true));
    assert_eq!(alone.row("second")["audio_seconds"], 2.5);
    assert!(alone.row("image")["audio_seconds"].is_null() && alone.row("image")["segments"].is_null());
    // The same prompt by other ways.
    assert_eq!(alone.row("two")["token_ids"], alone.row("images")["token_ids"]);
    let ids = |id: &str| &alone.row(id)["token_ids"];
    let different = [ids("text"), ids("image"), ids("other_image"), ids("images"), ids("audio"), ids("both"), ids("second")];
    for (at, own) in different.iter().enumerate() {
        assert!(!different[..at].contains(own), "what is seen and heard changes what is said: {different:?}");
    }
    read_back(&project.path("alone"), rows.len());
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn a_model_without_an_audio_tower_fails_rows_that_it_would_have_to_hear() {
    let test = "a_model_without_an_audio_tower_fails_rows_that_it_would_have_to_hear";
    let Some(model) = gemma4(test, "moe") else { return };
    let project = project(&model, &[], "");
    let (rows, _) = mixture(&project, test);
    let rows: Vec<&Value> =
        rows.iter().filter(|row| ["text", "image", "two", "audio", "both", "parts"].contains(&id(row))).collect();
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    project.write("manifest.jsonl", &lines);
    project.run(&[]).with(SOME_ROWS_FAILED);
    let results = project.results("out");
    for row in results.rows.values() {
        if ["audio", "both", "parts"].contains(&id(row)) {
            let error = row["error"].as_str().unwrap();
            assert!(row["error_stage"] == "prompt" && error.contains("moe hears none (its files hold no audio tower)"), "{row}");
        } else {
            assert_eq!(row["status"], "ok", "{row}");
        }
    }
    assert_eq!((results.len(), results.failed().count()), (6, 3));
}

fn id(row: &Value) -> &str {
    row["id"].as_str().unwrap()
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn kills_with_images_and_recordings() {
    let test = "kills_with_images_and_recordings";
    let Some(model) = gemma4(test, "e2b") else { return };
    let project = project(&model, &[], "[batching]\nrows = 8\n[results]\nrows_per_part = 10\ntoken_ids = true\n");
    let (rows, failing) = mixture(&project, test);
    let lines: String = (0..96)
        .map(|number| {
            let mut row = rows[number % rows.len()].clone();
            row["id"] = json!(format!("{}-{number}", id(&row)));
            format!("{row}\n")
        })
        .collect();
    project.write("manifest.jsonl", &lines);
    killed_often(&project, 6, SOME_ROWS_FAILED);
    let results = project.results("out");
    assert!(results.failed().count() >= failing.len() * (96 / rows.len()));
    read_back(&project.path("out"), 96);
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn bench_measures_towers_and_stages() {
    let Some(model) = gemma4("bench_measures_towers_and_stages", "dense") else { return };
    let folder = tempfile::tempdir().unwrap();
    for name in ["rgb8.png", "cmyk.jpg", "lossy.webp"] {
        fs::copy(repository("fixtures/images").join(name), folder.path().join(name)).unwrap();
    }
    fs::write(folder.path().join("sound.wav"), wav(&bursts(2.0, 1))).unwrap();
    fs::write(folder.path().join("notes.txt"), "not a medium").unwrap();
    let bench = |media: &str, more: &[&str]| {
        let settings = ["bench", &model, "--device", "cpu", "--media", media, "--prompts", "9", "--prompt-tokens", "3..9"];
        let settings = [settings.as_slice(), &["--new-tokens", "4", "--rows", "1,4", "--repeat", "1"], more].concat();
        Ended::of(program(&settings).output().unwrap())
    };
    let report = bench(folder.path().to_str().unwrap(), &["--json"]).with(OK).json();
    let towers = report["media"]["towers"].as_array().unwrap();
    assert_eq!(towers.iter().map(|tower| tower["count"].as_u64().unwrap()).collect::<Vec<_>>(), [7, 2], "{report}");
    let mut soft_tokens = 0.0;
    for tower in towers {
        let number = |name: &str| tower[name].as_f64().unwrap();
        soft_tokens += number("count") * number("soft_tokens_mean");
        assert!(number("one_by_one_ms") > 0.0 && number("together_ms") > 0.0, "{tower}");
        assert!((number("ratio") - number("one_by_one_ms") / number("together_ms")).abs() < 1e-9, "{tower}");
        assert!(number("one_scratch_bytes") > 0.0 && number("one_predicted_bytes") > 0.0, "{tower}");
    }
    let prompt_tokens = report["workload"]["prompt_tokens"].as_f64().unwrap();
    // Each row has its own tokens too, and two that begin and end its medium.
    assert!(prompt_tokens >= soft_tokens + 9.0 * 5.0 && prompt_tokens <= soft_tokens + 9.0 * 11.0, "{report}");
    for result in report["results"].as_array().unwrap() {
        let stages = ["encode_seconds", "prompt_seconds", "decode_seconds"].map(|name| result[name].as_f64().unwrap());
        assert!(stages.iter().all(|seconds| *seconds > 0.0), "{result}");
        assert!(stages.iter().sum::<f64>() <= result["wall_seconds"].as_f64().unwrap() * 1.01, "{result}");
    }
    let table = bench(folder.path().to_str().unwrap(), &[]).with(OK).stdout;
    for part in ["media read and decoded: ", "7 images of ", "2 recordings of ", "times as fast)", "media encoded, s"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    fs::write(folder.path().join("broken.png"), "no image").unwrap();
    bench(folder.path().to_str().unwrap(), &[]).with(crate::program::USAGE).saying(&["broken.png"]);
}
