//! What a row says of its recording: a path, or the bytes themselves. A path is not opened here, so that a file that is absent
//! fails its row where media are read.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Map, Value};

use super::raw::{first_8_bytes, shorten};
use super::records;
use crate::media::MediaSource;

/// Bytes of a recording at most that a manifest holds itself.
pub const AUDIO_BYTES_MAX: usize = 512 * 1024 * 1024;

/// Extensions of files that are recordings, films with a sound track among them. What is in a file is found out when it is read.
const EXTENSIONS: [&str; 23] = [
    "wav", "wave", "flac", "mp3", "m4a", "m4b", "mp4", "m4v", "mov", "aac", "ogg", "oga", "ogv", "opus", "webm", "mka", "mkv",
    "aif", "aiff", "aifc", "caf", "wma", "mp2",
];

/// Whether a file's name is that of a recording, or of a film with a sound track.
pub fn is_recording_name(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| EXTENSIONS.iter().any(|known| extension.eq_ignore_ascii_case(known)))
}

/// Names that a recording called `stem` could have.
pub(super) fn names(stem: &str) -> impl Iterator<Item = String> {
    EXTENSIONS.iter().flat_map(move |extension| [format!("{stem}.{extension}"), format!("{stem}.{}", extension.to_uppercase())])
}

/// Reads the audio column; none where the row has nothing in it.
///
/// A path is relative to `folder`, and becomes absolute in the column, so that `failed.jsonl` can be read wherever it lies.
///
/// # Errors
/// A sentence on what the column holds and what it should.
pub(super) fn of_column(
    columns: &mut Map<String, Value>,
    column: &str,
    folder: &Path,
    source: &str,
) -> Result<Option<MediaSource>, String> {
    let wanted = "write a path, or an object with `path` or `bytes` (base64)";
    match columns.get_mut(column) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
        Some(Value::String(text)) => located(text, column, folder).map(Some),
        Some(Value::Object(object)) => {
            if let (Some(Value::String(file)), Some(row)) = (object.get("parquet"), object.get("row")) {
                let row = row.as_u64().ok_or_else(|| format!("the row in `{column}` is not a whole number; {wanted}"))?;
                return records::recording(&folder.join(file), row, column).map(Some);
            }
            let name = object.get("path").and_then(Value::as_str).filter(|name| !name.trim().is_empty());
            match object.get("bytes") {
                Some(Value::String(text)) => {
                    let bytes = from_base64(text).map_err(|error| format!("the bytes in `{column}` are not base64: {error}"))?;
                    Ok(Some(MediaSource::Bytes { name: name.unwrap_or(source).to_owned(), bytes: bytes.into() }))
                }
                None | Some(Value::Null) if object.contains_key("array") && name.is_none() => {
                    Err(format!("`{column}` holds samples, which are not read; write them to a file and give its path"))
                }
                None | Some(Value::Null) => match object.get_mut("path") {
                    Some(Value::String(text)) if !text.trim().is_empty() => located(text, column, folder).map(Some),
                    Some(Value::Null | Value::String(_)) => Ok(None),
                    _ => Err(format!("the object in `{column}` has no path that is text; {wanted}")),
                },
                Some(_) => Err(format!("the bytes in `{column}` are not text in base64; {wanted}")),
            }
        }
        Some(other) => Err(format!("`{column}` holds {}, which is no recording; {wanted}", shorten(&other.to_string()))),
    }
}

/// The file that a text names, which becomes its absolute path.
pub(super) fn located(text: &mut String, column: &str, folder: &Path) -> Result<MediaSource, String> {
    if let Some(character) = text.chars().find(|character| character.is_control()) {
        return Err(format!("the path in `{column}` holds the control character {character:?}; correct it"));
    }
    let path = match text.split_once("://") {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("file") => {
            let rest = rest.strip_prefix("localhost").unwrap_or(rest);
            if !rest.starts_with('/') {
                return Err(format!("`{}` in `{column}` names another machine; write file:///, or a path", shorten(text)));
            }
            PathBuf::from(percent_decoded(rest).ok_or_else(|| {
                format!("`{}` in `{column}` has a % that is not followed by two digits of UTF-8 text; write a path", shorten(text))
            })?)
        }
        Some((scheme, _)) if is_scheme(scheme) => {
            return Err(format!("`{}` in `{column}` is a URL, and none is fetched; download it and write its path", shorten(text)));
        }
        _ if text.len() > 5 && text.is_char_boundary(5) && text[..5].eq_ignore_ascii_case("data:") => {
            return Err(format!("`{column}` holds a data: URL; write the base64 alone, as {{\"bytes\": …}}"));
        }
        _ => folder.join(&*text),
    };
    let path = std::path::absolute(&path).unwrap_or(path);
    // A folder whose name is not UTF-8 cannot be written into the column.
    if let Some(absolute) = path.to_str() {
        absolute.clone_into(text);
    }
    Ok(MediaSource::File(path))
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
}

