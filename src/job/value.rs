//! Values as written, by a TOML file, a `--set` or a row's column, and their reading into what a setting is.

use std::ops::RangeInclusive;

use toml::de::{DeTable, DeValue};

/// Where a value stands: bytes `start .. end` of a source. Source 0 is the job file, source `n` the n-th `--set`, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Origin {
    pub source: usize,
    pub start: usize,
    pub end: usize,
}

#[derive(Debug, Clone)]
pub(super) struct Node {
    pub value: Value,
    pub origin: Origin,
}

/// Numbers stay text, so that each is rounded once, to the type that its setting has.
#[derive(Debug, Clone)]
pub(super) enum Value {
    String(String),
    Integer(String),
    Float(String),
    Boolean(bool),
    Datetime(String),
    Array(Vec<Node>),
    Table(Vec<Entry>),
    Null,
}

#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub key: String,
    pub key_origin: Origin,
    pub node: Node,
}

/// A value that its setting does not take.
#[derive(Debug, Clone)]
pub(super) struct Fault {
    /// Follows "expects".
    pub expected: String,
    /// Follows "found".
    pub found: String,
    pub origin: Origin,
}

impl Node {
    /// Nesting is bounded by the TOML parser, at 80.
    pub fn from_toml(value: &DeValue<'_>, origin: Origin) -> Self {
        let at = |span: std::ops::Range<usize>| Origin { source: origin.source, start: span.start, end: span.end };
        let value = match value {
            DeValue::String(text) => Value::String(text.to_string()),
            DeValue::Integer(integer) => match i128::from_str_radix(integer.as_str(), integer.radix()) {
                Ok(parsed) => Value::Integer(parsed.to_string()),
                Err(_) => Value::Integer(integer.to_string()),
            },
            DeValue::Float(float) => Value::Float(float.to_string()),
            DeValue::Boolean(boolean) => Value::Boolean(*boolean),
            DeValue::Datetime(datetime) => Value::Datetime(datetime.to_string()),
            DeValue::Array(array) => {
                Value::Array(array.iter().map(|element| Self::from_toml(element.get_ref(), at(element.span()))).collect())
            }
            DeValue::Table(table) => Value::Table(entries(table, origin.source)),
        };
        Self { value, origin }
    }

    /// A float that is whole counts as an integer: tables that once held an empty cell write 64 as 64.0.
    pub fn from_json(value: &serde_json::Value) -> Self {
        let value = match value {
            serde_json::Value::Null => Value::Null,
            serde_json::Value::Bool(boolean) => Value::Boolean(*boolean),
            serde_json::Value::String(text) => Value::String(text.clone()),
            serde_json::Value::Number(number) => match number.as_f64() {
                Some(float) if number.is_f64() => Self::from_float(float, number.to_string()),
                _ => Value::Integer(number.to_string()),
            },
            serde_json::Value::Array(array) => Value::Array(array.iter().map(Self::from_json).collect()),
            serde_json::Value::Object(object) => Value::Table(
                object
                    .iter()
                    .map(|(key, value)| Entry { key: key.clone(), key_origin: Origin::default(), node: Self::from_json(value) })
                    .collect(),
            ),
        };
        Self { value, origin: Origin::default() }
    }

    /// The number that a cell of text spells, or the text itself.
    pub fn from_cell(text: &str) -> Self {
        let value = match (text.parse::<i128>(), text.parse::<f64>()) {
            (Ok(integer), _) => Value::Integer(integer.to_string()),
            (_, Ok(float)) => Self::from_float(float, text.to_owned()),
            _ => Value::String(text.to_owned()),
        };
        Self { value, origin: Origin::default() }
    }

    fn from_float(float: f64, text: String) -> Value {
        const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
        match float.fract() == 0.0 && float.abs() <= EXACT_MAX {
            true => Value::Integer((float as i64).to_string()),
            false => Value::Float(text),
        }
    }

    pub fn set_origin(&mut self, origin: Origin) {
        self.origin = origin;
        match &mut self.value {
            Value::Array(array) => array.iter_mut().for_each(|element| element.set_origin(origin)),
            Value::Table(entries) => entries.iter_mut().for_each(|entry| {
                entry.key_origin = origin;
                entry.node.set_origin(origin);
            }),
            _ => {}
        }
    }

