//! A file of a recording or an image, before it is known what is in it.

use std::{fs, io};

use thiserror::Error;

use super::MediaSource;

/// Why the bytes of a recording or an image are not to be had, whatever they are.
#[derive(Debug, Error)]
pub enum StoredError {
    #[error("the file does not exist; correct its path, or make the file first")]
    Missing,
    #[error("the path is a folder; name the file in it")]
    Folder,
    #[error("the path is not a regular file; copy what it yields into a file and name that")]
    NotRegular,
    #[error("the file cannot be read ({source}); check its permissions and the disk")]
    Read { source: io::Error },
    #[error("the file is empty (0 bytes); it was perhaps never downloaded or written")]
    Empty,
}

impl StoredError {
    pub(super) fn read(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::Missing,
            io::ErrorKind::IsADirectory => Self::Folder,
            _ => Self::Read { source },
        }
    }
}

/// How many bytes there are, looked at before a file is opened: opening a pipe would wait for whoever writes to it.
///
/// # Errors
/// What can be known to be wrong without reading them.
pub fn stored_bytes(source: &MediaSource) -> Result<u64, StoredError> {
    let bytes = match source {
        MediaSource::Bytes { bytes, .. } => bytes.len() as u64,
        MediaSource::File(path) => match fs::metadata(path).map_err(StoredError::read)? {
            metadata if metadata.is_dir() => return Err(StoredError::Folder),
            metadata if !metadata.is_file() => return Err(StoredError::NotRegular),
            metadata => metadata.len(),
        },
    };
    if bytes == 0 { Err(StoredError::Empty) } else { Ok(bytes) }
}
