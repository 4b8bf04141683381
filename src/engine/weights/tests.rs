//! Tensors that fit a configuration, and those that do not.

use std::path::Path;

use serde_json::json;

use super::*;

const F32: Policy = Policy { dtype: Some(Dtype::Float32), dequantize: true, merge: false, host: false };

fn checkpoint(name: &str) -> (PathBuf, Value) {
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints").join(name);
    let config = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    (folder.join("model.safetensors"), config)
}

fn refusal(loader: Loader, config: &Value) -> String {
    match super::super::models::load(config, loader) {
        Ok(_) => panic!("it was loaded"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn every_problem_is_told_at_once() {
    let (file, config) = checkpoint("llama");
    let mut loader = Loader::open(&[file], &config, F32).unwrap();
    loader.tensors.remove("model.norm.weight").unwrap();
    loader.tensors.insert("model.layers.0.self_attn.q_proj.weight".into(), ops::zeros::<f32>(&[3, 5]).unwrap());
    loader.tensors.insert("model.layers.0.self_attn.rotary.strange".into(), ops::zeros::<f32>(&[1]).unwrap());
    let hidden = config["hidden_size"].as_i64().unwrap() as i32;
    loader.tensors.insert("model.layers.1.input_layernorm.weight".into(), ops::zeros::<i32>(&[hidden]).unwrap());
    let text = refusal(loader, &config);
    for problem in [
        "model.norm.weight is missing",
        "model.layers.0.self_attn.q_proj.weight has shape [3, 5], the configuration says",
        "model.layers.0.self_attn.rotary.strange is not part of this family",
        "model.layers.1.input_layernorm.weight is Int32, a floating-point tensor is needed",
    ] {
        assert!(text.contains(problem), "{problem:?} is not in:\n{text}");
    }
}

#[test]
fn quantized_tensors_must_fit_what_the_configuration_says() {
    let (file, mut config) = checkpoint("llama-4bit-g32");
    let files = [file];
    config["quantization"]["bits"] = json!(8);
    let text = refusal(Loader::open(&files, &config, F32).unwrap(), &config);
    assert!(text.contains("8 bits in groups of 32 need uint32"), "{text}");

    config["quantization"] = json!({ "group_size": 32, "bits": 7 });
    let error = Loader::open(&files, &config, F32).err().unwrap().to_string();
    assert!(error.contains("2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128 are supported"), "{error}");

    config["quantization"] = json!({ "group_size": 32, "bits": 4, "mode": "fp3" });
    let error = Loader::open(&files, &config, F32).err().unwrap().to_string();
    assert!(error.contains("mode 'fp3' of the model is not known (affine, mxfp4, mxfp8 and nvfp4 are)"), "{error}");

    config["quantization"] = json!({ "group_size": 64, "bits": 4, "mode": "mxfp4" });
    let error = Loader::open(&files, &config, F32).err().unwrap().to_string();
    assert!(error.contains("is 4 bits in groups of 64, and mode 'mxfp4' has 4 bits in groups of 32"), "{error}");

    config["quantization"] = json!({ "mode": "mxfp4" });
    let text = refusal(Loader::open(&files, &config, F32).unwrap(), &config);
    assert!(text.contains("model.layers.0.mlp.up_proj.biases stands beside"), "{text}");

    config["quantization"] = json!({ "group_size": 32, "bits": 4 });
    let mut loader = Loader::open(&files, &config, F32).unwrap();
    loader.tensors.remove("model.layers.0.mlp.up_proj.biases").unwrap();
    let text = refusal(loader, &config);
    assert!(text.contains("model.layers.0.mlp.up_proj.biases is missing beside"), "{text}");
}

#[test]
fn a_file_that_is_no_weights_is_named() {
    let (file, config) = checkpoint("llama");
    let folder = tempfile::tempdir().unwrap();
    let cut = folder.path().join("cut.safetensors");
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    let outcome = Loader::open(std::slice::from_ref(&cut), &config, F32)
        .map(|loader| super::super::models::load(&config, loader).map(|_| ()));
    let error = match outcome {
        Err(error) | Ok(Err(error)) => error.to_string(),
        Ok(Ok(())) => panic!("half a file was loaded"),
    };
    assert!(error.contains("cut.safetensors: ") && error.contains("incomplete download or corrupt file?"), "{error}");
    assert!(!error.contains(".cpp") && !error.contains("/rustc/"), "{error}");
    let error = Loader::open(&[folder.path().join("none.safetensors")], &config, F32).err().unwrap().to_string();
    assert!(error.contains("none.safetensors"), "{error}");
}

#[test]
fn a_model_too_small_for_its_configuration_is_refused_before_its_layers_are_built() {
    let (file, mut config) = checkpoint("llama");
    config["num_hidden_layers"] = json!(3);
    let text = refusal(Loader::open(&[file], &config, F32).unwrap(), &config);
    assert!(text.contains("model.layers.2.self_attn.q_proj.weight is missing"), "{text}");
}

#[test]
fn looking_finds_what_loading_finds() {
    use crate::engine::check_weights;

    for name in ["llama", "llama-4bit-g32", "qwen3", "gemma3_text", "gemma4_text", "speech/whisper"] {
        let (file, config) = checkpoint(name);
        check_weights(&[file], &config).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    for (name, key, size) in
        [("llama", "num_hidden_layers", 3), ("llama-4bit-g32", "vocab_size", 7), ("speech/whisper", "d_model", 8)]
    {
        let (file, mut config) = checkpoint(name);
        config[key] = json!(size);
        let loaded = refusal(Loader::open(std::slice::from_ref(&file), &config, F32).unwrap(), &config);
        assert_eq!(check_weights(&[file], &config).unwrap_err().to_string(), loaded, "{name} with {key} {size}");
    }
}

#[test]
fn looking_reads_no_weights() {
    use crate::engine::{memory::active_bytes, models::load};

    let (file, config) = checkpoint("llama");
    let stored = file.metadata().unwrap().len();
    let files = [file];
    // Held until both are measured.
    let before = active_bytes().unwrap();
    let looked = load(&config, Loader::look(&files, &config).unwrap()).unwrap();
    let by_looking = active_bytes().unwrap() - before;
    let loaded = load(&config, Loader::open(&files, &config, F32).unwrap()).unwrap();
    let by_loading = active_bytes().unwrap() - before - by_looking;
    assert!(by_looking < stored / 20 && by_loading > stored / 2, "{by_looking}, {by_loading} of {stored} bytes");
    drop((looked, loaded));
}
