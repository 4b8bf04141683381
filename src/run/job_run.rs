//! The loop of a run: rows come in, steps go through the engine one ahead of the other, results go out.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};

use super::{
    Status,
    clock::{Clock, milliseconds},
    feed::{Fed, Feed, Next, Pending, Source, Total, Work},
    hear::{Hear, Heard, NextHeard},
    mode,
    open::{self, Loaded, Model, Words},
    print,
    see::See,
    speech::SpeechRows,
    status_of,
    summary::summarize,
};
use crate::{
    args,
    engine::{Engine, Logprobs},
    job::Job,
    manifest,
    model::Towers,
    prompt::{Senses, StopStrings, Tokens, final_text, row_seed},
    report::{Event, EventLog, Progress, Reporter, Summary, Tally},
    schedule::{FinishReason, Finished, IN_FLIGHT_MAX, Limits, Plan, Request, Sampled, Scheduler, SequenceId},
    score::{Normalizer, compare},
    sink::{self, Completion, End, Folder, Outcome, PartClosed, Provenance, Row, Stage, Timing},
};

/// Prompt tokens that rows must share for them to be computed once: fewer cost about as much to copy as to compute.
pub const PREFIX_TOKENS_MIN: u32 = 64;

/// How often progress is told to the reporter, which shows it as often as it likes.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// The stretch of time that the rate in progress is over.
const RATE_OVER: Duration = Duration::from_secs(10);

/// `mlxbatch run`.
pub fn run(args: &args::Run) -> Result<Status> {
    let started = Instant::now();
    let mut job = Job::read(&args.job.file, &args.job.set)?;
    if let Some(output) = &args.output {
        job.output = std::path::absolute(output)?;
    }
    // Whatever can be found wrong is found before weights load.
    open::refuse_results_as_input(&job)?;
    let manifest = manifest::open(&job.input)?;
    let model = Model::locate(&job)?;
    let words = model.words(&job)?;
    let template_note = open::template_note(&job, &words)?;
    let provenance = Provenance {
        job_toml: job.effective_toml(),
        manifest_hash: manifest::fingerprint(&job.input)?,
        settings_hash: job.settings_hash(),
        model_id: job.model.path.clone(),
        model_hash: model.hash()?,
        versions: open::versions(),
        machine: open::machine(),
    };
    let stop = interruptible()?;
    let (folder, done) = Folder::open(&job, &provenance, args.fresh)?;
    let log = EventLog::open(folder.path()).context("failed to open the log of events")?;
    let mut reporter = Reporter::new(mode(args.progress), Some(log));
    let (rows_resumed, rows_failed_before) = (done.rows, done.rows_failed);
    reporter.handle(&Event::Started {
        job: job.name.clone(),
        model: job.model.path.clone(),
        output: job.output.clone(),
        rows_total: None,
        rows_resumed,
    });
    template_note.into_iter().for_each(|message| reporter.handle(&Event::Note { message }));
    let feed = Feed::start(Source {
        manifest,
        preparation: words.preparation(&job),
        done: Arc::new(done),
        order: words.order(&job),
        limit: args.job.limit.unwrap_or(u64::MAX),
        stop: stop.clone(),
    });
    let results = Results { folder, reporter, tally: Tally::default(), told_at: started };
    let (tokens, speech, towers) = match &words {
        Words::Prompts(prompter) => (prompter.tokens().clone(), None, prompter.towers().clone()),
        Words::Recordings { transcriber, .. } => {
            (transcriber.tokens().clone(), Some(SpeechRows::new(transcriber.clone())), Towers::default())
        }
    };
    let intake = match words {
        Words::Prompts(_) if towers == Towers::default() => Intake::Prompts(feed),
        Words::Prompts(prompter) => {
            let senses = Senses::new(towers.clone(), job.audio);
            Intake::Seen(See::start(feed, prompter, senses))
        }
        Words::Recordings { bins, .. } => Intake::Recordings(Hear::start(feed, &job, bins)),
    };
    let mut run = Run {
        job: &job,
        tokens,
        towers,
        speech,
        stop,
        intake,
        results,
        rows_resumed,
        tokens_told: VecDeque::new(),
        tokens_untold: 0,
    };
    let outcome = run.all_rows(&model);
    let Run { intake, mut results, stop, .. } = run;

    let mut summary = results.tally.summary().over(started.elapsed().as_secs_f64());
    summary.rows_resumed = rows_resumed;
    if outcome.is_ok() && rows_resumed > 0 && summary.rows_ok + summary.rows_failed == 0 {
        // Nothing was left to do: what earlier runs did is what there is to tell.
        results
            .reporter
            .handle(&Event::Note { message: format!("all rows are in: {rows_resumed} done before, none left to compute") });
        summary = summarize(&job.output)?;
    }
    summary.job.clone_from(&job.name);
    summary.model.clone_from(&job.model.path);
    summary.output.clone_from(&job.output);
    let total = intake.total();
    let interrupted = stop.load(Ordering::Relaxed);
    let end = match (&outcome, total) {
        (Err(_), _) => End::Failed,
        (Ok(()), Some(total)) if !interrupted && !total.cut => End::Complete { rows: total.rows },
        _ => End::Interrupted,
    };
    let ended = results.finish(end, &mut summary);
    // Where the run has failed, what fails after it is its consequence.
    if let Err(error) = outcome.and(ended) {
        results.reporter.handle(&Event::Failed { error: format!("{error:#}") });
        // The reporter has said so, unless it was told to say nothing.
        return if args.progress == args::Progress::None { Err(error) } else { Ok(status_of(&error)) };
    }
    if interrupted {
        let rows_done = rows_resumed + summary.rows_ok + summary.rows_failed;
        let rows_total = total.filter(|total| !total.cut).map(|total| total.rows);
        results.reporter.handle(&Event::Interrupted { rows_done, rows_total });
    } else {
        results.reporter.handle(&Event::Finished(Box::new(summary.clone())));
    }
    if args.json {
        print(&(serde_json::to_string_pretty(&summary)? + "\n"))?;
    }
    Ok(match summary.rows_failed + rows_failed_before {
        _ if interrupted => Status::Interrupted,
        0 => Status::Ok,
        _ => Status::SomeRowsFailed,
    })
}

