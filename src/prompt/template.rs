//! A model's chat template, rendered byte for byte as transformers renders it.
//!
//! Reference: transformers' `utils/chat_template_utils.py` (`_cached_compile_jinja_template`, `render_jinja_template`) on jinja2.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior};
use serde::Serialize;
use serde_json::Value as Json;
use thiserror::Error;

use super::python;
use crate::model::{ModelError, ModelFiles, token_text};

/// Steps of a rendering: templates come from the hub, and must not loop for ever.
const FUEL: u64 = 50_000_000;
/// The longest template in use has 20 kB.
const SOURCE_BYTES_MAX: usize = 1 << 20;
const NAME: &str = "chat template";

/// The names transformers gives to special tokens, each a variable of the template.
const SPECIAL_TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

#[derive(Debug, Error)]
pub enum TemplateError {
    #[error("the chat template of {model} cannot be used: {reason}")]
    Source { model: String, reason: String },
    #[error("the model's chat template refuses this conversation: {reason}")]
    Refused { reason: String },
    #[error("the model's chat template fails on this conversation: {reason}")]
    Failed { reason: String },
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// One message of a conversation as the template sees it, in the order transformers users write the keys.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Message {
    /// The same as `reasoning_content`, for templates that read it under this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thinking: Option<String>,
    pub role: String,
    pub content: Content,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}

impl Message {
    /// A message of text alone.
    pub fn text(role: &str, text: String) -> Self {
        Self { thinking: None, role: role.to_owned(), content: Content::Text(text), name: None, reasoning_content: None }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// `{"type": "text", "text": …}`, or the place of a medium, `{"type": "image"}`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Part {
    Text { text: String },
    Image,
    Audio,
}

impl Part {
    /// Empty for a medium.
    pub fn text(&self) -> &str {
        match self {
            Self::Text { text } => text,
            Self::Image | Self::Audio => "",
        }
    }

    pub(super) fn text_mut(&mut self) -> Option<&mut String> {
        match self {
            Self::Text { text } => Some(text),
            Self::Image | Self::Audio => None,
        }
    }
}

/// A compiled template and the special tokens it may write. Shared by threads.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: Vec<(&'static str, String)>,
    source: String,
}

impl ChatTemplate {
    /// The template that comes with the model; `None` where it has none.
    ///
    /// In transformers' order: `chat_template.jinja`, then `chat_template.json`, then `tokenizer_config.json`, whose list form
    /// gives the one named `default`; of a GGUF file, `tokenizer.chat_template`.
    pub fn of_model(files: &ModelFiles) -> Result<Option<Self>, TemplateError> {
        let Some(source) = source_of(files)? else { return Ok(None) };
        Self::new(&source, special_tokens(files)?, &files.name).map(Some)
    }

