//! What an encoder put before and behind the sound, cut off.

use super::mix::Block;

#[derive(Debug, Default)]
pub(super) struct Trim {
    /// Frames at the start that are not sound.
    skip: u64,
    /// Where the sound ends, counted from the first decoded frame.
    end: Option<u64>,
    /// Frames that are kept back until it is known whether they are the last.
    hold: u64,
    held: Block,
    /// Frames that were seen.
    seen: u64,
    /// Whether nothing comes behind the end, however much is decoded.
    is_limit: bool,
}

impl Trim {
    /// The last `padding` frames, whatever their number, are not sound.
    pub fn padded(skip: u64, padding: u64) -> Self {
        Self { skip, hold: padding, ..Self::default() }
    }

    /// `end` is believed where what lies behind it, all in all, is up to `padding` frames.
    pub fn new(skip: u64, end: Option<u64>, padding: u64) -> Self {
        Self { skip, end, hold: padding, ..Self::default() }
    }

    pub fn limit(skip: u64, end: u64) -> Self {
        Self { skip, end: Some(end), is_limit: true, ..Self::default() }
    }

    pub fn apply(&mut self, block: &mut Block) {
        let frames = block.frames() as u64;
        let start = self.skip.saturating_sub(self.seen).min(frames);
        let mut stop = frames;
        if let Some(end) = self.end.filter(|_| self.is_limit) {
            stop = end.saturating_sub(self.seen).min(frames);
        }
        self.seen += frames;
        if start > 0 || stop < frames {
            cut(block, start, stop);
        }
        if self.hold > 0 {
            self.keep_back(block);
        }
    }

    fn keep_back(&mut self, block: &mut Block) {
        if self.held.rate != block.rate || self.held.channels.len() != block.channels.len() {
            // What was kept back belongs to another stage, and was no end.
            self.held = Block { rate: block.rate, effects: block.effects, channels: vec![Vec::new(); block.channels.len()] };
        }
        let hold = usize::try_from(self.hold).unwrap_or(usize::MAX);
        for (held, channel) in self.held.channels.iter_mut().zip(&mut block.channels) {
            held.append(channel);
            let out = held.len().saturating_sub(hold);
            channel.extend(held.drain(..out));
        }
    }

    /// Gives what was kept back, if it is sound; `frames` were decoded in all, and that is all there was if `is_complete`.
    pub fn finish(&mut self, frames: u64, is_complete: bool, block: &mut Block) {
        let held = std::mem::take(&mut self.held);
        let kept = held.frames() as u64;
        let padding = self.end.map_or(self.hold, |end| frames.saturating_sub(end));
        let padding = if is_complete && padding <= self.hold { padding.min(kept) } else { 0 };
        *block = held;
        cut(block, 0, kept - padding);
    }
}

fn cut(block: &mut Block, start: u64, stop: u64) {
    let (start, stop) = (usize::try_from(start).unwrap_or(usize::MAX), usize::try_from(stop).unwrap_or(usize::MAX));
    for channel in &mut block.channels {
        channel.truncate(stop);
        channel.drain(..start.min(channel.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames numbered from 0, in packets of 100, through a trim.
    fn trimmed(mut trim: Trim, frames: usize, is_complete: bool) -> Vec<usize> {
        let mut output = Vec::new();
        for from in (0..frames).step_by(100) {
            let samples = (from..(from + 100).min(frames)).map(|frame| frame as f32).collect();
            let mut block = Block { rate: 16_000, effects: 0, channels: vec![samples] };
            trim.apply(&mut block);
            output.append(&mut block.channels[0]);
        }
        let mut block = Block::default();
        trim.finish(frames as u64, is_complete, &mut block);
        output.extend(block.channels.into_iter().flatten());
        output.into_iter().map(|sample| sample as usize).collect()
    }

    #[test]
    fn what_lies_before_and_behind_is_cut_off_across_packets() {
        assert_eq!(trimmed(Trim::default(), 1_000, true), (0..1_000).collect::<Vec<_>>());
        assert_eq!(trimmed(Trim::padded(250, 0), 1_000, true), (250..1_000).collect::<Vec<_>>());
        assert_eq!(trimmed(Trim::padded(30, 310), 1_000, true), (30..690).collect::<Vec<_>>());
        assert_eq!(trimmed(Trim::new(30, Some(850), 150), 1_000, true), (30..850).collect::<Vec<_>>());
        assert_eq!(trimmed(Trim::limit(30, 850), 2_000, true), (30..850).collect::<Vec<_>>());
        assert_eq!(trimmed(Trim::padded(5_000, 0), 1_000, true), Vec::<usize>::new());
    }

    #[test]
    fn an_end_that_does_not_fit_what_was_decoded_is_not_believed() {
        let all: Vec<usize> = (30..1_000).collect();
        assert_eq!(trimmed(Trim::new(30, Some(850), 100), 1_000, true), all, "more lies behind it than padding");
        assert_eq!(trimmed(Trim::new(30, Some(2_000), 100), 1_000, true), all, "it is cut off");
        assert_eq!(trimmed(Trim::padded(30, 100), 1_000, false), all, "the last packets are missing");
    }
}
