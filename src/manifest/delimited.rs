//! CSV and TSV rows. Format: RFC 4180, with `\n` or `\r\n` line ends, and a tab in a comma's place for TSV.
//!
//! A row is first framed: [`scan`] finds whether a line ends its row, in the reader's own thread. [`Header::columns_of`] then
//! splits the row, on any thread. Both read as the csv crate does (the tests hold them against it) but for one thing: text after a
//! closing quote is a fault, because it nearly always means that a quote inside the field was not doubled. In the tables of some
//! speech corpora quotes are text.

use std::borrow::Cow;
use std::collections::HashSet;
use std::path::Path;

use memchr::memchr;
use serde_json::{Map, Value};

use super::ManifestError;
use super::corpus::Corpus;
use super::raw::{Unreadable, shorten, utf8};

pub(super) const COLUMNS_MAX: usize = 10_000;

/// How a line stands to its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scan {
    /// The row ends with it.
    Ends,
    /// A quoted field goes on in the next line.
    Open,
    /// Text follows a closing quote.
    Stray,
}

/// Scans a line without its line end; `quoted` says that it begins inside a quoted field.
pub(super) fn scan(line: &[u8], mut quoted: bool, delimiter: u8) -> Scan {
    if !quoted && memchr(b'"', line).is_none() {
        return Scan::Ends;
    }
    let mut at = 0;
    loop {
        if quoted {
            let Some(quote) = memchr(b'"', &line[at..]) else { return Scan::Open };
            at += quote + 1;
            match line.get(at) {
                None => return Scan::Ends,
                Some(b'"') => at += 1,
                Some(&byte) if byte == delimiter => {
                    at += 1;
                    quoted = false;
                }
                Some(_) => return Scan::Stray,
            }
        } else if line.get(at) == Some(&b'"') {
            at += 1;
            quoted = true;
        } else {
            match memchr(delimiter, &line[at..]) {
                None => return Scan::Ends,
                Some(end) => at += end + 1,
            }
        }
    }
}

/// The column names of one file, and what its fields are separated by.
#[derive(Debug)]
pub(super) struct Header {
    pub columns: Vec<String>,
    delimiter: u8,
    /// A corpus' table, whose quotes are text.
    pub corpus: Option<Corpus>,
}

impl Header {
    /// Reads a framed header row.
    pub fn new(path: &Path, row: &[u8], delimiter: u8, corpus: Option<Corpus>) -> Result<Self, ManifestError> {
        let fault = |reason: String| Err(ManifestError::header(path, reason));
        let Ok(row) = utf8(row) else { return fault("it is not UTF-8; re-save the file as UTF-8".into()) };
        let fields = Fields { rest: Some(row), delimiter, quotes: corpus.is_none() }.take(COLUMNS_MAX + 1);
        let header = Self { columns: fields.map(|field| field.trim().to_owned()).collect(), delimiter, corpus };
        if header.columns.len() > COLUMNS_MAX {
            return fault(format!("it has more than {COLUMNS_MAX} columns; keep those that the prompt needs"));
        }
        if let [only] = header.columns.as_slice()
            && let Some(separator) = only.chars().find(|&character| matches!(character, ';' | '|' | '\t' | ','))
        {
            return fault(format!(
                "its one column is named `{}`, so the fields seem to be separated by {separator:?}; \
                 write commas in a .csv file and tabs in a .tsv file",
                shorten(only)
            ));
        }
        let mut seen = HashSet::new();
        for (index, column) in header.columns.iter().enumerate() {
            if column.is_empty() {
                return fault(format!("column {} has no name; name it, or leave it out (pandas: `index=False`)", index + 1));
            }
            if let Some(character) = column.chars().find(|character| character.is_control()) {
                return fault(format!("the name of column {} holds {character:?}; name columns in one line of text", index + 1));
            }
            if !seen.insert(column) {
                return fault(format!("two columns are named `{}`; rename one", shorten(column)));
            }
        }
        Ok(header)
    }

