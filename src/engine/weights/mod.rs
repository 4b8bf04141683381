//! Strict loading: every tensor a family asks for must be there in the right shape, and none may be left over. All problems are
//! told at once.

mod gemma4;
mod gguf;
mod npz;
mod pack;
#[cfg(test)]
mod tests;
mod whisper;

use std::{collections::BTreeMap, path::PathBuf};

use mlx_rs::{Array, Dtype, ops};
use serde_json::Value;
use thiserror::Error;

use super::{
    host::HostMatrix,
    models::{Embedding, ExpertLinear, LayerNorm, Linear, Mode, Quantized, QuantizedMatrix, RmsNorm},
    reason,
};

#[derive(Debug, Error)]
pub enum WeightError {
    #[error("failed to read the weights in {path}: {reason}")]
    Read { path: PathBuf, reason: String },
    #[error("the configuration of this model does not fit: {0}")]
    Config(String),
    #[error("the weights of this model do not fit its configuration:\n{}", list(.0))]
    Tensors(Vec<String>),
    #[error("MLX failed while loading weights: {0}")]
    Mlx(String),
}

impl From<mlx_rs::error::Exception> for WeightError {
    fn from(error: mlx_rs::error::Exception) -> Self {
        Self::Mlx(reason(&error))
    }
}

/// At most this many problems are spelled out.
const PROBLEMS_SHOWN_MAX: usize = 24;

fn list(problems: &[String]) -> String {
    let mut text = String::new();
    for problem in problems.iter().take(PROBLEMS_SHOWN_MAX) {
        text.push_str("  - ");
        text.push_str(problem);
        text.push('\n');
    }
    if problems.len() > PROBLEMS_SHOWN_MAX {
        text.push_str(&format!("  … and {} more\n", problems.len() - PROBLEMS_SHOWN_MAX));
    }
    text.pop();
    text
}

/// In which form weights are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Floating-point weights are converted to it; `None` keeps them as stored.
    pub dtype: Option<Dtype>,
    /// Quantized weights are expanded to dense ones.
    pub dequantize: bool,
    /// Products over the same input become one.
    pub merge: bool,
    /// Weights of linear layers and embeddings are packed, as they are stored, for products on the CPU's cores in float32.
    pub host: bool,
}

/// The tensors of a model, by Hugging Face name, taken one by one.
pub struct Loader {
    tensors: BTreeMap<String, Array>,
    quantization: Quantization,
    policy: Policy,
    problems: Vec<String>,
    /// Tensors are looked at and not read: [`Loader::look`].
    looks: bool,
}

/// `quantization` of an MLX config.json: one default, and overrides by module.
#[derive(Default)]
struct Quantization {
    default: Option<Quantized>,
    overrides: BTreeMap<String, Option<Quantized>>,
}

impl Loader {
    /// Reads one `.gguf` or `.npz` file, or all of a folder's `.safetensors`, whose tensors stay on disk until they are taken.
    pub fn open(files: &[PathBuf], config: &Value, policy: Policy) -> Result<Self, WeightError> {
        let mut tensors = BTreeMap::new();
        let mut problems = Vec::new();
        let sidecar = if gemma4::is_one(config) { gemma4::sidecar(files) } else { None };
        for file in files.iter().chain(&sidecar) {
            let read = |reason: String| WeightError::Read { path: file.clone(), reason };
            if file.extension().is_some_and(|extension| extension == "gguf") {
                tensors.extend(gguf::read(file, config)?);
                continue;
            }
            if file.extension().is_some_and(|extension| extension == "npz") {
                tensors.extend(npz::read(file)?);
                continue;
            }
            let loaded = Array::load_safetensors(file).map_err(|error| read(reason(&error)))?;
            #[expect(clippy::iter_over_hash_type, reason = "what goes round ends in a sorted map")]
            for (name, tensor) in loaded {
                if tensors.insert(name.clone(), tensor).is_some() {
                    problems.push(format!("{name} stands in more than one file"));
                }
            }
        }
        // Frequencies that old checkpoints carry, which every family computes itself.
        tensors.retain(|name, _| !name.ends_with("rotary_emb.inv_freq"));
        let mut quantization = Quantization::read(config)?;
        if config.get("model_type").and_then(Value::as_str) == Some("whisper") {
            tensors = whisper::rename(tensors);
            quantization.overrides = whisper::rename(quantization.overrides);
        }
        if gemma4::is_one(config) {
            tensors = gemma4::rename(tensors);
            quantization.overrides = gemma4::rename(quantization.overrides);
        }
        Ok(Self { tensors, quantization, policy, problems, looks: false })
    }

