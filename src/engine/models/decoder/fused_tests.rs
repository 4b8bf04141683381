//! The kernels against the plain operations, on a GPU of NVIDIA's: both in bfloat16, judged by the plain ones in float32.

use std::{cell::Cell, collections::HashMap, path::Path};

use mlx_rs::{Array, Dtype, random};
use serde_json::{Value, json};

use super::{
    super::{
        Model,
        golden_test::pass,
        kernel_test::{error, on_cuda, save, timed},
        load,
    },
    Decoder, DecoderOptions, LayerOptions, Qkv,
};
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
    save(&tensors, folder);
}

/// Slots of rows and how long their prompts are: one beyond a block's keys, one of a single token, slots left out between.
const ROWS: [(u32, usize); 5] = [(0, 37), (1, 1500), (3, 1), (4, 64), (6, 700)];
const CHUNK: usize = 256;
const DECODED: u32 = 10;
/// More than the window, of which all is copied then.
const COPIED: u32 = 600;

/// Logits of every row's last prompt token and of the steps behind it, rows joining one after the other.
fn logits(model: &dyn Model, dtype: Dtype, slot_tokens: i32, copied_from: i32) -> Vec<Vec<f32>> {
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
    model.copy_prefix(&mut cache, copied_from, &[2, 5], COPIED as i32).unwrap();
    joined.extend([(2, COPIED), (5, COPIED)]);
    joined.sort_unstable();
    for _ in 0..DECODED {
        step(&mut cache, &mut joined, None);
    }
    all
}

#[test]
#[ignore = "needs a GPU of NVIDIA's"]
fn kernels_agree_with_the_plain_operations() {
    if !on_cuda() {
        return;
    }
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
        let reference = logits(&*open(Dtype::Float32, false), Dtype::Float32, 1600, 1);
        for dtype in [Dtype::Bfloat16, Dtype::Float16] {
            let plain = error(&logits(&*open(dtype, false), dtype, 1600, 1), &reference);
            let fused = error(&logits(&*open(dtype, true), dtype, 1600, 1), &reference);
            println!("{} {}: {dtype:?} plain {plain:.2e}, kernels {fused:.2e}", config["model_type"], config["head_dim"]);
            let fault = error(&logits(&*open(dtype, true), dtype, 1600, 6), &reference);
            assert!(fault > 0.1, "{config}: a prefix copied from another row does not show: {fault:e}");
            assert!(plain < 0.1 && fused <= plain * 1.2, "{config}: {dtype:?}: {fused:e} away, the plain operations {plain:e}");
            let shifted = logits(&*open(dtype, true), dtype, 1599, 1);
            assert_eq!(error(&shifted, &reference), fused, "how long slots are changes nothing");
        }
    }
}

