//! [`Decoder`] on the CPU's cores: the same layers as one pass in Rust, rather than as a graph of a thousand small operations.

use std::sync::{Mutex, PoisonError};

use mlx_rs::{Array, Dtype, ops};

use super::{
    Embedding, Linear, Model, RmsNorm, Scratch as ScratchBytes,
    decoder::{Decoder, Layer as PlainLayer, Qkv},
    layers::{Activation, GateUp},
};
use crate::engine::{
    EngineError,
    cache::{Cache, LayerLayout, LentLayer, Places, Step},
    ffi,
    host::{self, Angles, Attention, HostMatrix, Packed, Rotation, Seen, Write},
};

pub struct HostDecoder {
    embedding: HostMatrix,
    embedding_scale: Option<f32>,
    layers: Vec<Layer>,
    norm: Norm,
    /// None where the embedding is the output matrix too.
    output: Option<Product>,
    /// Those of the layers, each once.
    rotations: Vec<Rotation>,
    layouts: Vec<LayerLayout>,
    intermediate_size: usize,
    /// Kept from pass to pass: fresh pages cost as much as a small product.
    scratch: Mutex<Scratch>,
}

struct Layer {
    input_norm: Norm,
    /// Queries, keys and values, one after the other.
    qkv: Product,
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
    attention: Attention,
    window: Option<usize>,
    /// Index into the decoder's rotations.
    rotation: usize,
    output: Product,
    post_attention_norm: Option<Norm>,
    feedforward_norm: Norm,
    gate_up: Product,
    activation: Activation,
    down: Product,
    post_feedforward_norm: Option<Norm>,
}

struct Norm {
    weight: Vec<f32>,
    eps: f32,
}

struct Product {
    matrix: HostMatrix,
    bias: Option<Vec<f32>>,
}

/// What a pass writes over and over.
#[derive(Default)]
struct Scratch {
    hidden: Vec<f32>,
    normed: Vec<f32>,
    packed: Packed,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    gate_up: Vec<f32>,
}

/// One chunk's keys and values and what the tokens before it left in a ring that it overwrites, (kv_heads, tokens, head_dim) each.
struct Unrolled {
    keys: Vec<f32>,
    values: Vec<f32>,
    past: usize,
    tokens: usize,
}

impl HostDecoder {
    /// Takes over a decoder whose weights are packed for these cores; gives it back where one of them is not.
    pub fn new(decoder: Decoder) -> Result<Result<Self, Box<Decoder>>, EngineError> {
        let on_host = matches!(decoder.embed_tokens, Embedding::Host(_))
            && decoder.layers.iter().all(PlainLayer::on_host)
            && decoder.output.0.as_ref().is_none_or(|output| matches!(output, Linear::Host { .. }));
        if !on_host {
            return Ok(Err(Box::new(decoder)));
        }
        let layouts = decoder.cache_layout();
        let embedding_scale = decoder.embedding_scale()?;
        let Embedding::Host(embedding) = decoder.embed_tokens else { return Err(not_packed()) };
        let mut rotations: Vec<Rotation> = Vec::new();
        let mut layers = Vec::with_capacity(decoder.layers.len());
        for plain in decoder.layers {
            let own = plain.attention.rope.rotation()?;
            let rotation = rotations.iter().position(|rotation| *rotation == own).unwrap_or_else(|| {
                rotations.push(own);
                rotations.len() - 1
            });
            layers.push(Layer {
                input_norm: Norm::new(&plain.input_norm)?,
                qkv: match plain.attention.qkv {
                    Qkv::Merged(linear) => Product::new(linear)?,
                    Qkv::Separate { q_proj, k_proj, v_proj } => Product::stacked(vec![q_proj, k_proj, v_proj])?,
                },
                q_norm: plain.attention.q_norm.as_ref().map(Norm::new).transpose()?,
                k_norm: plain.attention.k_norm.as_ref().map(Norm::new).transpose()?,
                attention: Attention {
                    heads: plain.attention.heads as usize,
                    kv_heads: plain.attention.kv_heads as usize,
                    head_dim: plain.attention.head_dim as usize,
                    scale: plain.attention.scale,
                },
                window: plain.attention.window.map(|window| window as usize),
                rotation,
                output: Product::new(plain.attention.o_proj)?,
                post_attention_norm: plain.post_attention_norm.as_ref().map(Norm::new).transpose()?,
                feedforward_norm: Norm::new(&plain.feedforward_norm)?,
                gate_up: match plain.mlp.gate_up {
                    GateUp::Merged { gate_up_proj, .. } => Product::new(gate_up_proj)?,
                    GateUp::Separate { gate_proj, up_proj } => Product::stacked(vec![gate_proj, up_proj])?,
                },
                activation: plain.mlp.activation,
                down: Product::new(plain.mlp.down_proj)?,
                post_feedforward_norm: plain.post_feedforward_norm.as_ref().map(Norm::new).transpose()?,
            });
        }
        Ok(Ok(Self {
            embedding,
            embedding_scale,
            layers,
            norm: Norm::new(&decoder.norm)?,
            output: decoder.output.0.map(Product::new).transpose()?,
            rotations,
            layouts,
            intermediate_size: decoder.intermediate_size as usize,
            scratch: Mutex::default(),
        }))
    }

