//! Compressed recordings: symphonia's demuxers and decoders, libopus, and what both leave to whoever calls them.

use std::collections::VecDeque;
use std::io::{ErrorKind, Seek as _, SeekFrom};

use symphonia::core::audio::{ChannelLabel, Channels, Position};
use symphonia::core::codecs::audio::well_known::CODEC_ID_AAC;
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder};
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::ProbeableFormat as _;
use symphonia::core::formats::{FormatOptions, FormatReader};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::packet::Packet;
use symphonia::core::units::TimeBase;
use symphonia::default::formats::{
    AdtsReader, AiffReader, CafReader, FlacReader, IsoMp4Reader, MkvReader, MpaReader, OggReader, WavReader,
};

use super::codec::{is_lossy, name};
use super::mix::Block;
use super::pcm::{check_channels, check_rate};
use super::probe::{self, Kind};
use super::silence::Silence;
use super::source::{Allowance, PACKET_BYTES_MAX, Source};
use super::track::{About, PACKET_FRAMES_MAX, choose, make_decoder, prepared};
use super::trim::Trim;
use super::{MediaError, StoredError, aac};

/// Packets that are looked at before the first is decoded.
const FIRST_PACKETS: usize = 16;
/// Damaged packets in a row after which the rest is given up.
const DAMAGED_IN_A_ROW_MAX: usize = 200;
/// Streams chained behind one another, as radio recordings have them.
const CHAINED_MAX: usize = 10_000;
/// Samples of silence, of all channels together, in the place of packets that are missing or could not be decoded.
const GAP_SAMPLES_MAX: u64 = 1 << 22;
/// Seconds of silence that are filled in besides as much as was decoded.
const GAP_SECONDS_MAX: u64 = 30;

pub(super) struct Packets {
    kind: Kind,
    reader: Box<dyn FormatReader>,
    decoder: Box<dyn AudioDecoder>,
    parameters: AudioCodecParameters,
    allowance: Allowance,
    track: u32,
    first: VecDeque<Packet>,
    about: About,
    time_base: Option<TimeBase>,
    /// When the next packet is due, in seconds by the times of the one before.
    expected: Option<f64>,
    trim: Trim,
    /// Frames that the header promises, of this track.
    promised: Option<u64>,
    silence: Silence,
    damaged: Damaged,
    chained: usize,
    /// Frames that were decoded, and their rate.
    frames: u64,
    rate: u32,
    has_ended: bool,
}

#[derive(Default)]
struct Damaged {
    packets: u64,
    in_a_row: usize,
    /// Frames of silence that are due before the next packet.
    gap_frames: u64,
    filled_frames: u64,
    first_at: f64,
    /// Gaps in the packets' times, and the seconds in them.
    gaps: u64,
    gap_seconds: f64,
    first_gap_at: f64,
}

impl Damaged {
    /// The frames of silence that are filled in now.
    fn take_gap(&mut self, decoded_frames: u64, block: &Block) -> usize {
        let gap = std::mem::take(&mut self.gap_frames).min(GAP_SAMPLES_MAX / block.channels.len().max(1) as u64);
        // A few packets with forged times must not become hours.
        let left = (decoded_frames + GAP_SECONDS_MAX * u64::from(block.rate)).saturating_sub(self.filled_frames);
        let gap = gap.min(left);
        self.filled_frames += gap;
        usize::try_from(gap).unwrap_or(0)
    }
}