/// The first SIGINT, SIGTERM or SIGHUP sets the flag, and the run closes its part and ends; the second ends the process at once,
/// without destructors: MLX's own would run under threads that still compute, and crash.
fn interruptible() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // In this order: the first signal finds the flag unset.
        flag::register_conditional_shutdown(signal, Status::Interrupted as i32, stop.clone())
            .and_then(|_| flag::register(signal, stop.clone()))
            .context("failed to listen for signals")?;
    }
    Ok(stop)
}

/// Where rows end up.
struct Results {
    folder: Folder,
    reporter: Reporter,
    tally: Tally,
    told_at: Instant,
}

impl Results {
    fn push(&mut self, row: &Row, now: Instant) -> Result<()> {
        self.tally.add(row);
        if let Outcome::Failed { stage, error } = &row.outcome {
            self.reporter.handle(&Event::RowFailed {
                row: row.row,
                id: row.id.clone(),
                source: row.source.clone(),
                stage: *stage,
                error: error.clone(),
            });
        }
        let closed = self.folder.push(row, now)?;
        self.part_closed(closed);
        Ok(())
    }

    fn part_closed(&mut self, closed: Option<PartClosed>) {
        if let Some(PartClosed { name, rows, rows_failed, bytes }) = closed {
            self.reporter.handle(&Event::PartClosed { name, rows, rows_failed, bytes });
        }
    }

    fn finish(&mut self, end: End, summary: &mut Summary) -> Result<()> {
        let closed = self.folder.close_part()?;
        self.part_closed(closed);
        summary.parts = self.folder.parts() as u64;
        self.folder.finish(end, serde_json::to_value(&*summary)?)?;
        Ok(())
    }
}

/// Where rows come from.
enum Intake {
    Prompts(Feed),
    /// Of a model that sees or hears.
    Seen(See),
    Recordings(Hear),
}

impl Intake {
    /// Known after the last row.
    fn total(&self) -> Option<Total> {
        match self {
            Self::Prompts(feed) => feed.total(),
            Self::Seen(see) => see.total(),
            Self::Recordings(hear) => hear.total(),
        }
    }
}

fn came(next: Next) -> Came {
    match next {
        Next::Row(Fed::Ready(pending)) => Came::Work(Taken::Prompt(pending)),
        Next::Row(Fed::Failed(row)) => Came::Work(Taken::Failed(row)),
        Next::NotYet => Came::NotYet,
        Next::End => Came::End,
    }
}

/// What came in.
enum Came {
    /// A row, or a window of one.
    Work(Taken),
    NotYet,
    End,
}

enum Taken {
    Prompt(Box<Pending>),
    Heard(Heard),
    Failed(Box<Row>),
}

