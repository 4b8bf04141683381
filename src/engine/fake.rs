//! An engine without a model, which believes nothing.
//!
//! [`FakeEngine`] samples a hash of a sequence's own history, so that a row's tokens depend on its prompt and its seed and on no
//! schedule. Beside that it keeps a shadow of the cache a real engine would have, slot by slot: who owns it, which positions are
//! filled, what is set aside. A plan that contradicts the shadow is refused with a [`Fault`] that names what is wrong. It serves
//! the scheduler's tests, and jobs whose model is `fake`: to try a manifest, or to measure everything but the model. A row that
//! reuses a prefix goes on from what that prefix's slot holds, whether or not it is what the row starts with.
//!
//! A step is computed when it is launched; its tokens are handed over when it is collected, and until then the shadow counts the
//! step as in flight.
//!
//! # Known weaknesses
//!
//! - What a row may claim is checked, not what it is owed: a scheduler that lets a row wait for ever is not found out here.
//! - A row that a stop string ends, or that was cancelled, looks to the engine like one that goes on, so its release is believed.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use thiserror::Error;

use super::{Engine, EngineError, Logprobs, SpeechScore, TokenLogprob, logprobs};
use crate::schedule::{
    Admission, Decode, EncodePrice, FinishReason, IN_FLIGHT_MAX, Limits, MediaLoad, Medium, Plan, Prefill, Price, Release, Request,
    Reuse, Sampled, SequenceId,
};

/// What the fake pretends to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FakeModel {
    pub price: Price,
    /// Tokens a sequence can have, prompt and completion together.
    pub context_length: u32,
    /// Tokens it samples, each as likely as it is often in here; empty is as `[0]`.
    pub alphabet: Vec<u32>,
    pub stop_token: u32,
    /// Samples `stop_token` once in so many tokens on average; 0 is never.
    pub stop_one_in: u32,
}

impl FakeModel {
    /// Tokens of [`bytes`](Self::bytes): every byte, and the end.
    pub const BYTES_VOCABULARY: u32 = 257;
    /// The end token of [`bytes`](Self::bytes).
    pub const BYTES_STOP_TOKEN: u32 = 256;

    /// A model whose tokens are bytes: lower-case words that end now and then. Its cache costs what SmolLM2-135M's does in float32:
    /// 30 layers, keys and values, 3 heads of 64 numbers of 4 bytes.
    pub fn bytes() -> Self {
        Self {
            price: Price {
                full_bytes_per_token: 30 * 2 * 3 * 64 * 4,
                windows: Vec::new(),
                fixed_bytes_per_slot: 0,
                slot_tokens_step: 256,
                prefill_bytes_per_token: 0,
                prefill_bytes_per_pair: 0,
                decode_bytes_per_slot: 0,
                padding_tokens: 0,
                window_bytes: 0,
                image: EncodePrice::default(),
                audio: EncodePrice::default(),
                media_at_once: 1,
                soft_bytes_per_token: 0,
                prefixes: true,
            },
            context_length: 8192,
            alphabet: b"etaoinshrdlucmfwypvbgkqjxz eao tin ".iter().map(|&byte| u32::from(byte)).collect(),
            stop_token: Self::BYTES_STOP_TOKEN,
            stop_one_in: 64,
        }
    }

    /// The token that follows a history.
    fn sample(&self, history: History) -> u32 {
        let bits = history.bits();
        if self.stop_one_in > 0 && (bits >> 32).is_multiple_of(u64::from(self.stop_one_in)) {
            return self.stop_token;
        }
        let index = (bits & 0xffff_ffff) as usize % self.alphabet.len().max(1);
        self.alphabet.get(index).copied().unwrap_or(0)
    }

    /// What it samples, the likeliest first, each with the log-probability that it has after any history.
    pub fn likeliest(&self) -> Vec<TokenLogprob> {
        let stop = if self.stop_one_in == 0 { 0.0 } else { 1.0 / f64::from(self.stop_one_in) };
        let alphabet = if self.alphabet.is_empty() { &[0][..] } else { &self.alphabet };
        let mut chances = BTreeMap::from([(self.stop_token, stop)]);
        for &token in alphabet {
            *chances.entry(token).or_insert(0.0) += (1.0 - stop) / alphabet.len() as f64;
        }
        chances.retain(|_, chance| *chance > 0.0);
        let logprob = |(token_id, chance): (u32, f64)| TokenLogprob { token_id, logprob: chance.ln().min(0.0) as f32 };
        let mut tokens: Vec<_> = chances.into_iter().map(logprob).collect();
        logprobs::sort(&mut tokens);
        tokens
    }

