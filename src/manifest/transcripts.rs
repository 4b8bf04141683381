//! What was said in the recordings of a folder, where texts beside them tell: LibriSpeech's `*.trans.txt`
//! (<https://www.openslr.org/12>), which have a line `ID TEXT` for each recording, or a text file called as its recording is.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::ROW_BYTES_MAX;
use super::folder::{read_within, text_of};
use super::recording::{names, stamp};

const LISTED: &str = ".trans.txt";
/// Bytes of all `*.trans.txt` of one folder.
const BYTES_MAX: usize = 4 * ROW_BYTES_MAX;
const FIRST_LINE_BYTES_MAX: u64 = 4096;

/// The transcripts of one folder, read when they are first asked for.
#[derive(Debug)]
pub(super) struct Transcripts {
    pub folder: PathBuf,
    /// `*.trans.txt`, sorted.
    files: Vec<PathBuf>,
    texts: OnceLock<Result<HashMap<String, String>, String>>,
}

/// What is known of one recording.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Transcript {
    /// Given by `*.trans.txt`, which names recordings without their extension.
    pub id: Option<String>,
    pub text: Option<String>,
}

impl Transcripts {
    pub fn of(folder: &Path) -> Self {
        let names = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
        let listed = names.map(|entry| entry.path()).filter(|path| is_listed(path));
        let mut files: Vec<PathBuf> = listed.filter(|path| path.is_file()).collect();
        files.sort();
        Self { folder: folder.to_owned(), files, texts: OnceLock::new() }
    }

    /// # Errors
    /// A sentence on a transcript that cannot be read.
    pub fn transcript(&self, recording: &Path) -> Result<Transcript, String> {
        let stem = recording.file_stem().and_then(OsStr::to_str).unwrap_or_default();
        if self.files.is_empty() {
            let path = self.beside(stem);
            if !path.is_file() {
                return Ok(Transcript::default());
            }
            let text = read_within(&path).and_then(|bytes| text_of(&bytes).map(|text| text.trim().to_owned()));
            let failed = |error| format!("its transcript `{}` cannot be used: {error}", path.display());
            return Ok(Transcript { id: None, text: Some(text.map_err(failed)?) });
        }
        let texts = self.texts.get_or_init(|| self.read()).as_ref().map_err(Clone::clone)?;
        let text = texts.get(stem);
        Ok(Transcript { id: text.map(|_| stem.to_owned()), text: text.cloned() })
    }

    fn beside(&self, stem: &str) -> PathBuf {
        self.folder.join(format!("{stem}.txt"))
    }

    fn read(&self) -> Result<HashMap<String, String>, String> {
        let mut texts = HashMap::new();
        let mut bytes_read = 0;
        for path in &self.files {
            let failed = |error| format!("the transcripts in `{}` cannot be used: {error}", path.display());
            let bytes = read_within(path).map_err(failed)?;
            bytes_read += bytes.len();
            if bytes_read > BYTES_MAX {
                let error = format!("those of one folder have more than {BYTES_MAX} bytes; divide the folder");
                return Err(failed(error));
            }
            for line in text_of(&bytes).map_err(failed)?.lines() {
                let (id, text) = line.trim().split_once(char::is_whitespace).unwrap_or((line.trim(), ""));
                if !id.is_empty() && texts.insert(id.to_owned(), text.trim().to_owned()).is_some() {
                    return Err(failed(format!("`{}` has two lines; keep one", super::raw::shorten(id))));
                }
            }
        }
        Ok(texts)
    }

    /// Tells when what [`Transcripts::transcript`] gives may have changed.
    pub fn stamp(&self, recording: &Path) -> Vec<u8> {
        let beside = recording.file_stem().and_then(OsStr::to_str).map(|stem| self.beside(stem));
        if self.files.is_empty() {
            return beside.map(|path| stamp(&path)).unwrap_or_default();
        }
        self.files.iter().flat_map(|path| stamp(path)).collect()
    }
}

fn is_listed(path: &Path) -> bool {
    path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.ends_with(LISTED) && !name.starts_with('.'))
}

