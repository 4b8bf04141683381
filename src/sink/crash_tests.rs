//! Stops before every step of closing a part, as a kill would, and goes on.

use std::path::Path;

use fs_err as fs;
use serde_json::{Value, json};

use super::{
    FAILED_FILE, Folder, RowState, SUCCESS_FILE, SinkError,
    fixture::*,
    folder::{End, Step},
};
use crate::job::Job;

const ROWS: u64 = 14;

const STEPS: [Step; 9] = [
    Step::WritePart,
    Step::SyncPart,
    Step::AppendFailed,
    Step::AppendFailedHalf,
    Step::RenamePart,
    Step::SyncFolder,
    Step::RenameWidened,
    Step::WriteRecord,
    Step::WriteSuccess,
];

/// Keeps a column whose type widens from integer to float to text, from part to part.
fn widening_job(output: &Path) -> Job {
    let mut job = job(output);
    job.results.keep_columns = vec!["rank".into()];
    job
}

fn widening_rows() -> Vec<super::Row> {
    let with_rank = |number: u64| {
        let mut row = if number % 3 == 2 { heard_row(number) } else { row(number) };
        let rank = match number {
            0..4 => json!(number),
            4..8 => json!(number as f64 + 0.5),
            8 => json!("eight"),
            _ => Value::Null,
        };
        row.columns.insert("rank".into(), rank);
        row
    };
    (0..ROWS).map(with_rank).collect()
}

fn run(job: &Job, stop_before: Option<(Step, u32)>) -> Result<(), SinkError> {
    let (mut folder, done) = Folder::open(job, &provenance(), false)?;
    folder.stop_before = stop_before;
    push_all(&mut folder, &done, &widening_rows())?;
    folder.finish(End::Complete { rows: ROWS }, json!({"rows": ROWS}))?;
    Ok(())
}

fn check_complete(folder: &Path) {
    let mut rows = row_numbers(folder);
    rows.sort_unstable();
    assert_eq!(rows, (0..ROWS).collect::<Vec<_>>());
    let mut failed: Vec<_> = failed_lines(folder).iter().map(|line| line["_row"].as_u64().unwrap()).collect();
    failed.sort_unstable();
    assert_eq!(failed, (0..ROWS).filter(|row| row % 3 == 1).collect::<Vec<_>>());
    for line in failed_lines(folder) {
        assert_eq!(line["prompt"], "say it", "a line is the row's own, not one made up from a part");
    }
    let schemas: Vec<_> = batches(folder).iter().map(|batch| batch.schema()).collect();
    assert!(schemas.iter().all(|schema| schema.field_with_name("rank").unwrap().data_type() == &arrow::datatypes::DataType::Utf8));
    assert!(folder.join(SUCCESS_FILE).exists());
    let leftovers: Vec<_> = names(folder).into_iter().filter(|name| name.ends_with(".tmp")).collect();
    assert!(leftovers.is_empty(), "{leftovers:?}");
}

fn names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_stop_before_any_step_loses_the_part_in_hand_at_most() {
    let mut stops = 0;
    for step in STEPS {
        for part in 0..4 {
            let folder = results_folder();
            let job = widening_job(folder.path());
            match run(&job, Some((step, part))) {
                Err(SinkError::Stopped(stopped)) => assert_eq!(stopped, step),
                Ok(()) => continue, // A step that this part does not have.
                Err(error) => panic!("{error}"),
            }
            stops += 1;
            let closed = part_count(folder.path());
            assert!(closed == part as usize || closed == part as usize + 1 || part == 0, "{step:?} {part}: {closed} parts");
            let (opened, done) = Folder::open(&job, &provenance(), false).unwrap();
            assert_eq!(done.rows, row_numbers(folder.path()).len() as u64);
            assert_eq!(done.rows_failed as usize, failed_lines(folder.path()).len(), "{step:?} {part}");
            drop(opened);
            run(&job, None).unwrap();
            check_complete(folder.path());
        }
    }
    assert_eq!(stops, 6 * 4 + 2 + 2, "six steps in each of four parts, two widening parts, two steps at the end");
}

fn part_count(folder: &Path) -> usize {
    super::part_files(folder).unwrap().len()
}

