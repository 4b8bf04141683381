//! `mlxbatch bench`, on a checkpoint small enough for any machine.

use std::fs;

use serde_json::{Value, json};

use crate::program::{Ended, FAILED, OK, USAGE, checkpoint, program};

fn bench(arguments: &[&str]) -> Ended {
    let model = checkpoint("llama");
    Ended::of(program(["bench", &model, "--device", "cpu"].iter().chain(arguments)).output().unwrap())
}

#[test]
fn counts_are_exact_and_figures_agree_with_each_other() {
    let arguments =
        ["--prompts", "10", "--prompt-tokens", "3..40", "--new-tokens", "6", "--rows", "1,4", "--repeat", "2", "--json"];
    let ended = bench(&arguments).with(OK).saying(&["1 rows, warm-up", "4 rows, run 2 of 2"]);
    let report = ended.json();
    assert_eq!((&report["device"], &report["dtype"]), (&json!("cpu"), &json!("float32")));
    let workload = &report["workload"];
    assert_eq!((&workload["prompts"], &workload["output_tokens"]), (&json!(10), &json!(60)));
    let (prompt_tokens, weights) = (workload["prompt_tokens"].as_u64().unwrap(), report["weight_bytes"].as_u64().unwrap());
    assert!((30..=400).contains(&prompt_tokens) && weights > 0);
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.iter().map(|result| result["rows"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 4]);
    for result in results {
        let number = |name: &str| result[name].as_f64().unwrap_or_else(|| panic!("{name}: {result}"));
        assert_eq!((number("runs"), result["wall_seconds_of_runs"].as_array().unwrap().len()), (2.0, 2));
        let (output, total) = (number("output_tokens_per_second"), number("total_tokens_per_second"));
        assert!((total / output - (prompt_tokens as f64 + 60.0) / 60.0).abs() < 1e-6, "{result}");
        for (low, high) in [
            ("ttft_ms_p50", "ttft_ms_p95"),
            ("decode_step_ms_p50", "decode_step_ms_p95"),
            ("prefill_step_ms_p50", "prefill_step_ms_p95"),
        ] {
            assert!(0.0 < number(low) && number(low) <= number(high) && number(high) <= 1e3 * 60.0, "{low}: {result}");
        }
        assert!(number("ttft_ms_p95") <= number("wall_seconds") * 1e3 * 2.0, "{result}");
        assert!(0.0 < number("host_share") && number("host_share") < 1.0, "{result}");
        assert!(0.0 < number("schedule_us_per_step") && number("schedule_us_per_step") < number("host_ms_per_step") * 1e3 * 2.0);
        assert!(0.0 < number("occupancy") && number("occupancy") <= 1.0, "{result}");
        assert_eq!(number("cached_tokens"), 0.0, "random prompts have nothing in common");
        assert!(number("peak_memory_bytes") > weights as f64);
        assert_eq!(number("predicted_memory_bytes"), number("kv_bytes_max") + weights as f64);
    }
    // Alone, a prompt of 40 tokens at most is computed in one step, and each of five more tokens in a step of its own.
    assert_eq!((&results[0]["prefill_steps"], &results[0]["decode_steps"]), (&json!(10), &json!(50)));
    assert_eq!(results[0]["occupancy"], 1.0);
}

