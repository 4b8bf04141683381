//! English numbers in words into digits, as Whisper's normalizer writes them: `two hundred and five dollars` is `$205`,
//! `double oh seven` is `007`, `nineteen eighty four` is `1984`, `twenty first` is `21st`.
//!
//! Words are read one after the other, with one number in hand that the next word lengthens, multiplies or ends.

use super::{
    boundary::{is_boundary, is_space, is_word, words},
    decimal::{Whole, is_number},
    number_words::NumberWord,
    pattern::Pattern,
};

static CENTS_BEHIND: Pattern = Pattern::new(r"([€£$])([0-9]+) (?:and )?¢([0-9]{1,2})");
static CENTS_ALONE: Pattern = Pattern::new(r"[€£$]0.([0-9]{1,2})");

pub(super) fn normalize(text: &str) -> String {
    let text = join_suffixes(&part_letters_from_digits(&halves(text)));
    let mut numbers = Numbers::default();
    let words: Vec<&str> = words(&text).collect();
    numbers.read(&words);
    ones(&cents(&numbers.text))
}

/// `two and a half` is `two point five`; behind a word that is no number it stays.
fn halves(text: &str) -> String {
    let mut pieces: Vec<&str> = Vec::new();
    let (mut taken, mut from) = (0, 0);
    while let Some(found) = text[from..].find("and") {
        let start = from + found;
        match and_a_half(&text[start..]).filter(|length| is_boundary(text, start) && is_boundary(text, start + length)) {
            Some(length) => {
                let before = &text[taken..start];
                // Nothing before it, and Whisper drops it.
                if let Some(last) = words(before).last() {
                    let number =
                        NumberWord::of(last).is_some_and(|word| word.is_decimal() || matches!(word, NumberWord::Multiplier(_)));
                    pieces.extend([before, if number { "point five" } else { "and a half" }]);
                }
                (taken, from) = (start + length, start + length);
            }
            None => from = start + 1,
        }
    }
    pieces.extend(Some(&text[taken..]).filter(|rest| words(rest).next().is_some()));
    pieces.join(" ")
}

/// The length of `and a half` at the start of a text, whatever spaces it has.
fn and_a_half(text: &str) -> Option<usize> {
    let mut rest = text.strip_prefix("and")?;
    for word in ["a", "half"] {
        rest = rest.strip_prefix(is_space)?.trim_start_matches(is_space).strip_prefix(word)?;
    }
    Some(text.len() - rest.len())
}

fn part_letters_from_digits(text: &str) -> String {
    let mut parted = String::with_capacity(text.len() + 16);
    let mut before = ' ';
    for character in text.chars() {
        let letter = |c: char| c.is_ascii_lowercase();
        if letter(before) && character.is_ascii_digit() || before.is_ascii_digit() && letter(character) {
            parted.push(' ');
        }
        parted.push(character);
        before = character;
    }
    parted
}

/// `21 st` is `21st`, and so are `nd`, `rd`, `th` and `s`.
fn join_suffixes(text: &str) -> String {
    let mut joined = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(digit) = rest.find(|c: char| c.is_ascii_digit()) {
        let (before, behind) = rest.split_at(digit + 1);
        joined.push_str(before);
        let suffix = behind.trim_start_matches(is_space);
        let word = suffix.split(|c| !is_word(c)).next().unwrap_or_default();
        rest = if suffix.len() < behind.len() && ["st", "nd", "rd", "th", "s"].contains(&word) { suffix } else { behind };
    }
    joined + rest
}

/// `$2 and ¢7` is `$2.07`, and `$0.07` is `¢7`.
fn cents(text: &str) -> String {
    let joined = where_a_word_ends(&CENTS_BEHIND, text, |found| {
        let [currency, whole, cents] = [1, 2, 3].map(|group| found.get(group).map_or("", |found| found.as_str()));
        format!("{currency}{whole}.{cents:0>2}")
    });
    where_a_word_ends(&CENTS_ALONE, &joined, |found| {
        let cents = found.get(1).map_or("", |cents| cents.as_str());
        // "00" is zero.
        let significant = cents.trim_start_matches('0');
        format!("¢{}", if significant.is_empty() { "0" } else { significant })
    })
}

