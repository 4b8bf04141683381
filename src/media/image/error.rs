use std::io;

use thiserror::Error;

use crate::media::StoredError;

/// Why an image cannot be used: the sentence of a failed row, beside which its source is shown.
#[derive(Debug, Error)]
pub enum ImageError {
    #[error(transparent)]
    Stored(#[from] StoredError),
    #[error("this is not an image: its content is {content}; correct the path")]
    NotImage { content: String },
    #[error("{what} is not decoded here; convert the file to PNG or JPEG, for example with ImageMagick")]
    Unsupported { what: String },
    #[error("the {format} file is damaged: {reason}; obtain it again, or open and save it anew if a viewer shows it")]
    Damaged { format: &'static str, reason: String },
    #[error("the image has {what}, more than {limit}, which is the limit here; scale it down first")]
    TooMuch { what: String, limit: String },
    #[error("an image of {width} × {height} pixels leaves no patch within {soft_tokens} tokens; cut it to a less narrow one")]
    NoPatches { width: u32, height: u32, soft_tokens: u32 },
    #[error("the decoder broke down over this {format} file, which is an error in the decoder; convert the file to PNG")]
    BrokeDown { format: &'static str },
}

impl ImageError {
    pub(super) fn read(source: io::Error) -> Self {
        Self::Stored(StoredError::read(source))
    }

    pub(super) fn damaged(format: &'static str, reason: impl Into<String>) -> Self {
        Self::Damaged { format, reason: reason.into() }
    }
}
