//! Images and recordings that a row names: in its image column, and in the content parts of its messages.

use std::path::Path;

use serde_json::{Map, Value};

use super::raw::shorten;
use super::recording::{from_base64, located};
use super::{AUDIO_BYTES_MAX, Medium};
use crate::media::{IMAGE_BYTES_MAX, MediaSource};

/// Media of one row at most.
pub const MEDIA_MAX: usize = 256;

/// What a medium is, as its row says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediumKind {
    Image,
    Audio,
}

impl MediumKind {
    /// Of a content part's `type`: OpenAI's names, and those of Hugging Face's chat templates.
    pub fn of_part(part_type: &str) -> Option<Self> {
        match part_type {
            "image" | "image_url" | "input_image" => Some(Self::Image),
            "audio" | "audio_url" | "input_audio" => Some(Self::Audio),
            _ => None,
        }
    }

    fn keys(self) -> [&'static str; 4] {
        match self {
            Self::Image => ["image", "image_url", "url", "path"],
            Self::Audio => ["audio", "input_audio", "audio_url", "url"],
        }
    }

    fn bytes_max(self) -> usize {
        match self {
            Self::Image => IMAGE_BYTES_MAX as usize,
            Self::Audio => AUDIO_BYTES_MAX,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Image => "an image",
            Self::Audio => "a recording",
        }
    }
}

/// The images of a row's image column: one, or a list of them; paths become absolute in it, as [`located`] says.
pub(super) fn of_column(
    columns: &mut Map<String, Value>,
    column: &str,
    folder: &Path,
    source: &str,
) -> Result<Vec<MediaSource>, String> {
    let place = Place { column, folder, source, kind: MediumKind::Image };
    let images = match columns.get_mut(column) {
        None => Vec::new(),
        Some(Value::Array(values)) => {
            let images: Result<Vec<_>, String> = values.iter_mut().map(|value| place.resolve(value)).collect();
            images?.into_iter().flatten().collect()
        }
        Some(value) => place.resolve(value)?.into_iter().collect(),
    };
    check_count(images.len(), column)?;
    Ok(images)
}

/// The media of a row's messages, in the order of the conversation. What is no conversation has none; the prompt says what is wrong
/// with it.
pub(super) fn of_messages(
    columns: &mut Map<String, Value>,
    column: &str,
    folder: &Path,
    source: &str,
) -> Result<Vec<Medium>, String> {
    let Some(value) = columns.get_mut(column) else { return Ok(Vec::new()) };
    // CSV has it as text.
    let mut parsed = value.as_str().filter(|text| text.contains("\"type\"")).and_then(|text| serde_json::from_str(text).ok());
    let Some(messages) = parsed.as_mut().unwrap_or(value).as_array_mut() else { return Ok(Vec::new()) };
    let mut media = Vec::new();
    for (message, number) in messages.iter_mut().zip(1..) {
        let Some(parts) = message.get_mut("content").and_then(Value::as_array_mut) else { continue };
        for part in parts {
            let Some(kind) = part.get("type").and_then(Value::as_str).and_then(MediumKind::of_part) else { continue };
            let place = Place { column, folder, source, kind };
            let key = kind.keys().into_iter().find(|key| part.get(*key).is_some_and(|value| !value.is_null()));
            let medium = match key.and_then(|key| part.get_mut(key)) {
                Some(value) => place.resolve(value).map_err(|error| format!("message {number}: {error}"))?,
                None => None,
            };
            let Some(medium) = medium else {
                let (name, keys) = (kind.name(), kind.keys().join("`, `"));
                return Err(format!("message {number} in `{column}` has a part for {name} that names none; give it `{keys}`"));
            };
            media.push(Medium { kind, source: medium });
            check_count(media.len(), column)?;
        }
    }
    if !media.is_empty()
        && let Some(parsed) = parsed
    {
        *value = Value::String(parsed.to_string());
    }
    Ok(media)
}

fn check_count(count: usize, column: &str) -> Result<(), String> {
    if count > MEDIA_MAX {
        return Err(format!("`{column}` has more than {MEDIA_MAX} images and recordings, which is the limit for a row; split it"));
    }
    Ok(())
}

/// Where a medium is named.
struct Place<'a> {
    column: &'a str,
    folder: &'a Path,
    /// The row, which gives its name to a medium without one.
    source: &'a str,
    kind: MediumKind,
}

