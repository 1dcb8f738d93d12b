//! Agreement of all ranks on whether a step that each rank ran for itself has succeeded.

use crate::collectives::Op;
use crate::collectives::comm::Communicator;
use crate::error::{CollectiveError, Error};

/// Effect of an error on one rank on the world's process group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnError {
    /// The process group stays usable: a caller may handle the error and continue.
    KeepWorld,
    /// Every rank without an error of its own fails the process group, so that the launch reports
    /// the rank that had the error even if the other ranks handle theirs.
    FailWorld,
}

/// Returns this rank's value if every rank has one, and an error on every rank if any rank has an
/// error. Every rank calls it with its own `result`.
///
/// `what` names the step in the errors of collectives and must be equal on all ranks.
///
/// # Errors
///
/// This rank's own error; else [`CollectiveError::PeerFailed`] with the lowest rank that has an
/// error; else the [`CollectiveError`] of the exchange itself.
pub(crate) fn agree_result<T, E>(
    comm: &Communicator,
    what: &str,
    result: Result<T, E>,
    on_error: OnError,
) -> Result<T, Error>
where
    E: Into<Error> + ToString,
{
    let message = result.as_ref().err().map(ToString::to_string);
    let op = Op::new("all_gather", what);
    let messages = comm.issue(move |group| group.exchange(&op, message)).wait();
    // The own error comes before an error of the exchange: a rank that received it may have ended
    // the process group, which makes the exchange fail here.
    let value = result.map_err(Into::into)?;
    let messages = messages?;
    let mut failed = comm.world().members().iter().zip(&messages);
    let failed = failed.find_map(|(rank, message)| Some((*rank, (**message).clone()?)));
    let Some((rank, reason)) = failed else { return Ok(value) };
    let failure = CollectiveError::PeerFailed { rank, reason };
    if on_error == OnError::FailWorld {
        comm.world().fail(failure.clone());
    }
    Err(failure.into())
}