#[test]
fn a_second_stop_while_recovering_from_the_first_loses_nothing() {
    let steps = [Step::SyncPart, Step::AppendFailedHalf, Step::RenamePart, Step::SyncFolder, Step::RenameWidened];
    for first in steps {
        for second in steps {
            let folder = results_folder();
            let job = widening_job(folder.path());
            let _ = run(&job, Some((first, 1)));
            let _ = run(&job, Some((second, 2)));
            run(&job, None).unwrap();
            check_complete(folder.path());
        }
    }
}

#[test]
fn after_a_failed_close_no_more_rows_are_taken() {
    let folder = results_folder();
    let job = job(folder.path());
    let (mut results, _) = Folder::open(&job, &provenance(), false).unwrap();
    results.stop_before = Some((Step::RenamePart, 0));
    let now = std::time::Instant::now();
    for row in 0..3 {
        results.push(&ok_row(row), now).unwrap();
    }
    assert!(matches!(results.push(&ok_row(3), now), Err(SinkError::Stopped(_))));
    assert!(matches!(results.push(&ok_row(4), now), Err(SinkError::Broken)));
    assert!(matches!(results.finish(End::Failed, Value::Null), Err(SinkError::Broken)));
}

/// Runs completely, lets `change` at the folder, and expects the next run to repair it.
fn check_repaired(change: impl FnOnce(&Path), rows_todo: u64) {
    let folder = results_folder();
    let job = widening_job(folder.path());
    run(&job, None).unwrap();
    change(folder.path());
    let (opened, done) = Folder::open(&job, &provenance(), false).unwrap();
    let todo = widening_rows().iter().filter(|row| done.state(row.row, row.input_hash) == RowState::Todo).count() as u64;
    assert_eq!(todo, rows_todo);
    drop(opened);
    run(&job, None).unwrap();
    run(&job, None).unwrap();
    let mut rows = row_numbers(folder.path());
    rows.sort_unstable();
    assert_eq!(rows, (0..ROWS).collect::<Vec<_>>());
    let mut failed: Vec<_> = failed_lines(folder.path()).iter().map(|line| line["id"].as_str().unwrap().to_owned()).collect();
    failed.sort_unstable();
    assert_eq!(failed, ["id-1", "id-10", "id-13", "id-4", "id-7"]);
}

#[test]
fn a_part_taken_away_has_its_rows_done_again() {
    for part in 0..4 {
        let rows = if part == 3 { 2 } else { 4 };
        check_repaired(|folder| fs::remove_file(folder.join(format!("part-0000{part}.parquet"))).unwrap(), rows);
    }
}

#[test]
fn failed_rows_come_back_when_their_file_was_changed() {
    check_repaired(|folder| fs::remove_file(folder.join(FAILED_FILE)).unwrap(), 0);
    check_repaired(|folder| fs::write(folder.join(FAILED_FILE), "").unwrap(), 0);
    check_repaired(
        |folder| fs::write(folder.join(FAILED_FILE), "{\"id\": \"id-1\", \"_row\": 1}\nnot json\n{\"_row\"").unwrap(),
        0,
    );
    let duplicated = |folder: &Path| {
        let lines = fs::read_to_string(folder.join(FAILED_FILE)).unwrap();
        fs::write(folder.join(FAILED_FILE), lines.clone() + &lines).unwrap();
    };
    check_repaired(duplicated, 0);
}

#[test]
fn leftovers_of_a_kill_are_deleted() {
    let folder = results_folder();
    let job = widening_job(folder.path());
    let _ = run(&job, Some((Step::WritePart, 2)));
    for name in ["part-00002.parquet.tmp", "run.json.tmp", "job.toml.tmp", "failed.jsonl.tmp"] {
        fs::write(folder.path().join(name), "PAR1 torn").unwrap();
    }
    fs::write(folder.path().join("notes.tmp"), "mine").unwrap();
    run(&job, None).unwrap();
    assert!(folder.path().join("notes.tmp").exists(), "someone else's file stays");
    fs::remove_file(folder.path().join("notes.tmp")).unwrap();
    check_complete(folder.path());
}
