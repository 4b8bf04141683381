//! The command line of `mlxbatch bench`.

use std::path::PathBuf;

use clap::ValueEnum;

/// Measure how fast a model runs here: tokens a second, time to the first token, steps, memory
///
/// Prompts are made up of random token ids, and every row generates exactly as many tokens as its workload says, end tokens or not.
/// Rows go through the same scheduler and engine as a job's, without templates, tokenizer or results. A first run is not counted;
/// figures are medians over the others. Loading is not counted. docs/benchmarks.md says what each figure means.
#[derive(Debug, Clone, PartialEq, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Bench {
    /// A folder with config.json and safetensors, a .gguf file, or a hub id such as org/name
    #[arg(value_name = "MODEL", value_hint = clap::ValueHint::AnyPath)]
    pub model: String,

    /// Which prompts
    #[arg(long, value_name = "NAME", value_enum, default_value_t = WorkloadName::A)]
    pub workload: WorkloadName,

    /// How many prompts
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), default_value_t = 256)]
    pub prompts: u32,

    /// Rows decoded together; several numbers, separated by commas, are measured one after another
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "32")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub rows: Vec<u32>,

    /// Tokens of a prompt, from LO to HI, in place of the workload's
    #[arg(long, value_name = "LO..HI", value_parser = span)]
    pub prompt_tokens: Option<Span>,

    /// Tokens that all prompts begin with, in place of the workload's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub prefix_tokens: Option<u32>,

    /// Tokens that every row generates, in place of the workload's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub new_tokens: Option<u32>,

    /// Other prompts for another number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Which rows come first: rows of like length together, or as they stand; as `batching.order` of a job
    #[arg(long, value_name = "ORDER", value_enum, default_value_t = Order::Length)]
    pub order: Order,

    /// Memory for keys, values and scratch, such as 6GiB; as `batching.kv_budget` of a job
    #[arg(long, value_name = "SIZE", value_parser = kv_budget, default_value = "auto")]
    pub kv_budget: KvBudget,

    /// Prompt tokens of a step at most; as `batching.prefill_chunk` of a job
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prefill_chunk: Option<u32>,

    /// Rows that compute prompt tokens in one step at most; as `batching.prompt_concurrency` of a job
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub prompt_concurrency: Option<u32>,

    /// Compute what prompts share at the head with each of them, rather than once
    #[arg(long)]
    pub no_prefix_cache: bool,

    /// Compute with MLX's own operations, without the kernels that are made for batches
    #[arg(long)]
    pub plain: bool,

    /// What quantized weights are computed with on a GPU; a CPU computes with them as they are stored
    #[arg(long, value_name = "FORM", value_enum, default_value_t = Weights::Auto)]
    pub weights: Weights,

    /// Where to compute
    #[arg(long, value_name = "DEVICE", value_enum, default_value_t = Device::Auto)]
    pub device: Device,

    /// Number format of the layers
    #[arg(long, value_name = "DTYPE", value_enum, default_value_t = Dtype::Auto)]
    pub dtype: Dtype,

    /// Runs that count, after one that does not
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000), default_value_t = 3)]
    pub repeat: u32,

    /// Give each prompt an image or a recording, of those in DIR in turn, and measure the model's towers too
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath, conflicts_with = "dump")]
    pub media: Option<PathBuf>,

    /// Write the prompts to FILE for other programs and --load, and measure nothing
    ///
    /// It is a JSON list of {"prompt": [token ids], "max_tokens": n}.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, conflicts_with_all = ["load", "outputs", "json"])]
    pub dump: Option<PathBuf>,

    /// Take the prompts from such a file
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    #[arg(conflicts_with_all = ["workload", "prompts", "prompt_tokens", "prefix_tokens", "new_tokens", "seed"])]
    pub load: Option<PathBuf>,

    /// Write the token ids that the last run generated to FILE, a JSON list of a list for each prompt
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub outputs: Option<PathBuf>,

    /// Print it as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WorkloadName {
    /// 64 to 512 prompt tokens, 128 new ones
    A,
    /// A long tail: 16 to 4096 prompt tokens, 8 to 1024 new ones, each doubling as likely as the next
    B,
    /// 1500 tokens that all prompts begin with, 64 to 128 of each one's own, 64 new ones
    C,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Order {
    Length,
    Manifest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Weights {
    /// As they are stored, or dense where that is faster for so many rows and fits
    Auto,
    Stored,
    Dense,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// The GPU where there is one
    Auto,
    Gpu,
    Cpu,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// On a GPU as the weights are stored, on a CPU float32
    Auto,
    Float32,
    Bfloat16,
    Float16,
}

/// Both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub low: u32,
    pub high: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvBudget {
    Auto,
    Bytes(u64),
}

/// Tokens of a prompt at most.
const SPAN_MAX: u32 = 1_000_000;

fn span(text: &str) -> Result<Span, String> {
    let expected =
        || format!("expected two numbers of tokens such as 64..512, the first at least 1, the second at most {SPAN_MAX}");
    let (low, high) = text.split_once("..").ok_or_else(expected)?;
    let number = |text: &str| text.parse::<u32>().ok().filter(|number| (1..=SPAN_MAX).contains(number)).ok_or_else(expected);
    let (low, high) = (number(low)?, number(high)?);
    if low > high { Err(format!("{low} is more than {high}: the first number is the least")) } else { Ok(Span { low, high }) }
}

fn kv_budget(text: &str) -> Result<KvBudget, String> {
    if text == "auto" {
        return Ok(KvBudget::Auto);
    }
    // bytesize takes a bare number for bytes; whoever writes 6 means something else.
    let unit = text.chars().any(|character| character.is_ascii_alphabetic());
    match text.parse::<bytesize::ByteSize>() {
        Ok(size) if unit && size.as_u64() > 0 => Ok(KvBudget::Bytes(size.as_u64())),
        _ => Err("expected auto, or a size with its unit above 0, such as 6GiB or 500MB".to_owned()),
    }
}

const EXAMPLES: &str = "\
Examples:
  mlxbatch bench models/SmolLM2-135M-Instruct.Q4_1.gguf --rows 1,8,32
  mlxbatch bench org/name --workload b --rows 64 --json > bench.json
  mlxbatch bench MODEL --workload c --prefix-tokens 800 --new-tokens 16
  mlxbatch bench MODEL --workload b --dump prompts.json && mlxbatch bench MODEL --load prompts.json --rows 64";
