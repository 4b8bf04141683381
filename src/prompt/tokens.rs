//! Text into token ids and back.

use aho_corasick::{AhoCorasick, MatchKind};
use std::borrow::Cow;
use std::str::FromStr;

use thiserror::Error;
use tokenizers::tokenizer::pre_tokenizer::{OffsetType, PreTokenizedString};
use tokenizers::{Model as _, NormalizedString, Normalizer as _, OffsetReferential, PreTokenizer as _, Tokenizer};

use super::conversation::map_texts;
use super::template::{Content, Message, Part};
use super::vocabulary::{self, VocabularyError};
use crate::model::gguf::Gguf;
use crate::model::{ModelError, ModelFiles};

/// Around a control token that came from a row. Noncharacters, which Unicode keeps for use inside a program: text loses them.
const MARK_START: char = '\u{fdd0}';
const MARK_END: char = '\u{fdd1}';
/// Behind the first character of a special token, so that one whose marks a template cut off is still no token.
const MARK_INSIDE: char = '\u{fdd2}';
const MARKS: [char; 3] = [MARK_START, MARK_END, MARK_INSIDE];

#[derive(Debug, Error)]
pub enum TokensError {
    #[error("{model} has no tokenizer.json: convert its tokenizer, for example with transformers' save_pretrained")]
    NoTokenizer { model: String },
    #[error("the tokenizer of {model} cannot be used: {reason}")]
    Tokenizer { model: String, reason: String },
    #[error("the tokenizer of {model} cannot be rebuilt from its metadata: {source}")]
    Vocabulary { model: String, source: VocabularyError },
    #[error("the text cannot be tokenized: {reason}")]
    Encode { reason: String },
    #[error("the text contains {token:?}, a control token that this tokenizer cannot write as ordinary text: reword it")]
    Control { token: String },
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// A tokenizer. Shared by threads.
#[derive(Debug)]
pub struct Tokens {
    kind: Kind,
    /// Finds control tokens in a row's text.
    control: Option<AhoCorasick>,
    /// Its patterns, sorted, and whether each is a special token.
    control_texts: Vec<(String, bool)>,
}

#[derive(Debug)]
enum Kind {
    /// Byte values, and 256 for the end.
    Bytes,
    Model(Box<Tokenizer>),
}

impl Tokens {
    /// The id that ends a sequence of [`Tokens::bytes`].
    pub const BYTES_END: u32 = 256;

    /// The tokenizer of the `fake` model: a token a byte.
    pub fn bytes() -> Self {
        Self { kind: Kind::Bytes, control: None, control_texts: Vec::new() }
    }

    /// The tokenizer that comes with the model: `tokenizer.json`, or rebuilt from GGUF metadata.
    ///
    /// `template` is the source of the chat template. Its control tokens, which a row's own text must not write, are all special
    /// tokens and those other added tokens that the template itself writes: transformers' rule (`_get_control_tokens`).
    pub fn of_model(files: &ModelFiles, template: Option<&str>) -> Result<Self, TokensError> {
        let model = || files.name.clone();
        if let Some(gguf) = files.gguf() {
            return Self::from_gguf(gguf, template);
        }
        let json = files.side_file("tokenizer.json")?.ok_or_else(|| TokensError::NoTokenizer { model: model() })?;
        Self::from_json(&json, template).map_err(|reason| TokensError::Tokenizer { model: model(), reason })
    }

    /// The tokenizer that a GGUF header describes; `template` as for [`Tokens::of_model`].
    pub fn from_gguf(gguf: &Gguf, template: Option<&str>) -> Result<Self, TokensError> {
        let model = || gguf.file.display().to_string();
        let tokenizer = vocabulary::from_gguf(gguf).map_err(|source| TokensError::Vocabulary { model: model(), source })?;
        Self::new(tokenizer, template).map_err(|reason| TokensError::Tokenizer { model: model(), reason })
    }

    /// The tokenizer that the text of a `tokenizer.json` describes; `template` as for [`Tokens::of_model`].
    pub fn from_json(json: &str, template: Option<&str>) -> Result<Self, String> {
        let tokenizer = Tokenizer::from_str(json).map_err(|error| format!("tokenizer.json: {error}"))?;
        Self::new(tokenizer, template)
    }

