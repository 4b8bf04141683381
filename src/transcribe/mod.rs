//! Recordings' windows into text, by the rules of OpenAI's whisper.
//!
//! ```text
//! window ──> Pass ──engine──> Heard ──┬──> another Pass: warmer, or further on in the window
//!                                     └──> Transcript
//! ```
//!
//! A window is decoded in passes. A pass that repeats itself or is unlikely is tried again at the next temperature; one whose
//! last timestamp lies before the window's end is followed by one from there. This is `transcribe.py` of OpenAI's whisper for one
//! window, with `condition_on_previous_text` off, since windows are decoded side by side. Where it differs, docs/fidelity.md says
//! so.
//!
//! Nothing here computes: [`Transcriber`] knows the ids and the rules, [`WindowTranscript`] what became of one window.

mod window;

pub use window::{Heard, Next, Pass, Segment, Transcript, WindowTranscript};

use std::{collections::BTreeSet, sync::Arc};

use thiserror::Error;

use crate::{
    job::{Generation, Job, SpeechTask, Transcription},
    prompt::{Tokens, TokensError},
    schedule::{Request, SequenceId, SpeechRules, SpeechWindow, TimestampRules},
};

/// Seconds between two timestamps.
const TIMESTAMP_SECONDS: f64 = 0.02;

/// What comes before and after a text in the fake model, whose tokens are bytes.
const FAKE_START: u32 = b'>' as u32;

#[derive(Debug, Error)]
pub enum TranscribeError {
    #[error(
        "the tokenizer of {model} has no token {token}: it does not belong to a Whisper model; take tokenizer.json from the \
         openai/whisper repository of the same name"
    )]
    NoToken { model: String, token: &'static str },
    #[error("{model} knows English alone: transcription.language is {language:?}; take a multilingual model, or remove the key")]
    EnglishOnly { model: String, language: String },
    #[error("{model} knows English alone and cannot translate: take a multilingual model, or remove transcription.task")]
    NoTranslation { model: String },
    #[error("transcription.language is {language:?}, which {model} does not know; it knows {known}")]
    Language { model: String, language: String, known: String },
    #[error("transcription.suppress_tokens has {token}, and {model} has {vocabulary} tokens (ids from 0)")]
    Suppressed { model: String, token: i64, vocabulary: u32 },
    #[error(transparent)]
    Tokens(#[from] TokensError),
}

/// A job's way of writing down what is said; shared by threads.
#[derive(Debug)]
pub struct Transcriber {
    tokens: Arc<Tokens>,
    settings: Transcription,
    speech: Speech,
    rules: Arc<SpeechRules>,
    initial_prompt: Vec<u32>,
    /// By temperature.
    generations: Vec<Arc<Generation>>,
    stop_tokens: Arc<[u32]>,
    context_length: u32,
}

/// Special tokens of a model.
#[derive(Debug)]
struct Speech {
    start_of_transcript: u32,
    start_of_previous: Option<u32>,
    no_timestamps: Option<u32>,
    /// Code and token; none of a model that knows English alone.
    languages: Vec<(String, u32)>,
    /// Of the job's task; none of a model that knows English alone.
    task: Option<u32>,
}

/// Which language a pass is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// The token of a language.
    Known(u32),
    /// The pass finds it first.
    Detect,
    /// The model knows English alone.
    English,
}

