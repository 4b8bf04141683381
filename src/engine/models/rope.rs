//! Rotary position embedding (arXiv:2104.09864) and the scalings that the families ship with.
//!
//! Formulas as in mlx-lm's `rope_utils.py`; frequencies are wavelengths over 2π, as `mlx.fast.rope` takes them.

use std::f64::consts::PI;

use mlx_rs::{Array, Dtype, fast, ops};
use serde_json::Value;

use crate::engine::{
    EngineError,
    cache::Step,
    ffi,
    host::{Rotation, RotationKind},
};

pub struct Rope {
    head_dim: i32,
    traditional: bool,
    kind: Kind,
}

enum Kind {
    /// Positions times `scale`.
    Plain { base: f32, scale: f32 },
    /// Frequencies of its own, (head_dim / 2), and a factor on the input.
    Frequencies { frequencies: Array, scale: f32 },
    /// The base grows with the sequence once it is longer than the model was trained for.
    Dynamic { base: f64, factor: f64, trained_tokens: f64 },
}

/// What a rotary embedding is made of, read from a configuration.
pub struct RopeOptions<'a> {
    pub head_dim: i32,
    pub base: f64,
    pub traditional: bool,
    pub scaling: Option<&'a Value>,
    pub max_position_embeddings: Option<i64>,
    /// A GGUF file's own divisors for each frequency, (head_dim / 2).
    pub factors: Option<Array>,
}

