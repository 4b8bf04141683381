//! Tables of speech corpora, recognised as they are downloaded: what plays which part in them.
//!
//! - LJSpeech, <https://keithito.com/LJ-Speech-Dataset/>: `metadata.csv` has no header, its fields are separated by `|` and quotes
//!   are text; the recording is `wavs/<id>.wav` beside it.
//! - Common Voice, <https://github.com/common-voice/CorporaCreator>: a TSV whose quotes are text; recordings lie in `clips/` beside
//!   it.

use std::path::Path;

use serde_json::{Map, Value};

use crate::job::Columns;

/// A corpus with a table of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Corpus {
    LjSpeech,
    CommonVoice,
}

const LJ_SPEECH_COLUMNS: [&str; 3] = ["id", "transcription", "normalized"];
const COMMON_VOICE_COLUMNS: [&str; 3] = ["client_id", "path", "sentence"];

impl Corpus {
    /// By the file's name, its first line and the folder of recordings beside it.
    pub fn recognise(path: &Path, first_line: &[u8]) -> Option<Self> {
        let beside = |folder: &str| path.with_file_name(folder).is_dir();
        let has_name = |name: &str| path.file_name().is_some_and(|file| file.eq_ignore_ascii_case(name));
        let is_tsv = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("tsv"));
        let fields = |delimiter: u8| first_line.split(move |&byte| byte == delimiter);
        if has_name("metadata.csv") {
            let is_table = (2..=LJ_SPEECH_COLUMNS.len()).contains(&fields(b'|').count());
            return (is_table && beside("wavs")).then_some(Self::LjSpeech);
        }
        let is_table = is_tsv && COMMON_VOICE_COLUMNS.iter().all(|name| fields(b'\t').any(|field| field == name.as_bytes()));
        (is_table && beside("clips")).then_some(Self::CommonVoice)
    }

    pub fn delimiter(self) -> u8 {
        match self {
            Self::LjSpeech => b'|',
            Self::CommonVoice => b'\t',
        }
    }

    /// The columns of a table without a header; the last may be absent.
    pub fn columns(self) -> Option<&'static [&'static str]> {
        (self == Self::LjSpeech).then_some(&LJ_SPEECH_COLUMNS)
    }

    /// Adds the columns that the job looks for. One that the table has by that name is the job's own choice, and stays.
    pub fn complete(self, columns: &mut Map<String, Value>, roles: &Columns) {
        let text = |name: &str| columns.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        let plays = match self {
            Self::LjSpeech => [
                (&roles.id, text("id").map(str::to_owned)),
                (&roles.audio, text("id").map(|id| format!("wavs/{id}.wav"))),
                (&roles.reference, text("normalized").or(text("transcription")).map(str::to_owned)),
                (&roles.language, None),
            ],
            Self::CommonVoice => {
                let path = text("path").map(Path::new);
                // The first releases left it out.
                let named = |path: &Path| if path.extension().is_some() { path.into() } else { path.with_extension("mp3") };
                [
                    (&roles.id, path.and_then(|path| path.file_stem()?.to_str()).map(str::to_owned)),
                    (&roles.audio, path.map(|path| format!("clips/{}", named(path).display()))),
                    (&roles.reference, text("sentence").map(str::to_owned)),
                    (&roles.language, text("locale").and_then(|locale| locale.split(['-', '_']).next()).map(str::to_lowercase)),
                ]
            }
        };
        for (role, value) in plays {
            if let Some(value) = value
                && !columns.contains_key(role)
            {
                columns.insert(role.clone(), Value::String(value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_table_is_recognised_by_name_content_and_folder_together() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["lj/wavs", "cv/clips", "bare"] {
            std::fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        let recognise = |name: &str, line: &str| Corpus::recognise(&folder.path().join(name), line.as_bytes());
        let header = "client_id\tpath\tsentence\tup_votes\tlocale";
        assert_eq!(recognise("lj/metadata.csv", "LJ1|Text \"quoted|text"), Some(Corpus::LjSpeech));
        assert_eq!(recognise("lj/metadata.csv", "LJ1|text"), Some(Corpus::LjSpeech));
        assert_eq!(recognise("lj/metadata.csv", "id,text"), None);
        assert_eq!(recognise("lj/metadata.csv", "a|b|c|d"), None);
        assert_eq!(recognise("lj/other.csv", "LJ1|text|text"), None);
        assert_eq!(recognise("bare/metadata.csv", "LJ1|text|text"), None);
        assert_eq!(recognise("cv/test.tsv", header), Some(Corpus::CommonVoice));
        assert_eq!(recognise("cv/test.csv", header), None);
        assert_eq!(recognise("cv/test.tsv", "client_id\tpath\tup_votes"), None);
        assert_eq!(recognise("bare/test.tsv", header), None);
    }

    fn columns_of(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn what_the_job_names_itself_stays() {
        let roles = Columns {
            id: "client_id".into(),
            prompt: "prompt".into(),
            messages: "messages".into(),
            reference: "text".into(),
            audio: "audio".into(),
            image: "image".into(),
            language: "lang".into(),
        };
        let given = json!({"client_id": "c", "path": "a/b", "sentence": "s", "locale": "zh-CN"});
        let mut columns = columns_of(given.clone());
        Corpus::CommonVoice.complete(&mut columns, &roles);
        let mut expected = given;
        expected.as_object_mut().unwrap().extend(columns_of(json!({"audio": "clips/a/b.mp3", "text": "s", "lang": "zh"})));
        assert_eq!(Value::Object(columns), expected);
    }
}
