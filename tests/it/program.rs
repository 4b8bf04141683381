//! The program as it was built, a folder to run it in, and its results read back.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Float32Type, Float64Type, Int64Type, UInt32Type, UInt64Type};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};

pub const OK: i32 = 0;
pub const FAILED: i32 = 1;
pub const USAGE: i32 = 2;
pub const SOME_ROWS_FAILED: i32 = 3;
pub const INTERRUPTED: i32 = 75;

/// A checkpoint of `fixtures/`.
pub fn checkpoint(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints").join(name);
    assert!(path.exists(), "{}", path.display());
    path.to_str().unwrap().to_owned()
}

/// The program, with one thread for its matrix products: the machine runs other tests too.
pub fn program<I: AsRef<OsStr>>(arguments: impl IntoIterator<Item = I>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlxbatch"));
    command.args(arguments).env("OPENBLAS_NUM_THREADS", "1").stdin(Stdio::null());
    command
}

/// What a command came to.
pub struct Ended {
    pub status: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    pub fn of(Output { status, stdout, stderr }: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let ended = Ended { status: status.code(), stdout: text(stdout), stderr: text(stderr) };
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
        ended
    }

    /// Holds that it ended with `status`.
    #[track_caller]
    pub fn with(self, status: i32) -> Self {
        assert_eq!(self.status, Some(status), "{}{}", self.stdout, self.stderr);
        self
    }

    /// Holds that standard error says all of `parts`.
    #[track_caller]
    pub fn saying(self, parts: &[&str]) -> Self {
        for part in parts {
            assert!(self.stderr.contains(part), "{part:?} is not in: {}", self.stderr);
        }
        self
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }
}

/// A folder with `job.toml` and `manifest.jsonl`.
pub struct Project {
    folder: tempfile::TempDir,
}

impl Project {
    /// `sections` is what the job has beside model and input.
    pub fn new(model: &str, rows: &[Value], sections: &str) -> Self {
        let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
        Self::with_manifest(model, &lines, sections)
    }

    pub fn with_manifest(model: &str, manifest: &str, sections: &str) -> Self {
        let project = Self { folder: tempfile::tempdir().unwrap() };
        project.write("manifest.jsonl", manifest);
        let job = format!(
            "[job]\noutput = \"out\"\n[model]\npath = '{model}'\ndevice = \"cpu\"\n[input]\nmanifest = \"manifest.jsonl\"\n{sections}"
        );
        project.write("job.toml", &job);
        project
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, content: &str) {
        fs::write(self.path(name), content).unwrap();
    }

