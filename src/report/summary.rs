use std::{collections::BTreeMap, fmt, path::PathBuf};

use serde::Serialize;

use super::{Compared, words};
use crate::sink::FAILED_FILE;

/// What came of a run's rows.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Summary {
    /// The job's name; empty where only the results are known.
    pub job: String,
    pub model: String,
    /// The folder that has the Parquet parts.
    #[serde(serialize_with = "words::path")]
    pub output: PathBuf,
    pub parts: u64,
    pub rows_ok: u64,
    pub rows_failed: u64,
    /// Done by earlier runs, and in none of the other numbers.
    pub rows_resumed: u64,
    /// Rows, by `error_stage`.
    pub failed_by_stage: BTreeMap<String, u64>,
    /// The most frequent sorts of errors: an example, and how many rows.
    pub errors: Vec<(String, u64)>,
    /// Absent where `errors` are all there are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errors_left_off: Option<ErrorsLeftOff>,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    /// Of the run; from results alone, the time in which rows were worked on.
    pub wall_seconds: f64,
    /// Completion tokens of all rows over `wall_seconds`.
    pub tokens_per_second: Option<f64>,
    /// First token since admission; within 0.5 %.
    pub ttft_ms_p50: Option<f64>,
    pub ttft_ms_p95: Option<f64>,
    /// Mean of the ok rows.
    pub mean_ms: StageTimes,
    /// Rows decoded together, mean of the ok rows.
    pub rows_in_batch: Option<f64>,
    /// Ok rows with something in `notes`.
    pub rows_with_notes: u64,
    /// Absent without recordings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audio: Option<Heard>,
    /// Absent without scores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scores: Option<Compared>,
}

/// Errors beyond those that are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ErrorsLeftOff {
    pub kinds: u64,
    pub rows: u64,
    /// No kind came up after so many that no more were told apart.
    pub all_counted: bool,
}

impl ErrorsLeftOff {
    /// `and 3 more kinds (12 rows)`.
    pub fn words(&self) -> String {
        let rows = if self.rows == 1 { "1 row".to_owned() } else { format!("{} rows", words::count(self.rows)) };
        let kinds = words::count(self.kinds);
        match self.kinds {
            _ if !self.all_counted => format!("and {kinds} or more other kinds ({rows})"),
            1 => format!("and 1 more kind ({rows})"),
            _ => format!("and {kinds} more kinds ({rows})"),
        }
    }
}

/// Of the ok rows that have a recording.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Heard {
    pub rows: u64,
    pub audio_seconds: f64,
    /// Seconds heard in a second of the run.
    pub times_real_time: Option<f64>,
}

/// Milliseconds a row spent in each stage.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct StageTimes {
    pub media_ms: f64,
    pub encode_ms: f64,
    pub queue_ms: f64,
    pub prefill_ms: f64,
    pub decode_ms: f64,
    pub total_ms: f64,
}

impl Summary {
    /// The same with the run's own time, which its speed follows.
    #[must_use]
    pub fn over(mut self, wall_seconds: f64) -> Self {
        self.wall_seconds = wall_seconds;
        self.tokens_per_second = (self.rows_ok > 0 && wall_seconds > 0.0).then(|| self.completion_tokens as f64 / wall_seconds);
        if let Some(audio) = &mut self.audio {
            audio.times_real_time = (wall_seconds > 0.0).then(|| audio.audio_seconds / wall_seconds);
        }
        self
    }

    fn rows_words(&self) -> String {
        let mut words = format!("{} ok", words::count(self.rows_ok));
        if self.rows_failed > 0 {
            let stages = self.failed_by_stage.iter().map(|(stage, rows)| format!("{} {stage}", words::count(*rows)));
            words += &format!(" · {} failed ({})", words::count(self.rows_failed), stages.collect::<Vec<_>>().join(", "));
        }
        if self.rows_resumed > 0 {
            words += &format!(" · {} done before", words::count(self.rows_resumed));
        }
        words
    }

