//! Rows with recordings: each layout that people have data in, as a small made-up tree. Nothing here is decoded.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use mlxbatch::job::Job;
use mlxbatch::manifest::{self, BadRow, Item, fingerprint};
use mlxbatch::media::MediaSource;
use serde_json::{Value, json};

use crate::manifest::{Data, Row, columns};
use crate::program::{Ended, program};

/// Every good row as `id audio reference`, with the folder taken out of the audio's path.
fn heard(data: &Data) -> Vec<String> {
    let folder = format!("{}/", data.folder.path().display());
    let shown = |row: Row| match row {
        Ok(Item { id, audio, columns, .. }) => {
            let audio = match audio {
                Some(MediaSource::File(path)) => path.to_str().unwrap().replace(&folder, ""),
                Some(MediaSource::Bytes { name, bytes }) => format!("{name}={}", bytes.escape_ascii()),
                None => "-".to_owned(),
            };
            let reference = columns.get("reference").map_or("-".to_owned(), |text| text.as_str().unwrap().to_owned());
            format!("{id} {audio} {reference}")
        }
        Err(bad) => format!("{}! {}", bad.source, bad.error).replace(&folder, ""),
    };
    data.rows().into_iter().map(shown).collect()
}

fn only(data: &Data) -> Item {
    data.rows().remove(0).unwrap()
}

fn hashes(data: &Data) -> Vec<u64> {
    data.rows().into_iter().map(|row| row.map_or_else(|bad| bad.input_hash, |item| item.input_hash)).collect()
}

#[test]
fn paths_in_jsonl_csv_and_tsv_are_relative_to_their_manifest() {
    let data = Data::new(&[
        ("m/a.jsonl", b"{\"id\": 1, \"audio\": \"../clips/1.wav\"}\n{\"id\": 2, \"audio\": {\"path\": \"2.flac\"}}\n{\"id\": 3}\n"),
        ("m/b.csv", b"id,audio,reference\n4,/x/4.mp3,four\n5,,five\n"),
        ("c.tsv", b"id\taudio\n6\tfile:///x/6%206.ogg\n"),
    ]);
    let expected = ["1 m/../clips/1.wav -", "2 m/2.flac -", "3 - -", "4 /x/4.mp3 four", "5 - five", "6 /x/6 6.ogg -"];
    assert_eq!(heard(&data), expected);
    let rows = data.rows();
    assert_eq!(rows[0].as_ref().unwrap().columns["audio"], data.path("m/../clips/1.wav"));
    assert_eq!(rows[1].as_ref().unwrap().columns["audio"], json!({ "path": data.path("m/2.flac") }));
    assert_eq!(rows[4].as_ref().unwrap().columns, columns(json!({"id": "5", "audio": "", "reference": "five"})));
}

#[test]
fn the_audio_column_is_the_one_the_job_names() {
    let mut data = Data::one("a.jsonl", "{\"audio\": 7, \"path\": \"x.wav\"}\n");
    assert!(data.shown()[0].contains("a.jsonl:1! `audio` holds 7, which is no recording"));
    data.input.columns.audio = "path".into();
    assert_eq!(heard(&data), ["a.jsonl:1 x.wav -"]);
    assert_eq!(only(&data).columns["audio"], 7);
}

#[test]
fn recordings_that_are_none_cost_their_own_row_only() {
    let lines = r#"{"id": 1, "audio": "https://example.org/a.wav"}
{"id": 2, "audio": {"bytes": "?"}}
{"id": 3, "audio": {"bytes": "UklGRg==", "path": "x.wav"}}
{"id": 4, "audio": {"bytes": "UklGRg=="}}
{"id": 5, "audio": "absent.wav"}
"#;
    let data = Data::one("a.jsonl", lines);
    let shown = heard(&data);
    assert!(shown[0].contains("a.jsonl:1! `https://example.org/a.wav` in `audio` is a URL, and none is fetched"), "{shown:#?}");
    assert!(shown[1].contains("a.jsonl:2! the bytes in `audio` are not base64: character 1"), "{shown:#?}");
    let here = data.path("a.jsonl:4");
    assert_eq!(shown[2..], ["3 x.wav=RIFF -".to_owned(), format!("4 {here}=RIFF -"), "5 absent.wav -".to_owned()]);
    let bad: Box<BadRow> = data.rows().remove(0).unwrap_err();
    assert_eq!(bad.columns, columns(json!({"id": 1, "audio": "https://example.org/a.wav"})));
}