impl Packets {
    pub fn open(mut source: Source, kind: Kind, notes: &mut Vec<String>) -> Result<Self, MediaError> {
        let about = About::read(&mut source, kind)?;
        source.seek(SeekFrom::Start(0)).map_err(MediaError::read)?;
        let allowance = source.allowance();
        let error = |error: Error| explained(error, kind, &allowance);
        let reader = open_reader(source, kind).map_err(error)?;
        let track = choose(reader.as_ref(), &about.movie, notes)?;
        let id = track.id;
        let (parameters, trim, promised) = prepared(&track, kind, &about)?;
        let decoder = make_decoder(&parameters).map_err(error)?;
        let mut packets = Self {
            kind,
            reader,
            decoder,
            parameters,
            allowance,
            track: id,
            first: VecDeque::new(),
            about,
            time_base: track.time_base,
            expected: None,
            trim,
            promised,
            silence: Silence::default(),
            damaged: Damaged::default(),
            chained: 0,
            frames: 0,
            rate: 0,
            has_ended: false,
        };
        if packets.parameters.codec == CODEC_ID_AAC {
            packets.look_for_sbr()?;
        }
        Ok(packets)
    }

    pub fn format(&self) -> &'static str {
        self.kind.name()
    }

    /// Reads the first packets, and refuses HE-AAC that no header announced.
    fn look_for_sbr(&mut self) -> Result<(), MediaError> {
        self.allowance.renew(PACKET_BYTES_MAX);
        while self.first.len() < FIRST_PACKETS {
            match self.reader.next_packet() {
                Ok(Some(packet)) if packet.track_id == self.track => self.first.push_back(packet),
                Ok(Some(_)) => {}
                // What is wrong is told when the packets before it are used up.
                Ok(None) | Err(_) => break,
            }
        }
        let with_sbr = self.first.iter().filter(|packet| aac::ends_in_sbr(&packet.data)).count();
        if with_sbr >= 2 && with_sbr * 4 >= self.first.len() * 3 {
            return Err(MediaError::unsupported("HE-AAC (AAC with SBR, which its header does not say)"));
        }
        Ok(())
    }

    /// Fills `block` with what comes next, which may be nothing yet; false at the end.
    pub fn next(&mut self, block: &mut Block, notes: &mut Vec<String>) -> Result<bool, MediaError> {
        if self.has_ended {
            return Ok(false);
        }
        block.channels.iter_mut().for_each(Vec::clear);
        self.allowance.renew(PACKET_BYTES_MAX);
        let packet = match self.first.pop_front() {
            Some(packet) => Ok(Some(packet)),
            None => self.reader.next_packet(),
        };
        match packet {
            Ok(Some(packet)) if packet.track_id == self.track => self.decode(&packet, block, notes),
            Ok(Some(_)) => Ok(true),
            Ok(None) => self.end(true, block, notes),
            Err(Error::ResetRequired) => self.chain(notes),
            Err(error) => self.stop(error, block, notes),
        }
    }

    fn decode(&mut self, packet: &Packet, block: &mut Block, notes: &mut Vec<String>) -> Result<bool, MediaError> {
        if self.kind == Kind::Mpeg {
            self.follow(packet);
        }
        match self.decoder.decode(packet) {
            Ok(decoded) => {
                let spec = decoded.spec();
                check_rate(self.kind.name(), spec.rate())?;
                check_channels(spec.channels().count())?;
                (block.rate, block.effects) = (spec.rate(), effects(spec.channels()));
                self.silence.look(&packet.data, is_lossy(self.parameters.codec));
                decoded.copy_to_vecs_planar(&mut block.channels);
            }
            Err(error) => return self.skip(packet, error, block, notes),
        }
        self.damaged.in_a_row = 0;
        if self.rate != block.rate {
            (self.frames, self.rate) = (0, block.rate);
        }
        self.silence.listen(block);
        self.look_for_gap(packet, block);
        let gap = self.damaged.take_gap(self.frames, block);
        if gap > 0 {
            block.channels.iter_mut().for_each(|channel| drop(channel.splice(0..0, std::iter::repeat_n(0.0, gap))));
        }
        self.frames += block.frames() as u64;
        self.trim.apply(block);
        Ok(true)
    }

    /// Packets that a demuxer has left out without a word leave a gap in the times of the others.
    fn look_for_gap(&mut self, packet: &Packet, block: &Block) {
        let Some(base) = self.time_base.filter(|_| matches!(self.kind, Kind::Flac | Kind::Ogg | Kind::Matroska)) else { return };
        let tick = f64::from(base.numer.get()) / f64::from(base.denom.get());
        let start = packet.pts.get() as f64 * tick;
        // Matroska rounds its times, and Ogg has none for each packet.
        let tolerance = if self.kind == Kind::Flac { 0.5 / f64::from(block.rate) } else { 0.1 };
        if let Some(expected) = self.expected
            && start - expected > tolerance
        {
            let damaged = &mut self.damaged;
            if damaged.gaps == 0 {
                damaged.first_gap_at = expected;
            }
            damaged.gaps += 1;
            damaged.gap_seconds += start - expected;
            damaged.gap_frames = ((start - expected) * f64::from(block.rate)).round() as u64;
        }
        self.expected = Some(start + block.frames() as f64 / f64::from(block.rate));
    }

    /// Another rate or number of channels within an MPEG stream needs another decoder.
    fn follow(&mut self, packet: &Packet) {
        let Some(frame) = probe::frame(&packet.data) else { return };
        let last = self.decoder.last_decoded();
        let spec = last.spec();
        let same = spec.rate() == frame.rate && spec.channels().count() == usize::from(frame.channels);
        if self.rate != 0
            && !last.is_unused()
            && !same
            && let Ok(decoder) = make_decoder(&self.parameters)
        {
            self.decoder = decoder;
        }
    }

    fn skip(&mut self, packet: &Packet, error: Error, block: &mut Block, notes: &mut Vec<String>) -> Result<bool, MediaError> {
        if self.damaged.packets == 0 {
            self.damaged.first_at = self.seconds();
        }
        self.damaged.packets += 1;
        self.damaged.in_a_row += 1;
        if self.frames > 0 {
            self.damaged.gap_frames = self.damaged.gap_frames.saturating_add(packet.block_dur().get().min(PACKET_FRAMES_MAX));
        }
        if self.damaged.in_a_row > DAMAGED_IN_A_ROW_MAX {
            return self.stop(error, block, notes);
        }
        self.decoder.reset();
        Ok(true)
    }

    /// The next of several streams behind one another.
    fn chain(&mut self, notes: &mut Vec<String>) -> Result<bool, MediaError> {
        self.chained += 1;
        if self.chained > CHAINED_MAX {
            return Err(MediaError::TooMuch {
                what: format!("{} streams behind one another", self.chained),
                limit: CHAINED_MAX.to_string(),
                remedy: "divide it",
            });
        }
        let track = choose(self.reader.as_ref(), &self.about.movie, &mut Vec::new())?;
        let (parameters, trim, promised) = prepared(&track, self.kind, &self.about)?;
        self.decoder = make_decoder(&parameters).map_err(|error| explained(error, self.kind, &self.allowance))?;
        (self.track, self.parameters, self.trim, self.promised) = (track.id, parameters, trim, promised);
        if self.chained == 1 {
            notes.push(format!("at {:.1} s another stream begins in the same file", self.seconds()));
        }
        (self.frames, self.time_base, self.expected) = (0, track.time_base, None);
        Ok(true)
    }

    fn stop(&mut self, error: Error, block: &mut Block, notes: &mut Vec<String>) -> Result<bool, MediaError> {
        let error = explained(error, self.kind, &self.allowance);
        if self.frames == 0 || matches!(error, MediaError::Stored(_)) {
            self.has_ended = true;
            return Err(error);
        }
        let reason = match error {
            MediaError::Damaged { reason, .. } => reason,
            other => other.to_string(),
        };
        notes.push(format!("damaged or cut off at {:.1} s; what comes before is kept ({reason})", self.seconds()));
        self.promised = None;
        self.end(false, block, notes)
    }

    fn end(&mut self, is_complete: bool, block: &mut Block, notes: &mut Vec<String>) -> Result<bool, MediaError> {
        self.has_ended = true;
        let damaged = &self.damaged;
        if damaged.packets > 0 && self.frames > 0 {
            notes.push(format!(
                "{} damaged packets, the first at {:.1} s, are left out or heard as silence",
                damaged.packets, damaged.first_at
            ));
        } else if damaged.packets > 0 {
            let reason = format!("none of its {} packets can be decoded", damaged.packets);
            return Err(MediaError::damaged(self.kind.name(), reason));
        }
        if damaged.gaps > 0 {
            notes.push(format!(
                "{:.1} s are missing, the first at {:.1} s; they are heard as silence, up to a limit",
                damaged.gap_seconds, damaged.first_gap_at
            ));
        }
        if let Some(promised) = self.promised
            && self.rate > 0
            && promised.saturating_sub(self.frames) > u64::from(self.rate) / 10
        {
            notes.push(format!(
                "cut off: the header promises {:.1} s, decoding gave {:.1} s",
                promised as f64 / f64::from(self.rate),
                self.seconds()
            ));
        }
        if self.silence.is_false() {
            return Err(MediaError::OnlySilence { codec: name(self.parameters.codec), seconds: self.seconds() });
        }
        block.channels.iter_mut().for_each(Vec::clear);
        self.trim.finish(self.frames, is_complete, block);
        Ok(block.frames() > 0)
    }

    fn seconds(&self) -> f64 {
        self.frames as f64 / f64::from(self.rate.max(1))
    }
}

