//! Items into token ids.
//!
//! A row's prompt is what the job's template makes of its columns, or its `messages` column, or its `prompt` column; the model's
//! chat template makes the text the model reads of it; [`Tokens`] makes ids of that. Nothing a row says becomes a control token:
//! see [`Tokens::mark`].
//!
//! A row's media stand in the prompt as one placeholder each, until they are decoded ([`Senses`]) and
//! [`Prompter::complete`] knows how many soft tokens each has.

mod conversation;
mod literal;
mod placement;
mod python;
mod senses;
mod splice;
mod stop;
mod template;
mod tokens;
mod vocabulary;

use std::borrow::Cow;
use std::sync::Arc;

use minijinja::value::ValueKind;
use minijinja::{Environment, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value};
use thiserror::Error;

pub use conversation::parse as parse_messages;
pub use senses::{Sensed, Senses};
pub use splice::{Spliced, splice};
pub use stop::{Detokenizer, StopStrings, final_text, find_stop};
pub use template::{ChatTemplate, Content, Message, Part, TemplateError};
pub use tokens::{Tokens, TokensError};
pub use vocabulary::VocabularyError;

use crate::job::{self, Generation, Job};
use crate::manifest::{Item, Medium, MediumKind};
use crate::model::{ModelError, ModelFiles, Towers};
use crate::schedule::{self, Request, SequenceId};

/// Steps of rendering a job's template over one row.
const FUEL: u64 = 50_000_000;
/// No token of a vocabulary in use stands for more bytes: a longer text is over the limit without being tokenized.
const TOKEN_BYTES_MAX: usize = 1024;
/// Around a control token in a row's text, where a person is shown a prompt.
pub const TYPED: [&str; 2] = ["⟦", "⟧"];
const ROW_TEMPLATE: &str = "prompt.template";

