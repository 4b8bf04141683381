//! Regular expressions that are part of the program.

use std::{borrow::Cow, sync::OnceLock};

use regex::Regex;

/// Compiled when first used. One that does not compile matches nothing; none is like that, as the goldens use each.
pub(super) struct Pattern {
    source: &'static str,
    compiled: OnceLock<Option<Regex>>,
}

impl Pattern {
    pub const fn new(source: &'static str) -> Self {
        Pattern { source, compiled: OnceLock::new() }
    }

    pub fn regex(&self) -> Option<&Regex> {
        self.compiled.get_or_init(|| Regex::new(self.source).ok()).as_ref()
    }

    /// Replaces every match; `$1` in `with` stands for the first group.
    pub fn replace<'a>(&self, text: &'a str, with: &str) -> Cow<'a, str> {
        self.regex().map_or(Cow::Borrowed(text), |regex| regex.replace_all(text, with))
    }

    pub fn has(&self, character: char) -> bool {
        self.regex().is_some_and(|regex| regex.is_match(character.encode_utf8(&mut [0; 4])))
    }
}
