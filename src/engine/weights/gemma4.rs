//! Tensors of a Gemma 4 under one set of names: `model.layers.…` for the text model, as a text model alone has them, and
//! `vision_tower.…`, `vision_embedder.…`, `embed_vision.…`, `audio_tower.…`, `embed_audio.…` for what sees and hears.
//!
//! Google's checkpoints have `model.language_model.layers.…` and `model.vision_tower.…`, MLX's have
//! `language_model.model.layers.…` and `vision_tower.…`. Those that mlx-optiq writes have the towers, unquantized, in a file of
//! their own beside a quantized text model.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::model::SIDECAR;

/// Whether `config` is of this family, with or without towers.
pub fn is_one(config: &Value) -> bool {
    matches!(
        config.get("model_type").and_then(Value::as_str),
        Some("gemma4" | "gemma4_text" | "gemma4_unified" | "gemma4_unified_text")
    )
}

/// The towers' own file beside `files`, where there is one that is not among them.
pub fn sidecar(files: &[PathBuf]) -> Option<PathBuf> {
    let sidecar = files.first().and_then(|file| file.parent()).unwrap_or(Path::new("")).join(SIDECAR);
    (sidecar.is_file() && !files.contains(&sidecar)).then_some(sidecar)
}

/// Tensors, or whatever else goes by the names of modules.
pub fn rename<T>(named: BTreeMap<String, T>) -> BTreeMap<String, T> {
    named.into_iter().map(|(name, value)| (renamed(&name), value)).collect()
}

fn renamed(name: &str) -> String {
    const MODULES: [&str; 6] =
        ["language_model.", "vision_tower.", "vision_embedder.", "embed_vision.", "audio_tower.", "embed_audio."];
    let inner = name.strip_prefix("model.").filter(|rest| MODULES.iter().any(|module| rest.starts_with(module))).unwrap_or(name);
    let Some(text) = inner.strip_prefix("language_model.") else { return inner.to_owned() };
    if text.starts_with("model.") || text.starts_with("lm_head.") || text == "lm_head" {
        return text.to_owned();
    }
    format!("model.{text}")
}

#[cfg(test)]
mod tests {
    use super::renamed;

    #[test]
    fn every_layout_has_one_set_of_names() {
        let cases = [
            ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("language_model.model.layers.0.mlp.up_proj.scales", "model.layers.0.mlp.up_proj.scales"),
            ("language_model.model.embed_tokens", "model.embed_tokens"),
            ("model.language_model.embed_tokens_per_layer.weight", "model.embed_tokens_per_layer.weight"),
            ("language_model.lm_head.weight", "lm_head.weight"),
            ("model.layers.0.layer_scalar", "model.layers.0.layer_scalar"),
            ("model.audio_tower.layers.0.norm.weight", "audio_tower.layers.0.norm.weight"),
            ("vision_tower.std_bias", "vision_tower.std_bias"),
            ("model.vision_embedder.pos_embedding", "vision_embedder.pos_embedding"),
            ("model.embed_vision.embedding_projection.weight", "embed_vision.embedding_projection.weight"),
        ];
        for (stored, name) in cases {
            assert_eq!(renamed(stored), name);
        }
    }
}
