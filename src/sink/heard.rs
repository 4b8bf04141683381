//! The columns on what was heard, and how it compares with the reference.

use std::sync::Arc;

use arrow::{
    array::{ArrayRef, Float32Builder, Float64Builder, ListArray, StringBuilder, StructArray, UInt32Builder},
    buffer::{NullBuffer, OffsetBuffer},
    datatypes::{DataType, Field, Fields},
    error::ArrowError,
};

use super::{Heard, Segment};
use crate::score::Score;

/// About what a segment's numbers take.
const SEGMENT_BYTES: usize = 40;

/// The fields of a segment in the results; none of them is ever null.
const SEGMENT_FIELDS: [(&str, DataType); 7] = [
    ("start", DataType::Float64),
    ("end", DataType::Float64),
    ("text", DataType::Utf8),
    ("avg_logprob", DataType::Float32),
    ("compression_ratio", DataType::Float32),
    ("no_speech_prob", DataType::Float32),
    ("temperature", DataType::Float32),
];

fn segment_fields() -> Fields {
    SEGMENT_FIELDS.map(|(name, kind)| Field::new(name, kind, false)).into_iter().collect()
}

/// The field of a `segments` list's values.
pub(super) fn segment_field() -> Arc<Field> {
    Arc::new(Field::new_list_field(DataType::Struct(segment_fields()), false))
}

/// Paths of a segment's fields in a part, whose values hardly repeat.
pub(super) fn segment_paths() -> impl Iterator<Item = Vec<String>> {
    SEGMENT_FIELDS.iter().map(|(name, _)| ["segments", "list", "item", name].map(str::to_owned).to_vec())
}

/// About what segments take in memory.
pub(super) fn segments_bytes(segments: &[Segment]) -> usize {
    segments.iter().map(|segment| SEGMENT_BYTES + segment.text.len()).sum()
}

#[derive(Debug, Default)]
pub(super) struct HeardColumns {
    pub audio_tokens: UInt32Builder,
    pub audio_seconds: Float64Builder,
    pub language: StringBuilder,
    pub segments: SegmentsColumn,
}

impl HeardColumns {
    /// Adds a row, and returns the bytes it takes beside its numbers.
    pub fn push(&mut self, heard: Option<&Heard>) -> usize {
        self.audio_tokens.append_value(heard.map_or(0, |heard| heard.audio_tokens));
        self.audio_seconds.append_option(heard.map(|heard| heard.audio_seconds));
        let language = heard.and_then(|heard| heard.language.as_deref());
        self.language.append_option(language);
        self.segments.push(heard.map(|heard| &*heard.segments));
        language.map_or(0, str::len) + heard.map_or(0, |heard| segments_bytes(&heard.segments))
    }
}

/// Lists of segments, each field a column of its own.
#[derive(Debug, Default)]
pub(super) struct SegmentsColumn {
    /// Segments of each row, and none for null.
    rows: Vec<Option<usize>>,
    start: Float64Builder,
    end: Float64Builder,
    text: StringBuilder,
    avg_logprob: Float32Builder,
    compression_ratio: Float32Builder,
    no_speech_prob: Float32Builder,
    temperature: Float32Builder,
}

impl SegmentsColumn {
    fn push(&mut self, segments: Option<&[Segment]>) {
        self.rows.push(segments.map(<[_]>::len));
        for segment in segments.into_iter().flatten() {
            self.start.append_value(segment.start);
            self.end.append_value(segment.end);
            self.text.append_value(&segment.text);
            self.avg_logprob.append_value(segment.avg_logprob);
            self.compression_ratio.append_value(segment.compression_ratio);
            self.no_speech_prob.append_value(segment.no_speech_prob);
            self.temperature.append_value(segment.temperature);
        }
    }

    pub fn finish(&mut self) -> Result<ListArray, ArrowError> {
        let rows = std::mem::take(&mut self.rows);
        let values: Vec<ArrayRef> = vec![
            Arc::new(self.start.finish()),
            Arc::new(self.end.finish()),
            Arc::new(self.text.finish()),
            Arc::new(self.avg_logprob.finish()),
            Arc::new(self.compression_ratio.finish()),
            Arc::new(self.no_speech_prob.finish()),
            Arc::new(self.temperature.finish()),
        ];
        let values = StructArray::try_new(segment_fields(), values, None)?;
        let offsets = OffsetBuffer::from_lengths(rows.iter().map(|row| row.unwrap_or(0)));
        let nulls = NullBuffer::from_iter(rows.iter().map(Option::is_some));
        ListArray::try_new(segment_field(), offsets, Arc::new(values), Some(nulls))
    }
}

#[derive(Debug, Default)]
pub(super) struct ScoreColumns {
    wer: Float64Builder,
    cer: Float64Builder,
    /// In the order of the columns: words, word errors, characters, character errors.
    counts: [UInt32Builder; 4],
}

impl ScoreColumns {
    pub fn push(&mut self, score: Option<&Score>) {
        self.wer.append_option(score.and_then(Score::wer));
        self.cer.append_option(score.and_then(Score::cer));
        let counts = score.map(|score| [score.words, score.word_errors, score.characters, score.character_errors]);
        for (at, column) in self.counts.iter_mut().enumerate() {
            column.append_option(counts.map(|counts| counts[at]));
        }
    }

