//! Names of a results folder's files, and writing them so that a reader sees the old or the new one whole.

use std::{
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use fs_err::{self as fs, File};

use super::SinkError;

pub const RECORD_FILE: &str = "run.json";
pub const JOB_FILE: &str = "job.toml";
pub const EVENTS_FILE: &str = "events.jsonl";
pub const FAILED_FILE: &str = "failed.jsonl";
pub const SUCCESS_FILE: &str = "_SUCCESS";
const LOCK_FILE: &str = ".lock";

pub(super) fn part_name(part: u32) -> String {
    format!("part-{part:05}.parquet")
}

/// The number of a part's file name; exactly what [`part_name`] writes, so that no file of another's is taken for a part.
pub(super) fn part_number(name: &str) -> Option<u32> {
    let part = name.strip_prefix("part-")?.strip_suffix(".parquet")?.parse().ok()?;
    (part_name(part) == name).then_some(part)
}

/// The files of a folder, told apart.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub record: bool,
    pub success: bool,
    /// In ascending order.
    pub parts: Vec<u32>,
    /// Our `.tmp` files: what a killed run was writing.
    pub leftovers: Vec<PathBuf>,
    /// A file that only makes sense beside run.json, or is not ours.
    pub other: Option<String>,
}

impl Listing {
    pub fn read(folder: &Path) -> io::Result<Self> {
        let mut listing = Listing::default();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if let Some(part) = part_number(&name) {
                listing.parts.push(part);
                listing.other.get_or_insert(name.into_owned());
            } else if let Some(stem) = name.strip_suffix(".tmp")
                && (part_number(stem).is_some() || [RECORD_FILE, JOB_FILE, FAILED_FILE, SUCCESS_FILE].contains(&stem))
            {
                listing.leftovers.push(entry.path());
            } else if name == RECORD_FILE {
                listing.record = true;
            } else if name == SUCCESS_FILE {
                listing.success = true;
                listing.other.get_or_insert(name.into_owned());
            } else if name != LOCK_FILE && name != ".DS_Store" {
                listing.other.get_or_insert(name.into_owned());
            }
        }
        listing.parts.sort_unstable();
        Ok(listing)
    }
}

/// Keeps every other run out of the folder until it is dropped, or the process ends.
pub(super) fn lock(folder: &Path) -> Result<File, SinkError> {
    let path = folder.join(LOCK_FILE);
    let failed = || SinkError::io("lock the results folder");
    let mut file = File::options().read(true).write(true).create(true).truncate(false).open(path).map_err(failed())?;
    match file.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let known = file.take(20).read_to_string(&mut holder).is_ok() && holder.trim().parse::<u32>().is_ok();
            let holder = if known { format!(" (process {})", holder.trim()) } else { String::new() };
            return Err(SinkError::Locked { folder: folder.into(), holder });
        }
        Err(error) => return Err(failed()(io::Error::other(error))),
    }
    let process = format!("{}\n", std::process::id());
    file.set_len(0)
        .and_then(|()| file.seek(SeekFrom::Start(0)))
        .and_then(|_| file.write_all(process.as_bytes()))
        .map_err(failed())?;
    Ok(file)
}

/// Makes renames and new names in a folder last.
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

/// `path` with `.tmp` after its name.
pub(super) fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    name.into()
}

/// Puts a whole file in the place of `path`, at once.
pub(super) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let tmp = temporary(path);
    let mut file = File::create(&tmp)?;
    file.write_all(content)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&tmp, path)?;
    sync_folder(path.parent().unwrap_or(Path::new(".")))
}

pub(super) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes the files of an earlier run, and nothing else. Parts go from the last to the first and run.json last of all, so that a
/// kill in between leaves a shorter run rather than a folder nobody knows.
pub(super) fn remove_run(folder: &Path, listing: &Listing) -> io::Result<()> {
    remove_if_there(&folder.join(SUCCESS_FILE))?;
    for leftover in &listing.leftovers {
        remove_if_there(leftover)?;
    }
    for &part in listing.parts.iter().rev() {
        remove_if_there(&folder.join(part_name(part)))?;
    }
    for name in [FAILED_FILE, EVENTS_FILE, JOB_FILE, RECORD_FILE] {
        remove_if_there(&folder.join(name))?;
    }
    sync_folder(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_names_are_parts() {
        for part in [0, 7, 99_999, 100_000, u32::MAX] {
            assert_eq!(part_number(&part_name(part)), Some(part));
        }
        for name in
            ["part-0.parquet", "part-000000.parquet", "part-+0001.parquet", "part-00001.parquet.tmp", "part-99999999999.parquet"]
        {
            assert_eq!(part_number(name), None, "{name}");
        }
    }
}
