//! Reads the header of a GGUF file: metadata and tensor descriptions, no weights.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Every count and length is checked against the file's size
//! before anything is allocated for it.

use std::collections::{BTreeMap, HashSet};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Bytes that the metadata and tensor descriptions may take; the largest vocabularies in use need a tenth of it.
const HEADER_BYTES_MAX: u64 = 256 << 20;
/// Bytes of a key or a tensor name, as the specification limits them.
const NAME_BYTES_MAX: u64 = 65_535;
/// ggml's own limit of a tensor's dimensions.
const DIMENSIONS_MAX: u32 = 4;
/// Arrays in arrays.
const ARRAY_DEPTH_MAX: u32 = 4;

/// What a GGUF header says.
#[derive(Debug, Clone, PartialEq)]
pub struct Gguf {
    pub file: PathBuf,
    pub version: u32,
    pub metadata: BTreeMap<String, Value>,
    pub tensors: Vec<Tensor>,
    /// Where tensor data start, bytes from the start of the file.
    pub data_offset: u64,
    pub file_bytes: u64,
}

/// A metadata value; integers and floats are widened.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    Unsigned(Vec<u64>),
    Signed(Vec<i64>),
    Float(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Nested(Vec<Array>),
}

/// One tensor's description.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    pub name: String,
    /// Slowest dimension first, as MLX and Hugging Face write shapes; the file has the reverse.
    pub shape: Vec<u64>,
    pub kind: Kind,
    /// Bytes from [`Gguf::data_offset`].
    pub offset: u64,
    pub bytes: u64,
}

/// A ggml storage type: blocks of `block_elements` elements in `block_bytes` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    pub id: u32,
    pub name: &'static str,
    pub block_elements: u64,
    pub block_bytes: u64,
}

impl Kind {
    /// Bits an element takes, scales included.
    pub fn bits_per_element(&self) -> f64 {
        self.block_bytes as f64 * 8.0 / self.block_elements as f64
    }
}

/// From `ggml.h` and `ggml-common.h`: id, name, elements and bytes of a block.
#[rustfmt::skip]
const KINDS: &[(u32, &str, u64, u64)] = &[
    (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 36), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
];

#[derive(Debug, Error)]
pub enum GgufError {
    #[error("cannot read {file}: {source}")]
    Io { file: PathBuf, source: std::io::Error },
    #[error("{file} is not a GGUF file: it starts with {found:?} instead of \"GGUF\"; is the download complete?")]
    Magic { file: PathBuf, found: String },
    #[error("{file} has GGUF version {version}; versions 2 and 3 in little-endian order can be read: convert the model again")]
    Version { file: PathBuf, version: u32 },
    #[error("{file} is damaged or cut short: {what}; download it again")]
    Damaged { file: PathBuf, what: String },
}

impl Gguf {
    /// Reads the header of `file`.
    pub fn open(file: &Path) -> Result<Self, GgufError> {
        let io = |source| GgufError::Io { file: file.to_owned(), source };
        let reader = std::fs::File::open(file).map_err(io)?;
        let file_bytes = reader.metadata().map_err(io)?.len();
        Self::read(BufReader::with_capacity(1 << 18, reader), file_bytes, file)
    }

