//! The engine that runs a model on MLX.

use std::{
    cell::Cell,
    collections::{HashMap, VecDeque},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use mlx_rs::{Array, Dtype, memory, ops, transforms};
use serde_json::Value;

use super::{
    Engine, EngineError, PrefillDefaults, SpeechScore, WeightError,
    cache::{Cache, Chunk, Step},
    device::{self, WeightForm},
    ffi, host,
    logprobs::{Logprobs, StepLogprobs},
    models::{self, Model},
    on_host, price, reason,
    sample::{self, SampleRow},
    soft::{self, SoftPass, SoftPrompt},
    speech::{self, SpeechRow},
    weights::{Loader, Policy},
};
use crate::{
    job,
    schedule::{Admission, Medium, Plan, Price, Request, Reuse, Sampled, SequenceId},
};

/// MLX's own cache of freed buffers is emptied every so many steps, so that a long run does not hold on to shapes it has left.
const CLEAR_CACHE_STEPS: u64 = 1024;

/// Which device and number format a model runs with.
#[derive(Debug, Clone, Copy)]
pub struct MlxOptions {
    pub device: job::Device,
    pub dtype: job::Dtype,
    /// Only MLX's own operations: the reference of whatever is made to be faster.
    pub plain: bool,
    pub weights: WeightForm,
    /// Rows that are computed together at most.
    pub rows: u32,
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
    waited: Cell<Duration>,
    /// Whether launching a step waits for what its media become, so that the time of that can be told.
    times_media: bool,
    encoding: Duration,
}

struct Sequence {
    request: Arc<Request>,
    /// Tokens collected so far.
    tokens: Vec<u32>,
    /// Of these, where the row asks.
    logprobs: Option<Logprobs>,
    speech: SpeechScore,
    /// Until its prompt is computed.
    soft: SoftPrompt,
}

struct Launched {
    /// Evaluated with the step: what there is to wait for.
    hidden: Array,
    /// Evaluated asynchronously; none where no row sampled.
    chosen: Option<Chosen>,
    /// Who they belong to: for each token of the contract's order its place in `chosen`.
    order: Vec<(SequenceId, usize)>,
    /// Rows whose start of transcript was computed, and for each the probability that nobody speaks.
    no_speech: Option<(Vec<SequenceId>, Array)>,
}

/// What a step sampled, (rows) each.
struct Chosen {
    tokens: Array,
    /// Of the rows that ask.
    logprobs: Option<StepLogprobs>,
    /// Log-probabilities of a speech model's tokens.
    speech: Option<Array>,
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
        let dense = match options.weights {
            WeightForm::Auto => device::prefers_dense(files, options.rows),
            form => form == WeightForm::Dense,
        };
        // The CPU's cores take a decoder's weights as they are stored, and compute in float32.
        let family = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let host = !on_gpu && !options.plain && dtype == Some(Dtype::Float32) && family != "whisper" && host::wanted();
        let policy = Policy { dtype, dequantize: !on_gpu || dense, merge: on_gpu && !options.plain, host };
        let model = models::load(config, Loader::open(files, config, policy)?)?;
        if host {
            // What weights were packed from.
            memory::clear_cache().map_err(|error| WeightError::Mlx(reason(&error)))?;
        }
        Self::with_model(model, on_gpu).map_err(|error| WeightError::Mlx(error.to_string()))
    }

    fn with_model(model: Box<dyn Model>, on_gpu: bool) -> Result<Self, EngineError> {
        // Keys come out of the model in the format that its embedding starts with.
        let mut probe = empty_cache(&*model, Dtype::Float32, on_gpu)?;
        probe.resize(1, 1)?;
        let step = Step::new(vec![Chunk { slot: 0, start: 0, length: 1, prompt_tokens: 1 }], &[]);
        let cache_dtype = model.forward(&Array::from_slice(&[0i32], &[1]), &step, &mut probe)?.dtype();
        Ok(Self {
            cache: empty_cache(&*model, cache_dtype, on_gpu)?,
            model,
            cache_dtype,
            on_gpu,
            newest: ops::zeros::<i32>(&[0])?,
            sequences: HashMap::new(),
            launched: VecDeque::new(),
            waited: Cell::default(),
            times_media: false,
            encoding: Duration::ZERO,
        })
    }

    /// Puts every row out and gives the cache up: what stays is the model as it was loaded.
    pub fn reset(&mut self) -> Result<(), EngineError> {
        self.wait()?;
        self.launched.clear();
        self.sequences.clear();
        self.cache = empty_cache(&*self.model, self.cache_dtype, self.on_gpu)?;
        self.newest = ops::zeros::<i32>(&[0])?;
        Ok(())
    }

    /// [`Engine::price`], of a run in which no row is sampled but by its likeliest token where `greedy`.
    pub fn price_of(&self, greedy: bool) -> Price {
        price::of(&*self.model, self.cache_dtype, self.on_gpu, greedy)
    }

    /// How long calls of [`Engine::launch`] and [`Engine::collect`] have waited for the device, all together.
    pub fn waited(&self) -> Duration {
        self.waited.get()
    }

    /// Has [`MlxEngine::encoding`] count: a GPU is then waited for, where a job goes on.
    pub fn time_media(&mut self) {
        self.times_media = true;
    }

    /// How long images and recordings were encoded, since [`MlxEngine::time_media`].
    pub fn encoding(&self) -> Duration {
        self.encoding
    }

    /// Encodes media, so many at once, and gives up what they become.
    pub fn encode_media(&self, media: &[Medium], together: usize) -> Result<(), EngineError> {
        let towers = self.model.towers().ok_or_else(|| EngineError::Mlx("the model neither sees nor hears".into()))?;
        for group in media.chunks(together.max(1)) {
            let group: Vec<&Medium> = group.iter().collect();
            transforms::eval(&towers.encode(&group)?)?;
        }
        Ok(())
    }

    /// The number format of keys and values, which is that of the layers.
    pub fn dtype(&self) -> &'static str {
        match self.cache_dtype {
            Dtype::Float32 => "float32",
            Dtype::Bfloat16 => "bfloat16",
            Dtype::Float16 => "float16",
            _ => "other",
        }
    }

    /// Bytes that the cache and the scratch of a step may take: what the device has less what it holds now, less a margin.
    pub fn kv_bytes_auto(&self) -> u64 {
        let (_, bytes) = device::device_memory(if self.on_gpu { job::Device::Gpu } else { job::Device::Cpu });
        // What the weights take is no longer among what is free.
        if !self.on_gpu {
            return bytes;
        }
        let held = memory::active_memory().unwrap_or(0) as u64;
        // Others may use the GPU too.
        let free = ffi::gpu_free_bytes().map_or(u64::MAX, |free| free / 10 * 9);
        bytes.saturating_sub(held).min(free)
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
            let logprobs = request.generation.logprobs.filter(|_| request.window.is_none());
            let logprobs = logprobs.map(|top_k| Logprobs::new(top_k.min(self.model.vocabulary()) as usize));
            let (speech, soft) = (SpeechScore::default(), SoftPrompt::new());
            self.sequences.insert(request.sequence, Sequence { request, tokens: Vec::new(), logprobs, speech, soft });
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
        self.encode(&plan.admitted).map_err(|error| match error {
            EngineError::Plan { reason, .. } => impossible(reason),
            other => other,
        })?;

        let since = Instant::now();
        let soft = soft::encode(&*self.model, &plan.admitted, self.cache_dtype, self.on_gpu)?;
        if self.times_media && !soft.is_empty() {
            transforms::eval(soft.iter().flat_map(|(_, soft)| soft.iter().map(|(_, embeddings)| embeddings)))?;
            self.encoding += since.elapsed();
        }
        for (sequence, soft) in soft {
            if let Some(own) = self.sequences.get_mut(&sequence) {
                own.soft = soft;
            }
        }

        self.reuse(&plan.admitted)?;

        // All the step's tokens go through the model in one pass: prompt chunks first, then one token of each decoding row.
        let mut prompt_tokens = Vec::new();
        let mut chunks = Vec::with_capacity(plan.prefill.len());
        let mut sampled = Vec::new();
        let mut slots = Vec::new();
        let mut outputs = Vec::new();
        // Where rows start their transcripts, among the step's tokens.
        let mut starts = Vec::new();
        let mut soft_pass = SoftPass::default();
        for prefill in &plan.prefill {
            let sequence = self
                .sequences
                .get_mut(&prefill.sequence)
                .ok_or_else(|| impossible(format!("{:?} is not admitted", prefill.sequence)))?;
            let offset = prompt_tokens.len() as u32;
            soft_pass.add(chunks.len(), offset, prefill, &sequence.request, &sequence.soft)?;
            if prefill.last {
                sequence.soft = SoftPrompt::new();
            }
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
            if let Some(window) = &sequence.request.window
                && window.rules.no_speech.is_some()
                && (prefill.start..prefill.start + prefill.length).contains(&window.start_of_transcript)
            {
                let first = prompt_tokens.len() as u32 - prefill.length;
                starts.push((prefill.sequence, (first + window.start_of_transcript - prefill.start) as i32));
            }
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
        let padding = if self.model.pads() { device::padding(chunk_tokens, rows.len() as i32) } else { 0 };
        let step = soft_pass.put_into(Step::padded(chunks, padding, &places))?;
        let row_slots: Vec<i32> = rows.iter().map(|row| row.slot as i32).collect();
        let mut tokens = Vec::with_capacity(2);
        prompt_tokens.resize((chunk_tokens + padding) as usize, 0);
        if !prompt_tokens.is_empty() {
            tokens.push(Array::from_slice(&prompt_tokens, &[prompt_tokens.len() as i32]));
        }
        if !rows.is_empty() {
            let all = self.is_every_slot(&row_slots);
            let newest = &self.newest;
            tokens.push(if all {
                newest.clone()
            } else {
                newest.take_axis(Array::from_slice(&row_slots, &[row_slots.len() as i32]), 0)?
            });
        }
        let tokens = if tokens.len() == 1 { tokens.remove(0) } else { ops::concatenate(&tokens, 0)? };
        outputs.extend((0..rows.len() as i32).map(|row| chunk_tokens + padding + row));
        slots.extend(row_slots);
        sampled.extend(rows.iter().map(|row| (row.sequence, Some(row.position))));

        let hidden = self.model.forward(&tokens, &step, &mut self.cache)?;
        self.waited.set(self.waited.get() + step.waited());
        let mut chosen = None;
        if !outputs.is_empty() {
            let count = outputs.len() as i32;
            if self.model.pads() && count > device::OUTPUTS_STEP {
                outputs.resize(outputs.len().next_multiple_of(device::OUTPUTS_STEP as usize), 0);
            }
            let mut logits = self.model.logits(&self.rows_of(&hidden, &outputs)?)?;
            if logits.dim(0) > count {
                logits = ffi::slice(&logits, &[0, 0], &[count, logits.dim(1)])?;
            }
            let of_rows = self.sample(&logits, &sampled, &slots).map_err(|error| match error {
                EngineError::Plan { reason, .. } => impossible(reason),
                other => other,
            })?;
            self.newest = if self.is_every_slot(&slots) {
                of_rows.tokens.clone()
            } else {
                let updates = of_rows.tokens.reshape(&[count, 1])?;
                ffi::scatter(&self.newest, &[&Array::from_slice(&slots, &[count])], &updates, &[0])?
            };
            chosen = Some(of_rows);
        }
        let mut no_speech = None;
        if let Some(token) = starts.first().and_then(|(id, _)| self.sequences.get(id)?.request.window.as_ref()?.rules.no_speech) {
            let (rows, places): (Vec<SequenceId>, Vec<i32>) = starts.into_iter().unzip();
            let logits = self.model.logits(&self.rows_of(&hidden, &places)?)?;
            no_speech = Some((rows, speech::probability(&logits, token)?));
        }
        if !self.on_gpu {
            // On the CPU a step's tasks hold its buffers until they have run; handing over the next step before that would make
            // every cache write a copy. The graph is built meanwhile all the same.
            self.wait()?;
        }
        let of_chosen = chosen.iter().flat_map(|chosen| {
            let logprobs = chosen.logprobs.iter().flat_map(StepLogprobs::arrays);
            [Some(&chosen.tokens), chosen.speech.as_ref()].into_iter().flatten().chain(logprobs)
        });
        let of_starts = no_speech.iter().map(|(_, probability)| probability);
        // The hidden states too: where nothing is sampled, kernels that write into the cache have no other outcome.
        transforms::async_eval(self.cache.arrays().chain([&self.newest, &hidden]).chain(of_chosen).chain(of_starts))?;

        let place: HashMap<SequenceId, usize> = sampled.iter().enumerate().map(|(place, row)| (row.0, place)).collect();
        let contract = plan.prefill.iter().filter(|prefill| prefill.last).map(|prefill| prefill.sequence);
        let order = contract.chain(plan.decode.iter().map(|decode| decode.sequence)).map(|id| (id, place[&id])).collect();
        Ok(Launched { hidden, chosen, order, no_speech })
    }

    /// Whether `slots` are all slots, in order.
    fn is_every_slot(&self, slots: &[i32]) -> bool {
        slots.len() as i32 == self.newest.dim(0) && slots.iter().zip(0..).all(|(&slot, index)| slot == index)
    }

    /// The hidden states at `places`, all of them where those are all.
    fn rows_of(&self, hidden: &Array, places: &[i32]) -> Result<Array, EngineError> {
        let all = places.len() as i32 == hidden.dim(0) && places.iter().zip(0..).all(|(&place, index)| place == index);
        Ok(if all { hidden.clone() } else { hidden.take_axis(Array::from_slice(places, &[places.len() as i32]), 0)? })
    }

    /// Copies what the admitted rows take over of prefixes into their slots, rows that take the same together.
    fn reuse(&mut self, admitted: &[Admission]) -> Result<(), EngineError> {
        let mut copies: Vec<(Reuse, Vec<i32>)> = Vec::new();
        for admission in admitted {
            let Some(reuse) = admission.reuse else { continue };
            match copies.iter_mut().find(|(other, _)| *other == reuse) {
                Some((_, slots)) => slots.push(admission.slot as i32),
                None => copies.push((reuse, vec![admission.slot as i32])),
            }
        }
        if copies.is_empty() {
            return Ok(());
        }
        if !self.on_gpu {
            // The cache is written below, and a step that still runs holds its buffers.
            self.wait()?;
        }
        for (Reuse { slot, tokens }, mut slots) in copies {
            slots.sort_unstable();
            self.model.copy_prefix(&mut self.cache, slot as i32, &slots, tokens as i32)?;
            if self.on_gpu {
                transforms::async_eval(self.cache.arrays())?;
            } else {
                transforms::eval(self.cache.arrays())?;
            }
        }
        Ok(())
    }

    /// Encodes what the admitted rows hear, and keeps what the decoder looks up in it in their slots.
    fn encode(&mut self, admitted: &[Admission]) -> Result<(), EngineError> {
        let impossible = |reason: &str| EngineError::Plan { step: 0, reason: reason.to_owned() };
        let Some(encoder) = self.model.encoder() else {
            return match admitted.iter().find(|admission| admission.request.window.is_some()) {
                Some(_) => Err(impossible("a row has a recording, and the model hears nothing")),
                None => Ok(()),
            };
        };
        if admitted.is_empty() {
            return Ok(());
        }
        if !self.on_gpu {
            // The cache is written below, and a step that still runs holds its buffers.
            self.wait()?;
        }
        let (frames, bins) = encoder.input();
        for group in admitted.chunks(price::encoded_at_once(self.on_gpu)) {
            let mut values = Vec::with_capacity(group.len() * (frames * bins) as usize);
            for admission in group {
                let window = admission.request.window.as_ref();
                let features = &window.ok_or_else(|| impossible("a row of a speech model has no recording"))?.features;
                if (features.frames, features.bins) != (frames as usize, bins as usize) {
                    let reason = format!("features of {} × {}, the model takes {frames} × {bins}", features.frames, features.bins);
                    return Err(impossible(&reason));
                }
                values.extend_from_slice(&features.values);
            }
            let features = Array::from_slice(&values, &[group.len() as i32, frames, bins]);
            let encoded = encoder.encode(&features)?;
            let slots: Vec<i32> = group.iter().map(|admission| admission.slot as i32).collect();
            encoder.hear(&encoded, &slots, &mut self.cache)?;
            if self.on_gpu {
                transforms::async_eval(self.cache.arrays())?;
            } else {
                transforms::eval(self.cache.arrays())?;
            }
        }
        Ok(())
    }

    fn sample(&self, logits: &Array, sampled: &[(SequenceId, Option<u32>)], slots: &[i32]) -> Result<Chosen, EngineError> {
        if self.model.encoder().is_some() {
            return self.choose(logits, sampled, slots);
        }
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
        let tokens = sample::sample(logits, &rows, Some(&self.newest))?;
        let logprobs = StepLogprobs::of(logits, &tokens, rows.iter().map(|row| row.generation.logprobs))?;
        Ok(Chosen { tokens, logprobs, speech: None })
    }

    /// [`MlxEngine::sample`] for a speech model.
    fn choose(&self, logits: &Array, sampled: &[(SequenceId, Option<u32>)], slots: &[i32]) -> Result<Chosen, EngineError> {
        let mut rows = Vec::with_capacity(sampled.len());
        for ((id, position), &slot) in sampled.iter().zip(slots) {
            let sequence = self.sequences.get(id);
            let Some((sequence, window)) = sequence.and_then(|sequence| Some((sequence, sequence.request.window.as_deref()?)))
            else {
                return Err(EngineError::Plan { step: 0, reason: format!("{id:?} is to be sampled and has no recording") });
            };
            let request = &sequence.request;
            let index = position.map_or(0, |position| position + 1 - request.prompt.len() as u32);
            let known = &sequence.tokens[..sequence.tokens.len().min(index as usize)];
            rows.push(SpeechRow {
                window,
                temperature: request.generation.temperature,
                seed: request.seed,
                index,
                known,
                newest: (index as usize > known.len()).then_some(slot),
            });
        }
        let speech::Chosen { tokens, logprobs } = speech::choose(logits, &rows, &self.newest)?;
        Ok(Chosen { tokens, logprobs: None, speech: Some(logprobs) })
    }

    /// Waits for what was launched last.
    fn wait(&self) -> Result<(), EngineError> {
        let since = Instant::now();
        if let Some(Launched { hidden, chosen, .. }) = self.launched.back() {
            chosen.as_ref().map_or(hidden, |chosen| &chosen.tokens).eval()?;
        }
        self.waited.set(self.waited.get() + since.elapsed());
        Ok(())
    }
}

