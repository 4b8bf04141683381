//! Decides what each step computes: a state machine without I/O, clock, randomness, tensor or logger.
//!
//! # Outline
//!
//! ```text
//! add(Request) -> waiting --plan--> prefill --plan--> decode --commit--> Finished --plan--> slot released
//! ```
//!
//! [`Scheduler::add`] queues a row or refuses it for good. [`Scheduler::plan`] releases the slots of ended rows, admits waiting
//! rows, and gives every row in the cache its next piece of work; an [engine](crate::engine) computes the plan;
//! [`Scheduler::commit`] takes the tokens it sampled and says which rows have ended. The same calls give the same plans.
//!
//! # One step ahead
//!
//! A plan may be made before the one before it is committed: at most [`IN_FLIGHT_MAX`] plans are in flight. Until a token is
//! committed nobody knows whether it ends its row, so the next plan decodes that row anyway, unless `max_tokens` ends it for
//! certain. A token computed for a row that has ended by then is dropped. A slot is released once no plan in flight computes it.
//!
//! A plan with nothing to compute ([`Plan::is_empty`]) changes nothing: it has no step of its own, and is neither launched nor
//! committed. Releases then wait for the next plan that computes something.
//!
//! # Invariants
//!
//! - **Order.** Rows are admitted in the order in which they were added; a row that does not fit, or that waits for a prefix, holds
//!   back those behind it.
//! - **Budget.** Every plan's layout costs [`Limits::layout_bytes`]`(slots, slot_tokens, media) <= kv_bytes_max`. A row is admitted
//!   with all the positions it can ever fill, so no row in the cache is ever put out of it. Prefixes are put out.
//! - **Progress.** A row that was accepted fits an empty cache, and in every step every decoding row and the row or prefix in
//!   prefill advance, so each row ends: where no row runs and the first that waits does not fit, prefixes are put out until it
//!   does.
//! - **Slots.** A row gets the lowest free slot and keeps it until its release; so does a prefix. Its positions are filled from 0
//!   on, each once, by a copy or by a chunk. A slot is released once no plan in flight computes or copies it.
//! - **Independence.** Prompt chunks start at multiples of `prefill_chunk` from the row's own start, or from where its copy ends,
//!   but where its own media say otherwise ([Media](#media)), and every later token is a step of its own: what is computed for a
//!   row does not depend on its neighbours.
//! - **Prefill.** A step computes at most `prefill_chunk` prompt tokens, of at most `prompt_concurrency` rows, in the order of
//!   their admission. A row is admitted only when its first chunk fits into what the step has left, so it starts at once. A chunk
//!   that is one medium alone may be longer, up to [`Limits::span_tokens_max`].
//!
//! # Prefill
//!
//! An engine computes all chunks of a step in one forward pass, so `prefill_chunk` bounds them together. It is also the length of
//! each chunk but a prompt's last: a chunk that is not its row's last fills its step. So at most one row is in prefill from one
//! step to the next; it goes first, never finds its chunk too long for the step, and what its last chunk leaves over is for the
//! rows admitted behind it. A step's chunks are either a full one alone, or last chunks only.
//!
//! # Media
//!
//! An image or a recording is a run of placeholders in the prompt ([`Request::media`]). Where its tokens see each other both ways
//! ([`Request::whole_spans`]) no chunk parts it: a chunk ends before a medium that it cannot hold whole, and one that is longer
//! than `prefill_chunk` is a chunk by itself. A chunk cut short counts as a full one, so that all of the above holds.
//!
//! An image or a recording is encoded in the step that admits its row, which is therefore admitted only where the budget has room
//! for that too ([`MediaLoad`]); steps that encode nothing leave this room to rows.
//!
//! Placeholders are alike whatever they stand for. Rows share a medium where it is the same by its identity, at the same place, and
//! seen in the same way; and share all of it or nothing.
//!
//! # Prefixes
//!
//! What rows share at the head is computed once, as a sequence of its own that samples nothing, in a slot of its own, and copied
//! into the slots of the rows that start with it ([`Admission::reuse`]); they compute what follows, one token at least. A prefix
//! that is longer than another starts from that one in the same way.
//!
//! [`Scheduler::add`] finds it: a row is compared with the prefixes known, 8 at most ([`PREFIXES_MAX`]), and with the 32 rows
//! before it. The length by which those rows would have been saved most prompt tokens becomes a prefix, where it is
//! [`Limits::prefix_tokens_min`] longer than what the row can take over already and the tokens saved come to 512, or to a full
//! chunk where that is less. So two rows that share 600 tokens have a prefix, or nine that share 64.
//!
//! It is admitted when the first row that waits wants it, ahead of that row, and on top of the `rows` that may be in the cache;
//! only where the budget has room for four slots for each prefix, so that most slots are for rows. Where it has not, the row
//! computes its own prompt. It stays while rows that wait want it, and 256 steps more, unless its room is needed.
//!
//! A row may take over less than all of a prefix only as long as that fits every window of the cache ([`Price::can_cut`]): a ring
//! that has gone round holds no more what stood before the cut.
//!
//! # Layout
//!
//! The cache has `slots` slots of `slot_tokens` tokens each; a plan states the layout that holds from its step on, and an engine
//! reallocates when its own differs. Either number may rise or fall, both in one plan, and every row in the cache fits the new
//! layout:
//!
//! - It **grows** by what an admitted row needs: slots up to its own, `slot_tokens` to its reservation, rounded up by
//!   [`Price::slot_tokens`].
//! - It **shrinks** to what the rows in the cache need when the first waiting row could not be admitted otherwise, and
//! - it **shrinks** to what the rows in the cache and those waiting need together when that costs at most half as much. So growth
//!   and shrinking do not alternate over one row, and the last rows of a job do not drag empty slots along.
//!
//! # Cost
//!
//! A plan and its commit go over the rows in the cache and in the queue a fixed number of times; nothing is hashed or sorted.
//! Adding a row compares it with 40 prompts at most, which mostly end at the first difference.
//!
//! # Known weaknesses
//!
//! - Slots are never compacted: one long row in a high slot keeps the layout wide until it ends.
//! - All slots have the length of the longest row's; a queue in order of length wastes the least.
//! - One step ahead, a row that stops early costs a dropped token and its slot one idle step; a row that ends by `max_tokens` costs
//!   the idle step alone.
//! - Budget is set aside for `max_tokens`, though a row may stop well before.
//! - A step's prompt tokens are not always used up: a row that waits is not admitted with less than its whole first chunk, and
//!   holds back those behind it, for whose shorter prompts there would be room.
//! - Prefixes of more than 32 rows' groups in turn are not found, nor what is shared anywhere but at the head.
//! - A row that waits for its prefix waits a step longer than it would for its prompt, and so do those behind it.
//! - The prefill scratch of a full chunk is priced, whether or not any prompt is that long.

