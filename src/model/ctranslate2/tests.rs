//! A Whisper of width 4 in CTranslate2's format, whole and spoilt.

use serde_json::{Value, json};

use super::*;
use crate::model::{self, safetensors};

const WIDTH: u64 = 4;

#[derive(Clone)]
struct Made {
    name: String,
    shape: Vec<u64>,
    id: u8,
    data: Vec<u8>,
}

fn float(name: &str, shape: &[u64]) -> Made {
    let count: u64 = shape.iter().product();
    // No two tensors begin alike.
    let first = name.bytes().fold(7u64, |hash, byte| (hash * 31 + u64::from(byte)) % 65_521) as f32;
    let data = (0..count).flat_map(|index| (first + index as f32).to_le_bytes()).collect();
    Made { name: name.to_owned(), shape: shape.to_vec(), id: 0, data }
}

fn number(name: &str, value: i16) -> Made {
    Made { name: name.to_owned(), shape: vec![], id: 2, data: value.to_le_bytes().to_vec() }
}

fn whisper() -> Vec<Made> {
    let w = WIDTH;
    let mut made = vec![
        float("decoder/embeddings/weight", &[9, w]),
        float("decoder/position_encodings/encodings", &[5, w]),
        float("encoder/conv1/weight", &[w, 2, 3]),
        float("encoder/conv1/bias", &[w]),
        float("encoder/conv2/weight", &[w, w, 3]),
        float("encoder/conv2/bias", &[w]),
        number("encoder/num_heads", 2),
        number("decoder/num_heads", 1),
        number("decoder/activation", 3),
        number("decoder/alignment_layer", -1),
    ];
    let sinusoids = (0..3).flat_map(|position| {
        [0.0f64, 1.0]
            .map(|channel| f64::from(position) * (-(10_000f64.ln()) * channel).exp())
            .map(|angle| (angle.sin() as f32, angle.cos() as f32))
    });
    let pairs: Vec<(f32, f32)> = sinusoids.collect();
    let data = pairs.chunks(2).flat_map(|pair| [pair[0].0, pair[1].0, pair[0].1, pair[1].1]).flat_map(f32::to_le_bytes).collect();
    made.push(Made { name: "encoder/position_encodings/encodings".into(), shape: vec![3, w], id: 0, data });
    let mut norms = vec!["encoder/layer_norm".to_owned(), "decoder/layer_norm".to_owned()];
    for (side, attentions) in [("encoder", &["self_attention"][..]), ("decoder", &["self_attention", "attention"])] {
        let layer = format!("{side}/layer_0");
        for attention in attentions {
            let at = format!("{layer}/{attention}");
            norms.push(format!("{at}/layer_norm"));
            let outputs = if *attention == "attention" { vec![w, 2 * w, w] } else { vec![3 * w, w] };
            for (index, outputs) in outputs.into_iter().enumerate() {
                made.push(float(&format!("{at}/linear_{index}/weight"), &[outputs, w]));
                let mut bias = float(&format!("{at}/linear_{index}/bias"), &[outputs]);
                // Keys have none: the second of three, the first of two.
                if outputs > w {
                    let start = if outputs == 3 * w { w } else { 0 } as usize * 4;
                    bias.data[start..start + 4 * w as usize].fill(0);
                }
                made.push(bias);
            }
        }
        norms.push(format!("{layer}/ffn/layer_norm"));
        for (index, (outputs, inputs)) in [(4 * w, w), (w, 4 * w)].into_iter().enumerate() {
            made.push(float(&format!("{layer}/ffn/linear_{index}/weight"), &[outputs, inputs]));
            made.push(float(&format!("{layer}/ffn/linear_{index}/bias"), &[outputs]));
        }
    }
    for norm in norms {
        made.extend([float(&format!("{norm}/gamma"), &[w]), float(&format!("{norm}/beta"), &[w])]);
    }
    made
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u16 + 1).to_le_bytes().to_vec();
    bytes.extend(text.bytes());
    bytes.push(0);
    bytes
}

fn bytes(made: &[Made]) -> Vec<u8> {
    let mut bytes = 6u32.to_le_bytes().to_vec();
    bytes.extend(string("WhisperSpec"));
    bytes.extend(3u32.to_le_bytes());
    bytes.extend((made.len() as u32).to_le_bytes());
    for Made { name, shape, id, data } in made {
        bytes.extend(string(name));
        bytes.push(shape.len() as u8);
        bytes.extend(shape.iter().flat_map(|&size| (size as u32).to_le_bytes()));
        bytes.push(*id);
        bytes.extend((data.len() as u32).to_le_bytes());
        bytes.extend(data);
    }
    bytes.extend(1u32.to_le_bytes());
    bytes.extend(string("decoder/projection/weight"));
    bytes.extend(string("decoder/embeddings/weight"));
    bytes
}

/// A folder with `source/model.bin` and nothing at `out` yet.
fn folder(model: &[u8]) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let (source, out) = (folder.path().join("source"), folder.path().join("out"));
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("model.bin"), model).unwrap();
    std::fs::write(source.join("tokenizer.json"), "{}").unwrap();
    (folder, source, out)
}

