//! Reads the headers of safetensors files: names, types and shapes over all shards, no weights.
//!
//! Format: <https://github.com/huggingface/safetensors#format>.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

/// The format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// An index of the largest models in use has a few megabytes.
const INDEX_BYTES_MAX: u64 = 100_000_000;

/// One tensor's description.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub shape: Vec<u64>,
    /// As the file spells it: `F32`, `BF16`, `U32`, …
    pub dtype: String,
    pub bytes: u64,
}

#[derive(Debug, Error)]
pub enum SafetensorsError {
    #[error("cannot read {file}: {source}")]
    Io { file: PathBuf, source: std::io::Error },
    #[error("{file} is damaged or cut short: {what}; download it again")]
    Damaged { file: PathBuf, what: String },
    #[error("{file} does not match the weights beside it: {what}; download the model again")]
    Index { file: PathBuf, what: String },
    #[error("the tensor {name:?} is in both {first} and {second}: remove the file that does not belong to the model")]
    Twice { name: String, first: PathBuf, second: PathBuf },
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Bits of an element, from the format's list; `None` for a type it does not name.
pub fn bits_per_element(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E5M2FNUZ" | "F8_E4M3FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

/// Reads the header of one file.
pub fn read(file: &Path) -> Result<Vec<Tensor>, SafetensorsError> {
    let io = |source| SafetensorsError::Io { file: file.to_owned(), source };
    let reader = std::fs::File::open(file).map_err(io)?;
    let file_bytes = reader.metadata().map_err(io)?.len();
    read_header(reader, file_bytes, file)
}

fn read_header(mut reader: impl Read, file_bytes: u64, file: &Path) -> Result<Vec<Tensor>, SafetensorsError> {
    let damaged = |what: String| SafetensorsError::Damaged { file: file.to_owned(), what };
    let io = |source| SafetensorsError::Io { file: file.to_owned(), source };
    let Some(after_length) = file_bytes.checked_sub(8) else {
        return Err(damaged(format!("it has {file_bytes} bytes")));
    };
    let mut length = [0; 8];
    reader.read_exact(&mut length).map_err(io)?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > after_length.min(HEADER_BYTES_MAX) {
        return Err(damaged(format!("its header claims {header_bytes} bytes of the file's {file_bytes}")));
    }
    let mut header = vec![0; header_bytes as usize];
    reader.read_exact(&mut header).map_err(io)?;
    let entries: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&header).map_err(|error| damaged(format!("its header is not the JSON it should be: {error}")))?;

    let data_bytes = after_length - header_bytes;
    let mut tensors = Vec::new();
    let mut ranges = Vec::new();
    for (name, entry) in entries {
        if name == "__metadata__" {
            continue;
        }
        let Entry { dtype, shape, data_offsets: (start, end) } =
            serde_json::from_value(entry).map_err(|error| damaged(format!("the tensor {name:?}: {error}")))?;
        if start > end || end > data_bytes {
            return Err(damaged(format!("the tensor {name:?} is at {start}..{end} of {data_bytes} bytes")));
        }
        let bytes = end - start;
        if let Some(bits) = bits_per_element(&dtype) {
            let claimed = shape.iter().try_fold(bits, |product, &size| product.checked_mul(size));
            if claimed != bytes.checked_mul(8) {
                return Err(damaged(format!("the tensor {name:?} of {dtype} {shape:?} has {bytes} bytes")));
            }
        }
        ranges.push((start, end));
        tensors.push(Tensor { name, shape, dtype, bytes });
    }
    // The format has no holes: the tensors' ranges cover the data exactly.
    ranges.sort_unstable();
    let mut covered = 0;
    for (start, end) in ranges {
        if start != covered {
            return Err(damaged(format!("its tensors overlap or leave a hole at byte {} of the data", covered.min(start))));
        }
        covered = end;
    }
    if covered != data_bytes {
        return Err(damaged(format!("its tensors cover {covered} of {data_bytes} bytes")));
    }
    Ok(tensors)
}

/// Reads the headers of all shards.
pub fn read_all(shards: &[PathBuf]) -> Result<Vec<Tensor>, SafetensorsError> {
    let mut from: BTreeMap<String, &PathBuf> = BTreeMap::new();
    let mut tensors = Vec::new();
    for shard in shards {
        for tensor in read(shard)? {
            if let Some(first) = from.insert(tensor.name.clone(), shard) {
                return Err(SafetensorsError::Twice { name: tensor.name, first: first.clone(), second: shard.clone() });
            }
            tensors.push(tensor);
        }
    }
    Ok(tensors)
}

/// `model.safetensors.index.json`: which shard holds which tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Index {
    pub file: PathBuf,
    /// Tensor name to shard file name.
    pub weight_map: BTreeMap<String, String>,
}

