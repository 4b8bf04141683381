//! Templates and tokenizers against what transformers, tokenizers and llama.cpp gave; see `fixtures/` for the scripts.

use std::fs;
use std::path::{Path, PathBuf};

use minijinja::value::Serde;
use mlxbatch::model;
use mlxbatch::model::gguf::{Array, Gguf, Value as Meta};
use mlxbatch::prompt::{ChatTemplate, Detokenizer, Tokens, parse_messages};
use serde_json::Value;

fn golden(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))).unwrap()
}

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The folder of real models, or a line that says what was left out.
pub fn models(test: &str, file: &str) -> Option<PathBuf> {
    let path = std::env::var_os("MLXBATCH_MODELS").map(|folder| Path::new(&folder).join(file)).filter(|path| path.exists());
    if path.is_none() {
        println!("skipped: {test} needs {file} in the folder that MLXBATCH_MODELS names");
    }
    path
}

/// Special token variables of a golden, in the names that templates use.
fn special_tokens(tokens: &Value) -> Vec<(&'static str, String)> {
    ["bos_token", "eos_token", "unk_token", "pad_token"]
        .into_iter()
        .filter_map(|name| Some((name, tokens.get(name)?.as_str()?.to_owned())))
        .collect()
}

/// Renders all cases; returns how many differ, after printing the first differences.
fn differences(name: &str, template: &ChatTemplate, cases: &Value, conversations: &Value) -> usize {
    let mut differ = 0;
    for case in cases.as_array().unwrap() {
        let conversation = case["conversation"].as_str().unwrap();
        let messages = parse_messages("messages", &conversations[conversation]).unwrap();
        let messages = minijinja::Value::from(Serde(&messages));
        let add_generation_prompt = case["add_generation_prompt"].as_bool().unwrap();
        let thinking = case.get("enable_thinking").and_then(Value::as_bool);
        let rendered = template.render_with(&messages, add_generation_prompt, thinking);
        let expected = case["rendered"].as_str();
        if rendered.as_deref().ok() != expected {
            differ += 1;
            if differ <= 3 {
                println!(
                    "{name} {conversation:?}: expected\n{}\ngot\n{}\n",
                    expected.unwrap_or("(refused)"),
                    match &rendered {
                        Ok(text) => text.clone(),
                        Err(error) => format!("error: {error}"),
                    }
                );
            }
        }
    }
    differ
}

#[test]
fn templates_render_as_transformers_renders_them() {
    let golden = golden(&root("goldens/prompt/templates.json"));
    let mut differ = 0;
    for (name, cases) in golden["templates"].as_object().unwrap() {
        let source = fs::read_to_string(root("fixtures/templates").join(name)).unwrap();
        let template = ChatTemplate::new(&source, special_tokens(&golden["special_tokens"]), name).unwrap();
        differ += differences(name, &template, cases, &golden["conversations"]);
    }
    assert_eq!(differ, 0, "renderings that differ");
}

/// Real templates whose licences keep them out of this repository.
#[test]
fn templates_of_real_models_render_as_transformers_renders_them() {
    let Some(path) = models("templates_of_real_models", "templates.json") else { return };
    let all = golden(&path);
    let mut differ = 0;
    for (name, model) in all["models"].as_object().unwrap() {
        let folder = path.parent().unwrap().join(name);
        let config = golden(&folder.join("tokenizer_config.json"));
        let source = config["chat_template"].as_str().unwrap();
        let template = ChatTemplate::new(source, special_tokens(&config), name).unwrap();
        differ += differences(name, &template, &model["cases"], &all["conversations"]);
        let tokens =
            Tokens::from_json(&fs::read_to_string(folder.join("tokenizer.json")).unwrap(), Some(template.source())).unwrap();
        for case in model["sanitized"].as_array().unwrap() {
            let mut messages = parse_messages("messages", &case["messages"]).unwrap();
            tokens.mark_messages(&mut messages);
            let messages = minijinja::Value::from(Serde(&messages));
            let ids = template.render_with(&messages, true, None).map_err(|error| error.to_string());
            let ids = ids.and_then(|text| tokens.encode_marked(&text, false).map_err(|error| error.to_string()));
            let ids = ids.as_ref().map(|ids| Value::from(ids.clone()));
            if ids.as_ref().unwrap_or(&Value::Null) != &case["ids"] {
                differ += 1;
                println!("{name} {}: expected\n{}\ngot\n{ids:?}", case["messages"], case["ids"]);
            }
        }
    }
    assert_eq!(differ, 0, "renderings that differ");
}

