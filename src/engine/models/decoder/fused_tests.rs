//! The kernels against the plain operations, on a GPU of NVIDIA's: both in bfloat16, judged by the plain ones in float32.

use std::{cell::Cell, collections::HashMap, path::Path};

use mlx_rs::{Array, Dtype, random, transforms};
use serde_json::{Value, json};

use super::super::{Model, golden_test::pass, load};
use crate::engine::{
    cache::Cache,
    ffi,
    weights::{Loader, Policy},
};

/// A model of random weights, of a family and a shape: saved in bfloat16.
fn checkpoint(folder: &Path, config: &Value) {
    let size = |key: &str| config[key].as_i64().unwrap() as i32;
    let (hidden, intermediate, vocabulary) = (size("hidden_size"), size("intermediate_size"), size("vocab_size"));
    let (queries, keys) = (size("num_attention_heads") * size("head_dim"), size("num_key_value_heads") * size("head_dim"));
    let family = config["model_type"].as_str().unwrap();
    let drawn = Cell::new(0);
    let key = || {
        drawn.set(drawn.get() + 1);
        random::key(drawn.get()).unwrap()
    };
    let matrix = |rows: i32, columns: i32| {
        let scale = Array::from_f32(1.5 / (columns as f32).sqrt());
        let numbers = random::normal::<f32>(&[rows, columns], None, None, &key()).unwrap();
        numbers.multiply(scale).unwrap().as_dtype(Dtype::Bfloat16).unwrap()
    };
    let vector = |length: i32| {
        let numbers = random::uniform::<_, f32>(0.5, 1.5, &[length], &key()).unwrap();
        let stored = if family == "gemma3_text" { numbers.subtract(Array::from_f32(1.0)).unwrap() } else { numbers };
        stored.as_dtype(Dtype::Bfloat16).unwrap()
    };
    let mut tensors = HashMap::new();
    let mut put = |name: String, tensor: Array| {
        tensors.insert(name, tensor);
    };
    put("model.embed_tokens.weight".into(), matrix(vocabulary, hidden));
    put("lm_head.weight".into(), matrix(vocabulary, hidden));
    put("model.norm.weight".into(), vector(hidden));
    for layer in 0..size("num_hidden_layers") {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        for (part, rows, columns) in [
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", intermediate, hidden),
            ("mlp.up_proj", intermediate, hidden),
            ("mlp.down_proj", hidden, intermediate),
        ] {
            put(name(part), matrix(rows, columns));
        }
        let mut norms = vec![("input_layernorm", hidden), ("post_attention_layernorm", hidden)];
        if family == "gemma3_text" {
            norms.extend([("pre_feedforward_layernorm", hidden), ("post_feedforward_layernorm", hidden)]);
        }
        if family != "llama" {
            norms.extend([("self_attn.q_norm", size("head_dim")), ("self_attn.k_norm", size("head_dim"))]);
        }
        for (part, length) in norms {
            put(name(part), vector(length));
        }
    }
    transforms::eval(tensors.values()).unwrap();
    Array::save_safetensors(tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)), None, folder.join("model.safetensors"))
        .unwrap();
}

/// Slots of rows and how long their prompts are: one beyond a block's keys, one of a single token, slots left out between.
const ROWS: [(u32, usize); 5] = [(0, 37), (1, 1500), (3, 1), (4, 64), (6, 700)];
const CHUNK: usize = 256;
const DECODED: u32 = 10;
/// More than the window, of which all is copied then.
const COPIED: u32 = 600;

