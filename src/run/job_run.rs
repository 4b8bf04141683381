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
    feed::{Fed, Feed, Next, Pending, Source},
    open::{self, Model},
    print, status_of,
    summary::summarize,
};
use crate::{
    args,
    job::Job,
    manifest,
    prompt::{Prompter, StopStrings, final_text},
    report::{Event, EventLog, Progress, ProgressMode, Reporter, Summary, Tally},
    schedule::{FinishReason, Finished, IN_FLIGHT_MAX, Limits, Plan, Sampled, Scheduler, SequenceId},
    sink::{Completion, End, Folder, Outcome, PartClosed, Provenance, Row, Stage, Timing},
};

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
    let manifest_hash = manifest::fingerprint(&job.input)?;
    let model = Model::locate(&job)?;
    let prompter = Arc::new(model.prompter(&job)?);
    let provenance = Provenance {
        job_toml: job.effective_toml(),
        manifest_hash,
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
    let rows_resumed = done.rows;
    let rows_failed_before = done.rows_failed;
    reporter.handle(&Event::Started {
        job: job.name.clone(),
        model: job.model.path.clone(),
        output: job.output.clone(),
        rows_total: None,
        rows_resumed,
    });
    let feed = Feed::start(Source {
        manifest,
        prompter: prompter.clone(),
        done: Arc::new(done),
        order: job.batching.order,
        limit: args.job.limit.unwrap_or(u64::MAX),
        stop: stop.clone(),
    });
    let results = Results { folder, reporter, tally: Tally::default(), told_at: started };
    let mut run = Run { job: &job, prompter, stop, feed, results, rows_resumed, tokens_told: VecDeque::new(), tokens_untold: 0 };
    let outcome = run.all_rows(&model);
    let Run { feed, mut results, stop, .. } = run;

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
    let total = feed.total();
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

fn mode(progress: args::Progress) -> ProgressMode {
    match progress {
        args::Progress::Auto => ProgressMode::Auto,
        args::Progress::Bar => ProgressMode::Bar,
        args::Progress::Plain => ProgressMode::Plain,
        args::Progress::Json => ProgressMode::Json,
        args::Progress::None => ProgressMode::None,
    }
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

struct Run<'a> {
    job: &'a Job,
    prompter: Arc<Prompter>,
    stop: Arc<AtomicBool>,
    feed: Feed,
    results: Results,
    rows_resumed: u64,
    /// Tokens of late by when they were told, for the rate that progress tells, and those not told yet.
    tokens_told: VecDeque<(Instant, u64)>,
    tokens_untold: u64,
}

/// A row in the scheduler.
struct Active {
    pending: Pending,
    stops: Option<StopStrings>,
    admitted_at: Option<Instant>,
    started_at_us: i64,
    first_token_at: Option<Instant>,
    last_token_at: Option<Instant>,
    prefill: Duration,
    /// Decode steps it took part in, and the rows in them all together.
    decode_steps: u64,
    decode_rows: u64,
}

impl Run<'_> {
    /// Brings every row to its end, or an interrupted run to a stop. No `?` here is on a row's own failure.
    fn all_rows(&mut self, model: &Model) -> Result<()> {
        // Weights are loaded for a row that needs them, so a run that finds all done loads none.
        let first = loop {
            match self.feed.next(true)? {
                Next::End => return Ok(()),
                Next::Row(Fed::Ready(pending)) => break pending,
                Next::Row(Fed::Failed(row)) => self.results.push(&row, Instant::now())?,
                Next::NotYet => {}
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
        };
        let (mut engine, kv_bytes_max, device) = model.load(self.job)?;
        self.results.reporter.handle(&Event::Note { message: device.into() });
        let batching = &self.job.batching;
        let mut scheduler = Scheduler::new(Limits {
            rows: batching.rows,
            prefill_chunk: batching.prefill_chunk,
            prompt_concurrency: batching.prompt_concurrency,
            kv_bytes_max,
            price: engine.price(),
            context_length: model.context_length(),
        });
        let mut active = HashMap::new();
        self.add(&mut scheduler, &mut active, *first, engine.vocabulary())?;
        let mut launched: VecDeque<Plan> = VecDeque::new();
        let mut exhausted = false;
        let mut step_ended_at = Instant::now();
        loop {
            let stopping = self.stop.load(Ordering::Relaxed);
            while !exhausted && !stopping && scheduler.wants() > 0 {
                // Nobody waits for the reading thread while there are rows to compute.
                match self.feed.next(active.is_empty())? {
                    Next::End => exhausted = true,
                    Next::Row(Fed::Ready(pending)) => self.add(&mut scheduler, &mut active, *pending, engine.vocabulary())?,
                    Next::Row(Fed::Failed(row)) => self.results.push(&row, Instant::now())?,
                    Next::NotYet => break,
                }
            }
            let plan = if stopping { Plan::default() } else { scheduler.plan() };
            let idle = plan.is_empty();
            if !idle {
                admitted(&plan, &mut active);
                engine.launch(&plan)?;
                launched.push_back(plan);
            }
            if launched.len() == IN_FLIGHT_MAX || idle {
                // A row may still be waiting when nothing runs: the next plan takes it.
                let Some(plan) = launched.pop_front() else {
                    if stopping || (exhausted && scheduler.is_idle()) {
                        return Ok(());
                    }
                    continue;
                };
                let sampled = engine.collect()?;
                let now = Instant::now();
                let sampled = self.observe(&plan, sampled, &mut active, now, now - step_ended_at);
                step_ended_at = now;
                for finished in scheduler.commit(&plan, &sampled)? {
                    let row = active.remove(&finished.sequence).ok_or_else(|| anyhow!("{:?} ended twice", finished.sequence))?;
                    let row = self.finish_row(row, finished, now);
                    self.results.push(&row, now)?;
                }
                self.tell(&scheduler, now)?;
            }
        }
    }

    /// Queues a row; one that can never be computed becomes a failed row.
    fn add(
        &mut self,
        scheduler: &mut Scheduler,
        active: &mut HashMap<SequenceId, Active>,
        pending: Pending,
        vocabulary: u32,
    ) -> Result<()> {
        let request = pending.request.clone();
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
        let row = Active {
            pending,
            stops,
            admitted_at: None,
            started_at_us: 0,
            first_token_at: None,
            last_token_at: None,
            prefill: Duration::ZERO,
            decode_steps: 0,
            decode_rows: 0,
        };
        active.insert(request.sequence, row);
        Ok(())
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
            if let Some(row) = active.get_mut(&prefill.sequence) {
                row.prefill += took;
            }
        }
        let together = plan.decode.len() as u64;
        for decode in &plan.decode {
            if let Some(row) = active.get_mut(&decode.sequence) {
                row.decode_steps += 1;
                row.decode_rows += together;
            }
        }
        for token in &mut sampled {
            let Some(row) = active.get_mut(&token.sequence) else { continue };
            row.first_token_at.get_or_insert(now);
            row.last_token_at = Some(now);
            if let Some(stops) = &mut row.stops {
                token.stop_string = stops.push(self.prompter.tokens(), &row.pending.request.generation.stop, token.token);
            }
        }
        self.tokens_untold += sampled.len() as u64;
        sampled
    }

    fn finish_row(&self, row: Active, finished: Finished, now: Instant) -> Row {
        let request = row.pending.request.clone();
        let stopped_by_token = finished.reason == FinishReason::Stop
            && finished.tokens.last().is_some_and(|token| request.stop_tokens.contains(token));
        let spoken = &finished.tokens[..finished.tokens.len() - usize::from(stopped_by_token)];
        let text = final_text(self.prompter.tokens(), spoken, &request.generation.stop);
        let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
        let admitted_at = row.admitted_at.unwrap_or(now);
        let first = row.first_token_at.unwrap_or(now);
        let last = row.last_token_at.unwrap_or(now);
        let timing = Timing {
            media_ms: 0.0,
            encode_ms: 0.0,
            queue_ms: milliseconds(admitted_at - row.pending.read_at),
            prefill_ms: milliseconds(row.prefill),
            ttft_ms: milliseconds(first - admitted_at),
            decode_ms: milliseconds(last - first),
            total_ms: milliseconds(now - row.pending.read_at),
            rows_in_batch: if row.decode_steps == 0 { 1.0 } else { row.decode_rows as f64 / row.decode_steps as f64 },
            started_at_us: row.started_at_us,
        };
        let completion = Completion {
            text,
            finish_reason: finished.reason,
            prompt_tokens: request.prompt.len() as u32,
            cached_tokens: 0,
            completion_tokens: finished.tokens.len() as u32,
            token_ids: finished.tokens,
            timing,
            heard: None,
            notes: Vec::new(),
        };
        row.pending.into_row(Outcome::Ok(Box::new(completion)))
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
            rows_total: self.feed.total().map(|total| total.rows),
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

fn admitted(plan: &Plan, active: &mut HashMap<SequenceId, Active>) {
    if plan.admitted.is_empty() {
        return;
    }
    let now = Instant::now();
    let started_at_us = jiff::Timestamp::now().as_microsecond();
    for admission in &plan.admitted {
        if let Some(row) = active.get_mut(&admission.request.sequence) {
            row.admitted_at = Some(now);
            row.started_at_us = started_at_us;
        }
    }
}
