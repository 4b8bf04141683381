//! A folder of text files, each of them a row.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use globset::GlobMatcher;
use serde_json::{Map, Value};
use walkdir::{DirEntry, FilterEntry, IntoIter, WalkDir};

use super::files::{DEPTH_MAX, ENTRIES_MAX, is_hidden, matcher, slashed, wants_hidden};
use super::raw::{Unreadable, first_8_bytes, utf8};
use super::{ManifestError, ROW_BYTES_MAX};
use crate::job::Columns;

pub(super) const GLOB: &str = "**/*.txt";

/// Finds the files in the order of their names, folder by folder; it holds the names of the folders it is in, not all.
pub(super) struct FolderWalk {
    pub folder: Arc<Path>,
    matcher: GlobMatcher,
    walk: FilterEntry<IntoIter, fn(&DirEntry) -> bool>,
    looked_at: u64,
}

/// A file found, not yet read.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TextFile {
    /// Below the folder.
    pub relative: PathBuf,
    pub bytes: u64,
    pub modified: Option<SystemTime>,
    /// Why it cannot be a row.
    pub fault: Option<String>,
}

impl FolderWalk {
    pub fn open(folder: &Path, glob: Option<&str>) -> Result<Self, ManifestError> {
        let metadata = folder.metadata().map_err(|error| ManifestError::read(folder, error))?;
        if !metadata.is_dir() {
            return Err(ManifestError::NotFolder { path: folder.to_path_buf() });
        }
        let glob = glob.unwrap_or(GLOB);
        let named: fn(&DirEntry) -> bool =
            if wants_hidden(glob) { |_| true } else { |entry| entry.depth() == 0 || !is_hidden(entry) };
        let walk = WalkDir::new(folder).follow_links(true).min_depth(1).max_depth(DEPTH_MAX).sort_by_file_name();
        let walk = walk.into_iter().filter_entry(named);
        Ok(Self { folder: folder.into(), matcher: matcher(glob)?, walk, looked_at: 0 })
    }

    pub fn next(&mut self) -> Result<Option<TextFile>, ManifestError> {
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
                    if self.matcher.is_match(&relative) {
                        return Ok(Some(text_file(&entry, relative)));
                    }
                }
                Err(error) if error.depth() == 0 => return Err(ManifestError::read(&self.folder.clone(), error.into())),
                Err(error) => {
                    let path = error.path().unwrap_or(&self.folder).to_path_buf();
                    let relative = self.below(&path);
                    let is_loop = error.loop_ancestor().is_some();
                    if !is_loop && path.is_symlink() && !self.matcher.is_match(&relative) {
                        continue;
                    }
                    let fault = if is_loop {
                        "the link leads back to a folder it lies in; remove the link".to_owned()
                    } else {
                        cannot_read(&error.into())
                    };
                    return Ok(Some(TextFile { relative, bytes: 0, modified: None, fault: Some(fault) }));
                }
            }
        }
    }

    fn below(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.folder).unwrap_or(path).to_path_buf()
    }
}

fn text_file(entry: &DirEntry, relative: PathBuf) -> TextFile {
    let (bytes, modified, fault) = match entry.metadata() {
        Err(error) => (0, None, Some(cannot_read(&error.into()))),
        Ok(metadata) if !metadata.is_file() => (0, None, Some("it is not a regular file; remove it or narrow the glob".to_owned())),
        Ok(metadata) => (metadata.len(), metadata.modified().ok(), None),
    };
    let fault = fault.or_else(|| match relative.to_str() {
        None => Some("the name of the file is not UTF-8; rename it".to_owned()),
        Some(_) if bytes > ROW_BYTES_MAX as u64 => Some(too_large(bytes)),
        Some(_) => None,
    });
    TextFile { relative, bytes, modified, fault }
}

impl TextFile {
    /// Its path below the folder, with its extension: the row's id.
    pub fn name(&self) -> String {
        slashed(&self.relative)
    }

    /// Reads the file: the hash of its bytes (of its name, where they cannot be read), and its columns.
    pub fn read(&self, folder: &Path, columns: &Columns) -> (u64, Result<Map<String, Value>, Unreadable>) {
        let name = self.name();
        let bytes = match &self.fault {
            Some(fault) => Err(fault.clone()),
            None => read_within(&folder.join(&self.relative)),
        };
        let input_hash = first_8_bytes(&blake3::hash(bytes.as_deref().unwrap_or(name.as_bytes())));
        let mut read = Map::new();
        read.insert("path".into(), Value::String(name));
        let parsed = match bytes.as_deref().map_err(Clone::clone).and_then(text_of) {
            Ok(text) => {
                read.insert("text".into(), Value::String(text.into()));
                read.insert(columns.prompt.clone(), Value::String(text.into()));
                Ok(read)
            }
            Err(error) => Err(Unreadable { error, columns: read }),
        };
        (input_hash, parsed)
    }
}

/// Reads no more than a row may have, even of a file that has grown since.
fn read_within(path: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| cannot_read(&error))?;
    file.take(ROW_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(|error| cannot_read(&error))?;
    if bytes.len() > ROW_BYTES_MAX { Err(too_large(bytes.len() as u64)) } else { Ok(bytes) }
}

fn text_of(bytes: &[u8]) -> Result<&str, String> {
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
