//! Lines of a file, found without holding more than one row of it.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memchr::memchr;

use super::ManifestError;
use super::raw::first_8_bytes;

const CHUNK_BYTES: usize = 256 * 1024;
const BOM: &[u8] = b"\xef\xbb\xbf";

/// A window onto a file that starts at its first unread byte. All offsets count from there.
pub(super) struct Lines {
    file: File,
    path: PathBuf,
    buffer: Vec<u8>,
    /// Where the unread bytes begin in `buffer`.
    start: usize,
    file_ended: bool,
    /// The line at the first unread byte, from 1.
    line: u64,
    row_bytes_max: usize,
}

/// Where a line ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LineEnd {
    /// `end` is without the line's `\n` or `\r\n`; the next line begins at `next`.
    At { end: usize, next: usize },
    /// Not within `row_bytes_max` of the first unread byte.
    TooLong,
    /// There is no such line: the file ended.
    EndOfFile,
}

/// A line that was passed over.
pub(super) struct Skipped {
    pub bytes: u64,
    pub input_hash: u64,
}

impl Lines {
    /// Opens a file, passes over its byte order mark and refuses what cannot be UTF-8 text.
    pub fn open(path: &Path, row_bytes_max: usize) -> Result<Self, ManifestError> {
        let file = File::open(path).map_err(|error| ManifestError::read(path, error))?;
        let (path, buffer) = (path.to_path_buf(), Vec::new());
        let mut lines = Self { file, path, buffer, start: 0, file_ended: false, line: 1, row_bytes_max };
        while lines.buffer.len() < 4 && !lines.file_ended {
            lines.fill()?;
        }
        if let Some(reason) = not_text(&lines.buffer) {
            return Err(ManifestError::format(&lines.path, reason));
        }
        if lines.buffer.starts_with(BOM) {
            lines.start = BOM.len();
        }
        Ok(lines)
    }

    pub fn line(&self) -> u64 {
        self.line
    }

    /// Finds the end of the line that begins at `from`, reading on as needed.
    pub fn find_end(&mut self, from: usize) -> Result<LineEnd, ManifestError> {
        let mut searched = from;
        loop {
            let unread = &self.buffer[self.start..];
            if let Some(at) = memchr(b'\n', &unread[searched..]) {
                let newline = searched + at;
                return Ok(self.line_end(from, newline, newline + 1));
            }
            searched = unread.len();
            if self.file_ended {
                return Ok(if searched == from { LineEnd::EndOfFile } else { self.line_end(from, searched, searched) });
            }
            // One byte of grace: it may be the `\r` of a line end.
            if searched > self.row_bytes_max + 1 {
                return Ok(LineEnd::TooLong);
            }
            self.fill()?;
        }
    }

    fn line_end(&self, from: usize, end: usize, next: usize) -> LineEnd {
        let line = &self.buffer[self.start + from..self.start + end];
        let end = if line.last() == Some(&b'\r') { end - 1 } else { end };
        if end > self.row_bytes_max { LineEnd::TooLong } else { LineEnd::At { end, next } }
    }

    /// Bytes that [`Lines::find_end`] has found.
    pub fn unread(&self, range: Range<usize>) -> &[u8] {
        &self.buffer[self.start + range.start..self.start + range.end]
    }

    /// Passes over `bytes`, which hold `lines` line ends.
    pub fn consume(&mut self, bytes: usize, lines: u64) {
        self.start += bytes;
        self.line += lines;
    }

    /// Passes over one line of any length, holding a chunk of it at a time.
    pub fn skip_line(&mut self) -> Result<Skipped, ManifestError> {
        let mut hasher = blake3::Hasher::new();
        let mut bytes = 0;
        loop {
            let unread = &self.buffer[self.start..];
            let newline = memchr(b'\n', unread);
            let piece = newline.unwrap_or(unread.len());
            hasher.update(&unread[..piece]);
            bytes += piece as u64;
            self.start += piece;
            if newline.is_some() {
                self.start += 1;
            }
            if newline.is_some() || self.file_ended {
                self.line += 1;
                return Ok(Skipped { bytes, input_hash: first_8_bytes(&hasher.finalize()) });
            }
            self.fill()?;
        }
    }

    /// Reads a chunk behind the unread bytes.
    fn fill(&mut self) -> Result<(), ManifestError> {
        self.buffer.drain(..self.start);
        self.start = 0;
        let held = self.buffer.len();
        self.buffer.resize(held + CHUNK_BYTES, 0);
        let read = loop {
            match self.file.read(&mut self.buffer[held..]) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => break read,
            }
        };
        let read = read.map_err(|error| ManifestError::read(&self.path, error));
        self.buffer.truncate(held + *read.as_ref().unwrap_or(&0));
        self.file_ended = read? == 0;
        Ok(())
    }
}

