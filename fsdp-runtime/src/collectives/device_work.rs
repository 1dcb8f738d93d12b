//! Collectives on tensors, ordered with the operations of the rank's own thread.

use std::sync::Arc;

use super::comm::{Communicator, Work};
use super::group::AnyProcessGroup;
use crate::backend::ShardBackend;
use crate::error::CollectiveError;

/// A collective on tensors that has been issued. Waiting for its result consumes it.
#[derive(Debug)]
#[must_use = "the result of a collective is ordered only once it was waited for"]
pub(crate) enum DeviceWork<B: ShardBackend, T> {
    /// Queued for the communication thread.
    Queued(Work<(T, B::Fence)>),
    /// Issued by the rank's own thread.
    Issued(Result<T, CollectiveError>),
}

impl<B: ShardBackend, T: Send + 'static> DeviceWork<B, T> {
    /// Queues a collective of the members of `group`. It reads tensors after the operations that
    /// `after` marks.
    pub(crate) fn issue(
        comm: &Communicator,
        group: &Arc<AnyProcessGroup>,
        device: &B::Device,
        after: B::Fence,
        collective: impl FnOnce(&AnyProcessGroup) -> Result<T, CollectiveError> + Send + 'static,
    ) -> Self {
        let device = device.clone();
        Self::Queued(comm.issue_on(group, move |group| {
            B::wait_for(&after);
            let result = collective(group)?;
            Ok((result, B::fence(&device)))
        }))
    }

    /// Returns whether the collective has been issued on the device. Does not block.
    pub(crate) fn is_issued(&mut self) -> bool {
        match self {
            Self::Queued(work) => work.is_complete(),
            Self::Issued(_) => true,
        }
    }

    /// Blocks until the collective has been issued on the device. The communication thread has then
    /// issued all earlier ones, too.
    pub(crate) fn block(&mut self) {
        if let Self::Queued(work) = self {
            work.block();
        }
    }

    /// Blocks until the communication thread has issued the collective, and returns its result.
    /// Later operations of this thread come after the collective; the thread does not wait for the
    /// device.
    pub(crate) fn wait(self) -> Result<T, CollectiveError> {
        match self {
            Self::Queued(work) => {
                let (result, fence) = work.wait()?;
                B::wait_for(&fence);
                Ok(result)
            }
            Self::Issued(result) => result,
        }
    }
}
