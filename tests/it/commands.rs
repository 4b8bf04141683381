//! What each command says, and how it ends.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::program::{
    Ended, FAILED, INTERRUPTED, OK, Project, SOME_ROWS_FAILED, USAGE, checkpoint, parts, program, read_back, wait,
};

fn ended<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Ended {
    Ended::of(program(arguments).output().unwrap())
}

fn tides(count: u64) -> Vec<Value> {
    (0..count).map(|number| json!({"id": format!("r{number}"), "prompt": "tide ".repeat(1 + number as usize % 9)})).collect()
}

const SHORT: &str = "[generation]\nmax_tokens = 12\n";

#[test]
fn exit_statuses() {
    let good = Project::new("fake", &tides(5), SHORT);
    assert_eq!(good.run(&[]).with(OK).stdout, "", "results go to files");

    let mut rows = tides(5);
    rows.push(json!({"id": "bad"}));
    let some = Project::new("fake", &rows, SHORT);
    some.run(&[]).with(SOME_ROWS_FAILED).saying(&["manifest.jsonl:6", "neither a column \"prompt\" nor a column \"messages\""]);
    // A resume that finds all done says the same.
    some.run(&[]).with(SOME_ROWS_FAILED).saying(&["6 done before"]);

    let all = Project::with_manifest("fake", "{\n[]\n{\"id\": 1}\n", SHORT);
    all.run(&[]).with(SOME_ROWS_FAILED);
    assert_eq!(all.results("out").failed().count(), 3);
    assert!(all.path("out/_SUCCESS").exists());
    read_back(&all.path("out"), 3);

    good.run(&["--set", "generation.max_token=3"]).with(USAGE).saying(&["generation.max_token", "max_tokens"]);
    good.ended(["run", "absent.toml"]).with(USAGE).saying(&["absent.toml", "No such file"]);
    good.ended(["run"]).with(USAGE);
    good.run(&["--set", "model.path='absent.gguf'", "--output", "o"]).with(FAILED).saying(&["absent.gguf"]);
    good.run(&["--set", "input.manifest='absent.jsonl'"]).with(USAGE).saying(&["absent.jsonl", "does not exist"]);
    let template = ["--set", "prompt.template='{{ prompt'", "--output", "o"];
    good.run(&template).with(USAGE).saying(&["prompt.template in job.toml cannot be used"]);
}

#[test]
fn an_empty_manifest_is_refused_before_anything_is_written() {
    for (manifest, name) in [("", "manifest.jsonl"), ("\n\n", "manifest.jsonl")] {
        let project = Project::with_manifest("fake", manifest, "");
        project.run(&[]).with(USAGE).saying(&[name, "holds no rows"]);
        assert!(!project.path("out").exists());
    }
}

#[test]
fn json_summary_is_all_of_standard_output() {
    let mut rows = tides(40);
    rows.push(json!({"id": "bad", "prompt": ""}));
    let project = Project::new("fake", &rows, SHORT);
    for progress in ["auto", "bar", "plain", "json", "none"] {
        let ended = project.run(&["--json", "--progress", progress, "--output", progress]).with(SOME_ROWS_FAILED);
        let summary = ended.json();
        assert_eq!((&summary["rows_ok"], &summary["rows_failed"]), (&json!(40), &json!(1)));
        assert_eq!(project.record(progress)["summary"], summary);
        if progress == "none" {
            assert_eq!(ended.stderr, "");
        }
        if progress == "json" {
            let events: Vec<Value> = ended.stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            let kinds: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
            assert_eq!((kinds[0], kinds[kinds.len() - 1]), ("started", "finished"));
            assert!(kinds.contains(&"row_failed") && kinds.contains(&"part_closed"), "{kinds:?}");
        }
    }
}

#[test]
fn summary_of_the_parts_is_the_runs_own() {
    let mut rows = tides(70);
    rows.extend([json!({"id": "bad", "prompt": ""}), json!({"id": "cold", "prompt": "x", "temperature": -1})]);
    let project = Project::new(&checkpoint("llama"), &rows, &format!("{SHORT}[results]\nrows_per_part = 20\n"));
    project.run(&[]).with(SOME_ROWS_FAILED);
    let run = project.record("out")["summary"].clone();
    let parts = project.ended(["summary", "out", "--json"]).with(OK).json();
    for key in
        ["model", "parts", "rows_ok", "rows_failed", "failed_by_stage", "prompt_tokens", "cached_tokens", "completion_tokens"]
    {
        assert_eq!(run[key], parts[key], "{key}");
    }
    for key in ["rows_in_batch", "ttft_ms_p50", "ttft_ms_p95"] {
        let (run, parts) = (run[key].as_f64().unwrap(), parts[key].as_f64().unwrap());
        assert!((run - parts).abs() <= run * 1e-6, "{key}: {run} {parts}");
    }
    let text = project.ended(["summary", "out"]).with(OK).stdout;
    assert!(text.contains("70 ok · 2 failed (2 prompt)"), "{text}");
    project.ended(["summary", "absent"]).with(FAILED).saying(&["absent is no folder"]);
}