    /// What a row gives, told from its request alone: the oracle for every schedule.
    pub fn completion(&self, request: &Request) -> (Vec<u32>, FinishReason) {
        let mut history = History::of(request).over(request, 0, request.prompt.len() as u32);
        let mut tokens = Vec::new();
        loop {
            let token = self.sample(history);
            history = history.with(token);
            tokens.push(token);
            if request.stop_tokens.contains(&token) {
                return (tokens, FinishReason::Stop);
            }
            if tokens.len() as u64 >= u64::from(request.max_tokens) {
                return (tokens, FinishReason::Length);
            }
        }
    }
}

/// Hash of a seed and the tokens after it, mixed by the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom
/// Number Generators, 2014, with Stafford's variant 13 of the constants).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct History(u64);

impl History {
    /// Before a row's prompt: its seed, and some of what is heard.
    fn of(request: &Request) -> Self {
        let heard = request.window.iter().flat_map(|window| window.features.values.iter().step_by(97));
        heard.fold(Self(request.seed), |history, value| history.with(value.to_bits()))
    }

    /// Behind the prompt's tokens `start .. end`, and what their media are.
    fn over(self, request: &Request, start: u32, end: u32) -> Self {
        let mut media = request.media.iter().skip_while(|medium| medium.first < start).peekable();
        let tokens = (start..end).zip(&request.prompt[start as usize..end as usize]);
        tokens.fold(self, |mut history, (position, &token)| {
            if let Some(medium) = media.next_if(|medium| medium.first == position) {
                let how = history.with(u32::from(request.whole_spans));
                history = (0..4).fold(how, |history, part| history.with((medium.identity >> (32 * part)) as u32));
            }
            history.with(token)
        })
    }

    fn with(self, token: u32) -> Self {
        Self(Self(self.0 ^ (u64::from(token) + 1)).bits())
    }

    fn bits(self) -> u64 {
        let mut bits = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }
}

/// What makes a placeholder what it is.
fn medium_at(request: &Request, position: u32) -> Option<(u32, u32, u128, bool)> {
    let medium = request.media.iter().find(|medium| medium.first <= position && position < medium.end())?;
    Some((medium.first, medium.tokens, medium.identity, request.whole_spans))
}

