//! What Python's `re` and `str` take for words and spaces, which Unicode's annexes and Rust's `regex` see otherwise: a combining
//! mark ends a word (`\w` is letters, numbers and the underscore), and the four separators before U+0020 are spaces.

use super::pattern::Pattern;

static LETTER_OR_NUMBER: Pattern = Pattern::new(r"[\p{L}\p{N}]");

/// `str.isspace`, which `\s` and `str.split` go by.
pub(super) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

/// `str.split()`.
pub(super) fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|word| !word.is_empty())
}

/// `\w`.
pub(super) fn is_word(character: char) -> bool {
    if character.is_ascii() {
        return character.is_ascii_alphanumeric() || character == '_';
    }
    LETTER_OR_NUMBER.has(character)
}

/// `\b` at a byte offset.
pub(super) fn is_boundary(text: &str, at: usize) -> bool {
    let (before, after) = text.split_at(at);
    before.chars().next_back().is_some_and(is_word) != after.chars().next().is_some_and(is_word)
}

/// `re.sub(r"literal\b", …)`, with `starts` `re.sub(r"\bliteral\b", …)`.
pub(super) fn replace(text: &mut String, literal: &str, starts: bool, with: &str) {
    if !text.contains(literal) {
        return;
    }
    let mut replaced = String::with_capacity(text.len() + with.len());
    let (mut taken, mut from) = (0, 0);
    while let Some(found) = text[from..].find(literal) {
        let (start, end) = (from + found, from + found + literal.len());
        if (!starts || is_boundary(text, start)) && is_boundary(text, end) {
            replaced.push_str(&text[taken..start]);
            replaced.push_str(with);
            (taken, from) = (end, end);
        } else {
            // Literals begin with an ASCII character.
            from = start + 1;
        }
    }
    replaced.push_str(&text[taken..]);
    *text = replaced;
}

/// `re.sub(r"\s+", " ", text)`.
pub(super) fn single_spaces(text: &str) -> String {
    let mut single = String::with_capacity(text.len());
    let mut space = false;
    for character in text.chars() {
        if !is_space(character) {
            single.push(character);
        } else if !space {
            single.push(' ');
        }
        space = is_space(character);
    }
    single
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, literal: &str, starts: bool, expected: &str) {
        let mut text = text.to_owned();
        replace(&mut text, literal, starts, "X");
        assert_eq!(text, expected);
    }

    #[test]
    fn a_literal_is_replaced_where_words_end() {
        check("mm mmm hmm mm", "mm", true, "X mmm hmm X");
        check("mm_ mm2 éмм mm", "mm", true, "mm_ mm2 éмм X");
        check("ain't ain'ts n't", "n't", false, "aiX ain'ts X");
        check("aaa", "aa", false, "aX");
        check("mm\u{301} mm½", "mm", true, "X\u{301} mm½");
    }

    #[test]
    fn spaces_are_pythons() {
        assert_eq!(single_spaces("a\u{1c}\u{1f} \n b\u{85}\u{200b}c\u{a0}"), "a b \u{200b}c ");
        assert_eq!(words(" a\u{3000}b\u{1d}\u{1d}c ").collect::<Vec<_>>(), ["a", "b", "c"]);
    }

    #[test]
    fn marks_are_no_word_characters() {
        for (character, expected) in [('a', true), ('_', true), ('é', true), ('あ', true), ('²', true), ('Ⅳ', true), ('٣', true)]
        {
            assert_eq!(is_word(character), expected, "{character}");
        }
        for character in ['-', ' ', '\u{301}', '\u{200d}', 'ⓐ', '€'] {
            assert!(!is_word(character), "{character}");
        }
    }
}
