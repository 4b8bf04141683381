//! How large a Vorbis stream's codebooks are, before its decoder lays them out: a setup header of a few KB can ask for gigabytes.
//!
//! Source: "Vorbis I specification", 3.2.1 (codebooks), 4.2.4 (setup header), 9.2 (`ilog`, `lookup1_values`).

use super::MediaError;

/// Numbers in all codebooks of a stream; libvorbis' own have under a million.
const NUMBERS_MAX: u64 = 8 << 20;

const SETUP: &[u8; 7] = b"\x05vorbis";
const CODEBOOK: u32 = 0x56_4342;

/// Refuses headers that ask for too much. What is damaged is left to the decoder to tell.
pub(super) fn check_setup(headers: &[u8]) -> Result<(), MediaError> {
    let Some(at) = headers.windows(SETUP.len()).position(|bytes| bytes == SETUP) else { return Ok(()) };
    match numbers(&headers[at + SETUP.len()..]) {
        Some(NUMBERS_MAX..) => Err(MediaError::damaged("Vorbis", "its codebooks are larger than those of any encoder")),
        _ => Ok(()),
    }
}

fn numbers(setup: &[u8]) -> Option<u64> {
    let mut bits = Bits { bytes: setup, position: 0 };
    let mut total = 0;
    for _ in 0..=bits.read(8)? {
        total += codebook(&mut bits)?;
        if total >= NUMBERS_MAX {
            break;
        }
    }
    Some(total)
}

fn codebook(bits: &mut Bits<'_>) -> Option<u64> {
    if bits.read(24)? != CODEBOOK {
        return None;
    }
    let (dimensions, entries) = (u64::from(bits.read(16)?), u64::from(bits.read(24)?));
    let is_ordered = bits.read(1)? == 1;
    if is_ordered {
        bits.skip(5);
        let mut entry = 0;
        while entry < entries {
            entry += u64::from(bits.read((entries - entry).ilog2() + 1)?);
        }
    } else if bits.read(1)? == 1 {
        for _ in 0..entries {
            if bits.read(1)? == 1 {
                bits.skip(5);
            }
        }
    } else {
        bits.skip(5 * entries);
    }
    match bits.read(4)? {
        0 => Some(entries),
        kind => {
            bits.skip(64);
            let width = u64::from(bits.read(4)?) + 1;
            bits.skip(1);
            let values = if kind == 1 { lookup_values(entries, dimensions) } else { entries * dimensions };
            bits.skip(width * values);
            Some(entries * (dimensions + 1))
        }
    }
}

/// The largest number whose power of `dimensions` is not over `entries`.
fn lookup_values(entries: u64, dimensions: u64) -> u64 {
    let dimensions = u32::try_from(dimensions).unwrap_or(u32::MAX).max(1);
    let fits = |value: u64| value.checked_pow(dimensions).is_some_and(|power| power <= entries);
    let mut value = (entries as f64).powf(1.0 / f64::from(dimensions)) as u64 + 1;
    while value > 0 && !fits(value) {
        value -= 1;
    }
    value
}

/// Bits, the lowest first.
struct Bits<'a> {
    bytes: &'a [u8],
    position: u64,
}

impl Bits<'_> {
    fn read(&mut self, count: u32) -> Option<u32> {
        let mut value = 0;
        for bit in 0..count {
            let at = self.position + u64::from(bit);
            let byte = *self.bytes.get(usize::try_from(at / 8).ok()?)?;
            value |= u32::from(byte >> (at % 8) & 1) << bit;
        }
        self.position += u64::from(count);
        Some(value)
    }

    fn skip(&mut self, count: u64) {
        self.position = self.position.saturating_add(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes bits, the lowest first.
    #[derive(Default)]
    struct Writer(Vec<bool>);

    impl Writer {
        fn put(&mut self, value: u32, count: u32) {
            self.0.extend((0..count).map(|bit| value >> bit & 1 == 1));
        }

        fn bytes(&self) -> Vec<u8> {
            self.0.chunks(8).map(|bits| bits.iter().enumerate().fold(0, |byte, (at, &bit)| byte | u8::from(bit) << at)).collect()
        }
    }

    /// So many codebooks of 131,072 entries in 32 dimensions, each in 30 bytes.
    fn setup(codebooks: u32) -> Vec<u8> {
        let mut bits = Writer::default();
        bits.put(codebooks - 1, 8);
        for _ in 0..codebooks {
            bits.put(CODEBOOK, 24);
            bits.put(32, 16);
            bits.put(1 << 17, 24);
            bits.put(1, 1);
            bits.put(16, 5);
            bits.put(1 << 17, 18);
            bits.put(1, 4);
            bits.put(0, 32);
            bits.put(0, 32);
            bits.put(0, 4);
            bits.put(0, 1);
            bits.put(1, 1);
        }
        [&SETUP[..], &bits.bytes()].concat()
    }

    #[test]
    fn codebooks_of_gigabytes_are_refused() {
        assert!(check_setup(&setup(1)).is_ok());
        let error = check_setup(&setup(200)).unwrap_err().to_string();
        assert_eq!(error, "the Vorbis file is damaged: its codebooks are larger than those of any encoder; obtain it again");
        assert_eq!(numbers(&setup(1)[7..]), Some((1 << 17) * 33));
    }

    #[test]
    fn an_ordinary_stream_is_far_from_the_limit() {
        let file = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/audio/vorbis-44100-stereo.ogg")).unwrap();
        let at = file.windows(7).position(|bytes| bytes == SETUP).unwrap();
        // Its setup header lies in one page, up to where the next begins.
        let end = at + file[at..].windows(4).position(|bytes| bytes == b"OggS").unwrap();
        let numbers = numbers(&file[at + 7..end]).unwrap();
        assert!((1_000..1 << 20).contains(&numbers), "{numbers}");
    }

    #[test]
    fn lookup_values_are_whole_roots() {
        for (entries, dimensions, values) in [(81, 4, 3), (80, 4, 2), (1, 1, 1), (625, 4, 5), (131_072, 32, 1), (0, 3, 0)] {
            assert_eq!(lookup_values(entries, dimensions), values, "{entries} {dimensions}");
        }
    }
}
