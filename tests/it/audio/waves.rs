//! WAV files as the world writes them, byte by byte.

use mlxbatch::job::Channels;
use mlxbatch::media::{MediaSource, SAMPLE_RATE};

use super::{Heard, decibels, hear, hear_bytes, refusal, speech};

/// What a `fmt ` chunk says.
#[derive(Clone, Copy)]
struct Wave {
    tag: u16,
    channels: u16,
    rate: u32,
    bits: u16,
    big_endian: bool,
}

const PLAIN: Wave = Wave { tag: 1, channels: 1, rate: SAMPLE_RATE, bits: 16, big_endian: false };

impl Wave {
    fn number(&self, value: u32) -> [u8; 4] {
        if self.big_endian { value.to_be_bytes() } else { value.to_le_bytes() }
    }

    fn short(&self, value: u16) -> [u8; 2] {
        if self.big_endian { value.to_be_bytes() } else { value.to_le_bytes() }
    }

    fn chunk(&self, name: &[u8; 4], body: &[u8]) -> Vec<u8> {
        let padding = vec![0; body.len() % 2];
        [name, &self.number(body.len() as u32)[..], body, &padding].concat()
    }

    fn format(&self, extension: &[u8]) -> Vec<u8> {
        let stride = self.channels * self.bits / 8;
        let body = [
            &self.short(self.tag)[..],
            &self.short(self.channels),
            &self.number(self.rate),
            &self.number(self.rate * u32::from(stride)),
            &self.short(stride),
            &self.short(self.bits),
            extension,
        ];
        self.chunk(b"fmt ", &body.concat())
    }

    fn file(&self, data: &[u8]) -> Vec<u8> {
        self.riff(&[self.format(&[]), self.chunk(b"data", data)].concat())
    }

    fn riff(&self, chunks: &[u8]) -> Vec<u8> {
        let name = if self.big_endian { b"RIFX" } else { b"RIFF" };
        [name, &self.number(chunks.len() as u32 + 4)[..], b"WAVE", chunks].concat()
    }
}

fn sixteen(samples: &[f32]) -> Vec<u8> {
    samples.iter().flat_map(|sample| ((sample * 32_768.0).round() as i16).to_le_bytes()).collect()
}

/// Must be the speech, exactly as 16 bits hold it.
fn is_speech(heard: &Heard) {
    assert_eq!(heard.samples.len(), 8000);
    let near = decibels(&heard.samples, &speech(SAMPLE_RATE), 1.0);
    assert!(near > 70.0, "{near:.1} dB");
}

#[test]
fn every_width_and_both_byte_orders() {
    let speech = speech(SAMPLE_RATE);
    // tag, bits, how near it must come.
    let kinds = [(1, 8, 25.0), (1, 16, 70.0), (1, 24, 115.0), (1, 32, 140.0), (1, 64, 140.0), (3, 32, 200.0), (3, 64, 200.0)];
    for big_endian in [false, true] {
        for (tag, bits, least) in kinds {
            let wave = Wave { tag, bits, big_endian, ..PLAIN };
            let mut data = Vec::new();
            for &sample in &speech {
                let sample = f64::from(sample);
                let mut bytes = match (tag, bits) {
                    (3, 32) => (sample as f32).to_le_bytes().to_vec(),
                    (3, _) => sample.to_le_bytes().to_vec(),
                    (_, 8) => vec![(sample * 128.0 + 128.0).round() as u8],
                    _ => {
                        let whole = (sample * 2f64.powi(i32::from(bits) - 1)).round() as i64;
                        whole.to_le_bytes()[..usize::from(bits) / 8].to_vec()
                    }
                };
                if big_endian {
                    bytes.reverse();
                }
                data.extend(bytes);
            }
            let heard = hear_bytes(wave.file(&data)).unwrap();
            let near = decibels(&heard.samples, &speech, 1.0);
            assert!(heard.samples.len() == 8000 && near > least, "{tag} {bits} {big_endian}: {near:.1} dB");
            assert_eq!(heard.notes, Vec::<String>::new());
        }
    }
}

