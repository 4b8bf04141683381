//! The scheduler against the fake engine, whose shadow cache refuses whatever a plan claims falsely.

mod faults;
mod media;
mod prefix;
mod random;
mod script;
mod small;

use std::collections::VecDeque;
use std::sync::Arc;

use mlxbatch::engine::Engine;
use mlxbatch::engine::fake::{FakeEngine, FakeModel};
use mlxbatch::media::Patches;
use mlxbatch::schedule::{
    EncodePrice, Finished, Limits, MediaLoad, Medium, MediumContent, PREFIXES_MAX, Plan, Price, Request, Scheduler, SequenceId,
};

/// A byte a token of a slot, slots in steps of `slot_tokens_step`, and a byte a token of a chunk.
fn price(slot_tokens_step: u32) -> Price {
    Price {
        full_bytes_per_token: 1,
        windows: Vec::new(),
        fixed_bytes_per_slot: 0,
        slot_tokens_step,
        prefill_bytes_per_token: 1,
        prefill_bytes_per_pair: 0,
        padding_tokens: 0,
        decode_bytes_per_slot: 0,
        window_bytes: 0,
        image: EncodePrice::default(),
        audio: EncodePrice::default(),
        media_at_once: 1,
        soft_bytes_per_token: 0,
        prefixes: true,
    }
}

/// A model that never ends a row by itself.
fn model(limits: &Limits) -> FakeModel {
    FakeModel {
        price: limits.price.clone(),
        context_length: limits.context_length,
        alphabet: (0..1000).collect(),
        stop_token: 1000,
        stop_one_in: 0,
    }
}

fn request(sequence: u64, prompt_tokens: u32, max_tokens: u32, stop_tokens: &[u32]) -> Arc<Request> {
    Arc::new(Request {
        sequence: SequenceId(sequence),
        prompt: (0..prompt_tokens).map(|index| 100 * index + sequence as u32).collect(),
        max_tokens,
        stop_tokens: stop_tokens.into(),
        generation: Arc::default(),
        seed: sequence,
        window: None,
        media: Vec::new(),
        whole_spans: false,
    })
}

/// The same row, its first `head` tokens those that all rows of its `family` start with, and the first 6 those of every family.
fn sharing(row: &Request, family: u32, head: usize) -> Arc<Request> {
    let mut prompt = row.prompt.clone();
    for (token, index) in prompt.iter_mut().zip(0..).take(head) {
        *token = 1_000_000 + index + if index < 6 { 0 } else { 1000 * family };
    }
    Arc::new(Request { prompt, ..row.clone() })
}

/// The same row with images in it, in order: each at a place, so many tokens long, with an identity. Those that have no room are
/// left out.
fn seeing(row: &Request, media: &[((u32, u32), u32)], whole_spans: bool) -> Arc<Request> {
    let mut seeing = Request { whole_spans, ..row.clone() };
    for &((first, tokens), identity) in media {
        let end = seeing.media.last().map_or(0, Medium::end);
        if first < end || (first + tokens) as usize > seeing.prompt.len() {
            continue;
        }
        seeing.prompt[first as usize..(first + tokens) as usize].fill(7);
        let patches = Patches { values: Vec::new(), columns: 0, rows: 0, soft_tokens: tokens };
        seeing.media.push(Medium { first, tokens, content: Arc::new(MediumContent::Image(patches)), identity: identity.into() });
    }
    Arc::new(seeing)
}

/// The same row with a stop token among its tokens: its last but one where there are two.
fn stopping(model: &FakeModel, row: &Request) -> Arc<Request> {
    let (tokens, _) = model.completion(&Request { stop_tokens: Arc::new([]), ..row.clone() });
    let stop_token = tokens[tokens.len().max(2) - 2];
    Arc::new(Request { stop_tokens: Arc::new([stop_token]), ..row.clone() })
}

/// What a run gave.
#[derive(Debug, Default, PartialEq)]
struct Run {
    finished: Vec<Finished>,
    /// In the order of their admission.
    admitted: Vec<SequenceId>,
    /// Prompt tokens copied for each of them.
    cached_tokens: Vec<u32>,
    /// Prompt tokens computed, those of prefixes included.
    computed_tokens: u64,
    steps: u64,
}

/// A scheduler, the fake engine that checks it, and the plans between them, run as a job's loop runs them.
struct Loop {
    scheduler: Scheduler,
    engine: FakeEngine,
    launched: VecDeque<Plan>,
    limits: Limits,
    /// Plans in flight at most.
    depth: usize,
    /// Rows admitted whose last chunk is not planned yet, in the order of their admission.
    in_prefill: Vec<SequenceId>,
    run: Run,
}

impl Loop {
    fn new(limits: &Limits, model: &FakeModel, depth: usize) -> Self {
        let mut engine = FakeEngine::new(model.clone());
        engine.hold_to(limits.clone());
        let scheduler = Scheduler::new(limits.clone());
        let (launched, limits, run) = (VecDeque::new(), limits.clone(), Run::default());
        Self { scheduler, engine, launched, limits, depth, in_prefill: Vec::new(), run }
    }

