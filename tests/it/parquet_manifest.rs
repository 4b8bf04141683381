//! Parquet manifests through the public interface: what pyarrow writes, and what is damaged.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, BinaryArray, DurationSecondArray, FixedSizeBinaryArray, Int64Array, LargeStringArray, ListArray, RecordBatch,
    StringArray, StructArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Schema};
use mlxbatch::manifest::{self, Item, ROW_BYTES_MAX, fingerprint};
use mlxbatch::media::MediaSource;
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use serde_json::{Value, json};

use crate::manifest::{Data, columns};

fn speech() -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/parquet/speech.parquet")).unwrap()
}

/// Writes a file of these columns, its row groups of so many rows.
fn written(columns: Vec<(&str, ArrayRef)>, group_rows: usize) -> Vec<u8> {
    let fields: Vec<Field> = columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
    let schema = Arc::new(Schema::new(fields));
    let batch = RecordBatch::try_new(schema.clone(), columns.into_iter().map(|(_, array)| array).collect()).unwrap();
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(group_rows)).build();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, schema, Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    bytes
}

fn recordings(bytes: Vec<Option<&[u8]>>) -> ArrayRef {
    let field = Arc::new(Field::new("bytes", DataType::Binary, true));
    Arc::new(StructArray::from(vec![(field, Arc::new(BinaryArray::from_opt_vec(bytes)) as ArrayRef)]))
}

fn texts(texts: &[&str]) -> ArrayRef {
    Arc::new(StringArray::from(texts.to_vec()))
}

fn items(data: &Data) -> Vec<Item> {
    data.rows().into_iter().map(Result::unwrap).collect()
}

/// `fixtures/parquet/speech.parquet`, by pyarrow.
#[test]
fn a_data_set_as_hugging_face_exports_it() {
    let data = Data::one("sub/speech.parquet", speech());
    data.gives(&["a", "b", "c", "d", "e"]);
    let items = items(&data);
    let file = data.path("sub/speech.parquet");
    let bytes = |name: &str, bytes: &[u8]| Some(MediaSource::Bytes { name: name.into(), bytes: bytes.into() });
    let audio: Vec<_> = items.iter().map(|item| item.audio.clone()).collect();
    let three = Some(MediaSource::File(data.path("sub/clips/three.wav").into()));
    assert_eq!(audio, [bytes("one.wav", b"RIFF one"), bytes("row 2", b"RIFF two"), three, None, bytes("five.wav", b"")]);
    let sources: Vec<&String> = items.iter().map(|item| &item.source).collect();
    assert_eq!(sources, (1..=5).map(|row| format!("{file}:row {row}")).collect::<Vec<_>>().iter().collect::<Vec<_>>());
    assert_eq!(items.iter().map(|item| item.row).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);

    let place = |path: Value, row: u64| json!({"path": path, "parquet": file, "row": row});
    let audio = [place(json!("one.wav"), 1), place(json!(null), 2), json!(data.path("sub/clips/three.wav")), json!(null)];
    for (item, audio) in items.iter().zip(audio) {
        assert_eq!(item.columns["audio"], audio);
    }
    let first = json!({
        "id": "a", "audio": items[0].columns["audio"], "text": "one", "speaker": "x", "duration": 1.5, "rate": 16000,
        "words": ["one"], "scores": [1, 2], "meta": {"book": {"n": 1, "title": "t"}}, "taken": "2024-01-02T03:04:05.678901Z",
        "local": "2024-01-02T03:04:05", "day": "2024-02-29", "price": "1.50", "tags": {"k": 1}, "nothing": null,
    });
    assert_eq!(items[0].columns, columns(first));
    assert_eq!(items[0].columns.keys().next().unwrap(), "id");
    let third = &items[2].columns;
    assert_eq!([&third["text"], &third["duration"], &third["words"]], [&json!("drei — três"), &json!(0.1), &json!(null)]);
    let last = &items[4].columns;
    assert_eq!([&last["duration"], &last["words"]], [&json!("inf"), &json!(["a", "b"])]);
    assert_eq!(items[1].columns["duration"], Value::Null, "not a number is missing");
}

