//! The tables of `options.md` are those of the runtime. `UPDATE_GUIDE=1 cargo test --test guide`
//! rewrites defaults, values and keys. What an option means is written by hand.

use std::{env, fs};

use fsdp_runtime::config::{Keys, OptionRow, TABLE};

use super::{page, path, rows};

/// The lines around the computed table.
const MARKS: (&str, &str) = ("<!-- computed: table -->\n", "<!-- end -->");

/// The section after those with options of sharding.
const AFTER: &str = "## Looking at a sharded model";

/// Returns the options that the first cell of a row names.
fn named(cell: &str) -> Vec<&'static OptionRow> {
    let row = |name: &str| TABLE.iter().find(|row| row.name == name.trim_matches('`'));
    let found =
        cell.split(", ").map(|name| row(name).unwrap_or_else(|| panic!("no option {name}")));
    found.collect()
}

/// Returns the defaults of the options of a row, each once. A setting of single units beside the
/// option itself has no default of its own.
fn defaults(options: &[&OptionRow]) -> String {
    let beside = |row: &OptionRow| {
        options.iter().any(|general| general.of_units().any(|of| of.name == row.name))
    };
    let mut texts: Vec<&str> = Vec::new();
    for row in options.iter().filter(|row| !beside(row)) {
        let text = row.default_without_link();
        if !texts.contains(&text) {
            texts.push(text);
        }
    }
    texts.join(", ")
}

/// Returns the table of values and keys.
fn values() -> String {
    let mut table = String::from(
        "| option | values | for single units | key of Accelerate's file |\n|---|---|---|---|\n",
    );
    let listed = |names: Vec<&str>| {
        names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
    };
    for row in TABLE.iter().filter(|row| !row.is_of_units()) {
        let units: Vec<&str> = row.of_units().map(|of| of.name).collect();
        let units = if units.is_empty() { "no".into() } else { listed(units) };
        let keys = match row.keys {
            Keys::InFile(keys) => listed(keys.iter().map(|key| key.name).collect()),
            Keys::NotInFile(reason) => format!("none: {reason}"),
        };
        table.push_str(&format!("| `{}` | {} | {units} | {keys} |\n", row.name, row.range));
    }
    table
}

/// Returns the page with the defaults and the values of the table.
fn updated(page: &str) -> String {
    let end = page.find(AFTER).expect("a section");
    let mut text = String::new();
    for line in page[..end].lines() {
        match line.split('|').collect::<Vec<_>>().as_slice() {
            ["", option, _, meaning @ ..] if option.starts_with(" `") && meaning.len() == 2 => {
                let defaults = defaults(&named(option.trim()));
                text.push_str(&format!("|{option}| {defaults} |{}|\n", meaning[0]));
            }
            _ => text.push_str(&format!("{line}\n")),
        }
    }
    let from = text.find(MARKS.0).expect("a mark") + MARKS.0.len();
    let until = from + text[from..].find(MARKS.1).expect("an end");
    text.replace_range(from..until, &format!("\n{}\n", values()));
    text + &page[end..]
}

#[test]
fn the_tables_of_options_are_those_of_the_runtime() {
    let page = page("options");
    let updated = updated(&page);
    if env::var_os("UPDATE_GUIDE").is_some() {
        fs::write(path("fsdp-runtime/docs/options.md"), &updated).expect("a page");
    }
    assert!(page == updated, "options.md has another table; UPDATE_GUIDE=1 rewrites the page");
}

/// Each option has one row that says what it means.
#[test]
fn every_option_is_explained() {
    let page = page("options");
    let text = &page[..page.find(MARKS.0).expect("a mark")];
    let rows = rows(text).into_iter().filter(|row| row[0].starts_with('`'));
    let mut explained: Vec<&str> =
        rows.flat_map(|row| named(&row[0])).map(|option| option.name).collect();
    let mut names: Vec<&str> = TABLE.iter().map(|row| row.name).collect();
    explained.sort_unstable();
    names.sort_unstable();
    assert_eq!(explained, names);
}