    pub fn new(source: &str, special_tokens: Vec<(&'static str, String)>, model: &str) -> Result<Self, TemplateError> {
        let unusable = |reason: String| TemplateError::Source { model: model.to_owned(), reason };
        if source.len() > SOURCE_BYTES_MAX {
            return Err(unusable(format!("it has {} bytes, more than {SOURCE_BYTES_MAX}", source.len())));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| unusable(error.to_string()))?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(python::method);
        environment.set_formatter(|out, _state, value| Ok(out.write_str(&python::str(value)?)?));
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("trim", python::trim);
        environment.add_filter("string", |value: &Value| python::str(value));
        environment.add_test("sequence", |value: &Value| {
            matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
        });
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        let compiled = without_generation_tags(source);
        environment.add_template_owned(NAME, compiled).map_err(|error| unusable(error.to_string()))?;
        Ok(Self { environment, special_tokens, source: source.to_owned() })
    }

    /// The prompt of a conversation, ending where the model's answer begins.
    pub fn render(&self, messages: &[Message], enable_thinking: bool) -> Result<String, TemplateError> {
        self.render_with(&Value::from(Serde(messages)), true, Some(enable_thinking))
    }

    /// [`Self::render`] with all that transformers' `apply_chat_template` is given.
    pub fn render_with(
        &self,
        messages: &Value,
        add_generation_prompt: bool,
        enable_thinking: Option<bool>,
    ) -> Result<String, TemplateError> {
        let tokens = self.special_tokens.iter().map(|(name, token)| (*name, Value::from(token.as_str())));
        let given = [
            ("messages", messages.clone()),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ];
        let thinking = enable_thinking.map(|thinking| ("enable_thinking", Value::from(thinking)));
        let variables = Value::from_pairs(tokens.chain(given).chain(thinking));
        let template = self.environment.get_template(NAME).map_err(failed)?;
        template.render(variables).map_err(failed)
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of a special token, `bos_token` for one.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.iter().find(|(known, _)| *known == name).map(|(_, token)| token.as_str())
    }
}

fn source_of(files: &ModelFiles) -> Result<Option<String>, TemplateError> {
    let unusable = |reason: String| TemplateError::Source { model: files.name.clone(), reason };
    if let Some(gguf) = files.gguf() {
        return Ok(gguf.string("tokenizer.chat_template").map(str::to_owned));
    }
    if let Some(source) = files.side_file("chat_template.jinja")? {
        return Ok(Some(source));
    }
    if let Some(text) = files.side_file("chat_template.json")? {
        let json: Json = serde_json::from_str(&text).map_err(|error| unusable(format!("chat_template.json: {error}")))?;
        if let Some(source) = json.get("chat_template").and_then(Json::as_str) {
            return Ok(Some(source.to_owned()));
        }
    }
    match files.tokenizer_config().get("chat_template") {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(source)) => Ok(Some(source.clone())),
        Some(Json::Array(named)) => {
            let pairs = named.iter().map(|entry| (entry.get("name"), entry.get("template").and_then(Json::as_str)));
            let pairs: Vec<(&str, &str)> = pairs.filter_map(|(name, template)| Some((name?.as_str()?, template?))).collect();
            match pairs.iter().find(|(name, _)| *name == "default") {
                Some((_, source)) => Ok(Some((*source).to_owned())),
                None => {
                    let names = pairs.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
                    Err(unusable(format!("none of those in tokenizer_config.json is named \"default\" (there are: {names})")))
                }
            }
        }
        Some(_) => Err(unusable("chat_template in tokenizer_config.json is neither a string nor a list".to_owned())),
    }
}

/// From `tokenizer_config.json`, or the older `special_tokens_map.json`; of a GGUF file, by the ids it names.
fn special_tokens(files: &ModelFiles) -> Result<Vec<(&'static str, String)>, TemplateError> {
    let mut found = Vec::new();
    if let Some(gguf) = files.gguf() {
        let tokens = gguf.strings("tokenizer.ggml.tokens").unwrap_or_default();
        for (name, key) in [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")] {
            let id = gguf.unsigned(&format!("tokenizer.ggml.{key}_token_id")).and_then(|id| usize::try_from(id).ok());
            if let Some(token) = id.and_then(|id| tokens.get(id)) {
                found.push((name, token.clone()));
            }
        }
        return Ok(found);
    }
    let older = files.side_file("special_tokens_map.json")?.unwrap_or_default();
    let older: Json = serde_json::from_str(&older).unwrap_or_default();
    for name in SPECIAL_TOKENS {
        let newer = files.tokenizer_config().get(name);
        if let Some(token) = newer.or_else(|| older.get(name)).and_then(token_text) {
            found.push((name, token.to_owned()));
        }
    }
    Ok(found)
}

/// `{% generation %}` marks what an assistant wrote, for training; it prints what is inside. minijinja has no tags of others'
/// making, so the tag becomes the scope without variables that jinja2 gives it.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        text.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inside = &tag[2..end];
        let word = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        match word {
            "generation" => text.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => text.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => text.push_str(tag),
        }
        rest = after;
    }
    text.push_str(rest);
    text
}

/// Marks an error that the template itself raised.
const RAISED: &str = "\u{0}raised: ";

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{}", python::str(message)?)))
}

fn strftime_now(_state: &State, format: &str) -> Result<String, Error> {
    let mut text = String::new();
    let now = jiff::ZonedDateTime::now();
    jiff::fmt::strtime::format(format, &now)
        .map(|formatted| text.push_str(&formatted))
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {error}")))?;
    Ok(text)
}

fn failed(error: Error) -> TemplateError {
    // A macro's error is wrapped once for each call.
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(link) = cause {
        let raised = link.downcast_ref::<Error>().and_then(Error::detail).and_then(|detail| detail.strip_prefix(RAISED));
        if let Some(reason) = raised {
            return TemplateError::Refused { reason: reason.to_owned() };
        }
        cause = link.source();
    }
    TemplateError::Failed { reason: error.to_string() }
}