/// ITU-T G.711's tables 1a and 2a: the first and the last values of the positive half, and the smallest.
#[test]
fn companded_samples_are_those_of_the_tables() {
    let hear = |tag, byte: u8| hear_bytes(Wave { tag, bits: 8, ..PLAIN }.file(&[byte; 4])).unwrap().samples[0];
    for (byte, value) in [(0x80, 8031.0), (0xff, 0.0), (0xfe, 2.0), (0x00, -8031.0), (0x8f, 4191.0), (0xf0, 30.0)] {
        assert_eq!(hear(7, byte) * 8192.0, value, "mu-law {byte:#x}");
    }
    for (byte, value) in [(0xaa, 4032.0), (0xd5, 1.0), (0x55, -1.0), (0x2a, -4032.0), (0xa5, 2112.0)] {
        assert_eq!(hear(6, byte) * 4096.0, value, "A-law {byte:#x}");
    }
}

#[test]
fn samples_at_the_models_rate_are_left_alone() {
    let samples: Vec<i16> = (0..40_000).map(|at: i32| (at * 7919 % 65_536 - 32_768) as i16).collect();
    let data: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    let heard = hear_bytes(PLAIN.file(&data)).unwrap();
    assert_eq!(heard.samples, samples.iter().map(|&sample| f32::from(sample) / 32_768.0).collect::<Vec<_>>());
}

