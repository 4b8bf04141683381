//! What each command does. Only here do all stages meet.

mod bench;
mod check;
mod clock;
mod convert;
mod feed;
mod hear;
mod inspect;
mod job_run;
#[cfg(test)]
mod multimodal_test;
mod open;
mod see;
mod show;
mod speech;
pub mod summary;

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};

use bench::BenchError;

use crate::{
    args::{self, Args, Command},
    job::JobError,
    manifest::ManifestError,
    prompt::PromptError,
    report::ProgressMode,
    sink::SinkError,
};

/// How the program ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Every row is ok.
    Ok = 0,
    /// The job failed: weights, disk, engine.
    Failed = 1,
    /// The command line or the job file is wrong.
    Usage = 2,
    /// Finished, and some rows failed.
    SomeRowsFailed = 3,
    /// Interrupted: run again to go on.
    Interrupted = 75,
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> Self {
        ExitCode::from(status as u8)
    }
}

/// How a run shows that it goes on.
fn mode(progress: args::Progress) -> ProgressMode {
    match progress {
        args::Progress::Auto => ProgressMode::Auto,
        args::Progress::Bar => ProgressMode::Bar,
        args::Progress::Plain => ProgressMode::Plain,
        args::Progress::Json => ProgressMode::Json,
        args::Progress::None => ProgressMode::None,
    }
}

/// Carries out a command; an error is told on standard error with everything that led to it.
pub fn command(args: &Args) -> Status {
    let done = match &args.command {
        Command::Run(run) => job_run::run(run),
        Command::Check(check) => check::check(check),
        Command::Inspect(inspect) => inspect::inspect(inspect),
        Command::Convert(convert) => convert::convert(convert),
        Command::Summary(summary) => summarize(summary),
        Command::Show(show) => show::show(show),
        Command::Bench(bench) => bench::bench(bench),
        Command::Completions(completions) => args::completions(completions.shell).map(|()| Status::Ok).map_err(Into::into),
        Command::Man => args::man_page().map(|()| Status::Ok).map_err(Into::into),
    };
    done.unwrap_or_else(|error| {
        // Where nobody can be told, the exit status still tells.
        let _ = writeln!(io::stderr(), "error: {error:#}");
        status_of(&error)
    })
}

/// What is to be mended: the job as it was given, or something else.
fn status_of(error: &anyhow::Error) -> Status {
    let sink = error.downcast_ref::<SinkError>();
    let prompt = error.downcast_ref::<PromptError>();
    let usage = error.is::<JobError>()
        || error.is::<ManifestError>()
        || error.is::<BenchError>()
        || matches!(sink, Some(SinkError::Changed { .. } | SinkError::Foreign { .. } | SinkError::KeptColumn { .. }))
        || matches!(prompt, Some(PromptError::RowTemplate { .. } | PromptError::SystemWithoutTemplate { .. }));
    if usage { Status::Usage } else { Status::Failed }
}

fn summarize(args: &args::Summary) -> Result<Status> {
    let summary = summary::summarize(&args.folder)?;
    let text = if args.json { serde_json::to_string_pretty(&summary)? + "\n" } else { summary.to_string() };
    print(&text)?;
    Ok(Status::Ok)
}

/// Results go to standard output; a reader that has gone away is no failure.
fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("failed to write to standard output"),
    }
}
