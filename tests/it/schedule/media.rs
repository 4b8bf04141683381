//! Images in prompts: what no chunk parts, and what rows may share of them.

use std::sync::Arc;

use mlxbatch::schedule::{EncodePrice, Limits, Price, Refused, Request, Scheduler};

use super::{Loop, Run, model, price, request, seeing, sharing};

fn limits() -> Limits {
    Limits {
        rows: 16,
        prefill_chunk: 16,
        prompt_concurrency: 4,
        kv_bytes_max: 100_000,
        price: price(4),
        context_length: 500,
        prefix_tokens_min: None,
        span_tokens_max: 40,
    }
}

/// Chunks of a lone row: where each starts, and its length.
fn chunks(limits: &Limits, row: &Arc<Request>) -> Vec<(u32, u32)> {
    let mut lap = Loop::new(limits, &model(limits), 1);
    lap.scheduler.add(Arc::clone(row)).unwrap();
    let mut chunks = Vec::new();
    while !lap.scheduler.is_idle() {
        let plan = lap.scheduler.plan();
        chunks.extend(plan.prefill.iter().map(|prefill| (prefill.start, prefill.length)));
        lap.launch(plan).unwrap();
        lap.commit().unwrap();
    }
    chunks
}

#[test]
fn chunks_end_before_an_image_or_behind_it() {
    let row = request(0, 80, 2, &[]);
    assert_eq!(chunks(&limits(), &row), [(0, 16), (16, 16), (32, 16), (48, 16), (64, 16)]);
    let images = [((10, 12), 1), ((22, 3), 2), ((30, 40), 3)];
    let whole = seeing(&row, &images, true);
    assert_eq!(chunks(&limits(), &whole), [(0, 10), (10, 16), (26, 4), (30, 40), (70, 10)]);
    let causal = seeing(&row, &images, false);
    assert_eq!(chunks(&limits(), &causal), chunks(&limits(), &row));
}

#[test]
fn an_image_that_no_chunk_can_hold_is_refused() {
    let mut scheduler = Scheduler::new(limits());
    let refused = scheduler.add(seeing(&request(0, 80, 2, &[]), &[((3, 41), 1)], true)).unwrap_err();
    assert_eq!(refused, Refused::LongMedium { tokens: 41, tokens_max: 40 });
    assert_eq!(
        refused.to_string(),
        "an image has 41 tokens, and 40 are the most that are computed together: raise batching.prefill_chunk to 41 or scale the image \
         down"
    );
    scheduler.add(seeing(&request(0, 80, 2, &[]), &[((3, 41), 1)], false)).unwrap();
    let mut misplaced = (*seeing(&request(1, 80, 2, &[]), &[((3, 41), 1)], false)).clone();
    misplaced.prompt.truncate(40);
    assert_eq!(scheduler.add(Arc::new(misplaced)), Err(Refused::Misplaced { first: 3, tokens: 41, prompt_tokens: 40 }));
}

/// Twelve rows that start with the same 60 tokens, three of every four with the image 1 at 20, where the others have their own.
fn rows(whole_spans: bool) -> Vec<Arc<Request>> {
    let rows = (0..12).map(|sequence| {
        let row = sharing(&request(sequence, 70, 3, &[]), 0, 60);
        seeing(&row, &[((20, 24), if sequence % 4 == 3 { 100 + sequence as u32 } else { 1 })], whole_spans)
    });
    rows.collect()
}

fn run(limits: &Limits, rows: &[Arc<Request>]) -> Run {
    let run = Loop::new(limits, &model(limits), 2).run(rows).unwrap();
    for finished in &run.finished {
        let row = rows.iter().find(|row| row.sequence == finished.sequence).unwrap();
        assert_eq!((finished.tokens.clone(), finished.reason), model(limits).completion(row));
    }
    run
}

#[test]
fn an_image_is_shared_by_what_it_is() {
    let shares = Limits { prefix_tokens_min: Some(8), ..limits() };
    for whole_spans in [true, false] {
        let run = run(&shares, &rows(whole_spans));
        for (sequence, cached_tokens) in run.admitted.iter().zip(&run.cached_tokens) {
            let most = if sequence.0 % 4 == 3 { 20 } else { 60 };
            assert!([0, 20, most].contains(cached_tokens), "{sequence:?} takes over {cached_tokens}");
        }
        let count = |tokens| run.cached_tokens.iter().filter(|cached| **cached == tokens).count();
        assert!(count(60) >= 6 && count(20) >= 2, "{:?}", run.cached_tokens);
    }
}