/// Whether a text tells what was said in a recording beside it that `is_row` takes.
pub(super) fn is_transcript(text: &Path, is_row: impl Fn(&Path) -> bool) -> bool {
    let id = match text.file_name().and_then(OsStr::to_str) {
        Some(name) if name.ends_with(LISTED) => first_word(text),
        Some(name) => name.strip_suffix(".txt").map(str::to_owned),
        None => None,
    };
    let Some(id) = id.filter(|id| !id.is_empty() && !id.contains('/')) else { return false };
    names(&id).map(|name| text.with_file_name(name)).any(|path| is_row(&path) && path.is_file())
}

/// Whether a text is one of LibriSpeech's, of recordings beside it.
pub(super) fn is_list_of_recordings(text: &Path) -> bool {
    is_listed(text) && is_transcript(text, |_| true)
}

fn first_word(path: &Path) -> Option<String> {
    let mut first = Vec::new();
    File::open(path).ok()?.take(FIRST_LINE_BYTES_MAX).read_to_end(&mut first).ok()?;
    String::from_utf8_lossy(&first).trim_start_matches('\u{feff}').split_whitespace().next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        folder
    }

    fn transcript(files: &[(&str, &[u8])], recording: &str) -> Result<Transcript, String> {
        let folder = folder(files);
        Transcripts::of(folder.path()).transcript(&folder.path().join(recording))
    }

    #[test]
    fn lines_of_a_list_and_texts_beside_a_recording() {
        let list: &[u8] = b"\xef\xbb\xbf1-2-0000 CHAPTER ONE\r\n\n 1-2-0001\tTWO  WORDS \n1-2-0002\n";
        let of = |stem: &str| transcript(&[("1-2.trans.txt", list), ("x.txt", b"no")], &format!("{stem}.flac")).unwrap();
        let known = |id: &str, text: &str| Transcript { id: Some(id.into()), text: Some(text.into()) };
        assert_eq!(of("1-2-0000"), known("1-2-0000", "CHAPTER ONE"));
        assert_eq!(of("1-2-0001"), known("1-2-0001", "TWO  WORDS"));
        assert_eq!(of("1-2-0002"), known("1-2-0002", ""));
        assert_eq!(of("x"), Transcript::default());
        let beside = transcript(&[("x.txt", b" said \n")], "x.wav").unwrap();
        assert_eq!(beside, Transcript { id: None, text: Some("said".into()) });
        assert_eq!(transcript(&[], "x.wav").unwrap(), Transcript::default());
    }

    #[test]
    fn transcripts_that_cannot_be_used() {
        let fails = |files: &[(&str, &[u8])], expected: &str| {
            let error = transcript(files, "x.wav").unwrap_err();
            assert!(error.contains(expected), "{error}");
        };
        fails(&[("x.txt", b"\xff")], "x.txt` cannot be used: byte 1 is not UTF-8");
        fails(&[("a.trans.txt", b"x \xff")], "a.trans.txt` cannot be used: byte 3 is not UTF-8");
        fails(&[("a.trans.txt", b"x a\nx b\n")], "`x` has two lines");
        fails(&[("a.trans.txt", b"x a\n"), ("b.trans.txt", b"x b\n")], "b.trans.txt` cannot be used: `x` has two lines");
    }

    #[test]
    fn texts_are_transcripts_of_what_lies_beside_them() {
        let folder = folder(&[
            ("1.trans.txt", b"1-0 TEXT\n"),
            ("1-0.flac", b""),
            ("2.trans.txt", b"2-0 TEXT\n"),
            ("a.txt", b""),
            ("a.WAV", b""),
            ("b.txt", b""),
            ("c.md", b""),
            ("c.wav", b""),
        ]);
        let is = |name: &str| is_transcript(&folder.path().join(name), |_| true);
        assert!(is("1.trans.txt") && is("a.txt"));
        assert!(!is("2.trans.txt") && !is("b.txt") && !is("c.md"));
        assert!(!is_transcript(&folder.path().join("a.txt"), |path| path.extension().is_some_and(|it| it == "flac")));
        assert!(is_list_of_recordings(&folder.path().join("1.trans.txt")) && !is_list_of_recordings(&folder.path().join("a.txt")));
    }
}