/// RFC 3986, 2.1.
fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let mut digit = || char::from(rest.next()?).to_digit(16);
        bytes.push(if byte == b'%' { (digit()? << 4 | digit()?) as u8 } else { byte });
    }
    String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
}

/// RFC 4648, both alphabets; line ends and blanks are passed over, padding may be left out.
pub(super) fn from_base64(text: &str) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
    let (mut bits, mut held, mut padding) = (0_u32, 0, 0);
    for (at, character) in text.bytes().enumerate() {
        let digit = match character {
            b'A'..=b'Z' => character - b'A',
            b'a'..=b'z' => character - b'a' + 26,
            b'0'..=b'9' => character - b'0' + 52,
            b'+' | b'-' => 62,
            b'/' | b'_' => 63,
            b'=' if padding < 2 => {
                padding += 1;
                continue;
            }
            _ if character.is_ascii_whitespace() => continue,
            _ => return Err(format!("character {} is none of its digits", at + 1)),
        };
        if padding > 0 {
            return Err(format!("digits follow the padding at character {}", at + 1));
        }
        bits = bits << 6 | u32::from(digit);
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
            bits &= (1 << held) - 1;
        }
    }
    if held == 6 { Err("it ends too early; write it again".into()) } else { Ok(bytes) }
}

/// The hash of a row together with its recording: a file counts by its size and its time of change.
pub(super) fn hash_with(input_hash: u64, audio: &MediaSource) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&input_hash.to_le_bytes());
    match audio {
        MediaSource::File(path) => hasher.update(&stamp(path)),
        MediaSource::Bytes { bytes, .. } => hasher.update(bytes),
    };
    first_8_bytes(&hasher.finalize())
}

