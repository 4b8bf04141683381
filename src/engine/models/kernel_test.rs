//! What tests of kernels against the plain operations share, on a GPU of NVIDIA's.

use std::{
    collections::HashMap,
    path::Path,
    time::{Duration, Instant},
};

use mlx_rs::{Array, transforms};

use crate::engine::ffi;

/// Has MLX compute on a GPU of NVIDIA's; false, and told, where there is none.
pub fn on_cuda() -> bool {
    let found = ffi::cuda_available();
    if found {
        mlx_rs::Device::set_default(&mlx_rs::Device::gpu());
    } else {
        println!("skipped: there is no GPU of NVIDIA's here");
    }
    found
}

/// Writes a folder's model.safetensors.
pub fn save(tensors: &HashMap<String, Array>, folder: &Path) {
    transforms::eval(tensors.values()).unwrap();
    let named = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    Array::save_safetensors(named, None, folder.join("model.safetensors")).unwrap();
}

/// Root mean square of the difference over that of the reference.
pub fn error(ours: &[Vec<f32>], reference: &[Vec<f32>]) -> f64 {
    assert_eq!(ours.len(), reference.len());
    let pairs = || ours.iter().flatten().zip(reference.iter().flatten());
    let difference: f64 = pairs().map(|(ours, reference)| f64::from(ours - reference).powi(2)).sum();
    (difference / pairs().map(|(_, reference)| f64::from(*reference).powi(2)).sum::<f64>()).sqrt()
}

/// Prints what `run` takes, a pass behind the other as in a job, and what it took the first time.
pub fn timed(name: &str, mut run: impl FnMut() -> Vec<Array>) {
    const WARM_UPS: u32 = 5;
    const REPEATS: u32 = 30;
    let since = Instant::now();
    transforms::eval(run().iter()).unwrap();
    let first = since.elapsed();
    for _ in 0..WARM_UPS {
        transforms::eval(run().iter()).unwrap();
    }
    let (started, mut built, mut last) = (Instant::now(), Duration::ZERO, Vec::new());
    for _ in 0..REPEATS {
        let since = Instant::now();
        last = run();
        transforms::async_eval(last.iter()).unwrap();
        built += since.elapsed();
    }
    transforms::eval(last.iter()).unwrap();
    let (each, built) = (started.elapsed() / REPEATS, built / REPEATS);
    println!("{name:54} {each:9.3?}, of which the host builds for {built:9.3?}; the first one {first:9.1?}");
}
