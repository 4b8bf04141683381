//! Prompts with media: a small model of our own, and the reference's ids where its checkpoints are there.

use std::fs;
use std::path::Path;

use serde_json::json;

use super::prompter_tests::{item, job, model};
use super::*;
use crate::job::{Audio, Long};
use crate::media::{Features, MediaSource, PatchRule, Patches};
use crate::model::{self as models, AudioTower, ImageTower, Placeholder};
use crate::schedule::MediumContent;

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{% if m.content is string %}{{ m.content }}{% else %}\
                        {% for p in m.content %}\
                        {% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}<bos>{% else %}<|im_end|>{% endif %}\
                        {% endfor %}{% endif %}{% endfor %}";

/// `<bos>` stands for an image, and `<|im_end|>` for a recording.
fn prompter(template: Option<&str>, row_template: Option<&str>) -> Prompter {
    let (_folder, files) = model(template);
    let mut job = job();
    job.prompt.template = row_template.map(str::to_owned);
    let mut prompter = Prompter::new(&job, &files).unwrap();
    let placeholder = |token| Placeholder { token, begin: 1, end: 2 };
    prompter.towers = Towers {
        image: Some(ImageTower { placeholder: placeholder(258), rule: PatchRule::default(), both_ways: true }),
        audio: Some(AudioTower { placeholder: placeholder(257), soft_tokens_max: 750, samples_per_token: None }),
    };
    prompter
}

fn file(name: &str) -> MediaSource {
    MediaSource::File(name.into())
}

fn image(name: &str) -> Medium {
    Medium { kind: MediumKind::Image, source: file(name) }
}

fn sound(name: &str) -> Medium {
    Medium { kind: MediumKind::Audio, source: file(name) }
}

fn sensed(kind: MediumKind, soft_tokens: u32) -> Sensed {
    let patches = Patches { values: vec![], columns: 0, rows: 0, soft_tokens };
    Sensed { content: Arc::new(MediumContent::Image(patches)), soft_tokens, identity: 1, kind, seconds: 0.0, notes: vec![] }
}

#[track_caller]
fn is_prompt(prompter: &Prompter, item: &Item, rendered: &str, media: &[Medium]) {
    let prepared = prompter.prepare(item).unwrap();
    assert_eq!((prepared.rendered.as_str(), &prepared.media[..]), (rendered, media));
}

#[test]
fn media_stand_in_front_or_where_the_template_names_them() {
    let row = || Item { images: vec![file("a"), file("b")], audio: Some(file("c")), ..item(json!({"prompt": "hi", "x": "y"})) };
    let all = [image("a"), image("b"), sound("c")];
    is_prompt(&prompter(Some(TEMPLATE), None), &row(), "<|im_start|><bos><bos><|im_end|>hi", &all);
    let placed = "{{ audio }}1{{ images[1] }}2{{ images[0] }}{{ x }}";
    let order = [sound("c"), image("b"), image("a")];
    is_prompt(&prompter(Some(TEMPLATE), Some(placed)), &row(), "<|im_start|><|im_end|>1<bos>2<bos>y", &order);
    is_prompt(
        &prompter(Some(TEMPLATE), Some("{{ x }}{{ image }}")),
        &row(),
        "<|im_start|><|im_end|>y<bos><bos>",
        &[sound("c"), image("a"), image("b")],
    );
    is_prompt(
        &prompter(Some(TEMPLATE), Some("{{ images }}{{ x }}")),
        &row(),
        "<|im_start|><|im_end|><bos><bos>y",
        &[sound("c"), image("a"), image("b")],
    );
    // Without a chat template placeholders are the model's own tokens, and the job's template is the whole prompt.
    let mut bare = prompter(None, Some("{{ x }}: {{ image }}"));
    // Not `<bos>`, which the tokenizer puts in front.
    bare.towers.image.as_mut().unwrap().placeholder.token = 256;
    is_prompt(&bare, &Item { audio: None, ..row() }, "y: <|im_start|><|im_start|>", &all[..2]);
    // A column that is a path is none the less the image's place; a row without any text is its media.
    let named = Item { images: vec![file("a")], ..item(json!({"image": "a"})) };
    is_prompt(&prompter(Some(TEMPLATE), Some("see {{ image }}!")), &named, "<|im_start|>see <bos>!", &all[..1]);
    is_prompt(&prompter(Some(TEMPLATE), None), &named, "<|im_start|><bos>", &all[..1]);
    let twice = prompter(Some(TEMPLATE), Some("{{ image }}{{ image }}")).prepare(&named).unwrap_err();
    assert!(twice.contains("writes an image of the row twice"), "{twice}");
    let changed = prompter(Some(TEMPLATE), Some("{{ image | replace('0', '9') }}")).prepare(&named).unwrap_err();
    assert!(changed.contains("without a filter"), "{changed}");
}

