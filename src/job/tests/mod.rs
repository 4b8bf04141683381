mod effective;
mod errors;
mod overrides;

use std::path::Path;

use super::{Job, JobError};

/// The least that makes a job.
const LEAST: &str = "[model]\npath = \"fake\"\n[input]\nmanifest = [\"rows.jsonl\"]\n";

/// Reads text as if it stood in `/jobs/job.toml`.
fn read(text: &str) -> Result<Job, JobError> {
    Job::parse(Path::new("/jobs/job.toml"), text, &[])
}

fn read_with(text: &str, settings: &[&str]) -> Result<Job, JobError> {
    let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
    Job::parse(Path::new("/jobs/job.toml"), text, &settings)
}
