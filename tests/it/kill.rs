//! Runs that are killed at any instant, and gone on with until they are done.

use std::{
    os::unix::process::ExitStatusExt,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::program::{OK, Project, Random, Results, SOME_ROWS_FAILED, checkpoint, parts, read_back};

const SIGKILL: i32 = 9;

/// When a run is killed: so long after its start, or after it has begun to close a part.
enum When {
    AfterStart(Duration),
    /// The part behind so many others.
    ClosingPart {
        parts: usize,
        delay: Duration,
    },
}

/// Runs the job again and again until `kills` runs were killed before their end, and holds every life of it, from its first row to
/// its `_SUCCESS`, to what one run without a kill gives. Returns kills that landed while a part was being closed.
pub fn killed_often(project: &Project, kills: u32, ends_with: i32) -> u32 {
    let started = Instant::now();
    project.run(&["--output", "whole", "--progress", "none"]).with(ends_with);
    // A run without a kill takes so long; a killed one lives for up to a third of it, so each life of the job sees some kills.
    let spread = started.elapsed() / 3;
    let whole = project.results("whole");
    let out = project.path("out");
    let mut random = Random(2026);
    let (mut landed, mut landed_closing, mut lives) = (0, 0, 0);
    let mut ever_rows = 0;
    while landed < kills || !out.join("_SUCCESS").exists() {
        let last = landed >= kills;
        let fresh = out.join("_SUCCESS").exists();
        let mut arguments = vec!["--progress", "none"];
        arguments.extend(fresh.then_some("--fresh"));
        let mut child = project.start(&arguments);
        let when = if random.below(2) == 0 {
            When::AfterStart(spread.mul_f64(random.fraction()))
        } else {
            let parts = parts(&out).len() + random.below(4) as usize;
            When::ClosingPart { parts, delay: Duration::from_micros(random.below(3000)) }
        };
        let mut closing = false;
        if !last {
            closing = wait_until(project, &mut child, when, spread);
            child.kill().unwrap();
        }
        let status = child.wait().unwrap();
        if status.signal() == Some(SIGKILL) {
            landed += 1;
            landed_closing += u32::from(closing);
            let ended = out.join("_SUCCESS").exists();
            // Not after each kill, as reading takes longer than most of these runs live.
            if ended || landed % 4 == 0 {
                let rows = Results::read(&out);
                ever_rows = ever_rows.max(rows.len());
                if ended {
                    rows.assert_same(&whole, "killed after _SUCCESS");
                }
            }
            continue;
        }
        assert_eq!(status.code(), Some(ends_with), "{}", project.read("stderr"));
        lives += 1;
        check_whole(project, &whole);
    }
    println!("{landed} kills landed, {landed_closing} of them while a part was closed, in {lives} lives of the job");
    assert!(ever_rows > 0, "no killed run had closed a part");
    landed_closing
}

/// Returns whether a part is being closed.
fn wait_until(project: &Project, child: &mut std::process::Child, when: When, limit: Duration) -> bool {
    let started = Instant::now();
    match when {
        When::AfterStart(delay) => {
            thread::sleep(delay);
            is_closing(project)
        }
        When::ClosingPart { parts: before, delay } => {
            let there = || parts(&project.path("out")).len() >= before && is_closing(project);
            while !there() && child.try_wait().unwrap().is_none() && started.elapsed() < limit * 3 {
                thread::sleep(Duration::from_micros(200));
            }
            thread::sleep(delay);
            is_closing(project)
        }
    }
}

fn is_closing(project: &Project) -> bool {
    let Ok(entries) = std::fs::read_dir(project.path("out")) else { return false };
    entries.flatten().any(|entry| entry.file_name().to_string_lossy().ends_with(".parquet.tmp"))
}

/// Every row is there once, as in the run without a kill, and the files beside the parts say the same.
fn check_whole(project: &Project, whole: &Results) {
    let results = project.results("out");
    results.assert_same(whole, "after the last resume");
    assert!(project.path("out").join("_SUCCESS").exists());
    assert_eq!(project.record("out")["state"], "complete");
    let mut failed: Vec<u64> = project.failed_rows("out").iter().map(|row| row["_row"].as_u64().unwrap()).collect();
    failed.sort_unstable();
    let expected: Vec<u64> = results.failed().map(|row| row["row"].as_u64().unwrap()).collect();
    assert_eq!(failed, expected);
    project.events("out");
    let leftovers: Vec<_> = std::fs::read_dir(project.path("out")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(leftovers.iter().all(|name| !name.to_string_lossy().ends_with(".tmp")), "{leftovers:?}");
}

/// Rows of which about one in twenty fails, each in one of many ways.
fn manifest(rows: u64, words_max: u64) -> String {
    let mut random = Random(5);
    let line = |number: u64| {
        let id = format!("r{number}");
        let words = "tide and lamp ".repeat(1 + random.below(words_max) as usize);
        let row = json!({"id": id, "prompt": words, "number": number, "temperature": (number % 3) as f64 / 2.0});
        match (random.below(20), random.below(8)) {
            (0, 0) => "{\"id\": broken".into(),
            (0, 1) => json!({"id": id, "prompt": ""}).to_string(),
            (0, 2) => json!({"id": id, "prompt": "x".repeat(9000)}).to_string(),
            (0, 3) => json!({"id": id, "prompt": words, "temperature": -3}).to_string(),
            (0, 4) => json!({"id": id, "prompt": words, "max_tokens": 8000}).to_string(),
            (0, 5) => json!({"id": id, "prompt": words, "logit_bias": {"100000": 1}}).to_string(),
            (0, 6) => json!({"id": "r0", "prompt": words}).to_string(),
            (0, _) => json!({"id": id, "question": words}).to_string(),
            _ => row.to_string(),
        }
    };
    (0..rows).map(line).map(|line| line + "\n").collect()
}

#[test]
fn fifty_kills_lose_no_row_and_give_none_twice() {
    let sections = "[generation]\nmax_tokens = 60\n[batching]\nrows = 8\n\
                    [results]\nrows_per_part = 100\nkeep_columns = [\"number\"]\ntoken_ids = true\n";
    let project = Project::with_manifest("fake", &manifest(3000, 30), sections);
    let closing = killed_often(&project, 50, SOME_ROWS_FAILED);
    assert!(closing >= 5, "only {closing} kills landed while a part was being closed");
    let results = project.results("out");
    let stages: std::collections::BTreeSet<&str> = results.failed().map(|row| row["error_stage"].as_str().unwrap()).collect();
    assert_eq!(stages.into_iter().collect::<Vec<_>>(), ["admission", "manifest", "prompt"]);
    let failed = results.failed().count();
    assert!((100..250).contains(&failed), "{failed}");
    assert!(parts(&project.path("out")).len() >= 30);
    read_back(&project.path("out"), 3000);
}

#[test]
fn kills_with_a_model() {
    let rows: Vec<_> = (0..160u64)
        .map(|number| {
            let prompt = "the harbour counts seven lamps ".repeat(1 + number as usize % 5);
            json!({"id": format!("r{number}"), "prompt": prompt, "temperature": number % 2})
        })
        .collect();
    let sections = "[generation]\nmax_tokens = 24\n[batching]\nrows = 8\n[results]\nrows_per_part = 10\ntoken_ids = true\n";
    let project = Project::new(&checkpoint("llama"), &rows, sections);
    killed_often(&project, 10, OK);
    read_back(&project.path("out"), 160);
}
