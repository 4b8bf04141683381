use std::time::{Duration, Instant};

use arrow::{
    array::AsArray,
    datatypes::{DataType, Float64Type, TimeUnit, TimestampMicrosecondType, UInt32Type, UInt64Type},
};
use fs_err as fs;
use serde_json::{Value, json};

use super::{fixture::*, folder::Limits, *};
use crate::job::Job;

fn limits() -> Limits {
    Limits { rows: 4, age: Duration::from_secs(3600), bytes: 1 << 20, row_bytes: 1 << 20 }
}

#[test]
fn every_column_reads_back() {
    let folder = results_folder();
    let mut job = job(folder.path());
    job.results.token_ids = true;
    job.results.keep_columns = vec!["rank".into(), "absent".into()];
    let batch = written(&job, &[ok_row(0), failed_row(1), ok_row(2), ok_row(3), ok_row(4)]);
    insta::assert_snapshot!(shown(&batch, 4).join("\n"), @r#"
    id=id-4
    row=4
    source=rows.jsonl:5
    input_hash=8709371129873690708
    status=ok
    error_stage=-
    error=-
    text=text 4 ✓
    finish_reason=stop
    language=-
    segments=-
    notes=-
    prompt_tokens=14
    image_tokens=0
    audio_tokens=0
    cached_tokens=3
    completion_tokens=5
    audio_seconds=-
    media_ms=0.0
    encode_ms=0.0
    queue_ms=1.0
    prefill_ms=2.0
    ttft_ms=8.0
    decode_ms=8.0
    total_ms=16.0
    tokens_per_second=500.0
    rows_in_batch=2.5
    started_at=1700000000080000
    token_ids=[4, 4294967295]
    logprobs=-
    reference=ref
    wer=-
    cer=-
    reference_words=-
    word_errors=-
    reference_characters=-
    character_errors=-
    rank=4
    absent=-
    "#);
    insta::assert_snapshot!(shown(&batch, 1).join("\n"), @r#"
    id=id-1
    row=1
    source=rows.jsonl:2
    input_hash=11400714819323198485
    status=failed
    error_stage=prompt
    error=row 1 has "no" prompt
    text=-
    finish_reason=-
    language=-
    segments=-
    notes=-
    prompt_tokens=0
    image_tokens=0
    audio_tokens=0
    cached_tokens=0
    completion_tokens=0
    audio_seconds=-
    media_ms=-
    encode_ms=-
    queue_ms=-
    prefill_ms=-
    ttft_ms=-
    decode_ms=-
    total_ms=-
    tokens_per_second=-
    rows_in_batch=-
    started_at=-
    token_ids=-
    logprobs=-
    reference=-
    wer=-
    cer=-
    reference_words=-
    word_errors=-
    reference_characters=-
    character_errors=-
    rank=1
    absent=-
    "#);
    let types: Vec<_> = batch
        .schema()
        .fields()
        .iter()
        .map(|field| format!("{} {}{}", field.name(), field.data_type(), if field.is_nullable() { "?" } else { "" }))
        .collect();
    insta::assert_snapshot!(types.join("\n"), @r#"
    id Utf8
    row UInt64
    source Utf8
    input_hash UInt64
    status Utf8
    error_stage Utf8?
    error Utf8?
    text Utf8?
    finish_reason Utf8?
    language Utf8?
    segments List(non-null Struct("start": non-null Float64, "end": non-null Float64, "text": non-null Utf8, "avg_logprob": non-null Float32, "compression_ratio": non-null Float32, "no_speech_prob": non-null Float32, "temperature": non-null Float32))?
    notes List(non-null Utf8)?
    prompt_tokens UInt32
    image_tokens UInt32
    audio_tokens UInt32
    cached_tokens UInt32
    completion_tokens UInt32
    audio_seconds Float64?
    media_ms Float64?
    encode_ms Float64?
    queue_ms Float64?
    prefill_ms Float64?
    ttft_ms Float64?
    decode_ms Float64?
    total_ms Float64?
    tokens_per_second Float64?
    rows_in_batch Float64?
    started_at Timestamp(µs, "UTC")?
    token_ids List(non-null UInt32)?
    logprobs List(non-null Struct("token_id": non-null UInt32, "logprob": non-null Float32, "top": non-null List(non-null Struct("token_id": non-null UInt32, "logprob": non-null Float32))))?
    reference Utf8?
    wer Float64?
    cer Float64?
    reference_words UInt32?
    word_errors UInt32?
    reference_characters UInt32?
    character_errors UInt32?
    rank Int64?
    absent Utf8?
    "#);
}

#[test]
fn numbers_keep_their_bits() {
    let folder = results_folder();
    let mut row = ok_row(0);
    row.row = u64::MAX;
    row.input_hash = u64::MAX - 1;
    let Outcome::Ok(completion) = &mut row.outcome else { unreachable!() };
    completion.prompt_tokens = u32::MAX;
    completion.timing.ttft_ms = 0.1 + 0.2;
    completion.timing.started_at_us = -1;
    let batch = written(&job(folder.path()), &[row]);
    let column = |name| batch.column_by_name(name).unwrap();
    assert_eq!(column("row").as_primitive::<UInt64Type>().value(0), u64::MAX);
    assert_eq!(column("input_hash").as_primitive::<UInt64Type>().value(0), u64::MAX - 1);
    assert_eq!(column("prompt_tokens").as_primitive::<UInt32Type>().value(0), u32::MAX);
    assert_eq!(column("ttft_ms").as_primitive::<Float64Type>().value(0), 0.1 + 0.2);
    assert_eq!(column("started_at").as_primitive::<TimestampMicrosecondType>().value(0), -1);
    assert_eq!(column("started_at").data_type(), &DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())));
}

#[test]
fn tokens_per_second_needs_a_token_after_the_first() {
    let folder = results_folder();
    let with = |number, completion_tokens, decode_ms| {
        let mut row = ok_row(number);
        let Outcome::Ok(completion) = &mut row.outcome else { unreachable!() };
        (completion.completion_tokens, completion.timing.decode_ms) = (completion_tokens, decode_ms);
        row
    };
    let batch = written(&job(folder.path()), &[with(0, 0, 0.0), with(1, 1, 5.0), with(2, 5, 8.0), with(3, 5, 0.0)]);
    let rates = batch.column_by_name("tokens_per_second").unwrap().as_primitive::<Float64Type>();
    assert_eq!(rates.iter().collect::<Vec<_>>(), [None, None, Some(500.0), None]);
}

#[test]
fn a_part_tells_where_it_comes_from() {
    let folder = results_folder();
    written(&job(folder.path()), &[ok_row(0)]);
    let part = ClosedPart::open(&part_files(folder.path()).unwrap()[0]).unwrap();
    let metadata = part.metadata();
    for (key, value) in [
        ("mlxbatch.schema_version", "3"),
        ("mlxbatch.job_hash", "0000000000000abc"),
        ("mlxbatch.manifest_hash", "m0"),
        ("mlxbatch.model_id", "fake"),
        ("mlxbatch.model_hash", "f0"),
        ("mlxbatch.versions", r#"{"mlx":"0.32.0","mlxbatch":"0.1.0"}"#),
    ] {
        assert_eq!(metadata.get(key), Some(&value), "{key}");
    }
}

#[test]
fn failed_lines_are_a_manifest() {
    let folder = results_folder();
    let mut derived = failed_row(0);
    derived.id = "rows.csv:1".into();
    derived.columns = json!({"prompt": "", "id": null, "_error": "an earlier one", "_row": 9}).as_object().cloned().unwrap();
    let mut unreadable = failed_row(1);
    unreadable.columns = Map::new();
    written(&job(folder.path()), &[derived, unreadable, failed_row(2)]);
    insta::assert_snapshot!(fs::read_to_string(folder.path().join(FAILED_FILE)).unwrap(), @r#"
    {"id":"rows.csv:1","prompt":"","_row":0,"_source":"rows.jsonl:1","_error_stage":"prompt","_error":"row 0 has \"no\" prompt"}
    {"id":"id-1","_row":1,"_source":"rows.jsonl:2","_error_stage":"prompt","_error":"row 1 has \"no\" prompt"}
    {"id":"id-2","prompt":"say it","reference":"ref","rank":2,"_row":2,"_source":"rows.jsonl:3","_error_stage":"prompt","_error":"row 2 has \"no\" prompt"}
    "#);
}

#[test]
fn a_part_closes_when_it_is_full_or_old_or_large() {
    let folder = results_folder();
    let start = Instant::now();
    let limits = Limits { rows: 3, age: Duration::from_secs(60), bytes: 20_000, row_bytes: 1 << 20 };
    let (mut results, _) = Folder::open_with(&job(folder.path()), &provenance(), false, limits).unwrap();
    let mut push = |row: &Row, seconds: u64| results.push(row, start + Duration::from_secs(seconds)).unwrap().map(|part| part.rows);
    assert_eq!([push(&row(0), 0), push(&row(1), 0), push(&row(2), 0)], [None, None, Some(3)], "full");
    assert_eq!([push(&row(3), 100), push(&row(4), 159), push(&row(5), 160)], [None, None, Some(3)], "full before old");
    assert_eq!([push(&row(6), 200), push(&row(7), 260)], [None, Some(2)], "old, counted from its first row");
    let mut large = ok_row(8);
    let Outcome::Ok(completion) = &mut large.outcome else { unreachable!() };
    completion.text = "x".repeat(30_000);
    assert_eq!([push(&large, 300), push(&row(9), 300)], [Some(1), None], "large");
    assert_eq!(results.tick(start + Duration::from_secs(359)).unwrap(), None);
    assert_eq!(results.tick(start + Duration::from_secs(360)).unwrap().unwrap().rows, 1, "old without a row coming");
    assert_eq!(results.tick(start + Duration::from_secs(999)).unwrap(), None, "nothing in hand");
    assert_eq!(results.parts(), 5);
}

#[test]
fn a_row_too_large_fails_instead_of_the_run() {
    let folder = results_folder();
    let limits = Limits { row_bytes: 5000, ..limits() };
    let (mut results, _) = Folder::open_with(&job(folder.path()), &provenance(), false, limits).unwrap();
    let mut large = failed_row(0);
    large.columns.insert("prompt".into(), json!([{"content": "x".repeat(6000)}]));
    results.push(&large, Instant::now()).unwrap();
    results.finish(End::Complete { rows: 1 }, Value::Null).unwrap();
    let line = &failed_lines(folder.path())[0];
    assert!(line["_error"].as_str().unwrap().contains("results can hold 5000 bytes a row"), "{line}");
    assert_eq!(line["id"], "id-0");
}

#[test]
fn a_row_given_twice_is_refused() {
    let folder = results_folder();
    let job = job(folder.path());
    written(&job, &[ok_row(0)]);
    let (mut results, _) = Folder::open(&job, &provenance(), false).unwrap();
    assert!(matches!(results.push(&ok_row(0), Instant::now()), Err(SinkError::Duplicate { row: 0 })));
    results.push(&ok_row(1), Instant::now()).unwrap();
    assert!(matches!(results.push(&ok_row(1), Instant::now()), Err(SinkError::Duplicate { row: 1 })));
}

#[test]
fn success_means_every_row() {
    let folder = results_folder();
    let job = job(folder.path());
    let success = folder.path().join(SUCCESS_FILE);
    let (mut results, _) = Folder::open(&job, &provenance(), false).unwrap();
    results.push(&ok_row(0), Instant::now()).unwrap();
    let error = results.finish(End::Complete { rows: 2 }, Value::Null).unwrap_err();
    assert!(matches!(error, SinkError::Incomplete { rows: 1, expected: 2 }));
    results.finish(End::Interrupted, Value::Null).unwrap();
    assert!(!success.exists());
    drop(results);

    let (mut results, _) = Folder::open(&job, &provenance(), false).unwrap();
    results.finish(End::Complete { rows: 1 }, json!({"rows": 1})).unwrap();
    assert!(success.exists());
    drop(results);

    let (mut results, _) = Folder::open(&job, &provenance(), false).unwrap();
    assert!(success.exists(), "nothing has been added yet");
    results.push(&ok_row(1), Instant::now()).unwrap();
    results.close_part().unwrap();
    assert!(!success.exists(), "a run that goes on is not complete");
}

#[test]
fn run_json_tells_what_the_run_was() {
    let folder = results_folder();
    let job = job(folder.path());
    let record = || serde_json::from_slice::<Value>(&fs::read(folder.path().join(RECORD_FILE)).unwrap()).unwrap();
    let (mut results, _) = Folder::open(&job, &provenance(), false).unwrap();
    assert_eq!(record()["state"], "running");
    results.finish(End::Interrupted, json!({"rows": 0})).unwrap();
    drop(results);
    let first = record();
    assert_eq!(first["state"], "interrupted");
    Folder::open(&job, &provenance(), false).unwrap().0.finish(End::Complete { rows: 0 }, json!({"rows": 0})).unwrap();
    let last = record();
    assert_eq!(last["state"], "complete");
    assert_eq!(last["started_at"], first["started_at"]);
    assert_eq!(last["resumed_at"].as_array().unwrap().len(), 1);
    assert_eq!(last["model"], json!({"id": "fake", "hash": "f0"}));
    assert_eq!(last["machine"], json!({"cpu": "test"}));
    assert_eq!(last["summary"], json!({"rows": 0}));
    assert_eq!(fs::read_to_string(folder.path().join(JOB_FILE)).unwrap(), provenance().job_toml);
}

fn refused(job: &Job, provenance: &Provenance, fresh: bool) -> String {
    match Folder::open(job, provenance, fresh) {
        Ok(_) => panic!("was not refused"),
        Err(error) => error.to_string().replace(&*job.output.to_string_lossy(), "OUT"),
    }
}

#[test]
fn a_changed_run_is_refused_with_the_reason() {
    let folder = results_folder();
    let job = job(folder.path());
    written(&job, &[ok_row(0)]);
    let same = provenance;
    let remedy = "Run with --fresh to discard them, or give another folder with --output";
    let check = |job: &Job, provenance: Provenance, reason: &str| {
        let expected = format!("OUT holds results of a run that differs from this one: {reason}. {remedy}");
        assert_eq!(refused(job, &provenance, false), expected);
    };
    check(&job, Provenance { manifest_hash: "m1".into(), ..same() }, "the manifest has changed (hash m0 before, m1 now)");
    check(&job, Provenance { model_id: "other".into(), model_hash: "f1".into(), ..same() }, "the model was fake and is now other");
    check(&job, Provenance { model_hash: "f1".into(), ..same() }, "the model's files have changed (fake, hash f0 before, f1 now)");
    check(
        &job,
        Provenance { settings_hash: 1, job_toml: "[generation]\nmax_tokens = 65\n".into(), ..same() },
        "the job's settings have changed (generation.max_tokens was 64, is now 65)",
    );
    check(&job, Provenance { settings_hash: 1, ..same() }, "settings that change a row's result have changed");
    let mut keeping = job.clone();
    keeping.results.keep_columns = vec!["rank".into()];
    check(&keeping, same(), r#"results.keep_columns was [] and is now ["rank"]"#);
    let mut tokens = job.clone();
    tokens.results.token_ids = true;
    let two = "the manifest has changed (hash m0 before, m1 now), and results.token_ids was false and is now true";
    check(&tokens, Provenance { manifest_hash: "m1".into(), ..same() }, two);
    assert_eq!(row_numbers(folder.path()), [0], "a refusal changes nothing");
}

#[test]
fn fresh_removes_our_files_and_no_others() {
    let folder = results_folder();
    let job = job(folder.path());
    written(&job, &(0..9).map(row).collect::<Vec<_>>());
    fs::write(folder.path().join("plot.png"), "mine").unwrap();
    fs::write(folder.path().join("part-old.parquet"), "mine").unwrap();
    let changed = Provenance { manifest_hash: "m1".into(), ..provenance() };
    let (results, done) = Folder::open(&job, &changed, true).unwrap();
    assert_eq!((done.rows, results.parts()), (0, 0));
    let mut names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, [".lock", "job.toml", "part-old.parquet", "plot.png", "run.json"]);
}

#[test]
fn a_folder_of_someone_else_is_refused() {
    for file in ["thesis.docx", "part-00000.parquet", "_SUCCESS", "failed.jsonl"] {
        let folder = results_folder();
        fs::write(folder.path().join(file), "mine").unwrap();
        for fresh in [false, true] {
            let error = refused(&job(folder.path()), &provenance(), fresh);
            assert!(error.contains(&format!("OUT holds {file} but no run.json")), "{error}");
        }
        assert_eq!(fs::read_to_string(folder.path().join(file)).unwrap(), "mine");
    }
}

#[test]
fn a_second_run_in_the_same_folder_is_refused() {
    let folder = results_folder();
    let job = job(folder.path());
    let first = Folder::open(&job, &provenance(), false).unwrap();
    for fresh in [false, true] {
        let error = refused(&job, &provenance(), fresh);
        assert!(error.contains(&format!("OUT is being written by another run (process {})", std::process::id())), "{error}");
    }
    drop(first);
    Folder::open(&job, &provenance(), false).unwrap();
}

#[test]
fn a_record_that_cannot_be_read_is_refused() {
    for (record, reason) in [
        ("", "EOF"),
        ("{}", "it names no schema_version"),
        (r#"{"schema_version": 99}"#, "it has schema version 99, and mlxbatch"),
        (r#"{"schema_version": 2, "job": "test"}"#, "it has schema version 2, and mlxbatch"),
        (r#"{"schema_version": 3, "job": 5}"#, "invalid type"),
        ("[1", "EOF"),
    ] {
        let folder = results_folder();
        fs::write(folder.path().join(RECORD_FILE), record).unwrap();
        let error = refused(&job(folder.path()), &provenance(), false);
        assert!(error.contains("OUT/run.json cannot be read as the record of a run") && error.contains(reason), "{error}");
        assert!(Folder::open(&job(folder.path()), &provenance(), true).is_ok(), "--fresh goes on");
    }
}

#[test]
fn fresh_removes_nothing_beside_a_strangers_record() {
    let folder = results_folder();
    fs::write(folder.path().join(RECORD_FILE), r#"{"precious": 1}"#).unwrap();
    let error = refused(&job(folder.path()), &provenance(), true);
    assert_eq!(
        error,
        "the run.json in OUT was not written by mlxbatch, so nothing there is removed: give another folder with --output"
    );
    assert!(folder.path().join(RECORD_FILE).is_file());
}

#[test]
fn a_run_that_ended_before_its_first_part_does_not_hold_the_folder() {
    let folder = results_folder();
    let job = job(folder.path());
    drop(Folder::open(&job, &provenance(), false).unwrap());
    let other = Provenance { model_hash: "f1".into(), ..provenance() };
    assert_eq!(Folder::open(&job, &other, false).unwrap().1.rows, 0);
}

#[test]
fn a_damaged_part_is_named() {
    let folder = results_folder();
    let job = job(folder.path());
    written(&job, &(0..9).map(row).collect::<Vec<_>>());
    let part = folder.path().join("part-00001.parquet");
    let whole = fs::read(&part).unwrap();
    for content in [&whole[..0], &whole[..10], &whole[..whole.len() / 2], &whole[..whole.len() - 1], b"not a parquet file"] {
        fs::write(&part, content).unwrap();
        let error = Folder::open(&job, &provenance(), false).unwrap_err();
        let chain = format!("{:#}", anyhow::Error::from(error));
        assert!(chain.contains("part-00001.parquet is damaged"), "{chain}");
    }
    fs::remove_file(part).unwrap();
    let (_, done) = Folder::open(&job, &provenance(), false).unwrap();
    assert_eq!(done.rows, 5);
}

#[test]
fn a_part_of_another_run_is_named() {
    let (ours, theirs) = (results_folder(), results_folder());
    let job_ours = job(ours.path());
    written(&job_ours, &[ok_row(0)]);
    let (mut other, _) =
        Folder::open(&job(theirs.path()), &Provenance { manifest_hash: "m1".into(), ..provenance() }, false).unwrap();
    other.push(&ok_row(5), Instant::now()).unwrap();
    other.close_part().unwrap();
    fs::copy(theirs.path().join("part-00000.parquet"), ours.path().join("part-00001.parquet")).unwrap();
    let error = refused(&job_ours, &provenance(), false);
    assert!(error.contains("part-00001.parquet") && error.contains("mlxbatch.manifest_hash is m1, the run's is m0"), "{error}");

    fs::copy(ours.path().join("part-00000.parquet"), ours.path().join("part-00001.parquet")).unwrap();
    let error = refused(&job_ours, &provenance(), false);
    assert!(error.contains("row 0 is in part-00000.parquet and again in part-00001.parquet"), "{error}");
}

#[test]
fn a_folder_that_cannot_be_written_says_which() {
    let folder = results_folder();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = Folder::open(&job(&file.join("out")), &provenance(), false).unwrap_err();
    let chain = format!("{:#}", anyhow::Error::from(error));
    assert!(chain.contains("failed to open the results folder") && chain.contains("file/out"), "{chain}");
}

/// Linux has a device that is always full.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_ends_the_run_and_leaves_closed_parts() {
    let folder = results_folder();
    let job = job(folder.path());
    let (mut results, _) = Folder::open(&job, &provenance(), false).unwrap();
    for number in 0..4 {
        results.push(&row(number), Instant::now()).unwrap();
    }
    std::os::unix::fs::symlink("/dev/full", folder.path().join("part-00001.parquet.tmp")).unwrap();
    for number in 4..7 {
        results.push(&row(number), Instant::now()).unwrap();
    }
    let error = results.push(&row(7), Instant::now()).unwrap_err();
    let chain = format!("{:#}", anyhow::Error::from(error));
    assert!(chain.contains("part-00001.parquet") && chain.contains("No space left on device"), "{chain}");
    drop(results);
    let (_, done) = Folder::open(&job, &provenance(), false).unwrap();
    assert_eq!(done.rows, 4);
    assert_eq!(failed_lines(folder.path()).len(), 1);
}

/// `cargo nextest run --run-ignored only a_million_rows --no-capture`, in release mode, for the rates.
#[test]
#[ignore = "takes a while without optimization"]
fn a_million_rows() {
    let folder = results_folder();
    let mut job = job(folder.path());
    job.results.rows_per_part = 10_000;
    let mut rows: Vec<_> = (0..1000).map(ok_row).collect();
    let (mut results, _) = Folder::open(&job, &provenance(), false).unwrap();
    let start = Instant::now();
    for number in 0..1_000_000 {
        let row = &mut rows[number as usize % 1000];
        (row.row, row.input_hash) = (number, input_hash(number));
        results.push(row, start).unwrap();
    }
    results.finish(End::Complete { rows: 1_000_000 }, Value::Null).unwrap();
    let written = start.elapsed();
    drop(results);
    let start = Instant::now();
    let (_, done) = Folder::open(&job, &provenance(), false).unwrap();
    let opened = start.elapsed();
    assert_eq!(done.rows, 1_000_000);
    println!("{:.0} rows/s written, {:.3} s to resume", 1e6 / written.as_secs_f64(), opened.as_secs_f64());
}

/// `MLXBATCH_PYTHON=… cargo nextest run --run-ignored only others_read_it`
#[test]
#[ignore = "needs a Python with pyarrow and duckdb"]
fn others_read_it() {
    let folder = results_folder();
    let mut job = job(folder.path());
    job.results.token_ids = true;
    job.results.keep_columns = vec!["rank".into(), "größe".into()];
    let mut rows: Vec<_> = (0..100).map(|number| if number % 3 == 2 { heard_row(number) } else { row(number) }).collect();
    rows[50].columns.insert("größe".into(), json!(1.5));
    rows[90].columns.insert("größe".into(), json!({"a": [1]}));
    written(&job, &rows);
    let python = std::env::var("MLXBATCH_PYTHON").unwrap_or("python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/read_back.py");
    let status = std::process::Command::new(python).arg(script).arg(folder.path()).args(["--rows", "100"]).status().unwrap();
    assert!(status.success());
}
