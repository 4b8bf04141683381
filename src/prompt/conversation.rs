//! A row's `messages` column into checked messages.

use std::borrow::Cow;

use serde_json::Value;

use super::template::{Content, Message, Part};
use crate::manifest::MediumKind;

/// Messages of one row; a conversation of more is no conversation.
const MESSAGES_MAX: usize = 10_000;

/// Reads a `messages` column: an array, or the JSON text of one, as CSV has it. The error is a sentence.
pub fn parse(column: &str, value: &Value) -> Result<Vec<Message>, String> {
    let value = match value {
        Value::String(text) => match serde_json::from_str::<Value>(text) {
            Ok(value) => Cow::Owned(value),
            Err(error) => return Err(format!("the column {column:?} is not the JSON of an array of messages: {error}")),
        },
        value => Cow::Borrowed(value),
    };
    let Value::Array(entries) = value.as_ref() else {
        return Err(format!("the column {column:?} must be an array of messages, and is {}", kind(&value)));
    };
    if entries.is_empty() {
        return Err(format!("the column {column:?} has no messages: give at least one, from the user"));
    }
    if entries.len() > MESSAGES_MAX {
        return Err(format!("the column {column:?} has {} messages; a row has {MESSAGES_MAX} at most", entries.len()));
    }
    entries.iter().zip(1..).map(|(entry, number)| message(entry).map_err(|error| format!("message {number} {error}"))).collect()
}

fn message(entry: &Value) -> Result<Message, String> {
    let Value::Object(fields) = entry else {
        return Err(format!("must be an object with role and content, and is {}", kind(entry)));
    };
    for (name, value) in fields {
        match name.as_str() {
            "role" | "content" | "name" | "reasoning_content" | "thinking" | "reasoning" => {}
            _ if value.is_null() => {}
            "tool_calls" | "tool_call_id" | "function_call" => return Err(format!("has {name:?}: tools are not yet supported")),
            _ => return Err(format!("has the unknown key {name:?}: known are role, content, name, reasoning_content")),
        }
    }
    let text = |name: &str| match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(format!("has a {name} that is {} instead of text", kind(other))),
    };
    let role = text("role")?.filter(|role| !role.is_empty()).ok_or("has no role: system, user or assistant")?;
    let content = match fields.get("content") {
        None | Some(Value::Null) => return Err("has no content".to_owned()),
        Some(Value::String(text)) => Content::Text(text.clone()),
        Some(Value::Array(parts)) if parts.is_empty() => return Err("has no parts in its content".to_owned()),
        Some(Value::Array(parts)) => Content::Parts(parts.iter().map(part).collect::<Result<_, _>>()?),
        Some(other) => return Err(format!("has content that is {} instead of text or an array of parts", kind(other))),
    };
    // The names under which reasoning is passed, the first of which templates read: transformers' `_alias_reasoning_fields`.
    let mut reasoning = None;
    for name in ["reasoning_content", "thinking", "reasoning"] {
        reasoning = reasoning.or(text(name)?);
    }
    Ok(Message { thinking: reasoning.clone(), role, content, name: text("name")?, reasoning_content: reasoning })
}

fn part(part: &Value) -> Result<Part, String> {
    match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
        (Some("text" | "input_text"), Some(text)) => Ok(Part::Text { text: text.to_owned() }),
        (Some("text" | "input_text"), None) => Err("has a text part without text".to_owned()),
        (Some(kind @ ("video" | "video_url" | "input_video")), _) => {
            Err(format!("has a part of type {kind:?}, which is not yet supported: text, images and audio are"))
        }
        (Some(kind), _) => match MediumKind::of_part(kind) {
            Some(MediumKind::Image) => Ok(Part::Image),
            Some(MediumKind::Audio) => Ok(Part::Audio),
            None => Err(format!("has a part of unknown type {kind:?}: use text, image_url or input_audio")),
        },
        (None, _) => Err("has a part without a type: write {\"type\": \"text\", \"text\": …}".to_owned()),
    }
}

pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Of a conversation with an image or a recording in a message that is not its user's, the sentence for a chat template that does
/// not write it; a system message before others.
pub(super) fn misplaced(messages: &[Message]) -> Option<String> {
    let has = |message: &Message, wanted: &Part| matches!(&message.content, Content::Parts(parts) if parts.contains(wanted));
    let places = messages.iter().zip(1..).filter_map(|(message, number)| match message {
        message if message.role == "user" => None,
        message if has(message, &Part::Image) => Some((number, &message.role, MediumKind::Image)),
        message if has(message, &Part::Audio) => Some((number, &message.role, MediumKind::Audio)),
        _ => None,
    });
    let (number, role, kind) =
        places.min_by_key(|(number, role, _)| (!matches!(role.as_str(), "system" | "developer"), *number))?;
    Some(format!(
        "message {number}, whose role is {role:?}, has {}, which the model's chat template does not write there: move it into a message \
         whose role is \"user\"",
        kind.name()
    ))
}

/// Changes every string that a row gave.
pub(super) fn map_texts(messages: &mut [Message], map: impl Fn(&str) -> Cow<'_, str>) {
    let apply = |text: &mut String| {
        if let Cow::Owned(new) = map(text) {
            *text = new;
        }
    };
    for message in messages {
        apply(&mut message.role);
        message.name.as_mut().map(apply);
        message.reasoning_content.as_mut().map(apply);
        message.thinking.as_mut().map(apply);
        match &mut message.content {
            Content::Text(text) => apply(text),
            Content::Parts(parts) => parts.iter_mut().filter_map(Part::text_mut).for_each(&apply),
        }
    }
}

/// The conversation's texts alone, for a model that has no template for more.
pub(super) fn plain(messages: &[Message]) -> String {
    let mut text = String::new();
    for message in messages {
        let parts: Vec<&str> = match &message.content {
            Content::Text(text) => vec![text],
            Content::Parts(parts) => parts.iter().map(Part::text).collect(),
        };
        for part in parts {
            if !text.is_empty() {
                text.push('\n');
            }
            text.push_str(part);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn refused(value: Value, expected: &str) {
        let message = parse("messages", &value).unwrap_err();
        assert!(message.contains(expected), "{message:?} does not say {expected:?}");
    }

    #[test]
    fn messages_are_read_from_an_array_or_its_text() {
        let value = json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "tool_calls": null}]);
        let messages = parse("messages", &value).unwrap();
        assert_eq!(plain(&messages), "a\nb\nc");
        assert_eq!(parse("messages", &Value::String(value.to_string())).unwrap(), messages);
    }

    #[test]
    fn media_outside_of_the_users_messages_are_named() {
        let of = |value: Value| misplaced(&parse("messages", &value).unwrap());
        let (image, audio) = (json!({"type": "image"}), json!({"type": "audio"}));
        let user = json!({"role": "user", "content": [image, audio]});
        let system = json!({"role": "system", "content": [{"type": "text", "text": "a"}, image]});
        let assistant = json!({"role": "assistant", "content": [audio]});
        assert_eq!(of(json!([user])), None);
        let sentence = of(json!([system, user])).unwrap();
        assert!(sentence.starts_with("message 1, whose role is \"system\", has an image, which"), "{sentence}");
        let sentence = of(json!([user, assistant])).unwrap();
        assert!(sentence.starts_with("message 2, whose role is \"assistant\", has a recording, which"), "{sentence}");
        assert!(of(json!([user, assistant, system])).unwrap().starts_with("message 3"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        refused(json!("hello"), "is not the JSON of an array");
        refused(json!({"role": "user"}), "must be an array of messages, and is an object");
        refused(json!([]), "has no messages");
        refused(json!(["hi"]), "message 1 must be an object with role and content, and is text");
        refused(json!([{"role": "user", "content": "a"}, {"content": "b"}]), "message 2 has no role");
        refused(json!([{"role": "user"}]), "message 1 has no content");
        refused(json!([{"role": "user", "content": 5}]), "content that is a number");
        refused(json!([{"role": 1, "content": "a"}]), "role that is a number");
        refused(json!([{"role": "user", "contents": "a"}]), "unknown key \"contents\"");
        refused(json!([{"role": "user", "content": "a", "tool_calls": [1]}]), "tools are not yet supported");
        refused(json!([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]), "not yet supported");
        refused(json!([{"role": "user", "content": [{"type": "smell"}]}]), "unknown type \"smell\"");
        refused(json!([{"role": "user", "content": ["a"]}]), "part without a type");
    }
}
