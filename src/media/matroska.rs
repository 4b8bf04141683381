//! What symphonia does not say of a Matroska or WebM file: what its encoder put in front of the sound and behind it.
//!
//! Source: RFC 9559 (Matroska), 5.1.4.1.25 `CodecDelay` and 5.1.3.5.7 `DiscardPadding`; RFC 8794 (EBML) for how numbers lie.

use super::MediaError;
use super::source::Source;

/// Bytes at the start in which the tracks are looked for.
const HEAD_BYTES: usize = 1 << 18;
/// Bytes at the end in which the last cluster is looked for.
const TAIL_BYTES: u64 = 1 << 20;
/// Places that look like the start of a cluster.
const CANDIDATES_MAX: usize = 64;

const SEGMENT: u64 = 0x1853_8067;
const TRACKS: u64 = 0x1654_ae6b;
const TRACK_ENTRY: u64 = 0xae;
const TRACK_NUMBER: u64 = 0xd7;
const CODEC_DELAY: u64 = 0x56aa;
const CLUSTER: u64 = 0x1f43_b675;
const SIMPLE_BLOCK: u64 = 0xa3;
const BLOCK_GROUP: u64 = 0xa0;
const BLOCK: u64 = 0xa1;
const DISCARD_PADDING: u64 = 0x75a2;
/// `Timestamp`, `PrevSize`, `Position`, `Void`, `CRC-32`.
const OTHER_CHILDREN: [u64; 5] = [0xe7, 0xab, 0xa7, 0xec, 0xbf];

/// Nanoseconds of a track that are no sound.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Extent {
    pub track: u64,
    pub delay: u64,
    pub padding: u64,
}

pub(super) fn read(source: &mut Source) -> Result<Vec<Extent>, MediaError> {
    let head = source.peek(0, HEAD_BYTES).map_err(MediaError::read)?;
    let mut extents = tracks(&head).unwrap_or_default();
    let start = source.length().saturating_sub(TAIL_BYTES);
    let tail = source.peek(start, TAIL_BYTES as usize).map_err(MediaError::read)?;
    let places = (0..tail.len().saturating_sub(4)).rev().filter(|&at| tail[at..at + 4] == [0x1f, 0x43, 0xb6, 0x75]);
    for (track, padding) in places.take(CANDIDATES_MAX).find_map(|at| cluster(&tail[at..])).unwrap_or_default() {
        extents.iter_mut().filter(|extent| extent.track == track).for_each(|extent| extent.padding = padding);
    }
    Ok(extents)
}

fn tracks(head: &[u8]) -> Option<Vec<Extent>> {
    let (_, _, rest) = element(head)?;
    let (id, rest) = number(rest, true)?;
    let (_, mut rest) = number(rest, false).filter(|_| id == SEGMENT)?;
    let mut body = loop {
        let (id, body, after) = element(rest)?;
        if id == TRACKS {
            break body;
        }
        rest = after;
    };
    let mut extents = Vec::new();
    while let Some((id, mut entry, after)) = element(body) {
        let mut extent = Extent::default();
        while let Some((field, value, next)) = element(entry).filter(|_| id == TRACK_ENTRY) {
            match field {
                TRACK_NUMBER => extent.track = unsigned(value),
                CODEC_DELAY => extent.delay = unsigned(value),
                _ => {}
            }
            entry = next;
        }
        extents.push(extent);
        body = after;
    }
    Some(extents)
}

/// The last block of each track in a cluster: its track, and the nanoseconds that it has too many.
fn cluster(bytes: &[u8]) -> Option<Vec<(u64, u64)>> {
    let (_, mut rest, _) = element(bytes).filter(|(id, ..)| *id == CLUSTER)?;
    let mut last: Vec<(u64, u64)> = Vec::new();
    while let Some((id, body, after)) = element(rest) {
        let block = match id {
            SIMPLE_BLOCK => Some((body, 0)),
            BLOCK_GROUP => Some(group(body)?),
            other if OTHER_CHILDREN.contains(&other) => None,
            // The end of a cluster of unknown length.
            _ => break,
        };
        if let Some((block, padding)) = block {
            let (track, _) = number(block, false)?;
            last.retain(|(other, _)| *other != track);
            last.push((track, padding));
        }
        rest = after;
    }
    (!last.is_empty()).then_some(last)
}

fn group(mut rest: &[u8]) -> Option<(&[u8], u64)> {
    let (mut block, mut padding) = (None, 0);
    while let Some((id, body, after)) = element(rest) {
        match id {
            BLOCK => block = Some(body),
            // A negative one would add what is not there.
            DISCARD_PADDING if body.first().is_some_and(|&byte| byte < 0x80) => padding = unsigned(body),
            _ => {}
        }
        rest = after;
    }
    Some((block?, padding))
}

fn unsigned(body: &[u8]) -> u64 {
    body.iter().take(8).fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// An element's id, its body, and what follows.
fn element(bytes: &[u8]) -> Option<(u64, &[u8], &[u8])> {
    let (id, rest) = number(bytes, true)?;
    let (length, body) = number(rest, false)?;
    let unknown = rest[0].leading_zeros() as usize + 1;
    let is_unknown = length == (1 << (7 * unknown)) - 1;
    let length = if is_unknown { body.len() } else { usize::try_from(length).ok()? };
    // A body that the file does not hold in full is not looked at.
    Some((id, body.get(..length)?, &body[length..]))
}

/// A number whose first byte says by its leading zeros how many follow; ids keep the bit that ends them.
fn number(bytes: &[u8], is_id: bool) -> Option<(u64, &[u8])> {
    let first = *bytes.first()?;
    let length = first.leading_zeros() as usize + 1;
    if length > 8 || bytes.len() < length {
        return None;
    }
    let head = if is_id { u64::from(first) } else { u64::from(first) & ((1 << (8 - length)) - 1) };
    let value = bytes[1..length].iter().fold(head, |value, &byte| value << 8 | u64::from(byte));
    Some((value, &bytes[length..]))
}
