//! What symphonia does not say of an MP4 file: protection, the codec of a track that it skips, and the edit that cuts off what the
//! encoder put in front.
//!
//! Sources: ISO/IEC 14496-12 (the boxes), 14496-14 and 14496-15 (their sample entries).

use super::MediaError;
use super::source::Source;

/// Boxes that are looked at.
const BOXES_MAX: usize = 20_000;
const DEPTH_MAX: usize = 8;
const ENTRY_BYTES_MAX: usize = 4096;

#[derive(Debug, Default, Clone)]
pub(super) struct Track {
    pub id: u32,
    /// `soun`, `vide`, …
    pub handler: [u8; 4],
    /// The kind of its samples: `mp4a`, `enca`, …
    pub entry: [u8; 4],
    /// The scheme of its protection: `cenc`, `itun`, …
    pub scheme: Option<String>,
    /// Ticks a second of its own times.
    pub timescale: u32,
    /// Of its only edit: where it starts, in its own ticks, and how long it is, in the film's.
    pub edit: Option<(u64, u64)>,
}

impl Track {
    pub fn is_audio(&self) -> bool {
        self.handler == *b"soun"
    }
}

#[derive(Debug, Default)]
pub(super) struct Movie {
    pub timescale: u32,
    pub tracks: Vec<Track>,
    /// Whether there is a `moov` at all.
    pub is_indexed: bool,
    /// Where the last box ends by its header, which in a cut off file is behind the file's end.
    pub stated_end: u64,
    boxes: usize,
}

/// Looks through a file's `moov`; what is damaged is left to the demuxer to tell.
pub(super) fn read(source: &mut Source) -> Result<Movie, MediaError> {
    let mut movie = Movie::default();
    let length = source.length();
    movie.walk(source, 0, length, 0)?;
    Ok(movie)
}

impl Movie {
    fn walk(&mut self, source: &mut Source, mut position: u64, end: u64, depth: usize) -> Result<(), MediaError> {
        while position + 8 <= end && self.boxes < BOXES_MAX {
            self.boxes += 1;
            let head = source.peek(position, 16).map_err(MediaError::read)?;
            let (Some(&short), Some(&name)) = (head.first_chunk::<4>(), head.get(4..8).and_then(|name| name.first_chunk::<4>()))
            else {
                return Ok(());
            };
            let (length, header) = match (u32::from_be_bytes(short), head.get(8..16).and_then(|long| long.first_chunk::<8>())) {
                (0, _) => (end - position, 8),
                (1, Some(&long)) => (u64::from_be_bytes(long), 16),
                (short, _) => (u64::from(short), 8),
            };
            if length < header {
                return Ok(());
            }
            if depth == 0 {
                self.is_indexed |= &name == b"moov";
                self.stated_end = self.stated_end.max(position.saturating_add(length));
            }
            let (start, stop) = (position + header, position.saturating_add(length).min(end));
            match &name {
                b"moov" | b"mdia" | b"minf" | b"stbl" | b"edts" if depth < DEPTH_MAX => {
                    self.walk(source, start, stop, depth + 1)?
                }
                b"trak" if depth < DEPTH_MAX => {
                    self.tracks.push(Track::default());
                    self.walk(source, start, stop, depth + 1)?;
                }
                b"mvhd" | b"tkhd" | b"mdhd" | b"hdlr" | b"elst" | b"stsd" => {
                    let wanted = usize::try_from(stop - start).unwrap_or(usize::MAX).min(ENTRY_BYTES_MAX);
                    let body = source.peek(start, wanted).map_err(MediaError::read)?;
                    self.note(&name, &body);
                }
                _ => {}
            }
            position = stop.max(position + 8);
        }
        Ok(())
    }

    fn note(&mut self, name: &[u8; 4], body: &[u8]) {
        let word = |at: usize| body.get(at..at + 4).and_then(|bytes| bytes.first_chunk()).map(|&bytes| u32::from_be_bytes(bytes));
        let long = body.first() == Some(&1);
        if name == b"mvhd" {
            self.timescale = word(if long { 20 } else { 12 }).unwrap_or(0);
            return;
        }
        let Some(track) = self.tracks.last_mut() else { return };
        match name {
            b"tkhd" => track.id = word(if long { 20 } else { 12 }).unwrap_or(0),
            b"mdhd" => track.timescale = word(if long { 20 } else { 12 }).unwrap_or(0),
            b"hdlr" => track.handler = word(8).map_or([0; 4], u32::to_be_bytes),
            b"elst" => track.edit = edit(body, long),
            b"stsd" => {
                track.entry = word(12).map_or([0; 4], u32::to_be_bytes);
                if track.entry == *b"enca" || track.entry == *b"encv" || track.entry == *b"drms" || track.entry == *b"drmi" {
                    track.scheme = Some(scheme(body));
                }
            }
            _ => {}
        }
    }
}

/// The only edit that plays something; several make a film out of pieces, which are not put together here.
fn edit(body: &[u8], long: bool) -> Option<(u64, u64)> {
    let count = u32::from_be_bytes(*body.get(4..8)?.first_chunk()?) as usize;
    let size = if long { 20 } else { 12 };
    if body.len() < 8 + count.saturating_mul(size) {
        return None;
    }
    let mut edits = body[8..].chunks_exact(size).take(count).filter_map(|entry| {
        let (duration, start) = if long {
            (u64::from_be_bytes(*entry.first_chunk()?), i64::from_be_bytes(*entry.get(8..16)?.first_chunk()?))
        } else {
            let start = i32::from_be_bytes(*entry.get(4..8)?.first_chunk()?);
            (u64::from(u32::from_be_bytes(*entry.first_chunk()?)), i64::from(start))
        };
        // A negative start is a pause before the sound.
        Some((u64::try_from(start).ok()?, duration))
    });
    let only = edits.next();
    if edits.next().is_some() { None } else { only }
}

/// The four letters behind `schm`.
fn scheme(body: &[u8]) -> String {
    let at = body.windows(4).position(|name| name == b"schm");
    let letters = at.and_then(|at| body.get(at + 8..at + 12)).unwrap_or(b"DRM");
    match letters {
        b"itun" => "Apple FairPlay".to_owned(),
        _ => letters.iter().map(|&letter| char::from(letter)).filter(|letter| letter.is_ascii_alphanumeric()).collect(),
    }
}
