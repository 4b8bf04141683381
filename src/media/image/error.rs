use std::io;

use thiserror::Error;

/// Why an image cannot be used: the sentence of a failed row, beside which its source is shown.
#[derive(Debug, Error)]
pub enum ImageError {
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
    #[error("this is not an image: its content is {content}; correct the path")]
    NotImage { content: String },
    #[error("{what} is not decoded here; convert the file to PNG or JPEG, for example with ImageMagick")]
    Unsupported { what: String },
    #[error("the {format} file is damaged: {reason}; obtain it again")]
    Damaged { format: &'static str, reason: String },
    #[error("the image has {what}, more than {limit}, which is the limit here; scale it down first")]
    TooMuch { what: String, limit: String },
    #[error("an image of {width} × {height} pixels leaves no patch within {soft_tokens} tokens; cut it to a less narrow one")]
    NoPatches { width: u32, height: u32, soft_tokens: u32 },
    #[error("the decoder broke down over this file ({reason}), which is an error in it; convert the file to PNG")]
    BrokeDown { reason: String },
}

impl ImageError {
    pub(super) fn read(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::Missing,
            io::ErrorKind::IsADirectory => Self::Folder,
            _ => Self::Read { source },
        }
    }

    pub(super) fn damaged(format: &'static str, reason: impl Into<String>) -> Self {
        Self::Damaged { format, reason: reason.into() }
    }
}
