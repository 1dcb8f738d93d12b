//! The gather buffers of a model, and which unit uses which.
//!
//! Units with common buffers use the others only in passes in which the shards of some rank do not
//! lie in the common ones, for example because an optimizer had to copy them. The others are not
//! allocated before the first such pass.

use std::sync::Arc;

use burn::tensor::DType;

use super::decide::BufferTurns;
use crate::backend::ShardBackend;
use crate::backend::gather_buffer::GatherBuffer;
use crate::options::ReshardAfterForward;
use crate::param_group::{Unit, UnitControl, code_buffers, gather_buffer_plan};

/// One buffer for each flat range of a unit, for the units that have such buffers.
pub(super) type BuffersOfUnits<B> = Vec<Option<Vec<Arc<GatherBuffer<B>>>>>;

/// The gather buffers of a model.
pub(super) struct GatherBuffers<B: ShardBackend> {
    buffers: Vec<Arc<GatherBuffer<B>>>,
    /// Which unit uses which of the buffers.
    pub(super) turns: BufferTurns,
    /// Buffers that codes are received in, of different dtypes. Only the thread that runs all-gathers
    /// uses them, for one unit after the other.
    codes: Vec<Arc<GatherBuffer<B>>>,
    /// The part of each flat range of each unit that this rank keeps after forward, under
    /// `ReshardAfterForward::To`.
    kept_parts: Vec<Vec<Arc<GatherBuffer<B>>>>,
    /// Buffers of their own of the units that stay gathered, in place of those of `turns`.
    held: BuffersOfUnits<B>,
    /// Buffers in which the shards of all ranks of the shard group can lie. The ranks share them.
    common: BuffersOfUnits<B>,
    /// Units that are gathered in their common buffers.
    in_place: Vec<bool>,
}

impl<B: ShardBackend> GatherBuffers<B> {
    /// Allocates the buffers of `units`; the units of an inner nesting level share at least
    /// `gather_buffers`. With `common` buffers, those that units take in turn are allocated later.
    pub(super) fn new(
        gather_buffers: usize,
        device: &B::Device,
        units: &[Unit],
        controls: &[UnitControl],
        common: BuffersOfUnits<B>,
    ) -> Self {
        let plan = gather_buffer_plan(units, controls, gather_buffers);
        let new = |(numel, dtype): (usize, DType), later: bool| {
            let new = if later { GatherBuffer::<B>::unallocated } else { GatherBuffer::new };
            Arc::new(new(device, numel, dtype))
        };
        let any_common = common.iter().any(Option::is_some);
        let buffers: Vec<_> = plan.buffers.into_iter().map(|it| new(it, any_common)).collect();
        let parts = |((unit, control), common): ((&Unit, &UnitControl), &Option<_>)| {
            let parts = match control.reshard {
                ReshardAfterForward::To(size) => unit.parts(size),
                _ => Vec::new(),
            };
            parts.into_iter().map(|it| new(it, common.is_some())).collect()
        };
        let kept_parts = units.iter().zip(controls).zip(&common).map(parts).collect();
        let codes = code_buffers(units).into_iter().map(|it| new(it, false)).collect();
        let turns = BufferTurns::new(buffers.len(), plan.buffers_of);
        let (held, in_place) = (vec![None; units.len()], vec![false; units.len()]);
        Self { buffers, turns, codes, kept_parts, held, common, in_place }
    }

    /// Allocates the buffers that a unit takes in turn, and returns the bytes that this took.
    pub(super) fn allocate(&self, unit: usize) -> usize {
        self.turns.of(unit).iter().map(|&buffer| self.buffers[buffer].allocate()).sum()
    }

    /// Returns the common buffers of all units.
    pub(super) fn common(&self) -> &BuffersOfUnits<B> {
        &self.common
    }

    /// Returns whether a unit has common buffers.
    pub(super) fn has_common(&self, unit: usize) -> bool {
        self.common[unit].is_some()
    }

