mod jobs;
mod manifest;
mod schedule;
