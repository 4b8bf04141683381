//! `failed.jsonl`: the failed rows of closed parts, one line each, ready to be fed back as a manifest.

use std::{
    io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{DataType, UInt64Type};
use fs_err::{self as fs, File};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    Row, SinkError, Stage,
    closed::{ClosedPart, PartError},
    done::RowSet,
    files::{self, FAILED_FILE},
    schema::LAST,
};

/// A longer line was not written by us.
const LINE_BYTES_MAX: u64 = 1 << 30;

/// Keys that a line has beside the manifest's columns.
const ERROR: &str = "_error";
const ERROR_STAGE: &str = "_error_stage";
const SOURCE: &str = "_source";
const ROW: &str = "_row";

/// A line, its keys in the order in which people look for them: the row's columns first.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    columns: Columns<'a>,
    #[serde(rename = "_row")]
    row: u64,
    #[serde(rename = "_source")]
    source: &'a str,
    #[serde(rename = "_error_stage")]
    error_stage: &'a str,
    #[serde(rename = "_error")]
    error: &'a str,
}

/// The manifest's columns, with the id in front where it was derived, and without what an earlier failure added.
struct Columns<'a> {
    id_column: &'a str,
    id: &'a str,
    columns: &'a Map<String, Value>,
}

impl Serialize for Columns<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let id = match self.columns.get(self.id_column) {
            None | Some(Value::Null) => Some((self.id_column, Value::from(self.id))),
            Some(_) => None,
        };
        let given = self.columns.iter().filter(|(name, value)| {
            let ours = [ERROR, ERROR_STAGE, SOURCE, ROW].contains(&name.as_str());
            let replaced = name.as_str() == self.id_column && value.is_null();
            !(ours || replaced)
        });
        let id = id.as_ref().map(|(name, value)| (*name, value));
        serializer.collect_map(id.into_iter().chain(given.map(|(name, value)| (name.as_str(), value))))
    }
}

/// The file, and the lines of the part in hand.
#[derive(Debug)]
pub(super) struct FailedRows {
    path: PathBuf,
    id_column: String,
    /// Length of the file: the lines of all closed parts.
    closed_bytes: u64,
    lines: Vec<u8>,
    rows: u64,
}

impl FailedRows {
    pub fn new(folder: &Path, id_column: &str, closed_bytes: u64) -> Self {
        FailedRows { path: folder.join(FAILED_FILE), id_column: id_column.into(), closed_bytes, lines: Vec::new(), rows: 0 }
    }

    /// Adds a row to the part in hand.
    pub fn push(&mut self, row: &Row, stage: Stage, error: &str) -> Result<(), SinkError> {
        let columns = Columns { id_column: &self.id_column, id: &row.id, columns: &row.columns };
        let line = Line { columns, row: row.row, source: &row.source, error_stage: stage.name(), error };
        serde_json::to_writer(&mut self.lines, &line).map_err(|error| SinkError::io("write failed.jsonl")(error.into()))?;
        self.lines.push(b'\n');
        self.rows += 1;
        Ok(())
    }

    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Bytes of the lines in hand.
    pub fn bytes(&self) -> usize {
        self.lines.len()
    }

    /// Where in the file the lines of the part in hand will begin and end.
    pub fn span(&self) -> (u64, u64) {
        (self.closed_bytes, self.closed_bytes + self.lines.len() as u64)
    }

    /// Puts the first `bytes` bytes of the lines in hand behind those of closed parts; the part's rename makes them count.
    pub fn append(&self, bytes: usize) -> io::Result<()> {
        if self.lines.is_empty() {
            return Ok(());
        }
        let new = self.closed_bytes == 0;
        let mut file = File::options().write(true).create(true).truncate(false).open(&self.path)?;
        file.set_len(self.closed_bytes)?;
        file.seek(SeekFrom::End(0))?;
        file.write_all(&self.lines[..bytes])?;
        file.sync_all()?;
        if new { files::sync_folder(self.path.parent().unwrap_or(Path::new("."))) } else { Ok(()) }
    }

    /// The part in hand is closed, and the next one begins.
    pub fn part_closed(&mut self) {
        self.closed_bytes = self.span().1;
        self.lines.clear();
        // A part of huge lines should not be paid for by all later ones.
        self.lines.shrink_to(1 << 20);
        self.rows = 0;
    }
}

/// What a part's metadata says about its lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub start: u64,
    pub end: u64,
}

/// Makes the file hold the failed rows of the closed parts, each once, and returns its length.
///
/// After a kill the file is that, or has lines too many at its end, which are cut off. If it is anything else, someone changed it
/// or took a part away: then lines of closed rows are kept, and what is missing is written anew from the parts, which have the id
/// and the kept columns only.
pub(super) fn reconcile(folder: &Path, id_column: &str, parts: &[(PathBuf, Span)]) -> Result<u64, SinkError> {
    let doing = "bring failed.jsonl in line with the parts";
    let path = folder.join(FAILED_FILE);
    let length = match fs::metadata(&path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
        Err(error) => return Err(SinkError::io(doing)(error)),
    };
    let mut end = 0;
    let unbroken = parts.iter().all(|(_, span)| span.start == std::mem::replace(&mut end, span.end) && span.start <= span.end);
    if unbroken && end <= length && ends_line(&path, end).map_err(SinkError::io(doing))? {
        if end < length {
            let file = File::options().write(true).open(&path).map_err(SinkError::io(doing))?;
            file.set_len(end).and_then(|()| file.sync_all()).map_err(SinkError::io(doing))?;
        }
        return Ok(end);
    }
    rebuild(&path, id_column, parts)
}