    /// Reads a header from `reader`, the start of a file of `file_bytes` bytes; `file` is for messages.
    pub fn read(reader: impl Read, file_bytes: u64, file: &Path) -> Result<Self, GgufError> {
        let mut cursor = Cursor { reader, position: 0, end: file_bytes.min(HEADER_BYTES_MAX), file };
        let magic = cursor.bytes::<4>("the magic")?;
        if &magic != b"GGUF" {
            return Err(GgufError::Magic { file: file.to_owned(), found: String::from_utf8_lossy(&magic).into_owned() });
        }
        let version = cursor.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version { file: file.to_owned(), version });
        }
        let tensor_count = cursor.u64("the tensor count")?;
        let metadata_count = cursor.u64("the metadata count")?;
        // A metadata entry takes at least 13 bytes, a tensor description at least 32.
        cursor.fits(metadata_count, 13, "metadata entries")?;
        cursor.fits(tensor_count, 32, "tensors")?;

        let mut metadata = BTreeMap::new();
        for _ in 0..metadata_count {
            let key = cursor.string("a metadata key", NAME_BYTES_MAX)?;
            let kind = cursor.u32("a value type")?;
            let value = cursor.value(kind, &key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(cursor.damaged(format!("the metadata key {key:?} is there twice")));
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(Value::Unsigned(alignment)) if alignment.is_power_of_two() && *alignment <= 1 << 20 => *alignment,
            Some(other) => return Err(cursor.damaged(format!("general.alignment is {other:?}"))),
        };

        let mut tensors = Vec::new();
        let mut names = HashSet::new();
        for _ in 0..tensor_count {
            let tensor = cursor.tensor(alignment)?;
            if !names.insert(tensor.name.clone()) {
                return Err(cursor.damaged(format!("the tensor {:?} is there twice", tensor.name)));
            }
            tensors.push(tensor);
        }
        let data_offset = cursor.position.next_multiple_of(alignment);
        for tensor in &tensors {
            let end = data_offset.checked_add(tensor.offset).and_then(|start| start.checked_add(tensor.bytes));
            if end.is_none_or(|end| end > file_bytes) {
                return Err(cursor.damaged(format!(
                    "the tensor {:?} has {} bytes at {}, past the end of the file's {file_bytes} bytes",
                    tensor.name, tensor.bytes, tensor.offset
                )));
            }
        }
        Ok(Self { file: file.to_owned(), version, metadata, tensors, data_offset, file_bytes })
    }

    pub fn string(&self, key: &str) -> Option<&str> {
        match self.metadata.get(key) {
            Some(Value::String(value)) => Some(value),
            _ => None,
        }
    }

    /// A count or id, whichever integer type the file gives it.
    pub fn unsigned(&self, key: &str) -> Option<u64> {
        match self.metadata.get(key) {
            Some(Value::Unsigned(value)) => Some(*value),
            Some(Value::Signed(value)) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    pub fn float(&self, key: &str) -> Option<f64> {
        match self.metadata.get(key) {
            Some(Value::Float(value)) => Some(*value),
            Some(Value::Unsigned(value)) => Some(*value as f64),
            Some(Value::Signed(value)) => Some(*value as f64),
            _ => None,
        }
    }

    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.metadata.get(key) {
            Some(Value::Bool(value)) => Some(*value),
            _ => None,
        }
    }

    pub fn strings(&self, key: &str) -> Option<&[String]> {
        match self.metadata.get(key) {
            Some(Value::Array(Array::String(values))) => Some(values),
            _ => None,
        }
    }

    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

/// A reader that knows where it is and how far it may go.
struct Cursor<'a, R> {
    reader: R,
    position: u64,
    end: u64,
    file: &'a Path,
}

