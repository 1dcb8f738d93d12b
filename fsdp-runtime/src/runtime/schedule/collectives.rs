//! The collectives of a schedule outside of forward and backward.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::tensor::{DType, DispatchTensor, TensorData};

use super::core::Schedule;
use super::whole_step::{Step, Whole};
use crate::backend::{ModelBackend, Norm, Raw, ShardBackend, StoredTensor, decoded};
use crate::collectives::Op;
use crate::collectives::group::AnyProcessGroup;
use crate::error::{Error, ScheduleError};
use crate::layout::Rank;
use crate::module::ParamIndex;
use crate::param_group::{ParamSpec, Placement};

/// Backward passes after which tensor parallel ranks compare their gradients of whole parameters.
const CHECKED_PASSES: usize = 3;

/// The collectives of a schedule outside of forward and backward. Every rank calls each of them.
pub(crate) trait ScheduleCollectives {
    /// Returns the norm of reduced gradients over all ranks.
    fn gradient_norm(
        &self,
        gradients: Vec<(ParamIndex, DispatchTensor)>,
        norm: Norm,
    ) -> Result<f64, Error>;
    /// Returns the first parameter, in layout order, whose gradient has an element that is infinite or
    /// NaN, and the lowest rank that stores such an element.
    fn first_non_finite(
        &self,
        gradients: Vec<(ParamIndex, DispatchTensor)>,
    ) -> Result<Option<(ParamIndex, Rank)>, Error>;
    /// Checks that tensor parallel ranks have equal gradients of whole parameters: in the first passes, and
    /// with debug assertions in all.
    fn check_whole_gradients(
        &self,
        gradients: Vec<(ParamIndex, DispatchTensor)>,
    ) -> Result<(), Error>;
    /// Returns a full parameter, given its base. Returns `None` on a rank whose `keep` is `false`.
    fn full(
        &self,
        index: ParamIndex,
        base: DispatchTensor,
        keep: bool,
    ) -> Result<Option<TensorData>, Error>;
    /// Returns whether the gradients are finite on each rank of the world, with the rank's loss
    /// scale.
    fn exchange_finite(&self, finite: bool, scale: f32) -> Result<Vec<Arc<(bool, f32)>>, Error>;
    /// Returns the number of elements of each gradient on each rank of the shard group.
    fn exchange_gradients(
        &self,
        gradients: Vec<Option<usize>>,
    ) -> Result<Vec<Arc<Vec<Option<usize>>>>, Error>;
    /// Updates full matrices, each on its owner, and returns this rank's new shards. No two
    /// matrices have the same owner.
    fn step_whole(
        &self,
        round: Vec<Whole>,
        step: &mut Step<'_>,
    ) -> Result<Vec<Option<DispatchTensor>>, Error>;
}

impl<B: ModelBackend> Schedule<B> {
    /// Returns the buffers of reduced gradients. Leaves out tensors of other backends.
    fn lower_reduced(
        &self,
        gradients: Vec<(ParamIndex, DispatchTensor)>,
    ) -> Vec<(ParamIndex, StoredTensor<Raw<B>>)> {
        let stored = gradients.into_iter().filter_map(|(index, gradient)| {
            let stored = StoredTensor::<B>::from_dispatch(gradient, self.settings.storage);
            Some((index, stored?.0))
        });
        let (indices, gradients): (Vec<_>, Vec<_>) = stored.unzip();
        indices.into_iter().zip(self.lower(gradients)).collect()
    }
}

impl<B: ModelBackend> ScheduleCollectives for Schedule<B> {
    /// Computes the norm of the gradients of all ranks. Each rank sums over its own shards, in
    /// layout order. The partial sums are added in rank order, and then those of replicated
    /// parameters. A rank that holds a full matrix computes the partial sum of every rank's part by
    /// itself, so that all strategies have bit-identical norms.
    fn gradient_norm(
        &self,
        gradients: Vec<(ParamIndex, DispatchTensor)>,
        norm: Norm,
    ) -> Result<f64, Error> {
        let mesh = self.settings.mesh;
        let (mut parts, mut ranks) = (Vec::new(), Vec::new());
        let mut replicated = Vec::new();
        let gradients = self.lower_reduced(gradients);
        // Tensor parallel ranks have different parts of split parameters, and the same whole ones. Each of
        // the latter counts on the first of them.
        let counts = |entry: &ParamSpec| mesh.tensor_rank() == Rank::ZERO || entry.split.is_some();
        for (index, gradient) in gradients {
            let (unit, entry) = self.param(index);
            if !counts(entry) {
                continue;
            }
            if entry.segment.is_none() {
                replicated.push((gradient, 0..entry.numel()));
                continue;
            }
            for (rank, range) in unit.norm_ranges(index.param, mesh) {
                ranks.push(rank);
                parts.push((gradient.clone(), range));
            }
        }
        let mut partial = vec![0f64; mesh.shard_size().size()];
        for (rank, sum) in ranks.into_iter().zip(StoredTensor::norm_sums(parts, norm)) {
            partial[rank] = norm.add(partial[rank], sum);
        }
        // All ranks agree on whether anything is sharded; a rank whose own shards are empty takes
        // part too.
        if self.units.iter().any(|unit| unit.gathers) {
            let mine = partial[mesh.shard_rank().index()];
            let op = Op::new("all_reduce", "the gradient norm");
            let group = &self.settings.groups.shard;
            tracing::trace!(target: "fsdp", "fsdp::reduce_norm");
            let all = self.comm.issue_on(group, move |group| group.exchange(&op, mine)).wait()?;
            partial = all.iter().map(|sum| **sum).collect();
        }
        let sum = partial.into_iter().chain(StoredTensor::norm_sums(replicated, norm));
        // `-0.0` is the neutral element of float addition.
        let mut sum = sum.fold(-0.0, |sum, part| norm.add(sum, part));
        if let Some(group) = &self.settings.groups.tensor {
            let op = Op::new("all_reduce", "the gradient norm of tensor parallel ranks");
            let all = self.comm.issue_on(group, move |group| group.exchange(&op, sum)).wait()?;
            sum = all.iter().fold(-0.0, |sum, part| norm.add(sum, **part));
        }
        Ok(norm.root(sum))
    }

