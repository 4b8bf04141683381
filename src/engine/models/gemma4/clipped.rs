//! Linear layers whose input and output are held within the ranges that they had in training.
//!
//! Source: `Gemma4ClippableLinear` of transformers' `modeling_gemma4.py`.

use mlx_rs::{Array, ops};

use super::super::Linear;
use crate::engine::{
    EngineError,
    weights::{Loader, WeightError},
};

const BOUNDS: [&str; 4] = ["input_min", "input_max", "output_min", "output_max"];

/// `clip(clip(x) @ weightᵀ)`, (…, in) -> (…, out), without a bias.
pub struct ClippedLinear {
    linear: Linear,
    /// In the order of [`BOUNDS`], scalars; none where the configuration has them off.
    bounds: Option<[Array; 4]>,
}

impl ClippedLinear {
    /// `module.linear.weight` (output, input), and `module.input_min` to `module.output_max` where `clipped` says so. Where it does
    /// not, bounds that the file holds count for nothing.
    pub fn load(loader: &mut Loader, module: &str, input: i32, output: i32, clipped: bool) -> Result<Self, WeightError> {
        let linear = loader.linear(&format!("{module}.linear"), input, output, false)?;
        if !clipped {
            for bound in BOUNDS {
                loader.ignore(&format!("{module}.{bound}"));
            }
            return Ok(Self { linear, bounds: None });
        }
        let mut bound = |index: usize| loader.tensor(&format!("{module}.{}", BOUNDS[index]), &[]);
        let bounds = Some([bound(0)?, bound(1)?, bound(2)?, bound(3)?]);
        Ok(Self { linear, bounds })
    }

    pub fn forward(&self, x: &Array) -> Result<Array, EngineError> {
        let Some([input_min, input_max, output_min, output_max]) = &self.bounds else {
            return self.linear.forward(x);
        };
        let product = self.linear.forward(&ops::clip(x, (input_min, input_max))?)?;
        Ok(ops::clip(product, (output_min, output_max))?)
    }
}
