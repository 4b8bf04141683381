//! A job as written: its file, and what `--set` changes in it.

use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::error::{PROBLEMS_MAX, Place, Problem};
use super::value::{Entry, Node, Origin, Value, entries, shortened};

/// Tables that hold settings; the other tables are values.
pub(super) const SECTIONS: [&str; 10] =
    ["job", "model", "input", "input.columns", "prompt", "generation", "batching", "audio", "transcription", "results"];

/// Parts of a `--set` key, `generation.logit_bias.123`.
const KEY_PARTS_MAX: usize = 4;

pub(super) struct Document<'t> {
    pub file: &'t Path,
    text: &'t str,
    settings: &'t [String],
    pub entries: Vec<Entry>,
    /// What is wrong with settings; the rest of the job can still be looked at.
    pub problems: Vec<(Origin, Problem)>,
}

impl<'t> Document<'t> {
    /// # Errors
    /// What is not TOML, and how much more of it there is than is kept: a file that is not TOML is looked at no further.
    pub fn parse(file: &'t Path, text: &'t str, settings: &'t [String]) -> Result<Self, (Vec<Problem>, usize)> {
        let (table, mut errors) = DeTable::parse_recoverable(text);
        let mut document = Self { file, text, settings, entries: entries(table.get_ref(), 0), problems: Vec::new() };
        if !errors.is_empty() {
            errors.sort_by_key(|error| error.span().map(|span| span.start));
            let problems = errors.iter().take(PROBLEMS_MAX).map(|error| document.syntax(error)).collect();
            return Err((problems, errors.len().saturating_sub(PROBLEMS_MAX)));
        }
        for index in 0..settings.len() {
            if let Err(problem) = document.set(index) {
                document.problems.push((Origin { source: index + 1, start: 0, end: 0 }, *problem));
            }
        }
        Ok(document)
    }

    fn syntax(&self, error: &toml::de::Error) -> Problem {
        let span = error.span().unwrap_or(self.text.len()..self.text.len());
        let origin = Origin { source: 0, start: span.start, end: span.end };
        let message = format!("not valid TOML: {}", error.message());
        Problem { place: self.place(origin), key: None, message, help: None }
    }

    pub fn place(&self, origin: Origin) -> Place {
        match origin.source.checked_sub(1).and_then(|index| self.settings.get(index)) {
            Some(setting) => Place::Setting(shortened(setting)),
            None => Place::line(self.file, self.text.as_bytes(), origin.start, origin.end),
        }
    }

    /// Puts the setting of that index, `key=value`, in the place of what the file says.
    fn set(&mut self, index: usize) -> Result<(), Box<Problem>> {
        let setting = self.settings[index].as_str();
        let origin = Origin { source: index + 1, start: 0, end: setting.len() };
        let problem = |message: String, help: &str| {
            let help = Some(help.to_owned());
            Box::new(Problem { place: Place::Setting(shortened(setting)), key: None, message, help })
        };
        let Some((key, written)) = setting.split_once('=') else {
            return Err(problem("no `=` between a key and a value".to_owned(), "write --set generation.max_tokens=64"));
        };
        let key = key.trim();
        let path: Vec<&str> = key.split('.').map(|part| part.trim().trim_matches('"')).collect();
        if path.iter().any(|part| part.is_empty()) || !(2..=KEY_PARTS_MAX).contains(&path.len()) {
            let message = format!("`{}` is not the full name of a key", shortened(key));
            return Err(problem(message, "name the table and the key: generation.max_tokens"));
        }
        if SECTIONS.contains(&path.join(".").as_str()) {
            return Err(problem(format!("`{key}` is a table, and --set changes one key"), "name one of its keys"));
        }

        let value = match DeValue::parse(written.trim()) {
            Ok(value) => {
                let mut node = Node::from_toml(value.get_ref(), origin);
                // A setting is shown whole.
                node.set_origin(origin);
                node
            }
            // A list with a mistake in it is no text; a template that begins with a bracket is.
            Err(error) if written.trim().starts_with('[') && path[0] != "prompt" => {
                let message = format!("the value is not a valid TOML array: {}", error.message());
                return Err(problem(
                    message,
                    "write it as in a job file and quote it for the shell: 'generation.stop=[\"a\", \"b\"]'",
                ));
            }
            Err(_) => Node { value: Value::String(written.to_owned()), origin },
        };
        let (last, tables) = path.split_last().unwrap_or((&"", &[]));
        let mut entries = &mut self.entries;
        for table in tables {
            let position = position_or_insert(entries, table, origin, Value::Table(Vec::new()));
            match &mut entries[position].node.value {
                Value::Table(inner) => entries = inner,
                _ => return Err(problem(format!("`{table}` in `{key}` is no table"), "name a key of a table")),
            }
        }
        let position = position_or_insert(entries, last, origin, Value::Null);
        entries[position] = Entry { key: (*last).to_owned(), key_origin: origin, node: value };
        Ok(())
    }
}

fn position_or_insert(entries: &mut Vec<Entry>, key: &str, origin: Origin, value: Value) -> usize {
    entries.iter().position(|entry| entry.key == key).unwrap_or_else(|| {
        entries.push(Entry { key: key.to_owned(), key_origin: origin, node: Node { value, origin } });
        entries.len() - 1
    })
}