    fn tokens_words(&self) -> String {
        let cached =
            if self.cached_tokens == 0 { String::new() } else { format!(" ({} cached)", words::count(self.cached_tokens)) };
        format!("{} prompt{cached} · {} completion", words::count(self.prompt_tokens), words::count(self.completion_tokens))
    }

    fn speed_words(&self, rate: f64) -> String {
        let together = self.rows_in_batch.map_or(String::new(), |rows| format!(" · {rows:.1} rows together"));
        format!("{} tokens/s over {}{together}", words::rate(rate), words::seconds(self.wall_seconds))
    }
}

impl Heard {
    fn words(&self) -> String {
        let rows = if self.rows == 1 { "1 row".into() } else { format!("{} rows", words::count(self.rows)) };
        let times = self.times_real_time.map_or(String::new(), |times| format!(" · {} times real time", words::rate(times)));
        format!("{} in {rows}{times}", words::seconds(self.audio_seconds))
    }
}

impl StageTimes {
    fn words(&self) -> String {
        let stages = [
            ("media", self.media_ms),
            ("encode", self.encode_ms),
            ("queue", self.queue_ms),
            ("prefill", self.prefill_ms),
            ("decode", self.decode_ms),
        ];
        let shown = stages.into_iter().filter(|(stage, ms)| *ms > 0.0 || !["media", "encode"].contains(stage));
        let shown = shown.map(|(stage, ms)| format!("{stage} {}", words::milliseconds(ms)));
        format!("{} = {}", words::milliseconds(self.total_ms), shown.collect::<Vec<_>>().join(" + "))
    }
}

