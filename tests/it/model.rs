//! Real files, and a hub in small.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use mlxbatch::model::{self, Hub, ModelError, ModelSummary};
use serde_json::json;

use crate::prompt::models;

#[test]
fn smollm2_is_read_from_gguf() {
    let Some(path) = models("smollm2_is_read_from_gguf", "SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let files = model::locate(path.to_str().unwrap()).unwrap();
    // As HuggingFaceTB/SmolLM2-135M-Instruct's config.json says.
    let expected = json!({
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0, "tie_word_embeddings": true, "attention_bias": false, "mlp_bias": false,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    });
    assert_eq!(*files.config(), expected);
    assert_eq!(files.stop_tokens(), [2]);
    let summary = ModelSummary::new(&files, true).unwrap();
    assert_eq!((summary.parameters, summary.layers, summary.context_length), (134_515_008, 30, Some(8192)));
    assert_eq!(summary.kv_bytes_per_token(4), (46_080, 0));
    assert_eq!(summary.dtypes.keys().collect::<Vec<_>>(), ["F32", "Q4_1", "Q8_0"]);
}

#[test]
fn gemma3_is_read_from_gguf() {
    let Some(path) = models("gemma3_is_read_from_gguf", "gemma-3-270m-q4_k_m.gguf") else { return };
    let files = model::locate(path.to_str().unwrap()).unwrap();
    let config = files.config();
    assert_eq!((&config["model_type"], &config["head_dim"]), (&json!("gemma3_text"), &json!(256)));
    assert_eq!((&config["sliding_window"], &config["sliding_window_pattern"]), (&json!(512), &json!(6)));
    // `<eos>`, and `<end_of_turn>` by its text.
    assert_eq!(files.stop_tokens(), [1, 106]);
    let summary = ModelSummary::new(&files, false).unwrap();
    assert_eq!((summary.parameters, summary.full_layers, summary.window_layers), (268_098_176, 3, 15));
}

const TOKENIZER: &[u8] = br#"{"of":"openai"}"#;

/// What the hub says of one model, by path.
type Files = HashMap<String, Vec<u8>>;

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// Serves `files` as `org/name` in the way of the hub's HTTP; returns its address and the log of requests.
fn serve(files: Files) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let log = Arc::new(Mutex::new(Vec::new()));
    let requests = Arc::clone(&log);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            answer(stream.unwrap(), &files, &requests);
        }
    });
    (address, log)
}

fn answer(mut stream: TcpStream, files: &Files, log: &Mutex<Vec<String>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 || line.trim().is_empty() {
            break;
        }
        lines.push(line.trim().to_owned());
    }
    let Some(path) = lines.first().and_then(|line| line.split(' ').nth(1)).map(str::to_owned) else { return };
    let header = |name: &str| {
        lines
            .iter()
            .find_map(|line| line.split_once(": ").filter(|(key, _)| key.eq_ignore_ascii_case(name)))
            .map(|(_, value)| value)
    };
    log.lock().unwrap().push(format!("{path} {}", header("authorization").unwrap_or("-")));
    let (status, headers, body) = respond(&path, header("range"), files);
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n{headers}\r\n", body.len());
    stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body)).ok();
}

fn respond(path: &str, range: Option<&str>, files: &Files) -> (&'static str, String, Vec<u8>) {
    if path.starts_with("/api/models/gated/name") {
        return ("401 Unauthorized", String::new(), vec![]);
    }
    // What mlx-whisper's checkpoints come without.
    if path.starts_with("/api/models/openai/whisper-tiny.en") {
        let siblings = json!([{"rfilename": "tokenizer.json", "size": TOKENIZER.len()}, {"rfilename": "model.safetensors"}]);
        return ("200 OK", String::new(), json!({"sha": SHA, "siblings": siblings}).to_string().into_bytes());
    }
    if path.starts_with("/api/models/org/name") {
        let siblings: Vec<_> = files.iter().map(|(name, bytes)| json!({"rfilename": name, "size": bytes.len()})).collect();
        return ("200 OK", String::new(), json!({"sha": SHA, "siblings": siblings}).to_string().into_bytes());
    }
    let name = path.strip_prefix(&format!("/org/name/resolve/{SHA}/"));
    let openai = (path == format!("/openai/whisper-tiny.en/resolve/{SHA}/tokenizer.json")).then_some(TOKENIZER);
    let found = name.and_then(|name| files.get(name)).map(|bytes| &bytes[..]).or(openai);
    let Some(bytes) = found else { return ("404 Not Found", String::new(), vec![]) };
    let (start, end) = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')).unwrap_or(("0", ""));
    let start: usize = start.parse().unwrap();
    let end = end.parse().map_or(bytes.len(), |end: usize| (end + 1).min(bytes.len()));
    let etag = blake3::hash(bytes).to_hex();
    let headers = format!(
        "ETag: \"{etag}\"\r\nX-Repo-Commit: {SHA}\r\nContent-Range: bytes {start}-{}/{}\r\nAccept-Ranges: bytes\r\n",
        end - 1,
        bytes.len()
    );
    ("206 Partial Content", headers, bytes[start..end].to_vec())
}

/// A file of one float32 tensor of 4 elements.
fn shard(name: &str) -> Vec<u8> {
    let header = json!({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 16]].concat()
}

fn repository() -> Files {
    let index = json!({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}});
    HashMap::from([
        ("config.json".to_owned(), br#"{"model_type":"llama","eos_token_id":5}"#.to_vec()),
        ("tokenizer.json".to_owned(), b"{}".to_vec()),
        ("model.safetensors.index.json".to_owned(), index.to_string().into_bytes()),
        ("model-1.safetensors".to_owned(), shard("a")),
        ("model-2.safetensors".to_owned(), shard("b")),
        ("consolidated.safetensors".to_owned(), shard("c")),
        ("pytorch_model.bin".to_owned(), vec![1]),
    ])
}