mod budget;
mod media;
mod plan;
mod prefix;
mod sequence;

pub use budget::{Limits, Price, Refused};
pub use media::{EncodePrice, MediaLoad};
pub use plan::{
    Admission, Decode, FinishReason, Finished, Medium, MediumContent, Plan, Prefill, Release, Request, Reuse, Sampled, SequenceId,
    SpeechRules, SpeechWindow, TimestampRules,
};
pub use prefix::PREFIXES_MAX;

use std::collections::VecDeque;
use std::sync::Arc;

use thiserror::Error;

use budget::Layout;
use prefix::{Prefixes, Waiting};
use sequence::{Sequence, chunk_share};

/// Plans that may be in flight together: one being computed, one launched behind it.
pub const IN_FLIGHT_MAX: usize = 2;

/// See the [module](self).
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    waiting: VecDeque<Waiting>,
    prefixes: Prefixes,
    /// Rows and prefixes, by slot.
    rows: Vec<Option<Sequence>>,
    /// Rows in the cache, and those of them that have not ended.
    resident: u32,
    running: u32,
    /// Slot of the row or prefix whose prompt goes on in the next step: one at most, as its chunk filled the step.
    in_prefill: Option<u32>,
    layout: Layout,
    /// Of the last plan.
    media: MediaLoad,
    /// Slots freed, which no plan has told yet.
    released: Vec<Release>,
    in_flight: VecDeque<InFlight>,
    /// Step of the next plan.
    step: u64,
}

/// What `commit` holds a plan to.
#[derive(Debug)]
struct InFlight {
    step: u64,
    prefill: usize,
    decode: usize,
    /// Slots of the prefixes it copies, once for each row.
    copied: Vec<u32>,
}

