//! The scripts in `goldens/schedule/`: commands to a scheduler and what it answers, to be read as its specification.
//!
//! A command is followed by `----` and its answer; `#` begins a comment. `UPDATE_GOLDENS=1` writes the answers anew.
//!
//! ```text
//! limits rows=2 prefill_chunk=4 …      begins a scheduler; a key left out does not limit anything
//! add 1 prompt=5 max_tokens=3 stop=9   a row of 5 prompt tokens that token 9 ends
//! add 1 prompt=5 head=3 …              the first 3 of them are those of all rows, the others its own
//! plan                                 the next step, which the fake engine checks
//! commit 1:7 2:9!                      tokens of the oldest step in flight; ! says that a stop string ends there
//! commit newest 1:7                    hands over the plan of the newest step in flight
//! cancel 1
//! counters
//! ```
//!
//! A plan's first line has the layout as slots × tokens a slot, and what it costs of the budget. A token costs a byte in its slot,
//! and a chunk's token costs `prefill_bytes_per_token` bytes.

use std::collections::VecDeque;
use std::fmt::Write;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use mlxbatch::engine::Engine;
use mlxbatch::engine::fake::{FakeEngine, FakeModel};
use mlxbatch::schedule::{Admission, FinishReason, Limits, MediaLoad, Plan, Price, Request, Sampled, Scheduler, SequenceId};

use super::{model, price};

struct Session {
    scheduler: Scheduler,
    engine: FakeEngine,
    limits: Limits,
    in_flight: VecDeque<Plan>,
}

impl Session {
    fn new(words: &mut Words) -> Result<Self, String> {
        let price = Price {
            prefill_bytes_per_token: words.key("prefill_bytes_per_token")?.unwrap_or(0),
            ..price(words.key("slot_tokens_step")?.unwrap_or(1))
        };
        let limits = Limits {
            rows: words.key("rows")?.unwrap_or(100),
            prefill_chunk: words.key("prefill_chunk")?.unwrap_or(100),
            prompt_concurrency: words.key("prompt_concurrency")?.unwrap_or(100),
            kv_bytes_max: words.key("kv_bytes_max")?.unwrap_or(10_000),
            context_length: words.key("context_length")?.unwrap_or(1_000),
            price,
            prefix_tokens_min: words.key("prefix_tokens_min")?,
            span_tokens_max: 0,
        };
        // One token that ends no row: the script says what is sampled.
        let mut engine = FakeEngine::new(FakeModel { alphabet: vec![u32::MAX], ..model(&limits) });
        engine.hold_to(limits.clone());
        Ok(Self { scheduler: Scheduler::new(limits.clone()), engine, limits, in_flight: VecDeque::new() })
    }

    fn command(&mut self, command: &str, words: &mut Words) -> Result<String, String> {
        match command {
            "add" => self.add(words),
            "plan" => self.plan(),
            "commit" => self.commit(words),
            "cancel" => Ok(if self.scheduler.cancel(SequenceId(words.next()?)) { "cancelled" } else { "no such row" }.to_owned()),
            "counters" => {
                let counters = self.scheduler.counters();
                Ok(format!(
                    "{} running, {} of them in prefill; {} waiting; {} in flight; {} of {} bytes{}",
                    counters.running,
                    counters.in_prefill,
                    counters.waiting,
                    self.scheduler.in_flight(),
                    counters.kv_bytes,
                    counters.kv_bytes_max,
                    if self.scheduler.is_idle() { "; idle" } else { "" }
                ))
            }
            _ => Err(format!("no command {command:?}")),
        }
    }

    fn add(&mut self, words: &mut Words) -> Result<String, String> {
        let sequence: u64 = words.next()?;
        let mut prompt = vec![0; words.key("prompt")?.ok_or("prompt=… is missing")?];
        if let Some(head) = words.key::<usize>("head")? {
            prompt.iter_mut().skip(head).for_each(|token| *token = sequence as u32);
        }
        let request = Request {
            sequence: SequenceId(sequence),
            prompt,
            max_tokens: words.key("max_tokens")?.ok_or("max_tokens=… is missing")?,
            stop_tokens: words.key("stop")?.into_iter().collect(),
            generation: Arc::default(),
            seed: 0,
            window: None,
            media: Vec::new(),
            whole_spans: false,
        };
        Ok(match self.scheduler.add(Arc::new(request)) {
            Ok(()) => format!("queued; {} more wanted", self.scheduler.wants()),
            Err(refused) => format!("refused: {refused}"),
        })
    }

    fn plan(&mut self) -> Result<String, String> {
        let plan = self.scheduler.plan();
        if plan.is_empty() {
            return Ok("nothing to compute".to_owned());
        }
        self.engine.launch(&plan).map_err(|error| error.to_string())?;
        let text = describe(&plan, &self.limits);
        self.in_flight.push_back(plan);
        Ok(text)
    }

    fn commit(&mut self, words: &mut Words) -> Result<String, String> {
        let plan = if words.take("newest") { self.in_flight.back() } else { self.in_flight.front() };
        let plan = plan.cloned().unwrap_or_default();
        let mut sampled = Vec::new();
        while !words.0.is_empty() {
            let word: String = words.next()?;
            let (sequence, token) = word.split_once(':').ok_or_else(|| format!("{word:?} is not SEQUENCE:TOKEN"))?;
            let (token, stop_string) = token.strip_suffix('!').map_or((token, false), |token| (token, true));
            sampled.push(Sampled { sequence: SequenceId(number(sequence)?), token: number(token)?, stop_string });
        }
        let finished = match self.scheduler.commit(&plan, &sampled) {
            Ok(finished) => finished,
            Err(error) => return Ok(format!("refused: {error}")),
        };
        self.engine.collect().map_err(|error| error.to_string())?;
        self.in_flight.pop_front();
        let lines = finished.iter().map(|row| {
            let reason = match row.reason {
                FinishReason::Stop => "stop",
                FinishReason::Length => "length",
            };
            let cached = if row.cached_tokens == 0 { String::new() } else { format!(", {} cached", row.cached_tokens) };
            let tokens: Vec<_> = row.tokens.iter().map(u32::to_string).collect();
            format!("{} ends, {reason}{cached}: {}", row.sequence.0, tokens.join(" "))
        });
        let lines: Vec<_> = lines.collect();
        Ok(if lines.is_empty() { "nothing ends".to_owned() } else { lines.join("\n") })
    }
}

