//! Reads `.npz` files: a zip of numpy arrays, as mlx-whisper stores weights.
//!
//! Format: numpy's `numpy/lib/format.py` (NEP 1). bfloat16, which numpy does not know, is what MLX writes as `V2`, two bytes of
//! anything.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;
use zip::ZipArchive;

use super::safetensors::{Tensor, bits_per_element};

/// The largest checkpoints have a few thousand tensors.
const ARRAYS_MAX: usize = 100_000;
const HEADER_BYTES_MAX: usize = 1 << 16;
/// Of one array, unpacked: a zip says little of what it unpacks to.
const ARRAY_BYTES_MAX: u64 = 8 << 30;
const AXES_MAX: usize = 8;
const MAGIC: &[u8; 6] = b"\x93NUMPY";

#[derive(Debug, Error)]
pub enum NpzError {
    #[error("cannot read {file}: {source}")]
    Io { file: PathBuf, source: std::io::Error },
    #[error("{file} is damaged or cut short: {what}; download it again")]
    Damaged { file: PathBuf, what: String },
    #[error("{file} cannot be read: {what}; save the weights as safetensors instead")]
    Unsupported { file: PathBuf, what: String },
}

/// An array's own header.
#[derive(Debug, Clone, PartialEq)]
struct Header {
    /// As safetensors spells it.
    dtype: &'static str,
    shape: Vec<u64>,
    /// The first axis varies fastest.
    fortran_order: bool,
    bytes: u64,
}

/// An array with its numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct NpyArray {
    pub tensor: Tensor,
    /// The first axis varies fastest, not the last.
    pub fortran_order: bool,
    /// Little-endian.
    pub data: Vec<u8>,
}

/// Names, shapes and types of all arrays.
pub fn read(file: &Path) -> Result<Vec<Tensor>, NpzError> {
    let mut tensors = Vec::new();
    each(file, |name, header, _| {
        tensors.push(tensor(name, &header));
        Ok(())
    })?;
    Ok(tensors)
}

/// All arrays, one after the other, to `take`.
pub fn read_arrays<E>(file: &Path, mut take: impl FnMut(NpyArray) -> Result<(), E>) -> Result<Result<(), E>, NpzError> {
    let mut outcome = Ok(());
    each(file, |name, header, reader| {
        if outcome.is_err() {
            return Ok(());
        }
        // Grows with what there is, whatever the header claims.
        let mut data = Vec::new();
        reader.take(header.bytes + 1).read_to_end(&mut data).map_err(|error| Problem::Damaged(error.to_string()))?;
        if data.len() as u64 != header.bytes {
            let more = if data.len() as u64 > header.bytes { "more" } else { "fewer" };
            return Err(Problem::Damaged(format!("it has {more} than the {} bytes of {:?}", header.bytes, header.shape)));
        }
        outcome = take(NpyArray { tensor: tensor(name, &header), fortran_order: header.fortran_order, data });
        Ok(())
    })?;
    Ok(outcome)
}

fn tensor(name: &str, header: &Header) -> Tensor {
    Tensor { name: name.to_owned(), shape: header.shape.clone(), dtype: header.dtype.to_owned(), bytes: header.bytes }
}

/// What is wrong with one array.
enum Problem {
    Damaged(String),
    Unsupported(String),
}

fn each(file: &Path, mut visit: impl FnMut(&str, Header, &mut dyn Read) -> Result<(), Problem>) -> Result<(), NpzError> {
    let damaged = |what: String| NpzError::Damaged { file: file.to_owned(), what };
    let reader = File::open(file).map_err(|source| NpzError::Io { file: file.to_owned(), source })?;
    let mut archive = ZipArchive::new(BufReader::new(reader)).map_err(|error| damaged(error.to_string()))?;
    if archive.len() > ARRAYS_MAX {
        return Err(damaged(format!("it claims {} arrays", archive.len())));
    }
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(|error| damaged(error.to_string()))?;
        let name = entry.name().map_err(|error| damaged(error.to_string()))?.into_owned();
        let Some(name) = name.strip_suffix(".npy") else {
            return Err(damaged(format!("it holds {name:?}, which is no array")));
        };
        let told = |problem: Problem| match problem {
            Problem::Damaged(what) => damaged(format!("the array {name:?}: {what}")),
            Problem::Unsupported(what) => {
                NpzError::Unsupported { file: file.to_owned(), what: format!("the array {name:?}: {what}") }
            }
        };
        let header = read_header(&mut entry).map_err(told)?;
        visit(name, header, &mut entry).map_err(told)?;
    }
    Ok(())
}

