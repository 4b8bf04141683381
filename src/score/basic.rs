//! Whisper's normalizer of every language but English, and what both have in common.

use unicode_normalization::UnicodeNormalization;
use unicode_segmentation::UnicodeSegmentation;

use super::{boundary::single_spaces, pattern::Pattern};

static IN_BRACKETS: Pattern = Pattern::new(r"[<\[][^>\]]*[>\]]");
static IN_PARENTHESES: Pattern = Pattern::new(r"\([^)]+\)");
static MARK_SYMBOL_PUNCTUATION: Pattern = Pattern::new(r"[\p{M}\p{S}\p{P}]");
static NONSPACING_MARK: Pattern = Pattern::new(r"\p{Mn}");
/// But for those that belong to numbers.
static MOST_SYMBOLS: Pattern = Pattern::new(r"[[\p{M}\p{S}\p{P}]--[.%$¢€£]]");

pub(super) fn normalize(text: &str, split_letters: bool) -> String {
    let composed: String = without_asides(&text.to_lowercase()).nfkc().collect();
    let clean = MARK_SYMBOL_PUNCTUATION.replace(&composed, " ").to_lowercase();
    match split_letters {
        true => single_spaces(&clean.graphemes(true).collect::<Vec<_>>().join(" ")),
        false => single_spaces(&clean),
    }
}

/// Without what stands in brackets of any kind.
pub(super) fn without_asides(text: &str) -> String {
    IN_PARENTHESES.replace(&IN_BRACKETS.replace(text, ""), "").into_owned()
}

/// Compatibility decomposition without its marks, other symbols than those of numbers as spaces.
pub(super) fn plain_letters(text: &str) -> String {
    let mut letters = String::with_capacity(text.len());
    for character in text.nfkd() {
        match undecomposed(character) {
            Some(plain) => letters.push_str(plain),
            None => letters.push(character),
        }
    }
    MOST_SYMBOLS.replace(&NONSPACING_MARK.replace(&letters, ""), " ").into_owned()
}

/// Letters that decomposition leaves as they are.
fn undecomposed(letter: char) -> Option<&'static str> {
    Some(match letter {
        'œ' => "oe",
        'Œ' => "OE",
        'ø' => "o",
        'Ø' => "O",
        'æ' => "ae",
        'Æ' => "AE",
        'ß' => "ss",
        'ẞ' => "SS",
        'đ' | 'ð' => "d",
        'Đ' | 'Ð' => "D",
        'þ' | 'Þ' => "th",
        'ł' => "l",
        'Ł' => "L",
        _ => return None,
    })
}
