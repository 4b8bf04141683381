//! Where a row's own media stand in its message: where the job's template names them, or in front.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::template::Part;
use crate::job;
use crate::manifest::{Medium, MediumKind};

/// Around a medium's number, as the template writes it. Noncharacters, which Unicode keeps for use inside a program.
const IMAGE: char = '\u{fdd3}';
const AUDIO: char = '\u{fdd4}';
const BOTH: [char; 2] = [IMAGE, AUDIO];

/// A row's text, which must not name a medium so.
pub(super) fn without_places(text: &str) -> Cow<'_, str> {
    if text.contains(BOTH) { Cow::Owned(text.replace(BOTH, "")) } else { Cow::Borrowed(text) }
}

/// Whether a template's value is a medium's place.
pub(super) fn is_place(value: &minijinja::Value) -> bool {
    value.as_str().is_some_and(|text| text.starts_with(BOTH))
}

/// The template's variables that stand for media: the columns that name them, and `image`, `images` and `audio` where the row has
/// no such columns.
pub(super) fn variables(columns: &job::Columns, row: &Map<String, Value>, own: &[Medium]) -> Vec<(String, minijinja::Value)> {
    let places = |kind: MediumKind| {
        let of_kind = own.iter().enumerate().filter(move |(_, medium)| medium.kind == kind);
        of_kind.map(|(number, medium)| place(medium.kind, number)).collect::<Vec<String>>()
    };
    let (images, audio) = (places(MediumKind::Image), places(MediumKind::Audio));
    let mut variables = Vec::new();
    let mut put = |name: &str, value: minijinja::Value| {
        if variables.iter().all(|(known, _)| known != name) {
            variables.push((name.to_owned(), value));
        }
    };
    if !images.is_empty() {
        let several = row.get(&columns.image).is_some_and(Value::is_array);
        let own_value = if several { minijinja::Value::from(images.clone()) } else { images.concat().into() };
        put(&columns.image, own_value);
        if !row.contains_key("image") {
            put("image", images.concat().into());
        }
        if !row.contains_key("images") {
            put("images", minijinja::Value::from(images));
        }
    }
    if !audio.is_empty() {
        put(&columns.audio, audio.concat().into());
        if !row.contains_key("audio") {
            put("audio", audio.concat().into());
        }
    }
    variables
}

fn place(kind: MediumKind, number: usize) -> String {
    let mark = match kind {
        MediumKind::Image => IMAGE,
        MediumKind::Audio => AUDIO,
    };
    format!("{mark}{number}{mark}")
}

/// A message's parts, and the numbers of its media in their order: those that the text does not place stand in front of it.
///
/// The error is a sentence.
pub(super) fn parts(text: &str, own: &[Medium]) -> Result<(Vec<Part>, Vec<usize>), String> {
    let (mut placed, mut order) = (Vec::new(), Vec::new());
    let mut rest = text;
    while let Some(start) = rest.find(BOTH) {
        let (before, marked) = rest.split_at(start);
        push_text(&mut placed, before);
        let mut pieces = marked.splitn(3, BOTH);
        let number = pieces.nth(1).and_then(|number| number.parse::<usize>().ok());
        let (Some(number), Some(after)) = (number.filter(|number| *number < own.len()), pieces.next()) else {
            let error = "prompt.template changes the place of an image or a recording: write it as {{ image }}, without a filter";
            return Err(error.to_owned());
        };
        if order.contains(&number) {
            return Err(format!("prompt.template writes {} of the row twice; write each once", own[number].kind.name()));
        }
        order.push(number);
        placed.push(part(own[number].kind));
        rest = after;
    }
    push_text(&mut placed, rest);
    let in_front: Vec<usize> = (0..own.len()).filter(|number| !order.contains(number)).collect();
    let parts = in_front.iter().map(|number| part(own[*number].kind)).chain(placed).collect();
    Ok((parts, in_front.into_iter().chain(order).collect()))
}

fn push_text(parts: &mut Vec<Part>, text: &str) {
    if !text.is_empty() {
        parts.push(Part::Text { text: text.to_owned() });
    }
}

pub(super) fn part(kind: MediumKind) -> Part {
    match kind {
        MediumKind::Image => Part::Image,
        MediumKind::Audio => Part::Audio,
    }
}