    fn new(mut tokenizer: Tokenizer, template: Option<&str>) -> Result<Self, String> {
        // Some tokenizer.json files cut and pad for training.
        tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
        tokenizer.with_padding(None);
        let added = tokenizer.get_added_tokens_decoder();
        let mut control_texts: Vec<(String, bool)> = added
            .values()
            .filter(|token| {
                let written = |template: &str| template.contains(&token.content);
                let blank = token.content.chars().all(super::python::is_space);
                !token.content.is_empty() && (token.special || (!blank && template.is_some_and(written)))
            })
            .map(|token| (token.content.clone(), token.special))
            .collect();
        control_texts.sort();
        let control = if control_texts.is_empty() {
            None
        } else {
            let automaton =
                AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(control_texts.iter().map(|(text, _)| text));
            Some(automaton.map_err(|error| format!("its control tokens: {error}"))?)
        };
        Ok(Self { kind: Kind::Model(Box::new(tokenizer)), control, control_texts })
    }

    /// Wraps the control tokens in a row's text in marks, so that [`Tokens::encode_marked`] writes them as ordinary text. Marks
    /// already in the text are dropped.
    pub fn mark<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let text = if text.contains(MARKS) { Cow::Owned(text.replace(MARKS, "")) } else { Cow::Borrowed(text) };
        let Some(control) = &self.control else { return text };
        if control.find(text.as_bytes()).is_none() {
            return text;
        }
        let mut marked = String::with_capacity(text.len() + 32);
        let mut done = 0;
        for found in control.find_iter(text.as_bytes()) {
            marked.push_str(&text[done..found.start()]);
            marked.push(MARK_START);
            let token = &text[found.range()];
            let special = self.control_texts.get(found.pattern().as_usize()).is_none_or(|(_, special)| *special);
            let first = token.chars().next().filter(|_| special).map_or(0, char::len_utf8);
            marked.push_str(&token[..first]);
            // A template may look for other tokens in what it is given, as Qwen's looks for the end of an answer's reasoning.
            if special {
                marked.push(MARK_INSIDE);
            }
            marked.push_str(&token[first..]);
            marked.push(MARK_END);
            done = found.end();
        }
        marked.push_str(&text[done..]);
        Cow::Owned(marked)
    }

    /// [`Tokens::mark`] for every string of a conversation.
    ///
    /// Templates join the parts of a message, often trimmed: parts that would make a control token together are kept apart.
    pub fn mark_messages(&self, messages: &mut [Message]) {
        map_texts(messages, |text| self.mark(text));
        for message in messages {
            if let Content::Parts(parts) = &mut message.content
                && self.join_into_control(parts)
            {
                parts.iter_mut().filter_map(Part::text_mut).for_each(|text| text.insert(0, MARK_START));
            }
        }
    }

    /// Whether a control token would span two parts, written one after the other as they are or trimmed.
    fn join_into_control(&self, parts: &[Part]) -> bool {
        let Some(control) = self.control.as_ref().filter(|_| parts.len() > 1) else { return false };
        let spans = |text: fn(&str) -> &str| {
            let mut joined = String::new();
            let mut ends = Vec::with_capacity(parts.len());
            for part in parts {
                joined.push_str(text(&Self::unmarked(part.text())));
                ends.push(joined.len());
            }
            control.find_iter(&joined).any(|found| ends.iter().any(|&end| found.start() < end && end < found.end()))
        };
        spans(|text| text) || spans(str::trim)
    }

