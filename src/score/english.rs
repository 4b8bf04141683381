//! Whisper's normalizer of English.

use std::{collections::HashMap, sync::LazyLock};

use super::{
    basic::{plain_letters, without_asides},
    boundary::{is_space, replace, single_spaces, words},
    numbers,
    pattern::Pattern,
};

const FILLERS: [&str; 6] = ["hmm", "mm", "mhm", "mmm", "uh", "um"];

/// Whole words; an abbreviation's full form brings a space for the period that stood behind it.
const WORDS: [(&str, &str); 35] = [
    ("won't", "will not"),
    ("can't", "can not"),
    ("let's", "let us"),
    ("ain't", "aint"),
    ("y'all", "you all"),
    ("wanna", "want to"),
    ("gotta", "got to"),
    ("gonna", "going to"),
    ("i'ma", "i am going to"),
    ("imma", "i am going to"),
    ("woulda", "would have"),
    ("coulda", "could have"),
    ("shoulda", "should have"),
    ("ma'am", "madam"),
    ("mr", "mister "),
    ("mrs", "missus "),
    ("st", "saint "),
    ("dr", "doctor "),
    ("prof", "professor "),
    ("capt", "captain "),
    ("gov", "governor "),
    ("ald", "alderman "),
    ("gen", "general "),
    ("sen", "senator "),
    ("rep", "representative "),
    ("pres", "president "),
    ("rev", "reverend "),
    ("hon", "honorable "),
    ("asst", "assistant "),
    ("assoc", "associate "),
    ("lt", "lieutenant "),
    ("col", "colonel "),
    ("jr", "junior "),
    ("sr", "senior "),
    ("esq", "esquire "),
];

/// Ends of words, those of more than one word first.
const ENDINGS: [(&str, &str); 14] = [
    ("'d been", " had been"),
    ("'s been", " has been"),
    ("'d gone", " had gone"),
    ("'s gone", " has gone"),
    ("'d done", " had done"),
    ("'s got", " has got"),
    ("n't", " not"),
    ("'re", " are"),
    ("'s", " is"),
    ("'d", " would"),
    ("'ll", " will"),
    ("'t", " not"),
    ("'ve", " have"),
    ("'m", " am"),
];

static COMMA_IN_NUMBER: Pattern = Pattern::new(r"(\d),(\d)");
static PERIOD_BEFORE_NO_DIGIT: Pattern = Pattern::new(r"\.([^0-9]|$)");
static SIGN_BEFORE_NO_DIGIT: Pattern = Pattern::new(r"[.$¢€£]([^0-9])");
static PERCENT_AFTER_NO_DIGIT: Pattern = Pattern::new(r"([^0-9])%");

/// From British words to American ones. One has a stray tag behind it in Whisper's table, and therefore here.
static SPELLING: LazyLock<HashMap<&str, &str>> = LazyLock::new(|| {
    let lines = include_str!("spelling.txt").lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once(' ')).collect()
});

pub(super) fn normalize(text: &str) -> String {
    let mut text = without_asides(&text.to_lowercase());
    for filler in FILLERS {
        replace(&mut text, filler, true, "");
    }
    text = without_space_before_apostrophes(&text);
    for (contracted, full) in WORDS {
        replace(&mut text, contracted, true, full);
    }
    for (contracted, full) in ENDINGS {
        replace(&mut text, contracted, false, full);
    }
    let text = COMMA_IN_NUMBER.replace(&text, "$1$2");
    let text = PERIOD_BEFORE_NO_DIGIT.replace(&text, " $1");
    let text = numbers::normalize(&plain_letters(&text));
    let american: Vec<_> = words(&text).map(|word| SPELLING.get(word).copied().unwrap_or(word)).collect();
    let text = american.join(" ");
    // Signs that have lost their number.
    let text = SIGN_BEFORE_NO_DIGIT.replace(&text, " $1");
    single_spaces(&PERCENT_AFTER_NO_DIGIT.replace(&text, "$1 "))
}

fn without_space_before_apostrophes(text: &str) -> String {
    let mut joined = String::with_capacity(text.len());
    for character in text.chars() {
        if character == '\'' {
            joined.truncate(joined.trim_end_matches(is_space).len());
        }
        joined.push(character);
    }
    joined
}