#[test]
fn a_changed_recording_changes_its_row_and_no_other() {
    let data = Data::new(&[
        ("a.jsonl", b"{\"audio\": \"a.wav\"}\n{\"audio\": \"b.wav\"}\n{\"prompt\": \"x\"}\n"),
        ("a.wav", b"one"),
        ("b.wav", b"two"),
    ])
    .named(&["a.jsonl"]);
    let before = hashes(&data);
    assert_eq!(before, hashes(&data));
    assert_eq!(before[2].to_le_bytes(), blake3::hash(b"{\"prompt\": \"x\"}").as_bytes()[..8], "a row of text as it always was");
    let changed = |what: &str| {
        let now = hashes(&data);
        let same: Vec<bool> = before.iter().zip(&now).map(|(before, now)| before == now).collect();
        assert_eq!(same, [false, true, true], "{what}");
        now[0]
    };
    let file = std::fs::File::options().write(true).open(data.path("a.wav")).unwrap();
    file.set_modified(SystemTime::now() + Duration::from_secs(100)).unwrap();
    let touched = changed("another time");
    std::fs::write(data.path("a.wav"), b"longer").unwrap();
    let longer = changed("another size");
    std::fs::remove_file(data.path("a.wav")).unwrap();
    let absent = changed("gone");
    assert_eq!(HashSet::from([touched, longer, absent, before[0]]).len(), 4);
}

/// As it is downloaded: capital .TXT files at the top, which no glob takes, and a list of transcripts in each chapter.
const LIBRI_SPEECH: &[(&str, &[u8])] = &[
    ("README.TXT", b"..."),
    ("SPEAKERS.TXT", b"..."),
    ("test-clean/1089/134686/1089-134686-0000.flac", b"fLaC"),
    ("test-clean/1089/134686/1089-134686-0001.flac", b"fLaC"),
    ("test-clean/1089/134686/1089-134686.trans.txt", b"1089-134686-0000 HE HOPED\n1089-134686-0001 STUFF IT\n"),
    ("test-clean/1089/134691/1089-134691-0000.flac", b"fLaC"),
    ("test-clean/1089/134691/1089-134691.trans.txt", b"1089-134691-0000 HE COULD\n"),
];

#[test]
fn libri_speech() {
    let data = Data::new(LIBRI_SPEECH).walked(None);
    let expected = [
        "1089-134686-0000 test-clean/1089/134686/1089-134686-0000.flac HE HOPED",
        "1089-134686-0001 test-clean/1089/134686/1089-134686-0001.flac STUFF IT",
        "1089-134691-0000 test-clean/1089/134691/1089-134691-0000.flac HE COULD",
    ];
    assert_eq!(heard(&data), expected);
    let name = "test-clean/1089/134686/1089-134686-0000.flac";
    let item = only(&data);
    assert_eq!(item.source, data.path(name));
    let own = json!({"path": name, "id": "1089-134686-0000", "audio": data.path(name), "reference": "HE HOPED"});
    assert_eq!(item.columns, columns(own));
    for glob in ["**/*.flac", "**/*", "test-clean/**"] {
        assert_eq!(heard(&Data::new(LIBRI_SPEECH).walked(Some(glob)))[..expected.len()].len(), 3, "{glob}");
    }
    let rows = heard(&Data::new(LIBRI_SPEECH).walked(Some("**/*.flac")));
    assert_eq!(rows, expected);
    // Asked for by name, lists are texts like any others.
    Data::new(LIBRI_SPEECH).walked(Some("**/134691/*.txt")).gives(&["test-clean/1089/134691/1089-134691.trans.txt"]);
    assert_eq!(heard(&Data::new(LIBRI_SPEECH).walked(Some("test-clean/**/*"))), expected, "a list is no row beside its recordings");
}

