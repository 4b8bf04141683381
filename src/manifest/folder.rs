//! A folder of files, each of them a row: texts, recordings, or images.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use globset::GlobMatcher;
use serde_json::{Map, Value};
use walkdir::{DirEntry, FilterEntry, IntoIter, WalkDir};

use super::files::{DEPTH_MAX, ENTRIES_MAX, is_hidden, matcher, slashed, wants_hidden};
use super::raw::{Media, Unreadable, first_8_bytes, utf8};
use super::recording::{hash_with, is_recording_name};
use super::transcripts::{Transcripts, is_list_of_recordings, is_transcript};
use super::{ManifestError, ROW_BYTES_MAX};
use crate::job::Columns;
use crate::media::{MediaSource, is_image_name};

pub(super) const GLOB: &str = "**/*.txt";

/// Which files of a folder are rows.
#[derive(Debug, Clone)]
pub(super) enum Wanted {
    Texts,
    Recordings,
    Images,
    /// Recordings, images and texts, but no text that is the transcript of a recording that is a row.
    Glob {
        matcher: GlobMatcher,
        hidden: bool,
    },
}

impl Wanted {
    /// What the job asks for; or, where it has no glob, what the folder holds.
    pub fn new(folder: &Path, glob: Option<&str>) -> Result<Self, ManifestError> {
        let metadata = folder.metadata().map_err(|error| ManifestError::read(folder, error))?;
        if !metadata.is_dir() {
            return Err(ManifestError::NotFolder { path: folder.to_path_buf() });
        }
        if let Some(glob) = glob {
            return Ok(Self::Glob { matcher: matcher(glob)?, hidden: wants_hidden(glob) });
        }
        let (mut recording, mut text, mut image) = (None, None, None);
        for entry in walk(folder, false).filter_map(Result::ok).take(ENTRIES_MAX as usize) {
            if is_recording_name(entry.path()) && !entry.file_type().is_dir() {
                recording.get_or_insert(entry.into_path());
            } else if is_text(&entry) {
                text.get_or_insert(entry.into_path());
            } else if image.is_none() && is_image_name(entry.path()) && !entry.file_type().is_dir() {
                image = Some(entry.into_path());
            }
            if recording.is_some() && text.is_some() {
                break;
            }
        }
        match (recording, text, image) {
            (None, None, Some(_)) => Ok(Self::Images),
            (None, Some(text), Some(image)) => Err(ambiguous(folder, "images", image, "texts beside them", text)),
            (None, _, None) => Ok(Self::Texts),
            (Some(_), None, _) => Ok(Self::Recordings),
            (Some(recording), Some(_), _) => Self::of_both(folder, recording),
        }
    }

    /// Of a folder with recordings and texts, the recordings, where the texts tell what was said in them.
    fn of_both(folder: &Path, recording: PathBuf) -> Result<Self, ManifestError> {
        let mut alone = None;
        for entry in walk(folder, false).filter_map(Result::ok).take(ENTRIES_MAX as usize).filter(is_text) {
            if is_list_of_recordings(entry.path()) {
                return Ok(Self::Recordings);
            }
            if alone.is_none() && !is_transcript(entry.path(), is_recording_name) {
                alone = Some(entry.into_path());
            }
        }
        let Some(text) = alone else { return Ok(Self::Recordings) };
        Err(ambiguous(folder, "recordings", recording, "texts that are no transcripts of them", text))
    }

    /// What a file is, by its path below `folder`.
    fn kind(&self, folder: &Path, relative: &Path) -> Option<Kind> {
        match self {
            Self::Texts => relative.extension().is_some_and(|extension| extension == "txt").then_some(Kind::Text),
            Self::Recordings => is_recording_name(relative).then_some(Kind::Recording),
            Self::Images => is_image_name(relative).then_some(Kind::Image),
            Self::Glob { matcher, .. } if !matcher.is_match(relative) => None,
            Self::Glob { .. } if is_recording_name(relative) => Some(Kind::Recording),
            Self::Glob { .. } if is_image_name(relative) => Some(Kind::Image),
            Self::Glob { matcher, .. } => {
                let is_row = |path: &Path| path.strip_prefix(folder).is_ok_and(|relative| matcher.is_match(relative));
                (!is_transcript(&folder.join(relative), is_row)).then_some(Kind::Text)
            }
        }
    }
}

/// Of a folder with files of two kinds, of which a job without a glob does not say which are its rows.
fn ambiguous(folder: &Path, kind: &'static str, file: PathBuf, texts: &'static str, text: PathBuf) -> ManifestError {
    let such_as = |kind: &str, path: &Path| format!("{kind}, such as `{}`,", slashed(path.strip_prefix(folder).unwrap_or(path)));
    let extension = file.extension().unwrap_or_default().to_string_lossy().into_owned();
    let (media, texts) = (such_as(kind, &file), such_as(texts, &text));
    let texts = texts.trim_end_matches(',').to_owned();
    ManifestError::Ambiguous { folder: folder.to_path_buf(), media, texts, extension }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Recording,
    Image,
}

