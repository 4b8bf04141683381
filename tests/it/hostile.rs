//! Jobs, manifests and places that nobody should give, and what is said to those who do.

use std::{
    ffi::OsStr,
    fs::{self, File},
    os::unix::ffi::OsStrExt,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use crate::program::{Ended, FAILED, OK, Project, SOME_ROWS_FAILED, USAGE, checkpoint, parts, program};

fn tides(count: usize) -> Vec<Value> {
    (0..count).map(|number| json!({"id": format!("r{number}"), "prompt": "tide ".repeat(1 + number % 9)})).collect()
}

#[test]
fn a_job_file_that_is_none() {
    let project = Project::new("fake", &tides(2), "");
    project.ended(["run", "."]).with(USAGE).saying(&["failed to read the job file .", "directory"]);
    project.ended(["run", "/dev/null"]).with(USAGE).saying(&["model.path", "input.manifest"]);
    project.ended(["run", "manifest.jsonl"]).with(USAGE).saying(&["manifest.jsonl:1"]);
    project.ended(["run", "/dev/zero"]).with(USAGE).saying(&["/dev/zero has more than"]);
    fs::write(project.path("latin.toml"), b"[job]\nname = \"caf\xe9\"\n").unwrap();
    project.ended(["run", "latin.toml"]).with(USAGE).saying(&["latin.toml:2", "not UTF-8"]);
}

#[test]
fn a_manifest_that_is_none() {
    let project = Project::new("fake", &tides(2), "");
    assert!(Command::new("mkfifo").arg(project.path("pipe.jsonl")).status().unwrap().success());
    fs::create_dir(project.path("folder")).unwrap();
    for (manifest, words) in [
        ("/dev/null", "is not a regular file"),
        ("pipe.jsonl", "is not a regular file"),
        ("folder", "is a folder"),
        ("job.toml", "are not supported"),
        ("*.csv", "matches no file"),
    ] {
        let setting = format!("input.manifest='{manifest}'");
        for command in ["run", "check"] {
            project.ended([command, "job.toml", "--set", &setting]).with(USAGE).saying(&[manifest, words]);
        }
    }
    assert!(!project.path("out").exists());
}

#[test]
fn an_output_that_is_no_place_for_results() {
    let project = Project::new("fake", &tides(2), "");
    let before = fs::read_dir(project.path("")).unwrap().count();
    project.run(&["--output", "."]).with(USAGE).saying(&["but no run.json", "--output"]);
    project.run(&["--output", ".", "--fresh"]).with(USAGE).saying(&["but no run.json"]);
    assert_eq!(
        fs::read_dir(project.path("")).unwrap().filter(|entry| entry.as_ref().unwrap().file_name() != ".lock").count(),
        before
    );
    for output in ["manifest.jsonl", "manifest.jsonl/below", "/proc/results", "/dev/null"] {
        let ended = project.run(&["--output", output]).with(FAILED);
        ended.saying(&["failed to open the results folder", output]);
    }
}

/// Rows that the job itself writes would change under it, and `--fresh` would remove the manifest.
#[test]
fn results_are_not_read_as_rows_of_the_same_job() {
    let mut rows = tides(3);
    rows.push(json!({"id": "bad", "prompt": ""}));
    let project = Project::new("fake", &rows, "");
    project.run(&[]).with(SOME_ROWS_FAILED);
    for (manifest, output) in [("**/*.jsonl", "new"), ("*/*.jsonl", "out"), ("out/failed.jsonl", "out"), ("out/*", "out")] {
        let setting = format!("input.manifest='{manifest}'");
        let ended = project.run(&["--set", &setting, "--output", output, "--fresh"]).with(USAGE);
        ended.saying(&[manifest, "would read as rows what the job writes"]);
    }
    project.ended(["check", "job.toml", "--set", "input.manifest='**/*.jsonl'"]).with(USAGE);
    let (manifest, folder) = ("input.manifest", project.path("").to_str().unwrap().to_owned());
    let walked = project
        .read("job.toml")
        .replace(&format!("{} = \"manifest.jsonl\"", &manifest[6..]), "folder = \".\"\nglob = \"**/*.jsonl\"");
    project.write("walk.toml", &walked.replace("\"out\"", "\"/elsewhere\""));
    project.ended(["run", "walk.toml", "--output", "new"]).with(USAGE).saying(&[&folder, "would read as rows"]);
    assert_eq!(project.results("out").len(), 4, "nothing was removed");
    // Beside the results, or into another folder, all is well.
    project.run(&["--set", "input.manifest='*.jsonl'", "--fresh"]).with(SOME_ROWS_FAILED);
    project.run(&["--set", "input.manifest='out/failed.jsonl'", "--output", "again"]).with(SOME_ROWS_FAILED);
}

/// Limits files to a few kilobytes: the disk that is full.
#[test]
fn a_disk_that_is_full() {
    let project = Project::new("fake", &tides(3000), "[results]\nrows_per_part = 500\ntoken_ids = true\n");
    let full = |kibibytes: u32, progress: &str| {
        let script = format!("trap '' XFSZ; ulimit -f {}; exec \"$@\"", kibibytes * 2);
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_mlxbatch"), "run", "job.toml", "--progress", progress]);
        Ended::of(command.current_dir(project.path("")).output().unwrap())
    };
    for progress in ["plain", "none"] {
        let ended = full(8, progress).with(FAILED);
        ended.saying(&["part-00000.parquet", "File too large", "running the job again goes on"]);
    }
    assert_eq!(parts(&project.path("out")).len(), 0);
    project.run(&["--progress", "none"]).with(OK);
    assert_eq!(project.results("out").len(), 3000);
}

#[test]
fn nobody_listens() {
    let project = Project::new("fake", &tides(40), "");
    let run = |out: Stdio, errors: Stdio, arguments: &[&str]| {
        let mut command = project.command(arguments);
        command.stdout(out).stderr(errors).status().unwrap().code()
    };
    let full = || Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    assert_eq!(run(Stdio::null(), full(), &["run", "job.toml"]), Some(OK));
    assert_eq!(run(Stdio::null(), full(), &["run", "absent.toml"]), Some(USAGE));
    assert_eq!(run(full(), full(), &["check", "job.toml"]), Some(FAILED));
    let mut command = project.command(["summary", "out"]);
    let ended = Ended::of(command.stdout(full()).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap());
    ended.with(FAILED).saying(&["failed to write to standard output"]);
    // A reader that went away.
    let script = format!("'{}' summary out --json | true; '{0}' man | true", env!("CARGO_BIN_EXE_mlxbatch"));
    let ended = Ended::of(Command::new("sh").args(["-c", &script]).current_dir(project.path("")).output().unwrap());
    assert_eq!(ended.with(OK).stderr, "");
}

#[test]
fn names_that_are_not_utf8() {
    let project = Project::new("fake", &tides(3), "");
    let odd = OsStr::from_bytes(b"odd-\xff");
    // JSON cannot hold the name, and the run is none the worse.
    let mut arguments: Vec<&OsStr> = ["run", "job.toml", "--json", "--output"].map(OsStr::new).to_vec();
    arguments.push(odd);
    let ended = Ended { stderr: String::new(), ..lossy(project.command(arguments)) }.with(OK);
    assert!(ended.json()["output"].as_str().unwrap().ends_with("odd-\u{fffd}"));
    assert!(project.path("").join(odd).join("_SUCCESS").exists());
    let events = fs::read_to_string(project.path("").join(odd).join("events.jsonl")).unwrap();
    assert!(events.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{events}");
    lossy(project.command([OsStr::new("summary"), odd, OsStr::new("--json")])).with(OK).json();

    let folder = project.path("").join(OsStr::from_bytes(b"in-\xff"));
    fs::create_dir(&folder).unwrap();
    fs::copy(project.path("job.toml"), folder.join("job.toml")).unwrap();
    let refused = lossy(project.command([OsStr::new("run"), folder.join("job.toml").as_os_str()]));
    refused.with(USAGE).saying(&["name that is not UTF-8", "rename it"]);
}

fn lossy(mut command: Command) -> Ended {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ended { status: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[test]
fn rows_that_ask_for_too_much() {
    let cases: Vec<(Value, &str)> = vec![
        (json!({"prompt": "x".repeat(16 << 20)}), "the limit for a row is 16777216"),
        (json!({"prompt": "x".repeat(15 << 20)}), "context is 256 tokens"),
        (json!({"prompt": "tide ".repeat(10_000)}), "more than the context of 256"),
        (json!({"prompt": "x", "stop": (0..5000).map(|at| format!("s{at}")).collect::<Vec<_>>()}), "`stop`"),
        (json!({"prompt": "x", "stop": ["y".repeat(1 << 20)]}), "`stop`"),
        (json!({"prompt": "x", "stop": [""]}), "`stop`"),
        (json!({"prompt": "x", "max_tokens": 4_000_000_000u64}), "`max_tokens`"),
        (json!({"prompt": "x", "max_tokens": 10_000_000}), "more than the context of 256"),
        (json!({"prompt": "x", "max_tokens": 0}), "`max_tokens`"),
        (json!({"prompt": "x", "max_tokens": -1}), "`max_tokens`"),
        (json!({"prompt": "x", "temperature": "NaN"}), "`temperature`"),
        (json!({"prompt": "x", "temperature": 1e300}), "`temperature`"),
        (json!({"prompt": "x", "top_p": 0}), "`top_p`"),
        (json!({"prompt": "x", "top_k": -1}), "`top_k`"),
        (json!({"prompt": "x", "seed": -1}), "`seed`"),
        (json!({"prompt": "x", "logit_bias": {"4294967295": 1}}), "logit_bias names the token 4294967295"),
        (json!({"prompt": "x", "stop_token_ids": [-1]}), "`stop_token_ids`"),
        (json!({"prompt": {"deep": "x"}}), "prompt"),
        (json!({"prompt": " \n\t "}), "empty"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "user"}]}), "message 1 has no content"),
    ];
    let mut rows: Vec<Value> = cases.iter().map(|(row, _)| row.clone()).collect();
    // Odd, and none of it wrong.
    rows.push(json!({"id": "odd", "prompt": "a\u{0}b\u{202e}\u{fffd}<|im_end|></s>", "temperature": 1e-6, "top_k": 1_000_000}));
    rows.push(json!({"id": "ids", "prompt": "x", "stop_token_ids": [4_294_967_295u64], "penalty_context": 10_000_000}));
    let all = rows.len();
    let project = Project::new(&checkpoint("llama"), &rows, "[generation]\nmax_tokens = 6\nrepetition_penalty = 1.2\n");
    project.run(&[]).with(SOME_ROWS_FAILED);
    let results = project.results("out");
    assert_eq!(results.len(), all);
    for ((row, words), result) in cases.iter().zip(results.rows.values()) {
        let error = result["error"].as_str().unwrap_or_else(|| panic!("{words} was taken: {result}"));
        assert!(error.contains(words) && error.len() < 2000, "{words:?} is not in: {error} {:.200}", row.to_string());
    }
    assert_eq!(results.row("odd")["status"], "ok");
    assert_eq!(results.row("ids")["status"], "ok");
    let again = ["--set", "input.manifest='out/failed.jsonl'", "--output", "again"];
    project.run(&again).with(SOME_ROWS_FAILED);
    assert_eq!(project.results("again").failed().count(), cases.len());
}

