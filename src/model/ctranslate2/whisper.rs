//! CTranslate2's Whisper into mlx-whisper's layout: another name for each variable, fused projections taken apart, convolutions
//! with their kernel before their inputs, integers back to floats.
//!
//! Names: OpenNMT/CTranslate2 `python/ctranslate2/specs/{whisper,transformer,attention}_spec.py`; how it quantizes: its
//! `model_spec.py` (`_quantize`: int8 = round(weight × scale), a scale for each row; int16 with one scale for all).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::{ConvertError, Dtype, ModelBin, Variable};

/// The largest Whisper has 32.
const LAYERS_MAX: usize = 256;
/// `ActivationType::GELU`.
const GELU: i64 = 3;
/// Settings of the decoder in general that a Whisper has at 0.
const OFF: [&str; 5] = ["alibi", "alibi_use_positive_positions", "scale_alibi", "scale_embeddings", "start_from_zero_embedding"];
/// Nothing that the other layout states.
const IGNORED: [&str; 5] = [
    "decoder/alignment_heads",
    "decoder/alignment_layer",
    "decoder/projection/weight",
    "decoder/projection/weight_scale",
    "encoder/position_encodings/encodings",
];
/// How far the encoder's positions may be from the sinusoids that the other layout computes: float16 keeps 11 bits.
const POSITION_ERROR_MAX: f64 = 2e-3;

/// What was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Converted {
    pub tensors: usize,
    pub bytes: u64,
    /// Whether it was there to be copied.
    pub tokenizer: bool,
    pub config: Value,
}

/// A tensor of the other layout, and what it is made of.
#[derive(Debug, Clone, PartialEq)]
struct Piece {
    variable: String,
    /// Rows of the variable.
    rows: std::ops::Range<u64>,
    /// (output, input, kernel) -> (output, kernel, input)
    convolution: bool,
}

/// Converts the folder `source` into the new folder `out`, which appears when it is whole.
pub fn convert(source: &Path, out: &Path) -> Result<Converted, ConvertError> {
    let path = source.join("model.bin");
    if !path.is_file() {
        return Err(ConvertError::NoModel { folder: source.to_owned() });
    }
    let occupied = || ConvertError::Occupied { folder: out.to_owned() };
    match std::fs::read_dir(out) {
        Ok(mut entries) => {
            if entries.next().is_some() {
                return Err(occupied());
            }
        }
        Err(_) if out.symlink_metadata().is_ok() => return Err(occupied()),
        Err(_) => {}
    }
    let mut model = ModelBin::open(&path)?;
    let plan = Plan::new(&mut model)?;
    let write = |file: &Path, source| ConvertError::Write { file: file.to_owned(), source };
    // Beside its place, so that a rename puts it there.
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(format!(".converting-{}", std::process::id()));
    let unfinished = out.with_file_name(name);
    if let Some(above) = out.parent() {
        std::fs::create_dir_all(above).map_err(|error| write(above, error))?;
    }
    std::fs::create_dir(&unfinished).map_err(|error| write(&unfinished, error))?;
    let done = plan.write(&mut model, source, &unfinished).and_then(|converted| {
        std::fs::rename(&unfinished, out).map_err(|error| write(out, error))?;
        Ok(converted)
    });
    if done.is_err() {
        // The error that matters is the one that is told.
        let _ = std::fs::remove_dir_all(&unfinished);
    }
    done
}

struct Plan {
    config: Value,
    pieces: BTreeMap<String, Piece>,
}