#[test]
fn ids_derived_from_rows_and_told_when_taken() {
    let ids = texts(&["x", "y", "x"]);
    Data::one("a.parquet", written(vec![("prompt", ids.clone())], 2)).gives(&[
        "a.parquet:row 1",
        "a.parquet:row 2",
        "a.parquet:row 3",
    ]);
    let bytes = written(vec![("id", ids)], 2);
    let data = Data::new(&[("a.parquet", &bytes), ("b.jsonl", b"{\"id\": \"y\"}\n")]);
    data.gives(&["x", "y", "a.parquet:row 3! the id `x` is taken by a.parquet:row 1", "b.jsonl:1! taken by a.parquet:row 2"]);
    let numbers = written(vec![("id", Arc::new(Int64Array::from(vec![Some(7), None])))], 9);
    Data::one("a.parquet", numbers).gives(&["7", "a.parquet:row 2! the id in `id` is null"]);
}

#[test]
fn recordings_by_path_alone_or_as_plain_bytes() {
    let data = Data::one("a.parquet", written(vec![("audio", texts(&["a.wav", "", "http://x/a.wav"]))], 9));
    let rows = data.rows();
    assert_eq!(rows[0].as_ref().unwrap().audio, Some(MediaSource::File(data.path("a.wav").into())));
    assert_eq!(rows[1].as_ref().unwrap().audio, None);
    assert!(rows[2].as_ref().unwrap_err().error.contains("is a URL"));
    let plain: ArrayRef = Arc::new(BinaryArray::from(vec![b"one".as_slice()]));
    let named = Data::one("a.parquet", written(vec![("audio", plain)], 9));
    assert_eq!(items(&named)[0].audio, Some(MediaSource::Bytes { name: "row 1".into(), bytes: b"one".as_slice().into() }));
}

#[test]
fn a_row_s_hash_covers_its_columns_and_its_recording() {
    let hash = |prompt: &str, bytes: &[u8]| {
        let file = written(vec![("prompt", texts(&[prompt])), ("audio", recordings(vec![Some(bytes)]))], 9);
        items(&Data::one("a.parquet", file))[0].input_hash
    };
    assert_eq!(hash("a", b"x"), hash("a", b"x"), "wherever it lies");
    assert_ne!(hash("a", b"x"), hash("b", b"x"));
    assert_ne!(hash("a", b"x"), hash("a", b"y"));
}

#[test]
fn columns_that_cannot_be_read_are_named() {
    let check = |name: &str, array: ArrayRef, expected: &str| {
        Data::one("a.parquet", written(vec![("id", texts(&["1"])), (name, array)], 9)).fails_with(expected);
    };
    let plain: ArrayRef = Arc::new(BinaryArray::from(vec![b"x".as_slice()]));
    check(
        "blob",
        plain.clone(),
        "`a.parquet` cannot be used: its column `blob` has the type Binary, which is not read; leave the column out",
    );
    check("speech", recordings(vec![None]), "recordings are named by `input.columns.audio`");
    let fixed: ArrayRef = Arc::new(FixedSizeBinaryArray::try_from_iter([b"x"].into_iter()).unwrap());
    check("uuid", fixed, "its column `uuid` has the type FixedSizeBinary(1)");
    let field = Arc::new(Field::new("item", DataType::Binary, true));
    let list = ListArray::new(field, OffsetBuffer::new(vec![0, 1].into()), plain, None);
    check("blobs", Arc::new(list), "its column `blobs` has the type Binary within List(");
    Data::one("a.parquet", written(vec![("id", texts(&["1"])), ("id", texts(&["2"]))], 9)).fails_with("two columns are named `id`");
    // What Arrow alone knows is what Parquet stores.
    let duration: ArrayRef = Arc::new(DurationSecondArray::from(vec![5]));
    let read = Data::one("a.parquet", written(vec![("took", duration)], 9));
    assert_eq!(items(&read)[0].columns["took"], 5);
}

#[test]
fn a_file_without_rows_is_none_alone_and_no_fault_among_others() {
    let none = written(vec![("id", texts(&[]))], 9);
    Data::one("a.parquet", &none).fails_with("holds no rows");
    Data::new(&[("a.parquet", &none), ("b.jsonl", b"{\"id\": 1}"), ("c.parquet", &written(vec![("id", texts(&["2"]))], 9))])
        .gives(&["1", "2"]);
}

#[test]
fn a_row_of_more_than_the_limit_fails_alone() {
    let long = "x".repeat(ROW_BYTES_MAX);
    let large: ArrayRef = Arc::new(LargeStringArray::from(vec!["a", &long, "c"]));
    let data = Data::one("a.parquet", written(vec![("prompt", large)], 9));
    data.gives(&["a.parquet:row 1", "a.parquet:row 2! the limit is 16777216; split the row", "a.parquet:row 3"]);
}

