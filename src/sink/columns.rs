//! The rows of the part in hand, already as columns.

use std::sync::Arc;

use arrow::{
    array::{
        ArrayRef, Float64Builder, ListBuilder, RecordBatch, StringBuilder, TimestampMicrosecondBuilder, UInt32Builder,
        UInt64Builder,
    },
    error::ArrowError,
};

use super::{
    Completion, Outcome, Row,
    heard::{HeardColumns, ScoreColumns},
    kept::{KeptColumn, KeptType, widen},
    logprobs::LogprobsColumn,
    schema::{Layout, note_field, token_field},
};
use crate::schedule::FinishReason;

/// About what a row's numbers take.
const NUMBERS_BYTES: usize = 240;
/// About what a note takes beside its text.
const NOTE_BYTES: usize = 8;

#[derive(Debug)]
pub(super) struct Columns {
    layout: Layout,
    rows: usize,
    bytes: usize,
    id: StringBuilder,
    row: UInt64Builder,
    source: StringBuilder,
    input_hash: UInt64Builder,
    status: StringBuilder,
    error_stage: StringBuilder,
    error: StringBuilder,
    text: StringBuilder,
    finish_reason: StringBuilder,
    heard: HeardColumns,
    notes: ListBuilder<StringBuilder>,
    prompt_tokens: UInt32Builder,
    image_tokens: UInt32Builder,
    cached_tokens: UInt32Builder,
    completion_tokens: UInt32Builder,
    media_ms: Float64Builder,
    encode_ms: Float64Builder,
    queue_ms: Float64Builder,
    prefill_ms: Float64Builder,
    ttft_ms: Float64Builder,
    decode_ms: Float64Builder,
    total_ms: Float64Builder,
    tokens_per_second: Float64Builder,
    rows_in_batch: Float64Builder,
    started_at: TimestampMicrosecondBuilder,
    token_ids: ListBuilder<UInt32Builder>,
    logprobs: LogprobsColumn,
    reference: StringBuilder,
    score: ScoreColumns,
    kept: Vec<KeptColumn>,
}

