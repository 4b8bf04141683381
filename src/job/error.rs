//! What is wrong with a job file, shown where it stands.

use std::fmt::{self, Write as _};
use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Bytes of a job file at most.
pub(super) const FILE_BYTES_MAX: u64 = 1 << 18;
/// Problems that are kept and shown; the rest are counted.
pub(super) const PROBLEMS_MAX: usize = 50;
/// Characters of a line that are shown.
const LINE_CHARS_MAX: usize = 120;
/// Of these, before the fault where the line is longer.
const LINE_CHARS_BEFORE: usize = 60;

#[derive(Debug, Error)]
pub enum JobError {
    #[error("failed to read the job file {}", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("the job file {} has more than {bytes_max} bytes; a manifest is named in `input.manifest`", file.display())]
    TooLarge { file: PathBuf, bytes_max: u64 },
    /// Paths of a job are text in its TOML.
    #[error("the folder of the job file {} has a name that is not UTF-8; rename it or move the job file", file.display())]
    Folder { file: PathBuf },
    #[error("{}", listing(file, problems, *left_off))]
    Problems {
        file: PathBuf,
        /// In the order of the file, then of the settings.
        problems: Vec<Problem>,
        /// How many more there are.
        left_off: usize,
    },
}

/// One thing that is wrong with a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub place: Place,
    /// The setting's full dotted name, where the problem is one setting's.
    pub key: Option<String>,
    /// What is wrong and what was expected.
    pub message: String,
    /// What to do about it.
    pub help: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// `file:line:column`, both from 1, columns in characters; the line as far as it is shown, and the part of it that is marked.
    Line { file: PathBuf, line: usize, column: usize, shown: String, mark_start: usize, mark_chars: usize },
    /// A `--set`, as typed.
    Setting(String),
    /// Nowhere: something is missing.
    File(PathBuf),
}

impl Place {
    /// Bytes `start .. end` of `text`, which need not be UTF-8.
    pub(super) fn line(file: &std::path::Path, text: &[u8], start: usize, end: usize) -> Self {
        let start = start.min(text.len());
        let line_start = text[..start].iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
        let line_end = text[start..].iter().position(|&byte| byte == b'\n').map_or(text.len(), |newline| start + newline);
        let line = text[..line_start].iter().filter(|&&byte| byte == b'\n').count() + 1;
        let shown = |bytes: &[u8]| -> Vec<char> {
            let text = String::from_utf8_lossy(bytes);
            let text = if line_start == 0 { text.trim_start_matches('\u{feff}') } else { &text };
            text.trim_end_matches('\r').chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
        };
        let whole = shown(&text[line_start..line_end]);
        let before = shown(&text[line_start..start]).len().min(whole.len());
        let marked = String::from_utf8_lossy(&text[start..end.clamp(start, line_end.max(start))]).trim_end().chars().count();

        let skipped = if whole.len() > LINE_CHARS_MAX { before.saturating_sub(LINE_CHARS_BEFORE) } else { 0 };
        let kept: String = whole.iter().skip(skipped).take(LINE_CHARS_MAX).collect();
        let shown = if skipped > 0 { format!("…{kept}") } else { kept };
        let mark_start = before - skipped + usize::from(skipped > 0);
        let mark_chars = marked.min(shown.chars().count().saturating_sub(mark_start)).max(1);
        Self::Line { file: file.to_owned(), line, column: before + 1, shown, mark_start, mark_chars }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Line { file, line, column, shown, mark_start, mark_chars } => {
                let number = line.to_string();
                let margin = " ".repeat(number.len());
                writeln!(f, "{}:{line}:{column}: {}", file.display(), self.message)?;
                writeln!(f, "{margin} |")?;
                writeln!(f, "{}", format!("{number} | {shown}").trim_end())?;
                write!(f, "{margin} | {}{}", " ".repeat(*mark_start), "^".repeat(*mark_chars))?;
                self.help.as_ref().map_or(Ok(()), |help| write!(f, "\n{margin} = help: {help}"))
            }
            Place::Setting(setting) => {
                write!(f, "--set {setting}: {}", self.message)?;
                self.help.as_ref().map_or(Ok(()), |help| write!(f, "\n  = help: {help}"))
            }
            Place::File(file) => {
                write!(f, "{}: {}", file.display(), self.message)?;
                self.help.as_ref().map_or(Ok(()), |help| write!(f, "\n  = help: {help}"))
            }
        }
    }
}

fn listing(file: &std::path::Path, problems: &[Problem], left_off: usize) -> String {
    let count = problems.len() + left_off;
    let mut text = format!("the job {} cannot be run: {count} problem{}", file.display(), if count == 1 { "" } else { "s" });
    for problem in problems {
        // Writing to a String cannot fail.
        let _ = write!(text, "\n\n{problem}");
    }
    if left_off > 0 {
        let _ = write!(text, "\n\nand {left_off} more");
    }
    text
}
