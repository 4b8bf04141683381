//! A job back into TOML, and the hash of what makes its results.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

use super::speech::{CHANNELS, LONG, TASKS};
use super::{Audio, Columns, Device, Dtype, Generation, Job, KvBudget, Order, Prompt, Results, Transcription};

impl Job {
    /// The whole job as TOML, defaults included and paths resolved: [`Job::read`] gives the same job from it, wherever it lies.
    pub fn effective_toml(&self) -> String {
        let mut toml = Toml("# The job that was run: every setting, those from the command line included.\n".to_owned());
        toml.table("job");
        toml.text("name", &self.name);
        toml.text("task", "generate");
        toml.text("output", &self.output.to_string_lossy());

        toml.table("model");
        toml.text("path", &self.model.path);
        toml.text("device", self.model.device.name());
        toml.text("dtype", self.model.dtype.name());

        toml.table("input");
        if !self.input.manifest.is_empty() {
            toml.texts("manifest", &self.input.manifest);
        }
        if let Some(folder) = &self.input.folder {
            toml.text("folder", &folder.to_string_lossy());
        }
        if let Some(glob) = &self.input.glob {
            toml.text("glob", glob);
        }
        toml.table("input.columns");
        toml.text("id", &self.input.columns.id);
        toml.content_columns(&self.input.columns);
        toml.text("audio", &self.input.columns.audio);
        toml.text("image", &self.input.columns.image);
        toml.text("language", &self.input.columns.language);

        toml.table("prompt");
        toml.prompt(&self.prompt);
        toml.table("generation");
        toml.generation(&self.generation);
        toml.logprobs(self.generation.logprobs);

        toml.table("batching");
        toml.value("rows", self.batching.rows);
        toml.text("kv_budget", &self.batching.kv_budget.written());
        toml.value("kv_bits", 16);
        if let Some(tokens) = self.batching.prefill_chunk {
            toml.value("prefill_chunk", tokens);
        }
        if let Some(rows) = self.batching.prompt_concurrency {
            toml.value("prompt_concurrency", rows);
        }
        toml.text("order", self.batching.order.name());
        toml.value("prefix_cache", self.batching.prefix_cache);

        toml.table("audio");
        toml.audio(&self.audio);
        toml.table("transcription");
        toml.transcription(&self.transcription);

        toml.table("results");
        toml.row_results(&self.results);
        toml.value("rows_per_part", self.results.rows_per_part);
        toml.value("seconds_per_part", self.results.seconds_per_part);
        toml.0
    }