#[test]
fn a_recording_that_its_list_does_not_name_goes_by_its_path() {
    let data =
        Data::new(&[("a/1.flac", b""), ("a/2.wav", b""), ("a/x.trans.txt", b"1 ONE\n"), ("a/2.txt", b"unread")]).walked(None);
    assert_eq!(heard(&data), ["1 a/1.flac ONE", "a/2.wav a/2.wav -"]);
    let twice = Data::new(&[("a/1.flac", b""), ("a/1.trans.txt", b"1 A\n"), ("b/1.flac", b""), ("b/1.trans.txt", b"1 B\n")]);
    let shown = heard(&twice.walked(None));
    assert_eq!(shown[0], "1 a/1.flac A");
    assert!(shown[1].contains("b/1.flac! the id `1` is taken by"), "{shown:?}");
}

#[test]
fn a_broken_list_fails_the_rows_of_its_folder() {
    let data = Data::new(&[("a/1.flac", b""), ("a/x.trans.txt", b"1 \xff\n"), ("b/2.flac", b"")]).walked(None);
    let shown = heard(&data);
    assert!(shown[0].starts_with("a/1.flac! the transcripts in `a/x.trans.txt` cannot be used: byte 3"), "{shown:?}");
    assert_eq!(shown[1], "b/2.flac b/2.flac -");
    assert_eq!(data.rows()[0].as_ref().unwrap_err().columns["audio"], data.path("a/1.flac"));
}

#[test]
fn a_plain_folder_of_recordings_with_texts_beside_some() {
    let data = Data::new(&[
        ("b.MP3", b""),
        ("a/z.wav", b""),
        ("a/z.txt", b" said \n"),
        ("a/deep/y.opus", b""),
        ("a/zz.m4a", b""),
        (".hidden.wav", b""),
        ("notes.md", b""),
    ])
    .walked(None);
    let expected = ["a/deep/y.opus a/deep/y.opus -", "a/z.wav a/z.wav said", "a/zz.m4a a/zz.m4a -", "b.MP3 b.MP3 -"];
    assert_eq!(heard(&data), expected);
    let empty = Data::new(&[("a.wav", b""), ("a.txt", b"\xff")]).walked(None);
    assert!(heard(&empty)[0].contains("a.wav! its transcript `a.txt` cannot be used: byte 1 is not UTF-8"));
}

#[test]
fn a_folder_of_both_must_say_which_are_its_rows() {
    let files: &[(&str, &[u8])] = &[("talk/a.wav", b""), ("talk/a.txt", b"said"), ("essay.txt", b"text")];
    Data::new(files).walked(None).fails_with(
        "holds recordings, such as `talk/a.wav`, and texts that are no transcripts of them, such as `essay.txt`; say which are the \
         rows by `input.glob`, as \"**/*.wav\" or \"**/*.txt\"",
    );
    assert!(fingerprint(&Data::new(files).walked(None).input).is_err());
    assert_eq!(heard(&Data::new(files).walked(Some("**/*.wav"))), ["talk/a.wav talk/a.wav said"]);
    Data::new(files).walked(Some("**/*.txt")).gives(&["essay.txt", "talk/a.txt"]);
    // Both are asked for; a transcript of a recording that is a row is none itself.
    assert_eq!(heard(&Data::new(files).walked(Some("**/*"))), ["essay.txt - -", "talk/a.wav talk/a.wav said"]);
}

#[test]
fn lj_speech() {
    let table = "LJ001-0001|Printing, \"in the only sense|Printing, \"in the only sense\n\
                 LJ001-0002|in 1455|in fourteen fifty-five\r\n\
                 LJ001-0003|only this\n|none|none\nLJ001-0004|a|b|c\nLJ001-0005\n";
    let data = Data::new(&[("lj/metadata.csv", table.as_bytes()), ("lj/wavs/LJ001-0001.wav", b"")]).named(&["lj/metadata.csv"]);
    let shown = heard(&data);
    let good = [
        "LJ001-0001 lj/wavs/LJ001-0001.wav Printing, \"in the only sense",
        "LJ001-0002 lj/wavs/LJ001-0002.wav in fourteen fifty-five",
        "LJ001-0003 lj/wavs/LJ001-0003.wav only this",
    ];
    assert_eq!(shown[..3], good);
    assert!(shown[3].contains("lj/metadata.csv:4! the id in `id` is empty"), "{shown:#?}");
    assert!(shown[4].contains("lj/metadata.csv:5! the row has not the 3 fields of its table, separated by '|'"), "{shown:#?}");
    assert!(shown[5].contains("lj/metadata.csv:6! the row has not the 3 fields"), "{shown:#?}");
    let item = only(&data);
    assert_eq!((item.row, item.source), (0, data.path("lj/metadata.csv:1")));
    // Without its folder of recordings it is a CSV, and not a good one.
    Data::one("metadata.csv", "L1|a|b\n").fails_with("the header of `metadata.csv` cannot be used");
}

