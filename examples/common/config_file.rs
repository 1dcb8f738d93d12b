//! The configuration file of `fsdp launch`, in examples that do not read it.

use std::ffi::OsString;

use fsdp_runtime::config::CONFIG_VARIABLE;
use fsdp_runtime::env::RankEnv;

/// Prints a line to standard error if `fsdp launch` was given a configuration file. Of several
/// processes, that of rank 0 prints it.
pub fn note_unread() {
    let reports = RankEnv::read().ok().flatten().is_none_or(|place| place.rank.index() == 0);
    if let Some(note) = note(std::env::var_os(CONFIG_VARIABLE)).filter(|_| reports) {
        eprintln!("{note}");
    }
}

/// Returns the line about a file, given the value of the environment variable that names it.
fn note(variable: Option<OsString>) -> Option<String> {
    let file = variable.filter(|file| !file.is_empty())?;
    Some(format!(
        "{CONFIG_VARIABLE}={}: this example does not read the file; its settings have no effect, \
         apart from those of the launch",
        file.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_read_is_noted() {
        let note_of = |value: &str| note(Some(value.into()));
        let line = note_of("run/config.yaml").unwrap();
        assert!(
            line.starts_with("FSDP_CONFIG=run/config.yaml: ") && !line.contains('\n'),
            "{line}"
        );
        assert_eq!((note(None), note_of("")), (None, None));
    }
}