/// Replaces the matches behind which a word ends. A shorter match would end between two digits, where none does.
fn where_a_word_ends(pattern: &Pattern, text: &str, replacement: impl Fn(&regex::Captures) -> String) -> String {
    let Some(regex) = pattern.regex() else { return text.to_owned() };
    let mut replaced = String::with_capacity(text.len());
    let (mut taken, mut from) = (0, 0);
    while let Some(found) = regex.captures_at(text, from) {
        let Some(all) = found.get(0) else { break };
        if is_boundary(text, all.end()) {
            replaced.push_str(&text[taken..all.start()]);
            replaced.push_str(&replacement(&found));
            (taken, from) = (all.end(), all.end());
        } else {
            from = all.start() + text[all.start()..].chars().next().map_or(1, char::len_utf8);
        }
    }
    replaced + &text[taken..]
}

/// `1` and `1s` as words, as they are mostly meant.
fn ones(text: &str) -> String {
    let mut written = String::with_capacity(text.len());
    let mut before = None;
    for (at, character) in text.char_indices() {
        let behind = &text[at + character.len_utf8()..];
        let word = behind.split(|c| !is_word(c)).next().unwrap_or_default();
        let alone = character == '1' && !before.is_some_and(is_word) && (word.is_empty() || word == "s");
        if alone {
            written.push_str("one")
        } else {
            written.push(character)
        }
        before = Some(character);
    }
    written
}

/// The number in hand.
#[derive(Debug)]
enum Number {
    Whole(Whole),
    /// Digits in the order in which they were said, with points among them.
    Written(String),
}

impl Number {
    fn text(&self) -> String {
        match self {
            Number::Whole(whole) => whole.text(),
            Number::Written(text) => text.clone(),
        }
    }
}

#[derive(Default)]
struct Numbers {
    text: String,
    sign: Option<char>,
    number: Option<Number>,
}

impl Numbers {
    fn read(&mut self, words: &[&str]) {
        let mut at = 0;
        while let Some(&word) = words.get(at) {
            let before = at.checked_sub(1).and_then(|before| NumberWord::of(words[before]));
            let used = self.word(before, word, words.get(at + 1).copied());
            at += used;
        }
        self.end_number();
    }

    /// Puts a word out, and the sign that waits for it.
    fn put(&mut self, word: &str) {
        if !self.text.is_empty() {
            self.text.push(' ');
        }
        self.text.extend(self.sign.take());
        self.text.push_str(word);
        self.number = None;
    }

    fn end_number(&mut self) {
        if let Some(number) = self.number.take() {
            self.put(&number.text());
        }
    }

    fn end_number_and_put(&mut self, word: &str) {
        self.end_number();
        self.put(word);
    }

    /// The digits in hand as a text to append to; a zero that is a number has none.
    fn take_digits(&mut self) -> String {
        match self.number.take() {
            None => String::new(),
            Some(Number::Whole(whole)) if whole.is_zero() => String::new(),
            Some(Number::Whole(whole)) => whole.text(),
            Some(Number::Written(text)) => text,
        }
    }