#[test]
fn rows_that_differ_in_how_they_see_share_what_stands_before_the_image() {
    let shares = Limits { prefix_tokens_min: Some(8), ..limits() };
    let rows: Vec<_> =
        (0..12).map(|sequence| seeing(&sharing(&request(sequence, 70, 3, &[]), 0, 60), &[((20, 24), 1)], sequence == 5)).collect();
    let run = run(&shares, &rows);
    for (sequence, cached_tokens) in run.admitted.iter().zip(&run.cached_tokens) {
        assert!(sequence.0 != 5 || [0, 20].contains(cached_tokens), "{sequence:?} takes over {cached_tokens}");
    }
}

#[test]
fn an_image_is_shared_whole_or_not_at_all() {
    let shares = Limits { prefix_tokens_min: Some(8), ..limits() };
    // The rows end within what would be shared of the image.
    let rows: Vec<_> =
        (0..6).map(|sequence| seeing(&sharing(&request(sequence, 44, 3, &[]), 0, 44), &[((20, 24), 1)], true)).collect();
    let run = run(&shares, &rows);
    assert!(run.cached_tokens.contains(&20) && run.cached_tokens.iter().all(|tokens| [0, 20].contains(tokens)), "{run:?}");
}

/// Twelve rows of 20 tokens, of which the fourth alone has an image; its tower takes 300 bytes, of a budget of 400.
#[test]
fn a_tower_takes_its_scratch_when_a_row_brings_an_image_and_leaves_it_to_rows_otherwise() {
    let mut price = Price { image: EncodePrice { bytes_per_token: 30, ..EncodePrice::default() }, ..price(4) };
    price.prefill_bytes_per_token = 0;
    let limits = Limits { rows: 12, prefill_chunk: 20, prompt_concurrency: 1, kv_bytes_max: 400, price, ..limits() };
    let text: Vec<_> = (0..12).map(|sequence| request(sequence, 12, 9, &[])).collect();
    let mixed = text.iter().map(|row| if row.sequence.0 == 3 { seeing(row, &[((1, 10), 1)], false) } else { row.clone() });
    let slots_of = |rows: &[Arc<Request>]| {
        let mut lap = Loop::new(&limits, &model(&limits), 2);
        rows.iter().for_each(|row| lap.scheduler.add(Arc::clone(row)).unwrap());
        let (mut slots, mut with_image) = (0, 0);
        while !lap.scheduler.is_idle() {
            let before = lap.run.admitted.len();
            lap.turn().unwrap();
            let counters = lap.scheduler.counters();
            slots = slots.max(counters.slots);
            if lap.run.admitted.iter().skip(before).any(|sequence| sequence.0 == 3) {
                with_image = counters.slots;
            }
        }
        (slots, with_image)
    };
    let (slots, _) = slots_of(&text);
    assert!(slots > 8, "{slots} slots of 20 bytes");
    let (slots, with_image) = slots_of(&mixed.collect::<Vec<_>>());
    assert!(slots > 5 && with_image <= 5, "{slots} slots, {with_image} while the image is encoded");
    let alone = Limits { kv_bytes_max: 319, ..limits.clone() };
    let error = alone.check(&seeing(&request(0, 12, 9, &[]), &[((1, 10), 1)], false)).unwrap_err();
    assert!(error.to_string().contains("(its images and recordings alone 300 while they are encoded)"), "{error}");
    assert_eq!(alone.check(&request(0, 12, 9, &[])), Ok(()));
}

#[test]
fn a_budget_without_room_for_any_row_is_refused_at_the_start() {
    let limits = Limits { kv_bytes_max: 4, ..limits() };
    let error = limits.check_budget().unwrap_err();
    assert!(error.to_string().starts_with("batching.kv_budget is 4 bytes, and"), "{error}");
    assert_eq!(Limits { kv_bytes_max: 1000, ..limits }.check_budget(), Ok(()));
}
