//! The integration tests, in one binary.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may end in a panic")]
#![expect(clippy::print_stdout, reason = "skipped tests say so")]
#![expect(clippy::disallowed_methods, reason = "a test waits for a process by looking again after a while")]

mod audio;
mod bench;
mod commands;
mod hostile;
mod jobs;
mod kill;
mod logprobs;
mod manifest;
mod media_jobs;
mod model;
mod parquet_manifest;
mod program;
mod prompt;
mod recordings;
mod run;
mod schedule;
mod signals;
mod speech;
mod split;
mod tidy;
