//! A tokenizer rebuilt from GGUF metadata, equal to the model's own `tokenizer.json`.
//!
//! Keys and token types: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer>. Pre-tokenizers by name: llama.cpp's
//! `llama-vocab.cpp`; their definitions: the `tokenizer.json` of the models that they were made for.

use thiserror::Error;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{Prepend, Replace, unicode::NFC};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer, decoders, normalizers, pre_tokenizers,
};

use crate::model::gguf::{Array, Gguf, Value};

/// `tokenizer.ggml.token_type`.
const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// The longest in use, of 128 bytes, has 256 as it is spelled.
const TOKEN_BYTES_MAX: usize = 1024;

/// The space that SentencePiece writes.
const SPACE: &str = "\u{2581}";

const LLAMA3: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

#[derive(Debug, Error)]
pub enum VocabularyError {
    #[error("it has no {key}")]
    Missing { key: &'static str },
    #[error("its tokenizer {name:?} is not yet supported; gpt2 and llama are: use a folder with tokenizer.json")]
    Kind { name: String },
    #[error("its pre-tokenizer {name:?} is not yet supported; these are: {known}: use a folder with tokenizer.json")]
    PreTokenizer { name: String, known: String },
    #[error("{key} has {found} entries for {tokens} tokens")]
    Length { key: &'static str, found: usize, tokens: usize },
    #[error("the token {id} has {bytes} bytes; tokens have {TOKEN_BYTES_MAX} at most")]
    Long { id: usize, bytes: usize },
    #[error("the merge {merge:?} is not two tokens with a space between them")]
    Merge { merge: String },
    #[error("the token {id} is named by {key}, and the vocabulary has {tokens} tokens")]
    Id { key: String, id: u64, tokens: usize },
    #[error("{reason}")]
    Build { reason: String },
}

/// How a byte-level vocabulary cuts text before merging.
struct PreTokenizer {
    /// As `tokenizer.ggml.pre` names them.
    names: &'static [&'static str],
    cut: Cut,
    /// Composes characters first, as the family's tokenizer.json does.
    compose: bool,
    /// A word that is a token is that token, whatever the merges say.
    ignore_merges: bool,
    /// Whether the first token of a text is `<bos>` where the file does not say.
    bos: bool,
}

enum Cut {
    /// The pattern of GPT-2.
    Gpt2,
    /// Each digit by itself, then the pattern of GPT-2.
    DigitsThenGpt2,
    Pattern(&'static str),
}

#[rustfmt::skip]
const PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer { names: &["smollm"], cut: Cut::DigitsThenGpt2, compose: false, ignore_merges: false, bos: false },
    PreTokenizer { names: &["llama-bpe", "llama3", "llama-v3"], cut: Cut::Pattern(LLAMA3), compose: false, ignore_merges: true, bos: true },
    PreTokenizer { names: &["qwen2", "deepseek-r1-qwen"], cut: Cut::Pattern(QWEN2), compose: true, ignore_merges: false, bos: false },
    PreTokenizer { names: &["gpt-2", "gpt2", "default"], cut: Cut::Gpt2, compose: false, ignore_merges: false, bos: false },
];

/// Builds the tokenizer that the metadata describe.
pub(super) fn from_gguf(gguf: &Gguf) -> Result<Tokenizer, VocabularyError> {
    let kind = gguf.string("tokenizer.ggml.model").ok_or(VocabularyError::Missing { key: "tokenizer.ggml.model" })?;
    let metadata = Metadata::new(gguf)?;
    let (mut tokenizer, bos) = match kind {
        "gpt2" => metadata.byte_level()?,
        "llama" => metadata.sentence_piece()?,
        other => return Err(VocabularyError::Kind { name: other.to_owned() }),
    };
    metadata.add_tokens(&mut tokenizer, kind)?;
    if gguf.bool("tokenizer.ggml.add_bos_token").unwrap_or(bos)
        && let Some(id) = metadata.named_token("bos")?
    {
        let token = metadata.tokens[id].clone();
        let ids = u32::try_from(id).unwrap_or(u32::MAX);
        let processor = TemplateProcessing::builder()
            .try_single(vec![token.clone(), "$A".to_owned()])
            .map_err(|error| build_error(&error))?
            .try_pair(vec![token.clone(), "$A".to_owned(), "$B:1".to_owned()])
            .map_err(|error| build_error(&error))?
            .special_tokens(vec![(token, ids)])
            .build()
            .map_err(|error| build_error(&error.to_string()))?;
        tokenizer.with_post_processor(Some(processor));
    }
    Ok(tokenizer)
}

fn build_error(error: &dyn std::fmt::Display) -> VocabularyError {
    VocabularyError::Build { reason: error.to_string() }
}

struct Metadata<'a> {
    gguf: &'a Gguf,
    tokens: &'a [String],
    types: Vec<i64>,
}