/// Numbers for a report, as of the last plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Rows in the cache that have not ended, a row in prefill included.
    pub running: u32,
    /// Rows whose prompt goes on in the next step: 0 or 1.
    pub in_prefill: u32,
    pub waiting: u32,
    /// The cache's layout.
    pub slots: u32,
    pub slot_tokens: u32,
    /// What the layout costs, prefill scratch included, and what it may cost.
    pub kv_bytes: u64,
    pub kv_bytes_max: u64,
}

/// What was handed to [`Scheduler::commit`] is not what was planned. Nothing was committed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CommitError {
    #[error("step {step} cannot be committed: no step is in flight")]
    NothingInFlight { step: u64 },
    #[error("step {step} cannot be committed: steps are committed in order, and step {oldest} is the oldest in flight")]
    OutOfOrder { step: u64, oldest: u64 },
    #[error("step {step} cannot be committed: this is not the plan that was made for it")]
    OtherPlan { step: u64 },
    #[error("step {step} cannot be committed: its plan samples {planned} tokens, and {sampled} were handed over")]
    Count { step: u64, planned: usize, sampled: usize },
    #[error(
        "step {step} cannot be committed: its token {index} is planned for sequence {planned}, and one of sequence {sampled} was \
         handed over"
    )]
    Order { step: u64, index: usize, planned: u64, sampled: u64 },
}

impl Scheduler {
    pub fn new(limits: Limits) -> Self {
        let limits = Limits {
            rows: limits.rows.max(1),
            prefill_chunk: limits.prefill_chunk.max(1),
            prompt_concurrency: limits.prompt_concurrency.max(1),
            ..limits
        };
        Self {
            limits,
            waiting: VecDeque::new(),
            prefixes: Prefixes::default(),
            rows: Vec::new(),
            resident: 0,
            running: 0,
            in_prefill: None,
            layout: Layout::default(),
            media: MediaLoad::default(),
            released: Vec::new(),
            in_flight: VecDeque::with_capacity(IN_FLIGHT_MAX),
            step: 0,
        }
    }

    /// Queues a row, whose sequence no other row has that is waiting or in the cache, and none [is a
    /// prefix](SequenceId::is_prefix); refuses one that could never be computed.
    pub fn add(&mut self, request: Arc<Request>) -> Result<(), Refused> {
        self.limits.check(&request)?;
        if self.wants() == 0 {
            return Err(Refused::QueueFull { waiting_max: self.limits.rows });
        }
        let waiting = self.with_head(request);
        self.waiting.push_back(waiting);
        Ok(())
    }

    /// Rows that should be added now: with that many waiting, a plan can fill every slot.
    pub fn wants(&self) -> usize {
        (self.limits.rows as usize).saturating_sub(self.waiting.len())
    }

