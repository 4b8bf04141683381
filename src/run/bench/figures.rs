//! What is told of the runs with one number of rows.

use std::fmt::Write as _;

use bytesize::ByteSize;
use serde::Serialize;

use super::measure::Seen;
use crate::run::clock::milliseconds;

/// Each figure is the median over the runs. docs/benchmarks.md says what each means.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figures {
    pub rows: u32,
    pub runs: usize,
    pub wall_seconds: f64,
    pub wall_seconds_of_runs: Vec<f64>,
    pub output_tokens_per_second: f64,
    pub total_tokens_per_second: f64,
    pub ttft_ms_p50: f64,
    pub ttft_ms_p95: f64,
    pub decode_steps: usize,
    pub decode_step_ms_p50: f64,
    pub decode_step_ms_p95: f64,
    pub prefill_steps: usize,
    pub prefill_step_ms_p50: f64,
    pub prefill_step_ms_p95: f64,
    pub encode_seconds: f64,
    pub prompt_seconds: f64,
    pub decode_seconds: f64,
    pub host_ms_per_step: f64,
    pub host_share: f64,
    pub schedule_us_per_step: f64,
    pub occupancy: f64,
    pub cached_tokens: u64,
    pub peak_memory_bytes: u64,
    pub peak_memory_bytes_without_weights: u64,
    pub predicted_memory_bytes: u64,
    pub predicted_over_peak: f64,
    pub kv_bytes_max: u64,
}

/// What the figures of all numbers of rows have in common.
#[derive(Debug, Clone, Copy)]
pub struct Tokens {
    pub prompt: u64,
    pub output: u64,
}

impl Figures {
    /// `weight_bytes` is what MLX held before the first run.
    pub fn new(rows: u32, runs: &[Seen], tokens: Tokens, weight_bytes: u64) -> Self {
        let of = |figure: &dyn Fn(&Seen) -> f64| median(runs.iter().map(figure).collect());
        let wall = |run: &Seen| run.wall.as_secs_f64().max(f64::MIN_POSITIVE);
        let steps = |run: &Seen| run.steps().max(1) as f64;
        let seconds = |step_ms: &[f64]| step_ms.iter().sum::<f64>() / 1e3;
        let bytes = |figure: &dyn Fn(&Seen) -> u64| of(&|run| figure(run) as f64) as u64;
        let (peak, kv_bytes_max) = (bytes(&|run| run.peak_bytes), bytes(&|run| run.kv_bytes_max));
        let predicted = kv_bytes_max.saturating_add(weight_bytes);
        Self {
            rows,
            runs: runs.len(),
            wall_seconds: of(&wall),
            wall_seconds_of_runs: runs.iter().map(wall).collect(),
            output_tokens_per_second: of(&|run| tokens.output as f64 / wall(run)),
            total_tokens_per_second: of(&|run| (tokens.prompt + tokens.output) as f64 / wall(run)),
            ttft_ms_p50: of(&|run| percentile(&run.ttft_ms, 50.0)),
            ttft_ms_p95: of(&|run| percentile(&run.ttft_ms, 95.0)),
            decode_steps: of(&|run| run.decode_step_ms.len() as f64) as usize,
            decode_step_ms_p50: of(&|run| percentile(&run.decode_step_ms, 50.0)),
            decode_step_ms_p95: of(&|run| percentile(&run.decode_step_ms, 95.0)),
            prefill_steps: of(&|run| run.prefill_step_ms.len() as f64) as usize,
            prefill_step_ms_p50: of(&|run| percentile(&run.prefill_step_ms, 50.0)),
            prefill_step_ms_p95: of(&|run| percentile(&run.prefill_step_ms, 95.0)),
            encode_seconds: of(&|run| run.encode.as_secs_f64()),
            prompt_seconds: of(&|run| seconds(&run.prefill_step_ms)),
            decode_seconds: of(&|run| seconds(&run.decode_step_ms)),
            host_ms_per_step: of(&|run| milliseconds(run.host) / steps(run)),
            host_share: of(&|run| run.host.as_secs_f64() / wall(run)),
            schedule_us_per_step: of(&|run| milliseconds(run.schedule) * 1e3 / steps(run)),
            occupancy: of(&|run| run.rows_in_steps as f64 / steps(run) / f64::from(rows)),
            cached_tokens: bytes(&|run| run.cached_tokens),
            peak_memory_bytes: peak,
            peak_memory_bytes_without_weights: peak.saturating_sub(weight_bytes),
            predicted_memory_bytes: predicted,
            predicted_over_peak: predicted as f64 / peak.max(1) as f64,
            kv_bytes_max,
        }
    }

