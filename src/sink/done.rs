//! Which rows an earlier run has done, in about five bytes a row.

use std::collections::HashMap;

const PAGE_ROWS: u64 = 256;

/// The rows of closed parts: their numbers, and 32 bits of each one's input hash.
///
/// Memory follows the rows it holds, in pages of 256 neighbours (about 1 KiB), never the largest row number.
#[derive(Debug, Default)]
pub struct Done {
    pages: HashMap<u64, Box<Page>>,
    pub rows: u64,
    pub rows_failed: u64,
}

#[derive(Debug)]
struct Page {
    present: [u64; (PAGE_ROWS / 64) as usize],
    inputs: [u32; PAGE_ROWS as usize],
}

/// What an earlier run left of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowState {
    Todo,
    Done,
    /// It is done, but from other inputs than it has now.
    Changed,
}

impl Done {
    /// `input_hash` is the one of [`crate::manifest::Item`]. A changed input goes unnoticed once in 2^32.
    pub fn state(&self, row: u64, input_hash: u64) -> RowState {
        match self.pages.get(&(row / PAGE_ROWS)) {
            Some(page) if page.has(row) => {
                if page.inputs[(row % PAGE_ROWS) as usize] == input_hash as u32 {
                    RowState::Done
                } else {
                    RowState::Changed
                }
            }
            _ => RowState::Todo,
        }
    }

    pub fn contains(&self, row: u64) -> bool {
        self.pages.get(&(row / PAGE_ROWS)).is_some_and(|page| page.has(row))
    }

    /// False when the row was there already.
    pub(super) fn insert(&mut self, row: u64, input_hash: u64) -> bool {
        let empty = || Box::new(Page { present: [0; 4], inputs: [0; PAGE_ROWS as usize] });
        let page = self.pages.entry(row / PAGE_ROWS).or_insert_with(empty);
        if page.has(row) {
            return false;
        }
        let at = row % PAGE_ROWS;
        page.present[(at / 64) as usize] |= 1 << (at % 64);
        page.inputs[at as usize] = input_hash as u32;
        self.rows += 1;
        true
    }

    /// Row numbers alone.
    pub(super) fn row_set(&self) -> RowSet {
        let mut rows = RowSet::default();
        #[expect(clippy::iter_over_hash_type, reason = "a set is made of a map")]
        for (&page, content) in &self.pages {
            rows.pages.insert(page, content.present);
        }
        rows
    }
}

impl Page {
    fn has(&self, row: u64) -> bool {
        let at = row % PAGE_ROWS;
        self.present[(at / 64) as usize] & 1 << (at % 64) != 0
    }
}

/// A set of row numbers, one bit each in pages of 256.
#[derive(Debug, Default)]
pub(super) struct RowSet {
    pages: HashMap<u64, [u64; (PAGE_ROWS / 64) as usize]>,
}

impl RowSet {
    /// False when the row was there already.
    pub fn insert(&mut self, row: u64) -> bool {
        let word = &mut self.pages.entry(row / PAGE_ROWS).or_default()[(row % PAGE_ROWS / 64) as usize];
        let bit = 1 << (row % 64);
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    pub fn remove(&mut self, row: u64) -> bool {
        let Some(page) = self.pages.get_mut(&(row / PAGE_ROWS)) else { return false };
        let word = &mut page[(row % PAGE_ROWS / 64) as usize];
        let bit = 1 << (row % 64);
        let had = *word & bit != 0;
        *word &= !bit;
        had
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_done_with_its_inputs_only() {
        let mut done = Done::default();
        assert_eq!(done.state(7, 1), RowState::Todo);
        assert!(done.insert(7, 0xffff_ffff_0000_0001));
        assert!(!done.insert(7, 2), "a row is there once");
        assert_eq!(done.state(7, 0xffff_ffff_0000_0001), RowState::Done);
        assert_eq!(done.state(7, 0xffff_ffff_0000_0002), RowState::Changed);
        assert_eq!(done.state(8, 1), RowState::Todo);
        assert_eq!(done.state(7 + PAGE_ROWS, 1), RowState::Todo);
        assert_eq!(done.rows, 1);
    }

    #[test]
    fn a_huge_row_number_costs_one_page() {
        let mut done = Done::default();
        for row in [u64::MAX, 0, 255, 256, u64::MAX - 1] {
            assert!(done.insert(row, row));
            assert!(done.contains(row));
        }
        assert_eq!(done.pages.len(), 3);
        assert!(!done.row_set().insert(u64::MAX));
        assert!(done.row_set().insert(1));
    }

    #[test]
    fn a_row_set_takes_each_row_once() {
        let mut rows = RowSet::default();
        assert!(rows.insert(300) && !rows.insert(300));
        assert!(rows.remove(300) && !rows.remove(300) && !rows.remove(1));
        assert!(rows.insert(300));
    }
}
