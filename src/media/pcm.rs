//! Samples that stand in a file as they are: the sound of WAV and AIFF.

use std::io::{ErrorKind, Read, Seek, SeekFrom};

use super::mix::Block;
use super::source::{PACKET_BYTES_MAX, Source};
use super::{CHANNELS_MAX, MediaError, RATE_MAX, RATE_MIN};

/// Bytes that are read at a time.
const READ_BYTES: usize = 1 << 17;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sample {
    /// Around 128, as WAV has 8 bits.
    Unsigned8,
    /// Of so many bytes, 1 to 8, and left-justified in them.
    Signed(usize),
    Float32,
    Float64,
    /// ITU-T G.711.
    ALaw,
    MuLaw,
}

impl Sample {
    pub fn bytes(self) -> usize {
        match self {
            Self::Unsigned8 | Self::ALaw | Self::MuLaw => 1,
            Self::Signed(bytes) => bytes,
            Self::Float32 => 4,
            Self::Float64 => 8,
        }
    }
}

/// Where a file's samples are, and what they are.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub format: &'static str,
    pub sample: Sample,
    pub big_endian: bool,
    pub channels: usize,
    /// One bit a channel: those for low-frequency effects.
    pub effects: u64,
    /// In Hz.
    pub rate: u32,
    /// Bytes from one frame to the next.
    pub stride: usize,
    pub start: u64,
    /// Bytes that the header promises; none where it does not say.
    pub promised: Option<u64>,
}

pub(super) struct PcmReader {
    source: Source,
    layout: Layout,
    /// Bytes until the end.
    left: u64,
    raw: Vec<u8>,
    companded: Vec<f32>,
    cut_off: Option<String>,
}

impl PcmReader {
    pub fn new(mut source: Source, layout: Layout) -> Result<Self, MediaError> {
        check_channels(layout.channels)?;
        check_rate(layout.format, layout.rate)?;
        if layout.stride < layout.channels * layout.sample.bytes() {
            let reason = format!("a frame of {} bytes does not hold {} channels", layout.stride, layout.channels);
            return Err(MediaError::damaged(layout.format, reason));
        }
        let available = source.length().saturating_sub(layout.start);
        let left = layout.promised.unwrap_or(available).min(available);
        let stride = layout.stride as u64;
        let seconds = |bytes: u64| bytes as f64 / stride as f64 / f64::from(layout.rate);
        let cut_off = layout.promised.filter(|&promised| promised > available + stride).map(|promised| {
            format!("cut off: the header promises {:.1} s, the file holds {:.1} s", seconds(promised), seconds(available))
        });
        source.seek(SeekFrom::Start(layout.start)).map_err(MediaError::read)?;
        let companded = match layout.sample {
            Sample::MuLaw => (0..=255).map(mu_law).collect(),
            Sample::ALaw => (0..=255).map(a_law).collect(),
            _ => Vec::new(),
        };
        Ok(Self { source, layout, left, raw: Vec::new(), companded, cut_off })
    }