    /// What a table says of them, by line.
    fn cells(&self) -> [(&'static str, String); 19] {
        let one = |number: f64| format!("{number:.1}");
        let two = |number: f64| format!("{number:.2}");
        let size = |bytes: u64| ByteSize(bytes).display().iec().to_string();
        [
            ("rows", self.rows.to_string()),
            ("wall, s", two(self.wall_seconds)),
            ("output tokens/s", one(self.output_tokens_per_second)),
            ("all tokens/s", one(self.total_tokens_per_second)),
            ("first token p50, ms", one(self.ttft_ms_p50)),
            ("first token p95, ms", one(self.ttft_ms_p95)),
            ("decode step p50, ms", two(self.decode_step_ms_p50)),
            ("decode step p95, ms", two(self.decode_step_ms_p95)),
            ("prefill step p50, ms", two(self.prefill_step_ms_p50)),
            ("prefill step p95, ms", two(self.prefill_step_ms_p95)),
            ("media encoded, s", two(self.encode_seconds)),
            ("prompt steps, s", two(self.prompt_seconds)),
            ("decode steps, s", two(self.decode_seconds)),
            ("host a step, ms", format!("{} ({:.0}%)", two(self.host_ms_per_step), self.host_share * 100.0)),
            ("scheduler a step, µs", one(self.schedule_us_per_step)),
            ("occupancy", format!("{:.0}%", self.occupancy * 100.0)),
            ("prompt tokens cached", self.cached_tokens.to_string()),
            ("memory at most", size(self.peak_memory_bytes)),
            (
                "memory predicted",
                format!("{} ({:+.0}%)", size(self.predicted_memory_bytes), (self.predicted_over_peak - 1.0) * 100.0),
            ),
        ]
    }
}

/// A line a figure, a column a number of rows.
pub fn table(all: &[Figures]) -> String {
    let columns: Vec<_> = all.iter().map(Figures::cells).collect();
    let width = |column: &[(&str, String)]| column.iter().map(|(_, cell)| cell.chars().count()).max().unwrap_or_default() + 2;
    let mut text = String::new();
    for line in 0..columns.first().map_or(0, |column| column.len()) {
        let _ = write!(text, "{:<22}", columns[0][line].0);
        for column in &columns {
            let _ = write!(text, "{:>1$}", column[line].1, width(column));
        }
        text.push('\n');
    }
    text
}

/// The value that `percent` of the values do not exceed (nearest rank); 0 without values.
fn percentile(values: &[f64], percent: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let rank = (sorted.len() as f64 * percent / 100.0).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

/// The middle one; of an even number of values the mean of the two in the middle.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        even if even.is_multiple_of(2) => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn percentiles_are_values_that_were_there() {
        let values: Vec<f64> = (1..=20).rev().map(f64::from).collect();
        assert_eq!([50.0, 95.0, 100.0].map(|percent| percentile(&values, percent)), [10.0, 19.0, 20.0]);
        assert_eq!((percentile(&[7.0], 95.0), percentile(&[], 50.0)), (7.0, 0.0));
        assert_eq!([median(vec![3.0, 1.0, 2.0]), median(vec![4.0, 1.0]), median(Vec::new())], [2.0, 2.5, 0.0]);
    }

    #[test]
    fn figures_are_medians_over_runs() {
        let run = |seconds: u64| Seen {
            wall: Duration::from_secs(seconds),
            ttft_ms: vec![10.0, 30.0],
            decode_step_ms: vec![2.0, 4.0, 6.0],
            prefill_step_ms: vec![9.0],
            encode: Duration::from_millis(4),
            host: Duration::from_millis(400),
            schedule: Duration::from_micros(80),
            rows_in_steps: 6,
            cached_tokens: 5,
            kv_bytes_max: 1000,
            peak_bytes: 3000,
            outputs: Vec::new(),
        };
        let figures = Figures::new(2, &[run(1), run(4), run(2)], Tokens { prompt: 60, output: 40 }, 500);
        assert_eq!((figures.wall_seconds, &figures.wall_seconds_of_runs), (2.0, &vec![1.0, 4.0, 2.0]));
        assert_eq!((figures.output_tokens_per_second, figures.total_tokens_per_second), (20.0, 50.0));
        assert_eq!((figures.decode_step_ms_p50, figures.decode_step_ms_p95, figures.prefill_step_ms_p50), (4.0, 6.0, 9.0));
        assert_eq!((figures.decode_steps, figures.prefill_steps), (3, 1));
        let stages = [figures.encode_seconds, figures.prompt_seconds, figures.decode_seconds];
        assert_eq!(stages.map(|seconds| (seconds * 1e3).round()), [4.0, 9.0, 12.0]);
        assert_eq!((figures.host_ms_per_step, figures.host_share, figures.schedule_us_per_step), (100.0, 0.2, 20.0));
        assert_eq!((figures.occupancy, figures.cached_tokens), (0.75, 5));
        assert_eq!((figures.peak_memory_bytes_without_weights, figures.predicted_memory_bytes), (2500, 1500));
        let text = table(&[figures.clone(), figures]);
        assert!(text.contains("output tokens/s") && text.lines().count() == 19, "{text}");
        let widths: Vec<usize> = text.lines().map(|line| line.chars().count()).collect();
        assert!(widths.iter().all(|&width| width == widths[0]), "columns stand below each other\n{text}");
    }
}
