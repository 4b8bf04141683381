//! Where nobody speaks, by loudness alone.
//!
//! Levels are of 10 ms each, above 150 Hz, so that neither a constant offset nor hum hides a pause. What is quiet is
//! measured against the recording itself: between its floor (the level that a fiftieth of the time is under, which a single
//! pause can set) and its loud parts (which a twentieth is over), a pause begins under a quarter of the way and ends over
//! two fifths. Rabiner and Sambur ("An algorithm for determining the endpoints of isolated utterances", 1975) have two such
//! thresholds too. Silence between words is seldom shorter than 0.2 s, the closure of a stop consonant seldom longer than
//! 0.15 s.
//!
//! Where nothing stands out (steady noise, music, speech without a breath) the quietest place is taken.
//!
//! Known weakness: loudness does not tell speech from music. Words over music that is as loud are cut at its quiet places.

use std::ops::Range;

use crate::media::HOP_SAMPLES;

/// Of a high-pass filter of first order, y = x - x' + 0.94 y': 1 - 0.94 is 2π · 150 Hz a sample.
const HIGH_PASS: f32 = 0.94;
/// Levels are not lower than this, which is under the last bit of 16.
const LEAST_DB: f32 = -120.0;
/// Everything so far under the loud parts is equally quiet: digital silence does not make a noisy pause loud.
const RANGE_DB: f32 = 40.0;
/// Less between floor and loud parts is no contrast between speech and pause.
const CONTRAST_DB: f32 = 6.0;
const PAUSE_STARTS: f32 = 0.25;
const PAUSE_ENDS: f32 = 0.4;
const PAUSE_LEVELS: usize = 20;
/// A longer pause is not better.
const LONG_PAUSE_LEVELS: f32 = 60.0;
/// What a pause at the far end of a stretch must be longer by, as a part of a long one.
const DISTANCE_WEIGHT: f32 = 0.5;
/// How much quieter a place a second further away must be, where there is no pause.
const DISTANCE_DB_PER_SECOND: f32 = 0.3;
/// Neighbours on each side that a level is replaced by the median of: sounds of up to 20 ms, such as clicks, end no pause.
const MEDIAN_SIDE: usize = 2;
/// A cut is no nearer to a pause's ends.
const EDGE_LEVELS: usize = 8;
/// Where there is no pause: levels on each side that a cut should be quiet in, further and nearer.
const QUIET_SIDES: [usize; 2] = [15, 3];

/// Levels of a recording's stretch.
pub(super) struct Loudness {
    /// In decibels of full scale.
    levels: Vec<f32>,
    /// The same without clicks.
    smooth: Vec<f32>,
}

/// Where to cut, in samples.
pub(super) struct Cut<'a> {
    /// Searched one after another; none is empty, and the first is where to cut if none has a pause.
    pub(super) stretches: &'a [Range<usize>],
    /// The nearer the better.
    pub(super) best: usize,
}

struct Thresholds {
    starts: f32,
    ends: f32,
}

impl Loudness {
    pub(super) fn of(samples: &[f32]) -> Self {
        let mut before = samples.first().copied().unwrap_or(0.0);
        let mut passed = 0.0;
        let levels = samples.chunks(HOP_SAMPLES).map(|hop| {
            let mut energy = 0.0;
            for sample in hop {
                passed = sample - before + HIGH_PASS * passed;
                before = *sample;
                energy += passed * passed;
            }
            // What is not a number is not heard, and not remembered.
            if !energy.is_finite() {
                (before, passed, energy) = (0.0, 0.0, 0.0);
            }
            (10.0 * (energy / hop.len() as f32).log10()).max(LEAST_DB)
        });
        let levels: Vec<f32> = levels.collect();
        let smooth = (0..levels.len()).map(|at| {
            let mut near = levels[at.saturating_sub(MEDIAN_SIDE)..(at + MEDIAN_SIDE + 1).min(levels.len())].to_vec();
            near.sort_unstable_by(f32::total_cmp);
            near[near.len() / 2]
        });
        Self { smooth: smooth.collect(), levels }
    }

