use std::panic::{AssertUnwindSafe, catch_unwind};

use super::decode::Packets;
use super::mix::{Block, Mixer};
use super::pcm::PcmReader;
use super::probe::{Kind, probe};
use super::resample::Resampler;
use super::source::Source;
use super::wav::{self, Wav};
use super::{MediaError, MediaSource};
use crate::job::Channels;

/// Samples that are handed out together, about: two seconds at 16 kHz.
const STRETCH_SAMPLES: usize = 32_768;
/// Notes of one recording; a file that breaks every second needs no more.
const NOTES_MAX: usize = 8;
/// Changes of rate or channels that are followed.
const CHANGES_MAX: usize = 1_000;
/// Samples of floating-point files beyond this are damage, not loudness: files written at the scale of 16-bit integers end here.
const SAMPLE_MAX: f32 = 65_536.0;

/// A recording, decoded a stretch at a time into one channel at one rate.
pub struct Recording {
    decoder: Decoder,
    wanted: Channels,
    /// In Hz.
    sample_rate: u32,
    stage: Option<Stage>,
    block: Block,
    mono: Vec<f32>,
    ready: Vec<f32>,
    notes: Vec<String>,
    repaired: u64,
    changes: usize,
    /// Of stages that are over.
    seconds: f64,
    has_given: bool,
    has_ended: bool,
}

/// What one rate and one number of channels need.
struct Stage {
    mixer: Mixer,
    resampler: Resampler,
    frames: u64,
    /// In Hz.
    rate: u32,
}

enum Decoder {
    Samples(Box<PcmReader>),
    Packets(Box<Packets>),
}

impl Decoder {
    fn open(source: &MediaSource, notes: &mut Vec<String>) -> Result<Self, MediaError> {
        let mut source = Source::open(source)?;
        let (kind, start) = probe(&mut source)?;
        source.skip(start).map_err(MediaError::read)?;
        if kind == Kind::Wav
            && let Wav::Samples(layout) = wav::read(&mut source)?
        {
            return Ok(Self::Samples(Box::new(PcmReader::new(source, layout)?)));
        }
        Ok(Self::Packets(Box::new(Packets::open(source, kind, notes)?)))
    }

    fn format(&self) -> &'static str {
        match self {
            Self::Samples(reader) => reader.format(),
            Self::Packets(packets) => packets.format(),
        }
    }

    fn next(&mut self, block: &mut Block, notes: &mut Vec<String>) -> Result<bool, MediaError> {
        match self {
            Self::Samples(reader) => reader.next(block, notes),
            Self::Packets(packets) => packets.next(block, notes),
        }
    }
}

impl Recording {
    /// Opens a recording by its content, whatever its name, for a model that hears `sample_rate` samples a second.
    ///
    /// Errors are sentences for a row: what the file is instead, or why its sound cannot be had.
    pub fn open(source: &MediaSource, channels: Channels, sample_rate: u32) -> Result<Self, MediaError> {
        let mut notes = Vec::new();
        let decoder = guarded(|| Decoder::open(source, &mut notes))?;
        Ok(Self {
            decoder,
            wanted: channels,
            sample_rate,
            stage: None,
            block: Block::default(),
            mono: Vec::new(),
            ready: Vec::new(),
            notes,
            repaired: 0,
            changes: 0,
            seconds: 0.0,
            has_given: false,
            has_ended: false,
        })
    }

    /// The next stretch of samples: never empty, two to four seconds but for the last; none at the end.
    ///
    /// Where a file breaks off, what came before is kept and a note says so. An error means that the row has failed: there was no
    /// sound, or what came so far was not the file's (then it comes at the end).
    #[expect(clippy::should_implement_trait, reason = "an iterator would go on after an error")]
    pub fn next(&mut self) -> Result<Option<Vec<f32>>, MediaError> {
        while !self.has_ended && self.ready.len() < STRETCH_SAMPLES {
            self.step()?;
        }
        let rest = self.ready.split_off(self.ready.len().min(2 * STRETCH_SAMPLES));
        let stretch = std::mem::replace(&mut self.ready, rest);
        self.has_given |= !stretch.is_empty();
        Ok((!stretch.is_empty()).then_some(stretch))
    }

