//! What rows share at the head (a system prompt, a template, examples): found over the rows that come, computed once in a slot of
//! its own, copied into the slots of the rows that start with it.
//!
//! A new row is compared with the prefixes known and with a few rows before it. The length that would have saved those rows most
//! becomes a prefix, if that is worth a step. A prefix is a sequence that samples nothing: it is admitted when the first waiting
//! row wants it, by the rules for rows, and that row waits until it is computed. Afterwards it stays while rows that wait want it,
//! and for a while after; it goes sooner where its room is needed.
//!
//! A prefix is cut where a row goes on differently: anywhere, as long as it fits every window; behind that, only as a whole.

use std::collections::VecDeque;
use std::sync::Arc;

use super::budget::Layout;
use super::{MediaLoad, Medium, Release, Request, Reuse, Scheduler, SequenceId};

/// Prefixes known at once.
pub const PREFIXES_MAX: usize = 8;

/// Rows that a new one is compared with.
const COMPARED_MAX: usize = 32;

/// Prompt tokens that a prefix must have saved the rows compared, or a full chunk where that is less: computing it holds up the
/// rows behind by a step.
const SAVED_TOKENS_MIN: u32 = 512;

/// A prefix that no waiting row wants is given up after so many steps.
const IDLE_STEPS_MAX: u64 = 256;

/// A prefix is computed where the budget has room for so many slots for each prefix in the cache: the others are for rows.
const SLOTS_PER_PREFIX: u32 = 4;

/// A row in the queue, and what it would reuse.
#[derive(Debug)]
pub(super) struct Waiting {
    pub request: Arc<Request>,
    head: Option<Head>,
}

/// The first `tokens` of a prefix.
#[derive(Debug, Clone, Copy)]
struct Head {
    prefix: SequenceId,
    tokens: u32,
}

#[derive(Debug)]
struct Prefix {
    /// Samples nothing.
    request: Arc<Request>,
    /// Once it is in the cache.
    slot: Option<u32>,
    /// Waiting rows that would reuse it, as of the plan under way.
    wanted: u32,
    /// The last step in which any did.
    wanted_at: u64,
}

#[derive(Debug, Default)]
pub(super) struct Prefixes {
    known: Vec<Prefix>,
    /// The rows that came last.
    compared: VecDeque<Arc<Request>>,
    /// Prefixes there have been.
    count: u64,
    /// Tokens of the longest prefix that the plan under way copies.
    copied_tokens: u32,
}

impl Prefixes {
    fn tokens(prefix: &Prefix) -> u32 {
        prefix.request.prompt.len() as u32
    }

    fn in_cache(&self) -> impl Iterator<Item = &Prefix> {
        self.known.iter().filter(|prefix| prefix.slot.is_some())
    }

    /// Tokens of the longest in the cache.
    fn longest(&self) -> u32 {
        self.in_cache().map(Self::tokens).max().unwrap_or(0)
    }

    /// The length, longer than `least`, that would have saved the rows compared most beyond the first `base` tokens, and how much.
    fn shared(&self, request: &Request, base: u32, least: u32) -> Option<(u64, u32)> {
        let (prompt, least) = (&request.prompt, least as usize);
        let lengths = self.compared.iter().filter_map(|other| {
            // Either row must have a token left to compute.
            let most = prompt.len().min(other.prompt.len()) - 1;
            let (own, others) = (&prompt[..most], &other.prompt[..most]);
            // Where rows differ they mostly do so in the last of these.
            let alike = most >= least && own[least - 1] == others[least - 1] && own[..least] == others[..least];
            let shared = alike.then(|| (least + common(&own[least..], &others[least..])) as u32)?;
            let shared = before_other_media(request, other, shared);
            (shared as usize >= least).then_some(shared)
        });
        let mut lengths: Vec<u32> = lengths.collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        lengths.into_iter().zip(1..).map(|(tokens, rows)| (u64::from(tokens - base) * rows, tokens)).max()
    }

    /// Counts the rows that want each prefix.
    fn count_wanted(&mut self, waiting: &VecDeque<Waiting>, step: u64) {
        for prefix in &mut self.known {
            prefix.wanted = 0;
        }
        for head in waiting.iter().filter_map(|waiting| waiting.head) {
            if let Some(prefix) = self.known.iter_mut().find(|prefix| prefix.request.sequence == head.prefix) {
                prefix.wanted += 1;
                prefix.wanted_at = step;
            }
        }
    }