    fn first_non_finite(
        &self,
        gradients: Vec<(ParamIndex, DispatchTensor)>,
    ) -> Result<Option<(ParamIndex, Rank)>, Error> {
        let gradients = self.lower_reduced(gradients).into_iter();
        let parts = gradients.map(|(index, gradient)| {
            let len = self.param(index).1.range().len();
            ((index.unit, index.param), (gradient, 0..len))
        });
        let (indices, parts): (Vec<_>, Vec<_>) = parts.unzip();
        // The infinity norm is the largest magnitude, or NaN if an element is.
        let largest = StoredTensor::norm_sums(parts, Norm::Inf);
        let named = indices.into_iter().zip(largest).filter(|(_, largest)| !largest.is_finite());
        let own = named.map(|(index, _)| index).min();
        let op = Op::new("all_gather", "parameters with non-finite gradients");
        let all = self.comm.issue_on(&self.world, move |group| group.exchange(&op, own)).wait()?;
        let named = self
            .world
            .members()
            .iter()
            .copied()
            .zip(&all)
            .filter_map(|(rank, own)| Some(((**own)?, rank)));
        Ok(named.min().map(|((unit, param), rank)| (ParamIndex { unit, param }, rank)))
    }

    fn check_whole_gradients(
        &self,
        gradients: Vec<(ParamIndex, DispatchTensor)>,
    ) -> Result<(), Error> {
        let Some(group) = &self.settings.groups.tensor else { return Ok(()) };
        let passes = self.counters.whole_gradient_checks.fetch_add(1, Ordering::Relaxed);
        if passes >= CHECKED_PASSES && !cfg!(debug_assertions) {
            return Ok(());
        }
        let whole = gradients.into_iter().filter(|(index, _)| self.param(*index).1.split.is_none());
        let parts = self.lower_reduced(whole.collect()).into_iter().map(|(index, gradient)| {
            let stored = self.param(index).1.range().len();
            (index, (gradient, 0..stored))
        });
        let (indices, parts): (Vec<_>, Vec<_>) = parts.unzip();
        let own: Vec<f64> = StoredTensor::norm_sums(parts, Norm::Two);
        let op = Op::new("all_gather", "gradients of whole parameters");
        let all = self.comm.issue_on(group, move |group| group.exchange(&op, own)).wait()?;
        let differs = |at: &usize| {
            let of = |rank: usize| all[rank].get(*at).copied().unwrap_or(f64::NAN);
            let close = |rank| (of(rank) - of(0)).abs() <= 1e-5 * of(0).abs();
            of(0).is_finite() && !(1..all.len()).all(close)
        };
        match (0..indices.len()).find(differs) {
            Some(at) => {
                let path = self.param(indices[at]).1.path.clone();
                Err(ScheduleError::SplitGradient { path }.into())
            }
            None => Ok(()),
        }
    }

    fn full(
        &self,
        index: ParamIndex,
        base: DispatchTensor,
        keep: bool,
    ) -> Result<Option<TensorData>, Error> {
        let (_, entry) = self.param(index);
        if self.lock().unloaded.contains(&index) {
            return Err(self.not_loaded(index));
        }
        let Some((base, ..)) = StoredTensor::<B>::from_dispatch(base, self.settings.storage) else {
            return Ok(None);
        };
        let base = self.on_device(base);
        // Of a split parameter every rank gathers its own part, and gives it to the other tensor parallel ranks.
        let keeps = keep || entry.split.is_some();
        let full = match &entry.placement {
            Placement::Shard(_) if keeps => self.gather_single(index, base)?,
            Placement::Shard(_) => {
                // A rank that does not keep the result only takes part in the gather.
                self.gather_parts(index, base)?;
                return Ok(None);
            }
            Placement::Replicated | Placement::PerRank if keeps => {
                decoded::<Raw<B>>(base, entry.storage, &entry.shape, DType::F32)
            }
            Placement::Replicated | Placement::PerRank | Placement::TiedTo(_) => return Ok(None),
        };
        let full = match &entry.split {
            Some(split) => self.join_split(full, split.dim)?,
            None => full,
        };
        Ok(keep.then(|| Raw::<B>::to_data(full)))
    }

    fn exchange_finite(&self, finite: bool, scale: f32) -> Result<Vec<Arc<(bool, f32)>>, Error> {
        let op = Op::new("all_reduce", "the overflow check");
        tracing::trace!(target: "fsdp", finite, "fsdp::reduce_finite");
        let exchange = move |group: &AnyProcessGroup| group.exchange(&op, (finite, scale));
        Ok(self.comm.issue_on(&self.world, exchange).wait()?)
    }

    fn exchange_gradients(
        &self,
        gradients: Vec<Option<usize>>,
    ) -> Result<Vec<Arc<Vec<Option<usize>>>>, Error> {
        let op = Op::new("all_gather", "what has gradients");
        let group = &self.settings.groups.shard;
        Ok(self.comm.issue_on(group, move |group| group.exchange(&op, gradients)).wait()?)
    }

    fn step_whole(
        &self,
        round: Vec<Whole>,
        step: &mut Step<'_>,
    ) -> Result<Vec<Option<DispatchTensor>>, Error> {
        self.step_round(round, step)
    }
}
