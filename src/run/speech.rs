//! Rows whose recordings are being transcribed: windows in passes, passes in the scheduler, windows joined into rows.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    clock::{Clock, milliseconds},
    feed::{Pending, Work},
    hear::{Ended, Window},
};
use crate::{
    engine::SpeechScore,
    schedule::{FinishReason, Finished, Request, SequenceId},
    score::{Normalizer, compare},
    sink::{self, Completion, Outcome, Row, Segment, Stage, Timing},
    transcribe::{self, Language, Next, Pass, Transcriber, Transcript, WindowTranscript},
};

/// Frames of features a second, and encoder positions that a window takes whatever its length.
const WINDOW_TOKENS: u32 = 1500;

/// See the [module](self).
pub struct SpeechRows {
    transcriber: Arc<Transcriber>,
    rows: HashMap<u64, SpeechRow>,
    /// Passes in the scheduler.
    passes: HashMap<SequenceId, Underway>,
    /// Passes that may go to the scheduler, those of rows begun first in front.
    ready: VecDeque<(u64, usize)>,
    /// Windows that wait for their row's language.
    held: usize,
    next_sequence: u64,
}

struct Underway {
    row: u64,
    window: usize,
    clock: Clock,
}

struct SpeechRow {
    pending: Pending,
    seed: u64,
    language: Language,
    /// A window is on its way that finds the language.
    detecting: bool,
    windows: Vec<State>,
    ended: Option<Box<Ended>>,
    passes: u64,
    clock: RowClock,
    prompt_tokens: u32,
}

enum State {
    /// Waits for the language that the row's first window finds.
    Held(WindowStart),
    Underway {
        start_seconds: f64,
        transcript: Box<WindowTranscript>,
    },
    Done {
        start_seconds: f64,
        transcript: Box<Transcript>,
    },
    /// On its way from one of these to another.
    Gone,
}

struct WindowStart {
    start_seconds: f64,
    features: Arc<crate::media::Features>,
}

/// Over all passes of a row.
#[derive(Default)]
struct RowClock {
    first_admitted_at: Option<Instant>,
    started_at_us: i64,
    first_token_at: Option<Instant>,
    encode: Duration,
    decode: Duration,
    decode_steps: u64,
    decode_rows: u64,
}

impl SpeechRows {
    pub fn new(transcriber: Arc<Transcriber>) -> Self {
        Self { transcriber, rows: HashMap::new(), passes: HashMap::new(), ready: VecDeque::new(), held: 0, next_sequence: 0 }
    }

    /// Windows here that the scheduler does not have yet.
    pub fn backlog(&self) -> usize {
        self.ready.len() + self.held
    }

    pub fn is_idle(&self) -> bool {
        self.rows.is_empty()
    }

    pub fn start(&mut self, pending: Pending, seed: u64) {
        let Work::Speech { language, .. } = pending.work else { return };
        let row = SpeechRow {
            seed,
            language,
            detecting: false,
            windows: Vec::new(),
            ended: None,
            passes: 0,
            clock: RowClock::default(),
            prompt_tokens: 0,
            pending,
        };
        self.rows.insert(row.pending.row, row);
    }

    pub fn window(&mut self, window: Window) {
        let Some(row) = self.rows.get_mut(&window.row) else { return };
        let Window { start_seconds, features, is_steady, .. } = window;
        if is_steady {
            // A model makes up words where there are none.
            row.windows.push(State::Done { start_seconds, transcript: Box::new(Transcript::silent(row.language)) });
            return;
        }
        let start = WindowStart { start_seconds, features };
        // One recording has one language: the first window with sound in it finds it for all.
        if row.language == Language::Detect && row.detecting {
            row.windows.push(State::Held(start));
            self.held += 1;
            return;
        }
        row.detecting = row.language == Language::Detect;
        self.ready.push_back((window.row, row.windows.len()));
        row.windows.push(start.begin(row.language));
    }

    /// The row, where nothing of it is still to be done.
    pub fn end(&mut self, ended: Box<Ended>, now: Instant) -> Option<Row> {
        let number = ended.row;
        self.rows.get_mut(&number)?.ended = Some(ended);
        self.complete(number, now)
    }

