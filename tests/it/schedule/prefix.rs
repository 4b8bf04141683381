//! What rows share at the head: how much of it is computed how often, and where none of it is reused.

use std::sync::Arc;
use std::time::Instant;

use mlxbatch::engine::Engine;
use mlxbatch::engine::fake::Fault;
use mlxbatch::schedule::{Limits, Plan, Price, Release, Request, Reuse, Sampled, Scheduler, SequenceId};

use super::{Loop, Run, model, price, request, sharing};

fn limits() -> Limits {
    Limits {
        rows: 4,
        prefill_chunk: 8,
        prompt_concurrency: 4,
        kv_bytes_max: 10_000,
        price: price(1),
        context_length: 200,
        prefix_tokens_min: Some(8),
        span_tokens_max: 0,
    }
}

/// Rows of `head` tokens that all share and of `own` that none does.
fn rows(count: u64, head: u32, own: u32) -> Vec<Arc<Request>> {
    (0..count).map(|sequence| sharing(&request(sequence, head + own, 3, &[]), 0, head as usize)).collect()
}

/// Runs `rows` at both depths, and compares what each gives with what it must give.
fn run(limits: &Limits, rows: &[Arc<Request>]) -> Run {
    let model = model(limits);
    let [first, _] = [1, 2].map(|depth| {
        let run = Loop::new(limits, &model, depth).run(rows).unwrap();
        assert_eq!(run.finished.len(), rows.len());
        for finished in &run.finished {
            let row = rows.iter().find(|row| row.sequence == finished.sequence).unwrap();
            assert_eq!(finished.tokens, model.completion(row).0);
        }
        run
    });
    first
}

#[test]
fn a_head_is_computed_once_and_what_follows_it_by_each_row() {
    let run = run(&limits(), &rows(40, 30, 5));
    assert_eq!(run.cached_tokens, [30; 40]);
    assert_eq!(run.computed_tokens, 30 + 40 * 5);
    assert!(run.finished.iter().all(|row| row.cached_tokens == 30));
}

#[test]
fn without_reuse_each_row_computes_its_own_prompt() {
    let off = Limits { prefix_tokens_min: None, ..limits() };
    let refused = Limits { price: Price { prefixes: false, ..price(1) }, ..limits() };
    for limits in [off, refused] {
        let run = run(&limits, &rows(40, 30, 5));
        assert_eq!((run.cached_tokens, run.computed_tokens), (vec![0; 40], 40 * 35));
    }
}

#[test]
fn one_row_at_a_time_reuses_from_the_second_on() {
    let run = run(&Limits { rows: 1, ..limits() }, &rows(10, 30, 5));
    // Two rows are known before the first is computed: one that runs, one that waits.
    assert_eq!(run.computed_tokens, 35 + 30 + 9 * 5);
    assert_eq!(run.cached_tokens[1..], [30; 9]);
}

#[test]
fn rows_that_are_the_same_compute_their_last_token() {
    let row = request(0, 30, 3, &[]);
    let same: Vec<_> = (0..10).map(|sequence| Arc::new(Request { sequence: SequenceId(sequence), ..(*row).clone() })).collect();
    let run = run(&limits(), &same);
    assert_eq!((run.cached_tokens, run.computed_tokens), (vec![29; 10], 29 + 10));
}

/// Rows of three families whose first 6 tokens are the same, in turn.
#[test]
fn every_family_of_rows_has_its_own_head() {
    let rows: Vec<_> = (0..60).map(|sequence| sharing(&request(sequence, 25, 3, &[]), sequence as u32 % 3, 20)).collect();
    let run = run(&Limits { rows: 6, ..limits() }, &rows);
    assert_eq!((run.cached_tokens, run.computed_tokens), (vec![20; 60], 3 * 20 + 60 * 5));
}

/// Heads within heads: every row has 30 tokens that all share, every other one 20 more.
#[test]
fn a_longer_head_is_computed_from_a_shorter_one() {
    let rows = (0..40).map(|sequence| {
        let long = sequence % 2 == 1;
        sharing(&request(sequence, 60, 3, &[]), 0, if long { 50 } else { 30 })
    });
    let rows: Vec<_> = rows.collect();
    let all = run(&limits(), &rows);
    let expected: Vec<u32> = (0..40).map(|row| if row % 2 == 1 { 50 } else { 30 }).collect();
    assert_eq!(all.cached_tokens, expected);
    assert_eq!(all.computed_tokens, 30 + 20 + 20 * 10 + 20 * 30, "the longer one is computed from the end of the shorter one on");
}

