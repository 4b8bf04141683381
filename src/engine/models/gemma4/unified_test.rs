//! What a Gemma 4 without towers makes of patches and samples, against mlx-vlm on the same libmlx:
//! `goldens/gemma4_towers/unified.json`, by `fixtures/make_gemma4_tower_goldens.py`.

use std::{fs, path::Path, sync::Arc};

use mlx_rs::{Array, Dtype, random};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    super::Model,
    tower_test::{
        BFLOAT16, ERROR_MAX, FAULT_MIN, ONE_ERROR_MAX, PACKED, PLAIN, Soft, Towers, as_it_is, away, check, checkpoint, numbers,
        value,
    },
    unified::{self, AudioConfig, AudioEmbedder, VisionConfig, VisionEmbedder},
    vision::ImagePatches,
};
use crate::{
    engine::{
        memory,
        models::{golden_test::root, kernel_test::save},
        weights::{Loader, Policy, WeightError},
    },
    media::{Features, UsmFeatures},
    schedule::{EncodePrice, Medium, MediumContent},
};

const SIDE: usize = 48;
const SAMPLES_PER_TOKEN: usize = 640;

#[derive(Deserialize)]
struct Golden {
    /// Columns, rows, and how far colours are apart.
    images: Vec<(i32, i32, f32)>,
    /// Samples of each.
    recordings: Vec<usize>,
    float32: Soft,
    as_stored: Soft,
}

fn golden() -> Golden {
    serde_json::from_slice(&fs::read(root().join("goldens/gemma4_towers/unified.json")).unwrap()).unwrap()
}

fn load(towers: &Towers, policy: Policy, edit: impl FnOnce(&mut Value)) -> Result<(VisionEmbedder, AudioEmbedder), WeightError> {
    load_with(towers, policy, edit, |_| {})
}

fn load_with(
    towers: &Towers,
    policy: Policy,
    edit: impl FnOnce(&mut Value),
    plant: impl FnOnce(&mut Loader),
) -> Result<(VisionEmbedder, AudioEmbedder), WeightError> {
    let mut config = towers.config.clone();
    edit(&mut config);
    let mut loader = Loader::open(&[towers.folder.path().join("model.safetensors")], &config, policy)?;
    plant(&mut loader);
    let text_hidden = config["text_config"]["hidden_size"].as_i64().unwrap() as i32;
    let vision = unified::load_vision(&VisionConfig::deserialize(&config["vision_config"]).unwrap(), &mut loader, text_hidden)?;
    let audio = unified::load_audio(&AudioConfig::deserialize(&config["audio_config"]).unwrap(), &mut loader, text_hidden)?;
    loader.finish()?;
    Ok((vision, audio))
}

/// The patches of the script's image.
fn patches(columns: i32, rows: i32, contrast: f32, seed: usize) -> Vec<f32> {
    let (columns, rows) = (columns as usize, rows as usize);
    let mut values = Vec::new();
    for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
        for (y, x) in (0..SIDE).flat_map(|y| (0..SIDE).map(move |x| (y, x))) {
            let pixel = (row * SIDE + y) * columns * SIDE + column * SIDE + x;
            values.extend((0..3).map(|color| value(3 * pixel + color, seed) * contrast));
        }
    }
    values
}

fn samples(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|index| value(index, 100 + seed) * 2.0 - 1.0).collect()
}

fn recordings(golden: &Golden) -> Vec<Features> {
    let each = golden.recordings.iter().enumerate();
    each.map(|(seed, &count)| Features::of_samples(&samples(count, seed), SAMPLES_PER_TOKEN)).collect()
}

/// Cuts what several became, so many tokens each.
fn cut(all: &Array, tokens: &[usize]) -> Vec<Vec<f32>> {
    let (values, width) = (numbers(all), all.dim(1) as usize);
    let mut rest = &values[..];
    let each = tokens.iter().map(|tokens| rest.split_off(..tokens * width).unwrap().to_vec()).collect();
    assert!(rest.is_empty());
    each
}