    /// As [`Loader::open`] of `.safetensors`, for a model that is built to learn whether its weights fit and computes nothing:
    /// nothing but the files' headers is read, and what is built holds no memory.
    pub fn look(files: &[PathBuf], config: &Value) -> Result<Self, WeightError> {
        let policy = Policy { dtype: None, dequantize: false, merge: false, host: false };
        Ok(Self { looks: true, ..Self::open(files, config, policy)? })
    }

    /// Computes a weight at once, so that what it was made of can be let go.
    pub fn settle(&self, weight: &Array) -> Result<(), WeightError> {
        if !self.looks {
            weight.eval()?;
        }
        Ok(())
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// See [`Policy::merge`].
    pub fn merges(&self) -> bool {
        self.policy.merge
    }

    /// See [`Policy::host`].
    pub fn on_host(&self) -> bool {
        self.policy.host
    }

    /// Has what `load` takes kept in float32, whatever the rest is kept in.
    pub fn in_float32<T>(&mut self, load: impl FnOnce(&mut Self) -> Result<T, WeightError>) -> Result<T, WeightError> {
        let dtype = self.policy.dtype.replace(Dtype::Float32);
        let loaded = load(self);
        self.policy.dtype = dtype;
        loaded
    }

    /// Parts `module.weight` (output, input) along its inputs, as `module.0`, `module.1` and so on, the bias going to the first;
    /// whether it is one that can be parted: dense, and of this shape.
    pub fn part_inputs(&mut self, module: &str, [output, input]: [i32; 2], parts: i32) -> Result<bool, WeightError> {
        let name = format!("{module}.weight");
        let dense = !self.has(&format!("{module}.scales")) && parts > 0 && input % parts == 0;
        let Some(whole) = self.tensors.get(&name).filter(|tensor| dense && tensor.shape() == [output, input]).cloned() else {
            return Ok(false);
        };
        self.tensors.remove(&name);
        let width = input / parts;
        for part in 0..parts {
            let columns = Array::from_iter(part * width..(part + 1) * width, &[width]);
            self.tensors.insert(format!("{module}.{part}.weight"), whole.take_axis(columns, 1)?);
        }
        if let Some(bias) = self.tensors.remove(&format!("{module}.bias")) {
            self.tensors.insert(format!("{module}.0.bias"), bias);
        }
        Ok(true)
    }

    /// Drops a tensor that the model does not need.
    pub fn ignore(&mut self, name: &str) {
        self.tensors.remove(name);
    }

    /// Whether there is a tensor left whose name is one of these.
    pub fn has_where(&self, wanted: impl Fn(&str) -> bool) -> bool {
        self.tensors.keys().any(|name| wanted(name))
    }

    /// Drops every tensor whose name is one that the model does not need.
    pub fn ignore_where(&mut self, unneeded: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| !unneeded(name));
    }

    /// Plants a fault: nothing where there was something.
    #[cfg(test)]
    pub fn zero(&mut self, name: &str) {
        let tensor = self.tensors.get_mut(name).unwrap_or_else(|| panic!("there is no {name}"));
        *tensor = ops::zeros::<f32>(tensor.shape()).unwrap();
    }

    /// A floating-point tensor of this shape.
    pub fn tensor(&mut self, name: &str, shape: &[i32]) -> Result<Array, WeightError> {
        let Some(tensor) = self.tensors.remove(name) else {
            self.problems.push(format!("{name} is missing"));
            return Ok(ops::zeros::<f32>(shape)?);
        };
        if tensor.shape() != shape {
            self.problems.push(format!("{name} has shape {:?}, the configuration says {shape:?}", tensor.shape()));
            return Ok(ops::zeros::<f32>(shape)?);
        }
        self.float(name, tensor)
    }

    pub fn optional(&mut self, name: &str, shape: &[i32]) -> Result<Option<Array>, WeightError> {
        if self.has(name) { self.tensor(name, shape).map(Some) } else { Ok(None) }
    }

