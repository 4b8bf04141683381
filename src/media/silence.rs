use super::mix::Block;

/// Whether a decoder gives silence for packets that hold something (Symphonia#540).
///
/// A packet of silence is short, or filled up with one and the same byte; one of sound looks like noise. Samples of a lossy codec
/// that are all exactly zero although most packets look like noise are the decoder's failure.
#[derive(Default)]
pub(super) struct Silence {
    packets: u64,
    like_noise: u64,
    heard: bool,
}

/// Different bytes in a packet from which on it looks like noise.
const NOISE_BYTES: usize = 40;

impl Silence {
    pub fn look(&mut self, packet: &[u8], is_lossy: bool) {
        if self.heard || !is_lossy {
            return;
        }
        let mut seen = [0u64; 4];
        packet.iter().for_each(|&byte| seen[usize::from(byte >> 6)] |= 1 << (byte & 63));
        let different: u32 = seen.iter().map(|bits| bits.count_ones()).sum();
        self.packets += 1;
        self.like_noise += u64::from(different as usize >= NOISE_BYTES);
    }

    pub fn listen(&mut self, block: &Block) {
        self.heard = self.heard || block.channels.iter().flatten().any(|&sample| sample != 0.0);
    }

    pub fn is_false(&self) -> bool {
        !self.heard && self.like_noise >= 3 && self.like_noise * 2 > self.packets
    }
}
