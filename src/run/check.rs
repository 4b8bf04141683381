//! `mlxbatch check`: everything that can be known of a job without its weights.

use std::fmt::Write as _;

use anyhow::Result;
use bytesize::ByteSize;
use rayon::prelude::*;
use serde::Serialize;

use super::{
    Status,
    feed::Preparation,
    open::{Model, Words, refuse_results_as_input, template_note, weight_files},
    print,
};
use crate::{
    args, engine,
    job::{Device, Dtype, Job, KvBudget},
    manifest::{self, Item, Medium, MediumKind},
    media::{MediaSource, Picture, stored_bytes},
    model::{ModelSummary, Towers},
    prompt::{Prepared, TYPED},
};

/// Prompts that are shown in full, and the characters of each.
const PROMPTS_SHOWN: usize = 2;
const PROMPT_CHARS: usize = 1200;
/// Bad rows that are spelled out.
const BAD_ROWS_SHOWN: usize = 10;

/// What was found.
#[derive(Debug, Serialize)]
struct Found {
    job: String,
    model: String,
    output: String,
    rows: u64,
    rows_good: u64,
    rows_bad: u64,
    /// The first of them: source and reason.
    bad_rows: Vec<(String, String)>,
    /// Images and recordings, and the bytes of these as they are stored.
    images: u64,
    image_bytes: u64,
    recordings: u64,
    recording_bytes: u64,
    /// Tokens of prompts, in which each image and recording counts as one.
    prompt_tokens_min: u32,
    prompt_tokens_mean: f64,
    prompt_tokens_max: u32,
    prompt_tokens: u64,
    /// Good rows that are longer than the context if each of their images and recordings has as many tokens as one has at most.
    /// Which of them are is known when these are decoded; the run fails those.
    rows_perhaps_too_long: u64,
    /// What a prompt and its completion can have together; none where the model does not say.
    context_tokens: Option<u32>,
    /// Why the weights cannot be loaded, where their headers tell.
    weights_fault: Option<String>,
    /// What the job's author should know.
    notes: Vec<String>,
    /// Prompt and completion of the longest row, with as many tokens for each image and recording as one has at most.
    row_tokens_max: u32,
    kv_bytes_per_token: u64,
    /// What the longest row keeps in the cache.
    row_kv_bytes_max: u64,
    kv_budget_bytes: u64,
    /// The budget is an estimate: the run takes what the device has once the weights are loaded.
    kv_budget_estimated: bool,
    /// What encoding images or recordings takes of it meanwhile, as many at once as are encoded.
    encode_bytes: u64,
    /// Rows as long as the longest that fit the budget together.
    rows_together: u64,
    prompts: Vec<Shown>,
}

#[derive(Debug, Serialize)]
struct Shown {
    id: String,
    tokens: usize,
    prompt: String,
    /// The same with [`TYPED`] around text of the row that reads like a control token.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_with_typed: Option<String>,
}

pub fn check(args: &args::Check) -> Result<Status> {
    let job = Job::read(&args.job.file, &args.job.set)?;
    refuse_results_as_input(&job)?;
    let model = Model::locate(&job)?;
    let words = model.words(&job)?;
    let found = find(&job, &model, &words, args.job.limit.unwrap_or(u64::MAX))?;
    let text = if args.json { serde_json::to_string_pretty(&found)? + "\n" } else { describe(&job, &found) };
    print(&text)?;
    Ok(match found {
        Found { weights_fault: Some(_), .. } => Status::Failed,
        Found { rows_bad: 1.., .. } => Status::SomeRowsFailed,
        _ => Status::Ok,
    })
}