impl Index {
    pub fn read(file: &Path) -> Result<Self, SafetensorsError> {
        let io = |source| SafetensorsError::Io { file: file.to_owned(), source };
        let reader = std::fs::File::open(file).map_err(io)?;
        let bytes = reader.metadata().map_err(io)?.len();
        let wrong = |what: String| SafetensorsError::Index { file: file.to_owned(), what };
        if bytes > INDEX_BYTES_MAX {
            return Err(wrong(format!("it has {bytes} bytes, more than {INDEX_BYTES_MAX}")));
        }
        #[derive(Deserialize)]
        struct Content {
            weight_map: BTreeMap<String, String>,
        }
        let Content { weight_map } = serde_json::from_reader(std::io::BufReader::new(reader))
            .map_err(|error| wrong(format!("it cannot be read: {error}")))?;
        if weight_map.is_empty() {
            return Err(wrong("its weight_map is empty".to_owned()));
        }
        // A shard is a plain file name: an index from the hub must not point elsewhere on this machine.
        if let Some(shard) = weight_map.values().find(|shard| shard.contains(['/', '\\']) || shard.starts_with('.')) {
            return Err(wrong(format!("it names the shard {shard:?}, which is not a plain file name")));
        }
        Ok(Self { file: file.to_owned(), weight_map })
    }

    /// Names of the shards, in order, each once.
    pub fn shards(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }

    /// Every tensor of the index must be in the shards' headers.
    pub fn check(&self, tensors: &[Tensor]) -> Result<(), SafetensorsError> {
        let there: BTreeSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let missing: Vec<&str> = self.weight_map.keys().map(String::as_str).filter(|name| !there.contains(name)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let shown = missing.iter().take(8).copied().collect::<Vec<_>>().join(", ");
        let more = if missing.len() > 8 { ", …" } else { "" };
        Err(SafetensorsError::Index {
            file: self.file.clone(),
            what: format!("{} of its tensors are in no shard: {shown}{more}", missing.len()),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Vec<Tensor>, SafetensorsError> {
        read_header(bytes, bytes.len() as u64, Path::new("model.safetensors"))
    }

    #[track_caller]
    fn refused(bytes: &[u8], expected: &str) {
        let message = parse(bytes).unwrap_err().to_string();
        assert!(message.contains(expected) && message.contains("model.safetensors"), "{message:?} does not say {expected:?}");
    }

    #[test]
    fn a_good_header_is_read() {
        let header = r#"{"__metadata__":{"format":"mlx"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},
            "s":{"dtype":"F32","shape":[],"data_offsets":[12,16]}}"#;
        let tensors = parse(&file(header, 16)).unwrap();
        assert_eq!(tensors.len(), 2);
        assert_eq!(tensors[1], Tensor { name: "w".into(), shape: vec![2, 3], dtype: "BF16".into(), bytes: 12 });
    }

    #[test]
    fn a_header_longer_than_the_file() {
        refused(&u64::MAX.to_le_bytes(), "claims 18446744073709551615 bytes");
        refused(&[1, 0, 0], "it has 3 bytes");
    }

    #[test]
    fn a_header_that_is_not_json() {
        refused(&file("{\"w\":", 0), "not the JSON");
    }

    #[test]
    fn a_tensor_past_the_end() {
        refused(&file(r#"{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#, 8), "of 8 bytes");
    }

    #[test]
    fn a_shape_that_does_not_fit_its_bytes() {
        refused(&file(r#"{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,16]}}"#, 16), "has 16 bytes");
        let overflow = format!(r#"{{"w":{{"dtype":"F32","shape":[{0},{0}],"data_offsets":[0,16]}}}}"#, u64::MAX);
        refused(&file(&overflow, 16), "has 16 bytes");
    }

    #[test]
    fn overlaps_and_holes() {
        let overlap =
            r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[4,12]}}"#;
        refused(&file(overlap, 12), "overlap or leave a hole");
        refused(&file(r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#, 9), "cover 8 of 9 bytes");
    }

    #[test]
    fn an_index_is_checked_against_its_shards() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors.index.json");
        std::fs::write(&path, r#"{"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}"#).unwrap();
        let index = Index::read(&path).unwrap();
        assert_eq!(index.shards().into_iter().collect::<Vec<_>>(), ["one.safetensors", "two.safetensors"]);
        let a = Tensor { name: "a".into(), shape: vec![], dtype: "F32".into(), bytes: 4 };
        let message = index.check(&[a]).unwrap_err().to_string();
        assert!(message.contains("1 of its tensors are in no shard: b"), "{message}");
        std::fs::write(&path, r#"{"weight_map":{"a":"../../secret"}}"#).unwrap();
        assert!(Index::read(&path).unwrap_err().to_string().contains("not a plain file name"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn random_json_never_panics(text in "[\\[\\]{}\":,0-9a-zF]{0,80}", data in 0usize..32) {
            let _ = parse(&file(&text, data));
        }
    }
}
