//! What rows cost in bytes, and what may never be exceeded.

use thiserror::Error;

use super::{EncodePrice, MediaLoad, Medium, PREFIXES_MAX, Request};

/// Shorter chunks would leave a device without enough to do.
const PREFILL_CHUNK_MIN: u32 = 128;

/// Bytes that a cache layout costs. All counts are for the layout the engine's cache really has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Price {
    /// Keys and values of the layers with full attention, bytes a token of a slot.
    pub full_bytes_per_token: u64,
    /// Layers with a sliding window: (window in tokens, bytes a token of a slot).
    pub windows: Vec<(u32, u64)>,
    /// Bytes a slot whatever its length.
    pub fixed_bytes_per_slot: u64,
    /// Slots grow in steps of this many tokens; 0 counts as 1.
    pub slot_tokens_step: u32,
    /// Scratch of a step's prefill: bytes a prompt token, and bytes a (prompt token × token of its own context) pair.
    pub prefill_bytes_per_token: u64,
    pub prefill_bytes_per_pair: u64,
    /// Tokens of no row that a step with prefill may compute beside its own: passes of few sizes are padded.
    pub padding_tokens: u32,
    /// Scratch of a step without prefill: bytes a slot.
    pub decode_bytes_per_slot: u64,
    /// Scratch of encoding the windows of admitted rows, as many at once as the engine takes; 0 where rows have none.
    pub window_bytes: u64,
    /// Scratch of encoding an image, and a recording, of a prompt.
    pub image: EncodePrice,
    pub audio: EncodePrice,
    /// Images and recordings that the engine encodes at once.
    pub media_at_once: u32,
    /// What media have become, from the admission of their rows to the end of their prompts: bytes a soft token.
    pub soft_bytes_per_token: u64,
    /// Whether keys and values at a position depend on the tokens up to it alone, so that they serve all that starts with those.
    pub prefixes: bool,
}

impl Price {
    /// `tokens` rounded up to what a slot can have.
    pub fn slot_tokens(&self, tokens: u32) -> u32 {
        let step = self.slot_tokens_step.max(1);
        tokens.div_ceil(step).saturating_mul(step)
    }

    /// Bytes of a cache of `slots` slots of `slot_tokens` tokens.
    pub fn cache_bytes(&self, slots: u32, slot_tokens: u32) -> u64 {
        let full = self.full_bytes_per_token.saturating_mul(u64::from(slot_tokens));
        let slot = self.windows.iter().fold(full.saturating_add(self.fixed_bytes_per_slot), |sum, &(window, bytes)| {
            sum.saturating_add(bytes.saturating_mul(u64::from(slot_tokens.min(window))))
        });
        slot.saturating_mul(u64::from(slots))
    }

    /// Bytes of the largest prefill step over contexts of `slot_tokens`: all its chunks together have `chunk` tokens at most.
    pub fn prefill_bytes(&self, chunk: u32, slot_tokens: u32) -> u64 {
        let pairs = self.prefill_bytes_per_pair.saturating_mul(u64::from(slot_tokens));
        let tokens = u64::from(chunk).saturating_add(u64::from(self.padding_tokens));
        let of_tokens = self.prefill_bytes_per_token.saturating_mul(tokens);
        of_tokens.saturating_add(pairs.saturating_mul(u64::from(chunk)))
    }

    /// `chunk` prompt tokens a step, halved as long as their scratch leaves less than four fifths of `kv_bytes_max` for rows: many
    /// rows that decode together gain more than long chunks do.
    pub fn prefill_chunk_within(&self, chunk: u32, kv_bytes_max: u64) -> u32 {
        let mut chunk = chunk;
        while chunk > PREFILL_CHUNK_MIN && self.prefill_bytes(chunk, chunk) > kv_bytes_max / 5 {
            chunk = (chunk / 2).max(PREFILL_CHUNK_MIN);
        }
        chunk
    }

    /// Whether less than all of the first `tokens` positions of a sequence can be taken from them: no window has left any behind.
    pub fn can_cut(&self, tokens: u32) -> bool {
        self.windows.iter().all(|&(window, _)| tokens <= window)
    }
}

/// What a batch may take. A 0 in `rows`, `prefill_chunk` or `prompt_concurrency` counts as 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Rows in the cache at once at most, prefixes not counted; as many more may wait.
    pub rows: u32,
    /// Prompt tokens of a step at most, those of all its rows together; a row's chunks start at multiples of it.
    pub prefill_chunk: u32,
    /// Rows that compute prompt tokens in one step at most.
    pub prompt_concurrency: u32,
    /// The cache and the prefill scratch together never cost more, by `price`.
    pub kv_bytes_max: u64,
    pub price: Price,
    /// Tokens a row can have, prompt and completion together.
    pub context_length: u32,
    /// Prompt tokens that rows must share at the head for them to be computed once; None where each row computes its own. Nothing
    /// is shared where the price says that it cannot be.
    pub prefix_tokens_min: Option<u32>,
    /// Tokens of the longest medium that a chunk may be alone, where media are computed whole; 0 where there are none. The budget
    /// has its scratch where it is longer than `prefill_chunk`.
    pub span_tokens_max: u32,
}

