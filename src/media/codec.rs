//! Names of codecs, for people.

use symphonia::core::codecs::audio::AudioCodecId;
use symphonia::core::codecs::audio::well_known::*;

/// Empty where it has none.
pub(super) fn name(codec: AudioCodecId) -> &'static str {
    match codec {
        CODEC_ID_VORBIS => "Vorbis",
        CODEC_ID_OPUS => "Opus",
        CODEC_ID_SPEEX => "Speex",
        CODEC_ID_MUSEPACK => "Musepack",
        CODEC_ID_MP1 => "MPEG layer 1",
        CODEC_ID_MP2 => "MPEG layer 2",
        CODEC_ID_MP3 => "MP3",
        CODEC_ID_AAC => "AAC",
        CODEC_ID_AC3 => "AC-3",
        CODEC_ID_EAC3 => "E-AC-3",
        CODEC_ID_AC4 => "AC-4",
        CODEC_ID_DCA => "DTS",
        CODEC_ID_WMA => "Windows Media audio",
        CODEC_ID_FLAC => "FLAC",
        CODEC_ID_WAVPACK => "WavPack",
        CODEC_ID_MONKEYS_AUDIO => "Monkey's Audio",
        CODEC_ID_ALAC => "ALAC",
        CODEC_ID_TTA => "TTA",
        CODEC_ID_TRUEHD => "TrueHD",
        CODEC_ID_ADPCM_G722 => "G.722",
        CODEC_ID_ADPCM_G726 | CODEC_ID_ADPCM_G726LE => "G.726",
        CODEC_ID_ADPCM_MS | CODEC_ID_ADPCM_IMA_WAV | CODEC_ID_ADPCM_IMA_QT => "ADPCM",
        _ => "",
    }
}

pub(super) fn is_lossy(codec: AudioCodecId) -> bool {
    is_mpeg(codec) || matches!(codec, CODEC_ID_VORBIS | CODEC_ID_OPUS | CODEC_ID_AAC)
}

pub(super) fn is_mpeg(codec: AudioCodecId) -> bool {
    matches!(codec, CODEC_ID_MP1 | CODEC_ID_MP2 | CODEC_ID_MP3)
}

/// Of an MP4 track, by the four letters that say what its samples are. Source: the MP4 registration authority's codecs.
pub(super) fn of_sample_entry(entry: [u8; 4]) -> String {
    let name = match &entry {
        b"ac-3" => "AC-3",
        b"ec-3" => "E-AC-3",
        b"ac-4" => "AC-4",
        b"dtsc" | b"dtse" | b"dtsh" | b"dtsl" | b"dtsx" => "DTS",
        b"samr" => "AMR (telephone) audio",
        b"sawb" | b"sawp" => "AMR-WB audio",
        b"mlpa" => "TrueHD",
        b"QDM2" | b"QDMC" => "QDesign audio",
        b"ima4" | b"ms\0\x02" | b"ms\0\x11" => "ADPCM",
        b"mha1" | b"mhm1" => "MPEG-H audio",
        b"twos" | b"sowt" | b"raw " | b"in24" | b"in32" | b"fl32" | b"fl64" => "uncompressed audio of this kind in MP4",
        _ => {
            let letters: String = entry.iter().map(|&byte| char::from(byte)).filter(char::is_ascii_graphic).collect();
            return format!("MP4 audio of the kind `{letters}`");
        }
    };
    name.to_owned()
}
