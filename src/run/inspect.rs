//! `mlxbatch inspect`: what a model is.

use std::fmt::Write as _;

use anyhow::Result;
use bytesize::ByteSize;
use serde_json::json;

use super::{Status, print};
use crate::{
    args,
    model::{self, ModelSummary},
    prompt::ChatTemplate,
};

pub fn inspect(args: &args::Inspect) -> Result<Status> {
    let files = model::locate(&args.model)?;
    let template = ChatTemplate::of_model(&files)?;
    let summary = ModelSummary::new(&files, template.is_some())?;
    let text = if args.json { serde_json::to_string_pretty(&as_json(&summary))? + "\n" } else { describe(&summary) };
    print(&text)?;
    Ok(if summary.supported.is_ok() { Status::Ok } else { Status::Failed })
}

fn as_json(model: &ModelSummary) -> serde_json::Value {
    let (full, window) = model.kv_bytes_per_token(2);
    json!({
        "model": model.name,
        "family": model.family,
        "supported": model.supported.is_ok(),
        "unsupported_reason": model.supported.as_ref().err(),
        "parameters": model.parameters,
        "weight_bytes": model.weight_bytes,
        "bytes_by_dtype": model.dtypes,
        "quantization": model.quantization.as_ref().map(|quantization| json!({
            "bits": quantization.bits,
            "group_size": quantization.group_size,
            "mode": quantization.mode,
            "overrides": quantization.overrides,
        })),
        "layers": model.layers,
        "full_layers": model.full_layers,
        "window_layers": model.window_layers,
        "window_tokens": model.window_tokens,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "context_length": model.context_length,
        "vocabulary": model.vocab_size,
        "kv_bytes_per_token_16_bit": full + window,
        "encoder": model.encoder.map(|encoder| json!({
            "layers": encoder.layers,
            "heads": encoder.heads,
            "mel_bins": encoder.mel_bins,
            "window_seconds": encoder.window_seconds(),
            "tokens": encoder.tokens,
            "kv_bytes_per_row_16_bit": model.cross_bytes_per_row(2),
        })),
        "chat_template": model.chat_template,
        "inputs": model.inputs,
        "stop_tokens": model.stop_tokens,
    })
}

fn describe(model: &ModelSummary) -> String {
    let size = |bytes: u64| ByteSize(bytes).to_string();
    let mut text = String::new();
    let mut line = |name: &str, words: String| {
        let _ = writeln!(text, "  {name:<14} {words}");
    };
    line("model", model.name.clone());
    line(
        "family",
        match &model.supported {
            Ok(()) => model.family.clone(),
            Err(reason) => format!("{} — cannot be run: {reason}", model.family),
        },
    );
    line("parameters", format!("{:.1} million", model.parameters as f64 / 1e6));
    let dtypes: Vec<String> = model.dtypes.iter().map(|(dtype, bytes)| format!("{dtype} {}", size(*bytes))).collect();
    line("weights", format!("{} ({})", size(model.weight_bytes), dtypes.join(", ")));
    if let Some(quantization) = &model.quantization {
        let overrides = match quantization.overrides.len() {
            0 => String::new(),
            count => format!(", {count} layers otherwise"),
        };
        let (bits, group_size, mode) = (quantization.bits, quantization.group_size, &quantization.mode);
        line("quantization", format!("{mode}, {bits} bits in groups of {group_size}{overrides}"));
    }
    let windows = match model.window_tokens {
        Some(tokens) => format!(" ({} full, {} with a window of {tokens} tokens)", model.full_layers, model.window_layers),
        None => String::new(),
    };
    line("layers", format!("{}{windows}", model.layers));
    line("attention", format!("{} heads, {} for keys and values, of {} numbers", model.heads, model.kv_heads, model.head_dim));
    line("context", model.context_length.map_or("not stated".into(), |tokens| format!("{tokens} tokens")));
    line("vocabulary", model.vocab_size.map_or("not stated".into(), |tokens| format!("{tokens} tokens")));
    let of = |bytes: u64| {
        let (full, window) = model.kv_bytes_per_token(bytes);
        if window == 0 { size(full) } else { format!("{} (+ {} within the window)", size(full), size(window)) }
    };
    line("cache", format!("{} a token in 16 bits, {} in float32", of(2), of(4)));
    if let Some(encoder) = &model.encoder {
        let window = format!("windows of {} s as {} mel bins", encoder.window_seconds(), encoder.mel_bins);
        line("encoder", format!("{} layers, {} heads, {window} become {} tokens", encoder.layers, encoder.heads, encoder.tokens));
        let (half, full) = (size(model.cross_bytes_per_row(2)), size(model.cross_bytes_per_row(4)));
        line("heard", format!("{half} a row in 16 bits, {full} in float32"));
    }
    line("takes", model.inputs.join(", "));
    line("chat template", if model.chat_template { "yes".into() } else { "no".into() });
    line("stop tokens", format!("{:?}", model.stop_tokens));
    text
}
