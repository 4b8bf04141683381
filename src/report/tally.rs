//! Counts rows into a summary.

use std::collections::{BTreeMap, HashMap};

use super::{ErrorsLeftOff, Heard, StageTimes, Summary, Texts, compared::Comparison, spread::Spread, words};
use crate::{
    score::Score,
    sink::{Completion, Outcome, Row},
};

/// Sorts of errors told apart; rows beyond count in no sort.
const ERRORS_MAX: usize = 1000;
const ERRORS_SHOWN: usize = 5;
/// Characters of an error that tell its sort.
const ERROR_CHARS: usize = 200;
/// Rows that begin within this of the last one's end count as one stretch of work.
const PAUSE_US: i64 = 1_000_000;
const STRETCHES_MAX: usize = 100_000;

/// What a summary wants of an ok row.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Measured {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    pub media_ms: f64,
    pub encode_ms: f64,
    pub queue_ms: f64,
    pub prefill_ms: f64,
    pub ttft_ms: f64,
    pub decode_ms: f64,
    pub total_ms: f64,
    pub rows_in_batch: f64,
    /// Microseconds since the Unix epoch, at admission.
    pub started_at_us: i64,
    /// None without a recording.
    pub audio_seconds: Option<f64>,
    pub has_notes: bool,
}

impl From<&Completion> for Measured {
    fn from(completion: &Completion) -> Self {
        let timing = &completion.timing;
        Measured {
            prompt_tokens: completion.prompt_tokens.into(),
            cached_tokens: completion.cached_tokens.into(),
            completion_tokens: completion.completion_tokens.into(),
            media_ms: timing.media_ms,
            encode_ms: timing.encode_ms,
            queue_ms: timing.queue_ms,
            prefill_ms: timing.prefill_ms,
            ttft_ms: timing.ttft_ms,
            decode_ms: timing.decode_ms,
            total_ms: timing.total_ms,
            rows_in_batch: timing.rows_in_batch,
            started_at_us: timing.started_at_us,
            audio_seconds: completion.heard.as_ref().map(|heard| heard.audio_seconds),
            has_notes: !completion.notes.is_empty(),
        }
    }
}

/// Rows counted so far, in bounded memory.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    rows_ok: u64,
    failed_by_stage: BTreeMap<String, u64>,
    errors: HashMap<String, (String, u64)>,
    sums: Measured,
    rows_in_batch: f64,
    heard: Heard,
    rows_with_notes: u64,
    comparison: Comparison,
    ttft: Spread,
    /// Of work, in microseconds since the Unix epoch, apart and in order.
    stretches: Vec<(i64, i64)>,
}

impl Tally {
    pub fn add(&mut self, row: &Row) {
        match &row.outcome {
            Outcome::Ok(completion) => {
                self.ok(&Measured::from(&**completion));
                if let Some(score) = &row.score {
                    let reference = row.reference.as_deref().unwrap_or_default();
                    self.scored(row.row, score, Texts { id: &row.id, reference, text: &completion.text });
                }
            }
            Outcome::Failed { stage, error } => self.failed(stage.name(), error),
        }
    }

    pub fn ok(&mut self, row: &Measured) {
        self.rows_ok += 1;
        let sums = &mut self.sums;
        sums.prompt_tokens += row.prompt_tokens;
        sums.cached_tokens += row.cached_tokens;
        sums.completion_tokens += row.completion_tokens;
        sums.media_ms += row.media_ms;
        sums.encode_ms += row.encode_ms;
        sums.queue_ms += row.queue_ms;
        sums.prefill_ms += row.prefill_ms;
        sums.ttft_ms += row.ttft_ms;
        sums.decode_ms += row.decode_ms;
        sums.total_ms += row.total_ms;
        self.rows_in_batch += row.rows_in_batch;
        if let Some(seconds) = row.audio_seconds {
            self.heard.rows += 1;
            self.heard.audio_seconds += seconds;
        }
        self.rows_with_notes += u64::from(row.has_notes);
        self.ttft.add(row.ttft_ms);
        let worked_us = (row.ttft_ms + row.decode_ms) * 1000.0;
        self.worked(row.started_at_us, row.started_at_us.saturating_add(worked_us.max(0.0) as i64));
    }