#[derive(Debug, Error)]
pub enum PromptError {
    #[error("prompt.template in {file} cannot be used: {reason}")]
    RowTemplate { file: String, reason: String },
    #[error("prompt.system in {file} needs a chat template, which {model} does not have: write its text into prompt.template")]
    SystemWithoutTemplate { file: String, model: String },
    #[error(transparent)]
    ChatTemplate(#[from] TemplateError),
    #[error(transparent)]
    Tokens(#[from] TokensError),
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// A row ready for the scheduler, and what a person may want to see of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Prepared {
    /// Where the row has media, a placeholder for each: [`Prompter::complete`] makes the request whole.
    pub request: Request,
    /// In the order of the prompt, kind by kind.
    pub media: Vec<Medium>,
    /// The text that was tokenized, as the model reads it.
    pub rendered: String,
    /// The same with [`TYPED`] around what reads like a control token and is text of the row; none where nothing does.
    pub typed: Option<String>,
    pub reference: Option<String>,
}

/// Prepares a job's rows. Shared by threads.
#[derive(Debug)]
pub struct Prompter {
    /// What messages call the model.
    model: String,
    towers: Towers,
    tokens: Arc<Tokens>,
    chat_template: Option<ChatTemplate>,
    row_template: Option<RowTemplate>,
    system: Option<Message>,
    thinking: bool,
    columns: job::Columns,
    generation: Arc<Generation>,
    /// Those of `generation`, for rows that override nothing.
    stop_tokens: Arc<[u32]>,
    /// The model's own.
    end_tokens: Vec<u32>,
    context_length: Option<u32>,
    /// The text of the token that begins every text of this model, if its tokenizer adds one.
    bos: Option<String>,
}

#[derive(Debug)]
struct RowTemplate {
    environment: Environment<'static>,
    /// Columns it may ask for.
    columns: Vec<String>,
    /// What stands in single braces.
    literals: Vec<String>,
}

impl Prompter {
    /// For a real model: reads its tokenizer and chat template.
    pub fn new(job: &Job, files: &ModelFiles) -> Result<Self, PromptError> {
        let chat_template = ChatTemplate::of_model(files)?;
        let tokens = Tokens::of_model(files, chat_template.as_ref().map(ChatTemplate::source))?;
        if chat_template.is_none() && job.prompt.system.is_some() {
            let file = job.file.display().to_string();
            return Err(PromptError::SystemWithoutTemplate { file, model: files.name.clone() });
        }
        let mut end_tokens = files.stop_tokens();
        let named = chat_template.as_ref().and_then(|template| template.special_token("eos_token"));
        end_tokens.extend(named.and_then(|token| tokens.token_to_id(token)));
        end_tokens.sort_unstable();
        end_tokens.dedup();
        let mut prompter = Self::with(job, tokens, chat_template, end_tokens, files.context_length())?;
        prompter.model.clone_from(&files.name);
        prompter.towers = Towers::new(files)?;
        Ok(prompter)
    }

    /// For the `fake` model: a token a byte, and a conversation's texts in lines.
    pub fn fake(job: &Job) -> Result<Self, PromptError> {
        Self::with(job, Tokens::bytes(), None, vec![Tokens::BYTES_END], None)
    }

    fn with(
        job: &Job,
        tokens: Tokens,
        chat_template: Option<ChatTemplate>,
        end_tokens: Vec<u32>,
        context_length: Option<u32>,
    ) -> Result<Self, PromptError> {
        let row_template = job.prompt.template.as_deref().map(|source| {
            RowTemplate::new(source).map_err(|reason| PromptError::RowTemplate { file: job.file.display().to_string(), reason })
        });
        let system = job.prompt.system.as_ref().map(|system| Message::text("system", tokens.mark(system).into_owned()));
        let bos = tokens.text_start()?;
        Ok(Self {
            model: "fake".to_owned(),
            towers: Towers::default(),
            chat_template,
            row_template: row_template.transpose()?,
            system,
            thinking: job.prompt.thinking,
            columns: job.input.columns.clone(),
            generation: Arc::new(job.generation.clone()),
            stop_tokens: stop_tokens(&job.generation, &end_tokens),
            end_tokens,
            context_length,
            bos,
            tokens: Arc::new(tokens),
        })
    }

    /// Tokens a sequence can have, where the engine allows fewer than the model's files say.
    pub fn limit_context(&mut self, context_length: u32) {
        self.context_length = Some(self.context_length.map_or(context_length, |length| length.min(context_length)));
    }

    pub fn tokens(&self) -> &Arc<Tokens> {
        &self.tokens
    }

    /// What the model sees and hears.
    pub fn towers(&self) -> &Towers {
        &self.towers
    }

    /// Tokens that a prompt and its completion can have together, where the model's files say.
    pub fn context_length(&self) -> Option<u32> {
        self.context_length
    }

    /// Whether the job's template holds anything that [`Self::template_note`] could be about.
    pub fn has_literals(&self) -> bool {
        self.row_template.as_ref().is_some_and(|template| !template.literals.is_empty())
    }

    /// What the job's author should know of a template that seems to name a column of this row and leaves it as it is written.
    pub fn template_note(&self, item: &Item) -> Option<String> {
        literal::note(&self.row_template.as_ref()?.literals, &item.columns)
    }

    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// The request of a row; the error is the sentence of its failed row.
    pub fn prepare(&self, item: &Item) -> Result<Prepared, String> {
        let generation = self.generation.overridden_by(&item.columns)?;
        let (generation, stop_tokens) = if generation == *self.generation {
            (Arc::clone(&self.generation), Arc::clone(&self.stop_tokens))
        } else {
            let stop_tokens = stop_tokens(&generation, &self.end_tokens);
            (Arc::new(generation), stop_tokens)
        };
        let Rendered { marked, begins_itself, media, misplaced } = self.render(item)?;
        if let Some(context) = self.context_length
            && marked.len() / TOKEN_BYTES_MAX > context as usize
        {
            return Err(format!(
                "the prompt has {} bytes, and the model's context is {context} tokens: shorten the row",
                marked.len()
            ));
        }
        let prompt = self.tokens.encode_marked(&marked, !begins_itself).map_err(|error| error.to_string())?;
        if prompt.is_empty() {
            return Err("the prompt is empty: it has no tokens".to_owned());
        }
        // A place for a medium that is not there would be computed as if it were a word.
        let kinds = media.iter().map(|medium| medium.kind);
        splice::check_places(&prompt, &self.towers, kinds).map_err(|error| misplaced.unwrap_or(error))?;
        if media.is_empty() {
            self.check_length(prompt.len(), "", generation.max_tokens)?;
        } else {
            // Of each medium at least one soft token between two, for the one that stands there now.
            self.check_length(prompt.len() + 2 * media.len(), "at least ", generation.max_tokens)?;
        }
        let request = Request {
            sequence: SequenceId(item.row),
            prompt,
            max_tokens: generation.max_tokens,
            stop_tokens,
            seed: row_seed(generation.seed, &item.id),
            generation,
            window: None,
            media: Vec::new(),
            whole_spans: false,
        };
        let typed = Tokens::typed(&marked, TYPED);
        let rendered = match Tokens::unmarked(&marked) {
            Cow::Owned(rendered) => rendered,
            Cow::Borrowed(_) => marked,
        };
        Ok(Prepared { request, media, rendered, typed, reference: self.reference(&item.columns) })
    }

    /// The request of a row whose media have been decoded, in the order of [`Prepared::media`]; the error is the sentence of its
    /// failed row.
    pub fn complete(&self, request: Request, media: &[Sensed]) -> Result<Request, String> {
        let counts: Vec<(MediumKind, u32)> = media.iter().map(|medium| (medium.kind, medium.soft_tokens)).collect();
        let (prompt, places) = splice(&request.prompt, &self.towers, &counts)?;
        self.check_length(prompt.len(), "", request.max_tokens)?;
        let medium = |&Spliced { medium, first }: &Spliced| {
            let Sensed { content, soft_tokens, identity, .. } = &media[medium];
            schedule::Medium { first, tokens: *soft_tokens, content: Arc::clone(content), identity: *identity }
        };
        let sees = media.iter().any(|medium| medium.kind == MediumKind::Image);
        let hears = media.iter().any(|medium| medium.kind == MediumKind::Audio);
        let both_ways = self.towers.image.as_ref().is_some_and(|tower| tower.both_ways);
        let media = places.iter().map(medium).collect();
        // Any recording makes all of the prompt causal: docs/fidelity.md.
        Ok(Request { prompt, media, whole_spans: both_ways && sees && !hears, ..request })
    }

    /// Refuses media that the model has no tower for.
    fn check_media(&self, media: &[Medium]) -> Result<(), String> {
        let (model, without) = (&self.model, |kind: MediumKind| media.iter().any(|medium| medium.kind == kind));
        if self.towers.image.is_none() && without(MediumKind::Image) {
            return Err(format!(
                "the row has an image, and {model} sees none (its files hold no vision tower): take a model that does, such as \
                 google/gemma-4-e4b-it"
            ));
        }
        if self.towers.audio.is_none() && without(MediumKind::Audio) {
            return Err(format!(
                "the row has a recording, and {model} hears none (its files hold no audio tower): take a model that does, such as \
                 google/gemma-4-e4b-it, or a speech model such as openai/whisper-base"
            ));
        }
        Ok(())
    }

    /// The marked text of a row, and its media.
    fn render(&self, item: &Item) -> Result<Rendered, String> {
        let columns = &item.columns;
        // What the row's own columns name, images first.
        let images = item.images.iter().map(|source| Medium { kind: MediumKind::Image, source: source.clone() });
        let audio = item.audio.iter().map(|source| Medium { kind: MediumKind::Audio, source: source.clone() });
        let own: Vec<Medium> = images.chain(audio).collect();
        let from_messages = self.takes_messages(columns);
        self.check_media(&own)?;
        if from_messages {
            self.check_media(&item.parts)?;
        }
        if let Some(chat_template) = &self.chat_template {
            let mut misplaced = None;
            let (mut messages, media) = match self.row_text(columns, false, &own)? {
                Some(text) => {
                    let (content, media) = user_content(text, &own)?;
                    (vec![Message { content, ..Message::text("user", String::new()) }], media)
                }
                None => {
                    let mut messages = conversation::parse(&self.columns.messages, &columns[&self.columns.messages])?;
                    misplaced = conversation::misplaced(&messages);
                    let before = put_in_front(&mut messages, &own).min(item.parts.len());
                    let (before, after) = item.parts.split_at(before);
                    (messages, before.iter().chain(&own).chain(after).cloned().collect())
                }
            };
            self.tokens.mark_messages(&mut messages);
            if let Some(system) = &self.system
                && messages.first().is_none_or(|first| first.role != "system")
            {
                messages.insert(0, system.clone());
            }
            // A chat template writes `<bos>` itself where its model wants one.
            let marked = chat_template.render(&messages, self.thinking).map_err(|error| match (error, &misplaced) {
                (TemplateError::Failed { .. }, Some(misplaced)) => misplaced.clone(),
                (error, _) => error.to_string(),
            })?;
            return Ok(Rendered { marked, begins_itself: true, media, misplaced });
        }
        if let Some(text) = self.row_text(columns, true, &own)? {
            let (text, media) = match user_content(text, &own)? {
                (Content::Text(text), media) => (text, media),
                (Content::Parts(parts), media) => (self.with_placeholders(&parts), media),
            };
            let text = match &self.system {
                Some(system) => conversation::plain(&[system.clone(), Message::text("user", text)]),
                None => text,
            };
            let begins_itself = self.bos.as_deref().is_some_and(|bos| text.starts_with(bos));
            return Ok(Rendered { marked: text, begins_itself, media, misplaced: None });
        }
        if !self.tokens.is_bytes() {
            let column = &self.columns.messages;
            return Err(format!(
                "the column {column:?} needs a chat template, which this model does not have: give a prompt instead"
            ));
        }
        let messages = conversation::parse(&self.columns.messages, &columns[&self.columns.messages])?;
        let all: Vec<Message> = self.system.iter().cloned().chain(messages).collect();
        Ok(Rendered { marked: conversation::plain(&all), begins_itself: false, media: Vec::new(), misplaced: None })
    }

    /// Whether the row's messages column counts, and not a template or a prompt.
    fn takes_messages(&self, columns: &Map<String, Value>) -> bool {
        self.row_template.is_none() && columns.get(&self.columns.messages).is_some_and(|messages| !is_blank(messages))
    }

    /// The text of a message for a model without a chat template, whose placeholders mean what they say.
    fn with_placeholders(&self, parts: &[Part]) -> String {
        let image = self.towers.image.as_ref().map(|tower| tower.placeholder.token);
        let audio = self.towers.audio.as_ref().map(|tower| tower.placeholder.token);
        let token = |id: Option<u32>| Cow::Owned(id.and_then(|id| self.tokens.id_to_token(id)).unwrap_or_default());
        let texts = parts.iter().map(|part| match part {
            Part::Text { text } => Cow::Borrowed(text.as_str()),
            Part::Image => token(image),
            Part::Audio => token(audio),
        });
        texts.collect()
    }

    /// The text of the row's template or prompt column; `None` where its messages column counts instead.
    ///
    /// With `mark`, control tokens in the row's columns are marked and those the job's template writes are not: a model without a
    /// chat template gets its prompt format from the job.
    fn row_text(&self, columns: &Map<String, Value>, mark: bool, own: &[Medium]) -> Result<Option<String>, String> {
        let cleared = |text: &str| {
            let text = placement::without_places(text);
            if mark { self.tokens.mark(&text).into_owned() } else { text.into_owned() }
        };
        let text = match &self.row_template {
            Some(template) => template.render(columns, placement::variables(&self.columns, columns, own), cleared)?,
            None if self.takes_messages(columns) => return Ok(None),
            None => match columns.get(&self.columns.prompt) {
                Some(Value::String(text)) => cleared(text),
                None | Some(Value::Null) if !own.is_empty() => return Ok(Some(String::new())),
                Some(other) => {
                    let column = &self.columns.prompt;
                    return Err(format!("the column {column:?} is {} instead of text", conversation::kind(other)));
                }
                None => return Err(self.no_prompt(columns)),
            },
        };
        if own.is_empty() && text.chars().all(python::is_space) {
            let from = if self.row_template.is_some() { "prompt.template gives" } else { "its column holds" };
            return Err(format!("the prompt is empty: {from} no text for this row"));
        }
        Ok(Some(text))
    }

    fn no_prompt(&self, columns: &Map<String, Value>) -> String {
        let (prompt, messages) = (&self.columns.prompt, &self.columns.messages);
        format!(
            "the row has neither a column {prompt:?} nor a column {messages:?}{}: name the right one with input.columns.prompt",
            nearest(prompt, columns)
        )
    }

    /// `at_least` stands before the number of tokens.
    fn check_length(&self, prompt_tokens: usize, at_least: &str, max_tokens: u32) -> Result<(), String> {
        let Some(context) = self.context_length else { return Ok(()) };
        let total = prompt_tokens as u64 + u64::from(max_tokens);
        let Some(over) = total.checked_sub(u64::from(context)).filter(|over| *over > 0) else { return Ok(()) };
        let remedy = if (prompt_tokens as u64) < u64::from(context) && at_least.is_empty() {
            format!("lower generation.max_tokens to {} or shorten the row", u64::from(context) - prompt_tokens as u64)
        } else {
            "shorten the row".to_owned()
        };
        Err(format!(
            "the prompt has {at_least}{prompt_tokens} tokens and max_tokens is {max_tokens}, together {over} more than the context of {context}: \
             {remedy}"
        ))
    }

    fn reference(&self, columns: &Map<String, Value>) -> Option<String> {
        match columns.get(&self.columns.reference)? {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        }
    }
}

/// What a model reads of a row.
struct Rendered {
    /// Control tokens of the row's own are marked.
    marked: String,
    /// It begins as the model's texts do.
    begins_itself: bool,
    media: Vec<Medium>,
    /// The sentence for a medium that the chat template turns out not to write, where one stands in a message that is not its
    /// user's.
    misplaced: Option<String>,
}

/// The user's message, with its media in their order.
fn user_content(text: String, own: &[Medium]) -> Result<(Content, Vec<Medium>), String> {
    if own.is_empty() {
        return Ok((Content::Text(text), Vec::new()));
    }
    let (parts, order) = placement::parts(&text, own)?;
    Ok((Content::Parts(parts), order.into_iter().map(|number| own[number].clone()).collect()))
}

/// Puts a row's own media in front of the first thing its user says; returns how many media stand before that.
fn put_in_front(messages: &mut [Message], own: &[Medium]) -> usize {
    let user = messages.iter().position(|message| message.role == "user").unwrap_or(0);
    let media = |message: &Message| match &message.content {
        Content::Text(_) => 0,
        Content::Parts(parts) => parts.iter().filter(|part| !matches!(part, Part::Text { .. })).count(),
    };
    let before = messages[..user].iter().map(media).sum();
    if let Some(message) = messages.get_mut(user).filter(|_| !own.is_empty()) {
        let said = match std::mem::replace(&mut message.content, Content::Parts(Vec::new())) {
            Content::Text(text) => vec![Part::Text { text }],
            Content::Parts(parts) => parts,
        };
        message.content = Content::Parts(own.iter().map(|medium| placement::part(medium.kind)).chain(said).collect());
    }
    before
}

fn is_blank(value: &Value) -> bool {
    value.is_null() || value.as_str().is_some_and(str::is_empty)
}

fn stop_tokens(generation: &Generation, end_tokens: &[u32]) -> Arc<[u32]> {
    let end_tokens = if generation.ignore_eos { &[] } else { end_tokens };
    let mut all: Vec<u32> = end_tokens.iter().chain(&generation.stop_token_ids).copied().collect();
    all.sort_unstable();
    all.dedup();
    all.into()
}

/// The first 8 bytes, little-endian, of the blake3 hash of the job's seed (8 bytes, little-endian) and the row's id.
pub fn row_seed(seed: u64, id: &str) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.update(id.as_bytes());
    let hash = hasher.finalize();
    hash.as_bytes().iter().take(8).rev().fold(0, |seed, &byte| seed << 8 | u64::from(byte))
}

/// `; the nearest is "…"`, or nothing where no column is like it.
fn nearest(name: &str, columns: &Map<String, Value>) -> String {
    let near = columns.keys().map(|column| (strsim::jaro_winkler(name, column), column)).filter(|(likeness, _)| *likeness > 0.7);
    match near.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((_, column)) => format!("; the nearest is {column:?}"),
        None => String::new(),
    }
}