    pub fn format(&self) -> &'static str {
        self.layout.format
    }

    /// Fills `block` with what comes next; false at the end.
    pub fn next(&mut self, block: &mut Block, notes: &mut Vec<String>) -> Result<bool, MediaError> {
        let stride = self.layout.stride;
        let wanted = (READ_BYTES / stride).max(1) * stride;
        let wanted = usize::try_from(self.left).unwrap_or(usize::MAX).min(wanted) / stride * stride;
        self.source.allowance().renew(PACKET_BYTES_MAX);
        self.raw.resize(wanted, 0);
        let mut read = 0;
        while read < wanted {
            match self.source.read(&mut self.raw[read..]) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(MediaError::read(error)),
            }
        }
        self.left -= read as u64;
        let frames = read / stride;
        if frames == 0 {
            notes.extend(self.cut_off.take());
            return Ok(false);
        }
        self.raw.truncate(frames * stride);
        block.rate = self.layout.rate;
        block.effects = self.layout.effects;
        block.channels.resize_with(self.layout.channels, Vec::new);
        for channel in 0..self.layout.channels {
            self.channel(channel, &mut block.channels[channel]);
        }
        Ok(true)
    }

    fn channel(&self, channel: usize, output: &mut Vec<f32>) {
        output.clear();
        let Layout { sample, big_endian, stride, .. } = self.layout;
        let frames = Frames { raw: &self.raw, stride, offset: channel * sample.bytes() };
        match (sample, big_endian) {
            (Sample::Unsigned8, _) => frames.read(output, |[byte]| (f32::from(byte) - 128.0) / 128.0),
            (Sample::ALaw | Sample::MuLaw, _) => frames.read(output, |[byte]| self.companded[usize::from(byte)]),
            (Sample::Signed(1), _) => frames.read(output, |[byte]| f32::from(byte.cast_signed()) / 128.0),
            (Sample::Signed(2), false) => frames.read(output, |bytes| f32::from(i16::from_le_bytes(bytes)) / 32_768.0),
            (Sample::Signed(2), true) => frames.read(output, |bytes| f32::from(i16::from_be_bytes(bytes)) / 32_768.0),
            (Sample::Signed(3), false) => frames.read(output, |[low, mid, high]| whole(i32::from_le_bytes([0, low, mid, high]))),
            (Sample::Signed(3), true) => frames.read(output, |[high, mid, low]| whole(i32::from_le_bytes([0, low, mid, high]))),
            (Sample::Signed(4), false) => frames.read(output, |bytes| whole(i32::from_le_bytes(bytes))),
            (Sample::Signed(4), true) => frames.read(output, |bytes| whole(i32::from_be_bytes(bytes))),
            // Of more bytes the four highest are heard.
            (Sample::Signed(bytes), false) => {
                Frames { offset: frames.offset + bytes - 4, ..frames }.read(output, |bytes| whole(i32::from_le_bytes(bytes)));
            }
            (Sample::Signed(_), true) => frames.read(output, |bytes| whole(i32::from_be_bytes(bytes))),
            (Sample::Float32, false) => frames.read(output, f32::from_le_bytes),
            (Sample::Float32, true) => frames.read(output, f32::from_be_bytes),
            (Sample::Float64, false) => frames.read(output, |bytes| f64::from_le_bytes(bytes) as f32),
            (Sample::Float64, true) => frames.read(output, |bytes| f64::from_be_bytes(bytes) as f32),
        }
    }
}

#[derive(Clone, Copy)]
struct Frames<'a> {
    raw: &'a [u8],
    stride: usize,
    offset: usize,
}

impl Frames<'_> {
    fn read<const BYTES: usize>(self, output: &mut Vec<f32>, sample: impl Fn([u8; BYTES]) -> f32) {
        if self.stride == BYTES {
            let (samples, _) = self.raw.as_chunks::<BYTES>();
            output.extend(samples.iter().map(|&bytes| sample(bytes)));
            return;
        }
        output.extend(self.raw.chunks_exact(self.stride).map(|frame| {
            let mut bytes = [0; BYTES];
            bytes.copy_from_slice(&frame[self.offset..self.offset + BYTES]);
            sample(bytes)
        }));
    }
}

fn whole(sample: i32) -> f32 {
    sample as f32 / 2_147_483_648.0
}

/// ITU-T G.711, table 2a: sign, three bits of exponent and four of mantissa, all inverted, with a bias of 33 over 14 bits.
fn mu_law(byte: u8) -> f32 {
    let byte = !byte;
    let magnitude = ((i32::from(byte & 15) << 1 | 33) << (byte >> 4 & 7)) - 33;
    signed(byte & 0x80 != 0, magnitude, 8_192.0)
}

/// ITU-T G.711, table 1a: as above over 13 bits, every other bit inverted, and a first segment without an implied one.
fn a_law(byte: u8) -> f32 {
    let byte = byte ^ 0x55;
    let (exponent, mantissa) = (byte >> 4 & 7, i32::from(byte & 15) << 1 | 1);
    let magnitude = if exponent == 0 { mantissa } else { (mantissa | 32) << (exponent - 1) };
    signed(byte & 0x80 == 0, magnitude, 4_096.0)
}

fn signed(negative: bool, magnitude: i32, full: f32) -> f32 {
    let magnitude = magnitude as f32 / full;
    if negative { -magnitude } else { magnitude }
}

pub(super) fn check_channels(channels: usize) -> Result<(), MediaError> {
    if channels == 0 {
        return Err(MediaError::damaged("audio", "its header says that it has no channels"));
    }
    if channels > CHANNELS_MAX {
        return Err(MediaError::TooMuch {
            what: format!("{channels} channels"),
            limit: CHANNELS_MAX.to_string(),
            remedy: "keep the channels with speech",
        });
    }
    Ok(())
}

pub(super) fn check_rate(format: &'static str, rate: u32) -> Result<(), MediaError> {
    if rate < RATE_MIN {
        return Err(MediaError::damaged(format, format!("its header says that it has {rate} samples a second")));
    }
    if rate > RATE_MAX {
        return Err(MediaError::TooMuch {
            what: format!("{rate} samples a second"),
            limit: RATE_MAX.to_string(),
            remedy: "resample it, for example to 48000",
        });
    }
    Ok(())
}
