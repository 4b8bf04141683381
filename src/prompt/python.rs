//! What Python does with values in a template: `str`, `repr`, `json.dumps`, and the string methods that chat templates call.
//!
//! Semantics: the Python 3 library reference (`str` methods, `json`), since chat templates are written for jinja2 on Python.

use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat;

/// Arrays and maps in each other; deeper than any message, shallower than the stack.
const DEPTH_MAX: usize = 64;

/// Python's idea of white space: Unicode's, and the four separators of ASCII.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn deeper(depth: usize) -> Result<usize, Error> {
    if depth == DEPTH_MAX { Err(invalid(format!("a value is more than {DEPTH_MAX} levels deep"))) } else { Ok(depth + 1) }
}

/// `str(value)`.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    match value.kind() {
        ValueKind::String => text.push_str(value.as_str().unwrap_or_default()),
        ValueKind::Undefined => {}
        _ => repr(value, &mut text, 0)?,
    }
    Ok(text)
}

/// `repr(value)`, as it prints inside lists and maps.
fn repr(value: &Value, text: &mut String, depth: usize) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String => repr_str(value.as_str().unwrap_or_default(), text),
        ValueKind::Number if !value.is_integer() => text.push_str(&float(f64::try_from(value.clone())?)),
        ValueKind::Seq => {
            let depth = deeper(depth)?;
            text.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                repr(&item, text, depth)?;
            }
            text.push(']');
        }
        ValueKind::Map if is_plain_map(value) => {
            let depth = deeper(depth)?;
            text.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                repr(&key, text, depth)?;
                text.push_str(": ");
                repr(&value.get_item(&key)?, text, depth)?;
            }
            text.push('}');
        }
        _ => text.push_str(&value.to_string()),
    }
    Ok(())
}

/// A map from data rather than an object of the engine (a namespace, a module).
fn is_plain_map(value: &Value) -> bool {
    value.try_iter().is_ok()
}

fn repr_str(string: &str, text: &mut String) {
    let quote = if string.contains('\'') && !string.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for c in string.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            c if c == quote => text.extend(['\\', c]),
            c if is_printable(c) => text.push(c),
            c => text.push_str(&match c as u32 {
                code @ 0..0x100 => format!("\\x{code:02x}"),
                code @ 0x100..0x1_0000 => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    text.push(quote);
}

/// `str.isprintable` of one character: not of a category of separators or others (Unicode 16), but for the space. Code points that
/// are not assigned count as printable here.
fn is_printable(c: char) -> bool {
    const OTHER: &[(u32, u32)] = &[
        (0xad, 0xad),
        (0x600, 0x605),
        (0x61c, 0x61c),
        (0x6dd, 0x6dd),
        (0x70f, 0x70f),
        (0x890, 0x891),
        (0x8e2, 0x8e2),
        (0x180e, 0x180e),
        (0x200b, 0x200f),
        (0x202a, 0x202e),
        (0x2060, 0x2064),
        (0x2066, 0x206f),
        (0xe000, 0xf8ff),
        (0xfeff, 0xfeff),
        (0xfff9, 0xfffb),
        (0x110bd, 0x110bd),
        (0x110cd, 0x110cd),
        (0x13430, 0x1343f),
        (0x1bca0, 0x1bca3),
        (0x1d173, 0x1d17a),
        (0xe0001, 0xe0001),
        (0xe0020, 0xe007f),
        (0xf0000, 0x10ffff),
    ];
    let code = c as u32;
    c == ' ' || !(c.is_control() || c.is_whitespace() || OTHER.iter().any(|&(first, last)| (first..=last).contains(&code)))
}

/// `repr(float)`: the shortest digits that read back, with an exponent outside 1e-4 to 1e16.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// The `tojson` filter as transformers replaces it: `json.dumps` with `ensure_ascii=False`, and nothing escaped for HTML.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let mut style = Json { ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false), ..Json::default() };
    if let Some(indent) = options.get::<Option<Value>>("indent")?.filter(|indent| !indent.is_none()) {
        style.indent = Some(match indent.as_str() {
            Some(indent) => indent.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(64)),
        });
        style.item = ",".to_owned();
    }
    if let Some(separators) = options.get::<Option<Value>>("separators")?.filter(|separators| !separators.is_none()) {
        style.item = str(&separators.get_item_by_index(0)?)?;
        style.key = str(&separators.get_item_by_index(1)?)?;
    }
    style.sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut text = String::new();
    style.write(value, &mut text, 0)?;
    Ok(Value::from(text))
}