impl Limits {
    /// Slots that a layout has at most: those of rows, and those of prefixes on top.
    pub fn slots_max(&self) -> u32 {
        let prefixes = self.prefix_tokens_min.filter(|_| self.price.prefixes).map_or(0, |_| PREFIXES_MAX as u32);
        self.rows.saturating_add(prefixes)
    }

    /// Prompt tokens of the largest step.
    pub fn step_tokens_max(&self) -> u32 {
        self.prefill_chunk.max(self.span_tokens_max)
    }

    /// Bytes by which copying a prefix of `tokens` takes more than the largest prefill step over slots of `slot_tokens`, before
    /// which it is done.
    pub fn copy_bytes(&self, tokens: u32, slot_tokens: u32) -> u64 {
        let prefill = self.price.prefill_bytes(self.step_tokens_max(), slot_tokens);
        self.price.cache_bytes(1, tokens).saturating_sub(prefill)
    }

    /// Bytes that a cache of `slots` slots of `slot_tokens` tokens costs, the largest prefill step over it included: that is
    /// one full chunk, as several rows' chunks in one step are no longer together, and no context is longer than a slot. `media`
    /// are those of the step.
    pub fn layout_bytes(&self, slots: u32, slot_tokens: u32, media: &MediaLoad) -> u64 {
        let prefill = self.price.prefill_bytes(self.step_tokens_max(), slot_tokens);
        let decode = self.price.decode_bytes_per_slot.saturating_mul(u64::from(slots));
        // One after the other: an encoder's scratch is free again before the prompt is computed.
        let scratch = prefill.max(self.price.window_bytes).max(media.encode_bytes(&self.price)).max(decode);
        self.price.cache_bytes(slots, slot_tokens).saturating_add(scratch).saturating_add(media.soft_bytes(&self.price))
    }

    /// Refuses a budget that not even a row of one token fits.
    pub fn check_budget(&self) -> Result<(), Refused> {
        let needed_bytes = self.layout_bytes(1, self.price.slot_tokens(1), &MediaLoad::default());
        if needed_bytes > self.kv_bytes_max {
            return Err(Refused::NoRow { needed_bytes, kv_bytes_max: self.kv_bytes_max });
        }
        Ok(())
    }

    /// Refuses a row that could not be computed even alone.
    pub fn check(&self, request: &Request) -> Result<(), Refused> {
        if request.prompt.is_empty() {
            return Err(Refused::EmptyPrompt);
        }
        if request.max_tokens == 0 {
            return Err(Refused::NothingToGenerate);
        }
        let (prompt_tokens, max_tokens) = (request.prompt.len() as u64, request.max_tokens);
        if prompt_tokens + u64::from(max_tokens) > u64::from(self.context_length) {
            let over_tokens = prompt_tokens + u64::from(max_tokens) - u64::from(self.context_length);
            return Err(Refused::TooLong { prompt_tokens, max_tokens, context_length: self.context_length, over_tokens });
        }
        let mut end = 0;
        for &Medium { first, tokens, .. } in &request.media {
            if first < end || tokens == 0 || u64::from(first) + u64::from(tokens) > prompt_tokens {
                return Err(Refused::Misplaced { first, tokens, prompt_tokens });
            }
            end = first + tokens;
            let tokens_max = self.step_tokens_max();
            if request.whole_spans && tokens > tokens_max {
                return Err(Refused::LongMedium { tokens, tokens_max });
            }
        }
        let media = MediaLoad::of(request, &self.price);
        let needed_bytes = self.layout_bytes(1, self.price.slot_tokens(request.reserved_tokens()), &media);
        if needed_bytes > self.kv_bytes_max {
            let (encode_bytes, kv_bytes_max) = (media.encode_bytes(&self.price), self.kv_bytes_max);
            return Err(Refused::OverBudget { prompt_tokens, max_tokens, needed_bytes, encode_bytes, kv_bytes_max });
        }
        Ok(())
    }
}

