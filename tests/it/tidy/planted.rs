//! Each rule sees what it is there for.

use super::rules::{anchors, backwards, dead_files, form, links, named_files, reading_order, walls};

#[track_caller]
fn found(problems: &[String], expected: &str) {
    assert!(problems.len() == 1 && problems[0].contains(expected), "{expected:?} was to be found: {problems:?}");
}

#[test]
fn walls_see_what_stands_outside() {
    found(&walls("src/run/open.rs", "fn a() {}\nuse mlx_rs::Array;"), "src/run/open.rs:2 names mlx_rs");
    found(&walls("src/engine/cache.rs", "mlx_sys::mlx_array_new()"), "names mlx_sys");
    found(&walls("src/engine/cache.rs", "unsafe { f() }"), "names unsafe");
    found(&walls("src/report/tally.rs", "use arrow::array::Array;"), "names arrow");
    found(&walls("src/run/open.rs", "parquet::file()"), "names parquet");
    found(&walls("src/manifest/mod.rs", "use anyhow::Result;"), "names anyhow");
    found(&walls("src/run/mod.rs", "indicatif::ProgressBar"), "names indicatif");
    found(&walls("src/run/mod.rs", "clap::Parser"), "names clap");
    found(&walls("tests/it/run.rs", "unsafe { f() }"), "no test needs it");
    for planted in ["use std::time::Duration;", "use std::fs;", "rate: f64", "x as f32", "rand::random()", "HashMap::new()"] {
        found(&walls("src/schedule/sequence.rs", planted), "the scheduler has no clock");
    }
    assert!(walls("src/engine/mlx.rs", "use mlx_rs::Array; // unsafe").is_empty());
    assert!(walls("src/sink/schema.rs", "use arrow::array::Array; let text = \"mlx_rs\";").is_empty());
    assert!(walls("src/enginex/mlx.rs", "use mlx_rs::Array;").len() == 1, "a folder is meant, not a beginning");
}

#[test]
fn imports_forward_are_seen() {
    let order = reading_order("//! pub mod no;\npub mod job;\npub mod sink;\npub mod run;\n");
    assert_eq!(order, ["job", "sink", "run"]);
    found(&backwards("src/job/mod.rs", "use crate::{\n    run::Status,\n};", &order), "src/job/mod.rs:2 imports run");
    found(&backwards("src/sink/mod.rs", "fn f() -> crate::run::Status {}", &order), "imports run");
    found(&backwards("src/sink/mod.rs", "use crate::Job;", &order), "name the module");
    found(&backwards("src/media/mod.rs", "", &order), "does not declare media");
    assert!(backwards("src/run/mod.rs", "use crate::{job::Job, run::Status, sink};", &order).is_empty());
}

#[test]
fn dead_files_are_seen() {
    let files = |main: &str| {
        let files =
            [("tests/it/main.rs", main), ("tests/it/model.rs", ""), ("tests/it/a/mod.rs", "mod b;"), ("tests/it/a/b.rs", "")];
        files.map(|(path, text)| (path.to_owned(), text.to_owned()))
    };
    found(&dead_files(&files("mod a;\n// mod model;")), "tests/it/model.rs is compiled by nobody");
    assert!(dead_files(&files("mod a;\npub mod model;")).is_empty());
    assert!(dead_files(&files("mod a;\n#[path = \"model.rs\"]\nmod tests;")).is_empty());
}

#[test]
fn bad_form_is_seen() {
    found(&form("src/a.rs", &"x".repeat(133)), "src/a.rs:1 has 133 characters");
    found(&form("src/a.rs", &format!("// {}", "x".repeat(130))), "src/a.rs:1 has 133 characters");
    assert!(form("src/a.rs", &format!("    \"{}\",", "x".repeat(130))).is_empty(), "a text alone in its line");
    found(&form("src/a.rs", &"x\n".repeat(601)), "601 lines");
    found(&form("src/job/tests/errors.rs", "x"), "take it out of LONG_FILES");
    found(&form("src/run/util.rs", ""), "a module called util");
    found(&form("src/common/mod.rs", ""), "a module called common");
    found(&form("src/a.rs", "#[test]\n#[ignore]\nfn a() {}"), "src/a.rs:2 ignores a test");
    found(&form("src/a.rs", "proptest! {\n}"), "1 proptest! blocks");
    assert!(form("src/a.rs", "#[ignore = \"needs a model\"]\nproptest! { failure_persistence: None }").is_empty());
    assert!(form("src/a.rs", &"é".repeat(132)).is_empty(), "characters are counted, not bytes");
}

#[test]
fn links_and_names_are_read() {
    let page = "See [a](b.md#c) and ![d](e.png).\n```\n[no](no.md)\n```\n[f](#g)";
    let expected = [(1, "b.md#c"), (1, "e.png"), (5, "#g")].map(|(line, target)| (line, target.to_owned()));
    assert_eq!(links(page), expected);
    assert_eq!(anchors("# What a run leaves, behind\n## `[job]`\ntext"), ["what-a-run-leaves-behind", "job"]);
    let text = "`docs/output.md`, src/lib.rs. goldens/models/NAME.json docs/{a,b}.md src/engine and https://x/docs/no.md";
    let expected = [(1, "docs/output.md"), (1, "src/lib.rs")].map(|(line, name)| (line, name.to_owned()));
    assert_eq!(named_files(text), expected);
}
