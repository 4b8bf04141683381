//! What the images and recordings of prompts take of the budget, from their rows' admission until their prompts are computed.

use super::{Medium, MediumContent, Price, Request};

/// Scratch of a tower over one medium, by the soft tokens that it makes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EncodePrice {
    /// Bytes a soft token, of all but attention.
    pub bytes_per_token: u64,
    /// Of attention: bytes a soft token, and bytes a (soft token × soft token) pair. One after the other, so the more counts.
    pub attention_bytes_per_token: u64,
    pub attention_bytes_per_pair: u64,
}

impl EncodePrice {
    /// Bytes of encoding a medium of `tokens` soft tokens.
    pub fn bytes(&self, tokens: u32) -> u64 {
        let tokens = u64::from(tokens);
        let pairs = self.attention_bytes_per_pair.saturating_mul(tokens);
        let attention = self.attention_bytes_per_token.saturating_add(pairs);
        self.bytes_per_token.max(attention).saturating_mul(tokens)
    }
}

/// The media of a step: of rows admitted in it, which are encoded, and of the row whose prompt goes on, which are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MediaLoad {
    encoded: u64,
    /// Scratch of the largest of them.
    bytes_max: u64,
    soft_tokens: u64,
}

impl MediaLoad {
    /// Of a row alone that takes nothing over.
    pub fn of(request: &Request, price: &Price) -> Self {
        let mut load = Self::default();
        load.admit(request, 0, price);
        load
    }

    /// Adds what a row admitted in this step has, but for what it takes over with its first `cached_tokens`.
    pub fn admit(&mut self, request: &Request, cached_tokens: u32, price: &Price) {
        for medium in request.media.iter().filter(|medium| medium.end() > cached_tokens) {
            self.encoded += 1;
            self.bytes_max = self.bytes_max.max(price.medium_bytes(medium));
            self.soft_tokens += u64::from(medium.tokens);
        }
    }

    /// Adds what a row keeps that was admitted in an earlier step.
    pub fn keep(&mut self, request: &Request) {
        self.soft_tokens += request.media.iter().map(|medium| u64::from(medium.tokens)).sum::<u64>();
    }

    /// Scratch of encoding, as many at once as the engine takes.
    pub fn encode_bytes(&self, price: &Price) -> u64 {
        self.bytes_max.saturating_mul(self.encoded.min(u64::from(price.media_at_once)))
    }

    /// What is made of them, and the copy of it that a pass puts among its embeddings.
    pub fn soft_bytes(&self, price: &Price) -> u64 {
        price.soft_bytes_per_token.saturating_mul(self.soft_tokens.saturating_mul(2))
    }
}

impl Price {
    /// Scratch of encoding a medium.
    pub fn medium_bytes(&self, medium: &Medium) -> u64 {
        let encode = match *medium.content {
            MediumContent::Image(_) => self.image,
            MediumContent::Audio(_) | MediumContent::Waveform(_) => self.audio,
        };
        encode.bytes(medium.tokens)
    }
}
