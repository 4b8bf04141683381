//! What stands in single braces in a job's template: it stays as it is written, and was perhaps meant to be filled in.

use serde_json::{Map, Value};

/// Characters between braces that may be a column's name.
const NAME_CHARS_MAX: usize = 100;

/// What stands in single braces outside of minijinja's tags, each once.
pub(super) fn in_single_braces(source: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut rest = source;
    while let Some(start) = rest.find('{') {
        let inside = &rest[start + 1..];
        let closing = match inside.chars().next() {
            Some('{') => Some("}}"),
            Some('%') => Some("%}"),
            Some('#') => Some("#}"),
            _ => None,
        };
        if let Some(closing) = closing {
            rest = inside.find(closing).map_or("", |end| &inside[end + closing.len()..]);
            continue;
        }
        let name = inside.split_once('}').map(|(name, _)| name.trim());
        if let Some(name) = name.filter(|name| !name.is_empty() && name.chars().count() <= NAME_CHARS_MAX)
            && !found.iter().any(|known| known == name)
        {
            found.push(name.to_owned());
        }
        rest = inside;
    }
    found
}

/// A sentence for the job's author, where single braces name a column of a row.
pub(super) fn note(literals: &[String], columns: &Map<String, Value>) -> Option<String> {
    let name = literals.iter().find(|name| columns.contains_key(*name))?;
    let others = literals.iter().filter(|other| *other != name && columns.contains_key(*other)).count();
    let others = match others {
        0 => "",
        1 => ", as does another",
        _ => ", as do others",
    };
    Some(format!(
        "prompt.template has {{{name}}}, which stays in the prompt as it is written{others}: to have the column {name:?} filled in, write \
         {{{{ {name} }}}}"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn single_braces_are_found_outside_of_tags() {
        let found = |source| in_single_braces(source).join("|");
        assert_eq!(found("{q}"), "q");
        assert_eq!(found("a {q} b { long name } {q} ${x}"), "q|long name|x");
        assert_eq!(found("{{ q }}{% if {q} %}{# {q} #}"), "");
        assert_eq!(found("{{ {\"a\": q} }}"), "");
        assert_eq!(found("{\"answer\": {x}}"), "\"answer\": {x|x");
        assert_eq!(found("{ { {}  {q"), "{ {|{");
        assert_eq!(found("{{ q"), "");
        assert_eq!(found(&format!("{{{}}}", "x".repeat(101))), "");
    }

    #[test]
    fn a_note_is_about_columns_alone() {
        let columns = |value: Value| value.as_object().unwrap().clone();
        let literals = in_single_braces("{q} {r} {\"json\": 1}");
        let expected = "prompt.template has {q}, which stays in the prompt as it is written: to have the column \"q\" filled in, \
                        write {{ q }}";
        assert_eq!(note(&literals, &columns(json!({"q": "x", "json": 1}))).as_deref(), Some(expected));
        assert!(note(&literals, &columns(json!({"r": "x", "q": 1}))).unwrap().contains("as it is written, as does another: "));
        assert_eq!(note(&literals, &columns(json!({"json": 1, "prompt": "{q}"}))), None);
    }
}
