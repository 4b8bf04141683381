//! Which AAC a stream is. What is decoded is AAC-LC; HE-AAC comes in its clothes, and would be heard at half its rate without a
//! word.
//!
//! Source: ISO/IEC 14496-3, 1.6.2.1 (AudioSpecificConfig), 1.6.5 (signalling of SBR), 4.4.2.1 (raw_data_block).

use super::MediaError;

const LOW_COMPLEXITY: u32 = 2;
const SBR: u32 = 5;
const PARAMETRIC_STEREO: u32 = 29;
/// What announces an extension behind the configuration that older decoders read.
const SYNC_EXTENSION: u32 = 0x2b7;

const ID_FILL: u32 = 6;
const ID_END: u32 = 7;
/// Fill elements behind one another that are looked through.
const FILLS_MAX: usize = 3;

pub(super) struct Bits<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Bits<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    /// Up to 32 bits, the highest first.
    pub fn read(&mut self, count: usize) -> Option<u32> {
        let value = bits(self.bytes, self.position, count)?;
        self.position += count;
        Some(value)
    }
}

fn bits(bytes: &[u8], position: usize, count: usize) -> Option<u32> {
    (position..position + count).try_fold(0, |value, bit| Some(value << 1 | u32::from(bytes.get(bit / 8)? >> (7 - bit % 8) & 1)))
}

/// Refuses an AudioSpecificConfig of anything but AAC-LC of one or two channels.
pub(super) fn check_configuration(configuration: &[u8]) -> Result<(), MediaError> {
    let Some((object, channels, extended)) = read_configuration(configuration) else {
        return Err(MediaError::damaged("AAC", "its configuration is cut off"));
    };
    let name = match object {
        SBR => "HE-AAC (AAC with SBR)",
        PARAMETRIC_STEREO => "HE-AAC v2 (AAC with SBR and parametric stereo)",
        LOW_COMPLEXITY if extended => "HE-AAC (AAC with SBR)",
        LOW_COMPLEXITY => return check_channels(channels),
        1 => "AAC Main",
        3 => "AAC SSR",
        4 => "AAC LTP",
        23 => "AAC-LD",
        39 => "AAC-ELD",
        42 => "xHE-AAC (USAC)",
        other => return Err(MediaError::unsupported(format!("MPEG-4 audio of object type {other}"))),
    };
    Err(MediaError::unsupported(name))
}

fn check_channels(channels: u32) -> Result<(), MediaError> {
    match channels {
        1 | 2 => Ok(()),
        0 => Err(MediaError::unsupported("AAC with a channel layout of its own")),
        7 => Err(MediaError::unsupported("AAC with 8 channels")),
        more => Err(MediaError::unsupported(format!("AAC with {more} channels"))),
    }
}

fn read_configuration(configuration: &[u8]) -> Option<(u32, u32, bool)> {
    let mut bits = Bits::new(configuration);
    let object = object_type(&mut bits)?;
    frequency(&mut bits)?;
    let channels = bits.read(4)?;
    Some((object, channels, object == LOW_COMPLEXITY && is_extended(&mut bits) == Some(true)))
}

fn object_type(bits: &mut Bits<'_>) -> Option<u32> {
    let object = bits.read(5)?;
    if object == 31 { Some(32 + bits.read(6)?) } else { Some(object) }
}

fn frequency(bits: &mut Bits<'_>) -> Option<()> {
    if bits.read(4)? == 15 {
        bits.read(24)?;
    }
    Some(())
}

/// Whether SBR is announced behind a configuration of AAC-LC.
fn is_extended(bits: &mut Bits<'_>) -> Option<bool> {
    let (_short_frames, depends) = (bits.read(1)?, bits.read(1)?);
    if depends == 1 {
        bits.read(14)?;
    }
    let _extension = bits.read(1)?;
    Some(bits.read(11)? == SYNC_EXTENSION && object_type(bits)? == SBR && bits.read(1)? == 1)
}

/// Whether a packet ends in a fill element with SBR data, which no header announced.
///
/// A packet can only be read from the front by decoding all of it, so it is read from its end: `ID_END` and up to seven zero bits
/// stand there, and in front of them fill elements, whose lengths must fit. Noise fits once in a hundred packets, SBR always.
pub(super) fn ends_in_sbr(packet: &[u8]) -> bool {
    let Some(last) = packet.iter().rposition(|&byte| byte != 0) else { return false };
    let end = last * 8 + 8 - packet[last].trailing_zeros() as usize;
    end >= 3 && packet.len() * 8 - end < 8 && bits(packet, end - 3, 3) == Some(ID_END) && fills(packet, end - 3, FILLS_MAX)
}

fn fills(packet: &[u8], end: usize, depth: usize) -> bool {
    // The count is 4 bits, or 4 of ones and 8 of what is over 14.
    (1..=269usize).any(|bytes| {
        let head = if bytes < 15 { 7 } else { 15 };
        let Some(start) = end.checked_sub(bytes * 8 + head) else { return false };
        let counted = if bytes < 15 {
            bits(packet, start + 3, 4) == u32::try_from(bytes).ok()
        } else {
            bits(packet, start + 3, 4) == Some(15) && bits(packet, start + 7, 8) == u32::try_from(bytes - 14).ok()
        };
        let is_fill = counted && bits(packet, start, 3) == Some(ID_FILL);
        let kind = bits(packet, start + head, 4);
        is_fill && (matches!(kind, Some(0xd | 0xe)) || depth > 1 && matches!(kind, Some(0 | 1)) && fills(packet, start, depth - 1))
    })
}
