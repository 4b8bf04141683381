//! Larger workloads, drawn at random: rows of many lengths that come as they please, rows cancelled on their way, text that a stop
//! string ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mlxbatch::engine::Engine;
use mlxbatch::engine::fake::FakeModel;
use mlxbatch::schedule::{EncodePrice, FinishReason, Limits, MediaLoad, Price, Request, SequenceId};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::{Loop, model, request, seeing, sharing, work};

#[derive(Debug, Clone)]
struct Job {
    limits: Limits,
    rows: Vec<Arc<Request>>,
    depth: usize,
    stop_one_in: u32,
    /// Rows brought before each step, in turn.
    brought: Vec<usize>,
    /// (before which step, which row).
    cancelled: Vec<(u64, u64)>,
    /// A text ends where a stop string does, here after a token divisible by it.
    stop_string: u32,
}

fn job() -> impl Strategy<Value = Job> {
    let price = (
        1..4u64,
        vec((1..32u32, 1..4u64), 0..3),
        0..8u64,
        1..9u32,
        0..3u64,
        0..2u64,
        (0..5u32, 0..6u64),
        ((0..60u64, 0..6u64, 0..2u64, 1..4u32), 0..2u64),
        0..9u8,
    )
        .prop_map(
            |(
                full_bytes_per_token,
                windows,
                fixed_bytes_per_slot,
                slot_tokens_step,
                prefill_bytes_per_token,
                prefill_bytes_per_pair,
                (padding_tokens, decode_bytes_per_slot),
                ((window_bytes, bytes_per_token, attention_bytes_per_pair, media_at_once), soft_bytes_per_token),
                prefixes,
            )| Price {
                full_bytes_per_token,
                windows,
                fixed_bytes_per_slot,
                slot_tokens_step,
                prefill_bytes_per_token,
                prefill_bytes_per_pair,
                padding_tokens,
                decode_bytes_per_slot,
                window_bytes,
                image: EncodePrice { bytes_per_token, attention_bytes_per_token: 1, attention_bytes_per_pair },
                audio: EncodePrice::default(),
                media_at_once,
                soft_bytes_per_token,
                prefixes: prefixes > 0,
            },
        );
    let prefix_tokens_min = select(vec![None, Some(0), Some(1), Some(3), Some(8)]);
    let span_tokens_max = select(vec![0, 4, 14]);
    let limits = (1..20u32, 1..12u32, 1..6u32, 100..4000u64, price, 30..60u32, prefix_tokens_min, span_tokens_max).prop_map(
        |(rows, prefill_chunk, prompt_concurrency, kv_bytes_max, price, context_length, prefix_tokens_min, span_tokens_max)| {
            Limits {
                rows,
                prefill_chunk,
                prompt_concurrency,
                kv_bytes_max,
                price,
                context_length,
                prefix_tokens_min,
                span_tokens_max,
            }
        },
    );
    // Images that the heads of a family share or do not, one of them longer than any chunk.
    let media = (vec((select(vec![(1, 3), (5, 4), (9, 14), (25, 2)]), 0..2u32), 0..3), any::<bool>());
    let row = (1..40u32, 1..24u32, 0..12u32, select(vec![0, 9, 20, 40]), media);
    let rows = (vec(row, 1..48), 1..12u32, any::<bool>()).prop_map(|(rows, families, sees)| {
        let numbered = rows.into_iter().zip(0..);
        let rows = numbered.map(|((prompt_tokens, max_tokens, family, head, (media, whole_spans)), sequence)| {
            let row = sharing(&request(sequence, prompt_tokens, max_tokens, &[1000]), family % families, head);
            if sees { seeing(&row, &media, whole_spans) } else { row }
        });
        rows.collect()
    });
    let ends = (select(vec![0, 3, 10, 40]), vec((0..60u64, 0..48u64), 0..6), select(vec![7, 50, 1_000_000]));
    (limits, rows, 1..3usize, vec(0..6usize, 1..8), ends).prop_map(
        |(limits, rows, depth, brought, (stop_one_in, cancelled, stop_string))| Job {
            limits,
            rows,
            depth,
            stop_one_in,
            brought,
            cancelled,
            stop_string,
        },
    )
}

/// What a row must give: its own completion, cut after the first token that ends a stop string.
fn expected(model: &FakeModel, row: &Request, stop_string: u32) -> (Vec<u32>, FinishReason) {
    let (mut tokens, mut reason) = model.completion(row);
    if let Some(end) = tokens.iter().position(|token| token.is_multiple_of(stop_string)) {
        tokens.truncate(end + 1);
        reason = FinishReason::Stop;
    }
    (tokens, reason)
}

