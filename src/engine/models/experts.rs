//! Mixtures of experts: feed-forward halves of which each token takes a few (arXiv:1701.06538).
//!
//! As mlx-lm's `switch_layers.py`.

use mlx_rs::{Array, ops};

use super::{
    layers::{Activation, activated},
    quantized::QuantizedMatrix,
};
use crate::engine::EngineError;

/// From so many on, products go by expert rather than by token.
const SORTED_MIN: i32 = 64;

/// One matrix for each expert.
pub enum ExpertLinear {
    /// (experts, out, in)
    Dense(Array),
    Quantized(QuantizedMatrix),
}

impl ExpertLinear {
    /// `x[i] @ weight[experts[i]]ᵀ`: (…, 1, in), with leading axes that those of `experts` extend -> (experts…, 1, out)
    fn forward(&self, x: &Array, experts: &Array, sorted: bool) -> Result<Array, EngineError> {
        match self {
            Self::Dense(weight) => Ok(ops::gather_mm(x, weight.swap_axes(-1, -2)?, None, experts, sorted)?),
            Self::Quantized(matrix) => matrix.product_of_experts(x, experts, sorted),
        }
    }
}

/// `down(activation(gate(x)) × up(x))` of every expert.
pub struct Experts {
    pub gate_proj: ExpertLinear,
    pub up_proj: ExpertLinear,
    pub down_proj: ExpertLinear,
    pub activation: Activation,
}

impl Experts {
    /// (N, hidden) with `experts` (N, k) of each token -> (N, k, hidden)
    pub fn forward(&self, x: &Array, experts: &Array) -> Result<Array, EngineError> {
        let (tokens, hidden, taken) = (x.dim(0), x.dim(1), experts.dim(1));
        if tokens * taken < SORTED_MIN {
            let outputs = self.each(&x.reshape(&[tokens, 1, 1, hidden])?, experts, false)?;
            return Ok(outputs.reshape(&[tokens, taken, hidden])?);
        }
        let experts = experts.reshape(&[tokens * taken])?;
        let order = ops::argsort_axis(&experts, 0)?;
        let back = ops::argsort_axis(&order, 0)?;
        let of_order = x.take_axis(order.floor_divide(Array::from_int(taken).as_dtype(order.dtype())?)?, 0)?;
        let of_order = of_order.reshape(&[tokens * taken, 1, hidden])?;
        let outputs = self.each(&of_order, &experts.take_axis(&order, 0)?, true)?;
        Ok(outputs.take_axis(back, 0)?.reshape(&[tokens, taken, hidden])?)
    }

    fn each(&self, x: &Array, experts: &Array, sorted: bool) -> Result<Array, EngineError> {
        let up = self.up_proj.forward(x, experts, sorted)?;
        let gate = self.gate_proj.forward(x, experts, sorted)?;
        self.down_proj.forward(&activated(self.activation, &gate)?.multiply(up)?, experts, sorted)
    }
}