#[test]
fn common_voice() {
    let table = "client_id\tpath\tsentence\tup_votes\tlocale\nc1\tcommon_voice_pt_1.mp3\t\"Olá\" disse\t2\tpt\n\
                 c2\tclip2\t\"Só\t0\tsv-SE\nc3\tclip3.mp3\tshort\n";
    let data = Data::new(&[("pt/test.tsv", table.as_bytes()), ("pt/clips/common_voice_pt_1.mp3", b"")]).named(&["pt/test.tsv"]);
    let shown = heard(&data);
    assert_eq!(shown[0], "common_voice_pt_1 pt/clips/common_voice_pt_1.mp3 \"Olá\" disse");
    assert_eq!(shown[1], "clip2 pt/clips/clip2.mp3 \"Só");
    assert!(shown[2].contains("pt/test.tsv:4! the row has not the 5 fields of its table"), "{shown:#?}");
    let languages: Vec<Value> = data.rows().into_iter().flatten().map(|item| item.columns["language"].clone()).collect();
    assert_eq!(languages, ["pt", "sv"]);

    // What a job names itself goes before what is recognised.
    let mut named = data;
    named.input.columns.id = "client_id".into();
    named.input.columns.reference = "up_votes".into();
    named.input.columns.language = "locale".into();
    assert_eq!(named.rows()[1].as_ref().unwrap().columns["locale"], "sv-SE");
    assert_eq!((only(&named).id.as_str(), only(&named).columns.contains_key("language")), ("c1", false));
    assert_eq!(only(&named).columns["up_votes"], "2");

    // Without clips, quotes are a TSV's again.
    Data::one("test.tsv", table).gives(&[
        "test.tsv:2! text follows a closing quote",
        "test.tsv:3! a quote is opened",
        "test.tsv:4! fields",
    ]);
}

/// Writes a manifest of rows as `failed.jsonl` has them, elsewhere, and reads it.
fn fed_back(data: &Data) -> Data {
    let line = |row: Row| {
        let (id, mut columns) = row.map_or_else(|bad| (bad.id, bad.columns), |item| (item.id, item.columns));
        columns.entry("id").or_insert(Value::from(id));
        Value::Object(columns).to_string() + "\n"
    };
    Data::one("out/failed.jsonl", data.rows().into_iter().map(line).collect::<String>())
}

#[test]
fn failed_rows_of_every_layout_can_be_read_again_from_elsewhere() {
    let table = "client_id\tpath\tsentence\tlocale\nc1\t1.mp3\ts\tpt\n";
    let speech = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/parquet/speech.parquet");
    let layouts = [
        Data::new(LIBRI_SPEECH).walked(None),
        Data::new(&[("a.wav", b""), ("b/b.wav", b"")]).walked(None),
        Data::new(&[("a.jsonl", b"{\"audio\": \"a.wav\"}\n{\"audio\": {\"path\": \"b\"}}\n"), ("a.wav", b"")]).named(&["a.jsonl"]),
        Data::new(&[("metadata.csv", b"L1|a|b\n"), ("wavs/L1.wav", b"")]).named(&["metadata.csv"]),
        Data::new(&[("t.tsv", table.as_bytes()), ("clips/1.mp3", b"")]).named(&["t.tsv"]),
        Data::new(&[("s.parquet", &std::fs::read(speech).unwrap())]),
    ];
    for data in layouts {
        let again = fed_back(&data);
        let rows = |data: &Data| -> Vec<(String, Option<MediaSource>, Option<Value>)> {
            data.rows().into_iter().flatten().map(|item| (item.id, item.audio, item.columns.get("reference").cloned())).collect()
        };
        let mut first = rows(&data);
        for (_, audio, _) in &mut first {
            // A recording without a name is called by its row.
            if let Some(MediaSource::File(path)) = audio {
                assert!(path.is_absolute());
            }
        }
        assert!(!first.is_empty());
        assert_eq!(rows(&again), first);
        assert_eq!(rows(&fed_back(&again)), first, "and once more");
    }
}

