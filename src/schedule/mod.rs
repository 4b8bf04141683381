//! Decides what each step computes: a state machine without I/O, clock, randomness, tensor or logger.

mod budget;
mod plan;

pub use budget::Price;
pub use plan::{Admission, Decode, FinishReason, Finished, Plan, Prefill, Release, Request, Sampled, SequenceId};
