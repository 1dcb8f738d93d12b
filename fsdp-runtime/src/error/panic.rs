//! Errors that unwind through code which cannot return them, and the messages of panics.

use std::any::Any;

use super::Error;

/// Ends this rank with a typed error from where only a panic can: the caller is Burn's or the
/// user's code. [`Fsdp::backward`](crate::Fsdp::backward) and [`launch`](crate::launch) turn it
/// back into the error; the panic hook is not run, as nothing is wrong with the program.
pub(crate) fn raise(error: Error) -> ! {
    std::panic::resume_unwind(Box::new(error))
}

/// Returns the message of a panic, or of the [`Error`] that was raised as one.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .or_else(|| panic.downcast_ref::<Error>().map(ToString::to_string))
        .unwrap_or_else(|| "a value without a message".into())
}
