//! Prompts of random tokens, made or read.

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::args::{self, Span, WorkloadName};

/// All prompts together: what a `u32` a token makes 400 MB.
const PROMPT_TOKENS_MAX: u64 = 100_000_000;
const FILE_BYTES_MAX: u64 = 2 << 30;

/// What cannot be measured as it was asked for.
#[derive(Debug, Error)]
pub enum BenchError {
    #[error("cannot read {file}: {reason}")]
    Read { file: String, reason: String },
    #[error(
        "{file} is not a workload: {reason}; it must be a JSON list of {{\"prompt\": [token ids], \"max_tokens\": n}}, as --dump writes"
    )]
    NoWorkload { file: String, reason: String },
    #[error("prompt {index} of the workload has the token {token}, and the model has {vocabulary} tokens (ids from 0)")]
    Token { index: usize, token: u32, vocabulary: u32 },
    #[error(
        "the workload has up to {tokens} prompt tokens, and {PROMPT_TOKENS_MAX} are the limit: lower --prompts or --prompt-tokens"
    )]
    TooMany { tokens: u64 },
    #[error(
        "the configuration of {model} does not say how many tokens the model has (vocab_size), so no prompts can be made for it"
    )]
    NoVocabulary { model: String },
    #[error("prompt {index} of the workload cannot be computed: {reason}")]
    Refused { index: usize, reason: String },
    #[error("--outputs takes the tokens of one run, and --rows asks for {rows}: give --rows one number")]
    OutputsOfMany { rows: usize },
    #[error("--media is for models that see or hear, and {model} does neither")]
    NoTowers { model: String },
    #[error("bench measures models that write text, and {model} is a {family}: `make bench-speech` measures speech")]
    NotText { model: String, family: String },
}

/// A row of a workload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkloadRow {
    pub prompt: Vec<u32>,
    /// The row generates exactly as many.
    pub max_tokens: u32,
}

/// How lengths are drawn; both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lengths {
    Even(Span),
    /// Each doubling is as likely as the next: half of them are under the geometric mean of the ends.
    LogEven(Span),
}

/// What a workload is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    prompts: u32,
    prefix_tokens: u32,
    prompt_tokens: Lengths,
    new_tokens: Lengths,
    seed: u64,
}

impl Recipe {
    pub fn new(args: &args::Bench) -> Self {
        let span = |low, high| Span { low, high };
        let (prefix_tokens, prompt_tokens, new_tokens) = match args.workload {
            WorkloadName::A => (0, Lengths::Even(span(64, 512)), Lengths::Even(span(128, 128))),
            WorkloadName::B => (0, Lengths::LogEven(span(16, 4096)), Lengths::LogEven(span(8, 1024))),
            WorkloadName::C => (1500, Lengths::Even(span(64, 128)), Lengths::Even(span(64, 64))),
        };
        let given = |lengths, given| match (lengths, given) {
            (_, None) => lengths,
            (Lengths::Even(_), Some(span)) => Lengths::Even(span),
            (Lengths::LogEven(_), Some(span)) => Lengths::LogEven(span),
        };
        Self {
            prompts: args.prompts,
            prefix_tokens: args.prefix_tokens.unwrap_or(prefix_tokens),
            prompt_tokens: given(prompt_tokens, args.prompt_tokens),
            new_tokens: given(new_tokens, args.new_tokens.map(|tokens| span(tokens, tokens))),
            seed: args.seed,
        }
    }

    /// The rows, of ids below `vocabulary`. The same recipe makes the same rows, and fewer prompts are the first of more.
    pub fn rows(&self, vocabulary: u32) -> Result<Vec<WorkloadRow>, BenchError> {
        let (Lengths::Even(longest) | Lengths::LogEven(longest)) = self.prompt_tokens;
        let tokens = u64::from(self.prompts) * (u64::from(self.prefix_tokens) + u64::from(longest.high));
        if tokens > PROMPT_TOKENS_MAX {
            return Err(BenchError::TooMany { tokens });
        }
        let mut random = SplitMix64(self.seed);
        let ids = |count: u32, random: &mut SplitMix64| -> Vec<u32> {
            (0..count).map(|_| random.below(u64::from(vocabulary.max(1))) as u32).collect()
        };
        let prefix = ids(self.prefix_tokens, &mut random);
        let row = |_| {
            let (own_tokens, max_tokens) = (self.prompt_tokens.draw(&mut random), self.new_tokens.draw(&mut random));
            let mut prompt = prefix.clone();
            prompt.extend(ids(own_tokens, &mut random));
            WorkloadRow { prompt, max_tokens }
        };
        Ok((0..self.prompts).map(row).collect())
    }
}

