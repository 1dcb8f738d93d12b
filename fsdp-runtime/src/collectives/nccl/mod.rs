//! The `nccl` engine: each rank has a GPU of its own, as a thread or as a process.
//!
//! NCCL moves the data and takes the sums, on a CUDA stream of the rank's. Before each collective the
//! ranks *meet* over the host ([`Host`]): so ranks that issue different ones, come late or do not
//! come are named before any data moves, and what else must be told is told (which rank has which
//! gradient). Then CubeCL's stream is made to come after all that was issued on the buffers and is
//! waited for, NCCL runs on the buffers' addresses, and its end is waited for before anyone reads
//! them: so no stream needs to know of another.
//!
//! The layers are cudarc's: [`sys`] finds the functions, [`result`] reads their codes,
//! [`communicator`] makes them safe. [`lane`] is the GPU and its stream, [`world`] how ranks begin.
//! Sums in f32 of more than two ranks are taken in NCCL's order, which is not the ranks': they agree
//! with the other engines' to rounding ([`reduce`]).

mod communicator;
mod error;
#[cfg(test)]
pub(crate) mod fake;
mod lane;
mod reduce;
mod result;
mod sys;
mod world;

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use self::communicator::{Collectives, Communicator, Trouble, Watch};
pub use self::error::NcclJoinError;
#[cfg(test)]
pub(crate) use self::sys::library;
use self::sys::ncclDataType_t;
use super::group::Message;
use super::regions::{Arrivals, Reduction, Scratch, root_of};
use super::store::Host;
use super::{Op, ProcessGroup, Reduce};
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{DeviceMemory, Float, ShardBackend, numel};
use crate::collectives::cuda::NcclError;
use crate::error::CollectiveError;
use crate::layout::Rank;
use crate::layout::UnitLayout;

/// How long the news that a rank has ended may take, after NCCL has seen it.
const NEWS: Duration = Duration::from_millis(500);

/// This rank's end of a group.
#[derive(Debug)]
pub(crate) struct NcclGroup {
    host: Host,
    communicator: Communicator,
    /// Where gradients are summed: kept, so that training allocates nothing.
    sums: Scratch,
    /// Where parts of them arrive that are summed here.
    parts: Scratch,
}

impl NcclGroup {
    fn new(host: Host, communicator: Communicator) -> Self {
        Self { host, communicator, sums: Scratch::default(), parts: Scratch::default() }
    }

    /// Its members, by their ranks in the world.
    pub(crate) fn members(&self) -> &[Rank] {
        self.host.members()
    }

    /// This rank.
    pub(crate) fn rank(&self) -> Rank {
        self.host.rank()
    }

    /// What has ended the world, if anything has.
    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        self.host.failure()
    }

    /// Ends the world with `failure`, unless it has ended already.
    pub(crate) fn fail(&self, failure: CollectiveError) {
        self.host.fail(failure);
    }

    /// Ends this rank's part, after its last collective.
    pub(crate) fn leave(&self) {
        if self.failure().is_some() {
            self.communicator.abort();
        }
        self.host.leave();
    }

    /// Every member's value, in rank order.
    pub(crate) fn exchange<T: Message>(
        &self,
        op: &Op,
        value: T,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        self.host.exchange(op, value)
    }

    /// The members that give the same `color`, as a group.
    pub(crate) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        let host = self.host.split(color)?;
        let mut watch = Watch::of_setup(&self.host);
        let communicator = self.communicator.split(color, self.host.index(), &mut watch);
        let op = Op::new("split", "the mesh");
        let communicator = communicator.map_err(|trouble| blame(&self.host, &op, trouble))?;
        Ok(Self::new(host, communicator))
    }

    fn size(&self) -> usize {
        self.members().len()
    }

    /// Runs the collectives that `queue` queues on `slot`, given its address.
    ///
    /// # Safety
    ///
    /// They stay within the slot, which nobody else reads or writes meanwhile.
    unsafe fn run<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        slot: &Arc<GatherBuffer<B>>,
        queue: impl FnOnce(&Collectives<'_>, u64) -> Result<(), NcclError>,
    ) -> Result<(), CollectiveError> {
        let refused = |reason: String| {
            self.host.fail(CollectiveError::Transport {
                rank: self.rank(),
                op: op.name,
                unit: op.unit.to_string(),
                reason,
            })
        };
        // This thread's stream comes after all that was issued on the slot, and is waited for.
        let dtype = nccl_type(slot.dtype()).map_err(refused)?;
        let memory = slot.device_memory().map_err(refused)?;
        B::sync(device).map_err(|error| refused(error.to_string()))?;
        let start = memory.start;
        // On an error, or a panic, NCCL may go on: what it touches is never freed.
        let kept = ManuallyDrop::new((memory, slot.clone()));
        let mut watch = Watch::new(&self.host);
        // SAFETY: `kept` holds the memory in its place, and the caller answers for the rest.
        let outcome = unsafe {
            self.communicator.run(dtype, &mut watch, |collectives| queue(collectives, start))
        };
        outcome.map_err(|trouble| blame(&self.host, op, trouble))?;
        drop::<(DeviceMemory, _)>(ManuallyDrop::into_inner(kept));
        Ok(())
    }

    /// One tensor of each member, of these lengths, in rank order; `own` is this one's.
    fn broadcast_each<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        lens: Vec<Option<usize>>,
        own: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let arrivals = Arrivals::<B>::new(device, lens, |_| true);
        if let Some(own) = &own {
            arrivals.slot.write(arrivals.region(self.host.index()).start, own.clone());
        }
        if arrivals.regions().next().is_some() {
            // SAFETY: each member's region lies within the slot, which is this function's.
            unsafe {
                self.run::<B>(op, device, &arrivals.slot, |collectives, start| {
                    for (member, region) in arrivals.regions() {
                        let at = start + (region.start * DType::F32.size()) as u64;
                        collectives.broadcast(at, region.len(), member)?;
                    }
                    Ok(())
                })
            }?;
        }
        Ok(arrivals.into_tensors(self.host.index(), own))
    }
}