impl<'a> Metadata<'a> {
    fn new(gguf: &'a Gguf) -> Result<Self, VocabularyError> {
        let key = "tokenizer.ggml.tokens";
        let tokens = gguf.strings(key).filter(|tokens| !tokens.is_empty()).ok_or(VocabularyError::Missing { key })?;
        if let Some((id, token)) = tokens.iter().enumerate().find(|(_, token)| token.len() > TOKEN_BYTES_MAX) {
            return Err(VocabularyError::Long { id, bytes: token.len() });
        }
        let key = "tokenizer.ggml.token_type";
        let types = match gguf.metadata.get(key) {
            Some(Value::Array(Array::Signed(types))) => types.clone(),
            Some(Value::Array(Array::Unsigned(types))) => types.iter().map(|&kind| kind as i64).collect(),
            _ => vec![NORMAL; tokens.len()],
        };
        if types.len() != tokens.len() {
            return Err(VocabularyError::Length { key, found: types.len(), tokens: tokens.len() });
        }
        Ok(Self { gguf, tokens, types })
    }

    /// The position of the token that `tokenizer.ggml.NAME_token_id` names.
    fn named_token(&self, name: &str) -> Result<Option<usize>, VocabularyError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = self.gguf.unsigned(&key) else { return Ok(None) };
        match usize::try_from(id).ok().filter(|&id| id < self.tokens.len()) {
            Some(position) => Ok(Some(position)),
            None => Err(VocabularyError::Id { key, id, tokens: self.tokens.len() }),
        }
    }

    fn byte_level(&self) -> Result<(Tokenizer, bool), VocabularyError> {
        // Files from before this key was there have it as `default`.
        let name = self.gguf.string("tokenizer.ggml.pre").unwrap_or("default");
        let Some(pre_tokenizer) = PRE_TOKENIZERS.iter().find(|pre_tokenizer| pre_tokenizer.names.contains(&name)) else {
            let known = PRE_TOKENIZERS.iter().flat_map(|known| known.names).copied().collect::<Vec<_>>().join(", ");
            return Err(VocabularyError::PreTokenizer { name: name.to_owned(), known });
        };
        let key = "tokenizer.ggml.merges";
        let merges = self.gguf.strings(key).ok_or(VocabularyError::Missing { key })?;
        let merges: Vec<(String, String)> = merges.iter().map(|merge| parse_merge(merge)).collect::<Result<_, _>>()?;
        let vocabulary: Vec<String> = self
            .tokens
            .iter()
            .zip(&self.types)
            .map(|(token, &kind)| if kind == USER_DEFINED || kind == CONTROL { token.clone() } else { spelled_in_bytes(token) })
            .collect();
        let model = BPE::builder()
            .vocab_and_merges(ids_by_token(vocabulary), merges)
            .ignore_merges(pre_tokenizer.ignore_merges)
            .build()
            .map_err(|error| build_error(&error))?;
        let mut tokenizer = Tokenizer::new(model);
        if pre_tokenizer.compose {
            tokenizer.with_normalizer(Some(NFC)).map_err(|error| build_error(&error))?;
        }
        let by_bytes = |use_regex| PreTokenizerWrapper::from(ByteLevel::new(false, false, use_regex));
        let steps = match pre_tokenizer.cut {
            Cut::Gpt2 => vec![by_bytes(true)],
            Cut::DigitsThenGpt2 => vec![Digits::new(true).into(), by_bytes(true)],
            Cut::Pattern(pattern) => {
                let pattern = SplitPattern::Regex(pattern.to_owned());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(|error| build_error(&error))?;
                vec![split.into(), by_bytes(false)]
            }
        };
        tokenizer.with_pre_tokenizer(Some(pre_tokenizers::sequence::Sequence::new(steps)));
        tokenizer.with_decoder(Some(ByteLevel::new(false, false, false)));
        Ok((tokenizer, pre_tokenizer.bos))
    }

    fn sentence_piece(&self) -> Result<(Tokenizer, bool), VocabularyError> {
        let key = "tokenizer.ggml.scores";
        let scores = match self.gguf.metadata.get(key) {
            Some(Value::Array(Array::Float(scores))) => scores,
            _ => return Err(VocabularyError::Missing { key }),
        };
        if scores.len() != self.tokens.len() {
            return Err(VocabularyError::Length { key, found: scores.len(), tokens: self.tokens.len() });
        }
        let pieces: Vec<String> = self.tokens.iter().zip(&self.types).map(|(token, &kind)| piece(token, kind)).collect();
        let vocabulary = ids_by_token(pieces.clone());
        let merges = merges_by_score(&pieces, &self.types, scores, &vocabulary);
        let byte_fallback = self.types.contains(&BYTE);
        let mut model = BPE::builder().vocab_and_merges(vocabulary, merges).fuse_unk(true).byte_fallback(byte_fallback);
        let unknown = self.named_token("unknown")?.or_else(|| self.types.iter().position(|&kind| kind == UNKNOWN));
        if let Some(unknown) = unknown {
            model = model.unk_token(self.tokens[unknown].clone());
        }
        let mut tokenizer = Tokenizer::new(model.build().map_err(|error| build_error(&error))?);

        let prefix = self.gguf.bool("tokenizer.ggml.add_space_prefix").unwrap_or(true);
        let to_space = Replace::new(" ", SPACE).map_err(|error| build_error(&error))?;
        let mut steps: Vec<NormalizerWrapper> = vec![to_space.into()];
        if prefix {
            steps.insert(0, Prepend::new(SPACE.to_owned()).into());
        }
        tokenizer.with_normalizer(Some(normalizers::Sequence::new(steps))).map_err(|error| build_error(&error))?;

        let from_space = Replace::new(SPACE, " ").map_err(|error| build_error(&error))?;
        let mut steps: Vec<DecoderWrapper> = vec![from_space.into(), ByteFallback::new().into(), Fuse::new().into()];
        if prefix {
            steps.push(Strip::new(' ', 1, 0).into());
        }
        tokenizer.with_decoder(Some(decoders::sequence::Sequence::new(steps)));
        Ok((tokenizer, true))
    }

    /// Control tokens become special tokens, user-defined ones plain added tokens; both are found in text as they are.
    fn add_tokens(&self, tokenizer: &mut Tokenizer, kind: &str) -> Result<(), VocabularyError> {
        let mut special = Vec::new();
        let mut plain = Vec::new();
        for (token, &token_type) in self.tokens.iter().zip(&self.types) {
            if token.is_empty() {
                continue;
            }
            match token_type {
                CONTROL | UNKNOWN => special.push(AddedToken::from(token.clone(), true).normalized(false)),
                USER_DEFINED => {
                    let token = if kind == "llama" { piece(token, token_type) } else { token.clone() };
                    plain.push(AddedToken::from(token, false).normalized(false));
                }
                _ => {}
            }
        }
        tokenizer.add_tokens(plain).map_err(|error| build_error(&error))?;
        tokenizer.add_special_tokens(special).map_err(|error| build_error(&error))?;
        Ok(())
    }
}

