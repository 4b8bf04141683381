//! The command line as typed.

mod bench;

use std::io::{self, Write};
use std::path::PathBuf;

pub use bench::{Bench, Device, Dtype, KvBudget, Order, Span, Weights, WorkloadName};

use clap::{CommandFactory, Parser, Subcommand, ValueEnum};

/// Runs a model over a whole data set on your own machine.
///
/// A job file says which model, which rows, which prompt and how to sample. Rows are batched continuously within a memory budget,
/// results go into a folder of Parquet files while the job runs, and a job that was interrupted goes on where it was.
#[derive(Debug, Clone, PartialEq, Parser)]
#[command(name = "mlxbatch", version, max_term_width = 100, after_help = SHORT_EXAMPLES, after_long_help = LONG_AFTER_HELP)]
#[command(subcommand_required = true, arg_required_else_help = true, disable_help_subcommand = true)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Clone, PartialEq, Subcommand)]
pub enum Command {
    Run(Run),
    Check(Check),
    Inspect(Inspect),
    Convert(Convert),
    Summary(Summary),
    Show(Show),
    Bench(Box<Bench>),
    Completions(Completions),
    /// Print the manual page
    #[command(after_help = "Example:\n  mlxbatch man > ~/.local/share/man/man1/mlxbatch.1")]
    Man,
}

/// Run a job, or go on with one that was interrupted
///
/// Rows whose results are already in the output folder are not computed again. A job whose settings have changed since is refused
/// there, with the reason: give it another --output, or throw the earlier results away with --fresh.
#[derive(Debug, Clone, PartialEq, clap::Args)]
#[command(after_help = RUN_EXAMPLES)]
pub struct Run {
    #[command(flatten)]
    pub job: JobArgs,

    /// Write results into DIR instead of the job's own `job.output`
    ///
    /// Relative to the folder you are in, where the job file's own paths are relative to the job file.
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub output: Option<PathBuf>,

    /// Throw away earlier results in the output folder and start anew
    #[arg(long)]
    pub fresh: bool,

    /// How to show progress, on standard error
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Progress::Auto)]
    pub progress: Progress,

    /// Print the summary as JSON on standard output when the job is done
    #[arg(long)]
    pub json: bool,
}

/// Say what a job would do, without loading weights
///
/// Reads the job file and the whole manifest, counts rows and bad rows, renders the first prompts and prices the memory that the
/// rows need.
#[derive(Debug, Clone, PartialEq, clap::Args)]
#[command(after_help = CHECK_EXAMPLES)]
pub struct Check {
    #[command(flatten)]
    pub job: JobArgs,

    /// Print what was found as JSON on standard output
    #[arg(long)]
    pub json: bool,
}

/// The job and what is changed in it.
#[derive(Debug, Clone, PartialEq, clap::Args)]
pub struct JobArgs {
    /// The job file, in TOML
    #[arg(value_name = "JOB", value_hint = clap::ValueHint::FilePath)]
    pub file: PathBuf,

    /// Take only the first N rows of the manifest
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,

    /// Set one key of the job file, by its full name; may be given more than once
    ///
    /// The value is read as TOML and, where it is none, as plain text.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Say what a model is: family, sizes, quantization, context, memory a token
#[derive(Debug, Clone, PartialEq, clap::Args)]
#[command(after_help = INSPECT_EXAMPLES)]
pub struct Inspect {
    /// A folder with config.json and safetensors, a .gguf file, or a hub id such as org/name
    #[arg(value_name = "MODEL", value_hint = clap::ValueHint::AnyPath)]
    pub model: String,

    /// Print it as JSON
    #[arg(long)]
    pub json: bool,
}

/// Convert a model of another format into one that can be run
///
/// What is converted is a Whisper of CTranslate2's, as faster-whisper uses it: model.bin and its tokenizer.json become
/// weights.safetensors, config.json and tokenizer.json in the layout of mlx-whisper. Weights that were quantized to integers become
/// the floats that they stand for. The new folder appears when it is whole.
#[derive(Debug, Clone, PartialEq, clap::Args)]
#[command(after_help = CONVERT_EXAMPLES)]
pub struct Convert {
    /// The folder to convert
    #[arg(value_name = "SOURCE", value_hint = clap::ValueHint::DirPath)]
    pub source: PathBuf,

    /// The folder to make; it must not be there, or be empty
    #[arg(value_name = "OUT", value_hint = clap::ValueHint::DirPath)]
    pub out: PathBuf,
}

/// Summarize the results of a run: rows, failures, speed, time per stage
#[derive(Debug, Clone, PartialEq, clap::Args)]
#[command(after_help = SUMMARY_EXAMPLES)]
pub struct Summary {
    /// The job's output folder; a run need not be finished
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub folder: PathBuf,

    /// Print it as JSON
    #[arg(long)]
    pub json: bool,
}

/// Print the results of a run, a line a row, in the order in which rows were completed
///
/// Parts are Parquet, which pyarrow, DuckDB and Polars read; this is for a look without them.
#[derive(Debug, Clone, PartialEq, clap::Args)]
#[command(after_help = SHOW_EXAMPLES)]
pub struct Show {
    /// The job's output folder; a run need not be finished
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub folder: PathBuf,

