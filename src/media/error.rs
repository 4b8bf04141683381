use std::{any::Any, io};

use thiserror::Error;

use super::StoredError;

/// Why a recording cannot be used: the sentence of a failed row, beside which its source is shown.
#[derive(Debug, Error)]
pub enum MediaError {
    #[error(transparent)]
    Stored(#[from] StoredError),
    #[error("this is not a recording: its content is {content}; correct the path")]
    NotAudio { content: String },
    #[error("{what} cannot be decoded here; convert the file to WAV or FLAC, for example with ffmpeg")]
    Unsupported { what: String },
    #[error("the recording is encrypted ({scheme}); only its owner's software can decode it: use a copy without protection")]
    Protected { scheme: String },
    #[error("the file holds no audio track{tracks}; name a file with sound")]
    NoAudioTrack { tracks: String },
    #[error("the {format} file is damaged: {reason}; obtain it again")]
    Damaged { format: &'static str, reason: String },
    #[error("the {format} file holds no samples; it is cut off or was never finished: obtain it again")]
    NoSamples { format: &'static str },
    #[error(
        "decoding gave only silence, {seconds:.1} s of it, from {codec} data that is not silent; \
         convert the file to WAV or FLAC, for example with ffmpeg"
    )]
    OnlySilence { codec: &'static str, seconds: f64 },
    #[error("the recording has {what}, more than {limit}, which is the limit here; {remedy}")]
    TooMuch { what: String, limit: String, remedy: &'static str },
    #[error("the decoder broke down over this file ({reason}), which is an error in it; convert the file to WAV or FLAC")]
    BrokeDown { reason: String },
}

impl MediaError {
    pub(super) fn read(source: io::Error) -> Self {
        Self::Stored(StoredError::read(source))
    }

    pub(super) fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into() }
    }

    pub(super) fn damaged(format: &'static str, reason: impl Into<String>) -> Self {
        Self::Damaged { format, reason: reason.into() }
    }
}

/// What a panic said.
pub fn panic_words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no reason given")
}