#[test]
fn a_limited_run_goes_on_where_it_was() {
    let project = Project::new("fake", &tides(30), SHORT);
    project.run(&["--limit", "7"]).with(OK);
    assert_eq!(project.results("out").rows.keys().copied().collect::<Vec<_>>(), (0..7).collect::<Vec<_>>());
    assert!(!project.path("out/_SUCCESS").exists());
    // As many again are the same rows: nothing is done.
    project.run(&["--limit", "7"]).with(OK).saying(&["7 done before"]);
    assert_eq!(project.results("out").len(), 7);
    project.run(&["--limit", "30"]).with(OK);
    assert!(project.path("out/_SUCCESS").exists(), "the limit cut nothing off");
    project.run(&["--limit", "5"]).with(OK);
    project.run(&[]).with(OK).saying(&["30 of them done before"]);
    project.run(&["--output", "whole"]).with(OK);
    project.results("out").assert_same(&project.results("whole"), "in three runs");
}

#[test]
fn what_has_changed_is_refused_and_fresh_starts_anew() {
    let project = Project::new("fake", &tides(10), SHORT);
    project.run(&[]).with(OK);
    let before = project.results("out");
    let refused = project.run(&["--set", "generation.seed=4", "--set", "generation.temperature=1.0"]).with(USAGE);
    refused.saying(&["generation.seed was 0, is now 4", "generation.temperature was", "--fresh", "--output"]);
    // What changes no result is not refused.
    project.run(&["--set", "batching.rows=3", "--set", "batching.order='manifest'"]).with(OK);

    let mut rows = tides(10);
    rows[3]["prompt"] = json!("another");
    let manifest: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let earlier = project.read("manifest.jsonl");
    project.write("manifest.jsonl", &manifest);
    project.run(&[]).with(USAGE).saying(&["the manifest has changed", "--fresh"]);
    project.results("out").assert_same(&before, "refused runs change nothing");
    project.write("manifest.jsonl", &earlier);
    project.run(&[]).with(OK);

    project.run(&["--fresh", "--set", "generation.seed=4"]).with(OK).saying(&["10 ok"]);
    let anew = project.results("out");
    assert_eq!(anew.len(), 10);
    assert_ne!(anew, before);
    project.run(&[]).with(USAGE).saying(&["generation.seed was 4, is now 0"]);
}

#[test]
fn a_second_run_in_the_folder_is_refused() {
    let project = Project::new("fake", &tides(20_000), "[generation]\nmax_tokens = 60\n[results]\nrows_per_part = 50\n");
    let mut first = project.start(&["--progress", "none"]);
    let started = Instant::now();
    while parts(&project.path("out")).is_empty() {
        assert!(started.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(2));
    }
    let process = format!("(process {})", first.id());
    for arguments in [&[][..], &["--fresh"]] {
        project.run(arguments).with(FAILED).saying(&["is being written by another run", &process, "--output"]);
    }
    first.kill().unwrap();
    wait(&mut first, Duration::from_secs(5));
    project.run(&["--limit", "10"]).with(OK);
}

/// A resume loads weights only for rows that need them: told to compute on a GPU where there is none, it has nothing to compute.
#[test]
fn a_resume_that_finds_all_done_loads_no_weights() {
    let project = Project::new(&checkpoint("llama"), &tides(6), SHORT);
    project.run(&[]).with(OK);
    let computing = |events: &[Value]| events.iter().filter(|event| event["message"] == "computing on the CPU").count();
    assert_eq!(computing(&project.events("out")), 1);
    let started = Instant::now();
    project.run(&["--set", "model.device='gpu'"]).with(OK).saying(&["6 done before"]);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert_eq!(computing(&project.events("out")), 1);
    if cfg!(target_os = "linux") {
        let refused = project.run(&["--set", "model.device='gpu'", "--output", "other"]);
        if refused.status != Some(OK) {
            refused.with(FAILED).saying(&["model.device is 'gpu', and MLX finds no GPU here"]);
        }
    }
}

