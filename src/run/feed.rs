//! Rows on their way to the engine: read, checked against what is done, prepared on the rayon pool, ordered.
//!
//! A thread of its own stays a bounded number of rows ahead of the engine.

use std::{
    cmp::Reverse,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};
use rayon::prelude::*;
use serde_json::{Map, Value};

use crate::{
    job::{Columns, Order},
    manifest::{BadRow, Item, Manifest, Medium, RowResult},
    media::MediaSource,
    prompt::Prompter,
    schedule::Request,
    sink::{Done, Outcome, Row, RowState, Stage},
    transcribe::{Language, Transcriber},
};

/// Blocks of rows that are ready before the engine takes them.
const BLOCKS_AHEAD: usize = 2;

/// Rows that are ordered by length together, and the bytes of their columns that end such a stretch early.
pub const ORDERED_ROWS: usize = 4096;
const ORDERED_BYTES: usize = 32 << 20;

/// A row ready to be computed.
#[derive(Debug)]
pub struct Pending {
    pub work: Work,
    pub row: u64,
    pub id: String,
    pub source: String,
    pub input_hash: u64,
    pub reference: Option<String>,
    pub columns: Map<String, Value>,
    pub perceived: Perceived,
    /// When it had been read and prepared.
    pub read_at: Instant,
}

/// What a prompt's media came to once they were decoded.
#[derive(Debug, Default)]
pub struct Perceived {
    pub image_tokens: u32,
    /// Soft tokens and seconds of its recordings, where it has any.
    pub heard: Option<(u32, f64)>,
    pub notes: Vec<String>,
    /// What decoding took.
    pub took: Duration,
}

impl Pending {
    pub fn into_row(self, outcome: Outcome) -> Row {
        let Self { row, id, source, input_hash, reference, columns, .. } = self;
        Row { id, row, source, input_hash, outcome, reference, score: None, columns }
    }

    fn bytes(&self) -> usize {
        match &self.work {
            Work::Text(request) => 4 * request.prompt.len(),
            Work::Media { request, media } => {
                let held = media.iter().map(|medium| match &medium.source {
                    MediaSource::Bytes { bytes, .. } => bytes.len(),
                    MediaSource::File(path) => path.as_os_str().len(),
                });
                4 * request.prompt.len() + held.sum::<usize>()
            }
            Work::Speech { audio: MediaSource::Bytes { bytes, .. }, .. } => bytes.len(),
            Work::Speech { audio: MediaSource::File(path), .. } => path.as_os_str().len(),
        }
    }
}

/// What there is to compute.
#[derive(Debug)]
pub enum Work {
    Text(Arc<Request>),
    /// A prompt whose media are not decoded yet.
    Media {
        request: Request,
        media: Vec<Medium>,
    },
    Speech {
        audio: MediaSource,
        language: Language,
    },
}

/// What rows of a job become.
pub enum Preparation {
    Prompts { prompter: Arc<Prompter> },
    Recordings { transcriber: Arc<Transcriber>, columns: Columns },
}

/// One step of the way, for the loop.
pub enum Fed {
    Ready(Box<Pending>),
    Failed(Box<Row>),
}

/// What [`Feed::next`] gives.
pub enum Next {
    Row(Fed),
    /// The reading thread has none ready.
    NotYet,
    End,
}

/// What to feed.
pub struct Source {
    pub manifest: Manifest,
    pub preparation: Preparation,
    pub done: Arc<Done>,
    pub order: Order,
    /// Rows of the manifest to take.
    pub limit: u64,
    /// Once set, reading ends.
    pub stop: Arc<AtomicBool>,
}

/// What is known once the manifest has been read.
#[derive(Debug, Clone, Copy)]
pub struct Total {
    /// Rows of the manifest, up to the limit.
    pub rows: u64,
    /// The limit or a signal cut some off.
    pub cut: bool,
}

pub struct Feed {
    blocks: Receiver<Result<Block>>,
    ready: std::vec::IntoIter<Fed>,
    total: Option<Total>,
}

