//! One continuous stream from one sample rate to another: no delay, no cut tail, and exactly as many samples as the rates say.

use rubato::audioadapter_buffers::direct::SequentialSlice;
use rubato::{Fft, FixedSync, Resampler as _, WindowFunction};

use super::MediaError;

/// Points of the filter at the lower of the two rates, at least. It passes all up to 0.94 of what that rate can hold.
const FILTER_POINTS: usize = 480;

/// The samples that `frames` at rate `from` become at rate `to`, rounded half up.
pub(super) fn resampled_length(frames: u64, from: u32, to: u32) -> u64 {
    let (from, to) = (u128::from(from), u128::from(to));
    u64::try_from((u128::from(frames) * to * 2 + from) / (2 * from)).unwrap_or(u64::MAX)
}

pub(super) struct Resampler {
    from: u32,
    to: u32,
    filter: Option<Filter>,
    taken: u64,
    given: u64,
}

struct Filter {
    fft: Fft<f32>,
    /// Input that does not fill a block yet.
    waiting: Vec<f32>,
    block: Vec<f32>,
    /// Samples at the start that are the filter's delay.
    delay: usize,
}

impl Resampler {
    /// Rates in Hz, both over 0. Equal rates pass through unchanged.
    pub fn new(from: u32, to: u32) -> Result<Self, MediaError> {
        let filter = if from == to { None } else { Some(Filter::new(from as usize, to as usize)?) };
        Ok(Self { from, to, filter, taken: 0, given: 0 })
    }

    /// Takes samples, and appends to `output` those that are ready.
    pub fn push(&mut self, input: &[f32], output: &mut Vec<f32>) -> Result<(), MediaError> {
        self.taken += input.len() as u64;
        let start = output.len();
        match &mut self.filter {
            None => output.extend_from_slice(input),
            Some(filter) => filter.push(input, output)?,
        }
        self.given += (output.len() - start) as u64;
        Ok(())
    }

    /// Appends what is left.
    pub fn finish(mut self, output: &mut Vec<f32>) -> Result<(), MediaError> {
        let Some(filter) = &mut self.filter else { return Ok(()) };
        let start = output.len();
        let due = resampled_length(self.taken, self.from, self.to).saturating_sub(self.given);
        let due = usize::try_from(due).unwrap_or(usize::MAX);
        let block = vec![0.0; filter.fft.input_frames_next()];
        while output.len() - start < due {
            filter.push(&block, output)?;
        }
        output.truncate(start + due);
        Ok(())
    }
}

impl Filter {
    fn new(from: usize, to: usize) -> Result<Self, MediaError> {
        let mut divisor = (from, to);
        while divisor.1 != 0 {
            divisor = (divisor.1, divisor.0 % divisor.1);
        }
        let (from_step, to_step) = (from / divisor.0, to / divisor.0);
        // The filter's middle is a whole sample, so that its delay is one, only where its length is even.
        let steps = FILTER_POINTS.div_ceil(from_step.min(to_step)).next_multiple_of(2);
        let fft = Fft::new_custom(from, to, from_step * steps, 1, 1, WindowFunction::BlackmanHarris2, FixedSync::Both)
            .map_err(|error| MediaError::BrokeDown { reason: error.to_string() })?;
        let delay = fft.output_delay();
        let block = vec![0.0; fft.output_frames_next()];
        Ok(Self { fft, waiting: Vec::new(), block, delay })
    }

    fn push(&mut self, mut input: &[f32], output: &mut Vec<f32>) -> Result<(), MediaError> {
        let length = self.fft.input_frames_next();
        if !self.waiting.is_empty() {
            let missing = (length - self.waiting.len()).min(input.len());
            self.waiting.extend_from_slice(&input[..missing]);
            input = &input[missing..];
            if self.waiting.len() < length {
                return Ok(());
            }
            let waiting = std::mem::take(&mut self.waiting);
            self.compute(&waiting, output)?;
            self.waiting = waiting;
            self.waiting.clear();
        }
        let mut blocks = input.chunks_exact(length);
        for block in &mut blocks {
            self.compute(block, output)?;
        }
        self.waiting.extend_from_slice(blocks.remainder());
        Ok(())
    }

    fn compute(&mut self, input: &[f32], output: &mut Vec<f32>) -> Result<(), MediaError> {
        let broke_down = |reason: String| MediaError::BrokeDown { reason };
        let length = self.block.len();
        let from = SequentialSlice::new(input, 1, input.len()).map_err(|error| broke_down(error.to_string()))?;
        let mut to = SequentialSlice::new_mut(&mut self.block, 1, length).map_err(|error| broke_down(error.to_string()))?;
        let (_, given) = self.fft.process_into_buffer(&from, &mut to, None).map_err(|error| broke_down(error.to_string()))?;
        let delay = self.delay.min(given);
        self.delay -= delay;
        output.extend_from_slice(&self.block[delay..given]);
        Ok(())
    }
}
