//! Attention among context parallel ranks: keys and values of whole rows, and the sums of their gradients.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DispatchTensor, Shape};
use fsdp_kernels::AttentionRule;

use super::core::Schedule;
use super::counters::count;
use super::sum_of_part::{flattened, split_flat};
use crate::backend::ops::{Arriving, ContextRanks, attention_among, narrowed, of_part};
use crate::backend::{Float, ModelBackend, Raw, RawFloat, ShardBackend};
use crate::collectives::group::AnyProcessGroup;
use crate::collectives::{Op, ProcessGroup};
use crate::error::{Error, ScheduleError, ShardError};
use crate::layout::{ContextPart, WorldSize};
use crate::options::ContextExchange;

/// Dimension of the length in queries, keys and values.
const LENGTH: usize = 2;

impl<B: ModelBackend> Schedule<B> {
    /// Computes attention among the context parallel ranks.
    pub(super) fn attend(
        &self,
        tensors: [DispatchTensor; 3],
        bias: Option<DispatchTensor>,
        rule: &AttentionRule,
    ) -> Result<DispatchTensor, Error> {
        let ranks: Arc<dyn ContextRanks<B>> = self.this();
        let output = attention_among::<B>(tensors, bias, rule, ranks)?;
        output.ok_or_else(|| ScheduleError::NoContextAttention.into())
    }

    /// Checks, at the end of a backward pass, that attention knew of the other context parallel ranks.
    pub(super) fn check_context(&self) -> Result<(), Error> {
        let exchanges = self.counters.context_exchanges.load(Ordering::Relaxed);
        match self.settings.groups.context.is_some() && exchanges == 0 {
            true => Err(ScheduleError::NoContextAttention.into()),
            false => Ok(()),
        }
    }

    fn context_group(&self) -> &Arc<AnyProcessGroup> {
        let group = self.settings.groups.context.as_ref();
        group.expect("attention knows of context parallel ranks where there are some")
    }

    /// Returns a flat buffer of the elements of tensors, and their shapes.
    fn packed(&self, tensors: Vec<Float<B>>) -> (RawFloat<B>, Vec<Shape>) {
        let shapes = tensors.iter().map(TensorMetadata::shape).collect();
        let flat = self.lower_values(tensors).into_iter().map(flattened::<Raw<B>>);
        (Raw::<B>::float_cat(flat.collect(), 0), shapes)
    }

    fn context_size(&self) -> WorldSize {
        self.settings.mesh.context_size()
    }

    /// Returns the part of a context parallel rank, of rows of `length` positions.
    fn context_part(&self, length: usize, rank: usize) -> Result<ContextPart, Error> {
        let part = self.settings.mesh.context_part(length).map_err(ShardError::from)?;
        Ok(part.of_rank(rank))
    }
}

impl<B: ModelBackend> ContextRanks<B> for Schedule<B> {
    fn ring(&self, keys: usize) -> Result<Option<ContextPart>, Error> {
        match self.settings.context_exchange {
            ContextExchange::Gather => Ok(None),
            ContextExchange::Ring => {
                let own = self.settings.mesh.context_rank().index();
                self.context_part(keys * self.context_size().size(), own).map(Some)
            }
        }
    }

    fn pass_on(&self, tensors: Vec<Float<B>>) -> Result<Arriving<B>, Error> {
        count(&self.counters.context_exchanges);
        let (flat, shapes) = self.packed(tensors);
        let op = Op::new("send_recv", "keys and values").of(flat.shape().num_elements());
        let device = self.device.clone();
        let work = self.issue(self.context_group(), move |group| {
            ProcessGroup::<Raw<B>>::rotate(group, &op, &device, flat)
        });
        Ok(Box::new(move || {
            let tensors = split_flat::<Raw<B>>(&work.wait()?, &shapes);
            Ok(tensors.into_iter().map(B::raise).collect())
        }))
    }

    fn join(&self, parts: [Float<B>; 2]) -> Result<[Float<B>; 2], Error> {
        count(&self.counters.context_exchanges);
        let (flat, shapes) = self.packed(parts.into());
        let op = Op::new("all_gather", "keys and values").of(flat.shape().num_elements());
        let device = self.device.clone();
        let all = self.issue(self.context_group(), move |group| {
            ProcessGroup::<Raw<B>>::all_gather_one(group, &op, &device, Some(flat))
        });
        let all = all.wait()?;
        let mut keys = Vec::new();
        let mut values = Vec::new();
        for part in all.iter().flatten() {
            let part = split_flat::<Raw<B>>(part, &shapes);
            let [key, value] = <[_; 2]>::try_from(part).expect("two tensors were joined");
            keys.push(key);
            values.push(value);
        }
        Ok([keys, values].map(|parts| B::raise(in_order::<Raw<B>>(&parts))))
    }

    fn sum_parts(&self, whole: [Float<B>; 2]) -> Result<[Float<B>; 2], Error> {
        count(&self.counters.context_exchanges);
        let (own, ranks) = (self.settings.mesh.context_rank().index(), self.context_size());
        let lengths = whole.each_ref().map(|tensor| tensor.shape()[LENGTH]);
        let shapes = whole.each_ref().map(|tensor| {
            let mut shape = tensor.shape();
            shape[LENGTH] /= ranks.size();
            shape
        });
        let whole = self.lower_values(whole.into());
        let mut parts = Vec::new();
        for rank in 0..ranks.size() {
            let mut of_rank = Vec::new();
            for (tensor, length) in whole.iter().zip(lengths) {
                let part = self.context_part(length, rank)?;
                of_rank.push(flattened::<Raw<B>>(of_part::<Raw<B>>(tensor, LENGTH, part)));
            }
            parts.push(Raw::<B>::float_cat(of_rank, 0));
        }
        let what = "gradients of keys and values";
        let sum = self.sum_of_part(self.context_group(), (own, ranks), what, parts)?;
        let sums = split_flat::<Raw<B>>(&sum, &shapes);
        Ok(<[_; 2]>::try_from(sums).expect("two tensors were added").map(B::raise))
    }
}

/// Returns whole rows, given the parts of all ranks, each of two blocks.
fn in_order<B: ShardBackend>(parts: &[Float<B>]) -> Float<B> {
    let block = parts[0].shape()[LENGTH] / 2;
    let early = parts.iter().map(|part| narrowed::<B>(part, LENGTH, 0..block));
    let late = parts.iter().rev().map(|part| narrowed::<B>(part, LENGTH, block..2 * block));
    B::float_cat(early.chain(late).collect(), LENGTH)
}