    /// Nothing waits, runs or is in flight. A prefix may still be in the cache.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running == 0 && self.in_flight.is_empty()
    }

    /// Plans launched and not yet committed.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    pub fn counters(&self) -> Counters {
        let Layout { slots, slot_tokens } = self.layout;
        Counters {
            running: self.running,
            in_prefill: u32::from(self.in_prefill.is_some()),
            waiting: self.waiting.len() as u32,
            slots,
            slot_tokens,
            kv_bytes: if slots == 0 { 0 } else { self.limits.layout_bytes(slots, slot_tokens, &self.media) },
            kv_bytes_max: self.limits.kv_bytes_max,
        }
    }

    /// The next step. An empty plan is neither launched nor committed.
    ///
    /// # Panics
    ///
    /// When [`IN_FLIGHT_MAX`] plans are in flight: commit the oldest first.
    pub fn plan(&mut self) -> Plan {
        assert!(self.in_flight.len() < IN_FLIGHT_MAX, "{IN_FLIGHT_MAX} plans are in flight: commit the oldest first");
        self.review_prefixes();
        let mut held = self.release();
        self.media = self.media_kept();
        let admitted = self.admit(&mut held);
        let decode = self.decode();
        let prefill = self.prefill(&admitted);
        let mut plan = Plan { step: self.step, admitted, prefill, decode, ..Plan::default() };
        if !plan.is_empty() {
            self.halve(held);
            plan.released = std::mem::take(&mut self.released);
            let copied = plan.admitted.iter().filter_map(|admission| Some(admission.reuse?.slot)).collect();
            let (prefill, decode) = (plan.prefill.len(), plan.decode.len());
            self.in_flight.push_back(InFlight { step: plan.step, prefill, decode, copied });
            self.step += 1;
        }
        plan.slots = self.layout.slots;
        plan.slot_tokens = self.layout.slot_tokens;
        plan
    }

    /// Takes the tokens of the oldest plan in flight, one for each last chunk and each decode, in the plan's order, and returns the
    /// rows that end with them.
    pub fn commit(&mut self, plan: &Plan, sampled: &[Sampled]) -> Result<Vec<Finished>, CommitError> {
        self.check(plan, sampled)?;
        let copied = self.in_flight.pop_front().map(|in_flight| in_flight.copied).unwrap_or_default();
        let without_token = plan.prefill.iter().filter(|prefill| !prefill.last).map(|prefill| prefill.slot);
        for slot in without_token.chain(copied) {
            if let Some(row) = &mut self.rows[slot as usize] {
                row.in_flight = row.in_flight.saturating_sub(1);
            }
        }
        let mut finished = Vec::new();
        for ((sequence, slot), sampled) in sampling(plan).zip(sampled) {
            let Some(row) = &mut self.rows[slot as usize] else { continue };
            row.in_flight = row.in_flight.saturating_sub(1);
            if row.ended {
                continue;
            }
            if let Some(reason) = row.take(sampled.token, sampled.stop_string) {
                finished.push(Finished { sequence, tokens: row.end(), reason, cached_tokens: row.cached_tokens });
                self.running -= 1;
            }
        }
        Ok(finished)
    }

    /// Gives a row up, waiting or in the cache; it will not be among the finished. False where there is no such row (any more).
    pub fn cancel(&mut self, sequence: SequenceId) -> bool {
        let mut rows = self.rows.iter_mut().zip(0..).filter_map(|(row, slot)| row.as_mut().map(|row| (row, slot)));
        if let Some((row, slot)) = rows.find(|(row, _)| row.request.sequence == sequence && !row.ended) {
            self.in_prefill.take_if(|in_prefill| *in_prefill == slot);
            self.running -= 1;
            row.end();
            return true;
        }
        let position = self.waiting.iter().position(|waiting| waiting.request.sequence == sequence);
        position.and_then(|position| self.waiting.remove(position)).is_some()
    }

    /// Frees the slots of ended rows that no plan in flight computes. Returns the least layout of the rows that stay.
    fn release(&mut self) -> Layout {
        for (place, slot) in self.rows.iter_mut().zip(0..) {
            if let Some(row) = place.take_if(|row| row.ended && row.in_flight == 0) {
                let sequence = row.request.sequence;
                self.resident -= u32::from(!sequence.is_prefix());
                self.released.push(Release { sequence, slot });
            }
        }
        self.held()
    }

    /// The least layout of what is in the cache.
    fn held(&self) -> Layout {
        let held = self.rows.iter().zip(0..).fold(Layout::default(), |held, (row, slot)| match row {
            Some(row) => held.holding(slot, row.request.reserved_tokens()),
            None => held,
        });
        Layout { slot_tokens: self.limits.price.slot_tokens(held.slot_tokens), ..held }
    }

    /// Moves rows from the queue into the lowest free slots while they fit, the cache and the step, and prefixes before the rows
    /// that want them.
    fn admit(&mut self, held: &mut Layout) -> Vec<Admission> {
        let mut admitted = Vec::new();
        let mut slot = 0;
        let prefill_chunk = self.limits.prefill_chunk;
        let mut shares = 0;
        while self.chunks_left(&admitted) > 0 {
            let released = self.released.len();
            let Some((request, reuse)) = self.next_in_line() else { break };
            if self.released.len() > released {
                (slot, *held) = (0, self.held());
            }
            let is_prefix = request.sequence.is_prefix();
            let cached_tokens = reuse.map_or(0, |reuse| reuse.tokens);
            // Fits: `Limits::check` holds prompt and completion to a context counted in u32.
            let share = chunk_share(&request, cached_tokens, prefill_chunk);
            let has_slot = if is_prefix { self.has_prefix_slot() } else { self.resident < self.limits.rows };
            // What goes on goes first, unless it was a prefix that has just been given up.
            let goes_on = self.goes_on().map_or(0, |row| row.chunk_share(prefill_chunk));
            if share > prefill_chunk - goes_on - shares || !has_slot {
                break;
            }
            // Slots below the one taken last are full, but where a prefix was given up.
            while self.rows.get(slot as usize).is_some_and(Option::is_some) {
                slot += 1;
            }
            let reserved_tokens = request.reserved_tokens();
            let slot_tokens = self.limits.price.slot_tokens(reserved_tokens);
            let least = held.holding(slot, slot_tokens);
            let grown = self.layout.holding(slot, slot_tokens);
            let mut media = self.media;
            media.admit(&request, cached_tokens, &self.limits.price);
            let Some(layout) = [grown, least].into_iter().find(|layout| self.fits(*layout, &request, &media)) else {
                if self.make_room() {
                    (slot, *held) = (0, self.held());
                    continue;
                }
                break;
            };
            self.layout = layout;
            self.media = media;
            *held = least;
            if slot as usize == self.rows.len() {
                self.rows.push(None);
            }
            self.rows[slot as usize] = Some(Sequence::new(Arc::clone(&request), cached_tokens));
            self.admitted(&request, slot, reuse);
            self.resident += u32::from(!is_prefix);
            self.running += u32::from(!is_prefix);
            shares += share;
            admitted.push(Admission { request, slot, reserved_tokens, reuse });
        }
        admitted
    }

    /// Media of the row or prefix whose prompt goes on.
    fn media_kept(&self) -> MediaLoad {
        let mut media = MediaLoad::default();
        if let Some(row) = self.goes_on() {
            media.keep(&row.request);
        }
        media
    }

    /// The row or prefix whose prompt goes on in this step.
    fn goes_on(&self) -> Option<&Sequence> {
        self.in_prefill.and_then(|slot| self.rows[slot as usize].as_ref())
    }

    /// Chunks that a step may have beside those that go on or were `admitted`.
    fn chunks_left(&self, admitted: &[Admission]) -> u32 {
        self.limits.prompt_concurrency - u32::from(self.in_prefill.is_some()) - admitted.len() as u32
    }

    /// The next token of each row whose prompt was computed before this step, by slot.
    fn decode(&mut self) -> Vec<Decode> {
        let mut decode = Vec::with_capacity(self.running as usize);
        for (row, slot) in self.rows.iter_mut().zip(0..) {
            let Some(row) = row else { continue };
            if let Some(position) = row.next_token() {
                decode.push(Decode { sequence: row.request.sequence, slot, position });
            }
        }
        decode
    }

    /// The next chunk of the row in prefill, then the first chunks of those `admitted`, for which [`admit`](Self::admit) left room.
    fn prefill(&mut self, admitted: &[Admission]) -> Vec<Prefill> {
        let mut prefill = Vec::with_capacity(1 + admitted.len());
        for slot in self.in_prefill.take().into_iter().chain(admitted.iter().map(|admission| admission.slot)) {
            let Some(row) = &mut self.rows[slot as usize] else { continue };
            let (start, length) = row.next_chunk(self.limits.prefill_chunk);
            let last = !row.in_prefill() && !row.request.sequence.is_prefix();
            if row.in_prefill() {
                self.in_prefill = Some(slot);
            }
            prefill.push(Prefill { sequence: row.request.sequence, slot, start, length, last });
        }
        prefill
    }

    /// Shrinks the layout to what the rows in the cache (`held`) and those waiting need, when that costs at most half as much.
    fn halve(&mut self, held: Layout) {
        let bytes = |layout: Layout| self.limits.price.cache_bytes(layout.slots, layout.slot_tokens);
        let worth_it = |layout: Layout| layout != self.layout && bytes(layout) <= bytes(self.layout) / 2;
        if !worth_it(held) {
            return;
        }
        let free_below = self.rows.iter().take(held.slots as usize).filter(|row| row.is_none()).count();
        let to_come = self.waiting.len() + self.prefixes_to_come() as usize;
        let slots = held.slots.saturating_add(to_come.saturating_sub(free_below) as u32);
        let waiting_tokens = self.waiting.iter().map(|waiting| waiting.request.reserved_tokens()).max().unwrap_or(0);
        let slot_tokens = held.slot_tokens.max(self.limits.price.slot_tokens(waiting_tokens));
        let wanted = Layout { slots, slot_tokens }.within(self.layout);
        if worth_it(wanted) {
            self.layout = wanted;
        }
    }

    fn check(&self, plan: &Plan, sampled: &[Sampled]) -> Result<(), CommitError> {
        let step = plan.step;
        let oldest = self.in_flight.front().ok_or(CommitError::NothingInFlight { step })?;
        if step != oldest.step {
            return Err(CommitError::OutOfOrder { step, oldest: oldest.step });
        }
        let computed = plan.prefill.iter().map(|prefill| (prefill.sequence, prefill.slot));
        let computed = computed.chain(plan.decode.iter().map(|decode| (decode.sequence, decode.slot)));
        let in_its_slot = |(sequence, slot): (SequenceId, u32)| {
            let row = self.rows.get(slot as usize).and_then(Option::as_ref);
            row.is_some_and(|row| row.request.sequence == sequence && row.in_flight > 0)
        };
        if (plan.prefill.len(), plan.decode.len()) != (oldest.prefill, oldest.decode) || !computed.into_iter().all(in_its_slot) {
            return Err(CommitError::OtherPlan { step });
        }
        let planned = sampling(plan).count();
        if planned != sampled.len() {
            return Err(CommitError::Count { step, planned, sampled: sampled.len() });
        }
        match sampling(plan).zip(sampled).position(|((sequence, _), sampled)| sequence != sampled.sequence) {
            Some(index) => {
                let planned = sampling(plan).nth(index).map_or(0, |(sequence, _)| sequence.0);
                Err(CommitError::Order { step, index, planned, sampled: sampled[index].sequence.0 })
            }
            None => Ok(()),
        }
    }
}

