//! The layers that families share.

use mlx_rs::{Array, fast, ops};

use super::quantized::QuantizedMatrix;
use crate::engine::{
    EngineError, ffi,
    host::{HostMatrix, Packed, Write, install},
    weights::{Loader, WeightError},
};

/// `x @ weightᵀ + bias`, (…, in) -> (…, out).
pub enum Linear {
    /// `weight` is held transposed, (in, out).
    Dense {
        weight: Array,
        bias: Option<Array>,
    },
    Quantized {
        matrix: QuantizedMatrix,
        bias: Option<Array>,
    },
    /// Packed for this machine's cores, as float32 results.
    Host {
        matrix: HostMatrix,
        bias: Option<Array>,
    },
}

/// `x @ weightᵀ` in float32, computed before this returns.
fn product_on_host(x: &Array, matrix: &HostMatrix) -> Result<Array, EngineError> {
    let width = matrix.inputs();
    let rows = x.size().checked_div(width).unwrap_or(0);
    let mut product = vec![0.0; rows * matrix.outputs()];
    if rows > 0 {
        let x = ffi::numbers(x)?;
        let mut packed = Packed::default();
        install(|| {
            packed.pack(x, width, width);
            matrix.product(&packed, None, Write::Set, &mut product);
        });
    }
    let mut shape = x.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = matrix.outputs() as i32;
    }
    Ok(Array::from_slice(&product, &shape))
}

impl Linear {
    pub fn forward(&self, x: &Array) -> Result<Array, EngineError> {
        match self {
            Self::Dense { weight, bias: None } => Ok(x.matmul(weight)?),
            Self::Dense { weight, bias: Some(bias) } => Ok(ops::addmm(bias, x, weight, None, None)?),
            Self::Quantized { matrix, bias } => {
                let product = matrix.product(x)?;
                Ok(match bias {
                    Some(bias) => product.add(bias)?,
                    None => product,
                })
            }
            Self::Host { matrix, bias } => {
                let product = product_on_host(x, matrix)?;
                Ok(match bias {
                    Some(bias) => product.add(bias)?,
                    None => product,
                })
            }
        }
    }
}

impl Linear {
    /// `residual + forward(x)`, in one operation where that is one.
    pub fn forward_add(&self, x: &Array, residual: &Array) -> Result<Array, EngineError> {
        match self {
            Self::Dense { weight, bias: None } => Ok(ops::addmm(residual, x, weight, None, None)?),
            other => Ok(residual.add(other.forward(x)?)?),
        }
    }

    /// One product whose outputs are those of `parts` one after the other; none where they are stored in different ways. A part
    /// without a bias adds 0 beside those that have one.
    pub fn merged(parts: &[&Self]) -> Result<Option<Self>, WeightError> {
        let stacked = |arrays: Vec<&Array>| -> Result<Array, WeightError> {
            let stacked = ops::concatenate(&arrays, 0)?;
            stacked.eval()?;
            Ok(stacked)
        };
        let bias = match parts.iter().find_map(|part| part.bias()) {
            None => None,
            Some(first) => {
                let biases = parts.iter().map(|part| match (part.bias(), part.outputs()) {
                    (Some(bias), _) => Ok(Some(bias.clone())),
                    (None, Some(outputs)) => Ok(Some(ops::zeros_dtype(&[outputs], first.dtype())?)),
                    (None, None) => Ok(None),
                });
                let Some(biases) = biases.collect::<Result<Option<Vec<_>>, WeightError>>()? else { return Ok(None) };
                Some(stacked(biases.iter().collect())?)
            }
        };
        let dense: Vec<Array> =
            parts.iter().filter_map(|part| if let Self::Dense { weight, .. } = part { Some(weight.t()) } else { None }).collect();
        if dense.len() == parts.len() {
            let weight = stacked(dense.iter().collect())?.t();
            weight.eval()?;
            return Ok(Some(Self::Dense { weight, bias }));
        }
        let (mut weights, mut scales, mut offsets, mut kind) = (Vec::new(), Vec::new(), Vec::new(), None);
        for part in parts {
            let Self::Quantized { matrix, .. } = part else { return Ok(None) };
            if *kind.get_or_insert((matrix.kind, matrix.dtype)) != (matrix.kind, matrix.dtype) {
                return Ok(None);
            }
            weights.push(&matrix.weight);
            scales.push(&matrix.scales);
            offsets.extend(&matrix.biases);
        }
        let Some((kind, dtype)) = kind else { return Ok(None) };
        let biases = if offsets.is_empty() { None } else { Some(stacked(offsets)?) };
        let matrix = QuantizedMatrix { weight: stacked(weights)?, scales: stacked(scales)?, biases, kind, dtype };
        Ok(Some(Self::Quantized { matrix, bias }))
    }