struct Json {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl Default for Json {
    fn default() -> Self {
        Self { ascii: false, indent: None, item: ", ".to_owned(), key: ": ".to_owned(), sort_keys: false }
    }
}

impl Json {
    fn write(&self, value: &Value, text: &mut String, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), text),
            ValueKind::Number if value.is_integer() => text.push_str(&value.to_string()),
            ValueKind::Number => {
                let number = float(f64::try_from(value.clone())?);
                text.push_str(match number.as_str() {
                    "nan" => "NaN",
                    "inf" => "Infinity",
                    "-inf" => "-Infinity",
                    number => number,
                });
            }
            ValueKind::Seq => {
                let inside = deeper(depth)?;
                text.push('[');
                let mut any = false;
                for item in value.try_iter()? {
                    self.separate(&mut any, text, inside);
                    self.write(&item, text, inside)?;
                }
                self.close(any, text, depth);
                text.push(']');
            }
            ValueKind::Map => {
                let inside = deeper(depth)?;
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                text.push('{');
                let mut any = false;
                for key in keys {
                    self.separate(&mut any, text, inside);
                    match key.kind() {
                        ValueKind::String => self.string(key.as_str().unwrap_or_default(), text),
                        ValueKind::Number | ValueKind::Bool | ValueKind::None => {
                            text.push('"');
                            self.write(&key, text, inside)?;
                            text.push('"');
                        }
                        kind => return Err(invalid(format!("a key of kind {kind} cannot be written as JSON"))),
                    }
                    text.push_str(&self.key);
                    self.write(&value.get_item(&key)?, text, inside)?;
                }
                self.close(any, text, depth);
                text.push('}');
            }
            kind => return Err(invalid(format!("a value of kind {kind} cannot be written as JSON"))),
        }
        Ok(())
    }

    fn separate(&self, any: &mut bool, text: &mut String, depth: usize) {
        if *any {
            text.push_str(&self.item);
        }
        *any = true;
        self.line(text, depth);
    }

    fn close(&self, any: bool, text: &mut String, depth: usize) {
        if any {
            self.line(text, depth);
        }
    }

    fn line(&self, text: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            text.push('\n');
            (0..depth).for_each(|_| text.push_str(indent));
        }
    }

    fn string(&self, string: &str, text: &mut String) {
        text.push('"');
        for c in string.chars() {
            match c {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ascii && !(' '..='~').contains(&c)) => {
                    let mut units = [0; 2];
                    c.encode_utf16(&mut units).iter().for_each(|unit| text.push_str(&format!("\\u{unit:04x}")));
                }
                c => text.push(c),
            }
        }
        text.push('"');
    }
}

/// The `trim` filter: `str.strip`.
pub(super) fn trim(value: &Value, chars: Option<String>) -> Result<String, Error> {
    Ok(strip(&str(value)?, chars.as_deref(), true, true).to_owned())
}

fn strip<'a>(text: &'a str, chars: Option<&str>, start: bool, end: bool) -> &'a str {
    let gone = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(gone) } else { text };
    if end { text.trim_end_matches(gone) } else { text }
}

