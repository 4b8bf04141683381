//! Takes settings out of a document one by one and gathers every problem; what nobody takes is unknown.

use super::document::{Document, SECTIONS};
use super::error::{PROBLEMS_MAX, Place, Problem};
use super::value::{Entry, Fault, Node, Origin, Value, quoted, shortened};

pub(super) struct Reader<'d, 't> {
    document: &'d Document<'t>,
    problems: Vec<(Origin, Problem)>,
    /// Full names of all settings that were asked for, given or not.
    known: Vec<String>,
    unknown: Vec<(String, Origin)>,
}

/// One table of settings, from which keys are taken.
pub(super) struct Section {
    /// Its full name; empty for the whole document.
    path: String,
    entries: Vec<Entry>,
    /// Its header, if the job has it.
    pub origin: Option<Origin>,
}

impl Section {
    fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// Whether a key that nobody knows is probably meant to be this one: then this one is not missing.
    pub fn has_slip_of(&self, key: &str) -> bool {
        self.entries.iter().any(|entry| nearest(&entry.key, std::iter::once(key)).is_some())
    }

    /// Where that key stands, if it is given and not yet taken.
    pub fn key_origin(&self, key: &str) -> Option<Origin> {
        self.entries.iter().find(|entry| entry.key == key).map(|entry| entry.key_origin)
    }
}

impl<'d, 't> Reader<'d, 't> {
    pub fn new(document: &'d Document<'t>) -> Self {
        Self { document, problems: document.problems.clone(), known: Vec::new(), unknown: Vec::new() }
    }

    pub fn root(&self) -> Section {
        Section { path: String::new(), entries: self.document.entries.clone(), origin: None }
    }

    /// The table of that name, empty where the job has none.
    pub fn section(&mut self, parent: &mut Section, key: &str) -> Section {
        let path = parent.name(key);
        match self.take(parent, key) {
            None => Section { path, entries: Vec::new(), origin: None },
            Some(Entry { key_origin, node: Node { value: Value::Table(entries), .. }, .. }) => {
                Section { path, entries, origin: Some(key_origin) }
            }
            Some(entry) => {
                let message = format!("`{path}` expects a table, found {}", entry.node.found());
                self.report(Some(entry.node.origin), Some(&path), message, Some(format!("write its keys under [{path}]")));
                Section { path, entries: Vec::new(), origin: Some(entry.key_origin) }
            }
        }
    }

    /// Reads a key that may be absent. A fault is reported, and counts as absent from there on.
    pub fn optional<T>(&mut self, section: &mut Section, key: &str, read: impl FnOnce(&Node) -> Result<T, Fault>) -> Option<T> {
        let entry = self.take(section, key)?;
        match read(&entry.node) {
            Ok(value) => Some(value),
            Err(Fault { expected, found, origin }) => {
                let path = section.name(key);
                self.report(Some(origin), Some(&path), format!("`{path}` expects {expected}, found {found}"), None);
                None
            }
        }
    }

    /// A key that takes one of a few words. A wrong one is told the nearest.
    pub fn choice<T: Copy>(&mut self, section: &mut Section, key: &str, choices: &[(&str, T)]) -> Option<T> {
        let words: Vec<String> = choices.iter().map(|(word, _)| quoted(word)).collect();
        let expected = format!("one of {}", words.join(", "));
        let entry = self.take(section, key)?;
        let given = match &entry.node.value {
            Value::String(given) => given.as_str(),
            _ => "",
        };
        if let Some((_, value)) = choices.iter().find(|(word, _)| *word == given) {
            return Some(*value);
        }
        let path = section.name(key);
        let help = nearest(given, choices.iter().map(|(word, _)| *word)).map(|word| format!("did you mean {}?", quoted(word)));
        self.report(
            Some(entry.node.origin),
            Some(&path),
            format!("`{path}` expects {expected}, found {}", entry.node.found()),
            help,
        );
        None
    }

    /// A key whose capability comes later: it is known, and refused where it is given.
    pub fn later(&mut self, section: &mut Section, key: &str, help: &str) {
        if let Some(entry) = self.take(section, key) {
            self.not_yet(&section.name(key), entry.key_origin, help);
        }
    }

    pub fn not_yet(&mut self, what: &str, origin: Origin, help: &str) {
        self.report(Some(origin), Some(what), format!("`{what}` is not yet supported"), Some(help.to_owned()));
    }

    /// What is left of a section is unknown.
    pub fn finish(&mut self, section: Section) {
        for entry in &section.entries {
            self.unknown.push((section.name(&entry.key), entry.key_origin));
        }
    }

    pub fn report(&mut self, origin: Option<Origin>, key: Option<&str>, message: String, help: Option<String>) {
        let place = origin.map_or_else(|| Place::File(self.document.file.to_owned()), |origin| self.document.place(origin));
        let problem = Problem { place, key: key.map(str::to_owned), message, help };
        self.problems.push((origin.unwrap_or_default(), problem));
    }

