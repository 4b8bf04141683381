//! `mlxbatch summary DIR`: what came of a run, from its Parquet parts alone.

use std::path::{Path, PathBuf};

use arrow::{
    array::{Array, AsArray, RecordBatch},
    datatypes::{DataType, Float64Type, TimeUnit, TimestampMicrosecondType, UInt32Type, UInt64Type},
};
use thiserror::Error;

use crate::{
    report::{Measured, Summary, Tally, Texts},
    score::Score,
    sink::{ClosedPart, PartError, part_files},
};

#[derive(Debug, Error)]
pub enum SummaryError {
    #[error("{0} is no folder: give the output folder of a run")]
    NoFolder(PathBuf),
    #[error("{0} has no part-*.parquet: give the output folder of a run, one that has closed a part")]
    NoParts(PathBuf),
    #[error("the results cannot be summed up")]
    Part(#[from] PartError),
}

const COLUMNS: [&str; 22] = [
    "row",
    "status",
    "error_stage",
    "error",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "media_ms",
    "encode_ms",
    "queue_ms",
    "prefill_ms",
    "ttft_ms",
    "decode_ms",
    "total_ms",
    "rows_in_batch",
    "started_at",
    "audio_seconds",
    "notes",
    "reference_words",
    "word_errors",
    "reference_characters",
    "character_errors",
];
/// Of the rows that compare worst something is shown.
const TEXTS: [&str; 3] = ["id", "reference", "text"];

/// Reads the parts of a results folder, a few thousand rows at a time, and none of their texts but where they have scores.
///
/// # Errors
/// When the folder has no parts, and when one cannot be read; the error names the file.
pub fn summarize(folder: &Path) -> Result<Summary, SummaryError> {
    if !folder.is_dir() {
        return Err(SummaryError::NoFolder(folder.into()));
    }
    let parts = part_files(folder)?;
    if parts.is_empty() {
        return Err(SummaryError::NoParts(folder.into()));
    }
    let mut tally = Tally::default();
    let mut model = None;
    for path in &parts {
        let part = ClosedPart::open(path)?;
        check_columns(&part)?;
        model = model.or_else(|| part.metadata().get("mlxbatch.model_id").map(|id| (*id).to_owned()));
        let columns = if part.has_values("word_errors") { [&COLUMNS[..], &TEXTS].concat() } else { COLUMNS.to_vec() };
        for batch in part.read(&columns)? {
            add_batch(&mut tally, &batch?);
        }
    }
    Ok(Summary { model: model.unwrap_or_default(), output: folder.into(), parts: parts.len() as u64, ..tally.summary() })
}

/// After this, [`add_batch`] finds each column with its type.
fn check_columns(part: &ClosedPart) -> Result<(), PartError> {
    for name in COLUMNS.into_iter().chain(TEXTS) {
        let (kind, expected) = match name {
            "id" | "status" | "error_stage" | "error" | "reference" | "text" => (DataType::Utf8, "utf8"),
            "row" => (DataType::UInt64, "uint64"),
            "prompt_tokens"
            | "cached_tokens"
            | "completion_tokens"
            | "reference_words"
            | "word_errors"
            | "reference_characters"
            | "character_errors" => (DataType::UInt32, "uint32"),
            // Only whether there are any counts.
            "notes" if part.schema().field_with_name(name).is_ok() => continue,
            "notes" => return Err(part.no_column(name, "list of utf8")),
            "started_at" => (DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())), "timestamp(us, UTC)"),
            _ => (DataType::Float64, "float64"),
        };
        if !part.schema().field_with_name(name).is_ok_and(|field| field.data_type() == &kind) {
            return Err(part.no_column(name, expected));
        }
    }
    Ok(())
}