/// The rows for which `plan` samples a token, with their slots, in the order of its tokens.
fn sampling(plan: &Plan) -> impl Iterator<Item = (SequenceId, u32)> + '_ {
    let first = plan.prefill.iter().filter(|prefill| prefill.last).map(|prefill| (prefill.sequence, prefill.slot));
    first.chain(plan.decode.iter().map(|decode| (decode.sequence, decode.slot)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        let price = Price {
            full_bytes_per_token: 1,
            windows: Vec::new(),
            fixed_bytes_per_slot: 0,
            slot_tokens_step: 1,
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
        };
        Limits {
            rows: 2,
            prefill_chunk: 1,
            prompt_concurrency: 1,
            kv_bytes_max: 100,
            price,
            context_length: 50,
            prefix_tokens_min: None,
            span_tokens_max: 0,
        }
    }

    fn request(sequence: u64) -> Arc<Request> {
        let prompt = vec![0; 4];
        let (sequence, stop_tokens, generation) = (SequenceId(sequence), Arc::new([]), Arc::default());
        Arc::new(Request {
            sequence,
            prompt,
            max_tokens: 2,
            stop_tokens,
            generation,
            seed: 0,
            window: None,
            media: Vec::new(),
            whole_spans: false,
        })
    }

    #[test]
    #[should_panic(expected = "2 plans are in flight: commit the oldest first")]
    fn a_third_plan_in_flight_is_a_fault_of_the_caller() {
        let mut scheduler = Scheduler::new(limits());
        scheduler.add(request(1)).unwrap();
        for _ in 0..=IN_FLIGHT_MAX {
            scheduler.plan();
        }
    }

    #[test]
    fn limits_of_zero_count_as_one() {
        let mut scheduler = Scheduler::new(Limits { rows: 0, prefill_chunk: 0, prompt_concurrency: 0, ..limits() });
        assert_eq!(scheduler.wants(), 1);
        scheduler.add(request(1)).unwrap();
        assert_eq!(scheduler.plan().prefill, [Prefill { sequence: SequenceId(1), slot: 0, start: 0, length: 1, last: false }]);
    }

    #[test]
    fn a_plan_that_was_changed_is_not_committed() {
        let mut scheduler = Scheduler::new(limits());
        scheduler.add(request(1)).unwrap();
        let plan = scheduler.plan();
        let chunk = plan.prefill[0];
        for prefill in
            [vec![], vec![chunk, chunk], vec![Prefill { slot: 9, ..chunk }], vec![Prefill { sequence: SequenceId(2), ..chunk }]]
        {
            let changed = Plan { prefill, ..plan.clone() };
            assert_eq!(scheduler.commit(&changed, &[]), Err(CommitError::OtherPlan { step: 0 }));
        }
        assert_eq!(scheduler.commit(&plan, &[]), Ok(vec![]));
        assert_eq!(scheduler.commit(&plan, &[]), Err(CommitError::NothingInFlight { step: 0 }));
    }
}
