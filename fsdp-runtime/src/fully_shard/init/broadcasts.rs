//! Broadcasts of initial values that this rank has issued and not yet waited for.

use std::collections::VecDeque;

use burn::module::ParamId;

use crate::backend::{ShardBackend, StoredTensor};
use crate::collectives::device_work::DeviceWork;
use crate::error::CollectiveError;
use crate::module::ParamIndex;

/// The parts of parameters that this rank stores, by the ids of the parameters.
pub(super) type StoredValues<B> = Vec<(ParamId, StoredTensor<B>)>;

/// The result of a broadcast.
pub(super) struct Received<B: ShardBackend> {
    /// The parameter that was broadcast; `None` for the small parameters of a unit.
    pub(super) index: Option<ParamIndex>,
    /// Values that this rank stores.
    pub(super) values: StoredValues<B>,
}

/// A broadcast that was issued.
pub(super) struct Broadcast<B: ShardBackend> {
    /// The parameter that is broadcast; `None` for the small parameters of a unit.
    pub(super) index: Option<ParamIndex>,
    /// Number of elements of the full parameter that this rank keeps until it is sent; 0 where
    /// another rank sends.
    pub(super) sending: usize,
    /// Values that this rank stores.
    pub(super) values: DeviceWork<B, StoredValues<B>>,
}

/// The broadcasts that were issued and not yet waited for, in the order of issue.
pub(super) struct Broadcasts<B: ShardBackend> {
    queue: VecDeque<Broadcast<B>>,
    /// Elements of full parameters that this rank keeps until they are sent.
    sending: usize,
    /// Upper limit of `sending`; a single parameter may exceed it.
    limit: usize,
}

impl<B: ShardBackend> Broadcasts<B> {
    /// Returns an empty queue. Full parameters of at most `limit` elements, or one parameter, may
    /// wait to be sent.
    pub(super) fn new(limit: usize) -> Self {
        Self { queue: VecDeque::new(), sending: 0, limit }
    }

    /// Adds a broadcast that was issued.
    pub(super) fn push(&mut self, broadcast: Broadcast<B>) {
        self.sending += broadcast.sending;
        self.queue.push_back(broadcast);
    }

    /// Waits for the next broadcast and returns its result.
    ///
    /// Returns `None` once the queue is empty. With `room_for`, also returns `None` once the queue
    /// has room for that many more elements to be sent.
    pub(super) fn next(
        &mut self,
        room_for: Option<usize>,
    ) -> Option<Result<Received<B>, CollectiveError>> {
        let enough =
            room_for.is_some_and(|numel| self.sending == 0 || self.sending + numel <= self.limit);
        if enough {
            return None;
        }
        let Broadcast { index, sending, values } = self.queue.pop_front()?;
        let values = values.wait();
        self.sending -= sending;
        Some(values.map(|values| Received { index, values }))
    }
}
