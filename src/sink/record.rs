//! `run.json`: what a run was, and whether an earlier run is the same.

use std::{collections::BTreeMap, path::Path};

use fs_err as fs;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{SCHEMA_VERSION, SinkError, files, schema::Layout};
use crate::job::Job;

const RESUMES_MAX: usize = 1000;
const RECORD_BYTES_MAX: u64 = 64 << 20;
const CHANGES_SHOWN: usize = 6;
/// Characters of a setting's value that an error shows.
const VALUE_SHOWN: usize = 80;

/// What results come from, beside the job.
#[derive(Debug, Clone, Default)]
pub struct Provenance {
    /// The effective job, as `job.toml` has it.
    pub job_toml: String,
    /// Tells apart manifests with different rows.
    pub manifest_hash: String,
    /// Hash of the settings that change a row's result.
    pub settings_hash: u64,
    /// As the job names it.
    pub model_id: String,
    /// Tells apart models with different weights.
    pub model_hash: String,
    /// Of mlxbatch, MLX and whatever else takes part, by name.
    pub versions: BTreeMap<String, String>,
    /// Processor, memory and the like, by name.
    pub machine: BTreeMap<String, String>,
}

/// Whether a `run.json` is whole and someone else's; a damaged one may be ours.
pub(super) fn is_foreign(path: &Path) -> bool {
    let value = fs::read(path).ok().and_then(|content| serde_json::from_slice::<Map<String, Value>>(&content).ok());
    value.is_some_and(|fields| !fields.is_empty() && !fields.contains_key("schema_version"))
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    pub schema_version: u32,
    pub job: String,
    pub state: State,
    pub model: Model,
    pub manifest_hash: String,
    pub settings_hash: String,
    pub token_ids: bool,
    pub keep_columns: Vec<String>,
    pub versions: BTreeMap<String, String>,
    pub machine: BTreeMap<String, String>,
    /// Times are RFC 3339, UTC.
    pub started_at: String,
    pub resumed_at: Vec<String>,
    pub finished_at: Option<String>,
    /// What the program reports at the end of the run, of its last session.
    pub summary: Value,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Model {
    pub id: String,
    pub hash: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    /// Or killed, when no process has the folder locked.
    Running,
    Interrupted,
    Failed,
    Complete,
}

impl Record {
    pub fn new(job: &Job, provenance: &Provenance, layout: &Layout, now: String) -> Self {
        Record {
            schema_version: SCHEMA_VERSION,
            job: job.name.clone(),
            state: State::Running,
            model: Model { id: provenance.model_id.clone(), hash: provenance.model_hash.clone() },
            manifest_hash: provenance.manifest_hash.clone(),
            settings_hash: format!("{:016x}", provenance.settings_hash),
            token_ids: layout.token_ids,
            keep_columns: layout.kept.clone(),
            versions: provenance.versions.clone(),
            machine: provenance.machine.clone(),
            started_at: now,
            resumed_at: Vec::new(),
            finished_at: None,
            summary: Value::Null,
        }
    }

    /// This run's record as it goes on after `earlier`.
    pub fn resuming(mut self, earlier: Record) -> Self {
        self.resumed_at = earlier.resumed_at;
        self.resumed_at.truncate(RESUMES_MAX - 1);
        self.resumed_at.push(self.started_at);
        self.started_at = earlier.started_at;
        self
    }

    pub fn read(path: &Path) -> Result<Self, SinkError> {
        let refuse = |reason: String| SinkError::Record { file: path.into(), reason };
        let bytes = fs::metadata(path).map_err(SinkError::io("read the record of the earlier run"))?.len();
        if bytes > RECORD_BYTES_MAX {
            return Err(refuse(format!("it has {bytes} bytes")));
        }
        let content = fs::read(path).map_err(SinkError::io("read the record of the earlier run"))?;
        // The version first: another version's record may have other fields.
        let value: Value = serde_json::from_slice(&content).map_err(|error| refuse(error.to_string()))?;
        match value.get("schema_version").and_then(Value::as_u64) {
            Some(version) if version == u64::from(SCHEMA_VERSION) => {}
            Some(version) => {
                return Err(refuse(format!(
                    "it has schema version {version}, and mlxbatch {} writes {SCHEMA_VERSION}",
                    env!("CARGO_PKG_VERSION")
                )));
            }
            None => return Err(refuse("it names no schema_version".into())),
        }
        serde_json::from_value(value).map_err(|error| refuse(error.to_string()))
    }

    pub fn write(&self, folder: &Path) -> Result<(), SinkError> {
        let mut content = serde_json::to_vec_pretty(self).map_err(|error| SinkError::io("write run.json")(error.into()))?;
        content.push(b'\n');
        files::replace(&folder.join(files::RECORD_FILE), &content).map_err(SinkError::io("write run.json"))
    }

    /// Why rows of `earlier` cannot stand beside rows of this run.
    pub fn check_same(&self, earlier: &Record, job_toml: &str, folder: &Path) -> Result<(), SinkError> {
        let mut reasons = Vec::new();
        if self.model.hash != earlier.model.hash {
            let (now, was) = (&self.model.id, &earlier.model.id);
            reasons.push(match now == was {
                true => {
                    format!("the model's files have changed ({now}, hash {} before, {} now)", earlier.model.hash, self.model.hash)
                }
                false => format!("the model was {was} and is now {now}"),
            });
        }
        if self.manifest_hash != earlier.manifest_hash {
            let (now, was) = (&self.manifest_hash, &earlier.manifest_hash);
            reasons.push(format!("the manifest has changed (hash {was} before, {now} now)"));
        }
        if self.settings_hash != earlier.settings_hash {
            let before = fs::read_to_string(folder.join(files::JOB_FILE)).unwrap_or_default();
            let changes = setting_changes(&before, job_toml);
            reasons.push(match changes.is_empty() {
                true => "settings that change a row's result have changed".into(),
                false => format!("the job's settings have changed ({})", changes.join("; ")),
            });
        }
        if self.token_ids != earlier.token_ids {
            reasons.push(format!("results.token_ids was {} and is now {}", earlier.token_ids, self.token_ids));
        }
        if self.keep_columns != earlier.keep_columns {
            reasons.push(format!("results.keep_columns was {:?} and is now {:?}", earlier.keep_columns, self.keep_columns));
        }
        if reasons.is_empty() { Ok(()) } else { Err(SinkError::Changed { folder: folder.into(), reasons: reasons.join(", and ") }) }
    }
}

/// Keys whose values differ between two effective jobs, with both values.
fn setting_changes(before: &str, now: &str) -> Vec<String> {
    let (Ok(before), Ok(now)) = (before.parse::<toml::Table>(), now.parse::<toml::Table>()) else { return Vec::new() };
    let (mut old, mut new) = (BTreeMap::new(), BTreeMap::new());
    flatten("", &before, &mut old);
    flatten("", &now, &mut new);
    let absent = || "not set".to_owned();
    let keys: std::collections::BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let differing = keys.into_iter().filter(|key| old.get(*key) != new.get(*key));
    let mut changes: Vec<_> = differing
        .map(|key| {
            let (was, is) = (old.get(key).cloned().unwrap_or_else(absent), new.get(key).cloned().unwrap_or_else(absent));
            format!("{key} was {}, is now {}", shown(was), shown(is))
        })
        .collect();
    if changes.len() > CHANGES_SHOWN {
        let more = changes.len() - CHANGES_SHOWN;
        changes.truncate(CHANGES_SHOWN);
        changes.push(format!("and {more} more"));
    }
    changes
}

fn flatten(prefix: &str, table: &toml::Table, into: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            toml::Value::Table(inner) => flatten(&key, inner, into),
            other => {
                into.insert(key, other.to_string());
            }
        }
    }
}

fn shown(value: String) -> String {
    if value.chars().count() <= VALUE_SHOWN { value } else { value.chars().take(VALUE_SHOWN).chain(['…']).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_name_key_and_both_values() {
        let before = "[generation]\nmax_tokens = 64\nseed = 1\n[prompt]\nsystem = \"a\"\n";
        let now = "[generation]\nmax_tokens = 128\nseed = 1\ntop_p = 0.5\n";
        assert_eq!(
            setting_changes(before, now),
            [
                "generation.max_tokens was 64, is now 128",
                "generation.top_p was not set, is now 0.5",
                "prompt.system was \"a\", is now not set"
            ]
        );
        assert!(setting_changes("not toml [", now).is_empty());
    }

    #[test]
    fn many_changes_are_cut() {
        let lines = |value: u32| (0..20).map(|key| format!("key{key} = {value}\n")).collect::<String>();
        let changes = setting_changes(&lines(1), &lines(2));
        assert_eq!(changes.len(), CHANGES_SHOWN + 1);
        assert_eq!(changes.last().unwrap(), "and 14 more");
    }
}