    pub fn command<I: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = I>) -> Command {
        let mut command = program(arguments);
        command.current_dir(self.folder.path());
        command
    }

    pub fn ended<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Ended {
        Ended::of(self.command(arguments).output().unwrap())
    }

    /// `mlxbatch run job.toml …`.
    pub fn run(&self, arguments: &[&str]) -> Ended {
        self.ended(["run", "job.toml"].iter().chain(arguments).copied())
    }

    /// The same, not waited for; what it writes to standard error goes into the file `stderr`.
    pub fn start(&self, arguments: &[&str]) -> Child {
        let errors = File::create(self.path("stderr")).unwrap();
        let mut command = self.command(["run", "job.toml"].iter().chain(arguments));
        command.stdout(Stdio::null()).stderr(errors).spawn().unwrap()
    }

    pub fn results(&self, folder: &str) -> Results {
        Results::read(&self.path(folder))
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    pub fn record(&self, folder: &str) -> Value {
        serde_json::from_str(&self.read(&format!("{folder}/run.json"))).unwrap()
    }

    pub fn events(&self, folder: &str) -> Vec<Value> {
        self.read(&format!("{folder}/events.jsonl")).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub fn failed_rows(&self, folder: &str) -> Vec<Value> {
        let path = self.path(folder).join("failed.jsonl");
        let text = if path.exists() { fs::read_to_string(path).unwrap() } else { String::new() };
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Waits for a child, and fails where it takes longer than `limit`.
#[track_caller]
pub fn wait(child: &mut Child, limit: Duration) -> std::process::ExitStatus {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if started.elapsed() > limit {
            child.kill().unwrap();
            panic!("process {} took longer than {limit:?}", child.id());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Columns that tell when and beside whom, not what.
const TIMES: [&str; 11] = [
    "cached_tokens",
    "media_ms",
    "encode_ms",
    "queue_ms",
    "prefill_ms",
    "ttft_ms",
    "decode_ms",
    "total_ms",
    "tokens_per_second",
    "rows_in_batch",
    "started_at",
];

/// The rows of a results folder, by their place in the manifest, without times.
#[derive(Debug, PartialEq)]
pub struct Results {
    pub rows: BTreeMap<u64, Value>,
}

impl Results {
    /// Holds that no row is there twice.
    pub fn read(folder: &Path) -> Self {
        let mut rows = BTreeMap::new();
        for part in parts(folder) {
            let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(&part).unwrap()).unwrap().build().unwrap();
            for batch in reader {
                let batch = batch.unwrap();
                for at in 0..batch.num_rows() {
                    let row = row(&batch, at);
                    let number = row["row"].as_u64().unwrap();
                    let twice = rows.insert(number, row);
                    assert!(twice.is_none(), "row {number} is there again in {}", part.display());
                }
            }
        }
        Self { rows }
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn failed(&self) -> impl Iterator<Item = &Value> {
        self.rows.values().filter(|row| row["status"] == "failed")
    }

    /// The row whose id is `id`.
    #[track_caller]
    pub fn row(&self, id: &str) -> &Value {
        self.rows.values().find(|row| row["id"] == id).unwrap_or_else(|| panic!("no row {id}"))
    }

    /// Says where they first differ instead of showing all of both.
    #[track_caller]
    pub fn assert_same(&self, other: &Self, context: &str) {
        assert_eq!(self.rows.keys().collect::<Vec<_>>(), other.rows.keys().collect::<Vec<_>>(), "{context}");
        for (own, others) in self.rows.values().zip(other.rows.values()) {
            assert_eq!(own, others, "{context}");
        }
    }
}

/// Closed parts, in their order.
pub fn parts(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut parts: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    parts.retain(|path| path.extension().is_some_and(|extension| extension == "parquet"));
    parts.sort();
    parts
}

fn row(batch: &RecordBatch, at: usize) -> Value {
    let schema = batch.schema();
    let columns = schema.fields().iter().zip(batch.columns()).filter(|(field, _)| !TIMES.contains(&field.name().as_str()));
    columns.map(|(field, column)| (field.name().clone(), value(column.as_ref(), at))).collect::<serde_json::Map<_, _>>().into()
}

fn value(column: &dyn Array, at: usize) -> Value {
    match column.data_type() {
        _ if column.is_null(at) => Value::Null,
        DataType::Utf8 => json!(column.as_string::<i32>().value(at)),
        DataType::UInt64 => json!(column.as_primitive::<UInt64Type>().value(at)),
        DataType::Int64 => json!(column.as_primitive::<Int64Type>().value(at)),
        DataType::UInt32 => json!(column.as_primitive::<UInt32Type>().value(at)),
        DataType::Float64 => json!(column.as_primitive::<Float64Type>().value(at)),
        DataType::Float32 => json!(column.as_primitive::<Float32Type>().value(at)),
        DataType::List(_) => {
            let list = column.as_list::<i32>().value(at);
            (0..list.len()).map(|index| value(list.as_ref(), index)).collect()
        }
        DataType::Struct(fields) => {
            let columns = fields.iter().zip(column.as_struct().columns());
            columns
                .map(|(field, column)| (field.name().clone(), value(column.as_ref(), at)))
                .collect::<serde_json::Map<_, _>>()
                .into()
        }
        other => panic!("a column of type {other}"),
    }
}

/// Reads a finished folder with pyarrow and DuckDB where `MLXBATCH_PYTHON` names a Python that has them.
pub fn read_back(folder: &Path, rows: usize) {
    let Some(python) = std::env::var_os("MLXBATCH_PYTHON") else {
        println!("skipped: reading {} back, MLXBATCH_PYTHON is not set", folder.display());
        return;
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/read_back.py");
    let output = Command::new(python).arg(script).arg(folder).args(["--rows", &rows.to_string()]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// SplitMix64: numbers that are random enough, and the same each time.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// In `0.0 .. 1.0`.
    pub fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}