fn is_text(entry: &DirEntry) -> bool {
    entry.path().extension().is_some_and(|extension| extension == "txt") && !entry.file_type().is_dir()
}

type Walk = FilterEntry<IntoIter, fn(&DirEntry) -> bool>;

fn walk(folder: &Path, hidden: bool) -> Walk {
    let named: fn(&DirEntry) -> bool = if hidden { |_| true } else { |entry| entry.depth() == 0 || !is_hidden(entry) };
    let walk = WalkDir::new(folder).follow_links(true).min_depth(1).max_depth(DEPTH_MAX).sort_by_file_name();
    walk.into_iter().filter_entry(named)
}

/// Finds the files in the order of their names, folder by folder; it holds the names of the folders it is in, not all.
pub(super) struct FolderWalk {
    pub folder: Arc<Path>,
    wanted: Wanted,
    walk: Walk,
    looked_at: u64,
    /// Of the folders that the walk is in, the deepest last.
    transcripts: Vec<Arc<Transcripts>>,
}

/// A file found, not yet read.
#[derive(Debug, Clone)]
pub(super) struct FoundFile {
    /// Below the folder.
    pub relative: PathBuf,
    pub bytes: u64,
    pub modified: Option<SystemTime>,
    /// Why it cannot be a row.
    pub fault: Option<String>,
    /// Of a recording.
    pub transcripts: Option<Arc<Transcripts>>,
    pub is_image: bool,
}

/// A file's row.
pub(super) struct FileRow {
    pub id: String,
    /// Of the file's bytes (of its name, where they cannot be read); of a recording, of its name, size and time of change and of
    /// its transcript.
    pub input_hash: u64,
    pub parsed: Result<Map<String, Value>, Unreadable>,
    pub media: Media,
}

impl FolderWalk {
    pub fn open(folder: &Path, wanted: Wanted) -> Self {
        let hidden = matches!(wanted, Wanted::Glob { hidden: true, .. });
        Self { folder: folder.into(), wanted, walk: walk(folder, hidden), looked_at: 0, transcripts: Vec::new() }
    }

    pub fn next(&mut self) -> Result<Option<FoundFile>, ManifestError> {
        loop {
            let Some(entry) = self.walk.next() else { return Ok(None) };
            self.looked_at += 1;
            if self.looked_at > ENTRIES_MAX {
                let path = self.folder.to_path_buf();
                return Err(ManifestError::TooMany { path, what: "files and folders", limit: ENTRIES_MAX });
            }
            match entry {
                Ok(entry) if entry.file_type().is_dir() => {}
                Ok(entry) => {
                    let relative = self.below(entry.path());
                    let Some(kind) = self.wanted.kind(&self.folder, &relative) else { continue };
                    let transcripts = (kind == Kind::Recording).then(|| self.transcripts_beside(entry.path()));
                    return Ok(Some(found_file(&entry, relative, transcripts, kind == Kind::Image)));
                }
                Err(error) if error.depth() == 0 => return Err(ManifestError::read(&self.folder.clone(), error.into())),
                Err(error) => {
                    let path = error.path().unwrap_or(&self.folder).to_path_buf();
                    let relative = self.below(&path);
                    let is_loop = error.loop_ancestor().is_some();
                    if !is_loop && path.is_symlink() && self.wanted.kind(&self.folder, &relative).is_none() {
                        continue;
                    }
                    let fault = if is_loop {
                        "the link leads back to a folder it lies in; remove the link".to_owned()
                    } else {
                        cannot_read(&error.into())
                    };
                    return Ok(Some(FoundFile {
                        relative,
                        bytes: 0,
                        modified: None,
                        fault: Some(fault),
                        transcripts: None,
                        is_image: false,
                    }));
                }
            }
        }
    }

    fn below(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.folder).unwrap_or(path).to_path_buf()
    }

    fn transcripts_beside(&mut self, recording: &Path) -> Arc<Transcripts> {
        let folder = recording.parent().unwrap_or(&self.folder);
        // A folder's files may come before and after those of a folder in it.
        while self.transcripts.pop_if(|deepest| !folder.starts_with(&deepest.folder)).is_some() {}
        match self.transcripts.last() {
            Some(deepest) if deepest.folder == folder => deepest.clone(),
            _ => {
                let transcripts = Arc::new(Transcripts::of(folder));
                self.transcripts.push(transcripts.clone());
                transcripts
            }
        }
    }
}

fn found_file(entry: &DirEntry, relative: PathBuf, transcripts: Option<Arc<Transcripts>>, is_image: bool) -> FoundFile {
    let (bytes, modified, fault) = match entry.metadata() {
        Err(error) => (0, None, Some(cannot_read(&error.into()))),
        Ok(metadata) if !metadata.is_file() => (0, None, Some("it is not a regular file; remove it or narrow the glob".to_owned())),
        Ok(metadata) => (metadata.len(), metadata.modified().ok(), None),
    };
    let fault = fault.or_else(|| match relative.to_str() {
        None => Some("the name of the file is not UTF-8; rename it".to_owned()),
        Some(_) if transcripts.is_none() && !is_image && bytes > ROW_BYTES_MAX as u64 => Some(too_large(bytes)),
        Some(_) => None,
    });
    FoundFile { relative, bytes, modified, fault, transcripts, is_image }
}

