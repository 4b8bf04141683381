//! `mlxbatch`: arguments, a command, an exit status.

use std::process::ExitCode;

use clap::Parser;
use mlxbatch::{args::Args, engine, run};

fn main() -> ExitCode {
    engine::prepare_environment();
    run::command(&Args::parse()).into()
}
