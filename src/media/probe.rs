//! What a file is, by its content: names lie, and a name is never looked at.

use super::MediaError;
use super::source::Source;

/// Bytes that are searched for the first frame of an MPEG stream behind junk.
const JUNK_BYTES_MAX: usize = 1 << 16;
/// Frames in a row that must agree before bytes behind junk are taken for an MPEG stream.
const FRAMES_AGREEING: usize = 4;
/// Tags in front of the sound.
const TAGS_MAX: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Wav,
    Aiff,
    Caf,
    Flac,
    Ogg,
    Matroska,
    Mp4,
    Adts,
    Mpeg,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Wav => "WAV",
            Self::Aiff => "AIFF",
            Self::Caf => "CAF",
            Self::Flac => "FLAC",
            Self::Ogg => "Ogg",
            Self::Matroska => "Matroska or WebM",
            Self::Mp4 => "MP4",
            Self::Adts => "AAC",
            Self::Mpeg => "MP3",
        }
    }
}

/// The kind, and where in the file it begins: behind tags and junk.
pub(super) fn probe(source: &mut Source) -> Result<(Kind, u64), MediaError> {
    let mut start = 0;
    for _ in 0..TAGS_MAX {
        let head = source.peek(start, 32).map_err(MediaError::read)?;
        match tag_bytes(&head) {
            Some(bytes) if start + bytes < source.length() => start += bytes,
            Some(_) => return Err(MediaError::NotAudio { content: "a tag (ID3 or APE) without sound behind it".to_owned() }),
            None => break,
        }
    }
    let head = source.peek(start, JUNK_BYTES_MAX).map_err(MediaError::read)?;
    if let Some(kind) = container(&head) {
        return Ok((kind, start));
    }
    if let Some(what) = undecoded(&head) {
        return Err(MediaError::unsupported(what));
    }
    if start == 0
        && let Some(content) = other_content(&head)
    {
        return Err(MediaError::NotAudio { content });
    }
    if let Some((kind, junk)) = stream(&head) {
        return Ok((kind, start + junk as u64));
    }
    Err(MediaError::NotAudio { content: unknown_content(&head) })
}

/// The length of an ID3v2 or APEv2 tag that begins here. Sources: id3.org's "ID3 tag version 2.4.0", section 3.1; APEv2's
/// "APE Tags Header".
fn tag_bytes(head: &[u8]) -> Option<u64> {
    if let [b'I', b'D', b'3', major, minor, flags, length @ ..] = head
        && let [a, b, c, d, ..] = length
        && [a, b, c, d].iter().all(|&&byte| byte < 128)
        && *major < 0xff
        && *minor < 0xff
    {
        let body = [a, b, c, d].iter().fold(0, |sum, &&byte| sum << 7 | u64::from(byte));
        let footer = if flags & 0x10 != 0 { 10 } else { 0 };
        return Some(10 + body + footer);
    }
    if head.starts_with(b"APETAGEX") {
        let length: [u8; 4] = head.get(12..16)?.try_into().ok()?;
        return Some(32 + u64::from(u32::from_le_bytes(length)));
    }
    None
}

fn container(head: &[u8]) -> Option<Kind> {
    let at = |from: usize, what: &[u8]| head.get(from..).is_some_and(|rest| rest.starts_with(what));
    if (at(0, b"RIFF") || at(0, b"RIFX") || at(0, b"RF64") || at(0, b"BW64")) && at(8, b"WAVE") {
        return Some(Kind::Wav);
    }
    if at(0, b"FORM") && (at(8, b"AIFF") || at(8, b"AIFC")) {
        return Some(Kind::Aiff);
    }
    let starts: [(usize, &[u8], Kind); 9] = [
        (0, b"caff", Kind::Caf),
        (0, b"fLaC", Kind::Flac),
        (0, b"OggS", Kind::Ogg),
        (0, &[0x1a, 0x45, 0xdf, 0xa3], Kind::Matroska),
        (4, b"ftyp", Kind::Mp4),
        (4, b"moov", Kind::Mp4),
        (4, b"mdat", Kind::Mp4),
        (4, b"wide", Kind::Mp4),
        (4, b"styp", Kind::Mp4),
    ];
    starts.iter().find(|(from, what, _)| at(*from, what)).map(|(.., kind)| *kind)
}

