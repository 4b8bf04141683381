//! `mlxbatch`: arguments, a command, an exit status.

use std::process::ExitCode;

use clap::Parser;
use mlxbatch::{args::Args, run};

fn main() -> ExitCode {
    run::command(&Args::parse()).into()
}
