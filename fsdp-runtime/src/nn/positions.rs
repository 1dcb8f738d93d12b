//! Positions of the words of a row.

use burn::tensor::{Device, Int, Tensor};

use crate::module::RunningForward;

/// Returns the positions of `length` words of a row, `[length]`, for a table of positions as GPT-2 has it.
///
/// These are `0..length`. In the forward of a model with
/// [context parallel](crate::FsdpOptions::with_context_parallel) ranks, where a rank has `length` words of a longer row,
/// they are the positions of this rank's [part](crate::ContextPart).
///
/// # Example
///
/// ```
/// use burn::tensor::Device;
///
/// # fn main() {
/// # #[cfg(feature = "flex")] {
/// let positions = fsdp_runtime::nn::positions(3, &Device::flex());
/// positions.into_data().assert_eq(&[0, 1, 2].into(), false);
/// # }
/// # }
/// ```
pub fn positions(length: usize, device: &Device) -> Tensor<1, Int> {
    match RunningForward::part(length) {
        Some((part, _)) => part.positions(device),
        None => Tensor::arange(0..length as i64, device),
    }
}
