//! New tensors in memory that is written once.
//!
//! A vector of zeros that is filled afterwards is written twice, the first time by one thread; and
//! where the memory comes from the system, each thread should touch its own pages first.

use std::mem::MaybeUninit;

use burn::backend::flex::FlexTensor;
use burn::tensor::{Element, Shape, TensorData};
use rayon::prelude::*;

/// Elements of a task.
pub(crate) const TASK: usize = 1 << 15;

/// A tensor of this shape. `task` is given where a part of its elements begins, a multiple of
/// [`TASK`], and the part, which it sets and returns.
///
/// # Panics
///
/// Where what it returns is not that part.
pub(crate) fn made<E: Element>(
    shape: Shape,
    task: impl for<'a> Fn(usize, &'a mut [MaybeUninit<E>]) -> &'a mut [E] + Sync,
) -> FlexTensor {
    let numel = shape.num_elements();
    let mut elements: Vec<E> = Vec::with_capacity(numel);
    let room = &mut elements.spare_capacity_mut()[..numel];
    let set = |at: usize, room: &mut [MaybeUninit<E>]| {
        let part = (room.as_ptr().addr(), room.len());
        let set = task(at, room);
        assert_eq!((set.as_ptr().addr(), set.len()), part, "a task sets its own part");
    };
    if numel <= TASK {
        set(0, room);
    } else {
        let tasks = room.par_chunks_mut(TASK).enumerate();
        tasks.for_each(|(index, room)| set(index * TASK, room));
    }
    // SAFETY: the capacity is at least `numel`. A task cannot have a reference to elements that are
    // not set, and all have returned one to each of theirs.
    unsafe { elements.set_len(numel) };
    FlexTensor::from_data(TensorData::new(elements, shape))
}