    /// Normalized hidden states (N, hidden) of `tokens`, which stand as `step` says, into `normed`.
    fn pass(&self, tokens: &[i32], step: &Places, cache: &mut [LentLayer<'_>], normed: &mut [f32]) {
        let width = self.embedding.inputs();
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut hidden = std::mem::take(&mut scratch.hidden);
        hidden.resize(tokens.len() * width, 0.0);
        for (row, &token) in hidden.chunks_exact_mut(width).zip(tokens) {
            self.embedding.row(token as usize, row);
            if let Some(scale) = self.embedding_scale {
                row.iter_mut().for_each(|x| *x *= scale);
            }
        }
        let angles: Vec<Angles> = self.rotations.iter().map(|rotation| rotation.angles(step.tokens())).collect();
        for (layer, cache) in self.layers.iter().zip(cache) {
            layer.attend(&mut hidden, step, &self.rotations[layer.rotation], &angles[layer.rotation], cache, &mut scratch);
            layer.feed_forward(&mut hidden, &mut scratch);
        }
        self.norm.forward(&hidden, normed);
        scratch.hidden = hidden;
    }
}

impl Model for HostDecoder {
    fn cache_layout(&self) -> Vec<LayerLayout> {
        self.layouts.clone()
    }

    fn forward(&self, tokens: &Array, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        let tokens = ffi::integers(tokens)?;
        if let Some(token) = tokens.iter().find(|&&token| token < 0 || token as usize >= self.embedding.outputs()) {
            return Err(EngineError::Plan { step: 0, reason: format!("token {token} is not of this model's vocabulary") });
        }
        let (places, mut lent) = (step.places(), cache.lend()?);
        let mut hidden = ops::zeros::<f32>(&[tokens.len() as i32, self.embedding.inputs() as i32])?;
        let normed = ffi::lend(&mut hidden)?;
        host::install(|| self.pass(tokens, places, &mut lent, normed));
        Ok(hidden)
    }

    fn logits(&self, hidden: &Array) -> Result<Array, EngineError> {
        let (matrix, bias) = match &self.output {
            Some(output) => (&output.matrix, output.bias.as_deref()),
            None => (&self.embedding, None),
        };
        let x = ffi::numbers(hidden)?;
        let mut logits = ops::zeros::<f32>(&[hidden.dim(0), matrix.outputs() as i32])?;
        let y = ffi::lend(&mut logits)?;
        host::install(|| {
            let mut packed = Packed::default();
            packed.pack(x, matrix.inputs(), matrix.inputs());
            matrix.product(&packed, bias, Write::Set, y);
        });
        Ok(logits)
    }

    fn vocabulary(&self) -> u32 {
        self.embedding.outputs() as u32
    }

    fn scratch(&self, dtype_bytes: u64) -> ScratchBytes {
        let heads = self.layers.first().map_or(0, |Layer { attention: own, .. }| (2 * own.heads + 2 * own.kv_heads) * own.head_dim);
        // Hidden states, normalized ones, and the input of a product in its own order, which is as wide as the widest.
        let packed = self.intermediate_size.max(self.embedding.inputs());
        let numbers = 3 * self.embedding.inputs() + 2 * self.intermediate_size + heads + packed;
        ScratchBytes {
            prefill_bytes_per_token: dtype_bytes * numbers as u64,
            // Scores, and the values that they weigh.
            prefill_bytes_per_pair: self.layers.first().map_or(0, |layer| layer.attention.heads as u64) * 4 * 2,
            bytes_per_slot: dtype_bytes * numbers as u64,
            decode_bytes_per_slot: 0,
        }
    }