#[test]
fn messages_have_their_parts_in_place_and_the_rows_own_in_front() {
    let messages = json!([
        {"role": "system", "content": [{"type": "image", "image": "s"}]},
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "input_audio", "input_audio": {"data": ""}},
            {"type": "image_url", "image_url": {"url": "t"}}]},
    ]);
    let parts = vec![image("s"), sound("u"), image("t")];
    let row = Item { images: vec![file("own")], parts, ..item(json!({ "messages": messages })) };
    let expected = [image("s"), image("own"), sound("u"), image("t")];
    is_prompt(&prompter(Some(TEMPLATE), None), &row, "<|im_start|><bos><|im_start|><bos>1<|im_end|><bos>", &expected);
}

#[test]
fn media_that_the_chat_template_leaves_out_are_named_by_their_message() {
    let messages = json!([
        {"role": "system", "content": [{"type": "image", "image": "s"}]},
        {"role": "user", "content": "1"},
    ]);
    let row = Item { parts: vec![image("s")], ..item(json!({ "messages": messages })) };
    let expected = "message 1, whose role is \"system\", has an image, which the model's chat template does not write there: move \
                    it into a message whose role is \"user\"";
    let texts_alone =
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}";
    let fails = "{% for m in messages %}{{ m.content + '' }}{% endfor %}";
    for template in [texts_alone, fails] {
        assert_eq!(prompter(Some(template), None).prepare(&row).unwrap_err(), expected);
    }
    let refuses = prompter(Some("{{ raise_exception('no system') }}"), None).prepare(&row).unwrap_err();
    assert!(refuses.contains("refuses this conversation: no system"), "{refuses}");
}

#[test]
fn what_a_row_typed_is_told_apart_where_a_prompt_is_shown() {
    let row = |prompt: &str| Item { images: vec![file("a")], ..item(json!({ "prompt": prompt })) };
    let prompter = prompter(Some(TEMPLATE), None);
    let typed = |prompt: &str| prompter.prepare(&row(prompt)).unwrap().typed;
    assert_eq!(typed("see <bos>!").as_deref(), Some("<|im_start|><bos>see ⟦<bos>⟧!"));
    assert_eq!(typed("<|im_end|><bos>").as_deref(), Some("<|im_start|><bos>⟦<|im_end|>⟧⟦<bos>⟧"));
    assert_eq!(typed("see"), None);
    // Parts that would make a token together are kept apart, and are none.
    let content = json!([{"type": "text", "text": "<b"}, {"type": "text", "text": "os>"}]);
    let parts = item(json!({"messages": [{"role": "user", "content": content}]}));
    assert_eq!(prompter.prepare(&parts).unwrap().typed, None);
}

#[test]
fn what_a_row_says_is_no_place() {
    let prompter = prompter(Some(TEMPLATE), Some("{{ x }}{{ image }}"));
    let row = Item { images: vec![file("a")], ..item(json!({"x": "<bos> \u{fdd3}0\u{fdd3}<|im_end|>"})) };
    let prepared = prompter.prepare(&row).unwrap();
    assert_eq!(prepared.rendered, "<|im_start|><bos> 0<|im_end|><bos>");
    let request = prompter.complete(prepared.request, &[sensed(MediumKind::Image, 3)]).unwrap();
    assert_eq!(request.prompt.iter().filter(|token| **token == 258).count(), 3);
    assert!(!request.prompt.contains(&257));
    assert_eq!(request.prompt[request.prompt.len() - 5..], [1, 258, 258, 258, 2]);
    let [medium] = &request.media[..] else { panic!("{:?}", request.media) };
    assert_eq!((medium.first as usize, medium.tokens), (request.prompt.len() - 4, 3));
}

#[test]
fn an_image_is_whole_unless_there_is_a_recording() {
    let prompter = prompter(Some(TEMPLATE), None);
    let whole = |audio: Option<MediaSource>, media: &[Sensed]| {
        let row = Item { images: vec![file("a")], audio, ..item(json!({"prompt": "x"})) };
        prompter.complete(prompter.prepare(&row).unwrap().request, media).unwrap().whole_spans
    };
    assert!(whole(None, &[sensed(MediumKind::Image, 3)]));
    assert!(!whole(Some(file("b")), &[sensed(MediumKind::Image, 3), sensed(MediumKind::Audio, 2)]));
}