    /// None of a matrix that MLX does not hold.
    fn outputs(&self) -> Option<i32> {
        match self {
            Self::Dense { weight, .. } => Some(weight.dim(1)),
            Self::Quantized { matrix, .. } => Some(matrix.weight.dim(0)),
            Self::Host { .. } => None,
        }
    }

    fn bias(&self) -> Option<&Array> {
        match self {
            Self::Dense { bias, .. } | Self::Quantized { bias, .. } | Self::Host { bias, .. } => bias.as_ref(),
        }
    }
}

/// Rows of a table by token id, and, where input and output are tied, the output product.
pub enum Embedding {
    /// (vocabulary, hidden)
    Dense(Array),
    Quantized(QuantizedMatrix),
    Host(HostMatrix),
}

impl Embedding {
    /// (N) token ids -> (N, hidden)
    pub fn forward(&self, tokens: &Array) -> Result<Array, EngineError> {
        match self {
            Self::Dense(weight) => Ok(weight.take_axis(tokens, 0)?),
            Self::Quantized(matrix) => matrix.rows(tokens),
            Self::Host(matrix) => {
                let width = matrix.inputs();
                let tokens = ffi::integers(tokens)?;
                let mut rows = vec![0.0; tokens.len() * width];
                for (row, &token) in rows.chunks_exact_mut(width).zip(tokens) {
                    matrix.row(token as usize, row);
                }
                Ok(Array::from_slice(&rows, &[tokens.len() as i32, width as i32]))
            }
        }
    }

    /// (N, hidden) -> (N, vocabulary)
    pub fn as_linear(&self, x: &Array) -> Result<Array, EngineError> {
        match self {
            Self::Dense(weight) => Ok(x.matmul(weight.t())?),
            Self::Quantized(matrix) => matrix.product(x),
            Self::Host(matrix) => product_on_host(x, matrix),
        }
    }
}

/// Hidden states into logits: by a matrix of its own, or by the embedding where input and output are tied.
pub struct Output(pub(super) Option<Linear>);

impl Output {
    /// Without `tied`, as a configuration may be, the file decides by whether it holds `lm_head`.
    pub fn load(loader: &mut Loader, tied: Option<bool>, hidden: i32, vocabulary: i32) -> Result<Self, WeightError> {
        if tied.unwrap_or(!loader.has("lm_head.weight")) {
            loader.ignore("lm_head.weight");
            return Ok(Self(None));
        }
        Ok(Self(Some(loader.linear("lm_head", hidden, vocabulary, false)?)))
    }

    /// (N, hidden) -> (N, vocabulary)
    pub fn forward(&self, embedding: &Embedding, hidden: &Array) -> Result<Array, EngineError> {
        match &self.0 {
            Some(lm_head) => lm_head.forward(hidden),
            None => embedding.as_linear(hidden),
        }
    }
}

/// Root mean square normalization over the last axis.
pub struct RmsNorm {
    pub weight: Array,
    pub eps: f32,
}

impl RmsNorm {
    pub fn forward(&self, x: &Array) -> Result<Array, EngineError> {
        Ok(fast::rms_norm(x, Some(&self.weight), self.eps)?)
    }
}

/// Normalization to mean 0 and variance 1 over the last axis (arXiv:1607.06450).
pub struct LayerNorm {
    pub weight: Array,
    pub bias: Array,
    pub eps: f32,
}

impl LayerNorm {
    pub fn forward(&self, x: &Array) -> Result<Array, EngineError> {
        Ok(fast::layer_norm(x, &self.weight, &self.bias, self.eps)?)
    }
}