    /// The prefix that no row has wanted for longest.
    fn idle(&self, is: impl Fn(&Prefix) -> bool) -> Option<usize> {
        let idle = (0..self.known.len()).filter(|&index| self.known[index].wanted == 0 && is(&self.known[index]));
        idle.min_by_key(|&index| self.known[index].wanted_at)
    }
}

impl Scheduler {
    /// A row for the queue: finds what it shares with prefixes known, and with the rows before it.
    pub(super) fn with_head(&mut self, request: Arc<Request>) -> Waiting {
        let Some(tokens_min) = self.prefix_tokens_min().filter(|_| request.window.is_none()) else {
            return Waiting { request, head: None };
        };
        let heads = self.prefixes.known.iter().map(|prefix| {
            let tokens = self.usable(&prefix.request, &request);
            (tokens, prefix.slot.is_some(), Head { prefix: prefix.request.sequence, tokens })
        });
        let best = heads.filter(|(tokens, ..)| *tokens >= tokens_min).max_by_key(|&(tokens, in_cache, _)| (tokens, in_cache));
        let mut head = best.map(|(_, _, head)| head);
        let base = head.map_or(0, |head| head.tokens);
        let shared = self.prefixes.shared(&request, base, base.saturating_add(tokens_min));
        let saved_tokens_min = u64::from(SAVED_TOKENS_MIN.min(self.limits.prefill_chunk));
        if let Some((saved, tokens)) = shared
            && saved >= saved_tokens_min
            && self.has_place()
        {
            head = Some(Head { prefix: self.learn(&request, tokens, tokens_min), tokens });
        }
        if self.prefixes.compared.len() == COMPARED_MAX {
            self.prefixes.compared.pop_front();
        }
        self.prefixes.compared.push_back(Arc::clone(&request));
        Waiting { request, head }
    }

    fn prefix_tokens_min(&self) -> Option<u32> {
        self.limits.prefix_tokens_min.filter(|_| self.limits.price.prefixes).map(|tokens| tokens.max(1))
    }

    /// Tokens of `prefix` that a row of `prompt` can take over.
    fn usable(&self, prefix: &Request, row: &Request) -> u32 {
        let shared = common(&prefix.prompt, &row.prompt[..row.prompt.len() - 1]) as u32;
        let shared = before_other_media(prefix, row, shared);
        let prefix_tokens = prefix.prompt.len() as u32;
        if shared == prefix_tokens || self.limits.price.can_cut(prefix_tokens) { shared } else { 0 }
    }

    /// Whether one more prefix can be known, one that no row wants given up for it where there are as many as may be.
    fn has_place(&mut self) -> bool {
        if self.prefixes.known.len() < PREFIXES_MAX {
            return true;
        }
        self.prefixes.count_wanted(&self.waiting, self.step);
        let idle = self.prefixes.idle(|_| true);
        idle.inspect(|&index| self.forget(index)).is_some()
    }

    /// A new prefix, the first `tokens` of a row. Rows that wait take to it where it saves them clearly more than what they had, or
    /// hardly less than what is not computed yet, so that one is computed for them all.
    fn learn(&mut self, row: &Request, tokens: u32, tokens_min: u32) -> SequenceId {
        let sequence = SequenceId(SequenceId::PREFIXES.0 + self.prefixes.count);
        self.prefixes.count += 1;
        let request = Request {
            sequence,
            prompt: row.prompt[..tokens as usize].to_vec(),
            max_tokens: 0,
            stop_tokens: Arc::new([]),
            generation: Arc::default(),
            seed: 0,
            window: None,
            media: row.media.iter().filter(|medium| medium.end() <= tokens).cloned().collect(),
            whole_spans: row.whole_spans,
        };
        for index in 0..self.waiting.len() {
            let usable = self.usable(&request, &self.waiting[index].request);
            let before = self.waiting[index].head;
            let had = before.map_or(0, |head| head.tokens);
            let planned_only = before.is_some_and(|head| {
                self.prefixes.known.iter().any(|prefix| prefix.request.sequence == head.prefix && prefix.slot.is_none())
            });
            let gain =
                if planned_only { usable.saturating_add(tokens_min) > had } else { usable >= had.saturating_add(tokens_min) };
            if gain && usable >= tokens_min {
                self.waiting[index].head = Some(Head { prefix: sequence, tokens: usable });
            }
        }
        self.prefixes.known.push(Prefix { request: Arc::new(request), slot: None, wanted: 0, wanted_at: self.step });
        sequence
    }

