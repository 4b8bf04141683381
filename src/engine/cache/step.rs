//! Where a pass's tokens stand, and what they are besides tokens.

use std::{
    cell::{Cell, OnceCell},
    time::{Duration, Instant},
};

use mlx_rs::Array;

use crate::engine::EngineError;

/// Where the tokens of one forward pass stand: those of prompt chunks first, chunk after chunk, then one of each decoding row.
pub struct Step {
    places: Places,
    soft_tokens: Option<SoftTokens>,
    spans: Vec<Span>,
    /// Tokens between prompts and decoding rows that nobody looks at.
    padding: i32,
    /// Made when it is first needed, as are the positions: kernels of our own do without.
    decode: OnceCell<DecodeRows>,
    positions: OnceCell<Array>,
    /// Time that building the pass spent waiting for the device.
    waited: Cell<Duration>,
}

/// Hidden states that a tower made, which stand where tokens' own embeddings would.
pub struct SoftTokens {
    /// Which of the pass's tokens they stand for, in ascending order.
    pub places: Vec<i32>,
    /// (places, hidden), as the model's embedding would give them, scaled already.
    pub embeddings: Array,
}

/// Tokens `start .. end` of a prompt, all in one chunk of the pass, that see each other both ways in layers with a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Index among the pass's chunks.
    pub chunk: usize,
    pub start: i32,
    pub end: i32,
}

/// A step in plain numbers.
pub struct Places {
    pub chunks: Vec<Chunk>,
    /// (slot, position) of the decoding rows.
    pub rows: Vec<(u32, u32)>,
    /// For each token, how far its sequence reaches: a prompt's whole length, or its own position and itself.
    reaches: Vec<i32>,
}

impl Places {
    /// Each token's position, and how far its sequence reaches. Of a step without padding.
    pub fn tokens(&self) -> impl Iterator<Item = (i32, i32)> {
        let of_chunks = self.chunks.iter().flat_map(|chunk| chunk.start..chunk.start + chunk.length);
        of_chunks.chain(self.rows.iter().map(|row| row.1 as i32)).zip(self.reaches.iter().copied())
    }
}

/// One sequence's prompt tokens at positions `start .. start + length`, of a prompt of `prompt_tokens`.
#[derive(Debug, Clone, Copy)]
pub struct Chunk {
    pub slot: i32,
    pub start: i32,
    pub length: i32,
    pub prompt_tokens: i32,
}

impl Step {
    /// `rows` are (slot, position) of the decoding rows, in ascending order of slots.
    pub fn new(chunks: Vec<Chunk>, rows: &[(u32, u32)]) -> Self {
        Self::padded(chunks, 0, rows)
    }

    /// With `padding` tokens of no sequence between the prompts' and the decoding rows'.
    pub fn padded(chunks: Vec<Chunk>, padding: i32, rows: &[(u32, u32)]) -> Self {
        let mut reaches = Vec::new();
        for chunk in &chunks {
            reaches.extend(std::iter::repeat_n(chunk.prompt_tokens, chunk.length as usize));
        }
        reaches.extend(std::iter::repeat_n(1, padding as usize));
        reaches.extend(rows.iter().map(|row| row.1 as i32 + 1));
        let (decode, positions, waited) = (OnceCell::new(), OnceCell::new(), Cell::default());
        let places = Places { chunks, rows: rows.to_vec(), reaches };
        Self { places, soft_tokens: None, spans: Vec::new(), padding, decode, positions, waited }
    }

    /// With `embeddings` (places, hidden) in place of those of the tokens at `places`.
    pub fn with_soft_tokens(mut self, places: Vec<i32>, embeddings: Array) -> Self {
        self.soft_tokens = (!places.is_empty()).then_some(SoftTokens { places, embeddings });
        self
    }

    /// With tokens that see each other both ways.
    pub fn with_spans(mut self, spans: Vec<Span>) -> Self {
        self.spans = spans;
        self
    }

    pub fn soft_tokens(&self) -> Option<&SoftTokens> {
        self.soft_tokens.as_ref()
    }