impl Engine for MlxEngine {
    fn price(&self) -> Price {
        self.price_of(false)
    }

    fn prefill_defaults(&self) -> PrefillDefaults {
        // A GPU is filled by so many.
        if self.on_gpu { PrefillDefaults { chunk: 2048, concurrency: 64 } } else { PrefillDefaults { chunk: 512, concurrency: 8 } }
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
        if let Some((rows, probabilities)) = launched.no_speech {
            for (row, probability) in rows.into_iter().zip(on_host::<f32>(&probabilities)?) {
                if let Some(own) = self.sequences.get_mut(&row) {
                    own.speech.no_speech_prob = *probability;
                }
            }
        }
        let Some(Chosen { tokens, logprobs, speech }) = launched.chosen else { return Ok(Vec::new()) };
        let since = Instant::now();
        let tokens = on_host::<i32>(&tokens)?;
        self.waited.set(self.waited.get() + since.elapsed());
        let speech = speech.as_ref().map(on_host::<f32>).transpose()?;
        let mut sampled = Vec::with_capacity(launched.order.len());
        for (sequence, place) in launched.order {
            let token = tokens[place] as u32;
            if let Some(own) = self.sequences.get_mut(&sequence) {
                own.tokens.push(token);
                own.speech.sum_logprob += speech.map_or(0.0, |logprobs| logprobs[place]);
                if let (Some(of_step), Some(logprobs)) = (&logprobs, &mut own.logprobs) {
                    of_step.add_to(place, logprobs)?;
                }
            }
            sampled.push(Sampled { sequence, token, stop_string: false });
        }
        Ok(sampled)
    }

    fn speech(&self, sequence: SequenceId) -> Option<SpeechScore> {
        let row = self.sequences.get(&sequence)?;
        row.request.window.is_some().then_some(row.speech)
    }

    fn take_logprobs(&mut self, sequence: SequenceId) -> Option<Logprobs> {
        self.sequences.get_mut(&sequence)?.logprobs.take()
    }
}

/// Without slots, for keys of `dtype`.
fn empty_cache(model: &dyn Model, dtype: Dtype, on_gpu: bool) -> Result<Cache, EngineError> {
    let key_step = if on_gpu { price::SLOT_TOKENS_STEP as i32 } else { 1 };
    let cache = Cache::new(model.cache_layout(), dtype, key_step)?;
    match model.encoder() {
        Some(encoder) => cache.with_cross(encoder.cross_layout()),
        None => Ok(cache),
    }
}