/// Where the time of a decode step goes, at 64 and other numbers of rows with 448 tokens each: a table on standard output. The
/// model is that of tests/gpu/make_model.py.
#[test]
#[ignore = "measures, on a GPU of NVIDIA's"]
fn profile_of_a_decode_step() {
    if !on_cuda() {
        return;
    }
    let config = json!({
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "vocab_size": 128_256,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "rope_theta": 500_000.0, "tie_word_embeddings": false,
    });
    let folder = tempfile::tempdir().unwrap();
    checkpoint(folder.path(), &config);
    let open = |merge: bool| -> Decoder {
        let policy = Policy { dtype: Some(Dtype::Bfloat16), dequantize: false, merge, host: false };
        let mut loader = Loader::open(&[folder.path().join("model.safetensors")], &config, policy).unwrap();
        let layers = (0..16).map(|_| LayerOptions {
            rope: super::RopeOptions {
                head_dim: 64,
                base: 500_000.0,
                traditional: false,
                scaling: None,
                max_position_embeddings: None,
                factors: None,
            },
            window: None,
        });
        let options = DecoderOptions {
            hidden_size: 2048,
            intermediate_size: 8192,
            vocab_size: 128_256,
            heads: 32,
            kv_heads: 8,
            head_dim: 64,
            rms_norm_eps: 1e-5,
            norm_offset: 0.0,
            embedding_scale: None,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: false,
            sandwich_norms: false,
            activation: super::Activation::Silu,
            attention_scale: 0.125,
            tied: Some(false),
            layers: layers.collect(),
        };
        Decoder::build(options, &mut loader).unwrap()
    };
    let (fused, plain) = (open(true), open(false));
    for rows in [8i32, 64, 256] {
        let timed = |name: &str, run: &mut dyn FnMut() -> Vec<Array>| timed(&format!("{rows:4} rows  {name}"), run);
        let places: Vec<(u32, u32)> = (0..rows as u32).map(|slot| (slot, 447)).collect();
        let tokens = Array::from_slice(&(0..rows).collect::<Vec<i32>>(), &[rows]);
        for (name, model) in [("the whole step, kernels", &fused), ("the whole step, plain", &plain)] {
            let mut cache = Cache::new(model.cache_layout(), Dtype::Bfloat16, 64).unwrap();
            cache.resize(rows, 512).unwrap();
            timed(name, &mut || {
                cache.begin_step();
                let step = crate::engine::cache::Step::new(Vec::new(), &places);
                let hidden = model.forward(&tokens, &step, &mut cache).unwrap();
                let logits = model.logits(&hidden).unwrap();
                let mut arrays = vec![mlx_rs::ops::indexing::argmax_axis(&logits, -1, false).unwrap()];
                arrays.extend(cache.arrays().cloned());
                arrays
            });
        }
        let hidden = random::normal::<f32>(&[rows, 2048], None, None, &random::key(5).unwrap()).unwrap();
        let hidden = hidden.as_dtype(Dtype::Bfloat16).unwrap();
        timed("products of the layers", &mut || {
            let mut x = hidden.clone();
            for layer in &fused.layers {
                let Qkv::Merged(qkv) = &layer.attention.qkv else { panic!("not merged") };
                let (gate_up, down) = layer.mlp.merged().unwrap();
                let queries = ffi::slice(&qkv.forward(&x).unwrap(), &[0, 0], &[rows, 2048]).unwrap();
                let y = layer.attention.o_proj.forward_add(&queries, &x).unwrap();
                let middle = ffi::slice(&gate_up.forward(&y).unwrap(), &[0, 0], &[rows, 8192]).unwrap();
                x = down.forward_add(&middle, &y).unwrap();
            }
            vec![x]
        });
        timed("logits and the likeliest", &mut || {
            let logits = fused.logits(&hidden).unwrap();
            vec![mlx_rs::ops::indexing::argmax_axis(&logits, -1, false).unwrap()]
        });
        timed("norms and gates", &mut || {
            let kernels = fused.fused.as_ref().unwrap().kernels();
            let mut x = hidden.clone();
            let wide = mlx_rs::ops::broadcast_to(x.reshape(&[rows, 1, 2048]).unwrap(), &[rows, 8, 2048]).unwrap();
            let wide = wide.reshape(&[rows, 16_384]).unwrap();
            let mut gates = vec![wide.clone()];
            for layer in &fused.layers {
                x = layer.feedforward_norm.forward(&layer.input_norm.forward(&x).unwrap()).unwrap();
                gates.push(kernels.gate(&wide).unwrap());
            }
            gates.push(x);
            gates
        });
        let mut cache = Cache::new(fused.cache_layout(), Dtype::Bfloat16, 64).unwrap();
        cache.resize(rows, 512).unwrap();
        timed("attention", &mut || {
            let fused = fused.fused.as_ref().unwrap();
            let step = crate::engine::cache::Step::new(Vec::new(), &places);
            let places = fused.kernels().places(&step);
            let qkv = mlx_rs::ops::concatenate(&[&hidden, &ffi::slice(&hidden, &[0, 0], &[rows, 1024]).unwrap()], 1).unwrap();
            (0..16).map(|layer| fused.kernels().attend(layer, &qkv, fused.rotary(layer), &cache, &places).unwrap()).collect()
        });
    }
}
