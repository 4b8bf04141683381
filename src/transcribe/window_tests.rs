//! What follows a pass, with passes made up: tokens are bytes, and ids from 300 on are timestamps.

use std::{path::Path, sync::Arc};

use super::*;
use crate::{
    job::Job,
    prompt::Tokens,
    schedule::{SpeechRules, TimestampRules},
    transcribe::Speech,
};

const END: u32 = 256;
const BEGIN: u32 = 300;

fn transcriber(settings: &str) -> Transcriber {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("job.toml");
    let text = format!("[model]\npath = \"fake\"\n[input]\nmanifest = [\"a.jsonl\"]\n[transcription]\n{settings}\n");
    std::fs::write(&file, text).unwrap();
    let job = Job::read(Path::new(&file), &[]).unwrap();
    let speech = Speech {
        start_of_transcript: 257,
        start_of_previous: Some(258),
        no_timestamps: None,
        languages: vec![("en".into(), 260), ("de".into(), 261)],
        task: Some(270),
    };
    let timestamps = Some(TimestampRules { begin: BEGIN, no_timestamps: 299, initial_max: Some(50) });
    let rules = SpeechRules { end_of_text: END, timestamps, languages: vec![260, 261], ..SpeechRules::default() };
    Transcriber::with(&job, Arc::new(Tokens::bytes()), speech, rules, Vec::new(), 448)
}

fn window(seconds: usize) -> WindowTranscript {
    let features = Features { frames: 100 * seconds, bins: 1, values: vec![0.0; 100 * seconds] };
    WindowTranscript::new(Arc::new(features), Language::Known(260))
}

/// `<n>` is the timestamp of n hundredths of a second, the rest is text.
fn tokens(text: &str) -> Vec<u32> {
    let mut tokens = Vec::new();
    for (place, piece) in text.split('<').enumerate() {
        let rest = match piece.split_once('>').filter(|_| place > 0) {
            Some((hundredths, rest)) => {
                tokens.push(BEGIN + hundredths.parse::<u32>().unwrap() / 2);
                rest
            }
            None => piece,
        };
        tokens.extend(rest.bytes().map(u32::from));
    }
    tokens.push(END);
    tokens
}

/// A pass of that mean log-probability.
fn heard(text: &str, avg_logprob: f32, no_speech_prob: f32) -> Heard {
    let tokens = tokens(text);
    Heard { sum_logprob: avg_logprob * tokens.len() as f32, tokens, cut: false, no_speech_prob }
}

fn done(next: Next) -> Transcript {
    match next {
        Next::Done(transcript) => *transcript,
        Next::Pass(pass) => panic!("{pass:?} instead of an end"),
    }
}

fn again(next: Next) -> Pass {
    match next {
        Next::Pass(pass) => pass,
        Next::Done(transcript) => panic!("{transcript:?} instead of another pass"),
    }
}

#[test]
fn segments_are_cut_at_pairs_of_timestamps_and_the_next_pass_goes_on_from_the_last() {
    let transcriber = transcriber("");
    let mut window = window(12);
    let pass = again(window.take(&transcriber, heard("<0> One.<250><250> Two.<500><500> Thr", -0.2, 0.0)));
    assert_eq!(pass, Pass { seek: 500, attempt: 0, language: Language::Known(260) });
    // A timestamp alone at the end: nobody speaks behind it, so the window is done.
    let second = heard("<0> Three.<200><220> Four.<400>", -0.3, 0.0);
    let sampled = tokens("<0> One.<250><250> Two.<500><500> Thr").len() + second.tokens.len();
    let transcript = done(window.take(&transcriber, second));
    let segments: Vec<(f64, f64, &str)> =
        transcript.segments.iter().map(|segment| (segment.start, segment.end, segment.text.as_str())).collect();
    let expected = [(0.0, 2.5, " One."), (2.5, 5.0, " Two."), (5.0, 7.0, " Three."), (7.2, 9.0, " Four.")];
    for (own, wanted) in segments.iter().zip(expected) {
        assert!((own.0 - wanted.0).abs() < 1e-9 && (own.1 - wanted.1).abs() < 1e-9 && own.2 == wanted.2, "{segments:?}");
    }
    assert_eq!(segments.len(), 4);
    assert_eq!(transcript.text, " One. Two. Three. Four.");
    assert_eq!(transcript.completion_tokens as usize, sampled);
}

