//! Manifests through the public interface: a named test for each hostile input.

use std::collections::HashSet;
use std::path::Path;

use mlxbatch::job::{Columns, Input};
use mlxbatch::manifest::{self, BadRow, Item, ROW_BYTES_MAX, fingerprint};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

pub type Row = Result<Item, Box<BadRow>>;

/// A folder of files and the input that names some of them.
pub struct Data {
    pub folder: TempDir,
    pub input: Input,
}

impl Data {
    pub fn new(files: &[(&str, &[u8])]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        let columns = Columns {
            id: "id".into(),
            prompt: "prompt".into(),
            messages: "messages".into(),
            reference: "reference".into(),
            audio: "audio".into(),
            image: "image".into(),
            language: "language".into(),
        };
        let manifest = files.iter().map(|(name, _)| folder.path().join(name).to_str().unwrap().to_owned()).collect();
        Self { folder, input: Input { manifest, folder: None, glob: None, columns } }
    }

    pub fn one(name: &str, content: impl AsRef<[u8]>) -> Self {
        Self::new(&[(name, content.as_ref())])
    }

    pub fn named(mut self, patterns: &[&str]) -> Self {
        self.input.manifest = patterns.iter().map(|pattern| self.path(pattern)).collect();
        self
    }

    pub fn walked(mut self, glob: Option<&str>) -> Self {
        self.input.manifest.clear();
        self.input.folder = Some(self.folder.path().to_path_buf());
        self.input.glob = glob.map(str::to_owned);
        self
    }

    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    pub fn rows(&self) -> Vec<Row> {
        manifest::open(&self.input).unwrap().map(Result::unwrap).collect()
    }

    /// Each row as `id`, or `source! error` of a bad one, sources without the folder.
    pub fn shown(&self) -> Vec<String> {
        let folder = format!("{}/", self.folder.path().display());
        let shown = |row: Row| match row {
            Ok(item) => item.id,
            Err(bad) => format!("{}! {}", bad.source, bad.error).replace(&folder, ""),
        };
        self.rows().into_iter().map(shown).collect()
    }

    pub fn fails(&self) -> String {
        let error = manifest::open(&self.input).err().expect("opened");
        error.to_string().replace(&format!("{}/", self.folder.path().display()), "")
    }

    #[track_caller]
    pub fn fails_with(&self, expected: &str) {
        let error = self.fails();
        assert!(error.contains(expected), "gave     {error}\nexpected {expected}");
    }

    /// `expected` are whole ids of good rows, and for bad rows parts of what [`Data::shown`] gives, beginning with the source.
    #[track_caller]
    pub fn gives(&self, expected: &[&str]) {
        let shown = self.shown();
        let same = |(shown, expected): (&String, &&str)| match expected.split_once("! ") {
            None => shown == expected,
            Some((source, error)) => shown.starts_with(&format!("{source}! ")) && shown.contains(error),
        };
        assert!(shown.len() == expected.len() && shown.iter().zip(expected).all(same), "{shown:#?}\nexpected {expected:#?}");
    }
}