    /// Columns to print, separated by commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_values_t = ["id".to_owned(), "text".to_owned()])]
    pub columns: Vec<String>,

    /// Print N rows at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,

    /// Print each row as a JSON object
    #[arg(long)]
    pub json: bool,
}

/// Print completions for a shell
#[derive(Debug, Clone, PartialEq, clap::Args)]
#[command(after_help = COMPLETIONS_EXAMPLES)]
pub struct Completions {
    #[arg(value_name = "SHELL", value_enum)]
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Progress {
    /// A bar on a terminal, plain lines elsewhere
    Auto,
    /// A bar with rows, rates, failures and time left
    Bar,
    /// A line now and then, which reads well in a log
    Plain,
    /// One JSON object an event
    Json,
    /// Nothing
    None,
}

const SHORT_EXAMPLES: &str = "\
Examples:
  mlxbatch run jobs/quickstart.toml
  mlxbatch check jobs/quickstart.toml

`mlxbatch --help` tells more; docs/job-file.md tells what goes into a job file.";

const LONG_AFTER_HELP: &str = "\
Examples:
  mlxbatch check jobs/quickstart.toml                  what the job would do
  mlxbatch run jobs/quickstart.toml                    run it; again after an interruption to go on
  mlxbatch run job.toml --limit 20 --output out/try    try the first 20 rows, elsewhere
  mlxbatch run job.toml --set generation.max_tokens=64 --set batching.rows=8
  mlxbatch summary out/quickstart                      how it went
  mlxbatch inspect mlx-community/Qwen3-0.6B-4bit       what a model is
  mlxbatch bench models/model.gguf --rows 1,8,32       how fast it is here
  mlxbatch convert faster-whisper-base whisper-base    CTranslate2's weights into ones that can be run

Exit status:
  0   every row is ok
  1   the job failed: the model, the disk or the engine
  2   wrong usage, or a job file or manifest that cannot be used
  3   the job is done, and some rows failed: see failed.jsonl in the output folder
  75  interrupted; run the same command again to go on

docs/job-file.md tells what goes into a job file, docs/output.md what comes out.";

const RUN_EXAMPLES: &str = "\
Examples:
  mlxbatch run jobs/quickstart.toml
  mlxbatch run job.toml --limit 20 --output out/try
  mlxbatch run job.toml --set generation.temperature=0.7 --set 'generation.stop=[\"END\"]'
  mlxbatch run job.toml --progress none --json > summary.json

Ctrl-C finishes the part in hand and exits with 75: the same command goes on from there. A second Ctrl-C stops at once.";

const CHECK_EXAMPLES: &str = "\
Examples:
  mlxbatch check jobs/quickstart.toml
  mlxbatch check job.toml --limit 1000 --json";

const INSPECT_EXAMPLES: &str = "\
Examples:
  mlxbatch inspect models/SmolLM2-135M-Instruct.Q4_1.gguf
  mlxbatch inspect mlx-community/Qwen3-0.6B-4bit --json";

const CONVERT_EXAMPLES: &str = "\
Example:
  mlxbatch convert models/faster-whisper-tiny.en models/whisper-tiny.en";

const SUMMARY_EXAMPLES: &str = "\
Examples:
  mlxbatch summary out/quickstart
  mlxbatch summary out/quickstart --json";

const SHOW_EXAMPLES: &str = "Examples:
  mlxbatch show out/speech
  mlxbatch show out/speech --columns id,wer,text --limit 20
  mlxbatch show out/speech --columns id,segments --json";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  mlxbatch completions bash > ~/.local/share/bash-completion/completions/mlxbatch
  mlxbatch completions zsh > ~/.zfunc/_mlxbatch
  mlxbatch completions fish > ~/.config/fish/completions/mlxbatch.fish";

/// Writes completions for `shell` to standard output.
pub fn completions(shell: clap_complete::Shell) -> io::Result<()> {
    // clap_complete panics where it cannot write, and a closed pipe is no fault: so into memory first.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "mlxbatch", &mut script);
    print(&script)
}

/// Writes the manual page, all commands on one page, to standard output.
pub fn man_page() -> io::Result<()> {
    print(&render_man_page()?)
}

fn render_man_page() -> io::Result<Vec<u8>> {
    let mut command = Args::command();
    command.build();
    let mut page = Vec::new();
    let man = clap_mangen::Man::new(command.clone()).manual("mlxbatch");
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    for subcommand in command.get_subcommands() {
        let mut section = Vec::new();
        let man = clap_mangen::Man::new(subcommand.clone());
        man.render_synopsis_section(&mut section)?;
        man.render_description_section(&mut section)?;
        man.render_options_section(&mut section)?;
        writeln!(page, ".SH {}", subcommand.get_name().to_uppercase())?;
        // Sections of a command's own page are subsections here.
        page.extend_from_slice(String::from_utf8_lossy(&section).replace(".SH ", ".SS ").as_bytes());
        let notes = subcommand.get_after_help().map(ToString::to_string).unwrap_or_default();
        render_as_it_stands(&mut page, ".SS NOTES", &notes)?;
    }
    render_as_it_stands(&mut page, ".SH NOTES", LONG_AFTER_HELP)?;
    Ok(page)
}

/// Text whose lines mean something to roff nowhere: each stays a line.
fn render_as_it_stands(page: &mut Vec<u8>, heading: &str, text: &str) -> io::Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    writeln!(page, "{heading}\n.nf")?;
    for line in text.lines() {
        writeln!(page, "\\&{}", line.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq"))?;
    }
    writeln!(page, ".fi")
}

fn print(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Args::try_parse_from(line.split(' ')).map(|args| args.command)
    }

