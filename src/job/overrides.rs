//! A row's own sampling.

use serde_json::{Map, Value};

use super::Generation;
use super::generation::{KEYS, KEYS_LATER};
use super::value::{Fault, Node};

impl Generation {
    /// Whether a column is named like a key of `[generation]`: if not, all such rows can share one [`Generation`].
    pub fn is_overridden_by(&self, columns: &Map<String, Value>) -> bool {
        columns.iter().any(|(column, value)| is_key(column) && !is_empty(column, value))
    }

    /// The generation of a row with these columns: each one named like a key of `[generation]` replaces it.
    ///
    /// Null and blank text leave a key as it is (of `stop`, only empty text). Text, which is all that a CSV has, is read as the
    /// number, boolean, JSON array or JSON object that it spells.
    ///
    /// # Errors
    /// A sentence that names the column, what it expects and what it holds.
    pub fn overridden_by(&self, columns: &Map<String, Value>) -> Result<Self, String> {
        let mut generation = self.clone();
        for (column, value) in columns {
            if !is_key(column) || is_empty(column, value) {
                continue;
            }
            if KEYS_LATER.contains(&column.as_str()) {
                return Err(format!("column `{column}` asks for something that is not yet supported; empty it or rename it"));
            }
            let node = read(column, value);
            generation
                .assign(column, &node)
                .map_err(|Fault { expected, found, .. }| format!("column `{column}` expects {expected}, found {found}"))?;
        }
        Ok(generation)
    }
}

fn is_key(column: &str) -> bool {
    KEYS.contains(&column) || KEYS_LATER.contains(&column)
}

fn is_empty(column: &str, value: &Value) -> bool {
    match value {
        Value::Null => true,
        // Blanks and line ends are stop strings that people use.
        Value::String(text) if column == "stop" => text.is_empty(),
        Value::String(text) => text.trim().is_empty(),
        _ => false,
    }
}

fn read(column: &str, value: &Value) -> Node {
    let Value::String(text) = value else { return Node::from_json(value) };
    let trimmed = text.trim();
    match column {
        // A stop string may be anything, a number or blanks included; only a JSON array is more than itself.
        "stop" => match serde_json::from_str::<Value>(trimmed) {
            Ok(array @ Value::Array(_)) => Node::from_json(&array),
            _ => Node::from_json(value),
        },
        "stop_token_ids" | "logit_bias" => {
            serde_json::from_str::<Value>(trimmed).map_or_else(|_| Node::from_json(value), |value| Node::from_json(&value))
        }
        "ignore_eos" | "logprobs" if trimmed.eq_ignore_ascii_case("true") => Node::from_json(&Value::Bool(true)),
        "ignore_eos" | "logprobs" if trimmed.eq_ignore_ascii_case("false") => Node::from_json(&Value::Bool(false)),
        _ => Node::from_cell(trimmed),
    }
}
