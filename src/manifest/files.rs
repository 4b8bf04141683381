//! Which files a manifest is made of.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use globset::{GlobBuilder, GlobMatcher};
use walkdir::WalkDir;

use super::ManifestError;

pub(super) const DEPTH_MAX: usize = 64;
/// Files and folders looked at while a glob or a folder is walked.
pub(super) const ENTRIES_MAX: u64 = 10_000_000;
/// Files of one manifest.
const FILES_MAX: usize = 1_000_000;

/// One file of a manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct ManifestFile {
    pub path: PathBuf,
    /// Its size when the manifest was opened.
    pub bytes: u64,
    pub(super) format: Format,
    pub(super) index: u32,
    /// Its path below the folder that all files of the manifest share, so that ids made of it do not change when data moves.
    pub(super) name: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Jsonl,
    Csv,
    Tsv,
    Parquet,
}

impl Format {
    pub fn delimiter(self) -> Option<u8> {
        match self {
            Self::Jsonl | Self::Parquet => None,
            Self::Csv => Some(b','),
            Self::Tsv => Some(b'\t'),
        }
    }

    fn of(path: &Path) -> Result<Self, ManifestError> {
        let extension = path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
        let reason = match extension.as_str() {
            "jsonl" | "ndjson" | "json" => return Ok(Self::Jsonl),
            "csv" => return Ok(Self::Csv),
            "tsv" => return Ok(Self::Tsv),
            "parquet" => return Ok(Self::Parquet),
            "tar" => "tar archives are not yet supported; unpack it and give the folder as `input.folder`".into(),
            "gz" | "zst" | "bz2" | "xz" | "zip" => "compressed files are not supported; decompress it first".into(),
            "xlsx" | "xls" | "ods" => "spreadsheets are not supported; save the sheet as CSV in UTF-8".into(),
            "txt" => "a text file is a row, not a manifest; give its folder as `input.folder`".into(),
            "" => "it has no extension to tell its format by; name it .jsonl, .csv, .tsv or .parquet".into(),
            _ if super::recording::is_recording_name(path) => {
                "a recording is a row, not a manifest; give its folder as `input.folder`".into()
            }
            _ => {
                format!(
                    "files named .{extension} are not supported; use .jsonl, .ndjson, .json, .csv, .tsv or .parquet, or narrow the glob"
                )
            }
        };
        Err(ManifestError::format(path, reason))
    }
}

impl ManifestFile {
    /// Where a row stands, by a file's path or name and the number of a line or, of Parquet, of a row, from 1.
    pub(super) fn place(&self, file: impl std::fmt::Display, number: u64) -> String {
        match self.format {
            Format::Parquet => format!("{file}:row {number}"),
            _ => format!("{file}:{number}"),
        }
    }

    /// The folder that paths in it are relative to.
    pub(super) fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// A regular file in a format that can be read.
    pub(super) fn new(path: PathBuf, index: u32) -> Result<Self, ManifestError> {
        let metadata = path.metadata().map_err(|error| ManifestError::read(&path, error))?;
        if metadata.is_dir() {
            return Err(ManifestError::Folder { path });
        }
        if !metadata.is_file() {
            return Err(ManifestError::NotRegular { path });
        }
        let format = Format::of(&path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { path, bytes: metadata.len(), format, index, name })
    }
}

/// Finds all files that `patterns` name, in their order, those of a glob in the order of their names.
pub(super) fn find(patterns: &[String]) -> Result<Vec<Arc<ManifestFile>>, ManifestError> {
    let mut files: Vec<ManifestFile> = Vec::new();
    let mut named_by = HashMap::new();
    for pattern in patterns {
        let is_glob = pattern.contains(['*', '?', '[', '{']) && !Path::new(pattern).exists();
        let paths = if is_glob { expand(pattern)? } else { vec![PathBuf::from(pattern)] };
        for path in paths {
            let file = ManifestFile::new(path, files.len() as u32)?;
            let real = file.path.canonicalize().map_err(|error| ManifestError::read(&file.path, error))?;
            if let Some(first) = named_by.insert(real, pattern) {
                return Err(ManifestError::Twice { path: file.path, first: first.clone(), second: pattern.clone() });
            }
            files.push(file);
            if files.len() > FILES_MAX {
                return Err(ManifestError::TooMany { path: pattern.into(), what: "files", limit: FILES_MAX as u64 });
            }
        }
    }
    let shared = shared_folder(&files);
    for file in &mut files {
        if let Ok(below) = file.path.strip_prefix(&shared) {
            file.name = slashed(below);
        }
    }
    Ok(files.into_iter().map(Arc::new).collect())
}

