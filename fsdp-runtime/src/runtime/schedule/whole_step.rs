//! The update of full matrices, for optimizers that cannot step shards: each matrix is gathered on
//! one rank, updated there, and scattered again.

use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, DispatchTensor, Shape};

use super::core::Schedule;
use crate::backend::{ModelBackend, Raw, RawFloat, StorageDevice, StoredTensor};
use crate::collectives::device_work::DeviceWork;
use crate::collectives::{Op, ProcessGroup, ReduceScatter};
use crate::error::Error;
use crate::module::ParamIndex;
use crate::param_group::memory::MemoryKind;

/// A sharded matrix that is to be updated as a whole.
pub(crate) struct Whole {
    pub(crate) index: ParamIndex,
    /// Rank that updates the matrix, as a position in the shard group.
    pub(crate) owner: usize,
    /// This rank's shard; not read if this rank's range is empty.
    pub(crate) shard: DispatchTensor,
    /// This rank's shard of the gradient.
    pub(crate) gradient: Option<DispatchTensor>,
}

/// Function that updates a matrix. It gets the matrix's index in the round, its full value and its
/// full gradient, and returns the new value.
pub(super) type Step<'a> = dyn FnMut(usize, DispatchTensor, DispatchTensor) -> DispatchTensor + 'a;

/// A running collective that returns one part from each rank, in rank order.
type PartsWork<B> = DeviceWork<Raw<B>, Vec<Option<RawFloat<B>>>>;

/// The kinds under which a gathered matrix and its gradient are counted while they are moved to the
/// host for the update.
const ON_HOST: [(MemoryKind, MemoryKind); 2] = [
    (MemoryKind::GatherBuffers, MemoryKind::Shards),
    (MemoryKind::Gradients, MemoryKind::ReducedGradients),
];

impl<B: ModelBackend> Schedule<B> {
    /// Gathers each matrix on its owner, updates it there, and returns this rank's new shards. No
    /// two matrices of a round have the same owner, so all owners step at the same time and each
    /// holds one full matrix.
    pub(super) fn step_round(
        &self,
        round: Vec<Whole>,
        step: &mut Step<'_>,
    ) -> Result<Vec<Option<DispatchTensor>>, Error> {
        let mine = self.settings.mesh.shard_rank().index();
        let gather = |Whole { index, owner, shard, gradient }: Whole| {
            let path = &self.param(index).1.path;
            tracing::trace!(target: "fsdp", path = %path, owner, "fsdp::gather_whole");
            let gradient = self.gather_to(owner, index, gradient, format!("gradient of {path}"));
            let matrix = self.gather_to(owner, index, Some(shard), path.clone());
            (index, owner, gradient, matrix)
        };
        let gathers: Vec<_> = round.into_iter().map(gather).collect();
        let (mut scatters, mut bytes) = (Vec::new(), 0);
        for (at, (index, owner, gradient, matrix)) in gathers.into_iter().enumerate() {
            let (gradient, matrix) = (gradient.wait()?, matrix.wait()?);
            let mut updated = None;
            if owner == mine {
                bytes += self.param(index).1.numel() * size_of::<f32>();
                let parts = [matrix, gradient];
                let step = |matrix, gradient| step(at, matrix, gradient);
                updated = self.step_whole_matrix(index, parts, bytes, step);
            }
            scatters.push((index, updated));
        }
        // The scatters are issued after all updates, so that every rank issues them in the same
        // order and no rank waits for an update of another.
        let scatter = |(index, updated)| (index, self.scatter_from(index, updated));
        let scatters: Vec<_> = scatters.into_iter().map(scatter).collect();
        let shards = scatters.into_iter().map(|(index, scatter)| {
            let shard = scatter.wait()?.pop().flatten();
            let store = |it| StoredTensor::<Raw<B>>::store(it, self.settings.storage);
            Ok(shard.map(|it| {
                let stored = StoredTensor::<B>::raise(store(it));
                match self.param(index).1.is_rounded() {
                    true => stored.rounded(self.rounding(index)).into_dispatch(),
                    false => stored.into_dispatch(),
                }
            }))
        });
        let shards = shards.collect();
        self.tracker.give_back(MemoryKind::GatherBuffers, bytes, None);
        shards
    }

    /// Updates one full matrix on the storage device, where the optimizer's state is too. `parts`
    /// are every rank's shards of the matrix and of the gradient; `bytes` is counted for each of
    /// the two.
    fn step_whole_matrix(
        &self,
        index: ParamIndex,
        parts: [Vec<Option<RawFloat<B>>>; 2],
        bytes: usize,
        step: impl FnOnce(DispatchTensor, DispatchTensor) -> DispatchTensor,
    ) -> Option<RawFloat<B>> {
        self.tracker.take(MemoryKind::GatherBuffers, bytes, index.unit);
        self.tracker.take(MemoryKind::Gradients, bytes, index.unit);
        let storage = self.settings.storage;
        let [matrix, gradient] = parts.map(|parts| {
            let full = StoredTensor::<Raw<B>>::store(self.join_parts(index, parts), storage);
            StoredTensor::<B>::raise(full).into_dispatch()
        });
        let moved = if storage == StorageDevice::Device { &[][..] } else { &ON_HOST };
        for &(device, host) in moved {
            self.tracker.give_back(device, bytes, index.unit);
            self.tracker.take(host, bytes, index.unit);
        }
        let matrix = step(matrix, gradient);
        for &(device, host) in moved {
            self.tracker.give_back(host, bytes, index.unit);
            self.tracker.take(device, bytes, index.unit);
        }
        self.tracker.give_back(MemoryKind::Gradients, bytes, index.unit);
        StoredTensor::<B>::from_dispatch(matrix, storage).map(|(it, ..)| self.on_device(it))
    }

    /// Issues the gather, on the rank `owner`, of a tensor that is sharded like a parameter.
    fn gather_to(
        &self,
        owner: usize,
        index: ParamIndex,
        shard: Option<DispatchTensor>,
        what: String,
    ) -> PartsWork<B> {
        let len = self.param(index).1.range().len();
        let shard = shard.filter(|_| len > 0);
        let shard =
            shard.and_then(|it| StoredTensor::<B>::from_dispatch(it, self.settings.storage));
        let flat =
            shard.map(|(it, ..)| Raw::<B>::float_reshape(self.on_device(it), Shape::from([len])));
        let op = Op::new("gather", what);
        let device = self.device.clone();
        let gather =
            move |group: &_| ProcessGroup::<Raw<B>>::gather(group, &op, &device, owner, flat);
        self.issue(&self.settings.groups.shard, gather)
    }

    /// Issues the scatter of a matrix from the only rank that passes it. It is a reduce-scatter in
    /// which the other ranks pass zeros.
    fn scatter_from(&self, index: ParamIndex, matrix: Option<RawFloat<B>>) -> PartsWork<B> {
        let (unit, entry) = self.param(index);
        let (op, keep) = (Op::new("scatter", entry.path.as_str()), [entry.reduce(DType::F32)]);
        let (layout, device) = (unit.layout.clone(), self.device.clone());
        self.issue(&self.settings.groups.shard, move |group| {
            let gradients = vec![matrix];
            let request =
                ReduceScatter::<Raw<B>> { gradients, keep: &keep, layout: &layout, divisor: 1 };
            ProcessGroup::<Raw<B>>::reduce_scatter(group, &op, &device, request)
        })
    }
}
