//! The gather buffers of a model, and which unit uses which.

use std::sync::Arc;

use burn::tensor::DType;

use super::decide::BufferTurns;
use crate::backend::ShardBackend;
use crate::backend::gather_buffer::GatherBuffer;
use crate::options::ReshardAfterForward;
use crate::param_group::{Unit, UnitControl, code_buffers, gather_buffer_plan};

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
    held: Vec<Option<Vec<Arc<GatherBuffer<B>>>>>,
}

impl<B: ShardBackend> GatherBuffers<B> {
    /// Allocates the buffers of `units`; the units of an inner nesting level share at least
    /// `gather_buffers`.
    pub(super) fn new(
        gather_buffers: usize,
        device: &B::Device,
        units: &[Unit],
        controls: &[UnitControl],
    ) -> Self {
        let plan = gather_buffer_plan(units, controls, gather_buffers);
        let new = |(numel, dtype)| Arc::new(GatherBuffer::<B>::new(device, numel, dtype));
        let buffers: Vec<_> = plan.buffers.into_iter().map(new).collect();
        let parts = |(unit, control): (&Unit, &UnitControl)| match control.reshard {
            ReshardAfterForward::To(size) => unit.parts(size).into_iter().map(new).collect(),
            _ => Vec::new(),
        };
        let kept_parts = units.iter().zip(controls).map(parts).collect();
        let codes = code_buffers(units).into_iter().map(new).collect();
        let turns = BufferTurns::new(buffers.len(), plan.buffers_of);
        Self { buffers, turns, codes, kept_parts, held: vec![None; units.len()] }
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
        match &self.held[unit] {
            Some(held) => &held[range],
            None => &self.buffers[self.turns.of(unit)[range]],
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

    /// Returns the size of all buffers and kept parts, in bytes.
    pub(super) fn bytes(&self) -> usize {
        let parts = self.kept_parts.iter().flatten();
        let held = self.held.iter().flatten().flatten();
        let all = self.buffers.iter().chain(&self.codes).chain(parts).chain(held);
        all.map(|buffer| buffer.bytes()).sum()
    }
}