    fn shares_prefixes(&self) -> bool {
        !self.rotations.iter().any(Rotation::depends_on_length)
    }
}

impl Layer {
    /// Adds to `hidden` (N, hidden) what attention gives, and stores the tokens' keys and values.
    fn attend(
        &self,
        hidden: &mut [f32],
        step: &Places,
        rotation: &Rotation,
        angles: &Angles,
        cache: &mut LentLayer<'_>,
        scratch: &mut Scratch,
    ) {
        let Scratch { normed, packed, qkv, attended, .. } = scratch;
        let Attention { heads, kv_heads, head_dim, .. } = self.attention;
        let (queries_width, keys_width) = (heads * head_dim, kv_heads * head_dim);
        let stride = queries_width + 2 * keys_width;
        self.input_norm.apply(hidden, normed, packed);
        let tokens = packed.rows();
        qkv.resize(tokens * stride, 0.0);
        self.qkv.forward(packed, Write::Set, qkv);
        host::each_row(qkv, stride, |token, row| {
            let (queries, rest) = row.split_at_mut(queries_width);
            let keys = &mut rest[..keys_width];
            for (heads, norm) in [(queries, &self.q_norm), (keys, &self.k_norm)] {
                if let Some(norm) = norm {
                    norm.in_place(heads);
                }
                rotation.rotate(heads, angles, token);
            }
        });

        // What a chunk that leaves its window behind still sees of the ring is taken out before it is overwritten.
        let mut first = 0;
        let mut chunks = Vec::with_capacity(step.chunks.len());
        for chunk in &step.chunks {
            let (start, length) = (chunk.start as usize, chunk.length as usize);
            let rows = &qkv[first * stride..][..length * stride];
            let wraps = self.window.is_some_and(|window| start + length > window);
            let unrolled = wraps.then(|| self.unroll(chunk.slot as usize, start, rows, cache));
            chunks.push((first, start, length, chunk.slot as usize, unrolled));
            first += length;
        }
        for &(first, start, length, slot, _) in &chunks {
            // Of a chunk longer than the ring only its end stays.
            for token in length.saturating_sub(cache.ring)..length {
                cache.store(slot, start + token, &qkv[(first + token) * stride + queries_width..][..2 * keys_width]);
            }
        }
        for (row, &(slot, position)) in step.rows.iter().enumerate() {
            cache.store(slot as usize, position as usize, &qkv[(first + row) * stride + queries_width..][..2 * keys_width]);
        }

        attended.resize(tokens * queries_width, 0.0);
        for (first, start, length, slot, unrolled) in &chunks {
            let seen = match unrolled {
                Some(Unrolled { keys, values, past, tokens }) => {
                    Seen { keys, values, stride: *tokens, first: past + 1, window: self.window }
                }
                None => Seen { first: start + 1, ..cache.seen(*slot) },
            };
            let rows = &mut attended[first * queries_width..][..length * queries_width];
            self.attention.chunk(&qkv[first * stride..][..length * stride], stride, seen, rows);
        }
        let seen = step
            .rows
            .iter()
            .map(|&(slot, position)| Seen { first: (position as usize + 1).min(cache.ring), ..cache.seen(slot as usize) });
        let seen: Vec<Seen<'_>> = seen.collect();
        self.attention.rows(&qkv[first * stride..], stride, &seen, &mut attended[first * queries_width..]);

        packed.pack(attended, queries_width, queries_width);
        self.output.add(packed, self.post_attention_norm.as_ref(), hidden, normed);
    }

    /// Keys and values of the window before a chunk and of the chunk itself, in order.
    fn unroll(&self, slot: usize, start: usize, rows: &[f32], cache: &LentLayer<'_>) -> Unrolled {
        let Attention { heads, kv_heads, head_dim, .. } = self.attention;
        let stride = (heads + 2 * kv_heads) * head_dim;
        let past = start.min(self.window.unwrap_or(0).saturating_sub(1)).min(cache.ring);
        let tokens = past + rows.len() / stride;
        let mut unrolled = Unrolled { keys: Vec::with_capacity(tokens * kv_heads * head_dim), values: Vec::new(), past, tokens };
        let seen = cache.seen(slot);
        for (stored, offset, all) in [(seen.keys, heads, &mut unrolled.keys), (seen.values, heads + kv_heads, &mut unrolled.values)]
        {
            for head in 0..kv_heads {
                for position in start - past..start {
                    let at = (head * cache.ring + position % cache.ring) * head_dim;
                    all.extend_from_slice(&stored[at..at + head_dim]);
                }
                for row in rows.chunks_exact(stride) {
                    all.extend_from_slice(&row[(offset + head) * head_dim..][..head_dim]);
                }
            }
        }
        unrolled
    }