fn check(job: &Job) -> Result<(), TestCaseError> {
    let model = FakeModel { stop_one_in: job.stop_one_in, alphabet: (1..1000).collect(), ..model(&job.limits) };
    let mut lap = Loop::new(&job.limits, &model, job.depth);
    let (mut accepted, mut cancelled) = (Vec::new(), BTreeSet::new());
    let mut rows = job.rows.iter();
    let mut brought = job.brought.iter().cycle();
    let mut turn = 0;
    while rows.len() > 0 || !lap.scheduler.is_idle() {
        // An idle scheduler is always brought a row, so that rows that come slowly still come.
        let bring = brought.next().map_or(1, |&bring| bring.max(usize::from(lap.scheduler.is_idle()))).min(lap.scheduler.wants());
        for row in rows.by_ref().take(bring) {
            let media = MediaLoad::of(row, &job.limits.price);
            let alone = job.limits.layout_bytes(1, job.limits.price.slot_tokens(row.reserved_tokens()), &media);
            let span_tokens = row.media.iter().filter(|_| row.whole_spans).map(|medium| medium.tokens).max().unwrap_or(0);
            let fits = alone <= job.limits.kv_bytes_max
                && row.reserved_tokens() < job.limits.context_length
                && span_tokens <= job.limits.step_tokens_max();
            prop_assert_eq!(lap.scheduler.add(Arc::clone(row)).is_ok(), fits);
            if fits {
                accepted.push(Arc::clone(row));
            }
        }
        for &(_, row) in job.cancelled.iter().filter(|&&(step, _)| step == turn) {
            let known = accepted.iter().any(|request| request.sequence == SequenceId(row));
            let ended = lap.run.finished.iter().any(|finished| finished.sequence == SequenceId(row));
            let cancels = lap.scheduler.cancel(SequenceId(row));
            prop_assert_eq!(cancels, known && !ended && !cancelled.contains(&row), "row {}", row);
            cancelled.extend(cancels.then_some(row));
            lap.in_prefill.retain(|sequence| *sequence != SequenceId(row));
        }
        if !lap.scheduler.is_idle() {
            turn_with_stop_strings(&mut lap, job.stop_string)?;
        }
        turn += 1;
        // A row may have a prefix computed before it that is as long as its prompt.
        prop_assert!(turn <= 4 * work(&job.rows, &job.limits) + 4 * job.rows.len() as u64, "not done after {} turns", turn);
    }
    // A budget that takes no row at all does not take that one either.
    if !accepted.is_empty() {
        lap.finds_slots_free().map_err(TestCaseError::fail)?;
    }

    let admitted: Vec<_> = lap.run.admitted.clone();
    prop_assert!(admitted.is_sorted_by(|before, after| before < after), "admitted out of order: {:?}", admitted);
    let shares = job.limits.prefix_tokens_min.filter(|_| job.limits.price.prefixes);
    let cached: BTreeMap<_, _> = admitted.iter().zip(&lap.run.cached_tokens).collect();
    for &&tokens in cached.values() {
        prop_assert!(tokens == 0 || shares.is_some_and(|least| tokens >= least), "{} tokens are copied", tokens);
    }
    let mut finished = BTreeMap::new();
    for row in &lap.run.finished {
        prop_assert_eq!(row.cached_tokens, *cached[&row.sequence]);
        prop_assert!(finished.insert(row.sequence.0, (row.tokens.clone(), row.reason)).is_none(), "{:?} ended twice", row.sequence);
    }
    let remain = accepted.iter().filter(|row| !cancelled.contains(&row.sequence.0));
    let expected: BTreeMap<_, _> = remain.map(|row| (row.sequence.0, expected(&model, row, job.stop_string))).collect();
    prop_assert_eq!(finished, expected);
    Ok(())
}

fn turn_with_stop_strings(lap: &mut Loop, stop_string: u32) -> Result<(), TestCaseError> {
    let plan = lap.scheduler.plan();
    let idle = plan.is_empty();
    if !idle {
        lap.launch(plan).map_err(TestCaseError::fail)?;
    }
    if idle || lap.launched.len() == lap.depth {
        let Some(plan) = lap.launched.pop_front() else { return Err(TestCaseError::fail("nothing to compute, and not idle")) };
        let mut sampled = lap.engine.collect().map_err(|error| TestCaseError::fail(error.to_string()))?;
        sampled.iter_mut().for_each(|sampled| sampled.stop_string = sampled.token.is_multiple_of(stop_string));
        let finished = lap.scheduler.commit(&plan, &sampled).map_err(|error| TestCaseError::fail(error.to_string()))?;
        lap.run.finished.extend(finished);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_row_gives_its_own_completion_whatever_the_schedule(job in job()) {
        check(&job)?;
    }
}