    /// First and last but one of the positions in chunk `chunk` that see each other.
    pub(super) fn spans_of(&self, chunk: usize) -> impl Iterator<Item = (i32, i32)> {
        self.spans.iter().filter(move |span| span.chunk == chunk).map(|span| (span.start, span.end))
    }

    pub fn padding(&self) -> i32 {
        self.padding
    }

    /// Waits for an array, and counts the time.
    pub fn wait_for(&self, array: &Array) -> Result<(), EngineError> {
        let since = Instant::now();
        array.eval()?;
        self.waited.set(self.waited.get() + since.elapsed());
        Ok(())
    }

    pub fn waited(&self) -> Duration {
        self.waited.get()
    }

    /// (N) int32: the position of each token.
    pub fn positions(&self) -> &Array {
        self.positions.get_or_init(|| {
            let Places { chunks, rows, .. } = &self.places;
            let of_chunks = chunks.iter().flat_map(|chunk| chunk.start..chunk.start + chunk.length);
            let of_padding = std::iter::repeat_n(0, self.padding as usize);
            let positions: Vec<i32> = of_chunks.chain(of_padding).chain(rows.iter().map(|row| row.1 as i32)).collect();
            Array::from_slice(&positions, &[positions.len() as i32])
        })
    }

    pub(super) fn decode(&self) -> Option<&DecodeRows> {
        let rows = &self.places.rows;
        (!rows.is_empty()).then(|| self.decode.get_or_init(|| DecodeRows::new(rows)))
    }

    pub fn reaches(&self) -> &[i32] {
        &self.places.reaches
    }

    pub fn places(&self) -> &Places {
        &self.places
    }
}

/// The rows of a decode step; shared by all layers.
pub(super) struct DecodeRows {
    /// (rows) int32 each.
    pub(super) slots: Array,
    pub(super) positions: Array,
    pub(super) rows: i32,
    /// (first slot, slots): neighbours without a gap, in order.
    pub(super) runs: Vec<(i32, i32)>,
    /// Slots `0 .. span` hold all rows.
    pub(super) span: i32,
    pub(super) last_position: i32,
    /// Set where the rows are not exactly the slots `0 .. rows`: for each slot of the span, a row to stand in for it.
    pub(super) stand_ins: Option<Array>,
    /// Positions by slot of the span, `(span, 1, 1, 1)`.
    pub(super) span_positions: Array,
    /// All rows stand at the same position.
    pub(super) equal: bool,
}

impl DecodeRows {
    fn new(rows: &[(u32, u32)]) -> Self {
        let slots: Vec<i32> = rows.iter().map(|row| row.0 as i32).collect();
        let positions: Vec<i32> = rows.iter().map(|row| row.1 as i32).collect();
        let count = rows.len() as i32;
        let span = slots.iter().max().map_or(0, |slot| slot + 1);
        let last_position = positions.iter().copied().max().unwrap_or(0);
        let mut stand_ins = None;
        let mut by_slot = positions.clone();
        if span != count {
            let mut row_of_slot = vec![0; span as usize];
            by_slot = vec![last_position; span as usize];
            for (row, (&slot, &position)) in slots.iter().zip(&positions).enumerate() {
                row_of_slot[slot as usize] = row as i32;
                by_slot[slot as usize] = position;
            }
            stand_ins = Some(Array::from_slice(&row_of_slot, &[span]));
        }
        let equal = by_slot.iter().all(|&position| position == last_position);
        let mut runs: Vec<(i32, i32)> = Vec::new();
        for &slot in &slots {
            match runs.last_mut() {
                Some((first, length)) if *first + *length == slot => *length += 1,
                _ => runs.push((slot, 1)),
            }
        }
        Self {
            slots: Array::from_slice(&slots, &[count]),
            positions: Array::from_slice(&positions, &[count]),
            rows: count,
            runs,
            span,
            last_position,
            stand_ins,
            span_positions: Array::from_slice(&by_slot, &[span, 1, 1, 1]),
            equal,
        }
    }
}
