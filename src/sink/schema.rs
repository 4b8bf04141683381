//! The columns of a part, in order, and how they are encoded.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Fields, Schema, TimeUnit};
use parquet::{
    basic::{Compression, Encoding, ZstdLevel},
    file::{
        metadata::KeyValue,
        properties::{EnabledStatistics, WriterProperties, WriterPropertiesBuilder},
    },
    schema::types::ColumnPath,
};

use super::{
    SinkError,
    heard::{segment_field, segment_paths},
    kept::KeptType,
    logprobs::{logprob_field, logprob_paths},
};
use crate::job::Results;

/// Raised when a column changes its name, type or meaning.
pub const SCHEMA_VERSION: u32 = 3;

/// Rows of a row group, the size that DuckDB reads best.
const ROW_GROUP_ROWS_MAX: usize = 122_880;

/// Columns of every part before the kept ones, `token_ids` left out unless asked for.
const COLUMNS: [(&str, Kind, bool); 37] = [
    ("id", Kind::Text, false),
    ("row", Kind::Number, false),
    ("source", Kind::Text, false),
    ("input_hash", Kind::Number, false),
    ("status", Kind::Word, false),
    ("error_stage", Kind::Word, true),
    ("error", Kind::Word, true),
    ("text", Kind::Text, true),
    ("finish_reason", Kind::Word, true),
    ("language", Kind::Word, true),
    ("segments", Kind::Segments, true),
    ("notes", Kind::Notes, true),
    ("prompt_tokens", Kind::Count, false),
    ("image_tokens", Kind::Count, false),
    ("audio_tokens", Kind::Count, false),
    ("cached_tokens", Kind::Count, false),
    ("completion_tokens", Kind::Count, false),
    ("audio_seconds", Kind::Float, true),
    ("media_ms", Kind::Float, true),
    ("encode_ms", Kind::Float, true),
    ("queue_ms", Kind::Float, true),
    ("prefill_ms", Kind::Float, true),
    ("ttft_ms", Kind::Float, true),
    ("decode_ms", Kind::Float, true),
    ("total_ms", Kind::Float, true),
    ("tokens_per_second", Kind::Float, true),
    ("rows_in_batch", Kind::Float, true),
    ("started_at", Kind::Instant, true),
    (TOKEN_IDS, Kind::TokenIds, true),
    ("logprobs", Kind::Logprobs, true),
    ("reference", Kind::Text, true),
    ("wer", Kind::Float, true),
    ("cer", Kind::Float, true),
    ("reference_words", Kind::Count, true),
    ("word_errors", Kind::Count, true),
    ("reference_characters", Kind::Count, true),
    (LAST, Kind::Count, true),
];
/// Behind it stand the kept columns, and nothing else.
pub(super) const LAST: &str = "character_errors";
const TOKEN_IDS: &str = "token_ids";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Strings that are nearly all different.
    Text,
    /// Strings that repeat.
    Word,
    Number,
    Count,
    Float,
    /// Microseconds since the Unix epoch, UTC.
    Instant,
    TokenIds,
    Segments,
    Notes,
    Logprobs,
}

/// Which columns a run's parts have; the same for all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    pub token_ids: bool,
    pub kept: Vec<String>,
}

impl Layout {
    pub fn new(results: &Results) -> Result<Self, SinkError> {
        let mut seen = Vec::new();
        for name in &results.keep_columns {
            // DuckDB and others take names that differ in case alone for the same column.
            let lower = name.to_lowercase();
            let refuse = |reason| Err(SinkError::KeptColumn { name: name.clone(), reason });
            if COLUMNS.iter().any(|(own, ..)| *own == lower) {
                return refuse("which is a column that the results have anyway: leave it out, or rename it in the manifest");
            }
            if seen.contains(&lower) {
                return refuse("which it names before (upper and lower case count as the same): leave one out");
            }
            seen.push(lower);
        }
        Ok(Layout { token_ids: results.token_ids, kept: results.keep_columns.clone() })
    }