impl Rope {
    pub fn new(options: RopeOptions<'_>) -> Result<Self, String> {
        let RopeOptions { head_dim, base, traditional, scaling, max_position_embeddings, factors } = options;
        let make = |kind| Ok(Self { head_dim, traditional, kind });
        if head_dim < 2 || head_dim % 2 != 0 {
            return Err(format!("rotary embedding needs an even head size, not {head_dim}"));
        }
        let exponents = || (0..head_dim).step_by(2).map(move |index| base.powf(f64::from(index) / f64::from(head_dim)));
        if let Some(factors) = factors {
            let plain: Vec<f32> = exponents().map(|frequency| frequency as f32).collect();
            let frequencies = Array::from_slice(&plain, &[head_dim / 2]).multiply(factors).map_err(|error| error.to_string())?;
            return make(Kind::Frequencies { frequencies, scale: 1.0 });
        }
        let kind = scaling.and_then(|scaling| scaling.get("rope_type").or_else(|| scaling.get("type")));
        let kind = kind.and_then(Value::as_str).unwrap_or("default");
        let number = |key: &str| scaling.and_then(|scaling| scaling.get(key)).and_then(Value::as_f64);
        let required = |key: &str| number(key).ok_or_else(|| format!("rope_scaling of type '{kind}' needs the number '{key}'"));
        match kind {
            "default" => make(Kind::Plain { base: base as f32, scale: 1.0 }),
            "linear" => make(Kind::Plain { base: base as f32, scale: (1.0 / required("factor")?) as f32 }),
            "dynamic" => make(Kind::Dynamic {
                base,
                factor: required("factor")?,
                trained_tokens: max_position_embeddings
                    .ok_or("rope_scaling of type 'dynamic' needs max_position_embeddings in the configuration")?
                    as f64,
            }),
            "llama3" => {
                let factor = required("factor")?;
                let low = number("low_freq_factor").unwrap_or(1.0);
                let high = number("high_freq_factor").unwrap_or(4.0);
                let trained_tokens = number("original_max_position_embeddings").unwrap_or(8192.0);
                let frequencies = exponents().map(|frequency| {
                    let wavelength = 2.0 * PI * frequency;
                    if wavelength > trained_tokens / low {
                        frequency * factor
                    } else if wavelength > trained_tokens / high {
                        let smooth = (trained_tokens / wavelength - low) / (high - low);
                        frequency / ((1.0 - smooth) / factor + smooth)
                    } else {
                        frequency
                    }
                });
                make(Kind::Frequencies { frequencies: array(frequencies), scale: 1.0 })
            }
            "yarn" => {
                let factor = required("factor")?;
                let trained_tokens = number("original_max_position_embeddings").unwrap_or(4096.0);
                let dimension =
                    |rotations: f64| f64::from(head_dim) * (trained_tokens / (rotations * 2.0 * PI)).ln() / (2.0 * base.ln());
                let low = dimension(number("beta_fast").unwrap_or(32.0)).floor().max(0.0);
                let mut high = dimension(number("beta_slow").unwrap_or(1.0)).ceil().min(f64::from(head_dim - 1));
                if low == high {
                    high += 0.001;
                }
                let magnitude = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
                let scale = magnitude(number("mscale").unwrap_or(1.0)) / magnitude(number("mscale_all_dim").unwrap_or(0.0));
                let frequencies = exponents().enumerate().map(|(index, frequency)| {
                    let kept = 1.0 - ((index as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    let stretched = factor * frequency;
                    (stretched * frequency) / (stretched * kept + frequency * (1.0 - kept))
                });
                make(Kind::Frequencies { frequencies: array(frequencies), scale: scale as f32 })
            }
            "proportional" => {
                let turned = number("partial_rotary_factor").unwrap_or(1.0) * f64::from(head_dim);
                let turned = 2 * (turned as i32 / 2);
                if !(0..=head_dim).contains(&turned) {
                    return Err(format!("partial_rotary_factor makes {turned} of {head_dim} numbers of a head turn"));
                }
                let frequencies = partial(base as f32, number("factor").unwrap_or(1.0) as f32, turned, head_dim);
                make(Kind::Frequencies { frequencies: frequencies.map_err(|error| error.to_string())?, scale: 1.0 })
            }
            other => Err(format!(
                "rope_scaling of type '{other}' is not yet supported (default, linear, dynamic, llama3, yarn, proportional are)"
            )),
        }
    }

    /// Whether a key depends on how long its sequence will be, and not on what stands before it alone.
    pub fn depends_on_length(&self) -> bool {
        matches!(self.kind, Kind::Dynamic { .. })
    }

    /// The same in numbers, for a pass on the CPU's cores.
    pub fn rotation(&self) -> Result<Rotation, EngineError> {
        let kind = match &self.kind {
            Kind::Plain { base, scale } => {
                let half = self.head_dim / 2;
                let frequencies = (0..half).map(|index| (-f64::from(index) / f64::from(half) * f64::from(*base).ln()).exp() as f32);
                RotationKind::Fixed { frequencies: frequencies.collect(), position_scale: *scale, scale: 1.0 }
            }
            Kind::Frequencies { frequencies, scale } => {
                let frequencies = ffi::numbers(frequencies)?.iter().map(|frequency| 1.0 / frequency).collect();
                RotationKind::Fixed { frequencies, position_scale: 1.0, scale: *scale }
            }
            Kind::Dynamic { base, factor, trained_tokens } => RotationKind::Dynamic {
                head_dim: self.head_dim as usize,
                base: *base,
                factor: *factor,
                trained_tokens: *trained_tokens,
            },
        };
        Ok(Rotation { neighbours: self.traditional, kind })
    }

    /// Rotates (N, heads, 1, D) to the positions of `step`.
    pub fn forward(&self, x: &Array, step: &Step) -> Result<Array, EngineError> {
        match &self.kind {
            Kind::Plain { base, scale } => self.rotate(x, Some(*base), *scale, step, None),
            Kind::Frequencies { frequencies, scale } => {
                if *scale == 1.0 {
                    return self.rotate(x, None, 1.0, step, Some(frequencies));
                }
                let scaled = x.multiply(Array::from_f32(*scale).as_dtype(x.dtype())?)?;
                self.rotate(&scaled, None, 1.0, step, Some(frequencies))
            }
            Kind::Dynamic { base, factor, trained_tokens } => {
                if step.reaches().iter().all(|&reach| f64::from(reach) <= *trained_tokens) {
                    return self.rotate(x, Some(*base as f32), 1.0, step, None);
                }
                let dims = f64::from(self.head_dim);
                let bases = step.reaches().iter().map(|&reach| {
                    let tokens = f64::from(reach).max(*trained_tokens);
                    base * (factor * tokens / trained_tokens - (factor - 1.0)).powf(dims / (dims - 2.0))
                });
                self.rotate_each(x, step.positions(), bases)
            }
        }
    }

    fn rotate(
        &self,
        x: &Array,
        base: Option<f32>,
        scale: f32,
        step: &Step,
        frequencies: Option<&Array>,
    ) -> Result<Array, EngineError> {
        Ok(fast::rope_dynamic(x, self.head_dim, self.traditional, base, scale, step.positions(), frequencies)?)
    }

    /// A base for each token, which the fused operation does not take.
    fn rotate_each(&self, x: &Array, positions: &Array, bases: impl Iterator<Item = f64>) -> Result<Array, EngineError> {
        if self.traditional {
            return Err(EngineError::Mlx("dynamic rope over interleaved pairs is not supported".into()));
        }
        let (dims, tokens) = (self.head_dim, x.dim(0));
        let frequencies: Vec<f32> = bases
            .flat_map(|base| (0..dims).step_by(2).map(move |index| base.powf(-f64::from(index) / f64::from(dims)) as f32))
            .collect();
        // (N, 1, 1, D / 2)
        let frequencies = Array::from_slice(&frequencies, &[tokens, 1, 1, dims / 2]);
        let angles = positions.as_dtype(Dtype::Float32)?.reshape(&[tokens, 1, 1, 1])?.multiply(frequencies)?;
        let (cosine, sine) = (angles.cos()?.as_dtype(x.dtype())?, angles.sin()?.as_dtype(x.dtype())?);
        let halves = x.split_equal(2, -1)?;
        let first = halves[0].multiply(&cosine)?.subtract(halves[1].multiply(&sine)?)?;
        let second = halves[0].multiply(&sine)?.add(halves[1].multiply(&cosine)?)?;
        Ok(ops::concatenate(&[first, second], -1)?)
    }
}

/// Frequencies of the first `turned` numbers of a head, as of a rope over all of it; the rest stands still (mlx-vlm's
/// `ProportionalRoPE`).
fn partial(base: f32, factor: f32, turned: i32, head_dim: i32) -> Result<Array, mlx_rs::error::Exception> {
    let exponents: Vec<f32> = (0..turned).step_by(2).map(|index| index as f32 / head_dim as f32).collect();
    let still = vec![f32::INFINITY; ((head_dim - turned) / 2) as usize];
    let still = Array::from_slice(&still, &[still.len() as i32]);
    if exponents.is_empty() {
        return Ok(still);
    }
    // By MLX, as the reference has it: its power is not the exact one.
    let exponents = Array::from_slice(&exponents, &[exponents.len() as i32]);
    let frequencies = Array::from_f32(base).power(exponents)?.multiply(Array::from_f32(factor))?;
    ops::concatenate(&[frequencies, still], 0)
}

fn array(values: impl Iterator<Item = f64>) -> Array {
    let values: Vec<f32> = values.map(|value| value as f32).collect();
    Array::from_slice(&values, &[values.len() as i32])
}
