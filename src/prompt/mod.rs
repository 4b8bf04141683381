//! Items into token ids.
//!
//! A row's prompt is what the job's template makes of its columns, or its `messages` column, or its `prompt` column; the model's
//! chat template makes the text the model reads of it; [`Tokens`] makes ids of that. Nothing a row says becomes a control token:
//! see [`Tokens::mark`].

mod conversation;
mod python;
mod stop;
mod template;
mod tokens;
mod vocabulary;

use std::borrow::Cow;
use std::sync::Arc;

use minijinja::{Environment, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value};
use thiserror::Error;

pub use conversation::parse as parse_messages;
pub use stop::{Detokenizer, StopStrings, final_text, find_stop};
pub use template::{ChatTemplate, Content, Message, Part, TemplateError};
pub use tokens::{Tokens, TokensError};
pub use vocabulary::VocabularyError;

use crate::job::{self, Generation, Job};
use crate::manifest::Item;
use crate::model::ModelFiles;
use crate::schedule::{Request, SequenceId};

/// Steps of rendering a job's template over one row.
const FUEL: u64 = 50_000_000;
/// No token of a vocabulary in use stands for more bytes: a longer text is over the limit without being tokenized.
const TOKEN_BYTES_MAX: usize = 1024;
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
}

/// A row ready for the scheduler, and what a person may want to see of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Prepared {
    pub request: Request,
    /// The text that was tokenized, as the model reads it.
    pub rendered: String,
    pub reference: Option<String>,
}

/// Prepares a job's rows. Shared by threads.
#[derive(Debug)]
pub struct Prompter {
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
        Self::with(job, tokens, chat_template, end_tokens, files.context_length())
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
        let (marked, begins_itself) = self.render(&item.columns)?;
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
        self.check_length(prompt.len(), generation.max_tokens)?;
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
        let rendered = match Tokens::unmarked(&marked) {
            Cow::Owned(rendered) => rendered,
            Cow::Borrowed(_) => marked,
        };
        Ok(Prepared { request, rendered, reference: self.reference(&item.columns) })
    }

    /// The marked text of a row, and whether it already begins as the model's texts do.
    fn render(&self, columns: &Map<String, Value>) -> Result<(String, bool), String> {
        if let Some(chat_template) = &self.chat_template {
            let mut messages = match self.row_text(columns, false)? {
                Some(text) => vec![Message::text("user", text)],
                None => conversation::parse(&self.columns.messages, &columns[&self.columns.messages])?,
            };
            self.tokens.mark_messages(&mut messages);
            if let Some(system) = &self.system
                && messages.first().is_none_or(|first| first.role != "system")
            {
                messages.insert(0, system.clone());
            }
            // A chat template writes `<bos>` itself where its model wants one.
            return Ok((chat_template.render(&messages, self.thinking).map_err(|error| error.to_string())?, true));
        }
        if let Some(text) = self.row_text(columns, true)? {
            let text = match &self.system {
                Some(system) => conversation::plain(&[system.clone(), Message::text("user", text)]),
                None => text,
            };
            let begins_itself = self.bos.as_deref().is_some_and(|bos| text.starts_with(bos));
            return Ok((text, begins_itself));
        }
        if !self.tokens.is_bytes() {
            let column = &self.columns.messages;
            return Err(format!(
                "the column {column:?} needs a chat template, which this model does not have: give a prompt instead"
            ));
        }
        let messages = conversation::parse(&self.columns.messages, &columns[&self.columns.messages])?;
        let all: Vec<Message> = self.system.iter().cloned().chain(messages).collect();
        Ok((conversation::plain(&all), false))
    }

    /// The text of the row's template or prompt column; `None` where its messages column counts instead.
    ///
    /// With `mark`, control tokens in the row's columns are marked and those the job's template writes are not: a model without a
    /// chat template gets its prompt format from the job.
    fn row_text(&self, columns: &Map<String, Value>, mark: bool) -> Result<Option<String>, String> {
        let text = match &self.row_template {
            Some(template) => template.render(columns, |text| if mark { self.tokens.mark(text) } else { Cow::Borrowed(text) })?,
            None if columns.get(&self.columns.messages).is_some_and(|messages| !is_blank(messages)) => return Ok(None),
            None => match columns.get(&self.columns.prompt) {
                Some(Value::String(text)) if mark => self.tokens.mark(text).into_owned(),
                Some(Value::String(text)) => text.clone(),
                Some(other) => {
                    let column = &self.columns.prompt;
                    return Err(format!("the column {column:?} is {} instead of text", conversation::kind(other)));
                }
                None => return Err(self.no_prompt(columns)),
            },
        };
        if text.chars().all(python::is_space) {
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

    fn check_length(&self, prompt_tokens: usize, max_tokens: u32) -> Result<(), String> {
        let Some(context) = self.context_length else { return Ok(()) };
        let total = prompt_tokens as u64 + u64::from(max_tokens);
        let Some(over) = total.checked_sub(u64::from(context)).filter(|over| *over > 0) else { return Ok(()) };
        let remedy = if (prompt_tokens as u64) < u64::from(context) {
            format!("lower generation.max_tokens to {} or shorten the row", u64::from(context) - prompt_tokens as u64)
        } else {
            "shorten the row".to_owned()
        };
        Err(format!(
            "the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together {over} more than the context of {context}: \
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
            Ok(out.write_str(&python::str(value)?)?)
        });
        environment.add_template_owned(ROW_TEMPLATE, source.to_owned()).map_err(|error| error.to_string())?;
        let template = environment.get_template(ROW_TEMPLATE).map_err(|error| error.to_string())?;
        let globals: Vec<String> = environment.globals().map(|(name, _)| name.to_owned()).collect();
        let mut columns: Vec<String> =
            template.undeclared_variables(false).into_iter().filter(|name| !globals.contains(name)).collect();
        columns.sort();
        Ok(Self { environment, columns })
    }

    fn render<'a>(&self, columns: &'a Map<String, Value>, mark: impl Fn(&'a str) -> Cow<'a, str>) -> Result<String, String> {
        // Only what the template can ask for: rows may have large columns beside.
        let asked = self.columns.iter().filter_map(|name| columns.get_key_value(name));
        let variables = minijinja::Value::from_pairs(asked.map(|(name, value)| (name.as_str(), marked_value(value, &mark))));
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

fn marked_value<'a>(value: &'a Value, mark: &impl Fn(&'a str) -> Cow<'a, str>) -> minijinja::Value {
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
#[path = "prompter_tests.rs"]
mod tests;
