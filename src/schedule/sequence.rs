//! A row between its admission and its release.

use std::sync::Arc;

use super::{FinishReason, Request};

/// What a row computes in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Prefill { start: u32, length: u32, last: bool },
    Decode { position: u32 },
}

/// Two clocks run in it: what is planned goes ahead of what is committed by as many steps as are in flight.
#[derive(Debug)]
pub(super) struct Sequence {
    pub request: Arc<Request>,
    /// Prompt tokens that planned steps have put into the cache.
    prefilled: u32,
    /// Tokens that planned steps have sampled.
    planned: u32,
    /// Tokens that committed steps have sampled.
    tokens: Vec<u32>,
    /// Steps in flight that compute this row: its slot is not free before they are committed.
    pub in_flight: u32,
    /// Finished or cancelled; what is still sampled for it is dropped.
    pub ended: bool,
}

impl Sequence {
    pub fn new(request: Arc<Request>) -> Self {
        Self { request, prefilled: 0, planned: 0, tokens: Vec::new(), in_flight: 0, ended: false }
    }

    /// Whether prompt tokens are yet to be planned.
    pub fn in_prefill(&self) -> bool {
        self.planned == 0
    }

    /// Plans its next step: the next chunk of the prompt, or the next token unless `max_tokens` are planned already.
    pub fn advance(&mut self, prefill_chunk: u32) -> Option<Work> {
        if self.ended || self.planned == self.request.max_tokens {
            return None;
        }
        // Fits: `Limits::check` holds prompt and completion to a context counted in u32.
        let prompt_tokens = self.request.prompt.len() as u32;
        self.in_flight += 1;
        if self.planned == 0 {
            let start = self.prefilled;
            let length = prefill_chunk.min(prompt_tokens - start);
            self.prefilled += length;
            let last = self.prefilled == prompt_tokens;
            self.planned = u32::from(last);
            return Some(Work::Prefill { start, length, last });
        }
        let position = prompt_tokens + self.planned - 1;
        self.planned += 1;
        Some(Work::Decode { position })
    }

    /// Takes a committed token; says whether the row ends with it, and why.
    pub fn take(&mut self, token: u32, stop_string: bool) -> Option<FinishReason> {
        self.tokens.push(token);
        if stop_string || self.request.stop_tokens.contains(&token) {
            Some(FinishReason::Stop)
        } else if self.tokens.len() as u64 == u64::from(self.request.max_tokens) {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Ends the row and hands over its tokens.
    pub fn end(&mut self) -> Vec<u32> {
        self.ended = true;
        std::mem::take(&mut self.tokens)
    }
}
