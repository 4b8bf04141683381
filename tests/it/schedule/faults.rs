//! Plans that are correct but for one false claim: the fake engine's shadow cache must find each, and say which.
//!
//! Every case runs a real schedule and changes the first plan that the fault can be planted in.

use std::sync::Arc;

use mlxbatch::engine::Engine;
use mlxbatch::engine::EngineError;
use mlxbatch::engine::fake::{FakeEngine, FakeModel, Fault};
use mlxbatch::schedule::{Admission, Decode, Limits, Plan, Prefill, Release, Request, SequenceId};

use super::{Loop, model, price, request, stopping};

/// Two slots' worth of budget for rows of up to 8 tokens, chunks of 2.
fn limits() -> Limits {
    Limits {
        rows: 4,
        prefill_chunk: 2,
        prompt_concurrency: 2,
        kv_bytes_max: 2 * 8 + 2,
        price: price(4),
        context_length: 16,
        prefix_tokens_min: None,
        span_tokens_max: 0,
    }
}

/// Prompts of one to three chunks; row 1 stops early. Its prompt shares step 2 with the last chunk of row 0.
fn rows() -> Vec<Arc<Request>> {
    let row = |sequence, prompt_tokens, max_tokens| request(sequence, prompt_tokens, max_tokens, &[]);
    vec![row(0, 5, 4), stopping(&model(&limits()), &row(1, 1, 3)), row(2, 2, 3), row(3, 4, 4)]
}

/// Runs the rows up to the first plan that `plant` changes, and returns what the engine says to that one.
///
/// `plant` gets the plan to change, the plans launched before it, and the rows that wait; it returns false to leave a plan alone.
fn refusal(depth: usize, mut plant: impl FnMut(&mut Plan, &[Plan], &[Arc<Request>]) -> bool) -> (u64, String) {
    let rows = rows();
    let mut lap = Loop::new(&limits(), &model(&limits()), depth);
    let mut earlier: Vec<Plan> = Vec::new();
    for row in &rows {
        lap.scheduler.add(Arc::clone(row)).unwrap();
    }
    while !lap.scheduler.is_idle() {
        let plan = lap.scheduler.plan();
        if plan.is_empty() {
            lap.commit().unwrap();
            continue;
        }
        let waiting = rows.len() - lap.scheduler.counters().waiting as usize;
        let mut changed = plan.clone();
        if plant(&mut changed, &earlier, &rows[waiting..]) {
            assert_ne!(changed, plan, "the fault changes the plan");
            return match lap.engine.launch(&changed) {
                Err(EngineError::Plan { step, reason }) => (step, reason),
                other => panic!("not refused, but {other:?}: {changed:#?}"),
            };
        }
        lap.engine.launch(&plan).unwrap();
        earlier.push(plan.clone());
        lap.launched.push_back(plan);
        if lap.launched.len() == depth {
            lap.commit().unwrap();
        }
    }
    panic!("the schedule has no plan that the fault can be planted in")
}

fn check(fault: Fault, plant: impl FnMut(&mut Plan, &[Plan], &[Arc<Request>]) -> bool + Copy) {
    for depth in [1, 2] {
        let (_, reason) = refusal(depth, plant);
        assert_eq!(reason, fault.to_string(), "depth {depth}");
    }
}

fn admit(plan: &mut Plan, request: &Arc<Request>, slot: u32) {
    let reserved_tokens = request.reserved_tokens();
    plan.admitted.push(Admission { request: Arc::clone(request), slot, reserved_tokens, reuse: None });
    let length = 2.min(request.prompt.len() as u32);
    plan.prefill.push(Prefill {
        sequence: request.sequence,
        slot,
        start: 0,
        length,
        last: length as usize == request.prompt.len(),
    });
}

/// The plan's first decode, if it has one.
fn decode(plan: &mut Plan, change: impl FnOnce(&mut Decode)) -> bool {
    plan.decode.first_mut().map(change).is_some()
}

fn prefill(plan: &mut Plan, which: impl Fn(&Prefill) -> bool, change: impl FnOnce(&mut Prefill)) -> bool {
    plan.prefill.iter_mut().find(|prefill| which(prefill)).map(change).is_some()
}

