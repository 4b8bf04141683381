use std::{
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use indicatif::ProgressDrawTarget;
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::{Event, EventLog, Progress, bar::Bar, words};

/// How a run tells of its progress on standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ProgressMode {
    /// A bar on a terminal, lines elsewhere.
    #[default]
    Auto,
    Bar,
    /// One line now and then, for logs.
    Plain,
    /// Each event as a line of JSON.
    Json,
    None,
}

/// Failed rows that are told one by one; beyond, they are counted.
const FAILURES_SHOWN: u64 = 5;
/// Events of JSON progress, at most one in this time.
const JSON_EVERY: Duration = Duration::from_secs(1);

/// Shows events to people and programs, and keeps them in `events.jsonl`.
///
/// Nothing it does can end a run: what cannot be shown is dropped, and a full disk is told once.
pub struct Reporter {
    display: Display,
    log: Option<EventLog>,
    /// Since the reporter was made.
    clock: Box<dyn Fn() -> Duration + Send>,
    /// When `clock` was 0.
    start: Timestamp,
    out: Box<dyn Write + Send>,
    failures: u64,
    progress_at: Option<Duration>,
}

enum Display {
    Bar(Bar),
    Plain,
    Json,
    None,
}

/// An event as a line of JSON.
#[derive(Serialize)]
struct Timed<'a> {
    /// RFC 3339, UTC.
    at: String,
    #[serde(flatten)]
    event: &'a Event,
}

impl Reporter {
    /// A bar is shown on a terminal only, whatever is asked for: in a log it would leave nothing.
    pub fn new(mode: ProgressMode, log: Option<EventLog>) -> Self {
        let begin = Instant::now();
        let terminal = io::stderr().is_terminal();
        let display = match mode {
            ProgressMode::Auto | ProgressMode::Bar if terminal => Display::Bar(Bar::new(ProgressDrawTarget::stderr_with_hz(4))),
            ProgressMode::Auto | ProgressMode::Bar | ProgressMode::Plain => Display::Plain,
            ProgressMode::Json => Display::Json,
            ProgressMode::None => Display::None,
        };
        Self::with(display, log, Box::new(io::stderr()), Box::new(move || begin.elapsed()), Timestamp::now())
    }

    fn with(
        display: Display,
        log: Option<EventLog>,
        out: Box<dyn Write + Send>,
        clock: Box<dyn Fn() -> Duration + Send>,
        start: Timestamp,
    ) -> Self {
        Reporter { display, log, clock, start, out, failures: 0, progress_at: None }
    }

    /// The results folder exists from now on.
    pub fn set_log(&mut self, log: EventLog) {
        self.log = Some(log);
    }

    pub fn handle(&mut self, event: &Event) {
        let now = (self.clock)();
        let start = self.start;
        let json = move |event: &Event| {
            let at = SignedDuration::try_from(now).ok().and_then(|since| start.checked_add(since).ok()).unwrap_or(start);
            serde_json::to_string(&Timed { at: at.to_string(), event }).unwrap_or_default()
        };
        if let Some(log) = &mut self.log
            && let Err(error) = log.add(event, now.as_secs_f64(), json)
        {
            self.log = None;
            self.print(&format!("events.jsonl is not written any more: {error}"));
        }
        match self.display {
            Display::None => {}
            Display::Json => {
                if !event.is_progress() || self.due(now, JSON_EVERY) {
                    let _ = writeln!(self.out, "{}", json(event));
                }
            }
            Display::Bar(_) | Display::Plain => self.show(event, now),
        }
    }

