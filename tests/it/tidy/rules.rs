//! The rules, each from a path and its text to what is wrong there.

use super::code::{code, crate_modules, words};

pub type Problems = Vec<String>;

const LINE_CHARACTERS_MAX: usize = 132;
const FILE_LINES_MAX: usize = 600;

/// Longer files, and why.
const LONG_FILES: &[(&str, &str)] = &[
    ("src/job/tests/errors.rs", "every message about a job file, one below the other, as a user sees it"),
    ("tests/it/manifest.rs", "a named test for each hostile manifest"),
];

/// A name, where alone it may stand, and why. A place that ends in `/` is a folder.
const WALLS: &[(&str, &[&str], &str)] = &[
    ("mlx_rs", &["src/engine/"], "another engine must not touch what lies outside src/engine"),
    ("mlx_sys", &["src/engine/ffi.rs"], "what mlx-rs lacks is called in one place"),
    ("unsafe", &["src/engine/ffi.rs"], "one file to read for who doubts memory"),
    ("arrow", &["src/sink/", "src/manifest/", "src/run/summary.rs"], "rows are plain types everywhere else"),
    ("parquet", &["src/sink/", "src/manifest/", "src/run/summary.rs"], "rows are plain types everywhere else"),
    ("clap", &["src/args.rs", "src/args/", "src/main.rs"], "what was typed ends there"),
    ("clap_complete", &["src/args.rs"], "what was typed ends there"),
    ("anyhow", &["src/run/", "src/sink/tests.rs"], "elsewhere an error says in its type what can go wrong"),
    ("indicatif", &["src/report/"], "the run tells events, and knows nothing of how they look"),
];

/// What the scheduler must not know: the same calls give the same plans, everywhere and at any time.
const NOT_IN_SCHEDULE: &[&str] = &[
    "time",
    "fs",
    "io",
    "env",
    "thread",
    "rand",
    "f32",
    "f64",
    "Instant",
    "SystemTime",
    "HashMap",
    "HashSet",
    "println",
    "eprintln",
];

const NO_MODULE_NAMES: &[&str] = &["util", "utils", "common", "helper", "helpers", "core", "types", "misc"];

pub fn walls(path: &str, text: &str) -> Problems {
    let mut problems = Vec::new();
    for (number, line) in code(text).lines().enumerate() {
        for word in words(line) {
            let at = format!("{path}:{}", number + 1);
            if let Some((_, places, reason)) = WALLS.iter().find(|(name, ..)| *name == word)
                && path.starts_with("src/")
                && !places.iter().any(|place| path == *place || place.ends_with('/') && path.starts_with(place))
            {
                problems.push(format!("{at} names {word}, which belongs to {}: {reason}", places.join(", ")));
            }
            if word == "unsafe" && !path.starts_with("src/") {
                problems.push(format!("{at} has unsafe, and no test needs it"));
            }
            if path.starts_with("src/schedule/") && NOT_IN_SCHEDULE.contains(&word) {
                problems
                    .push(format!("{at} names {word}: the scheduler has no clock, no I/O, no randomness, no floats, no hashing"));
            }
        }
    }
    problems
}

/// The modules that `src/lib.rs` declares, in its order.
pub fn reading_order(lib: &str) -> Vec<String> {
    let code = code(lib);
    code.lines().filter_map(|line| Some(line.strip_prefix("pub mod ")?.strip_suffix(';')?.to_owned())).collect()
}

/// Imports go to modules declared before one's own.
pub fn backwards(path: &str, text: &str, order: &[String]) -> Problems {
    let Some(module) = path.strip_prefix("src/").and_then(|path| path.split(['/', '.']).next()) else { return Vec::new() };
    if module == "lib" || module == "main" {
        return Vec::new();
    }
    let place = |name: &str| order.iter().position(|other| other == name);
    let Some(own) = place(module) else { return vec![format!("{path}: src/lib.rs does not declare {module}")] };
    let forward = |(line, name): (usize, String)| match place(&name) {
        Some(other) if other <= own => None,
        Some(_) => Some(format!("{path}:{line} imports {name}, which src/lib.rs declares after {module}")),
        None => Some(format!("{path}:{line} names crate::{name}: name the module that it comes from")),
    };
    crate_modules(&code(text)).into_iter().filter_map(forward).collect()
}