fn read_header(reader: &mut impl Read) -> Result<Header, Problem> {
    let mut fill = |bytes: &mut [u8]| reader.read_exact(bytes).map_err(|error| Problem::Damaged(error.to_string()));
    let mut start = [0; 8];
    fill(&mut start)?;
    let length = match &start {
        [magic @ .., 1, _] if magic == MAGIC => {
            let mut length = [0; 2];
            fill(&mut length)?;
            usize::from(u16::from_le_bytes(length))
        }
        [magic @ .., 2 | 3, _] if magic == MAGIC => {
            let mut length = [0; 4];
            fill(&mut length)?;
            u32::from_le_bytes(length) as usize
        }
        _ => return Err(Problem::Damaged("it does not begin as numpy's arrays do".into())),
    };
    if length > HEADER_BYTES_MAX {
        return Err(Problem::Damaged(format!("its header claims {length} bytes")));
    }
    let mut text = vec![0; length];
    fill(&mut text)?;
    parse_header(&String::from_utf8_lossy(&text))
}

/// `{'descr': '<f2', 'fortran_order': False, 'shape': (384, 80), }`
fn parse_header(text: &str) -> Result<Header, Problem> {
    let unreadable = || Problem::Damaged(format!("its header is {:?}", text.chars().take(200).collect::<String>()));
    let value = |key: &str| {
        let (_, rest) = text.split_once(&format!("'{key}'"))?;
        Some(rest.trim_start().strip_prefix(':')?.trim_start())
    };
    let descr = value("descr").ok_or_else(unreadable)?;
    let Some(descr) = descr.strip_prefix('\'').and_then(|rest| rest.split_once('\'')).map(|(descr, _)| descr) else {
        return Err(Problem::Unsupported("it has fields, and is no tensor".into()));
    };
    let order = value("fortran_order").ok_or_else(unreadable)?;
    let fortran_order = match (order.starts_with("True"), order.starts_with("False")) {
        (true, _) => true,
        (_, true) => false,
        _ => return Err(unreadable()),
    };
    let shape = value("shape").and_then(|rest| rest.strip_prefix('(')?.split_once(')')).ok_or_else(unreadable)?.0;
    let sizes = shape.split(',').map(str::trim).filter(|size| !size.is_empty());
    let shape: Vec<u64> = sizes.map(str::parse).collect::<Result<_, _>>().map_err(|_| unreadable())?;
    let dtype = match descr.trim_start_matches(['<', '|', '=']) {
        "f2" => "F16",
        "f4" => "F32",
        "f8" => "F64",
        "V2" => "BF16",
        "b1" => "BOOL",
        "i1" => "I8",
        "i2" => "I16",
        "i4" => "I32",
        "i8" => "I64",
        "u1" => "U8",
        "u2" => "U16",
        "u4" => "U32",
        "u8" => "U64",
        _ => return Err(Problem::Unsupported(format!("it holds numbers of type {descr:?}"))),
    };
    let element_bytes = bits_per_element(dtype).unwrap_or(8) / 8;
    let bytes = shape.iter().try_fold(element_bytes, |product, &size| product.checked_mul(size));
    match bytes {
        Some(bytes) if bytes <= ARRAY_BYTES_MAX && shape.len() <= AXES_MAX => Ok(Header { dtype, shape, fortran_order, bytes }),
        _ => Err(Problem::Unsupported(format!("it has the shape {shape:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;
    use zip::{ZipWriter, write::SimpleFileOptions};

    use super::*;

    fn npy(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([1, 0]);
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    }

    fn npz(entries: &[(&str, Vec<u8>)]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.npz");
        let mut writer = ZipWriter::new(File::create(&path).unwrap());
        for (name, bytes) in entries {
            writer.start_file(*name, SimpleFileOptions::default()).unwrap();
            writer.write_all(bytes).unwrap();
        }
        writer.finish().unwrap();
        (folder, path)
    }

    const F16: &str = "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }          \n";

    fn all(path: &Path) -> Result<Vec<NpyArray>, NpzError> {
        let mut arrays = Vec::new();
        read_arrays(path, |array| {
            arrays.push(array);
            Ok::<(), ()>(())
        })
        .map(|_| arrays)
    }

    #[test]
    fn arrays_are_read() {
        let scalar = "{'descr': '|V2', 'fortran_order': True, 'shape': ()}";
        let (_folder, path) = npz(&[("a.b.npy", npy(F16, &[7; 12])), ("c.npy", npy(scalar, &[1, 2]))]);
        let tensors = read(&path).unwrap();
        assert_eq!(tensors[0], Tensor { name: "a.b".into(), shape: vec![2, 3], dtype: "F16".into(), bytes: 12 });
        assert_eq!((tensors[1].dtype.as_str(), tensors[1].bytes), ("BF16", 2));
        let arrays = all(&path).unwrap();
        assert_eq!((&arrays[0].data, arrays[0].fortran_order), (&vec![7; 12], false));
        assert_eq!((&arrays[1].data, arrays[1].fortran_order), (&vec![1, 2], true));
    }

    #[track_caller]
    fn refused(entry: Vec<u8>, expected: &str) {
        let (_folder, path) = npz(&[("w.npy", entry)]);
        let message = all(&path).unwrap_err().to_string();
        assert!(message.contains(expected) && message.contains("weights.npz"), "{message:?} does not say {expected:?}");
    }

    #[test]
    fn more_or_fewer_numbers_than_the_shape_has() {
        refused(npy(F16, &[0; 11]), "the array \"w\": it has fewer than the 12 bytes of [2, 3]");
        refused(npy(F16, &[0; 13]), "it has more than the 12 bytes");
    }

    #[test]
    fn a_header_that_claims_too_much() {
        let shape = |shape: &str| npy(&format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape})}}"), &[]);
        refused(shape("9999999999999, 9999999999999"), "it has the shape [9999999999999");
        refused(shape("4294967296, 2"), "it has the shape");
        refused(shape("1,1,1,1,1,1,1,1,1"), "it has the shape");
        refused(shape("-1,"), "its header is");
        let mut long = npy("", &[]);
        long.splice(6..10, [2, 0, 255, 255, 255, 255]);
        refused(long, "its header claims 4294967295 bytes");
    }

    #[test]
    fn what_is_no_tensor() {
        refused(npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", &[0; 4]), "it has fields");
        refused(npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", &[0; 8]), "numbers of type \"|O\"");
        refused(npy("{'descr': '>f4', 'fortran_order': False, 'shape': (1,)}", &[0; 4]), "numbers of type \">f4\"");
        refused(b"PK\x03\x04 and no more".to_vec(), "does not begin as numpy's arrays do");
        refused(vec![], "the array \"w\"");
        let (_folder, path) = npz(&[("readme.txt", vec![])]);
        assert!(read(&path).unwrap_err().to_string().contains("it holds \"readme.txt\", which is no array"));
    }

    #[test]
    fn a_file_cut_short() {
        let (_folder, path) = npz(&[("a.npy", npy(F16, &[0; 12])), ("b.npy", npy(F16, &[0; 12]))]);
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert!(all(&path).is_err(), "{cut} of {} bytes", whole.len());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn random_headers_never_panic(text in "[{}'a-z<|(),:0-9TF ]{0,120}") {
            let _ = parse_header(&text);
        }
    }
}
