//! How rows compare with their references, all together and the worst of them.

use serde::Serialize;

use super::words;
use crate::score::{Score, Scores};

const WORST_ROWS: usize = 5;
/// Characters of a text that are shown.
const SHOWN_CHARS: usize = 100;

/// Of all rows with a score; its rates are those of their texts as one.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Compared {
    pub rows: u64,
    pub reference_words: u64,
    pub word_errors: u64,
    pub reference_characters: u64,
    pub character_errors: u64,
    /// None where no reference has a word.
    pub wer: Option<f64>,
    pub cer: Option<f64>,
    /// Those with the highest word error rate, worst first; none without errors.
    pub worst_rows: Vec<ComparedRow>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComparedRow {
    pub id: String,
    pub row: u64,
    pub wer: f64,
    pub word_errors: u32,
    pub reference_words: u32,
    /// The texts' first 100 characters, not normalized.
    pub reference: String,
    pub text: String,
}

/// A row's texts, from which those of the worst are taken.
#[derive(Debug, Clone, Copy)]
pub struct Texts<'a> {
    pub id: &'a str,
    pub reference: &'a str,
    pub text: &'a str,
}

/// Scores counted so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Comparison {
    scores: Scores,
    worst: Vec<ComparedRow>,
}

impl Comparison {
    pub fn add(&mut self, row: u64, score: &Score, texts: Texts<'_>) {
        self.scores.add(score);
        let Some(wer) = score.wer().filter(|wer| *wer > 0.0) else { return };
        // Worst first; of equals, the longer and then the earlier one.
        let before = |other: &ComparedRow| {
            let order = other.wer.total_cmp(&wer).then(other.word_errors.cmp(&score.word_errors)).then(row.cmp(&other.row));
            order.is_gt()
        };
        let place = self.worst.partition_point(before);
        if place < WORST_ROWS {
            self.worst.truncate(WORST_ROWS - 1);
            let (word_errors, reference_words) = (score.word_errors, score.words);
            let [id, reference, text] = [texts.id, texts.reference, texts.text].map(start);
            self.worst.insert(place, ComparedRow { id, row, wer, word_errors, reference_words, reference, text });
        }
    }

    /// None before the first score.
    pub fn compared(&self) -> Option<Compared> {
        let scores = &self.scores;
        (scores.rows > 0).then(|| Compared {
            rows: scores.rows,
            reference_words: scores.words,
            word_errors: scores.word_errors,
            reference_characters: scores.characters,
            character_errors: scores.character_errors,
            wer: scores.wer(),
            cer: scores.cer(),
            worst_rows: self.worst.clone(),
        })
    }
}

fn start(text: &str) -> String {
    let text = text.trim();
    let start: String = text.chars().take(SHOWN_CHARS).collect();
    let start = words::one_line(&start);
    if text.chars().nth(SHOWN_CHARS).is_some() { start + "…" } else { start }
}

impl Compared {
    /// `WER 4.21% (2,213 errors in 52,576 words) · CER 1.52% · 2,620 rows`.
    pub(super) fn words(&self) -> String {
        let rows = format!("{} {}", words::count(self.rows), if self.rows == 1 { "row" } else { "rows" });
        match (self.wer, self.cer) {
            (Some(wer), Some(cer)) => format!(
                "WER {} ({} errors in {} words) · CER {} · {rows}",
                words::percent(wer),
                words::count(self.word_errors),
                words::count(self.reference_words),
                words::percent(cer)
            ),
            _ => format!("no words in the references · {} words in the texts · {rows}", words::count(self.word_errors)),
        }
    }
}

impl ComparedRow {
    /// Lines for people.
    pub(super) fn lines(&self) -> [String; 3] {
        let rate = format!("WER {} ({} errors in {} words)", words::percent(self.wer), self.word_errors, self.reference_words);
        [format!("{}: {rate}", self.id), format!("  reference  {}", self.reference), format!("  text       {}", self.text)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison(rows: &[(u64, u32, u32)]) -> Comparison {
        let mut comparison = Comparison::default();
        for &(row, words, word_errors) in rows {
            let score = Score { words, word_errors, characters: 5 * words, character_errors: word_errors };
            let (id, reference) = (format!("utt-{row}"), format!("said {row}"));
            comparison.add(row, &score, Texts { id: &id, reference: &reference, text: " heard\u{1b}[2J " });
        }
        comparison
    }

    #[test]
    fn the_worst_rows_are_told_worst_first() {
        let rows = [(0, 10, 1), (1, 10, 0), (2, 4, 2), (3, 10, 5), (4, 10, 5), (5, 2, 4), (6, 0, 7), (7, 10, 2), (8, 100, 99)];
        let compared = comparison(&rows).compared().unwrap();
        let worst: Vec<_> = compared.worst_rows.iter().map(|row| row.row).collect();
        assert_eq!(worst, [5, 8, 3, 4, 2]);
        assert_eq!((compared.rows, compared.reference_words, compared.word_errors), (9, 156, 125));
        assert_eq!(compared.wer, Some(125.0 / 156.0));
        assert_eq!(compared.worst_rows[0].lines()[2], "  text       heard [2J");
        let mut back = rows;
        back.reverse();
        assert_eq!(comparison(&back).compared().unwrap(), compared, "whatever their order");
    }

    #[test]
    fn rows_without_errors_or_words_have_no_worst() {
        assert_eq!(comparison(&[]).compared(), None);
        let compared = comparison(&[(0, 0, 3), (1, 0, 0)]).compared().unwrap();
        assert_eq!((compared.wer, compared.worst_rows.len()), (None, 0));
        assert_eq!(compared.words(), "no words in the references · 3 words in the texts · 2 rows");
    }

    #[test]
    fn long_texts_are_cut() {
        assert_eq!(start(&"é".repeat(100)), "é".repeat(100));
        assert_eq!(start(&"é".repeat(101)), "é".repeat(100) + "…");
    }
}
