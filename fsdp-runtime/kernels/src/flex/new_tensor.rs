//! New tensors whose memory is written once.
//!
//! Filling a vector of zeros would write its memory twice, the first time on one thread. It would
//! also give fresh pages to that thread, where each thread should be the first to touch the pages
//! it computes.

use std::mem::MaybeUninit;

use burn::backend::flex::FlexTensor;
use burn::tensor::{Element, Shape, TensorData};
use rayon::prelude::*;

/// Number of elements that a task of the thread pool computes.
pub(super) const TASK: usize = 1 << 15;

/// Elements of a new tensor, to be written before they are read.
pub(crate) type Uninit<E> = [MaybeUninit<E>];

/// Returns a tensor of this shape, filled by `task`, which runs on all threads.
///
/// `task` receives the index of a part's first element, a multiple of [`TASK`], and the part. It
/// writes every element of the part and returns the part.
///
/// # Panics
///
/// If `task` returns another slice than the part.
pub(crate) fn new_tensor<E: Element>(
    shape: Shape,
    task: impl for<'a> Fn(usize, &'a mut Uninit<E>) -> &'a mut [E] + Sync,
) -> FlexTensor {
    new_tensor_in_parts(shape, TASK, |at, part| (task(at, part), ())).0
}

/// Returns a tensor like [`new_tensor`], in parts of `part_len` elements, the last of which may be
/// shorter. Also returns the second value that `task` returns for each part, in the order of the
/// parts.
///
/// # Panics
///
/// If `task` returns another slice than the part, or if `part_len` is 0.
pub(super) fn new_tensor_in_parts<E: Element, R: Send>(
    shape: Shape,
    part_len: usize,
    task: impl for<'a> Fn(usize, &'a mut Uninit<E>) -> (&'a mut [E], R) + Sync,
) -> (FlexTensor, Vec<R>) {
    let ([tensor], results) = new_tensors_in_parts(shape, part_len, |at, [part]| {
        let (part, result) = task(at, part);
        ([part], result)
    });
    (tensor, results)
}

/// Returns `N` tensors of one shape like [`new_tensor_in_parts`]. `task` receives the parts of all of
/// them at the same elements.
///
/// # Panics
///
/// If `task` returns other slices than the parts, or if `part_len` is 0.
pub(super) fn new_tensors_in_parts<E: Element, R: Send, const N: usize>(
    shape: Shape,
    part_len: usize,
    task: impl for<'a> Fn(usize, [&'a mut Uninit<E>; N]) -> ([&'a mut [E]; N], R) + Sync,
) -> ([FlexTensor; N], Vec<R>) {
    let numel = shape.num_elements();
    let mut elements: [Vec<E>; N] = std::array::from_fn(|_| Vec::with_capacity(numel));
    let spare = elements.each_mut().map(|elements| &mut elements.spare_capacity_mut()[..numel]);
    let write = |(index, parts): (usize, [&mut Uninit<E>; N])| {
        let expected = parts.each_ref().map(|part| (part.as_ptr().addr(), part.len()));
        let (written, result) = task(index * part_len, parts);
        let written = written.map(|part| (part.as_ptr().addr(), part.len()));
        assert_eq!(written, expected, "a task returns the parts that it was given");
        result
    };
    let results = if numel <= part_len {
        vec![write((0, spare))]
    } else {
        let mut chunks = spare.map(|spare| spare.chunks_mut(part_len));
        let next = |_| chunks.each_mut().map(|chunks| chunks.next().unwrap_or_default());
        let parts: Vec<_> = (0..numel.div_ceil(part_len)).map(next).collect();
        parts.into_par_iter().enumerate().map(write).collect()
    };
    let tensors = elements.map(|mut elements| {
        // SAFETY: the capacity is at least `numel`. A task can return a `&mut [E]` to its part only if
        // the part is initialised, and the tasks returned such references to all `numel` elements.
        unsafe { elements.set_len(numel) };
        FlexTensor::from_data(TensorData::new(elements, shape.clone()))
    });
    (tensors, results)
}
