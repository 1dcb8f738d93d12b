//! Elements of a tensor as f32: those that a task reads, and those that it adds up.

use burn::tensor::DType;

use crate::flex::float::KernelFloat;
use crate::flex::loops::convert_over;

/// Returns the elements as f32: the slice itself if they are f32, else converted in `scratch`, which
/// grows as needed.
pub(super) fn wide<'a, E: KernelFloat>(source: &'a [E], scratch: &'a mut Vec<f32>) -> &'a [f32] {
    if !is_wide::<E>() && scratch.len() < source.len() {
        scratch.resize(source.len(), 0.0);
    }
    E::widened(source, scratch)
}

/// Sums in f32 of which a tensor gets the rounded ones: the tensor's own elements if they are f32.
pub(super) struct Sums<'a, E> {
    target: &'a mut [E],
    wide: Vec<f32>,
}

impl<'a, E: KernelFloat> Sums<'a, E> {
    /// Returns sums that are 0, as the elements of `target` are.
    pub(super) fn new(target: &'a mut [E]) -> Self {
        let wide = if is_wide::<E>() { Vec::new() } else { vec![0.0; target.len()] };
        Self { target, wide }
    }

    /// Returns the sums.
    pub(super) fn get(&mut self) -> &mut [f32] {
        if is_wide::<E>() { bytemuck::cast_slice_mut(self.target) } else { &mut self.wide }
    }

    /// Writes the sums to the tensor.
    pub(super) fn store(self) {
        if !is_wide::<E>() {
            convert_over(&self.wide, self.target);
        }
    }
}

fn is_wide<E: KernelFloat>() -> bool {
    E::dtype() == DType::F32
}
