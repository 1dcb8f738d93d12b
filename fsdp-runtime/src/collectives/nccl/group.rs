//! A process group of ranks with a GPU each: its members, its splits, and how NCCL runs on buffers.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use burn::tensor::DType;

use super::communicator::{Collectives, NcclCommunicator};
use super::in_flight::{Collective, InFlight};
use super::stream::Stream;
use super::sys::ncclDataType_t;
use super::watch::{Interruption, Watch};
use crate::backend::ShardBackend;
use crate::backend::gather_buffer::GatherBuffer;
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
    pub(super) host: Arc<HostGroup>,
    communicator: Arc<NcclCommunicator>,
    /// Collectives on CubeCL's stream that have not ended; `None` if each collective runs on a stream
    /// of the rank's own and is waited for on the host.
    in_flight: Option<Arc<InFlight>>,
    /// Whether the members are threads with a GPU each, and so launch a collective together.
    launches_together: bool,
    /// Buffers in which NCCL sums gradients; reused, so that a training step allocates none.
    pub(super) sum_buffers: ReusedBuffers,
    /// Receive buffers for parts of gradients that this rank sums; reused likewise.
    pub(super) part_buffers: ReusedBuffers,
}

impl NcclGroup {
    pub(super) fn new(
        host: HostGroup,
        communicator: NcclCommunicator,
        in_flight: Option<Arc<InFlight>>,
        launches_together: bool,
    ) -> Self {
        Self {
            host: Arc::new(host),
            communicator: Arc::new(communicator),
            in_flight,
            launches_together,
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
        if self.finish().is_err() {
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
        // NCCL may wait for ever where a collective of the communicator has not ended.
        self.finish()?;
        let host = self.host.split(color)?;
        let mut watch = Watch::of_setup(&self.host);
        let communicator = self.communicator.split(color, self.host.index(), &mut watch);
        let op = Op::new("split", "the mesh");
        let communicator = communicator.map_err(|error| error.end_run(&self.host, &op))?;
        Ok(Self::new(host, communicator, self.in_flight.clone(), self.launches_together))
    }

    /// Runs the collectives that `queue` queues on `buffer`, given the buffer's address. Later work of
    /// the calling thread on the buffer comes after them.
    ///
    /// # Safety
    ///
    /// The collectives must stay within the buffer. Until a fence of the calling thread, nobody else
    /// reads or writes it.
    pub(super) unsafe fn run<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        buffer: &Arc<GatherBuffer<B>>,
        queue: impl FnOnce(&Collectives<'_>, u64) -> Result<(), NcclError> + Send,
    ) -> Result<(), CollectiveError> {
        let fail = |reason: String| self.fail_transport(op, reason);
        let dtype = nccl_type(buffer.dtype()).map_err(fail)?;
        // Orders this thread's stream after all work issued on the buffer.
        let memory = buffer.device_memory().map_err(fail)?;
        if self.in_flight.is_none() {
            B::sync(device).map_err(|error| fail(error.to_string()))?;
        }
        let (start, stream) = (memory.start, memory.stream);
        // After an error or a panic NCCL may still use the memory: then it is never freed.
        let held: Box<dyn Any + Send> = Box::new((memory, buffer.clone()));
        let held = ManuallyDrop::new(held);
        let mut watch = Watch::new(&self.host);
        let launch = || {
            let stream = match &self.in_flight {
                Some(_) => Stream::of_cubecl(stream),
                None => self.communicator.own_stream(),
            };
            // SAFETY: `held` keeps the memory where it is; the caller promises the rest. CubeCL's stream is
            // that of the device whose memory was asked for.
            unsafe {
                self.communicator
                    .start(dtype, stream, &mut watch, |collectives| queue(collectives, start))
            }
        };
        let marks = self.launch::<B, _>(op, device, launch)?;
        match &self.in_flight {
            Some(in_flight) => in_flight.add(Collective {
                communicator: self.communicator.clone(),
                host: self.host.clone(),
                op: op.clone(),
                marks,
                held,
            }),
            None => {
                let ended = self.communicator.wait_for(&marks, &mut watch);
                ended.map_err(|interruption| self.end_run(op, interruption))?;
                drop(ManuallyDrop::into_inner(held));
            }
        }
        Ok(())
    }

    /// Launches a collective. Members that launch together do so once their devices do nothing else, and go on once
    /// all have launched it.
    ///
    /// In a process with several GPUs a call of the driver, such as one that frees memory, may wait for the kernels
    /// of another GPU. Between the launches of two ranks it would wait for a kernel of NCCL that waits for the second.
    fn launch<B: ShardBackend, T: Send>(
        &self,
        op: &Op,
        device: &B::Device,
        launch: impl FnOnce() -> Result<T, Interruption> + Send,
    ) -> Result<T, CollectiveError> {
        let launched = if self.launches_together {
            let together = || {
                self.host.exchange(op, ()).map_err(Interruption::Ended)?;
                let launched = launch()?;
                self.host.exchange(op, ()).map_err(Interruption::Ended)?;
                Ok(launched)
            };
            let done = B::alone_on_device(device, together);
            done.map_err(|reason| self.fail_transport(op, reason))?
        } else {
            launch()
        };
        launched.map_err(|interruption| self.end_run(op, interruption))
    }

    /// Takes part in the launch of a collective of other members, where members launch together.
    pub(super) fn run_nothing<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
    ) -> Result<(), CollectiveError> {
        self.launch::<B, _>(op, device, || Ok(()))
    }

    /// Ends the run after a collective that did not complete, and returns the failure. It is known before the device
    /// ends an aborted collective, and before another thread finds the communicator aborted.
    fn end_run(&self, op: &Op, interruption: Interruption) -> CollectiveError {
        let failure = interruption.end_run(&self.host, op);
        self.communicator.abort();
        failure
    }

    /// Ends the run of all ranks because this rank cannot run a collective.
    fn fail_transport(&self, op: &Op, reason: String) -> CollectiveError {
        self.host.fail(CollectiveError::Transport {
            rank: self.rank(),
            op: op.name,
            unit: op.unit.to_string(),
            reason,
        })
    }

    /// Returns the number of collectives on CubeCL's stream that have not ended.
    #[cfg(test)]
    pub(in crate::collectives) fn in_flight(&self) -> usize {
        self.in_flight.as_ref().map_or(0, |in_flight| in_flight.len())
    }

    /// Waits on the host until the collectives before have ended, for results that leave the device and
    /// are not followed by another collective.
    ///
    /// # Errors
    ///
    /// Returns the failure that has ended the run.
    pub(in crate::collectives) fn finish(&self) -> Result<(), CollectiveError> {
        if let Some(in_flight) = &self.in_flight {
            in_flight.wait_for_all();
        }
        self.failure().map_or(Ok(()), Err)
    }
}

impl Drop for NcclGroup {
    fn drop(&mut self) {
        // Members that have failed take no part in the communicator's regular end.
        if self.failure().is_some() {
            self.communicator.abort();
        }
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
