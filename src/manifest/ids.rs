//! Row ids: what is taken for one, and which of them have been seen.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hash, Hasher};

use serde_json::Value;

use super::raw::shorten;

/// Ids go into results, logs and file names.
pub const ID_BYTES_MAX: usize = 1024;

/// float64 holds every integer up to 2^53.
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;

/// The id that a column's value gives; `column` is its name.
pub(super) fn id_of(value: &Value, column: &str) -> Result<String, String> {
    let id = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() && number.as_f64().is_none_or(|number| number.abs() > EXACT_MAX) => {
            return Err(format!("the id in `{column}` is a number of more digits than JSON readers keep; write it as a string"));
        }
        Value::Number(number) => number.to_string(),
        Value::Null => return Err(format!("the id in `{column}` is null; give one, or leave `{column}` out of the row")),
        Value::Bool(_) | Value::Array(_) | Value::Object(_) => {
            return Err(format!("the id in `{column}` is neither text nor a number; write it as a string"));
        }
    };
    if id.trim().is_empty() {
        return Err(format!("the id in `{column}` is empty; give one, or remove the column `{column}`"));
    }
    if id.len() > ID_BYTES_MAX {
        return Err(format!("the id in `{column}` has {} bytes, the limit is {ID_BYTES_MAX}; shorten it", id.len()));
    }
    if let Some(character) = id.chars().find(|character| character.is_control()) {
        return Err(format!("the id `{}` in `{column}` holds the control character {character:?}; remove it", shorten(&id)));
    }
    Ok(id)
}

/// Where a row stands: a file's index and a line of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    // Halves, so that an entry of the table is aligned to 4 bytes.
    high: u32,
    low: u32,
}

const LINE_BITS: u32 = 40;

impl Place {
    /// `file` below 2^24 and `line` below 2^40; a line beyond is told as the last of them.
    pub fn new(file: u32, line: u64) -> Self {
        let packed = u64::from(file) << LINE_BITS | line.min((1 << LINE_BITS) - 1);
        Self { high: (packed >> 32) as u32, low: packed as u32 }
    }

    pub fn file(self) -> u32 {
        self.high >> (LINE_BITS - 32)
    }

    pub fn line(self) -> u64 {
        (u64::from(self.high) << 32 | u64::from(self.low)) & ((1 << LINE_BITS) - 1)
    }
}

/// The ids seen so far, as hashes: 21 bytes an entry of the table, of which 7/16 to 7/8 are in use, so 24 to 48 bytes a row.
///
/// 96 bits of blake3: two of 100 million ids are taken for one another with a chance of 1 in 10^13.
#[derive(Debug, Default)]
pub(super) struct IdSet {
    seen: HashMap<IdHash, Place, BuildHasherDefault<Unchanged>>,
}

impl IdSet {
    /// Takes an id, or says where it was taken before.
    pub fn insert(&mut self, id: &str, place: Place) -> Result<(), Place> {
        let hash = blake3::hash(id.as_bytes());
        let word = |index: usize| hash.as_bytes()[index * 4..].iter().take(4).fold(0, |word, &byte| word << 8 | u32::from(byte));
        match self.seen.entry(IdHash([word(0), word(1), word(2)])) {
            Entry::Occupied(first) => Err(*first.get()),
            Entry::Vacant(entry) => {
                entry.insert(place);
                Ok(())
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct IdHash([u32; 3]);

impl Hash for IdHash {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(u64::from(self.0[0]) << 32 | u64::from(self.0[1]));
    }
}

/// Passes on what is a hash already.
#[derive(Debug, Default)]
struct Unchanged(u64);

impl Hasher for Unchanged {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0 << 8 | u64::from(byte);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text_and_numbers_are_ids() {
        for (value, expected) in [
            (json!("a b"), "a b"),
            (json!(7), "7"),
            (json!(-1), "-1"),
            (json!(u64::MAX), "18446744073709551615"),
            (json!(1.5), "1.5"),
            (json!(" x"), " x"),
            (json!("é".repeat(512)), "é".repeat(512).as_str()),
        ] {
            assert_eq!(id_of(&value, "id").as_deref(), Ok(expected));
        }
    }

    #[test]
    fn what_is_no_id_says_why() {
        for (value, expected) in [
            (json!(null), "is null"),
            (json!(""), "is empty"),
            (json!(" \t"), "is empty"),
            (json!({"a": 1}), "neither text nor a number"),
            (json!(["a"]), "neither text nor a number"),
            (json!(true), "neither text nor a number"),
            (json!("x".repeat(1025)), "has 1025 bytes, the limit is 1024"),
            (json!("a\0b"), "control character"),
            (json!("a\nb"), "control character"),
            (json!(1e300), "more digits"),
            (serde_json::from_str("123456789012345678901234567890").unwrap(), "more digits"),
        ] {
            let error = id_of(&value, "utt").unwrap_err();
            assert!(error.contains(expected) && error.contains("`utt`"), "{value}: {error}");
        }
    }

    #[test]
    fn the_first_place_of_an_id_is_remembered() {
        let mut ids = IdSet::default();
        let far = Place::new((1 << 24) - 1, (1 << 40) - 1);
        assert_eq!((far.file(), far.line()), ((1 << 24) - 1, (1 << 40) - 1));
        assert_eq!(Place::new(1, u64::MAX), Place::new(1, (1 << 40) - 1));
        assert_eq!(ids.insert("a", far), Ok(()));
        assert_eq!(ids.insert("b", Place::new(0, 1)), Ok(()));
        assert_eq!(ids.insert("a", Place::new(0, 2)), Err(far));
        assert_eq!(ids.insert("a", Place::new(0, 3)), Err(far));
    }

    #[test]
    fn an_entry_has_20_bytes_and_ids_of_one_pattern_spread() {
        assert_eq!(size_of::<(IdHash, Place)>(), 20);
        let mut ids = IdSet::default();
        for number in 0..100_000 {
            assert_eq!(ids.insert(&number.to_string(), Place::new(0, number)), Ok(()));
        }
        assert_eq!(ids.seen.len(), 100_000);
    }
}
