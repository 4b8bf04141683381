//! The rows of one file, framed: where each begins and ends, and what is wrong with it at sight.

use std::sync::Arc;

use super::corpus::Corpus;
use super::delimited::{Header, Scan, scan};
use super::files::ManifestFile;
use super::lines::{LineEnd, Lines};
use super::raw::{Extent, Fault};
use super::{ManifestError, ROW_BYTES_MAX};

/// How much of one file may be read a second time after quotes that are not closed; such a file could else take time with the
/// square of its size.
const REREAD_BYTES_MAX: usize = 4 * ROW_BYTES_MAX;

pub(super) struct RowReader {
    lines: Lines,
    /// Of a CSV or TSV file; none where the file is empty.
    header: Option<Arc<Header>>,
    /// Of a CSV or TSV file.
    delimiter: Option<u8>,
    corpus: Option<Corpus>,
    limits: Limits,
    reread_bytes: usize,
}

#[derive(Debug, Clone, Copy)]
struct Limits {
    row_bytes: usize,
    reread_bytes: usize,
}

impl RowReader {
    /// Opens a file and reads its header.
    pub fn open(file: &ManifestFile) -> Result<Self, ManifestError> {
        Self::open_within(file, Limits { row_bytes: ROW_BYTES_MAX, reread_bytes: REREAD_BYTES_MAX })
    }

    fn open_within(file: &ManifestFile, limits: Limits) -> Result<Self, ManifestError> {
        let lines = Lines::open(&file.path, limits.row_bytes)?;
        let delimiter = file.format.delimiter();
        let mut reader = Self { lines, header: None, delimiter, corpus: None, limits, reread_bytes: 0 };
        if let Some(delimiter) = delimiter {
            if let LineEnd::At { end, .. } = reader.lines.find_end(0)? {
                reader.corpus = Corpus::recognise(&file.path, reader.lines.unread(0..end));
            }
            if let Some(header) = reader.corpus.and_then(Header::absent) {
                reader.header = Some(Arc::new(header));
                return Ok(reader);
            }
            let mut row = Vec::new();
            if let Some(extent) = reader.next(&mut row)? {
                if let Some(fault) = extent.fault {
                    return Err(ManifestError::header(&file.path, fault.error));
                }
                reader.header = Some(Arc::new(Header::new(&file.path, &row, delimiter, reader.corpus)?));
            }
        }
        Ok(reader)
    }

    pub fn header(&self) -> Option<Arc<Header>> {
        self.header.clone()
    }

    /// Finds the next row and appends its bytes, without the line end, to `bytes`.
    pub fn next(&mut self, bytes: &mut Vec<u8>) -> Result<Option<Extent>, ManifestError> {
        loop {
            let line = self.lines.line();
            let start = bytes.len();
            let (end, next) = match self.lines.find_end(0)? {
                LineEnd::EndOfFile => return Ok(None),
                LineEnd::TooLong => {
                    let skipped = self.lines.skip_line()?;
                    let error = format!(
                        "the line has {} bytes, the limit for a row is {}; split the row, or correct the line ends",
                        skipped.bytes, self.limits.row_bytes
                    );
                    let fault = Some(Fault { error, input_hash: Some(skipped.input_hash) });
                    return Ok(Some(Extent { line, start, end: start, fault }));
                }
                LineEnd::At { end, next } => (end, next),
            };
            let content = self.lines.unread(0..end);
            let Some(delimiter) = self.delimiter else {
                if content.iter().all(u8::is_ascii_whitespace) {
                    self.lines.consume(next, 1);
                    continue;
                }
                return Ok(Some(self.take(bytes, end, next, 1, None)));
            };
            if content.is_empty() {
                self.lines.consume(next, 1);
                continue;
            }
            let scanned = if self.corpus.is_some() { Scan::Ends } else { scan(content, false, delimiter) };
            return Ok(Some(match scanned {
                Scan::Ends => self.take(bytes, end, next, 1, None),
                Scan::Stray => self.take(bytes, end, next, 1, Some("text follows a closing quote".into())),
                Scan::Open => self.take_quoted(bytes, end, next, delimiter)?,
            }));
        }
    }