fn find(job: &Job, model: &Model, words: &Words, limit: u64) -> Result<Found> {
    let mut manifest = manifest::open(&job.input)?;
    let mut found = Found {
        job: job.name.clone(),
        model: job.model.path.clone(),
        output: job.output.display().to_string(),
        rows: 0,
        rows_good: 0,
        rows_bad: 0,
        bad_rows: Vec::new(),
        images: 0,
        image_bytes: 0,
        recordings: 0,
        recording_bytes: 0,
        prompt_tokens_min: u32::MAX,
        prompt_tokens_mean: 0.0,
        prompt_tokens_max: 0,
        prompt_tokens: 0,
        rows_perhaps_too_long: 0,
        context_tokens: None,
        weights_fault: None,
        notes: template_note(job, words)?.into_iter().collect(),
        row_tokens_max: 0,
        kv_bytes_per_token: 0,
        row_kv_bytes_max: 0,
        kv_budget_bytes: 0,
        kv_budget_estimated: false,
        encode_bytes: 0,
        rows_together: 0,
        prompts: Vec::new(),
    };
    if let Words::Prompts(prompter) = words {
        found.context_tokens = prompter.context_length();
    }
    let preparation = words.preparation(job);
    let mut prompts = 0u64;
    while found.rows < limit
        && let Some(mut block) = manifest.next_block()?
    {
        block.truncate(usize::try_from(limit - found.rows).unwrap_or(usize::MAX));
        found.rows += block.len() as u64;
        let prepared: Vec<_> = block
            .into_par_iter()
            .with_min_len(16)
            .map(|row| match row {
                Ok(item) => look(words, &preparation, &item).map_err(|error| (item.source, error)),
                Err(bad) => Err((bad.source, bad.error)),
            })
            .collect();
        for row in prepared {
            match row {
                Ok(Looked::Recording { bytes }) => {
                    found.rows_good += 1;
                    found.recordings += 1;
                    found.recording_bytes += bytes;
                }
                Ok(Looked::Prompt { id, prepared, media }) => {
                    prompts += 1;
                    found.images += media.images;
                    found.image_bytes += media.image_bytes;
                    found.recordings += media.recordings;
                    found.recording_bytes += media.recording_bytes;
                    let request = &prepared.request;
                    let tokens = request.prompt.len() as u32;
                    let tokens_max = u64::from(tokens) + u64::from(media.tokens_max) + u64::from(request.max_tokens);
                    found.rows_perhaps_too_long +=
                        u64::from(found.context_tokens.is_some_and(|context| tokens_max > context.into()));
                    found.rows_good += 1;
                    found.prompt_tokens += u64::from(tokens);
                    found.prompt_tokens_min = found.prompt_tokens_min.min(tokens);
                    found.prompt_tokens_max = found.prompt_tokens_max.max(tokens);
                    found.row_tokens_max = found.row_tokens_max.max(request.reserved_tokens() + media.tokens_max);
                    if found.prompts.len() < PROMPTS_SHOWN {
                        let Prepared { rendered: prompt, typed: prompt_with_typed, .. } = *prepared;
                        found.prompts.push(Shown { id, tokens: request.prompt.len(), prompt, prompt_with_typed });
                    }
                }
                Err(bad) => {
                    found.rows_bad += 1;
                    if found.bad_rows.len() < BAD_ROWS_SHOWN {
                        found.bad_rows.push(bad);
                    }
                }
            }
        }
    }
    if prompts > 0 {
        found.prompt_tokens_mean = found.prompt_tokens as f64 / prompts as f64;
    } else {
        found.prompt_tokens_min = 0;
    }
    let towers = match words {
        Words::Prompts(prompter) => prompter.towers(),
        Words::Recordings { .. } => &Towers::default(),
    };
    price(job, model, towers, &mut found)?;
    if let Model::Files(files) = model {
        let looked = engine::check_weights(&weight_files(files), files.config());
        found.weights_fault = looked.err().map(|error| error.to_string());
    }
    Ok(found)
}

/// A good row.
enum Looked {
    Prompt {
        id: String,
        prepared: Box<Prepared>,
        media: MediaLooked,
    },
    /// Bytes of its file, which was not opened.
    Recording {
        bytes: u64,
    },
}

/// Images and recordings of a prompt, which were not opened.
#[derive(Default)]
struct MediaLooked {
    images: u64,
    image_bytes: u64,
    recordings: u64,
    recording_bytes: u64,
    /// What they add to the prompt at most.
    tokens_max: u32,
}