fn ends_line(path: &Path, end: u64) -> io::Result<bool> {
    if end == 0 {
        return Ok(true);
    }
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(end - 1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

fn rebuild(path: &Path, id_column: &str, parts: &[(PathBuf, Span)]) -> Result<u64, SinkError> {
    let doing = "write failed.jsonl anew";
    let mut missing = RowSet::default();
    for (part, _) in parts {
        let part = ClosedPart::open(part)?;
        for_failed(&part, &["row", "status"], |batch, at| {
            missing.insert(batch.column(0).as_primitive::<UInt64Type>().value(at));
            Ok(())
        })?;
    }
    let temporary = files::temporary(path);
    let mut out = BufWriter::new(File::create(&temporary).map_err(SinkError::io(doing))?);
    if path.exists() {
        keep_lines(path, &mut missing, &mut out).map_err(SinkError::io(doing))?;
    }
    for (part, _) in parts {
        let part = ClosedPart::open(part)?;
        for_failed(&part, &[], |batch, at| {
            let row = batch.column_by_name("row").map_or(0, |rows| rows.as_primitive::<UInt64Type>().value(at));
            if missing.remove(row) {
                let line = line_of_part(batch, at, id_column);
                serde_json::to_writer(&mut out, &line).map_err(io::Error::from).map_err(SinkError::io(doing))?;
                out.write_all(b"\n").map_err(SinkError::io(doing))?;
            }
            Ok(())
        })?;
    }
    let file = out.into_inner().map_err(|error| SinkError::io(doing)(error.into_error()))?;
    file.sync_all().map_err(SinkError::io(doing))?;
    let length = file.metadata().map_err(SinkError::io(doing))?.len();
    fs::rename(&temporary, path).map_err(SinkError::io(doing))?;
    files::sync_folder(path.parent().unwrap_or(Path::new("."))).map_err(SinkError::io(doing))?;
    Ok(length)
}

/// Copies the lines of rows that are missing, which no longer are.
fn keep_lines(path: &Path, missing: &mut RowSet, out: &mut impl Write) -> io::Result<()> {
    #[derive(Deserialize)]
    struct Numbered {
        #[serde(rename = "_row")]
        row: u64,
    }
    let mut file = BufReader::new(File::open(path)?);
    let mut line = Vec::new();
    loop {
        line.clear();
        if file.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        if line.ends_with(b"\n")
            && let Ok(Numbered { row }) = serde_json::from_slice(&line)
            && missing.remove(row)
        {
            out.write_all(&line)?;
        }
    }
}

/// Calls back for each failed row with the batch it is in and where; columns are checked to have their types.
fn for_failed(
    part: &ClosedPart,
    columns: &[&str],
    mut callback: impl FnMut(&RecordBatch, usize) -> Result<(), SinkError>,
) -> Result<(), SinkError> {
    for batch in part.read(columns)? {
        let batch = batch?;
        typed(part, &batch, "row", &DataType::UInt64, "uint64")?;
        typed(part, &batch, "status", &DataType::Utf8, "utf8")?;
        let Some(status) = batch.column_by_name("status").map(|status| status.as_string::<i32>()) else { continue };
        for at in (0..batch.num_rows()).filter(|&at| status.value(at) == "failed") {
            callback(&batch, at)?;
        }
    }
    Ok(())
}

fn typed(part: &ClosedPart, batch: &RecordBatch, name: &str, kind: &DataType, expected: &'static str) -> Result<(), PartError> {
    match batch.column_by_name(name) {
        Some(column) if column.data_type() == kind => Ok(()),
        _ => Err(part.no_column(name, expected)),
    }
}

/// What a part knows of a failed row.
fn line_of_part(batch: &RecordBatch, at: usize, id_column: &str) -> Map<String, Value> {
    let value = |name: &str| batch.column_by_name(name).map_or(Value::Null, |column| json_value(column, at));
    let mut line = Map::new();
    line.insert(id_column.into(), value("id"));
    let own = batch.schema().index_of(LAST).map_or(batch.num_columns(), |last| last + 1);
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()).skip(own) {
        line.entry(field.name().clone()).or_insert_with(|| json_value(column, at));
    }
    for (key, column) in [(ROW, "row"), (SOURCE, "source"), (ERROR_STAGE, "error_stage"), (ERROR, "error")] {
        line.insert(key.into(), value(column));
    }
    line
}

fn json_value(column: &arrow::array::ArrayRef, at: usize) -> Value {
    use arrow::datatypes::{Float64Type, Int64Type};
    match column.data_type() {
        _ if column.is_null(at) => Value::Null,
        DataType::Utf8 => column.as_string::<i32>().value(at).into(),
        DataType::Boolean => column.as_boolean().value(at).into(),
        DataType::UInt64 => column.as_primitive::<UInt64Type>().value(at).into(),
        DataType::Int64 => column.as_primitive::<Int64Type>().value(at).into(),
        DataType::Float64 => column.as_primitive::<Float64Type>().value(at).into(),
        _ => Value::Null,
    }
}
