//! Reads CTranslate2's `model.bin`: names, shapes and places of its variables, and their numbers one variable at a time.
//!
//! Format: OpenNMT/CTranslate2's `model.cc` (`Model::load`), `python/ctranslate2/specs/model_spec.py` (`_save`).

mod whisper;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use thiserror::Error;

pub use whisper::{Converted, convert};

/// Older files state numbers of elements where these state bytes.
const VERSIONS: std::ops::RangeInclusive<u32> = 4..=6;
const VARIABLES_MAX: u32 = 100_000;
const AXES_MAX: u8 = 8;

#[derive(Debug, Error)]
pub enum ConvertError {
    #[error("there is no model.bin in {folder}: what is converted is a folder of CTranslate2's, as faster-whisper uses it")]
    NoModel { folder: PathBuf },
    #[error("cannot read {file}: {source}")]
    Read { file: PathBuf, source: std::io::Error },
    #[error("cannot write {file}: {source}")]
    Write { file: PathBuf, source: std::io::Error },
    #[error("{file} is damaged or cut short: {what}; download it again")]
    Damaged { file: PathBuf, what: String },
    #[error("{file} cannot be converted: {what}")]
    Unsupported { file: PathBuf, what: String },
    #[error("{folder} is there already and is not an empty folder: give another name, or remove it")]
    Occupied { folder: PathBuf },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    Float32,
    Int8,
    Int16,
    Int32,
    Float16,
    Bfloat16,
}

impl Dtype {
    fn of(id: u8) -> Option<Self> {
        Some(match id {
            0 => Self::Float32,
            1 => Self::Int8,
            2 => Self::Int16,
            3 => Self::Int32,
            4 => Self::Float16,
            5 => Self::Bfloat16,
            _ => return None,
        })
    }

    pub fn bytes(self) -> u64 {
        match self {
            Self::Int8 => 1,
            Self::Int16 | Self::Float16 | Self::Bfloat16 => 2,
            Self::Float32 | Self::Int32 => 4,
        }
    }
}

/// A variable's description.
#[derive(Debug, Clone, PartialEq)]
pub struct Variable {
    pub dtype: Dtype,
    /// Slowest axis first; empty for a single number.
    pub shape: Vec<u64>,
    offset: u64,
}

impl Variable {
    fn bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(self.dtype.bytes(), |product, &size| product.checked_mul(size))
    }
}

/// An open `model.bin`.
pub struct ModelBin {
    path: PathBuf,
    /// The name of the class that made it, as `WhisperSpec`.
    pub spec: String,
    pub variables: BTreeMap<String, Variable>,
    reader: BufReader<File>,
}

impl ModelBin {
    pub fn open(path: &Path) -> Result<Self, ConvertError> {
        let io = |source| ConvertError::Read { file: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let file_bytes = file.metadata().map_err(io)?.len();
        let mut header = Header { path, reader: BufReader::new(file), left: file_bytes };
        let version = header.u32()?;
        if !VERSIONS.contains(&version) {
            let (first, last) = (VERSIONS.start(), VERSIONS.end());
            return Err(header.unsupported(format!(
                "its version is {version}, and {first} to {last} are read: convert the model anew with a CTranslate2 of today"
            )));
        }
        let spec = header.string()?;
        header.u32()?; // The specification's own revision.
        let count = header.u32()?;
        if count > VARIABLES_MAX {
            return Err(header.damaged(format!("it claims {count} variables")));
        }
        let mut variables = BTreeMap::new();
        for _ in 0..count {
            let name = header.string()?;
            let [axes] = header.bytes()?;
            if axes > AXES_MAX {
                return Err(header.damaged(format!("{name:?} claims {axes} axes")));
            }
            let mut shape = Vec::with_capacity(axes.into());
            for _ in 0..axes {
                shape.push(u64::from(header.u32()?));
            }
            let [id] = header.bytes()?;
            let dtype = Dtype::of(id).ok_or_else(|| header.damaged(format!("{name:?} has the unknown type {id}")))?;
            let bytes = u64::from(header.u32()?);
            let variable = Variable { dtype, shape, offset: file_bytes - header.left };
            if variable.bytes() != Some(bytes) {
                return Err(header.damaged(format!("{name:?} of {dtype:?} {:?} has {bytes} bytes", variable.shape)));
            }
            header.skip(bytes, &name)?;
            if variables.insert(name.clone(), variable).is_some() {
                return Err(header.damaged(format!("it holds {name:?} twice")));
            }
        }
        let aliases = header.u32()?;
        if aliases > VARIABLES_MAX {
            return Err(header.damaged(format!("it claims {aliases} aliases")));
        }
        for _ in 0..aliases {
            let (alias, name) = (header.string()?, header.string()?);
            let Some(variable) = variables.get(&name).cloned() else {
                return Err(header.damaged(format!("{alias:?} stands for {name:?}, which is not there")));
            };
            variables.entry(alias).or_insert(variable);
        }
        if header.left != 0 {
            return Err(header.damaged(format!("{} bytes follow its end", header.left)));
        }
        Ok(Self { path: path.to_owned(), spec, variables, reader: header.reader })
    }

    /// A variable's bytes, little-endian.
    pub fn read(&mut self, variable: &Variable) -> Result<Vec<u8>, ConvertError> {
        let io = |source| ConvertError::Read { file: self.path.clone(), source };
        // The header was checked against the file's length.
        let mut data = vec![0; variable.bytes().unwrap_or(0) as usize];
        self.reader.seek(SeekFrom::Start(variable.offset)).and_then(|_| self.reader.read_exact(&mut data)).map_err(io)?;
        Ok(data)
    }
}

struct Header<'a> {
    path: &'a Path,
    reader: BufReader<File>,
    /// Bytes that the file still has.
    left: u64,
}

impl Header<'_> {
    fn damaged(&self, what: String) -> ConvertError {
        ConvertError::Damaged { file: self.path.to_owned(), what }
    }

    fn unsupported(&self, what: String) -> ConvertError {
        ConvertError::Unsupported { file: self.path.to_owned(), what }
    }

    fn take(&mut self, bytes: u64, what: &str) -> Result<(), ConvertError> {
        match self.left.checked_sub(bytes) {
            Some(left) => self.left = left,
            None => return Err(self.damaged(format!("it ends within {what}"))),
        }
        Ok(())
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), ConvertError> {
        self.take(bytes.len() as u64, "its description of variables")?;
        self.reader.read_exact(bytes).map_err(|source| ConvertError::Read { file: self.path.to_owned(), source })
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], ConvertError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, ConvertError> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    /// Its length, which counts the NUL at the end, in 16 bits.
    fn string(&mut self) -> Result<String, ConvertError> {
        let length = u16::from_le_bytes(self.bytes()?);
        let mut bytes = vec![0; length.into()];
        self.fill(&mut bytes)?;
        if bytes.last() == Some(&0) {
            bytes.pop();
        }
        String::from_utf8(bytes).map_err(|_| self.damaged("a name in it is not text".into()))
    }

    fn skip(&mut self, bytes: u64, name: &str) -> Result<(), ConvertError> {
        self.take(bytes, &format!("{name:?}"))?;
        // What is left of a file fits an i64.
        let read = self.reader.seek_relative(bytes as i64);
        read.map_err(|source| ConvertError::Read { file: self.path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests;
