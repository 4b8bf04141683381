//! The kernels against the plain operations, on a GPU of NVIDIA's: both in half precision, judged by the plain ones in float32.

use std::{cell::Cell, collections::HashMap, path::Path};

use mlx_rs::{Array, Dtype, random, transforms};
use serde_json::{Value, json};

use crate::engine::{
    cache::{Cache, Chunk, Step},
    device::padding,
    models::{
        Model,
        golden_test::pass,
        kernel_test::{error, on_cuda, save, timed},
        load,
    },
    weights::{Loader, Policy},
};

const FRAMES: i32 = 300;
const BINS: i32 = 80;
const VOCABULARY: i32 = 500;
/// More than a block's warps see at once, and no multiple of it.
const TOKENS: i32 = FRAMES / 2;

/// A model of random weights: saved in float16.
fn checkpoint(folder: &Path, config: &Value) {
    let size = |key: &str| config[key].as_i64().unwrap() as i32;
    let (hidden, ffn) = (size("d_model"), size("decoder_ffn_dim"));
    let drawn = Cell::new(0);
    let numbers = |shape: &[i32], scale: f32| {
        drawn.set(drawn.get() + 1);
        let numbers = random::normal::<f32>(shape, None, None, &random::key(drawn.get()).unwrap()).unwrap();
        numbers.multiply(Array::from_f32(scale)).unwrap()
    };
    let mut tensors = HashMap::new();
    let mut put = |name: String, tensor: Array| {
        tensors.insert(format!("model.{name}"), tensor.as_dtype(Dtype::Float16).unwrap());
    };
    let linear = |put: &mut dyn FnMut(String, Array), module: &str, from: i32, to: i32, bias: bool| {
        put(format!("{module}.weight"), numbers(&[to, from], 1.5 / (from as f32).sqrt()));
        if bias {
            put(format!("{module}.bias"), numbers(&[to], 0.3));
        }
    };
    let norm = |put: &mut dyn FnMut(String, Array), module: &str| {
        put(format!("{module}.weight"), numbers(&[hidden], 0.2).add(Array::from_f32(1.0)).unwrap());
        put(format!("{module}.bias"), numbers(&[hidden], 0.2));
    };
    let attention = |put: &mut dyn FnMut(String, Array), module: &str| {
        for (name, bias) in [("q_proj", true), ("k_proj", false), ("v_proj", true), ("out_proj", true)] {
            linear(put, &format!("{module}.{name}"), hidden, hidden, bias);
        }
    };
    for (name, input) in [("conv1", BINS), ("conv2", hidden)] {
        put(format!("encoder.{name}.weight"), numbers(&[hidden, input, 3], 1.0 / (3.0 * input as f32).sqrt()));
        put(format!("encoder.{name}.bias"), numbers(&[hidden], 0.3));
    }
    put("decoder.embed_tokens.weight".into(), numbers(&[size("vocab_size"), hidden], 0.3));
    put("decoder.embed_positions.weight".into(), numbers(&[size("max_target_positions"), hidden], 0.3));
    for half in ["encoder", "decoder"] {
        for layer in 0..size(&format!("{half}_layers")) {
            let module = format!("{half}.layers.{layer}");
            let mut attentions = vec!["self_attn"];
            if half == "decoder" {
                attentions.push("encoder_attn");
            }
            for name in attentions {
                attention(&mut put, &format!("{module}.{name}"));
                norm(&mut put, &format!("{module}.{name}_layer_norm"));
            }
            linear(&mut put, &format!("{module}.fc1"), hidden, ffn, true);
            linear(&mut put, &format!("{module}.fc2"), ffn, hidden, true);
            norm(&mut put, &format!("{module}.final_layer_norm"));
        }
        norm(&mut put, &format!("{half}.layer_norm"));
    }
    save(&tensors, folder);
}

/// Slots of rows and how long their prompts are.
const ROWS: [(u32, usize); 4] = [(0, 4), (3, 70), (1, 1), (4, 33)];
const DECODED: u32 = 12;

