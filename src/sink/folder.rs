//! The results folder of a run.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use fs_err::{self as fs, File};
use jiff::Timestamp;
use parquet::arrow::ArrowWriter;
use serde_json::{Map, Value};

use super::{
    Done, Outcome, Provenance, Row, SinkError, Stage,
    columns::{Columns, notes_bytes},
    done::RowSet,
    failed::{FailedRows, Span, reconcile},
    files::{self, Listing, RECORD_FILE, SUCCESS_FILE, part_name, temporary},
    heard::segments_bytes,
    kept::KeptType,
    record::{self, Record, State},
    resume::{self, metadata, widen_part},
    schema::{Layout, writer_properties},
};
use crate::{engine::Logprobs, job::Job};

/// What a part may hold before it closes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub rows: usize,
    pub age: Duration,
    /// In memory. A part is held there until it closes, twice for a moment.
    pub bytes: usize,
    /// Of one row in memory; beyond it the row fails. With `bytes` it keeps every string column under 2 GiB.
    pub row_bytes: usize,
}

const PART_BYTES_MAX: usize = 64 << 20;
const ROW_BYTES_MAX: usize = 128 << 20;

/// The steps of closing a part and ending a run, for tests that stop before each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    WritePart,
    SyncPart,
    AppendFailed,
    AppendFailedHalf,
    RenamePart,
    SyncFolder,
    RenameWidened,
    WriteRecord,
    WriteSuccess,
}

/// A part that is safe from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartClosed {
    /// File name.
    pub name: String,
    pub rows: u64,
    pub rows_failed: u64,
    /// Of the file.
    pub bytes: u64,
}

/// How a run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// A result for each of `rows` rows, those of earlier runs included.
    Complete {
        rows: u64,
    },
    Interrupted,
    Failed,
}

/// A results folder that this process alone writes to.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    layout: Layout,
    limits: Limits,
    record: Record,
    /// Of all closed parts.
    kept: Vec<KeptType>,
    parts: Vec<u32>,
    /// Rows of closed parts and of the part in hand.
    rows: RowSet,
    rows_count: u64,
    columns: Columns,
    failed: FailedRows,
    part_opened_at: Option<Instant>,
    /// `_SUCCESS` of an earlier run stands until rows are added.
    success: bool,
    broken: bool,
    _lock: File,
    #[cfg(test)]
    pub(super) stop_before: Option<(Step, u32)>,
}

impl Folder {
    /// Creates the job's output folder, or goes on in it after an earlier run of the same job, manifest and model.
    ///
    /// With `fresh` an earlier run's files are removed first, and none but those.
    ///
    /// # Errors
    /// When another process has it, when it holds an earlier run of another job or files of someone else's, when a part is damaged,
    /// and when the disk refuses.
    pub fn open(job: &Job, provenance: &Provenance, fresh: bool) -> Result<(Self, Done), SinkError> {
        let limits = Limits {
            rows: job.results.rows_per_part.max(1) as usize,
            age: Duration::from_secs(job.results.seconds_per_part.max(1).into()),
            bytes: PART_BYTES_MAX,
            row_bytes: ROW_BYTES_MAX,
        };
        Self::open_with(job, provenance, fresh, limits)
    }