    /// Gives a prefix up for good.
    fn forget(&mut self, index: usize) {
        self.evict(index);
        self.prefixes.known.swap_remove(index);
    }

    /// Takes a prefix out of the cache; its slot is free now, or once no plan in flight computes or copies it.
    fn evict(&mut self, index: usize) {
        let prefix = &mut self.prefixes.known[index];
        let Some(slot) = prefix.slot.take() else { return };
        self.in_prefill.take_if(|in_prefill| *in_prefill == slot);
        let place = &mut self.rows[slot as usize];
        if place.take_if(|sequence| sequence.in_flight == 0).is_some() {
            self.released.push(Release { sequence: prefix.request.sequence, slot });
        } else if let Some(sequence) = place {
            sequence.ended = true;
        }
    }

    /// Begins a plan: counts the rows that want each prefix, and gives up what none has wanted for long.
    pub(super) fn review_prefixes(&mut self) {
        self.prefixes.copied_tokens = 0;
        if self.prefixes.known.is_empty() {
            return;
        }
        self.prefixes.count_wanted(&self.waiting, self.step);
        let step = self.step;
        while let Some(index) = self.prefixes.idle(|prefix| step - prefix.wanted_at > IDLE_STEPS_MAX) {
            self.forget(index);
        }
    }

    /// What is to be admitted next, and what it reuses: the first row that waits, or the prefix that it waits for. None where
    /// nothing waits, or the prefix is being computed.
    pub(super) fn next_in_line(&mut self) -> Option<(Arc<Request>, Option<Reuse>)> {
        let Waiting { request, head } = self.waiting.front()?;
        let (request, Some(head)) = (Arc::clone(request), *head) else { return Some((Arc::clone(request), None)) };
        let known = |prefix: &Prefix| prefix.request.sequence == head.prefix;
        if let Some(prefix) = self.prefixes.known.iter().find(|prefix| known(prefix)) {
            if let Some(slot) = self.ready_slot(prefix) {
                return Some((request, Some(Reuse { slot, tokens: head.tokens })));
            }
            let (in_cache, prefix) = (prefix.slot.is_some(), Arc::clone(&prefix.request));
            let enough = head.tokens.saturating_sub(self.prefix_tokens_min()?);
            let ready = self.longest_ready(&request);
            if ready.is_none_or(|ready| ready.tokens <= enough) {
                if in_cache {
                    return None;
                }
                if self.can_afford(&prefix, &request) {
                    let ready = self.longest_ready(&prefix);
                    return Some((prefix, ready));
                }
                if let Some(index) = self.prefixes.known.iter().position(known) {
                    self.forget(index);
                }
            }
        }
        let ready = self.longest_ready(&request);
        Some((request, ready))
    }

    /// The slot of a prefix that the plans before this one have computed whole.
    fn ready_slot(&self, prefix: &Prefix) -> Option<u32> {
        prefix.slot.filter(|&slot| self.rows[slot as usize].as_ref().is_some_and(|sequence| !sequence.in_prefill()))
    }

    fn longest_ready(&self, row: &Request) -> Option<Reuse> {
        let tokens_min = self.prefix_tokens_min()?;
        let ready = self.prefixes.known.iter().filter_map(|prefix| {
            let slot = self.ready_slot(prefix)?;
            Some(Reuse { slot, tokens: self.usable(&prefix.request, row) })
        });
        ready.filter(|reuse| reuse.tokens >= tokens_min).max_by_key(|reuse| reuse.tokens)
    }

    /// Whether a prefix may join those in the cache, of which one that no row wants is given up where that helps.
    fn can_afford(&mut self, prefix: &Request, row: &Request) -> bool {
        loop {
            let prefixes = self.prefixes.in_cache().count() as u32 + 1;
            let slot_tokens = self.limits.price.slot_tokens(prefix.reserved_tokens().max(row.reserved_tokens()));
            let layout = Layout { slots: prefixes * SLOTS_PER_PREFIX, slot_tokens };
            if self.fits(layout, prefix, &MediaLoad::of(prefix, &self.limits.price)) {
                return true;
            }
            let Some(index) = self.prefixes.idle(|prefix| prefix.slot.is_some()) else { return false };
            self.forget(index);
        }
    }

