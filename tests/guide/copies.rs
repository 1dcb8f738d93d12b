//! Texts that are in two places are the same in both, and the README stays short.

use super::{page, text};

/// Returns the first block of code in a language.
fn block<'a>(text: &'a str, language: &str) -> &'a str {
    let start = text.find(&format!("```{language}")).expect("a block");
    let body = &text[start..];
    let body = &body[body.find('\n').expect("a line") + 1..];
    &body[..body.find("```").expect("an end")]
}

/// `.ci/new_crate` runs the example of the repository's README, and `cargo test --doc` compiles
/// that of the package's.
#[test]
fn both_readmes_have_one_example_and_one_list_of_features() {
    let (repository, package) = (text("README.md"), text("fsdp-runtime/README.md"));
    for language in ["rust", "toml"] {
        assert_eq!(block(&repository, language), block(&package, language));
    }
    let features = |text: &str| {
        let rows = super::rows(text).into_iter().filter(|row| row[0].starts_with("`flex`"));
        assert!(rows.count() == 1, "a table of features");
        let start = text.find("| `flex` (default").expect("a table");
        text[start..].split("\n\n").next().expect("a table").to_string()
    };
    assert_eq!(features(&repository), features(&package));
}

/// On a GPU nothing is tuned by default, as the table of features says.
#[test]
fn the_feature_of_cuda_brings_no_autotune() {
    for manifest in ["Cargo.toml", "fsdp-runtime/Cargo.toml"] {
        let manifest = text(manifest);
        let features = |name: &str| {
            let line = manifest.lines().find(|line| line.starts_with(&format!("{name} = [")));
            line.expect("a feature").contains("\"autotune\"")
        };
        assert_eq!(["cuda", "cuda-cpp", "cpu"].map(features), [false, false, true]);
    }
}

/// The README is the front page of the repository. Details belong in the guide.
#[test]
fn the_readme_has_at_most_220_lines() {
    let lines = text("README.md").lines().count();
    assert!((100..=220).contains(&lines), "README.md has {lines} lines");
}

#[test]
fn the_page_has_the_actual_expansion() {
    let page = page("expansion");
    for name in ["readme.rs", "readme.expanded.rs"] {
        let file = format!("fsdp-macros/tests/snapshots/{name}");
        let block = format!("```rust,ignore\n{}```\n", text(&file));
        assert!(page.contains(&block), "docs/expansion.md does not hold {file} as it is");
    }
}

/// The examples in the macros' documentation are those that `tests/units` compiles.
#[test]
fn examples_of_the_macros_compile() {
    let source = text("fsdp-macros/src/lib.rs");
    let lines = source.lines().filter_map(|line| line.strip_prefix("///"));
    let lines: Vec<_> = lines.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
    let documentation = lines.join("\n");
    // `ignore`, as rustdoc cannot link the runtime to its own dependency.
    let examples = documentation.split("```ignore\n").skip(1);
    let examples: Vec<_> = examples.filter_map(|text| text.split("```").next()).collect();
    let names = ["fsdp_unit", "generic_unit", "trait_block", "fsdp_module", "unit_value"];
    assert_eq!(examples.len(), names.len(), "an example for each name");
    for (example, name) in examples.into_iter().zip(names) {
        let compiled = text(&format!("tests/units/accepted/macro_examples/{name}.rs"));
        assert_eq!(example, compiled, "the documentation of {name}");
    }
}
