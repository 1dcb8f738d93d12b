//! The flags of `accelerate launch`: those that set a key of the configuration, those without an
//! effect here, and those that are refused.
//!
//! `table.rs` lists the flags, `elsewhere.rs` those that only other systems have. This file parses
//! them with clap. Each flag has two spellings, with hyphens and with underscores.

mod elsewhere;
mod table;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Command};
use fsdp_runtime::config::{ConfigError, Overrides};

use self::elsewhere::{NOTED, REFUSED};
use self::table::{ALWAYS, KEYS};

/// A flag that sets a key of the configuration.
#[derive(Clone, Copy, Debug)]
struct KeyFlag {
    /// Name with underscores, without the leading hyphens.
    name: &'static str,
    key: &'static str,
    /// Name of the value in the help text; `None` for a flag without a value, which sets `true`.
    value: Option<&'static str>,
    help: &'static str,
}

/// Flags with the same answer.
#[derive(Clone, Copy, Debug)]
struct Group {
    /// Reason for the answer, for a message.
    because: &'static str,
    /// Flags with a value.
    values: &'static [&'static str],
    /// Flags without a value.
    switches: &'static [&'static str],
    /// Values that switch the option off. A flag with such a value gets no answer.
    off: &'static [&'static str],
}

/// Key of the number of ranks.
const NUM_PROCESSES: &str = "num_processes";

/// Flags with one letter, and their names.
const SHORT: [(&str, char); 4] =
    [("num_processes", 'n'), ("quiet", 'q'), ("module", 'm'), ("tee", 't')];

/// The flags of a command line.
#[derive(Clone, Debug, Default)]
pub(super) struct Flags {
    /// Key and value of each flag that sets a key.
    keys: Vec<(&'static str, String)>,
    /// Minimum number of ranks, of `--num-processes MIN:MAX`.
    pub(super) min_processes: Option<usize>,
    /// Flags without an effect here, and the reasons.
    pub(super) noted: Vec<Answer>,
    /// Flags that ask for something that would not happen, and the reasons.
    pub(super) refused: Vec<Answer>,
}

/// A flag and the reason why it has no effect. The value is left out: it may be a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Name with underscores, without the leading hyphens.
    pub(super) flag: &'static str,
    pub(super) because: &'static str,
}

impl Flags {
    /// Sets the keys of the flags.
    pub(super) fn set_keys(&self, overrides: &mut Overrides) -> Result<(), ConfigError> {
        self.keys.iter().try_for_each(|(key, value)| overrides.set(key, value))
    }
}

impl clap::Args for Flags {
    fn augment_args(command: Command) -> Command {
        let keys = KEYS.iter().map(|flag| {
            let arg = arg(flag.name, flag.value).help(flag.help);
            arg.help_heading("Keys of the configuration file")
        });
        let always = ALWAYS.iter().map(|(name, _)| arg(name, None).hide(true));
        let elsewhere = NOTED.iter().chain(REFUSED).flat_map(|group| {
            let values = group.values.iter().map(|name| arg(name, Some("VALUE")));
            values.chain(group.switches.iter().map(|name| arg(name, None)))
        });
        // As in Accelerate, the last of several equal flags counts.
        let command = command.args_override_self(true);
        command.args(keys.chain(always)).args(elsewhere.map(|arg| arg.hide(true)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Returns the flag with this name in both spellings. Without the name of a value it takes none.
fn arg(name: &'static str, value: Option<&'static str>) -> Arg {
    // clap takes names that live as long as the program, which parses its command line once.
    let hyphens: &'static str = Box::leak(name.replace('_', "-").into_boxed_str());
    let arg = Arg::new(name).long(hyphens);
    let arg = if hyphens == name { arg } else { arg.alias(name) };
    let short = SHORT.iter().find(|(of, _)| *of == name);
    let arg = short.map_or(arg.clone(), |(_, short)| arg.short(*short));
    match value {
        Some(value) => arg.value_name(value).action(ArgAction::Set),
        None => arg.action(ArgAction::SetTrue),
    }
}

impl clap::FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let keys = KEYS.iter().filter_map(|flag| {
            let value = match flag.value {
                Some(_) => matches.get_one::<String>(flag.name).cloned(),
                None => matches.get_flag(flag.name).then(|| "true".into()),
            };
            Some((flag.key, value?))
        });
        let mut keys: Vec<(&'static str, String)> = keys.collect();
        let mut min_processes = None;
        for (_, value) in keys.iter_mut().filter(|(key, _)| *key == NUM_PROCESSES) {
            if let Some((min, max)) = range(value)? {
                (min_processes, *value) = (Some(min), max.to_string());
            }
        }
        Ok(Self {
            keys,
            min_processes,
            noted: answers(NOTED, matches),
            refused: answers(REFUSED, matches),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Parses `MIN:MAX`, two numbers of ranks from 1. Returns `None` for a text without a colon.
fn range(text: &str) -> Result<Option<(usize, usize)>, clap::Error> {
    let Some((min, max)) = text.split_once(':') else { return Ok(None) };
    let found = min.trim().parse().ok().zip(max.trim().parse().ok());
    match found.filter(|(min, max): &(usize, usize)| (1..=*max).contains(min)) {
        Some(range) => Ok(Some(range)),
        None => {
            let text = format!(
                "invalid value '{text}' for '--num-processes': expected a number of ranks, or \
                 MIN:MAX with 1 <= MIN <= MAX, such as 2:4\n"
            );
            Err(clap::Error::raw(ErrorKind::ValueValidation, text))
        }
    }
}

/// Returns the answers to the flags of these groups that are on the command line.
fn answers(groups: &[Group], matches: &ArgMatches) -> Vec<Answer> {
    let mut answers = Vec::new();
    for group in groups {
        let on = |name: &&str| {
            let off = |value: &String| group.off.iter().any(|off| off.eq_ignore_ascii_case(value));
            matches.get_one::<String>(name).is_some_and(|value| !off(value))
        };
        let values = group.values.iter().filter(|name| on(name));
        let switches = group.switches.iter().filter(|name| matches.get_flag(name));
        let because = group.because;
        answers.extend(values.chain(switches).map(|flag| Answer { flag, because }));
    }
    answers
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_range_of_ranks_has_two_numbers_in_order() {
        let range = |text: &str| range(text).map_err(|error| error.to_string());
        assert_eq!(range("4"), Ok(None));
        assert_eq!((range("2:4"), range(" 3 : 3 ")), (Ok(Some((2, 4))), Ok(Some((3, 3)))));
        for wrong in ["4:2", "0:4", ":4", "2:", "a:b", "1:2:3", "-1:2"] {
            let error = range(wrong).unwrap_err();
            assert!(error.contains(wrong) && error.contains("MIN:MAX"), "{error}");
        }
    }

    /// Each flag has one answer, and each key exists.
    #[test]
    fn every_flag_is_listed_once() {
        let mut names: Vec<&str> = KEYS.iter().map(|flag| flag.name).collect();
        names.extend(ALWAYS.iter().map(|(name, _)| *name));
        for group in NOTED.iter().chain(REFUSED) {
            names.extend(group.values.iter().chain(group.switches));
            assert!(!group.because.is_empty());
        }
        let unique: BTreeSet<&str> = names.iter().copied().collect();
        assert_eq!(unique.len(), names.len());
        let mut overrides = Overrides::default();
        for flag in KEYS.iter() {
            overrides.set(flag.key, "1").unwrap_or_else(|error| panic!("{error}"));
        }
    }
}
