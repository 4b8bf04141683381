//! How tokens are chosen; a row may override any of it by a column of the same name.

use std::collections::BTreeMap;

use super::value::{Fault, Node, Value};

/// Sampling follows `mlx_lm/sample_utils.py`: bias, then the three penalties; then top-p, min-p and top-k, in that order, on the
/// untempered log-probabilities; then the temperature. docs/job-file.md gives the range of each.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    pub max_tokens: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 0 keeps all.
    pub min_p: f32,
    /// 1 leaves logits alone.
    pub repetition_penalty: f32,
    /// How many of the last tokens (prompt included) the three penalties look back on.
    pub penalty_context: u32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// Added to the logits, by token id.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Strings that end the text; they are not part of it.
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    /// Goes on past the model's own end tokens, for measuring.
    pub ignore_eos: bool,
    pub seed: u64,
    /// Log-probabilities go into the results: of the tokens sampled, and of so many of the likeliest in their places.
    pub logprobs: Option<u32>,
}

impl Default for Generation {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            penalty_context: 20,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            seed: 0,
            logprobs: None,
        }
    }
}

const TOKENS_MAX: u32 = 10_000_000;
const TOP_K_MAX: u32 = 1_000_000;
/// As many as OpenAI's and vLLM's interfaces give.
const LOGPROBS_MAX: u32 = 20;
const LOGIT_BIAS_COUNT_MAX: usize = 4096;
const STOP_COUNT_MAX: usize = 64;
const STOP_BYTES_MAX: usize = 1024;
const STOP_TOKEN_IDS_MAX: usize = 1024;
/// TOML's integers are signed.
const SEED_MAX: u64 = i64::MAX as u64;

/// Each key of `[generation]`, in the order of the struct.
pub(super) const KEYS: [&str; 15] = [
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "penalty_context",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "logprobs",
];

/// Keys whose capability comes later.
pub(super) const KEYS_LATER: [&str; 3] = ["xtc_probability", "xtc_threshold", "json_schema"];

impl Generation {
    /// Sets the key of that name, one of [`KEYS`]: the one place that knows each key's type and range.
    pub(super) fn assign(&mut self, key: &str, node: &Node) -> Result<(), Fault> {
        match key {
            "max_tokens" => self.max_tokens = node.integer_u32(1..=TOKENS_MAX)?,
            // A smaller temperature overflows float32 where log-probabilities are divided by it.
            "temperature" => {
                self.temperature =
                    node.number("0 (greedy) or a number from 0.000001 to 100", |t| t == 0.0 || (1e-6..=100.0).contains(&t))?;
            }
            "top_p" => self.top_p = node.number("a number above 0 and at most 1 (1 keeps all)", |p| p > 0.0 && p <= 1.0)?,
            "top_k" => self.top_k = node.integer_u32(0..=TOP_K_MAX)?,
            "min_p" => self.min_p = node.number("a number from 0 to 1 (0 keeps all)", |p| (0.0..=1.0).contains(&p))?,
            "repetition_penalty" => {
                let expected = "a number from 0.01 to 100 (1 changes nothing)";
                self.repetition_penalty = node.number(expected, |penalty| (0.01..=100.0).contains(&penalty))?;
            }
            "penalty_context" => self.penalty_context = node.integer_u32(1..=TOKENS_MAX)?,
            "presence_penalty" => self.presence_penalty = penalty(node)?,
            "frequency_penalty" => self.frequency_penalty = penalty(node)?,
            "logit_bias" => self.logit_bias = logit_bias(node)?,
            "stop" => self.stop = stop(node)?,
            "stop_token_ids" => {
                let ids = node.one_or_many("an array of token ids", STOP_TOKEN_IDS_MAX)?;
                self.stop_token_ids = ids.iter().map(|id| id.integer_u32(0..=u32::MAX)).collect::<Result<_, _>>()?;
            }
            "ignore_eos" => self.ignore_eos = node.boolean()?,
            "seed" => self.seed = node.integer(0..=SEED_MAX)?,
            "logprobs" => self.logprobs = logprobs(node)?,
            _ => return Err(Fault { found: format!("`{key}`"), ..node.fault(format!("one of {}", KEYS.join(", "))) }),
        }
        Ok(())
    }
}

fn penalty(node: &Node) -> Result<f32, Fault> {
    node.number("a number from -100 to 100 (0 changes nothing)", |penalty| (-100.0..=100.0).contains(&penalty))
}

fn logprobs(node: &Node) -> Result<Option<u32>, Fault> {
    match node.value {
        Value::Boolean(false) => Ok(None),
        _ => node.integer_u32(0..=LOGPROBS_MAX).map(Some).map_err(|fault| Fault {
            expected: format!("an integer from 0 to {LOGPROBS_MAX}, or false to leave them out"),
            ..fault
        }),
    }
}

fn logit_bias(node: &Node) -> Result<BTreeMap<u32, f32>, Fault> {
    let Value::Table(entries) = &node.value else { return Err(node.fault("a table from token ids to numbers from -100 to 100")) };
    if entries.len() > LOGIT_BIAS_COUNT_MAX {
        let fault = node.fault(format!("{LOGIT_BIAS_COUNT_MAX} token ids at most"));
        return Err(Fault { found: format!("{} of them", entries.len()), ..fault });
    }
    let entry = |entry: &super::value::Entry| {
        // Only an id's one usual spelling, so that no id is given twice.
        let id = entry.key.parse::<u32>().ok().filter(|id| id.to_string() == entry.key).ok_or_else(|| Fault {
            expected: "token ids, integers from 0 to 4294967295, as its keys".to_owned(),
            found: super::value::quoted(&entry.key),
            origin: entry.key_origin,
        })?;
        Ok((id, entry.node.number("numbers from -100 to 100 as its values", |bias| (-100.0..=100.0).contains(&bias))?))
    };
    entries.iter().map(entry).collect()
}

fn stop(node: &Node) -> Result<Vec<String>, Fault> {
    let expected = "a string or an array of strings";
    let string = |node: &Node| {
        let text = node.string(expected)?;
        match text.is_empty() || text.len() > STOP_BYTES_MAX {
            true => Err(node.fault(format!("strings of 1 to {STOP_BYTES_MAX} bytes"))),
            false => Ok(text),
        }
    };
    node.one_or_many(expected, STOP_COUNT_MAX)?.iter().map(string).collect()
}