impl Columns {
    pub fn new(layout: Layout) -> Self {
        let kept = layout.kept.iter().map(|_| KeptColumn::new()).collect();
        Columns {
            layout,
            rows: 0,
            bytes: 0,
            id: StringBuilder::new(),
            row: UInt64Builder::new(),
            source: StringBuilder::new(),
            input_hash: UInt64Builder::new(),
            status: StringBuilder::new(),
            error_stage: StringBuilder::new(),
            error: StringBuilder::new(),
            text: StringBuilder::new(),
            finish_reason: StringBuilder::new(),
            heard: HeardColumns::default(),
            notes: ListBuilder::new(StringBuilder::new()).with_field(note_field()),
            prompt_tokens: UInt32Builder::new(),
            image_tokens: UInt32Builder::new(),
            cached_tokens: UInt32Builder::new(),
            completion_tokens: UInt32Builder::new(),
            media_ms: Float64Builder::new(),
            encode_ms: Float64Builder::new(),
            queue_ms: Float64Builder::new(),
            prefill_ms: Float64Builder::new(),
            ttft_ms: Float64Builder::new(),
            decode_ms: Float64Builder::new(),
            total_ms: Float64Builder::new(),
            tokens_per_second: Float64Builder::new(),
            rows_in_batch: Float64Builder::new(),
            started_at: TimestampMicrosecondBuilder::new().with_timezone("UTC"),
            token_ids: ListBuilder::new(UInt32Builder::new()).with_field(token_field()),
            logprobs: LogprobsColumn::default(),
            reference: StringBuilder::new(),
            score: ScoreColumns::default(),
            kept,
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// About how much memory the rows take.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The types that the kept columns' values in hand need.
    pub fn kept_types(&self) -> impl Iterator<Item = KeptType> {
        self.kept.iter().map(KeptColumn::kind)
    }

    pub fn push(&mut self, row: &Row) -> Result<(), ArrowError> {
        self.id.append_value(&row.id);
        self.row.append_value(row.row);
        self.source.append_value(&row.source);
        self.input_hash.append_value(row.input_hash);
        self.reference.append_option(row.reference.as_deref());
        self.bytes += NUMBERS_BYTES + row.id.len() + row.source.len() + row.reference.as_ref().map_or(0, String::len);
        match &row.outcome {
            Outcome::Ok(completion) => {
                self.push_completion(completion);
                self.score.push(row.score.as_ref());
            }
            Outcome::Failed { stage, error } => {
                self.push_failure(stage.name(), error);
                self.score.push(None);
            }
        }
        for (name, column) in self.layout.kept.iter().zip(&mut self.kept) {
            self.bytes += column.push(row.columns.get(name))?;
        }
        self.rows += 1;
        Ok(())
    }

    fn push_completion(&mut self, completion: &Completion) {
        let timing = &completion.timing;
        self.status.append_value("ok");
        self.error_stage.append_null();
        self.error.append_null();
        self.text.append_value(&completion.text);
        self.finish_reason.append_value(match completion.finish_reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        });
        self.bytes += self.heard.push(completion.heard.as_ref());
        for note in &completion.notes {
            self.notes.values().append_value(note);
        }
        self.notes.append(!completion.notes.is_empty());
        self.bytes += notes_bytes(&completion.notes);
        self.prompt_tokens.append_value(completion.prompt_tokens);
        self.image_tokens.append_value(completion.image_tokens);
        self.cached_tokens.append_value(completion.cached_tokens);
        self.completion_tokens.append_value(completion.completion_tokens);
        self.media_ms.append_value(timing.media_ms);
        self.encode_ms.append_value(timing.encode_ms);
        self.queue_ms.append_value(timing.queue_ms);
        self.prefill_ms.append_value(timing.prefill_ms);
        self.ttft_ms.append_value(timing.ttft_ms);
        self.decode_ms.append_value(timing.decode_ms);
        self.total_ms.append_value(timing.total_ms);
        let after_first = f64::from(completion.completion_tokens.saturating_sub(1));
        let measurable = after_first > 0.0 && timing.decode_ms > 0.0;
        self.tokens_per_second.append_option(measurable.then(|| after_first * 1000.0 / timing.decode_ms));
        self.rows_in_batch.append_value(timing.rows_in_batch);
        self.started_at.append_value(timing.started_at_us);
        if self.layout.token_ids {
            self.token_ids.values().append_slice(&completion.token_ids);
            self.token_ids.append(true);
            self.bytes += 4 * completion.token_ids.len();
        }
        self.bytes += self.logprobs.push(completion.logprobs.as_ref());
        self.bytes += completion.text.len();
    }

    fn push_failure(&mut self, stage: &str, error: &str) {
        self.status.append_value("failed");
        self.error_stage.append_value(stage);
        self.error.append_value(error);
        self.text.append_null();
        self.finish_reason.append_null();
        self.heard.push(None);
        self.notes.append_null();
        for counts in [&mut self.prompt_tokens, &mut self.image_tokens, &mut self.cached_tokens, &mut self.completion_tokens] {
            counts.append_value(0);
        }
        for times in [
            &mut self.media_ms,
            &mut self.encode_ms,
            &mut self.queue_ms,
            &mut self.prefill_ms,
            &mut self.ttft_ms,
            &mut self.decode_ms,
            &mut self.total_ms,
            &mut self.tokens_per_second,
            &mut self.rows_in_batch,
        ] {
            times.append_null();
        }
        self.started_at.append_null();
        if self.layout.token_ids {
            self.token_ids.append_null();
        }
        self.logprobs.push(None);
        self.bytes += error.len();
    }

    /// The rows so far with the kept columns as `kept` says, which their values must fit; none are left in hand.
    pub fn take(&mut self, kept: &[KeptType]) -> Result<RecordBatch, ArrowError> {
        (self.rows, self.bytes) = (0, 0);
        let mut arrays: Vec<ArrayRef> = vec![
            Arc::new(self.id.finish()),
            Arc::new(self.row.finish()),
            Arc::new(self.source.finish()),
            Arc::new(self.input_hash.finish()),
            Arc::new(self.status.finish()),
            Arc::new(self.error_stage.finish()),
            Arc::new(self.error.finish()),
            Arc::new(self.text.finish()),
            Arc::new(self.finish_reason.finish()),
            Arc::new(self.heard.language.finish()),
            Arc::new(self.heard.segments.finish()?),
            Arc::new(self.notes.finish()),
            Arc::new(self.prompt_tokens.finish()),
            Arc::new(self.image_tokens.finish()),
            Arc::new(self.heard.audio_tokens.finish()),
            Arc::new(self.cached_tokens.finish()),
            Arc::new(self.completion_tokens.finish()),
            Arc::new(self.heard.audio_seconds.finish()),
            Arc::new(self.media_ms.finish()),
            Arc::new(self.encode_ms.finish()),
            Arc::new(self.queue_ms.finish()),
            Arc::new(self.prefill_ms.finish()),
            Arc::new(self.ttft_ms.finish()),
            Arc::new(self.decode_ms.finish()),
            Arc::new(self.total_ms.finish()),
            Arc::new(self.tokens_per_second.finish()),
            Arc::new(self.rows_in_batch.finish()),
            Arc::new(self.started_at.finish()),
        ];
        if self.layout.token_ids {
            arrays.push(Arc::new(self.token_ids.finish()));
        }
        arrays.push(Arc::new(self.logprobs.finish()?));
        arrays.push(Arc::new(self.reference.finish()));
        arrays.extend(self.score.finish());
        for (column, kind) in self.kept.iter_mut().zip(kept) {
            arrays.push(widen(&column.take(), &kind.data_type())?);
            *column = KeptColumn::new();
        }
        RecordBatch::try_new(self.layout.schema(kept), arrays)
    }
}

/// About what a row's notes take in memory.
pub(super) fn notes_bytes(notes: &[String]) -> usize {
    notes.iter().map(|note| NOTE_BYTES + note.len()).sum()
}
