use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// What stops a job: a file that cannot be read as a manifest. One unusable row is a [`super::BadRow`] instead.
#[derive(Debug, Error)]
pub enum ManifestError {
    #[error("the job names no input; give `input.manifest` or `input.folder`")]
    NoInput,
    #[error("`{pattern}` matches no file; correct `input.manifest`, or make the files first")]
    NoMatch { pattern: String },
    #[error("`{pattern}` is not a glob: {reason}; correct it in the job file")]
    Glob { pattern: String, reason: String },
    #[error("`{}` does not exist; correct the path in the job file, or make the file first", path.display())]
    Missing { path: PathBuf },
    #[error(
        "`{}` is a folder; name its files, as `{}`, or give it as `input.folder`",
        path.display(), path.join("*.jsonl").display()
    )]
    Folder { path: PathBuf },
    #[error("`{}` is not a folder; give a folder as `input.folder`, or a file as `input.manifest`", path.display())]
    NotFolder { path: PathBuf },
    #[error("`{}` is not a regular file; copy what it yields into a file and name that", path.display())]
    NotRegular { path: PathBuf },
    #[error("`{}` cannot be read ({source}); check the path, its permissions and the disk", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("`{}` cannot be used: {reason}", path.display())]
    Format { path: PathBuf, reason: String },
    #[error("the header of `{}` cannot be used: {reason}", path.display())]
    Header { path: PathBuf, reason: String },
    #[error("`{}` is in the manifest twice, by `{first}` and by `{second}`; name each file once", path.display())]
    Twice { path: PathBuf, first: String, second: String },
    #[error("`{}` holds more than {limit} {what}, which is more than one job takes; split it into several jobs", path.display())]
    TooMany { path: PathBuf, what: &'static str, limit: u64 },
    #[error(
        "`{}` holds {media} and {texts}; say which are the rows by `input.glob`, as \
         \"**/*.{extension}\" or \"**/*.txt\"",
        folder.display()
    )]
    Ambiguous { folder: PathBuf, media: String, texts: String, extension: String },
    #[error("{input} holds no rows; there is nothing to do until it holds at least one")]
    Empty { input: String },
}

impl ManifestError {
    pub(super) fn read(path: &Path, source: io::Error) -> Self {
        let path = path.to_path_buf();
        match source.kind() {
            io::ErrorKind::NotFound => Self::Missing { path },
            _ => Self::Read { path, source },
        }
    }

    pub(super) fn format(path: &Path, reason: impl Into<String>) -> Self {
        Self::Format { path: path.to_path_buf(), reason: reason.into() }
    }

    pub(super) fn header(path: &Path, reason: impl Into<String>) -> Self {
        Self::Header { path: path.to_path_buf(), reason: reason.into() }
    }
}