/// Every file is declared by the file above it.
pub fn dead_files(files: &[(String, String)]) -> Problems {
    let mut problems = Vec::new();
    for (path, _) in files {
        if ["src/lib.rs", "src/main.rs", "tests/it/main.rs", "tests/fuzz/decode.rs"].contains(&path.as_str()) {
            continue;
        }
        let stem = path.strip_suffix("/mod.rs").or(path.strip_suffix(".rs")).unwrap_or(path);
        let Some((folder, name)) = stem.rsplit_once('/') else { continue };
        let above = match folder {
            "src" => vec!["src/lib.rs".to_owned()],
            "tests/it" => vec!["tests/it/main.rs".to_owned()],
            folder => vec![format!("{folder}/mod.rs"), format!("{folder}.rs")],
        };
        let declares = |text: &str| code(text).lines().any(|line| line.ends_with(&format!("mod {name};")));
        let file = path.rsplit('/').next().unwrap_or(path);
        let placed = |other: &str, text: &str| {
            other.rsplit_once('/').map(|(folder, _)| folder) == Some(folder) && text.contains(&format!("#[path = \"{file}\"]"))
        };
        if !files.iter().any(|(other, text)| above.contains(other) && declares(text) || placed(other, text)) {
            problems.push(format!("{path} is compiled by nobody: no `mod {name};` in {}", above.join(" or ")));
        }
    }
    problems
}

pub fn form(path: &str, text: &str) -> Problems {
    let mut problems = Vec::new();
    let code = code(text);
    for (number, (line, compiled)) in text.lines().zip(code.lines()).enumerate() {
        // A text alone in its line may be one that must not be broken.
        let text_alone = compiled.trim().trim_end_matches([',', ';', ')']).is_empty() && !line.trim_start().starts_with("//");
        let characters = line.chars().count();
        if characters > LINE_CHARACTERS_MAX && !text_alone {
            problems.push(format!("{path}:{} has {characters} characters, {LINE_CHARACTERS_MAX} is the limit", number + 1));
        }
    }
    let listed = LONG_FILES.iter().any(|(long, _)| *long == path);
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX && !listed {
        problems
            .push(format!("{path} has {lines} lines, {FILE_LINES_MAX} is the limit: divide it, or give a reason in LONG_FILES"));
    }
    if lines < FILE_LINES_MAX && listed {
        problems.push(format!("{path} has {lines} lines: take it out of LONG_FILES"));
    }
    let stem = path.strip_suffix(".rs").unwrap_or(path);
    if let Some(name) = stem.split('/').find(|name| NO_MODULE_NAMES.contains(name)) {
        problems.push(format!("{path}: a module called {name} says nothing of what is in it"));
    }
    for (number, line) in code.lines().enumerate() {
        if line.replace(' ', "").contains("#[ignore]") {
            problems.push(format!("{path}:{} ignores a test without a reason", number + 1));
        }
    }
    // Failing cases would be kept in files beside Cargo.toml: they become tests with a name instead.
    let (properties, configured) = (code.matches("proptest! {").count(), code.matches("failure_persistence: None").count());
    if properties > configured {
        problems.push(format!("{path} has {properties} proptest! blocks, and {configured} with failure_persistence: None"));
    }
    problems
}

/// Link targets of a Markdown page, with the line of each.
pub fn links(text: &str) -> Vec<(usize, String)> {
    let mut links = Vec::new();
    let mut fenced = false;
    for (number, line) in text.lines().enumerate() {
        fenced ^= line.trim_start().starts_with("```");
        if fenced {
            continue;
        }
        for (at, opening) in line.match_indices("](") {
            let target = &line[at + opening.len()..];
            links.extend(target.split_once(')').map(|(target, _)| (number + 1, target.to_owned())));
        }
    }
    links
}

/// What GitHub makes of a page's headings.
pub fn anchors(text: &str) -> Vec<String> {
    let kept = |character: &char| character.is_alphanumeric() || " -_".contains(*character);
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    headings.map(|heading| heading.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
}

/// Files of this repository that a text names, such as `src/lib.rs`, with the line of each. A name with a placeholder in it, in
/// capitals, names none.
pub fn named_files(text: &str) -> Vec<(usize, String)> {
    const FOLDERS: [&str; 8] = ["src/", "docs/", "jobs/", "tests/", "goldens/", "fixtures/", ".linux/", ".ci/"];
    let part = |character: char| character.is_ascii_alphanumeric() || "/._-*{}<>$".contains(character);
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for word in line.split(|character| !part(character)) {
            let word = word.trim_end_matches('.');
            let placeholder = word.contains(['*', '{', '<', '$']) || word.contains("NAME");
            let file = word.rsplit('/').next().is_some_and(|name| name.contains('.') || word.ends_with('/'));
            if FOLDERS.iter().any(|folder| word.starts_with(folder)) && !placeholder && file {
                found.push((number + 1, word.to_owned()));
            }
        }
    }
    found
}
