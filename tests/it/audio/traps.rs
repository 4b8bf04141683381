//! What went wrong in other programs, one test a symptom. `Symphonia#N` and the like are public issues.

use mlxbatch::media::SAMPLE_RATE;

use super::{decibels, fixture, hear_bytes, hear_file, refusal, speech};

fn bytes_of(name: &str) -> Vec<u8> {
    std::fs::read(fixture(name)).unwrap()
}

/// The frames of an MPEG or ADTS stream, by the lengths in their headers.
fn frames(bytes: &[u8], length: impl Fn(&[u8]) -> usize) -> Vec<Vec<u8>> {
    let mut rest = bytes;
    let mut frames = Vec::new();
    while rest.len() > 7 && rest[0] == 0xff {
        let (frame, after) = rest.split_at(length(rest).min(rest.len()));
        frames.push(frame.to_vec());
        rest = after;
    }
    frames
}

fn adts_length(header: &[u8]) -> usize {
    usize::from(header[3] & 3) << 11 | usize::from(header[4]) << 3 | usize::from(header[5] >> 5)
}

/// Layer III of MPEG 2 at 22,050 Hz, as the fixture is.
fn mpeg_length(header: &[u8]) -> usize {
    let kilobits = [0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160][usize::from(header[2] >> 4)];
    72_000 * kilobits / 22_050 + usize::from(header[2] >> 1 & 1)
}

/// Symphonia estimates the length of a stream without a Xing header from its first bit rates, and trims there: of a file of
/// variable bit rate whose beginning is loud, the rest would be missing.
#[test]
fn variable_bit_rate_without_a_header_is_not_cut_where_the_first_bit_rates_end() {
    let frames = frames(&bytes_of("mp3-22050-vbr-no-header.mp3"), mpeg_length);
    let (loudest, softest) =
        (frames.iter().max_by_key(|frame| frame.len()).unwrap(), frames.iter().min_by_key(|frame| frame.len()).unwrap());
    assert!(loudest.len() > 2 * softest.len());
    let stream = [vec![loudest.clone(); 40], vec![softest.clone(); 200]].concat();
    let heard = hear_bytes(stream.concat()).unwrap();
    let wanted = 240.0 * 576.0 * 16_000.0 / 22_050.0;
    assert!((heard.samples.len() as f64 - wanted).abs() < 2.0, "{} samples, not {wanted}", heard.samples.len());
}

/// Symphonia#540: frames whose main data points to before the beginning decode to nothing. Such a file must not pass as silence.
#[test]
fn a_decoder_that_returns_silence_from_data_that_is_not_silent() {
    // Every packet of sound claims to be of no granule with data: side information zeroed, noise behind it.
    let mut state = 1u32;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let frame = |noise: &mut dyn FnMut() -> u8| {
        let mut frame = vec![0xff, 0xfb, 0x90, 0xc0];
        frame.extend([0; 17]);
        frame.extend((0..417 - 21).map(|_| noise()));
        frame
    };
    let stream: Vec<u8> = (0..50).flat_map(|_| frame(&mut noise)).collect();
    assert_eq!(
        refusal(hear_bytes(stream)),
        "decoding gave only silence, 1.3 s of it, from MP3 data that is not silent; convert the file to WAV or FLAC, for example \
         with ffmpeg"
    );
    // The same frames filled up with one byte are silence, and are heard as such.
    let silence: Vec<u8> = (0..50).flat_map(|_| frame(&mut || 0x55)).collect();
    assert_eq!(hear_bytes(silence).unwrap().samples.len(), (50.0 * 1152.0 * 16_000.0 / 44_100.0f64).round() as usize);
}