#[test]
fn a_row_with_a_value_that_cannot_be_read_keeps_the_id_that_stands_behind_it() {
    // Of milliseconds, which Parquet stores as they are: seconds would become these, and run over.
    let when: ArrayRef = Arc::new(arrow::array::TimestampMillisecondArray::from(vec![0, i64::MAX]));
    let data = Data::one("a.parquet", written(vec![("when", when), ("id", texts(&["first", "second"]))], 9));
    data.gives(&["first", "a.parquet:row 2! column `when`: "]);
    assert_eq!(data.rows().remove(1).unwrap_err().id, "second");
}

#[test]
fn blocks_end_by_the_bytes_of_their_recordings() {
    let one = vec![7_u8; 1 << 20];
    // One large group, whose rows are small but for a few.
    let bytes: Vec<Option<&[u8]>> =
        (0..3000).map(|row| if (1000..1020).contains(&row) { Some(one.as_slice()) } else { None }).collect();
    let data = Data::one("a.parquet", written(vec![("audio", recordings(bytes))], 3000));
    let mut manifest = manifest::open(&data.input).unwrap();
    let (mut rows, mut blocks) = (0, 0);
    while let Some(block) = manifest.next_block().unwrap() {
        let held = block.iter().flatten().filter(|item| item.audio.is_some()).count();
        assert!((1..=1024).contains(&block.len()) && held <= 4, "{held} recordings in {} rows", block.len());
        for item in block.into_iter().flatten() {
            assert_eq!((item.row, item.id), (rows, format!("a.parquet:row {}", rows + 1)));
            rows += 1;
        }
        blocks += 1;
    }
    assert_eq!(rows, 3000);
    assert!((8..=40).contains(&blocks), "{blocks} blocks");
}

#[test]
fn the_fingerprint_changes_with_the_content() {
    let print = |prompt: &str| {
        let bytes = written(vec![("prompt", texts(&[prompt]))], 9);
        fingerprint(&Data::one("a.parquet", bytes).input).unwrap()
    };
    assert_eq!(print("a"), print("a"));
    assert_ne!(print("a"), print("b"));
}

/// Read in full where it is small, by samples where recordings make it large.
#[test]
fn the_fingerprint_of_a_large_file_is_over_its_size_its_end_and_samples() {
    use std::io::{Seek, SeekFrom, Write};
    let data = Data::one("a.parquet", b"");
    let file = File::options().write(true).open(data.path("a.parquet")).unwrap();
    let print = |bytes: u64, at: u64| {
        let mut file = &file;
        file.set_len(0).unwrap();
        file.set_len(bytes).unwrap();
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(b"x").unwrap();
        fingerprint(&data.input).unwrap()
    };
    let large = 300 << 20;
    let prints = [print(large, 0), print(large, large - 1), print(large + 1, 0), print(large, large / 1024 * 500 + 5)];
    assert_eq!(prints.iter().collect::<std::collections::HashSet<_>>().len(), 4);
    assert_eq!(print(large, 0), prints[0]);
}

/// Every outcome is rows or a sentence; the file is read to its end or named as damaged.
fn survives(bytes: &[u8], what: &str) -> bool {
    let data = Data::one("a.parquet", bytes);
    let read = manifest::open(&data.input).and_then(|rows| rows.collect::<Result<Vec<_>, _>>());
    if let Err(error) = &read {
        assert!(error.to_string().contains("a.parquet"), "{what}: {error}");
    }
    read.is_ok()
}

#[test]
fn files_cut_off_anywhere_are_named_as_damaged() {
    let whole = speech();
    let cut: Vec<usize> = (0..whole.len()).step_by(97).chain(whole.len() - 12..whole.len()).collect();
    for length in cut {
        let data = Data::one("a.parquet", &whole[..length]);
        data.fails_with("`a.parquet` cannot be used: it is damaged or cut off; copy it again, or write it again");
    }
}

#[test]
fn flipped_bytes_never_panic() {
    let whole = speech();
    let mut good = 0;
    let places: Vec<usize> = (0..whole.len()).step_by(7).collect();
    for &at in &places {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        good += usize::from(survives(&bytes, &format!("byte {at}")));
    }
    // Most of the file is metadata that nothing reads; where a page or the schema is hit, it shows.
    assert!(good > 0 && good < places.len(), "{good} of {}", places.len());
}
