//! A row, or a prefix, between its admission and its release.

use std::sync::Arc;

use super::{FinishReason, Request};

/// Two clocks run in it: what is planned goes ahead of what is committed by as many steps as are in flight.
#[derive(Debug)]
pub(super) struct Sequence {
    pub request: Arc<Request>,
    /// Prompt tokens copied when it was admitted.
    pub cached_tokens: u32,
    /// Prompt tokens that are copied or that planned steps have put into the cache.
    prefilled: u32,
    /// Tokens that planned steps have sampled.
    planned: u32,
    /// Tokens that committed steps have sampled.
    tokens: Vec<u32>,
    /// Steps in flight that compute this row, or copy this prefix: its slot is not free before they are committed.
    pub in_flight: u32,
    /// Finished or cancelled; what is still sampled for it is dropped.
    pub ended: bool,
}

/// What the chunk from `start` on takes of a step's `prefill_chunk` tokens: a chunk that is not its prompt's last takes all of
/// them, though it may be shorter, or one medium that is longer.
pub(super) fn chunk_share(request: &Request, start: u32, prefill_chunk: u32) -> u32 {
    let end = request.chunk_end(start, prefill_chunk);
    if end as usize == request.prompt.len() { prefill_chunk.min(end - start) } else { prefill_chunk }
}

impl Sequence {
    pub fn new(request: Arc<Request>, cached_tokens: u32) -> Self {
        Self { request, cached_tokens, prefilled: cached_tokens, planned: 0, tokens: Vec::new(), in_flight: 0, ended: false }
    }

    /// Whether prompt tokens are yet to be planned.
    pub fn in_prefill(&self) -> bool {
        self.prefilled < self.prompt_tokens()
    }

    /// What its prompt's next chunk takes of a step.
    pub fn chunk_share(&self, prefill_chunk: u32) -> u32 {
        chunk_share(&self.request, self.prefilled, prefill_chunk)
    }

    /// Plans the next chunk of the prompt of a row in prefill: where it starts, and its length.
    pub fn next_chunk(&mut self, prefill_chunk: u32) -> (u32, u32) {
        let start = self.prefilled;
        self.prefilled = self.request.chunk_end(start, prefill_chunk);
        let length = self.prefilled - start;
        // A prefix samples nothing.
        self.planned = u32::from(!self.in_prefill()).min(self.request.max_tokens);
        self.in_flight += 1;
        (start, length)
    }

    /// Plans the next token: the position it is decoded at. None in prefill, at the end, or when `max_tokens` are planned already.
    pub fn next_token(&mut self) -> Option<u32> {
        if self.ended || self.in_prefill() || self.planned == self.request.max_tokens {
            return None;
        }
        let position = self.prompt_tokens() + self.planned - 1;
        self.planned += 1;
        self.in_flight += 1;
        Some(position)
    }

    /// Fits: `Limits::check` holds prompt and completion to a context counted in u32.
    fn prompt_tokens(&self) -> u32 {
        self.request.prompt.len() as u32
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