/// Encodes and decodes all cases, whole and token by token.
fn check_tokens(name: &str, tokens: &Tokens, cases: &Value) {
    let mut differ = 0;
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids = tokens.encode(text, false).unwrap();
        let decoded = tokens.decode(&ids);
        let with_special = tokens.encode(text, true).unwrap();
        let mut detokenizer = Detokenizer::default();
        let mut joined: String = ids.iter().map(|&id| detokenizer.push(tokens, id)).collect();
        joined += &detokenizer.finish(tokens);
        let expected_special = case.get("with_special").unwrap_or(&case["ids"]);
        if Value::from(ids.clone()) != case["ids"]
            || decoded != case["decoded"]
            || Value::from(with_special.clone()) != *expected_special
            || joined != decoded
        {
            differ += 1;
            println!(
                "{name} {text:?}: expected {} {} {expected_special}\ngot {ids:?} {decoded:?} {with_special:?} {joined:?}",
                case["ids"], case["decoded"]
            );
        }
    }
    assert_eq!(differ, 0, "{name}: texts that differ");
}

#[test]
fn smollm2_tokenizes_as_the_python_library_does() {
    let Some(path) = models("smollm2_tokenizes", "SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let files = model::locate(path.to_str().unwrap()).unwrap();
    let tokens = Tokens::of_model(&files, None).unwrap();
    check_tokens("SmolLM2", &tokens, &golden(&root("goldens/prompt/smollm2_tokens.json"))["cases"]);
}

/// Gemma 3 rebuilt from GGUF metadata equals Google's own tokenizer.json.
#[test]
fn gemma3_from_gguf_tokenizes_as_its_tokenizer_json_does() {
    let (Some(path), Some(all)) =
        (models("gemma3_from_gguf", "gemma-3-270m-q4_k_m.gguf"), models("gemma3_from_gguf", "tokens.json"))
    else {
        return;
    };
    let files = model::locate(path.to_str().unwrap()).unwrap();
    let tokens = Tokens::of_model(&files, None).unwrap();
    let mut cases = golden(&all)["gemma3"].clone();
    // The file calls `<unused0>` a control token, which has no text; tokenizer.json does not.
    for case in cases.as_array_mut().unwrap() {
        if let Some(rest) = case["decoded"].as_str().unwrap().strip_prefix("<unused0>") {
            case["decoded"] = rest.to_owned().into();
        }
    }
    check_tokens("gemma3", &tokens, &cases);
}

#[test]
fn tokenizer_json_of_real_models_is_read_as_the_python_library_reads_it() {
    let Some(path) = models("tokenizer_json_of_real_models", "tokens.json") else { return };
    for (name, cases) in golden(&path).as_object().unwrap().iter().filter(|(_, cases)| cases.is_array()) {
        let json = fs::read_to_string(path.parent().unwrap().join(name).join("tokenizer.json")).unwrap();
        check_tokens(name, &Tokens::from_json(&json, None).unwrap(), cases);
    }
}

/// Metadata as a converter would write them from a byte-level tokenizer.json.
fn as_gguf(json: &Value, pre: &str) -> Gguf {
    let vocabulary = json["model"]["vocab"].as_object().unwrap();
    let added = json["added_tokens"].as_array().unwrap();
    let mut tokens: Vec<(u64, String, i64)> =
        vocabulary.iter().map(|(token, id)| (id.as_u64().unwrap(), token.clone(), 1)).collect();
    for token in added {
        let kind = if token["special"].as_bool().unwrap() { 3 } else { 4 };
        tokens.push((token["id"].as_u64().unwrap(), token["content"].as_str().unwrap().to_owned(), kind));
    }
    tokens.sort();
    let merge = |merge: &Value| match merge {
        Value::String(merge) => merge.clone(),
        pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
    };
    let merges = json["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    let entries = [
        ("model", Meta::String("gpt2".to_owned())),
        ("pre", Meta::String(pre.to_owned())),
        ("tokens", Meta::Array(Array::String(tokens.iter().map(|token| token.1.clone()).collect()))),
        ("token_type", Meta::Array(Array::Signed(tokens.iter().map(|token| token.2).collect()))),
        ("merges", Meta::Array(Array::String(merges))),
        ("add_bos_token", Meta::Bool(false)),
    ];
    let metadata = entries.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect();
    Gguf { file: "m.gguf".into(), version: 3, metadata, tensors: vec![], data_offset: 0, file_bytes: 0 }
}

#[test]
fn vocabularies_of_real_models_are_rebuilt_from_metadata() {
    let Some(path) = models("vocabularies_of_real_models", "tokens.json") else { return };
    let all = golden(&path);
    for (name, pre) in [("qwen3", "qwen2"), ("llama3", "llama-bpe")] {
        let json = golden(&path.parent().unwrap().join(name).join("tokenizer.json"));
        let tokens = Tokens::from_gguf(&as_gguf(&json, pre), None).unwrap();
        check_tokens(name, &tokens, &all[name]);
    }
}