    /// Sentences that belong in the row; complete after the end.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = self.notes.clone();
        if self.repaired > 0 {
            notes.push(format!("{} samples that were no numbers, or beyond all scale, are heard as silence", self.repaired));
        }
        if notes.len() > NOTES_MAX {
            let more = notes.len() - NOTES_MAX;
            notes.truncate(NOTES_MAX);
            notes.push(format!("and {more} more of the like"));
        }
        notes
    }

    /// Seconds decoded so far, by the samples that there were, whatever a header says.
    pub fn seconds(&self) -> f64 {
        let current = self.stage.as_ref().map_or(0.0, |stage| stage.frames as f64 / f64::from(stage.rate));
        self.seconds + current
    }

    fn step(&mut self) -> Result<(), MediaError> {
        let (decoder, block, notes) = (&mut self.decoder, &mut self.block, &mut self.notes);
        let more = match guarded(|| decoder.next(block, notes)) {
            Ok(more) => more,
            Err(MediaError::BrokeDown { reason }) if self.seconds() > 0.0 => {
                let note = format!("the decoder broke down at {:.1} s ({reason}); what came before is kept", self.seconds());
                self.notes.push(note);
                false
            }
            Err(error) => {
                self.has_ended = true;
                return Err(error);
            }
        };
        if !more {
            self.finish_stage()?;
            self.has_ended = true;
            if !self.has_given && self.ready.is_empty() {
                return Err(MediaError::NoSamples { format: self.decoder.format() });
            }
            return Ok(());
        }
        if self.block.frames() > 0 {
            self.take_block()?;
        }
        Ok(())
    }

    fn take_block(&mut self) -> Result<(), MediaError> {
        self.repaired += self.block.channels.iter_mut().map(|channel| repair(channel)).sum::<u64>();
        if self.stage.as_ref().is_some_and(|stage| !stage.mixer.fits(&self.block)) {
            self.finish_stage()?;
            self.changes += 1;
            if self.changes > CHANGES_MAX {
                return Err(MediaError::TooMuch {
                    what: format!("{} changes of its sample rate or channels", self.changes),
                    limit: CHANGES_MAX.to_string(),
                    remedy: "convert it to WAV or FLAC",
                });
            }
            self.notes.push(format!(
                "at {:.1} s the recording changes to {} Hz and {} channels",
                self.seconds,
                self.block.rate,
                self.block.channels.len()
            ));
        }
        let stage = match &mut self.stage {
            Some(stage) => stage,
            none => none.insert(Stage {
                mixer: Mixer::new(self.wanted, &self.block),
                resampler: Resampler::new(self.block.rate, self.sample_rate)?,
                frames: 0,
                rate: self.block.rate,
            }),
        };
        stage.frames += self.block.frames() as u64;
        self.mono.clear();
        stage.mixer.push(&self.block, &mut self.mono, &mut self.notes);
        stage.resampler.push(&self.mono, &mut self.ready)
    }

    fn finish_stage(&mut self) -> Result<(), MediaError> {
        self.seconds = self.seconds();
        let Some(mut stage) = self.stage.take() else { return Ok(()) };
        self.mono.clear();
        stage.mixer.finish(&mut self.mono, &mut self.notes);
        stage.resampler.push(&self.mono, &mut self.ready)?;
        stage.resampler.finish(&mut self.ready)
    }
}

/// Silences what is no number or far beyond full scale, and counts it.
fn repair(samples: &mut [f32]) -> u64 {
    // A comparison with NaN is false.
    let is_sound = |sample: f32| sample.abs() <= SAMPLE_MAX;
    let broken = samples.iter().filter(|&&sample| !is_sound(sample)).count();
    if broken > 0 {
        samples.iter_mut().filter(|sample| !is_sound(**sample)).for_each(|sample| *sample = 0.0);
    }
    broken as u64
}

/// Makes a panic of a decoder the error of its row.
///
/// symphonia's demuxers and decoders hold assertions and sums that a forged file can break: `CafReader::try_new` and
/// `expand_nibble` of its ADPCM overflow, `lookup1_values` of its Vorbis asserts. They are safe Rust, whose state is given up with
/// the recording, so nothing broken is seen afterwards.
fn guarded<T>(work: impl FnOnce() -> Result<T, MediaError>) -> Result<T, MediaError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        Err(MediaError::BrokeDown { reason: text.unwrap_or("no reason given").chars().take(200).collect() })
    })
}
