use std::path::PathBuf;

use serde::Serialize;

use super::{Summary, words};
use crate::sink::Stage;

/// What happens in a run. As JSON, `event` says which it is.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    Started {
        job: String,
        model: String,
        #[serde(serialize_with = "words::path")]
        output: PathBuf,
        /// Of the manifest; none while it is not known.
        rows_total: Option<u64>,
        /// Done by earlier runs.
        rows_resumed: u64,
    },
    /// Something that people should know, and that stops nothing.
    Note {
        message: String,
    },
    Progress(Progress),
    RowFailed {
        row: u64,
        id: String,
        source: String,
        #[serde(serialize_with = "stage_name")]
        stage: Stage,
        error: String,
    },
    PartClosed {
        name: String,
        rows: u64,
        rows_failed: u64,
        bytes: u64,
    },
    /// A signal was received: rows in work are left to the next run.
    Interrupted {
        rows_done: u64,
        rows_total: Option<u64>,
    },
    /// What ended the run before its rows were done.
    Failed {
        error: String,
    },
    Finished(Box<Summary>),
}

/// Where a run stands.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Progress {
    /// Of the manifest; none while it is not known.
    pub rows_total: Option<u64>,
    /// Ok and failed, earlier runs' included.
    pub rows_done: u64,
    /// Of this run.
    pub rows_ok: u64,
    pub rows_failed: u64,
    /// Admitted and not done.
    pub rows_running: u64,
    /// Read and not admitted.
    pub rows_waiting: u64,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    /// Completion tokens a second, of late.
    pub tokens_per_second: f64,
    pub kv_bytes: u64,
    pub kv_bytes_max: u64,
    /// Until the last row is done.
    pub seconds_left: Option<f64>,
}

impl Event {
    pub(super) fn is_progress(&self) -> bool {
        matches!(self, Event::Progress(_))
    }

    /// For a person: one line, without a line end; the summary is a table instead.
    pub(super) fn line(&self) -> String {
        match self {
            Event::Started { job, model, output, rows_total, rows_resumed } => {
                let rows = rows_total.map_or(String::new(), |rows| format!(", {} rows", words::count(rows)));
                let resumed = match rows_resumed {
                    0 => String::new(),
                    rows => format!(", {} of them done before", words::count(*rows)),
                };
                format!("{job}: {model}{rows}{resumed}, results in {}", output.display())
            }
            Event::Note { message } => message.clone(),
            Event::Progress(progress) => progress.line(),
            Event::RowFailed { id, source, stage, error, .. } => {
                let place = if source == id { source.clone() } else { format!("{source} (id {id})") };
                words::one_line(&format!("failed at {}: {place}: {error}", stage.name()))
            }
            Event::PartClosed { name, rows, rows_failed, bytes } => {
                let failed =
                    if *rows_failed == 0 { String::new() } else { format!(", {} of them failed", words::count(*rows_failed)) };
                format!("{name}: {} rows{failed}, {}", words::count(*rows), words::bytes(*bytes))
            }
            Event::Interrupted { rows_done, rows_total } => {
                let total = rows_total.map_or(String::new(), |rows| format!(" of {}", words::count(rows)));
                format!(
                    "interrupted: {}{total} rows are done and safe; run the same command again to go on",
                    words::count(*rows_done)
                )
            }
            Event::Failed { error } => format!("the run failed: {error}"),
            Event::Finished(_) => "finished".into(),
        }
    }
}

impl Progress {
    pub(super) fn line(&self) -> String {
        let mut line = match self.rows_total {
            Some(total) => {
                let percent = if total == 0 { 100.0 } else { self.rows_done as f64 * 100.0 / total as f64 };
                format!("{} of {} rows ({percent:.1}%)", words::count(self.rows_done), words::count(total))
            }
            None => format!("{} rows", words::count(self.rows_done)),
        };
        if self.rows_failed > 0 {
            line += &format!(", {} failed", words::count(self.rows_failed));
        }
        line += &format!(", {}", self.rates());
        if let Some(seconds) = self.seconds_left {
            line += &format!(", {} left", words::seconds(seconds));
        }
        line
    }

    /// Speed and load.
    fn rates(&self) -> String {
        let kv = match self.kv_bytes_max {
            0 => String::new(),
            max => format!(", KV {} of {}", words::bytes(self.kv_bytes), words::bytes(max)),
        };
        let (rate, running, waiting) = (self.tokens_per_second, self.rows_running, self.rows_waiting);
        format!("{} tokens/s, {running} running, {waiting} waiting{kv}", words::rate(rate))
    }
}

fn stage_name<S: serde::Serializer>(stage: &Stage, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(stage.name())
}
