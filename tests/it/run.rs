//! A row's result does not depend on what runs beside it, on real checkpoints in small.

use serde_json::{Value, json};

use crate::program::{FAILED, OK, Project, Random, Results, checkpoint};

const WORDS: [&str; 12] = ["the", "harbour", "tide", "counts", "seven", "lamps", "und", "größe", "before", "dawn,", "again.", "写"];

/// Rows of many lengths, each with one more thing of its own.
fn rows() -> Vec<Value> {
    let mut random = Random(11);
    let kinds = [
        json!({}),
        json!({"temperature": 1.0}),
        json!({"temperature": 1.0, "seed": 5}),
        json!({"temperature": 0.7, "top_p": 0.9, "top_k": 40}),
        json!({"temperature": 1.3, "min_p": 0.02}),
        json!({"repetition_penalty": 1.3, "penalty_context": 7}),
        json!({"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.4}),
        json!({"temperature": 1.0, "logit_bias": {"40": 6.0, "41": -100.0, "60": 5.0}}),
        json!({"temperature": 1.0, "stop": ["e", "ing"]}),
        json!({"temperature": 1.0, "stop_token_ids": (20..60).collect::<Vec<_>>()}),
        json!({"temperature": 1.0, "ignore_eos": true, "max_tokens": 40}),
        json!({"max_tokens": 1}),
    ];
    (0..42u64)
        .map(|number| {
            let words: Vec<&str> = (0..=random.below(18)).map(|_| WORDS[random.below(12) as usize]).collect();
            let mut row = json!({"id": format!("r{number}"), "prompt": words.join(" ")});
            if number % 3 == 0 {
                row["max_tokens"] = json!(2 + random.below(30));
            }
            let own = kinds[number as usize % kinds.len()].as_object().unwrap().clone();
            row.as_object_mut().unwrap().extend(own);
            row
        })
        .collect()
}

/// (rows, order, prefill_chunk, prompt_concurrency, the budget in cache and scratch of so many rows of the longest)
const SCHEDULES: [(u32, &str, u32, u32, Option<u64>); 6] = [
    (1, "manifest", 512, 8, None),
    (4, "length", 512, 8, None),
    (4, "manifest", 5, 1, None),
    (16, "length", 512, 8, None),
    (16, "manifest", 5, 8, None),
    (16, "length", 5, 8, Some(3)),
];

fn same_on_every_schedule(model: &str) -> Results {
    let rows = rows();
    // A sampled token turns when its random number lies within rounding of a boundary between two tokens: once in some tens of
    // thousands of tokens. With this seed none does here.
    let sections = "[generation]\nmax_tokens = 20\nseed = 1\n[results]\ntoken_ids = true\n[batching]\nkv_budget = \"1GiB\"\n";
    let project = Project::new(&checkpoint(model), &rows, sections);
    let mut first: Option<Results> = None;
    for (at, (rows_together, order, chunk, concurrency, budget_rows)) in SCHEDULES.into_iter().enumerate() {
        let out = format!("out-{at}");
        let budget_bytes = budget_rows.map_or(1 << 30, |rows| bytes_of_rows(&project, rows));
        let settings = [
            format!("batching.rows={rows_together}"),
            format!("batching.order=\"{order}\""),
            format!("batching.prefill_chunk={chunk}"),
            format!("batching.prompt_concurrency={concurrency}"),
            format!("batching.kv_budget={budget_bytes}B"),
        ];
        let mut arguments = vec!["--output", &out, "--progress", "json"];
        arguments.extend(settings.iter().flat_map(|setting| ["--set", setting]));
        let ended = project.run(&arguments).with(OK);
        let results = project.results(&out);
        assert_eq!(results.len(), rows.len());
        let context = format!("{model}, {settings:?}");
        if let Some(first) = &first {
            results.assert_same(first, &context);
        }
        first.get_or_insert(results);

        let progress = ended.stderr.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        for event in progress.filter(|event| event["event"] == "progress") {
            assert_eq!(event["kv_bytes_max"], budget_bytes, "{context}");
            assert!(event["kv_bytes"].as_u64().unwrap() <= budget_bytes, "{context}: {event}");
            assert!(event["rows_running"].as_u64().unwrap() <= u64::from(rows_together), "{context}: {event}");
        }
        let together = project.record(&out)["summary"]["rows_in_batch"].as_f64().unwrap();
        match (rows_together, budget_rows) {
            (1, _) => assert!((together - 1.0).abs() < 1e-9, "{context}: {together}"),
            // The budget made rows wait, and did not make them go one by one.
            (_, Some(_)) => assert!(together > 1.0 && together < 8.0, "{context}: {together}"),
            // Chunks shorter than the prompts: rows join one at a time, several steps apart.
            _ if chunk < 10 => assert!(together > 1.2, "{context}: {together}"),
            (rows, None) => assert!(together > f64::from(rows) * 0.4, "{context}: {together}"),
        }
    }
    first.unwrap()
}

/// The bytes that so many rows as long as the longest take: a budget for none says what the shortest needs, one for that what
/// each of the others does.
fn bytes_of_rows(project: &Project, rows: u64) -> u64 {
    let run = |bytes: u64, out: &str| {
        let budget = format!("batching.kv_budget={bytes}B");
        project.run(&["--set", &budget, "--set", "batching.prefill_chunk=5", "--output", out, "--progress", "none"])
    };
    let number = |words: &str, before: &str| -> Option<u64> {
        words.split(before).nth(1).and_then(|rest| rest.split(' ').next()).and_then(|bytes| bytes.parse().ok())
    };
    let refused = run(1000, "refused").with(FAILED).stderr;
    let least = number(&refused, "1000 bytes, and ").unwrap_or_else(|| panic!("{refused}"));
    let out = format!("least-{rows}");
    let ended = run(least, &out);
    assert_eq!(ended.stderr, "");
    let failed = project.results(&out).rows.into_values().filter(|row| row["status"] == "failed");
    let needed = failed.map(|row| number(row["error"].as_str().unwrap(), " need ").unwrap_or_else(|| panic!("{row}")));
    needed.fold(least, u64::max) * rows
}

/// What the rows have of their own did something, so that the comparison above means something.
fn own_settings_count(results: &Results) {
    let (mut stopped, mut cut) = (0, 0);
    let mut texts = std::collections::BTreeSet::new();
    for row in results.rows.values() {
        let tokens = row["token_ids"].as_array().unwrap();
        assert_eq!(row["completion_tokens"], tokens.len(), "{row}");
        match row["finish_reason"].as_str().unwrap() {
            "stop" => stopped += 1,
            _ => cut += 1,
        }
        texts.insert(row["text"].as_str().unwrap());
    }
    assert!(stopped >= 3 && cut >= 10 && texts.len() >= 25, "{stopped} {cut} {}", texts.len());
    for (at, row) in results.rows.values().enumerate() {
        let text = row["text"].as_str().unwrap();
        match at % 12 {
            7 => assert!(row["token_ids"].as_array().unwrap().iter().all(|token| *token != 41), "{row}"),
            8 => assert!(!text.contains('e') && !text.contains("ing"), "{row}"),
            9 => {
                let tokens = row["token_ids"].as_array().unwrap();
                let at = tokens.iter().position(|token| (20..60).contains(&token.as_u64().unwrap()));
                assert!(at.is_none_or(|at| at + 1 == tokens.len() && row["finish_reason"] == "stop"), "{row}");
            }
            10 => assert!(row["completion_tokens"] == 40 && row["finish_reason"] == "length", "{row}"),
            11 => assert_eq!(row["completion_tokens"], 1, "{row}"),
            _ => {}
        }
    }
}

#[test]
fn llama_gives_the_same_on_every_schedule() {
    own_settings_count(&same_on_every_schedule("llama"));
}

#[test]
fn qwen3_gives_the_same_on_every_schedule() {
    own_settings_count(&same_on_every_schedule("qwen3"));
}

/// Its windows of 8 tokens wrap in every row.
#[test]
fn gemma3_gives_the_same_on_every_schedule() {
    own_settings_count(&same_on_every_schedule("gemma3_text"));
}

/// A system prompt at the head of every row, and of Gemma's far behind its window.
#[test]
fn a_shared_head_is_computed_once_and_changes_nothing() {
    let system = WORDS.repeat(2).join(" ");
    let rows = rows();
    for model in ["llama", "qwen3", "gemma3_text"] {
        let sections =
            format!("[prompt]\nsystem = {system:?}\n[generation]\nmax_tokens = 12\nseed = 1\n[results]\ntoken_ids = true\n");
        let project = Project::new(&checkpoint(model), &rows, &sections);
        let run = |out: &str, setting: &str| {
            project.run(&["--output", out, "--progress", "none", "--set", "batching.kv_budget=1GiB", "--set", setting]).with(OK);
            let summary = project.record(out)["summary"].clone();
            (project.results(out), summary["cached_tokens"].as_u64().unwrap(), summary["prompt_tokens"].as_u64().unwrap())
        };
        let (cold, none, _) = run("cold", "batching.prefix_cache=false");
        let (warm, cached, prompt) = run("warm", "batching.rows=8");
        assert_eq!(none, 0);
        assert!(cached > prompt / 2, "{model}: {cached} of {prompt} prompt tokens are copied");
        warm.assert_same(&cold, model);
    }
}

#[test]
fn seeds_belong_to_rows() {
    let row = |id: &str, seed: u64| json!({"id": id, "prompt": "the harbour", "temperature": 1.0, "seed": seed});
    let text = |rows: &[Value], id: &str| {
        let project = Project::new(&checkpoint("llama"), rows, "[generation]\nmax_tokens = 24\n");
        project.run(&["--progress", "none"]).with(OK);
        project.results("out").row(id)["text"].clone()
    };
    let alone = text(&[row("a", 1)], "a");
    assert_eq!(alone, text(&[row("z", 9), row("y", 8), row("a", 1)], "a"));
    assert_ne!(alone, text(&[row("a", 2)], "a"));
    assert_ne!(alone, text(&[row("b", 1)], "b"));
}