/// Symphonia#247, #250: a `fmt ` of 40 bytes whose extension is said to have none.
#[test]
fn fmt_of_40_bytes_with_an_extension_of_0() {
    let speech = sixteen(&speech(SAMPLE_RATE));
    let guid = |tag: u16| [&tag.to_le_bytes()[..], b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"].concat();
    for (tag, stated) in [(1, 0u16), (1, 22), (0xfffe, 0), (0xfffe, 22)] {
        let extension = [&stated.to_le_bytes()[..], &16u16.to_le_bytes(), &4u32.to_le_bytes(), &guid(1)].concat();
        let wave = Wave { tag, ..PLAIN };
        let heard = hear_bytes(wave.riff(&[wave.format(&extension), wave.chunk(b"data", &speech)].concat())).unwrap();
        is_speech(&heard);
        assert_eq!(heard.notes, Vec::<String>::new());
    }
}

/// Symphonia#380.
#[test]
fn data_longer_than_the_riff_chunk() {
    let mut file = PLAIN.file(&sixteen(&speech(SAMPLE_RATE)));
    for riff in [0, 36, 100, u32::MAX] {
        file[4..8].copy_from_slice(&riff.to_le_bytes());
        let heard = hear_bytes(file.clone()).unwrap();
        is_speech(&heard);
        assert_eq!(heard.notes, Vec::<String>::new(), "{riff}");
    }
}

#[test]
fn lengths_that_were_never_filled_in() {
    for length in [0, u32::MAX, 0x7fff_ffff, 0x7fff_f000] {
        let mut file = PLAIN.file(&sixteen(&speech(SAMPLE_RATE)));
        file[4..8].copy_from_slice(&0u32.to_le_bytes());
        file[40..44].copy_from_slice(&length.to_le_bytes());
        let heard = hear_bytes(file).unwrap();
        is_speech(&heard);
        assert_eq!(heard.notes, Vec::<String>::new(), "{length:#x}");
    }
}

#[test]
fn a_data_chunk_that_is_really_empty() {
    let file =
        PLAIN.riff(&[PLAIN.format(&[]), PLAIN.chunk(b"data", &[]), PLAIN.chunk(b"LIST", b"INFOISFT\x04\0\0\0abc\0")].concat());
    assert_eq!(refusal(hear_bytes(file)), "the WAV file holds no samples; it is cut off or was never finished: obtain it again");
}

#[test]
fn rf64_has_its_length_elsewhere() {
    let data = sixteen(&speech(SAMPLE_RATE));
    let long = [&0u64.to_le_bytes()[..], &(data.len() as u64).to_le_bytes(), &8000u64.to_le_bytes(), &0u32.to_le_bytes()].concat();
    for name in [b"RF64", b"BW64"] {
        let mut chunk = PLAIN.chunk(b"data", &data);
        chunk[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        let tail = PLAIN.chunk(b"LIST", &[7; 400]);
        let mut file = PLAIN.riff(&[PLAIN.chunk(b"ds64", &long), PLAIN.format(&[]), chunk, tail].concat());
        file[..4].copy_from_slice(name);
        file[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        is_speech(&hear_bytes(file).unwrap());
    }
}

#[test]
fn chunks_of_odd_lengths_padded_and_not() {
    let data = sixteen(&speech(SAMPLE_RATE));
    for padded in [true, false] {
        let mut odd = PLAIN.chunk(b"LIST", b"INFOodd");
        odd.truncate(odd.len() - usize::from(!padded));
        let file = PLAIN.riff(&[odd.clone(), PLAIN.format(&[]), odd, PLAIN.chunk(b"data", &data)].concat());
        is_speech(&hear_bytes(file).unwrap());
    }
}

#[test]
fn every_number_of_channels_up_to_8_at_every_rate() {
    for (channels, rate) in (1..=8u16).zip([8_000, 11_025, 22_050, 32_000, 44_100, 48_000, 96_000, 192_000]) {
        let speech_at_rate = speech(rate);
        let wave = Wave { channels, rate, bits: 16, ..PLAIN };
        let frames = speech_at_rate.iter().flat_map(|&sample| std::iter::repeat_n(sample, usize::from(channels)));
        let heard = hear_bytes(wave.file(&sixteen(&frames.collect::<Vec<_>>()))).unwrap();
        let near = decibels(&heard.samples, &speech(SAMPLE_RATE), 1.0);
        let wanted = (speech_at_rate.len() as f64 * 16_000.0 / f64::from(rate)).round() as usize;
        assert_eq!(heard.samples.len(), wanted, "{channels} channels at {rate} Hz");
        assert!(near > 70.0, "{channels} channels at {rate} Hz: {near:.1} dB");
    }
}

#[test]
fn the_channel_for_low_frequencies_is_not_heard() {
    let extension = [&22u16.to_le_bytes()[..], &16u16.to_le_bytes(), &0x3fu32.to_le_bytes()].concat();
    let extension = [&extension[..], b"\x01\0\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"].concat();
    let wave = Wave { tag: 0xfffe, channels: 6, ..PLAIN };
    let frames: Vec<f32> = speech(SAMPLE_RATE).iter().flat_map(|&sample| [sample, sample, sample, 0.5, sample, sample]).collect();
    is_speech(&hear_bytes(wave.riff(&[wave.format(&extension), wave.chunk(b"data", &sixteen(&frames))].concat())).unwrap());
}

/// FluidVoice#626, and the other way round.
#[test]
fn one_silent_channel_takes_nothing_away_but_loudness() {
    for silent in [0, 1] {
        let wave = Wave { channels: 2, ..PLAIN };
        let frames = speech(SAMPLE_RATE).into_iter().flat_map(|sample| if silent == 0 { [0.0, sample] } else { [sample, 0.0] });
        let heard = hear_bytes(wave.file(&sixteen(&frames.collect::<Vec<_>>()))).unwrap();
        assert!(decibels(&heard.samples, &speech(SAMPLE_RATE), 0.5) > 65.0, "channel {silent} is silent");
        assert_eq!(heard.notes, Vec::<String>::new());
    }
}

#[test]
fn channels_that_cancel_are_heard_one_by_one() {
    let wave = Wave { channels: 2, ..PLAIN };
    let frames: Vec<f32> = speech(SAMPLE_RATE).into_iter().flat_map(|sample| [sample * 0.9, -sample]).collect();
    let source = MediaSource::Bytes { name: "phase".to_owned(), bytes: wave.file(&sixteen(&frames)).into() };
    let heard = hear(&source, Channels::Mix).unwrap();
    assert!(decibels(&heard.samples, &speech(SAMPLE_RATE), -1.0) > 65.0);
    assert_eq!(
        heard.notes,
        ["from 0.0 s on the channels cancel each other when mixed; channel 2 of 2, the loudest, is heard alone"]
    );
    let heard = hear(&source, Channels::Left).unwrap();
    assert!(decibels(&heard.samples, &speech(SAMPLE_RATE), 0.9) > 65.0 && heard.notes.is_empty());
}

#[test]
fn floating_point_that_is_no_number() {
    let wave = Wave { tag: 3, bits: 32, ..PLAIN };
    let mut samples = speech(SAMPLE_RATE);
    (samples[10], samples[20], samples[30], samples[40]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30);
    let heard = hear_bytes(wave.file(&samples.iter().flat_map(|sample| sample.to_le_bytes()).collect::<Vec<_>>())).unwrap();
    assert_eq!(heard.notes, ["4 samples that were no numbers, or beyond all scale, are heard as silence"]);
    assert!(heard.samples.iter().all(|sample| sample.abs() <= 1.0));
}

#[test]
fn clips_shorter_than_any_block() {
    for rate in [8_000, 16_000, 44_100, 192_000] {
        for frames in 1..30 {
            let wave = Wave { rate, ..PLAIN };
            let heard = hear_bytes(wave.file(&sixteen(&vec![0.25; frames])));
            let wanted = (frames as f64 * 16_000.0 / f64::from(rate)).round() as usize;
            // A few samples at 192 kHz are not one at 16.
            assert_eq!(heard.map_or(0, |heard| heard.samples.len()), wanted, "{frames} frames at {rate} Hz");
        }
    }
}

#[test]
fn a_header_that_makes_no_sense() {
    for (wave, sentence) in [
        (Wave { channels: 0, ..PLAIN }, "the audio file is damaged: its header says that it has no channels; obtain it again"),
        (Wave { rate: 0, ..PLAIN }, "the WAV file is damaged: its header says that it has 0 samples a second; obtain it again"),
        (
            Wave { rate: 4_000_000_000, ..PLAIN },
            "the recording has 4000000000 samples a second, more than 384000, which is the limit here; resample it, for example to 48000",
        ),
        (
            Wave { channels: 900, bits: 8, ..PLAIN },
            "the recording has 900 channels, more than 64, which is the limit here; keep the channels with speech",
        ),
        (
            Wave { tag: 0x55, ..PLAIN },
            "WAV with MP3 cannot be decoded here; convert the file to WAV or FLAC, for example with ffmpeg",
        ),
    ] {
        let stated = Wave { rate: wave.rate, ..wave };
        let mut file = PLAIN.file(&sixteen(&speech(SAMPLE_RATE)));
        file[20..22].copy_from_slice(&stated.tag.to_le_bytes());
        file[22..24].copy_from_slice(&stated.channels.to_le_bytes());
        file[24..28].copy_from_slice(&stated.rate.to_le_bytes());
        assert_eq!(refusal(hear_bytes(file)), sentence);
    }
}

#[test]
fn a_cut_off_file_keeps_what_is_there() {
    let file = PLAIN.file(&sixteen(&speech(SAMPLE_RATE)));
    let heard = hear_bytes(file[..44 + 4001].to_vec()).unwrap();
    assert_eq!(heard.samples.len(), 2000);
    assert_eq!(heard.notes, ["cut off: the header promises 0.5 s, the file holds 0.1 s"]);
}
