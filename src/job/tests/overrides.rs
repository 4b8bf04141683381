//! A row's own sampling.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::job::Generation;

fn columns(value: Value) -> Map<String, Value> {
    let Value::Object(columns) = value else { panic!("{value}") };
    columns
}

fn overridden(value: Value) -> Result<Generation, String> {
    Generation::default().overridden_by(&columns(value))
}

#[test]
fn other_columns_change_nothing() {
    let row =
        columns(json!({ "id": "a", "prompt": "b", "Max_Tokens": 5, "top": 1, "max_tokens": null, "seed": "", "top_p": "  " }));
    assert!(!Generation::default().is_overridden_by(&row));
    assert_eq!(Generation::default().overridden_by(&row).unwrap(), Generation::default());
}

#[test]
fn every_key_from_json() {
    let row = json!({
        "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.5,
        "penalty_context": 64,
        "presence_penalty": 1, "frequency_penalty": -1.5, "logit_bias": { "7": -100 }, "stop": ["a", "\n"],
        "stop_token_ids": [1, 2],
        "ignore_eos": true, "seed": 12_345_678_901_234_u64, "logprobs": 5,
    });
    assert!(Generation::default().is_overridden_by(&columns(row.clone())));
    let expected = Generation {
        max_tokens: 5,
        temperature: 0.7,
        top_p: 0.9,
        top_k: 40,
        min_p: 0.1,
        repetition_penalty: 1.5,
        penalty_context: 64,
        presence_penalty: 1.0,
        frequency_penalty: -1.5,
        logit_bias: BTreeMap::from([(7, -100.0)]),
        stop: vec!["a".to_owned(), "\n".to_owned()],
        stop_token_ids: vec![1, 2],
        ignore_eos: true,
        seed: 12_345_678_901_234,
        logprobs: Some(5),
    };
    assert_eq!(overridden(row.clone()).unwrap(), expected);

    // The same as a CSV has it: each value as text.
    let text: Map<String, Value> =
        columns(row).into_iter().map(|(key, value)| (key, Value::String(format!(" {value} ")))).collect();
    assert_eq!(Generation::default().overridden_by(&text).unwrap(), expected);
}

#[test]
fn spellings_of_cells() {
    let max_tokens = |cell: &str| overridden(json!({ "max_tokens": cell })).map(|generation| generation.max_tokens);
    assert_eq!(max_tokens("64"), Ok(64));
    assert_eq!(max_tokens("64.0"), Ok(64));
    assert_eq!(max_tokens("+64"), Ok(64));
    assert_eq!(max_tokens("6.4e1"), Ok(64));
    assert_eq!(overridden(json!({ "max_tokens": 64.0 })).unwrap().max_tokens, 64);
    assert_eq!(overridden(json!({ "temperature": ".5" })).unwrap().temperature, 0.5);
    assert!(overridden(json!({ "ignore_eos": "True" })).unwrap().ignore_eos);
    assert!(!overridden(json!({ "ignore_eos": "FALSE" })).unwrap().ignore_eos);
    assert_eq!(overridden(json!({ "stop_token_ids": "7" })).unwrap().stop_token_ids, [7]);
    assert_eq!(overridden(json!({ "logprobs": "0" })).unwrap().logprobs, Some(0));
    assert_eq!(overridden(json!({ "logprobs": 20.0 })).unwrap().logprobs, Some(20));
    assert!(overridden(json!({ "stop_token_ids": [] })).unwrap().stop_token_ids.is_empty());
}

#[test]
fn stop_strings_stay_as_they_are() {
    let stop = |cell: &str| overridden(json!({ "stop": cell })).unwrap().stop;
    assert_eq!(stop("\n"), ["\n"]);
    assert_eq!(stop(" END"), [" END"]);
    assert_eq!(stop("5"), ["5"]);
    assert_eq!(stop("[a"), ["[a"]);
    assert_eq!(stop("[\"a\", \"b\"]"), ["a", "b"]);
}

#[test]
fn a_row_may_take_back_what_the_job_says() {
    let job = Generation {
        stop: vec!["a".to_owned()],
        logit_bias: BTreeMap::from([(1, 1.0)]),
        temperature: 1.0,
        logprobs: Some(5),
        ..Generation::default()
    };
    for off in [json!(false), json!("False")] {
        let row = json!({ "stop": [], "logit_bias": {}, "temperature": 0, "logprobs": off });
        assert_eq!(job.overridden_by(&columns(row)).unwrap(), Generation::default());
    }
}

#[test]
fn bad_values() {
    let cases = [
        (json!({ "max_tokens": 0 }), "column `max_tokens` expects an integer from 1 to 10000000, found 0"),
        (json!({ "max_tokens": -5 }), "column `max_tokens` expects an integer from 1 to 10000000, found -5"),
        (json!({ "max_tokens": 1.5 }), "column `max_tokens` expects an integer from 1 to 10000000, found 1.5"),
        (json!({ "max_tokens": "many" }), "column `max_tokens` expects an integer from 1 to 10000000, found the string \"many\""),
        (json!({ "max_tokens": true }), "column `max_tokens` expects an integer from 1 to 10000000, found true"),
        (json!({ "top_p": "nan" }), "column `top_p` expects a number above 0 and at most 1 (1 keeps all), found nan"),
        (json!({ "top_p": 0 }), "column `top_p` expects a number above 0 and at most 1 (1 keeps all), found 0"),
        (json!({ "temperature": "-1" }), "column `temperature` expects 0 (greedy) or a number from 0.000001 to 100, found -1"),
        (json!({ "seed": 1e300 }), "column `seed` expects an integer from 0 to 9223372036854775807, found 1e+300"),
        (json!({ "stop": [1] }), "column `stop` expects a string or an array of strings, found 1"),
        (json!({ "stop": [""] }), "column `stop` expects strings of 1 to 1024 bytes, found the string \"\""),
        (json!({ "ignore_eos": "yes" }), "column `ignore_eos` expects true or false, found the string \"yes\""),
        (
            json!({ "logit_bias": "{\"01\": 1}" }),
            "column `logit_bias` expects token ids, integers from 0 to 4294967295, as its keys, found \"01\"",
        ),
        (json!({ "logit_bias": { "1": 101 } }), "column `logit_bias` expects numbers from -100 to 100 as its values, found 101"),
        (json!({ "logprobs": 21 }), "column `logprobs` expects an integer from 0 to 20, or false to leave them out, found 21"),
        (json!({ "logprobs": -1 }), "column `logprobs` expects an integer from 0 to 20, or false to leave them out, found -1"),
        (
            json!({ "logprobs": "true" }),
            "column `logprobs` expects an integer from 0 to 20, or false to leave them out, found true",
        ),
        (json!({ "stop_token_ids": [-1] }), "column `stop_token_ids` expects an integer from 0 to 4294967295, found -1"),
        (json!({ "stop": vec!["a"; 65] }), "column `stop` expects a string or an array of strings, 64 at most, found 65 of them"),
        (json!({ "json_schema": {} }), "column `json_schema` asks for something that is not yet supported; empty it or rename it"),
    ];
    for (row, expected) in cases {
        assert_eq!(overridden(row.clone()).expect_err(&row.to_string()), expected);
    }
}