    /// An ok row's score.
    pub fn scored(&mut self, row: u64, score: &Score, texts: Texts<'_>) {
        self.comparison.add(row, score, texts);
    }

    /// Errors that differ in their numbers alone are one sort.
    pub fn failed(&mut self, stage: &str, error: &str) {
        match self.failed_by_stage.get_mut(stage) {
            Some(count) => *count += 1,
            None => drop(self.failed_by_stage.insert(stage.into(), 1)),
        }
        let sort: String = error.chars().take(ERROR_CHARS).map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        let sort = sort.split('0').filter(|rest| !rest.is_empty()).collect::<Vec<_>>().join("0");
        let key = format!("{stage}: {sort}");
        if let Some((_, count)) = self.errors.get_mut(&key) {
            *count += 1;
        } else if self.errors.len() < ERRORS_MAX {
            let example = words::one_line(&error.chars().take(ERROR_CHARS).collect::<String>());
            self.errors.insert(key, (format!("{stage}: {example}"), 1));
        }
    }

    fn worked(&mut self, start: i64, end: i64) {
        // Rows come about in the order of their ends, so nearly all belong to the last stretch.
        let first = self.stretches.partition_point(|stretch| stretch.1.saturating_add(PAUSE_US) < start);
        let behind = self.stretches[first..].partition_point(|stretch| stretch.0 <= end.saturating_add(PAUSE_US)) + first;
        if first == behind {
            if self.stretches.len() < STRETCHES_MAX {
                self.stretches.insert(first, (start, end));
            }
            return;
        }
        let joined = (start.min(self.stretches[first].0), end.max(self.stretches[behind - 1].1));
        self.stretches[first] = joined;
        self.stretches.drain(first + 1..behind);
    }

    pub fn rows_ok(&self) -> u64 {
        self.rows_ok
    }

    pub fn rows_failed(&self) -> u64 {
        self.failed_by_stage.values().sum()
    }

    pub fn completion_tokens(&self) -> u64 {
        self.sums.completion_tokens
    }

    pub fn prompt_tokens(&self) -> u64 {
        self.sums.prompt_tokens
    }

