//! Compressed recordings: symphonia's demuxers and decoders, libopus, and what both leave to whoever calls them.

use std::collections::VecDeque;
use std::io::ErrorKind;

use symphonia::core::audio::{ChannelLabel, Channels, Position};
use symphonia::core::codecs::CodecParameters;
use symphonia::core::codecs::audio::well_known::{CODEC_ID_AAC, CODEC_ID_ALAC, CODEC_ID_OPUS};
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder, AudioDecoderOptions};
use symphonia::core::codecs::registry::RegisterableAudioDecoder;
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::ProbeableFormat;
use symphonia::core::formats::{FormatOptions, FormatReader, Track, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::packet::Packet;
use symphonia::default::formats::{
    AdtsReader, AiffReader, CafReader, FlacReader, IsoMp4Reader, MkvReader, MpaReader, OggReader, WavReader,
};
use symphonia_adapter_libopus::OpusDecoder;

use super::codec::{is_lossy, name};
use super::mix::Block;
use super::pcm::{check_channels, check_rate};
use super::probe::{self, Kind};
use super::source::{Allowance, PACKET_BYTES_MAX, Source};
use super::trim::Trim;
use super::{MediaError, aac, matroska, mp4};

/// Packets that are looked at before the first is decoded.
const FIRST_PACKETS: usize = 16;
/// Damaged packets in a row after which the rest is given up.
const DAMAGED_IN_A_ROW_MAX: usize = 200;
/// Streams chained behind one another, as radio recordings have them.
const CHAINED_MAX: usize = 10_000;
/// Frames of one packet: more than any codec has.
const PACKET_FRAMES_MAX: u64 = 1 << 20;
/// Frames of silence in the place of packets that could not be decoded.
const GAP_FRAMES_MAX: u64 = 1 << 22;
/// In Hz.
const OPUS_RATE: u32 = 48_000;

/// What symphonia's demuxers do not say of a file.
#[derive(Default)]
struct About {
    movie: mp4::Movie,
    extents: Vec<matroska::Extent>,
}

impl About {
    fn read(source: &mut Source, kind: Kind) -> Result<Self, MediaError> {
        Ok(match kind {
            Kind::Mp4 => Self { movie: mp4::read(source)?, ..Self::default() },
            Kind::Matroska => Self { extents: matroska::read(source)?, ..Self::default() },
            _ => Self::default(),
        })
    }
}

/// Nanoseconds in frames.
fn frames_of(nanoseconds: u64, rate: u32) -> u64 {
    let frames = (u128::from(nanoseconds) * u128::from(rate) + 500_000_000) / 1_000_000_000;
    // Padding is less than a packet.
    u64::try_from(frames).unwrap_or(0).min(PACKET_FRAMES_MAX)
}

pub(super) struct Packets {
    kind: Kind,
    reader: Box<dyn FormatReader>,
    decoder: Box<dyn AudioDecoder>,
    parameters: AudioCodecParameters,
    allowance: Allowance,
    track: u32,
    first: VecDeque<Packet>,
    about: About,
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
    gap_frames: u64,
    first_at: f64,
}

impl Packets {
    pub fn open(mut source: Source, kind: Kind, notes: &mut Vec<String>) -> Result<Self, MediaError> {
        let about = About::read(&mut source, kind)?;
        source.skip(0).map_err(MediaError::read)?;
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
        let gap = std::mem::take(&mut self.damaged.gap_frames);
        if gap > 0 {
            let gap = usize::try_from(gap.min(GAP_FRAMES_MAX)).unwrap_or(0);
            block.channels.iter_mut().for_each(|channel| drop(channel.splice(0..0, std::iter::repeat_n(0.0, gap))));
        }
        self.silence.listen(block);
        self.frames += block.frames() as u64;
        self.trim.apply(block);
        Ok(true)
    }

    /// Another rate or number of channels within an MPEG stream needs another decoder.
    fn follow(&mut self, packet: &Packet) {
        let Some(frame) = probe::frame(&packet.data) else { return };
        let last = self.decoder.last_decoded();
        let spec = last.spec();
        let same = spec.rate() == frame.rate && spec.channels().count() == usize::from(frame.channels);
        if self.rate != 0 && !last.is_unused() && !same {
            if let Ok(decoder) = make_decoder(&self.parameters) {
                self.decoder = decoder;
            }
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
        self.frames = 0;
        Ok(true)
    }

    fn stop(&mut self, error: Error, block: &mut Block, notes: &mut Vec<String>) -> Result<bool, MediaError> {
        let error = explained(error, self.kind, &self.allowance);
        if self.frames == 0 || matches!(error, MediaError::Read { .. }) {
            self.has_ended = true;
            return Err(error);
        }
        notes.push(format!("damaged or cut off at {:.1} s; what comes before is kept ({error})", self.seconds()));
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
        if let Some(promised) = self.promised
            && self.rate > 0
            && promised.saturating_sub(self.frames) > u64::from(self.rate) / 4
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

/// The track that is heard: the default one, else the first that can be decoded, else the first.
fn choose(reader: &dyn FormatReader, movie: &mp4::Movie, notes: &mut Vec<String>) -> Result<Track, MediaError> {
    let audio: Vec<&Track> = reader.tracks().iter().filter(|track| track.track_type() == Some(TrackType::Audio)).collect();
    let sounding = movie.tracks.iter().filter(|track| track.is_audio());
    if let Some(scheme) = sounding.clone().find_map(|track| track.scheme.clone())
        && !audio.iter().any(|track| is_decoded(track))
    {
        return Err(MediaError::Protected { scheme });
    }
    if audio.is_empty() {
        if let Some(track) = sounding.clone().next() {
            return Err(MediaError::unsupported(super::codec::of_sample_entry(track.entry)));
        }
        let count = |kind: TrackType| reader.tracks().iter().filter(|track| track.track_type() == Some(kind)).count();
        let (video, subtitles) = (count(TrackType::Video), count(TrackType::Subtitle));
        let other = reader.tracks().len() - video - subtitles;
        let parts = [(video, "of video"), (subtitles, "of subtitles"), (other, "of another kind")];
        let parts: Vec<String> =
            parts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        let tracks = if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") };
        return Err(MediaError::NoAudioTrack { tracks });
    }
    let default = reader.default_track(TrackType::Audio).filter(|track| is_decoded(track));
    let chosen = default.or_else(|| audio.iter().copied().find(|track| is_decoded(track))).unwrap_or(audio[0]);
    if audio.len() > 1 {
        let place = audio.iter().position(|track| track.id == chosen.id).unwrap_or(0) + 1;
        let language = chosen.language.as_deref().map(|language| format!(" ({language})")).unwrap_or_default();
        notes.push(format!("of {} audio tracks, number {place}{language} is heard", audio.len()));
    }
    Ok(chosen.clone())
}

fn is_decoded(track: &Track) -> bool {
    let Some(CodecParameters::Audio(parameters)) = &track.codec_params else { return false };
    parameters.codec == CODEC_ID_OPUS || symphonia::default::get_codecs().get_audio_decoder(parameters.codec).is_some()
}

/// What a decoder is given, how its output is trimmed, and the frames that there should be before that.
fn prepared(track: &Track, kind: Kind, about: &About) -> Result<(AudioCodecParameters, Trim, Option<u64>), MediaError> {
    let Some(CodecParameters::Audio(parameters)) = &track.codec_params else {
        return Err(MediaError::damaged(kind.name(), "its audio track does not say what it is"));
    };
    let mut parameters = parameters.clone();
    let movie = &about.movie;
    let extent = about.extents.iter().find(|extent| extent.track == u64::from(track.id)).cloned().unwrap_or_default();
    let rate = parameters.sample_rate.unwrap_or(0);
    if !is_decoded(track) {
        let entry = movie.tracks.iter().find(|other| other.id == track.id).map(|other| other.entry);
        let known = name(parameters.codec);
        let what = match entry {
            Some(entry) if known.is_empty() => super::codec::of_sample_entry(entry),
            _ if known.is_empty() => format!("a codec of {} that is not known", kind.name()),
            _ => known.to_owned(),
        };
        return Err(MediaError::unsupported(what));
    }
    if let Some(channels) = &parameters.channels {
        check_channels(channels.count())?;
    }
    let frames = parameters.max_frames_per_packet.unwrap_or(0);
    if frames > PACKET_FRAMES_MAX {
        return Err(MediaError::damaged(kind.name(), format!("its header says that a packet has {frames} frames")));
    }
    let mut trim = Trim::default();
    let mut promised = track.num_frames;
    match parameters.codec {
        CODEC_ID_AAC => {
            if let Some(configuration) = &parameters.extra_data {
                aac::check_configuration(configuration)?;
            }
            trim = Trim::padded(frames_of(extent.delay, rate), frames_of(extent.padding, rate));
        }
        CODEC_ID_ALAC => {
            // The decoder makes a buffer of so many frames.
            let length =
                parameters.extra_data.as_deref().and_then(|cookie| cookie.first_chunk()).map(|&head| u32::from_be_bytes(head));
            if length.is_some_and(|length| u64::from(length) > PACKET_FRAMES_MAX) {
                return Err(MediaError::damaged(kind.name(), "its ALAC header says that a packet has over a million frames"));
            }
        }
        CODEC_ID_OPUS => {
            // The adapter drops the pre-skip from the first packet only, which may be shorter.
            let head = parameters.extra_data.take();
            let pre_skip =
                head.as_deref().and_then(|head| head.get(10..12)).map_or(0, |skip| u64::from(skip[0]) | u64::from(skip[1]) << 8);
            parameters.with_sample_rate(OPUS_RATE);
            trim = Trim::padded(pre_skip, frames_of(extent.padding, OPUS_RATE));
            promised = None;
            if parameters.channels.as_ref().is_some_and(|channels| channels.count() > 2) {
                let count = parameters.channels.as_ref().map_or(0, Channels::count);
                return Err(MediaError::unsupported(format!("Opus with {count} channels")));
            }
        }
        _ if kind == Kind::Matroska => trim = Trim::padded(0, frames_of(extent.padding, rate)),
        _ => {}
    }
    if kind == Kind::Mpeg {
        (trim, promised) = mpeg_trim(track);
    }
    if let Some(edited) = movie.tracks.iter().find(|other| other.id == track.id) {
        trim = mp4_trim(edited, movie.timescale, track.num_frames, parameters.sample_rate);
    }
    Ok((parameters, trim, promised))
}

/// A header by LAME or ffmpeg says what the encoder put around the sound. Without one symphonia only estimates the length from the
/// first bit rates, and its own trimming would cut a stream of variable bit rate there.
fn mpeg_trim(track: &Track) -> (Trim, Option<u64>) {
    let (Some(delay), Some(frames)) = (track.delay, track.num_frames) else { return (Trim::default(), None) };
    let (delay, padding) = (u64::from(delay), u64::from(track.padding.unwrap_or(0)));
    (Trim::new(delay, Some(delay + frames), padding), Some(delay + frames + padding))
}

fn mp4_trim(track: &mp4::Track, movie_timescale: u32, frames: Option<u64>, rate: Option<u32>) -> Trim {
    // Times are frames where a tick is one.
    let Some(rate) = rate.filter(|&rate| rate == track.timescale) else { return Trim::default() };
    // A file in fragments does not say how long it is.
    let Some(frames) = frames.filter(|&frames| frames > 0) else {
        return Trim::padded(track.edit.map_or(0, |(start, _)| start).min(u64::from(rate)), 0);
    };
    let start = track.edit.map_or(0, |(start, _)| start).min(frames);
    // An edit that ends well before the track does is meant; less is the coarser clock of the film.
    let length =
        track.edit.map(|(_, length)| (length, u64::from(movie_timescale))).filter(|&(length, scale)| length > 0 && scale > 0);
    let edited = length.map(|(length, scale)| u128::from(length) * u128::from(rate) / u128::from(scale));
    let end = edited.and_then(|length| u64::try_from(length).ok()).map(|length| start.saturating_add(length));
    match end {
        Some(end) if end + u64::from(rate) / 2 < frames => Trim::limit(start, end),
        _ => Trim::new(start, Some(frames), 2 * 1024),
    }
}

fn make_decoder(parameters: &AudioCodecParameters) -> Result<Box<dyn AudioDecoder>, Error> {
    // MPEG streams are trimmed here; see `mpeg_trim`.
    let is_mpeg = super::codec::is_mpeg(parameters.codec);
    let options = AudioDecoderOptions::default().gapless(!is_mpeg);
    if parameters.codec == CODEC_ID_OPUS {
        return OpusDecoder::try_registry_new(parameters, &options);
    }
    symphonia::default::get_codecs().make_audio_decoder(parameters, &options)
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
        Error::IoError(source) => MediaError::Read { source },
        Error::DecodeError(reason) | Error::LimitError(reason) => MediaError::damaged(format, told(reason)),
        Error::Unsupported(what) => MediaError::unsupported(format!("{format} of this kind ({})", told(what))),
        Error::SeekError(_) | Error::ResetRequired => MediaError::damaged(format, "its parts do not fit together"),
        other => MediaError::damaged(format, other.to_string()),
    }
}

/// Whether a decoder gives silence for packets that hold something (Symphonia#540).
///
/// A packet of silence is short, or filled up with one and the same byte; one of sound looks like noise. Samples of a lossy codec
/// that are all exactly zero although most packets look like noise are the decoder's failure.
#[derive(Default)]
struct Silence {
    packets: u64,
    like_noise: u64,
    heard: bool,
}

/// Different bytes in a packet from which on it looks like noise.
const NOISE_BYTES: usize = 40;

impl Silence {
    fn look(&mut self, packet: &[u8], is_lossy: bool) {
        if self.heard || !is_lossy {
            return;
        }
        let mut seen = [0u64; 4];
        packet.iter().for_each(|&byte| seen[usize::from(byte >> 6)] |= 1 << (byte & 63));
        let different: u32 = seen.iter().map(|bits| bits.count_ones()).sum();
        self.packets += 1;
        self.like_noise += u64::from(different as usize >= NOISE_BYTES);
    }

    fn listen(&mut self, block: &Block) {
        self.heard = self.heard || block.channels.iter().flatten().any(|&sample| sample != 0.0);
    }

    fn is_false(&self) -> bool {
        !self.heard && self.like_noise >= 3 && self.like_noise * 2 > self.packets
    }
}
