//! Job files into jobs.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use globset::GlobBuilder;

use super::document::Document;
use super::error::{FILE_BYTES_MAX, JobError, Place, Problem};
use super::generation::{KEYS, KEYS_LATER};
use super::reader::{Reader, Section};
use super::value::{Fault, Node, Value, quoted};
use super::{Batching, Columns, Device, Dtype, Generation, Input, Job, KvBudget, Model, Order, Prompt, Results, speech};

const MANIFESTS_MAX: usize = 10_000;
const KEEP_COLUMNS_MAX: usize = 1000;
const KV_BUDGET_MAX: u64 = 1 << 50;

impl Job {
    /// Reads a job file; `settings` are `--set`'s, `key=value` with the key's full dotted name and the value as TOML or plain text.
    ///
    /// Nothing is loaded and no manifest is opened.
    ///
    /// # Errors
    /// All that is wrong with the job, each with its place and what was expected.
    pub fn read(path: &Path, settings: &[String]) -> Result<Self, JobError> {
        let failed = |source| JobError::Read { file: path.to_owned(), source };
        let mut bytes = Vec::new();
        let file = std::fs::File::open(path).map_err(failed)?;
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(JobError::TooLarge { file: path.to_owned(), bytes_max: FILE_BYTES_MAX });
        }
        match std::str::from_utf8(&bytes) {
            Ok(text) => Self::parse(path, text, settings),
            Err(error) => {
                let at = error.valid_up_to();
                let message = format!("the file is not UTF-8: byte 0x{:02x}", bytes[at]);
                let place = Place::line(path, &bytes, at, at + 1);
                let problem = Problem { place, key: None, message, help: Some("save it as UTF-8".to_owned()) };
                Err(JobError::Problems { file: path.to_owned(), problems: vec![problem], left_off: 0 })
            }
        }
    }

    /// As [`Job::read`], of text that stands, or could stand, in the file `path`.
    pub fn parse(path: &Path, text: &str, settings: &[String]) -> Result<Self, JobError> {
        let failed = |(problems, left_off)| JobError::Problems { file: path.to_owned(), problems, left_off };
        let folder = Folder::of(path)?;
        let document = Document::parse(path, text, settings).map_err(failed)?;
        let mut reader = Reader::new(&document);
        let job = job(&mut reader, path, &folder);
        match (job, reader.into_problems()) {
            (Some(job), (problems, _)) if problems.is_empty() => Ok(job),
            (_, problems) => Err(failed(problems)),
        }
    }
}

/// None, or a job with defaults in the place of faults, where something was reported.
fn job(reader: &mut Reader, path: &Path, folder: &Folder) -> Option<Job> {
    let mut root = reader.root();
    let mut section = reader.section(&mut root, "job");
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or("job");
    let name = reader.optional(&mut section, "name", |node| node.name("a name")).unwrap_or_else(|| stem.to_owned());
    task(reader, &mut section);
    let output = reader.optional(&mut section, "output", |node| folder.path(node, "a folder for the results"));
    let output = PathBuf::from(output.unwrap_or_else(|| folder.resolve(&format!("out/{stem}"))));
    reader.finish(section);

    let model = model(reader, &mut root, folder);
    let input = input(reader, &mut root, folder, &output);
    let prompt = prompt(reader, &mut root);
    let generation = generation(reader, &mut root);
    let batching = batching(reader, &mut root);
    let audio = speech::audio(reader, &mut root);
    let transcription = speech::transcription(reader, &mut root);
    let results = results(reader, &mut root);
    reader.finish(root);
    Some(Job {
        file: path.to_owned(),
        name,
        output,
        model: model?,
        input: input?,
        prompt,
        generation,
        batching,
        audio,
        transcription,
        results,
    })
}

fn task(reader: &mut Reader, section: &mut Section) {
    let origin = section.key_origin("task");
    let later = reader.choice(section, "task", &[("generate", false), ("score", true), ("choose", true)]);
    if later == Some(true) {
        let message = "this `job.task` is not yet supported".to_owned();
        reader.report(origin, Some("job.task"), message, Some("the only task there is now is \"generate\"".to_owned()));
    }
}

