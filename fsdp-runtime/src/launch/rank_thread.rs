//! The thread on which one rank runs, with a separate rayon pool and communication thread.

use std::any::Any;
use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::worker::Worker;
use crate::backend::finish;
use crate::collectives::comm::{Communicator, rank_span};
use crate::error::{CollectiveError, Error, RankPanic, panic_message, with_causes, with_sources};
use crate::layout::Rank;

/// An error of any kind, as the user's program may return.
pub(super) type BoxedError = Box<dyn StdError + Send + Sync>;

/// The user's program, which runs once on each rank.
pub(super) type RankProgram<T> = Arc<dyn Fn(Worker) -> Result<T, BoxedError> + Send + Sync>;

/// Runs one rank on a new thread, inside a new rayon pool of `threads` threads. A failure ends the
/// other ranks at their next collective. `ended` receives the outcome.
pub(super) fn start_rank<T: Send + 'static>(
    worker: Worker,
    threads: usize,
    program: RankProgram<T>,
    ended: impl FnOnce(Result<T, BoxedError>) + Send + 'static,
) -> std::io::Result<()> {
    let index = worker.rank();
    // The communication thread must run until the other ranks know of a failure of this one.
    let comm = worker.comm().clone();
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(move |thread| format!("fsdp-rank-{index}-{thread}"))
        .build()
        .map_err(std::io::Error::other)?;
    std::thread::Builder::new().name(format!("fsdp-rank-{index}")).spawn(move || {
        let device = worker.device().clone();
        let run = || {
            let _span = rank_span(index, "compute").entered();
            let outcome = catch_unwind(AssertUnwindSafe(|| program(worker)));
            // A device frees the tensors that the program has dropped when the operations on them
            // have run. After a failure of the program these may fail too.
            let finished = catch_unwind(AssertUnwindSafe(|| finish(&device)));
            let result = outcome.unwrap_or_else(|panic| Err(unwound(panic)))?;
            finished.unwrap_or_else(|panic| Err(panic_message(&*panic)))?;
            Ok(result)
        };
        let outcome: Result<T, BoxedError> = pool.install(run);
        match &outcome {
            Ok(_) => Communicator::end(comm),
            Err(error) => {
                comm.world().fail(failure_of(index, &**error));
                drop(comm);
            }
        }
        ended(outcome);
    })?;
    Ok(())
}

/// Converts a rank's panic to an error: the typed error that it carries, or the panic's message.
fn unwound(panic: Box<dyn Any + Send>) -> BoxedError {
    match panic.downcast::<Error>() {
        Ok(error) => error,
        Err(panic) => Box::new(RankPanic { message: panic_message(&*panic) }),
    }
}

/// Returns the failure of the run that a rank's error causes: the failure of another rank, if that
/// is the error's cause.
fn failure_of(rank: Rank, error: &(dyn StdError + 'static)) -> CollectiveError {
    let of_peer = with_sources(error).find_map(|cause| match cause.downcast_ref::<Error>() {
        Some(Error::Collective(failure @ CollectiveError::PeerFailed { .. })) => {
            Some(failure.clone())
        }
        _ => None,
    });
    of_peer.unwrap_or_else(|| CollectiveError::PeerFailed { rank, reason: with_causes(error) })
}