/// The error is what makes the row bad.
fn look(words: &Words, preparation: &Preparation, item: &Item) -> Result<Looked, String> {
    if let Words::Prompts(prompter) = words {
        let prepared = Box::new(prompter.prepare(item)?);
        let media = look_at_media(&prepared.media, prompter.towers())?;
        return Ok(Looked::Prompt { id: item.id.clone(), prepared, media });
    }
    preparation.of(item)?;
    Ok(Looked::Recording { bytes: item.audio.as_ref().map_or(Ok(0), recording_bytes)? })
}

fn look_at_media(media: &[Medium], towers: &Towers) -> Result<MediaLooked, String> {
    let mut looked = MediaLooked::default();
    for Medium { kind, source } in media {
        let soft_tokens_max = match kind {
            MediumKind::Image => {
                looked.images += 1;
                looked.image_bytes += Picture::stored_bytes(source).map_err(|error| source.fault(&error))?;
                towers.image.as_ref().map_or(0, |tower| tower.rule.soft_tokens_max)
            }
            MediumKind::Audio => {
                looked.recordings += 1;
                looked.recording_bytes += recording_bytes(source)?;
                towers.audio.as_ref().map_or(0, |tower| tower.soft_tokens_max)
            }
        };
        // One token of the prompt becomes these, between one that begins and one that ends them.
        looked.tokens_max = looked.tokens_max.saturating_add(soft_tokens_max + 1);
    }
    Ok(looked)
}

fn recording_bytes(source: &MediaSource) -> Result<u64, String> {
    stored_bytes(source).map_err(|error| source.fault(&error))
}

/// What rows will cost, told by the configuration alone.
fn price(job: &Job, model: &Model, towers: &Towers, found: &mut Found) -> Result<()> {
    let Model::Files(files) = model else { return Ok(()) };
    let summary = ModelSummary::new(files, true)?;
    let (on_gpu, memory_bytes) = engine::device_memory(job.model.device);
    let element_bytes = match job.model.dtype {
        Dtype::Float32 => 4,
        Dtype::Auto if !on_gpu => 4,
        _ => 2,
    };
    let (full, window) = summary.kv_bytes_per_token(element_bytes);
    let window_tokens = summary.window_tokens.unwrap_or(u32::MAX).min(found.row_tokens_max);
    found.kv_bytes_per_token = full + window;
    found.row_kv_bytes_max = full * u64::from(found.row_tokens_max) + window * u64::from(window_tokens);
    let weights: u64 = if on_gpu {
        weight_files(files).iter().filter_map(|file| fs_err::metadata(file).ok()).map(|metadata| metadata.len()).sum()
    } else {
        summary.parameters * 4
    };
    (found.kv_budget_bytes, found.kv_budget_estimated) = match job.batching.kv_budget {
        KvBudget::Bytes(bytes) => (bytes, false),
        KvBudget::Auto => (memory_bytes.saturating_sub(weights), true),
    };
    let [image, audio] = engine::encode_prices(files.config(), on_gpu, element_bytes == 4);
    let tokens_max = |tower: Option<u32>, media: u64| tower.filter(|_| media > 0).unwrap_or(0);
    let image_bytes = image.bytes(tokens_max(towers.image.as_ref().map(|tower| tower.rule.soft_tokens_max), found.images));
    let audio_bytes = audio.bytes(tokens_max(towers.audio.as_ref().map(|tower| tower.soft_tokens_max), found.recordings));
    let at_once = (found.images + found.recordings).min(engine::encoded_at_once(on_gpu) as u64);
    found.encode_bytes = at_once * image_bytes.max(audio_bytes);
    let left = found.kv_budget_bytes.saturating_sub(found.encode_bytes);
    found.rows_together = left.checked_div(found.row_kv_bytes_max).unwrap_or(0).min(u64::from(job.batching.rows));
    Ok(())
}