    /// Plans and launches a step if there is anything to compute, then commits the oldest when as many are in flight as may be, or
    /// when nothing else can be done.
    fn turn(&mut self) -> Result<(), String> {
        let plan = self.scheduler.plan();
        let idle = plan.is_empty();
        if !idle {
            let bytes = self.scheduler.counters().kv_bytes;
            let least = self.limits.layout_bytes(plan.slots, plan.slot_tokens, &MediaLoad::default());
            if bytes > self.limits.kv_bytes_max || bytes < least {
                return Err(format!("step {} costs {bytes} bytes: {:?}", plan.step, self.scheduler.counters()));
            }
            self.launch(plan)?;
        }
        if self.launched.len() != self.scheduler.in_flight() {
            return Err(format!(
                "{} steps are launched, and the scheduler counts {}",
                self.launched.len(),
                self.scheduler.in_flight()
            ));
        }
        if idle || self.launched.len() == self.depth {
            self.commit()?;
        }
        Ok(())
    }

    /// Every row in prefill has its chunk in the plan, in the order of admission; the engine checks what else the plan claims.
    fn launch(&mut self, plan: Plan) -> Result<(), String> {
        let admitted = || plan.admitted.iter().filter(|admission| !admission.request.sequence.is_prefix());
        self.in_prefill.extend(admitted().map(|admission| admission.request.sequence));
        let chunks = || plan.prefill.iter().filter(|prefill| !prefill.sequence.is_prefix());
        if !chunks().map(|prefill| prefill.sequence).eq(self.in_prefill.iter().copied()) {
            return Err(format!("step {} computes {:?}, and in prefill are {:?}", plan.step, plan.prefill, self.in_prefill));
        }
        self.in_prefill = chunks().filter(|prefill| !prefill.last).map(|prefill| prefill.sequence).collect();
        self.engine.launch(&plan).map_err(|error| error.to_string())?;
        self.run.admitted.extend(admitted().map(|admission| admission.request.sequence));
        self.run.cached_tokens.extend(admitted().map(|admission| admission.reuse.map_or(0, |reuse| reuse.tokens)));
        self.run.computed_tokens += plan.prefill.iter().map(|prefill| u64::from(prefill.length)).sum::<u64>();
        self.run.steps += 1;
        self.launched.push_back(plan);
        Ok(())
    }

    fn commit(&mut self) -> Result<(), String> {
        let plan = self.launched.pop_front().ok_or("the scheduler is not idle, and has nothing to compute")?;
        let sampled = self.engine.collect().map_err(|error| error.to_string())?;
        self.run.finished.extend(self.scheduler.commit(&plan, &sampled).map_err(|error| error.to_string())?);
        Ok(())
    }

    /// Runs `requests` to the end, then one more row, which must find every slot free.
    fn run(mut self, requests: &[Arc<Request>]) -> Result<Run, String> {
        let mut requests_left = requests.iter();
        loop {
            for request in requests_left.by_ref().take(self.scheduler.wants()) {
                self.scheduler.add(Arc::clone(request)).map_err(|refused| refused.to_string())?;
            }
            if self.scheduler.is_idle() {
                break;
            }
            self.turn()?;
            if self.run.steps > work(requests, &self.limits) {
                return Err(format!("not done after {} steps", self.run.steps));
            }
        }
        self.finds_slots_free()?;
        Ok(self.run)
    }

    fn finds_slots_free(&mut self) -> Result<(), String> {
        let last = SequenceId(SequenceId::PREFIXES.0 - 1);
        let one_token = Request { sequence: last, prompt: vec![1], ..(*request(0, 1, 1, &[])).clone() };
        self.scheduler.add(Arc::new(one_token)).map_err(|refused| refused.to_string())?;
        self.engine.launch(&self.scheduler.plan()).map_err(|error| error.to_string())?;
        let owners: Vec<_> = self.engine.owners().collect();
        // It has the lowest slot but for those of prefixes, which may stay.
        let (prefixes, rows): (Vec<_>, Vec<_>) = owners.iter().copied().partition(|(_, owner)| owner.is_prefix());
        let lowest = (0..).find(|slot| prefixes.iter().all(|(taken, _)| taken != slot));
        let most = if self.limits.prefix_tokens_min.is_some() { PREFIXES_MAX } else { 0 };
        if !matches!(rows[..], [(slot, owner)] if Some(slot) == lowest && owner == last) || prefixes.len() > most {
            return Err(format!("slots are still taken at the end: {owners:?}"));
        }
        Ok(())
    }
}

/// Steps that rows take one after another, each with one dropped token at its end, and none with a prefix.
fn work(requests: &[Arc<Request>], limits: &Limits) -> u64 {
    let chunks = |row: &Request| row.prompt.len().div_ceil(limits.prefill_chunk as usize) + 2 * row.media.len();
    requests.iter().map(|row| chunks(row) as u64 + u64::from(row.max_tokens)).sum()
}