enum Block {
    Rows(Vec<Fed>),
    End(Total),
}

impl Feed {
    pub fn start(source: Source) -> Self {
        let (sender, blocks) = sync_channel(BLOCKS_AHEAD);
        thread::spawn(move || {
            let failed = sender.clone();
            if let Err(error) = read(source, &sender) {
                // The loop has gone where nobody receives it.
                let _ = failed.send(Err(error));
            }
        });
        Self { blocks, ready: Vec::new().into_iter(), total: None }
    }

    /// The next row. With `wait` it is never [`Next::NotYet`].
    pub fn next(&mut self, wait: bool) -> Result<Next> {
        loop {
            if let Some(fed) = self.ready.next() {
                return Ok(Next::Row(fed));
            }
            if self.total.is_some() {
                return Ok(Next::End);
            }
            let block = if wait {
                self.blocks.recv().ok()
            } else {
                match self.blocks.try_recv() {
                    Err(TryRecvError::Empty) => return Ok(Next::NotYet),
                    received => received.ok(),
                }
            };
            match block.ok_or_else(|| anyhow!("the thread that reads the manifest ended without a word"))?? {
                Block::Rows(rows) => self.ready = rows.into_iter(),
                Block::End(total) => self.total = Some(total),
            }
        }
    }

    /// Known after the last row.
    pub fn total(&self) -> Option<Total> {
        self.total
    }
}

fn read(mut source: Source, blocks: &SyncSender<Result<Block>>) -> Result<()> {
    let mut rows = 0;
    let mut cut = false;
    let mut stretch = Vec::new();
    let mut stretch_bytes = 0;
    let mut stretches = 0u64;
    while let Some(mut block) = source.manifest.next_block()? {
        let left = source.limit - rows;
        if block.len() as u64 > left {
            block.truncate(left as usize);
            cut = true;
        }
        rows += block.len() as u64;
        for row in &block {
            refuse_changed(row, &source.done)?;
        }
        let fed: Vec<Fed> = block
            .into_par_iter()
            .with_min_len(16)
            .filter(|row| !source.done.contains(number(row)))
            .map(|row| source.prepare(row))
            .collect();
        stretch_bytes += fed.iter().map(bytes).sum::<usize>();
        stretch.extend(fed);
        let full = source.order == Order::Manifest || stretch.len() >= ORDERED_ROWS || stretch_bytes >= ORDERED_BYTES;
        if full && !stretch.is_empty() {
            stretches += 1;
            let rows = source.ordered(std::mem::take(&mut stretch), stretches);
            stretch_bytes = 0;
            if blocks.send(Ok(Block::Rows(rows))).is_err() {
                return Ok(());
            }
        }
        cut |= source.stop.load(Ordering::Relaxed);
        if cut {
            break;
        }
        if rows == source.limit {
            cut = source.manifest.next_block()?.is_some();
            break;
        }
    }
    if !stretch.is_empty() && blocks.send(Ok(Block::Rows(source.ordered(stretch, stretches + 1)))).is_err() {
        return Ok(());
    }
    let _ = blocks.send(Ok(Block::End(Total { rows, cut })));
    Ok(())
}

fn number(row: &RowResult) -> u64 {
    match row {
        Ok(item) => item.row,
        Err(bad) => bad.row,
    }
}

fn refuse_changed(row: &RowResult, done: &Done) -> Result<()> {
    let (number, hash, source) = match row {
        Ok(item) => (item.row, item.input_hash, &item.source),
        Err(bad) => (bad.row, bad.input_hash, &bad.source),
    };
    if done.state(number, hash) == RowState::Changed {
        return Err(anyhow!(
            "{source} has changed since its result was written: give the job another --output, or throw the earlier results away with \
             --fresh"
        ));
    }
    Ok(())
}

/// About what a row takes in memory while it waits.
fn bytes(fed: &Fed) -> usize {
    let (columns, own) = match fed {
        Fed::Ready(pending) => (&pending.columns, pending.bytes()),
        Fed::Failed(row) => (&row.columns, 0),
    };
    columns.iter().map(|(name, value)| name.len() + value_bytes(value)).sum::<usize>() + own + 256
}

