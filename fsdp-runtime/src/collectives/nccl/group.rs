//! A process group of ranks with a GPU each: its members, its splits, and how NCCL runs on buffers.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use burn::tensor::DType;

use super::communicator::{Collectives, NcclCommunicator};
use super::ready_word::{HeldWord, ReadyWord};
use super::sys::ncclDataType_t;
use super::watch::Watch;
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{DeviceMemory, ShardBackend};
use crate::collectives::cuda::NcclError;
use crate::collectives::message::Message;
use crate::collectives::op::Op;
use crate::collectives::regions::ReusedBuffers;
use crate::collectives::store::HostGroup;
use crate::error::CollectiveError;
use crate::layout::Rank;

/// A process group of ranks with a GPU each, as one of them sees it.
#[derive(Debug)]
pub(crate) struct NcclGroup {
    pub(super) host: HostGroup,
    communicator: NcclCommunicator,
    ready: ReadyWord,
    /// Buffers in which NCCL sums gradients; reused, so that a training step allocates none.
    pub(super) sum_buffers: ReusedBuffers,
    /// Receive buffers for parts of gradients that this rank sums; reused likewise.
    pub(super) part_buffers: ReusedBuffers,
}

impl NcclGroup {
    pub(super) fn new(host: HostGroup, communicator: NcclCommunicator, ready: ReadyWord) -> Self {
        Self {
            host,
            communicator,
            ready,
            sum_buffers: ReusedBuffers::default(),
            part_buffers: ReusedBuffers::default(),
        }
    }

    /// Returns the members, as ranks of the world.
    pub(in crate::collectives) fn members(&self) -> &[Rank] {
        self.host.members()
    }

    /// Returns the number of members.
    pub(super) fn size(&self) -> usize {
        self.members().len()
    }

    /// Returns the calling rank, as a rank of the world.
    pub(in crate::collectives) fn rank(&self) -> Rank {
        self.host.rank()
    }

    /// Returns the failure that has ended the run, as far as this rank knows of one.
    pub(in crate::collectives) fn failure(&self) -> Option<CollectiveError> {
        self.host.failure()
    }

    /// Ends the run of all ranks with `failure`, unless an earlier failure has ended it.
    pub(in crate::collectives) fn fail(&self, failure: CollectiveError) {
        self.host.fail(failure);
    }

    /// Ends this rank's participation, after its last collective.
    pub(crate) fn leave(&self) {
        if self.failure().is_some() {
            self.communicator.abort();
        }
        self.host.leave();
    }

    /// Returns every member's value, in rank order. All members call it.
    pub(in crate::collectives) fn exchange<T: Message>(
        &self,
        op: &Op,
        value: T,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        self.host.exchange(op, value)
    }

    /// Returns every member's value, in rank order, on the member at position `to`, and `None` on the
    /// others, which receive no value. All members call it.
    pub(in crate::collectives) fn gather_values<T: Message>(
        &self,
        op: &Op,
        to: usize,
        value: T,
    ) -> Result<Option<Vec<Arc<T>>>, CollectiveError> {
        self.host.gather_values(op, to, value)
    }

    /// Returns the process group of the members that give the same `color`. All members call it.
    pub(in crate::collectives) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        let host = self.host.split(color)?;
        let mut watch = Watch::of_setup(&self.host);
        let communicator = self.communicator.split(color, self.host.index(), &mut watch);
        let op = Op::new("split", "the mesh");
        let communicator = communicator.map_err(|error| error.end_run(&self.host, &op))?;
        Ok(Self::new(host, communicator, self.ready.of_split()))
    }

    /// Runs the collectives that `queue` queues on `buffer`, given the buffer's address, and waits
    /// for their end.
    ///
    /// # Safety
    ///
    /// The collectives must stay within the buffer, which nobody else reads or writes meanwhile.
    pub(super) unsafe fn run<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        buffer: &Arc<GatherBuffer<B>>,
        queue: impl FnOnce(&Collectives<'_>, u64) -> Result<(), NcclError>,
    ) -> Result<(), CollectiveError> {
        let fail = |reason: String| {
            self.host.fail(CollectiveError::Transport {
                rank: self.rank(),
                op: op.name,
                unit: op.unit.to_string(),
                reason,
            })
        };
        let dtype = nccl_type(buffer.dtype()).map_err(fail)?;
        // Orders this thread's stream after all work issued on the buffer.
        let memory = buffer.device_memory().map_err(fail)?;
        let (ready, word) = self.ready.write::<B>(device).map_err(fail)?.unzip();
        if ready.is_none() {
            B::sync(device).map_err(|error| fail(error.to_string()))?;
        }
        let start = memory.start;
        // After an error or a panic NCCL may still use the memory: then it is never freed.
        let owned = ManuallyDrop::new((memory, buffer.clone(), word));
        let mut watch = Watch::new(&self.host);
        // SAFETY: `owned` keeps the memory where it is; the caller promises the rest.
        let outcome = unsafe {
            self.communicator.run(dtype, ready, &mut watch, |collectives| queue(collectives, start))
        };
        outcome.map_err(|error| error.end_run(&self.host, op))?;
        drop::<(DeviceMemory, _, Option<HeldWord<B>>)>(ManuallyDrop::into_inner(owned));
        Ok(())
    }
}

/// Returns NCCL's name of an element type.
fn nccl_type(dtype: DType) -> Result<ncclDataType_t, String> {
    match dtype {
        DType::F32 => Ok(ncclDataType_t::ncclFloat32),
        DType::BF16 => Ok(ncclDataType_t::ncclBfloat16),
        DType::F16 => Ok(ncclDataType_t::ncclFloat16),
        other => Err(format!("NCCL moves elements of type F32, BF16 or F16, not {other:?}")),
    }
}