    /// The text without its marks.
    pub fn unmarked(text: &str) -> Cow<'_, str> {
        if text.contains(MARKS) { Cow::Owned(text.replace(MARKS, "")) } else { Cow::Borrowed(text) }
    }

    /// A marked text with `around` each control token that is text of a row, and without marks; none where there is none.
    pub fn typed(text: &str, around: [&str; 2]) -> Option<String> {
        let (mut shown, mut any, mut rest) = (String::new(), false, text);
        while let Some(start) = rest.find(MARK_START) {
            let (before, inside) = (&rest[..start], &rest[start + MARK_START.len_utf8()..]);
            shown.push_str(&Self::unmarked(before));
            rest = inside;
            // Parts that are kept apart begin with a mark that nothing ends.
            if let Some(end) = inside.find([MARK_START, MARK_END])
                && let Some(after) = inside[end..].strip_prefix(MARK_END)
            {
                any = true;
                shown.extend([around[0], &Self::unmarked(&inside[..end]), around[1]]);
                rest = after;
            }
        }
        shown.push_str(&Self::unmarked(rest));
        any.then_some(shown)
    }

    /// Ids of a text whose control tokens mean what they say. `add_special_tokens` puts those around it that the tokenizer puts
    /// around every text, `<bos>` for one.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokensError> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Model(tokenizer) => {
                let encoding = tokenizer.encode_fast(text, add_special_tokens).map_err(encode_error)?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Ids of a text in which marked control tokens are ordinary text and the others mean what they say.
    ///
    /// As transformers' `encode_marked_chat`: pieces between marks are encoded by themselves. A piece that is not the first is
    /// encoded behind a newline, which is then taken off again, since some tokenizers put a space before a text's start.
    pub fn encode_marked(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokensError> {
        let Kind::Model(tokenizer) = &self.kind else {
            return self.encode(&Self::unmarked(text), add_special_tokens);
        };
        let Some(first) = text.find(MARKS) else {
            return self.encode(text, add_special_tokens);
        };
        let mut ids = self.encode(&text[..first], add_special_tokens)?;
        let newline = self.encode("\n", false)?;
        let mut rest = &text[first..];
        while let Some(mark) = rest.chars().next() {
            rest = &rest[mark.len_utf8()..];
            if mark == MARK_START
                && let Some((inside, after)) = rest.split_once(MARK_END)
                && let token = inside.replacen(MARK_INSIDE, "", 1)
                && self.is_control(&token)
            {
                let token_ids = behind_newline(&token, &newline, |text| encode_plain(tokenizer, text))?;
                if tokenizer.token_to_id(&token).is_some_and(|id| token_ids.contains(&id)) {
                    return Err(TokensError::Control { token });
                }
                ids.extend(token_ids);
                rest = after;
            }
            // A mark alone is left of a pair that the template parted, and still parts the text.
            let (piece, after) = rest.split_at(rest.find(MARKS).unwrap_or(rest.len()));
            if !piece.is_empty() {
                ids.extend(behind_newline(piece, &newline, |text| self.encode(text, false))?);
            }
            rest = after;
        }
        Ok(ids)
    }

    fn is_control(&self, text: &str) -> bool {
        self.control_texts.binary_search_by(|(control, _)| control.as_str().cmp(text)).is_ok()
    }

    /// The text of a whole sequence, special tokens left out.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            // A decoder fails on no ids; were one to, the sequence has no text rather than the run an end.
            Kind::Model(tokenizer) => tokenizer.decode(ids, true).unwrap_or_default(),
        }
    }

    /// The text of what the tokenizer puts before every text, if it puts anything there.
    pub(super) fn text_start(&self) -> Result<Option<String>, TokensError> {
        let Kind::Model(tokenizer) = &self.kind else { return Ok(None) };
        let with = self.encode("", true)?;
        Ok(with.first().and_then(|&id| tokenizer.id_to_token(id)))
    }

    /// Whether these are [`Tokens::bytes`].
    pub(super) fn is_bytes(&self) -> bool {
        matches!(self.kind, Kind::Bytes)
    }

    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::Model(tokenizer) => tokenizer.token_to_id(token),
        }
    }

    pub fn id_to_token(&self, id: u32) -> Option<String> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::Model(tokenizer) => tokenizer.id_to_token(id),
        }
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> u32 {
        match &self.kind {
            Kind::Bytes => Self::BYTES_END + 1,
            Kind::Model(tokenizer) => u32::try_from(tokenizer.get_vocab_size(true)).unwrap_or(u32::MAX),
        }
    }
}

fn encode_error(error: tokenizers::Error) -> TokensError {
    TokensError::Encode { reason: error.to_string() }
}

fn behind_newline(
    piece: &str,
    newline: &[u32],
    encode: impl Fn(&str) -> Result<Vec<u32>, TokensError>,
) -> Result<Vec<u32>, TokensError> {
    let ids = encode(&format!("\n{piece}"))?;
    match ids.strip_prefix(newline) {
        Some(ids) => Ok(ids.to_vec()),
        None => encode(piece),
    }
}

/// Runs the tokenizer without its added tokens.
fn encode_plain(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, TokensError> {
    let mut normalized = NormalizedString::from(text);
    if let Some(normalizer) = tokenizer.get_normalizer() {
        normalizer.normalize(&mut normalized).map_err(encode_error)?;
    }
    let mut pieces = PreTokenizedString::from(normalized);
    if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut pieces).map_err(encode_error)?;
    }
    let model = tokenizer.get_model();
    pieces.tokenize(|piece| model.tokenize(piece.get())).map_err(encode_error)?;
    let splits = pieces.get_splits(OffsetReferential::Normalized, OffsetType::None);
    Ok(splits.into_iter().flat_map(|(_, _, tokens)| tokens.iter().flatten().map(|token| token.id)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back() {
        let tokens = Tokens::bytes();
        let text = "a\u{fdd0}é🙂\n";
        let ids = tokens.encode(text, true).unwrap();
        assert_eq!(ids.len(), text.len());
        assert_eq!(tokens.decode(&ids), text);
        assert_eq!(tokens.decode(&[104, 105, Tokens::BYTES_END]), "hi");
        assert_eq!(tokens.encode_marked(&tokens.mark(text), true).unwrap(), "aé🙂\n".bytes().map(u32::from).collect::<Vec<_>>());
    }
}
