//! Levenshtein distance: the fewest substitutions, insertions and deletions that make one sequence of another.
//!
//! Computed 64 rows at a time in the bits of a word (Myers, "A fast bit-vector algorithm for approximate string matching based on
//! dynamic programming", JACM 46, 1999, in blocks as section 5 has it, with the steps of Hyyrö, "A bit-vector algorithm for
//! computing Levenshtein and Damerau edit distances", 2003), and only within a band around the diagonal that is widened until the
//! distance fits into it (Ukkonen, "Algorithms for approximate string matching", 1985). Time follows length × distance / 64,
//! memory the length.

use std::collections::HashMap;

const BLOCK: usize = 64;
/// Blocks computed before a comparison is given up: some seconds.
const BLOCKS_MAX: u64 = 1 << 31;

/// None when it would take too long.
pub(super) fn distance(a: &[u32], b: &[u32]) -> Option<u32> {
    distance_within(a, b, BLOCKS_MAX)
}

fn distance_within(a: &[u32], b: &[u32], mut blocks_left: u64) -> Option<u32> {
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[same..], &b[same..]);
    let same = a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[..a.len() - same], &b[..b.len() - same]);
    let (shorter, longer) = if a.len() <= b.len() { (a, b) } else { (b, a) };
    if shorter.is_empty() {
        return Some(longer.len() as u32);
    }
    let rows = Rows::new(shorter);
    let mut band = (longer.len() - shorter.len()).max(BLOCK).min(longer.len());
    loop {
        let found = within_band(&rows, longer, band, &mut blocks_left)?;
        // What is found outside the band is never too little, and so is a width for the next.
        if found <= band || band == longer.len() {
            return Some(found as u32);
        }
        band = found.min(2 * band).min(longer.len());
    }
}

/// Where each symbol stands in the shorter sequence, in little more memory than that has.
struct Rows {
    count: usize,
    symbols: HashMap<u32, Places>,
}

enum Places {
    /// A bit for each row, of a symbol that is frequent.
    Bits(Vec<u64>),
    List(Vec<u32>),
}

impl Rows {
    fn new(sequence: &[u32]) -> Self {
        let mut lists: HashMap<u32, Vec<u32>> = HashMap::new();
        for (row, &symbol) in sequence.iter().enumerate() {
            lists.entry(symbol).or_default().push(row as u32);
        }
        let blocks = sequence.len().div_ceil(BLOCK);
        // At most 64 symbols can be so frequent.
        let places = |list: Vec<u32>| match list.len() >= blocks {
            true => {
                let mut bits = vec![0; blocks];
                for row in list {
                    bits[row as usize / BLOCK] |= 1 << (row as usize % BLOCK);
                }
                Places::Bits(bits)
            }
            false => Places::List(list),
        };
        let symbols = lists.into_iter().map(|(symbol, list)| (symbol, places(list))).collect();
        Rows { count: sequence.len(), symbols }
    }

    /// Sets the bits of the rows in `first..=last` that hold the symbol; the others of these blocks are unset.
    fn matches(&self, symbol: u32, first: usize, last: usize, bits: &mut [u64]) {
        let bits = &mut bits[first..=last];
        match self.symbols.get(&symbol) {
            None => bits.fill(0),
            Some(Places::Bits(all)) => bits.copy_from_slice(&all[first..=last]),
            Some(Places::List(rows)) => {
                bits.fill(0);
                let from = rows.partition_point(|&row| (row as usize) < first * BLOCK);
                for row in rows[from..].iter().map(|&row| row as usize).take_while(|row| *row < (last + 1) * BLOCK) {
                    bits[row / BLOCK - first] |= 1 << (row % BLOCK);
                }
            }
        }
    }
}

/// The distance where it is at most `band`, otherwise something between it and the length of `columns`.
fn within_band(rows: &Rows, columns: &[u32], band: usize, blocks_left: &mut u64) -> Option<usize> {
    // A path of so many errors leaves the diagonal by so much at most, and must come back to where it ends.
    let surplus = columns.len() - rows.count;
    let (above, below) = ((band + surplus) / 2, (band - surplus) / 2);
    let last_block = (rows.count - 1) / BLOCK;
    let last_row = |block: usize| if block == last_block { (rows.count - 1) % BLOCK } else { BLOCK - 1 };
    // From one row to the next the distance rises where a bit of the first is set, and falls where one of the second is.
    let (mut rises, mut falls) = (vec![u64::MAX; last_block + 1], vec![0_u64; last_block + 1]);
    let mut matches = vec![0; last_block + 1];
    // The distance at the last row of the last block of the band.
    let (mut last, mut distance) = (0, last_row(0) + 1);
    for (at, &symbol) in columns.iter().enumerate() {
        let first = at.saturating_sub(above) / BLOCK;
        let wanted = (at + below).min(rows.count - 1) / BLOCK;
        while last < wanted {
            last += 1;
            distance += last_row(last) + 1;
        }
        *blocks_left = blocks_left.checked_sub((last - first) as u64 + 1)?;
        rows.matches(symbol, first, last, &mut matches);
        // Above the first row the distance rises by one a column, or would at most.
        let mut step = 1_i8;
        for block in first..=last {
            step = next_column(&mut rises[block], &mut falls[block], matches[block], step, last_row(block));
        }
        distance = distance.saturating_add_signed(step.into());
    }
    Some(distance)
}