fn describe(job: &Job, found: &Found) -> String {
    let mut text = String::new();
    let mut line = |name: &str, words: &str| {
        let _ = writeln!(text, "  {name:<12} {words}");
    };
    line("job", &format!("{} ({})", found.job, job.file.display()));
    line("model", &format!("{} on {}", found.model, device(job.model.device)));
    line("rows", &format!("{} good · {} bad", found.rows_good, found.rows_bad));
    if found.images > 0 {
        line("images", &format!("{}, {} as stored (not decoded here)", found.images, ByteSize(found.image_bytes)));
    }
    if found.recordings > 0 {
        line("recordings", &format!("{}, {} as stored (not decoded here)", found.recordings, ByteSize(found.recording_bytes)));
    }
    if found.prompt_tokens > 0 {
        let media = if found.images + found.recordings > 0 { ", each image and recording counted as one" } else { "" };
        line(
            "prompts",
            &format!(
                "{} to {} tokens, {:.0} on average, {} in all{media}",
                found.prompt_tokens_min, found.prompt_tokens_max, found.prompt_tokens_mean, found.prompt_tokens
            ),
        );
    }
    if found.kv_bytes_per_token > 0 && found.row_tokens_max > 0 {
        let size = |bytes: u64| ByteSize(bytes).to_string();
        let estimated = if found.kv_budget_estimated { " (about: what is free now, less the weights)" } else { "" };
        line("a token", &format!("{} of cache", size(found.kv_bytes_per_token)));
        line("longest row", &format!("{} tokens, {} of cache", found.row_tokens_max, size(found.row_kv_bytes_max)));
        line("budget", &format!("{}{estimated}", size(found.kv_budget_bytes)));
        if found.encode_bytes > 0 {
            line("encoding", &format!("{} of it while images or recordings are encoded", size(found.encode_bytes)));
        }
        line("together", &format!("{} rows of that length, of batching.rows = {}", found.rows_together, job.batching.rows));
        if found.rows_together == 0 {
            line("", "the longest row does not fit: raise batching.kv_budget, or lower generation.max_tokens");
        }
    }
    if found.rows_perhaps_too_long > 0 {
        let (rows, context) = (found.rows_perhaps_too_long, found.context_tokens.unwrap_or_default());
        let rows = if rows == 1 { "1 row".to_owned() } else { format!("{rows} rows") };
        line(
            "too long?",
            &format!("{rows}: over the context of {context} tokens, if images and recordings have as many as they can;"),
        );
        line("", "what is too long once they are decoded fails in the run: shorten it, or lower generation.max_tokens");
    }
    line("output", &found.output);
    for (at, fault) in found.weights_fault.iter().flat_map(|fault| fault.lines()).enumerate() {
        line(if at == 0 { "weights" } else { "" }, fault);
    }
    for note in &found.notes {
        line("note", note);
    }
    for (source, reason) in &found.bad_rows {
        line("bad row", &format!("{source}: {reason}"));
    }
    if found.rows_bad as usize > found.bad_rows.len() {
        line("", &format!("… and {} more", found.rows_bad as usize - found.bad_rows.len()));
    }
    for shown in &found.prompts {
        let _ = writeln!(text, "\n  prompt of {} ({} tokens):", shown.id, shown.tokens);
        let prompt = shown.prompt_with_typed.as_ref().unwrap_or(&shown.prompt);
        let cut: String = prompt.chars().take(PROMPT_CHARS).collect();
        for prompt_line in cut.lines() {
            let _ = writeln!(text, "  | {prompt_line}");
        }
        if cut.len() < prompt.len() {
            let _ = writeln!(text, "  | … ({} characters more)", prompt.chars().count() - PROMPT_CHARS);
        }
        if shown.prompt_with_typed.is_some() {
            let [before, after] = TYPED;
            let _ = writeln!(text, "  {before}…{after}: text of the row that reads like a control token, and is none");
        }
    }
    text
}

fn device(device: Device) -> &'static str {
    let (on_gpu, _) = engine::device_memory(device);
    if on_gpu { "the GPU" } else { "the CPU" }
}