    /// Says whether a unit is gathered in its common buffers.
    pub(super) fn set_in_place(&mut self, unit: usize, in_place: bool) {
        self.in_place[unit] = in_place;
    }

    /// Returns whether a unit is gathered in its common buffers.
    pub(super) fn is_in_place(&self, unit: usize) -> bool {
        self.in_place[unit]
    }

    /// Takes the buffers of their own from `other`, which is being replaced.
    pub(super) fn take_held(&mut self, other: &mut Self) {
        self.held = std::mem::take(&mut other.held);
        for (unit, held) in self.held.iter().enumerate() {
            self.turns.hold(unit, held.is_some());
        }
    }

    /// Gives a unit buffers of its own, which no other unit takes.
    pub(super) fn hold(&mut self, unit: usize, buffers: Vec<Arc<GatherBuffer<B>>>) {
        self.held[unit] = Some(buffers);
        self.turns.hold(unit, true);
    }

    /// Takes a unit's own buffers away, and returns their bytes. Tensors that view them keep their
    /// memory alive.
    pub(super) fn end_hold(&mut self, unit: usize) -> usize {
        self.turns.hold(unit, false);
        let buffers = self.held[unit].take().unwrap_or_default();
        buffers.iter().map(|buffer| buffer.bytes()).sum()
    }

    /// Returns the buffers that a unit is gathered in, one for each flat range.
    pub(super) fn of(&self, unit: usize) -> impl Iterator<Item = &Arc<GatherBuffer<B>>> {
        (0..self.turns.of(unit).len()).map(move |range| self.of_range(unit, range))
    }

    /// Returns the buffer of one flat range of a unit.
    pub(super) fn of_range(&self, unit: usize, range: usize) -> &Arc<GatherBuffer<B>> {
        match (&self.held[unit], &self.common[unit]) {
            (Some(held), _) => &held[range],
            (None, Some(common)) if self.in_place[unit] => &common[range],
            _ => &self.buffers[self.turns.of(unit)[range]],
        }
    }

    /// Returns the buffer that codes of this dtype are received in.
    pub(super) fn codes(&self, dtype: DType) -> Arc<GatherBuffer<B>> {
        let buffer = self.codes.iter().find(|buffer| buffer.dtype() == dtype);
        buffer.expect("each dtype that codes have has a buffer").clone()
    }

    /// Returns the parts of a unit that this rank keeps after forward, one for each flat range.
    pub(super) fn kept_parts(&self, unit: usize) -> &[Arc<GatherBuffer<B>>] {
        &self.kept_parts[unit]
    }

    /// Gives a unit's buffers back.
    pub(super) fn release(&mut self, unit: usize) {
        if std::mem::take(&mut self.in_place[unit]) {
            return;
        }
        for &buffer in self.turns.of(unit) {
            self.buffers[buffer].release();
        }
        self.turns.release(unit);
    }

    /// Replaces the buffer of one flat range of a unit by a new one, which is returned.
    pub(super) fn add(
        &mut self,
        unit: usize,
        range: usize,
        device: &B::Device,
        (numel, dtype): (usize, DType),
    ) -> &GatherBuffer<B> {
        self.turns.add(unit, range);
        self.buffers.push(Arc::new(GatherBuffer::new(device, numel, dtype)));
        &self.buffers[self.buffers.len() - 1]
    }

    /// Returns the size of all buffers and kept parts, in bytes. Common buffers have the shards, which
    /// are counted as such. The places of shards that lie elsewhere for a time are not counted.
    pub(super) fn bytes(&self) -> usize {
        let parts = self.kept_parts.iter().flatten();
        let held = self.held.iter().flatten().flatten();
        let all = self.buffers.iter().chain(&self.codes).chain(parts).chain(held);
        all.map(|buffer| buffer.bytes()).sum()
    }
}
