//! Panics in the forward of a unit, as typed errors where their cause is known: operations of Burn on tensors of
//! different dtypes, and code that takes a rank's part of the outputs of a `column` layer for all of them.
//!
//! Flex checks the dtypes of an operation's operands and names them. On CubeCL devices Burn names none.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::hooks::{Call, OpenCall};
use crate::error::{ScheduleError, panic_text, raise};
use crate::module::RunningForward;

/// Runs the body of a unit's forward.
///
/// # Panics
///
/// Unwinds with [`ScheduleError::DtypeMismatch`] if an operation of Burn panics because the dtypes of
/// its operands differ, with [`ScheduleError::PanicBetweenParts`] after any other panic with a text between the split
/// layers of tensor parallel ranks, and as the body does otherwise.
pub fn run<O>(call: &Call, forward: impl FnOnce() -> O) -> O {
    let Some(OpenCall { runtime, unit, .. }) = &call.0 else { return forward() };
    // What the body has changed is seen by no one else than after a panic without this call.
    let panic = match catch_unwind(AssertUnwindSafe(forward)) {
        Ok(output) => return output,
        Err(panic) => panic,
    };
    let Some(message) = panic_text(&*panic) else { resume_unwind(panic) };
    let unit = runtime.unit_name(*unit);
    if let Some((operation, [left, right])) = mismatch(message) {
        raise(ScheduleError::DtypeMismatch { unit, operation, left, right }.into());
    }
    if let Some((path, ranks)) = RunningForward::part_of() {
        let message = message.to_string();
        raise(ScheduleError::PanicBetweenParts { unit, path, ranks, message }.into());
    }
    resume_unwind(panic)
}

/// Returns the operation and the two dtypes that Burn's message about a mismatch of float dtypes
/// names; `None` for any other message.
///
/// The messages of Flex are `..: matmul: dtype mismatch\n  left: F32\n right: BF16`, the text of
/// `assert_eq`, and `storage: dtype mismatch (expected F32, got BF16)`.
fn mismatch(message: &str) -> Option<(String, [String; 2])> {
    const DTYPES: [&str; 5] = ["F64", "F32", "Flex32", "F16", "BF16"];
    let (before, after) = message.split_once("dtype mismatch")?;
    let operation = before.rsplit(": ").map(str::trim).find(|part| !part.is_empty())?;
    let words = after.split(|c: char| !c.is_ascii_alphanumeric());
    let mut dtypes = words.filter(|word| DTYPES.contains(word)).map(str::to_string);
    Some((operation.trim_end_matches(':').to_string(), [dtypes.next()?, dtypes.next()?]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_about_dtypes_names_the_operation_and_both() {
        let assertion =
            "assertion `left == right` failed: matmul: dtype mismatch\n  left: BF16\n right: F32";
        let names = |operation: &str, left: &str, right: &str| {
            Some((operation.to_string(), [left.to_string(), right.to_string()]))
        };
        assert_eq!(mismatch(assertion), names("matmul", "BF16", "F32"));
        let storage = "storage: dtype mismatch (expected F32, got BF16)";
        assert_eq!(mismatch(storage), names("storage", "F32", "BF16"));
        let cat = "cat: dtype mismatch: expected F16, got F32";
        assert_eq!(mismatch(cat), names("cat", "F16", "F32"));
    }

    #[test]
    fn other_messages_are_left_alone() {
        let int = "assertion failed: int_matmul: dtype mismatch\n  left: I32\n right: I64";
        for message in [int, "matmul: inner dimensions must match", "", "dtype mismatch F32 F16"] {
            assert_eq!(mismatch(message), None, "{message}");
        }
    }
}
