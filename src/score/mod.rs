//! How a text compares with a reference: word and character error rates over normalized texts.
//!
//! Both texts are first made alike in what does not count: case, punctuation, and in English also contractions, spelled-out
//! numbers and British spelling. [`Normalizer`] does exactly what Whisper's own does (`whisper/normalizers/` of openai-whisper
//! 20250625; "Robust Speech Recognition via Large-Scale Weak Supervision", appendix C), its oddities included, so that rates can be
//! set beside published ones. Rates are then jiwer's: the Levenshtein distance over words, and over Unicode scalar values with the
//! single spaces between words among them, over the length of the reference.
//!
//! `english` is the normalizer of English, with `numbers` and `number_words` for its numbers, `decimal` for their arithmetic and
//! `spelling.txt` for British words; `basic` is the one of every other language. `boundary` holds what Python's regular expressions
//! mean by a word, `distance` counts errors.
//!
//! Known differences from Python 3.11: what Unicode has added or put right since version 14 counts as what it is now, and numbers
//! of more than 4,300 digits, where Python gives up, are numbers like others.

mod basic;
mod boundary;
mod decimal;
mod distance;
mod english;
#[cfg(test)]
mod golden_test;
mod number_words;
mod numbers;
mod pattern;

use std::collections::HashMap;

/// Longer texts are not compared.
const TEXT_BYTES_MAX: usize = 16 << 20;

/// Makes texts alike in what does not count as an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Normalizer {
    English,
    /// For every other language: no case, no punctuation, no marks.
    Basic {
        /// Each letter is a word of its own, for languages that put no spaces between words.
        split_letters: bool,
    },
}

impl Normalizer {
    /// As Whisper's evaluation chooses: by language, a code such as `en` or `zh-TW`, or a name as Whisper knows it. A language that
    /// is not known has the basic one.
    pub fn for_language(language: Option<&str>) -> Self {
        let language = language.unwrap_or_default().trim().to_lowercase();
        match language.split(['-', '_']).next().unwrap_or_default() {
            "en" | "english" => Normalizer::English,
            "zh" | "chinese" | "mandarin" | "ja" | "japanese" | "th" | "thai" | "lo" | "lao" | "my" | "burmese" | "myanmar"
            | "yue" | "cantonese" => Normalizer::Basic { split_letters: true },
            _ => Normalizer::Basic { split_letters: false },
        }
    }

    /// The text as it is compared. A space may be left at either end, as Whisper leaves it; it does not count.
    pub fn normalize(&self, text: &str) -> String {
        match self {
            Normalizer::English => english::normalize(text),
            Normalizer::Basic { split_letters } => basic::normalize(text, *split_letters),
        }
    }
}

/// Edit distances between a text and its reference, both normalized; WER is `word_errors / words`, CER alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Score {
    /// Of the reference.
    pub words: u32,
    /// Substitutions, insertions and deletions.
    pub word_errors: u32,
    /// Of the reference, the spaces between its words included.
    pub characters: u32,
    pub character_errors: u32,
}

impl Score {
    /// Word error rate; none without a word in the reference.
    pub fn wer(&self) -> Option<f64> {
        rate(self.word_errors.into(), self.words.into())
    }

    /// Character error rate; none without a character in the reference.
    pub fn cer(&self) -> Option<f64> {
        rate(self.character_errors.into(), self.characters.into())
    }
}

/// Scores of many rows. Its rates are those of all texts as one: errors over the reference's length, both summed up.
///
/// Words said where the reference has none are errors too: they count here, while their row has no rate of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scores {
    pub rows: u64,
    pub words: u64,
    pub word_errors: u64,
    pub characters: u64,
    pub character_errors: u64,
}

impl Scores {
    pub fn add(&mut self, score: &Score) {
        self.rows += 1;
        self.words += u64::from(score.words);
        self.word_errors += u64::from(score.word_errors);
        self.characters += u64::from(score.characters);
        self.character_errors += u64::from(score.character_errors);
    }

    pub fn wer(&self) -> Option<f64> {
        rate(self.word_errors, self.words)
    }

    pub fn cer(&self) -> Option<f64> {
        rate(self.character_errors, self.characters)
    }
}

fn rate(errors: u64, length: u64) -> Option<f64> {
    (length > 0).then(|| errors as f64 / length as f64)
}

/// Compares a text with its reference. A thousand characters take well under a millisecond.
///
/// None when the two cannot be compared in bounded time: one has more than 16 MiB, or they are so long and so different that it
/// would take more than a few seconds. Ten hours of speech with a tenth of its words wrong are compared; a wholly different text is
/// up to some 300,000 characters.
pub fn compare(normalizer: &Normalizer, reference: &str, text: &str) -> Option<Score> {
    if reference.len().max(text.len()) > TEXT_BYTES_MAX {
        return None;
    }
    let (reference, text) = (normalizer.normalize(reference), normalizer.normalize(text));
    let (reference, text) = (reference.trim_matches(boundary::is_space), text.trim_matches(boundary::is_space));
    let mut known = HashMap::new();
    let mut words = |text| -> Vec<u32> {
        let mut number = |word| {
            let next = known.len() as u32;
            *known.entry(word).or_insert(next)
        };
        boundary::words(text).map(&mut number).collect()
    };
    let (reference_words, text_words) = (words(reference), words(text));
    let characters = |text: &str| -> Vec<u32> { text.chars().map(u32::from).collect() };
    let (reference_characters, text_characters) = (characters(reference), characters(text));
    Some(Score {
        words: reference_words.len() as u32,
        word_errors: distance::distance(&reference_words, &text_words)?,
        characters: reference_characters.len() as u32,
        character_errors: distance::distance(&reference_characters, &text_characters)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_language_chooses_the_normalizer() {
        let split = |split_letters| Normalizer::Basic { split_letters };
        for (language, expected) in [
            (Some("en"), Normalizer::English),
            (Some("EN-gb"), Normalizer::English),
            (Some("english"), Normalizer::English),
            (Some("zh"), split(true)),
            (Some("zh-TW"), split(true)),
            (Some("yue"), split(true)),
            (Some("my"), split(true)),
            (Some("de"), split(false)),
            (Some("enm"), split(false)),
            (Some(""), split(false)),
            (None, split(false)),
        ] {
            assert_eq!(Normalizer::for_language(language), expected, "{language:?}");
        }
    }

    #[test]
    fn an_empty_reference_has_no_rate_and_its_errors_count() {
        let score = compare(&Normalizer::English, "(silence)", "thanks for watching").unwrap();
        assert_eq!(score, Score { words: 0, word_errors: 3, characters: 0, character_errors: 19 });
        assert_eq!((score.wer(), score.cer()), (None, None));
        let mut scores = Scores::default();
        scores.add(&score);
        assert_eq!(scores.wer(), None);
        scores.add(&compare(&Normalizer::English, "one two three", "one two").unwrap());
        assert_eq!((scores.rows, scores.words, scores.word_errors, scores.wer()), (2, 1, 4, Some(4.0)));
    }

    #[test]
    fn texts_beyond_the_limit_are_not_compared() {
        let huge = "a ".repeat(TEXT_BYTES_MAX / 2 + 1);
        assert_eq!(compare(&Normalizer::English, &huge, "a"), None);
        assert_eq!(compare(&Normalizer::English, "a", &huge), None);
    }
}
