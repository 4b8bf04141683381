//! Which track of a file is heard, and what its decoder must be told.

use symphonia::core::audio::Channels;
use symphonia::core::codecs::CodecParameters;
use symphonia::core::codecs::audio::well_known::{CODEC_ID_AAC, CODEC_ID_ALAC, CODEC_ID_OPUS, CODEC_ID_VORBIS};
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder, AudioDecoderOptions};
use symphonia::core::codecs::registry::RegisterableAudioDecoder as _;
use symphonia::core::errors::Error;
use symphonia::core::formats::{FormatReader, Track, TrackType};
use symphonia_adapter_libopus::OpusDecoder;

use super::codec::{is_mpeg, name, of_sample_entry};
use super::pcm::check_channels;
use super::probe::Kind;
use super::source::Source;
use super::trim::Trim;
use super::{MediaError, aac, matroska, mp4, vorbis};

/// Frames of one packet: more than any codec has.
pub(super) const PACKET_FRAMES_MAX: u64 = 1 << 20;
/// In Hz.
const OPUS_RATE: u32 = 48_000;
/// Frames of an AAC packet.
const AAC_FRAMES: u64 = 1024;

/// What symphonia's demuxers do not say of a file.
#[derive(Default)]
pub(super) struct About {
    pub movie: mp4::Movie,
    pub extents: Vec<matroska::Extent>,
}

impl About {
    pub fn read(source: &mut Source, kind: Kind) -> Result<Self, MediaError> {
        Ok(match kind {
            Kind::Mp4 => {
                let movie = mp4::read(source)?;
                if !movie.is_indexed {
                    let reason = "its index (`moov`) is missing; it is cut off, or was never finished";
                    return Err(MediaError::damaged(kind.name(), reason));
                }
                source.state_length(movie.stated_end);
                Self { movie, ..Self::default() }
            }
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

/// The track that is heard: the default one, else the first that can be decoded, else the first.
pub(super) fn choose(reader: &dyn FormatReader, movie: &mp4::Movie, notes: &mut Vec<String>) -> Result<Track, MediaError> {
    let audio: Vec<&Track> = reader.tracks().iter().filter(|track| track.track_type() == Some(TrackType::Audio)).collect();
    let sounding = movie.tracks.iter().filter(|track| track.is_audio());
    if let Some(scheme) = sounding.clone().find_map(|track| track.scheme.clone())
        && !audio.iter().any(|track| is_decoded(track))
    {
        return Err(MediaError::Protected { scheme });
    }
    if audio.is_empty() {
        if let Some(track) = sounding.clone().next() {
            return Err(MediaError::unsupported(of_sample_entry(track.entry)));
        }
        let count = |kind: TrackType| reader.tracks().iter().filter(|track| track.track_type() == Some(kind)).count();
        let (video, subtitles) = (count(TrackType::Video), count(TrackType::Subtitle));
        let other = reader.tracks().len() - video - subtitles;
        let parts = [(video, "of video"), (subtitles, "of subtitles"), (other, "of another kind")];
        let parts: Vec<String> =
            parts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        let tracks = if parts.is_empty() { String::new() } else { format!(", only {}", parts.join(", ")) };
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
pub(super) fn prepared(track: &Track, kind: Kind, about: &About) -> Result<(AudioCodecParameters, Trim, Option<u64>), MediaError> {
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
            Some(entry) if known.is_empty() => of_sample_entry(entry),
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
    if parameters.codec == CODEC_ID_VORBIS {
        vorbis::check_setup(parameters.extra_data.as_deref().unwrap_or_default())?;
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
        _ => Trim::new(start, Some(frames), 2 * AAC_FRAMES),
    }
}

pub(super) fn make_decoder(parameters: &AudioCodecParameters) -> Result<Box<dyn AudioDecoder>, Error> {
    // MPEG streams are trimmed here; see `mpeg_trim`.
    let is_mpeg = is_mpeg(parameters.codec);
    let options = AudioDecoderOptions::default().gapless(!is_mpeg);
    if parameters.codec == CODEC_ID_OPUS {
        return OpusDecoder::try_registry_new(parameters, &options);
    }
    symphonia::default::get_codecs().make_audio_decoder(parameters, &options)
}