impl Lengths {
    fn draw(self, random: &mut SplitMix64) -> u32 {
        match self {
            Self::Even(Span { low, high }) => low + random.below(u64::from(high - low) + 1) as u32,
            Self::LogEven(Span { low, high }) => {
                let length = f64::from(low) * (f64::from(high) / f64::from(low)).powf(random.fraction());
                (length.round() as u32).clamp(low, high)
            }
        }
    }
}

/// Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to `limit`, which is left out; even but for 2^-32 where limits are below 2^32.
    fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }

    /// From 0 to 1, which is left out.
    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Reads such a file as [`dump`] writes.
pub fn load(path: &Path) -> Result<Vec<WorkloadRow>, BenchError> {
    let file = path.display().to_string();
    let no_workload = |reason: String| BenchError::NoWorkload { file: file.clone(), reason };
    let read = |error: std::io::Error| BenchError::Read { file: file.clone(), reason: error.to_string() };
    let bytes = fs::metadata(path).map_err(read)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(no_workload(format!("it has {bytes} bytes, and {FILE_BYTES_MAX} are the limit")));
    }
    let text = fs::read(path).map_err(read)?;
    let rows: Vec<WorkloadRow> = serde_json::from_slice(&text).map_err(|error| no_workload(error.to_string()))?;
    if rows.is_empty() {
        return Err(no_workload("the list is empty".to_owned()));
    }
    Ok(rows)
}

pub fn dump(path: &Path, rows: &[WorkloadRow]) -> Result<(), std::io::Error> {
    fs_err::write(path, serde_json::to_vec(rows)?)
}

/// Refuses ids that the model does not have.
pub fn check(rows: &[WorkloadRow], vocabulary: u32) -> Result<(), BenchError> {
    for (index, row) in rows.iter().enumerate() {
        if let Some(&token) = row.prompt.iter().find(|&&token| token >= vocabulary) {
            return Err(BenchError::Token { index, token, vocabulary });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(lengths: Lengths, prompts: u32) -> Recipe {
        Recipe { prompts, prefix_tokens: 0, prompt_tokens: lengths, new_tokens: Lengths::Even(Span { low: 4, high: 4 }), seed: 7 }
    }

    fn median(mut lengths: Vec<usize>) -> usize {
        lengths.sort_unstable();
        lengths[lengths.len() / 2]
    }

    #[test]
    fn lengths_are_spread_as_the_workload_says() {
        let span = Span { low: 16, high: 4096 };
        let lengths = |lengths| recipe(lengths, 2000).rows(50).unwrap().iter().map(|row| row.prompt.len()).collect::<Vec<_>>();
        let (even, tail) = (lengths(Lengths::Even(span)), lengths(Lengths::LogEven(span)));
        for lengths in [&even, &tail] {
            assert!(*lengths.iter().min().unwrap() >= 16 && *lengths.iter().max().unwrap() <= 4096);
        }
        let (even, tail) = (median(even), median(tail));
        assert!((1900..2200).contains(&even), "{even}");
        assert!((220..300).contains(&tail), "the geometric mean of 16 and 4096 is 256, not {tail}");
        let one = recipe(Lengths::LogEven(Span { low: 1, high: 1 }), 3).rows(50).unwrap();
        assert!(one.iter().all(|row| row.prompt.len() == 1 && row.max_tokens == 4));
    }

    #[test]
    fn rows_share_their_prefix_and_nothing_else() {
        let shared = Recipe { prefix_tokens: 40, ..recipe(Lengths::Even(Span { low: 8, high: 9 }), 6) };
        let rows = shared.rows(1000).unwrap();
        assert!(rows.iter().all(|row| row.prompt[..40] == rows[0].prompt[..40]));
        assert_ne!(rows[0].prompt[40..48], rows[1].prompt[40..48]);
        assert!(rows.iter().flat_map(|row| &row.prompt).all(|&token| token < 1000));
        assert!(rows.iter().flat_map(|row| &row.prompt).any(|&token| token > 500));
        let fewer = Recipe { prompts: 2, ..shared.clone() };
        assert_eq!(fewer.rows(1000).unwrap(), rows[..2]);
        assert_ne!(Recipe { seed: 8, ..shared }.rows(1000).unwrap(), rows);
    }

    #[test]
    fn the_generator_gives_the_published_numbers() {
        // Of the seed 1234567, as in the reference implementation's own test.
        let mut random = SplitMix64(1_234_567);
        assert_eq!([random.next(), random.next()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }

    #[test]
    fn what_would_fill_the_memory_is_refused() {
        let absurd = recipe(Lengths::Even(Span { low: 1, high: 1_000_000 }), 1_000_000);
        assert!(matches!(absurd.rows(10), Err(BenchError::TooMany { tokens: 1_000_000_000_000 })));
    }
}