struct Run<'a> {
    job: &'a Job,
    tokens: Arc<Tokens>,
    towers: Towers,
    /// Of a job that hears.
    speech: Option<SpeechRows>,
    stop: Arc<AtomicBool>,
    intake: Intake,
    results: Results,
    rows_resumed: u64,
    /// Tokens of late by when they were told, for the rate that progress tells, and those not told yet.
    tokens_told: VecDeque<(Instant, u64)>,
    tokens_untold: u64,
}

/// A row of text in the scheduler.
struct Active {
    pending: Pending,
    request: Arc<Request>,
    stops: Option<StopStrings>,
    clock: Clock,
}

impl Run<'_> {
    /// Brings every row to its end, or an interrupted run to a stop. No `?` here is on a row's own failure.
    fn all_rows(&mut self, model: &Model) -> Result<()> {
        // Weights are loaded for a row that needs them, so a run that finds all done loads none.
        let first = loop {
            match self.take(true)? {
                Came::End => return Ok(()),
                Came::Work(Taken::Failed(row)) => self.results.push(&row, Instant::now())?,
                Came::Work(taken) => break taken,
                Came::NotYet => {}
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
        };
        let Loaded { mut engine, kv_bytes_max, device, span_tokens_max } = model.load(self.job, &self.towers)?;
        let engine = &mut *engine;
        self.results.reporter.handle(&Event::Note { message: device.into() });
        let batching = &self.job.batching;
        let defaults = engine.prefill_defaults();
        let price = engine.price();
        let limits = Limits {
            rows: batching.rows,
            prefill_chunk: batching.prefill_chunk.unwrap_or_else(|| price.prefill_chunk_within(defaults.chunk, kv_bytes_max)),
            prompt_concurrency: batching.prompt_concurrency.unwrap_or(defaults.concurrency),
            kv_bytes_max,
            price,
            context_length: model.context_length(),
            prefix_tokens_min: batching.prefix_cache.then_some(PREFIX_TOKENS_MIN),
            span_tokens_max,
        };
        limits.check_budget()?;
        let mut scheduler = Scheduler::new(limits);
        let mut active = HashMap::new();
        self.bring(&mut scheduler, &mut active, first, engine)?;
        let mut launched: VecDeque<Plan> = VecDeque::new();
        let mut exhausted = false;
        let mut step_ended_at = Instant::now();
        loop {
            let stopping = self.stop.load(Ordering::Relaxed);
            while !stopping && scheduler.wants() > 0 {
                if self.next_pass(&mut scheduler)? {
                    continue;
                }
                if exhausted || self.is_full() {
                    break;
                }
                // Nobody waits for the reading thread while there are rows to compute.
                match self.take(scheduler.is_idle())? {
                    Came::End => exhausted = true,
                    Came::Work(taken) => self.bring(&mut scheduler, &mut active, taken, engine)?,
                    Came::NotYet => break,
                }
            }
            let plan = if stopping { Plan::default() } else { scheduler.plan() };
            let idle = plan.is_empty();
            if !idle {
                self.admitted(&plan, &mut active);
                engine.launch(&plan)?;
                launched.push_back(plan);
            }
            if launched.len() == IN_FLIGHT_MAX || idle {
                // A row may still be waiting when nothing runs: the next plan takes it.
                let Some(plan) = launched.pop_front() else {
                    let done = exhausted && scheduler.is_idle() && self.speech.as_ref().is_none_or(SpeechRows::is_idle);
                    if stopping || done {
                        return Ok(());
                    }
                    continue;
                };
                let sampled = engine.collect()?;
                let now = Instant::now();
                let sampled = self.observe(&plan, sampled, &mut active, now, now - step_ended_at);
                step_ended_at = now;
                for finished in scheduler.commit(&plan, &sampled)? {
                    let row = match (&mut self.speech, active.remove(&finished.sequence)) {
                        (_, Some(row)) => Some(self.finish_row(row, engine.take_logprobs(finished.sequence), finished, now)),
                        (Some(speech), None) => {
                            let score = engine.speech(finished.sequence).unwrap_or_default();
                            speech.finished(finished, score, now)
                        }
                        (None, None) => return Err(anyhow!("{:?} ended twice", finished.sequence)),
                    };
                    if let Some(row) = row {
                        self.results.push(&row, now)?;
                    }
                }
                self.tell(&scheduler, now)?;
            }
        }
    }

    /// What comes in next. With `wait` it is [`Came::NotYet`] only after a moment without any.
    fn take(&mut self, wait: bool) -> Result<Came> {
        Ok(match &mut self.intake {
            Intake::Prompts(feed) => came(feed.next(wait)?),
            Intake::Seen(see) => came(see.next(wait)?),
            Intake::Recordings(hear) => match hear.next(wait)? {
                NextHeard::Heard(Heard::Failed(row)) => Came::Work(Taken::Failed(row)),
                NextHeard::Heard(heard) => Came::Work(Taken::Heard(heard)),
                NextHeard::NotYet => Came::NotYet,
                NextHeard::End => Came::End,
            },
        })
    }

    fn bring(
        &mut self,
        scheduler: &mut Scheduler,
        active: &mut HashMap<SequenceId, Active>,
        taken: Taken,
        engine: &dyn Engine,
    ) -> Result<()> {
        let now = Instant::now();
        let row = match (taken, &mut self.speech) {
            (Taken::Prompt(pending), _) => return self.add(scheduler, active, *pending, engine.vocabulary()),
            (Taken::Failed(row), _) => Some(*row),
            (Taken::Heard(Heard::Failed(row)), _) => Some(*row),
            (Taken::Heard(_), None) => None,
            (Taken::Heard(Heard::Start(pending)), Some(speech)) => {
                let seed = row_seed(self.job.generation.seed, &pending.id);
                speech.start(*pending, seed);
                None
            }
            (Taken::Heard(Heard::Window(window)), Some(speech)) => {
                speech.window(window);
                None
            }
            (Taken::Heard(Heard::End(ended)), Some(speech)) => speech.end(ended, now),
        };
        row.map_or(Ok(()), |row| self.results.push(&row, now))
    }

    /// Gives the scheduler the next pass over a window, where there is one.
    fn next_pass(&mut self, scheduler: &mut Scheduler) -> Result<bool> {
        let Some(speech) = &mut self.speech else { return Ok(false) };
        let Some(request) = speech.request() else { return Ok(false) };
        let sequence = request.sequence;
        if let Err(refused) = scheduler.add(request)
            && let Some(row) = speech.refused(sequence, refused.to_string())
        {
            self.results.push(&row, Instant::now())?;
        }
        Ok(true)
    }

    /// Whether as many windows wait here as rows are decoded together.
    fn is_full(&self) -> bool {
        self.speech.as_ref().is_some_and(|speech| speech.backlog() >= self.job.batching.rows as usize)
    }

    /// Queues a row; one that can never be computed becomes a failed row.
    fn add(
        &mut self,
        scheduler: &mut Scheduler,
        active: &mut HashMap<SequenceId, Active>,
        pending: Pending,
        vocabulary: u32,
    ) -> Result<()> {
        let Work::Text(request) = &pending.work else { return Ok(()) };
        let request = request.clone();
        let unknown =
            request.prompt.iter().find(|&&token| token >= vocabulary).map(|token| format!("the prompt has the token {token}"));
        let unknown = unknown.or_else(|| {
            let biased = request.generation.logit_bias.keys().find(|&&token| token >= vocabulary);
            biased.map(|token| format!("logit_bias names the token {token}"))
        });
        let refused = match unknown {
            Some(unknown) => Some(format!("{unknown}, and the model has {vocabulary} tokens (ids from 0)")),
            None => scheduler.add(request.clone()).err().map(|refused| refused.to_string()),
        };
        if let Some(error) = refused {
            let row = pending.into_row(Outcome::Failed { stage: Stage::Admission, error });
            return self.results.push(&row, Instant::now());
        }
        let stop = &request.generation.stop;
        let stops = (!stop.is_empty()).then(|| StopStrings::new(stop));
        active.insert(request.sequence, Active { pending, request, stops, clock: Clock::default() });
        Ok(())
    }

    fn clock<'a>(&'a mut self, active: &'a mut HashMap<SequenceId, Active>, sequence: SequenceId) -> Option<&'a mut Clock> {
        match active.get_mut(&sequence) {
            Some(row) => Some(&mut row.clock),
            None => self.speech.as_mut()?.clock(sequence),
        }
    }

    fn admitted(&mut self, plan: &Plan, active: &mut HashMap<SequenceId, Active>) {
        let now = Instant::now();
        for admission in &plan.admitted {
            if let Some(clock) = self.clock(active, admission.request.sequence) {
                clock.admit(now);
            }
        }
    }

    /// Notes what a collected step did for each row, and marks the tokens that complete a stop string.
    fn observe(
        &mut self,
        plan: &Plan,
        mut sampled: Vec<Sampled>,
        active: &mut HashMap<SequenceId, Active>,
        now: Instant,
        took: Duration,
    ) -> Vec<Sampled> {
        for prefill in &plan.prefill {
            let end = prefill.start + prefill.length;
            let media = active.get(&prefill.sequence).map(|row| &row.request.media);
            let encodes = media.is_some_and(|media| media.iter().any(|medium| medium.first < end && prefill.start < medium.end()));
            if let Some(clock) = self.clock(active, prefill.sequence) {
                *(if encodes { &mut clock.encode } else { &mut clock.prefill }) += took;
            }
        }
        let together = plan.decode.len() as u64;
        for decode in &plan.decode {
            if let Some(clock) = self.clock(active, decode.sequence) {
                clock.decode_steps += 1;
                clock.decode_rows += together;
            }
        }
        for token in &mut sampled {
            if let Some(clock) = self.clock(active, token.sequence) {
                clock.token(now);
            }
            if let Some(Active { stops: Some(stops), request, .. }) = active.get_mut(&token.sequence) {
                token.stop_string = stops.push(&self.tokens, &request.generation.stop, token.token);
            }
        }
        self.tokens_untold += sampled.len() as u64;
        sampled
    }

    fn finish_row(&self, row: Active, logprobs: Option<Logprobs>, finished: Finished, now: Instant) -> Row {
        let Active { mut pending, request, clock, .. } = row;
        let stopped_by_token = finished.reason == FinishReason::Stop
            && finished.tokens.last().is_some_and(|token| request.stop_tokens.contains(token));
        let spoken = &finished.tokens[..finished.tokens.len() - usize::from(stopped_by_token)];
        let text = final_text(&self.tokens, spoken, &request.generation.stop);
        let admitted_at = clock.admitted_at.unwrap_or(now);
        let first = clock.first_token_at.unwrap_or(now);
        let timing = Timing {
            media_ms: milliseconds(pending.perceived.took),
            encode_ms: milliseconds(clock.encode),
            queue_ms: milliseconds(admitted_at - pending.read_at),
            prefill_ms: milliseconds(clock.prefill),
            ttft_ms: milliseconds(first - admitted_at),
            decode_ms: milliseconds(clock.decode()),
            total_ms: milliseconds(now - pending.read_at),
            rows_in_batch: if clock.decode_steps == 0 { 1.0 } else { clock.decode_rows as f64 / clock.decode_steps as f64 },
            started_at_us: clock.started_at_us,
        };
        let score = pending.reference.as_ref().and_then(|reference| compare(&Normalizer::for_language(None), reference, &text));
        let heard = pending.perceived.heard.map(|(audio_tokens, audio_seconds)| {
            let segments = Vec::new();
            sink::Heard { audio_seconds, audio_tokens, language: None, segments }
        });
        let completion = Completion {
            text,
            finish_reason: finished.reason,
            prompt_tokens: request.prompt.len() as u32,
            image_tokens: pending.perceived.image_tokens,
            cached_tokens: finished.cached_tokens,
            completion_tokens: finished.tokens.len() as u32,
            token_ids: finished.tokens,
            logprobs,
            timing,
            heard,
            notes: std::mem::take(&mut pending.perceived.notes),
        };
        Row { score, ..pending.into_row(Outcome::Ok(Box::new(completion))) }
    }

    fn tell(&mut self, scheduler: &Scheduler, now: Instant) -> Result<()> {
        let closed = self.results.folder.tick(now)?;
        self.results.part_closed(closed);
        if now - self.results.told_at < PROGRESS_EVERY {
            return Ok(());
        }
        self.results.told_at = now;
        self.tokens_told.push_back((now, std::mem::take(&mut self.tokens_untold)));
        while self.tokens_told.front().is_some_and(|(at, _)| now - *at > RATE_OVER) {
            self.tokens_told.pop_front();
        }
        let counters = scheduler.counters();
        let tally = &self.results.tally;
        let (rows_ok, rows_failed) = (tally.rows_ok(), tally.rows_failed());
        let spent = self.tokens_told.front().map_or(0.0, |(at, _)| (now - *at).as_secs_f64());
        let tokens: u64 = self.tokens_told.iter().skip(1).map(|(_, tokens)| tokens).sum();
        self.results.reporter.handle(&Event::Progress(Progress {
            rows_total: self.intake.total().map(|total| total.rows),
            rows_done: self.rows_resumed + rows_ok + rows_failed,
            rows_ok,
            rows_failed,
            rows_running: u64::from(counters.running),
            rows_waiting: u64::from(counters.waiting),
            prompt_tokens: tally.prompt_tokens(),
            completion_tokens: tally.completion_tokens(),
            tokens_per_second: if spent > 0.0 { tokens as f64 / spent } else { 0.0 },
            kv_bytes: counters.kv_bytes,
            kv_bytes_max: counters.kv_bytes_max,
            seconds_left: None,
        }));
        Ok(())
    }
}
