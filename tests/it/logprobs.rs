//! Log-probabilities from the job file to the results.

use serde_json::{Value, json};

use crate::program::{OK, Project, SOME_ROWS_FAILED, USAGE, checkpoint, read_back};

fn numbers<'a>(list: &'a Value, name: &'a str) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|token| token[name].as_f64().unwrap()).collect()
}

/// Each token with its own and the likeliest ones, as float32, which are written with the fewest digits.
fn parts_of(row: &Value) -> Vec<(u64, f32)> {
    let pair = |token: &Value| (token["token_id"].as_u64().unwrap(), token["logprob"].as_f64().unwrap() as f32);
    let tokens = row["logprobs"].as_array().unwrap().iter();
    tokens.flat_map(|token| [token].into_iter().chain(token["top"].as_array().unwrap()).map(pair)).collect()
}

/// A row's log-probabilities are those of its tokens, and what is likeliest is no less likely than what was sampled.
fn sound(row: &Value, top_k: usize) {
    let logprobs = row["logprobs"].as_array().unwrap_or_else(|| panic!("{row}"));
    let ids: Vec<&Value> = logprobs.iter().map(|token| &token["token_id"]).collect();
    assert_eq!(ids, row["token_ids"].as_array().unwrap().iter().collect::<Vec<_>>(), "{row}");
    assert_eq!(row["completion_tokens"], logprobs.len());
    for token in logprobs {
        let (own, top) = (token["logprob"].as_f64().unwrap(), numbers(&token["top"], "logprob"));
        assert!(own <= 0.0 && top.len() == top_k, "{token}");
        assert!(top.is_sorted_by(|a, b| a >= b) && top.iter().map(|logprob| logprob.exp()).sum::<f64>() < 1.0 + 1e-6, "{token}");
        let place = numbers(&token["top"], "token_id").iter().position(|id| *id == token["token_id"].as_f64().unwrap());
        match place {
            Some(place) => assert_eq!(own, top[place], "{token}"),
            None => assert!(top.iter().all(|logprob| *logprob >= own), "{token}"),
        }
    }
}

#[test]
fn rows_have_what_job_or_row_asks_for() {
    let rows = [
        json!({"id": "as the job", "prompt": "a"}),
        json!({"id": "five", "prompt": "b", "logprobs": 5}),
        json!({"id": "its own alone", "prompt": "c", "logprobs": "0"}),
        json!({"id": "none", "prompt": "d", "logprobs": false}),
        json!({"id": "too many", "prompt": "e", "logprobs": 21}),
    ];
    let sections = "[generation]\nlogprobs = 2\nmax_tokens = 9\ntemperature = 1.0\n[results]\ntoken_ids = true\n";
    for model in ["fake".to_owned(), checkpoint("llama")] {
        let project = Project::new(&model, &rows, sections);
        project.run(&[]).with(SOME_ROWS_FAILED);
        let results = project.results("out");
        for (id, top_k) in [("as the job", 2), ("five", 5), ("its own alone", 0)] {
            sound(results.row(id), top_k);
        }
        assert!(results.row("none")["logprobs"].is_null() && results.row("none")["status"] == "ok");
        let failed = results.row("too many");
        assert!(failed["logprobs"].is_null() && failed["error_stage"] == "prompt", "{failed}");
        let error = "column `logprobs` expects an integer from 0 to 20, or false to leave them out, found 21";
        assert_eq!(failed["error"], error);
        read_back(&project.path("out"), rows.len());

        let shown = project.ended(["show", "out", "--json", "--columns", "id,logprobs"]).with(OK);
        let shown: Vec<Value> = shown.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let five = shown.iter().find(|row| row["id"] == "five").unwrap();
        assert_eq!(parts_of(five), parts_of(results.row("five")), "as a line what it is in Parquet");

        // What is done stays; with other log-probabilities it would not be one run's.
        project.run(&[]).with(SOME_ROWS_FAILED).saying(&["all rows are in"]);
        project.run(&["--set", "generation.logprobs=3"]).with(USAGE).saying(&["generation.logprobs was 2, is now 3"]);
    }
    // A row may ask where the job does not.
    let project = Project::new("fake", &rows[..2], "[results]\ntoken_ids = true\n");
    project.run(&[]).with(OK);
    let results = project.results("out");
    assert!(results.row("as the job")["logprobs"].is_null());
    sound(results.row("five"), 5);
}

/// To the last bit, as the rest of a row: a decoder on the CPU's cores computes each row by itself.
#[test]
fn a_row_among_others_has_what_it_has_alone() {
    let rows: Vec<Value> = (0..12)
        .map(|row| {
            let prompt = "counts the lamps again ".repeat(1 + row % 4);
            json!({"id": format!("r{row}"), "prompt": prompt, "logprobs": row % 7, "temperature": (row % 3) as f64 * 0.6})
        })
        .collect();
    let project = Project::new(&checkpoint("qwen3"), &rows, "[generation]\nmax_tokens = 12\n[results]\ntoken_ids = true\n");
    project.run(&["--set", "batching.rows=1", "--output", "alone"]).with(OK);
    project.run(&["--set", "batching.rows=8", "--output", "together"]).with(OK);
    let (alone, together) = (project.results("alone"), project.results("together"));
    together.assert_same(&alone, "log-probabilities");
    for row in 0..12 {
        sound(alone.row(&format!("r{row}")), row % 7);
    }
}

#[test]
fn bad_values_are_told_with_their_place() {
    for (given, found) in [("21", "21"), ("-1", "-1"), ("true", "true"), ("2.5", "2.5"), ("\"5\"", "the string \"5\"")] {
        let project = Project::new("fake", &[], &format!("[generation]\nlogprobs = {given}\n"));
        let expected = format!("`generation.logprobs` expects an integer from 0 to 20, or false to leave them out, found {found}");
        project.run(&[]).with(USAGE).saying(&["job.toml", &expected]);
    }
}

#[test]
fn transcripts_have_scores_of_their_own() {
    let project = Project::new("fake", &[json!({"id": "a", "audio": "a.wav"})], "[generation]\nlogprobs = 5\n");
    let refused = ["`generation.logprobs` is for generated text, and the job's rows are transcribed", "`avg_logprob`"];
    for command in ["run", "check"] {
        project.ended([command, "job.toml"]).with(USAGE).saying(&refused);
    }
}