#[test]
fn one_row_too_many_is_over_the_budget() {
    check(Fault::OverBudget { slots: 3, slot_tokens: 8, bytes: 26, kv_bytes_max: 18 }, |plan, _, waiting| {
        plan.prefill.clear();
        admit(plan, &waiting[0], 2);
        plan.slots = 3;
        true
    });
}

#[test]
fn one_row_too_many_does_not_fit_the_layout_that_was_priced() {
    check(Fault::OutsideLayout { sequence: 2, slot: 2, slots: 2 }, |plan, _, waiting| {
        admit(plan, &waiting[0], 2);
        plan.slots == 2
    });
}

#[test]
fn a_layout_must_hold_every_row() {
    check(Fault::SlotTooShort { sequence: 0, reserved_tokens: 8, slot_tokens: 4 }, |plan, _, _| {
        plan.slot_tokens = 4;
        true
    });
    check(Fault::OutsideLayout { sequence: 1, slot: 1, slots: 1 }, |plan, earlier, _| {
        plan.slots = 1;
        earlier.last().is_some_and(|earlier| earlier.slots == 2)
    });
    check(Fault::TooManySlots { slots: 5, slots_max: 4 }, |plan, _, _| {
        plan.slots = 5;
        true
    });
}

#[test]
fn a_reservation_is_exact() {
    check(Fault::Reservation { sequence: 0, stated: 7, expected: 8 }, |plan, _, _| {
        plan.admitted[0].reserved_tokens -= 1;
        true
    });
}

#[test]
fn a_slot_is_not_used_again_too_early() {
    check(Fault::SlotTaken { sequence: 2, slot: 1, owner: 1 }, |plan, _, waiting| {
        let Some(row) = waiting.first().filter(|_| plan.slots == 2) else { return false };
        admit(plan, row, 1);
        true
    });
    // The release of a correct plan left out.
    check(Fault::SlotTaken { sequence: 2, slot: 1, owner: 1 }, |plan, _, _| {
        let reused = plan.released.iter().position(|release| plan.admitted.iter().any(|admission| admission.slot == release.slot));
        reused.map(|index| plan.released.remove(index)).is_some()
    });
}

#[test]
fn a_slot_is_not_released_while_a_step_in_flight_computes_it() {
    let (step, reason) = refusal(2, |plan, earlier, _| {
        let Some(decode) = earlier.last().and_then(|earlier| earlier.decode.last().copied()) else { return false };
        plan.decode.retain(|other| other.sequence != decode.sequence);
        plan.released.push(Release { sequence: decode.sequence, slot: decode.slot });
        true
    });
    assert_eq!(reason, Fault::ReleasedInFlight { sequence: 1, slot: 1 }.to_string());
    assert_eq!(step, 4, "row 1 is first decoded in step 3, after its prompt in step 2");
}

#[test]
fn a_slot_is_released_by_its_owner_and_once() {
    check(Fault::NotInSlot { sequence: 0, slot: 1 }, |plan, earlier, _| {
        plan.released.push(Release { sequence: SequenceId(0), slot: 1 });
        earlier.last().is_some_and(|earlier| earlier.slots == 2)
    });
    check(Fault::NotInSlot { sequence: 1, slot: 1 }, |plan, _, _| {
        let twice = plan.released.first().copied();
        plan.released.extend(twice);
        twice.is_some()
    });
    check(Fault::NotInSlot { sequence: 0, slot: 4_000_000_000 }, |plan, _, _| {
        plan.released.push(Release { sequence: SequenceId(0), slot: 4_000_000_000 });
        true
    });
}

#[test]
fn a_chunk_is_not_skipped() {
    check(Fault::PrefillPosition { sequence: 0, start: 4, filled: 2 }, |plan, _, _| {
        let second = |prefill: &Prefill| prefill.start == 2 && !prefill.last;
        prefill(plan, second, |prefill| *prefill = Prefill { start: 4, length: 1, last: true, ..*prefill })
    });
    // The chunk left out: the row's next one does not follow.
    let (step, reason) = refusal_after_a_gap();
    assert_eq!((step, reason), (3, Fault::PrefillPosition { sequence: 0, start: 4, filled: 2 }.to_string()));
}