    pub fn finish(&mut self) -> [ArrayRef; 6] {
        let [words, word_errors, characters, character_errors] = self.counts.each_mut().map(|column| Arc::new(column.finish()));
        [Arc::new(self.wer.finish()), Arc::new(self.cer.finish()), words, word_errors, characters, character_errors]
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::Value;

    use super::*;
    use crate::sink::{End, Folder, Outcome, fixture::*, folder::Limits};

    fn limits() -> Limits {
        Limits { rows: 4, age: Duration::from_secs(3600), bytes: 1 << 20, row_bytes: 1 << 20 }
    }

    #[test]
    fn what_was_heard_reads_back() {
        let folder = results_folder();
        let mut silent = heard_row(2);
        let Outcome::Ok(completion) = &mut silent.outcome else { unreachable!() };
        completion.notes.clear();
        let heard = completion.heard.as_mut().unwrap();
        (heard.language, heard.segments) = (None, Vec::new());
        silent.score = Some(Score { words: 0, word_errors: 2, characters: 0, character_errors: 9 });
        let mut failed = failed_row(4);
        failed.score = Some(Score::default());
        let batch = written(&job(folder.path()), &[ok_row(0), heard_row(1), silent, heard_row(3), failed]);
        let heard = |at| {
            let names = ["language", "segments", "notes", "audio_tokens", "audio_seconds", "media_ms", "encode_ms", "wer", "cer"];
            let counts = ["reference_words", "word_errors", "reference_characters", "character_errors"];
            let wanted = |shown: &String| [&names[..], &counts].concat().contains(&shown.split('=').next().unwrap());
            shown(&batch, at).into_iter().filter(wanted).collect::<Vec<_>>().join("\n")
        };
        insta::assert_snapshot!(heard(1), @r"
        language=en
        segments=[{start: 0.0, end: 2.5, text:  Hello ✓, avg_logprob: -0.25, compression_ratio: 1.5, no_speech_prob: 0.125, temperature: 0.0}, {start: 4.5, end: 7.0, text:  there., avg_logprob: -0.25, compression_ratio: 1.5, no_speech_prob: 0.125, temperature: 0.0}]
        notes=[the recording ends early, the left channel was taken]
        audio_tokens=1500
        audio_seconds=8.5
        media_ms=20.0
        encode_ms=30.0
        wer=0.2
        cer=0.06
        reference_words=10
        word_errors=2
        reference_characters=50
        character_errors=3
        ");
        insta::assert_snapshot!(heard(2), @r"
        language=-
        segments=[]
        notes=-
        audio_tokens=1500
        audio_seconds=9.5
        media_ms=20.0
        encode_ms=30.0
        wer=-
        cer=-
        reference_words=0
        word_errors=2
        reference_characters=0
        character_errors=9
        ");
        assert_eq!(heard(3).matches("avg_logprob").count(), 2, "the list of a later row is its own");
        for (at, audio_tokens, ms) in [(0, "0", "0.0"), (4, "0", "-")] {
            let nothing = format!("audio_tokens={audio_tokens} audio_seconds=- media_ms={ms} encode_ms={ms}");
            let scores = "wer=- cer=- reference_words=- word_errors=- reference_characters=- character_errors=-";
            assert_eq!(heard(at).replace('\n', " "), format!("language=- segments=- notes=- {nothing} {scores}"));
        }
    }

    #[test]
    fn soft_tokens_of_images_and_recordings_read_back() {
        let folder = results_folder();
        let mut seen = ok_row(0);
        let Outcome::Ok(completion) = &mut seen.outcome else { unreachable!() };
        completion.image_tokens = 560;
        completion.heard = Some(Heard { audio_seconds: 30.0, audio_tokens: 750, language: None, segments: Vec::new() });
        let batch = written(&job(folder.path()), &[seen, ok_row(1), failed_row(2)]);
        let wanted = ["image_tokens=", "audio_tokens=", "audio_seconds=", "language=", "segments="];
        let of = |at| {
            let shown = shown(&batch, at);
            shown.into_iter().filter(|one| wanted.iter().any(|name| one.starts_with(name))).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of(0), "language=- segments=[] image_tokens=560 audio_tokens=750 audio_seconds=30.0");
        for at in [1, 2] {
            assert_eq!(of(at), "language=- segments=- image_tokens=0 audio_tokens=0 audio_seconds=-");
        }
    }

    #[test]
    fn segments_and_notes_count_in_a_rows_size() {
        let limits = Limits { row_bytes: 5000, ..limits() };
        for place in ["segments", "notes"] {
            let folder = results_folder();
            let (mut results, _) = Folder::open_with(&job(folder.path()), &provenance(), false, limits).unwrap();
            let mut row = heard_row(0);
            let Outcome::Ok(completion) = &mut row.outcome else { unreachable!() };
            if place == "notes" {
                completion.notes = vec![String::new(); 700];
            } else {
                let segments = &mut completion.heard.as_mut().unwrap().segments;
                *segments = vec![segments[0].clone(); 110];
            }
            results.push(&row, Instant::now()).unwrap();
            results.push(&heard_row(1), Instant::now()).unwrap();
            results.finish(End::Complete { rows: 2 }, Value::Null).unwrap();
            assert_eq!(failed_lines(folder.path()).len(), 1, "{place}");
        }
    }

    #[test]
    fn segments_count_in_a_parts_size() {
        let folder = results_folder();
        let limits = Limits { rows: 1000, bytes: 50_000, ..limits() };
        let (mut results, _) = Folder::open_with(&job(folder.path()), &provenance(), false, limits).unwrap();
        let mut row = heard_row(0);
        let Outcome::Ok(completion) = &mut row.outcome else { unreachable!() };
        let segments = &mut completion.heard.as_mut().unwrap().segments;
        *segments = vec![segments[0].clone(); 700];
        assert_eq!(results.push(&row, Instant::now()).unwrap().map(|part| part.rows), None);
        assert_eq!(results.push(&heard_row(1), Instant::now()).unwrap().map(|part| part.rows), None);
        row.row = 2;
        assert_eq!(results.push(&row, Instant::now()).unwrap().map(|part| part.rows), Some(3));
    }
}
