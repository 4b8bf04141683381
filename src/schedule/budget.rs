//! What rows cost in bytes.

/// Bytes that a cache layout costs. All counts are for the layout the engine's cache really has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Price {
    /// Keys and values of the layers with full attention, bytes a token of a slot.
    pub full_bytes_per_token: u64,
    /// Layers with a sliding window: (window in tokens, bytes a token of a slot).
    pub windows: Vec<(u32, u64)>,
    /// Bytes a slot whatever its length.
    pub fixed_bytes_per_slot: u64,
    /// Slots grow in steps of this many tokens.
    pub slot_tokens_step: u32,
    /// Prefill scratch: bytes a prompt token of a chunk, and bytes a (chunk token × context token) pair.
    pub prefill_bytes_per_token: u64,
    pub prefill_bytes_per_pair: u64,
}

impl Price {
    /// `tokens` rounded up to what a slot can have.
    pub fn slot_tokens(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.slot_tokens_step).saturating_mul(self.slot_tokens_step)
    }

    /// Bytes of a cache of `slots` slots of `slot_tokens` tokens.
    pub fn cache_bytes(&self, slots: u32, slot_tokens: u32) -> u64 {
        let windows: u64 = self.windows.iter().map(|&(window, bytes)| bytes * u64::from(slot_tokens.min(window))).sum();
        u64::from(slots) * (self.full_bytes_per_token * u64::from(slot_tokens) + windows + self.fixed_bytes_per_slot)
    }

    /// Bytes of the largest prefill step over a context of `slot_tokens`.
    pub fn prefill_bytes(&self, chunk: u32, slot_tokens: u32) -> u64 {
        u64::from(chunk) * (self.prefill_bytes_per_token + self.prefill_bytes_per_pair * u64::from(slot_tokens))
    }
}
