//! Numbers and texts as people read them.

use std::path::Path;

use serde::Serializer;

const LINE_CHARS: usize = 500;

/// A path in JSON: one that is not UTF-8 is shown with replacement characters, as JSON cannot hold it.
pub(super) fn path<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

/// With a comma every three digits.
pub(super) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// One decimal below a hundred, none above.
pub(super) fn rate(rate: f64) -> String {
    if !rate.is_finite() || rate < 0.0 {
        "?".into()
    } else if rate < 99.95 {
        format!("{rate:.1}")
    } else {
        count(rate.round() as u64)
    }
}

/// Of a fraction, with two decimals.
pub(super) fn percent(fraction: f64) -> String {
    format!("{:.2}%", fraction * 100.0)
}

/// In binary units.
pub(super) fn bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        _ => {
            let (mut value, mut unit) = (bytes as f64 / 1024.0, 0);
            while value >= 999.95 && unit < 3 {
                (value, unit) = (value / 1024.0, unit + 1);
            }
            format!("{value:.1} {}", ["KiB", "MiB", "GiB", "TiB"][unit])
        }
    }
}

/// Two units at most.
pub(super) fn seconds(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "?".into();
    }
    if seconds < 59.5 {
        return if seconds < 9.95 { format!("{seconds:.1} s") } else { format!("{seconds:.0} s") };
    }
    let total = seconds.round() as u64;
    let (days, hours, minutes, rest) = (total / 86_400, total / 3600 % 24, total / 60 % 60, total % 60);
    match (days, hours) {
        (0, 0) => format!("{minutes} min {rest} s"),
        (0, _) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

pub(super) fn milliseconds(ms: f64) -> String {
    match ms {
        _ if !ms.is_finite() || ms < 0.0 => "?".into(),
        0.0 => "0 ms".into(),
        _ if ms < 9.995 => format!("{ms:.2} ms"),
        _ if ms < 999.5 => format!("{ms:.0} ms"),
        _ => seconds(ms / 1000.0),
    }
}

/// Text from data, fit to be shown: no control characters, at most 500 characters.
pub(super) fn one_line(text: &str) -> String {
    let shown = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut line: String = shown.clone().take(LINE_CHARS).collect();
    if shown.count() > LINE_CHARS {
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_data_cannot_steer_the_terminal() {
        assert_eq!(one_line("a\n\u{1b}[2Jb"), "a  [2Jb");
        assert_eq!(one_line(&"é".repeat(501)), "é".repeat(500) + "…");
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0.0, 5.54, 99.96, 12_345.6, f64::NAN].map(rate), ["0.0", "5.5", "100", "12,346", "?"]);
        assert_eq!(
            [0, 1023, 1024, 1_048_575, 6 << 30, u64::MAX].map(bytes),
            ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "6.0 GiB", "16777216.0 TiB"]
        );
        assert_eq!(
            [0.0, 9.96, 59.4, 59.6, 219.0, 3600.0, 90_061.0, -1.0].map(seconds),
            ["0.0 s", "10 s", "59 s", "1 min 0 s", "3 min 39 s", "1 h 0 min", "1 d 1 h", "?"]
        );
        assert_eq!([0.0, 0.0123, 9.996, 999.6, 61_000.0].map(milliseconds), ["0 ms", "0.01 ms", "10 ms", "1.0 s", "1 min 1 s"]);
    }
}