/// What a plan claims falsely. It reaches the caller as the reason of [`EngineError::Plan`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fault {
    #[error("step {expected} is next")]
    Step { expected: u64 },
    #[error("{IN_FLIGHT_MAX} steps are in flight, and no more may be launched before one is collected")]
    TooManyInFlight,
    #[error("no step is in flight that could be collected")]
    NothingInFlight,
    #[error("it computes nothing")]
    Empty,
    #[error("its layout of {slots} slots of {slot_tokens} tokens costs {bytes} bytes, over the budget of {kv_bytes_max}")]
    OverBudget { slots: u32, slot_tokens: u32, bytes: u64, kv_bytes_max: u64 },
    #[error("its layout has {slots} slots, and {slots_max} are the limit")]
    TooManySlots { slots: u32, slots_max: u32 },
    #[error("{resident} rows are in the cache, and {rows} are the limit")]
    TooManyRows { resident: u32, rows: u32 },
    #[error("copying a prefix of {tokens} tokens takes {bytes} bytes more than the budget of {kv_bytes_max}")]
    CopyOverBudget { tokens: u32, bytes: u64, kv_bytes_max: u64 },
    #[error("slot {slot} is outside of its layout of {slots} slots, and sequence {sequence} is in it")]
    OutsideLayout { sequence: u64, slot: u32, slots: u32 },
    #[error("sequence {sequence} has {reserved_tokens} tokens set aside, and its layout has {slot_tokens} a slot")]
    SlotTooShort { sequence: u64, reserved_tokens: u32, slot_tokens: u32 },
    #[error("sequence {sequence} is admitted with {stated} tokens set aside, and can fill {expected}")]
    Reservation { sequence: u64, stated: u32, expected: u32 },
    #[error("sequence {sequence} is admitted with nothing to compute")]
    EmptyRequest { sequence: u64 },
    #[error("sequence {sequence} is admitted as a prefix, which the limits or the price leave no room for")]
    NoPrefixes { sequence: u64 },
    #[error("sequence {sequence} takes over the prefix in slot {slot}, which holds none that is computed whole")]
    NoPrefix { sequence: u64, slot: u32 },
    #[error("sequence {sequence} takes over {tokens} tokens of its {prompt_tokens}, and {shared} are those of the prefix")]
    PrefixTokens { sequence: u64, tokens: u32, prompt_tokens: u64, shared: u32 },
    #[error("sequence {sequence} takes over {tokens} of the {prefix_tokens} tokens of a prefix, which a window has left behind")]
    PrefixCut { sequence: u64, tokens: u32, prefix_tokens: u32 },
    #[error("sequence {sequence} has a medium of {tokens} tokens at {first}, which is parted")]
    PartedMedium { sequence: u64, first: u32, tokens: u32 },
    #[error("sequence {sequence} is admitted to slot {slot}, which sequence {owner} has")]
    SlotTaken { sequence: u64, slot: u32, owner: u64 },
    #[error("sequence {sequence} does not have slot {slot}")]
    NotInSlot { sequence: u64, slot: u32 },
    #[error("sequence {sequence} is released from slot {slot}, which a step in flight computes")]
    ReleasedInFlight { sequence: u64, slot: u32 },
    #[error("sequence {sequence} is computed twice")]
    Twice { sequence: u64 },
    #[error("sequence {sequence} has ended: its last token was collected")]
    Ended { sequence: u64 },
    #[error("prefill of sequence {sequence} starts at position {start}, and {filled} positions are filled")]
    PrefillPosition { sequence: u64, start: u32, filled: u32 },
    #[error("prefill of sequence {sequence} covers {start}..{end} of a prompt of {prompt_tokens} tokens")]
    PrefillRange { sequence: u64, start: u32, end: u64, prompt_tokens: u64 },
    #[error("prefill of sequence {sequence} covers {start}..{end}, which is not one chunk of {prefill_chunk} tokens or the last")]
    PrefillChunk { sequence: u64, start: u32, end: u64, prefill_chunk: u32 },
    #[error(
        "prefill of sequence {sequence} says last = {stated}, and its prompt of {prompt_tokens} tokens says otherwise at {end}"
    )]
    PrefillLast { sequence: u64, stated: bool, end: u64, prompt_tokens: u64 },
    #[error("its prefill covers {tokens} prompt tokens, and {prefill_chunk} are the limit of a step")]
    PrefillTokens { tokens: u64, prefill_chunk: u32 },
    #[error("{rows} rows are in prefill, and {prompt_concurrency} are the limit")]
    TooManyInPrefill { rows: usize, prompt_concurrency: u32 },
    #[error("sequence {sequence} is decoded with {filled} of its {prompt_tokens} prompt tokens computed")]
    DecodeBeforePrompt { sequence: u64, filled: u32, prompt_tokens: u64 },
    #[error("sequence {sequence} is decoded at position {position}, and {filled} positions are filled")]
    DecodePosition { sequence: u64, position: u32, filled: u32 },
    #[error("sequence {sequence} is decoded at position {position}, and has {reserved_tokens} tokens set aside")]
    BeyondReservation { sequence: u64, position: u32, reserved_tokens: u32 },
}

/// What a slot of the cache holds.
#[derive(Debug)]
struct Slot {
    request: Arc<Request>,
    /// Positions `0 .. filled` hold keys and values.
    filled: u32,
    /// Hash of the tokens at those positions.
    history: History,
    /// Sampled last, not yet in the cache.
    token: u32,
    /// Tokens sampled and collected.
    collected: u32,
    /// Steps launched and not yet collected that compute the slot.
    in_flight: u32,
    /// The step that computed it last.
    step: Option<u64>,
    /// Its last token was collected.
    ended: bool,
    /// Of the tokens collected, where the row asks.
    logprobs: Option<Logprobs>,
}