/// Each image's soft tokens: alone, or all in one call.
fn see(embedder: &VisionEmbedder, golden: &Golden, together: bool) -> Vec<Vec<f32>> {
    let sizes = golden.images.iter().enumerate();
    let values: Vec<Vec<f32>> = sizes.map(|(seed, &(columns, rows, contrast))| patches(columns, rows, contrast, seed)).collect();
    let sized = values.iter().zip(&golden.images);
    let images: Vec<ImagePatches<'_>> = sized.map(|(values, &(columns, rows, _))| ImagePatches { values, columns, rows }).collect();
    if !together {
        return images.iter().map(|image| numbers(&embedder.encode(&[*image]).unwrap())).collect();
    }
    let tokens: Vec<usize> = images.iter().map(|image| embedder.soft_tokens(image) as usize).collect();
    cut(&embedder.encode(&images).unwrap(), &tokens)
}

fn hear(embedder: &AudioEmbedder, recordings: &[Features], together: bool) -> Vec<Vec<f32>> {
    if !together {
        return recordings.iter().map(|recording| numbers(&embedder.encode(&[recording]).unwrap())).collect();
    }
    let tokens: Vec<usize> = recordings.iter().map(|recording| recording.frames).collect();
    cut(&embedder.encode(&recordings.iter().collect::<Vec<_>>()).unwrap(), &tokens)
}

#[test]
fn embedders_agree_with_mlx_vlm_alone_and_together() {
    let Some(checkpoint) = checkpoint("embedders_agree_with_mlx_vlm_alone_and_together", "unified") else { return };
    let (towers, golden) = (Towers::of(&checkpoint, as_it_is), golden());
    // In bfloat16 too pixels and samples are never rounded, nor is what comes of them.
    for (policy, theirs) in [(PLAIN, &golden.float32), (PACKED, &golden.float32), (BFLOAT16, &golden.as_stored)] {
        let (vision, audio) = load(&towers, policy, |_| {}).unwrap();
        for together in [false, true] {
            let place = |what| format!("{what}, {policy:?}, together {together}");
            check(&place("images"), &see(&vision, &golden, together), &theirs.images, ERROR_MAX, ONE_ERROR_MAX);
            check(
                &place("recordings"),
                &hear(&audio, &recordings(&golden), together),
                &theirs.recordings,
                ERROR_MAX,
                ONE_ERROR_MAX,
            );
        }
    }
}

#[test]
fn on_the_cpu_company_changes_no_bit_of_patches_and_samples() {
    let Some(checkpoint) = checkpoint("on_the_cpu_company_changes_no_bit_of_patches_and_samples", "unified") else { return };
    let golden = golden();
    let (vision, audio) = load(&Towers::of(&checkpoint, as_it_is), PACKED, |_| {}).unwrap();
    assert_eq!(see(&vision, &golden, true), see(&vision, &golden, false));
    assert_eq!(hear(&audio, &recordings(&golden), true), hear(&audio, &recordings(&golden), false));
}