/// A short table for people.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, words: &str| writeln!(f, "  {name:<12} {words}");
        line("rows", &self.rows_words())?;
        if let Some(audio) = &self.audio {
            line("audio", &audio.words())?;
        }
        if let Some(scores) = &self.scores {
            line("scores", &scores.words())?;
        }
        if self.rows_ok > 0 {
            line("tokens", &self.tokens_words())?;
            if let Some(rate) = self.tokens_per_second {
                line("speed", &self.speed_words(rate))?;
            }
            if let (Some(p50), Some(p95)) = (self.ttft_ms_p50, self.ttft_ms_p95) {
                line("first token", &format!("{} median · {} p95", words::milliseconds(p50), words::milliseconds(p95)))?;
            }
            line("a row", &self.mean_ms.words())?;
        }
        match self.rows_with_notes {
            0 => {}
            1 => line("notes", "1 row has something in its column notes")?,
            rows => line("notes", &format!("{} rows have something in their column notes", words::count(rows)))?,
        }
        for (at, row) in self.scores.iter().flat_map(|scores| &scores.worst_rows).enumerate() {
            for (part, words) in row.lines().iter().enumerate() {
                line(if at + part == 0 { "worst rows" } else { "" }, words)?;
            }
        }
        for (at, (error, rows)) in self.errors.iter().enumerate() {
            line(if at == 0 { "errors" } else { "" }, &format!("{} × {error}", words::count(*rows)))?;
        }
        if let Some(left_off) = &self.errors_left_off {
            line("", &left_off.words())?;
        }
        if self.rows_failed > 0 {
            line("failed rows", &self.output.join(FAILED_FILE).display().to_string())?;
        }
        let parts = if self.parts == 1 { "1 part".into() } else { format!("{} parts", words::count(self.parts)) };
        line("results", &format!("{} ({parts})", self.output.join("part-*.parquet").display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_a_short_table() {
        let summary = Summary {
            job: "demo".into(),
            model: "SmolLM2".into(),
            output: "out/demo".into(),
            parts: 2,
            rows_ok: 9_997,
            rows_failed: 3,
            rows_resumed: 4_000,
            failed_by_stage: BTreeMap::from([("manifest".into(), 1), ("prompt".into(), 2)]),
            errors: vec![("prompt: the prompt has 3000 tokens".into(), 2), ("manifest: not JSON".into(), 1)],
            prompt_tokens: 400_000,
            cached_tokens: 12,
            completion_tokens: 112_345,
            ttft_ms_p50: Some(120.4),
            ttft_ms_p95: Some(4_812.0),
            mean_ms: StageTimes { queue_ms: 600.0, prefill_ms: 120.0, decode_ms: 300.0, total_ms: 1020.0, ..StageTimes::default() },
            rows_in_batch: Some(24.06),
            ..Summary::default()
        };
        insta::assert_snapshot!(summary.over(219.3).to_string(), @r"
          rows         9,997 ok · 3 failed (1 manifest, 2 prompt) · 4,000 done before
          tokens       400,000 prompt (12 cached) · 112,345 completion
          speed        512 tokens/s over 3 min 39 s · 24.1 rows together
          first token  120 ms median · 4.8 s p95
          a row        1.0 s = queue 600 ms + prefill 120 ms + decode 300 ms
          errors       2 × prompt: the prompt has 3000 tokens
                       1 × manifest: not JSON
          failed rows  out/demo/failed.jsonl
          results      out/demo/part-*.parquet (2 parts)
        ");
    }

    #[test]
    fn a_summary_of_recordings_tells_speed_and_errors() {
        let worst = |id: &str, word_errors| crate::report::ComparedRow {
            id: id.into(),
            row: 7,
            wer: f64::from(word_errors) / 6.0,
            word_errors,
            reference_words: 6,
            reference: "HE HOPED THERE WOULD BE STEW".into(),
            text: "Thanks for watching!".into(),
        };
        let summary = Summary {
            output: "out/test-clean".into(),
            parts: 1,
            rows_ok: 2_620,
            prompt_tokens: 10_480,
            completion_tokens: 81_000,
            rows_with_notes: 3,
            audio: Some(Heard { rows: 2_620, audio_seconds: 19_452.5, times_real_time: None }),
            scores: Some(Compared {
                rows: 2_620,
                reference_words: 52_576,
                word_errors: 2_213,
                reference_characters: 281_530,
                character_errors: 4_279,
                wer: Some(2_213.0 / 52_576.0),
                cer: Some(4_279.0 / 281_530.0),
                worst_rows: vec![worst("1089-134686-0000", 6), worst("61-70968-0003", 5)],
            }),
            mean_ms: StageTimes { media_ms: 20.0, encode_ms: 200.0, decode_ms: 800.0, total_ms: 1020.0, ..StageTimes::default() },
            ..Summary::default()
        };
        let summary = summary.over(713.0);
        insta::assert_snapshot!(summary.to_string(), @r"
          rows         2,620 ok
          audio        5 h 24 min in 2,620 rows · 27.3 times real time
          scores       WER 4.21% (2,213 errors in 52,576 words) · CER 1.52% · 2,620 rows
          tokens       10,480 prompt · 81,000 completion
          speed        114 tokens/s over 11 min 53 s
          a row        1.0 s = media 20 ms + encode 200 ms + queue 0 ms + prefill 0 ms + decode 800 ms
          notes        3 rows have something in their column notes
          worst rows   1089-134686-0000: WER 100.00% (6 errors in 6 words)
                         reference  HE HOPED THERE WOULD BE STEW
                         text       Thanks for watching!
                       61-70968-0003: WER 83.33% (5 errors in 6 words)
                         reference  HE HOPED THERE WOULD BE STEW
                         text       Thanks for watching!
          results      out/test-clean/part-*.parquet (1 part)
        ");
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(json["audio"]["audio_seconds"], 19_452.5);
        assert_eq!(json["scores"]["worst_rows"][1]["id"], "61-70968-0003");
        let text = serde_json::to_value(Summary::default()).unwrap();
        assert!(text.get("audio").is_none() && text.get("scores").is_none(), "text has neither");
    }

    #[test]
    fn a_summary_of_nothing_is_no_nonsense() {
        let summary = Summary { output: "out".into(), ..Summary::default() };
        insta::assert_snapshot!(summary.over(0.0).to_string(), @r"
          rows         0 ok
          results      out/part-*.parquet (0 parts)
        ");
    }
}
