//! The bytes of a recording, from a file or from memory, with a limit on how many one call of a demuxer may take.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{MediaError, MediaSource, stored_bytes};

/// Bytes that opening a file may take: the tables of a film of days, or a junk start, and no more.
pub(super) const OPEN_BYTES_MAX: u64 = 256 << 20;
/// Bytes that one packet may take, junk before it included.
pub(super) const PACKET_BYTES_MAX: u64 = 64 << 20;

/// Buffers of a demuxer grow with what it reads, whatever a header says; so a limit on reading is one on memory, and on time.
#[derive(Debug, Clone)]
pub(super) struct Allowance(Arc<AtomicU64>);

impl Allowance {
    pub fn renew(&self, bytes: u64) {
        self.0.store(bytes, Ordering::Relaxed);
    }

    pub fn is_spent(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}

#[derive(Debug)]
enum Inner {
    File(File),
    Bytes(Cursor<Arc<[u8]>>),
}

#[derive(Debug)]
pub(super) struct Source {
    inner: Inner,
    /// What lies before is not seen.
    start: u64,
    length: u64,
    /// What a demuxer takes for the length.
    stated_length: u64,
    allowance: Allowance,
}

impl Source {
    pub fn open(source: &MediaSource) -> Result<Self, MediaError> {
        let length = stored_bytes(source)?;
        let inner = match source {
            MediaSource::File(path) => Inner::File(File::open(path).map_err(MediaError::read)?),
            MediaSource::Bytes { bytes, .. } => Inner::Bytes(Cursor::new(bytes.clone())),
        };
        Ok(Self { inner, start: 0, length, stated_length: length, allowance: Allowance(Arc::new(AtomicU64::new(OPEN_BYTES_MAX))) })
    }

    /// Forgets the first bytes, tags for instance: what follows is the file from now on.
    pub fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let bytes = bytes.min(self.length);
        (self.start, self.length) = (self.start + bytes, self.length - bytes);
        self.stated_length = self.length;
        self.seek(SeekFrom::Start(0)).map(drop)
    }

    /// Pretends to be as long as a header says, for a demuxer that else would not look at what there is of a cut off file.
    pub fn state_length(&mut self, length: u64) {
        self.stated_length = length.max(self.length);
    }

    pub fn length(&self) -> u64 {
        self.length
    }

    pub fn allowance(&self) -> Allowance {
        self.allowance.clone()
    }

    /// Up to `length` bytes from `position`, fewer at the end.
    pub fn peek(&mut self, position: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.seek(SeekFrom::Start(position))?;
        self.take(length as u64).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.allowance.0.load(Ordering::Relaxed);
        if left == 0 && !buffer.is_empty() {
            return Err(io::Error::other("more bytes without sound than is allowed"));
        }
        let length = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = match &mut self.inner {
            Inner::File(file) => file.read(&mut buffer[..length])?,
            Inner::Bytes(cursor) => cursor.read(&mut buffer[..length])?,
        };
        self.allowance.0.store(left - read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl Seek for Source {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        let position = match position {
            SeekFrom::Start(position) => SeekFrom::Start(self.start.saturating_add(position)),
            SeekFrom::End(offset) => SeekFrom::Start(self.start.saturating_add(self.stated_length).saturating_add_signed(offset)),
            relative => relative,
        };
        let position = match &mut self.inner {
            Inner::File(file) => file.seek(position)?,
            Inner::Bytes(cursor) => cursor.seek(position)?,
        };
        position.checked_sub(self.start).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
    }
}

impl symphonia::core::io::MediaSource for Source {
    fn is_seekable(&self) -> bool {
        true
    }

    fn byte_len(&self) -> Option<u64> {
        Some(self.stated_length)
    }
}