pub fn columns(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

#[test]
fn jsonl_rows_keep_their_columns_and_say_where_they_stand() {
    let data = Data::one("rows.jsonl", "{\"id\": 7, \"prompt\": \"hi\", \"extra\": [1]}\n\n{\"prompt\": \"x\"}\n");
    let rows = data.rows();
    let first = rows[0].as_ref().unwrap();
    assert_eq!(first.columns, columns(json!({"id": 7, "prompt": "hi", "extra": [1]})));
    assert_eq!((first.row, first.id.as_str(), first.source.as_str()), (0, "7", format!("{}:1", data.path("rows.jsonl")).as_str()));
    let hash = blake3::hash(b"{\"id\": 7, \"prompt\": \"hi\", \"extra\": [1]}");
    assert_eq!(first.input_hash, u64::from_le_bytes(hash.as_bytes()[..8].try_into().unwrap()));
    let second = rows[1].as_ref().unwrap();
    assert_eq!((second.row, second.id.as_str()), (1, "rows.jsonl:3"));
    assert_eq!(rows.len(), 2);
}

#[test]
fn every_extension_that_is_read() {
    for name in ["a.jsonl", "a.ndjson", "a.json", "a.JSONL"] {
        Data::one(name, "{\"id\": 1}\n{\"id\": 2}").gives(&["1", "2"]);
    }
    Data::one("a.csv", "id,prompt\n1,\"x, y\"\n").gives(&["1"]);
    Data::one("a.tsv", "id\tprompt\n1\tx, \"y\"\n2\t\"a\tb\"\n").gives(&["1", "2"]);
}

#[test]
fn byte_order_marks_and_crlf() {
    let bom = "\u{feff}";
    Data::one("a.jsonl", format!("{bom}{{\"id\": \"a\"}}\r\n{bom}{{\"id\": \"b\"}}\r\n")).gives(&["a", "b"]);
    Data::one("a.csv", format!("{bom}id,prompt\r\na,x\r\nb,y\r\n")).gives(&["a", "b"]);
    Data::one("a.csv", format!("{bom}\"id\",prompt\r\na,\"x\r\ny\"\r\n")).gives(&["a"]);
    let with = Data::one("a.jsonl", "{\"id\": \"a\"}\r\n").rows();
    let without = Data::one("a.jsonl", "{\"id\": \"a\"}\n").rows();
    assert_eq!(with[0].as_ref().unwrap().input_hash, without[0].as_ref().unwrap().input_hash);
}

#[test]
fn blank_lines_are_no_rows_and_line_numbers_stay_right() {
    Data::one("a.jsonl", "\n\r\n  \t\n{\"id\": 1}\n\n[]\n\n").gives(&["1", "a.jsonl:6! an array, not an object"]);
    Data::one("a.csv", "\n\nid,prompt\n\n1,x\n\r\n2\n").gives(&["1", "a.csv:7! 1 of 2 fields"]);
}

#[test]
fn quoted_newlines_in_csv_leave_later_line_numbers_right() {
    let data = Data::one("a.csv", "id,prompt\n1,\"one\ntwo\r\n\nfour\"\n2\n3,\"a\n\"\n4,x,y\n");
    data.gives(&["1", "a.csv:6! 1 of 2 fields", "3", "a.csv:9! more than 2 fields"]);
    assert_eq!(data.rows()[0].as_ref().unwrap().columns["prompt"], "one\ntwo\r\n\nfour");
}

#[test]
fn rows_of_the_wrong_width_keep_what_was_read() {
    let rows = Data::one("a.csv", "id,prompt,extra\n1,x\n").rows();
    assert_eq!(rows[0].as_ref().unwrap_err().columns, columns(json!({"id": "1", "prompt": "x"})));
}

#[test]
fn an_unclosed_quote_does_not_swallow_the_rows_after_it() {
    let rows = 200_000;
    let content = format!("id,prompt\nbad,\"x\n{}", (0..rows).map(|row| format!("{row},some text\n")).collect::<String>());
    let shown = Data::one("a.csv", content).shown();
    assert_eq!(shown.len(), rows + 1);
    assert!(
        shown[0].starts_with("a.csv:2! a quote is opened and not closed before the end of the file; close the quote"),
        "{}",
        shown[0]
    );
    assert_eq!(shown[1..], (0..rows).map(|row| row.to_string()).collect::<Vec<_>>());
}

#[test]
fn a_quote_inside_a_field_that_is_not_doubled() {
    Data::one("a.csv", "id,prompt\n1,\"say \"hi\" to\"\n2,5\" pipe\n3,\"say \"\"hi\"\"\"\n").gives(&[
        "a.csv:2! text follows a closing quote; close the quote",
        "2",
        "3",
    ]);
}

#[test]
fn duplicate_ids_name_where_the_first_stands() {
    let data =
        Data::new(&[("a.jsonl", b"{\"id\": 1}\n{\"id\": \"x\"}\n{\"id\": \"1\", \"prompt\": \"p\"}\n"), ("b.csv", b"id\nx\ny\n")]);
    data.gives(&["1", "x", "a.jsonl:3! the id `1` is taken by a.jsonl:1", "b.csv:2! the id `x` is taken by a.jsonl:2", "y"]);
    let bad = data.rows().remove(2).unwrap_err();
    assert_eq!((bad.id.as_str(), bad.row, bad.columns), ("a.jsonl:3", 2, columns(json!({"id": "1", "prompt": "p"}))));
}

#[test]
fn ids_stay_unique_even_when_a_row_is_named_as_another_is_derived() {
    let data = Data::one("a.jsonl", "{\"id\": \"a.jsonl:3\"}\n{\"id\": \"a.jsonl:3#2\"}\n{}\n[]\n{\"id\": \"a.jsonl:4\"}\n");
    let ids: Vec<String> = data.rows().into_iter().map(|row| row.map_or_else(|bad| bad.id, |item| item.id)).collect();
    assert_eq!(ids, ["a.jsonl:3", "a.jsonl:3#2", "a.jsonl:3#3", "a.jsonl:4", "a.jsonl:5"]);
    data.gives(&[
        "a.jsonl:3",
        "a.jsonl:3#2",
        "a.jsonl:3! the id `a.jsonl:3` is taken by a.jsonl:1",
        "a.jsonl:4! an array",
        "a.jsonl:5! the id `a.jsonl:4` is taken by a.jsonl:4",
    ]);
}

#[test]
fn a_bad_row_keeps_its_own_id() {
    let id = |name: &str, content: &str| {
        let ids = |row: Row| row.map_or_else(|bad| format!("!{}", bad.id), |item| item.id);
        Data::one(name, content).rows().into_iter().map(ids).collect::<Vec<String>>()
    };
    let url = r#""image": "https://x.org/a.png""#;
    assert_eq!(
        id("a.jsonl", &format!("{{\"id\": \"cat\", {url}}}\n{{\"id\": 7, {url}}}\n{{{url}}}\n")),
        ["!cat", "!7", "!a.jsonl:3"]
    );
    assert_eq!(id("a.csv", "id,image\ncat,s3://b/a.png\n"), ["!cat"]);
    // An id that is none, and one that another row has, before or after.
    assert_eq!(id("a.jsonl", &format!("{{\"id\": \"\", {url}}}\n")), ["!a.jsonl:1"]);
    let twice = format!("{{\"id\": \"a\"}}\n{{\"id\": \"a\", {url}}}\n{{\"id\": \"b\", {url}}}\n{{\"id\": \"b\"}}\n");
    assert_eq!(id("a.jsonl", &twice), ["a", "!a.jsonl:2", "!b", "!a.jsonl:4"]);
    // With a field too few nothing is certain of which is the id.
    assert_eq!(id("a.csv", "n,id,prompt\nx,y\n"), ["!a.csv:2"]);
}

#[test]
fn a_folder_of_images_needs_no_glob_unless_texts_lie_beside() {
    let rows = |files: &[&str], glob: Option<&str>| {
        let files: Vec<(&str, &[u8])> = files.iter().map(|name| (*name, b"x".as_slice())).collect();
        let data = Data::new(&files).walked(glob);
        let manifest = manifest::open(&data.input).map_err(|error| error.to_string())?;
        let shown = |item: Item| format!("{}{}", item.id, if item.images.is_empty() { "" } else { " seen" });
        Ok::<_, String>(manifest.map(|row| shown(row.unwrap().unwrap())).collect::<Vec<String>>())
    };
    assert_eq!(rows(&["b/c.PNG", "a.jpeg", "d.heic", "notes.md"], None).unwrap(), ["a.jpeg seen", "b/c.PNG seen", "d.heic seen"]);
    let error = rows(&["a.jpg", "README.txt"], None).unwrap_err();
    let expected = "holds images, such as `a.jpg`, and texts beside them, such as `README.txt`; say which are the rows by \
                    `input.glob`, as \"**/*.jpg\" or \"**/*.txt\"";
    assert!(error.ends_with(expected), "{error}");
    assert_eq!(rows(&["a.jpg", "README.txt"], Some("**/*.jpg")).unwrap(), ["a.jpg seen"]);
    assert_eq!(rows(&["a.jpg", "b.txt"], Some("**/*.{jpg,txt}")).unwrap(), ["a.jpg seen", "b.txt"]);
}

#[test]
fn ids_that_are_none() {
    let content = format!(
        "{{\"id\": \"\"}}\n{{\"id\": null}}\n{{\"id\": {{}}}}\n{{\"id\": true}}\n{{\"id\": \"{}\"}}\n{{\"id\": \"\\u0000\"}}\n",
        "x".repeat(1025)
    );
    Data::one("a.jsonl", content).gives(&[
        "a.jsonl:1! is empty",
        "a.jsonl:2! is null",
        "a.jsonl:3! neither text nor a number",
        "a.jsonl:4! neither text nor a number",
        "a.jsonl:5! has 1025 bytes, the limit is 1024",
        "a.jsonl:6! control character",
    ]);
    Data::one("a.csv", "id,prompt\n,x\n").gives(&["a.csv:2! is empty"]);
}

#[test]
fn the_id_column_is_the_one_the_job_names() {
    let mut data = Data::one("a.jsonl", "{\"id\": 1, \"utt\": \"u1\"}\n{\"id\": 1}\n");
    data.input.columns.id = "utt".into();
    data.gives(&["u1", "a.jsonl:2"]);
}

#[test]
fn invalid_utf_8_costs_its_own_line_only() {
    Data::one("a.jsonl", b"{\"id\": 1}\n{\"id\": \"\xff\"}\n{\"id\": 3}\n").gives(&[
        "1",
        "a.jsonl:2! byte 9 is not UTF-8 (0xff)",
        "3",
    ]);
    Data::one("a.csv", b"id,prompt\n1,x\n2,\xc3\n3,z\n").gives(&["1", "a.csv:3! byte 3 is not UTF-8 (0xc3)", "3"]);
}

#[test]
fn a_line_of_50_mb_is_passed_over() {
    let mut content = b"{\"id\": 1}\n{\"id\": 2, \"prompt\": \"".to_vec();
    content.resize(content.len() + 50_000_000, b'x');
    let bytes = content.len() - 10 + 2;
    content.extend_from_slice(b"\"}\n{\"id\": 3}\n");
    let data = Data::one("a.jsonl", &content);
    data.gives(&["1", &format!("a.jsonl:2! the line has {bytes} bytes, the limit for a row is 16777216; split the row"), "3"]);
    let hash = blake3::hash(&content[10..10 + bytes]);
    assert_eq!(data.rows()[1].as_ref().unwrap_err().input_hash.to_le_bytes(), hash.as_bytes()[..8]);
    let csv = format!(
        "id,prompt\n1,{}\n2,\"{}\n3,z\n",
        "x".repeat(ROW_BYTES_MAX),
        format!("{}\n", "y".repeat(4095)).repeat(ROW_BYTES_MAX / 4096)
    );
    let shown = Data::one("a.csv", csv).shown();
    assert!(shown[0].contains(&format!("a.csv:2! the line has {} bytes", ROW_BYTES_MAX + 2)), "{}", shown[0]);
    assert!(shown[1].contains("a.csv:3! a quote is opened and not closed within 16777216 bytes"), "{}", shown[1]);
    assert_eq!(shown.last().unwrap(), "3");
    assert_eq!(shown.len(), 2 + ROW_BYTES_MAX / 4096);
}

#[test]
fn a_row_of_exactly_the_limit_is_a_row() {
    let frame = "{\"id\": 1, \"prompt\": \"\"}";
    let content = format!("{{\"id\": 1, \"prompt\": \"{}\"}}\r\n{{\"id\": 2}}", "x".repeat(ROW_BYTES_MAX - frame.len()));
    Data::one("a.jsonl", content).gives(&["1", "2"]);
}

#[test]
fn json_that_is_no_object_or_not_json() {
    Data::one(
        "a.jsonl",
        "[1]\n1\n\"x\"\nnull\n{\"id\": 1} {\"id\": 2}\n{\"id\": 1\n{\"a\": 1, \"a\": 2}\n{\"n\": 1e999}\n{'a': 1}\n{}\n",
    )
    .gives(&[
        "a.jsonl:1! an array",
        "a.jsonl:2! a number",
        "a.jsonl:3! a string",
        "a.jsonl:4! null",
        "a.jsonl:5! text follows the object",
        "a.jsonl:6! ends too early",
        "a.jsonl:7! the key `a` stands twice",
        "a.jsonl:8! larger than a float64",
        "a.jsonl:9! not JSON",
        "a.jsonl:10",
    ]);
}

#[test]
fn depth_bombs_and_nul_bytes() {
    let bomb = format!("{{\"a\": {}\n{{\"id\": 2}}\n{{\"id\": \"\0\"}}\n\0\0\0\n", "[".repeat(3_000_000));
    Data::one("a.jsonl", bomb).gives(&[
        "a.jsonl:1! nested deeper than 127 levels",
        "2",
        "a.jsonl:3! raw control character",
        "a.jsonl:4! not JSON",
    ]);
    Data::one("a.csv", "id,prompt\n1,a\0b\n2,x\n").gives(&["a.csv:2! byte 4 is NUL", "2"]);
}

#[test]
fn utf_16_is_a_bad_file() {
    let wide = |bom: &[u8], text: &str| [bom, &text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>()].concat();
    for content in [wide(b"\xff\xfe", "{\"id\": 1}\n"), wide(b"", "{\"id\": 1}\n"), b"\xfe\xff\0{\0}".to_vec()] {
        Data::one("a.jsonl", content).fails_with("`a.jsonl` cannot be used: it is UTF-16 text; re-save it as UTF-8");
    }
    Data::one("a.csv", wide(b"\xff\xfe", "id,prompt\n")).fails_with("UTF-16");
}

#[test]
fn bad_files_are_named_before_anything_is_read() {
    let good = ("good.jsonl", b"{\"id\": 1}\n".as_slice());
    let with = |name: &str, content: &[u8]| Data::new(&[good, (name, content)]);
    with("b.parquet", b"PAR1").fails_with("`b.parquet` cannot be used: it is damaged or cut off; copy it again");
    with("b.jsonl", b"PAR1").fails_with("it is Parquet; name it .parquet");
    with("b.wav", b"RIFF").fails_with("a recording is a row, not a manifest; give its folder as `input.folder`");
    with("b.tar", b"x").fails_with("tar archives are not yet supported");
    with("b.jsonl.gz", b"\x1f\x8b").fails_with("decompress it first");
    with("b.xlsx", b"PK").fails_with("save the sheet as CSV");
    with("b.md", b"x").fails_with("files named .md are not supported");
    with("b", b"x").fails_with("no extension");
    with("b.jsonl", b"\x1f\x8b\x08\0\0").fails_with("compressed with gzip");
    with("b.csv", b"id,id\n1,2\n").fails_with("the header of `b.csv` cannot be used: two columns are named `id`");
    with("b.csv", b",id\n1,2\n").fails_with("column 1 has no name");
    with("b.csv", b"id;prompt\n1;2\n").fails_with("separated by ';'");
    with("b.csv", b"id,\"prompt\n1,2\n").fails_with("a quote is opened and not closed");
    with("b.csv", b"id,\xff\n").fails_with("not UTF-8");
    with("b.json", b"[\n  {\"id\": 1}\n]\n").fails_with("it is one JSON document");
    with("b.json", b"{\n  \"id\": 1\n}\n").fails_with("jq -c '.[]'");
    Data::new(&[good]).named(&["good.jsonl", "no.jsonl"]).fails_with("`no.jsonl` does not exist; correct the path");
    Data::new(&[good]).named(&["g*.csv"]).fails_with("`g*.csv` matches no file");
    Data::new(&[good]).named(&["none/*.jsonl"]).fails_with("`none/*.jsonl` matches no file");
    Data::new(&[good]).named(&["[.jsonl"]).fails_with("`[.jsonl` is not a glob");
    Data::new(&[good, ("sub/a.jsonl", b"{}")]).named(&["sub"]).fails_with("`sub` is a folder; name its files, as `sub/*.jsonl`");
    Data::new(&[good]).named(&["*.jsonl", "good.jsonl"]).fails_with("`good.jsonl` is in the manifest twice");
    let mut none = Data::new(&[good]);
    none.input.manifest.clear();
    none.fails_with("the job names no input");
    Data::new(&[good]).named(&["good.jsonl/x.jsonl"]).fails_with("good.jsonl/x.jsonl");
}

#[test]
fn an_empty_manifest_is_no_job_but_one_empty_file_is_no_fault() {
    for (name, content) in
        [("a.jsonl", ""), ("a.jsonl", "\n \n"), ("a.csv", ""), ("a.csv", "id,prompt\n\n"), ("a.jsonl", "\u{feff}")]
    {
        Data::one(name, content).fails_with("a.jsonl".replace("jsonl", name.split_once('.').unwrap().1).as_str());
        Data::one(name, content).fails_with("holds no rows");
    }
    Data::new(&[("a.jsonl", b""), ("b.csv", b""), ("c.jsonl", b"{\"id\": 1}")]).gives(&["1"]);
}

#[cfg(unix)]
#[test]
fn what_is_not_a_regular_file() {
    let data = Data::one("a.jsonl", "{}");
    let _socket = std::os::unix::net::UnixListener::bind(data.path("socket.jsonl")).unwrap();
    data.named(&["socket.jsonl"]).fails_with("`socket.jsonl` is not a regular file");
    let mut data = Data::one("a.jsonl", "{}");
    data.input.manifest = vec!["/dev/zero".into()];
    data.fails_with("not a regular file");
}

#[test]
fn files_follow_each_other_as_named_and_globs_by_name() {
    let line: &[u8] = b"{}\n";
    let data =
        Data::new(&[("data/b.jsonl", line), ("data/a.jsonl", line), ("data/.hidden.jsonl", line), ("data/sub/a.jsonl", line)]);
    let data = data.named(&["data/sub/a.jsonl", "data/*.jsonl"]);
    data.gives(&["sub/a.jsonl:1", "a.jsonl:1", "b.jsonl:1"]);
    assert_eq!(data.rows().iter().map(|row| row.as_ref().unwrap().row).collect::<Vec<_>>(), [0, 1, 2]);
    let manifest = manifest::open(&data.input).unwrap();
    let files: Vec<_> =
        manifest.files().iter().map(|file| (file.path.strip_prefix(data.folder.path()).unwrap(), file.bytes)).collect();
    assert_eq!(files, [(Path::new("data/sub/a.jsonl"), 3), (Path::new("data/a.jsonl"), 3), (Path::new("data/b.jsonl"), 3)]);
    data.named(&["data/**/*.jsonl"]).gives(&["a.jsonl:1", "b.jsonl:1", "sub/a.jsonl:1"]);
}

#[test]
fn derived_ids_do_not_change_when_the_data_moves() {
    let files: &[(&str, &[u8])] = &[("x/a.jsonl", b"{}\n{}\n"), ("y/a.jsonl", b"{}\n")];
    let (here, there) = (Data::new(files), Data::new(files));
    assert_eq!(here.shown(), there.shown());
    here.gives(&["x/a.jsonl:1", "x/a.jsonl:2", "y/a.jsonl:1"]);
    assert_eq!(fingerprint(&here.input).unwrap(), fingerprint(&there.input).unwrap());
}

#[test]
fn a_folder_of_text_files_in_the_order_of_their_names() {
    let data = Data::new(&[
        ("b.txt", b"\xef\xbb\xbfsecond\n"),
        ("a/z.txt", b"first"),
        ("c.md", b"no"),
        (".git/x.txt", b"no"),
        ("._b.txt", b"no"),
        ("d.txt", b""),
    ])
    .walked(None);
    data.gives(&["a/z.txt", "b.txt", "d.txt"]);
    let rows = data.rows();
    let item = rows[1].as_ref().unwrap();
    assert_eq!(item.columns, columns(json!({"path": "b.txt", "text": "second\n", "prompt": "second\n"})));
    assert_eq!((item.row, &item.source), (1, &data.path("b.txt")));
    let hash = blake3::hash(b"\xef\xbb\xbfsecond\n");
    assert_eq!(item.input_hash.to_le_bytes(), hash.as_bytes()[..8]);
    assert!(manifest::open(&data.input).unwrap().files().is_empty());
    data.walked(Some("*.md")).gives(&["c.md"]);
}

#[test]
fn text_files_that_are_no_rows() {
    let data = Data::new(&[
        ("a.txt", b"a\xff"),
        ("b.txt", b"a\0b"),
        ("c.txt", b"\xff\xfea\0"),
        ("d.txt", &vec![b'x'; ROW_BYTES_MAX + 1]),
        ("e.txt", b"fine"),
    ])
    .walked(None);
    data.gives(&[
        "a.txt! byte 2 is not UTF-8",
        "b.txt! byte 2 is NUL",
        "c.txt! UTF-16",
        "d.txt! the file has 16777217 bytes or more, the limit for a row is 16777216",
        "e.txt",
    ]);
    let bad = data.rows().remove(0).unwrap_err();
    assert_eq!((bad.id.as_str(), bad.columns), ("a.txt", columns(json!({"path": "a.txt"}))));
}

#[cfg(unix)]
#[test]
fn links_that_lead_nowhere_or_back() {
    use std::os::unix::{ffi::OsStrExt, fs::symlink};
    let data = Data::new(&[("sub/a.txt", b"a"), ("b.txt", b"b")]).walked(None);
    symlink(data.folder.path(), data.path("sub/back")).unwrap();
    symlink("nowhere", data.path("gone.txt")).unwrap();
    symlink("nowhere", data.path("gone.bin")).unwrap();
    symlink("b.txt", data.path("link.txt")).unwrap();
    std::fs::write(data.folder.path().join(std::ffi::OsStr::from_bytes(b"z\xff.txt")), "z").unwrap();
    data.gives(&[
        "b.txt",
        "gone.txt! it cannot be read",
        "link.txt",
        "sub/a.txt",
        "sub/back! the link leads back",
        "z\u{fffd}.txt! the name of the file is not UTF-8; rename it",
    ]);
    let jsonl = Data::one("sub/a.jsonl", "{\"id\": 1}");
    symlink(jsonl.folder.path(), jsonl.path("sub/back")).unwrap();
    symlink("nowhere", jsonl.path("sub/gone.bin")).unwrap();
    jsonl.named(&["**/*.jsonl"]).gives(&["1"]);
}

#[test]
fn folders_that_are_none() {
    let mut data = Data::one("a.md", "x").walked(None);
    let error = data.fails();
    assert!(error.contains("with the glob `**/*.txt` holds no rows"), "{error}");
    data.input.folder = Some(data.folder.path().join("a.md"));
    data.fails_with("`a.md` is not a folder");
    data.input.folder = Some(data.folder.path().join("none"));
    data.fails_with("`none` does not exist");
    Data::one("a.txt", "x").walked(Some("{a")).fails_with("`{a` is not a glob");
}

#[test]
fn a_file_that_is_gone_when_its_turn_comes_ends_the_manifest_once() {
    let data = Data::new(&[("a.jsonl", b"{\"id\": 1}\n"), ("b.jsonl", b"{\"id\": 2}\n")]);
    let mut manifest = manifest::open(&data.input).unwrap();
    std::fs::remove_file(data.path("b.jsonl")).unwrap();
    assert_eq!(manifest.next().unwrap().unwrap().unwrap().id, "1");
    assert!(manifest.next().unwrap().unwrap_err().to_string().contains("b.jsonl` does not exist"));
    assert!(manifest.next().is_none());
    assert!(manifest.next().is_none());
}

#[test]
fn the_fingerprint_changes_with_what_is_read() {
    let print = |files: &[(&str, &[u8])]| fingerprint(&Data::new(files).input).unwrap();
    let base = print(&[("a.jsonl", b"{}\n"), ("b.jsonl", b"{}\n")]);
    assert_eq!(base.len(), 64);
    assert_eq!(base, print(&[("a.jsonl", b"{}\n"), ("b.jsonl", b"{}\n")]));
    for changed in [
        print(&[("a.jsonl", b"{}\n"), ("b.jsonl", b"{} \n")]),
        print(&[("b.jsonl", b"{}\n"), ("a.jsonl", b"{}\n")]),
        print(&[("a.jsonl", b"{}\n"), ("c.jsonl", b"{}\n")]),
        print(&[("a.jsonl", b"{}\n")]),
    ] {
        assert_ne!(base, changed);
    }
    let folder = Data::one("a.txt", "one").walked(None);
    let before = fingerprint(&folder.input).unwrap();
    assert_eq!(before, fingerprint(&folder.input).unwrap());
    std::fs::write(folder.path("a.txt"), "other").unwrap();
    let changed = fingerprint(&folder.input).unwrap();
    std::fs::write(folder.path("b.txt"), "").unwrap();
    assert_eq!(HashSet::from([before, changed, fingerprint(&folder.input).unwrap()]).len(), 3);
    assert!(fingerprint(&Data::one("a.md", "x").input).unwrap_err().to_string().contains("not supported"));
}

#[test]
fn blocks_hold_the_same_rows_as_the_iterator_and_few_at_a_time() {
    let rows = 200_000;
    let line = |row: usize| match row % 1000 {
        7 => format!("{{\"id\": \"r{row}\", \n"),
        8 => format!("{{\"id\": \"r{}\"}}\n", row - 8),
        9 => "\n".to_owned(),
        _ => format!("{{\"id\": \"r{row}\", \"prompt\": \"text {row}\"}}\n"),
    };
    let data = Data::one("a.jsonl", (0..rows).map(line).collect::<String>());
    let mut manifest = manifest::open(&data.input).unwrap();
    let (mut seen, mut bad) = (0_u64, 0);
    let mut ids = HashSet::new();
    while let Some(block) = manifest.next_block().unwrap() {
        assert!((1..=1024).contains(&block.len()));
        for row in block {
            let (number, id, source) = match &row {
                Ok(item) => (item.row, &item.id, &item.source),
                Err(bad) => (bad.row, &bad.id, &bad.source),
            };
            assert_eq!(number, seen);
            // Ten lines of a thousand before each thousand hold one blank line.
            let line = number + (number + 990) / 999;
            let line = if number % 999 < 9 { number + number / 999 } else { line };
            assert!(source.ends_with(&format!(":{}", line + 1)), "row {number} at {source}");
            assert!(ids.insert(id.clone()));
            seen += 1;
            bad += u32::from(row.is_err());
        }
    }
    assert_eq!((seen, bad), (rows as u64 - 200, 400));
    let iterated: Vec<Row> = manifest::open(&data.input).unwrap().map(Result::unwrap).collect();
    assert_eq!(iterated.len() as u64, seen);
    assert!(iterated.iter().all(|row| ids.contains(row.as_ref().map_or_else(|bad| &bad.id, |item| &item.id))));
}

#[test]
fn a_block_of_large_rows_is_short() {
    let line = format!("{{\"prompt\": \"{}\"}}\n", "x".repeat(1 << 20));
    let data = Data::one("a.jsonl", line.repeat(20));
    let mut manifest = manifest::open(&data.input).unwrap();
    assert_eq!(manifest.next_block().unwrap().unwrap().len(), 4);
}

#[test]
fn a_manifest_can_be_read_on_a_thread_of_its_own() {
    fn is_send<T: Send>(_: &T) {}
    is_send(&manifest::open(&Data::one("a.jsonl", "{}").input).unwrap());
    is_send(&manifest::open(&Data::one("a.txt", "x").walked(None).input).unwrap());
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map(any::<String>(), inner, 0..4).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic_and_every_line_of_them_is_one_row(content in proptest::collection::vec(any::<u8>(), 0..300)) {
        for name in ["a.jsonl", "a.json", "a.csv", "a.tsv"] {
            let data = Data::one(name, &content);
            let Ok(manifest) = manifest::open(&data.input) else { continue };
            let rows: Vec<Row> = manifest.map(Result::unwrap).collect();
            if name == "a.jsonl" {
                let content = content.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&content);
                let filled = content.split(|&byte| byte == b'\n').enumerate().filter(|(_, line)| !line.trim_ascii().is_empty());
                let lines: Vec<String> = filled.map(|(index, _)| format!("{}:{}", data.path(name), index + 1)).collect();
                let source = |row: &Row| row.as_ref().map_or_else(|bad| &bad.source, |item| &item.source).clone();
                let sources: Vec<String> = rows.iter().map(source).collect();
                prop_assert_eq!(sources, lines);
            }
        }
        Data::new(&[("a.txt", &content)]).walked(None).rows();
    }

    #[test]
    fn jsonl_goes_round(
        rows in proptest::collection::vec(proptest::collection::btree_map("[a-z]{2}|\\PC{0,6}", json_value(), 0..5), 1..20),
    ) {
        let rows: Vec<Map<String, Value>> = rows.into_iter().enumerate().map(|(index, columns)| {
            let mut columns: Map<String, Value> = columns.into_iter().collect();
            columns.insert("id".into(), Value::from(index));
            columns
        }).collect();
        let content: String = rows.iter().map(|columns| Value::Object(columns.clone()).to_string() + "\n").collect();
        let read = Data::one("a.jsonl", content).rows().into_iter().map(|row| row.unwrap().columns);
        let read: Vec<Map<String, Value>> = read.collect();
        prop_assert_eq!(read, rows);
    }

    #[test]
    fn csv_goes_round(rows in proptest::collection::vec(("\\PC{0,12}|[\",\r\n ab]{0,12}", "[^\0]{0,12}"), 1..20)) {
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.write_record(["id", "prompt", "more"]).unwrap();
        for (index, (prompt, more)) in rows.iter().enumerate() {
            writer.write_record([&index.to_string(), prompt, more]).unwrap();
        }
        let read: Vec<(String, String)> = Data::one("a.csv", writer.into_inner().unwrap()).rows().into_iter().map(|row| {
            let columns = row.unwrap().columns;
            (columns["prompt"].as_str().unwrap().to_owned(), columns["more"].as_str().unwrap().to_owned())
        }).collect();
        prop_assert_eq!(read, rows);
    }
}
