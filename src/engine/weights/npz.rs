//! The arrays of an `.npz` file.

use std::{collections::BTreeMap, path::Path};

use mlx_rs::{Array, Dtype};

use super::{WeightError, reason};
use crate::model::npz::{NpyArray, read_arrays};

pub fn read(path: &Path) -> Result<BTreeMap<String, Array>, WeightError> {
    let fail = |reason: String| WeightError::Read { path: path.to_owned(), reason };
    let mut tensors = BTreeMap::new();
    let mut twice = None;
    let outcome = read_arrays(path, |array| {
        let name = array.tensor.name.clone();
        let converted = convert(array).map_err(|error| fail(format!("the array {name:?}: {error}")))?;
        if tensors.insert(name.clone(), converted).is_some() {
            twice = Some(name);
        }
        Ok::<(), WeightError>(())
    });
    outcome.map_err(|error| fail(error.to_string()))??;
    match twice {
        Some(name) => Err(fail(format!("it holds the array {name:?} twice"))),
        None => Ok(tensors),
    }
}

fn convert(npy: NpyArray) -> Result<Array, String> {
    let sizes = npy.tensor.shape.iter().map(|&size| i32::try_from(size).map_err(|_| format!("an axis of {size}")));
    let mut shape: Vec<i32> = sizes.collect::<Result<_, _>>()?;
    if npy.fortran_order {
        shape.reverse();
    }
    let data = &npy.data[..];
    let halves = |dtype: Dtype| {
        Array::from_slice(&numbers(data, u16::from_le_bytes), &shape).view_dtype(dtype).map_err(|error| reason(&error))
    };
    let array = match npy.tensor.dtype.as_str() {
        "F32" => Array::from_slice(&numbers(data, f32::from_le_bytes), &shape),
        "F16" => halves(Dtype::Float16)?,
        "BF16" => halves(Dtype::Bfloat16)?,
        "U32" => Array::from_slice(&numbers(data, u32::from_le_bytes), &shape),
        "I32" => Array::from_slice(&numbers(data, i32::from_le_bytes), &shape),
        "I64" => Array::from_slice(&numbers(data, i64::from_le_bytes), &shape),
        // Nothing that a model asks for; kept, so that it is named as left over.
        _ => return Ok(Array::from_slice(data, &[data.len() as i32])),
    };
    if npy.fortran_order { array.transpose().map_err(|error| reason(&error)) } else { Ok(array) }
}

fn numbers<const BYTES: usize, T>(data: &[u8], number: fn([u8; BYTES]) -> T) -> Vec<T> {
    data.as_chunks::<BYTES>().0.iter().map(|&bytes| number(bytes)).collect()
}