/// A column of NaN in CSV, where a number is text until it is read as one.
#[test]
fn csv_columns_that_are_no_numbers() {
    let csv = "id,prompt,temperature\na,tide,NaN\nb,tide,inf\nc,tide,1.0\nd,tide,\ne,tide,0x10\n";
    let project = Project::new("fake", &[], "[generation]\nmax_tokens = 4\n");
    project.write("rows.csv", csv);
    project.run(&["--set", "input.manifest='rows.csv'"]).with(SOME_ROWS_FAILED);
    let results = project.results("out");
    let failed: Vec<&str> = results.failed().map(|row| row["id"].as_str().unwrap()).collect();
    assert_eq!(failed, ["a", "b", "e"]);
    assert!(results.failed().all(|row| row["error"].as_str().unwrap().contains("`temperature`")));
}

#[test]
fn settings_that_are_absurd() {
    let project = Project::new("fake", &tides(20), "[generation]\nmax_tokens = 6\n");
    for (setting, words) in [
        ("batching.rows=0", "batching.rows"),
        ("batching.rows=4000000000", "batching.rows"),
        ("batching.kv_budget='0B'", "batching.kv_budget"),
        ("batching.kv_budget='9999999TiB'", "batching.kv_budget"),
        ("generation.temperature=nan", "generation.temperature"),
        ("generation.stop=['']", "generation.stop"),
        ("job.output=''", "job.output"),
        ("results.keep_columns=['id']", "keep_columns"),
        ("nonsense", "nonsense"),
        ("=", "="),
    ] {
        project.run(&["--set", setting, "--output", "o"]).with(USAGE).saying(&[words]);
    }
    // Large, and allowed: the program takes no memory for what no row needs.
    let settings =
        ["batching.rows=4096", "batching.prefill_chunk=100000", "results.rows_per_part=10000000", "batching.kv_budget='1PiB'"];
    let arguments: Vec<&str> = settings.iter().flat_map(|setting| ["--set", *setting]).collect();
    let ended = project.run(&arguments);
    assert!([Some(OK), Some(USAGE)].contains(&ended.status), "{}", ended.stderr);
}

/// Weights that are cut short are told before or while they load, by the file's name.
#[test]
fn weights_that_are_cut_short() {
    let project = Project::new("model", &tides(2), "[generation]\nmax_tokens = 6\n");
    fs::create_dir(project.path("model")).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        fs::copy(format!("{}/{name}", checkpoint("llama")), project.path("model").join(name)).unwrap();
    }
    let weights = project.path("model/model.safetensors");
    let length = fs::metadata(&weights).unwrap().len();
    for kept in [0, 7, 100, length / 2, length - 1] {
        File::options().write(true).open(&weights).unwrap().set_len(kept).unwrap();
        let out = format!("out-{kept}");
        project.run(&["--output", &out]).with(FAILED).saying(&["model.safetensors"]);
        let status = program(["inspect", project.path("model").to_str().unwrap()]).output().unwrap().status;
        assert_eq!(status.code(), Some(FAILED), "{kept}");
        fs::copy(format!("{}/model.safetensors", checkpoint("llama")), &weights).unwrap();
    }
    project.run(&[]).with(OK);
}