fn model(reader: &mut Reader, root: &mut Section, folder: &Folder) -> Option<Model> {
    let mut section = reader.section(root, "model");
    let origin = section.origin;
    let given = section.key_origin("path").is_some();
    let path = reader.optional(&mut section, "path", |node| {
        let path = folder.path_as_written(node, "a folder, a .gguf file or a hub id such as \"org/name\"")?;
        Ok(if path == "fake" || is_hub_id(&path) && !folder.has(&path) { path } else { folder.resolve(&path) })
    });
    let slip = origin.is_none() && root.has_slip_of("model") || section.has_slip_of("path");
    if !given && !slip {
        let help = "path = \"model.gguf\": a folder, a .gguf file or a hub id such as \"org/name\"".to_owned();
        reader.report(origin, Some("model.path"), "`model.path` is missing".to_owned(), Some(help));
    }
    reader.later(&mut section, "adapter", "remove it to run the model without the adapter");
    let devices = [("auto", Device::Auto), ("gpu", Device::Gpu), ("cpu", Device::Cpu)];
    let device = reader.choice(&mut section, "device", &devices).unwrap_or(Device::Auto);
    let dtypes = [("auto", Dtype::Auto), ("float32", Dtype::Float32), ("bfloat16", Dtype::Bfloat16), ("float16", Dtype::Float16)];
    let dtype = reader.choice(&mut section, "dtype", &dtypes).unwrap_or(Dtype::Auto);
    reader.finish(section);
    Some(Model { path: path?, device, dtype })
}

fn input(reader: &mut Reader, root: &mut Section, folder: &Folder, output: &Path) -> Option<Input> {
    let mut section = reader.section(root, "input");
    let header = section.origin;
    let (manifest_origin, folder_origin) = (section.key_origin("manifest"), section.key_origin("folder"));
    let glob_origin = section.key_origin("glob");
    let manifest = reader.optional(&mut section, "manifest", |node| manifests(node, folder));
    let walked = reader.optional(&mut section, "folder", |node| folder.path(node, "a folder of files"));
    let glob = reader.optional(&mut section, "glob", |node| {
        let glob = node.name("a pattern of file names such as \"**/*.txt\"")?;
        match GlobBuilder::new(&glob).literal_separator(true).build() {
            Ok(_) => Ok(glob),
            Err(error) => Err(node.fault(format!("a pattern of file names such as \"**/*.txt\" ({})", error.kind()))),
        }
    });
    let slip = header.is_none() && root.has_slip_of("input") || section.has_slip_of("manifest") || section.has_slip_of("folder");
    match (manifest_origin, folder_origin) {
        (Some(manifest), Some(folder)) => {
            let message = "`input.manifest` and `input.folder` are both given, and a job reads one of them".to_owned();
            reader.report(Some(manifest.max(folder)), Some("input.folder"), message, Some("remove one of the two".to_owned()));
        }
        (None, None) if slip => {}
        (None, None) => {
            let message = "neither `input.manifest` nor `input.folder` is given".to_owned();
            let help = "manifest = [\"data/*.jsonl\"], or folder = \"texts\"".to_owned();
            reader.report(header, Some("input.manifest"), message, Some(help));
        }
        (Some(_), None) if glob_origin.is_some() => {
            let message = "`input.glob` chooses files of an `input.folder`, and there is none".to_owned();
            let help = "put the pattern into `input.manifest`, as in \"data/*.jsonl\", or give `input.folder`".to_owned();
            reader.report(glob_origin, Some("input.glob"), message, Some(help));
        }
        _ => {}
    }
    if let (Some(walked), Some(glob)) = (&walked, &glob)
        && walks_into(Path::new(walked), glob, output)
    {
        let message = "`job.output` lies inside `input.folder`, and `input.glob` would read results as rows".to_owned();
        let help = "put the output elsewhere, or give `input.glob` a pattern that leaves results out".to_owned();
        reader.report(glob_origin, Some("input.glob"), message, Some(help));
    }
    let columns = columns(reader, &mut section);
    reader.finish(section);
    Some(Input { manifest: manifest.unwrap_or_default(), folder: walked.map(PathBuf::from), glob, columns })
}

/// Whether a walk of `folder` finds what a run leaves in `output`. Without a glob it finds only .txt files, and there are none.
fn walks_into(folder: &Path, glob: &str, output: &Path) -> bool {
    let Ok(below) = output.strip_prefix(folder) else { return false };
    let Ok(glob) = GlobBuilder::new(glob).literal_separator(true).build() else { return false };
    let matcher = glob.compile_matcher();
    let left = ["job.toml", "run.json", "events.jsonl", "failed.jsonl", "part-00000.parquet", "_SUCCESS"];
    left.iter().any(|name| matcher.is_match(below.join(name)))
}

fn manifests(node: &Node, folder: &Folder) -> Result<Vec<String>, Fault> {
    let expected = "a manifest file or an array of them, globs included";
    let nodes = node.one_or_many(expected, MANIFESTS_MAX)?;
    if nodes.is_empty() {
        return Err(node.fault(expected));
    }
    let manifest = |node: &Node| {
        let written = folder.path_as_written(node, expected)?;
        let later = [".tar", ".tar.gz"].into_iter().find(|extension| written.to_lowercase().ends_with(extension));
        if let Some(extension) = later {
            return Err(node.fault(format!("JSONL, CSV, TSV or Parquet files ({extension} is not yet supported)")));
        }
        Ok(if is_glob(&written) && !folder.has(&written) { folder.resolve_glob(&written) } else { folder.resolve(&written) })
    };
    nodes.iter().map(manifest).collect()
}

