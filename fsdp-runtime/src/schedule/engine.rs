//! What [`Fsdp`](crate::Fsdp) asks of a schedule between passes, whatever its backend.

use std::sync::atomic::Ordering;

use burn::tensor::{DispatchTensor, Tensor, TensorData};

use super::{Counts, Schedule};
use crate::backend::{ShardBackend, Value};
use crate::collectives::Op;
use crate::error::Error;
use crate::group::{Held, Unit};
use crate::mesh::Mesh;
use crate::param::{Place, Runtime};

/// The erased schedule of a sharded model.
pub(crate) trait Engine: Runtime {
    /// This rank's place.
    fn mesh(&self) -> Mesh;
    /// The model's units, in layout order.
    fn units(&self) -> &[Unit];
    /// How often this rank did what.
    fn counts(&self) -> Counts;
    /// The most bytes of gathered parameters there were at once.
    fn peak_unsharded_bytes(&self) -> usize;
    /// Bytes of the buffers that gathered parameters live in.
    fn slot_bytes(&self) -> usize;
    /// Ends a backward pass.
    fn finish_backward(&self) -> Result<(), Error>;
    /// The reduced gradient of a parameter, once.
    fn take_gradient(&self, place: Place) -> Option<DispatchTensor>;
    /// The 2-norm over all ranks of reduced gradients.
    fn gradient_norm(&self, gradients: Vec<(Place, DispatchTensor)>) -> Result<f64, Error>;
    /// A full parameter, given its base; every rank calls, `keep` says who wants the result.
    fn full(
        &self,
        place: Place,
        base: DispatchTensor,
        keep: bool,
    ) -> Result<Option<TensorData>, Error>;
}

impl<B: ShardBackend> Engine for Schedule<B> {
    fn mesh(&self) -> Mesh {
        self.mesh
    }

    fn units(&self) -> &[Unit] {
        &self.units
    }

    fn counts(&self) -> Counts {
        let read = |counter: &std::sync::atomic::AtomicUsize| counter.load(Ordering::Relaxed);
        Counts {
            all_gathers: read(&self.counters.all_gathers),
            single_gathers: read(&self.counters.single_gathers),
            reduce_scatters: read(&self.counters.reduce_scatters),
            mis_prefetches: read(&self.counters.mis_prefetches),
        }
    }

    fn peak_unsharded_bytes(&self) -> usize {
        self.counters.peak_unsharded_bytes.load(Ordering::Relaxed)
    }

    fn slot_bytes(&self) -> usize {
        self.slots.iter().map(|slot| slot.bytes()).sum()
    }

    fn finish_backward(&self) -> Result<(), Error> {
        self.post_backward_final()
    }

    fn take_gradient(&self, place: Place) -> Option<DispatchTensor> {
        let gradient = self.lock().units[place.unit].reduced[place.entry].take()?;
        Some(B::into_dispatch(Value::Plain(gradient)))
    }

    /// Each rank sums the squares of its own fragments, in layout order; the partial sums are added
    /// in rank order, then those of replicated parameters. A rank that holds a matrix whole sums
    /// up every rank's part by itself, so that all strategies find the same bits.
    fn gradient_norm(&self, gradients: Vec<(Place, DispatchTensor)>) -> Result<f64, Error> {
        let (mut parts, mut ranks) = (Vec::new(), Vec::new());
        let mut whole = Vec::new();
        for (place, gradient) in gradients {
            let (unit, entry) = self.place(place);
            let Some(gradient) = B::from_dispatch(gradient).map(Value::into_inner) else {
                continue;
            };
            if entry.segment.is_none() {
                whole.push((gradient, 0..entry.numel()));
                continue;
            }
            for (rank, range) in unit.norm_ranges(place.entry, self.mesh) {
                ranks.push(rank);
                parts.push((gradient.clone(), range));
            }
        }
        let mut partial = vec![0f64; self.mesh.world.size()];
        for (rank, sum) in ranks.into_iter().zip(B::sum_squares(&parts)) {
            partial[rank] += sum;
        }
        // Whether there are fragments is the same on all ranks; one whose own are empty takes part.
        if !self.slots.is_empty() {
            let mine = partial[self.mesh.rank.index()];
            let op = Op::new("all_gather", "the gradient norm");
            let all = self.comm.issue(move |group| group.exchange(&op, mine)).wait()?;
            partial = all.iter().map(|sum| **sum).collect();
        }
        let squares = partial.iter().sum::<f64>() + B::sum_squares(&whole).iter().sum::<f64>();
        Ok(squares.sqrt())
    }

    fn full(
        &self,
        place: Place,
        base: DispatchTensor,
        keep: bool,
    ) -> Result<Option<TensorData>, Error> {
        let (_, entry) = self.place(place);
        let Some(base) = B::from_dispatch(base).map(Value::into_inner) else { return Ok(None) };
        let full = match &entry.held {
            Held::Fragment(_) => self.gather_single(place, base)?,
            Held::Whole => base,
            Held::TiedTo(_) => return Ok(None),
        };
        if !keep {
            return Ok(None);
        }
        let numel = crate::backend::numel::<B>(&full);
        let flat = B::float_reshape(full, burn::tensor::Shape::from([numel]));
        let flat = Tensor::<1>::from_dispatch(B::into_dispatch(Value::Plain(flat)));
        let (bytes, _, dtype) = flat.into_data().into_parts();
        Ok(Some(TensorData::from_bytes(bytes, entry.shape.clone(), dtype)))
    }
}
