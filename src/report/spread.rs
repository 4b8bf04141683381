//! Percentiles over any number of values, in a fixed amount of memory.

/// A histogram whose bucket borders grow by [`GROWTH`]: percentiles are within 0.5 % of a value that was there.
#[derive(Debug, Clone)]
pub(super) struct Spread {
    counts: Vec<u64>,
    total: u64,
    min: f64,
    max: f64,
}

const GROWTH: f64 = 1.01;
/// What is smaller counts as this.
const SMALLEST: f64 = 1e-3;
/// Up to 1e-3 × 1.01^3000, about 9e9.
const BUCKETS: usize = 3000;

impl Default for Spread {
    fn default() -> Self {
        Spread { counts: vec![0; BUCKETS], total: 0, min: f64::INFINITY, max: f64::NEG_INFINITY }
    }
}

impl Spread {
    /// Values that are no numbers are left out.
    pub fn add(&mut self, value: f64) {
        if value.is_nan() {
            return;
        }
        let bucket = ((value.max(SMALLEST) / SMALLEST).ln() / GROWTH.ln()) as usize;
        self.counts[bucket.min(BUCKETS - 1)] += 1;
        self.total += 1;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// The value that `percent` of the values do not exceed (nearest rank); none without values.
    pub fn percentile(&self, percent: f64) -> Option<f64> {
        let rank = ((self.total as f64 * percent / 100.0).ceil() as u64).clamp(1, self.total.max(1));
        let mut seen = 0;
        let bucket = self.counts.iter().position(|&count| {
            seen += count;
            seen >= rank
        })?;
        let middle = SMALLEST * GROWTH.powf(bucket as f64 + 0.5);
        Some(middle.clamp(self.min, self.max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_half_a_percent() {
        let mut spread = Spread::default();
        assert_eq!(spread.percentile(50.0), None);
        for value in 1..=10_000 {
            spread.add(f64::from(value) / 7.0);
        }
        for percent in [1.0, 50.0, 95.0, 99.0, 100.0] {
            let (found, exact) = (spread.percentile(percent).unwrap(), percent * 100.0 / 7.0);
            assert!((found / exact - 1.0).abs() < 0.0051, "{percent}: {found} for {exact}");
        }
    }

    #[test]
    fn single_and_extreme_values_are_exact_or_bounded() {
        let mut spread = Spread::default();
        spread.add(f64::NAN);
        assert_eq!(spread.percentile(50.0), None);
        spread.add(12.345);
        assert_eq!(spread.percentile(50.0), Some(12.345));
        for value in [0.0, -1.0, f64::INFINITY, f64::MAX] {
            spread.add(value);
        }
        assert!(spread.percentile(1.0).unwrap() < 0.01);
        assert!(spread.percentile(100.0).unwrap() > 1e9);
    }
}
