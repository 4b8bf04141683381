//! Bytes that MLX has allocated, by its own count. What it keeps of freed buffers is not among them.

use std::{thread, time::Duration};

use mlx_rs::memory;

use super::EngineError;

const SETTLE_STEP: Duration = Duration::from_millis(20);
const SETTLE_STEPS_MAX: u32 = 50;

/// Bytes of the arrays that live now.
pub fn active_bytes() -> Result<u64, EngineError> {
    Ok(memory::active_memory()? as u64)
}

/// As [`active_bytes`], once what was computed before has given up its own: a GPU does so a little later.
#[expect(clippy::disallowed_methods, reason = "a GPU tells nobody when it has given back")]
pub fn settled_bytes() -> Result<u64, EngineError> {
    let mut bytes = active_bytes()?;
    for _ in 0..SETTLE_STEPS_MAX {
        thread::sleep(SETTLE_STEP);
        let before = std::mem::replace(&mut bytes, active_bytes()?);
        if before == bytes {
            break;
        }
    }
    Ok(bytes)
}

/// Bytes of the arrays that lived together at most, since the program began or [`reset_peak`].
pub fn peak_bytes() -> Result<u64, EngineError> {
    Ok(memory::peak_memory()? as u64)
}

/// Has [`peak_bytes`] count anew.
pub fn reset_peak() -> Result<(), EngineError> {
    Ok(memory::reset_peak_memory()?)
}
