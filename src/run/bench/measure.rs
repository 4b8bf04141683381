//! One run of a workload through scheduler and engine, and what was seen of it.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use super::workload::BenchError;
use crate::{
    engine::{Engine, MlxEngine, memory},
    run::clock::milliseconds,
    schedule::{IN_FLIGHT_MAX, Limits, Plan, Request, Scheduler},
};

/// What one run was seen to do. Its clock starts when all rows are there to be taken.
#[derive(Debug, Default)]
pub struct Seen {
    /// To the last row's end.
    pub wall: Duration,
    /// For each row, from the run's start to its first token.
    pub ttft_ms: Vec<f64>,
    /// Steps that decoded alone, and steps that computed prompt tokens too: from the end of the step before to their own, without
    /// what media of steps behind were encoded meanwhile.
    pub decode_step_ms: Vec<f64>,
    pub prefill_step_ms: Vec<f64>,
    /// Encoding images and recordings; on a GPU waited for.
    pub encode: Duration,
    /// Planning, building and launching steps, without waiting for the device.
    pub host: Duration,
    /// The scheduler's part: plans and commits.
    pub schedule: Duration,
    /// Rows that a step computed, all steps added up.
    pub rows_in_steps: u64,
    /// Prompt tokens that no step computed, as their keys and values were there already.
    pub cached_tokens: u64,
    /// What the scheduler priced at most, and what MLX had at most.
    pub kv_bytes_max: u64,
    pub peak_bytes: u64,
    /// By sequence.
    pub outputs: Vec<Vec<u32>>,
}

impl Seen {
    pub fn steps(&self) -> usize {
        self.decode_step_ms.len() + self.prefill_step_ms.len()
    }

    fn launched(&mut self, plan: &Plan, kv_bytes: u64) {
        self.rows_in_steps += (plan.prefill.len() + plan.decode.len()) as u64;
        let computed: u64 = plan.prefill.iter().map(|prefill| u64::from(prefill.length)).sum();
        let admitted: u64 = plan.admitted.iter().map(|admission| admission.request.prompt.len() as u64).sum();
        // A prompt may take several steps, so this can only be told when all are done.
        self.cached_tokens = self.cached_tokens.wrapping_add(admitted).wrapping_sub(computed);
        self.kv_bytes_max = self.kv_bytes_max.max(kv_bytes);
    }
}

/// Runs `requests` in their order; sequences count from 0. The engine begins without rows and with an empty cache.
pub fn run(engine: &mut MlxEngine, limits: Limits, requests: &[Arc<Request>]) -> Result<Seen> {
    engine.reset()?;
    let encoding = engine.encoding();
    let mut encoded = encoding;
    memory::reset_peak()?;
    let mut seen = Seen { outputs: vec![Vec::new(); requests.len()], ..Seen::default() };
    let mut ttft = vec![None; requests.len()];
    let mut scheduler = Scheduler::new(limits);
    let mut left = requests.iter();
    let mut launched: VecDeque<Plan> = VecDeque::new();
    let started = Instant::now();
    let mut step_ended_at = started;
    loop {
        while scheduler.wants() > 0
            && let Some(request) = left.next()
        {
            let refused = |refused| BenchError::Refused { index: request.sequence.0 as usize, reason: format!("{refused}") };
            scheduler.add(request.clone()).map_err(refused)?;
        }
        let since = Instant::now();
        let plan = scheduler.plan();
        let planned_at = Instant::now();
        let idle = plan.is_empty();
        if !idle {
            let waited = engine.waited();
            engine.launch(&plan)?;
            seen.host += since.elapsed().saturating_sub(engine.waited() - waited);
            seen.schedule += planned_at - since;
            seen.launched(&plan, scheduler.counters().kv_bytes);
            launched.push_back(plan);
        }
        if launched.len() == IN_FLIGHT_MAX || idle {
            let Some(plan) = launched.pop_front() else {
                if scheduler.is_idle() && left.len() == 0 {
                    break;
                }
                continue;
            };
            let sampled = engine.collect()?;
            let now = Instant::now();
            let steps = if plan.prefill.is_empty() { &mut seen.decode_step_ms } else { &mut seen.prefill_step_ms };
            steps.push(milliseconds((now - step_ended_at).saturating_sub(engine.encoding() - encoded)));
            (step_ended_at, encoded) = (now, engine.encoding());
            for token in &sampled {
                let first = ttft.get_mut(token.sequence.0 as usize).context("a token of a row that is not in the workload")?;
                first.get_or_insert(now - started);
            }
            let finished = scheduler.commit(&plan, &sampled)?;
            seen.schedule += now.elapsed();
            for finished in finished {
                let output = seen.outputs.get_mut(finished.sequence.0 as usize).context("a row that is not in the workload")?;
                *output = finished.tokens;
            }
        }
    }
    seen.wall = started.elapsed();
    seen.encode = engine.encoding() - encoding;
    seen.ttft_ms = ttft.into_iter().flatten().map(milliseconds).collect();
    seen.peak_bytes = memory::peak_bytes()?;
    Ok(seen)
}