#[test]
fn rows_that_can_never_fit_say_what_they_need() {
    let rows = [
        json!({"id": "fits", "prompt": "tide"}),
        json!({"id": "hungry", "prompt": "tide", "max_tokens": 200}),
        json!({"id": "long", "prompt": "tide ".repeat(400)}),
        json!({"id": "unknown", "prompt": "tide", "logit_bias": {"100000": 1}}),
    ];
    let sections = "[generation]\nmax_tokens = 8\n[batching]\nkv_budget = \"120KB\"\nprefill_chunk = 8\n";
    let project = Project::new(&checkpoint("llama"), &rows, sections);
    project.run(&[]).with(SOME_ROWS_FAILED);
    let results = project.results("out");
    assert_eq!(results.row("fits")["status"], "ok");
    let error = |id: &str| {
        let row = results.row(id);
        (row["error_stage"].as_str().unwrap().to_owned(), row["error"].as_str().unwrap().to_owned())
    };
    let (stage, hungry) = error("hungry");
    assert_eq!(stage, "admission");
    let needed: u64 = hungry.split(" need ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(needed > 120_000, "{hungry}");
    assert!(hungry.contains("the budget is 120000 bytes: raise batching.kv_budget"), "{hungry}");
    let (stage, long) = error("long");
    assert_eq!(stage, "prompt");
    let tokens: u64 = long.split("the prompt has ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(long.contains(&format!("together {} more than the context of 256", tokens + 8 - 256)), "{long}");
    let (stage, unknown) = error("unknown");
    assert_eq!(stage, "admission");
    assert!(unknown.contains("logit_bias names the token 100000, and the model has 512 tokens"), "{unknown}");

    // What it says it needs is enough.
    let budget = format!("batching.kv_budget='{needed}B'");
    project.run(&["--set", &budget, "--output", "enough"]).with(SOME_ROWS_FAILED);
    assert_eq!(project.results("enough").row("hungry")["status"], "ok");
}

#[test]
fn failed_rows_are_a_manifest() {
    let mut rows = tides(8);
    rows[2]["max_tokens"] = json!(9000);
    rows[2]["colour"] = json!("red");
    rows[5] = json!({"prompt": "no id of its own", "max_tokens": 9000});
    let project = Project::new("fake", &rows, SHORT);
    project.run(&[]).with(SOME_ROWS_FAILED);
    let failed = project.failed_rows("out");
    assert_eq!(failed.len(), 2);
    assert_eq!((&failed[0]["id"], &failed[0]["colour"], &failed[0]["_row"]), (&json!("r2"), &json!("red"), &json!(2)));

    // As it stands, each row fails again for the same reason.
    let again = ["--set", "input.manifest='out/failed.jsonl'", "--output", "again"];
    project.run(&again).with(SOME_ROWS_FAILED);
    assert_eq!(project.results("again").failed().count(), 2);
    // Mended, each gives a result under its own id.
    let mended: String = project.read("out/failed.jsonl").replace("9000", "5");
    project.write("mended.jsonl", &mended);
    project.run(&["--set", "input.manifest='mended.jsonl'", "--output", "mended"]).with(OK);
    let results = project.results("mended");
    assert_eq!(results.row("r2")["completion_tokens"], 5);
    assert_eq!(results.row("manifest.jsonl:6")["status"], "ok");
}

#[test]
fn every_shipped_job_is_checked_and_run_dry() {
    let jobs = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs");
    let output = tempfile::tempdir().unwrap();
    let mut checked = 0;
    for entry in std::fs::read_dir(jobs).unwrap() {
        let file = entry.unwrap().path();
        // Recordings and images are downloaded; tests of their own make some up for these jobs.
        let hears_or_sees = |text: String| ["[transcription]", "[audio]", "**/*.jpg"].iter().any(|key| text.contains(key));
        let downloaded = std::fs::read_to_string(&file).is_ok_and(hears_or_sees);
        if downloaded || file.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        checked += 1;
        let job = file.to_str().unwrap();
        let found = ended(["check", job, "--set", "model.path=fake", "--json"]).with(OK).json();
        assert!(found["rows"].as_u64().unwrap() > 0 && found["rows_bad"] == 0, "{found}");
        let text = ended(["check", job, "--set", "model.path=fake"]).with(OK).stdout;
        assert!(text.contains("prompt of "), "{text}");
        // With the tokenizer and template of a real checkpoint rows may be too long for it, and nothing else.
        let tiny = format!("model.path='{}'", checkpoint("llama"));
        let found = ended(["check", job, "--set", &tiny, "--json"]).json();
        for bad in found["bad_rows"].as_array().unwrap() {
            assert!(bad[1].as_str().unwrap().contains("more than the context of 256"), "{bad}");
        }
        let out = output.path().join(file.file_stem().unwrap());
        ended(["run", job, "--set", "model.path=fake", "--progress", "none", "--output", out.to_str().unwrap()]).with(OK);
        // As shipped: found, or missing with its name. What would come from a hub is left alone.
        if std::fs::read_to_string(&file).is_ok_and(|text| !text.contains("SmolLM2-135M-Instruct.Q4_1.gguf")) {
            continue;
        }
        let shipped = ended(["check", job]);
        if shipped.status == Some(FAILED) {
            shipped.saying(&["SmolLM2-135M-Instruct.Q4_1.gguf", job]);
        } else {
            shipped.with(OK);
        }
    }
    assert!(checked >= 4);
}

#[test]
fn check_counts_bad_rows_and_prices_the_cache() {
    let mut rows = tides(20);
    rows.push(json!({"id": "r0", "prompt": "twice"}));
    let project =
        Project::new(&checkpoint("gemma3_text"), &rows, "[batching]\nkv_budget = \"1MB\"\n[generation]\nmax_tokens = 9\n");
    let found = project.ended(["check", "job.toml", "--json"]).with(SOME_ROWS_FAILED).json();
    assert_eq!((&found["rows"], &found["rows_good"], &found["rows_bad"]), (&json!(21), &json!(20), &json!(1)));
    assert!(found["bad_rows"][0][0].as_str().unwrap().ends_with("manifest.jsonl:21"), "{found}");
    assert_eq!(found["kv_budget_bytes"], 1_000_000);
    assert!(found["kv_bytes_per_token"].as_u64().unwrap() > 0 && found["row_kv_bytes_max"].as_u64().unwrap() > 0);
    assert!(!project.path("out").exists(), "check writes nothing");
    let limited = project.ended(["check", "job.toml", "--limit", "3", "--json"]).with(OK).json();
    assert_eq!(limited["rows"], 3);
}

#[test]
fn every_checkpoint_is_inspected() {
    let expected = [
        ("llama", "llama", Value::Null),
        ("llama-4bit-g32", "llama", json!(4)),
        ("qwen3", "qwen3", Value::Null),
        ("gemma3_text", "gemma3_text", Value::Null),
        ("gguf/llama-q4_1.gguf", "llama", Value::Null),
    ];
    for (name, family, bits) in expected {
        let model = ended(["inspect", &checkpoint(name), "--json"]).with(OK).json();
        assert_eq!((&model["family"], &model["supported"]), (&json!(family), &json!(true)), "{name}");
        assert_eq!(model["quantization"]["bits"], bits, "{name}");
        assert_eq!(model["context_length"], 256, "{name}");
        assert!(model["kv_bytes_per_token_16_bit"].as_u64().unwrap() > 0, "{name}");
        let text = ended(["inspect", &checkpoint(name)]).with(OK).stdout;
        assert!(text.contains(family) && text.contains("256 tokens"), "{text}");
    }
    ended(["inspect", "/absent/model"]).with(FAILED).saying(&["/absent/model"]);
}

/// Each checkpoint, quantized ones and GGUF included, runs a job from end to end.
#[test]
fn every_checkpoint_runs() {
    for name in ["llama-4bit-g32", "gguf/llama-q4_1.gguf"] {
        let project = Project::new(&checkpoint(name), &tides(6), SHORT);
        let ended = project.run(&[]);
        ended.with(OK);
        assert_eq!(project.results("out").len(), 6, "{name}");
    }
}

#[test]
fn completions_and_manual() {
    for (shell, marks) in [("bash", "complete -F"), ("zsh", "#compdef mlxbatch"), ("fish", "complete -c mlxbatch")] {
        let script = ended(["completions", shell]).with(OK).stdout;
        assert!(script.contains(marks) && script.contains("summary") && script.contains("fresh"), "{shell}: {script}");
    }
    let page = ended(["man"]).with(OK).stdout;
    assert!(page.contains(".TH mlxbatch") && page.contains(&INTERRUPTED.to_string()), "{page}");
    let help = ended(["--help"]).with(OK).stdout;
    assert!(help.contains("run the same command again to go on"), "{help}");
}