/// A step launched and not yet collected: the slots it computes, and its tokens.
#[derive(Debug)]
struct Step {
    chunks: Vec<u32>,
    sampled: Vec<(u32, Sampled)>,
}

/// See the [module](self).
#[derive(Debug)]
pub struct FakeEngine {
    model: FakeModel,
    likeliest: Vec<TokenLogprob>,
    limits: Option<Limits>,
    /// By slot.
    slots: Vec<Option<Slot>>,
    in_flight: VecDeque<Step>,
    /// The step that must come next.
    step: u64,
}

impl FakeEngine {
    pub fn new(model: FakeModel) -> Self {
        let (likeliest, in_flight) = (model.likeliest(), VecDeque::with_capacity(IN_FLIGHT_MAX));
        Self { model, likeliest, limits: None, slots: Vec::new(), in_flight, step: 0 }
    }

    /// From now on plans must keep to `limits` too: budget, rows, chunks, prompt tokens and rows of a step's prefill.
    pub fn hold_to(&mut self, limits: Limits) {
        self.limits = Some(limits);
    }

    /// Sequences in the cache, by slot.
    pub fn owners(&self) -> impl Iterator<Item = (u32, SequenceId)> + '_ {
        (0..).zip(&self.slots).filter_map(|(slot, owned)| owned.as_ref().map(|owned| (slot, owned.request.sequence)))
    }

    fn launch_step(&mut self, plan: &Plan) -> Result<Step, Fault> {
        if plan.step != self.step {
            return Err(Fault::Step { expected: self.step });
        }
        if self.in_flight.len() == IN_FLIGHT_MAX {
            return Err(Fault::TooManyInFlight);
        }
        if plan.is_empty() {
            return Err(Fault::Empty);
        }
        plan.released.iter().try_for_each(|release| self.release(release))?;
        let mut step = Step { chunks: Vec::new(), sampled: Vec::with_capacity(plan.prefill.len() + plan.decode.len()) };
        plan.admitted.iter().try_for_each(|admission| self.admit(admission, plan.slots, &mut step))?;
        self.check_layout(plan)?;
        plan.prefill.iter().try_for_each(|prefill| self.prefill(prefill, &mut step))?;
        self.check_prefill_tokens(plan)?;
        plan.decode.iter().try_for_each(|decode| self.decode(decode, &mut step))?;
        Ok(step)
    }

    fn release(&mut self, &Release { sequence, slot }: &Release) -> Result<(), Fault> {
        let place =
            self.slots.get_mut(slot as usize).filter(|place| place.as_ref().is_some_and(|row| row.request.sequence == sequence));
        let Some(place) = place else { return Err(Fault::NotInSlot { sequence: sequence.0, slot }) };
        if place.as_ref().is_some_and(|row| row.in_flight > 0) {
            return Err(Fault::ReleasedInFlight { sequence: sequence.0, slot });
        }
        *place = None;
        Ok(())
    }

    fn admit(&mut self, admission: &Admission, slots: u32, step: &mut Step) -> Result<(), Fault> {
        let Admission { request, slot, reserved_tokens, reuse } = admission;
        let (sequence, slot) = (request.sequence.0, *slot);
        if request.prompt.is_empty() || (request.max_tokens == 0) != request.sequence.is_prefix() {
            return Err(Fault::EmptyRequest { sequence });
        }
        let shares = self.limits.as_ref().is_none_or(|limits| limits.prefix_tokens_min.is_some() && limits.price.prefixes);
        if request.sequence.is_prefix() && !shares {
            return Err(Fault::NoPrefixes { sequence });
        }
        let expected = request.reserved_tokens();
        if *reserved_tokens != expected {
            return Err(Fault::Reservation { sequence, stated: *reserved_tokens, expected });
        }
        // Before the slots grow to it: a slot number alone must not be able to allocate.
        if slot >= slots {
            return Err(Fault::OutsideLayout { sequence, slot, slots });
        }
        if let Some(slots_max) = self.limits.as_ref().map(Limits::slots_max).filter(|slots_max| slot >= *slots_max) {
            return Err(Fault::TooManySlots { slots, slots_max });
        }
        let (copied, history) = match reuse {
            Some(reuse) => (reuse.tokens, self.copy(request, *reuse, step)?),
            None => (0, History::of(request)),
        };
        if self.slots.len() <= slot as usize {
            self.slots.resize_with(slot as usize + 1, || None);
        }
        let place = &mut self.slots[slot as usize];
        if let Some(owner) = place {
            return Err(Fault::SlotTaken { sequence, slot, owner: owner.request.sequence.0 });
        }
        let asked = request.generation.logprobs.filter(|_| request.window.is_none());
        *place = Some(Slot {
            request: Arc::clone(request),
            filled: copied,
            history,
            token: 0,
            collected: 0,
            in_flight: 0,
            step: None,
            ended: false,
            logprobs: asked.map(|top_k| Logprobs::new(self.likeliest.len().min(top_k as usize))),
        });
        Ok(())
    }

    /// What a row's slot holds after it has taken over a prefix, which is in flight by that.
    fn copy(&mut self, request: &Request, Reuse { slot, tokens }: Reuse, step: &mut Step) -> Result<History, Fault> {
        let sequence = request.sequence.0;
        let prefix = self.slots.get_mut(slot as usize).and_then(Option::as_mut);
        let whole =
            |prefix: &&mut Slot| prefix.request.sequence.is_prefix() && prefix.filled as usize == prefix.request.prompt.len();
        let Some(prefix) = prefix.filter(whole) else { return Err(Fault::NoPrefix { sequence, slot }) };
        let held = &prefix.request.prompt;
        let prompt_tokens = request.prompt.len() as u64;
        let same = |(position, (held, own)): &(u32, (&u32, &u32))| {
            held == own && medium_at(&prefix.request, *position) == medium_at(request, *position)
        };
        let shared = (0..).zip(held.iter().zip(&request.prompt)).take_while(same).count() as u32;
        if tokens == 0 || tokens > shared || u64::from(tokens) >= prompt_tokens {
            return Err(Fault::PrefixTokens { sequence, tokens, prompt_tokens, shared });
        }
        if let Some(medium) = request.media.iter().find(|medium| medium.is_parted(tokens)) {
            return Err(Fault::PartedMedium { sequence, first: medium.first, tokens: medium.tokens });
        }
        let prefix_tokens = prefix.filled;
        if tokens < prefix_tokens && self.model.price.windows.iter().any(|&(window, _)| window < prefix_tokens) {
            return Err(Fault::PrefixCut { sequence, tokens, prefix_tokens });
        }
        prefix.in_flight += 1;
        step.chunks.push(slot);
        Ok(History::of(request).over(&prefix.request, 0, tokens))
    }

    /// The layout holds every row in the cache and costs no more than the budget.
    fn check_layout(&self, plan: &Plan) -> Result<(), Fault> {
        let (slots, slot_tokens) = (plan.slots, plan.slot_tokens);
        for (row, slot) in self.slots.iter().zip(0..) {
            let Some(row) = row else { continue };
            let (sequence, reserved_tokens) = (row.request.sequence.0, row.request.reserved_tokens());
            if slot >= slots {
                return Err(Fault::OutsideLayout { sequence, slot, slots });
            }
            if reserved_tokens > slot_tokens {
                return Err(Fault::SlotTooShort { sequence, reserved_tokens, slot_tokens });
            }
        }
        let Some(limits) = &self.limits else { return Ok(()) };
        let slots_max = limits.slots_max();
        if slots > slots_max {
            return Err(Fault::TooManySlots { slots, slots_max });
        }
        let rows = self.slots.iter().flatten().filter(|slot| !slot.request.sequence.is_prefix());
        let resident = rows.count() as u32;
        if resident > limits.rows {
            return Err(Fault::TooManyRows { resident, rows: limits.rows });
        }
        let (bytes, kv_bytes_max) = (limits.layout_bytes(slots, slot_tokens, &self.media(plan)), limits.kv_bytes_max);
        if bytes > kv_bytes_max {
            return Err(Fault::OverBudget { slots, slot_tokens, bytes, kv_bytes_max });
        }
        // A slot that is copied in this step must have been priced for that.
        let copied = plan.admitted.iter().filter_map(|admission| self.slots.get(admission.reuse?.slot as usize)?.as_ref());
        if let Some(tokens) = copied.map(|prefix| prefix.filled).max() {
            let bytes = bytes.saturating_add(limits.copy_bytes(tokens, slot_tokens));
            if bytes > kv_bytes_max {
                return Err(Fault::CopyOverBudget { tokens, bytes, kv_bytes_max });
            }
        }
        if plan.prefill.len() > limits.prompt_concurrency as usize {
            return Err(Fault::TooManyInPrefill { rows: plan.prefill.len(), prompt_concurrency: limits.prompt_concurrency });
        }
        Ok(())
    }

    /// What is encoded in the step, and what goes on.
    fn media(&self, plan: &Plan) -> MediaLoad {
        let mut media = MediaLoad::default();
        for admission in &plan.admitted {
            media.admit(&admission.request, admission.reuse.map_or(0, |reuse| reuse.tokens), &self.model.price);
        }
        for Prefill { sequence, slot, .. } in &plan.prefill {
            if plan.admitted.iter().all(|admission| admission.request.sequence != *sequence)
                && let Some(row) = self.slots.get(*slot as usize).and_then(Option::as_ref)
            {
                media.keep(&row.request);
            }
        }
        media
    }

    fn prefill(&mut self, &Prefill { sequence, slot, start, length, last }: &Prefill, step: &mut Step) -> Result<(), Fault> {
        let prefill_chunk = self.limits.as_ref().map(|limits| limits.prefill_chunk);
        let row = Slot::computed(&mut self.slots, sequence, slot, self.step)?;
        let (sequence, filled) = (sequence.0, row.filled);
        if start != filled {
            return Err(Fault::PrefillPosition { sequence, start, filled });
        }
        let (end, prompt_tokens) = (u64::from(start) + u64::from(length), row.request.prompt.len() as u64);
        if length == 0 || end > prompt_tokens {
            return Err(Fault::PrefillRange { sequence, start, end, prompt_tokens });
        }
        let whole = end == prompt_tokens;
        if last != (whole && !row.request.sequence.is_prefix()) {
            return Err(Fault::PrefillLast { sequence, stated: last, end, prompt_tokens });
        }
        let parts = |medium: &&Medium| row.request.whole_spans && [start, end as u32].iter().any(|at| medium.is_parted(*at));
        if let Some(medium) = row.request.media.iter().find(parts) {
            return Err(Fault::PartedMedium { sequence, first: medium.first, tokens: medium.tokens });
        }
        if let Some(prefill_chunk) = prefill_chunk
            && !row.is_chunk(start, end as u32, prefill_chunk)
        {
            return Err(Fault::PrefillChunk { sequence, start, end, prefill_chunk });
        }
        row.history = row.history.over(&row.request, start, end as u32);
        row.filled += length;
        if last {
            step.sampled.push((slot, row.sample(&self.model)));
        } else {
            step.chunks.push(slot);
        }
        Ok(())
    }

    /// All chunks are computed in one forward pass; the budget has the scratch of one full chunk, and of one medium alone.
    fn check_prefill_tokens(&self, plan: &Plan) -> Result<(), Fault> {
        let tokens = plan.prefill.iter().map(|prefill| u64::from(prefill.length)).sum();
        let limit = |limits: &Limits| if plan.prefill.len() == 1 { limits.step_tokens_max() } else { limits.prefill_chunk };
        match self.limits.as_ref().map(limit).filter(|limit| tokens > u64::from(*limit)) {
            Some(prefill_chunk) => Err(Fault::PrefillTokens { tokens, prefill_chunk }),
            None => Ok(()),
        }
    }

    fn decode(&mut self, &Decode { sequence, slot, position }: &Decode, step: &mut Step) -> Result<(), Fault> {
        let row = Slot::computed(&mut self.slots, sequence, slot, self.step)?;
        let (sequence, filled) = (sequence.0, row.filled);
        let (reserved_tokens, prompt_tokens) = (row.request.reserved_tokens(), row.request.prompt.len() as u64);
        if u64::from(filled) < prompt_tokens {
            return Err(Fault::DecodeBeforePrompt { sequence, filled, prompt_tokens });
        }
        if position != filled {
            return Err(Fault::DecodePosition { sequence, position, filled });
        }
        if position >= reserved_tokens {
            return Err(Fault::BeyondReservation { sequence, position, reserved_tokens });
        }
        row.history = row.history.with(row.token);
        row.filled += 1;
        step.sampled.push((slot, row.sample(&self.model)));
        Ok(())
    }
}

