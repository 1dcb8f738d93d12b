//! The handle of one rank, which the program gets.

use std::sync::Arc;

use burn::tensor::Device;

use crate::collectives::Op;
use crate::collectives::comm::Communicator;
use crate::collectives::group::{AnyProcessGroup, Message};
use crate::error::Error;
use crate::layout::{Mesh, Rank, WorldSize};

/// One rank of a launch: its number, its device and its connection to the other ranks. Clones stand
/// for the same rank.
#[derive(Clone, Debug)]
pub struct Worker {
    mesh: Mesh,
    device: Device,
    local_size: usize,
    comm: Arc<Communicator>,
}

impl Worker {
    /// Returns the worker of a rank; `local_size` ranks run on this machine.
    pub(super) fn new(
        mesh: Mesh,
        device: Device,
        local_size: usize,
        comm: Arc<Communicator>,
    ) -> Self {
        Self { mesh, device, local_size, comm }
    }

    /// Returns this rank's number, counted from 0.
    pub fn rank(&self) -> Rank {
        self.mesh.rank
    }

    /// Returns whether this is rank 0, which writes logs and files for all ranks.
    ///
    /// Accelerate's `is_main_process`.
    pub fn is_rank_zero(&self) -> bool {
        self.rank() == Rank::ZERO
    }

    /// Returns the number of ranks.
    pub fn world(&self) -> WorldSize {
        self.mesh.world
    }

    /// Returns the rank's device, with autodiff.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// Returns the number of ranks on this machine.
    pub(crate) fn local_size(&self) -> usize {
        self.local_size
    }

    pub(crate) fn comm(&self) -> &Arc<Communicator> {
        &self.comm
    }

    /// Waits until every rank has called this method.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::errors::CollectiveError) when a rank does not call it within the time-out.
    pub fn barrier(&self) -> Result<(), Error> {
        self.exchange_as("barrier", "the worker", ()).map(|_| ())
    }

    /// Returns the smallest `own` of all ranks: the number of steps for which every rank has
    /// batches. Every rank calls it before an epoch, since all ranks must take the same number of
    /// steps.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::errors::CollectiveError) when a rank does not call it within the time-out.
    pub fn agree_steps(&self, own: usize) -> Result<usize, Error> {
        let all = self.exchange_as("all_gather", "the number of steps", own)?;
        Ok(all.iter().map(|steps| **steps).min().unwrap_or(own))
    }

    /// Returns every rank's value, in rank order. `name` and `what` describe the operation in errors.
    pub(crate) fn exchange_as<T: Message>(
        &self,
        name: &'static str,
        what: &str,
        value: T,
    ) -> Result<Vec<Arc<T>>, Error> {
        let op = Op::new(name, what);
        Ok(self.comm.issue(move |group| group.exchange(&op, value)).wait()?)
    }

    /// Returns every rank's value, in rank order, on the rank `to`, and `None` on the others, which
    /// receive no value. `what` describes the values in errors.
    pub(crate) fn gather_as<T: Message>(
        &self,
        what: &str,
        to: Rank,
        value: T,
    ) -> Result<Option<Vec<Arc<T>>>, Error> {
        let op = Op::new("gather", what);
        let gather = move |group: &AnyProcessGroup| group.gather_values(&op, to.index(), value);
        Ok(self.comm.issue(gather).wait()?)
    }
}
