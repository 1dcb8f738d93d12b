//! Products by AMX, where there is none.

use super::Matrix;
use super::parts::Target;
use crate::flex::float::KernelFloat;

pub(super) fn is_available() -> bool {
    false
}

pub(super) fn is_faster(_: [Matrix<'_>; 2]) -> bool {
    false
}

pub(super) fn new_product<I, O: KernelFloat, const PLANES: usize>(_: [Matrix<'_, I>; 2]) -> Vec<O> {
    unreachable!("the processor does not have AMX")
}

/// Does not return.
///
/// # Safety
///
/// None.
pub(super) unsafe fn multiply_part(_: Target, _: bool, _: f32, _: [Matrix<'_>; 2]) {
    unreachable!("the processor does not have AMX")
}
