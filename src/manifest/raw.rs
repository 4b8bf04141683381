//! Rows as they were read, not yet parsed: reading is sequential and cheap, parsing is neither and runs on any thread.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::delimited::Header;
use super::files::ManifestFile;
use super::folder::{FileRow, FoundFile};
use super::ids::{Place, id_of};
use super::parts;
use super::recording::{self, hash_with};
use super::records::{self, Record, Records};
use super::{BadRow, Item, Medium, RowResult, jsonl};
use crate::job::Columns;
use crate::media::MediaSource;

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
    Records {
        file: Arc<ManifestFile>,
        records: Records,
    },
    Files {
        folder: Arc<Path>,
        files: Vec<FoundFile>,
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
    /// Which column each value belongs to is certain, so that the row's own id can be told.
    pub is_certain: bool,
}

impl Unreadable {
    pub fn new(error: String) -> Self {
        Self { error, columns: Map::new(), is_certain: false }
    }
}

impl Block {
    pub fn len(&self) -> usize {
        match &self.rows {
            Rows::Lines { extents, .. } => extents.len(),
            Rows::Records { records, .. } => records.batch.num_rows(),
            Rows::Files { files, .. } => files.len(),
        }
    }

    fn row(&self, index: usize) -> u64 {
        self.first_row + index as u64
    }

    pub fn place(&self, index: usize) -> Place {
        match &self.rows {
            Rows::Lines { file, extents, .. } => Place::new(file.index, extents[index].line),
            Rows::Records { file, records } => Place::new(file.index, records.first + index as u64),
            Rows::Files { .. } => Place::new(0, self.row(index)),
        }
    }

    /// The id of a row that gives none: unique, because it says where the row stands.
    pub fn derived_id(&self, index: usize) -> String {
        match &self.rows {
            Rows::Lines { file, extents, .. } => file.place(&file.name, extents[index].line),
            Rows::Records { file, records } => file.place(&file.name, records.first + index as u64),
            Rows::Files { files, .. } => files[index].name(),
        }
    }

    pub fn parse(&self, index: usize, columns: &Columns) -> RowResult {
        let Read { source, id, input_hash, parsed } = match &self.rows {
            Rows::Lines { file, header, bytes, extents } => read_line(file, header.as_deref(), &extents[index], bytes, columns),
            Rows::Records { file, records } => read_record(file, records, index, columns),
            Rows::Files { folder, files } => {
                let FileRow { id, input_hash, parsed, media } = files[index].read(folder, columns);
                let source = folder.join(&files[index].relative).display().to_string();
                Read { source, id: Some(id), input_hash, parsed: parsed.map(|columns| (columns, media)) }
            }
        };
        let row = self.row(index);
        let bad = |error, id: Option<String>, columns, source| {
            let id = id.unwrap_or_else(|| self.derived_id(index));
            Box::new(BadRow { row, id, source, input_hash, error, columns })
        };
        // A file's id is its path or what its transcripts call it, whatever its columns are called.
        let given = |id: Option<String>, read: &Map<String, Value>| match id {
            Some(id) => Some(Ok(id)),
            None => read.get(&columns.id).map(|value| id_of(value, &columns.id)),
        };
        let (read, media) = match parsed {
            Ok(read) => read,
            Err(Unreadable { error, columns: read, is_certain }) => {
                let id = if is_certain { given(id, &read).and_then(Result::ok) } else { id };
                return Err(bad(error, id, read, source));
            }
        };
        let id = match given(id, &read) {
            None => self.derived_id(index),
            Some(Ok(id)) => id,
            Some(Err(error)) => return Err(bad(error, None, read, source)),
        };
        let Media { audio, images, parts } = media;
        Ok(Item { row, id, source, input_hash, columns: read, audio, images, parts })
    }
}

/// A row that has been read.
struct Read {
    source: String,
    /// Of a file that is a row.
    id: Option<String>,
    input_hash: u64,
    parsed: Result<(Map<String, Value>, Media), Unreadable>,
}

/// What a row names besides its text.
#[derive(Debug, Default)]
pub(super) struct Media {
    pub audio: Option<MediaSource>,
    pub images: Vec<MediaSource>,
    pub parts: Vec<Medium>,
}

impl Media {
    fn sources(&self) -> impl Iterator<Item = &MediaSource> {
        self.audio.iter().chain(&self.images).chain(self.parts.iter().map(|part| &part.source))
    }
}

fn read_line(file: &ManifestFile, header: Option<&Header>, extent: &Extent, bytes: &[u8], columns: &Columns) -> Read {
    let bytes = &bytes[extent.start..extent.end];
    let fault = extent.fault.as_ref();
    let input_hash = fault.and_then(|fault| fault.input_hash).unwrap_or_else(|| first_8_bytes(&blake3::hash(bytes)));
    let parsed = match (fault, header) {
        (Some(fault), _) => Err(Unreadable::new(fault.error.clone())),
        (None, Some(header)) => header.columns_of(bytes).map(|mut read| {
            if let Some(corpus) = header.corpus {
                corpus.complete(&mut read, columns);
            }
            read
        }),
        (None, None) => jsonl::columns_of(bytes),
    };
    with_media(file, file.place(file.path.display(), extent.line), input_hash, parsed, None, columns)
}

fn read_record(file: &ManifestFile, records: &Records, index: usize, columns: &Columns) -> Read {
    let source = file.place(file.path.display(), records.first + index as u64);
    match records.record(index, &columns.audio, &file.path) {
        Ok(Record { columns: read, audio }) => {
            let left_out = audio.is_some().then_some(columns.audio.as_str());
            let (hash, fault) = records::hash_of(&read, left_out);
            let parsed = fault.map_or(Ok(read), |fault| Err(Unreadable::new(fault)));
            with_media(file, source, first_8_bytes(&hash), parsed, audio, columns)
        }
        Err(unreadable) => {
            let input_hash = first_8_bytes(&records::hash_of(&unreadable.columns, None).0);
            Read { source, id: None, input_hash, parsed: Err(unreadable) }
        }
    }
}

/// Looks for the recording of a row that does not hold one itself, and for its images.
fn with_media(
    file: &ManifestFile,
    source: String,
    mut input_hash: u64,
    parsed: Result<Map<String, Value>, Unreadable>,
    held: Option<MediaSource>,
    columns: &Columns,
) -> Read {
    let parsed = parsed.and_then(|mut read| match media_of(&mut read, held, file.folder(), &source, columns) {
        Ok(media) => Ok((read, media)),
        Err(error) => Err(Unreadable { error, columns: read, is_certain: true }),
    });
    if let Ok((_, media)) = &parsed {
        input_hash = media.sources().fold(input_hash, hash_with);
    }
    Read { source, id: None, input_hash, parsed }
}

fn media_of(
    read: &mut Map<String, Value>,
    held: Option<MediaSource>,
    folder: &Path,
    source: &str,
    columns: &Columns,
) -> Result<Media, String> {
    let audio = match held {
        Some(held) => Some(held),
        None => recording::of_column(read, &columns.audio, folder, source)?,
    };
    let images = parts::of_column(read, &columns.image, folder, source)?;
    let parts = parts::of_messages(read, &columns.messages, folder, source)?;
    Ok(Media { audio, images, parts })
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