/// Logits of every row's last prompt token and of the steps behind it, rows joining one after the other.
fn logits(model: &dyn Model, dtype: Dtype, slot_tokens: i32) -> Vec<Vec<f32>> {
    let token = |slot: u32, position: u32| (slot * 7919 + position * 104_729 + position * position * 31) % model.vocabulary();
    let mut cache = Cache::new(model.cache_layout(), dtype, 64).unwrap();
    cache.resize(7, slot_tokens).unwrap();
    let mut all = Vec::new();
    let mut joined: Vec<(u32, u32)> = Vec::new();
    let mut step = |cache: &mut Cache, joined: &mut Vec<(u32, u32)>, piece: Option<(u32, usize, &[u32], usize)>| {
        let rows: Vec<(u32, u32, u32)> = joined.iter().map(|&(slot, position)| (slot, position, token(slot, position))).collect();
        let pieces: Vec<_> = piece.iter().map(|&(slot, start, tokens, length)| (slot as i32, start, tokens, length)).collect();
        all.extend(pass(model, cache, &pieces, &rows));
        joined.iter_mut().for_each(|row| row.1 += 1);
    };
    for (slot, length) in ROWS {
        let prompt: Vec<u32> = (0..length as u32).map(|position| token(slot, position)).collect();
        for (index, piece) in prompt.chunks(CHUNK).enumerate() {
            step(&mut cache, &mut joined, Some((slot, index * CHUNK, piece, length)));
        }
        joined.push((slot, length as u32));
        joined.sort_unstable();
    }
    // Two more rows begin with what one has computed.
    model.copy_prefix(&mut cache, 1, &[2, 5], COPIED as i32).unwrap();
    joined.extend([(2, COPIED), (5, COPIED)]);
    joined.sort_unstable();
    for _ in 0..DECODED {
        step(&mut cache, &mut joined, None);
    }
    all
}

fn error(ours: &[Vec<f32>], reference: &[Vec<f32>]) -> f64 {
    assert_eq!(ours.len(), reference.len());
    let square = |x: f64| x * x;
    let (mut difference, mut size) = (0.0, 0.0);
    for (ours, reference) in ours.iter().flatten().zip(reference.iter().flatten()) {
        difference += square(f64::from(ours - reference));
        size += square(f64::from(*reference));
    }
    (difference / size).sqrt()
}

#[test]
#[ignore = "needs a GPU of NVIDIA's"]
fn kernels_agree_with_the_plain_operations() {
    if !ffi::cuda_available() {
        println!("skipped: there is no GPU of NVIDIA's here");
        return;
    }
    mlx_rs::Device::set_default(&mlx_rs::Device::gpu());
    let shape = |family: &str, heads: i32, kv_heads: i32, head_dim: i32, more: Value| {
        let mut config = json!({
            "model_type": family, "hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 512, "vocab_size": 512,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192, "rope_theta": 500_000.0, "tie_word_embeddings": false,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let cases = [
        shape("llama", 8, 2, 64, json!({})),
        shape("llama", 9, 3, 64, json!({ "rope_traditional": true })),
        shape("llama", 4, 4, 128, json!({ "rope_scaling": { "rope_type": "llama3", "factor": 8.0 } })),
        shape("qwen3", 16, 1, 128, json!({})),
        shape("gemma3_text", 4, 1, 256, json!({ "sliding_window": 512, "sliding_window_pattern": 2 })),
    ];
    for config in cases {
        let folder = tempfile::tempdir().unwrap();
        checkpoint(folder.path(), &config);
        let open = |dtype: Dtype, merge: bool| {
            let policy = Policy { dtype: Some(dtype), dequantize: false, merge, host: false };
            load(&config, Loader::open(&[folder.path().join("model.safetensors")], &config, policy).unwrap()).unwrap()
        };
        let reference = logits(&*open(Dtype::Float32, false), Dtype::Float32, 1600);
        for dtype in [Dtype::Bfloat16, Dtype::Float16] {
            let plain = error(&logits(&*open(dtype, false), dtype, 1600), &reference);
            let fused = error(&logits(&*open(dtype, true), dtype, 1600), &reference);
            println!("{} {}: {dtype:?} plain {plain:.2e}, kernels {fused:.2e}", config["model_type"], config["head_dim"]);
            assert!(plain < 0.1 && fused <= plain * 1.2, "{config}: {dtype:?}: {fused:e} away, the plain operations {plain:e}");
            let shifted = logits(&*open(dtype, true), dtype, 1599);
            assert_eq!(error(&shifted, &reference), fused, "how long slots are changes nothing");
        }
    }
}
