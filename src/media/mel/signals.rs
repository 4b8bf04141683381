//! Sounds for tests, the same to the bit as those of `fixtures/mel_goldens.py`: integers divided by powers of two.

/// A linear congruential generator's upper halves, -32768 ..= 32767.
pub fn numbers(mut state: u32) -> impl Iterator<Item = i64> {
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        i64::from(state >> 16) - 32_768
    })
}

/// Parabolas in place of a sine's halves, -32768 ..= 32768.
fn wave(phase: u64) -> i64 {
    let phase = phase as u32;
    let half = i64::from((phase >> 16) & 0x7FFF);
    let height = (half * (32_768 - half)) >> 13;
    if phase >> 31 == 1 { -height } else { height }
}

pub fn signal(name: &str, samples: usize) -> Vec<f32> {
    let noise = |divisor: f64| numbers(1).take(samples).map(|value| (value as f64 / divisor) as f32).collect();
    let at = 0..samples as u64;
    match name {
        "noise" => noise(32_768.0),
        "quiet" => noise(33_554_432.0),
        "tone" => at.map(|at| (wave(at * 118_111_601) as f64 / 65_536.0) as f32).collect(),
        "chirp" => at.map(|at| (wave(at * 26_843_546 + at * (at + 1) / 2 * 1_789) as f64 / 65_536.0) as f32).collect(),
        "bursts" => {
            let loudness = |at: u64| (at % 4096).min(2048u64.saturating_sub(at % 4096)) as i64;
            numbers(1).zip(at).map(|(value, at)| ((value * loudness(at)) as f64 / 33_554_432.0) as f32).collect()
        }
        "click" => at.map(|at| if at == samples as u64 / 2 { 1.0 } else { 0.0 }).collect(),
        "silence" => vec![0.0; samples],
        "constant" => vec![0.25; samples],
        _ => panic!("no signal is called {name}"),
    }
}
