//! Format of the result and of the progress bar.

use std::fmt::{self, Display};
use std::process::ExitCode;

use anyhow::Result;
use fsdp_runtime::errors::LaunchError;
use fsdp_runtime::launch::env::{EXIT_REFUSED, RankEnv};
use fsdp_runtime::{Error, Rank};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::args::OutputArgs;

/// Returns whether this process prints for all ranks, because it runs rank 0. `started` is the
/// process's place among the ranks, or `None` if all ranks are threads of this process.
pub fn reports(started: Option<&RankEnv>) -> bool {
    started.is_none_or(|place| place.rank == Rank::ZERO)
}

/// Prints the result to standard output: as a table, as one line of JSON under `--json`, or as
/// both. `--json --quiet` omits the table.
///
/// # Errors
///
/// If the summary cannot be serialized.
pub fn print_summary(summary: &(impl Display + Serialize), output: OutputArgs) -> Result<()> {
    if !(output.json && output.quiet) {
        println!("{summary}");
    }
    if output.json {
        println!("{}", serde_json::to_string(summary)?);
    }
    Ok(())
}

/// An error that ends a program before a rank starts, such as a file that cannot be read. A restart
/// would fail in the same way.
#[derive(Debug)]
pub struct Refused(anyhow::Error);

/// Error of a rank, which keeps the types of its causes.
#[derive(Debug)]
struct RankFailed(anyhow::Error);

impl Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Display for RankFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Refused {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl std::error::Error for RankFailed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

/// Marks an error as one that a restart does not cure.
///
/// # Errors
///
/// Those of `result`.
pub fn refused<T>(result: Result<T>) -> Result<T> {
    result.map_err(|error| Refused(error).into())
}

/// Converts the error of a rank, so that [`exit_code`] finds what caused it.
///
/// # Errors
///
/// Those of `result`.
pub fn of_rank<T>(result: Result<T>) -> Result<T, Box<dyn std::error::Error + Send + Sync>> {
    result.map_err(|error| RankFailed(error).into())
}

/// Returns the exit code of the program after an error, which this function prints to standard
/// error: [`EXIT_PEER_FAILED`](fsdp_runtime::launch::env::EXIT_PEER_FAILED) if another rank failed,
/// [`EXIT_REFUSED`] for an error that a restart does not cure, and otherwise 1.
///
/// The text is written at once, so that the lines of several processes on one terminal do not mix.
pub fn exit_code(result: Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    let text = format!("Error: {error:?}\n");
    eprint!("{text}");
    ExitCode::from(u8::try_from(code_of(&error)).unwrap_or(1))
}

fn code_of(error: &anyhow::Error) -> i32 {
    if error.is::<Refused>() {
        return EXIT_REFUSED;
    }
    let Some(launch) = error.downcast_ref::<LaunchError>() else { return 1 };
    let of_rank = launch.source.downcast_ref::<RankFailed>();
    let typed = of_rank.and_then(|RankFailed(error)| error.downcast_ref::<Error>());
    typed.map_or_else(|| launch.exit_code(), Error::exit_code)
}

/// Formats one row of the result's table, 44 characters wide.
pub fn table_row(name: &str, value: &str) -> String {
    format!("{name:<30}{value:>14}")
}

/// Formats a number with a comma every three digits: `1234567` as `1,234,567`.
pub fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Sets the template of a progress bar, in the syntax of [`ProgressStyle`].
pub fn set_template(bar: &ProgressBar, template: &str) {
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.set_style(style),
        Err(error) => debug_assert!(false, "the progress bar's template: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;
    use fsdp_runtime::errors::{CheckpointError, CollectiveError};
    use fsdp_runtime::prelude::*;

    use super::*;

    #[test]
    fn the_exit_code_tells_what_a_restart_can_cure() {
        let failing = |error: Error| {
            let options = LaunchOptions::new(1).with_device(burn::tensor::Device::flex());
            let rank = move |_| of_rank(Err::<(), _>(error.clone()).context("while it trained"));
            let error: anyhow::Error = launch(options, rank).unwrap_err().into();
            assert!(format!("{error:?}").contains("while it trained"), "{error:?}");
            code_of(&error)
        };
        let mismatch = CheckpointError::Mismatch { folder: "a".into(), differences: Vec::new() };
        let io = CheckpointError::Io {
            action: "write",
            file: "a".into(),
            kind: std::io::ErrorKind::StorageFull,
            reason: "no space".into(),
        };
        let peer = CollectiveError::PeerFailed { rank: Rank::ZERO, reason: "it ended".into() };
        assert_eq!(failing(mismatch.into()), 78);
        assert_eq!(failing(io.into()), 1);
        assert_eq!(failing(peer.into()), 75);
        let refused = refused(Err::<(), _>(anyhow::anyhow!("no such file"))).unwrap_err();
        assert_eq!((code_of(&refused), refused.to_string()), (78, "no such file".into()));
        assert_eq!(code_of(&anyhow::anyhow!("other")), 1);
    }

    #[test]
    fn digits_are_grouped_by_three() {
        assert_eq!([0, 999, 1000, 1_000_000].map(grouped), ["0", "999", "1,000", "1,000,000"]);
    }
}
