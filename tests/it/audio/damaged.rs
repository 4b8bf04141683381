//! Damaged and forged files, and files that are no recordings: each gives sound or a sentence, in bounded time and memory.

use std::time::{Duration, Instant};

use mlxbatch::job::Channels;
use mlxbatch::media::{MediaError, MediaSource, Recording, SAMPLE_RATE, StoredError};

use super::{fixture, hear_bytes, hear_file, refusal};

/// For one file, in a debug build, beside five other tests.
const TIME_MAX: Duration = Duration::from_secs(20);
/// Of resident memory, over what the test began with: files here have a few KB, buffers a few MB.
const MEMORY_BYTES_MAX: u64 = 400 << 20;

#[derive(Debug, Default, PartialEq)]
struct Counts {
    heard: usize,
    with_notes: usize,
    refused: usize,
}

struct Sweep {
    counts: Counts,
    sentences: Vec<String>,
}

impl Sweep {
    /// Decodes a file, of which nothing is known but that it must end in one of two ways.
    fn look(&mut self, name: &str, bytes: Vec<u8>) {
        let start = Instant::now();
        let length = bytes.len();
        let result = hear(bytes);
        let took = start.elapsed();
        assert!(took < TIME_MAX, "{name}: {took:?}");
        match result {
            Ok((samples, notes)) => {
                assert!(samples > 0, "{name}: an empty recording is an error");
                // Opus has 120 ms for three bytes; a minute besides, for gaps.
                assert!(samples < 60 * 16_000 + length * 1_000, "{name}: {samples} samples out of {length} bytes");
                self.counts.heard += usize::from(notes.is_empty());
                self.counts.with_notes += usize::from(!notes.is_empty());
                self.sentences.extend(notes);
            }
            Err(error) => {
                let sentence = error.to_string();
                assert!(sentence.len() > 30 && sentence.len() < 400, "{name}: {sentence}");
                assert!(!matches!(error, MediaError::Stored(StoredError::Read { .. })), "{name}: {sentence}");
                self.counts.refused += 1;
                self.sentences.push(sentence);
            }
        }
    }
}

fn hear(bytes: Vec<u8>) -> Result<(usize, Vec<String>), MediaError> {
    let source = MediaSource::Bytes { name: "hostile".to_owned(), bytes: bytes.into() };
    let mut recording = Recording::open(&source, Channels::Mix, SAMPLE_RATE)?;
    let mut samples = 0;
    while let Some(stretch) = recording.next()? {
        assert!(stretch.iter().all(|sample| sample.is_finite()));
        samples += stretch.len();
    }
    Ok((samples, recording.notes()))
}

/// Every format once: what the damaged files are made of.
const SEEDS: &[&str] = &[
    "flac-44100-stereo.flac",
    "flac-ogg.oga",
    "flac-matroska.mka",
    "mp3-44100-stereo.mp3",
    "mp3-22050-vbr-no-header.mp3",
    "aac-16000.m4a",
    "aac-fragments.mp4",
    "aac-22050.aac",
    "aac-matroska.mkv",
    "alac-16000.m4a",
    "alac-stereo.caf",
    "vorbis-44100-stereo.ogg",
    "vorbis-16000.webm",
    "opus-48000.opus",
    "opus-16000.webm",
    "pcm-16000.aiff",
    "pcm-8000-mulaw.aifc",
    "pcm-11025.caf",
    "pcm-8000.mov",
    "adpcm-ima.wav",
    "adpcm-ms.wav",
    "film.mp4",
];

struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        // Knuth's MMIX.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, limit: usize) -> usize {
        self.next() as usize % limit.max(1)
    }
}

#[test]
fn hostile_files_give_sound_or_a_sentence() {
    let before = resident_bytes();
    let mut sweep = Sweep { counts: Counts::default(), sentences: Vec::new() };
    let mut noise = Noise(1);
    let mut files = 0;
    for name in SEEDS {
        let seed = std::fs::read(fixture(name)).unwrap();
        for (damage, bytes) in damages(&seed, &mut noise) {
            sweep.look(&format!("{name} {damage}"), bytes);
            files += 1;
        }
    }
    for (name, bytes) in strangers() {
        sweep.look(name, bytes);
        files += 1;
    }
    let grown = peak_bytes().saturating_sub(before);
    println!("{files} files: {:?}, {} MB of memory", sweep.counts, grown >> 20);
    sweep.sentences.sort();
    sweep.sentences.dedup_by(|one, other| one[..12] == other[..12]);
    sweep.sentences.iter().for_each(|sentence| println!("    {sentence}"));
    assert!(files >= 150, "{files}");
    assert!(grown < MEMORY_BYTES_MAX, "{} MB", grown >> 20);
    let Counts { heard, with_notes, refused } = sweep.counts;
    assert!(heard > 50 && with_notes > 50 && refused > 100, "{:?}", sweep.counts);
}