    /// The next pass for the scheduler.
    pub fn request(&mut self) -> Option<Arc<Request>> {
        let (number, window) = self.ready.pop_front()?;
        // Both are there: a row takes its passes with it when it goes.
        let row = self.rows.get_mut(&number)?;
        let State::Underway { transcript, .. } = row.windows.get(window)? else { return None };
        let sequence = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        let pass: Pass = transcript.pass();
        // A pass has its own random numbers, told apart by where it stands in its row alone.
        let number_in_row = (window as u64) << 32 | (pass.seek as u64) << 8 | pass.attempt as u64;
        let request = Arc::new(self.transcriber.request(sequence, transcript, pass, row.seed, number_in_row));
        row.passes += 1;
        row.prompt_tokens += request.prompt.len() as u32;
        self.passes.insert(sequence, Underway { row: number, window, clock: Clock::default() });
        Some(request)
    }

    /// The row of a pass that the scheduler refused.
    pub fn refused(&mut self, sequence: SequenceId, error: String) -> Option<Row> {
        let number = self.passes.remove(&sequence)?.row;
        let row = self.forget(number)?;
        Some(row.pending.into_row(Outcome::Failed { stage: Stage::Admission, error }))
    }

    pub fn clock(&mut self, sequence: SequenceId) -> Option<&mut Clock> {
        self.passes.get_mut(&sequence).map(|underway| &mut underway.clock)
    }

    /// Takes a pass that ended; the row, where it was the last thing to be done.
    pub fn finished(&mut self, finished: Finished, score: SpeechScore, now: Instant) -> Option<Row> {
        let Underway { row: number, window, clock } = self.passes.remove(&finished.sequence)?;
        // A row that failed meanwhile has nothing more to be told.
        let row = self.rows.get_mut(&number)?;
        row.clock.add(&clock);
        let heard = transcribe::Heard {
            cut: finished.reason == FinishReason::Length,
            tokens: finished.tokens,
            sum_logprob: score.sum_logprob,
            no_speech_prob: score.no_speech_prob,
        };
        let State::Underway { start_seconds, mut transcript } = std::mem::replace(row.windows.get_mut(window)?, State::Gone) else {
            return None;
        };
        let next = transcript.take(&self.transcriber, heard);
        let language = transcript.language();
        row.windows[window] = match next {
            Next::Pass(_) => {
                self.ready.push_front((number, window));
                State::Underway { start_seconds, transcript }
            }
            Next::Done(transcript) => State::Done { start_seconds, transcript },
        };
        if row.language == Language::Detect && language != Language::Detect {
            row.language = language;
            for index in 0..row.windows.len() {
                if let State::Held(_) = row.windows[index]
                    && let State::Held(start) = std::mem::replace(&mut row.windows[index], State::Gone)
                {
                    row.windows[index] = start.begin(language);
                    self.held -= 1;
                    self.ready.push_back((number, index));
                }
            }
        }
        self.complete(number, now)
    }

    /// Takes a row out with all that is left of it.
    fn forget(&mut self, number: u64) -> Option<SpeechRow> {
        let row = self.rows.remove(&number)?;
        self.ready.retain(|(own, _)| *own != number);
        self.held -= row.windows.iter().filter(|state| matches!(state, State::Held(_))).count();
        Some(row)
    }

    fn complete(&mut self, number: u64, now: Instant) -> Option<Row> {
        let row = self.rows.get(&number)?;
        let ended = row.ended.as_ref()?;
        let whole = row.windows.len() == ended.windows && row.windows.iter().all(|state| matches!(state, State::Done { .. }));
        if ended.error.is_none() && !whole {
            return None;
        }
        let row = self.forget(number)?;
        Some(row.finish(&self.transcriber, now))
    }
}

impl WindowStart {
    fn begin(self, language: Language) -> State {
        let transcript = Box::new(WindowTranscript::new(self.features, language));
        State::Underway { start_seconds: self.start_seconds, transcript }
    }
}