    /// Takes a row whose first line leaves a quote open.
    ///
    /// Where the quote is not closed as it should be, the first line alone is the bad row: it is the one sure to be wrong, and the
    /// lines after it may be good rows.
    fn take_quoted(
        &mut self,
        bytes: &mut Vec<u8>,
        first_end: usize,
        first_next: usize,
        delimiter: u8,
    ) -> Result<Extent, ManifestError> {
        let first_line = self.lines.line();
        let (mut end, mut next, mut lines) = (first_end, first_next, 1);
        let error = loop {
            match self.lines.find_end(next)? {
                LineEnd::EndOfFile => break "a quote is opened and not closed before the end of the file".to_owned(),
                LineEnd::TooLong => break format!("a quote is opened and not closed within {} bytes", self.limits.row_bytes),
                LineEnd::At { end: line_end, next: line_next } => {
                    let scanned = scan(self.lines.unread(next..line_end), true, delimiter);
                    (end, next, lines) = (line_end, line_next, lines + 1);
                    match scanned {
                        Scan::Ends => return Ok(self.take(bytes, end, next, lines, None)),
                        Scan::Open => {}
                        Scan::Stray => {
                            let line = first_line + lines - 1;
                            break format!("a quote is opened, and text follows the quote that closes it on line {line}");
                        }
                    }
                }
            }
        };
        self.reread_bytes += next - first_next;
        if self.reread_bytes <= self.limits.reread_bytes {
            return Ok(self.take(bytes, first_end, first_next, 1, Some(error)));
        }
        let last_line = first_line + lines - 1;
        let error = format!("{error}; the file has many of these, so lines {first_line} to {last_line} are passed over as one row");
        Ok(self.take(bytes, end, next, lines, Some(error)))
    }

    fn take(&mut self, bytes: &mut Vec<u8>, end: usize, next: usize, lines: u64, error: Option<String>) -> Extent {
        let (line, start) = (self.lines.line(), bytes.len());
        bytes.extend_from_slice(self.lines.unread(0..end));
        self.lines.consume(next, lines);
        let remedy = "close the quote, and write each quote inside a quoted field as two (\"\")";
        let fault = error.map(|error| Fault { error: format!("{error}; {remedy}"), input_hash: None });
        Extent { line, start, end: bytes.len(), fault }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { row_bytes: 1000, reread_bytes: 4000 };

    fn read(name: &str, content: &[u8], limits: Limits) -> Result<Vec<(String, Extent, u64)>, ManifestError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        let file = ManifestFile::new(path, 0).unwrap();
        let mut reader = RowReader::open_within(&file, limits)?;
        let (mut rows, mut bytes) = (Vec::new(), Vec::new());
        while let Some(extent) = reader.next(&mut bytes)? {
            let text = String::from_utf8_lossy(&bytes[extent.start..extent.end]).into_owned();
            rows.push((text, extent, reader.lines.line()));
        }
        Ok(rows)
    }

    /// `line text`, and `!` before a row with a fault.
    fn check(content: &str, expected: &[&str]) {
        let rows = read("rows.csv", content.as_bytes(), LIMITS).unwrap();
        let shown: Vec<String> = rows
            .iter()
            .map(|(text, extent, _)| format!("{}{} {text}", if extent.fault.is_some() { "!" } else { "" }, extent.line))
            .collect();
        assert_eq!(shown, expected, "{content}");
    }

    #[test]
    fn quoted_line_ends_belong_to_the_row() {
        check("a,b\n1,\"x\n\ny\"\r\n\n2,z", &["2 1,\"x\n\ny\"", "6 2,z"]);
        check("\"a\n\",b\r\n1,\"x\r\ny\"\r\n", &["3 1,\"x\r\ny\""]);
    }

