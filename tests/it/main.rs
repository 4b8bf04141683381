mod jobs;
mod manifest;
mod prompt;
mod schedule;
