//! Rows of a data set, read one at a time.
//!
//! [`open`] finds and checks every file before anything costly is loaded, so that a bad file ends a job early. [`Manifest`] then
//! yields the rows in order, a block of them at a time in memory: one thread frames rows (where each begins and ends), the rayon
//! pool parses them, and ids are compared in order afterwards. A row that cannot be used is a [`BadRow`] and the next one is read;
//! only a [`ManifestError`] ends the manifest. What is read, and every message about it: docs/manifests.md.

mod cell;
mod corpus;
mod delimited;
mod error;
mod files;
mod fingerprint;
mod folder;
mod ids;
mod jsonl;
mod lines;
mod parts;
mod raw;
mod reader;
mod recording;
mod records;
mod transcripts;

use std::iter::FusedIterator;
use std::sync::Arc;
use std::vec;

use rayon::prelude::*;
use serde_json::{Map, Value};

pub use error::ManifestError;
pub use files::ManifestFile;
pub use fingerprint::fingerprint;
pub use ids::ID_BYTES_MAX;
pub use parts::{MEDIA_MAX, MediumKind};
pub use recording::{AUDIO_BYTES_MAX, is_recording_name};

use crate::{
    job::{Columns, Input},
    media::MediaSource,
};
use files::Format;
use folder::{FolderWalk, Wanted};
use ids::{IdSet, Place};
use raw::{Block, Rows};
use reader::RowReader;
use records::RecordReader;

/// Bytes of one row at most, as it stands in its file.
pub const ROW_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Rows read ahead and parsed together.
const BLOCK_ROWS: usize = 1024;
/// A block ends with the row that reaches this.
const BLOCK_BYTES: usize = 4 * 1024 * 1024;

/// One good row.
#[derive(Debug, Clone, PartialEq)]
pub struct Item {
    /// Position over all files of the manifest, from 0; bad rows count.
    pub row: u64,
    /// From the id column, or derived from the source.
    pub id: String,
    /// `file:line`, `file:row N` of Parquet, or the path of a file of its own.
    pub source: String,
    /// The first 8 bytes of the blake3 hash of what the row was read from.
    pub input_hash: u64,
    /// Every column, in the order of the manifest.
    pub columns: Map<String, Value>,
    /// What the row's audio column names, resolved against its manifest's folder; or the file that the row is.
    pub audio: Option<MediaSource>,
    /// What its image column names; or the file that the row is.
    pub images: Vec<MediaSource>,
    /// The media of its messages' content parts, in their order.
    pub parts: Vec<Medium>,
}

/// An image or a recording that a message names.
#[derive(Debug, Clone, PartialEq)]
pub struct Medium {
    pub kind: MediumKind,
    pub source: MediaSource,
}

/// One row that cannot be used: it becomes a failed row.
#[derive(Debug, Clone, PartialEq)]
pub struct BadRow {
    pub row: u64,
    /// Its own, where that could be read and is no other row's; else derived from the source.
    pub id: String,
    pub source: String,
    pub input_hash: u64,
    /// A sentence that names the fault and the remedy; the source is told beside it.
    pub error: String,
    /// What could be read of it.
    pub columns: Map<String, Value>,
}

/// Boxed, because few rows are bad.
pub type RowResult = Result<Item, Box<BadRow>>;

/// Finds and checks all files of an input: that each is there, can be read, is in a known format with a usable header, and
/// that there is at least one row.
pub fn open(input: &Input) -> Result<Manifest, ManifestError> {
    let columns = &input.columns;
    let manifest = |files, origin| Manifest {
        files,
        origin,
        columns: columns.clone(),
        ids: IdSet::default(),
        next_row: 0,
        ready: Vec::new().into_iter(),
        ended: false,
    };
    if !input.manifest.is_empty() {
        let files = files::find(&input.manifest)?;
        let mut has_rows = false;
        for file in &files {
            has_rows |= check(file, columns)?;
        }
        if !has_rows {
            return Err(ManifestError::Empty { input: format!("`{}`", input.manifest.join("`, `")) });
        }
        return Ok(manifest(files, Origin::Files { opened: 0, reader: None }));
    }
    let Some(folder) = &input.folder else { return Err(ManifestError::NoInput) };
    let glob = input.glob.as_deref();
    let wanted = Wanted::new(folder, glob)?;
    if FolderWalk::open(folder, wanted.clone()).next()?.is_none() {
        let input = format!("`{}` with the glob `{}`", folder.display(), glob.unwrap_or(folder::GLOB));
        return Err(ManifestError::Empty { input });
    }
    Ok(manifest(Vec::new(), Origin::Folder(FolderWalk::open(folder, wanted))))
}

/// Whether a file has a row; an error when it is not a manifest at all.
fn check(file: &ManifestFile, columns: &Columns) -> Result<bool, ManifestError> {
    if file.format == Format::Parquet {
        return Ok(RecordReader::open(&file.path, &columns.audio)?.next(&file.path)?.is_some());
    }
    let mut row = Vec::new();
    let found = RowReader::open(file)?.next(&mut row)?.is_some();
    let row = row.trim_ascii();
    if file.path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
        && (row.starts_with(b"[") || row == b"{")
    {
        let reason = "it is one JSON document, not one object a line; convert it (`jq -c '.[]' in.json > out.jsonl` for an array)";
        return Err(ManifestError::format(&file.path, reason));
    }
    Ok(found)
}

