//! Wrong use does not compile, and the compiler says what to write instead: one case for each rule.
//!
//! `BLESS=1 cargo test --test compile_fail` accepts new messages.
//!
//! Each case is one call of `rustc`, beside the libraries that this test was built with, on all cores. Cargo names
//! the libraries: it is asked to build this test again, with the same features, and finds everything up to date.
//! (The crates `trybuild` and `ui_test` check or compile all dependencies once more, which takes minutes.)

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rayon::prelude::*;
use serde_json::Value;

/// Fewest cases that there are.
const CASES: usize = 64;
/// Crates that the cases use.
const CRATES: [&str; 2] = ["burn", "fsdp_runtime"];

/// Returns those of the root package's features that this test was built with.
fn features() -> Vec<&'static str> {
    macro_rules! on {
        ($($feature:literal)*) => {
            [$(($feature, cfg!(feature = $feature))),*]
        };
    }
    let features = on!(
        "flex" "train" "plot" "trace" "cpu" "wgpu" "fusion" "persistence" "cuda" "cuda-cpp" "autotune"
        "x86-v4" "mpi"
    );
    features.into_iter().filter(|(_, on)| *on).map(|(feature, _)| feature).collect()
}

/// Returns a program of the toolchain: Cargo says which one.
fn tool(variable: &str, name: &str) -> OsString {
    std::env::var_os(variable).unwrap_or_else(|| name.into())
}

/// Returns the library of each crate that the cases use.
fn libraries() -> [PathBuf; 2] {
    let mut build = Command::new(tool("CARGO", "cargo"));
    build.args(["test", "--no-run", "--test", "compile_fail", "--message-format=json", "--locked"]);
    build.args(["--no-default-features", "--features", &features().join(",")]);
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    let built = build.stderr(Stdio::inherit()).output().expect("cargo starts");
    assert!(built.status.success(), "cargo builds this test");
    let lines = String::from_utf8(built.stdout).expect("cargo prints text");
    let artifacts: Vec<Value> =
        lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    CRATES.map(|name| {
        let of_crate = |artifact: &&Value| {
            artifact["target"]["name"] == name && artifact["target"]["kind"][0] == "lib"
        };
        let artifact = artifacts.iter().find(of_crate);
        let files = artifact.and_then(|artifact| artifact["filenames"].as_array());
        let mut files = files.into_iter().flatten().filter_map(Value::as_str);
        let library = files.find(|file| file.ends_with(".rlib"));
        library.unwrap_or_else(|| panic!("cargo names no library of {name}")).into()
    })
}

/// Compiles a case. Returns the compiler's messages, or `None` if it compiles.
fn messages(case: &Path, libraries: &[PathBuf; 2], out: &Path) -> Option<String> {
    let folder = libraries[0].parent().expect("a library is in a folder");
    let mut rustc = Command::new(tool("RUSTC", "rustc"));
    rustc.args(["--edition=2024", "--crate-type=bin", "--emit=metadata", "--color=never"]);
    rustc.arg("--diagnostic-width=140").arg("--out-dir").arg(out);
    rustc.arg(format!("-Ldependency={}", folder.display()));
    for (name, library) in CRATES.iter().zip(libraries) {
        rustc.arg(format!("--extern={name}={}", library.display()));
    }
    let ran = rustc.arg(case).output().expect("rustc starts");
    let text = String::from_utf8(ran.stderr).expect("rustc prints text");
    (!ran.status.success()).then(|| normalized(&text))
}

/// Lines that count errors, which depends on the compiler.
const COUNTS: [&str; 3] =
    ["error: aborting due to ", "For more information about ", "Some errors have "];

/// Returns messages without what changes in other places than the case: lines that count errors, numbers of lines
/// in other files, and the number of types that a list leaves out.
fn normalized(text: &str) -> String {
    let is_kept = |line: &&str| !COUNTS.iter().any(|count| line.starts_with(count));
    let lines: Vec<&str> = text.lines().filter(is_kept).collect();
    let messages = lines.split(|line| line.trim().is_empty()).map(without_lines_of_others);
    messages.filter(|message| !message.is_empty()).collect::<Vec<_>>().join("\n\n")
}

/// Returns the number of leading spaces.
fn indent(line: &str) -> usize {
    line.len() - line.trim_start_matches(' ').len()
}