#[test]
fn faults_planted_in_embedders_are_seen() {
    let Some(checkpoint) = checkpoint("faults_planted_in_embedders_are_seen", "unified") else { return };
    let (towers, golden) = (Towers::of(&checkpoint, as_it_is), golden());
    let float32 = &golden.float32;
    let of_images = |vision: &VisionEmbedder| away(&see(vision, &golden, true).concat(), &float32.images.concat());

    let exchanged = |name: String, tensor: Array| {
        let table = name.ends_with("pos_embedding");
        (name, if table { tensor.take_axis(Array::from_slice(&[1, 0], &[2]), 1).unwrap().contiguous().unwrap() } else { tensor })
    };
    let exchanged = of_images(&load(&Towers::of(&checkpoint, exchanged), PLAIN, |_| {}).unwrap().0);
    let mut faults = vec![("columns for rows".to_owned(), exchanged, FAULT_MIN)];
    for tensor in ["patch_ln1.bias", "patch_dense.bias", "patch_ln2.bias", "pos_norm.bias", "pos_embedding"] {
        let zero = |loader: &mut Loader| loader.zero(&format!("vision_embedder.{tensor}"));
        let (vision, _) = load_with(&towers, PLAIN, |_| {}, zero).unwrap();
        faults.push((format!("without {tensor}"), of_images(&vision), FAULT_MIN));
    }
    let last = float32.images.len() - 1;
    // What is nearly of one color shows it.
    let (mut vision, _) = load(&towers, PLAIN, |_| {}).unwrap();
    vision.patch_ln1.eps = 1e-6;
    faults.push((
        "the other norms' epsilon".to_owned(),
        away(&see(&vision, &golden, true)[last], &float32.images[last]),
        FAULT_MIN,
    ));
    let (_, audio) = load(&towers, PLAIN, |_| {}).unwrap();
    let at = golden.recordings.iter().position(|count| count % SAMPLES_PER_TOKEN != 0 && *count > SAMPLES_PER_TOKEN).unwrap();
    let own = samples(golden.recordings[at], at);
    let padding = own.len().next_multiple_of(SAMPLES_PER_TOKEN) - own.len();
    let mut in_front = own.clone();
    in_front.splice(own.len() / SAMPLES_PER_TOKEN * SAMPLES_PER_TOKEN.., vec![0.0; padding]);
    in_front.extend(&own[own.len() / SAMPLES_PER_TOKEN * SAMPLES_PER_TOKEN..]);
    let mut loud = Features::of_samples(&own, SAMPLES_PER_TOKEN);
    let end = loud.values.len();
    loud.values[end - padding..].fill(1.0);
    for (what, recording) in [("in front", Features::of_samples(&in_front, SAMPLES_PER_TOKEN)), ("that is heard", loud)] {
        let heard = numbers(&audio.encode(&[&recording]).unwrap());
        faults.push((format!("padding {what}"), away(&heard, &float32.recordings[at]), FAULT_MIN));
    }
    for (fault, away, least) in faults {
        println!("{fault}: {away:.2e} away");
        assert!(away >= least, "{fault} is {away} away");
    }
}

#[test]
fn names_of_converted_files_are_known() {
    let Some(checkpoint) = checkpoint("names_of_converted_files_are_known", "unified") else { return };
    let golden = golden();
    let converted = |name: String, tensor: Array| (name.replacen("model.", "", 1), tensor);
    let (vision, audio) = load(&Towers::of(&checkpoint, as_it_is), PLAIN, |_| {}).unwrap();
    let (other_vision, other_audio) = load(&Towers::of(&checkpoint, converted), PLAIN, |_| {}).unwrap();
    assert_eq!(see(&vision, &golden, true), see(&other_vision, &golden, true));
    assert_eq!(hear(&audio, &recordings(&golden), true), hear(&other_audio, &recordings(&golden), true));
}

#[test]
fn embedders_that_do_not_fit_are_refused() {
    let Some(checkpoint) = checkpoint("embedders_that_do_not_fit_are_refused", "unified") else { return };
    let refusal = |towers: &Towers, edit: &dyn Fn(&mut Value)| match load(towers, PLAIN, edit) {
        Ok(_) => panic!("it was loaded"),
        Err(error) => error.to_string(),
    };
    let renamed = |name: String, tensor: Array| {
        if name.ends_with("patch_ln2.bias") { (format!("{name}.strange"), tensor) } else { (name, tensor) }
    };
    let text = refusal(&Towers::of(&checkpoint, renamed), &|config| config["vision_config"]["mm_posemb_size"] = json!(99));
    for problem in [
        "vision_embedder.patch_ln2.bias is missing",
        "vision_embedder.pos_embedding has shape [160, 2, 40], the configuration says [99, 2, 40]",
        "vision_embedder.patch_ln2.bias.strange is not part of this family",
    ] {
        assert!(text.contains(problem), "{problem:?} is not in:\n{text}");
    }
    let towers = Towers::of(&checkpoint, as_it_is);
    for (table, key, to, problem) in [
        ("vision_config", "patch_size", json!(0), "vision_config.patch_size is 0; it must be 1 to 256"),
        ("vision_config", "pooling_kernel_size", json!(65), "vision_config.pooling_kernel_size is 65; it must be 1 to 64"),
        (
            "vision_config",
            "patch_size",
            json!(14),
            "model_patch_size is 48; images are cut into patches of patch_size × pooling_kernel",
        ),
        ("vision_config", "mm_embed_dim", json!(-1), "vision_config.mm_embed_dim is -1; it must be 1 to 1048576"),
        ("vision_config", "mm_posemb_size", json!(0), "vision_config.mm_posemb_size is 0"),
        (
            "vision_config",
            "output_proj_dims",
            json!(7),
            "output_proj_dims is 7, and what is projected has mm_embed_dim = 40 numbers",
        ),
        ("audio_config", "output_proj_dims", json!(0), "audio_config.output_proj_dims is 0; it must be 1 to 1048576"),
    ] {
        let text = refusal(&towers, &|config| config[table][key] = to.clone());
        assert!(text.contains(problem), "{problem:?} is not in:\n{text}");
    }
    let large = |config: &mut Value| config["vision_config"] = json!({ "patch_size": 256, "pooling_kernel_size": 64 });
    assert!(refusal(&towers, &large).contains("patches of 16384 × 16384 pixels; 1048576 numbers are possible"));
}

