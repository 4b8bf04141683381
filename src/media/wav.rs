//! The RIFF family: WAV, big-endian RIFX, and RF64 or BW64 for more than 4 GiB.
//!
//! A reader of its own, because headers in the wild contradict themselves, and the samples behind them are good all the same:
//! lengths that were never filled in, a `fmt ` of 40 bytes whose extension is said to have none, data beyond the end of the RIFF
//! chunk.
//! Sources: Microsoft's "Multimedia Programming Interface and Data Specifications 1.0", its WAVEFORMATEXTENSIBLE, EBU Tech 3306.

use super::MediaError;
use super::pcm::{Layout, Sample};
use super::source::Source;

/// A header of more chunks than this is none.
const CHUNKS_MAX: usize = 10_000;
/// Lengths from here on stand for "unknown": programs that write into a pipe put them there.
const UNKNOWN_FROM: u64 = 0x7fff_0000;

const PCM: u16 = 1;
const MS_ADPCM: u16 = 2;
const FLOAT: u16 = 3;
const A_LAW: u16 = 6;
const MU_LAW: u16 = 7;
const IMA_ADPCM: u16 = 0x11;
const EXTENSIBLE: u16 = 0xfffe;

/// In a channel mask, the speaker for low-frequency effects.
const EFFECTS_SPEAKER: u32 = 8;

pub(super) enum Wav {
    Samples(Layout),
    /// For symphonia's reader.
    Adpcm,
}

#[derive(Clone, Copy)]
struct Data {
    start: u64,
    promised: Option<u64>,
}

/// Reads a header that begins with RIFF, RIFX, RF64 or BW64, and WAVE.
pub(super) fn read(source: &mut Source) -> Result<Wav, MediaError> {
    let big_endian = source.peek(0, 4).map_err(MediaError::read)? == b"RIFX";
    let number = |bytes: [u8; 4]| if big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) };
    let (mut position, mut long, mut format, mut data) = (12, None, None, None);
    for _ in 0..CHUNKS_MAX {
        let Some((name, length)) = chunk(source, position, number)? else { break };
        let start = position + 8;
        match &name {
            b"ds64" => {
                let body = source.peek(start, 16).map_err(MediaError::read)?;
                long = body.get(8..16).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
            }
            b"fmt " if format.is_none() => {
                format = Some(source.peek(start, length.min(64) as usize).map_err(MediaError::read)?);
            }
            b"data" if data.is_none() => {
                let length = if u64::from(length) == u64::from(u32::MAX) { long.unwrap_or(u64::MAX) } else { u64::from(length) };
                data = promised(source, start, length, number)?;
                if data.is_some_and(|data| data.promised.is_none() || format.is_some()) {
                    break;
                }
            }
            _ => {}
        }
        position = start + u64::from(length);
        // Chunks are padded to even lengths, though not by every program.
        if length % 2 == 1 {
            position += u64::from(!is_chunk(source, position)? || is_chunk(source, position + 1)?);
        }
    }
    let Some(format) = format else { return Err(MediaError::damaged("WAV", "it has no `fmt ` chunk")) };
    let Some(data) = data else { return Err(MediaError::NoSamples { format: "WAV" }) };
    layout(&format, data, big_endian)
}

fn chunk(source: &mut Source, position: u64, number: impl Fn([u8; 4]) -> u32) -> Result<Option<([u8; 4], u32)>, MediaError> {
    let head = source.peek(position, 8).map_err(MediaError::read)?;
    let (Some(name), Some(length)) = (head.first_chunk(), head.last_chunk()) else { return Ok(None) };
    Ok((head.len() == 8).then(|| (*name, number(*length))))
}

/// Whether what stands there looks like a chunk: a name of four letters, and a length that the file has.
fn is_chunk(source: &mut Source, position: u64) -> Result<bool, MediaError> {
    let name = source.peek(position, 4).map_err(MediaError::read)?;
    Ok(name.len() == 4 && name.iter().all(|&byte| byte == b' ' || byte.is_ascii_alphanumeric()))
}

