//! One JSON object a line. Format: RFC 8259 a line, <https://jsonlines.org>.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;
use serde_json::{Map, Number, Value};

use super::raw::{Unreadable, shorten, utf8};

/// Reads the columns of a line.
pub(super) fn columns_of(line: &[u8]) -> Result<Map<String, Value>, Unreadable> {
    // Files joined with `cat` carry their byte order marks along; JSON never begins with one.
    let text = utf8(line)?.trim_start_matches('\u{feff}');
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = UniqueKeys.deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| value));
    let kind = match value {
        Ok(Value::Object(columns)) => return Ok(columns),
        Ok(Value::Array(_)) => "an array",
        Ok(Value::String(_)) => "a string",
        Ok(Value::Number(_)) => "a number",
        Ok(Value::Bool(_)) => "a boolean",
        Ok(Value::Null) => "null",
        Err(error) => return Err(Unreadable::new(sentence(&error))),
    };
    Err(Unreadable::new(format!(
        "the line is {kind}, not an object; write one JSON object a line, as {{\"id\": …, \"prompt\": …}}"
    )))
}

fn sentence(error: &serde_json::Error) -> String {
    let (message, column) = (error.to_string(), error.column());
    // serde_json's own position says line 1 always; the row's source says the real one.
    let message = message.split(" at line ").next().unwrap_or_default();
    match error.classify() {
        Category::Data => format!("column {column} of the line: {message}"),
        Category::Eof => format!("the JSON ends too early ({message}); write each object on one line of its own"),
        _ if message.starts_with("recursion limit") => {
            format!("column {column} of the line: the JSON is nested deeper than 127 levels; flatten it, or write it as a string")
        }
        _ if message.starts_with("number out of range") => {
            format!("column {column} of the line: the number is larger than a float64 holds; write it as a string")
        }
        _ if message.starts_with("control character") => {
            format!("column {column} of the line: a raw control character; write it as \\n, \\t or \\u00XX")
        }
        _ if message.starts_with("trailing characters") => {
            format!("column {column} of the line: text follows the object; write one JSON object a line")
        }
        _ => {
            format!("column {column} of the line is not JSON ({message}); correct the line, or write the file with a JSON library")
        }
    }
}

/// Reads a [`Value`] and refuses a key that stands twice in one object, of which serde_json keeps the last in silence.
struct UniqueKeys;

impl<'de> DeserializeSeed<'de> for UniqueKeys {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("a number is not finite; write it as a string"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.into()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value, A::Error> {
        let mut array = Vec::new();
        while let Some(element) = elements.next_element_seed(UniqueKeys)? {
            array.push(element);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if object.contains_key(&key) {
                let key = shorten(&key);
                return Err(A::Error::custom(format_args!("the key `{key}` stands twice in one object; keep one")));
            }
            object.insert(key, entries.next_value_seed(UniqueKeys)?);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expected: &str) {
        let error = columns_of(line.as_bytes()).expect_err(line).error;
        assert!(error.contains(expected), "{line}\n  gave     {error}\n  expected {expected}");
    }

    #[test]
    fn columns_keep_their_order_and_kinds() {
        let columns = columns_of(br#"{"z": 1, "a": [true, null, -2, 1.5, {"b": "\u00e9"}], "m": 18446744073709551615}"#).unwrap();
        assert_eq!(columns.keys().collect::<Vec<_>>(), ["z", "a", "m"]);
        assert_eq!(Value::Object(columns).to_string(), r#"{"z":1,"a":[true,null,-2,1.5,{"b":"é"}],"m":18446744073709551615}"#);
    }

    #[test]
    fn what_is_not_an_object() {
        check("[1, 2]", "an array, not an object");
        check("\"text\"", "a string, not an object");
        check("7", "a number, not an object");
        check("true", "a boolean, not an object");
        check("null", "null, not an object");
    }

    #[test]
    fn faults_name_the_column_and_the_remedy() {
        check("{\"a\": 1,}", "column 9 of the line is not JSON (trailing comma)");
        check("{'a': 1}", "column 2 of the line is not JSON");
        check("{\"a\": NaN}", "column 7 of the line is not JSON");
        check("{\"a\": 1", "ends too early");
        check("{", "write each object on one line of its own");
        check("{} {}", "write one JSON object a line");
        check("{\"a\": \"\\ud800\"}", "column");
        check("{\"a\": 1e999}", "larger than a float64 holds");
        check("{\"a\": \"\0\"}", "raw control character");
    }

    #[test]
    fn a_key_that_stands_twice_at_any_depth() {
        check("{\"a\": 1, \"a\": 2}", "the key `a` stands twice");
        check("{\"m\": [{\"role\": 1, \"role\": 2}]}", "the key `role` stands twice");
        let long = "k".repeat(100_000);
        let error = columns_of(format!("{{\"{long}\": 1, \"{long}\": 1}}").as_bytes()).unwrap_err().error;
        assert!(error.len() < 400, "{}", error.len());
    }

    #[test]
    fn a_depth_bomb() {
        check(&format!("{{\"a\": {}", "[".repeat(1_000_000)), "nested deeper than 127 levels");
        check(&"{\"a\":".repeat(1_000_000), "nested deeper than 127 levels");
        let deepest = format!("{{\"a\": {}{}}}", "[".repeat(126), "]".repeat(126));
        assert!(columns_of(deepest.as_bytes()).is_ok());
    }

    #[test]
    fn invalid_utf_8_says_which_byte() {
        let error = columns_of(b"{\"a\": \"\xff\"}").unwrap_err().error;
        assert!(error.contains("byte 8 is not UTF-8"), "{error}");
    }
}