/// One seed, damaged in every way.
fn damages(seed: &[u8], noise: &mut Noise) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    for length in [1, 4, 7, 12, 20, 36, 44, 60, 100, 200, 500] {
        files.push((format!("cut off at {length}"), seed[..length.min(seed.len())].to_vec()));
    }
    for part in 1..8 {
        files.push((format!("cut off at {part} eighths"), seed[..seed.len() * part / 8].to_vec()));
    }
    files.push(("without its last byte".to_owned(), seed[..seed.len() - 1].to_vec()));
    for count in [1, 5, 50, 500] {
        let mut bytes = seed.to_vec();
        for _ in 0..count {
            let at = noise.below(bytes.len());
            bytes[at] ^= 1 << noise.below(8);
        }
        files.push((format!("with {count} bits turned"), bytes));
    }
    // Headers: each number of the first bytes at its largest, and at zero.
    for at in (0..seed.len().min(96)).step_by(4) {
        for value in [0x00, 0x7f, 0xff] {
            let mut bytes = seed.to_vec();
            let end = (at + 4).min(bytes.len());
            bytes[at..end].fill(value);
            files.push((format!("with {value:#x} at {at}"), bytes));
        }
    }
    let (third, half) = (seed.len() / 3, seed.len() / 2);
    files.push(("with a hole".to_owned(), [&seed[..third], &seed[half..]].concat()));
    files.push(("twice".to_owned(), [seed, seed].concat()));
    files.push(("with zeros behind".to_owned(), [seed, &vec![0; 5000]].concat()));
    files.push(("of zeros from the middle on".to_owned(), [&seed[..half], &vec![0; half]].concat()));
    files.push((
        "of noise from the middle on".to_owned(),
        [&seed[..half], &(0..half).map(|_| noise.next() as u8).collect::<Vec<_>>()].concat(),
    ));
    files.push(("backwards".to_owned(), seed.iter().rev().copied().collect()));
    files
}