fn columns(reader: &mut Reader, input: &mut Section) -> Columns {
    let mut section = reader.section(input, "columns");
    let roles = ["id", "prompt", "messages", "reference", "audio", "language", "image"];
    let origins = roles.map(|role| section.key_origin(role));
    let names = roles.map(|role| {
        let name = reader.optional(&mut section, role, |node| node.name("the name of a column"));
        name.unwrap_or_else(|| role.to_owned())
    });
    let [id, prompt, messages, reference, audio, language, image] = names;
    if prompt == messages {
        let given = if origins[2].is_some() { origins[2] } else { origins[1] };
        let message = format!("`input.columns.prompt` and `input.columns.messages` are both the column {}", quoted(&prompt));
        let help = "a column holds either a prompt as text or a conversation; leave the other one out".to_owned();
        reader.report(given, Some("input.columns.messages"), message, Some(help));
    }
    let texts = [(1, &prompt), (2, &messages), (3, &reference), (5, &language)];
    if let Some((role, _)) = texts.into_iter().find(|(_, name)| **name == audio) {
        let given = if origins[4].is_some() { origins[4] } else { origins[role] };
        let message = format!("`input.columns.audio` and `input.columns.{}` are both the column {}", roles[role], quoted(&audio));
        let help = "a column holds either a recording or text; leave one of the two out, or rename it".to_owned();
        reader.report(given, Some("input.columns.audio"), message, Some(help));
    }
    let others = [(1, &prompt), (2, &messages), (3, &reference), (4, &audio), (5, &language)];
    if let Some((role, _)) = others.into_iter().find(|(_, name)| **name == image) {
        let given = if origins[6].is_some() { origins[6] } else { origins[role] };
        let message = format!("`input.columns.image` and `input.columns.{}` are both the column {}", roles[role], quoted(&image));
        let help = "a column holds either images or something else; leave one of the two out, or rename it".to_owned();
        reader.report(given, Some("input.columns.image"), message, Some(help));
    }
    reader.later(&mut section, "video", "only text, recordings and images are read now");
    reader.finish(section);
    Columns { id, prompt, messages, reference, audio, image, language }
}

fn prompt(reader: &mut Reader, root: &mut Section) -> Prompt {
    let mut section = reader.section(root, "prompt");
    let system = reader.optional(&mut section, "system", |node| node.string("text"));
    let template = reader.optional(&mut section, "template", |node| node.string("a minijinja template"));
    let thinking = reader.optional(&mut section, "thinking", Node::boolean).unwrap_or(false);
    reader.finish(section);
    Prompt { system, template, thinking }
}

fn generation(reader: &mut Reader, root: &mut Section) -> Generation {
    let mut section = reader.section(root, "generation");
    let mut generation = Generation::default();
    for key in KEYS {
        reader.optional(&mut section, key, |node| generation.assign(key, node));
    }
    for key in KEYS_LATER {
        reader.later(&mut section, key, "remove it");
    }
    reader.finish(section);
    generation
}

fn batching(reader: &mut Reader, root: &mut Section) -> Batching {
    let mut section = reader.section(root, "batching");
    let rows = reader.optional(&mut section, "rows", |node| node.integer_u32(1..=65_536)).unwrap_or(32);
    let kv_budget = reader.optional(&mut section, "kv_budget", kv_budget).unwrap_or(KvBudget::Auto);
    let bits_origin = section.key_origin("kv_bits");
    let bits = reader.optional(&mut section, "kv_bits", |node| match node.integer(4..=16)? {
        bits @ (4 | 8 | 16) => Ok(bits),
        _ => Err(node.fault("16, 8 or 4")),
    });
    if let Some(bits @ (4 | 8)) = bits {
        let message = format!("`batching.kv_bits` of {bits} is not yet supported");
        reader.report(bits_origin, Some("batching.kv_bits"), message, Some("remove it: keys and values have 16 bits".to_owned()));
    }
    let chunk = reader.optional(&mut section, "prefill_chunk", |node| node.integer_u32(1..=1_000_000));
    let concurrency = reader.optional(&mut section, "prompt_concurrency", |node| node.integer_u32(1..=65_536));
    let order = reader.choice(&mut section, "order", &[("length", Order::Length), ("manifest", Order::Manifest)]);
    let prefix_cache = reader.optional(&mut section, "prefix_cache", Node::boolean).unwrap_or(true);
    reader.finish(section);
    Batching {
        rows,
        kv_budget,
        prefill_chunk: chunk,
        prompt_concurrency: concurrency,
        order: order.unwrap_or(Order::Length),
        prefix_cache,
    }
}