impl Slot {
    /// The row that a step computes, counted as in flight.
    fn computed(slots: &mut [Option<Slot>], sequence: SequenceId, slot: u32, step: u64) -> Result<&mut Slot, Fault> {
        let row = slots.get_mut(slot as usize).and_then(Option::as_mut).filter(|row| row.request.sequence == sequence);
        let Some(row) = row else { return Err(Fault::NotInSlot { sequence: sequence.0, slot }) };
        if row.step == Some(step) {
            return Err(Fault::Twice { sequence: sequence.0 });
        }
        if row.ended {
            return Err(Fault::Ended { sequence: sequence.0 });
        }
        row.step = Some(step);
        row.in_flight += 1;
        Ok(row)
    }

    /// Whether a chunk goes to where a full one ends, or the prompt; or before a medium it would part, or over that.
    fn is_chunk(&self, start: u32, end: u32, prefill_chunk: u32) -> bool {
        let prompt_tokens = self.request.prompt.len() as u32;
        let full = (start + prefill_chunk).min(prompt_tokens);
        let parts = |at: u32| self.request.whole_spans && self.request.media.iter().any(|medium| medium.is_parted(at));
        let before = (start + 1..=full).rev().find(|&at| !parts(at));
        let expected = before.or_else(|| (full..=prompt_tokens).find(|&at| !parts(at)));
        expected == Some(end)
    }