/// Why these first bytes cannot begin a manifest of text.
fn not_text(first: &[u8]) -> Option<String> {
    let wide = |encoding: &str| Some(format!("it is {encoding} text; re-save it as UTF-8"));
    match first {
        [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] => wide("UTF-32"),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => wide("UTF-16"),
        // Without a byte order mark, text in these encodings still begins with ASCII characters.
        [1..=0x7f, 0, 0, 0, ..] | [0, 0, 0, 1..=0x7f, ..] => wide("UTF-32"),
        [1..=0x7f, 0, 1..=0x7f, 0, ..] | [0, 1..=0x7f, 0, 1..=0x7f, ..] => wide("UTF-16"),
        [0x1f, 0x8b, ..] => Some("it is compressed with gzip; decompress it first".into()),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some("it is compressed with zstd; decompress it first".into()),
        [b'P', b'K', 3, 4, ..] => Some("it is a zip archive; unpack it, or save the sheet as CSV in UTF-8".into()),
        [b'P', b'A', b'R', b'1', ..] => Some("it is Parquet; name it .parquet".into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(bytes: &[u8], row_bytes_max: usize) -> (tempfile::TempDir, Lines) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        std::fs::write(&path, bytes).unwrap();
        let lines = Lines::open(&path, row_bytes_max).unwrap();
        (folder, lines)
    }

    fn check(bytes: &[u8], row_bytes_max: usize, expected: &[&str]) {
        let (_folder, mut lines) = lines_of(bytes, row_bytes_max);
        let mut seen = Vec::new();
        loop {
            let number = lines.line();
            match lines.find_end(0).unwrap() {
                LineEnd::EndOfFile => break,
                LineEnd::TooLong => seen.push(format!("{number}: {} bytes", lines.skip_line().unwrap().bytes)),
                LineEnd::At { end, next } => {
                    seen.push(format!("{number}: {}", String::from_utf8_lossy(lines.unread(0..end))));
                    lines.consume(next, 1);
                }
            }
        }
        assert_eq!(seen, expected);
    }

    #[test]
    fn line_ends_of_every_kind() {
        check(b"", 8, &[]);
        check(b"a", 8, &["1: a"]);
        check(b"a\n", 8, &["1: a"]);
        check(b"a\r\n\r\n\nb\r", 8, &["1: a", "2: ", "3: ", "4: b"]);
        check(b"\xef\xbb\xbfa\nb", 8, &["1: a", "2: b"]);
    }

    #[test]
    fn a_line_of_exactly_the_limit_is_kept_and_one_byte_more_is_not() {
        check(b"12345678\n12345678\r\n123456789\n12345678", 8, &["1: 12345678", "2: 12345678", "3: 9 bytes", "4: 12345678"]);
        check(b"123456789", 8, &["1: 9 bytes"]);
    }

    #[test]
    fn a_line_of_50_mb_is_never_held_whole() {
        let mut bytes = vec![b'x'; 50_000_000];
        bytes.extend_from_slice(b"\nnext\n");
        let (_folder, mut lines) = lines_of(&bytes, 1 << 20);
        assert_eq!(lines.find_end(0).unwrap(), LineEnd::TooLong);
        let skipped = lines.skip_line().unwrap();
        assert_eq!(skipped.bytes, 50_000_000);
        assert_eq!(skipped.input_hash, first_8_bytes(&blake3::hash(&bytes[..50_000_000])));
        assert!(lines.buffer.capacity() <= 4 << 20, "{}", lines.buffer.capacity());
        assert_eq!((lines.line(), lines.find_end(0).unwrap()), (2, LineEnd::At { end: 4, next: 5 }));
    }

    #[test]
    fn what_is_not_utf_8_text_is_named() {
        let named = |bytes: &[u8]| not_text(bytes).unwrap_or_default();
        let wide: Vec<u8> = "{\"id\"".encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert!(named(&wide).contains("UTF-16"));
        assert!(named(b"\xff\xfe{\0").contains("UTF-16"));
        assert!(named(b"\xfe\xff\0{").contains("UTF-16"));
        assert!(named(b"\xff\xfe\0\0{\0\0\0").contains("UTF-32"));
        assert!(named(b"\x1f\x8b\x08\0").contains("gzip"));
        assert!(named(b"PAR1").contains("Parquet"));
        assert_eq!(not_text(b"{\"id\": 1}"), None);
        assert_eq!(not_text(b""), None);
    }
}