/// Launches a schedule whose second chunk of row 0 is taken out of its plan, which then only decodes row 1.
fn refusal_after_a_gap() -> (u64, String) {
    let mut lap = Loop::new(&limits(), &model(&limits()), 2);
    for row in [request(1, 1, 4, &[]), request(0, 5, 4, &[])] {
        lap.scheduler.add(row).unwrap();
    }
    loop {
        let plan = lap.scheduler.plan();
        let mut changed = plan.clone();
        changed.prefill.retain(|prefill| (prefill.sequence, prefill.start) != (SequenceId(0), 2));
        match lap.engine.launch(&changed) {
            Ok(()) => lap.launched.push_back(plan),
            Err(EngineError::Plan { step, reason }) => return (step, reason),
            Err(error) => panic!("{error}"),
        }
        if lap.launched.len() == 2 {
            lap.commit().unwrap();
        }
    }
}

#[test]
fn a_chunk_is_computed_once_and_is_of_the_prompt() {
    check(Fault::PrefillPosition { sequence: 0, start: 0, filled: 2 }, |plan, _, _| {
        prefill(plan, |prefill| prefill.start == 2, |prefill| prefill.start = 0)
    });
    check(Fault::Twice { sequence: 0 }, |plan, _, _| {
        let [chunk] = plan.prefill[..] else { return false };
        plan.prefill.push(Prefill { start: chunk.start + chunk.length, ..chunk });
        true
    });
    check(Fault::PrefillRange { sequence: 0, start: 4, end: 6, prompt_tokens: 5 }, |plan, _, _| {
        prefill(plan, |prefill| prefill.start == 4 && prefill.last, |prefill| prefill.length = 2)
    });
    check(Fault::PrefillRange { sequence: 0, start: 0, end: 0, prompt_tokens: 5 }, |plan, _, _| {
        prefill(plan, |_| true, |prefill| prefill.length = 0)
    });
    check(Fault::PrefillChunk { sequence: 0, start: 0, end: 1, prefill_chunk: 2 }, |plan, _, _| {
        prefill(plan, |_| true, |prefill| prefill.length = 1)
    });
    check(Fault::PrefillChunk { sequence: 0, start: 0, end: 3, prefill_chunk: 2 }, |plan, _, _| {
        prefill(plan, |_| true, |prefill| prefill.length = 3)
    });
}

#[test]
fn the_last_chunk_is_the_last() {
    check(Fault::PrefillLast { sequence: 0, stated: false, end: 5, prompt_tokens: 5 }, |plan, _, _| {
        prefill(plan, |prefill| prefill.last, |prefill| prefill.last = false)
    });
    check(Fault::PrefillLast { sequence: 0, stated: true, end: 2, prompt_tokens: 5 }, |plan, _, _| {
        prefill(plan, |prefill| !prefill.last, |prefill| prefill.last = true)
    });
}

#[test]
fn no_more_rows_are_in_prefill_than_may_be() {
    check(Fault::TooManyInPrefill { rows: 3, prompt_concurrency: 2 }, |plan, _, _| {
        let second = plan.prefill.get(1).copied();
        plan.prefill.extend(second);
        second.is_some()
    });
}

#[test]
fn no_more_prompt_tokens_are_in_a_step_than_may_be() {
    // The next row's prompt beside a full chunk: each is right by itself.
    check(Fault::PrefillTokens { tokens: 3, prefill_chunk: 2 }, |plan, earlier, waiting| {
        admit(plan, &waiting[0], 1);
        plan.slots = 2;
        !earlier.is_empty()
    });
}

#[test]
fn a_row_is_not_decoded_before_its_last_chunk() {
    check(Fault::DecodeBeforePrompt { sequence: 0, filled: 2, prompt_tokens: 5 }, |plan, _, _| {
        let second = plan.prefill.iter().position(|prefill| prefill.start == 2 && !prefill.last);
        let Some(chunk) = second.map(|index| plan.prefill.remove(index)) else { return false };
        plan.decode.push(Decode { sequence: chunk.sequence, slot: chunk.slot, position: 2 });
        true
    });
}

