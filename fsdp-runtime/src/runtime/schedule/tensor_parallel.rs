//! Exchanges between tensor parallel ranks, in forward and backward.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DispatchTensor, Shape};

use super::super::autodiff::{Axis, TensorRanks, exchange};
use super::core::Schedule;
use super::counters::count;
use super::sum_of_part::flattened;
use crate::backend::ops::narrowed;
use crate::backend::{Float, FloatTensor, ModelBackend, Raw, RawFloat, ShardBackend, cast};
use crate::collectives::group::AnyProcessGroup;
use crate::collectives::{Op, ProcessGroup, Reduce, ReduceScatter};
use crate::error::{Error, ScheduleError, ShardError};
use crate::layout::{MeshError, TensorSplit, UnitLayout, WorldSize};
use crate::module::Exchange;

/// Inputs of split layers that tensor parallel ranks compare at the begin of a run.
const CHECKED_INPUTS: usize = 64;

impl<B: ModelBackend> Schedule<B> {
    /// Exchanges a tensor between the tensor parallel ranks, and records it where it is tracked.
    pub(super) fn exchange_tensor(
        &self,
        way: Exchange,
        tensor: DispatchTensor,
    ) -> Result<DispatchTensor, Error> {
        let Some(value) = B::from_dispatch(tensor.clone()) else { return Ok(tensor) };
        self.check_sequence(way, &value)?;
        if way == Exchange::Shared {
            self.check_inputs(&mut || {
                let Some(value) = B::from_dispatch(tensor.clone()) else { return 0.0 };
                let data = Raw::<B>::to_data(self.lowered(value.into_inner()));
                data.iter::<f64>().map(|element| element * element).sum()
            })?;
        }
        let value = match value {
            FloatTensor::Plain(value) => FloatTensor::Plain(way.forward(self, value)?),
            FloatTensor::Autodiff(value, context) => {
                FloatTensor::Autodiff(exchange(self.this(), way, value)?, context)
            }
        };
        Ok(B::into_dispatch(value))
    }

    /// Checks that tensor parallel ranks have equal digests of what they call a layer with, for the first
    /// layers of a run.
    pub(super) fn check_inputs(&self, digest: &mut dyn FnMut() -> f64) -> Result<(), Error> {
        let Some(group) = &self.settings.groups.tensor else { return Ok(()) };
        if self.counters.input_checks.fetch_add(1, Ordering::Relaxed) >= CHECKED_INPUTS {
            return Ok(());
        }
        let (op, own) = (Op::new("all_gather", "inputs of split layers"), digest());
        let all = self.comm.issue_on(group, move |group| group.exchange(&op, own)).wait()?;
        let is_close = |other: &Arc<f64>| (**other - own).abs() <= 1e-4 * own.abs();
        match own.is_finite() && !all.iter().all(is_close) {
            true => Err(ScheduleError::DifferentInputs.into()),
            false => Ok(()),
        }
    }

