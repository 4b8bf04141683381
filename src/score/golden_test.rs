//! `goldens/normalizer.json`: Whisper's own normalizers, and jiwer's rates.

use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn golden(name: &str) -> Vec<Value> {
    let golden: Value = serde_json::from_str(include_str!("../../goldens/normalizer.json")).unwrap();
    golden[name].as_array().unwrap().clone()
}

#[track_caller]
fn check(normalizer: Normalizer, cases: &[Value]) {
    let differing: Vec<_> = cases
        .iter()
        .map(|case| (case[0].as_str().unwrap(), case[1].as_str().unwrap()))
        .filter_map(|(text, expected)| {
            let found = normalizer.normalize(text);
            (found != expected).then(|| format!("{text:?}\n  expected {expected:?}\n  found    {found:?}"))
        })
        .collect();
    let shown = differing.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
    assert!(differing.is_empty(), "{} of {} differ:\n{shown}", differing.len(), cases.len());
}

#[test]
fn english_is_whispers() {
    let cases = golden("english");
    assert!(cases.len() > 500);
    check(Normalizer::English, &cases);
}

#[test]
fn other_languages_are_whispers() {
    check(Normalizer::Basic { split_letters: false }, &golden("basic"));
    check(Normalizer::Basic { split_letters: true }, &golden("split_letters"));
}

#[test]
fn rates_are_jiwers() {
    for case in golden("scores") {
        let text = |name: &str| case[name].as_str().unwrap();
        let number = |name: &str| case[name].as_u64().unwrap() as u32;
        let normalizer = Normalizer::for_language(Some(text("language")));
        let score = compare(&normalizer, text("reference"), text("text")).unwrap();
        let expected = Score {
            words: number("words"),
            word_errors: number("word_errors"),
            characters: number("characters"),
            character_errors: number("character_errors"),
        };
        assert_eq!(score, expected, "{case}");
        for (found, expected) in [(score.wer(), &case["wer"]), (score.cer(), &case["cer"])] {
            assert!((found.unwrap() - expected.as_f64().unwrap()).abs() < 1e-12, "{case}");
        }
    }
}

/// `MLXBATCH_NORMALIZER=FILE`, of `fixtures/normalizer_goldens.py --sequences 100000 --out FILE`.
#[test]
#[ignore = "needs a file of many sequences"]
fn many_sequences_are_whispers() {
    let Ok(file) = std::env::var("MLXBATCH_NORMALIZER") else {
        eprintln!("skipped: many_sequences_are_whispers, MLXBATCH_NORMALIZER is not set");
        return;
    };
    let golden: Value = serde_json::from_str(&fs_err::read_to_string(file).unwrap()).unwrap();
    check(Normalizer::English, golden["english"].as_array().unwrap());
    check(Normalizer::Basic { split_letters: false }, golden["basic"].as_array().unwrap());
    check(Normalizer::Basic { split_letters: true }, golden["split_letters"].as_array().unwrap());
}

/// Words that numbers are made of, and anything else.
fn hostile() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        prop::sample::select(vec![
            "one",
            "twenty",
            "hundred",
            "decillion",
            "and a half",
            "double",
            "oh",
            "point",
            "5",
            "0.5",
            "$0.07",
            "¢7",
            "and",
            "per",
            "cent",
            "%",
            "minus",
            "dollars",
            "'s",
            "th",
            "1",
            "(",
            ")",
            "[",
            ">",
            ".",
            "٣",
            "first",
            "millions",
        ])
        .prop_map(str::to_owned),
        "\\PC{0,6}",
        "[0-9]{1,60}",
        any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(word, 0..20).prop_map(|words| words.join(" "))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_normalized(text in hostile()) {
        let english = Normalizer::English.normalize(&text);
        prop_assert!(!english.contains("  "));
        prop_assert_eq!(compare(&Normalizer::English, &text, &text).unwrap().word_errors, 0);
    }

    #[test]
    fn the_basic_normalizer_changes_nothing_twice(text in hostile(), split_letters: bool) {
        let basic = Normalizer::Basic { split_letters };
        let once = basic.normalize(&text);
        let trimmed = |text: &str| text.trim_matches(boundary::is_space).to_owned();
        prop_assert_eq!(trimmed(&basic.normalize(&once)), trimmed(&once));
    }
}