#[test]
fn a_window_that_has_left_tokens_behind_is_not_cut() {
    // A head of 30 that some rows leave after 20 tokens: where the cache keeps all, and where a window keeps 25.
    let rows = (0..40).map(|sequence| {
        let row = request(sequence, 60, 3, &[]);
        sharing(&row, 0, if sequence > 8 && sequence % 5 == 0 { 20 } else { 30 })
    });
    let rows: Vec<_> = rows.collect();
    let expected: Vec<u32> = (0..40).map(|row| if row > 8 && row % 5 == 0 { 20 } else { 30 }).collect();
    let own = expected.iter().map(|&head| u64::from(60 - head)).sum::<u64>();
    let all = run(&limits(), &rows);
    assert_eq!((all.computed_tokens, &all.cached_tokens), (30 + own, &expected));
    let windowed = Limits { price: Price { windows: vec![(25, 1)], ..price(1) }, ..limits() };
    let run = run(&windowed, &rows);
    assert_eq!((run.computed_tokens, &run.cached_tokens), (30 + 20 + own, &expected), "the shorter head is computed, too");
}

#[test]
fn no_more_prefixes_than_the_limit_are_kept() {
    // Twenty families in turn are more than are kept; those that are not compute their own prompts.
    let rows: Vec<_> = (0..200).map(|sequence| sharing(&request(sequence, 45, 2, &[]), sequence as u32 % 20, 40)).collect();
    let run = run(&Limits { rows: 40, ..limits() }, &rows);
    let reused = run.cached_tokens.iter().filter(|&&tokens| tokens == 40).count();
    assert!((80..200).contains(&reused), "{reused} of 200 rows reuse a head");
}

#[test]
fn a_tight_budget_keeps_its_slots_for_rows() {
    for slots in 1..12u64 {
        let tight = Limits { kv_bytes_max: slots * 37 + 8 + 30, ..limits() };
        let run = run(&tight, &rows(40, 30, 5));
        let expected = if slots < 4 { 0 } else { 30 };
        assert_eq!(run.cached_tokens, [expected; 40], "a budget of {slots} slots");
    }
}

#[test]
fn a_prefix_makes_room_for_a_row_that_needs_all_of_the_budget() {
    let mut rows = rows(20, 30, 5);
    rows.insert(10, request(100, 150, 10, &[]));
    let tight = Limits { kv_bytes_max: 4 * 37 + 30, ..limits() };
    rows.iter_mut()
        .zip(0..)
        .for_each(|(row, sequence)| *row = Arc::new(Request { sequence: SequenceId(sequence), ..(**row).clone() }));
    let run = run(&tight, &rows);
    assert_eq!(run.cached_tokens[9..12], [30, 0, 30]);
    assert_eq!(run.computed_tokens, 2 * 30 + 150 + 20 * 5, "the head is computed again behind it");
}

#[test]
fn a_prefix_that_none_wants_is_given_up_after_a_while() {
    let mut rows = rows(8, 30, 5);
    rows.push(request(8, 40, 150, &[]));
    rows.extend((9..12).map(|sequence| request(sequence, 40, 150, &[])));
    let mut lap = Loop::new(&Limits { rows: 2, ..limits() }, &model(&limits()), 2);
    let mut rows = rows.into_iter();
    let mut prefix_left = None;
    while rows.len() > 0 || !lap.scheduler.is_idle() {
        for row in rows.by_ref().take(lap.scheduler.wants()) {
            lap.scheduler.add(row).unwrap();
        }
        lap.turn().unwrap();
        if lap.run.admitted.len() > 8 && prefix_left.is_none() && lap.engine.owners().all(|(_, owner)| !owner.is_prefix()) {
            prefix_left = Some(lap.run.steps);
        }
    }
    assert!(prefix_left.is_some_and(|step| (256..330).contains(&step)), "given up in step {prefix_left:?}");
}

/// What the engine says to the first plan that takes over a prefix, changed.
fn refusal(windows: Vec<(u32, u64)>, plant: impl FnOnce(&mut Reuse)) -> String {
    let limits = Limits { price: Price { windows, ..price(1) }, ..limits() };
    let mut lap = Loop::new(&limits, &model(&limits), 1);
    for row in rows(4, 30, 5) {
        lap.scheduler.add(row).unwrap();
    }
    loop {
        let mut plan = lap.scheduler.plan();
        let Some(reuse) = plan.admitted.iter_mut().find_map(|admission| admission.reuse.as_mut()) else {
            lap.launch(plan).unwrap();
            lap.commit().unwrap();
            continue;
        };
        plant(reuse);
        return lap.engine.launch(&plan).unwrap_err().to_string();
    }
}

