//! `troubleshooting.md` lists every error of the crates, with its message.

use std::collections::BTreeMap;

use fsdp_runtime::errors::NotRecomputable;

use super::{files, matches, page, rows, text};

/// A variant of an error type and its message, which is `None` where it is that of its source.
type Variant = (String, Option<String>);

/// Returns the errors of the sources of the runtime, of the kernels and of the tool: for each type with `#[derive(thiserror::Error)]`,
/// its variants. A struct has none. The launcher's own error is called `fsdp launch`.
fn error_types() -> BTreeMap<String, Vec<Variant>> {
    let mut types = BTreeMap::new();
    let folders = ["fsdp-runtime/src", "fsdp-runtime/kernels/src", "fsdp-runtime/cli/src"];
    for file in folders.into_iter().flat_map(|folder| files(folder, ".rs")) {
        let source = text(&file);
        let mut lines = source.lines();
        while let Some(line) = lines.next() {
            if !(line.starts_with("#[derive(") && line.contains("thiserror::Error")) {
                continue;
            }
            let head = lines.by_ref().find(|line| line.starts_with("pub")).expect("a type");
            let words: Vec<&str> = head.split_whitespace().collect();
            let keyword = words.iter().position(|word| ["enum", "struct"].contains(word));
            let keyword = keyword.unwrap_or_else(|| panic!("{file}: `{head}` is no type"));
            let in_tool = file.starts_with("fsdp-runtime/cli/");
            let name = if in_tool { "fsdp launch" } else { words[keyword + 1] };
            let body: Vec<&str> = lines.by_ref().take_while(|line| *line != "}").collect();
            let found = if words[keyword] == "enum" { variants(&body) } else { Vec::new() };
            assert!(words[keyword] == "struct" || !found.is_empty(), "{file}: {name} is empty");
            assert!(types.insert(name.to_string(), found).is_none(), "{name} is in two files");
        }
    }
    types
}

/// Returns the variants in the lines of an enum.
fn variants(body: &[&str]) -> Vec<Variant> {
    let mut found = Vec::new();
    let mut attribute: Option<String> = None;
    for line in body {
        let code = line.trim();
        let open = attribute.as_ref().is_some_and(|text| !text.ends_with(")]"));
        if code.starts_with("#[error(") {
            attribute = Some(code.to_string());
        } else if open && let Some(text) = &mut attribute {
            // A backslash at the end of a line joins the next one.
            text.push_str(if text.ends_with('\\') { "" } else { " " });
            text.truncate(text.trim_end_matches('\\').len());
            text.push_str(code);
        } else if line.starts_with("    ")
            && code.starts_with(|first: char| first.is_ascii_uppercase())
            && line.find(code) == Some(4)
        {
            let name = code.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
            let error = attribute.take().unwrap_or_else(|| panic!("{name} has no message"));
            let message = error.split_once('"').map(|(_, rest)| rest.replace("\\\"", "\""));
            found.push((name.to_string(), message));
        }
    }
    found
}

/// Returns the text below the heading of a type.
fn section<'a>(page: &'a str, name: &str) -> &'a str {
    let heading = format!("### `{name}`\n");
    let start = page.find(&heading).unwrap_or_else(|| panic!("no section `{name}`"));
    let below = &page[start + heading.len()..];
    &below[..below.find("\n##").unwrap_or(below.len())]
}

#[test]
fn every_error_is_listed_with_its_message() {
    let page = page("troubleshooting");
    let types = error_types();
    assert!(types.values().map(Vec::len).sum::<usize>() > 100, "{types:?}");
    let mut wrong = Vec::new();
    for (name, variants) in &types {
        if variants.is_empty() {
            assert!(page.contains(&format!("`{name}`")), "`{name}` is not in the page");
            continue;
        }
        let rows = rows(section(&page, name));
        for (variant, message) in variants {
            let label = format!("`{variant}`");
            let Some(row) = rows.iter().find(|row| row.get(1) == Some(&label)) else {
                wrong.push(format!("{name}::{variant} is missing"));
                continue;
            };
            assert_eq!(row.len(), 4, "{name}::{variant}: a cell with `|`");
            assert!(row[2..].iter().all(|cell| !cell.is_empty()), "{name}::{variant}");
            // `{file}` and the like are `..` in the page.
            let message = message.clone().unwrap_or_default();
            if !matches(&format!("..{}", row[0]), &message)
                || row[0].is_empty() != message.is_empty()
            {
                wrong.push(format!("{name}::{variant} says `{message}`, the page `{}`", row[0]));
            }
        }
        for row in &rows {
            let known = |(variant, _): &Variant| row[1] == format!("`{variant}`");
            if !variants.iter().any(known) {
                wrong.push(format!("{name} has no variant {}", row[1]));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_reason_against_recomputation_is_listed() {
    let all = [
        NotRecomputable::Borrowed,
        NotRecomputable::Parameters,
        NotRecomputable::Generic,
        NotRecomputable::Unknown,
        NotRecomputable::Output,
    ];
    let page = page("troubleshooting");
    let rows = rows(section(&page, "NotRecomputable"));
    assert_eq!(rows.len(), all.len());
    for reason in all {
        // A new variant does not compile here.
        match reason {
            NotRecomputable::Borrowed
            | NotRecomputable::Parameters
            | NotRecomputable::Generic
            | NotRecomputable::Unknown
            | NotRecomputable::Output => {}
        }
        assert!(rows.iter().any(|row| row[1] == format!("`{reason:?}`")), "{reason:?}");
    }
}

/// Each message of the compiler in `tests/ui` has a row, and each row such a message.
#[test]
fn every_error_of_the_compiler_is_listed() {
    let page = page("troubleshooting");
    let start = page.find("## Errors of the compiler").expect("a section");
    let section = &page[start + 2..];
    let rows = rows(&section[..section.find("\n## ").expect("a next section")]);
    let mut messages = Vec::new();
    for file in files("tests/ui", ".stderr") {
        for line in text(&file).lines().filter(|line| line.starts_with("error")) {
            let message = line.split_once(": ").expect("a message").1;
            messages.push(message.trim_start_matches("evaluation panicked: ").to_string());
        }
    }
    assert!(messages.len() > 100);
    let mut wrong = Vec::new();
    for message in &messages {
        if !rows.iter().any(|row| matches(&row[0], message)) {
            wrong.push(format!("no row for: {message}"));
        }
    }
    for row in &rows {
        assert_eq!(row.len(), 3, "{row:?}");
        if !messages.iter().any(|message| matches(&row[0], message)) {
            wrong.push(format!("no message for: {}", row[0]));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