    /// Checks that the tensor parallel ranks can have equal parts of the sequence, and notes its length for
    /// attention.
    fn check_sequence(&self, way: Exchange, value: &FloatTensor<B>) -> Result<(), Error> {
        let tensor = self.settings.mesh.tensor_size();
        let shape = match value {
            FloatTensor::Plain(value) => value.shape(),
            FloatTensor::Autodiff(value, _) => value.shape(),
        };
        let joins = matches!(way, Exchange::SequenceShared | Exchange::SequenceGathered);
        let cuts = matches!(way, Exchange::SequenceSummed | Exchange::SequencePart);
        if !joins && !cuts {
            return Ok(());
        }
        let &[.., _, length, _] = &shape[..] else {
            return Err(ScheduleError::NoSequence { shape: shape.to_vec() }.into());
        };
        let length = if joins { length * tensor.size() } else { length };
        if !length.is_multiple_of(tensor.size()) {
            return Err(ShardError::from(MeshError::UnevenSequence { length, tensor }).into());
        }
        if way == Exchange::SequenceShared {
            self.counters.sequence_length.store(length, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Checks that attention is called with the positions that the last `column` layer returned, and not with
    /// this rank's part of them.
    pub(super) fn check_positions_of_attention(&self, positions: usize) -> Result<(), Error> {
        let length = self.counters.sequence_length.load(Ordering::Relaxed);
        match self.settings.mesh.splits_sequence() && length != positions {
            true => Err(ScheduleError::PartOfSequence { length, positions }.into()),
            false => Ok(()),
        }
    }

    fn tensor_group(&self) -> &Arc<AnyProcessGroup> {
        let group = self.settings.groups.tensor.as_ref();
        group.expect("a parameter is split between the ranks of a group")
    }

    /// Returns the parts of all tensor parallel ranks, joined along a dimension.
    pub(super) fn join_split(&self, part: RawFloat<B>, dim: usize) -> Result<RawFloat<B>, Error> {
        let (shape, numel) = (part.shape(), part.shape().num_elements());
        let op = Op::new("all_gather", "the parts of tensor parallel ranks").of(numel);
        let device = self.device.clone();
        // Groups gather flat tensors.
        let flat = Raw::<B>::float_reshape(part, Shape::from([numel]));
        let parts = self.issue(self.tensor_group(), move |group| {
            ProcessGroup::<Raw<B>>::all_gather_one(group, &op, &device, Some(flat))
        });
        let parts = parts.wait()?.into_iter().flatten();
        let parts = parts.map(|part| Raw::<B>::float_reshape(part, shape.clone()));
        Ok(Raw::<B>::float_cat(parts.collect(), dim))
    }

    fn lowered(&self, tensor: Float<B>) -> RawFloat<B> {
        let mut buffers = self.lower_values(vec![tensor]);
        buffers.pop().expect("`lower_values` returns as many buffers")
    }
}

impl<B: ModelBackend> TensorRanks<B> for Schedule<B> {
    fn sum(&self, tensor: Float<B>) -> Result<Float<B>, Error> {
        count(&self.counters.tensor_exchanges);
        let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
        let value = self.lowered(tensor);
        let numel = shape.iter().product();
        let op = Op::new("all_reduce", "a tensor parallel layer").of(numel);
        let device = self.device.clone();
        let sum = self.issue(self.tensor_group(), move |group| {
            let layout = UnitLayout::stored_as(std::iter::empty(), WorldSize::ONE);
            let keep = [Reduce { range: 0..numel, shape, segment: None, dtype }];
            let gradients = vec![Some(value)];
            let request = ReduceScatter { gradients, keep: &keep, layout: &layout, divisor: 1 };
            ProcessGroup::<Raw<B>>::reduce_scatter(group, &op, &device, request)
        });
        let sum = sum.wait()?.pop().flatten().expect("each rank gives a tensor");
        Ok(B::raise(cast::<Raw<B>>(sum, dtype)))
    }

    fn sum_part(&self, tensor: Float<B>, axis: Axis) -> Result<Float<B>, Error> {
        count(&self.counters.tensor_exchanges);
        let (mut shape, mesh) = (tensor.shape(), self.settings.mesh);
        let (own, ranks) = (mesh.tensor_rank().index(), mesh.tensor_size());
        let dim = axis.dim(shape.num_dims());
        shape[dim] /= ranks.size();
        let (whole, len) = (self.lowered(tensor), shape[dim]);
        let part = |rank: usize| narrowed::<Raw<B>>(&whole, dim, rank * len..(rank + 1) * len);
        let parts = (0..ranks.size()).map(part).map(flattened::<Raw<B>>).collect();
        let what = "a tensor parallel layer";
        let sum = self.sum_of_part(self.tensor_group(), (own, ranks), what, parts)?;
        Ok(B::raise(Raw::<B>::float_reshape(sum, shape)))
    }

    fn join(&self, tensor: Float<B>, axis: Axis) -> Result<Float<B>, Error> {
        count(&self.counters.tensor_exchanges);
        let dim = axis.dim(tensor.shape().num_dims());
        Ok(B::raise(self.join_split(self.lowered(tensor), dim)?))
    }

    fn part(&self, tensor: Float<B>, axis: Axis) -> Float<B> {
        let (shape, mesh) = (tensor.shape(), self.settings.mesh);
        let (part, parts) = (mesh.tensor_rank().index(), mesh.tensor_size().size());
        let split = TensorSplit { dim: axis.dim(shape.num_dims()), part, parts, gathers: false };
        B::float_slice(tensor, &split.slices(&split.local_shape(&shape)))
    }
}