#[test]
fn the_engine_finds_what_is_taken_over_falsely() {
    let refused = |windows, plant: fn(&mut Reuse), fault: Fault| {
        let reason = refusal(windows, plant);
        assert!(reason.ends_with(&fault.to_string()), "{reason} instead of {fault}");
    };
    refused(vec![], |reuse| reuse.slot = 1, Fault::NoPrefix { sequence: 0, slot: 1 });
    let tokens = |tokens| Fault::PrefixTokens { sequence: 0, tokens, prompt_tokens: 35, shared: 30 };
    refused(vec![], |reuse| reuse.tokens = 31, tokens(31));
    refused(vec![], |reuse| reuse.tokens = 0, tokens(0));
    refused(vec![(29, 1)], |reuse| reuse.tokens = 29, Fault::PrefixCut { sequence: 0, tokens: 29, prefix_tokens: 30 });
    refused(vec![], |reuse| reuse.tokens = 29, Fault::PrefillPosition { sequence: 0, start: 30, filled: 29 });
}

#[test]
fn a_prefix_is_not_released_while_a_step_in_flight_copies_it() {
    let limits = limits();
    let mut lap = Loop::new(&limits, &model(&limits), 2);
    for row in rows(4, 30, 5) {
        lap.scheduler.add(row).unwrap();
    }
    loop {
        let plan = lap.scheduler.plan();
        if let Some(reuse) = plan.admitted.iter().find_map(|admission| admission.reuse) {
            lap.launch(plan).unwrap();
            let mut next = lap.scheduler.plan();
            let sequence = lap.engine.owners().find(|(slot, _)| *slot == reuse.slot).unwrap().1;
            next.released.push(Release { sequence, slot: reuse.slot });
            let reason = lap.engine.launch(&next).unwrap_err().to_string();
            assert!(reason.ends_with(&Fault::ReleasedInFlight { sequence: sequence.0, slot: reuse.slot }.to_string()), "{reason}");
            return;
        }
        lap.launch(plan).unwrap();
        lap.commit().unwrap();
    }
}

/// Host time of a step at 256 rows that join and leave, alone and with 1,500 tokens at the head of each. In a release build:
/// `cargo nextest run --release --run-ignored only --no-capture cost_of_a_step`.
#[test]
#[ignore = "a measurement"]
fn cost_of_a_step() {
    let price = Price { slot_tokens_step: 64, full_bytes_per_token: 1000, ..price(1) };
    for (name, head) in [("prompts of 100 to 227 tokens", 0), ("1,500 tokens before them", 1500)] {
        let limits = Limits {
            rows: 256,
            prefill_chunk: 512,
            prompt_concurrency: 8,
            kv_bytes_max: u64::MAX,
            price: price.clone(),
            context_length: 4096,
            prefix_tokens_min: Some(64),
            span_tokens_max: 0,
        };
        let rows: Vec<_> = (0..6000u64)
            .map(|sequence| {
                let own = 100 + (sequence * 37 % 128) as u32;
                sharing(&request(sequence, head + own, 64 + (sequence * 29 % 128) as u32, &[]), 0, head as usize)
            })
            .collect();
        let mut rows = rows.into_iter();
        let mut scheduler = Scheduler::new(limits);
        let (mut adds, mut plans, mut commits, mut joins, mut added) = (Vec::new(), Vec::new(), Vec::new(), 0, 0);
        let mut in_flight: Option<Plan> = None;
        while rows.len() > 0 {
            let start = Instant::now();
            let before = added;
            for row in rows.by_ref().take(scheduler.wants()) {
                scheduler.add(row).unwrap();
                added += 1;
            }
            let (of_adds, start) = (start.elapsed(), Instant::now());
            let plan = scheduler.plan();
            let of_plan = start.elapsed();
            let full = scheduler.counters().running > 240;
            if full {
                adds.push((of_adds, added - before));
                plans.push(of_plan);
                joins += plan.admitted.len();
            }
            let Some(oldest) = in_flight.replace(plan) else { continue };
            let sampled: Vec<_> = (oldest.prefill.iter().filter(|chunk| chunk.last).map(|chunk| chunk.sequence))
                .chain(oldest.decode.iter().map(|decode| decode.sequence))
                .map(|sequence| Sampled { sequence, token: 7, stop_string: false })
                .collect();
            let start = Instant::now();
            scheduler.commit(&oldest, &sampled).unwrap();
            if full {
                commits.push(start.elapsed());
            }
        }
        let micros = |times: &mut Vec<std::time::Duration>| {
            times.sort_unstable();
            let at = |part: usize| times[times.len() * part / 100].as_nanos() as f64 / 1000.0;
            format!("{:.1} µs (95th percentile {:.1})", at(50), at(95))
        };
        let count = plans.len();
        let per_add = adds.iter().map(|(time, _)| time.as_nanos()).sum::<u128>() as f64
            / adds.iter().map(|(_, rows)| *rows).sum::<usize>().max(1) as f64;
        println!(
            "256 rows, {name}: plan {}, commit {}; {count} steps, {:.2} joins a step; add {:.2} µs a row",
            micros(&mut plans),
            micros(&mut commits),
            joins as f64 / count as f64,
            per_add / 1000.0
        );
    }
}