    /// Of a corpus whose table has none.
    pub fn absent(corpus: Corpus) -> Option<Self> {
        let columns = corpus.columns()?.iter().map(|&column| column.to_owned()).collect();
        Some(Self { columns, delimiter: corpus.delimiter(), corpus: Some(corpus) })
    }

    /// Splits a framed row.
    pub fn columns_of(&self, row: &[u8]) -> Result<Map<String, Value>, Unreadable> {
        let row = utf8(row)?;
        if let Some(at) = memchr(0, row.as_bytes()) {
            return Err(Unreadable::new(format!("byte {} is NUL; the file is damaged or not text, write it again", at + 1)));
        }
        let mut fields = Fields { rest: Some(row), delimiter: self.delimiter, quotes: self.corpus.is_none() };
        let columns: Map<String, Value> =
            self.columns.iter().zip(&mut fields).map(|(name, field)| (name.clone(), Value::String(field.into_owned()))).collect();
        let (wanted, found) = (self.columns.len(), columns.len());
        let without_last = self.corpus.is_some_and(|corpus| corpus.columns().is_some()) && found + 1 == wanted;
        if (found == wanted || without_last) && fields.rest.is_none() {
            return Ok(columns);
        }
        if self.corpus.is_some() {
            let delimiter = char::from(self.delimiter);
            let error = format!("the row has not the {wanted} fields of its table, separated by {delimiter:?}; correct the line");
            return Err(Unreadable { error, columns, is_certain: false });
        }
        let found = if found == wanted { format!("more than {wanted} fields") } else { format!("{found} of {wanted} fields") };
        let error =
            format!("the row has {found}, as the header counts them; quote fields that hold a delimiter, and write empty ones");
        Err(Unreadable { error, columns, is_certain: false })
    }
}

/// The fields of a framed row, unquoted. Cuts are at ASCII characters, so within UTF-8.
struct Fields<'a> {
    /// From the next field on; none after the last.
    rest: Option<&'a str>,
    delimiter: u8,
    /// Whether a field may be quoted.
    quotes: bool,
}

impl<'a> Iterator for Fields<'a> {
    type Item = Cow<'a, str>;

    fn next(&mut self) -> Option<Cow<'a, str>> {
        let row = self.rest?;
        let (field, end) = match row.strip_prefix('"').filter(|_| self.quotes) {
            None => {
                let end = memchr(self.delimiter, row.as_bytes()).unwrap_or(row.len());
                (Cow::Borrowed(&row[..end]), end)
            }
            Some(mut quoted) => {
                let mut field = Cow::Borrowed("");
                loop {
                    let (text, after) = quoted.split_once('"').unwrap_or((quoted, ""));
                    field += text;
                    let Some(escaped) = after.strip_prefix('"') else { break (field, row.len() - after.len()) };
                    field += "\"";
                    quoted = escaped;
                }
            }
        };
        // Framing has seen to it that a delimiter or nothing follows a closing quote.
        self.rest = row.get(end + 1..).filter(|_| end < row.len());
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(row: &str, delimiter: u8) -> Result<Header, String> {
        Header::new(Path::new("rows.csv"), row.as_bytes(), delimiter, None).map_err(|error| error.to_string())
    }

    #[test]
    fn quotes_decide_where_a_row_ends() {
        for (line, quoted, expected) in [
            ("a,b", false, Scan::Ends),
            ("", false, Scan::Ends),
            ("a,\"b", false, Scan::Open),
            ("a,\"b\"", false, Scan::Ends),
            ("a,\"b\"\"", false, Scan::Open),
            ("a,\"b\"\"\"", false, Scan::Ends),
            ("a,\"b\",\"c", false, Scan::Open),
            ("5\" pipe,b\"", false, Scan::Ends),
            ("\"b\" ,c", false, Scan::Stray),
            ("\"say \"hi\"\"", false, Scan::Stray),
            ("more", true, Scan::Open),
            ("end\",b", true, Scan::Ends),
            ("end\"b", true, Scan::Stray),
            ("\"", true, Scan::Ends),
        ] {
            assert_eq!(scan(line.as_bytes(), quoted, b','), expected, "{line} {quoted}");
        }
        assert_eq!(scan(b"\"a\"\tb", false, b'\t'), Scan::Ends);
    }

