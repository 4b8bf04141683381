//! Rows of Parquet files. Format: <https://parquet.apache.org/docs/file-format/>; recordings in it as Hugging Face exports data
//! sets: a struct of `bytes` and `path`.
//!
//! A file is read a batch of rows at a time, as large as a block of the rows on average. What Arrow writers leave in the metadata
//! beside Parquet's own types is not looked at: large and plain strings, dictionaries and their values are the same to a row.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use serde_json::{Map, Value, json};

use super::delimited::COLUMNS_MAX;
use super::raw::{Unreadable, shorten};
use super::recording::AUDIO_BYTES_MAX;
use super::{BLOCK_BYTES, BLOCK_ROWS, ManifestError, ROW_BYTES_MAX, cell};
use crate::media::MediaSource;

const DAMAGED: &str = "it is damaged or cut off; copy it again, or write it again";

pub(super) struct RecordReader {
    /// Used by one thread at a time; the lock lets a manifest be lent to several.
    reader: Mutex<ParquetRecordBatchReader>,
    /// Read and not yet given out.
    batch: RecordBatch,
    /// Number of the next row of the file, from 1.
    next: u64,
    /// Of a row, but for its recording.
    row_bytes: usize,
    audio: String,
}

/// Rows of a file that follow each other.
#[derive(Debug)]
pub(super) struct Records {
    /// Number of the first in its file, from 1.
    pub first: u64,
    pub batch: RecordBatch,
}

impl RecordReader {
    /// Opens a file and checks that every column can be read; `audio` names the one that holds recordings.
    pub fn open(path: &Path, audio: &str) -> Result<Self, ManifestError> {
        let builder = builder(path)?;
        check(builder.schema(), audio).map_err(|reason| ManifestError::format(path, reason))?;
        let groups = builder.metadata().row_groups();
        let file_bytes = path.metadata().map_err(|error| ManifestError::read(path, error))?.len();
        for column in groups.iter().flat_map(|group| group.columns()) {
            let start = column.dictionary_page_offset().unwrap_or(column.data_page_offset());
            let end = start.checked_add(column.compressed_size());
            if start < 0 || column.compressed_size() < 0 || end.is_none_or(|end| end as u64 > file_bytes) {
                let name = shorten(&column.column_path().string());
                return Err(ManifestError::format(path, format!("{DAMAGED} (column `{name}` lies outside of the file)")));
            }
        }
        let bytes = groups.iter().filter(|group| group.num_rows() > 0).map(|group| group.total_byte_size() / group.num_rows());
        let row_bytes = bytes.max().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0).max(1);
        let batch = RecordBatch::new_empty(builder.schema().clone());
        let batch_rows = (BLOCK_BYTES / row_bytes).clamp(1, BLOCK_ROWS);
        let reader = guarded(path, || builder.with_batch_size(batch_rows).build().map_err(|error| error.to_string()))?;
        Ok(Self { reader: Mutex::new(reader), batch, next: 1, row_bytes, audio: audio.to_owned() })
    }

    /// The next rows, a block of them at most; none after the last.
    pub fn next(&mut self, path: &Path) -> Result<Option<Records>, ManifestError> {
        while self.batch.num_rows() == 0 {
            let reader = self.reader.get_mut().unwrap_or_else(PoisonError::into_inner);
            let read = guarded(path, || reader.next().transpose().map_err(|error| error.to_string()))?;
            let Some(batch) = read else { return Ok(None) };
            self.batch = batch;
        }
        let recordings = self.batch.column_by_name(&self.audio).and_then(bytes_of).cloned();
        let (mut rows, mut bytes) = (0, 0);
        while rows < self.batch.num_rows() && bytes < BLOCK_BYTES {
            bytes += match &recordings {
                Some(recordings) => recordings.as_binary::<i32>().value_length(rows) as usize,
                None => self.row_bytes.min(BLOCK_BYTES / BLOCK_ROWS),
            };
            rows += 1;
        }
        let batch = self.batch.slice(0, rows);
        self.batch = self.batch.slice(rows, self.batch.num_rows() - rows);
        let first = self.next;
        self.next += rows as u64;
        Ok(Some(Records { first, batch }))
    }
}

