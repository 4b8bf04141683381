//! Fetches a model's files from the Hugging Face hub into the ordinary cache, which Python's `huggingface_hub` shares.
//!
//! Layout of the cache: <https://huggingface.co/docs/huggingface_hub/guides/manage-cache>.

use std::io::Read;
use std::path::{Component, Path, PathBuf};

use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};
use serde::Deserialize;
use thiserror::Error;

/// A listing of a repository's files; the largest have thousands of files.
const LISTING_BYTES_MAX: u64 = 64 << 20;
const RETRIES_MAX: usize = 5;

/// Small files that say what the model is, fetched where the repository has them.
const SIDE_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
];

#[derive(Debug, Error)]
pub enum HubError {
    #[error(
        "there is no model {id:?} at {endpoint}, or it is private: check the name, or set HF_TOKEN to a token that may read it"
    )]
    NotFound { id: String, endpoint: String },
    #[error(
        "{endpoint} refuses {id:?} (status {status}): accept the model's terms on its page, and set HF_TOKEN to a token that may read it"
    )]
    Refused { id: String, endpoint: String, status: u16 },
    #[error("cannot reach {endpoint} for {id:?} ({reason}), and {cache} has no complete copy: check the network or HF_ENDPOINT")]
    Unreachable { id: String, endpoint: String, reason: String, cache: PathBuf },
    #[error("the hub's listing of {id:?} cannot be used: {reason}")]
    Listing { id: String, reason: String },
    #[error("{id:?} has no config.json on the hub: it is not a model that can be run{found}")]
    NoConfig { id: String, found: String },
    #[error(
        "{id:?} has no *.safetensors and no weights.npz on the hub; other weight formats are not read: look for a converted copy of the model"
    )]
    NoWeights { id: String },
    #[error("downloading {name} of {id:?} failed: {reason}; run again to go on where it stopped")]
    Download { id: String, name: String, reason: String },
}

/// Where to ask and where to keep.
#[derive(Debug, Clone)]
pub struct Hub {
    pub endpoint: String,
    /// The folder that holds `models--org--name`.
    pub cache: PathBuf,
    pub token: Option<String>,
    /// Uses the cache alone.
    pub offline: bool,
}

#[derive(Deserialize)]
struct Listing {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
}

