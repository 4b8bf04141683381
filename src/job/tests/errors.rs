//! What is said about each kind of fault, word for word, and what no file may do.

use std::path::Path;

use insta::assert_snapshot;
use proptest::prelude::*;

use super::{LEAST, read, read_with};
use crate::job::{Job, JobError};

/// The message for [`LEAST`] with more keys after it.
fn message(more: &str) -> String {
    read(&format!("{LEAST}{more}")).expect_err("a faulty job").to_string()
}

fn message_with(settings: &[&str]) -> String {
    read_with(LEAST, settings).expect_err("a faulty job").to_string()
}

#[test]
fn misspelt_key() {
    assert_snapshot!(message("[generation]\ntemprature = 0.7\n"), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:1: unknown key `generation.temprature`
      |
    6 | temprature = 0.7
      | ^^^^^^^^^^
      = help: did you mean `generation.temperature`?
    ");
}

#[test]
fn misspelt_table() {
    let text = "[modle]\npath = \"fake\"\n[input]\nmanifest = [\"rows.jsonl\"]\n";
    assert_snapshot!(read(text).unwrap_err(), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:1:2: unknown table or key `modle`
      |
    1 | [modle]
      |  ^^^^^
      = help: did you mean `model`?
    ");
}

#[test]
fn misspelt_key_that_must_be_there() {
    let text = "[model]\npth = \"fake\"\n[input]\nmanifests = [\"rows.jsonl\"]\n";
    assert_snapshot!(read(text).unwrap_err(), @r#"
    the job /jobs/job.toml cannot be run: 2 problems

    /jobs/job.toml:2:1: unknown key `model.pth`
      |
    2 | pth = "fake"
      | ^^^
      = help: did you mean `model.path`?

    /jobs/job.toml:4:1: unknown key `input.manifests`
      |
    4 | manifests = ["rows.jsonl"]
      | ^^^^^^^^^
      = help: did you mean `input.manifest`?
    "#);
}

#[test]
fn key_of_another_table() {
    assert_snapshot!(message("[batching]\nmax_tokens = 5\n"), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:1: unknown key `batching.max_tokens`
      |
    6 | max_tokens = 5
      | ^^^^^^^^^^
      = help: did you mean `generation.max_tokens`?
    ");
}

#[test]
fn key_of_another_program() {
    assert_snapshot!(message("[generation]\nmax_new_tokens = 5\n"), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:1: unknown key `generation.max_new_tokens`
      |
    6 | max_new_tokens = 5
      | ^^^^^^^^^^^^^^
      = help: did you mean `generation.max_tokens`?
    ");
}

#[test]
fn key_like_no_other() {
    assert_snapshot!(message("[prompt]\n\"sch\\u0007öön\" = 5\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:1: unknown key `prompt.sch\u{7}öön`
      |
    6 | "sch\u0007öön" = 5
      | ^^^^^^^^^^^^^^
      = help: [prompt] has the keys system, template, thinking
    "#);
}

#[test]
fn wrong_type() {
    assert_snapshot!(message("[generation]\nmax_tokens = \"many\"\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:14: `generation.max_tokens` expects an integer from 1 to 10000000, found the string "many"
      |
    6 | max_tokens = "many"
      |              ^^^^^^
    "#);
}

#[test]
fn integer_written_as_a_float() {
    assert_snapshot!(message("[generation]\nmax_tokens = 64.0\n"), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:14: `generation.max_tokens` expects an integer from 1 to 10000000, found 64.0
      |
    6 | max_tokens = 64.0
      |              ^^^^
    ");
}

#[test]
fn value_in_the_place_of_a_table() {
    assert_snapshot!(read("batching = 32\n[model]\npath = \"fake\"\n[input]\nmanifest = \"rows.csv\"\n").unwrap_err(), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:1:12: `batching` expects a table, found 32
      |
    1 | batching = 32
      |            ^^
      = help: write its keys under [batching]
    ");
}

#[test]
fn table_in_the_place_of_a_value() {
    assert_snapshot!(message("[batching.rows]\n"), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:5:1: `batching.rows` expects an integer from 1 to 65536, found a table
      |
    5 | [batching.rows]
      | ^^^^^^^^^^^^^^^
    ");
}

#[test]
fn out_of_range() {
    assert_snapshot!(message("[generation]\ntop_p = 1.5\n"), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:9: `generation.top_p` expects a number above 0 and at most 1 (1 keeps all), found 1.5
      |
    6 | top_p = 1.5
      |         ^^^
    ");
}

#[test]
fn not_a_number() {
    assert_snapshot!(message("[generation]\ntemperature = nan\n"), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:15: `generation.temperature` expects 0 (greedy) or a number from 0.000001 to 100, found nan
      |
    6 | temperature = nan
      |               ^^^
    ");
}

#[test]
fn integer_beyond_all_types() {
    assert_snapshot!(message("[generation]\nseed = 340282366920938463463374607431768211456000\n"), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:8: `generation.seed` expects an integer from 0 to 9223372036854775807, found 340282366920938463463374607431768211456000
      |
    6 | seed = 340282366920938463463374607431768211456000
      |        ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
    ");
}

#[test]
fn element_of_an_array() {
    assert_snapshot!(message("[generation]\nstop = [\n  \"a\",\n  5,\n]\n"), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:8:3: `generation.stop` expects a string or an array of strings, found 5
      |
    8 |   5,
      |   ^
    ");
}

#[test]
fn token_id_that_is_none() {
    assert_snapshot!(message("[generation.logit_bias]\n\"the\" = -5\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:1: `generation.logit_bias` expects token ids, integers from 0 to 4294967295, as its keys, found "the"
      |
    6 | "the" = -5
      | ^^^^^
    "#);
}

#[test]
fn misspelt_word() {
    assert_snapshot!(message("[batching]\norder = \"lenght\"\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:9: `batching.order` expects one of "length", "manifest", found the string "lenght"
      |
    6 | order = "lenght"
      |         ^^^^^^^^
      = help: did you mean "length"?
    "#);
}

#[test]
fn budget_without_a_unit() {
    assert_snapshot!(message("[batching]\nkv_budget = \"6\"\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:13: `batching.kv_budget` expects "auto" or a size with its unit, such as "6GiB" or "500MB", above 0 and at most 1024 TiB, found the string "6"
      |
    6 | kv_budget = "6"
      |             ^^^
    "#);
}

#[test]
fn budgets_that_are_none() {
    for budget in
        ["\"0GiB\"", "\"0.1B\"", "\"-1GiB\"", "\"6 bananas\"", "\"\"", "\"99999EiB\"", "\"infGiB\"", "\"NaNGB\"", "6", "6.5", "[]"]
    {
        let error = message(&format!("[batching]\nkv_budget = {budget}\n"));
        assert!(error.contains("`batching.kv_budget` expects \"auto\" or a size with its unit"), "{budget}: {error}");
    }
}

#[test]
fn manifest_and_folder() {
    assert_snapshot!(message("folder = \"texts\"\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:5:1: `input.manifest` and `input.folder` are both given, and a job reads one of them
      |
    5 | folder = "texts"
      | ^^^^^^
      = help: remove one of the two
    "#);
}

#[test]
fn neither_manifest_nor_folder() {
    assert_snapshot!(read("[model]\npath = \"fake\"\n[input]\n").unwrap_err(), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:3:2: neither `input.manifest` nor `input.folder` is given
      |
    3 | [input]
      |  ^^^^^
      = help: manifest = ["data/*.jsonl"], or folder = "texts"
    "#);
}

#[test]
fn empty_file() {
    assert_snapshot!(read("").unwrap_err(), @r#"
    the job /jobs/job.toml cannot be run: 2 problems

    /jobs/job.toml: `model.path` is missing
      = help: path = "model.gguf": a folder, a .gguf file or a hub id such as "org/name"

    /jobs/job.toml: neither `input.manifest` nor `input.folder` is given
      = help: manifest = ["data/*.jsonl"], or folder = "texts"
    "#);
}

#[test]
fn glob_without_folder() {
    assert_snapshot!(message("glob = \"*.txt\"\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:5:1: `input.glob` chooses files of an `input.folder`, and there is none
      |
    5 | glob = "*.txt"
      | ^^^^
      = help: put the pattern into `input.manifest`, as in "data/*.jsonl", or give `input.folder`
    "#);
}

#[test]
fn glob_that_is_none() {
    let text = "[model]\npath = \"fake\"\n[input]\nfolder = \"texts\"\nglob = \"[a\"\n";
    assert_snapshot!(read(text).unwrap_err(), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:5:8: `input.glob` expects a pattern of file names such as "**/*.txt" (unclosed character class; missing ']'), found the string "[a"
      |
    5 | glob = "[a"
      |        ^^^^
    "#);
}

#[test]
fn output_inside_the_input() {
    let text = |glob| format!("[job]\noutput = \"texts/out\"\n[model]\npath = \"fake\"\n[input]\nfolder = \"texts\"\n{glob}\n");
    assert_snapshot!(read(&text("glob = \"**/*\"")).unwrap_err(), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:7:1: `job.output` lies inside `input.folder`, and `input.glob` would read results as rows
      |
    7 | glob = "**/*"
      | ^^^^
      = help: put the output elsewhere, or give `input.glob` a pattern that leaves results out
    "#);
    for glob in ["", "glob = \"*\"", "glob = \"**/*.txt\"", "glob = \"*/[!o]*/*.jsonl\""] {
        assert!(read(&text(glob)).is_ok(), "{glob}");
    }
}

#[test]
fn prompt_and_messages_in_one_column() {
    assert_snapshot!(message("columns = { id = \"chat\", messages = \"chat\", prompt = \"chat\" }\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:5:26: `input.columns.prompt` and `input.columns.messages` are both the column "chat"
      |
    5 | columns = { id = "chat", messages = "chat", prompt = "chat" }
      |                          ^^^^^^^^
      = help: a column holds either a prompt as text or a conversation; leave the other one out
    "#);
    assert_snapshot!(message("columns = { prompt = \"messages\" }\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:5:13: `input.columns.prompt` and `input.columns.messages` are both the column "messages"
      |
    5 | columns = { prompt = "messages" }
      |             ^^^^^^
      = help: a column holds either a prompt as text or a conversation; leave the other one out
    "#);
}

#[test]
fn recording_and_text_in_one_column() {
    assert_snapshot!(message("columns = { audio = \"path\", language = \"path\" }\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:5:13: `input.columns.audio` and `input.columns.language` are both the column "path"
      |
    5 | columns = { audio = "path", language = "path" }
      |             ^^^^^
      = help: a column holds either a recording or text; leave one of the two out, or rename it
    "#);
    assert_snapshot!(message("columns = { reference = \"audio\" }\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:5:13: `input.columns.audio` and `input.columns.reference` are both the column "audio"
      |
    5 | columns = { reference = "audio" }
      |             ^^^^^^^^^
      = help: a column holds either a recording or text; leave one of the two out, or rename it
    "#);
}

#[test]
fn misspelt_keys_of_recordings() {
    assert_snapshot!(message("[audio]\nchannel = \"mix\"\nlong = \"spilt\"\n[transcripton]\n"), @r#"
    the job /jobs/job.toml cannot be run: 3 problems

    /jobs/job.toml:6:1: unknown key `audio.channel`
      |
    6 | channel = "mix"
      | ^^^^^^^
      = help: did you mean `audio.channels`?

    /jobs/job.toml:7:8: `audio.long` expects one of "split", "truncate", found the string "spilt"
      |
    7 | long = "spilt"
      |        ^^^^^^^
      = help: did you mean "split"?

    /jobs/job.toml:8:2: unknown table or key `transcripton`
      |
    8 | [transcripton]
      |  ^^^^^^^^^^^^
      = help: did you mean `transcription`?
    "#);
    assert_snapshot!(message("[transcription]\ntemperature = 0\nlanguages = \"en\"\n"), @r#"
    the job /jobs/job.toml cannot be run: 2 problems

    /jobs/job.toml:6:1: unknown key `transcription.temperature`
      |
    6 | temperature = 0
      | ^^^^^^^^^^^
      = help: did you mean `transcription.temperatures`?

    /jobs/job.toml:7:1: unknown key `transcription.languages`
      |
    7 | languages = "en"
      | ^^^^^^^^^
      = help: did you mean `transcription.language`?
    "#);
}

#[test]
fn transcription_out_of_range() {
    let text = r#"[transcription]
task = "transscribe"
language = " "
timestamps = "yes"
initial_prompt = 5
temperatures = [0, 1.5]
compression_ratio_threshold = 0
logprob_threshold = true
no_speech_threshold = 60
suppress_tokens = [-2]
suppress_blank = 1
max_initial_timestamp = 31
"#;
    assert_snapshot!(message(text), @r#"
    the job /jobs/job.toml cannot be run: 11 problems

    /jobs/job.toml:6:8: `transcription.task` expects one of "transcribe", "translate", found the string "transscribe"
      |
    6 | task = "transscribe"
      |        ^^^^^^^^^^^^^
      = help: did you mean "transcribe"?

    /jobs/job.toml:7:12: `transcription.language` expects a language such as "en" or "English", of 40 characters at most, not empty and without control characters, found the string " "
      |
    7 | language = " "
      |            ^^^

    /jobs/job.toml:8:14: `transcription.timestamps` expects true or false, found the string "yes"
      |
    8 | timestamps = "yes"
      |              ^^^^^

    /jobs/job.toml:9:18: `transcription.initial_prompt` expects text, found 5
      |
    9 | initial_prompt = 5
      |                  ^

    /jobs/job.toml:10:20: `transcription.temperatures` expects numbers from 0 to 1, found 1.5
       |
    10 | temperatures = [0, 1.5]
       |                    ^^^

    /jobs/job.toml:11:31: `transcription.compression_ratio_threshold` expects a number above 0, or false to leave it off, found 0
       |
    11 | compression_ratio_threshold = 0
       |                               ^

    /jobs/job.toml:12:21: `transcription.logprob_threshold` expects a number of at most 0, or false to leave it off, found true
       |
    12 | logprob_threshold = true
       |                     ^^^^

    /jobs/job.toml:13:23: `transcription.no_speech_threshold` expects a number from 0 to 1, or false to leave it off, found 60
       |
    13 | no_speech_threshold = 60
       |                       ^^

    /jobs/job.toml:14:20: `transcription.suppress_tokens` expects integers from -1 to 4294967295, found -2
       |
    14 | suppress_tokens = [-2]
       |                    ^^

    /jobs/job.toml:15:18: `transcription.suppress_blank` expects true or false, found 1
       |
    15 | suppress_blank = 1
       |                  ^

    /jobs/job.toml:16:25: `transcription.max_initial_timestamp` expects seconds, from 0 to 30, found 31
       |
    16 | max_initial_timestamp = 31
       |                         ^^
    "#);
}

#[test]
fn transcription_lists_that_are_none() {
    for (key, value, expected) in [
        ("temperatures", "0.5".to_owned(), "an array of 1 to 16 numbers from 0 to 1, found 0.5"),
        ("temperatures", "[]".to_owned(), "an array of 1 to 16 numbers from 0 to 1, found an empty array"),
        ("temperatures", format!("[{}]", "0,".repeat(17)), "an array of 1 to 16 numbers from 0 to 1, found 17 of them"),
        ("temperatures", "[nan]".to_owned(), "numbers from 0 to 1, found nan"),
        ("suppress_tokens", "-1".to_owned(), "an array of token ids, in which -1 stands for what is not speech, found -1"),
        ("suppress_tokens", "[1.0]".to_owned(), "integers from -1 to 4294967295, found 1.0"),
        ("suppress_tokens", "[4294967296]".to_owned(), "integers from -1 to 4294967295, found 4294967296"),
        ("suppress_tokens", format!("[{}]", "1,".repeat(4097)), "4096 token ids at most, found 4097 of them"),
        ("language", format!("\"{}\"", "x".repeat(41)), "a language such as \"en\" or \"English\", of 40 characters at most"),
        ("no_speech_threshold", "\"off\"".to_owned(), "a number from 0 to 1, or false to leave it off, found the string \"off\""),
    ] {
        let error = message(&format!("[transcription]\n{key} = {value}\n"));
        assert!(error.contains(&format!("`transcription.{key}` expects {expected}")), "{error}");
    }
}

#[test]
fn column_kept_twice() {
    assert_snapshot!(message("[results]\nkeep_columns = [\"a\", \"b\", \"a\"]\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:27: `results.keep_columns` expects each column once, found the string "a"
      |
    6 | keep_columns = ["a", "b", "a"]
      |                           ^^^
    "#);
}

#[test]
fn home_folder() {
    assert_snapshot!(message("[job]\noutput = \"~/out\"\n"), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:10: `job.output` expects a folder for the results; `~` is not expanded here, write the whole path, found the string "~/out"
      |
    6 | output = "~/out"
      |          ^^^^^^^
    "#);
}

#[test]
fn later_keys_are_refused() {
    let later = [
        ("[job]\ntask = \"score\"", "job.task"),
        ("[job]\ntask = \"choose\"", "job.task"),
        ("[batching]\nkv_bits = 8", "batching.kv_bits"),
        ("[batching]\nkv_bits = 4", "batching.kv_bits"),
        ("columns = { video = \"clip\" }", "input.columns.video"),
        ("[generation]\njson_schema = {}", "generation.json_schema"),
        ("[generation]\nxtc_probability = 0.5", "generation.xtc_probability"),
        ("[generation]\nxtc_threshold = 0.1", "generation.xtc_threshold"),
    ];
    for (text, key) in later {
        let JobError::Problems { problems, .. } = read(&format!("{LEAST}{text}\n")).expect_err(text) else { panic!("{text}") };
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert_eq!(problems[0].key.as_deref(), Some(key));
        assert!(problems[0].message.ends_with("is not yet supported"), "{problems:?}");
        assert!(problems[0].help.is_some(), "{problems:?}");
    }
    let adapter = "[model]\npath = \"fake\"\nadapter = \"lora\"\n[input]\nmanifest = [\"a.jsonl\", \"b.tar\"]\n";
    assert_snapshot!(read(adapter).unwrap_err(), @r#"
    the job /jobs/job.toml cannot be run: 2 problems

    /jobs/job.toml:3:1: `model.adapter` is not yet supported
      |
    3 | adapter = "lora"
      | ^^^^^^^
      = help: remove it to run the model without the adapter

    /jobs/job.toml:5:24: `input.manifest` expects JSONL, CSV, TSV or Parquet files (.tar is not yet supported), found the string "b.tar"
      |
    5 | manifest = ["a.jsonl", "b.tar"]
      |                        ^^^^^^^
    "#);
}

#[test]
fn settings() {
    let settings = [
        "generation.max_tokens=lots",
        "generation.maxtokens=4",
        "rows=4",
        "generation=4",
        "input.columns={}",
        "x",
        "=",
        "a.b.c.d.e=1",
        "model.path.x=1",
        "generation.stop=[\"a\"",
    ];
    assert_snapshot!(message_with(&settings), @r#"
    the job /jobs/job.toml cannot be run: 10 problems

    --set generation.max_tokens=lots: `generation.max_tokens` expects an integer from 1 to 10000000, found the string "lots"

    --set generation.maxtokens=4: unknown key `generation.maxtokens`
      = help: did you mean `generation.max_tokens`?

    --set rows=4: `rows` is not the full name of a key
      = help: name the table and the key: generation.max_tokens

    --set generation=4: `generation` is not the full name of a key
      = help: name the table and the key: generation.max_tokens

    --set input.columns={}: `input.columns` is a table, and --set changes one key
      = help: name one of its keys

    --set x: no `=` between a key and a value
      = help: write --set generation.max_tokens=64

    --set =: `` is not the full name of a key
      = help: name the table and the key: generation.max_tokens

    --set a.b.c.d.e=1: `a.b.c.d.e` is not the full name of a key
      = help: name the table and the key: generation.max_tokens

    --set model.path.x=1: `path` in `model.path.x` is no table
      = help: name a key of a table

    --set generation.stop=["a": the value is not a valid TOML array: unclosed array, expected `]`
      = help: write it as in a job file and quote it for the shell: 'generation.stop=["a", "b"]'
    "#);
}

#[test]
fn setting_against_the_file() {
    assert_snapshot!(message_with(&["input.folder=texts"]), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    --set input.folder=texts: `input.manifest` and `input.folder` are both given, and a job reads one of them
      = help: remove one of the two
    ");
}

#[test]
fn not_toml() {
    assert_snapshot!(message("rows 32\nthinking = yes\n[model]\n"), @r"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:5:6: not valid TOML: key with no value, expected `=`
      |
    5 | rows 32
      |      ^
    ");
}

#[test]
fn windows_line_ends_and_byte_order_mark() {
    let text = "\u{feff}[modell]\r\npath = \"fake\"\r\n[input]\r\nmanifest = \"a.jsonl\"\r\nfoo = 1\r\n";
    let error = read(text).unwrap_err().to_string();
    assert!(!error.contains('\r'));
    assert_snapshot!(error, @r"
    the job /jobs/job.toml cannot be run: 2 problems

    /jobs/job.toml:1:2: unknown table or key `modell`
      |
    1 | [modell]
      |  ^^^^^^
      = help: did you mean `model`?

    /jobs/job.toml:5:1: unknown key `input.foo`
      |
    5 | foo = 1
      | ^^^
      = help: [input] has the keys manifest, folder, glob, columns
    ");
    let good = format!("\u{feff}{LEAST}").replace('\n', "\r\n");
    assert_eq!(read(&good).unwrap(), read(LEAST).unwrap());
}

#[test]
fn long_line() {
    let text = format!("[prompt]\nsystem = {{ a = \"{}\", b = 5, c = \"{}\" }}\n", "x".repeat(300), "y".repeat(300));
    assert_snapshot!(message(&text), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:6:10: `prompt.system` expects text, found a table
      |
    6 | system = { a = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
      |          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
    "#);
    let text = format!("input = {{ manifest = [\"{}\", 5] }}\n[model]\npath = \"fake\"\n", "é".repeat(300));
    assert_snapshot!(read(&text).unwrap_err(), @r#"
    the job /jobs/job.toml cannot be run: 1 problem

    /jobs/job.toml:1:327: `input.manifest` expects a manifest file or an array of them, globs included, found 5
      |
    1 | …ééééééééééééééééééééééééééééééééééééééééééééééééééééééééé", 5] }
      |                                                              ^
    "#);
}

#[test]
fn many_problems_are_counted() {
    let keys: String = (0..100_000).map(|index| format!("k{index} = 1\n")).collect();
    let JobError::Problems { problems, left_off, .. } = read(&keys).unwrap_err() else { panic!() };
    assert_eq!(problems.len() + left_off, 100_002);
    assert!(problems.len() <= 50);
}

/// The most a file can be, of what costs a parser most: with a quadratic step anywhere it would not end.
#[test]
fn large_files_are_refused_in_time() {
    let pieces = [
        "=\n",
        "[",
        "]\n",
        "{",
        "a\n",
        "\"",
        "'",
        "'''",
        "a=[\n",
        "a=1\n",
        "[a]\n",
        "[[a]]\n",
        "a.b.c=1\n",
        "\r",
        "\u{0}",
        "é",
        "a={",
    ];
    for piece in pieces {
        let text = piece.repeat((1 << 18) / piece.len());
        let error = read(&text).expect_err(piece).to_string();
        assert!(error.len() < 50_000, "{piece:?}: {} bytes of error", error.len());
    }
    let biases: String = (0..60_000).map(|id| format!("{id} = 1\n")).collect();
    assert!(message(&format!("[generation.logit_bias]\n{biases}")).contains("4096 token ids at most, found 60000 of them"));
}

fn read_bytes(bytes: &[u8]) -> Result<Job, JobError> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("job.toml");
    std::fs::write(&file, bytes).unwrap();
    Job::read(&file, &[])
}

#[test]
fn not_utf8() {
    let mut text = LEAST.as_bytes().to_vec();
    text.extend(b"[prompt]\nsystem = \"caf\xe9\"\n");
    let error = read_bytes(&text).unwrap_err().to_string();
    let shown = error.split_once("job.toml:").unwrap().1;
    assert_snapshot!(shown, @r#"
    6:14: the file is not UTF-8: byte 0xe9
      |
    6 | system = "caf�"
      |              ^
      = help: save it as UTF-8
    "#);
}

#[test]
fn too_large() {
    let error = read_bytes(&vec![b'\n'; (1 << 18) + 1]).unwrap_err();
    assert!(matches!(error, JobError::TooLarge { .. }), "{error}");
    assert!(read_bytes(&[LEAST.as_bytes(), &vec![b'\n'; (1 << 18) - LEAST.len()]].concat()).is_ok());
}

#[test]
fn absent_file() {
    let error = Job::read(Path::new("/no/such/job.toml"), &[]).unwrap_err();
    assert!(matches!(error, JobError::Read { .. }), "{error}");
    assert_eq!(error.to_string(), "failed to read the job file /no/such/job.toml");
}

#[test]
fn folder_in_the_place_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(Job::read(folder.path(), &[]), Err(JobError::Read { .. })));
}

#[test]
fn deep_nesting() {
    for (open, close) in [("[", "]"), ("{a=", "}")] {
        let text = format!("{LEAST}x = {}1{}\n", open.repeat(100_000), close.repeat(100_000));
        assert!(read(&text).is_err());
        assert!(read_with(LEAST, &[&format!("prompt.thinking={}", open.repeat(10_000))]).is_err());
    }
    assert!(read(&format!("{}x = 1\n", "a.".repeat(100_000))).is_err());
    assert!(read(&format!("[{}x]\n", "a.".repeat(100_000))).is_err());
    assert!(read_with(LEAST, &[&format!("{}x=1", "a.".repeat(100_000))]).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(text) = std::str::from_utf8(&bytes) {
            let _ = read(text).map_err(|error| error.to_string());
        }
        let text = String::from_utf8_lossy(&bytes);
        let _ = read_with(LEAST, &[&text]).map_err(|error| error.to_string());
    }

    /// Pieces of job files in any order: most are nearly TOML, and nearly jobs.
    #[test]
    fn no_pieces_panic(pieces in prop::collection::vec(prop::sample::select(PIECES), 0..30)) {
        let _ = read(&pieces.concat()).map_err(|error| error.to_string());
        let _ = read_with(LEAST, &[&pieces.concat()]).map_err(|error| error.to_string());
    }

    /// Cutting a good job anywhere and changing a byte of it.
    #[test]
    fn no_damage_panics(cut in 0..2000_usize, at in 0..2000_usize, byte in any::<u8>()) {
        let mut bytes = read(LEAST).unwrap().effective_toml().into_bytes();
        bytes.truncate(cut.max(1));
        let at = at % bytes.len();
        bytes[at] = byte;
        let _ = read(&String::from_utf8_lossy(&bytes)).map_err(|error| error.to_string());
    }
}

const PIECES: &[&str] = &[
    "[",
    "]",
    "{",
    "}",
    "=",
    ".",
    ",",
    "\"",
    "'",
    "\"\"\"",
    "'''",
    "\n",
    "\r\n",
    "\r",
    "\t",
    " ",
    "#",
    "\u{feff}",
    "\u{0}",
    "é",
    "🦀",
    "\\",
    "\\u",
    "-",
    "+",
    "1",
    "0x",
    "1e9",
    "inf",
    "nan",
    "true",
    "1979-05-27",
    "job",
    "model",
    "path",
    "input",
    "columns",
    "manifest",
    "folder",
    "generation",
    "stop",
    "logit_bias",
    "max_tokens",
    "[model]\n",
    "[[input]]\n",
    "[generation]\n",
    "[batching]\n",
    "path = \"fake\"\n",
    "manifest = [\"a.jsonl\"]\n",
    "kv_budget = \"6GiB\"\n",
    "temperature = 0.5\n",
    "keep_columns = []\n",
];