    pub fn schema(&self, kept: &[KeptType]) -> Arc<Schema> {
        let own = COLUMNS.iter().filter(|(_, kind, _)| *kind != Kind::TokenIds || self.token_ids);
        let own = own.map(|&(name, kind, nullable)| Field::new(name, kind.data_type(), nullable));
        let kept = self.kept.iter().zip(kept).map(|(name, kind)| Field::new(name, kind.data_type(), true));
        Arc::new(Schema::new(own.chain(kept).collect::<Fields>()))
    }
}

impl Kind {
    fn data_type(self) -> DataType {
        match self {
            Kind::Text | Kind::Word => DataType::Utf8,
            Kind::Number => DataType::UInt64,
            Kind::Count => DataType::UInt32,
            Kind::Float => DataType::Float64,
            Kind::Instant => DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())),
            Kind::TokenIds => DataType::List(token_field()),
            Kind::Segments => DataType::List(segment_field()),
            Kind::Notes => DataType::List(note_field()),
            Kind::Logprobs => DataType::List(logprob_field()),
        }
    }
}

/// The field of a `token_ids` list's values.
pub(super) fn token_field() -> Arc<Field> {
    Arc::new(Field::new_list_field(DataType::UInt32, false))
}

/// The field of a `notes` list's values.
pub(super) fn note_field() -> Arc<Field> {
    Arc::new(Field::new_list_field(DataType::Utf8, false))
}

/// zstd throughout; dictionaries only where values repeat, as they cost time and memory where they do not.
pub(super) fn writer_properties(metadata: Vec<KeyValue>) -> WriterProperties {
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_max_row_group_row_count(Some(ROW_GROUP_ROWS_MAX))
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_key_value_metadata(Some(metadata));
    for (name, kind, _) in COLUMNS {
        let path = ColumnPath::from(name);
        properties = match kind {
            Kind::Text | Kind::Float => properties.set_column_dictionary_enabled(path, false),
            Kind::Number | Kind::Instant => properties
                .set_column_dictionary_enabled(path.clone(), false)
                .set_column_encoding(path, Encoding::DELTA_BINARY_PACKED),
            Kind::Segments => without_dictionary(properties, segment_paths()),
            Kind::Logprobs => without_dictionary(properties, logprob_paths()),
            Kind::Word | Kind::Count | Kind::TokenIds | Kind::Notes => properties,
        };
    }
    properties.build()
}

fn without_dictionary(properties: WriterPropertiesBuilder, paths: impl Iterator<Item = Vec<String>>) -> WriterPropertiesBuilder {
    paths.fold(properties, |properties, path| properties.set_column_dictionary_enabled(ColumnPath::new(path), false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(keep: &[&str]) -> Results {
        let keep_columns = keep.iter().map(|name| name.to_string()).collect();
        Results { token_ids: false, keep_columns, rows_per_part: 1, seconds_per_part: 1 }
    }

    #[test]
    fn a_kept_column_may_not_take_the_place_of_another() {
        for keep in [&["speaker", "text"][..], &["Row"], &["logprobs"], &["token_ids"], &["speaker", "Speaker"]] {
            let error = Layout::new(&results(keep)).unwrap_err().to_string();
            assert!(error.contains(&format!("`{}`", keep.last().unwrap())), "{error}");
        }
        assert_eq!(Layout::new(&results(&["speaker", "größe"])).unwrap().kept, ["speaker", "größe"]);
    }

    #[test]
    fn kept_columns_come_last() {
        for token_ids in [false, true] {
            let layout = Layout { token_ids, kept: vec!["speaker".into()] };
            let schema = layout.schema(&[KeptType::Integer]);
            assert_eq!(schema.fields().last().unwrap().name(), "speaker");
            assert_eq!(schema.fields().len(), 37 + usize::from(token_ids));
            assert_eq!(schema.field_with_name("token_ids").is_ok(), token_ids);
        }
    }
}
