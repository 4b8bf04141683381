//! Rotary position embedding: angles of a pass's tokens, once for all layers that share them, and heads turned by them.

/// A rotary embedding in numbers; the formulas are in `models/rope.rs`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotation {
    /// Pairs are neighbours, rather than a head's first half and its second.
    pub neighbours: bool,
    pub kind: RotationKind,
}

#[derive(Debug, Clone, PartialEq)]
pub enum RotationKind {
    /// Radians a token, (head_dim / 2), of positions times `position_scale`; numbers are multiplied by `scale`.
    Fixed { frequencies: Vec<f32>, position_scale: f32, scale: f32 },
    /// The base grows with the sequence once it is longer than the model was trained for.
    Dynamic { head_dim: usize, base: f64, factor: f64, trained_tokens: f64 },
}

/// Cosines and sines, (tokens, head_dim / 2) each.
#[derive(Debug)]
pub struct Angles {
    cosines: Vec<f32>,
    sines: Vec<f32>,
    pairs: usize,
}

impl Rotation {
    /// Whether a key depends on how long its sequence will be, and not on what stands before it alone.
    pub fn depends_on_length(&self) -> bool {
        matches!(self.kind, RotationKind::Dynamic { .. })
    }

    /// `places` are each token's position, and how far its sequence reaches.
    pub fn angles(&self, places: impl Iterator<Item = (i32, i32)>) -> Angles {
        let (mut cosines, mut sines, mut pairs) = (Vec::new(), Vec::new(), 0);
        let mut add = |angles: &mut dyn Iterator<Item = f32>, scale: f32| {
            let before = cosines.len();
            for angle in angles {
                let (sine, cosine) = f64::from(angle).sin_cos();
                cosines.push(scale * cosine as f32);
                sines.push(scale * sine as f32);
            }
            pairs = cosines.len() - before;
        };
        for (position, reach) in places {
            let position = position as f32;
            match &self.kind {
                RotationKind::Fixed { frequencies, position_scale, scale } => {
                    // As MLX has it, in single precision.
                    let position = position * position_scale;
                    add(&mut frequencies.iter().map(|frequency| position * frequency), *scale);
                }
                RotationKind::Dynamic { head_dim, base, factor, trained_tokens } => {
                    let dims = *head_dim as f64;
                    let tokens = f64::from(reach);
                    let base = if tokens <= *trained_tokens {
                        *base
                    } else {
                        base * (factor * tokens / trained_tokens - (factor - 1.0)).powf(dims / (dims - 2.0))
                    };
                    let frequencies = (0..*head_dim).step_by(2).map(|index| base.powf(-(index as f64) / dims) as f32);
                    add(&mut frequencies.map(|frequency| position * frequency), 1.0);
                }
            }
        }
        Angles { cosines, sines, pairs }
    }

    /// Turns heads, (heads, head_dim), of token `token`.
    pub fn rotate(&self, heads: &mut [f32], angles: &Angles, token: usize) {
        let pairs = angles.pairs;
        let (cosines, sines) = (&angles.cosines[token * pairs..][..pairs], &angles.sines[token * pairs..][..pairs]);
        for head in heads.chunks_exact_mut(2 * pairs) {
            if self.neighbours {
                for ((pair, cosine), sine) in head.as_chunks_mut::<2>().0.iter_mut().zip(cosines).zip(sines) {
                    *pair = [pair[0] * cosine - pair[1] * sine, pair[0] * sine + pair[1] * cosine];
                }
            } else {
                let (first, second) = head.split_at_mut(pairs);
                for (((first, second), cosine), sine) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
                    (*first, *second) = (*first * cosine - *second * sine, *first * sine + *second * cosine);
                }
            }
        }
    }
}