/// Why a row can never be computed under the limits.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refused {
    #[error("the prompt has no tokens: a model needs at least one to go on from")]
    EmptyPrompt,
    #[error("max_tokens is 0, so there is nothing to generate: set it to at least 1")]
    NothingToGenerate,
    #[error(
        "{prompt_tokens} prompt tokens and max_tokens = {max_tokens} are {over_tokens} more than the model's context of \
         {context_length} tokens: shorten the prompt or lower generation.max_tokens"
    )]
    TooLong { prompt_tokens: u64, max_tokens: u32, context_length: u32, over_tokens: u64 },
    #[error(
        "{prompt_tokens} prompt tokens and max_tokens = {max_tokens} need {needed_bytes} bytes of cache and prefill{}, and the \
         budget is {kv_bytes_max} bytes: raise batching.kv_budget, or lower generation.max_tokens or batching.prefill_chunk",
        of_media(*encode_bytes)
    )]
    OverBudget { prompt_tokens: u64, max_tokens: u32, needed_bytes: u64, encode_bytes: u64, kv_bytes_max: u64 },
    #[error(
        "batching.kv_budget is {kv_bytes_max} bytes, and {needed_bytes} is the least that a row of a single token needs, the \
         scratch of a prompt's chunk included: raise it, or lower batching.prefill_chunk"
    )]
    NoRow { needed_bytes: u64, kv_bytes_max: u64 },
    #[error(
        "an image has {tokens} tokens, and {tokens_max} are the most that are computed together: raise batching.prefill_chunk to \
         {tokens} or scale the image down"
    )]
    LongMedium { tokens: u32, tokens_max: u32 },
    /// A fault of whoever made the request.
    #[error("a medium of {tokens} tokens stands at {first} of a prompt of {prompt_tokens}, outside of it or over another")]
    Misplaced { first: u32, tokens: u32, prompt_tokens: u64 },
    /// The caller brought more than [`wants`](super::Scheduler::wants) said.
    #[error("{waiting_max} rows wait already, which is all the queue holds: bring rows only while the scheduler wants them")]
    QueueFull { waiting_max: u32 },
}

fn of_media(encode_bytes: u64) -> String {
    if encode_bytes == 0 {
        String::new()
    } else {
        format!(" (its images and recordings alone {encode_bytes} while they are encoded)")
    }
}

/// A cache's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Layout {
    pub slots: u32,
    pub slot_tokens: u32,
}

impl Layout {
    /// This layout, grown where needed to hold `slot_tokens` tokens in `slot`.
    pub fn holding(self, slot: u32, slot_tokens: u32) -> Self {
        Self { slots: self.slots.max(slot + 1), slot_tokens: self.slot_tokens.max(slot_tokens) }
    }

    /// The smaller of both in either direction.
    pub fn within(self, other: Self) -> Self {
        Self { slots: self.slots.min(other.slots), slot_tokens: self.slot_tokens.min(other.slot_tokens) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn price() -> Price {
        Price {
            full_bytes_per_token: 10,
            windows: vec![(8, 3)],
            fixed_bytes_per_slot: 5,
            slot_tokens_step: 16,
            prefill_bytes_per_token: 7,
            prefill_bytes_per_pair: 2,
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

    #[test]
    fn padding_is_priced_and_a_small_budget_has_short_chunks() {
        let price = Price { prefill_bytes_per_token: 100, prefill_bytes_per_pair: 0, padding_tokens: 255, ..price() };
        assert_eq!(price.prefill_bytes(512, 640), 100 * 767);
        assert_eq!(price.prefill_chunk_within(2048, 5 * 100 * 2303), 2048, "a fifth holds it to the byte");
        assert_eq!(price.prefill_chunk_within(2048, 5 * 100 * 2303 - 1), 1024);
        assert_eq!(price.prefill_chunk_within(2048, 0), PREFILL_CHUNK_MIN);
        assert_eq!(price.prefill_chunk_within(64, 0), 64, "what is shorter stays");
    }

    #[test]
    fn a_layout_costs_what_its_layers_keep() {
        assert_eq!(price().slot_tokens(0), 0);
        assert_eq!(price().slot_tokens(16), 16);
        assert_eq!(price().slot_tokens(17), 32);
        assert_eq!(price().cache_bytes(3, 32), 3 * (320 + 24 + 5), "a window of 8 keeps 8 of 32 tokens");
        assert_eq!(price().cache_bytes(3, 4), 3 * (40 + 12 + 5), "and 4 of 4");
        assert_eq!(price().prefill_bytes(4, 32), 4 * (7 + 64));
    }

    #[test]
    fn what_no_window_has_left_behind_can_be_cut() {
        assert!(price().can_cut(8) && !price().can_cut(9));
        assert!(Price { windows: Vec::new(), ..price() }.can_cut(u32::MAX));
    }

    #[test]
    fn absurd_numbers_saturate() {
        let price = Price { full_bytes_per_token: u64::MAX, prefill_bytes_per_pair: u64::MAX, slot_tokens_step: 0, ..price() };
        assert_eq!(price.slot_tokens(3), 3);
        assert_eq!(price.cache_bytes(u32::MAX, u32::MAX), u64::MAX);
        assert_eq!(price.prefill_bytes(u32::MAX, u32::MAX), u64::MAX);
        assert_eq!(Price { slot_tokens_step: 16, ..price }.slot_tokens(u32::MAX), u32::MAX);
    }
}
