//! The configuration of `fsdp launch`, in examples that do not read it.

use std::ffi::OsString;

use fsdp_runtime::config::{
    CONFIG_VARIABLE, Config, FsdpSection, MixedPrecision, OVERRIDES_VARIABLE, Overrides,
};
use fsdp_runtime::launch::env::RankEnv;

/// Prints a line to standard error if `fsdp launch` was given a configuration file, or flags that
/// are keys of one. Of several processes, that of rank 0 prints it.
pub fn note_unread() {
    let reports = RankEnv::read().ok().flatten().is_none_or(|place| place.rank.index() == 0);
    if let Some(note) = note(|name| std::env::var_os(name)).filter(|_| reports) {
        eprintln!("{note}");
    }
}

/// Returns the line, given the environment variables.
fn note(variable: impl Fn(&str) -> Option<OsString>) -> Option<String> {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    if let Some(file) = set(CONFIG_VARIABLE) {
        return Some(format!(
            "{CONFIG_VARIABLE}={}: this example does not read the file; its settings have no \
             effect, apart from those of the launch",
            file.display()
        ));
    }
    let flags = Overrides::from_variable(&set(OVERRIDES_VARIABLE)?.to_string_lossy()).ok()?;
    let (config, _) = Config::read_with(None, &flags).ok()?;
    let read_elsewhere =
        config.fsdp == FsdpSection::default() && config.mixed_precision == MixedPrecision::No;
    (!read_elsewhere).then(|| {
        "this example does not read the flags of `fsdp launch` for sharding and precision; they \
         have no effect"
            .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_that_is_not_read_is_noted() {
        let note_of = |name: &str, value: &str| {
            note(|wanted| (wanted == name).then(|| OsString::from(value)))
        };
        let line = note_of(CONFIG_VARIABLE, "run/config.yaml").unwrap();
        assert!(
            line.starts_with("FSDP_CONFIG=run/config.yaml: ") && !line.contains('\n'),
            "{line}"
        );
        let strategy = r#"{"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}"#;
        assert!(note_of(OVERRIDES_VARIABLE, strategy).unwrap().contains("no effect"));
        let launch = r#"{"num_processes": "2"}"#;
        assert_eq!(note_of(OVERRIDES_VARIABLE, launch), None, "read by the launcher");
        assert_eq!((note(|_| None), note_of(CONFIG_VARIABLE, "")), (None, None));
    }
}