impl Plan {
    fn new(model: &mut ModelBin) -> Result<Self, ConvertError> {
        if model.spec != "WhisperSpec" {
            return Err(unsupported(model, format!("it holds a {:?}, and only Whisper is converted", model.spec)));
        }
        let config = config(model)?;
        let size = |name: &str| config[name].as_u64().unwrap_or(0);
        let mut mapping = Mapping { model, pieces: BTreeMap::new(), problems: Vec::new(), used: IGNORED.map(str::to_owned).into() };
        let width = size("n_audio_state");
        for (conv, inputs) in [("conv1", size("n_mels")), ("conv2", width)] {
            let module = format!("encoder.{conv}");
            mapping.take(format!("{module}.weight"), &format!("encoder/{conv}/weight"), &[width, inputs, 3], 0..width);
            mapping.take(format!("{module}.bias"), &format!("encoder/{conv}/bias"), &[width], 0..width);
        }
        let (vocabulary, positions) = (size("n_vocab"), size("n_text_ctx"));
        let embeddings = "decoder/embeddings/weight";
        mapping.take("decoder.token_embedding.weight".into(), embeddings, &[vocabulary, width], 0..vocabulary);
        let encodings = "decoder/position_encodings/encodings";
        mapping.take("decoder.positional_embedding".into(), encodings, &[positions, width], 0..positions);
        mapping.norm("encoder.ln_post", "encoder/layer_norm", width);
        mapping.norm("decoder.ln", "decoder/layer_norm", width);
        for (side, layers) in [("encoder", size("n_audio_layer")), ("decoder", size("n_text_layer"))] {
            for layer in 0..layers {
                let (from, to) = (format!("{side}/layer_{layer}"), format!("{side}.blocks.{layer}"));
                let attention = format!("{from}/self_attention");
                mapping.norm(&format!("{to}.attn_ln"), &format!("{attention}/layer_norm"), width);
                mapping.fused(&format!("{to}.attn"), &format!("{attention}/linear_0"), &["query", "key", "value"], width);
                mapping.linear(&format!("{to}.attn.out"), &format!("{attention}/linear_1"), width, width);
                if side == "decoder" {
                    let attention = format!("{from}/attention");
                    mapping.norm(&format!("{to}.cross_attn_ln"), &format!("{attention}/layer_norm"), width);
                    mapping.linear(&format!("{to}.cross_attn.query"), &format!("{attention}/linear_0"), width, width);
                    mapping.fused(&format!("{to}.cross_attn"), &format!("{attention}/linear_1"), &["key", "value"], width);
                    mapping.linear(&format!("{to}.cross_attn.out"), &format!("{attention}/linear_2"), width, width);
                }
                mapping.norm(&format!("{to}.mlp_ln"), &format!("{from}/ffn/layer_norm"), width);
                mapping.linear(&format!("{to}.mlp1"), &format!("{from}/ffn/linear_0"), 4 * width, width);
                mapping.linear(&format!("{to}.mlp2"), &format!("{from}/ffn/linear_1"), width, 4 * width);
            }
        }
        let Mapping { pieces, mut problems, used, .. } = mapping;
        let setting = |name: &str| model.variables.get(name).is_some_and(|variable| variable.shape.is_empty());
        let left = model.variables.keys().filter(|name| !used.contains(name.as_str()) && !setting(name));
        problems.extend(left.map(|name| format!("{name} is not part of a Whisper")));
        if !problems.is_empty() {
            let more = problems.len().saturating_sub(8);
            problems.truncate(8);
            let more = if more > 0 { format!("; and {more} more") } else { String::new() };
            return Err(unsupported(model, problems.join("; ") + &more));
        }
        let plan = Self { config, pieces };
        plan.check_keys(model)?;
        plan.check_positions(model)?;
        Ok(plan)
    }

    /// Whisper's keys have no bias: where queries, keys and values are one, theirs is zero.
    fn check_keys(&self, model: &mut ModelBin) -> Result<(), ConvertError> {
        for (name, piece) in self.pieces.iter().filter(|(name, _)| name.ends_with(".key.weight")) {
            let bias = piece.variable.replace("/weight", "/bias");
            let Some(variable) = model.variables.get(&bias).cloned() else { continue };
            let values = floats(&model.read(&variable)?, variable.dtype);
            let own = values.get(piece.rows.start as usize..piece.rows.end as usize).unwrap_or_default();
            if own.iter().any(|&value| value != 0.0) {
                return Err(unsupported(model, format!("{bias} has a bias for {name}, which no Whisper has")));
            }
        }
        Ok(())
    }