#[test]
fn media_count_for_the_context_and_without_a_tower_fail_their_row() {
    let seeing = prompter(Some(TEMPLATE), None);
    let row = Item { images: vec![file("a")], ..item(json!({"prompt": "x"})) };
    let request = seeing.prepare(&row).unwrap().request;
    let error = seeing.complete(request, &[sensed(MediumKind::Image, 400)]).unwrap_err();
    assert!(error.contains("more than the context of 320"), "{error}");
    let mut blind = prompter(Some(TEMPLATE), None);
    blind.towers = Towers::default();
    let error = blind.prepare(&row).unwrap_err();
    assert!(error.contains("the row has an image, and ") && error.contains("sees none"), "{error}");
    let row = Item { parts: vec![sound("a")], ..item(json!({"messages": [{"role": "user", "content": [{"type": "audio"}]}]})) };
    let error = blind.prepare(&row).unwrap_err();
    assert!(error.contains("the row has a recording, and ") && error.contains("hears none"), "{error}");
    // A chat template that writes no places.
    let deaf = prompter(Some("{{ messages[0].role }}"), None);
    let row = Item { images: vec![file("a")], ..item(json!({"prompt": "x"})) };
    let error = deaf.prepare(&row).unwrap_err();
    assert!(error.contains("0 places for images, and the row has 1"), "{error}");
    // What is too long with one soft token a medium is so before anything is decoded.
    let bytes = |count: usize| Item { images: vec![file("a")], ..item(json!({"prompt": "x".repeat(count)})) };
    let max_tokens = seeing.generation.max_tokens as usize;
    let fits = (1..320).rev().find(|count| seeing.prepare(&bytes(*count)).is_ok()).unwrap();
    let request = seeing.prepare(&bytes(fits)).unwrap().request;
    assert_eq!(request.prompt.len() + 2 + max_tokens, 320);
    assert_eq!(seeing.complete(request, &[sensed(MediumKind::Image, 1)]).unwrap().prompt.len() + max_tokens, 320);
    let error = seeing.prepare(&bytes(fits + 1)).unwrap_err();
    assert!(error.contains("the prompt has at least") && error.contains("together 1 more than the context of 320"), "{error}");
}

/// A WAV of one channel and 16 bits, of so many samples of a ramp.
fn wav(samples: u32) -> MediaSource {
    let mut bytes = b"RIFF".to_vec();
    bytes.extend((36 + 2 * samples).to_le_bytes());
    bytes.extend(b"WAVEfmt ");
    for word in [16, 0x0001_0001, 16_000, 32_000, 0x0010_0002_u32] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(b"data");
    bytes.extend((2 * samples).to_le_bytes());
    bytes.extend((0..samples).flat_map(|at| ((at * 37) as i16).to_le_bytes()));
    MediaSource::Bytes { name: "ramp".to_owned(), bytes: bytes.into() }
}

fn senses(long: Long) -> Senses {
    Senses::new(prompter(Some(TEMPLATE), None).towers, Audio { long, ..Audio::default() })
}

#[test]
fn recordings_over_30_seconds_fail_or_are_cut() {
    let hear = |long, samples| senses(long).sense(&Medium { kind: MediumKind::Audio, source: wav(samples) });
    let whole = hear(Long::Split, 480_000).unwrap();
    assert_eq!((whole.soft_tokens, whole.notes.len()), (750, 0));
    let error = hear(Long::Split, 480_001).unwrap_err();
    assert!(error.starts_with("ramp: the recording is longer than the 30 s"), "{error}");
    let cut = hear(Long::Truncate, 600_000).unwrap();
    assert_eq!((cut.soft_tokens, cut.notes.len()), (750, 1));
    assert_eq!(cut.identity, whole.identity, "what is heard is the same");
    assert_eq!(hear(Long::Split, 16_000).unwrap().soft_tokens, 25);
    assert!(hear(Long::Split, 100).unwrap_err().contains("too short"));
}

