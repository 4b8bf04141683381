//! Matrices as MLX quantizes them.
//!
//! Modes: MLX's `mx.quantize`; MX formats are those of the Open Compute Project's "Microscaling Formats (MX) Specification", NVFP4
//! is NVIDIA's.

use std::ffi::CStr;

use mlx_rs::{Array, Dtype};

use crate::engine::{
    EngineError,
    ffi::{self, PackedMatrix, Packing},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Integers, with a floating-point scale and offset a group.
    Affine,
    /// 4-bit floats (E2M1), with a power of two a group.
    Mxfp4,
    /// 8-bit floats (E4M3), with a power of two a group.
    Mxfp8,
    /// 4-bit floats (E2M1), with an 8-bit float (E4M3) a group.
    Nvfp4,
}

impl Mode {
    pub const NAMES: &str = "affine, mxfp4, mxfp8 and nvfp4";

    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "affine" => Self::Affine,
            "mxfp4" => Self::Mxfp4,
            "mxfp8" => Self::Mxfp8,
            "nvfp4" => Self::Nvfp4,
            _ => return None,
        })
    }

    fn name(self) -> &'static CStr {
        match self {
            Self::Affine => c"affine",
            Self::Mxfp4 => c"mxfp4",
            Self::Mxfp8 => c"mxfp8",
            Self::Nvfp4 => c"nvfp4",
        }
    }

    /// Group size and bits, where the mode leaves no choice.
    pub fn only(self) -> Option<(i32, i32)> {
        match self {
            Self::Affine => None,
            Self::Mxfp4 => Some((32, 4)),
            Self::Mxfp8 => Some((32, 8)),
            Self::Nvfp4 => Some((16, 4)),
        }
    }
}

/// How a matrix is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantized {
    pub group_size: i32,
    pub bits: i32,
    pub mode: Mode,
}

/// Packed `weight` (…, out, in × bits / 32), `scales` and, of the affine mode alone, `biases` (…, out, in / group_size).
pub struct QuantizedMatrix {
    pub weight: Array,
    pub scales: Array,
    pub biases: Option<Array>,
    pub kind: Quantized,
    /// What rows of it are written out in; as MLX chooses where there is none.
    pub dtype: Option<Dtype>,
}

impl QuantizedMatrix {
    fn packed(&self) -> PackedMatrix<'_> {
        let Quantized { group_size, bits, mode } = self.kind;
        let packing = Packing { group_size, bits, mode: mode.name() };
        PackedMatrix { weight: &self.weight, scales: &self.scales, biases: self.biases.as_ref(), packing }
    }

    /// `x @ weightᵀ`, (…, in) -> (…, out)
    pub fn product(&self, x: &Array) -> Result<Array, EngineError> {
        ffi::quantized_matmul(x, self.packed())
    }

    /// `x[i] @ weight[experts[i]]ᵀ`, with experts in the first axis; `sorted` where they ascend.
    pub fn product_of_experts(&self, x: &Array, experts: &Array, sorted: bool) -> Result<Array, EngineError> {
        ffi::gather_quantized_matmul(x, self.packed(), experts, sorted)
    }

    /// (N) rows -> (N, in), written out.
    pub fn rows(&self, rows: &Array) -> Result<Array, EngineError> {
        let of = |array: &Array| array.take_axis(rows, 0);
        let biases = self.biases.as_ref().map(of).transpose()?;
        let (weight, scales) = (of(&self.weight)?, of(&self.scales)?);
        Self { weight, scales, biases, ..*self }.written_out()
    }

    /// All of it, written out.
    pub fn written_out(&self) -> Result<Array, EngineError> {
        // The affine mode computes in the format of its scales.
        ffi::dequantize(self.packed(), self.dtype.filter(|_| self.kind.mode != Mode::Affine))
    }
}
