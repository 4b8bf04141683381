//! A job and rows for tests.

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use arrow::{
    array::{Array, AsArray, RecordBatch},
    compute::concat_batches,
    datatypes::{DataType, TimestampMicrosecondType, UInt64Type},
    util::display::array_value_to_string,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    ClosedPart, Completion, Done, End, Folder, Heard, Outcome, Provenance, Row, RowState, Segment, SinkError, Stage, Timing,
    part_files,
};
use crate::{
    job::{
        Audio, Batching, Columns, Device, Dtype, Generation, Input, Job, KvBudget, Model, Order, Prompt, Results, Transcription,
    },
    schedule::FinishReason,
    score::Score,
};

/// In memory where the system has such a place: these tests sync thousands of files.
pub fn results_folder() -> TempDir {
    TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap()
}

pub fn job(output: &Path) -> Job {
    let columns = Columns {
        id: "id".into(),
        prompt: "prompt".into(),
        messages: "messages".into(),
        reference: "reference".into(),
        audio: "audio".into(),
        image: "image".into(),
        language: "language".into(),
    };
    Job {
        file: "jobs/test.toml".into(),
        name: "test".into(),
        output: output.into(),
        model: Model { path: "fake".into(), device: Device::Auto, dtype: Dtype::Auto },
        input: Input { manifest: vec!["rows.jsonl".into()], folder: None, glob: None, columns },
        prompt: Prompt { system: None, template: None, thinking: false },
        generation: Generation::default(),
        batching: Batching {
            rows: 4,
            kv_budget: KvBudget::Auto,
            prefill_chunk: None,
            prompt_concurrency: None,
            order: Order::Manifest,
            prefix_cache: true,
        },
        audio: Audio::default(),
        transcription: Transcription::default(),
        results: Results { token_ids: false, keep_columns: Vec::new(), rows_per_part: 4, seconds_per_part: 3600 },
    }
}

pub fn provenance() -> Provenance {
    Provenance {
        job_toml: "[generation]\nmax_tokens = 64\n".into(),
        manifest_hash: "m0".into(),
        settings_hash: 0xabc,
        model_id: "fake".into(),
        model_hash: "f0".into(),
        versions: BTreeMap::from([("mlxbatch".into(), "0.1.0".into()), ("mlx".into(), "0.32.0".into())]),
        machine: BTreeMap::from([("cpu".into(), "test".into())]),
    }
}

pub fn ok_row(row: u64) -> Row {
    let timing = Timing {
        media_ms: 0.0,
        encode_ms: 0.0,
        queue_ms: 1.0,
        prefill_ms: 2.0,
        ttft_ms: 4.0 + row as f64,
        decode_ms: 8.0,
        total_ms: 16.0,
        rows_in_batch: 2.5,
        started_at_us: 1_700_000_000_000_000 + 20_000 * row as i64,
    };
    let completion = Completion {
        text: format!("text {row} ✓\n"),
        finish_reason: if row.is_multiple_of(2) { FinishReason::Stop } else { FinishReason::Length },
        prompt_tokens: 10 + row as u32,
        image_tokens: 0,
        cached_tokens: 3,
        completion_tokens: 5,
        token_ids: vec![row as u32, u32::MAX],
        logprobs: None,
        timing,
        heard: None,
        notes: Vec::new(),
    };
    let columns = json!({"id": format!("id-{row}"), "prompt": "say it", "reference": "ref", "rank": row});
    Row {
        id: format!("id-{row}"),
        row,
        source: format!("rows.jsonl:{}", row + 1),
        input_hash: input_hash(row),
        outcome: Outcome::Ok(Box::new(completion)),
        reference: Some("ref".into()),
        score: None,
        columns: columns.as_object().cloned().unwrap(),
    }
}

/// Of a recording, with a score.
pub fn heard_row(row: u64) -> Row {
    let mut heard = ok_row(row);
    let Outcome::Ok(completion) = &mut heard.outcome else { unreachable!() };
    let segment = |start: f64, text: &str| Segment {
        start,
        end: start + 2.5,
        text: text.into(),
        avg_logprob: -0.25,
        compression_ratio: 1.5,
        no_speech_prob: 0.125,
        temperature: 0.0,
    };
    completion.timing.media_ms = 20.0;
    completion.timing.encode_ms = 30.0;
    completion.heard = Some(Heard {
        audio_seconds: 7.5 + row as f64,
        audio_tokens: 1500,
        language: Some("en".into()),
        segments: vec![segment(0.0, " Hello ✓"), segment(4.5, " there.")],
    });
    completion.notes = vec!["the recording ends early".into(), "the left channel was taken".into()];
    heard.score = Some(Score { words: 10, word_errors: 1 + (row as u32 % 8), characters: 50, character_errors: 3 });
    heard
}

pub fn failed_row(row: u64) -> Row {
    let outcome = Outcome::Failed { stage: Stage::Prompt, error: format!("row {row} has \"no\" prompt") };
    Row { outcome, reference: None, ..ok_row(row) }
}

/// Every third row fails.
pub fn row(row: u64) -> Row {
    if row % 3 == 1 { failed_row(row) } else { ok_row(row) }
}

pub fn input_hash(row: u64) -> u64 {
    row.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Pushes those of `rows` that are not done.
pub fn push_all(folder: &mut Folder, done: &Done, rows: &[Row]) -> Result<(), SinkError> {
    let now = Instant::now() + Duration::from_secs(1);
    for row in rows {
        match done.state(row.row, row.input_hash) {
            RowState::Done => {}
            RowState::Changed => panic!("row {} has changed", row.row),
            RowState::Todo => {
                folder.push(row, now)?;
            }
        }
    }
    Ok(())
}

pub fn batches(folder: &Path) -> Vec<RecordBatch> {
    let parts = part_files(folder).unwrap();
    parts.iter().flat_map(|part| ClosedPart::open(part).unwrap().read(&[]).unwrap().map(Result::unwrap)).collect()
}

/// What a complete run of the rows leaves.
pub fn written(job: &Job, rows: &[Row]) -> RecordBatch {
    let (mut folder, done) = Folder::open(job, &provenance(), false).unwrap();
    push_all(&mut folder, &done, rows).unwrap();
    folder.finish(End::Complete { rows: rows.len() as u64 }, Value::Null).unwrap();
    let batches = batches(&job.output);
    concat_batches(&batches[0].schema(), &batches).unwrap()
}

/// One row of the results as text, `-` for null.
pub fn shown(batch: &RecordBatch, at: usize) -> Vec<String> {
    let value = |column: &arrow::array::ArrayRef| match column.data_type() {
        _ if column.is_null(at) => "-".to_owned(),
        DataType::Timestamp(..) => column.as_primitive::<TimestampMicrosecondType>().value(at).to_string(),
        _ => array_value_to_string(column, at).unwrap().trim_end().to_owned(),
    };
    let names = batch.schema().fields().iter().map(|field| field.name().clone()).collect::<Vec<_>>();
    names.iter().zip(batch.columns()).map(|(name, column)| format!("{name}={}", value(column))).collect()
}

/// Row numbers in the parts, in their order.
pub fn row_numbers(folder: &Path) -> Vec<u64> {
    let rows = |batch: &RecordBatch| batch.column_by_name("row").unwrap().as_primitive::<UInt64Type>().values().to_vec();
    batches(folder).iter().flat_map(rows).collect()
}

pub fn failed_lines(folder: &Path) -> Vec<Value> {
    let text = fs_err::read_to_string(folder.join(super::FAILED_FILE)).unwrap_or_default();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
