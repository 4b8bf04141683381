//! The engine that runs a model on MLX.

use std::{
    collections::{HashMap, VecDeque},
    fs,
    path::PathBuf,
    sync::Arc,
};

use mlx_rs::{Array, Dtype, memory, ops, transforms};
use serde_json::Value;

use super::{
    Engine, EngineError, WeightError,
    cache::{Cache, Chunk, Step},
    ffi,
    models::{self, Model},
    reason,
    sample::{self, SampleRow},
    weights::{Loader, Policy},
};
use crate::{
    job,
    schedule::{Plan, Price, Request, Sampled, SequenceId},
};

/// Slots grow in steps of this many tokens: each step of growth copies the cache once.
const SLOT_TOKENS_STEP: u32 = 64;

/// MLX's own cache of freed buffers is emptied every so many steps, so that a long run does not hold on to shapes it has left.
const CLEAR_CACHE_STEPS: u64 = 1024;

/// Which device and number format a model runs with.
#[derive(Debug, Clone, Copy)]
pub struct MlxOptions {
    pub device: job::Device,
    pub dtype: job::Dtype,
}

/// Whether a job's device is the GPU here, and the bytes a run may take on it: nine tenths of a GPU's memory, or seven tenths of
/// what the system can give without swapping.
pub fn device_memory(device: job::Device) -> (bool, u64) {
    if device != job::Device::Cpu && ffi::gpu_available() {
        let total = ffi::gpu_memory_bytes().or_else(|| memory::memory_limit().ok().map(|bytes| bytes as u64));
        return (true, total.unwrap_or(0) / 10 * 9);
    }
    // What Linux says can be taken; elsewhere MLX's own limit.
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kibibytes| kibibytes * 1024)
    });
    (false, available.unwrap_or_else(|| memory::memory_limit().unwrap_or(0) as u64) / 10 * 7)
}

pub struct MlxEngine {
    model: Box<dyn Model>,
    cache: Cache,
    cache_dtype: Dtype,
    on_gpu: bool,
    /// The token sampled last in each slot, (slots) int32: decoding reads it without the host.
    newest: Array,
    sequences: HashMap<SequenceId, Sequence>,
    launched: VecDeque<Launched>,
}

struct Sequence {
    request: Arc<Request>,
    /// Tokens collected so far.
    tokens: Vec<u32>,
}

struct Launched {
    /// Evaluated asynchronously; none where no row sampled.
    tokens: Option<Array>,
    /// Who they belong to: for each token of the contract's order its place in `tokens`.
    order: Vec<(SequenceId, usize)>,
}

impl MlxEngine {
    /// Loads a model's weights: `files` is one `.gguf` or all of a folder's `.safetensors`, `config` its config.json.
    pub fn load(files: &[PathBuf], config: &Value, options: MlxOptions) -> Result<Self, WeightError> {
        let on_gpu = match options.device {
            job::Device::Cpu => false,
            job::Device::Auto => ffi::gpu_available(),
            job::Device::Gpu if ffi::gpu_available() => true,
            job::Device::Gpu => {
                return Err(WeightError::Config("model.device is 'gpu', and MLX finds no GPU here; take 'auto' or 'cpu'".into()));
            }
        };
        mlx_rs::Device::set_default(&if on_gpu { mlx_rs::Device::gpu() } else { mlx_rs::Device::cpu() });
        // On the CPU neither half precision nor packed products gain from rows sharing them; dense float32 does.
        let dtype = match options.dtype {
            job::Dtype::Float32 => Some(Dtype::Float32),
            job::Dtype::Bfloat16 => Some(Dtype::Bfloat16),
            job::Dtype::Float16 => Some(Dtype::Float16),
            job::Dtype::Auto if on_gpu => None,
            job::Dtype::Auto => Some(Dtype::Float32),
        };
        let policy = Policy { dtype, dequantize: !on_gpu };
        let model = models::load(config, Loader::open(files, config, policy)?)?;
        Self::with_model(model, on_gpu).map_err(|error| WeightError::Mlx(error.to_string()))
    }

    fn with_model(model: Box<dyn Model>, on_gpu: bool) -> Result<Self, EngineError> {
        // Keys come out of the model in the format that its embedding starts with.
        let mut probe = Cache::new(model.cache_layout(), Dtype::Float32, 1)?;
        probe.resize(1, 1)?;
        let step = Step::new(vec![Chunk { slot: 0, start: 0, length: 1, prompt_tokens: 1 }], &[]);
        let cache_dtype = model.forward(&Array::from_slice(&[0i32], &[1]), &step, &mut probe)?.dtype();
        let key_step = if on_gpu { SLOT_TOKENS_STEP as i32 } else { 1 };
        let cache = Cache::new(model.cache_layout(), cache_dtype, key_step)?;
        Ok(Self {
            model,
            cache,
            cache_dtype,
            on_gpu,
            newest: ops::zeros::<i32>(&[0])?,
            sequences: HashMap::new(),
            launched: VecDeque::new(),
        })
    }