    /// The sample to cut before, within the stretches.
    pub(super) fn cut(&self, cut: &Cut) -> usize {
        let whole = self.thresholds(0..self.smooth.len());
        // Where the noise has changed, its new level shows in the stretch alone.
        let near = cut.stretches.first().and_then(|stretch| self.thresholds(levels(stretch)).map(|own| (stretch, own)));
        let by_whole = whole.iter().flat_map(|whole| cut.stretches.iter().map(move |stretch| (stretch, whole)));
        by_whole
            .chain(near.iter().map(|(stretch, own)| (*stretch, own)))
            .find_map(|(stretch, thresholds)| self.pause(stretch, thresholds, cut.best))
            .unwrap_or_else(|| self.quietest(cut))
    }

    /// None where quiet and loud are too near each other.
    fn thresholds(&self, levels: Range<usize>) -> Option<Thresholds> {
        let mut sorted = self.smooth[levels].to_vec();
        sorted.sort_unstable_by(f32::total_cmp);
        let loud = *sorted.get(sorted.len() * 95 / 100)?;
        let floor = sorted[sorted.len() / 50].max(loud - RANGE_DB);
        let contrast = loud - floor;
        let thresholds = Thresholds { starts: floor + PAUSE_STARTS * contrast, ends: floor + PAUSE_ENDS * contrast };
        (contrast >= CONTRAST_DB).then_some(thresholds)
    }

    /// The middle of the pause that suits best of those that reach into `stretch`.
    fn pause(&self, stretch: &Range<usize>, thresholds: &Thresholds, best: usize) -> Option<usize> {
        let within = levels(stretch);
        let best = (best / HOP_SAMPLES) as f32;
        let value = |(pause, at): &(Range<usize>, usize)| {
            let length = (pause.len() as f32 / LONG_PAUSE_LEVELS).min(1.0);
            length - DISTANCE_WEIGHT * (*at as f32 - best).abs() / within.len() as f32
        };
        let pauses = self.pauses(thresholds).into_iter().filter(|pause| pause.len() >= PAUSE_LEVELS);
        let places = pauses.filter_map(|pause| {
            let at = (pause.start + pause.len() / 2).clamp(within.start, within.end);
            // It may be that a pause merely reaches into the stretch.
            let inside = pause.start + EDGE_LEVELS..pause.end - EDGE_LEVELS;
            inside.contains(&at).then_some((pause, at))
        });
        places.max_by(|one, other| value(one).total_cmp(&value(other))).map(|(_, at)| at * HOP_SAMPLES)
    }

    /// All pauses, in levels.
    fn pauses(&self, thresholds: &Thresholds) -> Vec<Range<usize>> {
        let mut pauses = Vec::new();
        let mut start = None;
        for (at, level) in self.smooth.iter().enumerate() {
            match start {
                None if *level < thresholds.starts => start = Some(at),
                Some(from) if *level > thresholds.ends => {
                    pauses.push(from..at);
                    start = None;
                }
                _ => {}
            }
        }
        pauses.extend(start.map(|from| from..self.smooth.len()));
        pauses
    }

    /// The quietest place of the first stretch, near the best one if there is little between them.
    fn quietest(&self, cut: &Cut) -> usize {
        let Some(stretch) = cut.stretches.first() else { return cut.best };
        let cost = |at: &usize| {
            let level = |side: usize| mean(&self.levels[at.saturating_sub(side)..(at + side).min(self.levels.len())]);
            let away_seconds = (at * HOP_SAMPLES).abs_diff(cut.best) as f32 / (100 * HOP_SAMPLES) as f32;
            QUIET_SIDES.map(level).iter().sum::<f32>() / 2.0 + DISTANCE_DB_PER_SECOND * away_seconds
        };
        let within = levels(stretch);
        let quietest = (within.start..=within.end).min_by(|one, other| cost(one).total_cmp(&cost(other)));
        quietest.map_or(cut.best, |at| at * HOP_SAMPLES)
    }
}

/// The levels whose starts are in a stretch of samples: cuts are made between two of them.
fn levels(stretch: &Range<usize>) -> Range<usize> {
    stretch.start.div_ceil(HOP_SAMPLES)..stretch.end / HOP_SAMPLES
}

fn mean(levels: &[f32]) -> f32 {
    levels.iter().sum::<f32>() / levels.len().max(1) as f32
}
