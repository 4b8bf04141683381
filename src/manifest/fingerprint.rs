//! One hash for all that a manifest is read from.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::SystemTime;

use blake3::{Hash, Hasher};
use rayon::prelude::*;

use super::files::{Format, ManifestFile};
use super::folder::{FolderWalk, Wanted};
use super::{ManifestError, files};
use crate::job::Input;

const CHUNK_BYTES: usize = 1024 * 1024;
/// A Parquet file that is larger, which recordings make it, is not read in full.
const PARQUET_BYTES_MAX: u64 = 256 * 1024 * 1024;
const SAMPLES: u64 = 1024;
const SAMPLE_BYTES: usize = 4096;

/// A hash (blake3, 64 hexadecimal digits) that changes when the rows of the input may have changed.
///
/// Of files it is over their contents, in order, and their names below the folder they share; moving them all leaves it as it is.
/// Of a Parquet file of more than 256 MiB it is over its size, its end, where sizes and statistics of all columns stand, and
/// samples in between. Of a folder it is over each file's path, size and time of change, and those of transcripts, because reading
/// them all would take as long as the job's first step.
pub fn fingerprint(input: &Input) -> Result<String, ManifestError> {
    let mut hasher = Hasher::new();
    if !input.manifest.is_empty() {
        let found = files::find(&input.manifest)?;
        let hashes: Vec<Hash> = found.par_iter().map(|file| hash_file(file)).collect::<Result<_, _>>()?;
        for (file, hash) in found.iter().zip(hashes) {
            update(&mut hasher, file.name.as_bytes());
            update(&mut hasher, hash.as_bytes());
        }
    } else if let Some(folder) = &input.folder {
        let mut walk = FolderWalk::open(folder, Wanted::new(folder, input.glob.as_deref())?);
        while let Some(file) = walk.next()? {
            let modified = file.modified.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
            update(&mut hasher, file.relative.as_os_str().as_encoded_bytes());
            update(&mut hasher, file.fault.unwrap_or_default().as_bytes());
            hasher.update(&file.bytes.to_le_bytes());
            hasher.update(&modified.unwrap_or_default().as_nanos().to_le_bytes());
            if let Some(transcripts) = file.transcripts {
                update(&mut hasher, &transcripts.stamp(&file.relative));
            }
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

fn hash_file(file: &ManifestFile) -> Result<Hash, ManifestError> {
    let path = file.path.as_path();
    let failed = |error| ManifestError::read(path, error);
    let mut file = match file.format {
        Format::Parquet if file.bytes > PARQUET_BYTES_MAX => return hash_samples(path).map_err(failed),
        _ => File::open(path).map_err(failed)?,
    };
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

fn hash_samples(path: &Path) -> io::Result<Hash> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let mut hasher = Hasher::new();
    hasher.update(&bytes.to_le_bytes());
    let mut sample = vec![0; SAMPLE_BYTES.min(bytes as usize)];
    for place in 0..SAMPLES {
        file.seek(SeekFrom::Start((bytes - sample.len() as u64) / SAMPLES * place))?;
        file.read_exact(&mut sample)?;
        hasher.update(&sample);
    }
    let end = bytes.saturating_sub(CHUNK_BYTES as u64);
    file.seek(SeekFrom::Start(end))?;
    let mut last = Vec::new();
    file.take(CHUNK_BYTES as u64).read_to_end(&mut last)?;
    hasher.update(&last);
    Ok(hasher.finalize())
}
