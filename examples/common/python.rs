//! Python programs that tests compare with.

use std::ffi::OsStr;
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

/// Runs a script at a path below `examples/`, and returns its output.
pub fn run_script(python: &str, path: &str, arguments: &[&OsStr]) -> Vec<u8> {
    let output = Command::new(python)
        .arg(format!("examples/{path}"))
        .args(arguments)
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .expect("python was found before");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}
