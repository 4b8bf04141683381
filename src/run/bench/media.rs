//! Images and recordings in a workload's prompts: decoded on the pool as a job does it, and what the towers take of a row.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use bytesize::ByteSize;
use rayon::prelude::*;
use serde::Serialize;

use super::workload::{BenchError, WorkloadRow};
use crate::{
    engine::{EngineError, MlxEngine, memory},
    job::{Audio, Long},
    manifest::{MediumKind, is_recording_name},
    media::{MediaSource, is_image_name},
    model::Towers,
    prompt::{Sensed, Senses, splice},
    run::clock::milliseconds,
    schedule::Medium,
};

/// Media encoded together where they are not encoded one by one: as many as a GPU is given at once.
const TOGETHER: usize = 8;

/// The media of a workload, one a row.
pub struct RowMedia {
    sensed: Vec<Sensed>,
    /// Reading and decoding all of them, on the whole pool, and on one core added up.
    wall: Duration,
    cores: Duration,
}

impl RowMedia {
    /// The files of a folder in turn, for so many rows; each row decodes its own.
    pub fn read(folder: &Path, towers: &Towers, rows: usize) -> Result<Self, BenchError> {
        let unread = |reason: String| BenchError::Read { file: folder.display().to_string(), reason };
        let mut files: Vec<(MediumKind, PathBuf)> = Vec::new();
        for entry in folder.read_dir().map_err(|error| unread(error.to_string()))? {
            let path = entry.map_err(|error| unread(error.to_string()))?.path();
            if towers.image.is_some() && is_image_name(&path) {
                files.push((MediumKind::Image, path));
            } else if towers.audio.is_some() && is_recording_name(&path) {
                files.push((MediumKind::Audio, path));
            }
        }
        if files.is_empty() {
            let inputs = towers.inputs().join(" and ");
            return Err(unread(format!("it has no files of what the model takes, which is {inputs}")));
        }
        files.sort_by(|(_, a), (_, b)| a.cmp(b));
        let senses = Senses::new(towers.clone(), Audio { long: Long::Truncate, ..Audio::default() });
        let since = Instant::now();
        let sensed: Result<Vec<(Sensed, Duration)>, String> = (0..rows)
            .into_par_iter()
            .map(|row| {
                let (kind, path) = &files[row % files.len()];
                let since = Instant::now();
                let medium = crate::manifest::Medium { kind: *kind, source: MediaSource::File(path.clone()) };
                Ok((senses.sense(&medium)?, since.elapsed()))
            })
            .collect();
        let (sensed, took): (Vec<Sensed>, Vec<Duration>) = sensed.map_err(unread)?.into_iter().unzip();
        Ok(Self { sensed, wall: since.elapsed(), cores: took.into_iter().sum() })
    }

    /// The prompt of row `index` with its medium behind the first token, and that medium.
    pub fn splice(&self, index: usize, row: &WorkloadRow, towers: &Towers) -> Result<(Vec<u32>, Vec<Medium>), BenchError> {
        let refused = |reason: String| BenchError::Refused { index, reason };
        let sensed = &self.sensed[index];
        let placeholder = match sensed.kind {
            MediumKind::Image => towers.image.as_ref().map(|tower| tower.placeholder),
            MediumKind::Audio => towers.audio.as_ref().map(|tower| tower.placeholder),
        };
        let placeholder = placeholder.ok_or_else(|| refused("the model has no tower for it".to_owned()))?;
        let others = [&towers.image.as_ref().map(|tower| tower.placeholder), &towers.audio.as_ref().map(|tower| tower.placeholder)];
        // Drawn at random, a token may happen to be a placeholder.
        let is_placeholder = |token: u32| others.iter().any(|other| other.is_some_and(|other| other.token == token));
        let mut prompt: Vec<u32> = row.prompt.iter().map(|&token| if is_placeholder(token) { 0 } else { token }).collect();
        prompt.insert(prompt.len().min(1), placeholder.token);
        let (prompt, places) = splice(&prompt, towers, &[(sensed.kind, sensed.soft_tokens)]).map_err(refused)?;
        let media = places.into_iter().map(|place| Medium {
            first: place.first,
            tokens: sensed.soft_tokens,
            content: sensed.content.clone(),
            identity: sensed.identity,
        });
        Ok((prompt, media.collect()))
    }

    /// Whether the tokens of every row's medium see each other both ways.
    pub fn whole_spans(&self, index: usize, towers: &Towers) -> bool {
        self.sensed[index].kind == MediumKind::Image && towers.image.as_ref().is_some_and(|tower| tower.both_ways)
    }

