//! What a device has, and what suits it.

use std::{fs, path::PathBuf};

use mlx_rs::{Device, DeviceType, memory};

use super::{WeightError, ffi};
use crate::job;

/// Where passes are padded, more rows of logits than this come in multiples of it.
pub const OUTPUTS_STEP: i32 = 16;

/// Whether MLX computes on the CPU, and so step by step in one thread.
pub fn is_cpu() -> Result<bool, WeightError> {
    Ok(matches!(Device::try_default()?.get_type()?, DeviceType::Cpu))
}

/// The most tokens that [`padding`] adds.
pub const PADDING_MAX: u32 = 255;

/// Tokens that bring a pass to one of few sizes: on CUDA every new size of an array is memory to be allocated, which stops the
/// device, and every new shape of a product an algorithm to be chosen.
pub fn padding(chunk_tokens: i32, rows: i32) -> i32 {
    let tokens = chunk_tokens + rows;
    let step = match (chunk_tokens, tokens) {
        (0, ..=16) => 1,
        (0, _) => 16,
        (_, ..=256) => 32,
        _ => PADDING_MAX as i32 + 1,
    };
    (tokens + step - 1) / step * step - tokens
}

/// What quantized weights are computed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightForm {
    /// What is faster for so many rows on the device, where it fits.
    Auto,
    Stored,
    Dense,
}

/// Rows from which on CUDA computes faster with dense weights than with quantized ones; measured in docs/benchmarks.md.
const DENSE_ROWS_MIN: u32 = 16;

/// Whether quantized weights should be made dense on the GPU here: where they take about a third of its memory at most. Of 4 bits
/// with their scales a byte becomes four.
pub fn prefers_dense(files: &[PathBuf], rows: u32) -> bool {
    if rows < DENSE_ROWS_MIN || !ffi::cuda_available() {
        return false;
    }
    // Of 2 bits, or in float32, a byte becomes six or seven: two thirds are left over for that.
    let stored: u64 = files.iter().filter_map(|file| fs::metadata(file).ok()).map(|metadata| metadata.len()).sum();
    stored.saturating_mul(4) <= device_memory(job::Device::Gpu).1 / 3
}

/// Whether a job's device is the GPU here, and the bytes a run may take on it: nine tenths of a GPU's memory, or seven tenths of
/// what the system can give without swapping.
pub fn device_memory(device: job::Device) -> (bool, u64) {
    if device != job::Device::Cpu && ffi::gpu_available() {
        let total = ffi::gpu_memory_bytes().or_else(|| memory::memory_limit().ok().map(|bytes| bytes as u64));
        return (true, total.unwrap_or(0) / 10 * 9);
    }
    // What Linux says can be taken; elsewhere MLX's own limit.
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kibibytes| kibibytes * 1024)
    });
    (false, available.unwrap_or_else(|| memory::memory_limit().unwrap_or(0) as u64) / 10 * 7)
}