fn open_reader(source: Source, kind: Kind) -> Result<Box<dyn FormatReader>, Error> {
    let stream = MediaSourceStream::new(Box::new(source), Default::default());
    let options = FormatOptions::default();
    match kind {
        Kind::Wav => WavReader::try_probe_new(stream, options),
        Kind::Aiff => AiffReader::try_probe_new(stream, options),
        Kind::Caf => CafReader::try_probe_new(stream, options),
        Kind::Flac => FlacReader::try_probe_new(stream, options),
        Kind::Ogg => OggReader::try_probe_new(stream, options),
        Kind::Matroska => MkvReader::try_probe_new(stream, options),
        Kind::Mp4 => IsoMp4Reader::try_probe_new(stream, options),
        Kind::Adts => AdtsReader::try_probe_new(stream, options),
        Kind::Mpeg => MpaReader::try_probe_new(stream, options),
    }
}

/// One bit a channel, for those of low-frequency effects.
fn effects(channels: &Channels) -> u64 {
    let lows = Position::LFE1 | Position::LFE2;
    let bits = |at: &mut dyn Iterator<Item = bool>| {
        at.take(64).enumerate().fold(0, |bits, (channel, is_low)| bits | u64::from(is_low) << channel)
    };
    match channels {
        Channels::Positioned(positions) => bits(&mut positions.iter().map(|position| lows.contains(position))),
        Channels::Custom(labels) => bits(&mut labels.iter().map(|label| match label {
            ChannelLabel::Positioned(position) => lows.contains(*position),
            _ => false,
        })),
        _ => 0,
    }
}

fn explained(error: Error, kind: Kind, allowance: &Allowance) -> MediaError {
    let format = kind.name();
    let told = |text: &str| text.rsplit_once(": ").map_or(text, |(_, reason)| reason).to_owned();
    match error {
        _ if allowance.is_spent() => MediaError::damaged(format, "it holds more bytes without sound than any recording"),
        Error::IoError(error) if error.kind() == ErrorKind::UnexpectedEof => MediaError::damaged(format, "it ends too early"),
        Error::IoError(source) => MediaError::Stored(StoredError::Read { source }),
        Error::DecodeError(reason) | Error::LimitError(reason) => MediaError::damaged(format, told(reason)),
        Error::Unsupported(what) => MediaError::unsupported(format!("{format} of this kind ({})", told(what))),
        Error::SeekError(_) | Error::ResetRequired => MediaError::damaged(format, "its parts do not fit together"),
        other => MediaError::damaged(format, other.to_string()),
    }
}