#[test]
fn media_that_do_not_fit_are_refused() {
    let Some(checkpoint) = checkpoint("media_that_do_not_fit_are_refused", "unified") else { return };
    let (vision, audio) = load(&Towers::of(&checkpoint, as_it_is), PLAIN, |_| {}).unwrap();
    let values = patches(2, 1, 1.0, 0);
    for (columns, rows, values, problem) in [
        (2, 1, &values[1..], "2 × 1 patches are 13824 numbers, and it has 13823"),
        (0, 1, &values[..], "0 × 1 patches, and the model knows 1 to 160 each way"),
        (1, 161, &values[..], "1 × 161 patches, and the model knows 1 to 160 each way"),
    ] {
        let error = vision.encode(&[ImagePatches { values, columns, rows }]).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
    assert!(vision.encode(&[]).is_err() && audio.encode(&[]).is_err());
    let cut = Features { frames: 2, bins: 640, values: vec![0.0; 1279] };
    for (recording, problem) in [
        (Features::of_samples(&[0.5; 999], 320), "frames of 320 samples (audio_samples_per_token of processor_config.json)"),
        (Features::of_samples(&[], 640), "it has 0 frames, 1 to 750 are possible"),
        (Features::of_samples(&[0.5; 480_001], 640), "it has 751 frames, 1 to 750 are possible"),
        (cut, "2 frames are 1280 samples, and it has 1279"),
    ] {
        let error = audio.encode(&[&recording]).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
}

fn whole(checkpoint: &Path, edit: impl FnOnce(&mut Value)) -> super::Gemma4 {
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    let mut config: Value = serde_json::from_slice(&fs::read(checkpoint.join("config.json")).unwrap()).unwrap();
    edit(&mut config);
    super::load(&config, Loader::open(&[checkpoint.join("model.safetensors")], &config, PLAIN).unwrap()).unwrap()
}

#[test]
fn media_go_where_their_kind_is_known() {
    let Some(checkpoint) = checkpoint("media_go_where_their_kind_is_known", "unified") else { return };
    let model = whole(&checkpoint, |_| {});
    let medium = |content, tokens| Medium { first: 0, tokens, content: Arc::new(content), identity: 0 };
    let frames = || MediumContent::Waveform(Features::of_samples(&samples(1000, 1), SAMPLES_PER_TOKEN));
    let image = || {
        let values = patches(3, 1, 1.0, 2);
        MediumContent::Image(crate::media::Patches { values, columns: 3, rows: 1, soft_tokens: 3 })
    };
    let media = [medium(frames(), 2), medium(image(), 3), medium(frames(), 2)];
    let encoded = model.towers().unwrap().encode(&media.iter().collect::<Vec<_>>()).unwrap();
    assert_eq!(encoded.iter().map(|soft| soft.shape().to_vec()).collect::<Vec<_>>(), [[2, 32], [3, 32], [2, 32]]);
    assert_eq!(numbers(&encoded[0]), numbers(&encoded[2]));
    let mel = UsmFeatures { features: Features { frames: 4, bins: 128, values: vec![0.0; 512] }, valid_frames: 4 };
    for (medium, problem) in [
        (medium(frames(), 3), "a recording becomes 2 soft tokens and has 3 places in the prompt"),
        (medium(image(), 2), "an image becomes 3 soft tokens and has 2 places in the prompt"),
        (medium(MediumContent::Audio(mel), 1), "a recording was made ready for another kind of model"),
    ] {
        let error = model.towers().unwrap().encode(&[&medium]).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
    // Tensors that the configuration has no place for are of no use.
    let deaf = whole(&checkpoint, |config| config["audio_config"] = Value::Null);
    let error = deaf.towers().unwrap().encode(&[&medium(frames(), 2)]).unwrap_err().to_string();
    assert!(error.contains("the model has no weights for recordings"), "{error}");
    let blind = whole(&checkpoint, |config| config["vision_config"] = Value::Null);
    let error = blind.towers().unwrap().encode(&[&medium(image(), 3)]).unwrap_err().to_string();
    assert!(error.contains("the model has no weights for images"), "{error}");
}

/// The budget's prediction beside MLX's peak, of embedders of the 12B's own sizes with random weights.
fn predict_scratch(policies: &[Policy]) {
    let text_hidden = 3840;
    let (vision, audio) = (VisionConfig::default(), AudioConfig::default());
    let width = vision.mm_embed_dim;
    let pixels = (3 * SIDE * SIDE) as i32;
    let shapes = [
        ("vision_embedder.patch_ln1.weight", vec![pixels]),
        ("vision_embedder.patch_ln1.bias", vec![pixels]),
        ("vision_embedder.patch_dense.weight", vec![width, pixels]),
        ("vision_embedder.patch_dense.bias", vec![width]),
        ("vision_embedder.patch_ln2.weight", vec![width]),
        ("vision_embedder.patch_ln2.bias", vec![width]),
        ("vision_embedder.pos_embedding", vec![vision.mm_posemb_size, 2, width]),
        ("vision_embedder.pos_norm.weight", vec![width]),
        ("vision_embedder.pos_norm.bias", vec![width]),
        ("embed_vision.embedding_projection.weight", vec![text_hidden, width]),
        ("embed_audio.embedding_projection.weight", vec![text_hidden, 640]),
    ];
    let random = |shape: &[i32]| random::normal::<f32>(shape, None, Some(0.02), None).unwrap().as_dtype(Dtype::Bfloat16).unwrap();
    let tensors = shapes.iter().map(|(name, shape)| ((*name).to_owned(), random(shape))).collect();
    let folder = tempfile::tempdir().unwrap();
    save(&tensors, folder.path());
    for &policy in policies {
        let mut loader = Loader::open(&[folder.path().join("model.safetensors")], &json!({}), policy).unwrap();
        let seeing = unified::load_vision(&vision, &mut loader, text_hidden).unwrap();
        let hearing = unified::load_audio(&audio, &mut loader, text_hidden).unwrap();
        // What comes of a recording is larger than its samples, and there with them.
        let measure = |what: &str, tokens: u32, price: EncodePrice, soft_bytes: u64, encode: &dyn Fn() -> Array| {
            let once = || encode().eval().unwrap();
            // What is done once is done.
            once();
            let before = memory::active_bytes().unwrap();
            memory::reset_peak().unwrap();
            once();
            let (predicted, measured) =
                (price.bytes(tokens) + u64::from(tokens) * soft_bytes, memory::peak_bytes().unwrap() - before);
            let over = 100.0 * (predicted as f64 / measured as f64 - 1.0);
            println!("{what}, {policy:?}: predicted {predicted}, measured {measured}: {over:+.1}%");
            over
        };
        let mut worst = 0.0f64;
        for (columns, rows) in [(20, 14), (5, 4)] {
            let values = patches(columns, rows, 1.0, 1);
            let image = || seeing.encode(&[ImagePatches { values: &values, columns, rows }]).unwrap();
            let over = measure(&format!("{columns} × {rows} patches"), (columns * rows) as u32, seeing.encode_price(), 0, &image);
            worst = worst.max(over.abs());
        }
        for count in [480_000, 32_000] {
            let recording = Features::of_samples(&samples(count, 1), SAMPLES_PER_TOKEN);
            let sound = || hearing.encode(&[&recording]).unwrap();
            let over = measure(
                &format!("{count} samples"),
                recording.frames as u32,
                hearing.encode_price(),
                4 * text_hidden as u64,
                &sound,
            );
            worst = worst.max(over.abs());
        }
        assert!(worst <= 10.0, "{worst:.1}% away");
    }
}

#[test]
fn an_embedders_scratch_is_predicted() {
    mlx_rs::Device::set_default(&mlx_rs::Device::cpu());
    predict_scratch(&[PACKED]);
}
