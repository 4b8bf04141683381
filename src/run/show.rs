//! `mlxbatch show`: results as lines, for a look at them.

use std::io::{self, BufWriter, Write};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Map, Value};

use super::Status;
use crate::{
    args,
    job::{Columns, Input},
    manifest,
    sink::part_files,
};

pub fn show(args: &args::Show) -> Result<Status> {
    let folder = &args.folder;
    let parts =
        part_files(folder).with_context(|| format!("{} cannot be read: give the output folder of a run", folder.display()))?;
    if parts.is_empty() {
        bail!("{} has no part-*.parquet: give the output folder of a run, one that has closed a part", folder.display());
    }
    let path = |part: &std::path::PathBuf| {
        part.to_str()
            .map(str::to_owned)
            .ok_or_else(|| anyhow!("{} is not UTF-8, which is what paths are written in", part.display()))
    };
    let manifest = parts.iter().map(path).collect::<Result<_>>()?;
    // Results are rows of a Parquet manifest, in which no column has a part to play.
    let columns = Columns { audio: String::new(), ..Columns::default() };
    let rows = manifest::open(&Input { manifest, folder: None, glob: None, columns })?;
    let mut out = BufWriter::new(io::stdout().lock());
    let limit = args.limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    for row in rows.take(limit) {
        let columns = match row? {
            Ok(item) => item.columns,
            Err(bad) => bail!("{}: {}", bad.source, bad.error),
        };
        if let Some(missing) = args.columns.iter().find(|name| !columns.contains_key(*name)) {
            let known: Vec<&str> = columns.keys().map(String::as_str).collect();
            bail!("the results have no column {missing:?}; they have {}", known.join(", "));
        }
        let line = if args.json { object(&columns, &args.columns) } else { fields(&columns, &args.columns) };
        match writeln!(out, "{line}") {
            // Whoever read along has seen enough.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(Status::Ok),
            written => written?,
        }
    }
    match out.flush() {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(Status::Ok),
    }
}

fn object(columns: &Map<String, Value>, names: &[String]) -> String {
    let chosen: Map<String, Value> = names.iter().filter_map(|name| Some((name.clone(), columns.get(name)?.clone()))).collect();
    Value::Object(chosen).to_string()
}

/// Fields between tabs; a failed row says why in the place of its text.
fn fields(columns: &Map<String, Value>, names: &[String]) -> String {
    let failed = columns.get("error").and_then(Value::as_str);
    let field = |name: &String| match (columns.get(name), failed) {
        (None | Some(Value::Null), Some(error)) if name == "text" => format!("failed: {error}"),
        (None | Some(Value::Null), _) => String::new(),
        (Some(Value::String(text)), _) => text.clone(),
        (Some(Value::Number(number)), _) if number.is_f64() => format!("{:.3}", number.as_f64().unwrap_or(f64::NAN)),
        (Some(other), _) => other.to_string(),
    };
    names.iter().map(|name| field(name).replace(['\t', '\n', '\r'], " ")).collect::<Vec<_>>().join("\t")
}