impl Place<'_> {
    /// A path, a file: or data: URL, or an object that has one of these or base64; none where it is empty.
    fn resolve(&self, value: &mut Value) -> Result<Option<MediaSource>, String> {
        match value {
            Value::Null => Ok(None),
            Value::String(text) if text.trim().is_empty() => Ok(None),
            Value::String(text) => self.named(text).map(Some),
            Value::Object(object) => {
                for key in ["data", "bytes"] {
                    match object.get(key) {
                        None | Some(Value::Null) => {}
                        Some(Value::String(text)) => return self.of_base64(text).map(Some),
                        Some(_) => return Err(format!("the {key} in `{}` are not text in base64; write it so", self.column)),
                    }
                }
                let key = ["url", "path"].into_iter().find(|key| object.get(*key).is_some_and(|value| !value.is_null()));
                match key.and_then(|key| object.get_mut(key)) {
                    None => Ok(None),
                    Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
                    Some(Value::String(text)) => self.named(text).map(Some),
                    Some(other) => Err(self.is_none(other)),
                }
            }
            other => Err(self.is_none(other)),
        }
    }

    fn is_none(&self, value: &Value) -> String {
        let (column, name) = (self.column, self.kind.name());
        format!("`{column}` holds {}, which is not {name}; write a path or a data: URL", shorten(&value.to_string()))
    }

    fn named(&self, text: &mut String) -> Result<MediaSource, String> {
        let column = self.column;
        let Some(data) = text.get(..5).filter(|scheme| scheme.eq_ignore_ascii_case("data:")).map(|_| &text[5..]) else {
            return located(text, column, self.folder);
        };
        // RFC 2397. What the content is, its bytes say.
        let (header, data) = data.split_once(',').ok_or_else(|| format!("the data: URL in `{column}` has no comma; correct it"))?;
        if !header.to_ascii_lowercase().ends_with(";base64") {
            return Err(format!("the data: URL in `{column}` is not in base64; write data:TYPE;base64,…"));
        }
        self.of_base64(data)
    }

    fn of_base64(&self, text: &str) -> Result<MediaSource, String> {
        let (column, bytes_max) = (self.column, self.kind.bytes_max());
        if text.len() / 4 * 3 > bytes_max {
            let limit = bytes_max >> 20;
            return Err(format!("the base64 in `{column}` stands for more than {limit} MiB, the limit; write a file and name it"));
        }
        let bytes = from_base64(text).map_err(|error| format!("the bytes in `{column}` are not base64: {error}"))?;
        Ok(MediaSource::Bytes { name: format!("{} in {}", self.kind.name(), self.source), bytes: bytes.into() })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn messages(value: Value) -> (Result<Vec<Medium>, String>, Value) {
        let mut columns = Map::from_iter([("messages".to_owned(), value)]);
        let read = of_messages(&mut columns, "messages", Path::new("/data"), "m.jsonl:3");
        (read, columns.remove("messages").unwrap())
    }

    fn file(kind: MediumKind, path: &str) -> Medium {
        Medium { kind, source: MediaSource::File(path.into()) }
    }

    #[test]
    fn content_parts_of_every_form_in_the_order_of_the_conversation() {
        let value = json!([
            {"role": "system", "content": "s"},
            {"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}},
                {"type": "text", "text": "b"},
                {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
                {"type": "image", "image": "data:image/png;base64,UklG"},
                {"type": "audio_url", "audio_url": {"url": "file:///x/c.wav"}},
                {"type": "image", "path": "/d.png"},
                {"type": "audio", "audio": "e.flac"},
                {"type": "input_image", "image_url": "f.png"},
            ]},
        ]);
        let bytes = |kind: MediumKind| MediaSource::Bytes {
            name: format!("{} in m.jsonl:3", kind.name()),
            bytes: b"RIF".as_slice().into(),
        };
        use MediumKind::{Audio, Image};
        let expected = vec![
            file(Image, "/data/a.png"),
            Medium { kind: Audio, source: bytes(Audio) },
            Medium { kind: Image, source: bytes(Image) },
            file(Audio, "/x/c.wav"),
            file(Image, "/d.png"),
            file(Audio, "/data/e.flac"),
            file(Image, "/data/f.png"),
        ];
        let (read, written) = messages(value.clone());
        assert_eq!(read.unwrap(), expected);
        assert_eq!(written[1]["content"][0]["image_url"]["url"], "/data/a.png", "paths become absolute");
        let (read, written) = messages(Value::String(value.to_string()));
        assert_eq!(read.unwrap(), expected);
        assert!(written.as_str().unwrap().contains("/data/a.png"));
        let text = json!([{"role": "user", "content": [{"type": "text", "text": "x"}]}]);
        assert_eq!(messages(text.clone()), (Ok(vec![]), text));
    }

    #[track_caller]
    fn refused(part: Value, expected: &str) {
        let error = messages(json!([{"role": "user", "content": [part]}])).0.unwrap_err();
        assert!(error.contains(expected) && error.starts_with("message 1"), "{error}");
    }

    #[test]
    fn what_names_no_medium_says_why() {
        let url = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
        refused(url("https://x.org/a.png"), "is a URL, and none is fetched; download it");
        refused(url("data:image/png,abc"), "not in base64");
        refused(url("data:image/png;base64"), "has no comma");
        refused(url("data:image/png;base64,U*"), "not base64: character 2");
        refused(url(""), "names none");
        refused(json!({"type": "image"}), "has a part for an image that names none; give it `image`, `image_url`");
        refused(json!({"type": "audio", "audio": 5}), "holds 5, which is not a recording");
        refused(json!({"type": "input_audio", "input_audio": {"data": 5}}), "not text in base64");
        let many = vec![json!({"type": "image", "image": "a.png"}); MEDIA_MAX + 1];
        let error = messages(json!([{"role": "user", "content": many}])).0.unwrap_err();
        assert!(error.contains("more than 256"), "{error}");
    }

    #[test]
    fn a_column_has_one_image_or_several() {
        let read = |value: Value| {
            let mut columns = Map::from_iter([("image".to_owned(), value)]);
            of_column(&mut columns, "image", Path::new("/data"), "m.jsonl:3")
        };
        assert_eq!(read(json!("a.png")), Ok(vec![MediaSource::File("/data/a.png".into())]));
        assert_eq!(read(json!(["a.png", null, {"path": "b.png"}])).unwrap().len(), 2);
        assert_eq!(read(json!(null)), Ok(vec![]));
        assert_eq!(read(json!("")), Ok(vec![]));
        assert!(read(json!(7)).unwrap_err().contains("not an image"));
        assert!(read(json!("https://x.org/a.png")).unwrap_err().contains("none is fetched"));
    }
}