    pub fn rms_norm(&mut self, module: &str, size: i32, eps: f32) -> Result<RmsNorm, WeightError> {
        Ok(RmsNorm { weight: self.tensor(&format!("{module}.weight"), &[size])?, eps })
    }

    /// `module.weight` and `module.bias`.
    pub fn layer_norm(&mut self, module: &str, size: i32, eps: f32) -> Result<LayerNorm, WeightError> {
        let weight = self.tensor(&format!("{module}.weight"), &[size])?;
        Ok(LayerNorm { weight, bias: self.tensor(&format!("{module}.bias"), &[size])?, eps })
    }

    /// `module.weight` of a convolution over time, (output, kernel, input): as MLX has it, or with the last two exchanged, as
    /// PyTorch has it.
    pub fn conv1d(&mut self, module: &str, input: i32, output: i32, kernel: i32) -> Result<Array, WeightError> {
        let name = format!("{module}.weight");
        if let Some(tensor) = self.tensors.get_mut(&name)
            && tensor.shape() == [output, input, kernel]
        {
            *tensor = tensor.transpose_axes(&[0, 2, 1])?;
        }
        self.tensor(&name, &[output, kernel, input])
    }

    /// As [`Loader::conv1d`] over two axes, (output, kernel, kernel, input), where PyTorch has (output, input, kernel, kernel).
    pub fn conv2d(&mut self, module: &str, input: i32, output: i32, kernel: i32) -> Result<Array, WeightError> {
        let (name, shape) = (format!("{module}.weight"), [output, kernel, kernel, input]);
        if let Some(tensor) = self.tensors.get_mut(&name)
            && tensor.shape() == [output, input, kernel, kernel]
            && tensor.shape() != shape
        {
            *tensor = tensor.transpose_axes(&[0, 2, 3, 1])?;
        }
        self.tensor(&name, &shape)
    }

    /// `module.weight` (output, input), dense or quantized, and `module.bias` (output) where `bias` says so.
    pub fn linear(&mut self, module: &str, input: i32, output: i32, bias: bool) -> Result<Linear, WeightError> {
        let bias = if bias { Some(self.tensor(&format!("{module}.bias"), &[output])?) } else { None };
        Ok(match self.matrix(module, output, input)? {
            Matrix::Dense(weight) => {
                let weight = weight.t();
                self.settle(&weight)?;
                Linear::Dense { weight, bias }
            }
            Matrix::Quantized(matrix) => Linear::Quantized { matrix, bias },
            Matrix::Host(matrix) => Linear::Host { matrix, bias },
        })
    }

    /// `module.weight` (vocabulary, hidden), dense or quantized.
    pub fn embedding(&mut self, module: &str, vocabulary: i32, hidden: i32) -> Result<Embedding, WeightError> {
        Ok(match self.matrix(module, vocabulary, hidden)? {
            Matrix::Dense(weight) => Embedding::Dense(weight),
            Matrix::Quantized(matrix) => Embedding::Quantized(matrix),
            Matrix::Host(matrix) => Embedding::Host(matrix),
        })
    }

    /// `module.weight` (experts, output, input), dense or quantized: a matrix for each expert.
    pub fn experts(&mut self, module: &str, experts: i32, input: i32, output: i32) -> Result<ExpertLinear, WeightError> {
        let shape = [experts, output, input];
        let name = format!("{module}.weight");
        let Some(scales) = self.tensors.remove(&format!("{module}.scales")) else {
            return Ok(ExpertLinear::Dense(self.tensor(&name, &shape)?));
        };
        let Some(quantized) = self.quantized(module, &shape, scales)? else {
            return Ok(ExpertLinear::Dense(ops::zeros::<f32>(&shape)?));
        };
        if self.policy.dequantize || self.policy.host {
            return Ok(ExpertLinear::Dense(self.dense(quantized)?));
        }
        Ok(ExpertLinear::Quantized(self.kept(&name, quantized)?))
    }