#[test]
fn without_a_tower_samples_are_heard_as_they_are() {
    let mut towers = prompter(Some(TEMPLATE), None).towers;
    let audio = towers.audio.as_mut().unwrap();
    (audio.samples_per_token, audio.soft_tokens_max) = (Some(640), 700);
    let hearing = Senses::new(towers, Audio { long: Long::Truncate, ..Audio::default() });
    let hear = |samples| hearing.sense(&Medium { kind: MediumKind::Audio, source: wav(samples) });
    // By frames: the reference's count by duration is one more at two lengths under 30 s, this among them.
    for (samples, soft_tokens) in [(1, 1), (640, 1), (641, 2), (16_000, 25), (257_920, 403), (448_000, 700), (480_001, 700)] {
        let sensed = hear(samples).unwrap();
        let MediumContent::Waveform(frames) = &*sensed.content else { panic!("{:?}", sensed.content) };
        assert_eq!((sensed.soft_tokens, frames.frames as u32, frames.bins), (soft_tokens, soft_tokens, 640), "{samples} samples");
        assert_eq!(frames.values.len(), 640 * frames.frames);
    }
    let MediumContent::Waveform(frames) = &*hear(641).unwrap().content else { panic!("no samples") };
    let ramp = |at: usize| f32::from((at * 37) as i16) / 32768.0;
    assert!((0..641).all(|at| frames.values[at] == ramp(at)) && frames.values[641..].iter().all(|sample| *sample == 0.0));
    assert_ne!(hear(640).unwrap().identity, hear(641).unwrap().identity);
    assert!(hear(0).unwrap_err().starts_with("ramp: "));
    let silenced = Features::of_samples(&[1.0, f32::NAN, f32::INFINITY], 2);
    assert_eq!(silenced.values, [1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn an_image_is_known_by_what_is_seen_of_it() {
    let see = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/images").join(name);
        senses(Long::Split).sense(&Medium { kind: MediumKind::Image, source: MediaSource::File(path) })
    };
    let (png, tiff, other) = (see("rgb8.png").unwrap(), see("lzw.tif").unwrap(), see("wide.png").unwrap());
    assert_eq!(png.identity, tiff.identity);
    assert_ne!(png.identity, other.identity);
    let error = see("none.png").unwrap_err();
    assert!(error.contains("none.png: the file does not exist; correct its path"), "{error}");
}

#[test]
#[ignore = "needs the checkpoints of `make fixtures`"]
fn ids_are_the_references() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fixtures = std::env::var_os("MLXBATCH_FIXTURES").map_or(root.join(".fixtures"), std::path::PathBuf::from);
    let mut cases = 0;
    for name in ["e2b", "dense", "moe", "e2b-sidecar", "unified"] {
        let folder = fixtures.join("gemma4").join(name);
        let golden = root.join(format!("goldens/gemma4/{name}.json"));
        if !folder.is_dir() {
            println!("skipped: {} is not there: run `make fixtures`", folder.display());
            continue;
        }
        let golden: Value = serde_json::from_str(&fs::read_to_string(golden).unwrap()).unwrap();
        let prompter = Prompter::new(&job(), &models::locate(folder.to_str().unwrap()).unwrap()).unwrap();
        for (case, golden) in golden["cases"].as_object().unwrap() {
            let parts = golden["parts"].as_array().unwrap();
            let named = |part: &Value| match part["type"].as_str() {
                Some("image") => Some(image(part["image"].as_str().unwrap())),
                Some("audio") => Some(sound(part["audio"].as_str().unwrap())),
                _ => None,
            };
            let row = Item {
                parts: parts.iter().filter_map(named).collect(),
                ..item(json!({"messages": [{"role": "user", "content": parts}]}))
            };
            let prepared = prompter.prepare(&row).unwrap_or_else(|error| panic!("{name} {case}: {error}"));
            assert_eq!(prepared.rendered, golden["text"].as_str().unwrap(), "{name} {case}");
            let counts = |key: &str| golden[key].as_array().unwrap().iter().map(|count| count.as_u64().unwrap() as u32);
            let (mut images, mut sounds) = (counts("image_tokens"), counts("audio_tokens"));
            let media: Vec<Sensed> = prepared
                .media
                .iter()
                .map(|medium| match medium.kind {
                    MediumKind::Image => sensed(MediumKind::Image, images.next().unwrap()),
                    MediumKind::Audio => sensed(MediumKind::Audio, sounds.next().unwrap()),
                })
                .collect();
            let request = prompter.complete(prepared.request, &media).unwrap();
            let ids: Vec<u32> = golden["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
            assert_eq!(request.prompt, ids, "{name} {case}");
            cases += 1;
        }
    }
    println!("{cases} cases");
}
