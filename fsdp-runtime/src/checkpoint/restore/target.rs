//! A parameter to load into, and the elements that this rank needs for it.

use std::iter::once;
use std::ops::Range;

use burn::module::ParamId;
use burn::tensor::DType;

use crate::checkpoint::manifest::TensorEntry;
use crate::module::ParamIndex;
use crate::param_group::{ParamSpec, Placement};

/// A parameter of a model to load into.
#[derive(Clone)]
pub(super) struct Target<'a> {
    pub(super) id: ParamId,
    pub(super) index: ParamIndex,
    pub(super) spec: &'a ParamSpec,
    pub(super) dtype: DType,
    /// The rank that loads.
    pub(super) rank: usize,
    /// Whether this rank steps this sharded matrix, under an optimizer that steps full matrices.
    pub(super) owned: bool,
}

/// Returns the elements, or words of codes, of a stored tensor that a rank needs for its part of a
/// parameter, counted over all copies.
pub(super) fn stored_ranges(
    spec: &ParamSpec,
    stored: &TensorEntry,
    rank: usize,
) -> Vec<Range<usize>> {
    if let Some(split) = spec.split {
        return split.runs(&spec.shape, spec.stored_range());
    }
    let first = first_element(spec, stored, rank);
    let range = spec.stored_range();
    once(first + range.start..first + range.end).collect()
}

/// Returns the index of the first element of the copy that a rank loads. This is copy 0 for a rank
/// that the saving world did not have, and for a parameter that is no longer ignored.
fn first_element(spec: &ParamSpec, stored: &TensorEntry, rank: usize) -> usize {
    match spec.placement {
        Placement::PerRank if rank < stored.copies => rank * stored.numel().unwrap_or(0),
        _ => 0,
    }
}

impl Target<'_> {
    /// Returns the ranges and the shape of the elements that this rank loads of `stored`, a tensor
    /// of the parameter's optimizer state.
    ///
    /// For a sharded matrix without `whole` these are the elements of the shard, otherwise all
    /// elements. Returns `None` if the shape of `stored` does not fit the parameter.
    pub(super) fn state_ranges(
        &self,
        stored: &TensorEntry,
        whole: bool,
    ) -> Option<(Vec<Range<usize>>, Vec<usize>)> {
        let spec = self.spec;
        let sharded = matches!(spec.placement, Placement::Shard(_)) && !whole;
        if sharded || spec.split.is_some() {
            let ranges = stored_ranges(spec, stored, self.rank);
            return (stored.shape == spec.whole_shape()).then(|| (ranges, spec.base_shape()));
        }
        let first = first_element(spec, stored, self.rank);
        let fits = stored.shape.len() == spec.shape.len();
        let numel = stored.numel().filter(|_| fits)?;
        Some((once(first..first + numel).collect(), stored.shape.clone()))
    }

    /// Returns whether this rank steps the parameter, and so has optimizer state of it.
    pub(super) fn is_stepped(&self, whole: bool) -> bool {
        match self.spec.placement {
            Placement::Shard(_) if whole => self.owned,
            _ => !self.spec.range().is_empty(),
        }
    }
}