    /// The summary of the rows so far. Its speed is over the time in which rows were worked on, until [`Summary::over`] says
    /// better; where the results are is left to the caller.
    pub fn summary(&self) -> Summary {
        let rows = self.rows_ok as f64;
        let mean = |sum: f64| if self.rows_ok == 0 { 0.0 } else { sum / rows };
        let sums = &self.sums;
        let mut errors: Vec<_> = self.errors.values().cloned().collect();
        errors.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let kinds = errors.len().saturating_sub(ERRORS_SHOWN) as u64;
        errors.truncate(ERRORS_SHOWN);
        let rows = self.rows_failed() - errors.iter().map(|(_, rows)| rows).sum::<u64>();
        let errors_left_off = (rows > 0).then_some(ErrorsLeftOff { kinds, rows, all_counted: self.errors.len() < ERRORS_MAX });
        let worked_us: i64 = self.stretches.iter().map(|(start, end)| end.saturating_sub(*start)).fold(0, i64::saturating_add);
        let summary = Summary {
            rows_ok: self.rows_ok,
            rows_failed: self.rows_failed(),
            failed_by_stage: self.failed_by_stage.clone(),
            errors,
            errors_left_off,
            prompt_tokens: sums.prompt_tokens,
            cached_tokens: sums.cached_tokens,
            completion_tokens: sums.completion_tokens,
            ttft_ms_p50: self.ttft.percentile(50.0),
            ttft_ms_p95: self.ttft.percentile(95.0),
            mean_ms: StageTimes {
                media_ms: mean(sums.media_ms),
                encode_ms: mean(sums.encode_ms),
                queue_ms: mean(sums.queue_ms),
                prefill_ms: mean(sums.prefill_ms),
                decode_ms: mean(sums.decode_ms),
                total_ms: mean(sums.total_ms),
            },
            rows_in_batch: (self.rows_ok > 0).then(|| mean(self.rows_in_batch)),
            rows_with_notes: self.rows_with_notes,
            audio: (self.heard.rows > 0).then_some(self.heard),
            scores: self.comparison.compared(),
            ..Summary::default()
        };
        summary.over(worked_us as f64 / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start_s: f64, seconds: f64) -> Measured {
        Measured {
            completion_tokens: 10,
            ttft_ms: seconds * 250.0,
            decode_ms: seconds * 750.0,
            started_at_us: (start_s * 1e6) as i64,
            ..Measured::default()
        }
    }

    fn check_wall(rows: &[(f64, f64)], expected_s: f64) {
        let mut tally = Tally::default();
        for &(start, seconds) in rows {
            tally.ok(&at(start, seconds));
        }
        let found = tally.summary().wall_seconds;
        assert!((found - expected_s).abs() < 1e-3, "{rows:?}: {found}");
    }

    #[test]
    fn time_is_counted_once_and_pauses_are_not() {
        check_wall(&[(0.0, 2.0), (1.0, 2.0)], 3.0);
        check_wall(&[(100.0, 2.0), (0.0, 2.0)], 4.0);
        check_wall(&[(0.0, 2.0), (2.5, 1.0)], 3.5);
        check_wall(&[(0.0, 1.0), (10.0, 1.0), (20.0, 1.0), (0.5, 20.0)], 21.0);
        check_wall(&[(5.0, 1.0), (1.0, 10.0)], 10.0);
        check_wall(&[], 0.0);
    }

    #[test]
    fn speed_is_tokens_over_the_time_worked() {
        let mut tally = Tally::default();
        tally.ok(&at(0.0, 4.0));
        tally.ok(&at(1000.0, 1.0));
        assert_eq!(tally.summary().tokens_per_second, Some(4.0));
        assert_eq!(Tally::default().summary().tokens_per_second, None);
    }

    #[test]
    fn errors_that_differ_in_numbers_are_one_sort() {
        let mut tally = Tally::default();
        for row in 0..7 {
            tally.failed("prompt", &format!("the prompt has {} tokens, the context 2048", row * 1000));
        }
        tally.failed("manifest", "not JSON");
        let summary = tally.summary();
        assert_eq!(
            summary.errors,
            [("prompt: the prompt has 0 tokens, the context 2048".to_owned(), 7), ("manifest: not JSON".to_owned(), 1)]
        );
        assert_eq!(summary.failed_by_stage, BTreeMap::from([("prompt".to_owned(), 7), ("manifest".to_owned(), 1)]));
    }

    #[test]
    fn a_million_different_errors_are_bounded() {
        let mut tally = Tally::default();
        for row in 0..5000_u32 {
            let name: String = row.to_string().bytes().map(|digit| char::from(digit - b'0' + b'a')).collect();
            tally.failed("media", &format!("cannot open {name} {}", "x".repeat(1000)));
        }
        assert_eq!(tally.errors.len(), ERRORS_MAX);
        let summary = tally.summary();
        assert_eq!((summary.rows_failed, summary.errors.len()), (5000, ERRORS_SHOWN));
        assert!(summary.errors[0].0.len() < 300);
        let left_off = summary.errors_left_off.unwrap();
        assert_eq!(left_off, ErrorsLeftOff { kinds: 995, rows: 4995, all_counted: false });
        assert_eq!(left_off.words(), "and 995 or more other kinds (4,995 rows)");
    }

    #[test]
    fn errors_that_are_not_shown_are_counted() {
        let mut tally = Tally::default();
        for (kind, rows) in ["a", "b", "c", "d", "e"].into_iter().zip(2..) {
            (0..rows).for_each(|_| tally.failed("prompt", kind));
        }
        assert_eq!(tally.summary().errors_left_off, None);
        tally.failed("media", "f");
        assert_eq!(tally.summary().errors_left_off.unwrap().words(), "and 1 more kind (1 row)");
        (0..2).for_each(|_| tally.failed("media", "g"));
        let summary = tally.summary();
        assert_eq!(summary.errors.len(), ERRORS_SHOWN);
        assert!(summary.to_string().contains("\n               and 2 more kinds (3 rows)\n"), "{summary}");
    }
}
