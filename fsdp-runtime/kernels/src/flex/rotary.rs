//! Rotary position encoding: the rotation of pairs of elements, in one pass over memory.
//!
//! The input is read row by row through its strides, so that heads that are views of `[batch, length,
//! heads, width]` need no copy.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use multiversion::multiversion;

use super::float::{KernelFloat, slice, with_float_type};
use super::new_tensor::{Uninit, new_tensor_in_parts};
use super::rows::task_len;
use crate::rotary::{RotaryRule, RotaryTensors};

/// Implements [`Kernels::rotate`](crate::Kernels::rotate).
///
/// # Panics
///
/// If a position is beyond the table.
pub(super) fn rotate(tensors: &RotaryTensors<FlexTensor>, rule: &RotaryRule) -> FlexTensor {
    let (table, input) = (tensors.table.to_contiguous(), with_whole_rows(&tensors.input));
    let positions = positions(tensors, rule);
    let [_, heads, length, width]: [usize; 4] = input.shape().dims();
    let strides = input.layout().strides();
    with_float_type!(input.dtype(), |E| {
        let rows = Rows {
            elements: &input.storage::<E>()[input.layout().start_offset()..],
            strides: [strides[0], strides[1], strides[2]].map(|stride| stride as usize),
            heads,
            length,
            width,
            table: slice(&table),
            positions: &positions,
            of_batch: if tensors.positions.is_some() { length } else { 0 },
            interleaved: rule.interleaved,
            sign: if rule.inverse { -1.0 } else { 1.0 },
        };
        new_tensor_in_parts(input.shape(), task_len(width), |at, output| {
            (rotate_rows(&rows, at / width, output), ())
        })
        .0
    })
}

/// Returns the tensor if the elements of a row are neighbours and no stride is negative, else a contiguous
/// copy.
fn with_whole_rows(tensor: &FlexTensor) -> FlexTensor {
    match tensor.layout().strides() {
        [outer @ .., 1] if outer.iter().all(|&stride| stride >= 0) => tensor.clone(),
        _ => tensor.to_contiguous(),
    }
}

/// Returns the positions of the rows of a head: those of each batch element in turn, or those that all
/// heads have.
fn positions(tensors: &RotaryTensors<FlexTensor>, rule: &RotaryRule) -> Vec<usize> {
    let [_, _, length, _]: [usize; 4] = tensors.input.shape().dims();
    let known = tensors.table.shape()[0];
    let positions: Vec<usize> = match &tensors.positions {
        None => (rule.start..rule.start + length).collect(),
        Some(positions) => {
            let positions = positions.to_contiguous();
            let position = |&position: &f32| {
                assert!(position >= 0.0, "positions must not be negative, as {position} is");
                position as usize
            };
            slice::<f32>(&positions).iter().map(position).collect()
        }
    };
    let last = positions.iter().max().copied().unwrap_or(0);
    assert!(last < known, "position {last} is beyond the rotary encoding, which has {known}");
    positions
}

/// Rows to be rotated, and the table of their angles.
struct Rows<'a, E> {
    elements: &'a [E],
    /// Elements from one batch element, head and row to the next.
    strides: [usize; 3],
    heads: usize,
    length: usize,
    width: usize,
    table: &'a [f32],
    positions: &'a [usize],
    /// Number of positions from one batch element to the next.
    of_batch: usize,
    interleaved: bool,
    /// Factor of the sines.
    sign: f32,
}

impl<E> Rows<'_, E> {
    /// Returns the elements of a row, and the cosines and sines of its angles.
    #[inline(always)]
    fn row(&self, index: usize) -> (&[E], &[f32], &[f32]) {
        let (head, at) = (index / self.length, index % self.length);
        let (batch, head) = (head / self.heads, head % self.heads);
        let [of_batch, of_head, of_row] = self.strides;
        let first = batch * of_batch + head * of_head + at * of_row;
        let position = self.positions[batch * self.of_batch + at];
        let angles = &self.table[position * self.width..][..self.width];
        let (cosines, sines) = angles.split_at(self.width / 2);
        (&self.elements[first..][..self.width], cosines, sines)
    }
}

/// Rotates the rows from number `first` on, as many as `output` has.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn rotate_rows<'a, E: KernelFloat>(
    rows: &Rows<'_, E>,
    first: usize,
    output: &'a mut Uninit<E>,
) -> &'a mut [E] {
    let half = rows.width / 2;
    for (number, output) in output.chunks_exact_mut(rows.width).enumerate() {
        let (input, cosines, sines) = rows.row(first + number);
        let (cosines, sines) = (&cosines[..half], &sines[..half]);
        let rotated = |pair: usize, a: E, b: E| {
            let (a, b, cos, sin) = (a.wide(), b.wide(), cosines[pair], rows.sign * sines[pair]);
            [a * cos - b * sin, b * cos + a * sin].map(E::narrow)
        };
        if rows.interleaved {
            let pairs = input.as_chunks::<2>().0.iter().zip(output.as_chunks_mut::<2>().0);
            for (pair, ([a, b], output)) in pairs.enumerate() {
                let [a, b] = rotated(pair, *a, *b);
                output[0].write(a);
                output[1].write(b);
            }
        } else {
            let ((left, right), (to_left, to_right)) =
                (input.split_at(half), output.split_at_mut(half));
            let (right, to_right) = (&right[..half], &mut to_right[..half]);
            for pair in 0..half {
                let [a, b] = rotated(pair, left[pair], right[pair]);
                to_left[pair].write(a);
                to_right[pair].write(b);
            }
        }
    }
    // SAFETY: the loops wrote both elements of each pair of each row, and `output` consists of rows, whose
    // width is even.
    unsafe { output.assume_init_mut() }
}
