//! What a model's files say, read without loading a weight.
//!
//! A model is a folder (`config.json`, `*.safetensors` or `weights.npz`, tokenizer files), a `.gguf` file, or a hub id, which
//! becomes a folder. [`locate`] finds and checks the files; [`ModelFiles::config`] speaks Hugging Face's names for all of them.

mod config;
pub mod ctranslate2;
pub mod gguf;
pub mod hub;
pub mod npz;
pub mod safetensors;
mod summary;
mod towers;

use std::path::{Path, PathBuf};

use serde_json::Value;
use thiserror::Error;

pub use hub::Hub;
pub use summary::{EncoderSummary, ModelSummary, Quantization};
pub use towers::{AudioTower, ImageTower, Placeholder, SIDECAR, Towers};

use gguf::Gguf;
use safetensors::Index;

/// Families that can be run, as config.json's `model_type` names them.
pub const FAMILIES: &[&str] = &[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
    "whisper",
];

/// What mlx-whisper's older checkpoints keep their weights in.
const NPZ_FILE: &str = "weights.npz";
const INDEX_FILE: &str = "model.safetensors.index.json";
/// The largest side files, tokenizers of 262,144 tokens, have 35 MB.
const SIDE_FILE_BYTES_MAX: u64 = 256 << 20;

