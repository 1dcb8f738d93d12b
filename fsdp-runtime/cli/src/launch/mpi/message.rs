//! The format of messages from `fsdp rank` to the launcher, one a line:
//!
//! ```text
//! <run> <rank> :a line that the program has printed
//! <run> <rank> !code 7        the program has ended with this exit code, other than 0
//! <run> <rank> !signal 9      the program was killed by this signal
//! ```
//!
//! `<run>` is the value of `FSDP_RUN_ID`. It distinguishes messages from the lines of `mpirun`.

use std::fmt::Display;

use crate::launch::exit::Exit;

/// A message from `fsdp rank`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message<'a> {
    /// A line that the program has printed.
    Line(&'a [u8]),
    /// The exit code or signal with which the program failed.
    Failed(Exit),
}

/// Returns the start of all messages of a run: `<run> `.
pub(super) fn run_prefix(run: &str) -> String {
    format!("{run} ")
}

/// Returns the start of all messages of a rank: `<run> <rank> `.
pub(super) fn rank_prefix(run: &str, rank: impl Display) -> String {
    format!("{}{rank} ", run_prefix(run))
}

/// Returns the start of a [`Message::Line`].
pub(super) fn line_prefix(rank_prefix: &str) -> String {
    format!("{rank_prefix}:")
}

/// Returns a [`Message::Failed`] with its line ending; `None` for a program that did not fail.
pub(super) fn failure(rank_prefix: &str, exit: Exit) -> Option<String> {
    match exit {
        Exit::Code(0) => None,
        Exit::Code(code) => Some(format!("{rank_prefix}!code {code}\n")),
        Exit::Signal(signal) => Some(format!("{rank_prefix}!signal {signal}\n")),
    }
}

/// Returns the rank and the message in a line; `None` for a line without a message of this run.
pub(super) fn parse<'a>(line: &'a [u8], run_prefix: &str) -> Option<(usize, Message<'a>)> {
    let line = line.strip_prefix(run_prefix.as_bytes())?;
    let end = line.iter().position(|byte| *byte == b' ')?;
    // No `mpirun` starts more ranks than a `u16` can count. The bound keeps a damaged line from
    // making the list of ranks long.
    let rank = usize::from(std::str::from_utf8(&line[..end]).ok()?.parse::<u16>().ok()?);
    let (kind, text) = line[end + 1..].split_first()?;
    if *kind == b':' {
        return Some((rank, Message::Line(text)));
    }
    let (kind, number) = std::str::from_utf8(text).ok()?.split_once(' ')?;
    let number = number.parse().ok()?;
    match kind {
        "code" => Some((rank, Message::Failed(Exit::Code(number)))),
        "signal" => Some((rank, Message::Failed(Exit::Signal(number)))),
        _ => None,
    }
}
