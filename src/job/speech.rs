//! The keys of `[audio]` and `[transcription]`.

use super::reader::{Reader, Section};
use super::value::{Fault, Node, Value};
use super::{Audio, Channels, Long, SpeechTask, Transcription};

const LANGUAGE_CHARS_MAX: usize = 40;
const TEMPERATURES_MAX: usize = 16;
const SUPPRESS_TOKENS_MAX: usize = 4096;
/// Seconds that a Whisper model hears at once.
const WINDOW_SECONDS: f32 = 30.0;

pub(super) const LONG: [(&str, Long); 2] = [("split", Long::Split), ("truncate", Long::Truncate)];
pub(super) const CHANNELS: [(&str, Channels); 3] = [("mix", Channels::Mix), ("left", Channels::Left), ("right", Channels::Right)];
pub(super) const TASKS: [(&str, SpeechTask); 2] = [("transcribe", SpeechTask::Transcribe), ("translate", SpeechTask::Translate)];

pub(super) fn audio(reader: &mut Reader, root: &mut Section) -> Audio {
    let mut section = reader.section(root, "audio");
    let defaults = Audio::default();
    let long = reader.choice(&mut section, "long", &LONG).unwrap_or(defaults.long);
    let channels = reader.choice(&mut section, "channels", &CHANNELS).unwrap_or(defaults.channels);
    reader.finish(section);
    Audio { long, channels }
}

pub(super) fn transcription(reader: &mut Reader, root: &mut Section) -> Transcription {
    let mut section = reader.section(root, "transcription");
    let mut given = Transcription::default();
    if let Some(task) = reader.choice(&mut section, "task", &TASKS) {
        given.task = task;
    }
    given.language = reader.optional(&mut section, "language", language);
    if let Some(timestamps) = reader.optional(&mut section, "timestamps", Node::boolean) {
        given.timestamps = timestamps;
    }
    given.initial_prompt = reader.optional(&mut section, "initial_prompt", |node| node.string("text"));
    if let Some(temperatures) = reader.optional(&mut section, "temperatures", temperatures) {
        given.temperatures = temperatures;
    }
    let above_0 = |ratio: f32| ratio > 0.0;
    let ratio = |node: &Node| number_or_off(node, "a number above 0, or false to leave it off", above_0);
    if let Some(threshold) = reader.optional(&mut section, "compression_ratio_threshold", ratio) {
        given.compression_ratio_threshold = threshold;
    }
    let logprob = |node: &Node| number_or_off(node, "a number of at most 0, or false to leave it off", |logprob| logprob <= 0.0);
    if let Some(threshold) = reader.optional(&mut section, "logprob_threshold", logprob) {
        given.logprob_threshold = threshold;
    }
    let within_1 = |probability: f32| (0.0..=1.0).contains(&probability);
    let probability = |node: &Node| number_or_off(node, "a number from 0 to 1, or false to leave it off", within_1);
    if let Some(threshold) = reader.optional(&mut section, "no_speech_threshold", probability) {
        given.no_speech_threshold = threshold;
    }
    if let Some(tokens) = reader.optional(&mut section, "suppress_tokens", suppress_tokens) {
        given.suppress_tokens = tokens;
    }
    if let Some(suppress_blank) = reader.optional(&mut section, "suppress_blank", Node::boolean) {
        given.suppress_blank = suppress_blank;
    }
    let seconds = |node: &Node| node.number("seconds, from 0 to 30", |seconds| (0.0..=WINDOW_SECONDS).contains(&seconds));
    if let Some(timestamp) = reader.optional(&mut section, "max_initial_timestamp", seconds) {
        given.max_initial_timestamp = timestamp;
    }
    reader.finish(section);
    given
}

/// Which languages there are is known to the model alone.
fn language(node: &Node) -> Result<String, Fault> {
    let expected = "a language such as \"en\" or \"English\", of 40 characters at most";
    let language = node.name(expected)?;
    if language.chars().count() > LANGUAGE_CHARS_MAX { Err(node.fault(expected)) } else { Ok(language) }
}

fn temperatures(node: &Node) -> Result<Vec<f32>, Fault> {
    let expected = "an array of 1 to 16 numbers from 0 to 1";
    let Value::Array(nodes) = &node.value else { return Err(node.fault(expected)) };
    if nodes.len() > TEMPERATURES_MAX {
        return Err(Fault { found: format!("{} of them", nodes.len()), ..node.fault(expected) });
    }
    if nodes.is_empty() {
        return Err(node.fault(expected));
    }
    nodes.iter().map(|node| node.number("numbers from 0 to 1", |number| (0.0..=1.0).contains(&number))).collect()
}

fn number_or_off(node: &Node, expected: &str, allowed: impl Fn(f32) -> bool) -> Result<Option<f32>, Fault> {
    match node.value {
        Value::Boolean(false) => Ok(None),
        _ => node.number(expected, allowed).map(Some),
    }
}

fn suppress_tokens(node: &Node) -> Result<Vec<i64>, Fault> {
    let expected = "an array of token ids, in which -1 stands for what is not speech";
    let Value::Array(nodes) = &node.value else { return Err(node.fault(expected)) };
    if nodes.len() > SUPPRESS_TOKENS_MAX {
        let fault = node.fault(format!("{SUPPRESS_TOKENS_MAX} token ids at most"));
        return Err(Fault { found: format!("{} of them", nodes.len()), ..fault });
    }
    let token = |node: &Node| {
        let id = match &node.value {
            Value::Integer(text) => text.parse::<i64>().ok(),
            _ => None,
        };
        let id = id.filter(|id| (-1..=i64::from(u32::MAX)).contains(id));
        id.ok_or_else(|| node.fault(format!("integers from -1 to {}", u32::MAX)))
    };
    nodes.iter().map(token).collect()
}