/// Ids are positions; of two equal tokens the first counts.
fn ids_by_token(tokens: Vec<String>) -> Vocab {
    let mut ids = Vocab::default();
    for (id, token) in (0u32..).zip(tokens) {
        ids.entry(token).or_insert(id);
    }
    ids
}

/// `left right`; the left one may itself be a space.
fn parse_merge(merge: &str) -> Result<(String, String), VocabularyError> {
    let wrong = || VocabularyError::Merge { merge: merge.to_owned() };
    let first = merge.chars().next().ok_or_else(wrong)?.len_utf8();
    let at = merge[first..].find(' ').ok_or_else(wrong)? + first;
    let (left, right) = (&merge[..at], &merge[at + 1..]);
    if right.is_empty() { Err(wrong()) } else { Ok((left.to_owned(), right.to_owned())) }
}

/// GPT-2's letters for the 256 bytes: printable ones stand for themselves, the others are counted up from U+0100.
fn byte_letters() -> [char; 256] {
    let mut next = 0x100u32;
    std::array::from_fn(|byte| match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from(byte as u8),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    })
}

/// A token in the byte alphabet; converters leave a few as plain text.
fn spelled_in_bytes(token: &str) -> String {
    let letters = byte_letters();
    if token.chars().all(|c| letters.contains(&c)) {
        return token.to_owned();
    }
    token.bytes().map(|byte| letters[usize::from(byte)]).collect()
}

/// llama.cpp's converter writes user-defined runs of SentencePiece spaces as plain ones.
fn piece(token: &str, kind: i64) -> String {
    if kind == USER_DEFINED && !token.is_empty() && token.chars().all(|c| c == ' ') {
        return SPACE.repeat(token.len());
    }
    token.to_owned()
}