    /// Reads a word, and the next one too where the two belong together; returns how many.
    fn word(&mut self, before: Option<NumberWord>, word: &str, next: Option<&str>) -> usize {
        let sign = word.chars().next().filter(|first| "-+£€$¢".contains(*first));
        let unsigned = &word[sign.map_or(0, char::len_utf8)..];
        if is_number(unsigned) {
            self.digits(word, unsigned, sign);
            return 1;
        }
        let Some(kind) = NumberWord::of(word) else {
            self.end_number_and_put(word);
            return 1;
        };
        let next_word = next.and_then(NumberWord::of);
        let number_follows = next_word.is_some() || next.is_some_and(is_number);
        match kind {
            NumberWord::Zero => {
                let digits = self.take_digits() + "0";
                self.number = Some(Number::Written(digits));
            }
            NumberWord::Ones(ones) => self.number = Some(self.with_ones(ones, before)),
            NumberWord::OnesWithSuffix(ones, suffix) => {
                let number = self.with_ones(ones, before).text();
                self.put(&(number + suffix));
            }
            NumberWord::Tens(tens) => self.number = Some(self.with_tens(tens)),
            NumberWord::TensWithSuffix(tens, suffix) => {
                let number = self.with_tens(tens).text();
                self.put(&(number + suffix));
            }
            NumberWord::Multiplier(zeros) => self.number = Some(self.multiplied(zeros)),
            NumberWord::MultiplierWithSuffix(zeros, suffix) => {
                let number = self.multiplied(zeros).text();
                self.put(&(number + suffix));
            }
            NumberWord::Sign(sign) => {
                self.end_number();
                if number_follows { self.sign = Some(sign) } else { self.put(word) }
            }
            NumberWord::Currency(sign) => match self.number {
                Some(_) => {
                    self.sign = Some(sign);
                    self.end_number();
                }
                None => self.put(word),
            },
            NumberWord::Percent => match self.number.take() {
                Some(number) => self.put(&(number.text() + "%")),
                None => self.put(word),
            },
            NumberWord::Per => match self.number.take() {
                Some(number) if next == Some("cent") => {
                    self.put(&(number.text() + "%"));
                    return 2;
                }
                number => {
                    self.number = number;
                    self.end_number_and_put(word);
                }
            },
            NumberWord::And | NumberWord::Repeat(_) | NumberWord::Point if !number_follows => self.end_number_and_put(word),
            // Between the hundreds and the rest it says nothing.
            NumberWord::And if matches!(before, Some(NumberWord::Multiplier(_))) => {}
            NumberWord::And => self.end_number_and_put(word),
            NumberWord::Repeat(times) => {
                let repeated = match next_word {
                    Some(NumberWord::Zero) => 0,
                    Some(NumberWord::Ones(ones)) => ones,
                    _ => {
                        self.end_number_and_put(word);
                        return 1;
                    }
                };
                let digits = self.take_digits() + &repeated.to_string().repeat(times);
                self.number = Some(Number::Written(digits));
                return 2;
            }
            NumberWord::Point => {
                if next.is_some_and(is_number) || next_word.is_some_and(NumberWord::is_decimal) {
                    let digits = self.take_digits() + ".";
                    self.number = Some(Number::Written(digits));
                }
            }
        }
        1
    }

    /// A number in digits already.
    fn digits(&mut self, word: &str, unsigned: &str, sign: Option<char>) {
        if let Some(Number::Written(digits)) = &mut self.number
            && digits.ends_with('.')
        {
            digits.push_str(word);
            return;
        }
        self.end_number();
        self.sign = sign.or(self.sign);
        self.number = Some(match Whole::scaled(unsigned, 0) {
            Some(whole) => Number::Whole(whole),
            None => Number::Written(unsigned.to_owned()),
        });
    }

    /// One to nineteen fill zeros that the number in hand ends in; otherwise they are the next digits.
    fn with_ones(&mut self, ones: u32, before: Option<NumberWord>) -> Number {
        let zeros = if ones < 10 { 1 } else { 2 };
        match self.number.take() {
            None => Number::Whole(Whole::new(ones)),
            // `… twenty five`, of which twenty are the last two digits.
            Some(Number::Written(mut digits)) if ones < 10 && matches!(before, Some(NumberWord::Tens(_))) => {
                digits.pop();
                Number::Written(digits + &ones.to_string())
            }
            Some(Number::Whole(mut whole)) if whole.ends_in_zeros(zeros) && !matches!(before, Some(NumberWord::Ones(_))) => {
                whole.add(ones, 0);
                Number::Whole(whole)
            }
            Some(number) => Number::Written(number.text() + &ones.to_string()),
        }
    }

    fn with_tens(&mut self, tens: u32) -> Number {
        match self.number.take() {
            None => Number::Whole(Whole::new(tens)),
            Some(Number::Whole(mut whole)) if whole.ends_in_zeros(2) => {
                whole.add(tens, 0);
                Number::Whole(whole)
            }
            Some(number) => Number::Written(number.text() + &tens.to_string()),
        }
    }

    /// What is below a thousand is multiplied, or all of a written number; one whose product is not whole is put out instead.
    fn multiplied(&mut self, zeros: usize) -> Number {
        match self.number.take() {
            None => Number::Whole(Whole::power_of_ten(zeros)),
            Some(Number::Whole(mut whole)) => {
                whole.multiply_below_thousand(zeros);
                Number::Whole(whole)
            }
            Some(Number::Written(digits)) => match Whole::scaled(&digits, zeros) {
                Some(whole) => Number::Whole(whole),
                None => {
                    self.put(&digits);
                    Number::Whole(Whole::power_of_ten(zeros))
                }
            },
        }
    }
}