/// Methods of Python's `str` and `dict` that minijinja does not have, or has otherwise; the rest is minijinja-contrib's.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return pycompat::unknown_method_callback(state, value, name, args);
    };
    let list = |parts: Vec<String>| Value::from(parts);
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Value::from(strip(text, chars, name != "rstrip", name != "lstrip"))
        }
        "split" | "rsplit" => {
            let (rest, options): (&[Value], Kwargs) = from_args(args)?;
            let (separator, limit): (Option<Option<String>>, Option<i64>) = from_args(rest)?;
            let separator = separator.flatten().or(options.get("sep")?);
            let limit = limit.or(options.get("maxsplit")?).and_then(|limit| usize::try_from(limit).ok());
            options.assert_all_used()?;
            list(split(text, separator.as_deref(), limit, name == "rsplit")?)
        }
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            list(splitlines(text, keep.unwrap_or(false)))
        }
        "removeprefix" | "removesuffix" => {
            let (part,): (&str,) = from_args(args)?;
            let cut = if name == "removeprefix" { text.strip_prefix(part) } else { text.strip_suffix(part) };
            Value::from(cut.unwrap_or(text))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            if separator.is_empty() {
                return Err(invalid("empty separator"));
            }
            let last = name == "rpartition";
            let cut = if last { text.rsplit_once(separator) } else { text.split_once(separator) };
            let (a, b, c) = match cut {
                Some((a, c)) => (a, separator, c),
                None if last => ("", "", text),
                None => (text, "", ""),
            };
            list(vec![a.to_owned(), b.to_owned(), c.to_owned()])
        }
        "index" | "rindex" => {
            let found = pycompat::unknown_method_callback(state, value, if name == "index" { "find" } else { "rfind" }, args)?;
            if found.as_i64() == Some(-1) {
                return Err(invalid("substring not found"));
            }
            found
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            Value::from(pad(text, width, fill.unwrap_or(' '), name)?)
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = if text.starts_with(['+', '-']) { text.split_at(1) } else { ("", text) };
            Value::from(format!("{sign}{}", pad(digits, width.saturating_sub(sign.len()), '0', "rjust")?))
        }
        _ => return pycompat::unknown_method_callback(state, value, name, args),
    })
}

fn split(text: &str, separator: Option<&str>, limit: Option<usize>, from_right: bool) -> Result<Vec<String>, Error> {
    let parts_max = limit.map_or(usize::MAX, |limit| limit.saturating_add(1));
    let Some(separator) = separator else {
        let mut parts: Vec<String> = Vec::new();
        let mut rest = strip(text, None, !from_right, from_right);
        while !rest.is_empty() {
            if parts.len() + 1 == parts_max {
                parts.push(rest.to_owned());
                break;
            }
            let cut = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
            match cut {
                None => {
                    parts.push(rest.to_owned());
                    break;
                }
                Some(at) if from_right => {
                    let after = at + rest[at..].chars().next().map_or(0, char::len_utf8);
                    parts.push(rest[after..].to_owned());
                    rest = strip(&rest[..at], None, false, true);
                }
                Some(at) => {
                    parts.push(rest[..at].to_owned());
                    rest = strip(&rest[at..], None, true, false);
                }
            }
        }
        if from_right {
            parts.reverse();
        }
        return Ok(parts);
    };
    if separator.is_empty() {
        return Err(invalid("empty separator"));
    }
    if from_right {
        let mut parts: Vec<String> = text.rsplitn(parts_max, separator).map(str::to_owned).collect();
        parts.reverse();
        return Ok(parts);
    }
    Ok(text.splitn(parts_max, separator).map(str::to_owned).collect())
}

fn splitlines(text: &str, keep_ends: bool) -> Vec<String> {
    let ends =
        |c| matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}' | '\u{1d}' | '\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let length = if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(1, char::len_utf8) };
        lines.push(rest[..if keep_ends { at + length } else { at }].to_owned());
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        lines.push(rest.to_owned());
    }
    lines
}

fn pad(text: &str, width: usize, fill: char, how: &str) -> Result<String, Error> {
    if width > 1 << 16 {
        return Err(invalid(format!("{how} to {width} characters is too wide")));
    }
    let missing = width.saturating_sub(text.chars().count());
    // CPython's rule for the odd character of a centred text.
    let left = match how {
        "ljust" => 0,
        "rjust" => missing,
        _ => missing / 2 + (missing & width & 1),
    };
    let many = |count: usize| std::iter::repeat_n(fill, count);
    Ok(many(left).chain(text.chars()).chain(many(missing - left)).collect())
}
