//! Channels into the one that is heard.

use crate::job::Channels;

/// Stretches of a second that are looked at as a whole before their mix is trusted.
const STRETCHES_A_SECOND: usize = 2;
/// A mix under this share of the power that channels without any relation would leave cancels.
const CANCELS_UNDER: f64 = 0.05;
/// Mean square under which a stretch is too quiet to judge: -70 dB of full scale.
const QUIET_POWER: f64 = 1e-7;

/// A stretch of decoded channels of equal length.
#[derive(Debug, Default)]
pub(super) struct Block {
    /// In Hz.
    pub rate: u32,
    /// One bit a channel: those for low-frequency effects alone.
    pub effects: u64,
    pub channels: Vec<Vec<f32>>,
}

impl Block {
    pub fn frames(&self) -> usize {
        self.channels.first().map_or(0, Vec::len)
    }
}

pub(super) struct Mixer {
    wanted: Channels,
    /// Whose number and order stay for the mixer's life.
    channels: Vec<Vec<f32>>,
    effects: u64,
    /// The channel that is heard alone, because the mix cancels.
    alone: Option<usize>,
    frames: u64,
    rate: u32,
}

impl Mixer {
    pub fn new(wanted: Channels, block: &Block) -> Self {
        let channels = vec![Vec::new(); block.channels.len()];
        Self { wanted, channels, effects: block.effects, alone: None, frames: 0, rate: block.rate }
    }

    /// Whether a block continues what came before it.
    pub fn fits(&self, block: &Block) -> bool {
        block.rate == self.rate && block.channels.len() == self.channels.len() && block.effects == self.effects
    }

    /// Takes a block, and appends to `output` what is ready.
    pub fn push(&mut self, block: &Block, output: &mut Vec<f32>, notes: &mut Vec<String>) {
        let count = self.channels.len();
        let taken = match self.wanted {
            Channels::Left => Some(0),
            Channels::Right => Some(1.min(count - 1)),
            Channels::Mix if count == 1 => Some(0),
            Channels::Mix => self.alone,
        };
        if let Some(taken) = taken {
            output.extend_from_slice(&block.channels[taken]);
            self.frames += block.frames() as u64;
            return;
        }
        for (waiting, channel) in self.channels.iter_mut().zip(&block.channels) {
            waiting.extend_from_slice(channel);
        }
        if self.channels[0].len() >= self.rate as usize / STRETCHES_A_SECOND {
            self.mix(output, notes);
        }
    }

    pub fn finish(mut self, output: &mut Vec<f32>, notes: &mut Vec<String>) {
        if self.channels.iter().any(|channel| !channel.is_empty()) {
            self.mix(output, notes);
        }
    }

    fn mix(&mut self, output: &mut Vec<f32>, notes: &mut Vec<String>) {
        let all_effects = self.effects.count_ones() as usize >= self.channels.len();
        let effects = if all_effects { 0 } else { self.effects };
        let heard: Vec<usize> = (0..self.channels.len()).filter(|&channel| channel >= 64 || effects >> channel & 1 == 0).collect();
        let start = output.len();
        let frames = self.channels[0].len();
        if let [left, right] = heard[..] {
            let pairs = self.channels[left].iter().zip(&self.channels[right]);
            output.extend(pairs.map(|(left, right)| (left + right) * 0.5));
        } else {
            output.extend_from_slice(&self.channels[heard[0]]);
            for &channel in &heard[1..] {
                for (sum, sample) in output[start..].iter_mut().zip(&self.channels[channel]) {
                    *sum += sample;
                }
            }
            let share = 1.0 / heard.len() as f32;
            output[start..].iter_mut().for_each(|sum| *sum *= share);
        }
        let powers: Vec<f64> = heard.iter().map(|&channel| power(&self.channels[channel])).collect();
        let count = heard.len() as f64;
        let unrelated = powers.iter().sum::<f64>() / (count * count);
        if unrelated > QUIET_POWER && power(&output[start..]) < CANCELS_UNDER * unrelated {
            let loudest = (0..heard.len()).max_by(|&one, &other| powers[one].total_cmp(&powers[other])).unwrap_or(0);
            let loudest = heard[loudest];
            output.truncate(start);
            output.extend_from_slice(&self.channels[loudest]);
            self.alone = Some(loudest);
            notes.push(format!(
                "from {:.1} s on the channels cancel each other when mixed; channel {} of {}, the loudest, is heard alone",
                self.frames as f64 / f64::from(self.rate.max(1)),
                loudest + 1,
                self.channels.len()
            ));
        }
        self.frames += frames as u64;
        self.channels.iter_mut().for_each(Vec::clear);
    }
}