impl<R: Read> Cursor<'_, R> {
    fn damaged(&self, what: String) -> GgufError {
        GgufError::Damaged { file: self.file.to_owned(), what }
    }

    fn fits(&self, count: u64, bytes_each_min: u64, what: &str) -> Result<(), GgufError> {
        let left = self.end - self.position;
        if count.checked_mul(bytes_each_min).is_none_or(|bytes| bytes > left) {
            return Err(self.damaged(format!("it claims {count} {what} at byte {}, and {left} bytes are left", self.position)));
        }
        Ok(())
    }

    fn fill(&mut self, buffer: &mut [u8], what: &str) -> Result<(), GgufError> {
        self.fits(buffer.len() as u64, 1, &format!("bytes of {what}"))?;
        self.reader.read_exact(buffer).map_err(|source| GgufError::Io { file: self.file.to_owned(), source })?;
        self.position += buffer.len() as u64;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let left = self.end - self.position;
        if left < N as u64 {
            return Err(self.damaged(format!("it ends in {what}, at byte {}", self.position)));
        }
        let mut buffer = [0; N];
        self.reader.read_exact(&mut buffer).map_err(|source| GgufError::Io { file: self.file.to_owned(), source })?;
        self.position += N as u64;
        Ok(buffer)
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.bytes(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.bytes(what)?))
    }

    fn string(&mut self, what: &str, bytes_max: u64) -> Result<String, GgufError> {
        let length = self.u64(what)?;
        if length > bytes_max || length > self.end - self.position {
            return Err(self.damaged(format!("{what} claims {length} bytes at byte {}", self.position)));
        }
        let mut buffer = vec![0; length as usize];
        self.fill(&mut buffer, what)?;
        String::from_utf8(buffer).map_err(|_| self.damaged(format!("{what} before byte {} is not UTF-8", self.position)))
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<Value, GgufError> {
        Ok(match kind {
            0 => Value::Unsigned(u64::from(self.bytes::<1>(key)?[0])),
            1 => Value::Signed(i64::from(i8::from_le_bytes(self.bytes(key)?))),
            2 => Value::Unsigned(u64::from(u16::from_le_bytes(self.bytes(key)?))),
            3 => Value::Signed(i64::from(i16::from_le_bytes(self.bytes(key)?))),
            4 => Value::Unsigned(u64::from(self.u32(key)?)),
            5 => Value::Signed(i64::from(i32::from_le_bytes(self.bytes(key)?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.bytes(key)?))),
            7 => Value::Bool(self.boolean(key)?),
            8 => Value::String(self.string(key, u64::MAX)?),
            9 => Value::Array(self.array(key, 1)?),
            10 => Value::Unsigned(self.u64(key)?),
            11 => Value::Signed(i64::from_le_bytes(self.bytes(key)?)),
            12 => Value::Float(f64::from_le_bytes(self.bytes(key)?)),
            _ => return Err(self.damaged(format!("{key:?} has the unknown value type {kind}"))),
        })
    }

    fn boolean(&mut self, key: &str) -> Result<bool, GgufError> {
        match self.bytes::<1>(key)?[0] {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.damaged(format!("{key:?} has the boolean {other}"))),
        }
    }

    fn array(&mut self, key: &str, depth: u32) -> Result<Array, GgufError> {
        let kind = self.u32(key)?;
        let length = self.u64(key)?;
        let bytes_each_min = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 if depth < ARRAY_DEPTH_MAX => 12,
            9 => return Err(self.damaged(format!("{key:?} has arrays more than {ARRAY_DEPTH_MAX} deep"))),
            _ => return Err(self.damaged(format!("{key:?} has elements of the unknown type {kind}"))),
        };
        self.fits(length, bytes_each_min, &format!("elements of {key:?}"))?;
        Ok(match kind {
            0 => Array::Unsigned(self.many(length, |c| Ok(u64::from(c.bytes::<1>(key)?[0])))?),
            1 => Array::Signed(self.many(length, |c| Ok(i64::from(i8::from_le_bytes(c.bytes(key)?))))?),
            2 => Array::Unsigned(self.many(length, |c| Ok(u64::from(u16::from_le_bytes(c.bytes(key)?))))?),
            3 => Array::Signed(self.many(length, |c| Ok(i64::from(i16::from_le_bytes(c.bytes(key)?))))?),
            4 => Array::Unsigned(self.many(length, |c| Ok(u64::from(c.u32(key)?)))?),
            5 => Array::Signed(self.many(length, |c| Ok(i64::from(i32::from_le_bytes(c.bytes(key)?))))?),
            6 => Array::Float(self.many(length, |c| Ok(f64::from(f32::from_le_bytes(c.bytes(key)?))))?),
            7 => Array::Bool(self.many(length, |c| c.boolean(key))?),
            8 => Array::String(self.many(length, |c| c.string(key, u64::MAX))?),
            9 => Array::Nested(self.many(length, |c| c.array(key, depth + 1))?),
            10 => Array::Unsigned(self.many(length, |c| c.u64(key))?),
            11 => Array::Signed(self.many(length, |c| Ok(i64::from_le_bytes(c.bytes(key)?)))?),
            _ => Array::Float(self.many(length, |c| Ok(f64::from_le_bytes(c.bytes(key)?)))?),
        })
    }

    /// `length` was checked against what is left of the file, yet the vector grows only as elements are read.
    fn many<T>(&mut self, length: u64, mut one: impl FnMut(&mut Self) -> Result<T, GgufError>) -> Result<Vec<T>, GgufError> {
        let mut values = Vec::with_capacity(length.min(1 << 16) as usize);
        for _ in 0..length {
            values.push(one(self)?);
        }
        Ok(values)
    }

    fn tensor(&mut self, alignment: u64) -> Result<Tensor, GgufError> {
        let name = self.string("a tensor's name", NAME_BYTES_MAX)?;
        let dimensions = self.u32("a tensor's dimensions")?;
        if dimensions > DIMENSIONS_MAX {
            return Err(self.damaged(format!("the tensor {name:?} has {dimensions} dimensions")));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(self.u64("a tensor's shape")?);
        }
        let id = self.u32("a tensor's type")?;
        let offset = self.u64("a tensor's offset")?;
        let Some(&(id, kind_name, block_elements, block_bytes)) = KINDS.iter().find(|kind| kind.0 == id) else {
            return Err(self.damaged(format!("the tensor {name:?} has the unknown type {id}")));
        };
        let kind = Kind { id, name: kind_name, block_elements, block_bytes };
        let elements = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
        let row = shape.first().copied().unwrap_or(1);
        let bytes = elements.and_then(|elements| (elements / block_elements).checked_mul(block_bytes));
        let Some(bytes) = bytes.filter(|_| row.is_multiple_of(block_elements)) else {
            return Err(self.damaged(format!("the tensor {name:?} of type {kind_name} has the impossible shape {shape:?}")));
        };
        if !offset.is_multiple_of(alignment) {
            return Err(self.damaged(format!("the tensor {name:?} starts at {offset}, which is not a multiple of {alignment}")));
        }
        shape.reverse();
        Ok(Tensor { name, shape, kind, offset, bytes })
    }
}

#[cfg(test)]
#[path = "gguf_tests.rs"]
mod tests;