    /// The first 8 bytes, little-endian, of the blake3 hash of the settings that change what a row's results hold.
    ///
    /// These are the model's path and dtype, the columns that are read, the prompt, the generation, what is done with recordings,
    /// and which columns are kept. Not among them: the manifest (each row has the hash of its own input), the output, the device,
    /// and how rows are batched and written.
    ///
    /// What is said of recordings and log-probabilities counts where it is not the default, so that results from before there were
    /// any still go on.
    pub fn settings_hash(&self) -> u64 {
        let mut toml = Toml("mlxbatch settings 1\n".to_owned());
        toml.text("model", &self.model.path);
        toml.text("dtype", self.model.dtype.name());
        toml.text("id", &self.input.columns.id);
        toml.content_columns(&self.input.columns);
        toml.prompt(&self.prompt);
        toml.generation(&self.generation);
        if self.generation.logprobs.is_some() {
            toml.logprobs(self.generation.logprobs);
        }
        toml.row_results(&self.results);
        let Columns { audio, image, language, .. } = &self.input.columns;
        for (role, name) in [("audio", audio), ("image", image), ("language", language)] {
            if name != role {
                toml.text(&format!("columns.{role}"), name);
            }
        }
        if self.audio != Audio::default() {
            toml.table("audio");
            toml.audio(&self.audio);
        }
        if self.transcription != Transcription::default() {
            toml.table("transcription");
            toml.transcription(&self.transcription);
        }
        let [a, b, c, d, e, f, g, h, ..] = *blake3::hash(toml.0.as_bytes()).as_bytes();
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

struct Toml(String);

impl Toml {
    fn table(&mut self, name: &str) {
        self.line(format_args!("\n[{name}]"));
    }

    fn value(&mut self, key: &str, value: impl Display) {
        self.line(format_args!("{key} = {value}"));
    }

    /// With the fewest digits that give the same float32.
    fn number(&mut self, key: &str, number: f32) {
        self.line(format_args!("{key} = {number:?}"));
    }

    fn text(&mut self, key: &str, text: &str) {
        self.value(key, quoted(text));
    }

    fn texts(&mut self, key: &str, texts: &[String]) {
        let texts: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
        self.value(key, format_args!("[{}]", texts.join(", ")));
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.0, "{line}");
    }

    fn content_columns(&mut self, columns: &Columns) {
        self.text("prompt", &columns.prompt);
        self.text("messages", &columns.messages);
        self.text("reference", &columns.reference);
    }

    fn prompt(&mut self, prompt: &Prompt) {
        if let Some(system) = &prompt.system {
            self.text("system", system);
        }
        if let Some(template) = &prompt.template {
            self.text("template", template);
        }
        self.value("thinking", prompt.thinking);
    }

    fn generation(&mut self, generation: &Generation) {
        // Named one by one, so that no key is forgotten.
        let Generation {
            max_tokens,
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty,
            penalty_context,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            stop,
            stop_token_ids,
            ignore_eos,
            seed,
            logprobs: _,
        } = generation;
        self.value("max_tokens", max_tokens);
        self.number("temperature", *temperature);
        self.number("top_p", *top_p);
        self.value("top_k", top_k);
        self.number("min_p", *min_p);
        self.number("repetition_penalty", *repetition_penalty);
        self.value("penalty_context", penalty_context);
        self.number("presence_penalty", *presence_penalty);
        self.number("frequency_penalty", *frequency_penalty);
        self.value("logit_bias", biases(logit_bias));
        self.texts("stop", stop);
        let ids: Vec<String> = stop_token_ids.iter().map(u32::to_string).collect();
        self.value("stop_token_ids", format_args!("[{}]", ids.join(", ")));
        self.value("ignore_eos", ignore_eos);
        self.value("seed", seed);
    }

    fn logprobs(&mut self, top_k: Option<u32>) {
        match top_k {
            Some(top_k) => self.value("logprobs", top_k),
            None => self.value("logprobs", false),
        }
    }

    fn audio(&mut self, audio: &Audio) {
        let Audio { long, channels } = audio;
        self.text("long", word(&LONG, long));
        self.text("channels", word(&CHANNELS, channels));
    }

    fn transcription(&mut self, transcription: &Transcription) {
        let Transcription {
            task,
            language,
            timestamps,
            initial_prompt,
            temperatures,
            compression_ratio_threshold,
            logprob_threshold,
            no_speech_threshold,
            suppress_tokens,
            suppress_blank,
            max_initial_timestamp,
        } = transcription;
        self.text("task", word(&TASKS, task));
        if let Some(language) = language {
            self.text("language", language);
        }
        self.value("timestamps", timestamps);
        if let Some(prompt) = initial_prompt {
            self.text("initial_prompt", prompt);
        }
        let temperatures: Vec<String> = temperatures.iter().map(|temperature| format!("{temperature:?}")).collect();
        self.value("temperatures", format_args!("[{}]", temperatures.join(", ")));
        self.threshold("compression_ratio_threshold", *compression_ratio_threshold);
        self.threshold("logprob_threshold", *logprob_threshold);
        self.threshold("no_speech_threshold", *no_speech_threshold);
        let tokens: Vec<String> = suppress_tokens.iter().map(i64::to_string).collect();
        self.value("suppress_tokens", format_args!("[{}]", tokens.join(", ")));
        self.value("suppress_blank", suppress_blank);
        self.number("max_initial_timestamp", *max_initial_timestamp);
    }

    fn threshold(&mut self, key: &str, threshold: Option<f32>) {
        match threshold {
            Some(threshold) => self.number(key, threshold),
            None => self.value(key, false),
        }
    }

    fn row_results(&mut self, results: &Results) {
        self.value("token_ids", results.token_ids);
        self.texts("keep_columns", &results.keep_columns);
    }
}

/// What a job file calls a choice.
fn word<T: PartialEq>(words: &[(&'static str, T)], choice: &T) -> &'static str {
    words.iter().find(|(_, other)| other == choice).map_or("", |(word, _)| word)
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

fn biases(biases: &BTreeMap<u32, f32>) -> String {
    let biases: Vec<String> = biases.iter().map(|(id, bias)| format!("{id} = {bias:?}")).collect();
    if biases.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", biases.join(", ")) }
}

impl Device {
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Gpu => "gpu",
            Self::Cpu => "cpu",
        }
    }
}

impl Dtype {
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
            Self::Float16 => "float16",
        }
    }
}

impl Order {
    pub fn name(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Manifest => "manifest",
        }
    }
}

impl KvBudget {
    /// In the largest unit that says it exactly.
    fn written(self) -> String {
        let Self::Bytes(bytes) = self else { return "auto".to_owned() };
        let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        let exact = units.into_iter().find(|&(_, bits)| bytes.trailing_zeros() >= bits && bytes > 0);
        exact.map_or_else(|| format!("{bytes}B"), |(unit, bits)| format!("{}{unit}", bytes >> bits))
    }
}
