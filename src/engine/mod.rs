//! Computes plans.

mod cache;
mod cuda;
mod device;
pub mod fake;
mod ffi;
mod host;
mod logprobs;
pub mod memory;
mod mlx;
mod models;
mod price;
mod sample;
mod soft;
mod speech;
mod weights;

pub use device::{WeightForm, device_memory};
pub use ffi::{mlx_version, prepare_environment};
pub use logprobs::{Logprobs, TokenLogprob};
pub use mlx::{MlxEngine, MlxOptions};
pub use models::{check_weights, encode_prices};
pub use price::encoded_at_once;
pub use weights::WeightError;

use mlx_rs::{Array, ArrayElement};
use thiserror::Error;

use crate::schedule::{Plan, Price, Sampled, SequenceId};

/// Runs a model. One thread owns it.
pub trait Engine {
    /// What this engine's cache and prefill cost.
    fn price(&self) -> Price;

    /// Prompt tokens of a step at most, and rows that compute them, where a job does not say.
    fn prefill_defaults(&self) -> PrefillDefaults {
        PrefillDefaults { chunk: 512, concurrency: 8 }
    }

    /// Token ids are below this.
    fn vocabulary(&self) -> u32;

    /// Starts the step that `plan` describes, and returns without waiting for its tokens. Steps run in the order of their launch.
    fn launch(&mut self, plan: &Plan) -> Result<(), EngineError>;

    /// Waits for the oldest launched step: a token for each final prefill and each decode of its plan, in that order.
    fn collect(&mut self) -> Result<Vec<Sampled>, EngineError>;

    /// What the model thought of a recording's window and of the tokens collected for it; none of a row that has no window, or that
    /// a launched plan has released.
    fn speech(&self, sequence: SequenceId) -> Option<SpeechScore>;

    /// Hands over the log-probabilities of the tokens collected for a row that asks for them (`Generation::logprobs`); none of any
    /// other row, of one that has a window, or of one that a launched plan has released.
    fn take_logprobs(&mut self, sequence: SequenceId) -> Option<Logprobs>;
}

/// What suits a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillDefaults {
    pub chunk: u32,
    pub concurrency: u32,
}

/// What a speech model thought of a window.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SpeechScore {
    /// Log-probabilities of the transcript's tokens, its end included, added up.
    pub sum_logprob: f32,
    /// Probability that nobody speaks in the window; 0 of a model that does not say.
    pub no_speech_prob: f32,
}

/// What ends a run; a row's own failure is a failed row instead.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The plan contradicts the engine's state: a fault of the scheduler.
    #[error("step {step} of the plan is not possible: {reason}")]
    Plan { step: u64, reason: String },
    #[error("MLX failed: {0}")]
    Mlx(String),
}

impl From<mlx_rs::error::Exception> for EngineError {
    fn from(error: mlx_rs::error::Exception) -> Self {
        Self::Mlx(reason(&error))
    }
}

/// Waits for an array's numbers.
fn on_host<T: ArrayElement>(array: &Array) -> Result<&[T], EngineError> {
    array.eval()?;
    array.try_as_slice::<T>().map_err(|error| EngineError::Mlx(reason(&error)))
}

/// What MLX says of a failure, without the places in its sources that follow.
fn reason(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    let text = text.split(" at /").next().unwrap_or_default();
    text.trim_matches('"').trim_end_matches('"').to_owned()
}