#[test]
fn the_fingerprint_of_a_folder_covers_recordings_and_transcripts() {
    let data =
        Data::new(&[("a/1.flac", b"one"), ("a/a.trans.txt", b"1 ONE\n"), ("b/2.flac", b"two"), ("b/2.txt", b"x")]).walked(None);
    let mut seen = vec![fingerprint(&data.input).unwrap()];
    assert_eq!(seen[0], fingerprint(&data.input).unwrap());
    let rows = hashes(&data);
    for (name, content) in [("a/1.flac", "longer"), ("a/a.trans.txt", "1 ANOTHER\n"), ("b/2.txt", "another"), ("b/3.wav", "")] {
        std::fs::write(data.path(name), content).unwrap();
        seen.push(fingerprint(&data.input).unwrap());
    }
    assert_eq!(seen.iter().collect::<HashSet<_>>().len(), 5);
    let now = hashes(&data);
    assert!(rows[0] != now[0] && rows[1] != now[1], "a reference that has changed changes its row");
}

#[test]
fn large_recordings_do_not_make_blocks_short() {
    let data = Data::new(&[("a.wav", &vec![0; 20 << 20]), ("b.wav", b""), ("c.wav", b"")]).walked(None);
    assert_eq!(manifest::open(&data.input).unwrap().next_block().unwrap().unwrap().len(), 3);
}

#[cfg(unix)]
#[test]
fn names_and_links_that_are_no_recordings() {
    use std::os::unix::{ffi::OsStrExt, fs::symlink};
    let data = Data::new(&[("a.wav", b"")]).walked(None);
    symlink("nowhere", data.path("b.wav")).unwrap();
    symlink("a.wav", data.path("c.wav")).unwrap();
    std::fs::create_dir(data.path("d.wav")).unwrap();
    std::fs::write(data.folder.path().join(std::ffi::OsStr::from_bytes(b"z\xff.wav")), "z").unwrap();
    data.gives(&["a.wav", "b.wav! it cannot be read", "c.wav", "z\u{fffd}.wav! the name of the file is not UTF-8; rename it"]);
}

/// `jobs/librispeech.toml` over a made-up tree in the place where it looks for the data.
#[test]
fn the_shipped_job_reads_libri_speech() {
    let folder = tempfile::tempdir().unwrap();
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/librispeech.toml");
    let file = folder.path().join("jobs/librispeech.toml");
    std::fs::create_dir(folder.path().join("jobs")).unwrap();
    std::fs::copy(shipped, &file).unwrap();
    let job = Job::read(&file, &[]).unwrap();
    let looked_at: &PathBuf = job.input.folder.as_ref().unwrap();
    let base = looked_at.ancestors().nth(1).unwrap();
    for (name, content) in LIBRI_SPEECH {
        let path = base.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    let items: Vec<Item> = manifest::open(&job.input).unwrap().map(|row| row.unwrap().unwrap()).collect();
    let ids: Vec<&str> = items.iter().map(|item| item.id.as_str()).collect();
    assert_eq!(ids, ["1089-134686-0000", "1089-134686-0001", "1089-134691-0000"]);
    assert!(items.iter().all(|item| matches!(&item.audio, Some(MediaSource::File(path)) if path.is_file())));
    assert_eq!(items[0].columns["reference"], "HE HOPED");
    // A model that hears is another test's: here the program finds the rows.
    let check = program(["check", file.to_str().unwrap(), "--set", "model.path=fake", "--json"]).output().unwrap();
    assert_eq!(Ended::of(check).json()["rows"], 3);
}