/// x × sigmoid(x)
pub fn silu(x: &Array) -> Result<Array, EngineError> {
    Ok(x.multiply(ops::sigmoid(x)?)?)
}

/// 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), the approximation that Gemma uses (arXiv:1606.08415).
pub fn gelu_tanh(x: &Array) -> Result<Array, EngineError> {
    let scalar = |value: f32| Array::from_f32(value).as_dtype(x.dtype());
    let cubed = x.multiply(x)?.multiply(x)?;
    let inner = x.add(cubed.multiply(scalar(0.044_715)?)?)?.multiply(scalar((2.0 / std::f32::consts::PI).sqrt())?)?;
    Ok(x.multiply(scalar(0.5)?)?.multiply(ops::tanh(inner)?.add(scalar(1.0)?)?)?)
}

/// 0.5 x (1 + erf(x / √2)), as it is defined (arXiv:1606.08415).
pub fn gelu(x: &Array) -> Result<Array, EngineError> {
    let scalar = |value: f32| Array::from_f32(value).as_dtype(x.dtype());
    let erf = ops::erf(x.multiply(scalar(std::f32::consts::FRAC_1_SQRT_2)?)?)?;
    Ok(x.multiply(erf.add(scalar(1.0)?)?)?.multiply(scalar(0.5)?)?)
}

/// (N, heads × D) -> (N, heads, 1, D): each token is a sequence of its own to the rope.
pub fn split_heads(x: &Array, heads: i32, head_dim: i32) -> Result<Array, EngineError> {
    Ok(x.reshape(&[x.dim(0), heads, 1, head_dim])?)
}

/// What a gated feed-forward layer applies to its gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    Silu,
    GeluTanh,
}

pub fn activated(activation: Activation, x: &Array) -> Result<Array, EngineError> {
    match activation {
        Activation::Silu => silu(x),
        Activation::GeluTanh => gelu_tanh(x),
    }
}

/// `down(activation(gate(x)) × up(x))` (arXiv:2002.05202).
pub struct GatedMlp {
    pub(super) gate_up: GateUp,
    pub(super) down_proj: Linear,
    pub(super) activation: Activation,
}

/// The products into the gated space, as with queries, keys and values one where that is faster.
pub(super) enum GateUp {
    Merged { gate_up_proj: Linear, intermediate: i32 },
    Separate { gate_proj: Linear, up_proj: Linear },
}

impl GatedMlp {
    pub fn load(
        loader: &mut Loader,
        module: &str,
        hidden: i32,
        intermediate: i32,
        bias: bool,
        activation: Activation,
    ) -> Result<Self, WeightError> {
        let gate_proj = loader.linear(&format!("{module}.gate_proj"), hidden, intermediate, bias)?;
        let up_proj = loader.linear(&format!("{module}.up_proj"), hidden, intermediate, bias)?;
        let gate_up = match loader.merges().then(|| Linear::merged(&[&gate_proj, &up_proj])).transpose()?.flatten() {
            Some(gate_up_proj) => GateUp::Merged { gate_up_proj, intermediate },
            None => GateUp::Separate { gate_proj, up_proj },
        };
        let down_proj = loader.linear(&format!("{module}.down_proj"), intermediate, hidden, bias)?;
        Ok(Self { gate_up, down_proj, activation })
    }

    /// The products before and after the middle, where the first is one.
    pub fn merged(&self) -> Option<(&Linear, &Linear)> {
        match &self.gate_up {
            GateUp::Merged { gate_up_proj, .. } => Some((gate_up_proj, &self.down_proj)),
            GateUp::Separate { .. } => None,
        }
    }

    pub fn forward(&self, x: &Array) -> Result<Array, EngineError> {
        let (gate, up) = match &self.gate_up {
            GateUp::Separate { gate_proj, up_proj } => (gate_proj.forward(x)?, up_proj.forward(x)?),
            GateUp::Merged { gate_up_proj, intermediate } => {
                let both = gate_up_proj.forward(x)?;
                let (rows, middle) = (both.dim(0), *intermediate);
                (ffi::slice(&both, &[0, 0], &[rows, middle])?, ffi::slice(&both, &[0, middle], &[rows, 2 * middle])?)
            }
        };
        self.down_proj.forward(&activated(self.activation, &gate)?.multiply(up)?)
    }
}
