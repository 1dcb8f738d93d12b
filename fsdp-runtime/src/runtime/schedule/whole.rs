//! Whole matrices on one rank: gathered there from the shards of all, changed, and cut up again.

use burn::tensor::{DType, DispatchTensor, Shape};

use super::Schedule;
use crate::backend::{Float, ShardBackend, StorageDevice, StoredTensor};
use crate::collectives::comm::Work;
use crate::collectives::{Op, ProcessGroup, ReduceScatter};
use crate::error::Error;
use crate::module::ParamIndex;
use crate::param_group::memory::MemoryKind;

/// A sharded matrix to be stepped whole.
pub(crate) struct Whole {
    pub(crate) place: ParamIndex,
    /// Where it is put together: a position in the shard group.
    pub(crate) owner: usize,
    /// This rank's shard; not read where that is empty.
    pub(crate) shard: DispatchTensor,
    /// Its gradient.
    pub(crate) gradient: Option<DispatchTensor>,
}

/// Updates matrix `index` of a round, given it and its gradient, both whole.
pub(crate) type Step<'a> = dyn FnMut(usize, DispatchTensor, DispatchTensor) -> DispatchTensor + 'a;

/// A gather under way: the parts, in rank order, on the owner.
type Gather<B> = Work<Vec<Option<Float<B>>>>;

impl<B: ShardBackend> Schedule<B> {
    /// Gathers each matrix on its owner, updates it there, and returns this rank's new shards.
    /// No two matrices have one owner, so that all owners step at once and each holds one matrix.
    pub(super) fn step_round(
        &self,
        round: Vec<Whole>,
        step: &mut Step<'_>,
    ) -> Result<Vec<Option<DispatchTensor>>, Error> {
        let mine = self.settings.mesh.shard_rank().index();
        let gather = |Whole { place, owner, shard, gradient }: Whole| {
            let path = &self.place(place).1.path;
            tracing::trace!(target: "fsdp", path = %path, owner, "fsdp::gather_whole");
            let gradient = self.gather_to(owner, place, gradient, format!("gradient of {path}"));
            let matrix = self.gather_to(owner, place, Some(shard), path.clone());
            (place, owner, gradient, matrix)
        };
        let gathers: Vec<_> = round.into_iter().map(gather).collect();
        let (mut scatters, mut bytes) = (Vec::new(), 0);
        for (index, (place, owner, gradient, matrix)) in gathers.into_iter().enumerate() {
            let (gradient, matrix) = (gradient.wait()?, matrix.wait()?);
            let mut updated = None;
            if owner == mine {
                bytes += self.place(place).1.numel() * size_of::<f32>();
                self.tracker.take(MemoryKind::Gathered, bytes);
                self.tracker.take(MemoryKind::Gradients, bytes);
                // Stepped where shards rest, and the optimizer's state with them.
                let rest = self.settings.rest;
                let [matrix, gradient] = [matrix, gradient].map(|parts| {
                    StoredTensor::<B>::store(self.join(place, parts), rest).into_dispatch()
                });
                // There they are counted for as long.
                let moved = [
                    (MemoryKind::Gathered, MemoryKind::Shards),
                    (MemoryKind::Gradients, MemoryKind::Reduced),
                ];
                let moved = if rest == StorageDevice::Device { &[][..] } else { &moved };
                for &(from, to) in moved {
                    self.tracker.give_back(from, bytes);
                    self.tracker.take(to, bytes);
                }
                let matrix = step(index, matrix, gradient);
                for &(from, to) in moved {
                    self.tracker.give_back(to, bytes);
                    self.tracker.take(from, bytes);
                }
                self.tracker.give_back(MemoryKind::Gradients, bytes);
                updated = StoredTensor::<B>::from_dispatch(matrix, rest)
                    .map(|(it, ..)| self.on_device(it));
            }
            scatters.push((place, updated));
        }
        // Only now: what an owner sends is ready, and every rank issues them in one order.
        let scatter = |(place, updated)| self.scatter_from(place, updated);
        let scatters: Vec<_> = scatters.into_iter().map(scatter).collect();
        let shards = scatters.into_iter().map(|scatter| {
            let shard = scatter.wait()?.pop().flatten();
            Ok(shard.map(|it| StoredTensor::<B>::store(it, self.settings.rest).into_dispatch()))
        });
        let shards = shards.collect();
        self.tracker.give_back(MemoryKind::Gathered, bytes);
        shards
    }

    /// Issues the gather of a tensor that is sharded as the parameter at `place` is.
    fn gather_to(
        &self,
        owner: usize,
        place: ParamIndex,
        shard: Option<DispatchTensor>,
        what: String,
    ) -> Gather<B> {
        let len = self.place(place).1.range().len();
        let shard = shard.filter(|_| len > 0);
        let shard = shard.and_then(|it| StoredTensor::<B>::from_dispatch(it, self.settings.rest));
        let flat = shard.map(|(it, ..)| B::float_reshape(self.on_device(it), Shape::from([len])));
        let op = Op::new("gather", what);
        let device = self.device.clone();
        let gather = move |group: &_| ProcessGroup::<B>::gather(group, &op, &device, owner, flat);
        self.comm.issue_on(&self.settings.groups.shard, gather)
    }

    /// Issues what gives each rank its shard of a matrix, which one rank has: the sum with the
    /// zeros of the others.
    fn scatter_from(&self, place: ParamIndex, matrix: Option<Float<B>>) -> Gather<B> {
        let (unit, entry) = self.place(place);
        let (op, keep) = (Op::new("scatter", entry.path.as_str()), [entry.reduce(DType::F32)]);
        let (layout, device) = (unit.layout.clone(), self.device.clone());
        self.comm.issue_on(&self.settings.groups.shard, move |group| {
            let gradients = vec![matrix];
            let request =
                ReduceScatter::<B> { gradients, keep: &keep, layout: &layout, divisor: 1 };
            ProcessGroup::<B>::reduce_scatter(group, &op, &device, request)
        })
    }

    /// The full tensor from all ranks' parts of it.
    pub(super) fn join(&self, place: ParamIndex, parts: Vec<Option<Float<B>>>) -> Float<B> {
        let flatten = |part: Float<B>| {
            let numel = crate::backend::numel::<B>(&part);
            B::float_reshape(part, Shape::from([numel]))
        };
        let full = B::float_cat(parts.into_iter().flatten().map(flatten).collect(), 0);
        B::float_reshape(full, Shape::from(self.place(place).1.shape.clone()))
    }
}