impl RowTemplate {
    fn new(source: &str) -> Result<Self, String> {
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(python::method);
        environment.add_filter("tojson", python::tojson);
        environment.set_formatter(|out, _state, value| {
            if value.is_none() {
                let message = "it writes a column that is null in this row: give it a default, as in {{ column or \"\" }}";
                return Err(minijinja::Error::new(ErrorKind::InvalidOperation, message));
            }
            if value.kind() == ValueKind::Seq
                && let Ok(items) = value.try_iter()
                && let items = items.collect::<Vec<_>>()
                && !items.is_empty()
                && items.iter().all(placement::is_place)
            {
                // A list of images is all of them.
                return items.iter().filter_map(|item| item.as_str()).try_for_each(|place| Ok(out.write_str(place)?));
            }
            Ok(out.write_str(&python::str(value)?)?)
        });
        environment.add_template_owned(ROW_TEMPLATE, source.to_owned()).map_err(|error| error.to_string())?;
        let template = environment.get_template(ROW_TEMPLATE).map_err(|error| error.to_string())?;
        let globals: Vec<String> = environment.globals().map(|(name, _)| name.to_owned()).collect();
        let mut columns: Vec<String> =
            template.undeclared_variables(false).into_iter().filter(|name| !globals.contains(name)).collect();
        columns.sort();
        Ok(Self { environment, columns, literals: literal::in_single_braces(source) })
    }

