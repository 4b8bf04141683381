//! `mlxbatch bench`: how fast a model runs here.

mod figures;
mod measure;
mod media;
mod workload;

use std::{
    io::{self, Write},
    sync::Arc,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

pub use workload::BenchError;

use super::{
    Status,
    feed::{ORDERED_ROWS, by_length},
    job_run::PREFIX_TOKENS_MIN,
    open::{SPEECH_FAMILY, machine, versions, weight_files},
    print,
};
use crate::{
    args::{self, KvBudget},
    engine::{Engine, MlxEngine, MlxOptions, WeightForm, memory},
    job::{Device, Dtype, Generation},
    model::{self, ModelFiles, Towers},
    schedule::{Limits, Request, SequenceId},
};
use figures::{Figures, Tokens};
use media::RowMedia;
use workload::{Recipe, WorkloadRow};

pub fn bench(args: &args::Bench) -> Result<Status> {
    if let (Some(_), rows @ 2..) = (&args.outputs, args.rows.len()) {
        return Err(BenchError::OutputsOfMany { rows }.into());
    }
    let loaded = args.load.as_deref().map(workload::load).transpose()?;
    let files = model::locate(&args.model)?;
    if files.family() == SPEECH_FAMILY {
        return Err(BenchError::NotText { model: args.model.clone(), family: files.family().to_owned() }.into());
    }
    let towers = if args.media.is_some() { Towers::new(&files)? } else { Towers::default() };
    if args.media.is_some() && towers == Towers::default() {
        return Err(BenchError::NoTowers { model: args.model.clone() }.into());
    }
    let workload = match loaded {
        Some(rows) => rows,
        None => Recipe::new(args).rows(vocabulary(&files)?)?,
    };
    if let Some(path) = &args.dump {
        workload::dump(path, &workload)?;
        return Ok(Status::Ok);
    }
    let options = MlxOptions {
        device: device(args.device),
        dtype: dtype(args.dtype),
        plain: args.plain,
        weights: weights(args.weights),
        rows: args.rows.iter().copied().max().unwrap_or(1),
    };

    let media = match &args.media {
        Some(folder) => Some(RowMedia::read(folder, &towers, workload.len())?),
        None => None,
    };
    let mut engine = MlxEngine::load(&weight_files(&files), files.config(), options)
        .with_context(|| format!("failed to load {}", args.model))?;
    if media.is_some() {
        engine.time_media();
    }
    workload::check(&workload, engine.vocabulary())?;
    let defaults = engine.prefill_defaults();
    let kv_bytes_max = match args.kv_budget {
        KvBudget::Auto => engine.kv_bytes_auto(),
        KvBudget::Bytes(bytes) => bytes,
    };
    // Every row is greedy.
    let price = engine.price_of(true);
    let limits = Limits {
        rows: 1,
        prefill_chunk: args.prefill_chunk.unwrap_or_else(|| price.prefill_chunk_within(defaults.chunk, kv_bytes_max)),
        prompt_concurrency: args.prompt_concurrency.unwrap_or(defaults.concurrency),
        prefix_tokens_min: (!args.no_prefix_cache).then_some(PREFIX_TOKENS_MIN),
        span_tokens_max: towers.image.as_ref().filter(|tower| tower.both_ways).map_or(0, |tower| tower.rule.soft_tokens_max),
        kv_bytes_max,
        price,
        context_length: files.context_length().unwrap_or(u32::MAX),
    };
    let requests = requests(&workload, media.as_ref(), &towers, args.order)?;
    for request in &requests {
        let refused = |refused| BenchError::Refused { index: request.sequence.0 as usize, reason: format!("{refused}") };
        limits.check(request).map_err(refused)?;
    }
    let tokens = Tokens {
        prompt: requests.iter().map(|request| request.prompt.len() as u64).sum(),
        output: workload.iter().map(|row| u64::from(row.max_tokens)).sum(),
    };
    let weight_bytes = memory::active_bytes()?;
    let media = media.map(|media| media.figures(&engine)).transpose()?;
    let mut all = Vec::with_capacity(args.rows.len());
    let mut outputs = Vec::new();
    for &rows in &args.rows {
        let mut runs = Vec::with_capacity(args.repeat as usize);
        for run in 0..=args.repeat {
            let mut seen = measure::run(&mut engine, Limits { rows, ..limits.clone() }, &requests)?;
            let rate = tokens.output as f64 / seen.wall.as_secs_f64();
            let which = if run == 0 { "warm-up".to_owned() } else { format!("run {run} of {}", args.repeat) };
            // Nobody need be told.
            let _ = writeln!(io::stderr(), "{rows} rows, {which}: {:.2} s, {rate:.1} output tokens/s", seen.wall.as_secs_f64());
            outputs = std::mem::take(&mut seen.outputs);
            if run > 0 {
                runs.push(seen);
            }
        }
        all.push(Figures::new(rows, &runs, tokens, weight_bytes));
    }
    if let Some(path) = &args.outputs {
        fs_err::write(path, serde_json::to_vec(&outputs)?)?;
    }
    let name = match (&args.load, args.workload) {
        (Some(path), _) => path.display().to_string(),
        (None, args::WorkloadName::A) => "a".to_owned(),
        (None, args::WorkloadName::B) => "b".to_owned(),
        (None, args::WorkloadName::C) => "c".to_owned(),
    };
    let order = if args.order == args::Order::Length { "length" } else { "manifest" };
    let device = if engine.on_gpu() { "gpu" } else { "cpu" };
    let (versions, machine, dtype) = (versions(), machine(), engine.dtype());
    let text = if args.json {
        let report = json!({
            "program": "mlxbatch",
            "versions": versions,
            "machine": machine,
            "model": args.model,
            "device": device,
            "dtype": dtype,
            "weight_bytes": weight_bytes,
            "workload": {
                "name": name,
                "prompts": workload.len(),
                "prompt_tokens": tokens.prompt,
                "output_tokens": tokens.output,
                "seed": args.load.is_none().then_some(args.seed),
                "order": order,
            },
            "settings": {
                "prefill_chunk": limits.prefill_chunk,
                "prompt_concurrency": limits.prompt_concurrency,
                "kv_bytes_max": limits.kv_bytes_max,
                "prefix_cache": limits.prefix_tokens_min.is_some(),
                "plain": args.plain,
                "weights": format!("{:?}", args.weights).to_lowercase(),
            },
            "media": media,
            "results": all,
        });
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        let mlx = versions.get("mlx").map_or("unknown", String::as_str);
        format!(
            "{}, {dtype} on the {}, MLX {mlx}\nworkload {name}: {} prompts of {} tokens together, {} new tokens, order {order}\n\n{}{}\n\
             To have a machine listed in docs/benchmarks.md, open an issue that names it (processor or GPU, memory, system) and has the\n\
             output of this command with --json.\n",
            args.model,
            device.to_uppercase(),
            workload.len(),
            tokens.prompt,
            tokens.output,
            media.map(|media| media::table(&media)).unwrap_or_default(),
            figures::table(&all),
        )
    };
    print(&text)?;
    Ok(Status::Ok)
}

/// How many tokens a model has, by its files.
fn vocabulary(files: &ModelFiles) -> Result<u32, BenchError> {
    let stated = files
        .config()
        .get("vocab_size")
        .or_else(|| files.text_config("vocab_size"))
        .and_then(Value::as_u64)
        .and_then(|tokens| u32::try_from(tokens).ok());
    stated.filter(|&tokens| tokens > 0).ok_or_else(|| BenchError::NoVocabulary { model: files.name.clone() })
}

/// Greedy requests that no token ends, in the order in which a job would bring them.
fn requests(
    workload: &[WorkloadRow],
    media: Option<&RowMedia>,
    towers: &Towers,
    order: args::Order,
) -> Result<Vec<Arc<Request>>, BenchError> {
    let stop_tokens: Arc<[u32]> = Arc::new([]);
    let mut requests: Vec<Arc<Request>> = workload
        .iter()
        .enumerate()
        .map(|(index, row)| {
            let (prompt, of_row) = match media {
                Some(media) => media.splice(index, row, towers)?,
                None => (row.prompt.clone(), Vec::new()),
            };
            Ok(Arc::new(Request {
                sequence: SequenceId(index as u64),
                prompt,
                max_tokens: row.max_tokens,
                stop_tokens: stop_tokens.clone(),
                generation: Arc::new(Generation { max_tokens: row.max_tokens, ignore_eos: true, ..Generation::default() }),
                seed: index as u64,
                window: None,
                media: of_row,
                whole_spans: media.is_some_and(|media| media.whole_spans(index, towers)),
            }))
        })
        .collect::<Result<_, BenchError>>()?;
    if order == args::Order::Length {
        for (stretch, rows) in (0u64..).zip(requests.chunks_mut(ORDERED_ROWS)) {
            by_length(rows, stretch, |request| request.reserved_tokens());
        }
    }
    Ok(requests)
}

fn weights(weights: args::Weights) -> WeightForm {
    match weights {
        args::Weights::Auto => WeightForm::Auto,
        args::Weights::Stored => WeightForm::Stored,
        args::Weights::Dense => WeightForm::Dense,
    }
}

fn device(device: args::Device) -> Device {
    match device {
        args::Device::Auto => Device::Auto,
        args::Device::Gpu => Device::Gpu,
        args::Device::Cpu => Device::Cpu,
    }
}

fn dtype(dtype: args::Dtype) -> Dtype {
    match dtype {
        args::Dtype::Auto => Dtype::Auto,
        args::Dtype::Float32 => Dtype::Float32,
        args::Dtype::Bfloat16 => Dtype::Bfloat16,
        args::Dtype::Float16 => Dtype::Float16,
    }
}