fn tensor(file: &Path, name: &str) -> (Vec<u64>, Vec<f32>) {
    let bytes = std::fs::read(file).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let place = |index: usize| start + header[name]["data_offsets"][index].as_u64().unwrap() as usize;
    let data = &bytes[place(0)..place(1)];
    let shape = header[name]["shape"].as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).collect();
    (shape, data.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
}

fn numbers(made: &[Made], name: &str) -> Vec<f32> {
    let made = made.iter().find(|made| made.name == name).unwrap();
    made.data.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

#[test]
fn every_variable_finds_its_place() {
    let made = whisper();
    let (_folder, source, out) = folder(&bytes(&made));
    std::fs::create_dir(&out).unwrap();
    let converted = convert(&source, &out).unwrap();
    assert!(converted.tokenizer && out.join("tokenizer.json").is_file());
    let expected = json!({"model_type": "whisper", "n_mels": 2, "n_audio_ctx": 3, "n_audio_state": 4, "n_audio_head": 2,
        "n_audio_layer": 1, "n_vocab": 9, "n_text_ctx": 5, "n_text_state": 4, "n_text_head": 1, "n_text_layer": 1});
    assert_eq!(converted.config, expected);

    // The result is a model, of which every header is right.
    let files = model::locate(out.to_str().unwrap()).unwrap();
    assert_eq!((files.family(), &files.config()["d_model"]), ("whisper", &json!(4)));
    let weights = out.join("weights.safetensors");
    assert_eq!(safetensors::read(&weights).unwrap().len(), converted.tensors);

    let fused = numbers(&made, "decoder/layer_0/self_attention/linear_0/weight");
    for (index, name) in ["query", "key", "value"].into_iter().enumerate() {
        let (shape, values) = tensor(&weights, &format!("decoder.blocks.0.attn.{name}.weight"));
        assert_eq!((shape, &values[..]), (vec![4, 4], &fused[16 * index..16 * (index + 1)]), "{name}");
    }
    let bias = numbers(&made, "decoder/layer_0/attention/linear_1/bias");
    assert_eq!(tensor(&weights, "decoder.blocks.0.cross_attn.value.bias").1, bias[4..]);
    let convolution = numbers(&made, "encoder/conv1/weight");
    let (shape, turned) = tensor(&weights, "encoder.conv1.weight");
    assert_eq!(shape, [4, 3, 2]);
    for (output, at, input) in [(0, 0, 1), (1, 2, 0), (3, 1, 1)] {
        assert_eq!(turned[(output * 3 + at) * 2 + input], convolution[(output * 2 + input) * 3 + at]);
    }
    for (name, variable) in [
        ("encoder.blocks.0.attn.out.weight", "encoder/layer_0/self_attention/linear_1/weight"),
        ("encoder.blocks.0.attn_ln.weight", "encoder/layer_0/self_attention/layer_norm/gamma"),
        ("encoder.blocks.0.mlp_ln.bias", "encoder/layer_0/ffn/layer_norm/beta"),
        ("decoder.blocks.0.cross_attn.query.weight", "decoder/layer_0/attention/linear_0/weight"),
        ("decoder.blocks.0.cross_attn.out.bias", "decoder/layer_0/attention/linear_2/bias"),
        ("decoder.blocks.0.cross_attn_ln.bias", "decoder/layer_0/attention/layer_norm/beta"),
        ("decoder.blocks.0.mlp1.weight", "decoder/layer_0/ffn/linear_0/weight"),
        ("decoder.blocks.0.mlp2.bias", "decoder/layer_0/ffn/linear_1/bias"),
        ("decoder.token_embedding.weight", "decoder/embeddings/weight"),
        ("decoder.positional_embedding", "decoder/position_encodings/encodings"),
        ("encoder.ln_post.weight", "encoder/layer_norm/gamma"),
        ("decoder.ln.bias", "decoder/layer_norm/beta"),
    ] {
        assert_eq!(tensor(&weights, name).1, numbers(&made, variable), "{name}");
    }
}

#[test]
fn integers_become_what_they_stand_for() {
    let mut made = whisper();
    let place = made.iter().position(|made| made.name == "decoder/layer_0/ffn/linear_0/weight").unwrap();
    made[place].id = 1;
    made[place].data = (0..64).map(|index| (index * 5 - 128) as u8).collect();
    made.push(float("decoder/layer_0/ffn/linear_0/weight_scale", &[16]));
    let scales = numbers(&made, "decoder/layer_0/ffn/linear_0/weight_scale");
    let place = made.iter().position(|made| made.name == "decoder/embeddings/weight").unwrap();
    made[place].id = 2;
    made[place].data = (0..36).flat_map(|index: i16| (index * 900 - 16_000).to_le_bytes()).collect();
    made.push(float("decoder/embeddings/weight_scale", &[]));
    let scale = numbers(&made, "decoder/embeddings/weight_scale")[0];
    let (_folder, source, out) = folder(&bytes(&made));
    convert(&source, &out).unwrap();
    let (_, wide) = tensor(&out.join("weights.safetensors"), "decoder.blocks.0.mlp1.weight");
    let expected = |index: usize| f32::from((index as i32 * 5 - 128) as u8 as i8) / scales[index / 4];
    assert!(wide.iter().enumerate().all(|(index, &value)| value == expected(index)), "{wide:?}");
    let (_, wide) = tensor(&out.join("weights.safetensors"), "decoder.token_embedding.weight");
    assert!(wide.iter().enumerate().all(|(index, &value)| value == (index as f32 * 900.0 - 16_000.0) / scale), "{wide:?}");
}

#[track_caller]
fn refused(model: &[u8], expected: &str) {
    let (folder, source, out) = folder(model);
    let message = convert(&source, &out).unwrap_err().to_string();
    assert!(message.contains(expected) && message.contains("model.bin"), "{message:?} does not say {expected:?}");
    // Nothing is left of it.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_file_cut_short_anywhere() {
    let whole = bytes(&whisper());
    let (_folder, source, out) = folder(&whole);
    for cut in (0..whole.len()).step_by(7) {
        std::fs::write(source.join("model.bin"), &whole[..cut]).unwrap();
        let error = convert(&source, &out).unwrap_err();
        assert!(matches!(error, ConvertError::Damaged { .. } | ConvertError::Unsupported { .. }), "{cut} bytes: {error}");
        assert!(!out.exists());
    }
    let longer = [&whole[..], &[0]].concat();
    refused(&longer, "1 bytes follow its end");
}

#[test]
fn headers_that_claim_too_much() {
    let head = |count: u32| [&6u32.to_le_bytes()[..], &string("WhisperSpec"), &[3, 0, 0, 0], &count.to_le_bytes()].concat();
    refused(&head(u32::MAX), "it claims 4294967295 variables");
    refused(&head(5), "it ends within its description of variables");
    let variable = |axes: u8, size: u32, bytes: u32| {
        let sizes: Vec<u8> = std::iter::repeat_n(size.to_le_bytes(), axes.into()).flatten().collect();
        [&head(1)[..], &string("w"), &[axes], &sizes, &[0], &bytes.to_le_bytes()].concat()
    };
    refused(&variable(200, 1, 4), "\"w\" claims 200 axes");
    refused(&variable(4, u32::MAX, 4), "\"w\" of Float32 [4294967295,");
    refused(&variable(1, 1000, 4000), "it ends within \"w\"");
    refused(&3u32.to_le_bytes(), "its version is 3");
    let mut type_unknown = variable(1, 1, 4);
    let place = type_unknown.len() - 5;
    type_unknown[place] = 9;
    refused(&type_unknown, "\"w\" has the unknown type 9");
}

#[test]
fn what_is_no_whisper() {
    let changed = |change: &dyn Fn(&mut Vec<Made>)| {
        let mut made = whisper();
        change(&mut made);
        bytes(&made)
    };
    let find = |made: &mut Vec<Made>, name: &str| made.iter().position(|made| made.name == name).unwrap();
    refused(&changed(&|made| made.push(float("decoder/strange", &[2]))), "decoder/strange is not part of a Whisper");
    let missing = "decoder/layer_0/attention/linear_2/bias";
    let gone = changed(&|made| {
        let place = find(made, missing);
        made.remove(place);
    });
    refused(&gone, "decoder/layer_0/attention/linear_2/bias is missing");
    let key = changed(&|made| {
        let place = find(made, "encoder/layer_0/self_attention/linear_0/bias");
        made[place].data[16] = 1;
    });
    refused(&key, "has a bias for encoder.blocks.0.attn.key.weight, which no Whisper has");
    let positions = changed(&|made| {
        let place = find(made, "encoder/position_encodings/encodings");
        made[place].data[19] = 0x42;
    });
    refused(&positions, "are not the sinusoids that Whisper has");
    let heads = changed(&|made| {
        let place = find(made, "encoder/num_heads");
        made[place] = number("encoder/num_heads", 3);
    });
    refused(&heads, "a width of 4 does not divide into its encoder's heads");
    refused(&changed(&|made| made.push(number("decoder/alibi", 1))), "it has decoder/alibi on");
    let unscaled = changed(&|made| {
        let place = find(made, "encoder/conv1/bias");
        made[place].id = 1;
        made[place].data = vec![1; 4];
    });
    refused(&unscaled, "encoder/conv1/bias_scale is missing or does not fit");
    let other = [&6u32.to_le_bytes()[..], &string("TransformerSpec"), &[3, 0, 0, 0], &[0; 4], &[0; 4]].concat();
    refused(&other, "it holds a \"TransformerSpec\", and only Whisper is converted");
}

#[test]
fn what_is_there_is_not_written_over() {
    let (folder, source, out) = folder(&bytes(&whisper()));
    std::fs::write(&out, "a file").unwrap();
    assert!(matches!(convert(&source, &out), Err(ConvertError::Occupied { .. })));
    assert!(matches!(convert(&source, &source), Err(ConvertError::Occupied { .. })));
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "a file");
    let message = convert(folder.path(), &source).unwrap_err().to_string();
    assert!(message.starts_with("there is no model.bin in "), "{message}");
}
