//! Log-probabilities of sampled tokens, and of the likeliest ones in their places, for the rows that ask for them.
//!
//! They are the model's own: the log-softmax, in float32, of the logits as they come, before bias, penalties, filters and
//! temperature. So they say the same whatever a row samples with, what a filter strikes out is still seen, and texts of two
//! settings compare. vLLM returns these by default (`logprobs_mode = "raw_logprobs"`); mlx-lm's `generate_step` gives them behind
//! bias and penalties, and before filters and temperature, so that the two differ where a row has a bias or a penalty and nowhere
//! else.
//!
//! The likeliest tokens are found on the device, in the step's own graph, over the rows that ask and no others. The host puts the
//! few that are left in order.

use mlx_rs::{Array, Dtype, ops};

use super::{EngineError, ffi, on_host};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    pub token_id: u32,
    /// At most 0.
    pub logprob: f32,
}

impl TokenLogprob {
    /// In memory.
    pub const BYTES: usize = size_of::<Self>();
}

/// Of a row's completion.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Logprobs {
    /// Of the tokens sampled, in their order.
    pub sampled: Vec<TokenLogprob>,
    /// How many of the likeliest tokens are kept for each.
    pub top_k: usize,
    /// `top_k` for each token sampled, those of the first first: the likeliest first, of equals the one with the lower id.
    pub top: Vec<TokenLogprob>,
}

impl Logprobs {
    pub fn new(top_k: usize) -> Self {
        Self { top_k, ..Self::default() }
    }

    /// About what they take in memory.
    pub fn bytes(&self) -> usize {
        TokenLogprob::BYTES * (self.sampled.len() + self.top.len())
    }

    /// Adds a token, and the first `top_k` of `likeliest`, which are in order.
    pub(super) fn push(&mut self, sampled: TokenLogprob, likeliest: &[TokenLogprob]) {
        self.sampled.push(sampled);
        self.top.extend_from_slice(&likeliest[..self.top_k.min(likeliest.len())]);
    }
}

/// The order of [`Logprobs::top`].
pub(super) fn sort(likeliest: &mut [TokenLogprob]) {
    likeliest.sort_unstable_by(|a, b| b.logprob.total_cmp(&a.logprob).then(a.token_id.cmp(&b.token_id)));
}

/// Those of a step, on the device.
pub struct StepLogprobs {
    /// Rows of the step's logits that ask, ascending.
    rows: Vec<usize>,
    /// (rows, 1 + likeliest) int32: the token sampled, then the likeliest ones in no order.
    tokens: Array,
    /// (rows, 1 + likeliest) float32.
    logprobs: Array,
}

impl StepLogprobs {
    /// Of `logits`, (rows, vocabulary), and the tokens (rows) int32 that were sampled; `top_k` says for each row how many of the
    /// likeliest tokens it wants, where it asks. None where no row does.
    pub fn of(logits: &Array, sampled: &Array, top_k: impl Iterator<Item = Option<u32>>) -> Result<Option<Self>, EngineError> {
        let asked = top_k.enumerate().filter_map(|(row, top_k)| Some((row, top_k?)));
        let (rows, top_k): (Vec<usize>, Vec<u32>) = asked.unzip();
        let Some(widest) = top_k.into_iter().max() else { return Ok(None) };
        let likeliest = widest.min(logits.dim(1) as u32) as i32;
        let count = rows.len() as i32;
        let (mut logits, mut sampled) = (logits.clone(), sampled.clone());
        if count < logits.dim(0) {
            let index: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
            let index = Array::from_slice(&index, &[count]);
            (logits, sampled) = (logits.take_axis(&index, 0)?, sampled.take_axis(&index, 0)?);
        }
        let mut tokens = sampled.reshape(&[count, 1])?;
        if likeliest > 0 {
            // Ascending of what is negated: of equals MLX puts the one with the lower id first.
            let order = ops::argpartition_axis(logits.negative()?, likeliest - 1, -1)?;
            let first = ffi::slice(&order, &[0, 0], &[count, likeliest])?.as_dtype(Dtype::Int32)?;
            tokens = ops::concatenate(&[&tokens, &first], 1)?;
        }
        let chosen = ops::indexing::take_along_axis(&logits, &tokens, -1)?.as_dtype(Dtype::Float32)?;
        let whole = logits.as_dtype(Dtype::Float32)?.logsumexp_axis(-1, true)?;
        // Rounding can leave the only likely token above the sum of all.
        let logprobs = ops::minimum(chosen.subtract(whole)?, Array::from_f32(0.0))?;
        Ok(Some(Self { rows, tokens, logprobs }))
    }

    pub fn arrays(&self) -> [&Array; 2] {
        [&self.tokens, &self.logprobs]
    }

    /// Adds what row `row` of the step's logits asked for, once it is computed.
    pub fn add_to(&self, row: usize, logprobs: &mut Logprobs) -> Result<(), EngineError> {
        let Ok(place) = self.rows.binary_search(&row) else { return Ok(()) };
        let width = self.tokens.dim(1) as usize;
        let of_row = place * width..(place + 1) * width;
        let (tokens, values) = (on_host::<i32>(&self.tokens)?, on_host::<f32>(&self.logprobs)?);
        let pairs = tokens[of_row.clone()].iter().zip(&values[of_row]);
        let mut pairs = pairs.map(|(&token, &logprob)| TokenLogprob { token_id: token as u32, logprob });
        let Some(sampled) = pairs.next() else { return Ok(()) };
        let mut likeliest: Vec<TokenLogprob> = pairs.collect();
        sort(&mut likeliest);
        logprobs.push(sampled, &likeliest);
        Ok(())
    }
}

#[cfg(test)]
#[path = "logprobs_tests.rs"]
mod tests;