/// NCCL's name for a type of elements.
fn nccl_type(dtype: DType) -> Result<ncclDataType_t, String> {
    match dtype {
        DType::F32 => Ok(ncclDataType_t::ncclFloat32),
        DType::BF16 => Ok(ncclDataType_t::ncclBfloat16),
        DType::F16 => Ok(ncclDataType_t::ncclFloat16),
        other => Err(format!("NCCL is not asked to move elements of {other:?}")),
    }
}

/// What a collective's trouble is to the world, which it ends: the cause, where another rank has told
/// it.
fn blame(host: &Host, op: &Op, trouble: Trouble) -> CollectiveError {
    let reason = match trouble {
        Trouble::Ended(failure) => return failure,
        Trouble::TimedOut => {
            let others = || host.members().iter().filter(|&&member| member != host.rank());
            // Whoever is in the collective is heard of all the time.
            let mut missing = host.silent(host.timeout() / 2);
            if missing.is_empty() {
                missing = others().copied().collect();
            }
            return host.fail(CollectiveError::Timeout {
                op: op.name,
                unit: op.unit.to_string(),
                missing,
                waited: host.timeout(),
            });
        }
        Trouble::Nccl(error) => format!("NCCL: {error}"),
        Trouble::Cuda(error) => error.to_string(),
    };
    let seen = Instant::now();
    while seen.elapsed() < NEWS {
        if let Some(failure) = host.here() {
            return failure;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let (rank, unit) = (host.rank(), op.unit.to_string());
    host.fail(CollectiveError::Transport { rank, op: op.name, unit, reason })
}

impl<B: ShardBackend> ProcessGroup<B> for NcclGroup {
    fn all_gather(
        &self,
        op: &Op,
        device: &B::Device,
        shards: Vec<(usize, Float<B>)>,
        shard_len: usize,
        slot: &Arc<GatherBuffer<B>>,
    ) -> Result<(), CollectiveError> {
        slot.write_all(shards);
        self.exchange(op, ())?;
        if shard_len == 0 {
            return Ok(());
        }
        assert!(self.size() * shard_len <= slot.numel(), "a gather stays within its slot");
        let (index, size) = (self.host.index(), slot.dtype().size());
        // SAFETY: within the slot, as checked, which the schedule has nobody read while it is
        // gathered.
        unsafe {
            self.run::<B>(op, device, slot, |collectives, at| {
                collectives.all_gather(at, index, shard_len, size)
            })
        }
    }

    fn all_gather_one(
        &self,
        op: &Op,
        device: &B::Device,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let lens = self.exchange(op, shard.as_ref().map(numel::<B>))?;
        self.broadcast_each::<B>(op, device, lens.iter().map(|len| **len).collect(), shard)
    }

    fn gather(
        &self,
        op: &Op,
        device: &B::Device,
        to: usize,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let lens = self.exchange(op, shard.as_ref().map(numel::<B>))?;
        let (own, receives) = (self.host.index(), self.host.index() == to);
        // The receiver's own shard stays where it is; the others need room for theirs alone.
        let here = |member: usize| if receives { member != own } else { member == own };
        let lens = lens.iter().map(|len| **len).collect();
        let arrivals = Arrivals::<B>::new(device, lens, here);
        if let Some(shard) = shard.as_ref().filter(|_| !receives) {
            arrivals.slot.write(arrivals.region(own).start, shard.clone());
        }
        if arrivals.regions().next().is_some() {
            // SAFETY: each region lies within the slot, which is this function's.
            unsafe {
                self.run::<B>(op, device, &arrivals.slot, |collectives, start| {
                    for (member, region) in arrivals.regions() {
                        let at = start + (region.start * DType::F32.size()) as u64;
                        match receives {
                            true => collectives.receive(at, region.len(), member)?,
                            false => collectives.send(at, region.len(), to)?,
                        }
                    }
                    Ok(())
                })
            }?;
        }
        Ok(if receives { arrivals.into_tensors(own, shard) } else { Vec::new() })
    }

    fn reduce_scatter(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: Vec<Option<Float<B>>>,
        keep: &[Reduce],
        layout: &UnitLayout,
        divisor: usize,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let present: Vec<bool> = gradients.iter().map(Option::is_some).collect();
        let present = self.exchange(op, present)?;
        let reduction = Reduction { keep, layout, divisor, present };
        self.reduce::<B>(op, device, &gradients, &reduction)
    }

    fn broadcast(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Option<Float<B>>,
    ) -> Result<Float<B>, CollectiveError> {
        let shapes = self.exchange(op, tensor.as_ref().map(|tensor| tensor.shape().to_vec()))?;
        let (root, shape, lens) = root_of(&shapes);
        let full = self.broadcast_each::<B>(op, device, lens, tensor)?.swap_remove(root);
        Ok(B::float_reshape(full.expect("a rank gives the tensor"), shape))
    }
}
