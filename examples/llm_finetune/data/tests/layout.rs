//! Modules import in one direction.

use crate::data::fixture::folder;

#[test]
fn modules_import_only_those_above_them() {
    let read = |name: &str| std::fs::read_to_string(folder().join(name)).unwrap();
    let text = read("mod.rs");
    let rows = text.lines().filter(|line| line.starts_with("//! | `"));
    let modules: Vec<String> = rows
        .flat_map(|row| row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2))
        .map(str::to_string)
        .collect();
    assert!(modules.len() > 20, "{modules:?}");
    for (place, module) in modules.iter().enumerate() {
        let text = read(&format!("{module}.rs"));
        let code = text.split("#[cfg(test)]").next().unwrap();
        for line in code.lines().filter(|line| line.starts_with("use super::")) {
            let names = line.trim_start_matches("use super::").trim_start_matches('{');
            let imported = names
                .split([':', ',', ';', '}', ' '])
                .filter(|name| modules.iter().any(|m| m == name));
            for name in imported {
                let at = modules.iter().position(|known| known == name).unwrap();
                assert!(at < place, "{module} imports {name}, which is below it");
            }
        }
    }
    let declared = text.lines().filter(|line| line.starts_with("pub mod ")).count();
    assert_eq!(declared, modules.len(), "a module is missing in the list");
}