/// Sound that nothing here decodes.
fn undecoded(head: &[u8]) -> Option<&'static str> {
    const STARTS: &[(&[u8], &str)] = &[
        (b"#!AMR", "AMR (telephone) audio"),
        (b"wvpk", "WavPack"),
        (b"MAC ", "Monkey's Audio"),
        (b"TTA1", "TTA"),
        (b"MPCK", "Musepack"),
        (b"MP+", "Musepack"),
        (&[0x30, 0x26, 0xb2, 0x75], "Windows Media (WMA or WMV)"),
        (&[0x0b, 0x77], "AC-3"),
        (&[0x7f, 0xfe, 0x80, 0x01], "DTS"),
        (b".snd", "Sun AU"),
        (b"NIST_1A", "NIST SPHERE"),
        (b"FLV", "Flash video"),
        (b".RMF", "RealMedia"),
        (b"DSD ", "DSD"),
        (b"MThd", "MIDI, which is notes and no sound,"),
        (b"riff\x2e\x91\xcf\x11", "Wave64"),
    ];
    let avi = head.starts_with(b"RIFF") && head.get(8..12) == Some(b"AVI ");
    let transport = head.first() == Some(&0x47) && [188, 376].iter().all(|&at| head.get(at) == Some(&0x47));
    match (avi, transport) {
        (true, _) => Some("AVI video"),
        (_, true) => Some("an MPEG transport stream"),
        _ => STARTS.iter().find(|(start, _)| head.starts_with(start)).map(|(_, what)| *what),
    }
}

/// What bytes that are no image are.
pub(super) fn content(head: &[u8]) -> String {
    let sound = || container(head).map(|kind| format!("a recording or film ({})", kind.name()));
    other_content(head).or_else(sound).unwrap_or_else(|| unknown_content(head))
}

/// What is certainly no sound.
fn other_content(head: &[u8]) -> Option<String> {
    const STARTS: &[(&[u8], &str)] = &[
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (&[0xff, 0xd8, 0xff], "a JPEG image"),
        (b"GIF8", "a GIF image"),
        (b"%PDF", "a PDF document"),
        (b"PK\x03\x04", "a ZIP archive (or a document of an office program)"),
        (b"PK\x05\x06", "an empty ZIP archive"),
        (&[0x1f, 0x8b], "a gzip archive; unpack it first"),
        (b"BZh", "a bzip2 archive; unpack it first"),
        (&[0xfd, b'7', b'z', b'X', b'Z'], "an xz archive; unpack it first"),
        (&[0x28, 0xb5, 0x2f, 0xfd], "a zstd archive; unpack it first"),
        (b"7z\xbc\xaf", "a 7z archive; unpack it first"),
        (b"Rar!", "a RAR archive; unpack it first"),
        (b"\x7fELF", "a program"),
        (b"MZ", "a program"),
        (b"PAR1", "a Parquet file"),
        (b"SQLite format 3", "a SQLite database"),
        (b"version https://git-lfs", "a Git LFS pointer, not the file itself; run `git lfs pull`"),
    ];
    if let Some((_, what)) = STARTS.iter().find(|(start, _)| head.starts_with(start)) {
        return Some((*what).to_owned());
    }
    if head.starts_with(b"RIFF") && head.get(8..12) == Some(b"WEBP") {
        return Some("a WebP image".to_owned());
    }
    text(head)
}