fn builder(path: &Path) -> Result<ParquetRecordBatchReaderBuilder<File>, ManifestError> {
    let file = File::open(path).map_err(|error| ManifestError::read(path, error))?;
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    guarded(path, || ParquetRecordBatchReaderBuilder::try_new_with_options(file, options).map_err(|error| error.to_string()))
}

/// Damaged files fail in many ways; the few that the decoder meets with a panic are that file's fault, not the end of the program.
fn guarded<T>(path: &Path, read: impl FnOnce() -> Result<T, String>) -> Result<T, ManifestError> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(Ok(read)) => Ok(read),
        Ok(Err(error)) => Err(ManifestError::format(path, format!("{DAMAGED} ({error})"))),
        Err(_) => Err(ManifestError::format(path, DAMAGED)),
    }
}

fn check(schema: &Schema, audio: &str) -> Result<(), String> {
    let fields = schema.fields();
    if fields.len() > COLUMNS_MAX {
        return Err(format!("it has more than {COLUMNS_MAX} columns; keep those that the prompt needs"));
    }
    for (index, field) in fields.iter().enumerate() {
        let name = shorten(field.name());
        if fields[..index].iter().any(|other| other.name() == field.name()) {
            return Err(format!("two columns are named `{name}`; rename one"));
        }
        if field.name() == audio && holds_bytes(field.data_type()) {
            continue;
        }
        if let Some(part) = cell::unreadable(field.data_type()) {
            let whole = if part == field.data_type() { String::new() } else { format!(" within {}", shown(field.data_type())) };
            let audio = if holds_bytes(field.data_type()) { "; recordings are named by `input.columns.audio`" } else { "" };
            let part = shown(part);
            return Err(format!("its column `{name}` has the type {part}{whole}, which is not read; leave the column out{audio}"));
        }
    }
    Ok(())
}

fn shown(data_type: &DataType) -> String {
    shorten(&data_type.to_string())
}

fn holds_bytes(data_type: &DataType) -> bool {
    let is_part = |field: &&std::sync::Arc<Field>| field.name() == "bytes" && *field.data_type() == DataType::Binary;
    match data_type {
        DataType::Binary => true,
        DataType::Struct(fields) => fields.iter().find(is_part).is_some(),
        _ => false,
    }
}

/// The bytes of a column of recordings.
fn bytes_of(column: &ArrayRef) -> Option<&ArrayRef> {
    match column.data_type() {
        DataType::Binary => Some(column),
        data_type if holds_bytes(data_type) => column.as_struct().column_by_name("bytes"),
        _ => None,
    }
}

/// A row of a file, with the bytes of its recording beside its columns.
pub(super) struct Record {
    pub columns: Map<String, Value>,
    pub audio: Option<MediaSource>,
}

impl Records {
    /// Reads a row. The audio column holds no bytes, but says where they stand, so that `failed.jsonl` can be read.
    pub fn record(&self, index: usize, audio: &str, path: &Path) -> Result<Record, Unreadable> {
        let row = self.first + index as u64;
        let mut record = Record { columns: Map::new(), audio: None };
        // The columns behind a fault are read all the same: the row's id may be among them.
        let mut fault = None;
        for (field, column) in self.batch.schema_ref().fields().iter().zip(self.batch.columns()) {
            let value = if field.name() == audio && holds_bytes(field.data_type()) {
                let (name, bytes) = named_bytes(column, index);
                let place = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
                match bytes {
                    None => name.map_or(Value::Null, Value::String),
                    Some(bytes) => {
                        let shown = name.clone().unwrap_or_else(|| format!("row {row}"));
                        match source(shown, bytes) {
                            Ok(source) => record.audio = Some(source),
                            Err(error) => {
                                fault.get_or_insert(error);
                            }
                        }
                        json!({ "path": name, "parquet": place.to_string_lossy(), "row": row })
                    }
                }
            } else {
                match cell::value(column, index) {
                    Ok(value) => value,
                    Err(error) => {
                        fault.get_or_insert_with(|| format!("column `{}`: {error}", shorten(field.name())));
                        continue;
                    }
                }
            };
            record.columns.insert(field.name().clone(), value);
        }
        match fault {
            Some(error) => Err(Unreadable { error, columns: record.columns, is_certain: true }),
            None => Ok(record),
        }
    }
}

