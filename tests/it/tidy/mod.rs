//! What no compiler sees: the walls of the architecture, and files that nobody needs.

mod code;
mod planted;
mod rules;

use std::{collections::BTreeSet, fs, path::Path};

use rules::Problems;
use walkdir::WalkDir;

/// What the top level may hold, beside names that begin with a dot.
const TOP_LEVEL: &[&str] = &[
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "Makefile",
    "README.md",
    "docs",
    "examples",
    "fixtures",
    "goldens",
    "jobs",
    "src",
    "tests",
];

/// Names of files that an example or a test makes up.
const MADE_UP: &[&str] = &["jobs/label.toml", "jobs/test.toml"];

/// Written there by building and running; git ignores them.
const TOP_LEVEL_IGNORED: &[&str] = &["out", "target"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Files below `folder`, by their paths from the top level, sorted.
fn files(folder: &str, extensions: &[&str]) -> Vec<String> {
    let walk = WalkDir::new(root().join(folder)).sort_by_file_name().into_iter().map(|entry| entry.unwrap());
    let found = walk
        .filter(|entry| entry.file_type().is_file())
        .map(|entry| entry.path().strip_prefix(root()).unwrap().to_str().unwrap().replace('\\', "/"));
    let wanted = |path: &String| extensions.is_empty() || extensions.iter().any(|extension| path.ends_with(extension));
    found.filter(wanted).filter(|path| !path.contains("__pycache__")).collect()
}

/// (path, text) of every Rust source.
fn sources() -> Vec<(String, String)> {
    let paths = [files("src", &[".rs"]), files("tests", &[".rs"])].concat();
    assert!(paths.len() > 100, "only {} sources were found", paths.len());
    paths.into_iter().map(|path| (path.clone(), read(&path))).collect()
}

/// (path, text) of every page and script, and of what is built by.
fn others() -> Vec<(String, String)> {
    let mut paths = vec![".ci/run".to_owned(), "Cargo.toml".to_owned(), "Makefile".to_owned()];
    paths.extend(["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(str::to_owned));
    paths.extend([files("docs", &[".md"]), files(".linux", &[]), files("jobs", &[".toml"])].concat());
    paths.extend([files("fixtures", &[".py", ".sh", ".md"]), files("tests", &[".py"])].concat());
    paths.into_iter().map(|path| (path.clone(), read(&path))).collect()
}

#[track_caller]
fn none(problems: Problems) {
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}

#[test]
fn walls_stand() {
    none(sources().iter().flat_map(|(path, text)| rules::walls(path, text)).collect());
}

#[test]
fn imports_go_backwards() {
    let order = rules::reading_order(&read("src/lib.rs"));
    assert!(order.len() >= 9, "{order:?}");
    none(sources().iter().flat_map(|(path, text)| rules::backwards(path, text, &order)).collect());
}

#[test]
fn no_source_is_dead() {
    none(rules::dead_files(&sources()));
}

#[test]
fn sources_have_their_form() {
    none(sources().iter().flat_map(|(path, text)| rules::form(path, text)).collect());
}

#[test]
fn top_level_is_what_was_agreed() {
    let ignored = read(".gitignore");
    let mut problems = Vec::new();
    for entry in fs::read_dir(root()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let built = TOP_LEVEL_IGNORED.contains(&name.as_str()) && ignored.lines().any(|line| line == format!("/{name}"));
        if !name.starts_with('.') && !built && !TOP_LEVEL.contains(&name.as_str()) {
            problems.push(format!("{name} is not among what the top level holds"));
        }
    }
    none(problems);
}

#[test]
fn links_lead_somewhere() {
    let mut problems = Vec::new();
    for (path, text) in others().iter().filter(|(path, _)| path.ends_with(".md")) {
        for (line, target) in rules::links(text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let page = root().join(path);
            let page = if file.is_empty() { page } else { page.with_file_name("").join(file) };
            let found = if anchor.is_empty() || page.is_dir() {
                page.is_file() || page.is_dir()
            } else {
                fs::read_to_string(&page).is_ok_and(|text| rules::anchors(&text).iter().any(|other| other == anchor))
            };
            if !found {
                problems.push(format!("{path}:{line} links to {target}, which is not there"));
            }
        }
    }
    none(problems);
}

/// Wherever a comment, a page, a script or a message says that something stands in a file, the file is there.
#[test]
fn named_files_are_there() {
    let mut problems = Vec::new();
    for (path, text) in [sources(), others()].concat() {
        // Planted names; and the Python scripts cite files of other projects.
        if path.starts_with("tests/it/tidy/") || path.ends_with(".py") {
            continue;
        }
        for (line, name) in rules::named_files(&text) {
            let from_here = root().join(&path).with_file_name("").join(&name);
            if !MADE_UP.contains(&name.as_str()) && !root().join(&name).try_exists().unwrap() && !from_here.try_exists().unwrap() {
                problems.push(format!("{path}:{line} names {name}, which is not there"));
            }
        }
    }
    none(problems);
}

#[test]
fn nothing_shipped_is_unused() {
    let (sources, others) = (sources(), others());
    let named_in = |texts: &[(String, String)], kinds: &[&str], own: &str, name: &str| {
        texts.iter().any(|(path, text)| path != own && kinds.iter().any(|kind| path.ends_with(kind)) && text.contains(name))
    };
    let file_name = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
    let mut problems = Vec::new();
    for path in files("jobs", &[".toml"]) {
        if !named_in(&others, &[".md"], &path, &path) {
            problems.push(format!("{path} is told of on no page"));
        }
    }
    for path in files("jobs", &[".jsonl", ".csv", ".tsv", ".txt"]) {
        // A file by its name, or all of a folder.
        let folder = path.split('/').nth(1).map(|folder| format!("\"{folder}\"")).unwrap_or_default();
        if !named_in(&others, &[".toml"], "", &format!("\"{}\"", file_name(&path))) && !named_in(&others, &[".toml"], "", &folder) {
            problems.push(format!("{path} is read by no job"));
        }
    }
    for path in files("docs", &[]) {
        if !named_in(&others, &[".md"], &path, &file_name(&path)) {
            problems.push(format!("{path} is linked from no page"));
        }
    }
    for path in files("goldens", &[]) {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let by_folder = folder != "goldens" && named_in(&sources, &[".rs"], "", folder);
        if !by_folder && !named_in(&sources, &[".rs"], "", &path) {
            problems.push(format!("{path} is read by no test"));
        }
    }
    for path in [files("fixtures", &[".py", ".sh", ".txt"]), files("tests", &[".py"])].concat() {
        let name = file_name(&path);
        let stem = name.strip_suffix(".py").unwrap_or(&name);
        let imported = named_in(&others, &[".py"], &path, &format!("from {stem} import"));
        let kinds = [".md", ".sh", "Makefile", ".py"];
        if !imported && !named_in(&others, &kinds, &path, &name) && !named_in(&sources, &[".rs"], "", &name) {
            problems.push(format!("{path} is used by nothing"));
        }
    }
    let rendered = read("goldens/prompt/templates.json");
    for path in files("fixtures/templates", &[".jinja"]) {
        if !rendered.contains(&format!("\"{}\"", file_name(&path))) {
            problems.push(format!("{path} is not in goldens/prompt/templates.json"));
        }
    }
    // Each checkpoint that is shipped has a golden, or another file of its name that says what it must give.
    let goldens: BTreeSet<String> = files("goldens", &[".json"]).iter().map(|path| file_name(path)).collect();
    for path in files("fixtures/checkpoints", &[".safetensors", ".gguf"]) {
        let name = path.trim_end_matches("/model.safetensors").trim_end_matches(".gguf");
        if !goldens.contains(&format!("{}.json", file_name(name))) {
            problems.push(format!("{path} has no golden"));
        }
    }
    none(problems);
}