    /// The other layout computes the encoder's positions, so these must be what it computes.
    fn check_positions(&self, model: &mut ModelBin) -> Result<(), ConvertError> {
        let name = "encoder/position_encodings/encodings";
        let Some(variable) = model.variables.get(name).cloned() else { return Ok(()) };
        let width = self.config["n_audio_state"].as_u64().unwrap_or(0) as usize;
        let values = floats(&model.read(&variable)?, variable.dtype);
        let half = width / 2;
        for (index, &value) in values.iter().enumerate() {
            let (position, channel) = ((index / width) as f64, index % width);
            let angle = position * (-(10_000f64.ln()) / (half as f64 - 1.0) * (channel % half) as f64).exp();
            let expected = if channel < half { angle.sin() } else { angle.cos() };
            if (expected - f64::from(value)).abs() > POSITION_ERROR_MAX {
                return Err(unsupported(model, format!("{name} are not the sinusoids that Whisper has")));
            }
        }
        Ok(())
    }

    fn write(&self, model: &mut ModelBin, source: &Path, folder: &Path) -> Result<Converted, ConvertError> {
        let file = folder.join("weights.safetensors");
        let io = |source| ConvertError::Write { file: file.clone(), source };
        // https://huggingface.co/docs/safetensors: the header's length, the header, the numbers.
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({ "format": "mlx" }));
        let mut bytes = 0;
        for (name, piece) in &self.pieces {
            let variable = &model.variables[&piece.variable];
            let (dtype, element_bytes) = written_as(variable.dtype);
            let mut shape = variable.shape.clone();
            shape[0] = piece.rows.end - piece.rows.start;
            if piece.convolution {
                shape.swap(1, 2);
            }
            let end = bytes + shape.iter().product::<u64>() * element_bytes;
            header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [bytes, end] }));
            bytes = end;
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut writer = BufWriter::new(File::create(&file).map_err(io)?);
        writer.write_all(&(text.len() as u64).to_le_bytes()).and_then(|()| writer.write_all(&text)).map_err(io)?;
        for piece in self.pieces.values() {
            let data = piece.data(model)?;
            writer.write_all(&data).map_err(io)?;
        }
        writer.into_inner().map_err(|error| error.into_error()).and_then(|file| file.sync_all()).map_err(io)?;

        let file = folder.join("config.json");
        let config = serde_json::to_string_pretty(&self.config).unwrap_or_default() + "\n";
        std::fs::write(&file, config).map_err(|source| ConvertError::Write { file: file.clone(), source })?;
        let (from, to) = (source.join("tokenizer.json"), folder.join("tokenizer.json"));
        let tokenizer = from.is_file();
        if tokenizer {
            std::fs::copy(&from, &to).map_err(|source| ConvertError::Write { file: to.clone(), source })?;
        }
        Ok(Converted { tensors: self.pieces.len(), bytes, tokenizer, config: self.config.clone() })
    }
}

impl Piece {
    /// The tensor's numbers, little-endian, in the type that [`written_as`] says.
    fn data(&self, model: &mut ModelBin) -> Result<Vec<u8>, ConvertError> {
        let variable = model.variables[&self.variable].clone();
        let row_elements = variable.shape[1..].iter().product::<u64>() as usize;
        let data = model.read(&variable)?;
        let element_bytes = variable.dtype.bytes() as usize;
        let rows = self.rows.start as usize..self.rows.end as usize;
        let own = &data[rows.start * row_elements * element_bytes..rows.end * row_elements * element_bytes];
        let (own, element_bytes) = match variable.dtype {
            Dtype::Int8 | Dtype::Int16 => {
                let scale = model.variables[&format!("{}_scale", self.variable)].clone();
                let scales = floats(&model.read(&scale)?, scale.dtype);
                let scale_of = |row: usize| *scales.get(row).unwrap_or(&scales[0]);
                let numbers = floats(own, variable.dtype).into_iter().enumerate();
                let wide = numbers.flat_map(|(index, value)| (value / scale_of(rows.start + index / row_elements)).to_le_bytes());
                (wide.collect(), 4)
            }
            _ => (own.to_vec(), element_bytes),
        };
        if !self.convolution {
            return Ok(own);
        }
        let (inputs, kernel) = (variable.shape[1] as usize, variable.shape[2] as usize);
        let mut turned = Vec::with_capacity(own.len());
        for row in own.chunks_exact(row_elements * element_bytes) {
            for at in 0..kernel {
                for input in 0..inputs {
                    let from = (input * kernel + at) * element_bytes;
                    turned.extend_from_slice(&row[from..from + element_bytes]);
                }
            }
        }
        Ok(turned)
    }
}