    /// Whether the budget has room for a layout, `request` in it, in a step with `media`.
    pub(super) fn fits(&self, layout: Layout, request: &Request, media: &MediaLoad) -> bool {
        let own = if request.sequence.is_prefix() { request.reserved_tokens() } else { 0 };
        let copied = self.prefixes.longest().max(own).max(self.prefixes.copied_tokens);
        let copying = if copied == 0 { 0 } else { self.limits.copy_bytes(copied, layout.slot_tokens) };
        self.limits.layout_bytes(layout.slots, layout.slot_tokens, media).saturating_add(copying) <= self.limits.kv_bytes_max
    }

    /// Takes a prefix out of the cache for the sake of the first row that waits: one that no row wants; or any, when no row runs
    /// whose end would make room. Whether its slot is free now: where a plan in flight has to do with it, it will be.
    pub(super) fn make_room(&mut self) -> bool {
        let released = self.released.len();
        let own = self.waiting.front().and_then(|waiting| waiting.head).map(|head| head.prefix);
        if let Some(index) = self.prefixes.idle(|prefix| prefix.slot.is_some()) {
            self.forget(index);
        } else if self.running == 0 {
            let others = |prefix: &Prefix| prefix.slot.is_some() && Some(prefix.request.sequence) != own;
            if let Some(index) = self.prefixes.known.iter().position(others) {
                // It is computed again for the rows behind.
                self.evict(index);
            } else if let Some(index) = self.prefixes.known.iter().position(|prefix| prefix.slot.is_some()) {
                self.forget(index);
            }
        }
        self.released.len() > released
    }

    /// Notes that `request` was admitted to `slot`, with what it reuses.
    pub(super) fn admitted(&mut self, request: &Request, slot: u32, reuse: Option<Reuse>) {
        if let Some(source) = reuse.and_then(|reuse| self.rows[reuse.slot as usize].as_mut()) {
            source.in_flight += 1;
            self.prefixes.copied_tokens = self.prefixes.copied_tokens.max(source.request.reserved_tokens());
        }
        if request.sequence.is_prefix() {
            let admitted = self.prefixes.known.iter_mut().find(|prefix| prefix.request.sequence == request.sequence);
            if let Some(prefix) = admitted {
                prefix.slot = Some(slot);
            }
            return;
        }
        let head = self.waiting.pop_front().and_then(|waiting| waiting.head);
        let wanted = self.prefixes.known.iter_mut().find(|prefix| Some(prefix.request.sequence) == head.map(|head| head.prefix));
        if let Some(prefix) = wanted {
            prefix.wanted = prefix.wanted.saturating_sub(1);
        }
    }

    /// Whether a prefix may take a slot: those given up keep theirs while they are in flight.
    pub(super) fn has_prefix_slot(&self) -> bool {
        self.rows.iter().flatten().count() < self.resident as usize + PREFIXES_MAX
    }

    /// Slots that prefixes will take which are wanted and not in the cache yet.
    pub(super) fn prefixes_to_come(&self) -> u32 {
        self.prefixes.known.iter().filter(|prefix| prefix.wanted > 0 && prefix.slot.is_none()).count() as u32
    }
}

/// Of `shared` tokens that both start with, those before a medium that is not the same in both, or that the last of them parts.
fn before_other_media(a: &Request, b: &Request, shared: u32) -> u32 {
    let same = |(a_medium, b_medium): &(&Medium, &Medium)| {
        (a_medium.first, a_medium.tokens, a_medium.identity) == (b_medium.first, b_medium.tokens, b_medium.identity)
            && a.whole_spans == b.whole_spans
    };
    let both = a.media.iter().zip(&b.media).take_while(same).count();
    let parted = a.media[..both].iter().filter(|medium| medium.is_parted(shared));
    let others = a.media.get(both).into_iter().chain(b.media.get(both));
    parted.chain(others).map(|medium| medium.first).min().map_or(shared, |first| shared.min(first))
}

/// Tokens that both start with.
fn common(a: &[u32], b: &[u32]) -> usize {
    // Whole blocks are compared much faster than tokens.
    const BLOCK: usize = 64;
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK)).take_while(|(a, b)| a == b).count();
    let start = blocks * BLOCK;
    start + a[start..].iter().zip(&b[start..]).take_while(|(a, b)| a == b).count()
}
