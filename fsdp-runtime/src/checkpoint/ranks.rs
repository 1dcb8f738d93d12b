//! The ranks that save or load together.

use std::sync::Arc;

use crate::collectives::Op;
use crate::collectives::comm::Communicator;
use crate::collectives::group::Message;
use crate::error::Error;
use crate::fully_shard::Fsdp;
use crate::launch::Worker;
use crate::launch::agree::{OnError, agree_result};
use crate::layout::Mesh;

/// Advice to a program that saves or loads the parts of tensor parallel ranks.
pub(super) const SAVE_WHOLE: &str =
    "save the model with `save_pretrained` or `full`, which gather whole matrices";

/// Connection of this rank to the ranks that save or load together.
#[derive(Clone, Debug)]
pub(super) struct Ranks {
    pub(super) mesh: Mesh,
    comm: Arc<Communicator>,
}

impl From<&Worker> for Ranks {
    fn from(worker: &Worker) -> Self {
        Self { mesh: worker.mesh(), comm: worker.comm().clone() }
    }
}

impl<M> From<&Fsdp<M>> for Ranks {
    fn from(model: &Fsdp<M>) -> Self {
        Self { mesh: model.schedule.world_mesh(), comm: model.schedule.world_comm() }
    }
}

impl Ranks {
    /// Returns this rank's number in the world.
    pub(super) fn index(&self) -> usize {
        self.mesh.rank.index()
    }

    /// Returns whether this is rank 0, which names folders and writes manifests.
    pub(super) fn leads(&self) -> bool {
        self.index() == 0
    }

    /// Returns every rank's `value`, in rank order. Every rank calls it; `what` names the values in
    /// errors.
    pub(super) fn exchange<T: Message>(&self, what: &str, value: T) -> Result<Vec<Arc<T>>, Error> {
        let op = Op::new("all_gather", what);
        Ok(self.comm.issue(move |group| group.exchange(&op, value)).wait()?)
    }

    /// Returns this rank's value if every rank has one, and an error on every rank if any rank has
    /// an error (see [`agree_result`]). Collectives work as before after such an error.
    pub(super) fn agree<T, E>(&self, what: &str, result: Result<T, E>) -> Result<T, Error>
    where
        E: Into<Error> + ToString,
    {
        agree_result(&self.comm, what, result, OnError::KeepWorld)
    }
}
