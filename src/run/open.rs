//! What a job names, opened: model files, prompts, engine.

use std::{
    collections::BTreeMap,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result};
use globset::GlobBuilder;
use serde_json::Value;

use super::feed::Preparation;

use crate::{
    engine::{self, Engine, MlxEngine, MlxOptions, WeightForm, fake::FakeEngine, fake::FakeModel},
    job::{Job, JobError, KvBudget, Order, Place, Problem},
    manifest,
    model::{self, ModelFiles, Towers},
    prompt::{Prompter, Tokens},
    transcribe::Transcriber,
};

/// The name that needs no model.
const FAKE: &str = "fake";

/// A model's files beside configuration and weights that change what it says.
const SIDE_FILES: [&str; 5] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json"];

const WEIGHT_SAMPLES: u64 = 256;
const WEIGHT_SAMPLE_BYTES: u64 = 4096;

/// The family that takes recordings alone.
pub const SPEECH_FAMILY: &str = "whisper";

/// The bins of a Whisper's features, and the tokens of its decoder, where the model is `fake`.
const FAKE_BINS: usize = 80;
const SPEECH_TOKENS: u32 = 448;

/// How rows become requests, and tokens text.
pub enum Words {
    Prompts(Arc<Prompter>),
    /// `bins` of the model's features.
    Recordings {
        transcriber: Arc<Transcriber>,
        bins: usize,
    },
}

impl Words {
    /// In which order rows are taken. Windows all cost the same, and recordings that a manifest holds itself must not pile up.
    pub fn order(&self, job: &Job) -> Order {
        if matches!(self, Self::Recordings { .. }) { Order::Manifest } else { job.batching.order }
    }

    pub fn preparation(&self, job: &Job) -> Preparation {
        match self {
            Self::Prompts(prompter) => Preparation::Prompts { prompter: prompter.clone() },
            Self::Recordings { transcriber, .. } => {
                Preparation::Recordings { transcriber: transcriber.clone(), columns: job.input.columns.clone() }
            }
        }
    }
}

/// What the job's author should know of its template, by the first good row.
pub fn template_note(job: &Job, words: &Words) -> Result<Option<String>> {
    let Words::Prompts(prompter) = words else { return Ok(None) };
    if !prompter.has_literals() {
        return Ok(None);
    }
    let block = manifest::open(&job.input)?.next_block()?.unwrap_or_default();
    Ok(block.iter().find_map(|row| row.as_ref().ok()).and_then(|item| prompter.template_note(item)))
}

/// Whether the first row has a recording: the fake model is what its rows need.
fn holds_recordings(job: &Job) -> Result<bool> {
    let block = manifest::open(&job.input)?.next_block()?.unwrap_or_default();
    Ok(block.iter().find_map(|row| row.as_ref().ok()).is_some_and(|item| item.audio.is_some()))
}

/// A job's model, found but not loaded.
pub enum Model {
    Fake,
    Files(Box<ModelFiles>),
}

impl Model {
    pub fn locate(job: &Job) -> Result<Self> {
        if job.model.path == FAKE {
            return Ok(Self::Fake);
        }
        let files = model::locate(&job.model.path).with_context(|| format!("the model of {}", job.file.display()))?;
        Ok(Self::Files(Box::new(files)))
    }

    /// What the job's rows become before the model sees them, and how its tokens become text.
    pub fn words(&self, job: &Job) -> Result<Words> {
        let words = match self {
            Self::Fake if holds_recordings(job)? => {
                let transcriber = Arc::new(Transcriber::fake(job, SPEECH_TOKENS));
                Words::Recordings { transcriber, bins: FAKE_BINS }
            }
            Self::Fake => {
                let mut prompter = Prompter::fake(job)?;
                prompter.limit_context(FakeModel::bytes().context_length);
                Words::Prompts(Arc::new(prompter))
            }
            Self::Files(files) if files.family() == SPEECH_FAMILY => {
                let tokens = Arc::new(Tokens::of_model(files, None)?);
                let bins = files.config().get("num_mel_bins").and_then(Value::as_u64).unwrap_or_default() as usize;
                Words::Recordings { transcriber: Arc::new(Transcriber::new(job, tokens, self.context_length())?), bins }
            }
            Self::Files(files) => Words::Prompts(Arc::new(Prompter::new(job, files)?)),
        };
        if matches!(words, Words::Recordings { .. }) && job.generation.logprobs.is_some() {
            let problem = Problem {
                place: Place::File(job.file.clone()),
                key: Some("generation.logprobs".to_owned()),
                message: "`generation.logprobs` is for generated text, and the job's rows are transcribed".to_owned(),
                help: Some("remove it: each segment of a transcript has its `avg_logprob`".to_owned()),
            };
            return Err(JobError::Problems { file: job.file.clone(), problems: vec![problem], left_off: 0 }.into());
        }
        Ok(words)
    }

    /// Tells apart models: by configuration, tokenizer and template as they are, by what the weights' headers say, and by samples
    /// of the weights themselves, which are too large to be read in full before every run.
    pub fn hash(&self) -> Result<String> {
        let Self::Files(files) = self else { return Ok(FAKE.into()) };
        let mut hasher = blake3::Hasher::new();
        hasher.update(files.config().to_string().as_bytes());
        for name in SIDE_FILES {
            if let Some(text) = files.side_file(name)? {
                hasher.update(name.as_bytes()).update(text.as_bytes());
            }
        }
        for tensor in files.tensors()? {
            hasher.update(format!("\n{} {} {:?} {}", tensor.name, tensor.dtype, tensor.shape, tensor.bytes).as_bytes());
        }
        for file in weight_files(files) {
            let mut weights = fs_err::File::open(&file)?;
            let bytes = weights.metadata()?.len();
            hasher.update(&bytes.to_le_bytes());
            let mut sample = vec![0; WEIGHT_SAMPLE_BYTES.min(bytes) as usize];
            for place in 0..WEIGHT_SAMPLES {
                weights.seek(SeekFrom::Start((bytes - sample.len() as u64) / (WEIGHT_SAMPLES - 1) * place))?;
                weights.read_exact(&mut sample)?;
                hasher.update(&sample);
            }
        }
        Ok(hasher.finalize().to_hex()[..16].to_owned())
    }