    fn show(&mut self, event: &Event, now: Duration) {
        match event {
            Event::Progress(progress) => self.show_progress(progress, now),
            Event::RowFailed { .. } => {
                self.failures += 1;
                if self.failures <= FAILURES_SHOWN {
                    self.print(&event.line());
                } else if self.failures == FAILURES_SHOWN + 1 {
                    self.print("more rows failed: from here on they are counted, and all of them are in failed.jsonl");
                }
            }
            // Progress says as much.
            Event::PartClosed { .. } => {}
            Event::Started { .. } | Event::Note { .. } => self.print(&event.line()),
            Event::Interrupted { .. } | Event::Failed { .. } => {
                self.end_bar();
                self.print(&event.line());
            }
            Event::Finished(summary) => {
                self.end_bar();
                let _ = write!(self.out, "\n{summary}\n");
            }
        }
    }

    fn show_progress(&mut self, progress: &Progress, now: Duration) {
        if let Display::Bar(bar) = &self.display {
            bar.show(progress);
        } else if self.due(now, plain_every(now)) {
            let _ = writeln!(self.out, "[{}] {}", words::seconds(now.as_secs().max(1) as f64), progress.line());
        }
    }

    fn due(&mut self, now: Duration, every: Duration) -> bool {
        let due = self.progress_at.is_none_or(|at| now.saturating_sub(at) >= every);
        if due {
            self.progress_at = Some(now);
        }
        due
    }

    fn print(&mut self, line: &str) {
        match &self.display {
            Display::Bar(bar) => bar.print(line),
            Display::Plain => drop(writeln!(self.out, "{line}")),
            Display::Json => drop(writeln!(self.out, "{}", serde_json::json!({"event": "note", "message": line}))),
            Display::None => {}
        }
    }

    fn end_bar(&mut self) {
        if let Display::Bar(bar) = &self.display {
            bar.end();
        }
    }
}