/// The deepest folder that all files lie in.
fn shared_folder(files: &[ManifestFile]) -> PathBuf {
    let mut parents = files.iter().filter_map(|file| file.path.parent());
    let mut shared: Vec<Component> = parents.next().map(|parent| parent.components().collect()).unwrap_or_default();
    for parent in parents {
        let common = shared.iter().zip(parent.components()).take_while(|(left, right)| **left == *right).count();
        shared.truncate(common);
    }
    shared.into_iter().collect()
}

/// A relative path as ids show it, the same on every system.
pub(super) fn slashed(path: &Path) -> String {
    let names: Vec<_> = path.components().map(|component| component.as_os_str().to_string_lossy()).collect();
    names.join("/")
}

pub(super) fn matcher(pattern: &str) -> Result<GlobMatcher, ManifestError> {
    let glob = GlobBuilder::new(pattern).literal_separator(true).build();
    let glob = glob.map_err(|error| ManifestError::Glob { pattern: pattern.into(), reason: error.kind().to_string() })?;
    Ok(glob.compile_matcher())
}

/// Whether a glob asks for names that begin with a dot; others pass them over, as in a shell.
pub(super) fn wants_hidden(pattern: &str) -> bool {
    pattern.split('/').any(|name| name.starts_with('.') && name != "." && name != "..")
}

fn expand(pattern: &str) -> Result<Vec<PathBuf>, ManifestError> {
    let globbed = pattern.find(['*', '?', '[', '{']).unwrap_or(pattern.len());
    let (base, rest) = pattern.split_at(pattern[..globbed].rfind('/').map_or(0, |slash| slash + 1));
    let matcher = matcher(rest)?;
    let hidden = wants_hidden(rest);
    let any_depth = rest.contains("**") || rest.contains('{');
    let depth = if any_depth { DEPTH_MAX } else { rest.split('/').count() };
    let root = if base.is_empty() { Path::new(".") } else { Path::new(base) };
    let walk = WalkDir::new(root).follow_links(true).min_depth(1).max_depth(depth).sort_by_file_name();
    let named = |entry: &walkdir::DirEntry| hidden || entry.depth() == 0 || !is_hidden(entry);
    let mut paths = Vec::new();
    for (looked_at, entry) in walk.into_iter().filter_entry(named).enumerate() {
        if looked_at as u64 >= ENTRIES_MAX {
            return Err(ManifestError::TooMany { path: pattern.into(), what: "files and folders", limit: ENTRIES_MAX });
        }
        let entry = match entry {
            Ok(entry) => entry,
            // It leads to where the walk has been, so to no other file.
            Err(error) if error.loop_ancestor().is_some() => continue,
            Err(error) if error.depth() == 0 => return Err(ManifestError::NoMatch { pattern: pattern.into() }),
            Err(error) => {
                let path = error.path().unwrap_or(root).to_path_buf();
                let dangling = path.is_symlink() && !path.exists();
                if dangling && !path.strip_prefix(root).is_ok_and(|below| matcher.is_match(below)) {
                    continue;
                }
                return Err(ManifestError::read(&path, error.into()));
            }
        };
        let Ok(below) = entry.path().strip_prefix(root) else { continue };
        if !entry.file_type().is_dir() && matcher.is_match(below) {
            paths.push(Path::new(base).join(below));
        }
    }
    if paths.is_empty() {
        return Err(ManifestError::NoMatch { pattern: pattern.into() });
    }
    Ok(paths)
}

pub(super) fn is_hidden(entry: &walkdir::DirEntry) -> bool {
    entry.file_name().as_encoded_bytes().first() == Some(&b'.')
}
