mod jobs;
mod schedule;