    #[test]
    fn bad_headers() {
        for (row, expected) in [
            ("id,prompt,id", "two columns are named `id`"),
            ("id, id", "two columns are named `id`"),
            (",id,prompt", "column 1 has no name"),
            ("id,\"\"", "column 2 has no name"),
            ("id;prompt", "separated by ';'"),
            ("id\tprompt", "separated by '\\t'"),
            ("id,a\rb", "column 2 holds '\\r'"),
            (&vec!["c"; COLUMNS_MAX + 1].join(","), "more than 10000 columns"),
        ] {
            let error = header(row, b',').unwrap_err();
            assert!(error.contains(expected), "{row}\n  gave     {error}\n  expected {expected}");
        }
        assert!(Header::new(Path::new("rows.csv"), b"id,\xff", b',', None).unwrap_err().to_string().contains("not UTF-8"));
        assert_eq!(header(" id ,\"pro\"\"mpt\"", b',').unwrap().columns, ["id", "pro\"mpt"]);
    }

    #[test]
    fn rows_are_split_as_wide_as_the_header() {
        let header = header("a,b", b',').unwrap();
        let check = |row: &str, expected: &str| match header.columns_of(row.as_bytes()) {
            Ok(columns) => assert_eq!(Value::Object(columns).to_string(), expected),
            Err(unreadable) => {
                let read = Value::Object(unreadable.columns).to_string();
                assert!(unreadable.error.contains(expected), "{row}: {} {read}", unreadable.error);
            }
        };
        check("1,2", r#"{"a":"1","b":"2"}"#);
        check(",", r#"{"a":"","b":""}"#);
        check("\"x, \"\"y\"\"\r\nz\",\u{e9}", r#"{"a":"x, \"y\"\r\nz","b":"é"}"#);
        check("\u{feff}1,2", "{\"a\":\"\u{feff}1\",\"b\":\"2\"}");
        check("1", "the row has 1 of 2 fields");
        check("1,2,3", "more than 2 fields");
        check("1,2,3,4,5", "more than 2 fields");
        check("1,\0", "byte 3 is NUL");
        assert_eq!(header.columns_of(b"1,2,3").unwrap_err().columns.len(), 2);
        assert!(header.columns_of(b"1,\xff").unwrap_err().error.contains("byte 3 is not UTF-8"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// The csv crate, asked as the oracle, agrees wherever framing finds no fault.
        #[test]
        fn framing_and_splitting_agree_with_the_csv_crate(text in "[\",\nab]{0,40}") {
            let mut rows = Vec::new();
            let (mut row, mut quoted, mut stray) = (String::new(), false, false);
            for line in text.split('\n') {
                if !quoted && line.is_empty() { continue; }
                if quoted { row.push('\n'); }
                row.push_str(line);
                match scan(line.as_bytes(), quoted, b',') {
                    Scan::Ends => { rows.push(std::mem::take(&mut row)); quoted = false; }
                    Scan::Open => quoted = true,
                    Scan::Stray => { stray = true; break; }
                }
            }
            prop_assume!(!stray && !quoted);
            let names: Vec<String> = (0..50).map(|index| format!("c{index}")).collect();
            let header = header(&names.join(","), b',').unwrap();
            let split: Vec<Vec<String>> = rows.iter().map(|row| {
                let columns = header.columns_of(row.as_bytes()).unwrap_err().columns;
                columns.values().map(|value| value.as_str().unwrap().to_owned()).collect()
            }).collect();
            let oracle: Vec<Vec<String>> = csv::ReaderBuilder::new().has_headers(false).flexible(true)
                .from_reader(text.as_bytes()).records().map(|record| record.unwrap().iter().map(str::to_owned).collect()).collect();
            prop_assert_eq!(split, oracle);
        }
    }
}