    pub fn figures(&self, engine: &MlxEngine) -> Result<MediaFigures, EngineError> {
        let of_kind = |kind| -> Vec<&Sensed> { self.sensed.iter().filter(|sensed| sensed.kind == kind).collect() };
        let mut towers = Vec::new();
        for (name, kind) in [("images", MediumKind::Image), ("recordings", MediumKind::Audio)] {
            let media = of_kind(kind);
            if !media.is_empty() {
                towers.push(tower_figures(name, &media, engine)?);
            }
        }
        let rows = self.sensed.len().max(1) as f64;
        Ok(MediaFigures {
            decode_ms_per_row: milliseconds(self.cores) / rows,
            decode_wall_seconds: self.wall.as_secs_f64(),
            cores: rayon::current_num_threads(),
            towers,
        })
    }
}

/// docs/benchmarks.md says what each means.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MediaFigures {
    pub decode_ms_per_row: f64,
    pub decode_wall_seconds: f64,
    pub cores: usize,
    pub towers: Vec<TowerFigures>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TowerFigures {
    pub media: &'static str,
    pub count: usize,
    pub soft_tokens_mean: f64,
    pub one_by_one_ms: f64,
    pub together: usize,
    pub together_ms: f64,
    /// Time of one by one over time together.
    pub ratio: f64,
    pub one_scratch_bytes: u64,
    pub together_scratch_bytes: u64,
    /// By the budget, of the largest alone and of so many.
    pub one_predicted_bytes: u64,
    pub together_predicted_bytes: u64,
}

fn tower_figures(name: &'static str, media: &[&Sensed], engine: &MlxEngine) -> Result<TowerFigures, EngineError> {
    let media: Vec<Medium> = media
        .iter()
        .map(|sensed| Medium { first: 0, tokens: sensed.soft_tokens, content: sensed.content.clone(), identity: sensed.identity })
        .collect();
    let count = media.len();
    // What is made once, such as a GPU's kernels, counts for nobody.
    engine.encode_media(&media[..count.min(TOGETHER)], TOGETHER)?;
    engine.encode_media(&media[..1], 1)?;
    let timed = |together: usize| -> Result<(f64, u64), EngineError> {
        let before = memory::settled_bytes()?;
        memory::reset_peak()?;
        let since = Instant::now();
        engine.encode_media(&media, together)?;
        let took = since.elapsed();
        Ok((milliseconds(took) / count as f64, memory::peak_bytes()?.saturating_sub(before)))
    };
    let ((one_by_one_ms, one_scratch_bytes), (together_ms, together_scratch_bytes)) = (timed(1)?, timed(TOGETHER)?);
    let price = engine.price_of(true);
    let largest = media.iter().map(|medium| price.medium_bytes(medium)).max().unwrap_or(0);
    Ok(TowerFigures {
        media: name,
        count,
        soft_tokens_mean: media.iter().map(|medium| f64::from(medium.tokens)).sum::<f64>() / count as f64,
        one_by_one_ms,
        together: TOGETHER,
        together_ms,
        ratio: one_by_one_ms / together_ms,
        one_scratch_bytes,
        together_scratch_bytes,
        one_predicted_bytes: largest,
        together_predicted_bytes: largest * TOGETHER.min(count) as u64,
    })
}

/// A line for decoding, and three for each kind of media.
pub fn table(figures: &MediaFigures) -> String {
    let size = |bytes: u64| ByteSize(bytes).display().iec().to_string();
    let mut text = format!(
        "media read and decoded: {:.1} ms a row on a core, {:.2} s for all on {} cores\n",
        figures.decode_ms_per_row, figures.decode_wall_seconds, figures.cores
    );
    for tower in &figures.towers {
        let TowerFigures { media, count, soft_tokens_mean, one_by_one_ms, together, together_ms, ratio, .. } = tower;
        let _ = writeln!(
            text,
            "{count} {media} of {soft_tokens_mean:.0} soft tokens: {one_by_one_ms:.2} ms each one by one, {together_ms:.2} ms each in groups \
             of {together} ({ratio:.2} times as fast)\n  scratch {} for one (predicted {}), {} for {together} (predicted {})",
            size(tower.one_scratch_bytes),
            size(tower.one_predicted_bytes),
            size(tower.together_scratch_bytes),
            size(tower.together_predicted_bytes)
        );
    }
    text.push('\n');
    text
}