    #[test]
    fn an_unclosed_quote_costs_its_own_line_only() {
        check("a,b\n1,\"x\n2,y\n3,z\n", &["!2 1,\"x", "3 2,y", "4 3,z"]);
        check("a,b\n1,\"x\n2,y\n3,\"z\"\n", &["!2 1,\"x", "3 2,y", "4 3,\"z\""]);
        check("a,b\n1,x\n2,\"", &["2 1,x", "!3 2,\""]);
        let many = format!("a,b\n1,\"x\n{}", "2,y\n".repeat(1000));
        assert_eq!(read("rows.csv", many.as_bytes(), LIMITS).unwrap().iter().filter(|row| row.1.fault.is_none()).count(), 1000);
    }

    #[test]
    fn quotes_that_would_be_reread_for_ever_are_passed_over_together() {
        // From any line of this, every later line leaves a quote open.
        let content = format!("a,b\n{}", "x\",\"y\n".repeat(20_000));
        let rows = read("rows.csv", content.as_bytes(), LIMITS).unwrap();
        assert!(rows.len() < 1000, "{}", rows.len());
        assert!(rows.iter().all(|(text, extent, _)| extent.fault.is_some() && text.len() <= LIMITS.row_bytes));
        let last = rows.last().unwrap();
        assert!(last.1.fault.as_ref().unwrap().error.contains("are passed over as one row"));
        assert_eq!(last.2, 20_002);
    }

    #[test]
    fn a_header_that_is_not_closed_or_too_long_is_a_bad_file() {
        let fails = |content: &[u8]| read("rows.csv", content, LIMITS).unwrap_err().to_string();
        assert!(fails(b"a,\"b\n1,2\n").contains("the header of"));
        assert!(fails(&[b'a'; 2000]).contains("2000 bytes"));
        assert!(read("rows.csv", b"", LIMITS).unwrap().is_empty());
        assert!(read("rows.csv", b"a,b\n", LIMITS).unwrap().is_empty());
    }

    /// Rows and blank lines follow each other without gap or overlap, up to the end of the file.
    fn every_line_is_accounted_for(name: &str, content: &[u8], limits: Limits) -> Result<(), TestCaseError> {
        let Ok(rows) = read(name, content, limits) else { return Ok(()) };
        let content = content.strip_prefix(b"\xef\xbb\xbf").unwrap_or(content);
        let mut lines: Vec<&[u8]> = content.split(|&byte| byte == b'\n').collect();
        lines.pop_if(|last| last.is_empty());
        let blank = |line: &&[u8]| {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if name.ends_with(".csv") { line.is_empty() } else { line.iter().all(u8::is_ascii_whitespace) }
        };
        // A header's lines are its own; the first row says where they end at the latest.
        let mut after = if name.ends_with(".csv") { rows.first().map_or(lines.len() as u64 + 1, |row| row.1.line) } else { 1 };
        for (_, extent, next) in &rows {
            prop_assert!(after <= extent.line && extent.line < *next);
            prop_assert!(lines[after as usize - 1..extent.line as usize - 1].iter().all(blank));
            prop_assert!(!blank(&lines[extent.line as usize - 1]));
            after = *next;
        }
        prop_assert!(lines[(after as usize - 1).min(lines.len())..].iter().all(blank));
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_line_of_arbitrary_bytes_is_accounted_for(content in proptest::collection::vec(any::<u8>(), 0..200)) {
            every_line_is_accounted_for("rows.jsonl", &content, LIMITS)?;
            every_line_is_accounted_for("rows.csv", &content, LIMITS)?;
        }

        #[test]
        fn every_line_of_hostile_csv_is_accounted_for(
            content in "[\",\n\r ab]{0,120}",
            row_bytes in 5usize..40,
            reread_bytes in 0usize..60,
        ) {
            let limits = Limits { row_bytes, reread_bytes };
            every_line_is_accounted_for("rows.jsonl", content.as_bytes(), limits)?;
            every_line_is_accounted_for("rows.csv", format!("a,b\n{content}").as_bytes(), limits)?;
            every_line_is_accounted_for("rows.csv", content.as_bytes(), limits)?;
        }
    }
}
