//! Rust sources without their comments and texts, so that a rule sees only what is compiled.

/// `source` with every comment and every string and character literal blanked; lines and columns stay.
pub fn code(source: &str) -> String {
    let characters: Vec<char> = source.chars().collect();
    let mut code = String::with_capacity(source.len());
    let mut at = 0;
    while at < characters.len() {
        let end = literal_end(&characters, at);
        if end == at {
            code.push(characters[at]);
            at += 1;
        } else {
            code.extend(characters[at..end].iter().map(|&character| if character == '\n' { '\n' } else { ' ' }));
            at = end;
        }
    }
    code
}

/// Where the comment or literal ends that begins at `at`; `at` itself where none does.
fn literal_end(characters: &[char], at: usize) -> usize {
    let starts = |from: usize, text: &str| text.chars().enumerate().all(|(i, c)| characters.get(from + i) == Some(&c));
    let rest = |from: usize| characters.len().min(from);
    if starts(at, "//") {
        return (at..characters.len()).find(|&i| characters[i] == '\n').unwrap_or(characters.len());
    }
    if starts(at, "/*") {
        let (mut depth, mut i) = (1, at + 2);
        while i < characters.len() && depth > 0 {
            let step = usize::from(starts(i, "/*") || starts(i, "*/")) + 1;
            depth += i32::from(starts(i, "/*")) - i32::from(starts(i, "*/"));
            i += step;
        }
        return rest(i);
    }
    if characters[at] == '"' {
        return quoted_end(characters, at, '"');
    }
    if characters[at] == '\'' {
        // A lifetime has no second quote right after one character.
        let escaped = characters.get(at + 1) == Some(&'\\');
        return if escaped || characters.get(at + 2) == Some(&'\'') { quoted_end(characters, at, '\'') } else { at };
    }
    let within_name = at > 0 && (characters[at - 1].is_alphanumeric() || characters[at - 1] == '_');
    if !within_name && (starts(at, "r\"") || starts(at, "r#") || starts(at, "br\"") || starts(at, "br#")) {
        let hashes_at = at + if characters[at] == 'b' { 2 } else { 1 };
        let hashes = characters[hashes_at..].iter().take_while(|&&character| character == '#').count();
        if characters.get(hashes_at + hashes) == Some(&'"') {
            let closing = format!("\"{}", "#".repeat(hashes));
            let inside = hashes_at + hashes + 1;
            let end = (inside..characters.len()).find(|&i| starts(i, &closing));
            return end.map_or(characters.len(), |end| end + 1 + hashes);
        }
    }
    at
}

fn quoted_end(characters: &[char], at: usize, quote: char) -> usize {
    let mut i = at + 1;
    while i < characters.len() && characters[i] != quote {
        i += if characters[i] == '\\' { 2 } else { 1 };
    }
    characters.len().min(i + 1)
}

/// Names in a line, `a::b` as two.
pub fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|character: char| !character.is_alphanumeric() && character != '_').filter(|word| !word.is_empty())
}

/// The modules of this crate that `code` imports or names: what follows `crate::`, in braces too, with the line of each.
pub fn crate_modules(code: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, path) in code.match_indices("crate::") {
        if code[..at].ends_with(|character: char| character.is_alphanumeric() || character == '_') {
            continue;
        }
        let line = code[..at].matches('\n').count() + 1;
        let rest = &code[at + path.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            found.extend(words(rest).next().map(|word| (line, word.to_owned())));
            continue;
        };
        let (mut depth, mut begins) = (0, true);
        for (i, character) in group.char_indices() {
            match character {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => begins = true,
                _ if begins && !character.is_whitespace() => {
                    let line = line + group[..i].matches('\n').count();
                    found.extend(words(&group[i..]).next().map(|word| (line, word.to_owned())));
                    begins = false;
                }
                _ => {}
            }
        }
    }
    found
}

#[test]
fn comments_and_texts_are_blank() {
    let source = "a // unsafe\n/* x /* y */ z */ b \"unsafe \\\" // \" c 'u' '\\'' d<'a> r#\"un\"safe\"# e br\"\\\" f";
    let kept: Vec<String> = code(source).lines().map(|line| words(line).collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(kept, ["a", "b c d a e f"]);
    assert_eq!(code(source).chars().count(), source.chars().count());
}

#[test]
fn imports_are_found_in_braces_too() {
    let code = "use crate::{\n    job,\n    sink::{Row, crash::Deep}, run as x,\n};\ncrate::report::Event mycrate::no";
    let expected = [(2, "job"), (3, "sink"), (3, "run"), (5, "report")].map(|(line, name)| (line, name.to_owned()));
    assert_eq!(crate_modules(code), expected);
}
