//! One hash for all that a manifest is read from.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::time::SystemTime;

use blake3::{Hash, Hasher};
use rayon::prelude::*;

use super::folder::FolderWalk;
use super::{ManifestError, files};
use crate::job::Input;

const CHUNK_BYTES: usize = 1024 * 1024;

/// A hash (blake3, 64 hexadecimal digits) that changes when the rows of the input may have changed.
///
/// Of files it is over their contents, in order, and their names below the folder they share; moving them all leaves it as it is.
/// Of a folder it is over each file's path, size and time of change, because reading them all would take as long as the job's first
/// step.
pub fn fingerprint(input: &Input) -> Result<String, ManifestError> {
    let mut hasher = Hasher::new();
    if !input.manifest.is_empty() {
        let found = files::find(&input.manifest)?;
        let hashes: Vec<Hash> = found.par_iter().map(|file| hash_file(&file.path)).collect::<Result<_, _>>()?;
        for (file, hash) in found.iter().zip(hashes) {
            update(&mut hasher, file.name.as_bytes());
            update(&mut hasher, hash.as_bytes());
        }
    } else if let Some(folder) = &input.folder {
        let mut walk = FolderWalk::open(folder, input.glob.as_deref())?;
        while let Some(text) = walk.next()? {
            let modified = text.modified.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
            update(&mut hasher, text.relative.as_os_str().as_encoded_bytes());
            update(&mut hasher, text.fault.unwrap_or_default().as_bytes());
            hasher.update(&text.bytes.to_le_bytes());
            hasher.update(&modified.unwrap_or_default().as_nanos().to_le_bytes());
        }
    } else {
        return Err(ManifestError::NoInput);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// The length comes first, so that no two lists of parts read alike.
fn update(hasher: &mut Hasher, part: &[u8]) {
    hasher.update(&(part.len() as u64).to_le_bytes());
    hasher.update(part);
}

fn hash_file(path: &Path) -> Result<Hash, ManifestError> {
    let failed = |error| ManifestError::read(path, error);
    let mut file = File::open(path).map_err(failed)?;
    let (mut hasher, mut chunk) = (Hasher::new(), vec![0; CHUNK_BYTES]);
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return Ok(hasher.finalize()),
            Ok(read) => hasher.update(&chunk[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(failed(error)),
        };
    }
}