fn add_batch(tally: &mut Tally, batch: &RecordBatch) {
    let column = |name: &str| &batch[name];
    let text = |name| column(name).as_string::<i32>();
    let counts = |name| column(name).as_primitive::<UInt32Type>();
    let times = |name| column(name).as_primitive::<Float64Type>();
    let (status, error_stage, error) = (text("status"), text("error_stage"), text("error"));
    let (prompt, cached, completion) = (counts("prompt_tokens"), counts("cached_tokens"), counts("completion_tokens"));
    let (media, encode, queue, prefill) = (times("media_ms"), times("encode_ms"), times("queue_ms"), times("prefill_ms"));
    let (ttft, decode, total, together) = (times("ttft_ms"), times("decode_ms"), times("total_ms"), times("rows_in_batch"));
    let started_at = column("started_at").as_primitive::<TimestampMicrosecondType>();
    let (audio_seconds, notes) = (times("audio_seconds"), column("notes"));
    let rows = column("row").as_primitive::<UInt64Type>();
    let (words, word_errors) = (counts("reference_words"), counts("word_errors"));
    let (characters, character_errors) = (counts("reference_characters"), counts("character_errors"));
    let texts = batch.column_by_name("text").map(|_| TEXTS.map(text));
    for at in 0..batch.num_rows() {
        if status.value(at) != "ok" {
            // A null reads as an empty string.
            tally.failed(error_stage.value(at), error.value(at));
            continue;
        }
        tally.ok(&Measured {
            prompt_tokens: prompt.value(at).into(),
            cached_tokens: cached.value(at).into(),
            completion_tokens: completion.value(at).into(),
            media_ms: media.value(at),
            encode_ms: encode.value(at),
            queue_ms: queue.value(at),
            prefill_ms: prefill.value(at),
            ttft_ms: ttft.value(at),
            decode_ms: decode.value(at),
            total_ms: total.value(at),
            rows_in_batch: together.value(at),
            started_at_us: started_at.value(at),
            audio_seconds: audio_seconds.is_valid(at).then(|| audio_seconds.value(at)),
            has_notes: notes.is_valid(at),
        });
        if let Some([id, reference, text]) = texts.filter(|_| word_errors.is_valid(at)) {
            let score = Score {
                words: words.value(at),
                word_errors: word_errors.value(at),
                characters: characters.value(at),
                character_errors: character_errors.value(at),
            };
            let texts = Texts { id: id.value(at), reference: reference.value(at), text: text.value(at) };
            tally.scored(rows.value(at), &score, texts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::{End, Folder, fixture::*};
    use fs_err as fs;
    use serde_json::Value;

    #[test]
    fn parts_give_the_summary_that_the_run_gave() {
        let folder = results_folder();
        let job = job(folder.path());
        let (mut results, done) = Folder::open(&job, &provenance(), false).unwrap();
        let rows: Vec<_> = (0..100).map(row).collect();
        push_all(&mut results, &done, &rows).unwrap();
        results.finish(End::Complete { rows: 100 }, Value::Null).unwrap();
        let mut tally = Tally::default();
        rows.iter().for_each(|row| tally.add(row));
        let expected = Summary { model: "fake".into(), output: folder.path().into(), parts: 25, ..tally.summary() };
        let found = summarize(folder.path()).unwrap();
        assert_eq!(found, expected);
        assert_eq!((found.rows_ok, found.rows_failed, found.completion_tokens), (67, 33, 67 * 5));
        assert_eq!(found.rows_in_batch, Some(2.5));
        let shown = found.to_string();
        assert!(shown.contains("33 × prompt: row 1 has \"no\" prompt"), "{shown}");
    }

    #[test]
    fn parts_give_audio_and_scores_as_the_run_did() {
        let folder = results_folder();
        let job = job(folder.path());
        let (mut results, done) = Folder::open(&job, &provenance(), false).unwrap();
        let rows: Vec<_> = (0..100).map(|number| if number % 3 == 2 { heard_row(number) } else { row(number) }).collect();
        push_all(&mut results, &done, &rows).unwrap();
        results.finish(End::Complete { rows: 100 }, Value::Null).unwrap();
        let mut tally = Tally::default();
        rows.iter().for_each(|row| tally.add(row));
        let expected = Summary { model: "fake".into(), output: folder.path().into(), parts: 25, ..tally.summary() };
        let found = summarize(folder.path()).unwrap();
        assert_eq!(found, expected);
        let seconds: f64 = (2..100).step_by(3).map(|number| 7.5 + f64::from(number)).sum();
        let (audio, scores) = (found.audio.unwrap(), found.scores.unwrap());
        assert_eq!((audio.rows, audio.audio_seconds, found.rows_with_notes), (33, seconds, 33));
        assert_eq!(audio.times_real_time, Some(seconds / found.wall_seconds));
        let errors: u64 = (2..100).step_by(3).map(|number| 1 + number % 8).sum();
        assert_eq!((scores.rows, scores.reference_words, scores.word_errors), (33, 330, errors));
        assert_eq!(scores.worst_rows.iter().map(|row| row.row).collect::<Vec<_>>(), [23, 47, 71, 95, 14]);
        assert_eq!((scores.worst_rows[0].id.as_str(), scores.worst_rows[0].text.as_str()), ("id-23", "text 23 ✓"));
    }

    #[test]
    fn parts_without_scores_say_so() {
        let folder = results_folder();
        let (mut results, _) = Folder::open(&job(folder.path()), &provenance(), false).unwrap();
        let mut push = |row: &crate::sink::Row| {
            results.push(row, std::time::Instant::now()).unwrap();
            results.close_part().unwrap();
        };
        push(&ok_row(0));
        push(&heard_row(1));
        let has = |part: usize, column| ClosedPart::open(&part_files(folder.path()).unwrap()[part]).unwrap().has_values(column);
        assert_eq!([has(0, "word_errors"), has(1, "word_errors"), has(0, "text"), has(0, "wer")], [false, true, true, false]);
    }

    fn refused(folder: &Path) -> String {
        let error = anyhow::Error::from(summarize(folder).unwrap_err());
        format!("{error:#}").replace(&*folder.to_string_lossy(), "OUT")
    }

    #[test]
    fn what_is_no_results_folder_is_refused() {
        let folder = results_folder();
        assert_eq!(refused(&folder.path().join("absent")), "OUT is no folder: give the output folder of a run");
        let expected = "OUT has no part-*.parquet: give the output folder of a run, one that has closed a part";
        assert_eq!(refused(folder.path()), expected);
        fs::write(folder.path().join("part-00000.parquet"), "PAR1 but no more").unwrap();
        let error = refused(folder.path());
        assert!(
            error.starts_with("the results cannot be summed up: OUT/part-00000.parquet is damaged, or no Parquet file: "),
            "{error}"
        );
    }

    #[test]
    fn a_damaged_page_names_the_file() {
        let folder = results_folder();
        let (mut results, _) = Folder::open(&job(folder.path()), &provenance(), false).unwrap();
        results.push(&ok_row(0), std::time::Instant::now()).unwrap();
        results.finish(End::Interrupted, Value::Null).unwrap();
        let part = folder.path().join("part-00000.parquet");
        let mut bytes = fs::read(&part).unwrap();
        let footer = bytes.len() - 8 - u32::from_le_bytes(bytes[bytes.len() - 8..bytes.len() - 4].try_into().unwrap()) as usize;
        bytes[4..footer].fill(0xff);
        fs::write(&part, bytes).unwrap();
        let error = refused(folder.path());
        assert!(error.contains("OUT/part-00000.parquet is damaged"), "{error}");
    }
}