/// Logits of every row's last prompt token and of the steps behind it, rows joining one after the other. A planted fault turns
/// round which row hears which window.
fn logits(model: &dyn Model, dtype: Dtype, fault: bool) -> Vec<Vec<f32>> {
    let token = |slot: u32, position: u32| (slot * 7919 + position * 104_729 + position * position * 31) % VOCABULARY as u32;
    let encoder = model.encoder().unwrap();
    let mut cache = Cache::new(model.cache_layout(), dtype, 64).unwrap().with_cross(encoder.cross_layout()).unwrap();
    cache.resize(5, 192).unwrap();
    let key = random::key(99).unwrap();
    let features = random::normal::<f32>(&[ROWS.len() as i32, FRAMES, BINS], None, None, &key).unwrap();
    let encoded = encoder.encode(&features).unwrap();
    let mut slots: Vec<i32> = ROWS.iter().map(|row| row.0 as i32).collect();
    slots.sort_unstable();
    if fault {
        slots.reverse();
    }
    encoder.hear(&encoded, &slots, &mut cache).unwrap();
    transforms::eval(cache.arrays()).unwrap();
    let mut all = Vec::new();
    let mut joined: Vec<(u32, u32)> = Vec::new();
    let mut step = |joined: &mut Vec<(u32, u32)>, piece: Option<(u32, &[u32])>| {
        let rows: Vec<(u32, u32, u32)> = joined.iter().map(|&(slot, position)| (slot, position, token(slot, position))).collect();
        let pieces: Vec<_> = piece.iter().map(|&(slot, tokens)| (slot as i32, 0, tokens, tokens.len())).collect();
        all.extend(pass(model, &mut cache, &pieces, &rows));
        joined.iter_mut().for_each(|row| row.1 += 1);
    };
    for (slot, length) in ROWS {
        let prompt: Vec<u32> = (0..length as u32).map(|position| token(slot, position)).collect();
        step(&mut joined, Some((slot, &prompt)));
        joined.push((slot, length as u32));
        joined.sort_unstable();
    }
    for _ in 0..DECODED {
        step(&mut joined, None);
    }
    all
}

fn config(hidden: i32, heads: i32) -> Value {
    json!({
        "model_type": "whisper", "d_model": hidden, "encoder_layers": 2, "encoder_attention_heads": heads, "decoder_layers": 3,
        "decoder_attention_heads": heads, "encoder_ffn_dim": 2 * hidden, "decoder_ffn_dim": 2 * hidden, "num_mel_bins": BINS,
        "max_source_positions": TOKENS, "max_target_positions": 192, "vocab_size": VOCABULARY,
    })
}

fn open(folder: &Path, config: &Value, dtype: Dtype, merge: bool) -> Box<dyn Model> {
    let policy = Policy { dtype: Some(dtype), dequantize: false, merge, host: false };
    load(config, Loader::open(&[folder.join("model.safetensors")], config, policy).unwrap()).unwrap()
}

#[test]
#[ignore = "needs a GPU of NVIDIA's"]
fn kernels_agree_with_the_plain_operations() {
    if !on_cuda() {
        return;
    }
    for (hidden, heads) in [(128, 2), (384, 6), (512, 4)] {
        let (folder, config) = (tempfile::tempdir().unwrap(), config(hidden, heads));
        checkpoint(folder.path(), &config);
        let reference = logits(&*open(folder.path(), &config, Dtype::Float32, false), Dtype::Float32, false);
        for dtype in [Dtype::Float16, Dtype::Bfloat16] {
            let plain = error(&logits(&*open(folder.path(), &config, dtype, false), dtype, false), &reference);
            let model = open(folder.path(), &config, dtype, true);
            assert!(model.pads(), "the kernels are not in use");
            let fused = error(&logits(&*model, dtype, false), &reference);
            println!("whisper, {heads} heads of {}: {dtype:?} plain {plain:.2e}, kernels {fused:.2e}", hidden / heads);
            assert!(error(&logits(&*model, dtype, true), &reference) > 0.1, "{dtype:?}: a fault does not show");
            assert!(plain < 0.1 && fused <= plain * 1.2, "{dtype:?}: {fused:e} away, the plain operations {plain:e}");
        }
    }
}