    /// Bytes that the cache and the scratch of a step may take: what the device has less what it holds now, less a margin.
    pub fn kv_bytes_auto(&self) -> u64 {
        let (_, bytes) = device_memory(if self.on_gpu { job::Device::Gpu } else { job::Device::Cpu });
        let held = memory::active_memory().unwrap_or(0) as u64;
        // On the CPU what the weights take is no longer among what is free.
        if self.on_gpu { bytes.saturating_sub(held) } else { bytes }
    }

    pub fn on_gpu(&self) -> bool {
        self.on_gpu
    }

    fn step(&mut self, plan: &Plan) -> Result<Launched, EngineError> {
        let impossible = |reason: String| EngineError::Plan { step: plan.step, reason };
        for release in &plan.released {
            self.sequences.remove(&release.sequence);
        }
        for admission in &plan.admitted {
            let request = admission.request.clone();
            self.sequences.insert(request.sequence, Sequence { request, tokens: Vec::new() });
        }
        if self.cache.layout() != (plan.slots as i32, plan.slot_tokens as i32) {
            self.wait()?;
            self.cache.resize(plan.slots as i32, plan.slot_tokens as i32)?;
            let kept = self.newest.dim(0).min(plan.slots as i32);
            let newest = ops::zeros::<i32>(&[plan.slots as i32])?;
            // CUDA launches no kernel over nothing.
            self.newest =
                if kept == 0 { newest } else { ffi::slice_update(&newest, &ffi::slice(&self.newest, &[0], &[kept])?, &[0])? };
        }
        self.cache.begin_step();

        // All the step's tokens go through the model in one pass: prompt chunks first, then one token of each decoding row.
        let mut prompt_tokens = Vec::new();
        let mut chunks = Vec::with_capacity(plan.prefill.len());
        let mut sampled = Vec::new();
        let mut slots = Vec::new();
        let mut outputs = Vec::new();
        for prefill in &plan.prefill {
            let sequence = self
                .sequences
                .get(&prefill.sequence)
                .ok_or_else(|| impossible(format!("{:?} is not admitted", prefill.sequence)))?;
            let (start, end) = (prefill.start as usize, (prefill.start + prefill.length) as usize);
            let prompt = &sequence.request.prompt;
            let tokens = prompt.get(start..end).ok_or_else(|| impossible("a chunk past the prompt".into()))?;
            prompt_tokens.extend(tokens.iter().map(|&token| token as i32));
            chunks.push(Chunk {
                slot: prefill.slot as i32,
                start: prefill.start as i32,
                length: prefill.length as i32,
                prompt_tokens: prompt.len() as i32,
            });
            if prefill.last {
                outputs.push(prompt_tokens.len() as i32 - 1);
                slots.push(prefill.slot as i32);
                sampled.push((prefill.sequence, None));
            }
        }
        let chunk_tokens = prompt_tokens.len() as i32;
        let mut rows = plan.decode.clone();
        rows.sort_unstable_by_key(|row| row.slot);
        let places: Vec<(u32, u32)> = rows.iter().map(|row| (row.slot, row.position)).collect();
        let step = Step::new(chunks, &places);
        let row_slots: Vec<i32> = rows.iter().map(|row| row.slot as i32).collect();
        let mut tokens = Vec::with_capacity(2);
        if chunk_tokens > 0 {
            tokens.push(Array::from_slice(&prompt_tokens, &[chunk_tokens]));
        }
        if !rows.is_empty() {
            tokens.push(self.newest.take_axis(Array::from_slice(&row_slots, &[row_slots.len() as i32]), 0)?);
        }
        let tokens = if tokens.len() == 1 { tokens.remove(0) } else { ops::concatenate(&tokens, 0)? };
        outputs.extend((0..rows.len() as i32).map(|row| chunk_tokens + row));
        slots.extend(row_slots);
        sampled.extend(rows.iter().map(|row| (row.sequence, Some(row.position))));

        let hidden = self.model.forward(&tokens, &step, &mut self.cache)?;
        let mut tokens = None;
        if !outputs.is_empty() {
            let count = outputs.len() as i32;
            let hidden =
                if count == step.tokens() { hidden } else { hidden.take_axis(Array::from_slice(&outputs, &[count]), 0)? };
            let chosen = self.sample(&self.model.logits(&hidden)?, &sampled, &slots).map_err(|error| match error {
                EngineError::Plan { reason, .. } => impossible(reason),
                other => other,
            })?;
            let updates = chosen.reshape(&[count, 1])?;
            self.newest = ffi::scatter(&self.newest, &[&Array::from_slice(&slots, &[count])], &updates, &[0])?;
            tokens = Some(chosen);
        }
        if !self.on_gpu {
            // On the CPU a step's tasks hold its buffers until they have run; handing over the next step before that would make
            // every cache write a copy. The graph is built meanwhile all the same.
            self.wait()?;
        }
        transforms::async_eval(self.cache.arrays().chain([&self.newest]).chain(&tokens))?;

        let place: HashMap<SequenceId, usize> = sampled.iter().enumerate().map(|(place, row)| (row.0, place)).collect();
        let contract = plan.prefill.iter().filter(|prefill| prefill.last).map(|prefill| prefill.sequence);
        let order = contract.chain(plan.decode.iter().map(|decode| decode.sequence)).map(|id| (id, place[&id])).collect();
        Ok(Launched { tokens, order })
    }