/// The name and the bytes at `index` of a column of recordings.
fn named_bytes(column: &ArrayRef, index: usize) -> (Option<String>, Option<&[u8]>) {
    if column.is_null(index) {
        return (None, None);
    }
    let bytes = bytes_of(column).map(|bytes| bytes.as_binary::<i32>()).filter(|bytes| !bytes.is_null(index));
    let path = (*column.data_type() != DataType::Binary).then(|| column.as_struct().column_by_name("path")).flatten();
    let path = path.filter(|path| *path.data_type() == DataType::Utf8 && !path.is_null(index));
    let path = path.map(|path| path.as_string::<i32>().value(index).to_owned()).filter(|path| !path.is_empty());
    (path, bytes.map(|bytes| bytes.value(index)))
}

fn source(name: String, bytes: &[u8]) -> Result<MediaSource, String> {
    if bytes.len() > AUDIO_BYTES_MAX {
        let limit = AUDIO_BYTES_MAX;
        return Err(format!("the recording has {} bytes, the limit is {limit}; write it to a file and give its path", bytes.len()));
    }
    Ok(MediaSource::Bytes { name, bytes: bytes.into() })
}

/// The recording in the row of that number, from 1, of a Parquet file.
pub(super) fn recording(path: &Path, row: u64, audio: &str) -> Result<MediaSource, String> {
    let absent =
        || format!("`{}` has no recording in row {row} of its column `{audio}`; correct the path or the row", path.display());
    let failed = |error| format!("the Parquet file that `{audio}` names cannot be read: {error}");
    let builder = builder(path).map_err(failed)?;
    let column = builder.schema().index_of(audio).map_err(|_| absent())?;
    if !holds_bytes(builder.schema().field(column).data_type()) {
        return Err(absent());
    }
    let offset = row.checked_sub(1).and_then(|row| usize::try_from(row).ok()).ok_or_else(absent)?;
    let only = ProjectionMask::roots(builder.parquet_schema(), [column]);
    let builder = builder.with_projection(only).with_offset(offset).with_limit(1).with_batch_size(1);
    let batch = guarded(path, || {
        let mut reader = builder.build().map_err(|error| error.to_string())?;
        reader.next().transpose().map_err(|error| error.to_string())
    });
    let batch = batch.map_err(failed)?.filter(|batch| batch.num_rows() == 1).ok_or_else(absent)?;
    let (name, bytes) = named_bytes(batch.column(0), 0);
    source(name.unwrap_or_else(|| format!("row {row}")), bytes.ok_or_else(absent)?)
}

/// The hash of what a row holds, but for what is `left_out`; and an error where that is more than a row may hold.
pub(super) fn hash_of(columns: &Map<String, Value>, left_out: Option<&str>) -> (blake3::Hash, Option<String>) {
    let mut text = Vec::new();
    for (name, value) in columns.iter().filter(|(name, _)| Some(name.as_str()) != left_out) {
        // Writing to a vector cannot fail, and a map has text for keys.
        let _ = serde_json::to_writer(&mut text, &(name, value));
    }
    let bytes = text.len();
    let error = format!("the row has {bytes} bytes as JSON, the limit is {ROW_BYTES_MAX}; split the row");
    (blake3::hash(&text), (bytes > ROW_BYTES_MAX).then_some(error))
}