/// safetensors' name of the type, and its bytes: integers become float32, in which what they stand for is not rounded.
fn written_as(dtype: Dtype) -> (&'static str, u64) {
    match dtype {
        Dtype::Float16 => ("F16", 2),
        Dtype::Bfloat16 => ("BF16", 2),
        Dtype::Float32 | Dtype::Int8 | Dtype::Int16 | Dtype::Int32 => ("F32", 4),
    }
}

/// A half's bits, widened: IEEE 754 binary16.
fn half(bits: u16) -> f32 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    match exponent {
        0 => sign * fraction * 2f32.powi(-24),
        31 => sign * if fraction == 0.0 { f32::INFINITY } else { f32::NAN },
        _ => sign * (1.0 + fraction / 1024.0) * 2f32.powi(exponent - 15),
    }
}

fn floats(data: &[u8], dtype: Dtype) -> Vec<f32> {
    let pairs = || data.as_chunks::<2>().0.iter();
    let quads = || data.as_chunks::<4>().0.iter();
    match dtype {
        Dtype::Float32 => quads().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
        Dtype::Int32 => quads().map(|&bytes| i32::from_le_bytes(bytes) as f32).collect(),
        Dtype::Float16 => pairs().map(|&bytes| half(u16::from_le_bytes(bytes))).collect(),
        Dtype::Bfloat16 => pairs().map(|&bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)).collect(),
        Dtype::Int16 => pairs().map(|&bytes| f32::from(i16::from_le_bytes(bytes))).collect(),
        Dtype::Int8 => data.iter().map(|&byte| f32::from(byte as i8)).collect(),
    }
}

fn unsupported(model: &ModelBin, what: String) -> ConvertError {
    ConvertError::Unsupported { file: model.path.clone(), what }
}

/// mlx-whisper's config.json, from the variables' shapes and the settings beside them.
fn config(model: &mut ModelBin) -> Result<Value, ConvertError> {
    let shape = |name: &str, axes: usize| match model.variables.get(name) {
        Some(variable) if variable.shape.len() == axes && !variable.shape.contains(&0) => Ok(variable.shape.clone()),
        Some(variable) => Err(unsupported(model, format!("{name} has the shape {:?}", variable.shape))),
        None => Err(unsupported(model, format!("{name} is missing"))),
    };
    let layers = |side: &str| {
        let there = |layer: &usize| model.variables.contains_key(&format!("{side}/layer_{layer}/ffn/linear_0/weight"));
        (0..LAYERS_MAX).take_while(there).count()
    };
    let conv1 = shape("encoder/conv1/weight", 3)?;
    let positions = shape("encoder/position_encodings/encodings", 2)?;
    let embeddings = shape("decoder/embeddings/weight", 2)?;
    let text_positions = shape("decoder/position_encodings/encodings", 2)?;
    let width = conv1[0];
    if positions[1] != width || embeddings[1] != width || width < 4 || width % 2 != 0 {
        return Err(unsupported(model, format!("its widths {width}, {} and {} do not fit", positions[1], embeddings[1])));
    }
    let (audio_layers, text_layers) = (layers("encoder"), layers("decoder"));
    for name in OFF {
        if setting(model, &format!("decoder/{name}"))?.is_some_and(|value| value != 0) {
            return Err(unsupported(model, format!("it has decoder/{name} on, which no Whisper has")));
        }
    }
    for (name, expected) in [("decoder/activation", GELU), ("decoder/pre_norm", 1)] {
        if let Some(value) = setting(model, name)?.filter(|value| *value != expected) {
            return Err(unsupported(model, format!("its {name} is {value}, a Whisper's is {expected}")));
        }
    }
    let mut heads = |side: &str| -> Result<u64, ConvertError> {
        // Before it was stated, heads were known to be 64 wide.
        let stated = setting(model, &format!("{side}/num_heads"))?;
        let heads = stated.map_or(Some(width / 64), |heads| u64::try_from(heads).ok()).filter(|&heads| heads > 0);
        heads
            .filter(|heads| width % heads == 0)
            .ok_or_else(|| unsupported(model, format!("a width of {width} does not divide into its {side}'s heads")))
    };
    let (audio_heads, text_heads) = (heads("encoder")?, heads("decoder")?);
    Ok(json!({
        "model_type": "whisper",
        "n_mels": conv1[1],
        "n_audio_ctx": positions[0],
        "n_audio_state": width,
        "n_audio_head": audio_heads,
        "n_audio_layer": audio_layers,
        "n_vocab": embeddings[0],
        "n_text_ctx": text_positions[0],
        "n_text_state": width,
        "n_text_head": text_heads,
        "n_text_layer": text_layers,
    }))
}