/// Lines come slower as a run gets longer, so that a night's log stays readable.
fn plain_every(since_start: Duration) -> Duration {
    Duration::from_secs(match since_start.as_secs() {
        0..120 => 10,
        120..1800 => 30,
        1800..14_400 => 120,
        _ => 600,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{report::Summary, sink::Stage};
    use std::sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    };

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl Write for Output {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Watched {
        reporter: Reporter,
        output: Output,
        seconds: Arc<AtomicU64>,
    }

    impl Watched {
        fn new(display: Display, log: Option<EventLog>) -> Self {
            let (output, seconds) = (Output::default(), Arc::new(AtomicU64::new(0)));
            let time = seconds.clone();
            let clock = Box::new(move || Duration::from_secs(time.load(Ordering::Relaxed)));
            let reporter = Reporter::with(display, log, Box::new(output.clone()), clock, Timestamp::UNIX_EPOCH);
            Watched { reporter, output, seconds }
        }

        fn at(&mut self, seconds: u64, event: &Event) {
            self.seconds.store(seconds, Ordering::Relaxed);
            self.reporter.handle(event);
        }

        fn text(&self) -> String {
            String::from_utf8(self.output.0.lock().unwrap().clone()).unwrap()
        }
    }

    fn progress(rows_done: u64) -> Event {
        Event::Progress(Progress {
            rows_total: Some(10_000),
            rows_done,
            rows_failed: 3,
            rows_running: 32,
            rows_waiting: 100,
            tokens_per_second: 512.34,
            kv_bytes: 1_300_000_000,
            kv_bytes_max: 6 << 30,
            seconds_left: Some(540.0),
            ..Progress::default()
        })
    }

    fn failure(row: u64) -> Event {
        Event::RowFailed {
            row,
            id: format!("utt-{row}"),
            source: format!("a.jsonl:{row}"),
            stage: Stage::Prompt,
            error: "no prompt".into(),
        }
    }

    fn started() -> Event {
        Event::Started {
            job: "demo".into(),
            model: "SmolLM2".into(),
            output: "out/demo".into(),
            rows_total: Some(10_000),
            rows_resumed: 4_000,
        }
    }

    #[test]
    fn plain_lines_read_well_and_come_slower() {
        let mut watched = Watched::new(Display::Plain, None);
        watched.at(0, &started());
        for second in 0..300 {
            watched.at(second, &progress(second * 10));
        }
        watched.at(300, &Event::PartClosed { name: "part-00000.parquet".into(), rows: 1, rows_failed: 0, bytes: 5 });
        watched.at(300, &Event::Interrupted { rows_done: 3_000, rows_total: Some(10_000) });
        let text = watched.text();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "demo: SmolLM2, 10,000 rows, 4,000 of them done before, results in out/demo");
        assert_eq!(
            lines[2],
            "[10 s] 100 of 10,000 rows (1.0%), 3 failed, 512 tokens/s, 32 running, 100 waiting, KV 1.2 GiB of 6.0 GiB, 9 min 0 s left"
        );
        assert_eq!(
            *lines.last().unwrap(),
            "interrupted: 3,000 of 10,000 rows are done and safe; run the same command again to go on"
        );
        assert_eq!(lines.len(), 1 + 12 + 6 + 1, "{text}");
    }

    #[test]
    fn a_handful_of_failures_is_told_and_the_rest_counted() {
        let mut watched = Watched::new(Display::Plain, None);
        for row in 0..1000 {
            watched.at(0, &failure(row));
        }
        let text = watched.text();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 6);
        assert_eq!(lines[4], "failed at prompt: a.jsonl:4 (id utt-4): no prompt");
        assert!(lines[5].contains("failed.jsonl"));
    }

    #[test]
    fn json_is_one_event_a_line() {
        let mut watched = Watched::new(Display::Json, None);
        watched.at(0, &started());
        for second in [0, 0, 0, 1, 1, 2] {
            watched.at(second, &progress(second));
        }
        watched.at(2, &failure(7));
        watched.at(3, &Event::Finished(Box::new(Summary { rows_ok: 5, ..Summary::default() })));
        let lines: Vec<serde_json::Value> = watched.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let names: Vec<_> = lines.iter().map(|line| line["event"].as_str().unwrap()).collect();
        assert_eq!(names, ["started", "progress", "progress", "progress", "row_failed", "finished"]);
        assert_eq!(lines[0]["at"], "1970-01-01T00:00:00Z");
        assert_eq!(lines[4]["stage"], "prompt");
        assert_eq!(lines[5]["rows_ok"], 5);
        assert_eq!(lines[5]["at"], "1970-01-01T00:00:03Z");
    }

    #[test]
    fn the_log_gets_what_is_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        let mut watched = Watched::new(Display::None, Some(EventLog::open(folder.path()).unwrap()));
        watched.at(0, &started());
        watched.at(1, &Event::PartClosed { name: "part-00000.parquet".into(), rows: 1, rows_failed: 0, bytes: 5 });
        assert_eq!(watched.text(), "");
        let log = fs_err::read_to_string(folder.path().join("events.jsonl")).unwrap();
        assert_eq!(log.lines().count(), 2);
        assert!(
            log.lines()
                .nth(1)
                .unwrap()
                .starts_with(r#"{"at":"1970-01-01T00:00:01Z","event":"part_closed","name":"part-00000.parquet""#)
        );
    }

    #[test]
    fn the_summary_ends_a_plain_log() {
        let mut watched = Watched::new(Display::Plain, None);
        watched.at(0, &Event::Finished(Box::new(Summary { output: "out".into(), parts: 1, ..Summary::default() })));
        assert_eq!(watched.text(), "\n  rows         0 ok\n  results      out/part-*.parquet (1 part)\n\n");
    }

    #[test]
    fn a_closed_output_ends_nothing() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
        for display in [Display::Plain, Display::Json] {
            let mut reporter = Reporter::with(display, None, Box::new(Closed), Box::new(|| Duration::ZERO), Timestamp::UNIX_EPOCH);
            for event in [started(), progress(1), failure(1), Event::Finished(Box::default())] {
                reporter.handle(&event);
            }
        }
    }
}
