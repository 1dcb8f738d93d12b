//! The guide agrees with the code: its links, its lists of errors, its figures, and texts that are
//! in two places.

mod copies;
mod errors;
mod figures;
mod gpt;
mod links;
mod memory;
mod options;

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the path of a file in the repository.
fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Returns the text of a file in the repository.
fn text(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Returns the text of a page of the guide.
fn page(name: &str) -> String {
    text(&format!("fsdp-runtime/docs/{name}.md"))
}

/// Returns the files below a folder of the repository whose names end in `end`, sorted.
fn files(folder: &str, end: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path(folder)).expect("a folder of the repository") {
        let entry = entry.expect("an entry");
        let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            found.extend(files(&name, end));
        } else if name.ends_with(end) {
            found.push(name);
        }
    }
    found.sort();
    found
}

/// Returns the cells of the tables in a text, row by row, without head rows.
fn rows(text: &str) -> Vec<Vec<String>> {
    let cells = |line: &str| -> Vec<String> {
        let inner = line.trim().trim_start_matches('|').trim_end_matches('|');
        inner.split('|').map(|cell| cell.trim().to_string()).collect()
    };
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let head = lines.get(index + 1).is_some_and(|next| next.starts_with("|---"));
        if line.starts_with('|') && !line.starts_with("|---") && !head {
            found.push(cells(line));
        }
    }
    found
}

/// Returns whether the parts of `pattern` between `..` are in `text`, in this order. The first part
/// begins the text.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split("..").map(str::trim);
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    true
}

#[test]
fn patterns_match_in_order() {
    assert!(matches("`..` has no ..; it", "`Model` has no field `x`; it has"));
    assert!(matches("unit .. has", "unit `A` has") && matches("..", "anything"));
    assert!(!matches("has", "it has") && !matches("a .. b .. a", "a b"));
}