    fn matrix(&mut self, module: &str, rows: i32, columns: i32) -> Result<Matrix, WeightError> {
        let name = format!("{module}.weight");
        let Some(scales) = self.tensors.remove(&format!("{module}.scales")) else {
            if self.policy.host {
                let dtype = std::mem::take(&mut self.policy.dtype);
                let dense = self.tensor(&name, &[rows, columns]);
                self.policy.dtype = dtype;
                return Ok(Matrix::Host(pack::dense(&dense?, rows, columns)?));
            }
            return Ok(Matrix::Dense(self.tensor(&name, &[rows, columns])?));
        };
        let Some(quantized) = self.quantized(module, &[rows, columns], scales)? else {
            return Ok(Matrix::Dense(ops::zeros::<f32>(&[rows, columns])?));
        };
        if self.policy.host {
            if let (Quantized { group_size, bits, mode: Mode::Affine }, Some(biases)) = (quantized.kind, &quantized.biases) {
                return Ok(Matrix::Host(pack::quantized(&quantized.weight, &quantized.scales, biases, group_size, bits)?));
            }
            let dense = written_out(&QuantizedMatrix { dtype: Some(Dtype::Float32), ..quantized })?;
            return Ok(Matrix::Host(pack::dense(&dense, rows, columns)?));
        }
        if self.policy.dequantize {
            return Ok(Matrix::Dense(self.dense(quantized)?));
        }
        Ok(Matrix::Quantized(self.kept(&name, quantized)?))
    }

    /// What `module.scales`, taken already, belongs to: a matrix of this shape, or several of them along a first axis. Where
    /// something is wrong with it, that is noted and there is none.
    fn quantized(&mut self, module: &str, shape: &[i32], scales: Array) -> Result<Option<QuantizedMatrix>, WeightError> {
        let name = format!("{module}.weight");
        let [leading @ .., columns] = shape else { return Ok(None) };
        let (weight, biases) = (self.tensors.remove(&name), self.tensors.remove(&format!("{module}.biases")));
        let Some(weight) = weight else {
            self.problems.push(format!("{name} is missing beside {module}.scales"));
            return Ok(None);
        };
        let Some(kind) = self.quantization.of(module, &weight, &scales, *columns) else {
            self.problems.push(format!("{module} is quantized, and the configuration does not say how (its 'quantization' key)"));
            return Ok(None);
        };
        let Quantized { group_size, bits, mode } = kind;
        if biases.is_some() != (mode == Mode::Affine) {
            let (is, why) = if biases.is_some() { ("stands", "has none") } else { ("is missing", "needs it") };
            self.problems.push(format!("{module}.biases {is} beside {module}.scales ({mode:?} quantization {why})"));
            return Ok(None);
        }
        let of = |last: i32| [leading, &[last]].concat();
        let (packed, groups) = (of(columns * bits / 32), of(columns / group_size));
        let fits = weight.dtype() == Dtype::Uint32
            && weight.shape() == packed
            && scales.shape() == groups
            && (mode == Mode::Affine || scales.dtype() == Dtype::Uint8)
            && biases.as_ref().is_none_or(|biases| biases.shape() == groups);
        if !fits {
            self.problems.push(format!(
                "{module} has a weight of {:?} {:?} and scales of {:?} {:?}, {bits} bits in groups of {group_size} need uint32 \
                 {packed:?} and {groups:?}",
                weight.dtype(),
                weight.shape(),
                scales.dtype(),
                scales.shape()
            ));
            return Ok(None);
        }
        Ok(Some(QuantizedMatrix { weight, scales, biases, kind, dtype: self.policy.dtype }))
    }

    /// Written out in the format of the policy.
    fn dense(&self, matrix: QuantizedMatrix) -> Result<Array, WeightError> {
        let Some(dtype) = self.policy.dtype.filter(|_| matrix.kind.mode == Mode::Affine) else { return written_out(&matrix) };
        // Scales are widened first, so that the product is not rounded to half precision.
        let scales = matrix.scales.as_dtype(dtype)?;
        let biases = matrix.biases.as_ref().map(|biases| biases.as_dtype(dtype)).transpose()?;
        written_out(&QuantizedMatrix { scales, biases, ..matrix })
    }

    /// As it is stored, but for scales in the format of the policy.
    fn kept(&mut self, name: &str, mut matrix: QuantizedMatrix) -> Result<QuantizedMatrix, WeightError> {
        if matrix.kind.mode == Mode::Affine {
            matrix.scales = self.float(name, matrix.scales)?;
            matrix.biases = matrix.biases.map(|biases| self.float(name, biases)).transpose()?;
        }
        self.settle(&matrix.weight)?;
        self.settle(&matrix.scales)?;
        Ok(matrix)
    }

