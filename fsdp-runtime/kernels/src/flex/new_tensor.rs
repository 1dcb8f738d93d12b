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
    let numel = shape.num_elements();
    let mut elements: Vec<E> = Vec::with_capacity(numel);
    let spare = &mut elements.spare_capacity_mut()[..numel];
    let write = |at: usize, part: &mut Uninit<E>| {
        let expected = (part.as_ptr().addr(), part.len());
        let (written, result) = task(at, part);
        let written = (written.as_ptr().addr(), written.len());
        assert_eq!(written, expected, "a task returns the part that it was given");
        result
    };
    let results = if numel <= part_len {
        vec![write(0, spare)]
    } else {
        let parts = spare.par_chunks_mut(part_len).enumerate();
        parts.map(|(index, part)| write(index * part_len, part)).collect()
    };
    // SAFETY: the capacity is at least `numel`. A task can return a `&mut [E]` to its part only if
    // the part is initialised, and the tasks returned such references to all `numel` elements.
    unsafe { elements.set_len(numel) };
    (FlexTensor::from_data(TensorData::new(elements, shape)), results)
}