impl Hub {
    /// From HF_ENDPOINT, HF_HOME or HF_HUB_CACHE, HF_TOKEN (or the token that `hf auth login` left) and HF_HUB_OFFLINE.
    pub fn from_env() -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let cache = variable("HF_HUB_CACHE").map_or_else(Cache::from_env, |path| Cache::new(path.into()));
        Self {
            endpoint: variable("HF_ENDPOINT")
                .map_or_else(|| "https://huggingface.co".to_owned(), |endpoint| endpoint.trim_end_matches('/').to_owned()),
            token: variable("HF_TOKEN").or_else(|| cache.token()),
            cache: cache.path().clone(),
            offline: variable("HF_HUB_OFFLINE")
                .is_some_and(|value| ["1", "true", "yes", "on"].contains(&value.to_lowercase().as_str())),
        }
    }

    /// Fetches what `id` needs to run, and returns the snapshot's folder. Files already there are not fetched again.
    pub fn fetch(&self, id: &str) -> Result<PathBuf, HubError> {
        let unreachable = |reason: String| HubError::Unreachable {
            id: id.to_owned(),
            endpoint: self.endpoint.clone(),
            reason,
            cache: self.cache.clone(),
        };
        if self.offline {
            return self.cached(id).ok_or_else(|| unreachable("HF_HUB_OFFLINE is set".to_owned()));
        }
        let api = self.api().map_err(|error| unreachable(error.to_string()))?;
        let listing = match self.listing(&api, id) {
            Ok(listing) => listing,
            Err(HubError::Unreachable { reason, .. }) => return self.cached(id).ok_or_else(|| unreachable(reason)),
            Err(error) => return Err(error),
        };
        let has = |name: &str| listing.siblings.iter().any(|sibling| sibling.rfilename == name);
        if !has("config.json") {
            let gguf: Vec<&str> =
                listing.siblings.iter().map(|sibling| sibling.rfilename.as_str()).filter(|name| name.ends_with(".gguf")).collect();
            let found = match gguf.first() {
                Some(first) => {
                    format!("; it has {} .gguf file(s): download one, for example {first:?}, and give its path", gguf.len())
                }
                None => String::new(),
            };
            return Err(HubError::NoConfig { id: id.to_owned(), found });
        }
        for name in SIDE_FILES.iter().filter(|name| has(name)) {
            self.file(&api, id, &listing, name)?;
        }
        let names: Vec<String> = listing.siblings.iter().map(|sibling| sibling.rfilename.clone()).collect();
        let index = has(super::INDEX_FILE).then(|| self.file(&api, id, &listing, super::INDEX_FILE)).transpose()?;
        let weights = match index {
            Some(index) => {
                let index = super::safetensors::Index::read(&index)
                    .map_err(|error| HubError::Listing { id: id.to_owned(), reason: error.to_string() })?;
                index.shards().into_iter().map(str::to_owned).collect()
            }
            None => super::weight_files(&names),
        };
        if weights.is_empty() {
            return Err(HubError::NoWeights { id: id.to_owned() });
        }
        for name in &weights {
            self.file(&api, id, &listing, name)?;
        }
        self.set_main(id, &listing)?;
        Ok(Cache::new(self.cache.clone()).repo(Repo::model(id.to_owned())).pointer_path(&listing.sha))
    }

    /// So that Python's library, and a later run without a network, find this snapshot under `main`.
    fn set_main(&self, id: &str, listing: &Listing) -> Result<(), HubError> {
        let cache = Cache::new(self.cache.clone()).repo(Repo::model(id.to_owned()));
        cache.create_ref(&listing.sha).map_err(|error| HubError::Download {
            id: id.to_owned(),
            name: "refs/main".to_owned(),
            reason: error.to_string(),
        })
    }

    /// One file of a repository, which is fetched alone where the cache does not have it.
    pub fn fetch_file(&self, id: &str, name: &str) -> Result<PathBuf, HubError> {
        if let Some(file) = Cache::new(self.cache.clone()).repo(Repo::model(id.to_owned())).get(name) {
            return Ok(file);
        }
        let unreachable = |reason: String| HubError::Unreachable {
            id: id.to_owned(),
            endpoint: self.endpoint.clone(),
            reason,
            cache: self.cache.clone(),
        };
        if self.offline {
            return Err(unreachable("HF_HUB_OFFLINE is set".to_owned()));
        }
        let api = self.api().map_err(|error| unreachable(error.to_string()))?;
        let listing = self.listing(&api, id)?;
        let file = self.file(&api, id, &listing, name)?;
        self.set_main(id, &listing)?;
        Ok(file)
    }

    fn api(&self) -> Result<Api, ApiError> {
        ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_endpoint(self.endpoint.clone())
            .with_token(self.token.clone())
            .with_retries(RETRIES_MAX)
            .with_user_agent("mlxbatch", env!("CARGO_PKG_VERSION"))
            .build()
    }

    fn listing(&self, api: &Api, id: &str) -> Result<Listing, HubError> {
        let response = api.model(id.to_owned()).info_request().query("blobs", "true").call();
        let mut response = response.map_err(|error| match error {
            ureq::Error::StatusCode(404) => HubError::NotFound { id: id.to_owned(), endpoint: self.endpoint.clone() },
            ureq::Error::StatusCode(status @ 400..=499) => {
                HubError::Refused { id: id.to_owned(), endpoint: self.endpoint.clone(), status }
            }
            error => HubError::Unreachable {
                id: id.to_owned(),
                endpoint: self.endpoint.clone(),
                reason: error.to_string(),
                cache: self.cache.clone(),
            },
        })?;
        let unusable = |reason: String| HubError::Listing { id: id.to_owned(), reason };
        let mut body = Vec::new();
        let mut reader = response.body_mut().as_reader().take(LISTING_BYTES_MAX);
        reader.read_to_end(&mut body).map_err(|error| unusable(error.to_string()))?;
        let listing: Listing = serde_json::from_slice(&body).map_err(|error| unusable(error.to_string()))?;
        // Both become paths in the cache.
        if listing.sha.is_empty() || !listing.sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(unusable(format!("its revision is {:?}", listing.sha)));
        }
        if let Some(bad) = listing.siblings.iter().find(|sibling| !is_plain_path(&sibling.rfilename)) {
            return Err(unusable(format!("it has a file named {:?}", bad.rfilename)));
        }
        Ok(listing)
    }

    /// One file of the listed revision, from the cache or the hub.
    fn file(&self, api: &Api, id: &str, listing: &Listing, name: &str) -> Result<PathBuf, HubError> {
        let failed = |reason: String| HubError::Download { id: id.to_owned(), name: name.to_owned(), reason };
        let Some(sibling) = listing.siblings.iter().find(|sibling| sibling.rfilename == name) else {
            return Err(failed("the index names it, and the repository does not have it".to_owned()));
        };
        let cache = Cache::new(self.cache.clone()).repo(Repo::model(id.to_owned()));
        let mut path = cache.pointer_path(&listing.sha).join(name);
        if !path.exists() {
            let repo = Repo::with_revision(id.to_owned(), RepoType::Model, listing.sha.clone());
            path = api.repo(repo).download(name).map_err(|error| failed(error.to_string()))?;
        }
        let bytes = std::fs::metadata(&path).map_err(|error| failed(error.to_string()))?.len();
        if let Some(expected) = sibling.size
            && expected != bytes
        {
            return Err(failed(format!("{} has {bytes} bytes instead of {expected}: delete it", path.display())));
        }
        Ok(path)
    }

    /// The snapshot of `main` that the cache has, if it could be run.
    fn cached(&self, id: &str) -> Option<PathBuf> {
        let config = Cache::new(self.cache.clone()).repo(Repo::model(id.to_owned())).get("config.json")?;
        let folder = config.parent()?.to_owned();
        let names: Vec<String> =
            std::fs::read_dir(&folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        let whole = match super::safetensors::Index::read(&folder.join(super::INDEX_FILE)) {
            Ok(index) => index.shards().iter().all(|shard| folder.join(shard).exists()),
            Err(_) => !super::weight_files(&names).is_empty(),
        };
        whole.then_some(folder)
    }
}

/// Relative, and without a way out of its folder.
fn is_plain_path(name: &str) -> bool {
    !name.is_empty() && !name.contains('\\') && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}
