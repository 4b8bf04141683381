//! The column of log-probabilities: a list of what was sampled, and in each the list of what was likeliest.

use std::sync::Arc;

use arrow::{
    array::{ArrayRef, Float32Builder, ListArray, StructArray, UInt32Builder},
    buffer::{NullBuffer, OffsetBuffer},
    datatypes::{DataType, Field, Fields},
    error::ArrowError,
};

use crate::engine::{Logprobs, TokenLogprob};

const TOKEN_ID: &str = "token_id";
const LOGPROB: &str = "logprob";
const TOP: &str = "top";

/// Those of a token and its log-probability; neither is ever null.
fn pair_fields() -> [Field; 2] {
    [Field::new(TOKEN_ID, DataType::UInt32, false), Field::new(LOGPROB, DataType::Float32, false)]
}

/// The field of a `top` list's values.
fn top_field() -> Arc<Field> {
    Arc::new(Field::new_list_field(DataType::Struct(Fields::from_iter(pair_fields())), false))
}

fn fields() -> Fields {
    pair_fields().into_iter().chain([Field::new(TOP, DataType::List(top_field()), false)]).collect()
}

/// The field of a `logprobs` list's values.
pub(super) fn logprob_field() -> Arc<Field> {
    Arc::new(Field::new_list_field(DataType::Struct(fields()), false))
}

/// Paths in a part of what hardly repeats.
pub(super) fn logprob_paths() -> impl Iterator<Item = Vec<String>> {
    let paths: [&[&str]; 2] = [&["logprobs", "list", "item", LOGPROB], &["logprobs", "list", "item", TOP, "list", "item", LOGPROB]];
    paths.into_iter().map(|path| path.iter().map(|&name| name.to_owned()).collect())
}

/// Tokens and their log-probabilities, each a column of its own.
#[derive(Debug, Default)]
struct Pairs {
    token_id: UInt32Builder,
    logprob: Float32Builder,
}

impl Pairs {
    fn push(&mut self, pairs: &[TokenLogprob]) {
        for pair in pairs {
            self.token_id.append_value(pair.token_id);
            self.logprob.append_value(pair.logprob);
        }
    }

    fn finish(&mut self) -> [ArrayRef; 2] {
        [Arc::new(self.token_id.finish()), Arc::new(self.logprob.finish())]
    }
}

#[derive(Debug, Default)]
pub(super) struct LogprobsColumn {
    /// Tokens of each row, and none for null.
    rows: Vec<Option<usize>>,
    sampled: Pairs,
    /// Likeliest tokens in the place of each.
    top_k: Vec<usize>,
    top: Pairs,
}

impl LogprobsColumn {
    /// Adds a row, and returns about the bytes it takes.
    pub fn push(&mut self, logprobs: Option<&Logprobs>) -> usize {
        self.rows.push(logprobs.map(|logprobs| logprobs.sampled.len()));
        let Some(logprobs) = logprobs else { return 0 };
        self.sampled.push(&logprobs.sampled);
        self.top_k.extend(std::iter::repeat_n(logprobs.top_k, logprobs.sampled.len()));
        self.top.push(&logprobs.top);
        logprobs.bytes()
    }

    pub fn finish(&mut self) -> Result<ListArray, ArrowError> {
        let top = StructArray::try_new(Fields::from_iter(pair_fields()), self.top.finish().into(), None)?;
        let offsets = OffsetBuffer::from_lengths(std::mem::take(&mut self.top_k));
        let top = ListArray::try_new(top_field(), offsets, Arc::new(top), None)?;
        let [token_id, logprob] = self.sampled.finish();
        let sampled = StructArray::try_new(fields(), vec![token_id, logprob, Arc::new(top)], None)?;
        let rows = std::mem::take(&mut self.rows);
        let offsets = OffsetBuffer::from_lengths(rows.iter().map(|row| row.unwrap_or(0)));
        let nulls = NullBuffer::from_iter(rows.iter().map(Option::is_some));
        ListArray::try_new(logprob_field(), offsets, Arc::new(sampled), Some(nulls))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::Value;

    use super::*;
    use crate::sink::{End, Folder, Outcome, Row, fixture::*, folder::Limits};

    fn with(row: u64, tokens: u32, top_k: u32) -> Row {
        let mut row = ok_row(row);
        let pair = |token_id: u32| TokenLogprob { token_id, logprob: -0.5 * (1 + token_id) as f32 };
        let Outcome::Ok(completion) = &mut row.outcome else { unreachable!() };
        completion.logprobs = Some(Logprobs {
            sampled: (0..tokens).map(pair).collect(),
            top_k: top_k as usize,
            top: (0..tokens).flat_map(|token| (0..top_k).map(move |rank| pair(10 * token + rank))).collect(),
        });
        row
    }

    #[test]
    fn log_probabilities_read_back() {
        let folder = results_folder();
        let rows = [ok_row(0), with(1, 2, 2), with(2, 0, 3), failed_row(3), with(4, 1, 0), with(5, 2, 1)];
        let batch = written(&job(folder.path()), &rows);
        let of = |at| shown(&batch, at).into_iter().find(|one| one.starts_with("logprobs=")).unwrap();
        insta::assert_snapshot!((0..6).map(of).collect::<Vec<_>>().join("\n"), @r"
        logprobs=-
        logprobs=[{token_id: 0, logprob: -0.5, top: [{token_id: 0, logprob: -0.5}, {token_id: 1, logprob: -1.0}]}, {token_id: 1, logprob: -1.0, top: [{token_id: 10, logprob: -5.5}, {token_id: 11, logprob: -6.0}]}]
        logprobs=[]
        logprobs=-
        logprobs=[{token_id: 0, logprob: -0.5, top: []}]
        logprobs=[{token_id: 0, logprob: -0.5, top: [{token_id: 0, logprob: -0.5}]}, {token_id: 1, logprob: -1.0, top: [{token_id: 10, logprob: -5.5}]}]
        ");
    }

    #[test]
    fn they_count_in_a_rows_size_and_in_a_parts() {
        let limits = Limits { rows: 1000, age: Duration::from_secs(3600), bytes: 50_000, row_bytes: 100_000 };
        let folder = results_folder();
        let (mut results, _) = Folder::open_with(&job(folder.path()), &provenance(), false, limits).unwrap();
        // 8 bytes a token and its log-probability: 43,200 bytes, and 100,800.
        assert_eq!(results.push(&with(0, 900, 5), Instant::now()).unwrap().map(|part| part.rows), None);
        assert_eq!(results.push(&with(1, 900, 5), Instant::now()).unwrap().map(|part| part.rows), Some(2));
        results.push(&with(2, 2100, 5), Instant::now()).unwrap();
        results.finish(End::Complete { rows: 3 }, Value::Null).unwrap();
        assert_eq!(failed_lines(folder.path()).len(), 1);
    }
}
