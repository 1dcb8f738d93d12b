//! The launch of the forward kernel.

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::attention::{Attention, strides};
use super::dropout::Mask;
use super::forward_kernel::flash_forward_kernel;
use super::fragments::Fragments;
use super::plan::Pass;
use super::product::{MatrixProduct, ScalarProduct};
use crate::cube::buffer_slice::BufferSlice;
use crate::cube::tensors::{element, empty, empty_heads};

/// Returns the output and the statistics.
pub(super) fn forward(attention: &Attention<'_>) -> [CubeTensor; 2] {
    let Attention { client, tensors, batch, heads, .. } = attention;
    let (query, queries) = (&tensors.query, attention.queries());
    let plan = attention.plan(Pass::Forward);
    let output = empty_heads(query, [*batch, *heads, queries, plan.width], query.dtype);
    let statistics = empty(query, Shape::from([*batch, *heads, queries, 1]), DType::F32);
    let tiles = queries.div_ceil(plan.rows());
    let count = CubeCount::Static(tiles as u32, *heads as u32, *batch as u32);
    let dim = CubeDim::new_1d(plan.threads() as u32);
    let launch = match plan.fragments {
        Fragments::Matrix => flash_forward_kernel::launch_unchecked::<MatrixProduct>,
        Fragments::Scalar => flash_forward_kernel::launch_unchecked::<ScalarProduct>,
    };
    let argument = |tensor: &CubeTensor| BufferSlice::of(tensor).buffer_arg();
    // SAFETY: `Attention::new` checked that the buffers hold the rows of all heads. The kernel reads only these, as
    // it limits the rows to those of a head, and writes only rows of queries, which the new tensors have.
    unsafe {
        launch(
            client,
            count,
            dim,
            argument(query),
            argument(&tensors.key),
            argument(&tensors.value),
            attention.bias(),
            attention.table(),
            attention.mask().iter().map(Mask::argument).collect(),
            argument(&output),
            argument(&statistics),
            attention.shape(),
            strides(&output),
            plan,
            element(query.dtype),
        );
    }
    [output, statistics]
}