/// The mean square.
fn power(samples: &[f32]) -> f64 {
    // Sixteen sums side by side, which the processor adds at once.
    let mut total = 0.0;
    for stretch in samples.chunks(4096) {
        let mut sums = [0.0f32; 16];
        let mut groups = stretch.chunks_exact(16);
        for group in &mut groups {
            for (sum, sample) in sums.iter_mut().zip(group) {
                *sum += sample * sample;
            }
        }
        total += f64::from(sums.iter().sum::<f32>() + groups.remainder().iter().map(|sample| sample * sample).sum::<f32>());
    }
    total / samples.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(length: usize, mut state: u32) -> Vec<f32> {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..length).map(|_| next()).collect()
    }

    fn mixed(wanted: Channels, channels: &[Vec<f32>], effects: u64) -> (Vec<f32>, Vec<String>) {
        let (mut output, mut notes) = (Vec::new(), Vec::new());
        let block = |from: usize, to: usize| Block {
            rate: 16_000,
            effects,
            channels: channels.iter().map(|channel| channel[from..to].to_vec()).collect(),
        };
        let mut mixer = Mixer::new(wanted, &block(0, 0));
        for from in (0..channels[0].len()).step_by(1_000) {
            mixer.push(&block(from, (from + 1_000).min(channels[0].len())), &mut output, &mut notes);
        }
        mixer.finish(&mut output, &mut notes);
        (output, notes)
    }

    #[test]
    fn the_mean_of_any_number_of_channels() {
        for count in 1..=8u32 {
            let channels: Vec<Vec<f32>> = (0..count).map(|channel| noise(150_001, channel)).collect();
            let (output, notes) = mixed(Channels::Mix, &channels, 0);
            let mean = |frame: usize| channels.iter().map(|channel| channel[frame]).sum::<f32>() / count as f32;
            assert!((0..150_001).all(|frame| (output[frame] - mean(frame)).abs() < 1e-6), "{count}");
            assert!(output.len() == 150_001 && notes.is_empty(), "{count} {notes:?}");
        }
    }

    #[test]
    fn a_mix_that_begins_to_cancel_in_the_middle() {
        let left = noise(300_000, 1);
        let mut right = left.clone();
        right[150_000..].iter_mut().for_each(|sample| *sample *= -0.95);
        let (output, notes) = mixed(Channels::Mix, &[left.clone(), right], 0);
        assert_eq!(output.len(), 300_000);
        assert_eq!(output[200_000..], left[200_000..]);
        assert_eq!(notes.len(), 1);
        assert!(notes[0].starts_with("from 9.5 s on the channels cancel"), "{notes:?}");
    }

    #[test]
    fn quiet_stretches_and_unrelated_channels_do_not_cancel() {
        let faint: Vec<f32> = noise(100_000, 3).iter().map(|sample| sample * 1e-4).collect();
        let against: Vec<f32> = faint.iter().map(|sample| -sample).collect();
        assert!(mixed(Channels::Mix, &[faint, against], 0).1.is_empty());
        assert!(mixed(Channels::Mix, &[noise(100_000, 4), noise(100_000, 5)], 0).1.is_empty());
        let alone = [noise(100_000, 6), vec![0.0; 100_000], vec![0.0; 100_000], vec![0.0; 100_000], vec![0.0; 100_000]];
        assert!(mixed(Channels::Mix, &alone, 0).1.is_empty());
    }

    #[test]
    fn channels_for_effects_are_heard_only_where_there_are_no_others() {
        let (one, two) = (noise(1_000, 7), noise(1_000, 8));
        assert_eq!(mixed(Channels::Mix, &[one.clone(), two.clone()], 0b10).0, one);
        assert_ne!(mixed(Channels::Mix, &[one.clone(), two.clone()], 0b11).0, one);
        assert_eq!(mixed(Channels::Right, &[one, two.clone()], 0).0, two);
        assert_eq!(mixed(Channels::Right, std::slice::from_ref(&two), 0).0, two);
    }
}