impl Transcriber {
    /// For a Whisper model of `vocabulary` ids, whose decoder holds `context_length` tokens.
    pub fn new(job: &Job, tokens: Arc<Tokens>, context_length: u32) -> Result<Self, TranscribeError> {
        let model = || job.model.path.clone();
        let id = |names: &[&'static str]| names.iter().find_map(|name| tokens.token_to_id(name));
        let need = |names: &[&'static str]| id(names).ok_or_else(|| TranscribeError::NoToken { model: model(), token: names[0] });
        let end_of_text = need(&["<|endoftext|>"])?;
        let start_of_transcript = need(&["<|startoftranscript|>"])?;
        let (translate, transcribe) = (need(&["<|translate|>"])?, need(&["<|transcribe|>"])?);
        let start_of_previous = need(&["<|startofprev|>"])?;
        let start_of_lm = need(&["<|startoflm|>"])?;
        let no_speech = need(&["<|nospeech|>", "<|nocaptions|>"])?;
        let no_timestamps = need(&["<|notimestamps|>"])?;
        // The languages stand between these two; an English model's tokenizer has them all the same, and no use for them.
        let multilingual = end_of_text > LAST_ENGLISH_TOKEN;
        let languages: Vec<(String, u32)> = (start_of_transcript + 1..translate)
            .filter_map(|id| Some((tokens.id_to_token(id)?.strip_prefix("<|")?.strip_suffix("|>")?.to_owned(), id)))
            .filter(|_| multilingual)
            .collect();
        let settings = job.transcription.clone();
        if !multilingual && settings.task == SpeechTask::Translate {
            return Err(TranscribeError::NoTranslation { model: model() });
        }
        let task = if settings.task == SpeechTask::Translate { translate } else { transcribe };

        let mut suppressed: BTreeSet<u32> =
            [transcribe, translate, start_of_transcript, start_of_previous, start_of_lm, no_speech].into();
        let vocabulary = tokens.vocab_size().max(no_timestamps + 1 + (30.0 / TIMESTAMP_SECONDS) as u32 + 1);
        for &token in &settings.suppress_tokens {
            match u32::try_from(token) {
                Ok(token) if token < vocabulary => {
                    suppressed.insert(token);
                }
                Err(_) if token == -1 => suppressed.extend(non_speech(&tokens)?),
                _ => return Err(TranscribeError::Suppressed { model: model(), token, vocabulary }),
            }
        }
        let mut suppressed_first = Vec::new();
        if settings.suppress_blank {
            suppressed_first = tokens.encode(" ", false)?;
            suppressed_first.push(end_of_text);
        }
        let timestamps = settings.timestamps.then(|| TimestampRules {
            begin: no_timestamps + 1,
            no_timestamps,
            initial_max: (settings.max_initial_timestamp > 0.0)
                .then(|| (f64::from(settings.max_initial_timestamp) / TIMESTAMP_SECONDS).round_ties_even() as u32),
        });
        let rules = SpeechRules {
            end_of_text,
            suppressed: suppressed.into_iter().collect(),
            suppressed_first,
            languages: languages.iter().map(|(_, token)| *token).collect(),
            no_speech: Some(no_speech),
            timestamps,
        };
        let initial_prompt = match &settings.initial_prompt {
            Some(prompt) => tokens.encode_marked(&tokens.mark(&format!(" {}", prompt.trim())), false)?,
            None => Vec::new(),
        };
        let speech = Speech {
            start_of_transcript,
            start_of_previous: Some(start_of_previous),
            no_timestamps: Some(no_timestamps).filter(|_| !settings.timestamps),
            languages,
            task: multilingual.then_some(task),
        };
        let made = Self::with(job, tokens, speech, rules, initial_prompt, context_length);
        if let Some(language) = &made.settings.language {
            made.language(Some(language)).map_err(|known| match known {
                None => TranscribeError::EnglishOnly { model: model(), language: language.clone() },
                Some(known) => TranscribeError::Language { model: model(), language: language.clone(), known },
            })?;
        }
        Ok(made)
    }

    /// For the `fake` model: a token a byte, without times.
    pub fn fake(job: &Job, context_length: u32) -> Self {
        let speech = Speech {
            start_of_transcript: FAKE_START,
            start_of_previous: None,
            no_timestamps: None,
            languages: Vec::new(),
            task: None,
        };
        let rules = SpeechRules { end_of_text: Tokens::BYTES_END, ..SpeechRules::default() };
        Self::with(job, Arc::new(Tokens::bytes()), speech, rules, Vec::new(), context_length)
    }

    fn with(
        job: &Job,
        tokens: Arc<Tokens>,
        speech: Speech,
        rules: SpeechRules,
        initial_prompt: Vec<u32>,
        context_length: u32,
    ) -> Self {
        let settings = job.transcription.clone();
        let generation = |&temperature: &f32| {
            let Generation { seed, max_tokens, .. } = job.generation;
            Arc::new(Generation { seed, max_tokens, temperature, ..Generation::default() })
        };
        Self {
            generations: settings.temperatures.iter().map(generation).collect(),
            stop_tokens: Arc::new([rules.end_of_text]),
            rules: Arc::new(rules),
            tokens,
            settings,
            speech,
            initial_prompt,
            context_length,
        }
    }

    pub fn tokens(&self) -> &Arc<Tokens> {
        &self.tokens
    }

    pub fn settings(&self) -> &Transcription {
        &self.settings
    }

    /// What a row is told of its language: its own code, the job's, or none. The error lists the codes that there are; none where
    /// the model knows English alone.
    pub fn language(&self, own: Option<&str>) -> Result<Language, Option<String>> {
        let code = own.or(self.settings.language.as_deref()).map(str::to_lowercase);
        if self.speech.languages.is_empty() {
            return match code.as_deref() {
                None | Some("en" | "english") => Ok(Language::English),
                Some(_) => Err(None),
            };
        }
        let Some(code) = code else { return Ok(Language::Detect) };
        match self.speech.languages.iter().find(|(known, _)| *known == code) {
            Some((_, token)) => Ok(Language::Known(*token)),
            None => {
                let codes: Vec<&str> = self.speech.languages.iter().map(|(code, _)| code.as_str()).collect();
                Err(Some(codes.join(", ")))
            }
        }
    }

    /// The code of a language's token.
    pub fn code(&self, language: Language) -> Option<&str> {
        match language {
            Language::Known(token) => {
                self.speech.languages.iter().find(|(_, known)| *known == token).map(|(code, _)| code.as_str())
            }
            Language::English => Some("en"),
            Language::Detect => None,
        }
    }

    /// Whether finding the language takes a pass of its own: with an earlier text in the prompt, as the reference finds it without.
    pub fn detects_alone(&self) -> bool {
        !self.initial_prompt.is_empty()
    }

    /// The request of a pass. `row_seed` is the row's, `number` tells its passes apart.
    pub fn request(&self, sequence: SequenceId, window: &WindowTranscript, pass: Pass, row_seed: u64, number: u64) -> Request {
        let Speech { start_of_transcript, start_of_previous, no_timestamps, task, .. } = &self.speech;
        let mut prompt = Vec::new();
        let alone = pass.language == Language::Detect && self.detects_alone();
        if let Some(start_of_previous) = start_of_previous.filter(|_| pass.seek == 0 && !alone && !self.initial_prompt.is_empty()) {
            let kept = (self.context_length as usize / 2).saturating_sub(1);
            prompt.push(start_of_previous);
            prompt.extend_from_slice(&self.initial_prompt[self.initial_prompt.len().saturating_sub(kept)..]);
        }
        let start = prompt.len() as u32;
        prompt.push(*start_of_transcript);
        let mut forced: Vec<u32> = task.iter().chain(no_timestamps).copied().collect();
        match pass.language {
            Language::Known(token) => prompt.push(token),
            Language::Detect | Language::English => {}
        }
        let detect_language = pass.language == Language::Detect;
        if !detect_language {
            prompt.append(&mut forced);
        } else if alone {
            forced.clear();
        }
        let speech = SpeechWindow {
            features: Arc::new(window.features().padded(pass.seek)),
            rules: self.rules.clone(),
            start_of_transcript: start,
            detect_language,
            forced,
        };
        let generation = &self.generations[pass.attempt.min(self.generations.len() - 1)];
        let preamble = speech.preamble_tokens();
        let left = self.context_length.saturating_sub(prompt.len() as u32 + preamble);
        let max_tokens = if alone { 1 } else { (self.context_length / 2).min(left).min(generation.max_tokens).max(1) + preamble };
        Request {
            sequence,
            prompt,
            max_tokens,
            stop_tokens: self.stop_tokens.clone(),
            generation: generation.clone(),
            seed: row_seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            window: Some(Arc::new(speech)),
            media: Vec::new(),
            whole_spans: false,
        }
    }
}

/// Vocabularies of English models end their text here, at 50256; multilingual ones at 50257. Source: `tokenizer.py` of whisper.
const LAST_ENGLISH_TOKEN: u32 = 50_256;

/// Ids that write what is not spoken: brackets, music, speakers' names. Source: `non_speech_tokens` of whisper's `tokenizer.py`.
fn non_speech(tokens: &Tokens) -> Result<Vec<u32>, TokensError> {
    const SYMBOLS: &str = "\" # ( ) * + / : ; < = > @ [ \\ ] ^ _ ` { | } ~ 「 」 『 』 << >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) \
                           [[ ]] {{ }} ♪♪ ♪♪♪";
    const MUSIC: &str = "♩ ♪ ♫ ♬ ♭ ♮ ♯";
    let mut ids = Vec::new();
    // Hyphens and quotes stand between words, but begin none.
    for text in [" -", " '"] {
        ids.extend(tokens.encode(text, false)?.first());
    }
    let symbols = SYMBOLS.split(' ').map(|symbol| (symbol, false)).chain(MUSIC.split(' ').map(|symbol| (symbol, true)));
    for (symbol, is_music) in symbols.filter(|(symbol, _)| !symbol.is_empty()) {
        for text in [symbol.to_owned(), format!(" {symbol}")] {
            let own = tokens.encode(&text, false)?;
            if own.len() == 1 || is_music {
                ids.extend(own.first());
            }
        }
    }
    Ok(ids)
}