#[test]
fn a_pass_without_pairs_is_one_segment() {
    let transcriber = transcriber("");
    let transcript = done(window(6).take(&transcriber, heard("<0> All of it.<420>", -0.1, 0.0)));
    assert_eq!((transcript.segments[0].start, transcript.segments[0].end), (0.0, 4.2));
    let transcript = done(window(6).take(&transcriber, heard("<0> No end.", -0.1, 0.0)));
    assert_eq!(transcript.segments[0].end, 6.0);
    let transcript = done(window(6).take(&transcriber, heard("<0> <420>", -0.1, 0.0)));
    assert_eq!((transcript.segments.len(), transcript.text.as_str()), (0, ""), "blank is none");
}

#[test]
fn what_is_unlikely_or_repeats_itself_is_tried_again_warmer() {
    let transcriber = transcriber("temperatures = [0.0, 0.4, 0.8]");
    let mut window = window(6);
    assert_eq!(again(window.take(&transcriber, heard("<0> Mumble.<300>", -1.2, 0.0))).attempt, 1);
    assert_eq!(again(window.take(&transcriber, heard(&format!("<0>{}<300>", " la".repeat(60)), -0.1, 0.0))).attempt, 2);
    let transcript = done(window.take(&transcriber, heard("<0> Mumbled.<300>", -1.4, 0.0)));
    assert_eq!((transcript.text.as_str(), transcript.uncertain), (" Mumbled.", 1), "the last attempt is kept, and told of");
    assert_eq!(transcript.segments[0].temperature, 0.8);
}

#[test]
fn silence_is_not_written_down() {
    let transcriber = transcriber("");
    let transcript = done(window(6).take(&transcriber, heard("<0> Thanks for watching!<300>", -1.1, 0.7)));
    assert_eq!((transcript.text.as_str(), transcript.uncertain), ("", 0));
    let transcript = done(window(6).take(&transcriber, heard("<0> Said softly.<300>", -0.5, 0.7)));
    assert_eq!(transcript.text, " Said softly.", "what is likely is kept, however silent it is said to be");
}

#[test]
fn a_repetition_in_silence_is_tried_again() {
    let transcriber = transcriber("temperatures = [0.0, 1.0]");
    let mut window = window(6);
    assert_eq!(again(window.take(&transcriber, heard(&format!("<0>{}<300>", " ...".repeat(60)), -0.1, 0.9))).attempt, 1);
    assert_eq!(done(window.take(&transcriber, heard("<0> x y z<300>", -2.0, 0.9))).text, "");
}

#[test]
fn nonsense_is_left_out() {
    let transcriber = transcriber("temperatures = [0.0, 1.0]");
    let mut window = window(6);
    again(window.take(&transcriber, heard("<0> Elisa projets<300>", -1.5, 0.5)));
    let transcript = done(window.take(&transcriber, heard("<0> Unie Continu40<300>", -5.7, 0.5)));
    assert_eq!((transcript.text.as_str(), transcript.nonsense, transcript.segments.len()), ("", 1, 0));
}

#[test]
fn a_language_is_taken_from_the_first_pass_and_told_from_then_on() {
    let transcriber = transcriber("");
    let mut window = window(12);
    window.language = Language::Detect;
    let mut first = heard("<0> Eins.<250><250>", -0.2, 0.0);
    first.tokens.splice(0..0, [261, 270]);
    let pass = again(window.take(&transcriber, first));
    assert_eq!((pass.language, pass.seek), (Language::Known(261), 250));
    let request = transcriber.request(crate::schedule::SequenceId(0), &window, pass, 7, 0);
    assert_eq!(request.prompt, [257, 261, 270], "start, language, task");
    let transcript = done(window.take(&transcriber, heard("<0> Zwei.<200>", -0.2, 0.0)));
    assert_eq!((transcript.text.as_str(), transcriber.code(transcript.language)), (" Eins. Zwei.", Some("de")));
}

#[test]
fn passes_of_a_window_end_though_the_model_never_moves_on() {
    let transcriber = transcriber("");
    let mut window = window(30);
    let mut passes = 0;
    while let Next::Pass(_) = window.take(&transcriber, heard("<0><0>", -0.1, 0.0)) {
        passes += 1;
        assert!(passes <= PLACES_MAX, "no end");
    }
}