/// The rows of an input, in order.
///
/// As an iterator it yields `Err` once, as its last, when the manifest cannot be read on; `Ok(Err(_))` is one bad row. Ids of good
/// and bad rows together are unique.
pub struct Manifest {
    /// None of a folder.
    files: Vec<Arc<ManifestFile>>,
    origin: Origin,
    columns: Columns,
    ids: IdSet,
    next_row: u64,
    /// What [`Iterator::next`] has still to yield of the last block.
    ready: vec::IntoIter<RowResult>,
    ended: bool,
}

enum Origin {
    Files { opened: usize, reader: Option<Reader> },
    Folder(FolderWalk),
}

/// What reads a file, by its format.
enum Reader {
    Lines(RowReader),
    Records(RecordReader),
}

impl Reader {
    fn open(file: &ManifestFile, columns: &Columns) -> Result<Self, ManifestError> {
        match file.format {
            Format::Parquet => RecordReader::open(&file.path, &columns.audio).map(Self::Records),
            _ => RowReader::open(file).map(Self::Lines),
        }
    }

    /// The next rows of the file; none after the last.
    fn block(&mut self, file: &Arc<ManifestFile>) -> Result<Option<Rows>, ManifestError> {
        let reading = match self {
            Self::Records(reading) => {
                return Ok(reading.next(&file.path)?.map(|records| Rows::Records { file: file.clone(), records }));
            }
            Self::Lines(reading) => reading,
        };
        let (mut bytes, mut extents) = (Vec::new(), Vec::new());
        while extents.len() < BLOCK_ROWS && bytes.len() < BLOCK_BYTES {
            let Some(extent) = reading.next(&mut bytes)? else { break };
            extents.push(extent);
        }
        let header = reading.header();
        Ok((!extents.is_empty()).then(|| Rows::Lines { file: file.clone(), header, bytes, extents }))
    }
}

impl Manifest {
    /// The files that are read, in order; none where the input is a folder.
    pub fn files(&self) -> &[Arc<ManifestFile>] {
        &self.files
    }

    /// The next rows, 1,024 at most, parsed on the rayon pool; none after the last. Do not mix it with iteration.
    pub fn next_block(&mut self) -> Result<Option<Vec<RowResult>>, ManifestError> {
        let Some(block) = self.read_block()? else { return Ok(None) };
        let columns = &self.columns;
        let parsed: Vec<_> = (0..block.len()).into_par_iter().with_min_len(32).map(|index| block.parse(index, columns)).collect();
        Ok(Some(parsed.into_iter().enumerate().map(|(index, row)| self.admit(&block, index, row)).collect()))
    }

    fn read_block(&mut self) -> Result<Option<Block>, ManifestError> {
        let rows = match &mut self.origin {
            Origin::Files { opened, reader } => loop {
                let Some(reading) = reader else {
                    let Some(file) = self.files.get(*opened) else { return Ok(None) };
                    *reader = Some(Reader::open(file, &self.columns)?);
                    *opened += 1;
                    continue;
                };
                if let Some(rows) = reading.block(&self.files[*opened - 1])? {
                    break rows;
                }
                *reader = None;
            },
            Origin::Folder(walk) => {
                let (mut files, mut bytes) = (Vec::new(), 0);
                while files.len() < BLOCK_ROWS && bytes < BLOCK_BYTES as u64 {
                    let Some(file) = walk.next()? else { break };
                    bytes += file.row_bytes();
                    files.push(file);
                }
                if files.is_empty() {
                    return Ok(None);
                }
                Rows::Files { folder: walk.folder.clone(), files }
            }
        };
        let block = Block { first_row: self.next_row, rows };
        self.next_row += block.len() as u64;
        Ok(Some(block))
    }

    /// Compares a row's id with those before it.
    fn admit(&mut self, block: &Block, index: usize, row: RowResult) -> RowResult {
        let place = block.place(index);
        let mut bad = match row {
            Ok(item) => match self.ids.insert(&item.id, place) {
                Ok(()) => return Ok(item),
                Err(first) => {
                    let error = format!(
                        "the id `{}` is taken by {}; give each row an id of its own",
                        raw::shorten(&item.id),
                        self.shown(first)
                    );
                    let Item { row, source, input_hash, columns, .. } = item;
                    Box::new(BadRow { row, id: block.derived_id(index), source, input_hash, error, columns })
                }
            },
            Err(bad) => bad,
        };
        if self.ids.insert(&bad.id, place).is_ok() {
            return Err(bad);
        }
        // Its own id is another row's. And another row may be called by the very name that is derived for this one.
        bad.id = block.derived_id(index);
        let derived = bad.id.len();
        for attempt in 2.. {
            if self.ids.insert(&bad.id, place).is_ok() {
                break;
            }
            bad.id.truncate(derived);
            bad.id.push_str(&format!("#{attempt}"));
        }
        Err(bad)
    }

    fn shown(&self, place: Place) -> String {
        match self.files.get(place.file() as usize) {
            Some(file) => file.place(file.path.display(), place.line()),
            None => format!("row {}", place.line()),
        }
    }
}

impl Iterator for Manifest {
    type Item = Result<RowResult, ManifestError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(row) = self.ready.next() {
                return Some(Ok(row));
            }
            if self.ended {
                return None;
            }
            match self.next_block() {
                Ok(Some(block)) => self.ready = block.into_iter(),
                Ok(None) => self.ended = true,
                Err(error) => {
                    self.ended = true;
                    return Some(Err(error));
                }
            }
        }
    }
}

impl FusedIterator for Manifest {}