#[test]
fn a_workload_that_was_dumped_gives_the_same_outputs_at_any_number_of_rows() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (workload, first, second) = (path("workload.json"), path("first.json"), path("second.json"));
    let made = ["--workload", "c", "--prefix-tokens", "30", "--prompt-tokens", "2..20", "--new-tokens", "9", "--prompts", "7"];
    let made = [made.as_slice(), &["--seed", "5"]].concat();
    assert_eq!(bench(&[made.as_slice(), &["--dump", &workload]].concat()).with(OK).stdout, "", "nothing is measured");
    bench(&[made.as_slice(), &["--rows", "3", "--repeat", "1", "--outputs", &first]].concat()).with(OK);
    let loaded = ["--load", &workload, "--order", "manifest", "--rows", "7", "--repeat", "1", "--outputs", &second, "--json"];
    let report = bench(&loaded).with(OK).json();
    assert_eq!((&report["workload"]["name"], &report["workload"]["output_tokens"]), (&json!(workload), &json!(63)));
    let read = |file: &str| serde_json::from_slice::<Value>(&fs::read(file).unwrap()).unwrap();
    let prompts = read(&workload);
    let prompts = prompts.as_array().unwrap();
    assert_eq!(prompts.len(), 7);
    assert!(prompts.iter().all(|row| row["max_tokens"] == 9 && (32..=50).contains(&row["prompt"].as_array().unwrap().len())));
    assert_eq!(read(&first), read(&second));
    assert!(read(&first).as_array().unwrap().iter().all(|tokens| tokens.as_array().unwrap().len() == 9));
}

#[test]
fn a_table_is_printed_and_says_what_to_report() {
    let table =
        bench(&["--prompts", "3", "--prompt-tokens", "3..5", "--new-tokens", "2", "--rows", "2", "--repeat", "1"]).with(OK).stdout;
    for part in
        ["float32 on the CPU, MLX 0.", "workload a: 3 prompts", "6 new tokens", "output tokens/s", "memory predicted", "--json"]
    {
        assert!(table.contains(part), "{part}: {table}");
    }
}

#[test]
fn what_cannot_be_measured_is_refused_with_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |content: &str, parts: &[&str]| {
        let file = folder.path().join("w.json");
        fs::write(&file, content).unwrap();
        bench(&["--load", file.to_str().unwrap()]).with(USAGE).saying(parts);
    };
    refused("[", &["w.json is not a workload", "as --dump writes"]);
    refused("[]", &["the list is empty"]);
    refused(r#"[{"prompt": [1], "tokens": 3}]"#, &["unknown field"]);
    refused(
        r#"[{"prompt": [1, 512], "max_tokens": 3}]"#,
        &["prompt 0 of the workload has the token 512", "512 tokens (ids from 0)"],
    );
    refused(r#"[{"prompt": [], "max_tokens": 3}]"#, &["prompt 0 of the workload cannot be computed", "has no tokens"]);
    refused(r#"[{"prompt": [1], "max_tokens": 0}]"#, &["max_tokens is 0"]);
    bench(&["--load", "absent.json"]).with(USAGE).saying(&["cannot read absent.json"]);
    bench(&["--workload", "b"]).with(USAGE).saying(&["more than the model's context of 256 tokens"]);
    bench(&["--rows", "1,2", "--outputs", "o.json"]).with(USAGE).saying(&["give --rows one number"]);
    bench(&["--prompt-tokens", "9..3"]).with(USAGE).saying(&["9 is more than 3"]);
    bench(&["--kv-budget", "3"]).with(USAGE).saying(&["a size with its unit"]);
    bench(&["--kv-budget", "1KiB", "--prompts", "1", "--new-tokens", "1", "--prompt-tokens", "1..2"])
        .with(USAGE)
        .saying(&["the budget is"]);
    bench(&["--prompts", "1000000", "--prompt-tokens", "1..1000000"]).with(USAGE).saying(&["lower --prompts or --prompt-tokens"]);
    bench(&["--media", "."]).with(USAGE).saying(&["--media is for models that see or hear"]);
    let speech = checkpoint("speech");
    let models = fs::read_dir(&speech).unwrap().map(|entry| entry.unwrap().path());
    let whisper = models.into_iter().find(|path| path.join("config.json").exists()).unwrap();
    let ended = Ended::of(program(["bench", whisper.to_str().unwrap()]).output().unwrap());
    ended.with(USAGE).saying(&["bench measures models that write text", "whisper"]);
    Ended::of(program(["bench", "nowhere.gguf"]).output().unwrap()).with(FAILED).saying(&["nowhere.gguf"]);
}