/// Of text, what kind.
fn text(head: &[u8]) -> Option<String> {
    let head = &head[..head.len().min(4096)];
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        // The last letter may be cut in two.
        Err(error) if error.valid_up_to() + 4 > head.len() && error.error_len().is_none() => {
            std::str::from_utf8(&head[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    let readable = |letter: char| !letter.is_control() || letter.is_whitespace();
    if text.is_empty() || !text.chars().all(readable) {
        return None;
    }
    let start = text.trim_start_matches('\u{feff}').trim_start().to_ascii_lowercase();
    let kinds = [
        ("<!doctype html", "an HTML page; a download may have failed"),
        ("<html", "an HTML page; a download may have failed"),
        ("<?xml", "an XML document; a download may have failed"),
        ("<svg", "an SVG image"),
        ("{\\rtf", "an RTF document"),
        ("{", "JSON; a download may have failed"),
        ("#extm3u", "a playlist, which only names recordings"),
        ("[playlist]", "a playlist, which only names recordings"),
        ("webvtt", "subtitles"),
    ];
    let kind = kinds.iter().find(|(prefix, _)| start.starts_with(prefix)).map(|(_, kind)| *kind);
    let line: String = text.trim().lines().next().unwrap_or("").chars().take(40).collect();
    Some(kind.map_or_else(|| format!("text, beginning with `{line}`"), ToOwned::to_owned))
}

fn unknown_content(head: &[u8]) -> String {
    if head.iter().all(|&byte| byte == 0) {
        return "only zero bytes; it was perhaps never written in full".to_owned();
    }
    let start: Vec<String> = head.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("of no known kind (it begins with the bytes {})", start.join(" "))
}

/// What matters of a frame's header: the bytes to the next one, and what all frames of a stream share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    pub kind: Kind,
    pub bytes: usize,
    /// In Hz.
    pub rate: u32,
    pub version_and_layer: u8,
    pub channels: u8,
}

impl Frame {
    fn agrees(&self, other: &Self) -> bool {
        (self.kind, self.rate, self.version_and_layer) == (other.kind, other.rate, other.version_and_layer)
    }
}

fn stream(head: &[u8]) -> Option<(Kind, usize)> {
    (0..head.len().saturating_sub(4)).find_map(|start| Some((agreeing(head, start)?, start)))
}

/// The kind of stream that begins here: so many frames, one behind the other, or all until a small file's end.
fn agreeing(head: &[u8], start: usize) -> Option<Kind> {
    let first = frame(&head[start..])?;
    let mut position = start + first.bytes;
    for _ in 1..FRAMES_AGREEING {
        if start == 0 && position + 4 > head.len() && head.len() < JUNK_BYTES_MAX {
            break;
        }
        let next = frame(head.get(position..)?)?;
        if !next.agrees(&first) {
            return None;
        }
        position += next.bytes;
    }
    Some(first.kind)
}

/// Reads a frame's header. Sources: ISO/IEC 11172-3, 2.4.2.3 and 13818-3 for MPEG audio; ISO/IEC 14496-3, 1.A.2.2 for ADTS.
pub(super) fn frame(bytes: &[u8]) -> Option<Frame> {
    let &[first, second, third, fourth, ..] = bytes else { return None };
    if first != 0xff || second & 0xe0 != 0xe0 {
        return None;
    }
    if second & 0xf6 == 0xf0 {
        const RATES: [u32; 13] =
            [96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8_000, 7_350];
        let &[fifth, sixth] = bytes.get(4..6)?.first_chunk()?;
        let length = usize::from(fourth & 3) << 11 | usize::from(fifth) << 3 | usize::from(sixth >> 5);
        let rate = *RATES.get(usize::from(third >> 2 & 15))?;
        let channels = (third & 1) << 2 | fourth >> 6;
        return (length >= 7).then_some(Frame { kind: Kind::Adts, bytes: length, rate, version_and_layer: third >> 6, channels });
    }
    let (version, layer) = (second >> 3 & 3, second >> 1 & 3);
    let (bitrate, rate) = (usize::from(third >> 4), usize::from(third >> 2 & 3));
    if version == 1 || layer == 0 || bitrate == 15 || bitrate == 0 || rate == 3 {
        return None;
    }
    let rate = [44_100, 48_000, 32_000][rate] / [4, 1, 2, 1][usize::from(version)];
    let kilobits = kilobits(version == 3, layer)[bitrate - 1];
    let padding = usize::from(third >> 1 & 1);
    let bytes = match (layer, version) {
        (3, _) => (12_000 * kilobits / rate as usize + padding) * 4,
        (1, 0 | 2) => 72_000 * kilobits / rate as usize + padding,
        _ => 144_000 * kilobits / rate as usize + padding,
    };
    let channels = if fourth >> 6 == 3 { 1 } else { 2 };
    Some(Frame { kind: Kind::Mpeg, bytes, rate, version_and_layer: second >> 1 & 15, channels })
}

fn kilobits(first_version: bool, layer: u8) -> [usize; 14] {
    match (first_version, layer) {
        (true, 3) => [32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448],
        (true, 2) => [32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384],
        (true, _) => [32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320],
        (false, 3) => [32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256],
        (false, _) => [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160],
    }
}
