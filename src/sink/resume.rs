//! What an earlier run left in the folder.

use std::path::{Path, PathBuf};

use arrow::{
    array::{AsArray, RecordBatch},
    datatypes::{DataType, UInt64Type},
};
use fs_err::File;
use parquet::{arrow::ArrowWriter, file::metadata::KeyValue};

use super::{
    Done, SCHEMA_VERSION, SinkError,
    closed::ClosedPart,
    failed::Span,
    files,
    kept::{KeptType, widen},
    record::Record,
    schema::{Layout, writer_properties},
};

const SCHEMA: &str = "mlxbatch.schema_version";
const JOB: &str = "mlxbatch.job_hash";
const MANIFEST: &str = "mlxbatch.manifest_hash";
const MODEL_ID: &str = "mlxbatch.model_id";
const MODEL_HASH: &str = "mlxbatch.model_hash";
const VERSIONS: &str = "mlxbatch.versions";
const ROWS_FAILED: &str = "mlxbatch.rows_failed";
const FAILED_START: &str = "mlxbatch.failed_jsonl_start";
const FAILED_END: &str = "mlxbatch.failed_jsonl_end";
const KEPT_TYPES: &str = "mlxbatch.kept_types";

/// What a part says of itself.
pub(super) fn metadata(record: &Record, rows_failed: u64, failed: Span, kept: &[KeptType]) -> Vec<KeyValue> {
    let versions = serde_json::to_string(&record.versions).unwrap_or_default();
    let pairs = [
        (SCHEMA, SCHEMA_VERSION.to_string()),
        (JOB, record.settings_hash.clone()),
        (MANIFEST, record.manifest_hash.clone()),
        (MODEL_ID, record.model.id.clone()),
        (MODEL_HASH, record.model.hash.clone()),
        (VERSIONS, versions),
        (ROWS_FAILED, rows_failed.to_string()),
        (FAILED_START, failed.start.to_string()),
        (FAILED_END, failed.end.to_string()),
        (KEPT_TYPES, kept_names(kept)),
    ];
    pairs.into_iter().map(|(key, value)| KeyValue::new(key.to_owned(), value)).collect()
}

fn kept_names(kept: &[KeptType]) -> String {
    kept.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(",")
}

/// The closed parts of this run.
#[derive(Debug, Default)]
pub(super) struct Closed {
    pub done: Done,
    pub kept: Vec<KeptType>,
    pub parts: Vec<(PathBuf, Span)>,
}

/// Reads which rows the parts hold: their footers, and two columns of each.
pub(super) fn read_parts(folder: &Path, parts: &[u32], record: &Record, layout: &Layout) -> Result<Closed, SinkError> {
    let mut closed = Closed { kept: vec![KeptType::Unknown; layout.kept.len()], ..Closed::default() };
    for &number in parts {
        let part = ClosedPart::open(&folder.join(files::part_name(number)))?;
        let (rows_failed, span, kept) = check(&part, record, layout)?;
        for (all, own) in closed.kept.iter_mut().zip(kept) {
            *all = all.join(own);
        }
        for batch in part.read(&["row", "input_hash"])? {
            let batch = batch?;
            let rows = numbers(&part, &batch, "row")?;
            let inputs = numbers(&part, &batch, "input_hash")?;
            for (&row, &input) in rows.iter().zip(inputs) {
                if !closed.done.insert(row, input) {
                    return Err(row_twice(folder, parts, number, row));
                }
            }
        }
        closed.done.rows_failed += rows_failed;
        closed.parts.push((part.path, span));
    }
    Ok(closed)
}

fn numbers<'a>(part: &ClosedPart, batch: &'a RecordBatch, name: &str) -> Result<&'a [u64], SinkError> {
    let column = batch.column_by_name(name).filter(|column| column.data_type() == &DataType::UInt64);
    let column = column.ok_or_else(|| part.no_column(name, "uint64"))?;
    Ok(column.as_primitive::<UInt64Type>().values())
}

