//! Python programs that tests compare with.

use std::process::Command;

/// Returns a Python that has the packages, if there is one.
pub fn python_with(packages: &str) -> Option<String> {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let imports = Command::new(&python).args(["-c", &format!("import {packages}")]).output();
    if !imports.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: {python} cannot import {packages}");
        return None;
    }
    Some(python)
}