/// Takes a block to the next column. `step` is by how much the distance changes in the row above it; the result is by how much it
/// does in `last_row` of the block.
fn next_column(rises: &mut u64, falls: &mut u64, matches: u64, step: i8, last_row: usize) -> i8 {
    let vertical = matches | *falls;
    let matches = matches | u64::from(step < 0);
    let diagonal = ((matches & *rises).wrapping_add(*rises) ^ *rises) | matches;
    let rises_across = *falls | !(diagonal | *rises);
    let falls_across = *rises & diagonal;
    let across = (rises_across >> last_row & 1) as i8 - (falls_across >> last_row & 1) as i8;
    let rises_across = rises_across << 1 | u64::from(step > 0);
    let falls_across = falls_across << 1 | u64::from(step < 0);
    *rises = falls_across | !(vertical | rises_across);
    *falls = rises_across & vertical;
    across
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// By the definition, two rows at a time.
    fn expected(a: &[u32], b: &[u32]) -> u32 {
        let mut row: Vec<u32> = (0..=b.len() as u32).collect();
        for (i, x) in a.iter().enumerate() {
            let mut next = vec![i as u32 + 1];
            for (j, y) in b.iter().enumerate() {
                next.push((row[j] + u32::from(x != y)).min(row[j + 1] + 1).min(next[j] + 1));
            }
            row = next;
        }
        row[b.len()]
    }

    fn edited(sequence: &[u32], edits: &[(prop::sample::Index, u32)]) -> Vec<u32> {
        let mut edited = sequence.to_vec();
        for (place, edit) in edits {
            let at = place.index(edited.len() + 1);
            match edit % 3 {
                0 => edited.insert(at, edit / 3),
                1 if at < edited.len() => edited[at] = edit / 3,
                _ if at < edited.len() => drop(edited.remove(at)),
                _ => {}
            }
        }
        edited
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn is_what_the_definition_says(a in prop::collection::vec(0..4_u32, 0..300), b in prop::collection::vec(0..4_u32, 0..300)) {
            prop_assert_eq!(distance(&a, &b), Some(expected(&a, &b)));
        }

        #[test]
        fn is_so_for_rare_symbols(a in prop::collection::vec(0..150_u32, 0..300), b in prop::collection::vec(0..150_u32, 0..300)) {
            prop_assert_eq!(distance(&a, &b), Some(expected(&a, &b)));
        }

        #[test]
        fn is_so_in_a_band(
            a in prop::collection::vec(0..9_u32, 200..500),
            edits in prop::collection::vec((any::<prop::sample::Index>(), 0..27_u32), 0..120),
        ) {
            let b = edited(&a, &edits);
            prop_assert_eq!(distance(&a, &b), Some(expected(&a, &b)));
            prop_assert_eq!(distance(&b, &a), Some(expected(&a, &b)));
        }
    }

    #[test]
    fn lengths_around_a_block_are_right() {
        for rows in [1, 63, 64, 65, 127, 128, 129] {
            for columns in [1, 63, 64, 65, 128, 200] {
                let (a, b) = (vec![1; rows], vec![2; columns]);
                assert_eq!(distance(&a, &b), Some(rows.max(columns) as u32));
                let shifted: Vec<u32> = (10..10 + rows as u32).collect();
                let other: Vec<u32> = (13..13 + columns as u32).collect();
                assert_eq!(distance(&shifted, &other), Some(expected(&shifted, &other)), "{rows} {columns}");
            }
        }
        assert_eq!(distance(&[], &[]), Some(0));
        assert_eq!(distance(&[1, 2], &[]), Some(2));
    }

    #[test]
    fn an_hour_is_quick_and_too_much_is_given_up() {
        let symbols = |seed: u64, count: usize| -> Vec<u32> {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as u32 % 28
            };
            (0..count).map(|_| next()).collect()
        };
        let hour = symbols(1, 50_000);
        let mut heard = hour.clone();
        for at in (0..heard.len()).step_by(100) {
            heard[at] = 99;
        }
        heard.drain(20_001..20_041);
        assert_eq!(distance_within(&hour, &heard, 4_000_000), Some(540));
        assert_eq!(distance_within(&hour, &symbols(2, 50_000), 4_000_000), None);
    }
}
