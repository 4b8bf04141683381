//! When what happened to a sequence.

use std::time::{Duration, Instant};

/// A sequence's own clock.
#[derive(Debug, Default)]
pub struct Clock {
    pub admitted_at: Option<Instant>,
    /// Microseconds since the Unix epoch, at admission.
    pub started_at_us: i64,
    pub first_token_at: Option<Instant>,
    pub last_token_at: Option<Instant>,
    /// The steps that computed its prompt, but for `encode`.
    pub prefill: Duration,
    /// The steps that computed a piece of its prompt in which images or recordings stand, and the towers before it.
    pub encode: Duration,
    /// Decode steps it took part in, and the rows in them all together.
    pub decode_steps: u64,
    pub decode_rows: u64,
}

impl Clock {
    pub fn admit(&mut self, now: Instant) {
        self.admitted_at = Some(now);
        self.started_at_us = jiff::Timestamp::now().as_microsecond();
    }

    pub fn token(&mut self, now: Instant) {
        self.first_token_at.get_or_insert(now);
        self.last_token_at = Some(now);
    }

    /// First token to last.
    pub fn decode(&self) -> Duration {
        self.first_token_at.zip(self.last_token_at).map_or(Duration::ZERO, |(first, last)| last - first)
    }
}

pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
