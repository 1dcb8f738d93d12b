//! The handle of one rank, which the program gets.

use std::sync::Arc;

use burn::tensor::Device;

use crate::collectives::Op;
use crate::collectives::comm::Communicator;
use crate::collectives::group::Message;
use crate::error::{CollectiveError, Error};
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
    /// [`CollectiveError`] when a rank does not call it within the time-out.
    pub fn barrier(&self) -> Result<(), Error> {
        self.exchange("barrier", "the worker", ()).map(|_| ())
    }

    /// Replaces each value by its sum over all ranks, added in rank order. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`] when a rank does not call it within the time-out, or passes another
    /// number of values.
    pub fn all_reduce_sum(&self, values: &mut [f64]) -> Result<(), Error> {
        let all = self.exchange("all_reduce", "the worker's values", values.to_vec())?;
        let first = all[0].len();
        if let Some((rank, other)) =
            self.world().ranks().zip(&all).find(|(_, other)| other.len() != first)
        {
            let describe = |len| format!("all_reduce of {len} values");
            let (found, expected) = (describe(other.len()), describe(first));
            let failure = CollectiveError::Mismatch { rank, found, peer: Rank::ZERO, expected };
            return Err(failure.into());
        }
        for (index, value) in values.iter_mut().enumerate() {
            *value = all.iter().map(|rank| rank[index]).sum();
        }
        Ok(())
    }

    /// Returns the smallest `own` of all ranks: the number of steps for which every rank has
    /// batches. Every rank calls it before an epoch, since all ranks must take the same number of
    /// steps.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`] when a rank does not call it within the time-out.
    pub fn agree_steps(&self, own: usize) -> Result<usize, Error> {
        let all = self.exchange("all_gather", "the number of steps", own)?;
        Ok(all.iter().map(|steps| **steps).min().unwrap_or(own))
    }

    /// Returns every rank's value, in rank order.
    pub(crate) fn exchange<T: Message>(
        &self,
        name: &'static str,
        what: &str,
        value: T,
    ) -> Result<Vec<Arc<T>>, Error> {
        let op = Op::new(name, what);
        Ok(self.comm.issue(move |group| group.exchange(&op, value)).wait()?)
    }
}