#[test]
fn positions_are_filled_in_order() {
    check(Fault::DecodePosition { sequence: 0, position: 6, filled: 5 }, |plan, _, _| decode(plan, |decode| decode.position += 1));
    check(Fault::DecodePosition { sequence: 0, position: 4, filled: 5 }, |plan, _, _| decode(plan, |decode| decode.position -= 1));
    check(Fault::Twice { sequence: 0 }, |plan, _, _| {
        let twice = plan.decode.first().map(|decode| Decode { position: decode.position + 1, ..*decode });
        plan.decode.extend(twice);
        twice.is_some()
    });
}

#[test]
fn a_row_is_computed_in_its_own_slot() {
    check(Fault::NotInSlot { sequence: 0, slot: 1 }, |plan, _, _| decode(plan, |decode| decode.slot = 1));
    check(Fault::NotInSlot { sequence: 7, slot: 0 }, |plan, _, _| decode(plan, |decode| decode.sequence = SequenceId(7)));
    check(Fault::NotInSlot { sequence: 0, slot: 9 }, |plan, _, _| prefill(plan, |_| true, |prefill| prefill.slot = 9));
}

#[test]
fn a_row_is_not_decoded_past_its_end() {
    // Row 1 stops at its token before last: it is still in its slot when that token has been collected.
    check(Fault::Ended { sequence: 1 }, |plan, earlier, _| {
        let released = plan.released.iter().position(|release| release.sequence == SequenceId(1));
        let Some(release) = released.map(|index| plan.released.remove(index)) else { return false };
        let decoded =
            earlier.iter().flat_map(|earlier| &earlier.decode).filter(|decode| decode.sequence == release.sequence).count();
        plan.admitted.retain(|admission| admission.slot != release.slot);
        plan.prefill.retain(|prefill| prefill.slot != release.slot);
        plan.decode.push(Decode { sequence: release.sequence, slot: release.slot, position: 1 + decoded as u32 });
        true
    });
    let (_, reason) = refusal(2, |plan, earlier, _| {
        // Row 0 has 5 + 4 - 1 positions, and the last of them is filled by the step in flight.
        let last = earlier.last().and_then(|earlier| earlier.decode.iter().find(|decode| decode.position == 7 && decode.slot == 0));
        last.map(|decode| plan.decode.push(Decode { position: 8, ..*decode })).is_some()
    });
    assert_eq!(reason, Fault::BeyondReservation { sequence: 0, position: 8, reserved_tokens: 8 }.to_string());
}

#[test]
fn steps_are_launched_in_order_and_two_ahead_at_most() {
    check(Fault::Step { expected: 3 }, |plan, _, _| {
        let changed = plan.step == 3;
        plan.step += u64::from(changed);
        changed
    });
    check(Fault::Empty, |plan, _, _| {
        plan.prefill.clear();
        plan.decode.clear();
        true
    });
    let row = request(0, 6, 1, &[]);
    let mut engine = FakeEngine::new(FakeModel::bytes());
    let admission = Admission { slot: 0, reserved_tokens: row.reserved_tokens(), request: row, reuse: None };
    let chunk = |step| Plan {
        step,
        slots: 1,
        slot_tokens: 8,
        prefill: vec![Prefill { sequence: SequenceId(0), slot: 0, start: 2 * step as u32, length: 2, last: step == 2 }],
        ..Plan::default()
    };
    assert!(engine.collect().unwrap_err().to_string().ends_with(&Fault::NothingInFlight.to_string()));
    engine.launch(&Plan { admitted: vec![admission], ..chunk(0) }).unwrap();
    engine.launch(&chunk(1)).unwrap();
    let error = engine.launch(&chunk(2)).unwrap_err().to_string();
    assert_eq!(error, format!("step 2 of the plan is not possible: {}", Fault::TooManyInFlight));
    engine.collect().unwrap();
    engine.launch(&chunk(2)).unwrap();
}

#[test]
fn a_row_with_nothing_to_compute_is_not_admitted() {
    check(Fault::EmptyRequest { sequence: 0 }, |plan, _, _| {
        plan.admitted[0].request = request(0, 0, 4, &[]);
        true
    });
}