/// Returns a file without the line and the column in it.
fn without_position(place: &str) -> &str {
    place.trim_end_matches(|c: char| c.is_ascii_digit() || c == ':')
}

/// Returns one message without the numbers of lines in other files, which widen its margin.
fn without_lines_of_others(message: &[&str]) -> String {
    let (mut is_other, mut margin, mut widest) = (false, None, 1);
    let mut lines = Vec::new();
    for line in message {
        let mut line = line.trim_end().to_string();
        let digits: usize = line.trim_start().chars().take_while(char::is_ascii_digit).count();
        let is_numbered = digits > 0 && line[indent(&line) + digits..].starts_with(" |");
        if let Some((before, place)) =
            line.split_once("--> ").filter(|(it, _)| it.trim().is_empty())
        {
            margin.get_or_insert(before.len());
            is_other = !place.starts_with("tests/ui/");
            if is_other {
                line = format!("{before}--> {}", without_position(place));
            }
        } else if let Some((before, place)) =
            line.split_once("::: ").filter(|(it, _)| it.trim().is_empty())
        {
            is_other = !place.starts_with("tests/ui/");
            if is_other {
                line = format!("{before}::: {}", without_position(place));
            }
        } else if line.starts_with("help: ") {
            // What it suggests is a change of the case.
            is_other = false;
        } else if is_numbered && is_other {
            let at = indent(&line);
            line.replace_range(at..at + digits, &" ".repeat(digits));
        } else if is_numbered {
            widest = widest.max(digits);
        }
        if let Some(others) = line.trim_start().strip_prefix("and ") {
            let rest = others.trim_start_matches(|c: char| c.is_ascii_digit());
            if rest.starts_with(" other") {
                line = format!("{}and $N{rest}", " ".repeat(indent(&line)));
            }
        }
        lines.push(line);
    }
    let surplus = margin.unwrap_or(widest).saturating_sub(widest);
    let cut = |line: &String| line[surplus.min(indent(line))..].to_string();
    lines.iter().map(cut).collect::<Vec<_>>().join("\n")
}

/// Returns what is wrong with a case, if anything is.
fn check(case: &Path, libraries: &[PathBuf; 2], out: &Path) -> Option<String> {
    let name = case.display();
    let Some(found) = messages(case, libraries, out) else {
        return Some(format!("{name} compiles"));
    };
    let file = case.with_extension("stderr");
    if std::env::var_os("BLESS").is_some() {
        fs::write(&file, format!("{found}\n")).expect("the messages can be written");
        return None;
    }
    let expected = fs::read_to_string(&file).unwrap_or_default();
    let expected = expected.trim_end();
    (found != expected).then(|| format!("{name}: expected\n{expected}\n\nfound\n{found}\n"))
}

#[test]
fn wrong_use_does_not_compile() {
    let cases = fs::read_dir("tests/ui").expect("the folder of cases");
    let cases = cases.map(|entry| entry.expect("an entry can be read").path());
    let is_case = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "rs");
    let mut cases: Vec<PathBuf> = cases.filter(is_case).collect();
    cases.sort();
    assert!(cases.len() >= CASES, "{} cases", cases.len());
    let (libraries, out) = (libraries(), tempfile::tempdir().expect("a folder"));
    let wrong: Vec<String> =
        cases.par_iter().filter_map(|case| check(case, &libraries, out.path())).collect();
    assert!(wrong.is_empty(), "{} cases\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn what_changes_in_other_places_is_left_out() {
    let text = "error: no\n   --> tests/ui/a.rs:9:1\n    |\n  9 | struct A;\n    = help: these\n              and 12 others\n\
                note: by\n   --> src/b.rs:108:3\n    |\n108 | trait B;\n    |\n   ::: src/c.rs:7:1\n    |\n  7 | impl B;\n\n\
                error: aborting due to 2 previous errors\n\nFor more information about this error, try\n";
    let expected = "error: no\n --> tests/ui/a.rs:9:1\n  |\n9 | struct A;\n  = help: these\n            and $N others\n\
                    note: by\n --> src/b.rs\n  |\n  | trait B;\n  |\n ::: src/c.rs\n  |\n  | impl B;";
    assert_eq!(normalized(text), expected);
}
