//! Links between the pages of the guide work in rustdoc and in the files.
//!
//! A link is a reference, such as `[Checkpoints][checkpoints]`. `docs/links` defines it for
//! rustdoc, and the end of the page for readers of the file.

use std::collections::BTreeMap;

use super::{files, text};

const DOCS: &str = "fsdp-runtime/docs";

/// Returns the definitions `[label]: target` of a text.
fn definitions(text: &str) -> BTreeMap<&str, &str> {
    text.lines()
        .filter_map(|line| line.strip_prefix('[')?.split_once("]: "))
        .filter(|(_, target)| !target.contains(' '))
        .collect()
}

/// Returns the anchor of a heading, as GitHub and rustdoc make it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// Returns the lines of a page outside of code blocks.
fn prose(page: &str) -> Vec<&str> {
    let mut code = false;
    let mut lines = Vec::new();
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
        } else if !code {
            lines.push(line);
        }
    }
    lines
}

/// Returns the chapters that `guide.rs` lists.
fn chapters() -> Vec<String> {
    let source = text("fsdp-runtime/docs/guide.rs");
    let list = source.split("chapters!(\n").nth(1).expect("a list");
    let chapter = |line: &str| {
        let (name, file) = line.trim().trim_end_matches(',').split_once(": ")?;
        assert_eq!(file, format!("\"{name}.md\""));
        Some(name.to_string())
    };
    list.lines().filter_map(chapter).collect()
}

#[test]
fn every_page_is_a_chapter_with_a_link_and_a_row() {
    let chapters = chapters();
    let links = text(&format!("{DOCS}/links"));
    let links = definitions(&links);
    let index = text(&format!("{DOCS}/README.md"));
    let mut pages = Vec::new();
    for file in files(DOCS, ".md") {
        let name = file[DOCS.len() + 1..].trim_end_matches(".md").to_string();
        if name != "README" {
            pages.push(name);
        }
    }
    let mut sorted = chapters.clone();
    sorted.sort();
    assert_eq!(sorted, pages, "`guide.rs` and the pages of `docs`");
    for chapter in &chapters {
        assert_eq!(links.get(chapter.as_str()), Some(&&*format!("crate::guide::{chapter}")));
        assert!(index.contains(&format!("][{chapter}] |")), "no row for {chapter}");
    }
}

/// Each chapter has a block of Rust that `cargo test --doc` compiles.
#[test]
fn every_chapter_is_doctested() {
    for chapter in chapters() {
        let page = text(&format!("{DOCS}/{chapter}.md"));
        let compiled = |line: &&str| ["```rust", "```rust,no_run"].contains(line);
        assert!(page.lines().any(|line| compiled(&line)), "{chapter} has no Rust that compiles");
    }
}

#[test]
fn links_between_pages_work_in_both_forms() {
    let links = text(&format!("{DOCS}/links"));
    let links = definitions(&links);
    let mut count = 0;
    for file in files(DOCS, ".md") {
        let page = text(&file);
        let own = definitions(&page);
        let lines = prose(&page);
        for line in &lines {
            assert!(!line.contains(".md)"), "{file}: write a reference in `{line}`");
            for (at, _) in line.match_indices("][") {
                let rest = &line[at + 2..];
                let label = rest.split(']').next().unwrap_or_default();
                assert!(own.contains_key(label), "{file} does not define [{label}]");
                count += 1;
            }
        }
        for (label, target) in &own {
            let (name, fragment) = match target.split_once(".md") {
                Some((name, fragment)) => (name, fragment),
                None => continue,
            };
            let in_rustdoc = format!("crate::guide::{name}{fragment}");
            assert_eq!(links.get(label), Some(&&*in_rustdoc), "{file}: [{label}] in `docs/links`");
            if let Some(wanted) = fragment.strip_prefix('#') {
                let other = text(&format!("{DOCS}/{name}.md"));
                let headings = prose(&other);
                let headings = headings.iter().filter(|line| line.starts_with('#'));
                let found = headings.map(|line| anchor(line.trim_start_matches('#').trim()));
                assert!(found.into_iter().any(|found| found == wanted), "{file}: {target}");
            }
        }
    }
    assert!(count > 50, "{count} links");
}