    /// All problems, in the order of the file and then of the settings, and how many more there are.
    pub fn into_problems(mut self) -> (Vec<Problem>, usize) {
        self.unknown.sort_by_key(|(_, origin)| *origin);
        let unknown = std::mem::take(&mut self.unknown);
        let left_off = unknown.len().saturating_sub(PROBLEMS_MAX);
        for (name, origin) in unknown.into_iter().take(PROBLEMS_MAX) {
            let help = self.suggestion(&name);
            let message = match name.contains('.') {
                true => format!("unknown key `{}`", shortened(&name)),
                false => format!("unknown table or key `{}`", shortened(&name)),
            };
            self.report(Some(origin), Some(&name), message, Some(help));
        }
        let (problems, more) = in_order(self.problems);
        (problems, left_off + more)
    }

    fn take(&mut self, section: &mut Section, key: &str) -> Option<Entry> {
        self.known.push(section.name(key));
        let position = section.entries.iter().position(|entry| entry.key == key)?;
        Some(section.entries.swap_remove(position))
    }

    /// The right name of a key that was meant, or the names there are.
    fn suggestion(&self, name: &str) -> String {
        let (table, key) = name.rsplit_once('.').unwrap_or(("", name));
        let siblings: Vec<&str> = self
            .known
            .iter()
            .map(|known| known.rsplit_once('.').unwrap_or(("", known)))
            .filter(|(known_table, _)| *known_table == table)
            .map(|(_, known_key)| known_key)
            .collect();
        let alias = ALIASES.iter().find(|(alias, _)| key.eq_ignore_ascii_case(alias)).map(|(_, meant)| (*meant).to_owned());
        let sibling = || {
            nearest(key, siblings.iter().copied())
                .map(|near| if table.is_empty() { near.to_owned() } else { format!("{table}.{near}") })
        };
        let elsewhere = || {
            let mut keys = self.known.iter().filter(|known| !SECTIONS.contains(&known.as_str()));
            keys.find(|known| known.rsplit_once('.').is_some_and(|(_, known_key)| known_key == key)).cloned()
        };
        match alias.or_else(sibling).or_else(elsewhere) {
            Some(meant) => format!("did you mean `{meant}`?"),
            None if table.is_empty() => format!("a job has the tables {}", siblings.join(", ")),
            None => format!("[{table}] has the keys {}", siblings.join(", ")),
        }
    }
}

/// Sorted by place, cut to what is shown, and how many were cut off.
fn in_order(mut problems: Vec<(Origin, Problem)>) -> (Vec<Problem>, usize) {
    problems.sort_by_key(|(origin, _)| *origin);
    let left_off = problems.len().saturating_sub(PROBLEMS_MAX);
    (problems.into_iter().take(PROBLEMS_MAX).map(|(_, problem)| problem).collect(), left_off)
}

/// What other programs call our keys.
const ALIASES: [(&str, &str); 21] = [
    ("max_new_tokens", "generation.max_tokens"),
    ("max_completion_tokens", "generation.max_tokens"),
    ("max_length", "generation.max_tokens"),
    ("temp", "generation.temperature"),
    ("repeat_penalty", "generation.repetition_penalty"),
    ("repetition_context_size", "generation.penalty_context"),
    ("repeat_last_n", "generation.penalty_context"),
    ("stop_strings", "generation.stop"),
    ("stop_tokens", "generation.stop_token_ids"),
    ("eos_token_id", "generation.stop_token_ids"),
    ("random_seed", "generation.seed"),
    ("batch_size", "batching.rows"),
    ("max_num_seqs", "batching.rows"),
    ("prefill_step_size", "batching.prefill_chunk"),
    ("max_kv_size", "batching.kv_budget"),
    ("system_prompt", "prompt.system"),
    ("enable_thinking", "prompt.thinking"),
    ("lora", "model.adapter"),
    ("output_dir", "job.output"),
    ("without_timestamps", "transcription.timestamps"),
    ("lang", "transcription.language"),
];

/// The word that `given` is a slip of the keyboard away from.
fn nearest<'w>(given: &str, words: impl Iterator<Item = &'w str>) -> Option<&'w str> {
    const GIVEN_BYTES_MAX: usize = 64;
    if given.is_empty() || given.len() > GIVEN_BYTES_MAX {
        return None;
    }
    let given = given.to_lowercase().replace('-', "_");
    let edits_max = given.chars().count().div_ceil(3);
    words
        .map(|word| (strsim::damerau_levenshtein(&given, word), word))
        .filter(|(edits, word)| *edits <= edits_max && *edits < word.chars().count())
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, word)| word)
}
