//! Every small workload under small limits: up to two rows under all of them, more rows under some each, in turn.

use std::sync::Arc;

use mlxbatch::engine::fake::FakeModel;
use mlxbatch::schedule::{FinishReason, Limits, MediaLoad, Request, SequenceId};

use super::{Loop, Run, model, price, request, stopping};

/// A row and what it must give.
struct Row {
    request: Arc<Request>,
    tokens: Vec<u32>,
    reason: FinishReason,
}

fn unlimited() -> Limits {
    Limits {
        rows: 4,
        prefill_chunk: 3,
        prompt_concurrency: 4,
        kv_bytes_max: u64::MAX,
        price: price(2),
        context_length: 8,
        prefix_tokens_min: None,
        span_tokens_max: 0,
    }
}

/// Rows of prompt and `max_tokens` among `lengths`, each with and without an early stop, for one place in a workload.
fn kinds(model: &FakeModel, place: u64, lengths: &[u32]) -> Vec<Row> {
    let mut kinds = Vec::new();
    for &prompt_tokens in lengths {
        for &max_tokens in lengths {
            let whole = request(place, prompt_tokens, max_tokens, &[]);
            for request in [stopping(model, &whole), whole] {
                let alone = Loop::new(&unlimited(), model, 1).run(std::slice::from_ref(&request)).unwrap();
                let [finished] = &alone.finished[..] else { panic!("one row ends once: {alone:?}") };
                assert_eq!((finished.tokens.clone(), finished.reason), model.completion(&request), "{request:?}");
                kinds.push(Row { tokens: finished.tokens.clone(), reason: finished.reason, request });
            }
        }
    }
    kinds
}

/// Without the rows that are planned as another one is: one token is one token, whether it stops or not.
fn kinds_planned_apart(model: &FakeModel, place: u64, lengths: &[u32]) -> Vec<Row> {
    let mut kinds = kinds(model, place, lengths);
    kinds.retain(|row| row.request.max_tokens > 1 || row.reason == FinishReason::Stop);
    kinds
}

/// Every choice of rows, chunk, prompts in a step, budget and depth that differs for `rows`: chunks up to the longest
/// prompt, and two
/// that hold more than it; budgets from what the largest row needs alone to what all need together.
fn every_limit(rows: &[Arc<Request>]) -> impl Iterator<Item = (Limits, usize)> {
    let largest = rows.iter().map(|row| row.reserved_tokens()).max().unwrap_or(0);
    let longest = rows.iter().map(|row| row.prompt.len() as u32).max().unwrap_or(0);
    let count = rows.len() as u32;
    let total: u32 = rows.iter().map(|row| row.prompt.len() as u32).sum();
    let mut chunks: Vec<u32> = (1..=longest + 1).chain([total]).filter(|chunk| *chunk <= total).collect();
    chunks.dedup();
    let batches = (1..=count).flat_map(move |rows| chunks.clone().into_iter().map(move |prefill_chunk| (rows, prefill_chunk)));
    batches.flat_map(move |(rows, prefill_chunk)| {
        // No more rows share a step than it has tokens.
        (1..=rows.min(prefill_chunk)).flat_map(move |prompt_concurrency| {
            let limits = Limits { rows, prefill_chunk, prompt_concurrency, ..unlimited() };
            let least = limits.layout_bytes(1, limits.price.slot_tokens(largest), &MediaLoad::default());
            let most = limits.layout_bytes(rows, limits.price.slot_tokens(largest), &MediaLoad::default());
            let mut budgets = vec![least, least + (most - least) / 3, most - (most - least) / 3, most];
            budgets.dedup();
            budgets.into_iter().flat_map(move |kv_bytes_max| {
                let limits = Limits { kv_bytes_max, ..limits.clone() };
                [(limits.clone(), 1), (limits, 2)]
            })
        })
    })
}

fn check(workload: &[&Row], run: &Run) -> Result<(), String> {
    if run.finished.len() != workload.len() {
        return Err(format!("{} rows ended of {}", run.finished.len(), workload.len()));
    }
    if !(0..).map(SequenceId).zip(&run.admitted).all(|(expected, sequence)| expected == *sequence) {
        return Err(format!("admitted out of order: {:?}", run.admitted));
    }
    for row in workload {
        let mut ends = run.finished.iter().filter(|finished| finished.sequence == row.request.sequence);
        let finished = ends.next().ok_or("a row did not end")?;
        if (&finished.tokens, finished.reason) != (&row.tokens, row.reason) {
            return Err(format!("{finished:?} instead of {:?}, {:?}", row.tokens, row.reason));
        }
    }
    Ok(())
}

/// Runs every workload that has a row of each place; `choose` says under which limits.
fn every_workload(places: &[Vec<Row>], mut choose: impl FnMut(Vec<(Limits, usize)>) -> Vec<(Limits, usize)>) {
    let model = model(&unlimited());
    let kinds = places[0].len();
    let mut runs = 0;
    for mut choice in 0..kinds.pow(places.len() as u32) {
        let mut workload = Vec::new();
        for place in places {
            workload.push(&place[choice % kinds]);
            choice /= kinds;
        }
        let requests: Vec<_> = workload.iter().map(|row| Arc::clone(&row.request)).collect();
        for (limits, depth) in choose(every_limit(&requests).collect()) {
            let run = Loop::new(&limits, &model, depth).run(&requests);
            if let Err(error) = run.and_then(|run| check(&workload, &run)) {
                panic!("{error}\nrows {requests:#?}\nlimits {limits:#?}\ndepth {depth}");
            }
            runs += 1;
        }
    }
    println!("{runs} runs");
}

fn places(count: u64, kinds: impl Fn(&FakeModel, u64, &[u32]) -> Vec<Row>, lengths: &[u32]) -> Vec<Vec<Row>> {
    (0..count).map(|place| kinds(&model(&unlimited()), place, lengths)).collect()
}

/// One limit in seven, each workload's beginning one further on. Neither kinds of rows nor depths come in sevens, so every
/// two kinds
/// in two places still meet every limit.
fn one_in_seven() -> impl FnMut(Vec<(Limits, usize)>) -> Vec<(Limits, usize)> {
    let mut workload = 0;
    move |limits| {
        workload += 1;
        limits.into_iter().skip(workload % 7).step_by(7).collect()
    }
}

#[test]
fn every_workload_of_one_or_two_rows_under_every_limit_gives_the_lone_runs() {
    every_workload(&places(1, kinds, &[1, 2, 3]), |limits| limits);
    every_workload(&places(2, kinds, &[1, 2, 3]), |limits| limits);
}

#[test]
fn every_workload_of_three_rows_under_limits_in_turn_gives_the_lone_runs() {
    every_workload(&places(3, kinds_planned_apart, &[1, 2, 3]), one_in_seven());
}

#[test]
fn every_workload_of_four_short_or_long_rows_under_limits_in_turn_gives_the_lone_runs() {
    every_workload(&places(4, kinds_planned_apart, &[1, 3]), one_in_seven());
}

#[test]
fn every_workload_of_four_rows_under_one_limit_each_gives_the_lone_runs() {
    // A prime, so that the choice goes round all limits whatever their number.
    let mut turn = 0;
    every_workload(&places(4, kinds_planned_apart, &[1, 2, 3]), |limits| {
        turn += 7919;
        vec![limits[turn % limits.len()].clone()]
    });
}