    fn sample(&self, logits: &Array, sampled: &[(SequenceId, Option<u32>)], slots: &[i32]) -> Result<Array, EngineError> {
        let mut contexts = Vec::with_capacity(sampled.len());
        for (id, position) in sampled {
            let sequence = self
                .sequences
                .get(id)
                .ok_or_else(|| EngineError::Plan { step: 0, reason: format!("{id:?} is to be sampled and is not admitted") })?;
            let request = &sequence.request;
            let index = position.map_or(0, |position| position + 1 - request.prompt.len() as u32);
            let missing = index as usize > sequence.tokens.len();
            let mut context = Vec::new();
            if sample::is_penalized(&request.generation) {
                let known = &sequence.tokens[..sequence.tokens.len().min(index as usize)];
                let wanted = request.generation.penalty_context as usize - usize::from(missing);
                let from_prompt = wanted.saturating_sub(known.len()).min(request.prompt.len());
                context.extend_from_slice(&request.prompt[request.prompt.len() - from_prompt..]);
                context.extend_from_slice(&known[known.len().saturating_sub(wanted)..]);
            }
            contexts.push((request, index, context, missing));
        }
        let rows: Vec<SampleRow<'_>> = contexts
            .iter()
            .zip(slots)
            .map(|((request, index, context, missing), &slot)| SampleRow {
                generation: &request.generation,
                seed: request.seed,
                index: *index,
                context,
                newest: missing.then_some(slot),
            })
            .collect();
        sample::sample(logits, &rows, Some(&self.newest))
    }

    /// Waits for what was launched last.
    fn wait(&self) -> Result<(), EngineError> {
        if let Some(Launched { tokens: Some(tokens), .. }) = self.launched.back() {
            tokens.eval()?;
        }
        Ok(())
    }
}

impl Engine for MlxEngine {
    fn price(&self) -> Price {
        let bytes = if self.cache_dtype == Dtype::Float32 { 4 } else { 2 };
        let mut price = Price {
            full_bytes_per_token: 0,
            windows: Vec::new(),
            // A row's logits, their float32 copy and the cumulative sums of a sampled row.
            fixed_bytes_per_slot: u64::from(self.model.vocabulary()) * 16,
            slot_tokens_step: SLOT_TOKENS_STEP,
            prefill_bytes_per_token: self.model.activation_bytes_per_token(bytes),
            // Scores and their softmax.
            prefill_bytes_per_pair: u64::from(self.model.attention_heads()) * 4 * 2,
        };
        for layout in self.model.cache_layout() {
            let per_token = 2 * bytes * (layout.kv_heads * layout.head_dim) as u64;
            match layout.window {
                None => price.full_bytes_per_token += per_token,
                Some(window) => match price.windows.iter_mut().find(|(tokens, _)| *tokens == window as u32) {
                    Some((_, total)) => *total += per_token,
                    None => price.windows.push((window as u32, per_token)),
                },
            }
        }
        price
    }

    fn vocabulary(&self) -> u32 {
        self.model.vocabulary()
    }

    fn launch(&mut self, plan: &Plan) -> Result<(), EngineError> {
        let launched = self.step(plan)?;
        self.launched.push_back(launched);
        if plan.step % CLEAR_CACHE_STEPS == CLEAR_CACHE_STEPS - 1 {
            memory::clear_cache()?;
        }
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<Sampled>, EngineError> {
        let Some(launched) = self.launched.pop_front() else { return Ok(Vec::new()) };
        let Some(tokens) = launched.tokens else { return Ok(Vec::new()) };
        tokens.eval()?;
        let tokens = tokens.try_as_slice::<i32>().map_err(|error| EngineError::Mlx(reason(&error)))?;
        let mut sampled = Vec::with_capacity(launched.order.len());
        for (sequence, place) in launched.order {
            let token = tokens[place] as u32;
            if let Some(own) = self.sequences.get_mut(&sequence) {
                own.tokens.push(token);
            }
            sampled.push(Sampled { sequence, token, stop_string: false });
        }
        Ok(sampled)
    }
}