/// A single integer.
fn setting(model: &mut ModelBin, name: &str) -> Result<Option<i64>, ConvertError> {
    let Some(variable) = model.variables.get(name).cloned().filter(|variable| variable.shape.is_empty()) else { return Ok(None) };
    let data = model.read(&variable)?;
    Ok(floats(&data, variable.dtype).first().map(|&value| value as i64))
}

struct Mapping<'a> {
    model: &'a ModelBin,
    pieces: BTreeMap<String, Piece>,
    problems: Vec<String>,
    used: BTreeSet<String>,
}

impl Mapping<'_> {
    fn take(&mut self, name: String, variable: &str, shape: &[u64], rows: std::ops::Range<u64>) {
        let scale = format!("{variable}_scale");
        self.used.extend([variable.to_owned(), scale.clone()]);
        match self.model.variables.get(variable) {
            None => return self.problems.push(format!("{variable} is missing")),
            Some(found) if found.shape != shape => {
                return self.problems.push(format!("{variable} has the shape {:?}, {shape:?} is expected", found.shape));
            }
            Some(Variable { dtype: Dtype::Int32, .. }) => {
                return self.problems.push(format!("{variable} is packed in a way that is not read (AWQ)"));
            }
            Some(Variable { dtype: Dtype::Int8 | Dtype::Int16, .. }) => {
                // One for all rows, or one for each.
                let fits = |scale: &Variable| scale.shape.iter().product::<u64>() == 1 || scale.shape == shape[..1];
                let float = |scale: &Variable| matches!(scale.dtype, Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16);
                if !self.model.variables.get(&scale).is_some_and(|scale| fits(scale) && float(scale)) {
                    return self.problems.push(format!("{scale} is missing or does not fit"));
                }
            }
            Some(_) => {}
        }
        self.pieces.insert(name, Piece { variable: variable.to_owned(), rows, convolution: shape.len() == 3 });
    }

    fn norm(&mut self, to: &str, from: &str, width: u64) {
        self.take(format!("{to}.weight"), &format!("{from}/gamma"), &[width], 0..width);
        self.take(format!("{to}.bias"), &format!("{from}/beta"), &[width], 0..width);
    }

    fn linear(&mut self, to: &str, from: &str, outputs: u64, inputs: u64) {
        self.take(format!("{to}.weight"), &format!("{from}/weight"), &[outputs, inputs], 0..outputs);
        self.take(format!("{to}.bias"), &format!("{from}/bias"), &[outputs], 0..outputs);
    }

    /// Projections that are one product, one after the other in its rows.
    fn fused(&mut self, to: &str, from: &str, names: &[&str], width: u64) {
        let outputs = names.len() as u64 * width;
        for (index, name) in (0..).zip(names) {
            let rows = index * width..(index + 1) * width;
            self.take(format!("{to}.{name}.weight"), &format!("{from}/weight"), &[outputs, width], rows.clone());
            if *name != "key" {
                self.take(format!("{to}.{name}.bias"), &format!("{from}/bias"), &[outputs], rows);
            }
        }
    }
}