    #[test]
    fn definition_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn run_with_everything() {
        let line = "mlxbatch run a.toml --output out --limit 5 --set a.b=c --set d.e=-1 --fresh --progress json --json";
        let expected = Run {
            job: JobArgs { file: "a.toml".into(), limit: Some(5), set: vec!["a.b=c".to_owned(), "d.e=-1".to_owned()] },
            output: Some("out".into()),
            fresh: true,
            progress: Progress::Json,
            json: true,
        };
        assert_eq!(parse(line).unwrap(), Command::Run(expected));
    }

    #[test]
    fn run_with_nothing() {
        let job = JobArgs { file: "a.toml".into(), limit: None, set: Vec::new() };
        let expected = Run { job, output: None, fresh: false, progress: Progress::Auto, json: false };
        assert_eq!(parse("mlxbatch run a.toml").unwrap(), Command::Run(expected));
    }

    #[test]
    fn other_commands() {
        let job = JobArgs { file: "a.toml".into(), limit: Some(2), set: vec!["x.y=1".to_owned()] };
        assert_eq!(parse("mlxbatch check a.toml --set x.y=1 --limit 2").unwrap(), Command::Check(Check { job, json: false }));
        let inspect = Inspect { model: "org/name".to_owned(), json: true };
        assert_eq!(parse("mlxbatch inspect org/name --json").unwrap(), Command::Inspect(inspect));
        let convert = Convert { source: "a".into(), out: "b".into() };
        assert_eq!(parse("mlxbatch convert a b").unwrap(), Command::Convert(convert));
        let summary = Summary { folder: "out".into(), json: false };
        assert_eq!(parse("mlxbatch summary out").unwrap(), Command::Summary(summary));
        let columns = vec!["id".to_owned(), "wer".to_owned()];
        let show = Show { folder: "out".into(), columns, limit: Some(3), json: true };
        assert_eq!(parse("mlxbatch show out --columns id,wer --limit 3 --json").unwrap(), Command::Show(show));
        let Command::Bench(bench) = parse("mlxbatch bench m --workload c --rows 1,64 --new-tokens 4").unwrap() else {
            panic!("bench")
        };
        assert_eq!((bench.workload, bench.rows.as_slice(), bench.new_tokens), (WorkloadName::C, [1, 64].as_slice(), Some(4)));
        let completions = Completions { shell: clap_complete::Shell::Zsh };
        assert_eq!(parse("mlxbatch completions zsh").unwrap(), Command::Completions(completions));
        assert_eq!(parse("mlxbatch man").unwrap(), Command::Man);
    }

    #[test]
    fn wrong_usage_exits_2() {
        let lines = [
            "mlxbatch",
            "mlxbatch fly",
            "mlxbatch run",
            "mlxbatch run a.toml b.toml",
            "mlxbatch run a.toml --limit 0",
            "mlxbatch run a.toml --limit many",
            "mlxbatch run a.toml --progress loud",
            "mlxbatch run a.toml --colour",
            "mlxbatch check a.toml --fresh",
            "mlxbatch completions sh",
            "mlxbatch bench",
            "mlxbatch bench m --rows 0",
            "mlxbatch bench m --rows 1,,2",
            "mlxbatch bench m --workload e",
            "mlxbatch bench m --prompt-tokens 9..3",
            "mlxbatch bench m --prompt-tokens 0..3",
            "mlxbatch bench m --prompt-tokens 12",
            "mlxbatch bench m --kv-budget 12",
            "mlxbatch bench m --kv-budget 0GiB",
            "mlxbatch bench m --repeat 0",
            "mlxbatch bench m --load w.json --seed 3",
            "mlxbatch bench m --load w.json --workload a",
        ];
        for line in lines {
            assert_eq!(parse(line).expect_err(line).exit_code(), 2, "{line}");
        }
        assert_eq!(parse("mlxbatch --help").expect_err("help is shown").exit_code(), 0);
        assert_eq!(parse("mlxbatch run --help").expect_err("help is shown").exit_code(), 0);
    }

    #[test]
    fn manual_names_every_command_and_exit_status() {
        let page = String::from_utf8(render_man_page().unwrap()).unwrap();
        for expected in [".SH RUN", ".SH SUMMARY", ".SH CONVERT", "\\-\\-limit", "\\&  75  interrupted", "\\-\\-progress"] {
            assert!(page.contains(expected), "{expected}\n{page}");
        }
    }
}