fn row_twice(folder: &Path, parts: &[u32], second: u32, row: u64) -> SinkError {
    let holds = |number: u32| {
        let part = ClosedPart::open(&folder.join(files::part_name(number))).ok()?;
        let mut batches = part.read(&["row"]).ok()?;
        batches
            .any(|batch| batch.is_ok_and(|batch| numbers(&part, &batch, "row").is_ok_and(|rows| rows.contains(&row))))
            .then_some(())
    };
    let first = parts.iter().copied().find(|&number| holds(number).is_some()).unwrap_or(second);
    SinkError::RowTwice { row, first: files::part_name(first), second: files::part_name(second) }
}

/// A part must be this run's: its metadata tells.
fn check(part: &ClosedPart, record: &Record, layout: &Layout) -> Result<(u64, Span, Vec<KeptType>), SinkError> {
    let metadata = part.metadata();
    let stray = |reason: String| SinkError::Stray { file: part.path.clone(), reason };
    let expected = [
        (SCHEMA, SCHEMA_VERSION.to_string()),
        (JOB, record.settings_hash.clone()),
        (MANIFEST, record.manifest_hash.clone()),
        (MODEL_HASH, record.model.hash.clone()),
    ];
    for (key, value) in expected {
        match metadata.get(key) {
            Some(found) if *found == value => {}
            Some(found) => return Err(stray(format!("its {key} is {found}, the run's is {value}"))),
            None => return Err(stray(format!("it has no {key}"))),
        }
    }
    let number =
        |key: &str| metadata.get(key).and_then(|value| value.parse::<u64>().ok()).ok_or_else(|| stray(format!("it has no {key}")));
    let span = Span { start: number(FAILED_START)?, end: number(FAILED_END)? };
    let kept = metadata.get(KEPT_TYPES).copied().unwrap_or_default();
    let kept: Vec<_> = kept.split(',').filter(|name| !name.is_empty()).map_while(KeptType::from_name).collect();
    if kept.len() != layout.kept.len() {
        return Err(stray(format!("it keeps {} columns, the run keeps {}", kept.len(), layout.kept.len())));
    }
    Ok((number(ROWS_FAILED)?, span, kept))
}

/// Rewrites a part whose kept columns are narrower than `kept`, up to where its rename would make it count. Returns false when it
/// has those types already.
pub(super) fn widen_part(path: &Path, layout: &Layout, kept: &[KeptType]) -> Result<bool, SinkError> {
    let part = ClosedPart::open(path)?;
    let schema = layout.schema(kept);
    let fields = part.schema().fields();
    if fields.len() != schema.fields().len() {
        return Err(SinkError::Stray { file: path.into(), reason: format!("it has {} columns", fields.len()) });
    }
    if fields.iter().zip(schema.fields()).all(|(own, all)| own.data_type() == all.data_type()) {
        return Ok(false);
    }
    let failed = |source| SinkError::Write { file: path.into(), source };
    let metadata = part.metadata().into_iter().filter(|(key, _)| *key != KEPT_TYPES && key.starts_with("mlxbatch."));
    let mut metadata: Vec<_> = metadata.map(|(key, value)| KeyValue::new(key.to_owned(), value.to_owned())).collect();
    metadata.push(KeyValue::new(KEPT_TYPES.to_owned(), kept_names(kept)));
    metadata.sort_by(|a, b| a.key.cmp(&b.key));
    let doing = "rewrite a part whose kept columns have a wider type now";
    let file = File::create(files::temporary(path)).map_err(SinkError::io(doing))?;
    let mut writer = ArrowWriter::try_new(file, schema.clone(), Some(writer_properties(metadata))).map_err(failed)?;
    for batch in part.read(&[])? {
        let batch = batch?;
        let columns = batch.columns().iter().zip(schema.fields()).map(|(column, field)| widen(column, field.data_type()));
        let columns = columns.collect::<Result<_, _>>().and_then(|columns| RecordBatch::try_new(schema.clone(), columns));
        writer.write(&columns.map_err(|error| failed(error.into()))?).map_err(failed)?;
    }
    let file = writer.into_inner().map_err(failed)?;
    file.sync_all().map_err(SinkError::io(doing))?;
    Ok(true)
}
