//! How a text compares with a reference.

/// Edit distances between a text and its reference, both normalized; WER is `word_errors / words`, CER alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Score {
    /// Of the reference.
    pub words: u32,
    /// Substitutions, insertions and deletions.
    pub word_errors: u32,
    /// Of the reference.
    pub characters: u32,
    pub character_errors: u32,
}