/// Symphonia#190, #124.
#[test]
fn junk_in_front_of_an_mp3() {
    let mp3 = bytes_of("mp3-22050-vbr-no-header.mp3");
    let clean = hear_bytes(mp3.clone()).unwrap();
    let mut junk: Vec<u8> = (0..5000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for name in ["zeros", "noise with things that look like headers"] {
        let file = if name == "zeros" { [&vec![0; 3000], &mp3[..]].concat() } else { [&junk[..], &mp3].concat() };
        assert_eq!(hear_bytes(file).unwrap().samples, clean.samples, "{name}");
        junk[..4].copy_from_slice(&[0xff, 0xfb, 0x90, 0x44]);
        junk[2000..2004].copy_from_slice(&[0xff, 0xfa, 0x50, 0x00]);
    }
}

#[test]
fn id3_tags_in_front_even_several_and_behind() {
    let mp3 = bytes_of("mp3-22050-vbr-no-header.mp3");
    let clean = hear_bytes(mp3.clone()).unwrap();
    // A tag of 300 KB, as with a picture, that contains what looks like frames.
    let body = [&mp3[..200], &[0xff, 0xfb].repeat(150_000)].concat();
    let size = body.len() as u32;
    let length = [size >> 21 & 127, size >> 14 & 127, size >> 7 & 127, size & 127].map(|byte| byte as u8);
    let tag = [b"ID3\x04\0\0", &length[..], &body].concat();
    let trailer = [b"TAG", &[b' '; 125][..]].concat();
    let heard = hear_bytes([&tag[..], &tag, &mp3, &trailer].concat()).unwrap();
    assert_eq!(heard.samples, clean.samples);
    // FLAC too has tags put in front by programs that should not.
    let flac = hear_bytes([&tag[..], &bytes_of("flac-22050-24bit.flac")].concat()).unwrap();
    assert_eq!(flac.samples, hear_file("flac-22050-24bit.flac").unwrap().samples);
    assert!(refusal(hear_bytes(tag)).contains("a tag (ID3 or APE) without sound behind it"));
}

/// Symphonia#266, #426: HE-AAC would be decoded at half its rate. Here its header says so, in both of the ways there are.
#[test]
fn he_aac_that_its_header_announces() {
    let m4a = bytes_of("aac-22050.aac");
    assert!(hear_bytes(m4a).is_ok());
    let file = bytes_of("aac-16000.m4a");
    // The decoder configuration in `esds`: tag 5, its length on four bytes, AAC-LC at 16,000 Hz, one channel, an extension.
    let at = file.windows(5).position(|bytes| bytes == b"\x05\x80\x80\x80\x05").unwrap() + 5;
    assert_eq!(file[at..at + 5], [0x14, 0x08, 0x56, 0xe5, 0x00], "AAC-LC with the extension that says there is no SBR");
    let with = |configuration: [u8; 5]| {
        let mut file = file.clone();
        file[at..at + 5].copy_from_slice(&configuration);
        refusal(hear_bytes(file))
    };
    let refused = "cannot be decoded here; convert the file to WAV or FLAC, for example with ffmpeg";
    assert_eq!(with([0x14, 0x08, 0x56, 0xe5, 0x80]), format!("HE-AAC (AAC with SBR) {refused}"), "by the extension behind");
    assert_eq!(with([0x2c, 0x0a, 0x88, 0x00, 0x00]), format!("HE-AAC (AAC with SBR) {refused}"), "by its object type");
    assert_eq!(
        with([0xec, 0x0a, 0x88, 0x00, 0x00]),
        format!("HE-AAC v2 (AAC with SBR and parametric stereo) {refused}"),
        "by its object type"
    );
    assert_eq!(with([0xf9, 0x48, 0x40, 0x00, 0x00]), format!("xHE-AAC (USAC) {refused}"));
}

/// The same without an announcement: each packet ends in a fill element with SBR data.
#[test]
fn he_aac_that_only_its_packets_show() {
    let adts = bytes_of("aac-22050.aac");
    let frames = frames(&adts, adts_length);
    assert!(frames.len() > 8);
    let mut state = 7u32;
    let stream: Vec<u8> = frames.iter().flat_map(|frame| with_sbr(frame, &mut state)).collect();
    assert_eq!(
        refusal(hear_bytes(stream)),
        "HE-AAC (AAC with SBR, which its header does not say) cannot be decoded here; convert the file to WAV or FLAC, for example \
         with ffmpeg"
    );
}

/// Puts a fill element with SBR data in front of the three bits that end a frame.
fn with_sbr(frame: &[u8], state: &mut u32) -> Vec<u8> {
    let mut bits: Vec<bool> = frame[7..].iter().flat_map(|byte| (0..8).rev().map(move |bit| byte >> bit & 1 == 1)).collect();
    while bits.last() == Some(&false) {
        bits.pop();
    }
    assert_eq!(bits.split_off(bits.len() - 3), [true; 3], "ID_END");
    let mut put = |value: u32, count: u32| bits.extend((0..count).rev().map(|bit| value >> bit & 1 == 1));
    // ID_FIL, 20 bytes (15 and 5 more, less one), EXT_SBR_DATA.
    put(6, 3);
    put(15, 4);
    put(6, 8);
    put(13, 4);
    for _ in 0..39 {
        *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        put(*state >> 28, 4);
    }
    put(7, 3);
    let body: Vec<u8> =
        bits.chunks(8).map(|bits| (0..8).fold(0, |byte, bit| byte << 1 | u8::from(bits.get(bit) == Some(&true)))).collect();
    let length = body.len() + 7;
    let mut header = frame[..7].to_vec();
    header[3] = header[3] & !3 | (length >> 11) as u8;
    header[4] = (length >> 3) as u8;
    header[5] = header[5] & 31 | (length << 5) as u8;
    [header, body].concat()
}

#[test]
fn a_protected_mp4_is_named_as_such() {
    let mut file = bytes_of("aac-16000.m4a");
    let at = file.windows(4).position(|name| name == b"mp4a").unwrap();
    file[at..at + 4].copy_from_slice(b"drms");
    assert_eq!(
        refusal(hear_bytes(file.clone())),
        "the recording is encrypted (DRM); only its owner's software can decode it: use a copy without protection"
    );
    file[at..at + 4].copy_from_slice(b"sawb");
    assert!(refusal(hear_bytes(file)).starts_with("AMR-WB audio cannot be decoded here"));
}

/// faster-whisper#988.
#[test]
fn a_corrupt_tail_keeps_what_is_valid_and_says_so() {
    for (name, share) in
        [("flac-44100-stereo.flac", 0.6), ("aac-16000.m4a", 0.7), ("opus-48000.opus", 0.6), ("mp3-44100-stereo.mp3", 0.6)]
    {
        let file = bytes_of(name);
        let cut = &file[..(file.len() as f64 * share) as usize];
        // An M4A keeps its tables at the start with `faststart`, as this one does.
        let heard = hear_bytes(cut.to_vec()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let whole = hear_file(name).unwrap();
        let kept = heard.samples.len();
        println!("{name}: {kept} of {}, {:?}", whole.samples.len(), heard.notes);
        assert!(kept > 1500 && kept < whole.samples.len(), "{name}: {kept}");
        let same = kept.saturating_sub(200);
        assert!(decibels(&heard.samples[..same], &whole.samples[..same], 1.0) > 60.0, "{name}");
        if name != "opus-48000.opus" {
            assert!(heard.notes.len() == 1 && heard.notes[0].contains("cut off"), "{name}: {:?}", heard.notes);
        }
    }
}

#[test]
fn damaged_packets_in_the_middle_leave_the_rest_where_it_was() {
    let mut file = bytes_of("flac-44100-stereo.flac");
    let whole = hear_bytes(file.clone()).unwrap();
    let middle = file.len() / 2;
    file[middle..middle + 40].fill(0x5a);
    let heard = hear_bytes(file).unwrap();
    println!("{:?} {} {}", heard.notes, heard.samples.len(), whole.samples.len());
    assert_eq!(heard.samples.len(), whole.samples.len());
    let tail = whole.samples.len() * 9 / 10;
    assert_eq!(heard.samples[tail..], whole.samples[tail..]);
    assert_eq!(heard.notes.len(), 1);
}

/// Streams behind one another, as radio recordings have them.
#[test]
fn chained_ogg_streams_are_all_heard() {
    for name in ["vorbis-44100-stereo.ogg", "opus-48000.opus"] {
        let file = bytes_of(name);
        let mut other = file.clone();
        // The second needs a serial number of its own, and with it other checksums.
        renumber(&mut other);
        let heard = hear_bytes([file, other].concat()).unwrap();
        println!("{name}: {} {:?}", heard.samples.len(), heard.notes);
        assert_eq!(heard.samples.len(), 16_000, "{name}");
        let gain = if name.contains("stereo") { 0.8 } else { 1.0 };
        assert!(decibels(&heard.samples[8000..], &speech(SAMPLE_RATE), gain) > 18.0, "{name}");
    }
}

/// RFC 3533, section 6: the serial number at 14, the checksum at 22, a table of lengths at 27.
fn renumber(file: &mut [u8]) {
    let mut start = 0;
    while start + 27 <= file.len() {
        let segments = usize::from(file[start + 26]);
        let body: usize = file[start + 27..start + 27 + segments].iter().map(|&length| usize::from(length)).sum();
        let page = &mut file[start..start + 27 + segments + body];
        page[14] ^= 0xff;
        page[22..26].fill(0);
        let mut checksum = 0u32;
        for &byte in page.iter() {
            checksum ^= u32::from(byte) << 24;
            for _ in 0..8 {
                checksum = if checksum >> 31 == 1 { checksum << 1 ^ 0x04c1_1db7 } else { checksum << 1 };
            }
        }
        page[22..26].copy_from_slice(&checksum.to_le_bytes());
        start += 27 + segments + body;
    }
}

#[test]
fn another_sample_rate_in_the_middle_of_a_stream() {
    let (first, second) = (bytes_of("mp3-22050-vbr-no-header.mp3"), bytes_of("mp3-44100-stereo.mp3"));
    let at = second.windows(2).position(|sync| sync[0] == 0xff && sync[1] & 0xe0 == 0xe0).unwrap();
    let heard = hear_bytes([&first[..], &second[at..]].concat()).unwrap();
    println!("{} {:?}", heard.samples.len(), heard.notes);
    assert!(
        heard.notes.iter().any(|note| note == "at 0.6 s the recording changes to 44100 Hz and 2 channels"),
        "{:?}",
        heard.notes
    );
    assert!(heard.samples.len() > 16_500, "{}", heard.samples.len());
}