#[derive(Debug, Error)]
pub enum ModelError {
    #[error("{path:?} is neither a folder nor a .gguf file here, nor a hub id like org/name: check model.path in the job file")]
    NotFound { path: String },
    #[error("there is no config.json in {folder}: it must be the folder that holds config.json, *.safetensors and tokenizer.json")]
    NoConfig { folder: PathBuf },
    #[error(
        "there are no *.safetensors and no weights.npz in {folder}; other weight formats are not read: convert the \
         model, for example with mlx-lm"
    )]
    NoWeights { folder: PathBuf },
    #[error(
        "there is no tokenizer.json in {folder}, as in many a Whisper of mlx-whisper's layout: put there the one of {like}, which \
         has the same vocabulary"
    )]
    NoTokenizer { folder: PathBuf, like: &'static str },
    #[error("{index} names the shard {shard:?}, which is not in its folder: download the model again")]
    NoShard { index: PathBuf, shard: String },
    #[error("cannot read {file}: {source}")]
    Io { file: PathBuf, source: std::io::Error },
    #[error("{file} has {bytes} bytes; files of this kind are read up to {bytes_max}")]
    TooLarge { file: PathBuf, bytes: u64, bytes_max: u64 },
    #[error("{file} is not valid JSON: {source}")]
    Json { file: PathBuf, source: serde_json::Error },
    #[error("{file} cannot be run: {reason}")]
    Unsupported { file: PathBuf, reason: String },
    #[error(transparent)]
    Gguf(#[from] gguf::GgufError),
    #[error(transparent)]
    Safetensors(#[from] safetensors::SafetensorsError),
    #[error(transparent)]
    Npz(#[from] npz::NpzError),
    #[error(transparent)]
    Hub(#[from] hub::HubError),
}

/// A model's files, found and read but for the weights.
#[derive(Debug, Clone)]
pub struct ModelFiles {
    /// As the user named it.
    pub name: String,
    pub weights: Weights,
    config: Value,
    generation_config: Value,
    tokenizer_config: Value,
    /// A tokenizer.json from elsewhere, of a model without one.
    tokenizer: Option<PathBuf>,
}

#[derive(Debug, Clone)]
pub enum Weights {
    /// The shards, in the order of their names.
    Safetensors {
        folder: PathBuf,
        shards: Vec<PathBuf>,
        index: Option<Index>,
    },
    Npz {
        folder: PathBuf,
        file: PathBuf,
    },
    Gguf(Box<Gguf>),
}

/// A tensor of either format.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// As the file names it.
    pub name: String,
    /// Slowest dimension first.
    pub shape: Vec<u64>,
    /// `BF16`, `U32`, `Q4_1`, …
    pub dtype: String,
    pub bytes: u64,
}

/// Finds the model at `path`: a folder, a `.gguf` file, or a hub id that is fetched into the cache the environment names.
pub fn locate(path: &str) -> Result<ModelFiles, ModelError> {
    locate_with(path, Hub::from_env)
}

/// [`locate`], with another hub.
pub fn locate_with(path: &str, hub: impl FnOnce() -> Hub) -> Result<ModelFiles, ModelError> {
    let here = Path::new(path);
    if here.is_dir() {
        return open_folder(path, here);
    }
    if here.is_file() {
        return open_gguf(path, here);
    }
    if is_hub_id(path) {
        let hub = hub();
        let mut files = open_folder(path, &hub.fetch(path)?)?;
        if let (Some(like), None) = (files.tokenizer_like(), files.own_side_file("tokenizer.json")?) {
            files.tokenizer = Some(hub.fetch_file(like, "tokenizer.json")?);
        }
        return Ok(files);
    }
    Err(ModelError::NotFound { path: path.to_owned() })
}

/// `org/name`, by the hub's rules: letters, digits, `-`, `_`, `.`; not something that reads as a path.
fn is_hub_id(path: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && part.len() <= 96
            && !part.starts_with(['.', '-'])
            && !part.contains("..")
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    matches!(path.split_once('/'), Some((org, name)) if part(org) && part(name)) && !path.ends_with(".gguf")
}

fn open_gguf(name: &str, file: &Path) -> Result<ModelFiles, ModelError> {
    let gguf = Gguf::open(file)?;
    let config = config::from_gguf(&gguf).map_err(|reason| ModelError::Unsupported { file: file.to_owned(), reason })?;
    Ok(ModelFiles {
        name: name.to_owned(),
        weights: Weights::Gguf(Box::new(gguf)),
        config,
        generation_config: Value::Null,
        tokenizer_config: Value::Null,
        tokenizer: None,
    })
}

fn open_folder(name: &str, folder: &Path) -> Result<ModelFiles, ModelError> {
    let Some(config) = read_json(&folder.join("config.json"))? else {
        return Err(ModelError::NoConfig { folder: folder.to_owned() });
    };
    let unsupported = |reason| ModelError::Unsupported { file: folder.join("config.json"), reason };
    let config = config::from_openai(config).map_err(unsupported)?;
    let index_file = folder.join(INDEX_FILE);
    let index = index_file.is_file().then(|| Index::read(&index_file)).transpose()?;
    let names: Vec<String> = match &index {
        Some(index) => {
            if let Some(shard) = index.shards().into_iter().find(|shard| !folder.join(shard).is_file()) {
                return Err(ModelError::NoShard { index: index_file, shard: shard.to_owned() });
            }
            index.shards().into_iter().map(str::to_owned).collect()
        }
        None => {
            let io = |source| ModelError::Io { file: folder.to_owned(), source };
            let mut names = Vec::new();
            for entry in std::fs::read_dir(folder).map_err(io)? {
                names.extend(entry.map_err(io)?.file_name().into_string().ok());
            }
            weight_files(&names)
        }
    };
    if names.is_empty() {
        return Err(ModelError::NoWeights { folder: folder.to_owned() });
    }
    let weights = match &names[..] {
        [npz] if npz == NPZ_FILE => Weights::Npz { folder: folder.to_owned(), file: folder.join(npz) },
        names => {
            let shards = names.iter().map(|name| folder.join(name)).collect();
            Weights::Safetensors { folder: folder.to_owned(), shards, index }
        }
    };
    Ok(ModelFiles {
        name: name.to_owned(),
        weights,
        config,
        generation_config: read_json(&folder.join("generation_config.json"))?.unwrap_or_default(),
        tokenizer_config: read_json(&folder.join("tokenizer_config.json"))?.unwrap_or_default(),
        tokenizer: None,
    })
}

/// Which of a folder's files are the weights, without an index: `model.safetensors`, or all of `model*.safetensors`, as mlx-lm has
/// it; any other `*.safetensors` only where there is none of that name, since repositories keep second copies
/// (`consolidated.safetensors`, `model.fp32-00001-of-00002.safetensors`). Without any, `weights.npz`.
fn weight_files(names: &[String]) -> Vec<String> {
    if let Some(whole) = names.iter().find(|name| *name == "model.safetensors") {
        return vec![whole.clone()];
    }
    let mut weights: Vec<String> =
        names.iter().filter(|name| name.ends_with(".safetensors") && !name.contains('/')).cloned().collect();
    if weights.iter().any(|name| name.starts_with("model")) {
        weights.retain(|name| name.starts_with("model"));
    }
    if weights.is_empty() {
        weights.extend(names.iter().find(|name| *name == NPZ_FILE).cloned());
    }
    weights.sort();
    weights
}

/// The text of a side file; `None` where there is none.
fn read_text(file: &Path) -> Result<Option<String>, ModelError> {
    let io = |source| ModelError::Io { file: file.to_owned(), source };
    match std::fs::metadata(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
        Ok(metadata) if metadata.len() > SIDE_FILE_BYTES_MAX => {
            return Err(ModelError::TooLarge { file: file.to_owned(), bytes: metadata.len(), bytes_max: SIDE_FILE_BYTES_MAX });
        }
        Ok(_) => {}
    }
    Ok(Some(std::fs::read_to_string(file).map_err(io)?))
}

fn read_json(file: &Path) -> Result<Option<Value>, ModelError> {
    let Some(text) = read_text(file)? else { return Ok(None) };
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    Ok(Some(serde_json::from_str(text).map_err(|source| ModelError::Json { file: file.to_owned(), source })?))
}

impl ModelFiles {
    /// The configuration in Hugging Face's names: config.json as it is, or built from GGUF metadata.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `tokenizer_config.json`; null where there is none.
    pub fn tokenizer_config(&self) -> &Value {
        &self.tokenizer_config
    }

    /// The header of a GGUF model.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.weights {
            Weights::Gguf(gguf) => Some(gguf),
            Weights::Safetensors { .. } | Weights::Npz { .. } => None,
        }
    }

    /// The files that hold the weights.
    pub fn weight_files(&self) -> &[PathBuf] {
        match &self.weights {
            Weights::Safetensors { shards, .. } => shards,
            Weights::Npz { file, .. } => std::slice::from_ref(file),
            Weights::Gguf(gguf) => std::slice::from_ref(&gguf.file),
        }
    }

    /// The folder of a model that is one.
    pub fn folder(&self) -> Option<&Path> {
        match &self.weights {
            Weights::Gguf(_) => None,
            Weights::Safetensors { folder, .. } | Weights::Npz { folder, .. } => Some(folder),
        }
    }

    /// The text of a file in the model's folder; `None` where there is none, or no folder.
    ///
    /// The tokenizer.json of a Whisper may come from another one; that it is nowhere is an error, which says where there is one.
    pub fn side_file(&self, name: &str) -> Result<Option<String>, ModelError> {
        let own = self.own_side_file(name)?;
        match (&self.tokenizer, self.folder(), self.tokenizer_like()) {
            _ if own.is_some() || name != "tokenizer.json" => Ok(own),
            (Some(tokenizer), _, _) => read_text(tokenizer),
            (None, Some(folder), Some(like)) => Err(ModelError::NoTokenizer { folder: folder.to_owned(), like }),
            _ => Ok(None),
        }
    }

    fn own_side_file(&self, name: &str) -> Result<Option<String>, ModelError> {
        self.folder().map_or(Ok(None), |folder| read_text(&folder.join(name)))
    }

    /// A model on the hub whose tokenizer.json serves this one: mlx-whisper has the vocabularies of all Whispers in itself, so its
    /// checkpoints come without. The size tells which of the three it is.
    fn tokenizer_like(&self) -> Option<&'static str> {
        if self.family() != "whisper" {
            return None;
        }
        match self.config.get("vocab_size").and_then(Value::as_u64) {
            Some(51864) => Some("openai/whisper-tiny.en"),
            Some(51865) => Some("openai/whisper-tiny"),
            Some(51866) => Some("openai/whisper-large-v3"),
            _ => None,
        }
    }

    /// config.json's `model_type`, or the empty string.
    pub fn family(&self) -> &str {
        self.config.get("model_type").and_then(Value::as_str).unwrap_or_default()
    }

    /// Tokens a sequence can have, as the configuration says; a multimodal one says it in `text_config`.
    pub fn context_length(&self) -> Option<u32> {
        let own = |name| self.text_config(name)?.as_u64();
        let length = own("max_position_embeddings").or_else(|| own("max_target_positions"))?;
        Some(u32::try_from(length).unwrap_or(u32::MAX))
    }

    pub fn text_config(&self, name: &str) -> Option<&Value> {
        let own = self.config.get(name);
        own.or_else(|| self.config.get("text_config")?.get(name)).filter(|value| !value.is_null())
    }

    /// Ids that end a sequence, from every file that names any, sorted.
    ///
    /// `generation_config.json` and `config.json` (`eos_token_id`, one or a list), `tokenizer_config.json` (`eos_token`), GGUF
    /// (`eos_token_id`, `eot_token_id`). A GGUF file without the latter gets the control token that ends a turn, by its text, as
    /// llama.cpp does.
    pub fn stop_tokens(&self) -> Vec<u32> {
        let mut ids = Vec::new();
        for value in [self.generation_config.get("eos_token_id"), self.text_config("eos_token_id")].into_iter().flatten() {
            let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
            match value {
                Value::Array(values) => ids.extend(values.iter().filter_map(id)),
                value => ids.extend(id(value)),
            }
        }
        ids.extend(self.tokenizer_config_id("eos_token"));
        if let Some(gguf) = self.gguf() {
            ids.extend(gguf.unsigned("tokenizer.ggml.eos_token_id").and_then(|id| u32::try_from(id).ok()));
            let end_of_turn = gguf.unsigned("tokenizer.ggml.eot_token_id").and_then(|id| u32::try_from(id).ok());
            ids.extend(end_of_turn.or_else(|| end_of_turn_by_text(gguf)));
        }
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// The id of a token that `tokenizer_config.json` names, by its own list of added tokens.
    fn tokenizer_config_id(&self, name: &str) -> Option<u32> {
        let token = token_text(self.tokenizer_config.get(name)?)?;
        let added = self.tokenizer_config.get("added_tokens_decoder")?.as_object()?;
        let (id, _) = added.iter().find(|(_, entry)| entry.get("content").and_then(Value::as_str) == Some(token))?;
        id.parse().ok()
    }

    /// Names, shapes and types of all tensors; reads the shards' headers, and checks the index against them.
    pub fn tensors(&self) -> Result<Vec<Tensor>, ModelError> {
        match &self.weights {
            Weights::Gguf(gguf) => Ok(gguf
                .tensors
                .iter()
                .map(|tensor| Tensor {
                    name: tensor.name.clone(),
                    shape: tensor.shape.clone(),
                    dtype: tensor.kind.name.to_owned(),
                    bytes: tensor.bytes,
                })
                .collect()),
            Weights::Safetensors { shards, index, .. } => {
                let tensors = safetensors::read_all(shards)?;
                if let Some(index) = index {
                    index.check(&tensors)?;
                }
                Ok(tensors.into_iter().map(Into::into).collect())
            }
            Weights::Npz { file, .. } => Ok(npz::read(file)?.into_iter().map(Into::into).collect()),
        }
    }
}

impl From<safetensors::Tensor> for Tensor {
    fn from(tensor: safetensors::Tensor) -> Self {
        Self { name: tensor.name, shape: tensor.shape, dtype: tensor.dtype, bytes: tensor.bytes }
    }
}

/// `tokenizer_config.json` writes a token as its text or as an object with `content`.
pub(crate) fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

fn end_of_turn_by_text(gguf: &Gguf) -> Option<u32> {
    const END_OF_TURN: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"];
    let tokens = gguf.strings("tokenizer.ggml.tokens")?;
    END_OF_TURN.iter().find_map(|text| tokens.iter().position(|token| token == text)).and_then(|id| u32::try_from(id).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn open(folder: &tempfile::TempDir) -> Result<ModelFiles, ModelError> {
        locate_with(folder.path().to_str().unwrap(), || panic!("a folder needs no hub"))
    }

    #[test]
    fn errors_name_the_path_and_the_remedy() {
        let message = |result: Result<ModelFiles, ModelError>| result.unwrap_err().to_string();
        let nowhere = locate_with("/no/such/model", || panic!("not a hub id"));
        assert!(message(nowhere).starts_with("\"/no/such/model\" is neither a folder nor a .gguf file"));
        assert!(message(open(&folder(&[]))).starts_with("there is no config.json in /"));
        assert!(message(open(&folder(&[("config.json", "{}")]))).starts_with("there are no *.safetensors and no weights.npz in /"));
        assert!(message(open(&folder(&[("config.json", "{")]))).contains("config.json is not valid JSON"));
        let index = r#"{"weight_map":{"w":"model-00001.safetensors"}}"#;
        let missing = open(&folder(&[("config.json", "{}"), (INDEX_FILE, index)]));
        assert!(message(missing).contains("names the shard \"model-00001.safetensors\", which is not in its folder"));
    }

    #[test]
    fn hub_ids_are_told_from_paths() {
        assert!(is_hub_id("mlx-community/Qwen3-0.6B-4bit"));
        for path in ["model", "a/b/c", "./model", "../model", "/a", "a/..", "a/b.gguf", "a b/c", "a/"] {
            assert!(!is_hub_id(path), "{path}");
        }
    }

    #[test]
    fn second_copies_of_the_weights_are_left_out() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let found = weight_files(&names(&["model-2.safetensors", "consolidated.safetensors", "model-1.safetensors", "a.bin"]));
        assert_eq!(found, ["model-1.safetensors", "model-2.safetensors"]);
        assert_eq!(weight_files(&names(&["weights.00.safetensors"])), ["weights.00.safetensors"]);
        let found = weight_files(&names(&["model.fp32-00001-of-00002.safetensors", "model.safetensors", "model.npz"]));
        assert_eq!(found, ["model.safetensors"]);
        assert_eq!(weight_files(&names(&["weights.npz", "other.npz"])), ["weights.npz"]);
        assert_eq!(weight_files(&names(&["weights.npz", "weights.safetensors"])), ["weights.safetensors"]);
    }

    #[test]
    fn a_whisper_without_a_tokenizer_says_where_there_is_one() {
        let config = r#"{"model_type":"whisper","vocab_size":51865,"max_target_positions":448}"#;
        let folder = folder(&[("config.json", config), ("model.safetensors", "")]);
        let files = open(&folder).unwrap();
        assert_eq!(files.context_length(), Some(448));
        assert_eq!(files.side_file("chat_template.jinja").unwrap(), None);
        let message = files.side_file("tokenizer.json").unwrap_err().to_string();
        assert!(message.contains("put there the one of openai/whisper-tiny, which has the same vocabulary"), "{message}");
        std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
        assert_eq!(files.side_file("tokenizer.json").unwrap().as_deref(), Some("{}"));
    }

    #[test]
    fn stop_tokens_come_from_every_file() {
        let tokenizer_config =
            r#"{"eos_token":{"content":"<|im_end|>"},"added_tokens_decoder":{"9":{"content":"<|im_end|>"},"3":{"content":"x"}}}"#;
        let files = folder(&[
            ("config.json", r#"{"text_config":{"eos_token_id":7,"max_position_embeddings":99}}"#),
            ("generation_config.json", r#"{"eos_token_id":[8,7]}"#),
            ("tokenizer_config.json", tokenizer_config),
            ("model.safetensors", ""),
        ]);
        let files = open(&files).unwrap();
        assert_eq!(files.stop_tokens(), [7, 8, 9]);
        assert_eq!(files.context_length(), Some(99));
    }
}
