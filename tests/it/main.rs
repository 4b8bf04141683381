//! The integration tests, in one binary.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may end in a panic")]
#![expect(clippy::print_stdout, reason = "skipped tests say so")]

mod jobs;
mod manifest;
mod model;
mod prompt;
mod schedule;
mod tidy;
