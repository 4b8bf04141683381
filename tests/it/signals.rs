//! Interrupted runs.

use std::{
    io::Read,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::program::{INTERRUPTED, OK, Project, SOME_ROWS_FAILED, checkpoint, parts, wait};

const PATIENCE: Duration = Duration::from_secs(20);

fn send(signal: &str, child: &Child) {
    let status = Command::new("sh").args(["-c", &format!("kill -{signal} {}", child.id())]).status().unwrap();
    assert!(status.success());
}

/// A job of the fake model that takes a few seconds.
fn long_job(rows_per_part: u32) -> Project {
    let rows: Vec<_> = (0..6000u64)
        .map(|number| match number % 50 {
            7 => json!({"id": format!("r{number}"), "prompt": ""}),
            _ => json!({"id": format!("r{number}"), "prompt": "tide ".repeat(1 + number as usize % 40)}),
        })
        .collect();
    let sections = format!(
        "[generation]\nmax_tokens = 80\n[batching]\nrows = 8\norder = \"manifest\"\n[results]\nrows_per_part = {rows_per_part}\n"
    );
    Project::new("fake", &rows, &sections)
}

fn wait_for_parts(project: &Project, count: usize) {
    let started = Instant::now();
    while parts(&project.path("out")).len() < count {
        assert!(started.elapsed() < PATIENCE, "no part: {}", project.read("stderr"));
        thread::sleep(Duration::from_millis(1));
    }
}

fn interrupted_by(signal: &str) {
    let project = long_job(100);
    let mut child = project.start(&[]);
    wait_for_parts(&project, 1);
    send(signal, &child);
    let sent = Instant::now();
    let status = wait(&mut child, PATIENCE);
    assert_eq!(status.code(), Some(INTERRUPTED), "{}", project.read("stderr"));
    assert!(sent.elapsed() < Duration::from_secs(2), "{:?}", sent.elapsed());

    let record = project.record("out");
    assert_eq!(record["state"], "interrupted");
    let rows = project.results("out").len() as u64;
    assert!((100..6000).contains(&rows), "{rows}");
    let summary = &record["summary"];
    assert_eq!(rows, summary["rows_ok"].as_u64().unwrap() + summary["rows_failed"].as_u64().unwrap());
    let said = project.read("stderr");
    assert!(said.contains(&format!("interrupted: {}", with_comma(rows))), "{said}");
    assert!(said.contains("run the same command again to go on"), "{said}");
    assert!(!project.path("out/_SUCCESS").exists());
    let events = project.events("out");
    assert_eq!(events.last().unwrap()["event"], "interrupted");
    assert_eq!(events.last().unwrap()["rows_total"], serde_json::Value::Null, "the manifest was not read to its end");

    project.run(&[]).with(SOME_ROWS_FAILED).saying(&[&format!("{} of them done before", with_comma(rows))]);
    assert_eq!(project.results("out").len(), 6000);
    assert_eq!(project.record("out")["summary"]["rows_resumed"], rows);
    project.run(&["--output", "whole"]).with(SOME_ROWS_FAILED);
    project.results("out").assert_same(&project.results("whole"), signal);
}

fn with_comma(number: u64) -> String {
    if number < 1000 { number.to_string() } else { format!("{},{:03}", number / 1000, number % 1000) }
}

#[test]
fn sigint_closes_the_part_and_exits_75() {
    interrupted_by("INT");
}

#[test]
fn sigterm_closes_the_part_and_exits_75() {
    interrupted_by("TERM");
}

/// Nobody reads what it says, so the run stands still in the middle of its work and cannot heed the first signal.
#[test]
fn second_sigint_ends_a_run_that_stands_still() {
    let rows: Vec<_> = (0..4000u64)
        .map(|number| match number % 2 {
            0 => json!({"id": format!("r{number}"), "prompt": ""}),
            _ => json!({"id": format!("r{number}"), "prompt": "tide"}),
        })
        .collect();
    let sections = "[generation]\nmax_tokens = 20\n[batching]\norder = \"manifest\"\n[results]\nrows_per_part = 50\n";
    let project = Project::new("fake", &rows, sections);
    let mut command = project.command(["run", "job.toml", "--progress", "json"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_parts(&project, 1);
    // Until it has filled the pipe.
    let mut before = 0;
    loop {
        let now = parts(&project.path("out")).len();
        if now == before {
            break;
        }
        before = now;
        thread::sleep(Duration::from_millis(500));
    }
    send("INT", &child);
    thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none(), "the pipe was not full");
    send("INT", &child);
    let status = wait(&mut child, Duration::from_secs(1));
    assert_eq!(status.code(), Some(INTERRUPTED));
    let mut said = Vec::new();
    child.stderr.take().unwrap().read_to_end(&mut said).unwrap();
    assert!(said.len() >= 4096);

    let closed = parts(&project.path("out"));
    assert_eq!(closed.len(), before);
    assert_eq!(project.results("out").len(), before * 50);
    project.run(&["--progress", "none"]).with(SOME_ROWS_FAILED);
    assert_eq!(project.results("out").len(), 4000);
    let kept = &parts(&project.path("out"))[..before];
    assert_eq!(kept, closed);
}

/// A process that ends while MLX computes must not fall over its own destructors.
#[test]
fn two_signals_while_a_model_computes() {
    let rows: Vec<_> = (0..240u64).map(|number| json!({"id": format!("r{number}"), "prompt": "the tide ".repeat(20)})).collect();
    let sections = "[generation]\nmax_tokens = 60\nignore_eos = true\n[batching]\nrows = 16\n[results]\nrows_per_part = 16\n";
    let project = Project::new(&checkpoint("gemma3_text"), &rows, sections);
    for round in 0..4u64 {
        let mut child = project.start(&["--progress", "none"]);
        wait_for_parts(&project, round as usize + 1);
        send("INT", &child);
        thread::sleep(Duration::from_micros(300 * round));
        send("INT", &child);
        let status = wait(&mut child, Duration::from_secs(2));
        assert_eq!(status.code(), Some(INTERRUPTED), "round {round}: {status} {}", project.read("stderr"));
    }
    let before = project.results("out").len();
    assert!((64..240).contains(&before), "{before}");
    project.run(&["--progress", "none", "--set", "batching.rows=32"]).with(OK);
    assert_eq!(project.results("out").len(), 240);
}