    /// Converts at once, so that the stored form can be let go.
    fn float(&mut self, name: &str, tensor: Array) -> Result<Array, WeightError> {
        if !matches!(tensor.dtype(), Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16) {
            self.problems.push(format!("{name} is {:?}, a floating-point tensor is needed", tensor.dtype()));
        }
        let tensor = match self.policy.dtype {
            Some(dtype) if dtype != tensor.dtype() => tensor.as_dtype(dtype)?,
            _ => tensor,
        };
        self.settle(&tensor)?;
        Ok(tensor)
    }

    /// Must be called last: names whatever was missing, misshapen or left over.
    pub fn finish(&mut self) -> Result<(), WeightError> {
        self.problems.extend(self.tensors.keys().map(|name| format!("{name} is not part of this family")));
        if self.problems.is_empty() { Ok(()) } else { Err(WeightError::Tensors(std::mem::take(&mut self.problems))) }
    }
}

enum Matrix {
    Dense(Array),
    Quantized(QuantizedMatrix),
    Host(HostMatrix),
}

/// Computed before this returns.
fn written_out(matrix: &QuantizedMatrix) -> Result<Array, WeightError> {
    let dense = matrix.written_out().map_err(|error| WeightError::Mlx(error.to_string()))?;
    dense.eval()?;
    Ok(dense)
}

impl Quantization {
    fn read(config: &Value) -> Result<Self, WeightError> {
        let Some(object) = config.get("quantization").or_else(|| config.get("quantization_config")) else {
            return Ok(Self::default());
        };
        let object = object.as_object().ok_or_else(|| WeightError::Config("'quantization' must be a table".into()))?;
        let kind = |value: &Value, place: &str| -> Result<Option<Quantized>, WeightError> {
            let name = value.get("mode").and_then(Value::as_str).unwrap_or("affine");
            let Some(mode) = Mode::named(name) else {
                let known = Mode::NAMES;
                return Err(WeightError::Config(format!("quantization mode '{name}' of {place} is not known ({known} are)")));
            };
            let number = |key: &str| value.get(key).map(|value| value.as_i64().and_then(|value| i32::try_from(value).ok()));
            let (group_size, bits) = (number("group_size"), number("bits"));
            let kind = match (mode.only(), group_size, bits) {
                (None, Some(Some(group_size @ (32 | 64 | 128))), Some(Some(bits @ (2 | 3 | 4 | 5 | 6 | 8)))) => {
                    Quantized { group_size, bits, mode }
                }
                (None, Some(_), Some(_)) => {
                    return Err(WeightError::Config(format!(
                        "quantization of {place} is {} bits in groups of {}; 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128 are \
                         supported",
                        value["bits"], value["group_size"]
                    )));
                }
                (None, ..) => return Ok(None),
                (Some((own_group, own_bits)), ..) => {
                    let fits = |stated: Option<Option<i32>>, own: i32| stated.is_none_or(|stated| stated == Some(own));
                    if !fits(group_size, own_group) || !fits(bits, own_bits) {
                        return Err(WeightError::Config(format!(
                            "quantization of {place} is {} bits in groups of {}, and mode '{name}' has {own_bits} bits in groups of \
                             {own_group}",
                            value["bits"], value["group_size"]
                        )));
                    }
                    Quantized { group_size: own_group, bits: own_bits, mode }
                }
            };
            Ok(Some(kind))
        };
        let default = kind(&Value::Object(object.clone()), "the model")?;
        let mut overrides = BTreeMap::new();
        for (module, value) in object {
            if value.is_object() {
                overrides.insert(module.clone(), kind(value, module)?);
            } else if value == &Value::Bool(false) {
                overrides.insert(module.clone(), None);
            }
        }
        Ok(Self { default, overrides })
    }

    /// How a module is quantized; a GGUF file tells it by its shapes alone.
    fn of(&self, module: &str, weight: &Array, scales: &Array, columns: i32) -> Option<Quantized> {
        if let Some(own) = self.overrides.get(module) {
            return *own;
        }
        if self.default.is_some() {
            return self.default;
        }
        let (words, groups) = (*weight.shape().last()?, *scales.shape().last()?);
        let fits = columns > 0 && groups > 0 && columns % groups == 0;
        fits.then(|| Quantized { group_size: columns / groups, bits: words * 32 / columns, mode: Mode::Affine })
    }
}