impl FoundFile {
    /// Its path below the folder, with its extension: the id of a text, and of a recording that no list names.
    pub fn name(&self) -> String {
        slashed(&self.relative)
    }

    /// Bytes that its row takes in memory.
    pub fn row_bytes(&self) -> u64 {
        if self.transcripts.is_some() || self.is_image { 0 } else { self.bytes.min(ROW_BYTES_MAX as u64) }
    }

    pub fn read(&self, folder: &Path, columns: &Columns) -> FileRow {
        match &self.transcripts {
            Some(transcripts) if self.fault.is_none() => self.read_recording(folder, columns, transcripts),
            None if self.is_image && self.fault.is_none() => self.read_image(folder, columns),
            _ => self.read_text(folder, columns),
        }
    }

    fn read_text(&self, folder: &Path, columns: &Columns) -> FileRow {
        let name = self.name();
        let bytes = match &self.fault {
            Some(fault) => Err(fault.clone()),
            None => read_within(&folder.join(&self.relative)),
        };
        let input_hash = first_8_bytes(&blake3::hash(bytes.as_deref().unwrap_or(name.as_bytes())));
        let mut read = Map::new();
        read.insert("path".into(), Value::String(name.clone()));
        let parsed = match bytes.as_deref().map_err(Clone::clone).and_then(text_of) {
            Ok(text) => {
                read.insert("text".into(), Value::String(text.into()));
                read.insert(columns.prompt.clone(), Value::String(text.into()));
                Ok(read)
            }
            Err(error) => Err(Unreadable { error, columns: read, is_certain: true }),
        };
        FileRow { id: name, input_hash, parsed, media: Media::default() }
    }

    fn read_image(&self, folder: &Path, columns: &Columns) -> FileRow {
        let name = self.name();
        let path = folder.join(&self.relative);
        let path = std::path::absolute(&path).unwrap_or(path);
        let mut read = Map::new();
        read.insert("path".into(), Value::String(name.clone()));
        read.insert(columns.id.clone(), Value::String(name.clone()));
        read.insert(columns.image.clone(), Value::String(path.to_string_lossy().into_owned()));
        let image = MediaSource::File(path);
        let input_hash = hash_with(first_8_bytes(&blake3::hash(name.as_bytes())), &image);
        FileRow { id: name, input_hash, parsed: Ok(read), media: Media { images: vec![image], ..Media::default() } }
    }

    fn read_recording(&self, folder: &Path, columns: &Columns, transcripts: &Transcripts) -> FileRow {
        let name = self.name();
        let path = folder.join(&self.relative);
        let path = std::path::absolute(&path).unwrap_or(path);
        let transcript = transcripts.transcript(&path);
        let mut hasher = blake3::Hasher::new();
        hasher.update(name.as_bytes());
        if let Ok(Some(text)) = transcript.as_ref().map(|transcript| transcript.text.as_ref()) {
            hasher.update(b"\0").update(text.as_bytes());
        }
        let id = transcript.as_ref().ok().and_then(|transcript| transcript.id.clone()).unwrap_or_else(|| name.clone());
        // All that a row of `failed.jsonl` needs to be this row again.
        let mut read = Map::new();
        read.insert("path".into(), Value::String(name));
        read.insert(columns.id.clone(), Value::String(id.clone()));
        read.insert(columns.audio.clone(), Value::String(path.to_string_lossy().into_owned()));
        let parsed = match transcript {
            Ok(transcript) => {
                if let Some(text) = transcript.text {
                    read.insert(columns.reference.clone(), Value::String(text));
                }
                Ok(read)
            }
            Err(error) => Err(Unreadable { error, columns: read, is_certain: true }),
        };
        let audio = MediaSource::File(path);
        FileRow {
            id,
            input_hash: hash_with(first_8_bytes(&hasher.finalize()), &audio),
            parsed,
            media: Media { audio: Some(audio), ..Media::default() },
        }
    }
}

/// Reads no more than a row may have, even of a file that has grown since.
pub(super) fn read_within(path: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| cannot_read(&error))?;
    file.take(ROW_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(|error| cannot_read(&error))?;
    if bytes.len() > ROW_BYTES_MAX { Err(too_large(bytes.len() as u64)) } else { Ok(bytes) }
}

pub(super) fn text_of(bytes: &[u8]) -> Result<&str, String> {
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        return Err("it is UTF-16 text; re-save it as UTF-8".into());
    }
    let text = utf8(bytes).map_err(|unreadable| unreadable.error)?;
    if let Some(at) = memchr::memchr(0, bytes) {
        return Err(format!("byte {} is NUL; the file is damaged or not text, narrow the glob or write it again", at + 1));
    }
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text))
}

fn too_large(bytes: u64) -> String {
    format!("the file has {bytes} bytes or more, the limit for a row is {ROW_BYTES_MAX}; split it")
}

fn cannot_read(error: &std::io::Error) -> String {
    format!("it cannot be read ({error}); check that it is there and its permissions")
}