/// The merges that a SentencePiece vocabulary implies: every way to make a token of two others, best score first, then longest
/// left part first. Tokens that are not normal have a score of 0 in SentencePiece's own model; converters write other numbers.
fn merges_by_score(pieces: &[String], types: &[i64], scores: &[f64], ids: &Vocab) -> Vec<(String, String)> {
    let mut merges: Vec<(f64, usize, usize, &str, &str)> = Vec::new();
    for ((token, &kind), &score) in pieces.iter().zip(types).zip(scores) {
        let score = if kind == NORMAL { score } else { 0.0 };
        let length = token.chars().count();
        for (left_length, (at, _)) in token.char_indices().enumerate().skip(1) {
            let (left, right) = token.split_at(at);
            if ids.contains_key(left) && ids.contains_key(right) {
                merges.push((score, left_length, length - left_length, left, right));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)).then(b.2.cmp(&a.2)));
    merges.into_iter().map(|(.., left, right)| (left.to_owned(), right.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_byte_letters_are_gpt2s() {
        let letters = byte_letters();
        assert_eq!((letters[b' ' as usize], letters[b'\n' as usize], letters[b'A' as usize], letters[0xad]), ('Ġ', 'Ċ', 'A', 'Ń'));
        assert_eq!(letters.iter().collect::<std::collections::HashSet<_>>().len(), 256);
    }

    #[test]
    fn merges_are_cut_at_the_space_between() {
        assert_eq!(parse_merge("Ġ t").unwrap(), ("Ġ".to_owned(), "t".to_owned()));
        assert_eq!(parse_merge("  a").unwrap(), (" ".to_owned(), "a".to_owned()));
        for bad in ["", "a", "a ", " "] {
            assert!(parse_merge(bad).is_err(), "{bad:?}");
        }
    }

    fn gguf(entries: Vec<(&str, Value)>) -> Gguf {
        let metadata: BTreeMap<String, Value> =
            entries.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect();
        Gguf { file: "m.gguf".into(), version: 3, metadata, tensors: vec![], data_offset: 0, file_bytes: 0 }
    }

    fn strings(values: &[&str]) -> Value {
        Value::Array(Array::String(values.iter().map(|value| (*value).to_owned()).collect()))
    }

    #[test]
    fn what_is_unknown_is_named() {
        let message = |entries| from_gguf(&gguf(entries)).unwrap_err().to_string();
        let text = |value: &str| Value::String(value.to_owned());
        assert!(message(vec![]).contains("no tokenizer.ggml.model"));
        assert!(message(vec![("model", text("gpt2"))]).contains("no tokenizer.ggml.tokens"));
        assert!(message(vec![("model", text("t5")), ("tokens", strings(&["a"]))]).contains("\"t5\" is not yet supported"));
        let pre = vec![("model", text("gpt2")), ("pre", text("viking")), ("tokens", strings(&["a"]))];
        assert!(message(pre).contains("pre-tokenizer \"viking\" is not yet supported; these are: smollm, llama-bpe"));
        let types =
            vec![("model", text("gpt2")), ("tokens", strings(&["a"])), ("token_type", Value::Array(Array::Signed(vec![1, 1])))];
        assert!(message(types).contains("token_type has 2 entries for 1 tokens"));
        let bos = vec![
            ("model", text("gpt2")),
            ("tokens", strings(&["a"])),
            ("merges", strings(&[])),
            ("add_bos_token", Value::Bool(true)),
            ("bos_token_id", Value::Unsigned(7)),
        ];
        let long = vec![("model", text("llama")), ("tokens", strings(&["a", &"x".repeat(2000)]))];
        assert!(message(long).contains("the token 1 has 2000 bytes"));
        assert!(message(bos).contains("token 7 is named by tokenizer.ggml.bos_token_id"));
    }

    /// Llama 2's way in small: a space before every text, bytes for what the vocabulary lacks, `<s>` before all.
    #[test]
    fn sentence_pieces_with_a_space_before() {
        let tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "ab", "▁a", "▁ab"];
        let types = vec![UNKNOWN, CONTROL, CONTROL, BYTE, BYTE, 1, 1, 1, 1, 1, 1];
        let scores = vec![0.0, 0.0, 0.0, 0.0, 0.0, -5.0, -6.0, -7.0, -2.0, -1.0, -3.0];
        let tokenizer = from_gguf(&gguf(vec![
            ("model", Value::String("llama".into())),
            ("tokens", strings(&tokens)),
            ("token_type", Value::Array(Array::Signed(types))),
            ("scores", Value::Array(Array::Float(scores))),
            ("bos_token_id", Value::Unsigned(1)),
            ("unknown_token_id", Value::Unsigned(0)),
        ]))
        .unwrap();
        let encode = |text: &str, special| tokenizer.encode_fast(text, special).unwrap().get_ids().to_vec();
        // "▁a" has a better score than "ab", and "▁ab" is then made of "▁a" and "b".
        assert_eq!(encode("ab", true), [1, 10]);
        assert_eq!(encode("bab", false), [5, 7, 8]);
        assert_eq!(encode("é", false), [5, 3, 4]);
        assert_eq!(encode("</s>a", false), [2, 9]);
        assert_eq!(tokenizer.decode(&[1, 10, 5, 3, 4], true).unwrap(), "ab é");
    }
}
