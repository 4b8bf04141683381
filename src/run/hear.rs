//! Recordings on their way to the engine: decoded, cut into windows and turned into features on the rayon pool, in order.
//!
//! A thread of its own hands rows' recordings to the pool. Each is decoded a few windows at a time, so that what waits in memory
//! does not depend on how long a recording is, and several are under way at once, so that no core waits for one file. Rows leave in
//! the order of the manifest while the engine is what takes time: those of the first row under way always go on, the others while
//! there is room.

use std::{
    cell::Cell,
    collections::VecDeque,
    panic::{self, AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Once,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};

use super::feed::{Fed, Feed, Next, Pending, Total, Work};
use crate::{
    job::{Audio, Job},
    media::{Features, MediaSource, Recording, SAMPLE_RATE, Splitter, WhisperMel, panic_words},
    sink::Row,
};

/// Windows that one task of the pool makes before it lets others go.
const WINDOWS_PER_TASK: usize = 2;

/// Windows ready or in the making, beyond those of the first recording under way; features of one are about a megabyte.
const WINDOWS_AHEAD: usize = 48;

/// How long the loop waits for what is not ready before it looks around.
const WAIT: Duration = Duration::from_millis(100);

/// Messages that wait for the loop.
const MESSAGES_AHEAD: usize = 16;

thread_local! {
    /// This thread decodes, and what a decoder says as it panics is told in its row.
    static DECODING: Cell<bool> = const { Cell::new(false) };
}

/// A part of a row's recording.
#[derive(Debug)]
pub struct Window {
    pub row: u64,
    pub start_seconds: f64,
    /// Its own frames, without padding.
    pub features: Arc<Features>,
    /// Nobody can be speaking in it.
    pub is_steady: bool,
}

/// How a row's recording ended.
#[derive(Debug)]
pub struct Ended {
    pub row: u64,
    pub windows: usize,
    pub audio_seconds: f64,
    /// The pool's time for it.
    pub took: Duration,
    pub notes: Vec<String>,
    /// Why the row fails.
    pub error: Option<String>,
}

/// What comes out; a row's windows stand in their order between its start and its end, rows may be between each other.
#[derive(Debug)]
pub enum Heard {
    Start(Box<Pending>),
    Window(Window),
    End(Box<Ended>),
    Failed(Box<Row>),
}

/// What [`Hear::next`] gives.
pub enum NextHeard {
    Heard(Heard),
    /// None is ready.
    NotYet,
    End,
}

pub struct Hear {
    messages: Receiver<Result<Message>>,
    total: Option<Total>,
}

enum Message {
    Heard(Heard),
    End(Total),
}

/// How recordings become features.
struct Ear {
    audio: Audio,
    mel: WhisperMel,
}

/// A row under way.
struct Underway {
    row: u64,
    /// What the loop gets next of it, in order.
    ready: VecDeque<Heard>,
    /// None while the pool has it, and at its end.
    listening: Option<Box<Listening>>,
    ended: bool,
}

/// A recording between two tasks.
struct Listening {
    row: u64,
    /// What messages call it.
    name: String,
    source: Source,
    splitter: Splitter,
    /// All of it was read.
    read: bool,
    windows: usize,
    took: Duration,
}

enum Source {
    Closed(MediaSource),
    Open(Box<Recording>),
}

/// What a task hands back.
struct Advanced {
    row: u64,
    windows: Vec<Window>,
    /// Where it goes on, or how it ended.
    state: std::result::Result<Box<Listening>, Box<Ended>>,
}

impl Hear {
    /// `bins` of the model's features.
    pub fn start(feed: Feed, job: &Job, bins: usize) -> Self {
        quiet_decoders();
        let (sender, messages) = sync_channel(MESSAGES_AHEAD);
        let ear = Arc::new(Ear { audio: job.audio, mel: WhisperMel::new(bins) });
        thread::spawn(move || {
            if let Err(error) = (Coordinator { feed, ear, out: sender.clone(), rows: VecDeque::new(), ahead: 0 }).run() {
                // The loop has gone where nobody receives it.
                let _ = sender.send(Err(error));
            }
        });
        Self { messages, total: None }
    }

    /// The next part. With `wait` it waits a moment for one: a signal to stop must not wait for hours of silence.
    pub fn next(&mut self, wait: bool) -> Result<NextHeard> {
        if self.total.is_some() {
            return Ok(NextHeard::End);
        }
        let message = if wait {
            match self.messages.recv_timeout(WAIT) {
                Err(RecvTimeoutError::Timeout) => return Ok(NextHeard::NotYet),
                received => received.ok(),
            }
        } else {
            match self.messages.try_recv() {
                Err(TryRecvError::Empty) => return Ok(NextHeard::NotYet),
                received => received.ok(),
            }
        };
        Ok(match message.ok_or_else(|| anyhow!("the thread that hears recordings ended without a word"))?? {
            Message::Heard(heard) => NextHeard::Heard(heard),
            Message::End(total) => {
                self.total = Some(total);
                NextHeard::End
            }
        })
    }

    /// Known after the last row.
    pub fn total(&self) -> Option<Total> {
        self.total
    }
}

struct Coordinator {
    feed: Feed,
    ear: Arc<Ear>,
    out: SyncSender<Result<Message>>,
    rows: VecDeque<Underway>,
    /// Windows ready or in the making.
    ahead: usize,
}

/// The loop is no longer there to hear anything.
struct Gone;

impl Coordinator {
    fn run(mut self) -> Result<()> {
        let rows_max = 2 * rayon::current_num_threads() + 2;
        // As many as there can be tasks, so that none waits to hand over.
        let (done, advanced) = sync_channel(rows_max);
        let mut working = 0usize;
        let mut exhausted = false;
        loop {
            while self.rows.len() < rows_max && !exhausted {
                match self.feed.next(self.rows.is_empty())? {
                    Next::Row(fed) => self.take(fed),
                    Next::NotYet => break,
                    Next::End => exhausted = true,
                }
            }
            if self.hand_out().is_err() {
                return Ok(());
            }
            working += self.spawn(&done);
            if working == 0 {
                match (exhausted && self.rows.is_empty(), self.feed.total()) {
                    (true, Some(total)) => {
                        let _ = self.out.send(Ok(Message::End(total)));
                        return Ok(());
                    }
                    _ => continue,
                }
            }
            let Ok(Advanced { row, windows, state }) = advanced.recv() else {
                return Err(anyhow!("the pool that decodes recordings ended without a word"));
            };
            working -= 1;
            let Some(underway) = self.rows.iter_mut().find(|underway| underway.row == row) else { continue };
            // A task counts for all the windows it may make until it has made them.
            self.ahead = (self.ahead + windows.len()).saturating_sub(WINDOWS_PER_TASK);
            underway.ready.extend(windows.into_iter().map(Heard::Window));
            match state {
                Ok(listening) => underway.listening = Some(listening),
                Err(ended) => {
                    underway.ready.push_back(Heard::End(ended));
                    underway.ended = true;
                }
            }
        }
    }

    fn take(&mut self, fed: Fed) {
        let (row, heard, listening) = match fed {
            Fed::Failed(row) => (row.row, Heard::Failed(row), None),
            Fed::Ready(pending) => match &pending.work {
                Work::Speech { audio, .. } => {
                    let listening = Listening {
                        row: pending.row,
                        name: audio.name(),
                        source: Source::Closed(audio.clone()),
                        splitter: Splitter::new(self.ear.audio.long),
                        read: false,
                        windows: 0,
                        took: Duration::ZERO,
                    };
                    (pending.row, Heard::Start(pending), Some(Box::new(listening)))
                }
                // The feed of a job that hears gives no other.
                Work::Text(_) | Work::Media { .. } => return,
            },
        };
        let ended = listening.is_none();
        self.rows.push_back(Underway { row, ready: VecDeque::from([heard]), listening, ended });
    }

    /// Sends what is ready: of the first row all of it, of those behind it as much as the loop has room for at once. So rows keep
    /// their order while the engine is what takes time, and a long recording holds nobody up where decoding is.
    fn hand_out(&mut self) -> std::result::Result<(), Gone> {
        let mut place = 0;
        while let Some(row) = self.rows.get_mut(place) {
            while let Some(heard) = row.ready.pop_front() {
                let is_window = matches!(heard, Heard::Window(_));
                let message = Ok(Message::Heard(heard));
                if place == 0 {
                    self.out.send(message).map_err(|_| Gone)?;
                } else if let Err(unsent) = self.out.try_send(message) {
                    let TrySendError::Full(Ok(Message::Heard(heard))) = unsent else { return Err(Gone) };
                    row.ready.push_front(heard);
                    return Ok(());
                }
                self.ahead -= usize::from(is_window);
            }
            if row.ended {
                self.rows.remove(place);
            } else {
                place += 1;
            }
        }
        Ok(())
    }

    /// Gives the pool every recording that may go on; returns how many.
    fn spawn(&mut self, done: &SyncSender<Advanced>) -> usize {
        let mut spawned = 0;
        for (place, underway) in self.rows.iter_mut().enumerate() {
            if place > 0 && self.ahead + WINDOWS_PER_TASK > WINDOWS_AHEAD {
                break;
            }
            let Some(listening) = underway.listening.take() else { continue };
            self.ahead += WINDOWS_PER_TASK;
            spawned += 1;
            let (ear, done) = (self.ear.clone(), done.clone());
            // The thread that waits for it may be gone by then.
            rayon::spawn(move || drop(done.send(listening.advance(&ear))));
        }
        spawned
    }
}

impl Ended {
    fn failed(row: u64, windows: usize, took: Duration, error: String) -> Self {
        Self { row, windows, audio_seconds: 0.0, took, notes: Vec::new(), error: Some(error) }
    }
}

impl Listening {
    /// Makes the next windows. A decoder that panics on a file takes its row with it, and nothing else.
    fn advance(self: Box<Self>, ear: &Ear) -> Advanced {
        let Self { row, windows, took, .. } = *self;
        let started = Instant::now();
        let mut made = Vec::with_capacity(WINDOWS_PER_TASK);
        let made_up_to = quietly(|| catch_unwind(AssertUnwindSafe(|| self.make(ear, &mut made))));
        let state = match made_up_to {
            Ok(Ok(mut listening)) => {
                listening.took += started.elapsed();
                Ok(listening)
            }
            Ok(Err(mut ended)) => {
                ended.took += started.elapsed();
                Err(ended)
            }
            Err(panic) => {
                let error = format!("its decoder failed on this file ({}): convert it, for example to FLAC", panic_words(&*panic));
                Err(Box::new(Ended::failed(row, windows + made.len(), took + started.elapsed(), error)))
            }
        };
        Advanced { row, windows: made, state }
    }

    fn make(mut self: Box<Self>, ear: &Ear, made: &mut Vec<Window>) -> std::result::Result<Box<Self>, Box<Ended>> {
        let failed = |listening: &Self, error: String| {
            let error = format!("{}: {error}", listening.name);
            Box::new(Ended::failed(listening.row, listening.windows, listening.took, error))
        };
        if let Source::Closed(source) = &self.source {
            match Recording::open(source, ear.audio.channels, SAMPLE_RATE) {
                Ok(recording) => self.source = Source::Open(Box::new(recording)),
                Err(error) => return Err(failed(&self, error.to_string())),
            }
        }
        loop {
            while let Some(window) = self.splitter.next() {
                let features = ear.mel.log_mel(&window.samples);
                made.push(Window {
                    row: self.row,
                    is_steady: features.is_steady(),
                    start_seconds: window.start_sample as f64 / f64::from(SAMPLE_RATE),
                    features: Arc::new(features),
                });
                self.windows += 1;
                if made.len() == WINDOWS_PER_TASK {
                    return Ok(self);
                }
            }
            let Source::Open(recording) = &mut self.source else {
                return Err(failed(&self, "its recording was not opened".to_owned()));
            };
            match recording.next() {
                Ok(Some(samples)) => self.splitter.push(&samples),
                Ok(None) if self.read => {
                    let mut notes = recording.notes();
                    let left_seconds = self.splitter.truncated_seconds();
                    if left_seconds > 0.0 {
                        let heard = recording.seconds() - left_seconds;
                        notes.push(format!("heard up to {heard:.1} s: the {left_seconds:.1} s behind are left out (audio.long)"));
                    }
                    return Err(Box::new(Ended {
                        row: self.row,
                        windows: self.windows,
                        audio_seconds: recording.seconds(),
                        took: self.took,
                        notes,
                        error: None,
                    }));
                }
                Ok(None) => {
                    self.splitter.finish();
                    self.read = true;
                }
                Err(error) => return Err(failed(&self, error.to_string())),
            }
        }
    }
}

/// From now on a decoder that panics says nothing itself.
pub fn quiet_decoders() {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let tell = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !DECODING.get() {
                tell(info);
            }
        }));
    });
}

/// Runs a decoder, whose panics are caught in `decode` and told in its row.
pub fn quietly<T>(decode: impl FnOnce() -> T) -> T {
    let outer = DECODING.replace(true);
    let decoded = decode();
    DECODING.set(outer);
    decoded
}
