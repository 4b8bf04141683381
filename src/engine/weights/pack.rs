//! Weights into panels for products on the CPU's cores, in the form that they are stored in.

use mlx_rs::{Array, Dtype};

use super::WeightError;
use crate::engine::host::{HostMatrix, Stored};

/// `weight` (rows, columns), floating-point.
pub fn dense(weight: &Array, rows: i32, columns: i32) -> Result<HostMatrix, WeightError> {
    let (outputs, inputs) = (rows as usize, columns as usize);
    // An odd row of half-precision numbers does not divide into words.
    let half = columns % 2 == 0 && matches!(weight.dtype(), Dtype::Bfloat16 | Dtype::Float16);
    // Infinite halves are not unpacked; no weight that works holds any.
    let finite =
        || -> Result<bool, WeightError> { Ok(slice::<bool>(&weight.abs()?.max(None)?.is_finite()?)?.iter().all(|&finite| finite)) };
    if !half || weight.dtype() == Dtype::Float16 && !finite()? {
        let weight = weight.as_dtype(Dtype::Float32)?.contiguous()?;
        return Ok(HostMatrix::new(Stored::Float32(slice(&weight)?), outputs, inputs));
    }
    let words = weight.contiguous()?.view_dtype(Dtype::Uint32)?;
    let words = slice(&words)?;
    let stored = if weight.dtype() == Dtype::Bfloat16 { Stored::Bfloat16(words) } else { Stored::Float16(words) };
    Ok(HostMatrix::new(stored, outputs, inputs))
}

/// MLX's affine quantization: `weight` (rows, columns × bits / 32) of words, `scales` and `biases` (rows, columns / group size).
pub fn quantized(weight: &Array, scales: &Array, biases: &Array, group_size: i32, bits: i32) -> Result<HostMatrix, WeightError> {
    let weight = weight.contiguous()?;
    let (scales, biases) = (scales.as_dtype(Dtype::Float32)?.contiguous()?, biases.as_dtype(Dtype::Float32)?.contiguous()?);
    let (outputs, inputs) = (scales.dim(0) as usize, (scales.dim(1) * group_size) as usize);
    let stored = Stored::Affine {
        words: slice(&weight)?,
        scales: slice(&scales)?,
        biases: slice(&biases)?,
        group_size: group_size as usize,
        bits: bits as u32,
    };
    Ok(HostMatrix::new(stored, outputs, inputs))
}

fn slice<T: mlx_rs::ArrayElement>(array: &Array) -> Result<&[T], WeightError> {
    array.try_as_slice::<T>().map_err(|error| WeightError::Mlx(error.to_string()))
}
