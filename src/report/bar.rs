//! The bar on a terminal.

use std::{
    io::{self, Write},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::Progress;

pub(super) struct Bar {
    bar: ProgressBar,
}

impl Bar {
    pub fn new(target: ProgressDrawTarget) -> Self {
        let bar = ProgressBar::with_draw_target(None, target);
        bar.enable_steady_tick(Duration::from_millis(500));
        Bar { bar }
    }

    pub fn show(&self, progress: &Progress) {
        // A total of 0 would make indicatif draw a full bar.
        let total = progress.rows_total.filter(|&total| total > 0);
        if self.bar.length() != total || self.bar.position() == 0 {
            match total {
                Some(total) => {
                    self.bar.set_length(total);
                    self.bar.set_style(style("{bar:24} {msg}"));
                }
                None => self.bar.set_style(style("{spinner} {msg}")),
            }
        }
        self.bar.set_position(progress.rows_done);
        self.bar.set_message(progress.line());
    }

    /// Prints above the bar.
    pub fn print(&self, text: &str) {
        // A terminal that is gone is no fault of the run.
        self.bar.suspend(|| drop(writeln!(io::stderr(), "{text}")));
    }

    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// `template` is one of the two above.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("█▉▊▋▌▍▎▏ ")
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use indicatif::TermLike;

    use super::*;

    /// A terminal that keeps what is written to it.
    #[derive(Debug, Clone, Default)]
    struct Terminal(Arc<Mutex<String>>);

    impl TermLike for Terminal {
        fn width(&self) -> u16 {
            200
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.0.lock().unwrap().clear();
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_bar_has_rows_rates_failures_and_time_left() {
        let terminal = Terminal::default();
        let bar = Bar::new(ProgressDrawTarget::term_like(Box::new(terminal.clone())));
        let progress = Progress {
            rows_total: Some(40),
            rows_done: 10,
            rows_failed: 1,
            rows_running: 4,
            tokens_per_second: 55.5,
            seconds_left: Some(12.0),
            ..Progress::default()
        };
        bar.show(&progress);
        bar.bar.force_draw();
        let text = terminal.0.lock().unwrap().clone();
        let expected = "10 of 40 rows (25.0%), 1 failed, 55.5 tokens/s, 4 running, 0 waiting, 12 s left";
        assert!(text.contains(expected) && text.contains("██████"), "{text:?}");
        bar.show(&Progress { rows_total: None, ..progress });
        bar.show(&Progress::default());
        bar.end();
    }
}