/// What tells that a file is not what it was, without reading it.
pub(super) fn stamp(path: &Path) -> Vec<u8> {
    let Ok(metadata) = path.metadata() else { return b"missing".to_vec() };
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    let modified = modified.unwrap_or_default().as_nanos();
    [metadata.len().to_le_bytes().as_slice(), modified.to_le_bytes().as_slice()].concat()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> (Result<Option<MediaSource>, String>, Value) {
        let mut columns = Map::from_iter([("audio".to_owned(), value)]);
        let read = of_column(&mut columns, "audio", Path::new("/data/m"), "m.jsonl:3");
        (read, columns.remove("audio").unwrap())
    }

    #[track_caller]
    fn is_file(value: Value, path: &str, column: Value) {
        assert_eq!(read(value), (Ok(Some(MediaSource::File(path.into()))), column));
    }

    #[track_caller]
    fn fails(value: Value, expected: &str) {
        let error = read(value.clone()).0.expect_err(&value.to_string());
        assert!(error.contains(expected) && error.contains("`audio`"), "{value}: {error}");
    }

    #[test]
    fn paths_are_relative_to_the_manifest_and_become_absolute() {
        is_file(json!("a b.wav"), "/data/m/a b.wav", json!("/data/m/a b.wav"));
        is_file(json!("../x/a.wav"), "/data/m/../x/a.wav", json!("/data/m/../x/a.wav"));
        is_file(json!("/x/a.wav"), "/x/a.wav", json!("/x/a.wav"));
        is_file(json!({"path": "a.wav"}), "/data/m/a.wav", json!({"path": "/data/m/a.wav"}));
        is_file(
            json!({"bytes": null, "path": "a.wav", "n": 1}),
            "/data/m/a.wav",
            json!({"bytes": null, "path": "/data/m/a.wav", "n": 1}),
        );
        is_file(json!("file:///x/a%20b%C3%A9.wav"), "/x/a bé.wav", json!("/x/a bé.wav"));
        is_file(json!("File://localhost/a.wav"), "/a.wav", json!("/a.wav"));
        is_file(json!("C: 50%.wav"), "/data/m/C: 50%.wav", json!("/data/m/C: 50%.wav"));
    }

    #[test]
    fn a_row_without_a_recording() {
        for value in [json!(null), json!(""), json!(" "), json!({"path": null}), json!({"path": "", "bytes": null})] {
            assert_eq!(read(value.clone()), (Ok(None), value));
        }
        assert_eq!(of_column(&mut Map::new(), "audio", Path::new("/"), ""), Ok(None));
    }

    #[test]
    fn bytes_stay_in_their_column_and_have_a_name() {
        let bytes = |name: &str| Ok(Some(MediaSource::Bytes { name: name.into(), bytes: b"RIFF".as_slice().into() }));
        let value = json!({"bytes": "UklG\nRg==", "path": "a.wav"});
        assert_eq!(read(value.clone()), (bytes("a.wav"), value));
        assert_eq!(read(json!({"bytes": "UklGRg"})).0, bytes("m.jsonl:3"));
    }

    #[test]
    fn what_is_no_recording_says_why() {
        fails(json!("https://x.org/a.wav"), "is a URL, and none is fetched; download it");
        fails(json!({"path": "s3://b/a.wav"}), "is a URL");
        fails(json!("file://host/a.wav"), "another machine");
        fails(json!("file:///a%zz"), "has a %");
        fails(json!("file:///a%00"), "has a %");
        fails(json!("data:audio/wav;base64,AA=="), "data: URL");
        fails(json!("a\0.wav"), "control character");
        fails(json!(5), "holds 5, which is no recording");
        fails(json!([1]), "which is no recording");
        fails(json!({"array": [0.5], "sampling_rate": 16000}), "holds samples");
        fails(json!({"x": 1}), "has no path");
        fails(json!({"path": 1}), "has no path");
        fails(json!({"bytes": 1}), "not text in base64");
        fails(json!({"bytes": "U*=="}), "character 2");
        fails(json!({"bytes": "UklGR"}), "ends too early");
        fails(json!({"bytes": "UQ==UQ=="}), "digits follow the padding");
        fails(json!({"parquet": "none.parquet", "row": 1}), "none.parquet");
        fails(json!({"parquet": "none.parquet", "row": "x"}), "not a whole number");
    }

    #[test]
    fn extensions_of_any_case() {
        for (name, expected) in [
            ("a.wav", true),
            ("a.FLAC", true),
            ("b/c.Opus", true),
            ("a.txt", false),
            ("wav", false),
            (".wav", false),
            ("a.wav.txt", false),
        ] {
            assert_eq!(is_recording_name(Path::new(name)), expected, "{name}");
        }
        assert!(names("a").any(|name| name == "a.flac") && names("a").any(|name| name == "a.WAV"));
    }

    #[test]
    fn a_changed_file_changes_the_hash() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wav");
        let hash = || hash_with(7, &MediaSource::File(path.clone()));
        let mut seen = vec![hash()];
        for content in ["", "a", "ab"] {
            std::fs::write(&path, content).unwrap();
            seen.push(hash());
        }
        assert_eq!(hash(), seen[3]);
        let file = std::fs::File::options().append(true).open(&path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(5)).unwrap();
        seen.push(hash());
        seen.push(hash_with(8, &MediaSource::File(path.clone())));
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 6);
    }

    fn to_base64(bytes: &[u8]) -> String {
        const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for three in bytes.chunks(3) {
            let bits = three.iter().fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - three.len()));
            for digit in 0..4 {
                text.push(if digit <= three.len() { char::from(DIGITS[(bits >> (18 - 6 * digit) & 63) as usize]) } else { '=' });
            }
        }
        text
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn base64_goes_round(bytes in proptest::collection::vec(any::<u8>(), 0..50)) {
            let text = to_base64(&bytes);
            prop_assert_eq!(from_base64(text.trim_end_matches('=')).unwrap(), bytes.clone());
            prop_assert_eq!(from_base64(&text).unwrap(), bytes);
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,20}|[a-z:/%0-9=]{0,20}") {
            let _ = read(json!(text));
            let _ = read(json!({ "bytes": text }));
            let _ = read(json!({ "path": format!("file:///{text}") }));
        }
    }
}
