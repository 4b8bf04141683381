//! Bytes that MLX has allocated, by its own count. What it keeps of freed buffers is not among them.

use mlx_rs::memory;

use super::EngineError;

/// Bytes of the arrays that live now.
pub fn active_bytes() -> Result<u64, EngineError> {
    Ok(memory::active_memory()? as u64)
}

/// Bytes of the arrays that lived together at most, since the program began or [`reset_peak`].
pub fn peak_bytes() -> Result<u64, EngineError> {
    Ok(memory::peak_memory()? as u64)
}

/// Has [`peak_bytes`] count anew.
pub fn reset_peak() -> Result<(), EngineError> {
    Ok(memory::reset_peak_memory()?)
}