impl RowClock {
    fn add(&mut self, pass: &Clock) {
        // Passes end in another order than they began in.
        if self.first_admitted_at.is_none() || pass.admitted_at < self.first_admitted_at {
            (self.first_admitted_at, self.started_at_us) = (pass.admitted_at, pass.started_at_us);
        }
        self.first_token_at = [self.first_token_at, pass.first_token_at].into_iter().flatten().min();
        self.encode += pass.prefill;
        self.decode += pass.decode();
        self.decode_steps += pass.decode_steps;
        self.decode_rows += pass.decode_rows;
    }
}

impl SpeechRow {
    fn finish(self, transcriber: &Transcriber, now: Instant) -> Row {
        let Self { pending, language, windows, ended, clock, prompt_tokens, passes, .. } = self;
        let Some(ended) = ended else {
            return pending.into_row(Outcome::Failed { stage: Stage::Media, error: "its recording has no end".to_owned() });
        };
        if let Some(error) = ended.error {
            return pending.into_row(Outcome::Failed { stage: Stage::Media, error });
        }
        let mut text = String::new();
        let mut segments = Vec::new();
        let mut token_ids = Vec::new();
        let (mut completion_tokens, mut cut, mut uncertain, mut nonsense) = (0, false, 0, 0);
        let mut notes = ended.notes;
        for state in windows {
            let State::Done { start_seconds, transcript } = state else { continue };
            text.push_str(&transcript.text);
            segments.extend(transcript.segments.into_iter().map(|segment| at(start_seconds, segment)));
            token_ids.extend(transcript.token_ids);
            completion_tokens += transcript.completion_tokens;
            cut |= transcript.cut;
            uncertain += transcript.uncertain;
            nonsense += transcript.nonsense;
        }
        if nonsense > 0 {
            notes.push(format!("{nonsense} stretches read like nothing that was said, and their text was left out"));
        }
        if uncertain > 0 {
            notes.push(format!(
                "{uncertain} stretches stayed unlikely or repetitive at every temperature: their text may be made up (see avg_logprob)"
            ));
        }
        let text = text.trim().to_owned();
        let code = transcriber.code(language).map(str::to_owned);
        let admitted_at = clock.first_admitted_at.unwrap_or(now);
        let first_token_at = clock.first_token_at.unwrap_or(admitted_at);
        let timing = Timing {
            media_ms: milliseconds(ended.took),
            encode_ms: milliseconds(clock.encode),
            queue_ms: milliseconds(admitted_at.saturating_duration_since(pending.read_at)),
            // A prompt of a few tokens is computed in the step that encodes its window.
            prefill_ms: 0.0,
            ttft_ms: milliseconds(first_token_at.saturating_duration_since(admitted_at)),
            decode_ms: milliseconds(clock.decode),
            total_ms: milliseconds(now - pending.read_at),
            rows_in_batch: if clock.decode_steps == 0 { 1.0 } else { clock.decode_rows as f64 / clock.decode_steps as f64 },
            started_at_us: clock.started_at_us,
        };
        let score =
            pending.reference.as_ref().and_then(|reference| compare(&Normalizer::for_language(code.as_deref()), reference, &text));
        let completion = Completion {
            text,
            finish_reason: if cut { FinishReason::Length } else { FinishReason::Stop },
            prompt_tokens,
            image_tokens: 0,
            cached_tokens: 0,
            completion_tokens,
            token_ids,
            logprobs: None,
            timing,
            heard: Some(sink::Heard {
                audio_seconds: ended.audio_seconds,
                audio_tokens: u32::try_from(passes).unwrap_or(u32::MAX).saturating_mul(WINDOW_TOKENS),
                language: code,
                segments,
            }),
            notes,
        };
        Row { score, ..pending.into_row(Outcome::Ok(Box::new(completion))) }
    }
}

/// A window's segment as one of its recording.
fn at(start_seconds: f64, segment: Segment) -> Segment {
    let (start, end) = (start_seconds + segment.start, start_seconds + segment.end);
    Segment { start, end, text: segment.text.trim().to_owned(), ..segment }
}