#[test]
fn merged_products_are_the_separate_ones() {
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    let (folder, config) = (tempfile::tempdir().unwrap(), config(128, 2));
    checkpoint(folder.path(), &config);
    let separate = logits(&*open(folder.path(), &config, Dtype::Float32, false), Dtype::Float32, false);
    let merged = open(folder.path(), &config, Dtype::Float32, true);
    assert!(!merged.pads(), "no kernels on the CPU");
    assert!(error(&logits(&*merged, Dtype::Float32, false), &separate) < 1e-5);
    assert!(error(&logits(&*merged, Dtype::Float32, true), &separate) > 0.1, "a fault does not show");
}

/// Where the time goes with Whisper base and 64 windows: a table on standard output.
#[test]
#[ignore = "measures, on a GPU of NVIDIA's"]
fn profile_of_whisper_base() {
    if !on_cuda() {
        return;
    }
    const ROWS: u32 = 64;
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(512, 8);
    for (key, value) in [
        ("encoder_layers", 6),
        ("decoder_layers", 6),
        ("encoder_ffn_dim", 2048),
        ("decoder_ffn_dim", 2048),
        ("max_source_positions", 1500),
        ("max_target_positions", 448),
        ("vocab_size", 51_865),
    ] {
        config[key] = value.into();
    }
    checkpoint(folder.path(), &config);
    for merge in [false, true] {
        let timed = |name: &str, run: &mut dyn FnMut() -> Vec<Array>| {
            timed(&format!("{}  {name}", if merge { "kernels" } else { "plain  " }), run)
        };
        let model = open(folder.path(), &config, Dtype::Float16, merge);
        let encoder = model.encoder().unwrap();
        let mut cache = Cache::new(model.cache_layout(), Dtype::Float16, 64).unwrap().with_cross(encoder.cross_layout()).unwrap();
        cache.resize(ROWS as i32, 192).unwrap();
        for windows in [1, 2, 8] {
            let key = random::key(7).unwrap();
            let features = random::normal::<f32>(&[windows, 3000, BINS], None, None, &key).unwrap();
            timed(&format!("{windows} windows into hidden states"), &mut || vec![encoder.encode(&features).unwrap()]);
            let encoded = encoder.encode(&features).unwrap();
            encoded.eval().unwrap();
            let slots: Vec<i32> = (0..windows).collect();
            timed(&format!("{windows} windows into the cache"), &mut || {
                encoder.hear(&encoded, &slots, &mut cache).unwrap();
                cache.arrays().cloned().collect()
            });
        }
        let rows: Vec<(u32, u32)> = (0..ROWS).map(|slot| (slot, 60)).collect();
        let step_of = |chunks: u32, cache: &mut Cache, logits: bool| {
            cache.begin_step();
            let (joining, decoding) = rows.split_at(chunks as usize);
            let chunk = |&(slot, _): &(u32, u32)| Chunk { slot: slot as i32, start: 0, length: 4, prompt_tokens: 4 };
            let padding = if merge { padding(4 * chunks as i32, decoding.len() as i32) } else { 0 };
            let step = Step::padded(joining.iter().map(chunk).collect(), padding, decoding);
            let count = 4 * chunks as i32 + padding + decoding.len() as i32;
            let hidden = model.forward(&Array::from_slice(&vec![7i32; count as usize], &[count]), &step, cache).unwrap();
            let mut arrays: Vec<Array> = cache.arrays().cloned().collect();
            arrays.push(if logits { model.logits(&hidden).unwrap() } else { hidden });
            arrays
        };
        for chunks in [0, 1, 3, 64] {
            timed(&format!("a pass: {chunks} windows join, {} decode", ROWS - chunks), &mut || step_of(chunks, &mut cache, false));
        }
        timed("the same without joining, and logits", &mut || step_of(0, &mut cache, true));
    }
}