    /// The value in a few words, for an error.
    pub fn found(&self) -> String {
        match &self.value {
            Value::String(text) => format!("the string {}", quoted(text)),
            Value::Integer(text) | Value::Float(text) => shortened(text),
            Value::Boolean(boolean) => boolean.to_string(),
            Value::Datetime(text) => format!("the date {}", shortened(text)),
            Value::Array(array) if array.is_empty() => "an empty array".to_owned(),
            Value::Array(_) => "an array".to_owned(),
            Value::Table(_) => "a table".to_owned(),
            Value::Null => "null".to_owned(),
        }
    }

    pub fn fault(&self, expected: impl Into<String>) -> Fault {
        Fault { expected: expected.into(), found: self.found(), origin: self.origin }
    }

    pub fn integer(&self, range: RangeInclusive<u64>) -> Result<u64, Fault> {
        let expected = || self.fault(format!("an integer from {} to {}", range.start(), range.end()));
        let Value::Integer(text) = &self.value else { return Err(expected()) };
        text.parse().ok().filter(|integer| range.contains(integer)).ok_or_else(expected)
    }

    /// As [`Node::integer`]; a range within u32 makes the narrowing exact.
    pub fn integer_u32(&self, range: RangeInclusive<u32>) -> Result<u32, Fault> {
        self.integer(u64::from(*range.start())..=u64::from(*range.end())).map(|integer| integer as u32)
    }

    /// A finite number that `allowed` holds for; `expected` says so in words.
    pub fn number(&self, expected: &str, allowed: impl Fn(f32) -> bool) -> Result<f32, Fault> {
        let (Value::Integer(text) | Value::Float(text)) = &self.value else { return Err(self.fault(expected)) };
        let number = text.replace('_', "").parse::<f32>().ok();
        // Adding zero turns -0.0 into 0.0.
        number
            .filter(|number| number.is_finite() && allowed(*number))
            .map(|number| number + 0.0)
            .ok_or_else(|| self.fault(expected))
    }

    pub fn boolean(&self) -> Result<bool, Fault> {
        match self.value {
            Value::Boolean(boolean) => Ok(boolean),
            _ => Err(self.fault("true or false")),
        }
    }

    pub fn string(&self, expected: &str) -> Result<String, Fault> {
        match &self.value {
            Value::String(text) => Ok(text.clone()),
            _ => Err(self.fault(expected)),
        }
    }

    /// A string that is not empty and has no control characters: a name or a path.
    pub fn name(&self, expected: &str) -> Result<String, Fault> {
        let text = self.string(expected)?;
        match text.trim().is_empty() || text.chars().any(char::is_control) {
            true => Err(self.fault(format!("{expected}, not empty and without control characters"))),
            false => Ok(text),
        }
    }

    /// The elements of an array, or the value itself as the only one.
    pub fn one_or_many(&self, expected: &str, count_max: usize) -> Result<&[Node], Fault> {
        match &self.value {
            Value::Array(array) if array.len() > count_max => {
                Err(Fault { found: format!("{} of them", array.len()), ..self.fault(format!("{expected}, {count_max} at most")) })
            }
            Value::Array(array) => Ok(array),
            Value::Table(_) => Err(self.fault(expected)),
            _ => Ok(std::slice::from_ref(self)),
        }
    }
}

/// The entries of a table, in the order of the source.
pub(super) fn entries(table: &DeTable<'_>, source: usize) -> Vec<Entry> {
    let at = |span: std::ops::Range<usize>| Origin { source, start: span.start, end: span.end };
    table
        .iter()
        .map(|(key, value)| Entry {
            key: key.get_ref().to_string(),
            key_origin: at(key.span()),
            node: Node::from_toml(value.get_ref(), at(value.span())),
        })
        .collect()
}

/// `text` in quotes, escaped, and cut where it is long.
pub(super) fn quoted(text: &str) -> String {
    let cut: String = text.chars().take(SHOWN_CHARS_MAX).collect();
    let dots = if cut.len() < text.len() { "…" } else { "" };
    format!("\"{}{dots}\"", cut.escape_debug())
}

/// `text` with control characters escaped, and cut where it is long.
pub(super) fn shortened(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars().take(SHOWN_CHARS_MAX) {
        if c.is_control() { shown.extend(c.escape_debug()) } else { shown.push(c) }
    }
    if text.chars().nth(SHOWN_CHARS_MAX).is_some() { shown + "…" } else { shown }
}

const SHOWN_CHARS_MAX: usize = 60;
