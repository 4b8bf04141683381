//! Text as its tokens come, and the strings that end it.

use super::tokens::Tokens;

/// A character is made of 4 bytes, and so of 4 tokens, at most; what is held back longer is not going to become one.
const HELD_TOKENS_MAX: usize = 8;

/// Turns one sequence's tokens into text as they come, whole characters alone.
///
/// For looking at a text that is not finished: what it gives, joined, is [`Tokens::decode`] of all tokens wherever the bytes are
/// UTF-8 and the text has no replacement characters of its own.
#[derive(Debug, Clone, Default)]
pub struct Detokenizer {
    /// The last tokens given out, for their effect on the next, and those held back.
    window: Vec<u32>,
    /// How many of `window` were given out.
    given: usize,
}

impl Detokenizer {
    /// Takes the next token, and returns the text that it completes, often none.
    pub fn push(&mut self, tokens: &Tokens, token: u32) -> String {
        self.window.push(token);
        let text = tokens.decode(&self.window);
        let held = self.window.len() - self.given;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && held < HELD_TOKENS_MAX {
            return String::new();
        }
        self.take(tokens, &text)
    }

    /// The text still held back at the end of the sequence.
    pub fn finish(&mut self, tokens: &Tokens) -> String {
        let text = tokens.decode(&self.window);
        self.take(tokens, &text)
    }

    fn take(&mut self, tokens: &Tokens, text: &str) -> String {
        let before = tokens.decode(&self.window[..self.given]);
        // A later token can change how bytes before it are read; then only what is longer is new.
        let new = match text.strip_prefix(&before) {
            Some(new) => new.to_owned(),
            None => text.chars().skip(before.chars().count()).collect(),
        };
        if new.is_empty() {
            // Special tokens have no text, and what follows them must not be read as the start of a text.
            return new;
        }
        self.window.drain(..self.given);
        self.given = self.window.len();
        new
    }
}

/// Looks for a job's stop strings in one sequence's text.
#[derive(Debug, Clone)]
pub struct StopStrings {
    detokenizer: Detokenizer,
    /// The end of the text so far, as much as can begin a stop string.
    tail: String,
    tail_bytes_max: usize,
}

impl StopStrings {
    pub fn new(stop: &[String]) -> Self {
        let longest = stop.iter().map(String::len).max().unwrap_or(0);
        Self { detokenizer: Detokenizer::default(), tail: String::new(), tail_bytes_max: longest.saturating_sub(1) }
    }

    /// Takes the next token, and says whether the text now has one of the stop strings, which may have begun many tokens ago.
    pub fn push(&mut self, tokens: &Tokens, stop: &[String], token: u32) -> bool {
        if stop.is_empty() {
            return false;
        }
        self.tail.push_str(&self.detokenizer.push(tokens, token));
        if find_stop(&self.tail, stop).is_some() {
            return true;
        }
        let mut cut = self.tail.len().saturating_sub(self.tail_bytes_max);
        while !self.tail.is_char_boundary(cut) {
            cut -= 1;
        }
        self.tail.drain(..cut);
        false
    }
}

/// Where the earliest stop string begins.
pub fn find_stop(text: &str, stop: &[String]) -> Option<usize> {
    stop.iter().filter(|stop| !stop.is_empty()).filter_map(|stop| text.find(stop.as_str())).min()
}

/// The result's text: special tokens left out, cut before the earliest stop string.
pub fn final_text(tokens: &Tokens, ids: &[u32], stop: &[String]) -> String {
    let mut text = tokens.decode(ids);
    if let Some(at) = find_stop(&text, stop) {
        text.truncate(at);
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    fn stops(stop: &[&str]) -> Vec<String> {
        stop.iter().map(|stop| (*stop).to_owned()).collect()
    }

    /// Index of the token that completes a stop string.
    fn stopped_at(text: &str, stop: &[&str]) -> Option<usize> {
        let (tokens, stop) = (Tokens::bytes(), stops(stop));
        let mut strings = StopStrings::new(&stop);
        bytes(text).into_iter().position(|token| strings.push(&tokens, &stop, token))
    }

    #[test]
    fn characters_come_whole() {
        let tokens = Tokens::bytes();
        let mut detokenizer = Detokenizer::default();
        let given: Vec<String> = bytes("aé🙂b").into_iter().map(|token| detokenizer.push(&tokens, token)).collect();
        assert_eq!(given, ["a", "", "é", "", "", "", "🙂", "b"]);
    }

    #[test]
    fn bytes_that_are_no_character_are_not_held_for_ever() {
        let tokens = Tokens::bytes();
        let mut detokenizer = Detokenizer::default();
        let mut text = String::new();
        for _ in 0..100 {
            text += &detokenizer.push(&tokens, 0xff);
            assert!(detokenizer.window.len() <= 2 * HELD_TOKENS_MAX);
        }
        text += &detokenizer.push(&tokens, u32::from(b'a'));
        assert!(text.ends_with('a') && text.chars().count() > 90, "{text:?}");
        let mut cut = Detokenizer::default();
        assert_eq!(cut.push(&tokens, 0xe2), "");
        assert_eq!(cut.finish(&tokens), "\u{fffd}");
    }

    #[test]
    fn stop_strings_span_tokens() {
        assert_eq!(stopped_at("one\n\ntwo", &["\n\n"]), Some(4));
        assert_eq!(stopped_at("one two", &["three", "two"]), Some(6));
        assert_eq!(stopped_at("aab", &["ab"]), Some(2));
        assert_eq!(stopped_at("naïve 🙂 end", &["🙂"]), Some("naïve 🙂".len() - 1));
        assert_eq!(stopped_at("nothing", &["x", ""]), None);
        assert_eq!(stopped_at("nothing", &[]), None);
    }

    #[test]
    fn the_text_is_cut_before_the_earliest() {
        let tokens = Tokens::bytes();
        let text = |text: &str, stop: &[&str]| final_text(&tokens, &bytes(text), &stops(stop));
        assert_eq!(text("one two three", &["three", "two"]), "one ");
        assert_eq!(text("one two", &[]), "one two");
        assert_eq!(text("stop", &["stop"]), "");
        assert_eq!(text("stop", &["top", "stop"]), "");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn joined_text_equals_the_whole(text in "\\PC{0,40}") {
            prop_assume!(!text.contains(char::REPLACEMENT_CHARACTER));
            let tokens = Tokens::bytes();
            let mut detokenizer = Detokenizer::default();
            let ids = bytes(&text);
            let mut joined: String = ids.iter().map(|&id| detokenizer.push(&tokens, id)).collect();
            joined += &detokenizer.finish(&tokens);
            prop_assert_eq!(joined, tokens.decode(&ids));
        }

        #[test]
        fn a_stop_string_is_seen_when_the_text_first_has_it(text in "[abé ]{0,30}", stop in "[abé ]{1,4}") {
            let expected = (1..=text.len())
                .find(|&end| text.is_char_boundary(end) && text[..end].contains(&stop))
                .map(|end| end - 1);
            prop_assert_eq!(stopped_at(&text, &[&stop]), expected);
        }

        #[test]
        fn any_bytes_never_panic(ids in proptest::collection::vec(0u32..300, 0..60)) {
            let tokens = Tokens::bytes();
            let mut detokenizer = Detokenizer::default();
            let mut text = String::new();
            for id in ids {
                text += &detokenizer.push(&tokens, id);
            }
            text += &detokenizer.finish(&tokens);
        }
    }
}
