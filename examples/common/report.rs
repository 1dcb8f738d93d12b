//! Format of the result and of the progress bar.

use std::fmt::Display;
use std::process::ExitCode;

use anyhow::Result;
use fsdp_runtime::Rank;
use fsdp_runtime::env::RankEnv;
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

/// Returns the exit code of the program: 1 after an error, which this function prints to standard error.
///
/// The text is written at once, so that the lines of several processes on one terminal do not mix.
pub fn exit_code(result: Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    let text = format!("Error: {error:?}\n");
    eprint!("{text}");
    ExitCode::FAILURE
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
    use super::*;

    #[test]
    fn digits_are_grouped_by_three() {
        assert_eq!([0, 999, 1000, 1_000_000].map(grouped), ["0", "999", "1,000", "1,000,000"]);
    }
}
