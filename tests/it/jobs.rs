//! The job files that are shipped.

use std::path::{Path, PathBuf};

use mlxbatch::job::{Job, JobError};

fn shipped() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    files
}

#[test]
fn every_shipped_job_reads() -> Result<(), JobError> {
    let files = shipped();
    assert!(files.len() >= 4, "{files:?}");
    for file in files {
        let job = Job::read(&file, &[])?;
        assert_eq!(Some(job.name.as_str()), file.file_stem().and_then(|stem| stem.to_str()));
        let out = Path::new(env!("CARGO_MANIFEST_DIR")).canonicalize().unwrap().join("out");
        assert_eq!(job.output, out.join(&job.name), "{}", file.display());
        for manifest in &job.input.manifest {
            assert!(Path::new(manifest).is_file(), "{manifest}");
        }
        // What is downloaded is made up by tests/it/recordings.rs.
        if let Some(folder) = job.input.folder.as_ref().filter(|folder| !folder.iter().any(|name| name == ".data")) {
            assert!(folder.is_dir(), "{}", folder.display());
        }
        let effective = Job::parse(Path::new("/elsewhere/job.toml"), &job.effective_toml(), &[])?;
        assert_eq!(Job { file, ..effective }, job);
    }
    Ok(())
}

/// What the quickstart is for: many kinds of prompts, each row's own sampling valid, ids that stay.
#[test]
fn quickstart_manifest_is_varied_and_valid() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/quickstart.toml");
    let job = Job::read(&file, &[]).unwrap();
    let manifest = std::fs::read_to_string(&job.input.manifest[0]).unwrap();
    let rows: Vec<serde_json::Map<_, _>> = manifest.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(rows.len() >= 48, "{} rows", rows.len());

    let text = |row: &serde_json::Map<String, serde_json::Value>, column: &str| row[column].as_str().unwrap().to_owned();
    let distinct = |column| rows.iter().map(|row| text(row, column)).collect::<std::collections::BTreeSet<_>>().len();
    assert_eq!(distinct("id"), rows.len());
    assert_eq!(distinct("prompt"), rows.len());
    assert!(distinct("category") >= 8);
    let (overridden, as_the_job): (Vec<_>, Vec<_>) = rows.iter().partition(|row| job.generation.is_overridden_by(row));
    assert!(overridden.len() >= 10 && as_the_job.len() >= 10);
    for row in &rows {
        job.generation.overridden_by(row).unwrap();
    }
}

/// The reference names every key of the job that is written beside the results, so that neither outgrows the other.
#[test]
fn reference_names_every_key() {
    let reference = include_str!("../../docs/job-file.md");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/quickstart.toml");
    let effective = Job::read(&file, &[]).unwrap().effective_toml();
    let keys = effective.lines().filter_map(|line| line.split_once(" = ")).map(|(key, _)| key);
    for key in keys.chain(["template", "folder", "glob"]) {
        assert!(reference.contains(&format!("| `{key}` |")), "docs/job-file.md has no row for `{key}`");
    }
}