fn hub(endpoint: &str, cache: &tempfile::TempDir) -> Hub {
    Hub { endpoint: endpoint.to_owned(), cache: cache.path().to_owned(), token: Some("secret".to_owned()), offline: false }
}

#[test]
fn a_model_is_fetched_from_a_hub_once() {
    let cache = tempfile::tempdir().unwrap();
    let (address, log) = serve(repository());
    let files = model::locate_with("org/name", || hub(&address, &cache)).unwrap();
    assert_eq!(files.stop_tokens(), [5]);
    let mut names: Vec<String> = files.tensors().unwrap().into_iter().map(|tensor| tensor.name).collect();
    names.sort();
    assert_eq!(names, ["a", "b"]);
    let asked = std::mem::take(&mut *log.lock().unwrap());
    assert!(asked.iter().all(|line| line.ends_with("Bearer secret")), "{asked:?}");
    assert!(!asked.iter().any(|line| line.contains("consolidated") || line.contains("pytorch_model")), "{asked:?}");
    // The layout that Python's huggingface_hub reads.
    let repository = cache.path().join("models--org--name");
    assert_eq!(std::fs::read_to_string(repository.join("refs/main")).unwrap(), SHA);
    assert!(repository.join("snapshots").join(SHA).join("config.json").exists());

    model::locate_with("org/name", || hub(&address, &cache)).unwrap();
    assert_eq!(log.lock().unwrap().len(), 1, "the second time asks for the listing alone");

    // Without a network, and without asking.
    let gone = "http://127.0.0.1:1";
    assert_eq!(model::locate_with("org/name", || hub(gone, &cache)).unwrap().stop_tokens(), [5]);
    assert!(model::locate_with("org/name", || Hub { offline: true, ..hub(gone, &cache) }).is_ok());
}

#[test]
fn a_whisper_gets_its_tokenizer_from_openai() {
    let config = json!({"n_mels": 80, "n_audio_ctx": 1500, "n_audio_state": 384, "n_audio_head": 6, "n_audio_layer": 4,
        "n_vocab": 51864, "n_text_ctx": 448, "n_text_state": 384, "n_text_head": 6, "n_text_layer": 4});
    let mut repository = HashMap::from([
        ("config.json".to_owned(), config.to_string().into_bytes()),
        ("weights.npz".to_owned(), b"PK".to_vec()),
        ("README.md".to_owned(), b"x".to_vec()),
    ]);
    let cache = tempfile::tempdir().unwrap();
    let (address, log) = serve(repository.clone());
    let files = model::locate_with("org/name", || hub(&address, &cache)).unwrap();
    assert_eq!((files.family(), files.context_length()), ("whisper", Some(448)));
    assert_eq!(files.side_file("tokenizer.json").unwrap().unwrap().as_bytes(), TOKENIZER);
    assert_eq!(files.weight_files().len(), 1);
    assert!(!log.lock().unwrap().iter().any(|line| line.contains("whisper-tiny.en/resolve") && line.contains("model.safetensors")));
    // From the cache afterwards.
    let gone = || Hub { offline: true, ..hub("http://127.0.0.1:1", &cache) };
    let files = model::locate_with("org/name", gone).unwrap();
    assert_eq!(files.side_file("tokenizer.json").unwrap().unwrap().as_bytes(), TOKENIZER);

    // One of its own is kept.
    repository.insert("tokenizer.json".to_owned(), b"{}".to_vec());
    let cache = tempfile::tempdir().unwrap();
    let (address, log) = serve(repository);
    let files = model::locate_with("org/name", || hub(&address, &cache)).unwrap();
    assert_eq!(files.side_file("tokenizer.json").unwrap().as_deref(), Some("{}"));
    assert!(!log.lock().unwrap().iter().any(|line| line.contains("openai")));
}

#[track_caller]
fn refused(result: Result<model::ModelFiles, ModelError>, expected: &str) {
    let message = result.unwrap_err().to_string();
    assert!(message.contains(expected), "{message:?} does not say {expected:?}");
}

#[test]
fn what_a_hub_cannot_give_is_said() {
    let cache = tempfile::tempdir().unwrap();
    let locate = |id: &str, files: Files| {
        let (address, _log) = serve(files);
        model::locate_with(id, || hub(&address, &cache))
    };
    refused(locate("org/other", repository()), "there is no model \"org/other\" at http://127.0.0.1");
    refused(locate("gated/name", repository()), "accept the model's terms on its page, and set HF_TOKEN");
    let without = |gone: &[&str]| {
        let mut files = repository();
        files.retain(|name, _| !gone.iter().any(|gone| name.contains(gone)));
        files
    };
    refused(locate("org/name", without(&["config.json"])), "has no config.json on the hub");
    refused(locate("org/name", without(&["safetensors"])), "has no *.safetensors and no weights.npz on the hub");
    refused(
        locate("org/name", without(&["model-2"])),
        "downloading model-2.safetensors of \"org/name\" failed: the index names it",
    );
    refused(locate("org/name", HashMap::from([("m.gguf".to_owned(), vec![1])])), "download one, for example \"m.gguf\"");
    let mut hostile = repository();
    hostile.insert("../../outside".to_owned(), vec![1]);
    refused(locate("org/name", hostile), "it has a file named \"../../outside\"");
    refused(model::locate_with("org/none", || hub("http://127.0.0.1:1", &cache)), "cannot reach http://127.0.0.1:1");
}