/// A row's number, or that of a prefix.
fn name(sequence: SequenceId) -> String {
    match sequence.0.checked_sub(SequenceId::PREFIXES.0) {
        Some(number) => format!("prefix {number}"),
        None => sequence.0.to_string(),
    }
}

fn describe(plan: &Plan, limits: &Limits) -> String {
    let bytes = limits.layout_bytes(plan.slots, plan.slot_tokens, &MediaLoad::default());
    let mut text =
        format!("step {}: {} × {} tokens, {bytes} of {} bytes", plan.step, plan.slots, plan.slot_tokens, limits.kv_bytes_max);
    let mut line = |line: String| text.write_fmt(format_args!("\n  {line}")).expect("a string takes all");
    for release in &plan.released {
        line(format!("release {} from slot {}", name(release.sequence), release.slot));
    }
    for Admission { request, slot, reserved_tokens, reuse } in &plan.admitted {
        let reused = reuse.map(|reuse| format!(", {} of them copied from slot {}", reuse.tokens, reuse.slot)).unwrap_or_default();
        line(format!("admit {} to slot {slot}, {reserved_tokens} tokens reserved{reused}", name(request.sequence)));
    }
    for prefill in &plan.prefill {
        let (start, end) = (prefill.start, prefill.start + prefill.length);
        line(format!(
            "prefill {} in slot {}: {start}..{end}{}",
            name(prefill.sequence),
            prefill.slot,
            if prefill.last { ", last" } else { "" }
        ));
    }
    for decode in &plan.decode {
        line(format!("decode {} in slot {} at {}", decode.sequence.0, decode.slot, decode.position));
    }
    text
}

/// What is left of a command's line.
struct Words(VecDeque<String>);

impl Words {
    fn next<T: FromStr>(&mut self) -> Result<T, String> {
        number(&self.0.pop_front().ok_or("a word is missing")?)
    }

    fn take(&mut self, word: &str) -> bool {
        self.0.iter().position(|other| other == word).and_then(|index| self.0.remove(index)).is_some()
    }

    fn key<T: FromStr>(&mut self, key: &str) -> Result<Option<T>, String> {
        let index = self.0.iter().position(|word| word.strip_prefix(key).is_some_and(|rest| rest.starts_with('=')));
        let word = index.and_then(|index| self.0.remove(index));
        word.map(|word| number(&word[key.len() + 1..])).transpose()
    }
}

fn number<T: FromStr>(word: &str) -> Result<T, String> {
    word.parse().map_err(|_| format!("{word:?} does not fit here"))
}

/// The script with its answers as they are now.
fn answered(script: &str) -> Result<String, String> {
    let mut session: Option<Session> = None;
    let mut text = String::new();
    let mut lines = script.lines().zip(1..).peekable();
    while let Some((line, number)) = lines.next() {
        text.extend([line, "\n"]);
        let mut words = Words(line.split_whitespace().map(str::to_owned).collect());
        let Some(command) = words.0.pop_front().filter(|command| !command.starts_with('#')) else { continue };
        let answer = match (&mut session, command.as_str()) {
            (session, "limits") => Session::new(&mut words).map(|new| *session = Some(new)).map(|()| String::new()),
            (Some(session), command) => session.command(command, &mut words),
            (None, _) => Err("limits must come first".to_owned()),
        };
        let answer = answer.map_err(|error| format!("line {number}: {line}: {error}"))?;
        if !words.0.is_empty() {
            return Err(format!("line {number}: {line}: {:?} is not understood", words.0));
        }
        if answer.is_empty() {
            continue;
        }
        text.extend(["----\n", &answer, "\n"]);
        // The answer that was there, up to a blank line.
        if lines.next_if(|(line, _)| *line == "----").is_some() {
            while lines.next_if(|(line, _)| !line.is_empty()).is_some() {}
        }
    }
    Ok(text)
}

fn check(name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/schedule").join(name);
    let script = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let answered = answered(&script).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    if std::env::var_os("UPDATE_GOLDENS").is_some() {
        std::fs::write(&path, answered).unwrap();
        return;
    }
    let differs = script.lines().zip(answered.lines()).zip(1..).find(|((expected, answer), _)| expected != answer);
    let file = path.display();
    if let Some(((expected, answer), line)) = differs {
        panic!("{file}:{line}\n  expected: {expected}\n  answered: {answer}\nUPDATE_GOLDENS=1 takes this over:\n{answered}");
    }
    assert_eq!(script, answered, "{file}: it ends elsewhere; UPDATE_GOLDENS=1 takes it over");
}

macro_rules! scripts {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            check(concat!(stringify!($name), ".txt"));
        })*

        #[test]
        fn every_script_is_run() {
            let mut expected = vec![$(concat!(stringify!($name), ".txt")),*];
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/schedule");
            let mut names: Vec<_> =
                std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            expected.sort_unstable();
            names.sort_unstable();
            assert_eq!(names, expected);
        }
    };
}

scripts! { admission budget cancel commit layout one_step_ahead prefill prefill_shared prefix refusal }
