//! How far the host may be ahead of a device in a long pass: whatever a layer computes is held until the device is through with it,
//! and for many tokens that is much.

use std::collections::VecDeque;

use mlx_rs::{Array, transforms};

use crate::engine::EngineError;

/// Tokens of a decoder's pass from which on its layers are handed over one by one.
pub const TOKENS_MIN: i32 = 512;
/// Layers that the device may be behind then.
const LAYERS_MAX: usize = 2;
/// Layers of a long pass that hold memory at most: those, and the one that is being built.
pub const LAYERS_HELD: u64 = LAYERS_MAX as u64 + 1;

/// The layers handed over that nobody has waited for.
pub struct Ahead {
    handed_over: VecDeque<Array>,
    tokens_min: i32,
}

impl Ahead {
    /// Of passes with fewer tokens than `tokens_min` nothing is handed over before their end.
    pub fn new(tokens_min: i32) -> Self {
        Self { handed_over: VecDeque::new(), tokens_min }
    }

    /// Hands over what a layer gives, (tokens, width), and waits by `wait` for an earlier one where the host is too far ahead.
    pub fn hand_over(&mut self, hidden: &Array, wait: impl FnOnce(&Array) -> Result<(), EngineError>) -> Result<(), EngineError> {
        if hidden.dim(0) < self.tokens_min {
            return Ok(());
        }
        transforms::async_eval([hidden])?;
        self.handed_over.push_back(hidden.clone());
        if self.handed_over.len() > LAYERS_MAX
            && let Some(done) = self.handed_over.pop_front()
        {
            wait(&done)?;
        }
        Ok(())
    }
}