    fn sample(&mut self, model: &FakeModel) -> Sampled {
        self.token = model.sample(self.history);
        Sampled { sequence: self.request.sequence, token: self.token, stop_string: false }
    }
}

impl Engine for FakeEngine {
    fn price(&self) -> Price {
        self.model.price.clone()
    }

    fn vocabulary(&self) -> u32 {
        FakeModel::BYTES_VOCABULARY
    }

    /// After an error the shadow is in no defined state.
    fn launch(&mut self, plan: &Plan) -> Result<(), EngineError> {
        let step = self.launch_step(plan).map_err(|fault| EngineError::Plan { step: plan.step, reason: fault.to_string() })?;
        self.in_flight.push_back(step);
        self.step += 1;
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<Sampled>, EngineError> {
        let Some(step) = self.in_flight.pop_front() else {
            return Err(EngineError::Plan { step: self.step, reason: Fault::NothingInFlight.to_string() });
        };
        for slot in step.chunks {
            if let Some(row) = &mut self.slots[slot as usize] {
                row.in_flight -= 1;
            }
        }
        let collected = step.sampled.into_iter().map(|(slot, sampled)| {
            // Still the same row: no slot is released while a step in flight computes it.
            if let Some(row) = &mut self.slots[slot as usize] {
                row.in_flight -= 1;
                row.collected += 1;
                row.ended |= row.collected == row.request.max_tokens || row.request.stop_tokens.contains(&sampled.token);
                let own = self.likeliest.iter().find(|own| own.token_id == sampled.token);
                if let (Some(logprobs), Some(own)) = (&mut row.logprobs, own) {
                    logprobs.push(*own, &self.likeliest);
                }
            }
            sampled
        });
        Ok(collected.collect())
    }

    fn speech(&self, sequence: SequenceId) -> Option<SpeechScore> {
        let mut rows = self.slots.iter().flatten();
        rows.any(|row| row.request.sequence == sequence && row.request.window.is_some()).then(SpeechScore::default)
    }

    fn take_logprobs(&mut self, sequence: SequenceId) -> Option<Logprobs> {
        self.slots.iter_mut().flatten().find(|row| row.request.sequence == sequence)?.logprobs.take()
    }
}

#[cfg(test)]
#[path = "fake_tests.rs"]
mod tests;