fn value_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len() + 32,
        Value::Array(values) => values.iter().map(value_bytes).sum::<usize>() + 32,
        Value::Object(values) => values.iter().map(|(name, value)| name.len() + 32 + value_bytes(value)).sum::<usize>() + 32,
        Value::Null | Value::Bool(_) | Value::Number(_) => 32,
    }
}

impl Source {
    fn prepare(&self, row: RowResult) -> Fed {
        let item = match row {
            Ok(item) => item,
            Err(bad) => {
                let BadRow { row, id, source, input_hash, error, columns } = *bad;
                let outcome = Outcome::Failed { stage: Stage::Manifest, error };
                return failed(Row { id, row, source, input_hash, outcome, reference: None, score: None, columns });
            }
        };
        let prepared = self.preparation.of(&item);
        let Item { row, id, source, input_hash, columns, .. } = item;
        match prepared {
            Ok((work, reference)) => {
                let (perceived, read_at) = (Perceived::default(), Instant::now());
                Fed::Ready(Box::new(Pending { work, row, id, source, input_hash, reference, columns, perceived, read_at }))
            }
            Err(error) => {
                let outcome = Outcome::Failed { stage: Stage::Prompt, error };
                failed(Row { id, row, source, input_hash, outcome, reference: None, score: None, columns })
            }
        }
    }

    fn ordered(&self, mut rows: Vec<Fed>, stretch: u64) -> Vec<Fed> {
        if self.order == Order::Length {
            by_length(&mut rows, stretch, |fed| match fed {
                Fed::Ready(pending) => match &pending.work {
                    Work::Text(request) => request.reserved_tokens(),
                    // Soft tokens are not known yet.
                    Work::Media { request, media } => request.reserved_tokens() + 256 * media.len() as u32,
                    // Windows all cost the same, and how many there are is not known yet.
                    Work::Speech { .. } => 0,
                },
                Fed::Failed(_) => 0,
            });
        }
        rows
    }
}

/// Rows of like length beside each other: slots of the cache are as long as the longest row's. The longest come first, so that a
/// run does not end with a few of them alone; every other stretch runs the other way, so that neighbours across two stretches are
/// alike too.
pub fn by_length<T>(rows: &mut [T], stretch: u64, length: impl Fn(&T) -> u32) {
    if stretch.is_multiple_of(2) {
        rows.sort_by_key(|row| Reverse(length(row)));
    } else {
        rows.sort_by_key(length);
    }
}

impl Preparation {
    /// The work of a row, and its reference; the error is the sentence of a failed row.
    pub fn of(&self, item: &Item) -> Result<(Work, Option<String>), String> {
        let (transcriber, columns) = match self {
            Self::Prompts { prompter, .. } => {
                let prepared = prompter.prepare(item)?;
                if !prepared.media.is_empty() {
                    return Ok((Work::Media { request: prepared.request, media: prepared.media }, prepared.reference));
                }
                return Ok((Work::Text(Arc::new(prepared.request)), prepared.reference));
            }
            Self::Recordings { transcriber, columns } => (transcriber, columns),
        };
        let Some(audio) = item.audio.clone() else {
            let column = &columns.audio;
            return Err(format!(
                "the row has no recording: its column {column:?} is missing or empty; name the right one with input.columns.audio"
            ));
        };
        let text = |column: &String| item.columns.get(column).and_then(Value::as_str).filter(|text| !text.is_empty());
        let language = text(&columns.language);
        let language = transcriber.language(language).map_err(|known| {
            let (column, language) = (&columns.language, language.unwrap_or_default());
            match known {
                None => format!("the column {column:?} says {language:?}, and the model knows English alone"),
                Some(known) => format!("the column {column:?} says {language:?}, which the model does not know; it knows {known}"),
            }
        })?;
        Ok((Work::Speech { audio, language }, text(&columns.reference).map(str::to_owned)))
    }
}

fn failed(row: Row) -> Fed {
    Fed::Failed(Box::new(row))
}
