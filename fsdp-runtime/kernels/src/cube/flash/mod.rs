//! Attention in one kernel, whose scores stay in registers.
//!
//! A cube takes a tile of rows of the score matrix and visits its columns in tiles, which it copies to shared
//! memory (see `Plan`). Products are those of matrix instructions on the tensors' dtype, with sums in f32; the
//! CPU device has none, and runs the same kernels with multiplications one by one (`TileProduct`), in tests.
//!
//! The kernels take bf16 and f16, on devices with the instruction `mma.m16n8k16`, and rows of 16 to 128 elements,
//! in multiples of 16. For other attentions the functions return `None`, and on devices on which the kernels of a
//! kind of attention fail their check (`check`).

mod attention;
mod backward;
mod check;
mod dropout;
mod forward;
mod forward_kernel;
mod fragments;
mod key_grads_kernel;
mod means_kernel;
mod plan;
mod product;
mod query_grads_kernel;
mod scores;
mod shape;
mod sums;
#[cfg(all(test, feature = "cpu", feature = "flex"))]
mod tests;
mod tiles;

use burn_cubecl::tensor::CubeTensor;

use self::attention::Attention;
use self::plan::Setting;
use crate::attention::{AttentionRule, AttentionTensors};

/// Implements [`Kernels::tiled_attention`](crate::Kernels::tiled_attention).
pub(super) fn forward(
    tensors: &AttentionTensors<CubeTensor>,
    rule: &AttentionRule,
) -> Option<[CubeTensor; 2]> {
    let attention = checked(tensors, rule)?;
    Some(forward::forward(&attention))
}

/// Implements
/// [`Kernels::tiled_attention_backward`](crate::Kernels::tiled_attention_backward).
pub(super) fn backward(
    tensors: &AttentionTensors<CubeTensor>,
    results: &[CubeTensor; 2],
    grad: &CubeTensor,
    rule: &AttentionRule,
) -> Option<[CubeTensor; 3]> {
    let attention = checked(tensors, rule)?;
    backward::backward(&attention, results, grad)
}

/// Returns the attention if the kernels take it and are right on its device.
fn checked<'a>(
    tensors: &AttentionTensors<CubeTensor>,
    rule: &'a AttentionRule,
) -> Option<Attention<'a>> {
    let setting = Setting::get();
    let attention = Attention::new(tensors, rule, setting)?;
    // The tests that assemble the kernels run none.
    let is_right = cfg!(test) || check::passes(&attention, setting);
    is_right.then_some(attention)
}