/// A length of zero is one that was never filled in, unless another chunk follows.
fn promised(source: &mut Source, start: u64, length: u64, number: impl Fn([u8; 4]) -> u32) -> Result<Option<Data>, MediaError> {
    let rest = source.length().saturating_sub(start);
    if length == 0 {
        let follows =
            is_chunk(source, start)? && chunk(source, start, number)?.is_some_and(|(_, length)| u64::from(length) + 8 <= rest);
        return Ok((rest > 0 && !follows).then_some(Data { start, promised: None }));
    }
    let unknown = length > rest && length >= UNKNOWN_FROM && rest < UNKNOWN_FROM;
    Ok(Some(Data { start, promised: (!unknown).then_some(length) }))
}

fn layout(format: &[u8], data: Data, big_endian: bool) -> Result<Wav, MediaError> {
    let damaged = |reason: String| MediaError::damaged("WAV", reason);
    let read = |at: usize| -> Result<u16, MediaError> {
        let bytes = format.get(at..at + 2).and_then(|bytes| bytes.try_into().ok());
        let bytes = bytes.ok_or_else(|| damaged(format!("its `fmt ` chunk has {} bytes, not 16", format.len())))?;
        Ok(if big_endian { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) })
    };
    let wide = |at: usize| -> Result<u32, MediaError> {
        let (first, second) = (u32::from(read(at)?), u32::from(read(at + 2)?));
        Ok(if big_endian { first << 16 | second } else { second << 16 | first })
    };
    let (mut tag, channels, rate, stride) = (read(0)?, usize::from(read(2)?), wide(4)?, usize::from(read(12)?));
    let bits = if format.len() < 16 { 0 } else { usize::from(read(14)?) };
    let mut mask = 0;
    if tag == EXTENSIBLE {
        // The extension's own length, at 16, is zero in files whose extension is complete; the chunk's length decides.
        tag = if format.len() >= 40 { u16::try_from(wide(24)? & 0xffff).unwrap_or(PCM) } else { PCM };
        mask = if format.len() >= 24 { wide(20)? } else { 0 };
    }
    // Bytes of a sample as they lie, which may be more than its bits need.
    let held = if channels > 0 && stride.is_multiple_of(channels) { stride / channels } else { bits.div_ceil(8) };
    let sample = match (tag, bits) {
        (PCM, 1..=8) if held <= 1 => Sample::Unsigned8,
        (PCM, 1..=64) if (bits.div_ceil(8)..=8).contains(&held) => Sample::Signed(held),
        (PCM, 1..=64) => Sample::Signed(bits.div_ceil(8)),
        (FLOAT, 32) => Sample::Float32,
        (FLOAT, 64) => Sample::Float64,
        (A_LAW, _) => Sample::ALaw,
        (MU_LAW, _) => Sample::MuLaw,
        (MS_ADPCM | IMA_ADPCM, _) => return Ok(Wav::Adpcm),
        (PCM | FLOAT, _) => return Err(MediaError::unsupported(format!("WAV with samples of {bits} bits"))),
        _ => return Err(MediaError::unsupported(format!("WAV with {}", codec(tag)))),
    };
    let stride = if stride == 0 { channels * sample.bytes() } else { stride };
    let effects = effects(mask, channels);
    Ok(Wav::Samples(Layout {
        format: "WAV",
        sample,
        big_endian,
        channels,
        effects,
        rate,
        stride,
        start: data.start,
        promised: data.promised,
    }))
}

/// The channel, as a bit, that the mask gives to low-frequency effects.
fn effects(mask: u32, channels: usize) -> u64 {
    let complete = mask.count_ones() as usize >= channels;
    if complete && mask & EFFECTS_SPEAKER != 0 { 1 << (mask & (EFFECTS_SPEAKER - 1)).count_ones() } else { 0 }
}

/// Microsoft's mmreg.h.
fn codec(tag: u16) -> String {
    let name = match tag {
        0x31 => "GSM 6.10",
        0x40 | 0x64 => "G.721 or G.726 ADPCM",
        0x45 => "G.726 ADPCM",
        0x50 => "MPEG audio, layer 1 or 2",
        0x55 => "MP3",
        0x92 | 0x2000 => "AC-3",
        0xff | 0x1600..=0x1610 => "AAC",
        0x160..=0x163 => "Windows Media audio",
        0x674f..=0x6771 => "Vorbis",
        0x704f => "Opus",
        0xf1ac => "FLAC",
        _ => return format!("codec {tag:#06x}"),
    };
    name.to_owned()
}
