//! Whisper's tensors under OpenAI's names, which mlx-whisper kept, in Hugging Face's.
//!
//! Sources: openai/whisper `whisper/model.py`; mlx-examples `whisper/mlx_whisper/whisper.py`; transformers
//! `models/whisper/convert_openai_to_hf.py`.

use std::collections::BTreeMap;

/// OpenAI's name of a part to Hugging Face's, the longest that fits first.
const PARTS: &[(&str, &str)] = &[
    ("cross_attn.query", "encoder_attn.q_proj"),
    ("cross_attn.key", "encoder_attn.k_proj"),
    ("cross_attn.value", "encoder_attn.v_proj"),
    ("cross_attn.out", "encoder_attn.out_proj"),
    ("cross_attn_ln", "encoder_attn_layer_norm"),
    ("attn.query", "self_attn.q_proj"),
    ("attn.key", "self_attn.k_proj"),
    ("attn.value", "self_attn.v_proj"),
    ("attn.out", "self_attn.out_proj"),
    ("attn_ln", "self_attn_layer_norm"),
    ("mlp.0", "fc1"),
    ("mlp.2", "fc2"),
    ("mlp1", "fc1"),
    ("mlp2", "fc2"),
    ("mlp_ln", "final_layer_norm"),
];

/// Parts outside the blocks. The positions are a tensor of their own, where Hugging Face has an embedding's weight.
const OUTER: &[(&str, &str)] = &[
    ("encoder.positional_embedding", "encoder.embed_positions.weight"),
    ("decoder.positional_embedding", "decoder.embed_positions.weight"),
    ("decoder.token_embedding", "decoder.embed_tokens"),
    ("encoder.ln_post", "encoder.layer_norm"),
    ("decoder.ln", "decoder.layer_norm"),
];

/// Tensors, or anything else by module, under Hugging Face's names; what has another name already keeps it.
pub(super) fn rename<T>(named: BTreeMap<String, T>) -> BTreeMap<String, T> {
    // Which heads follow the time, for timestamps of words: nothing that is computed here.
    named.into_iter().filter(|(name, _)| name != "alignment_heads").map(|(name, value)| (hugging_face(&name), value)).collect()
}

fn hugging_face(name: &str) -> String {
    let own = name.strip_prefix("model.").unwrap_or(name);
    let Some((side @ ("encoder" | "decoder"), rest)) = own.split_once('.') else { return name.to_owned() };
    if let Some((layer, part)) = rest.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')) {
        let renamed = replace(part, PARTS).unwrap_or_else(|| part.to_owned());
        return format!("model.{side}.layers.{layer}.{renamed}");
    }
    format!("model.{}", replace(own, OUTER).unwrap_or_else(|| own.to_owned()))
}

/// `name` with the first part of the table that it begins with, whole words only, replaced.
fn replace(name: &str, table: &[(&str, &str)]) -> Option<String> {
    table.iter().find_map(|(from, to)| {
        let rest = name.strip_prefix(from)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{to}{rest}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_come_under_one_name() {
        for (from, to) in [
            ("encoder.conv1.weight", "model.encoder.conv1.weight"),
            ("encoder.blocks.3.attn.query.scales", "model.encoder.layers.3.self_attn.q_proj.scales"),
            ("decoder.blocks.11.cross_attn_ln.bias", "model.decoder.layers.11.encoder_attn_layer_norm.bias"),
            ("decoder.blocks.0.cross_attn.out.weight", "model.decoder.layers.0.encoder_attn.out_proj.weight"),
            ("decoder.blocks.0.mlp.2.weight", "model.decoder.layers.0.fc2.weight"),
            ("decoder.blocks.0.mlp_ln.weight", "model.decoder.layers.0.final_layer_norm.weight"),
            ("decoder.token_embedding.weight", "model.decoder.embed_tokens.weight"),
            ("decoder.positional_embedding", "model.decoder.embed_positions.weight"),
            ("decoder.ln.weight", "model.decoder.layer_norm.weight"),
            ("encoder.ln_post.bias", "model.encoder.layer_norm.bias"),
            ("model.decoder.layers.1.self_attn.k_proj.weight", "model.decoder.layers.1.self_attn.k_proj.weight"),
            ("decoder.layers.1.fc1.weight", "model.decoder.layers.1.fc1.weight"),
            ("proj_out.weight", "proj_out.weight"),
            ("encoder.blocks.0.attnx.query.weight", "model.encoder.layers.0.attnx.query.weight"),
        ] {
            assert_eq!(hugging_face(from), to);
        }
        let kept = rename(BTreeMap::from([("alignment_heads".to_owned(), 1), ("decoder.ln.bias".to_owned(), 2)]));
        assert_eq!(kept, BTreeMap::from([("model.decoder.layer_norm.bias".to_owned(), 2)]));
    }
}
