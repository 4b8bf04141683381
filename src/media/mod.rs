//! Recordings, from files to what a model hears: plain buffers, no tensor.

mod mel;
mod split;

pub use mel::{FRAMES, HOP_SAMPLES, N_SAMPLES, UsmFeatures, UsmMel, WhisperMel, soft_tokens};
pub use split::{Splitter, Window};

use std::{path::PathBuf, sync::Arc};

/// Where a row's recording is.
#[derive(Debug, Clone, PartialEq)]
pub enum AudioSource {
    File(PathBuf),
    /// What a manifest holds itself; `name` is what its row calls it, for messages.
    Bytes {
        name: String,
        bytes: Arc<[u8]>,
    },
}

/// What a model's encoder is given: `frames` × `bins` numbers, a frame after the other.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    pub frames: usize,
    pub bins: usize,
    pub values: Vec<f32>,
}
