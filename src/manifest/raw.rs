//! Rows as they were read, not yet parsed: reading is sequential and cheap, parsing is neither and runs on any thread.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::delimited::Header;
use super::files::ManifestFile;
use super::folder::TextFile;
use super::ids::{Place, id_of};
use super::{BadRow, Item, RowResult, jsonl};
use crate::job::Columns;

const SHOWN_CHARACTERS_MAX: usize = 60;

/// Rows that follow each other, from one file or from one folder.
#[derive(Debug)]
pub(super) struct Block {
    pub first_row: u64,
    pub rows: Rows,
}

#[derive(Debug)]
pub(super) enum Rows {
    /// `bytes` holds all rows of the block; a header makes them CSV or TSV.
    Lines {
        file: Arc<ManifestFile>,
        header: Option<Arc<Header>>,
        bytes: Vec<u8>,
        extents: Vec<Extent>,
    },
    Texts {
        folder: Arc<Path>,
        texts: Vec<TextFile>,
    },
}

/// A row within its block's bytes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Extent {
    /// Its first line, from 1.
    pub line: u64,
    pub start: usize,
    pub end: usize,
    pub fault: Option<Fault>,
}

/// What was wrong with a row before it could be parsed.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Fault {
    pub error: String,
    /// Of a row whose bytes were not kept.
    pub input_hash: Option<u64>,
}

/// Why no columns, or only some, could be read.
#[derive(Debug)]
pub(super) struct Unreadable {
    pub error: String,
    pub columns: Map<String, Value>,
}

impl Unreadable {
    pub fn new(error: String) -> Self {
        Self { error, columns: Map::new() }
    }
}

impl Block {
    pub fn len(&self) -> usize {
        match &self.rows {
            Rows::Lines { extents, .. } => extents.len(),
            Rows::Texts { texts, .. } => texts.len(),
        }
    }

    fn row(&self, index: usize) -> u64 {
        self.first_row + index as u64
    }

    pub fn place(&self, index: usize) -> Place {
        match &self.rows {
            Rows::Lines { file, extents, .. } => Place::new(file.index, extents[index].line),
            Rows::Texts { .. } => Place::new(0, self.row(index)),
        }
    }

    /// The id of a row that gives none: unique, because it says where the row stands.
    pub fn derived_id(&self, index: usize) -> String {
        match &self.rows {
            Rows::Lines { file, extents, .. } => format!("{}:{}", file.name, extents[index].line),
            Rows::Texts { texts, .. } => texts[index].name(),
        }
    }

    pub fn parse(&self, index: usize, columns: &Columns) -> RowResult {
        let row = self.row(index);
        let (source, input_hash, parsed) = match &self.rows {
            Rows::Lines { file, header, bytes, extents } => {
                let extent = &extents[index];
                let bytes = &bytes[extent.start..extent.end];
                let fault = extent.fault.as_ref();
                let input_hash = fault.and_then(|fault| fault.input_hash).unwrap_or_else(|| first_8_bytes(&blake3::hash(bytes)));
                let parsed = match (fault, header) {
                    (Some(fault), _) => Err(Unreadable::new(fault.error.clone())),
                    (None, Some(header)) => header.columns_of(bytes),
                    (None, None) => jsonl::columns_of(bytes),
                };
                (format!("{}:{}", file.path.display(), extent.line), input_hash, parsed)
            }
            Rows::Texts { folder, texts } => {
                let text = &texts[index];
                let (input_hash, parsed) = text.read(folder, columns);
                (folder.join(&text.relative).display().to_string(), input_hash, parsed)
            }
        };
        let bad = |error, columns, source| Box::new(BadRow { row, id: self.derived_id(index), source, input_hash, error, columns });
        let read = match parsed {
            Ok(read) => read,
            Err(Unreadable { error, columns }) => return Err(bad(error, columns, source)),
        };
        // A text file's id is its path, whatever its columns are called.
        let given = matches!(self.rows, Rows::Lines { .. }).then(|| read.get(&columns.id)).flatten();
        let id = match given.map(|value| id_of(value, &columns.id)) {
            None => self.derived_id(index),
            Some(Ok(id)) => id,
            Some(Err(error)) => return Err(bad(error, read, source)),
        };
        Ok(Item { row, id, source, input_hash, columns: read, audio: None })
    }
}

pub(super) fn first_8_bytes(hash: &blake3::Hash) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *hash.as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

pub(super) fn utf8(bytes: &[u8]) -> Result<&str, Unreadable> {
    std::str::from_utf8(bytes).map_err(|error| {
        let at = error.valid_up_to();
        Unreadable::new(format!("byte {} is not UTF-8 ({:#04x}); re-save the file as UTF-8", at + 1, bytes[at]))
    })
}

/// A value of the input as an error can show it: one line, not long.
pub(super) fn shorten(value: &str) -> String {
    let mut shown: String = value.chars().take(SHOWN_CHARACTERS_MAX).flat_map(char::escape_debug).collect();
    if value.chars().nth(SHOWN_CHARACTERS_MAX).is_some() {
        shown.push('…');
    }
    shown
}
