//! Any bytes are a recording, or a sentence says why not; in bounded time and memory.
#![no_main]

use std::panic;
use std::sync::Once;

use libfuzzer_sys::fuzz_target;

pub mod job {
    //! As in `src/job/mod.rs`, whose rest has nothing to do with recordings.

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Channels {
        Mix,
        Left,
        Right,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Long {
        Split,
        Truncate,
    }
}

#[path = "../../src/media/mod.rs"]
pub mod media;

static HOOK: Once = Once::new();

fuzz_target!(|data: &[u8]| {
    // Panics of decoders are caught by `Recording` and fail their row. One in our own code is an error.
    HOOK.call_once(|| {
        panic::set_hook(Box::new(|info| {
            if info.location().is_none_or(|location| location.file().contains("src/media/")) {
                eprintln!("{info}");
                std::process::abort();
            }
        }));
    });
    let channels = [job::Channels::Mix, job::Channels::Left, job::Channels::Right][data.len() % 3];
    let source = media::MediaSource::Bytes { name: "fuzz".to_owned(), bytes: data.into() };
    let Ok(mut recording) = media::Recording::open(&source, channels, media::SAMPLE_RATE) else { return };
    let mut samples = 0;
    while let Ok(Some(stretch)) = recording.next() {
        assert!(!stretch.is_empty() && stretch.len() <= 10 * media::SAMPLE_RATE as usize);
        assert!(stretch.iter().all(|sample| sample.is_finite()));
        samples += stretch.len();
    }
    assert!(samples < 60 * 16_000 + data.len() * 4_000, "{samples} samples out of {} bytes", data.len());
    assert!(recording.seconds().is_finite() && recording.notes().len() < 20);
});
