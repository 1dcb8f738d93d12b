//! The options of single units, by type and by path.

use burn::tensor::FloatDType;

use super::fsdp_options::FsdpOptions;
use super::policies::ReshardAfterForward;
use super::precision::MixedPrecisionPolicy;
use super::storage::StoragePolicy;
use crate::module::{FsdpModule, UnitType};

impl FsdpOptions {
    /// Sets whether gathered parameters are freed between forward and backward, for all units of
    /// the given types, in place of [`reshard_after_forward`](Self::with_reshard_after_forward): for
    /// example `unit_types![Head]`. Default: no such units.
    ///
    /// A unit under [`Never`](ReshardAfterForward::Never) has a gather buffer of its own. A unit that
    /// the wrap policy merges into the enclosing unit uses that unit's setting. If a type has two
    /// settings, the later one applies. FSDP2's `reshard_after_forward` of one `fully_shard` call.
    pub fn with_reshard_after_forward_for(
        mut self,
        units: &'static [UnitType],
        reshard: ReshardAfterForward,
    ) -> Self {
        self.reshard_after_forward_for.extend(units.iter().map(|unit| (*unit, reshard)));
        self
    }

    /// Sets whether gathered parameters are freed between forward and backward, for the units at
    /// module paths, and below them, in place of
    /// [`reshard_after_forward`](Self::with_reshard_after_forward) and
    /// [`reshard_after_forward_for`](Self::with_reshard_after_forward_for). Default: no such paths.
    ///
    /// If several paths lead to a unit, the one that was added last applies.
    /// [`Fsdp::unit`](crate::Fsdp::unit) changes it later.
    pub fn with_reshard_after_forward_at(
        mut self,
        paths: impl IntoIterator<Item = impl Into<String>>,
        reshard: ReshardAfterForward,
    ) -> Self {
        let paths = paths.into_iter().map(|path| (path.into(), reshard));
        self.reshard_after_forward_at.extend(paths);
        self
    }

    /// Sets whether gathered parameters are freed after the backward of a micro-batch that
    /// [`Fsdp::accumulate`](crate::Fsdp::accumulate) ends. Default: on.
    ///
    /// When it is off, every unit has a gather buffer of its own and stays gathered until the next
    /// forward of the step, which then needs no all-gather. The backward that ends the step frees all
    /// units in any case, because the optimizer changes the parameters. FSDP2's
    /// `set_reshard_after_backward`; [`Fsdp::unit`](crate::Fsdp::unit) sets it for one unit.
    pub const fn with_reshard_after_backward(mut self, reshard: bool) -> Self {
        self.reshard_after_backward = reshard;
        self
    }

    /// Sets how many units are prefetched while one computes, in forward and in backward. Default: 1.
    ///
    /// Each further unit ahead takes one more gather buffer of its nesting level: `n` units ahead
    /// need `n + 1` buffers, and [`gather_buffers`](Self::with_gather_buffers) is raised to that.
    /// [`forward_prefetch`](Self::with_forward_prefetch) and
    /// [`backward_prefetch`](Self::with_backward_prefetch) say whether there is a prefetch at all.
    pub const fn with_units_ahead(mut self, units: usize) -> Self {
        self.units_ahead = Some(units);
        self
    }

    /// Sets the unit types to prefetch in forward while a unit of one of the types `units` computes,
    /// in the given order and in place of the units that come next. Default: no such lists.
    ///
    /// A type in `ahead` stands for the next unit of that type in layout order, and a type that is
    /// named twice for the next two: `with_forward_prefetch_for(unit_types![Block], unit_types![Block,
    /// Block])` prefetches two blocks while one computes. A type without a further unit adds nothing. If a
    /// type in `units` has two lists, the later one applies, and
    /// [`forward_prefetch_at`](Self::with_forward_prefetch_at), whose documentation describes the
    /// gather buffers, overrides both.
    pub fn with_forward_prefetch_for(
        mut self,
        units: &'static [UnitType],
        ahead: &'static [UnitType],
    ) -> Self {
        self.forward_prefetch_for.extend(units.iter().map(|unit| (*unit, ahead.to_vec())));
        self
    }

    /// Sets the unit types to prefetch in backward while a unit of one of the types `units` computes,
    /// in the given order and in place of the units that ran forward before it. Default: no such lists.
    ///
    /// A type in `ahead` stands for the unit of that type before this one in layout order, and a type
    /// that is named twice for the two before it. The rest is as for
    /// [`forward_prefetch_for`](Self::with_forward_prefetch_for).
    pub fn with_backward_prefetch_for(
        mut self,
        units: &'static [UnitType],
        ahead: &'static [UnitType],
    ) -> Self {
        self.backward_prefetch_for.extend(units.iter().map(|unit| (*unit, ahead.to_vec())));
        self
    }

