//! `events.jsonl`.

use std::{
    io::{self, Read, Seek, SeekFrom, Write},
    path::Path,
};

use fs_err::File;

use super::Event;

const LOG_BYTES_MAX: u64 = 64 << 20;
/// The first failed rows of a run are events of their own; all of them are in failed.jsonl.
const FAILURES_MAX: u64 = 1000;
const PROGRESS_EVERY_SECONDS: f64 = 10.0;
/// A line that is not longer was cut by a kill.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// The file that gets every event, timed, one a line. It is kept within 64 MiB.
#[derive(Debug)]
pub struct EventLog {
    file: File,
    bytes: u64,
    bytes_max: u64,
    failures: u64,
    progress_at: Option<f64>,
}

impl EventLog {
    /// Opens it to write behind the events of earlier runs; a line that a kill cut short is removed.
    pub fn open(folder: &Path) -> io::Result<Self> {
        let path = folder.join(crate::sink::EVENTS_FILE);
        let mut file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        let length = file.metadata()?.len();
        let tail = length.min(LINE_BYTES_MAX);
        file.seek(SeekFrom::Start(length - tail))?;
        let mut end = Vec::new();
        Read::by_ref(&mut file).take(tail).read_to_end(&mut end)?;
        let cut = end.iter().rev().position(|&byte| byte == b'\n').unwrap_or(end.len());
        let bytes = length - cut as u64;
        file.set_len(bytes)?;
        file.seek(SeekFrom::Start(bytes))?;
        Ok(EventLog { file, bytes, bytes_max: LOG_BYTES_MAX, failures: 0, progress_at: None })
    }

    /// Writes the event, unless there are too many of its kind. `line` is the event as JSON with its time.
    pub(super) fn add(&mut self, event: &Event, seconds: f64, line: impl Fn(&Event) -> String) -> io::Result<()> {
        match event {
            Event::Progress(_) if self.progress_at.is_some_and(|at| seconds - at < PROGRESS_EVERY_SECONDS) => return Ok(()),
            Event::Progress(_) => self.progress_at = Some(seconds),
            Event::RowFailed { .. } => {
                self.failures += 1;
                if self.failures == FAILURES_MAX + 1 {
                    let message = format!("{FAILURES_MAX} failed rows are told here; all of them are in failed.jsonl");
                    return self.write(&line(&Event::Note { message }));
                }
                if self.failures > FAILURES_MAX {
                    return Ok(());
                }
            }
            _ => {}
        }
        // The ends of a run are told at any rate: they are few.
        let always = matches!(event, Event::Started { .. } | Event::Interrupted { .. } | Event::Failed { .. } | Event::Finished(_));
        let text = line(event);
        if always || self.bytes + text.len() as u64 <= self.bytes_max { self.write(&text) } else { Ok(()) }
    }

    fn write(&mut self, line: &str) -> io::Result<()> {
        self.file.write_all(format!("{line}\n").as_bytes())?;
        self.bytes += line.len() as u64 + 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{report::Progress, sink::Stage};
    use fs_err as fs;

    fn lines(folder: &Path) -> Vec<String> {
        let text = fs::read_to_string(folder.join("events.jsonl")).unwrap();
        text.lines().map(Into::into).collect()
    }

    fn json(event: &Event) -> String {
        serde_json::to_string(event).unwrap()
    }

    #[test]
    fn a_cut_line_is_removed_and_whole_ones_stay() {
        for (before, whole) in [("", 0), ("{\"a\":1}\n", 1), ("{\"a\":1}\n{\"b\"", 1), ("{\"b\"", 0)] {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join("events.jsonl"), before).unwrap();
            let mut log = EventLog::open(folder.path()).unwrap();
            log.add(&Event::Note { message: "x".into() }, 0.0, json).unwrap();
            let lines = lines(folder.path());
            assert_eq!(lines.len(), whole + 1, "{before:?}");
            assert_eq!(lines[whole], r#"{"event":"note","message":"x"}"#);
        }
    }

    #[test]
    fn progress_and_failures_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = EventLog::open(folder.path()).unwrap();
        for tenths in 0..400 {
            log.add(&Event::Progress(Progress::default()), f64::from(tenths) / 10.0, json).unwrap();
        }
        assert_eq!(lines(folder.path()).len(), 4);
        for row in 0..2000 {
            let event =
                Event::RowFailed { row, id: "a".into(), source: "b".into(), stage: Stage::Prompt, error: "no prompt".into() };
            log.add(&event, 50.0, json).unwrap();
        }
        let lines = lines(folder.path());
        assert_eq!(lines.len(), 4 + 1001);
        assert!(lines[1004].contains("1000 failed rows are told here"));
    }

    #[test]
    fn a_full_log_still_tells_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = EventLog::open(folder.path()).unwrap();
        log.bytes_max = 100;
        for _ in 0..50 {
            log.add(&Event::Note { message: "x".repeat(20) }, 0.0, json).unwrap();
        }
        log.add(&Event::Interrupted { rows_done: 5, rows_total: None }, 0.0, json).unwrap();
        let lines = lines(folder.path());
        assert_eq!(lines.len(), 3);
        assert!(lines[2].contains("interrupted"));
    }
}