    /// `media` are variables beside the columns, and before them; `mark` changes what the row says.
    fn render(
        &self,
        columns: &Map<String, Value>,
        media: Vec<(String, minijinja::Value)>,
        mark: impl Fn(&str) -> String,
    ) -> Result<String, String> {
        // Only what the template can ask for: rows may have large columns beside.
        let is_text = |name: &&String| media.iter().all(|(medium, _)| medium != *name);
        let asked = self.columns.iter().filter(is_text).filter_map(|name| columns.get_key_value(name));
        let asked: Vec<_> = asked.map(|(name, value)| (name.clone(), marked_value(value, &mark))).collect();
        let variables = minijinja::Value::from_pairs(asked.into_iter().chain(media));
        let template = self.environment.get_template(ROW_TEMPLATE).map_err(|error| error.to_string())?;
        template.render(variables).map_err(|error| {
            if error.kind() != ErrorKind::UndefinedError {
                let reason = error.detail().map_or_else(|| error.to_string(), str::to_owned);
                return format!("prompt.template fails on this row: {reason}");
            }
            let at = error.range().and_then(|range| template.source().get(range)).unwrap_or_default();
            let mut missing: Vec<&String> = self.columns.iter().filter(|name| !columns.contains_key(*name)).collect();
            missing.sort_by_key(|name| (!at.contains(name.as_str()), template.source().find(name.as_str())));
            match missing.first() {
                Some(name) => {
                    format!("prompt.template uses the column {name:?}, which this row does not have{}", nearest(name, columns))
                }
                None => format!("prompt.template uses something that this row's columns do not have: {error}"),
            }
        })
    }
}

fn marked_value(value: &Value, mark: &impl Fn(&str) -> String) -> minijinja::Value {
    match value {
        Value::String(text) => minijinja::Value::from(mark(text)),
        Value::Array(items) => items.iter().map(|item| marked_value(item, mark)).collect(),
        Value::Object(fields) => {
            minijinja::Value::from_pairs(fields.iter().map(|(name, value)| (mark(name), marked_value(value, mark))))
        }
        other => minijinja::value::Serde(other).into(),
    }
}

#[cfg(test)]
mod media_tests;
#[cfg(test)]
mod prompter_tests;