fn kv_budget(node: &Node) -> Result<KvBudget, Fault> {
    let expected = "\"auto\" or a size with its unit, such as \"6GiB\" or \"500MB\", above 0 and at most 1024 TiB";
    let text = node.string(expected)?;
    if text == "auto" {
        return Ok(KvBudget::Auto);
    }
    // bytesize takes a bare number for bytes; whoever writes 6 means something else.
    let unit = text.chars().any(|c| c.is_ascii_alphabetic());
    match text.parse::<bytesize::ByteSize>() {
        Ok(size) if unit && (1..=KV_BUDGET_MAX).contains(&size.as_u64()) => Ok(KvBudget::Bytes(size.as_u64())),
        _ => Err(node.fault(expected)),
    }
}

fn results(reader: &mut Reader, root: &mut Section) -> Results {
    let mut section = reader.section(root, "results");
    let token_ids = reader.optional(&mut section, "token_ids", Node::boolean).unwrap_or(false);
    let keep_columns = reader.optional(&mut section, "keep_columns", |node| {
        let Value::Array(nodes) = &node.value else { return Err(node.fault("an array of names of columns")) };
        if nodes.len() > KEEP_COLUMNS_MAX {
            return Err(Fault {
                found: format!("{} of them", nodes.len()),
                ..node.fault(format!("{KEEP_COLUMNS_MAX} columns at most"))
            });
        }
        let mut seen = BTreeSet::new();
        let column = |node: &Node| {
            let name = node.name("names of columns")?;
            if seen.insert(name.clone()) { Ok(name) } else { Err(node.fault("each column once")) }
        };
        nodes.iter().map(column).collect()
    });
    let rows = reader.optional(&mut section, "rows_per_part", |node| node.integer_u32(1..=10_000_000)).unwrap_or(10_000);
    let seconds = reader.optional(&mut section, "seconds_per_part", |node| node.integer_u32(1..=86_400)).unwrap_or(300);
    reader.finish(section);
    Results { token_ids, keep_columns: keep_columns.unwrap_or_default(), rows_per_part: rows, seconds_per_part: seconds }
}

/// The folder of the job file: what relative paths are relative to. Absolute, without links and `..`, and UTF-8.
struct Folder(String);

impl Folder {
    fn of(file: &Path) -> Result<Self, JobError> {
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let absolute = std::fs::canonicalize(folder).or_else(|_| std::path::absolute(folder));
        let absolute = absolute.map_err(|source| JobError::Read { file: file.to_owned(), source })?;
        absolute.into_os_string().into_string().map(Self).map_err(|_| JobError::Folder { file: file.to_owned() })
    }

    fn path(&self, node: &Node, expected: &str) -> Result<String, Fault> {
        self.path_as_written(node, expected).map(|path| self.resolve(&path))
    }

    fn path_as_written(&self, node: &Node, expected: &str) -> Result<String, Fault> {
        let path = node.name(expected)?;
        if path.starts_with('~') && !self.has(&path) {
            return Err(node.fault(format!("{expected}; `~` is not expanded here, write the whole path")));
        }
        Ok(path)
    }

    fn has(&self, path: &str) -> bool {
        Path::new(&self.0).join(path).exists()
    }

    fn resolve(&self, path: &str) -> String {
        join(&self.0, path, |base| base.to_owned())
    }

    /// As [`Folder::resolve`], with the folder's own name taken literally.
    fn resolve_glob(&self, pattern: &str) -> String {
        join(&self.0, pattern, globset::escape)
    }
}

/// Leading `./` and `../` are resolved, and those alone: further on, `..` may leave a linked folder.
fn join(base: &str, path: &str, spelled: impl Fn(&str) -> String) -> String {
    if path.starts_with('/') {
        return path.to_owned();
    }
    let (mut base, mut rest) = (Path::new(base), path);
    loop {
        rest = rest.trim_start_matches('/');
        if rest == "." || rest == ".." {
            base = if rest == ".." { base.parent().unwrap_or(base) } else { base };
            rest = "";
        } else if let Some(after) = rest.strip_prefix("./") {
            rest = after;
        } else if let Some(after) = rest.strip_prefix("../") {
            (base, rest) = (base.parent().unwrap_or(base), after);
        } else {
            break;
        }
    }
    // `base` is part of a string.
    let base = spelled(base.to_str().unwrap_or_default());
    match (rest, base.as_str()) {
        ("", _) => base,
        (_, "/") => format!("/{rest}"),
        _ => format!("{base}/{rest}"),
    }
}

fn is_glob(path: &str) -> bool {
    path.contains(['*', '?', '[', '{'])
}

/// `org/name`, of the characters that the hub allows.
fn is_hub_id(path: &str) -> bool {
    let allowed = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    !path.ends_with(".gguf") && path.split_once('/').is_some_and(|(owner, name)| allowed(owner) && allowed(name))
}