    pub(super) fn open_with(job: &Job, provenance: &Provenance, fresh: bool, limits: Limits) -> Result<(Self, Done), SinkError> {
        let doing = "open the results folder";
        let path = job.output.clone();
        let layout = Layout::new(&job.results)?;
        let mut record = Record::new(job, provenance, &layout, Timestamp::now().to_string());
        fs::create_dir_all(&path).map_err(SinkError::io(doing))?;
        let lock = files::lock(&path)?;
        let mut listing = Listing::read(&path).map_err(SinkError::io(doing))?;
        if !listing.record
            && let Some(file) = listing.other
        {
            return Err(SinkError::Foreign { folder: path, file });
        }
        if listing.record && fresh {
            if record::is_foreign(&path.join(RECORD_FILE)) {
                return Err(SinkError::ForeignRecord { folder: path });
            }
            files::remove_run(&path, &listing).map_err(SinkError::io("remove the files of the earlier run"))?;
            listing = Listing::default();
        }
        if listing.record {
            let earlier = Record::read(&path.join(RECORD_FILE))?;
            match record.check_same(&earlier, &provenance.job_toml, &path) {
                // A run that ended before its first part left nothing that another job could spoil.
                Err(_) if listing.parts.is_empty() => {
                    files::remove_run(&path, &listing).map_err(SinkError::io("remove the files of the earlier run"))?;
                    listing = Listing::default();
                }
                checked => {
                    checked?;
                    record = record.resuming(earlier);
                }
            }
        }
        for leftover in &listing.leftovers {
            files::remove_if_there(leftover).map_err(SinkError::io("remove what a killed run was writing"))?;
        }
        let closed = resume::read_parts(&path, &listing.parts, &record, &layout)?;
        for (part, _) in &closed.parts {
            if widen_part(part, &layout, &closed.kept)? {
                fs::rename(temporary(part), part).map_err(SinkError::io(doing))?;
            }
        }
        let closed_bytes = reconcile(&path, &job.input.columns.id, &closed.parts)?;
        record.write(&path)?;
        files::replace(&path.join(files::JOB_FILE), provenance.job_toml.as_bytes()).map_err(SinkError::io("write job.toml"))?;
        let folder = Folder {
            columns: Columns::new(layout.clone()),
            failed: FailedRows::new(&path, &job.input.columns.id, closed_bytes),
            path,
            layout,
            limits,
            record,
            kept: closed.kept,
            parts: listing.parts,
            rows: closed.done.row_set(),
            rows_count: closed.done.rows,
            part_opened_at: None,
            success: listing.success,
            broken: false,
            _lock: lock,
            #[cfg(test)]
            stop_before: None,
        };
        Ok((folder, closed.done))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Closed so far, those of earlier runs included.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Takes a row. When it fills the part, or the part is old enough, the part is closed and told.
    ///
    /// # Errors
    /// All of them end the run: a row is given twice, or the disk refuses.
    pub fn push(&mut self, row: &Row, now: Instant) -> Result<Option<PartClosed>, SinkError> {
        if self.broken {
            return Err(SinkError::Broken);
        }
        if !self.rows.insert(row.row) {
            return Err(SinkError::Duplicate { row: row.row });
        }
        let bytes = row_bytes(row, &self.layout);
        if bytes > self.limits.row_bytes {
            self.add(&too_large(row, bytes, self.limits.row_bytes))?;
        } else {
            self.add(row)?;
        }
        self.rows_count += 1;
        let opened_at = *self.part_opened_at.get_or_insert(now);
        let in_hand = self.columns.bytes() + self.failed.bytes();
        let full = self.columns.rows() >= self.limits.rows || in_hand >= self.limits.bytes;
        if full || now.saturating_duration_since(opened_at) >= self.limits.age { self.close_part() } else { Ok(None) }
    }

    /// Closes the part in hand when it is old enough; for times when no row comes.
    pub fn tick(&mut self, now: Instant) -> Result<Option<PartClosed>, SinkError> {
        match self.part_opened_at {
            Some(opened_at) if now.saturating_duration_since(opened_at) >= self.limits.age => self.close_part(),
            _ => Ok(None),
        }
    }

    fn add(&mut self, row: &Row) -> Result<(), SinkError> {
        if let Err(error) = self.columns.push(row) {
            self.broken = true;
            return Err(SinkError::Write { file: self.path.join(part_name(self.next_part())), source: error.into() });
        }
        match &row.outcome {
            Outcome::Ok(_) => Ok(()),
            Outcome::Failed { stage, error } => self.failed.push(row, *stage, error),
        }
    }

    fn next_part(&self) -> u32 {
        self.parts.last().map_or(0, |last| last.saturating_add(1))
    }

    /// Closes the part in hand, if it has rows.
    pub fn close_part(&mut self) -> Result<Option<PartClosed>, SinkError> {
        if self.broken {
            return Err(SinkError::Broken);
        }
        if self.columns.rows() == 0 {
            return Ok(None);
        }
        // Until it has worked out, nobody knows which steps were done: the next run finds out.
        self.broken = true;
        let closed = self.write_part()?;
        self.broken = false;
        Ok(Some(closed))
    }

    fn write_part(&mut self) -> Result<PartClosed, SinkError> {
        let doing = "close a part of the results";
        let number = self.next_part();
        let name = part_name(number);
        let file = self.path.join(&name);
        let rows = self.columns.rows() as u64;
        let rows_failed = self.failed.rows();

        if std::mem::take(&mut self.success) {
            files::remove_if_there(&self.path.join(SUCCESS_FILE)).map_err(SinkError::io(doing))?;
        }
        let kept: Vec<_> = self.kept.iter().zip(self.columns.kept_types()).map(|(all, own)| all.join(own)).collect();
        self.reach(Step::WritePart, number)?;
        let bytes = self.write_rows(&file, rows_failed, &kept, number)?;

        self.reach(Step::AppendFailed, number)?;
        #[cfg(test)]
        if self.stop_before == Some((Step::AppendFailedHalf, number)) {
            self.failed.append(self.failed.bytes() / 2).map_err(SinkError::io(doing))?;
        }
        self.reach(Step::AppendFailedHalf, number)?;
        self.failed.append(self.failed.bytes()).map_err(SinkError::io(doing))?;

        self.reach(Step::RenamePart, number)?;
        fs::rename(temporary(&file), &file).map_err(SinkError::io(doing))?;
        self.reach(Step::SyncFolder, number)?;
        files::sync_folder(&self.path).map_err(SinkError::io(doing))?;

        let widened = self.kept.iter().zip(&kept).any(|(old, new)| old.data_type() != new.data_type());
        self.kept = kept;
        if widened {
            for &part in &self.parts {
                let part = self.path.join(part_name(part));
                if widen_part(&part, &self.layout, &self.kept)? {
                    self.reach(Step::RenameWidened, number)?;
                    fs::rename(temporary(&part), &part).map_err(SinkError::io(doing))?;
                }
            }
            files::sync_folder(&self.path).map_err(SinkError::io(doing))?;
        }
        self.failed.part_closed();
        self.parts.push(number);
        self.part_opened_at = None;
        Ok(PartClosed { name, rows, rows_failed, bytes })
    }

    fn write_rows(&mut self, file: &Path, rows_failed: u64, kept: &[KeptType], number: u32) -> Result<u64, SinkError> {
        let failed = |source| SinkError::Write { file: file.into(), source };
        let batch = self.columns.take(kept).map_err(|error| failed(error.into()))?;
        let (start, end) = self.failed.span();
        let properties = writer_properties(metadata(&self.record, rows_failed, Span { start, end }, kept));
        let part = File::create(temporary(file)).map_err(SinkError::io("create a part of the results"))?;
        let mut writer = ArrowWriter::try_new(part, batch.schema(), Some(properties)).map_err(failed)?;
        writer.write(&batch).map_err(failed)?;
        drop(batch);
        let part = writer.into_inner().map_err(failed)?;
        self.reach(Step::SyncPart, number)?;
        part.sync_all().map_err(SinkError::io("sync a part of the results"))?;
        Ok(part.metadata().map_err(SinkError::io("read the size of a part"))?.len())
    }

    /// Closes the part in hand and ends the run: `run.json` gets `summary`, and a complete run its `_SUCCESS`.
    ///
    /// # Errors
    /// When the disk refuses, or a complete run lacks a row.
    pub fn finish(&mut self, end: End, summary: Value) -> Result<Option<PartClosed>, SinkError> {
        let closed = self.close_part()?;
        if let End::Complete { rows } = end
            && rows != self.rows_count
        {
            return Err(SinkError::Incomplete { rows: self.rows_count, expected: rows });
        }
        self.record.state = match end {
            End::Complete { .. } => State::Complete,
            End::Interrupted => State::Interrupted,
            End::Failed => State::Failed,
        };
        self.record.finished_at = Some(Timestamp::now().to_string());
        self.record.summary = summary;
        self.reach(Step::WriteRecord, 0)?;
        self.record.write(&self.path)?;
        self.reach(Step::WriteSuccess, 0)?;
        if matches!(end, End::Complete { .. }) {
            files::replace(&self.path.join(SUCCESS_FILE), b"").map_err(SinkError::io("write _SUCCESS"))?;
        }
        Ok(closed)
    }

    #[cfg(not(test))]
    fn reach(&self, _: Step, _: u32) -> Result<(), SinkError> {
        Ok(())
    }

    #[cfg(test)]
    fn reach(&self, step: Step, part: u32) -> Result<(), SinkError> {
        if self.stop_before == Some((step, part)) { Err(SinkError::Stopped(step)) } else { Ok(()) }
    }
}

/// About what a row takes in memory: its kept columns, or all of them when it failed.
fn row_bytes(row: &Row, layout: &Layout) -> usize {
    let text = match &row.outcome {
        Outcome::Ok(completion) => {
            let segments = completion.heard.as_ref().map_or(0, |heard| segments_bytes(&heard.segments));
            let logprobs = completion.logprobs.as_ref().map_or(0, Logprobs::bytes);
            completion.text.len() + 4 * completion.token_ids.len() + segments + logprobs + notes_bytes(&completion.notes)
        }
        Outcome::Failed { error, .. } => error.len() + row.columns.values().map(value_bytes).sum::<usize>(),
    };
    let kept = layout.kept.iter().filter_map(|name| row.columns.get(name)).map(value_bytes).sum::<usize>();
    row.id.len() + row.source.len() + row.reference.as_ref().map_or(0, String::len) + text + kept
}

fn value_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(value_bytes).sum::<usize>() + 8,
        Value::Object(values) => values.iter().map(|(key, value)| key.len() + value_bytes(value)).sum::<usize>() + 8,
        Value::Null | Value::Bool(_) | Value::Number(_) => 8,
    }
}

fn too_large(row: &Row, bytes: usize, bytes_max: usize) -> Row {
    let error =
        format!("the row's texts have {bytes} bytes together, and results can hold {bytes_max} bytes a row: shorten its columns");
    let start = |text: &str| text.chars().take(1000).collect::<String>();
    Row {
        id: start(&row.id),
        source: start(&row.source),
        outcome: Outcome::Failed { stage: Stage::Manifest, error },
        reference: None,
        score: None,
        columns: Map::new(),
        ..*row
    }
}