    /// Sets the units, by module path, to prefetch in forward while the unit at `path` computes, in
    /// the given order and in place of the units that come next. Default: no such lists.
    ///
    /// An empty list turns the prefetch off for this unit. The list applies without
    /// [`forward_prefetch`](Self::with_forward_prefetch), too. Units of one nesting level take their
    /// gather buffers in turn, in layout order. So a prefetch of the n-th unit after `path` on its
    /// level needs n + 1 buffers of that level, and it gets them. FSDP2's
    /// `set_modules_to_forward_prefetch`; [`Fsdp::unit`](crate::Fsdp::unit) changes the list later.
    pub fn with_forward_prefetch_at(
        mut self,
        path: impl Into<String>,
        units: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        let units = units.into_iter().map(Into::into).collect();
        self.forward_prefetch_at.push((path.into(), units));
        self
    }

    /// Sets the units, by module path, to prefetch in backward while the unit at `path` computes, in
    /// the given order and in place of the units that ran forward before it. Default: no such lists.
    ///
    /// Buffers are as for [`forward_prefetch_at`](Self::with_forward_prefetch_at). The list applies
    /// without [`backward_prefetch`](Self::with_backward_prefetch), too. FSDP2's
    /// `set_modules_to_backward_prefetch`.
    pub fn with_backward_prefetch_at(
        mut self,
        path: impl Into<String>,
        units: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        let units = units.into_iter().map(Into::into).collect();
        self.backward_prefetch_at.push((path.into(), units));
        self
    }

    /// Sets the dtypes for all units of the given types, in place of
    /// [`mixed_precision`](Self::with_mixed_precision): for example `unit_types![LmHead]`. Default:
    /// no such units.
    ///
    /// A unit that the wrap policy merges into the enclosing unit uses that unit's policy. If a
    /// type has two policies, the later one applies.
    pub fn with_mixed_precision_for(
        mut self,
        units: &'static [UnitType],
        policy: MixedPrecisionPolicy,
    ) -> Self {
        self.mixed_precision_for.extend(units.iter().map(|unit| (*unit, policy)));
        self
    }

    /// Sets the dtypes for the units at module paths, and below them, in place of
    /// [`mixed_precision`](Self::with_mixed_precision) and
    /// [`mixed_precision_for`](Self::with_mixed_precision_for): for example `["head"]`. Default: no
    /// such paths.
    ///
    /// If several paths lead to a unit, the one that was added last applies. The output dtype of the
    /// policy applies to the units at the paths themselves.
    pub fn with_mixed_precision_at(
        mut self,
        paths: impl IntoIterator<Item = impl Into<String>>,
        policy: MixedPrecisionPolicy,
    ) -> Self {
        self.mixed_precision_at.extend(paths.into_iter().map(|path| (path.into(), policy)));
        self
    }

    /// Sets the dtype of tables in modules of the type `M`, and below them, in place of
    /// [`buffer_dtype`](Self::with_buffer_dtype): for example
    /// `with_buffer_dtype_for::<Frequencies>(FloatDType::F32)`. Default: no such types.
    ///
    /// `M` is any module, a unit or not. Types are compared by name. If several modules around a table
    /// have a setting, that of the innermost applies; if a type has two, the later one.
    pub fn with_buffer_dtype_for<M: FsdpModule>(mut self, dtype: FloatDType) -> Self {
        self.buffer_dtype_for.push((UnitType::of_module::<M>(), dtype));
        self
    }

    /// Sets the dtype of tables at module paths, and below them, in place of
    /// [`buffer_dtype`](Self::with_buffer_dtype) and
    /// [`buffer_dtype_for`](Self::with_buffer_dtype_for): for example `["frequencies"]`. Default: no
    /// such paths.
    ///
    /// If several paths lead to a table, the one that was added last applies. Tables in arguments of a
    /// unit have the unit's path.
    pub fn with_buffer_dtype_at(
        mut self,
        paths: impl IntoIterator<Item = impl Into<String>>,
        dtype: FloatDType,
    ) -> Self {
        self.buffer_dtype_at.extend(paths.into_iter().map(|path| (path.into(), dtype)));
        self
    }

    /// Sets the form of storage for all units of the given types, in place of
    /// [`storage`](Self::with_storage): for example `unit_types![Embeddings]`. Default: no such
    /// units.
    ///
    /// A unit that the wrap policy merges into the enclosing unit uses that unit's policy. If a type
    /// has two policies, the later one applies.
    pub fn with_storage_for(mut self, units: &'static [UnitType], policy: StoragePolicy) -> Self {
        self.storage_for.extend(units.iter().map(|unit| (*unit, policy)));
        self
    }

    /// Sets the form of storage for the parameters at module paths, and below them, in place of
    /// [`storage`](Self::with_storage) and [`storage_for`](Self::with_storage_for): for example
    /// `["embed.word", "head"]`. Default: no such paths.
    ///
    /// If several paths lead to a parameter, the one that was added last applies.
    pub fn with_storage_at(
        mut self,
        paths: impl IntoIterator<Item = impl Into<String>>,
        policy: StoragePolicy,
    ) -> Self {
        self.storage_at.extend(paths.into_iter().map(|path| (path.into(), policy)));
        self
    }
}