/// What is no recording at all, or claims what cannot be.
fn strangers() -> Vec<(&'static str, Vec<u8>)> {
    let wav = |riff: u32, format: &[u8], data: u32| {
        [
            b"RIFF",
            &riff.to_le_bytes()[..],
            b"WAVEfmt ",
            &(format.len() as u32).to_le_bytes(),
            format,
            b"data",
            &data.to_le_bytes(),
            b"abcd",
        ]
        .concat()
    };
    let plain = b"\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0";
    let matroska = b"\x1a\x45\xdf\xa3\x01\xff\xff\xff\xff\xff\xff\xff".to_vec();
    let segment = b"\x18\x53\x80\x67\x01\xff\xff\xff\xff\xff\xff\xff";
    let aiff = [
        &b"FORM\xff\xff\xff\xffAIFF"[..],
        b"COMM\0\0\0\x12\0\x01\xff\xff\xff\xff\0\x10\x40\x0c\xfa\0\0\0\0\0\0\0",
        b"SSND\xff\xff\xff\xff",
    ];
    let caf = [
        &b"caff\0\x01\0\0"[..],
        b"desc\0\0\0\0\0\0\0\x20\x40\xe5\x88\x80\0\0\0\0alac\0\0\0\0\0\0\0\0\xff\xff\xff\xff\0\0\0\x02\0\0\0\x10",
        b"pakt\x7f\xff\xff\xff\xff\xff\xff\xff",
    ];
    let mut boxes = b"\0\0\0\x10ftypM4A \0\0\0\0".to_vec();
    for _ in 0..2000 {
        boxes.extend(b"\x7f\xff\xff\xffmoov");
    }
    vec![
        ("zeros", vec![0; 100_000]),
        ("ones", vec![0xff; 100_000]),
        ("text", b"the quick brown fox".repeat(500)),
        ("png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec()),
        ("html", b"<!DOCTYPE html><html><body>404</body></html>".to_vec()),
        ("zip", b"PK\x03\x04\x14\0\0\0\x08\0".repeat(10)),
        ("a header alone", b"RIFF\0\0\0\0WAVE".to_vec()),
        ("a wave of four bytes that claims 4 GB", wav(u32::MAX, plain, 0xffff_0000)),
        ("a wave without channels", wav(40, b"\x01\0\0\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0", 4)),
        ("a wave of 65,535 channels", wav(40, b"\x01\0\xff\xff\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0", 4)),
        ("a wave whose frames are shorter than their samples", wav(40, b"\x01\0\x02\0\x80\x3e\0\0\0\x7d\0\0\x01\0\x10\0", 4)),
        ("a wave of chunks of no length", [&b"RIFF\xff\xff\xff\xffWAVE"[..], &b"LIST\0\0\0\0".repeat(30_000)].concat()),
        ("boxes in boxes", boxes),
        ("a Matroska file of unknown lengths", [matroska.clone(), segment.repeat(500)].concat()),
        ("an Ogg page of nothing", [&b"OggS\0\x02"[..], &[0; 20], &[255; 256]].concat()),
        ("an endless ID3 tag", b"ID3\x04\0\0\x7f\x7f\x7f\x7fTIT2".to_vec()),
        ("frame headers and nothing else", b"\xff\xfb\x90\xc0".repeat(20_000)),
        ("AAC headers of 7 bytes", b"\xff\xf1\x50\x80\x00\xff\xfc".repeat(5_000)),
        ("a FLAC header of a picture of 16 MB", b"fLaC\x06\xff\xff\xff".to_vec()),
        ("an AIFF of 4 GB", aiff.concat()),
        ("a CAF of packets without end", caf.concat()),
    ]
}

#[test]
fn what_is_no_recording_is_named() {
    for (bytes, content) in [
        (&b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"[..], "a PNG image"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF\0", "a JPEG image"),
        (b"  <!DOCTYPE HTML>\n<html>", "an HTML page; a download may have failed"),
        (b"{\"error\": \"not found\"}", "JSON; a download may have failed"),
        (b"PK\x03\x04\x14\0", "a ZIP archive (or a document of an office program)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "a Git LFS pointer, not the file itself; run `git lfs pull`"),
        (b"#EXTM3U\n/music/a.mp3\n", "a playlist, which only names recordings"),
        ("Es war einmal, ähm, ein Kö".as_bytes(), "text, beginning with `Es war einmal, ähm, ein Kö`"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "a WebP image"),
        (&[0; 3000], "only zero bytes; it was perhaps never written in full"),
        (b"\x01\x02\x03\x04\xfa\xfb\xfc\xfd\xfe", "of no known kind (it begins with the bytes 01 02 03 04 fa fb fc fd)"),
    ] {
        assert_eq!(
            refusal(hear_bytes(bytes.to_vec())),
            format!("this is not a recording: its content is {content}; correct the path"),
        );
    }
    for (bytes, what) in [
        (&b"wvpk\0\0\0\0"[..], "WavPack"),
        (b"RIFF\x10\0\0\0AVI LIST", "AVI video"),
        (b".snd\0\0\0\x18", "Sun AU"),
        (b"NIST_1A\n   1024\n", "NIST SPHERE"),
        (b"MThd\0\0\0\x06", "MIDI, which is notes and no sound,"),
    ] {
        let sentence = format!("{what} cannot be decoded here; convert the file to WAV or FLAC, for example with ffmpeg");
        assert_eq!(refusal(hear_bytes(bytes.to_vec())), sentence);
    }
}

#[test]
fn paths_that_are_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("empty.wav");
    std::fs::write(&path, "").unwrap();
    let refused = |path: std::path::PathBuf| refusal(super::hear(&MediaSource::File(path), Channels::Mix));
    assert_eq!(refused(path), "the file is empty (0 bytes); it was perhaps never downloaded or written");
    assert_eq!(refused(folder.path().join("none.wav")), "the file does not exist; correct its path, or make the file first");
    assert_eq!(refused(folder.path().to_path_buf()), "the path is a folder; name the file in it");
    assert_eq!(refused("/dev/zero".into()), "the path is not a regular file; copy what it yields into a file and name that");
    assert_eq!(refusal(hear_bytes(Vec::new())), "the file is empty (0 bytes); it was perhaps never downloaded or written");
}

/// An index at the end, as without `faststart`, is lost with the end.
#[test]
fn an_mp4_without_its_index() {
    let file = std::fs::read(fixture("aac-44100-stereo.m4a")).unwrap();
    assert_eq!(
        refusal(hear_bytes(file[..file.len() / 2].to_vec())),
        "the MP4 file is damaged: its index (`moov`) is missing; it is cut off, or was never finished; obtain it again"
    );
    assert!(hear_file("aac-44100-stereo.m4a").is_ok());
}

/// Ten minutes of sound take no more memory than a second.
#[test]
fn memory_does_not_grow_with_a_recording() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.wav");
    let mut header = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x02\0\x44\xac\0\0\x10\xb1\x02\0\x04\0\x10\0data\0\0\0\0".to_vec();
    header.extend(std::iter::repeat_n(1, 4000));
    std::fs::write(&path, header).unwrap();
    // A sparse file: ten minutes of silence behind a click.
    std::fs::File::options().write(true).open(&path).unwrap().set_len(44_100 * 4 * 600 + 44).unwrap();
    let before = peak_bytes();
    let mut recording = Recording::open(&MediaSource::File(path), Channels::Mix, SAMPLE_RATE).unwrap();
    let mut samples = 0;
    while let Some(stretch) = recording.next().unwrap() {
        samples += stretch.len();
    }
    assert_eq!(samples, 600 * 16_000);
    assert!((recording.seconds() - 600.0).abs() < 1e-6);
    let grown = peak_bytes().saturating_sub(before);
    assert!(grown < 16 << 20, "{} MB", grown >> 20);
}

fn status(key: &str) -> u64 {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return 0 };
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or("0");
    line.split_whitespace().find_map(|word| word.parse::<u64>().ok()).unwrap_or(0) << 10
}

fn resident_bytes() -> u64 {
    status("VmRSS:")
}

fn peak_bytes() -> u64 {
    status("VmHWM:")
}
