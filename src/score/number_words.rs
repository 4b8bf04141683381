//! The words that English numbers are made of.

use std::{collections::HashMap, sync::LazyLock};

const ONES: [&str; 19] = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
];
/// From twenty on; without the `y` at their end.
const TENS: [&str; 8] = ["twent", "thirt", "fort", "fift", "sixt", "sevent", "eight", "ninet"];
/// With the zeros that each appends.
const MULTIPLIERS: [(&str, usize); 12] = [
    ("hundred", 2),
    ("thousand", 3),
    ("million", 6),
    ("billion", 9),
    ("trillion", 12),
    ("quadrillion", 15),
    ("quintillion", 18),
    ("sextillion", 21),
    ("septillion", 24),
    ("octillion", 27),
    ("nonillion", 30),
    ("decillion", 33),
];

/// What a word does in a number. Suffixes are those of plurals and ordinals: such a word ends its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NumberWord {
    Zero,
    /// 1 to 19.
    Ones(u32),
    OnesWithSuffix(u32, &'static str),
    /// 20 to 90.
    Tens(u32),
    TensWithSuffix(u32, &'static str),
    /// Zeros.
    Multiplier(usize),
    MultiplierWithSuffix(usize, &'static str),
    /// Before a number.
    Sign(char),
    /// After a number, and written before it.
    Currency(char),
    /// Makes a percentage with `cent`.
    Per,
    Percent,
    And,
    /// `double` and `triple`.
    Repeat(usize),
    Point,
}

static WORDS: LazyLock<HashMap<String, NumberWord>> = LazyLock::new(|| {
    use NumberWord::*;
    let mut words = HashMap::new();
    words.extend(["o", "oh", "zero"].map(|word| (word.to_owned(), Zero)));
    for (&name, number) in ONES.iter().zip(1..) {
        let plural = if name == "six" { "sixes".into() } else { format!("{name}s") };
        let ordinal = if name.ends_with('t') { format!("{name}h") } else { format!("{name}th") };
        words.extend([(name.to_owned(), Ones(number)), (plural, OnesWithSuffix(number, "s"))]);
        // As Whisper has it: `nineth` is the one of nine, and `ninth` is none.
        if number > 3 && !["five", "twelve"].contains(&name) {
            words.insert(ordinal, OnesWithSuffix(number, "th"));
        }
    }
    let irregular = [
        ("zeroth", 0, "th"),
        ("first", 1, "st"),
        ("second", 2, "nd"),
        ("third", 3, "rd"),
        ("fifth", 5, "th"),
        ("twelfth", 12, "th"),
    ];
    words.extend(irregular.map(|(word, number, suffix)| (word.to_owned(), OnesWithSuffix(number, suffix))));
    for (stem, number) in TENS.iter().zip((20..).step_by(10)) {
        words.insert(format!("{stem}y"), Tens(number));
        words.extend([(format!("{stem}ies"), TensWithSuffix(number, "s")), (format!("{stem}ieth"), TensWithSuffix(number, "th"))]);
    }
    for (name, zeros) in MULTIPLIERS {
        words.insert(name.to_owned(), Multiplier(zeros));
        words.extend(["s", "th"].map(|suffix| (format!("{name}{suffix}"), MultiplierWithSuffix(zeros, suffix))));
    }
    let rest = [
        ("minus", Sign('-')),
        ("negative", Sign('-')),
        ("plus", Sign('+')),
        ("positive", Sign('+')),
        ("pound", Currency('£')),
        ("pounds", Currency('£')),
        ("euro", Currency('€')),
        ("euros", Currency('€')),
        ("dollar", Currency('$')),
        ("dollars", Currency('$')),
        ("cent", Currency('¢')),
        ("cents", Currency('¢')),
        ("per", Per),
        ("percent", Percent),
        ("and", And),
        ("double", Repeat(2)),
        ("triple", Repeat(3)),
        ("point", Point),
    ];
    words.extend(rest.map(|(word, kind)| (word.to_owned(), kind)));
    words
});

impl NumberWord {
    pub fn of(word: &str) -> Option<Self> {
        WORDS.get(word).copied()
    }

    /// Whether it can stand behind a decimal point.
    pub fn is_decimal(self) -> bool {
        matches!(self, NumberWord::Zero | NumberWord::Ones(_) | NumberWord::Tens(_))
    }
}

#[cfg(test)]
mod tests {
    use super::{NumberWord::*, *};

    #[test]
    fn words_are_what_they_seem() {
        for (word, expected) in [
            ("nineteen", Some(Ones(19))),
            ("ninety", Some(Tens(90))),
            ("forty", Some(Tens(40))),
            ("eighth", Some(OnesWithSuffix(8, "th"))),
            ("eightieth", Some(TensWithSuffix(80, "th"))),
            ("sixes", Some(OnesWithSuffix(6, "s"))),
            ("tens", Some(OnesWithSuffix(10, "s"))),
            ("ninth", None),
            ("fiveth", None),
            ("twelveth", None),
            ("oneth", None),
            ("decillionth", Some(MultiplierWithSuffix(33, "th"))),
        ] {
            assert_eq!(NumberWord::of(word), expected, "{word}");
        }
    }
}