    /// Tokens a row can have.
    pub fn context_length(&self) -> u32 {
        match self {
            Self::Fake => FakeModel::bytes().context_length,
            Self::Files(files) => files.context_length().unwrap_or(u32::MAX),
        }
    }

    /// Loads the weights; `towers` are the model's, where its rows are prompts.
    pub fn load(&self, job: &Job, towers: &Towers) -> Result<Loaded> {
        let mut span_tokens_max = 0;
        let (engine, auto, device): (Box<dyn Engine>, u64, _) = match self {
            Self::Fake => (Box::new(FakeEngine::new(FakeModel::bytes())), 8 << 30, "no model: the tokens are made up"),
            Self::Files(files) => {
                if let Some(image) = towers.image.as_ref().filter(|image| image.both_ways) {
                    span_tokens_max = image.rule.soft_tokens_max;
                }
                let options = MlxOptions {
                    device: job.model.device,
                    dtype: job.model.dtype,
                    plain: false,
                    weights: WeightForm::Auto,
                    rows: job.batching.rows,
                };
                let engine = MlxEngine::load(&weight_files(files), files.config(), options)
                    .with_context(|| format!("failed to load {}", job.model.path))?;
                let (auto, device) =
                    (engine.kv_bytes_auto(), if engine.on_gpu() { "computing on the GPU" } else { "computing on the CPU" });
                (Box::new(engine), auto, device)
            }
        };
        let kv_bytes_max = match job.batching.kv_budget {
            KvBudget::Auto => auto,
            KvBudget::Bytes(bytes) => bytes,
        };
        Ok(Loaded { engine, kv_bytes_max, device, span_tokens_max })
    }
}

/// An engine with its weights.
pub struct Loaded {
    pub engine: Box<dyn Engine>,
    /// What cache and scratch may take.
    pub kv_bytes_max: u64,
    /// In words what computes.
    pub device: &'static str,
    /// Tokens of the longest image whose tokens see each other both ways; 0 where none do.
    pub span_tokens_max: u32,
}

/// Files of a results folder that a pattern may take for input.
const RESULT_FILES: [&str; 6] = ["failed.jsonl", "events.jsonl", "run.json", "job.toml", "part-00000.parquet", "_SUCCESS"];

/// Refuses a job that would read what it writes: its rows would change under it, and `--fresh` would remove them.
pub fn refuse_results_as_input(job: &Job) -> Result<(), JobError> {
    let output = job.output.canonicalize().unwrap_or_else(|_| job.output.clone());
    let below_folder = |pattern: &str| job.input.folder.as_ref().map(|folder| folder.join(pattern).to_string_lossy().into_owned());
    let walked = job.input.glob.as_deref().and_then(below_folder);
    let read = |pattern: &&String| {
        let glob = GlobBuilder::new(pattern).literal_separator(true).build().map(|glob| glob.compile_matcher());
        let matches = |file: PathBuf| file == Path::new(pattern) || glob.as_ref().is_ok_and(|glob| glob.is_match(&file));
        RESULT_FILES.iter().any(|name| matches(output.join(name)) || matches(job.output.join(name)))
    };
    let Some(pattern) = job.input.manifest.iter().chain(&walked).find(read) else { return Ok(()) };
    let problem = Problem {
        place: Place::File(job.file.clone()),
        key: Some(if walked.is_some() { "input.glob" } else { "input.manifest" }.to_owned()),
        message: format!("`{pattern}` would read as rows what the job writes into its output, {}", output.display()),
        help: Some("give the job an output elsewhere, or a pattern that leaves results out".to_owned()),
    };
    Err(JobError::Problems { file: job.file.clone(), problems: vec![problem], left_off: 0 })
}

pub fn weight_files(files: &ModelFiles) -> Vec<PathBuf> {
    files.weight_files().to_vec()
}

pub fn versions() -> BTreeMap<String, String> {
    BTreeMap::from([
        ("mlxbatch".into(), env!("CARGO_PKG_VERSION").into()),
        ("mlx".into(), engine::mlx_version().unwrap_or_else(|| "unknown".into())),
    ])
}

pub fn machine() -> BTreeMap<String, String> {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    BTreeMap::from([
        ("os".into(), std::env::consts::OS.into()),
        ("arch".into(), std::env::consts::ARCH.into()),
        ("cores".into(), cores.to_string()),
    ])
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_hash_notices_other_weights_and_another_template() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints/llama").join(name);
            fs::copy(from, folder.path().join(name)).unwrap();
        }
        let hash = || Model::Files(Box::new(model::locate(folder.path().to_str().unwrap()).unwrap())).hash().unwrap();
        let first = hash();
        assert_eq!(first, hash());
        let weights = folder.path().join("model.safetensors");
        let mut bytes = fs::read(&weights).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&weights, bytes).unwrap();
        let second = hash();
        assert_ne!(first, second);
        let template = folder.path().join("tokenizer_config.json");
        fs::write(&template, fs::read_to_string(&template).unwrap().replacen("role", "rule", 1)).unwrap();
        assert_ne!(second, hash());
    }
}
