//! The import order of the folders: a room uses only rooms that its `ROOMS` file lists above it.
//!
//! A room is a module at the top of a source folder: a file or a folder. `crate::room::..` in a
//! file of another room is an import. Test code, `lib.rs` and `main.rs` may use any room.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the `.rs` files below a folder that hold no test code only.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a source folder can be read") {
        let path = entry.expect("an entry can be read").path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "tests" && name != "bin") {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs")
            && path.file_name().is_some_and(|name| name != "tests.rs")
        {
            found.push(path);
        }
    }
    found
}

/// Returns the code of a file: without comments, and without test modules, which end a file.
fn code(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let lines: Vec<&str> = lines.collect();
    let test = |line: &&str| line.trim_start().starts_with("#[cfg") && line.contains("test");
    let end = lines.windows(2).position(|pair| {
        test(&pair[0]) && pair[1].contains("mod ") && pair[1].trim_end().ends_with('{')
    });
    lines[..end.unwrap_or(lines.len())].join("\n")
}

/// Returns the first segments of the `crate::` paths in the code: of `crate::{a::B, c}`, `a` and
/// `c`.
fn imports(code: &str) -> BTreeSet<String> {
    let ident = |text: &str| -> String {
        text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        let Some(list) = rest.strip_prefix('{') else {
            found.insert(ident(rest));
            continue;
        };
        let mut depth = 0;
        let mut item = String::new();
        for c in list.chars() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    found.insert(ident(item.trim()));
                    item.clear();
                    continue;
                }
                _ => {}
            }
            item.push(c);
        }
        found.insert(ident(item.trim()));
    }
    found
}

/// Returns every import against the order, and every room that the order lacks or has in vain.
fn wrong(folder: &Path) -> Vec<String> {
    let order = fs::read_to_string(folder.join("ROOMS")).expect("the folder has an order");
    let order = order.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    // Lines with a slash order the files of one room, and `tests` is test code.
    let listed = |room: &&str| !room.is_empty() && !room.contains('/') && *room != "tests";
    let order: Vec<&str> = order.filter(listed).collect();
    let place = |room: &str| order.iter().position(|known| *known == room);
    let mut wrong = Vec::new();
    let mut rooms = BTreeSet::new();
    for file in sources(folder) {
        let below = file.strip_prefix(folder).expect("a file below the folder");
        let first = below.components().next().expect("a name").as_os_str().to_string_lossy();
        let room = first.trim_end_matches(".rs").to_string();
        if ["lib", "main"].contains(&room.as_str()) {
            continue;
        }
        rooms.insert(room.clone());
        let text = fs::read_to_string(&file).expect("a source file is text");
        for other in imports(&code(&text)) {
            if let (Some(own), Some(used)) = (place(&room), place(&other))
                && used > own
            {
                wrong.push(format!("{} uses `{other}`, which is below `{room}`", below.display()));
            }
        }
    }
    wrong.extend(
        rooms
            .iter()
            .filter(|room| place(room).is_none())
            .map(|room| format!("`{room}` is not in {}", folder.join("ROOMS").display())),
    );
    wrong.extend(
        order
            .iter()
            .filter(|room| !rooms.contains(**room))
            .map(|room| format!("`{room}` in {} is no room", folder.join("ROOMS").display())),
    );
    wrong
}

#[test]
fn rooms_import_only_from_rooms_above_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec!["src", "src/bin/fsdp"];
    // A package from crates.io has no workspace around it.
    let macros = "../fsdp-macros/src";
    if root.join("../examples").is_dir() || root.join(macros).is_dir() {
        folders.push(macros);
    }
    for folder in folders {
        let found = wrong(&root.join(folder));
        assert!(found.is_empty(), "{folder}:\n{}", found.join("\n"));
    }
    let rooms = fs::read_to_string(root.join("src/ROOMS")).expect("an order");
    let code = |line: &&str| !line.trim_start().starts_with('#');
    let rooms = rooms.lines().filter(code).count();
    assert!(rooms <= 14, "{rooms} rooms at the top level");
}

/// An order that the code breaks is found.
#[test]
fn an_import_against_the_order_is_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let write =
        |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("written");
    write("ROOMS", "low # first\nhigh\ngone\n");
    write("low.rs", "use crate::{high::Thing, low};\n");
    write("high.rs", "use crate::low::Thing; // crate::other\n");
    write("new.rs", "#[cfg(test)]\nmod tests {\n    use crate::high;\n}\n");
    let found = wrong(folder.path());
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[0].contains("low.rs uses `high`"), "{found:?}");
    assert!(found[1].contains("`new` is not in") && found[2].contains("`gone` in"), "{found:?}");
}