    /// Adds to `hidden` (N, hidden) what the gated feed-forward half gives.
    fn feed_forward(&self, hidden: &mut [f32], scratch: &mut Scratch) {
        let Scratch { normed, packed, gate_up, .. } = scratch;
        self.feedforward_norm.apply(hidden, normed, packed);
        let width = self.down.matrix.inputs();
        gate_up.resize(packed.rows() * 2 * width, 0.0);
        self.gate_up.forward(packed, Write::Set, gate_up);
        match self.activation {
            Activation::Silu => host::silu_gated(gate_up, width),
            Activation::GeluTanh => host::gelu_tanh_gated(gate_up, width),
        }
        packed.pack(gate_up, 2 * width, width);
        self.down.add(packed, self.post_feedforward_norm.as_ref(), hidden, normed);
    }
}

impl Norm {
    fn new(norm: &RmsNorm) -> Result<Self, EngineError> {
        Ok(Self { weight: numbers(&norm.weight)?, eps: norm.eps })
    }

    fn forward(&self, x: &[f32], normed: &mut [f32]) {
        host::norm_rows(x, &self.weight, self.eps, normed);
    }

    /// Rows normalized and packed for a product.
    fn apply(&self, x: &[f32], normed: &mut Vec<f32>, packed: &mut Packed) {
        normed.resize(x.len(), 0.0);
        self.forward(x, normed);
        packed.pack(normed, self.weight.len(), self.weight.len());
    }

    fn in_place(&self, heads: &mut [f32]) {
        let own = heads.to_vec();
        self.forward(&own, heads);
    }
}

impl Product {
    fn new(linear: Linear) -> Result<Self, EngineError> {
        let Linear::Host { matrix, bias } = linear else { return Err(not_packed()) };
        Ok(Self { matrix, bias: bias.as_ref().map(numbers).transpose()? })
    }

    /// One product instead of several over the same inputs.
    fn stacked(linears: Vec<Linear>) -> Result<Self, EngineError> {
        let parts = linears.into_iter().map(Self::new).collect::<Result<Vec<_>, _>>()?;
        let mut bias = Vec::new();
        if parts.iter().any(|part| part.bias.is_some()) {
            for part in &parts {
                match &part.bias {
                    Some(own) => bias.extend_from_slice(own),
                    None => bias.extend(std::iter::repeat_n(0.0, part.matrix.outputs())),
                }
            }
        }
        let matrix = HostMatrix::stacked(parts.into_iter().map(|part| part.matrix).collect());
        Ok(Self { matrix, bias: (!bias.is_empty()).then_some(bias) })
    }

    fn forward(&self, x: &Packed, write: Write, y: &mut [f32]) {
        self.matrix.product(x, self.bias.as_deref(), write, y);
    }

    /// `hidden += self(x)`, or `hidden += norm(self(x))`; `fed` is room for the second.
    fn add(&self, x: &Packed, norm: Option<&Norm>, hidden: &mut [f32], fed: &mut Vec<f32>) {
        let Some(norm) = norm else { return self.forward(x, Write::Add, hidden) };
        fed.resize(hidden.len(), 0.0);
        self.forward(x, Write::Set, fed);
        let width = norm.weight.len();
        let mut normed = vec![0.0; width];
        for (row, hidden) in fed.chunks_exact(width).zip(hidden.chunks_exact_mut(width)) {
            norm.forward(row, &mut normed);
            hidden.iter_mut().zip(&normed).for_each(|(hidden, normed)| *hidden += normed);
        }
    }
}

impl LentLayer<'_> {
    /// What a slot holds.
    fn seen(&self, slot: usize) -> Seen<'_> {
        let numbers = self.kv_heads * self.ring * self.head_dim;
        let own = slot * numbers..(slot + 1) * numbers;
        Seen { keys: &self.keys[own.clone()], values: &self.values[own], stride: self.ring, first: 0, window: None }
    }

    /// Keeps a token's keys and values, (2, kv_heads, head_dim).
    fn store(&mut self, slot: usize, position: usize, keys_values: &[f32]) {
        let (keys, values) = keys_values.split_at(self.kv_heads * self.head_dim);
        for head in 0..self.kv_heads {
            let at = ((slot * self.kv_heads + head) * self.ring + position % self.ring) * self.head_dim;
            let own = head * self.head_dim..(head + 1) * self.head_dim;
            self.keys[at..at + self.head_dim].copy_from_slice(&keys[own.clone()]);
            self.values[at..at + self.head_dim].copy_from_slice(&values[own]);
        }
    }
}

fn numbers(array: &Array) -> Result<Vec<f32>, EngineError> {
    Ok(ffi::numbers(&array.as_dtype(Dtype::Float32)?.contiguous()?)?.to_vec())
}

fn not_packed() -> EngineError {
    EngineError::Mlx("a weight is not packed for the CPU's cores".into())
}
