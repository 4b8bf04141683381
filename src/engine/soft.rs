//! Soft tokens: what a model's towers make of the images and recordings in its rows' prompts, on their way into a pass.

use mlx_rs::{Array, Dtype, ops};

use super::{
    EngineError,
    cache::{Span, Step},
    ffi,
    models::{Model, Towers},
    price,
};
use crate::schedule::{Admission, Medium, MediumContent, Prefill, Request, SequenceId};

/// What a row's media have become, until its prompt is computed: (index in the prompt of the first, (tokens, hidden)) of each.
pub type SoftPrompt = Vec<(u32, Array)>;

/// Encodes what admitted rows see and hear, so many at once as the budget has counted, but for what they take over of a prefix.
pub fn encode(
    model: &dyn Model,
    admitted: &[Admission],
    dtype: Dtype,
    on_gpu: bool,
) -> Result<Vec<(SequenceId, SoftPrompt)>, EngineError> {
    let mut wanted: Vec<(usize, &Medium)> = Vec::new();
    for (row, Admission { request, reuse, .. }) in admitted.iter().enumerate() {
        let cached_tokens = reuse.map_or(0, |reuse| reuse.tokens);
        wanted.extend(request.media.iter().filter(|medium| medium.end() > cached_tokens).map(|medium| (row, medium)));
    }
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let towers = model.towers().ok_or_else(|| EngineError::Plan {
        step: 0,
        reason: "a row has an image or a recording, and the model neither sees nor hears".into(),
    })?;
    let mut prompts: Vec<SoftPrompt> = vec![Vec::new(); admitted.len()];
    for group in wanted.chunks(price::encoded_at_once(on_gpu)) {
        encode_group(towers, group, dtype, &mut prompts)?;
    }
    let of_rows = admitted.iter().zip(prompts).filter(|(_, prompt)| !prompt.is_empty());
    Ok(of_rows.map(|(admission, prompt)| (admission.request.sequence, prompt)).collect())
}

fn encode_group(
    towers: &dyn Towers,
    group: &[(usize, &Medium)],
    dtype: Dtype,
    prompts: &mut [SoftPrompt],
) -> Result<(), EngineError> {
    let media: Vec<&Medium> = group.iter().map(|(_, medium)| *medium).collect();
    for ((row, medium), soft) in group.iter().zip(towers.encode(&media)?) {
        // Rounded as they will be among the embeddings of tokens.
        prompts[*row].push((medium.first, soft.as_dtype(dtype)?));
    }
    Ok(())
}

/// Of one pass: which of its tokens are soft ones, and what stands there; and what sees each other both ways.
#[derive(Default)]
pub struct SoftPass {
    places: Vec<i32>,
    embeddings: Vec<Array>,
    spans: Vec<Span>,
}

impl SoftPass {
    /// Adds what is soft in a chunk, number `chunk` of the pass, whose tokens begin at `offset` among the pass's.
    pub fn add(
        &mut self,
        chunk: usize,
        offset: u32,
        prefill: &Prefill,
        request: &Request,
        soft: &SoftPrompt,
    ) -> Result<(), EngineError> {
        let (start, end) = (prefill.start, prefill.start + prefill.length);
        for (first, embeddings) in soft {
            let (from, to) = (start.max(*first), end.min(first + embeddings.dim(0) as u32));
            if from >= to {
                continue;
            }
            self.places.extend((offset + from - start..offset + to - start).map(|place| place as i32));
            let width = embeddings.dim(1);
            self.embeddings.push(ffi::slice(embeddings, &[(from - first) as i32, 0], &[(to - first) as i32, width])?);
        }
        if request.whole_spans {
            let images = request.media.iter().filter(|medium| matches!(*medium.content, MediumContent::Image(_)));
            let within = images.filter(|medium| start <= medium.first && medium.end() <= end);
            self.spans.extend(within.map(|medium| Span { chunk, start: medium.first as i32, end: medium.end() as i32 }));
        }
        Ok(())
    }

    /// `step` with what is soft in it.
    pub fn put_into(self, step: Step) -> Result<Step, EngineError> {
        if self.places.is_empty() {
            return Ok(step);
        }
        Ok(step.with_soft_tokens(self.places, ops::concatenate(&self.embeddings, 0)?).with_spans(self.spans))
    }
}
