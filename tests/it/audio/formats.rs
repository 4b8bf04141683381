//! Every format and codec.

use mlxbatch::job::Channels;
use mlxbatch::media::{MediaSource, SAMPLE_RATE};

use super::{SECONDS, decibels, fixture, hear, hear_file, refusal, speech};

/// The mean of a channel and of one at 0.6 of it.
const STEREO: f64 = 0.8;
/// Of a channel, one at 0.6 of it, and three that are silent; the channel for low frequencies is not heard.
const FIVE_AND_ONE: f64 = 1.6 / 5.0;

/// Decodes a fixture: `gain` times what was meant must come out, `least` dB near to it, `late` samples late, and up to `more`
/// samples longer.
fn check(name: &str, gain: f64, least: f64, late: usize, more: usize) {
    let heard = hear_file(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    let wanted = (SECONDS * f64::from(SAMPLE_RATE)) as usize;
    let from = late.min(heard.samples.len());
    let to = (from + wanted).min(heard.samples.len());
    let near = decibels(&heard.samples[from..to], &speech(SAMPLE_RATE), gain);
    println!("{name}: {} samples, {near:.1} dB", heard.samples.len());
    let length = heard.samples.len();
    // 11,025 Hz has no whole number of samples in half a second.
    assert!((wanted - 1..=wanted + more).contains(&length), "{name}: {length} samples, not {wanted}");
    assert!(near >= least, "{name}: {near:.1} dB, not {least}");
    assert!((heard.seconds - length as f64 / f64::from(SAMPLE_RATE)).abs() < 1e-4, "{name}: {} s", heard.seconds);
    assert_eq!(heard.notes, Vec::<String>::new(), "{name}");
}

#[test]
fn lossless_formats_give_back_what_was_recorded() {
    for (name, gain, least) in [
        ("flac-44100-stereo.flac", STEREO, 70.0),
        ("flac-22050-24bit.flac", 1.0, 110.0),
        ("flac-8000-6channels.flac", FIVE_AND_ONE, 70.0),
        ("flac-ogg.oga", 1.0, 70.0),
        ("flac-matroska.mka", 1.0, 70.0),
        ("alac-16000.m4a", 1.0, 70.0),
        ("alac-stereo.caf", STEREO, 70.0),
        ("pcm-16000.aiff", 1.0, 70.0),
        ("pcm-8000-sowt.aifc", 1.0, 70.0),
        ("pcm-8000-mulaw.aifc", 1.0, 35.0),
        ("pcm-11025.caf", 1.0, 70.0),
        ("pcm-8000.mov", 1.0, 70.0),
    ] {
        check(name, gain, least, 0, 0);
    }
}

#[test]
fn lossy_formats_begin_and_end_where_the_sound_does() {
    for (name, gain, least) in [
        ("mp3-44100-stereo.mp3", STEREO, 22.0),
        ("mp3-48000-vbr.mp3", 1.0, 24.0),
        ("mp3-8000.mp3", 1.0, 21.0),
        ("aac-44100-stereo.m4a", STEREO, 17.0),
        ("aac-16000.m4a", 1.0, 13.0),
        ("vorbis-44100-stereo.ogg", STEREO, 19.0),
        ("vorbis-16000.webm", 1.0, 24.0),
        ("opus-48000.opus", 1.0, 31.0),
        ("opus-stereo-60ms.opus", STEREO, 22.0),
        ("opus-2.5ms.opus", 1.0, 28.0),
        ("opus-16000.webm", 1.0, 35.0),
        ("opus-mp4.mp4", 1.0, 31.0),
    ] {
        check(name, gain, least, 0, 0);
    }
}

#[test]
fn a_film_is_heard() {
    check("film.mp4", STEREO, 15.0, 0, 0);
    check("film.webm", 1.0, 31.0, 0, 0);
}

/// These say where the sound begins, but not where it ends, or neither; ffmpeg decodes as many samples of each.
#[test]
fn what_a_format_does_not_say_is_not_cut_off() {
    check("aac-fragments.mp4", 1.0, 21.0, 0, 192);
    check("aac-matroska.mkv", 1.0, 21.0, 0, 173);
    check("adpcm-ima.wav", 1.0, 26.0, 0, 164);
    check("adpcm-ms.wav", 1.0, 25.0, 0, 144);
    // 1024 samples at 22,050 Hz.
    check("aac-22050.aac", 1.0, 10.0, 743, 916);
    // 481 at 32,000 Hz and 1105 at 22,050 Hz.
    check("mp2-32000.mp2", 1.0, 10.0, 240, 64);
    check("mp3-22050-vbr-no-header.mp3", 1.0, 10.0, 802, 1195);
}

#[test]
fn one_channel_is_heard_where_the_job_says_so() {
    for (channels, gain) in [(Channels::Left, 1.0), (Channels::Right, 0.6), (Channels::Mix, STEREO)] {
        let heard = hear(&MediaSource::File(fixture("flac-44100-stereo.flac")), channels).unwrap();
        assert!(decibels(&heard.samples, &speech(SAMPLE_RATE), gain) > 65.0, "{channels:?}");
    }
}

#[test]
fn of_several_tracks_the_note_says_which_is_heard() {
    let heard = hear_file("film-two-languages.mkv").unwrap();
    assert_eq!(heard.notes, ["of 2 audio tracks, number 1 (ger) is heard"]);
    assert!(decibels(&heard.samples, &speech(SAMPLE_RATE), 1.0) > 10.0);
}

#[test]
fn a_name_decides_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for (name, other) in [("pcm-16000.aiff", "sound.mp3"), ("mp3-8000.mp3", "sound.wav"), ("opus-48000.opus", "sound")] {
        let path = folder.path().join(other);
        std::fs::copy(fixture(name), &path).unwrap();
        let renamed = hear(&MediaSource::File(path), Channels::Mix).unwrap();
        assert_eq!(renamed.samples, hear_file(name).unwrap().samples, "{name} as {other}");
    }
}

#[test]
fn what_cannot_be_decoded_is_named() {
    for (name, what) in [
        ("ac3.mp4", "AC-3"),
        ("ac3.mka", "AC-3"),
        ("eac3.mp4", "E-AC-3"),
        ("wma.wma", "Windows Media (WMA or WMV)"),
        ("amr.amr", "AMR (telephone) audio"),
        ("transport.ts", "an MPEG transport stream"),
        ("aac-6channels.m4a", "AAC with 6 channels"),
        ("opus-6channels.opus", "Opus with 6 channels"),
    ] {
        let sentence = format!("{what} cannot be decoded here; convert the file to WAV or FLAC, for example with ffmpeg");
        assert_eq!(refusal(hear_file(name)), sentence, "{name}");
    }
    assert_eq!(refusal(hear_file("silent-film.mp4")), "the file holds no audio track, only 1 of video; name a file with sound");
}

#[test]
fn digital_silence_is_a_recording_too() {
    for name in ["silence.mp3", "silence.m4a", "silence.opus", "silence.ogg"] {
        let heard = hear_file(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(heard.samples.len(), 8000, "{name}");
        assert!(heard.samples.iter().all(|sample| sample.abs() < 1e-6), "{name}");
        assert_eq!(heard.notes, Vec::<String>::new(), "{name}");
    }
}
