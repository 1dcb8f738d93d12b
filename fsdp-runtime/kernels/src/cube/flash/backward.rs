//! The launches of the backward kernels.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::attention::{Attention, in_chunks, strides};
use super::dropout::Mask;
use super::fragments::Fragments;
use super::key_grads_kernel::flash_key_grads_kernel;
use super::means_kernel::flash_means_kernel;
use super::plan::{Pass, Plan};
use super::product::{MatrixProduct, ScalarProduct};
use super::query_grads_kernel::flash_query_grads_kernel;
use crate::cube::buffer_slice::BufferSlice;
use crate::cube::span::grid;
use crate::cube::tensors::{contiguous, element, empty, empty_heads, is_interleaved};

/// What the backward kernels need of the forward pass, and the gradient of its output.
struct Saved {
    /// Logarithms of the sums of the exponentials of the scores of each query, contiguous.
    logs: CubeTensor,
    /// Means of the gradients of each query's weights, contiguous.
    means: CubeTensor,
    /// The gradient of the output, whose rows are whole chunks.
    grad: CubeTensor,
    mask: Option<Mask>,
}

/// Returns the gradients of query, key and value, given output, statistics and the output's gradient. Returns `None`
/// if the kernels do not take the last.
pub(super) fn backward(
    attention: &Attention<'_>,
    [output, logs]: &[CubeTensor; 2],
    grad: &CubeTensor,
) -> Option<[CubeTensor; 3]> {
    let output = in_chunks(output.clone())?;
    let (logs, grad) = (contiguous(logs.clone()), in_chunks(grad.clone())?);
    let rows = attention.batch * attention.heads * attention.queries();
    assert_eq!(logs.dtype, DType::F32, "statistics are in f32");
    assert_eq!(grad.shape(), output.shape(), "the gradient of the output has its shape");
    assert!(rows <= BufferSlice::of(&logs).len(), "a number for each query");
    let means = means(attention, &output, &grad, rows);
    let saved = Saved { logs, means, grad, mask: attention.mask() };
    let query_grad = query_grads(attention, &saved);
    let [key_grad, value_grad] = key_grads(attention, &saved);
    Some([query_grad, key_grad, value_grad])
}

/// Returns the means of the gradients of each query's weights.
fn means(
    attention: &Attention<'_>,
    output: &CubeTensor,
    grad: &CubeTensor,
    rows: usize,
) -> CubeTensor {
    let (heads, queries) = (attention.heads, attention.queries());
    let means = empty(output, Shape::from([attention.batch, heads, queries, 1]), DType::F32);
    let plan = attention.plan(Pass::Forward);
    let lanes = plan.lanes_of_row();
    let (count, dim) = grid(&attention.client, rows * lanes);
    // SAFETY: `in_chunks` checked that the buffers hold the rows. The kernel reads only these, and
    // writes a number for each, which the new tensor has.
    unsafe {
        flash_means_kernel::launch_unchecked(
            &attention.client,
            count,
            dim,
            argument(output),
            argument(grad),
            argument(&means),
            strides(output),
            strides(grad),
            rows,
            heads,
            queries,
            plan.chunks(),
            lanes,
            element(output.dtype),
        );
    }
    means
}

fn query_grads(attention: &Attention<'_>, saved: &Saved) -> CubeTensor {
    let Attention { client, tensors, .. } = attention;
    let query = &tensors.query;
    let plan = attention.plan(Pass::QueryGrads);
    let target = empty_heads(query, query.shape().dims(), query.dtype);
    let count = cubes(attention, attention.queries(), attention.heads, &plan);
    let launch = match plan.fragments {
        Fragments::Matrix => flash_query_grads_kernel::launch_unchecked::<MatrixProduct>,
        Fragments::Scalar => flash_query_grads_kernel::launch_unchecked::<ScalarProduct>,
    };
    // SAFETY: `Attention::new` and `backward` checked that the buffers hold the rows of all heads. The kernel reads
    // only these, as it limits the rows to those of a head, and writes only rows of queries.
    unsafe {
        launch(
            client,
            count,
            CubeDim::new_1d(plan.threads() as u32),
            argument(query),
            argument(&tensors.key),
            argument(&tensors.value),
            argument(&saved.grad),
            argument(&saved.logs),
            argument(&saved.means),
            attention.bias(),
            attention.table(),
            saved.mask.iter().map(Mask::argument).collect(),
            argument(&target),
            attention.shape(),
            strides(&saved.grad),
            strides(&target),
            plan,
            element(query.dtype),
        );
    }
    target
}

fn key_grads(attention: &Attention<'_>, saved: &Saved) -> [CubeTensor; 2] {
    let Attention { client, tensors, .. } = attention;
    let (query, key) = (&tensors.query, &tensors.key);
    let plan = attention.plan(Pass::KeyGrads);
    let value = &tensors.value;
    let targets = [0, 1].map(|_| empty_heads(value, value.shape().dims(), value.dtype));
    let count = cubes(attention, attention.keys(), attention.key_heads, &plan);
    let launch = match plan.fragments {
        Fragments::Matrix => flash_key_grads_kernel::launch_unchecked::<MatrixProduct>,
        Fragments::Scalar => flash_key_grads_kernel::launch_unchecked::<ScalarProduct>,
    };
    // SAFETY: `Attention::new` and `backward` checked that the buffers hold the rows of all heads. The kernel reads
    // only these, as it limits the rows to those of a head, and writes only rows of keys.
    unsafe {
        launch(
            client,
            count,
            CubeDim::new_1d(plan.threads() as u32),
            argument(query),
            argument(key),
            argument(&tensors.value),
            argument(&saved.grad),
            argument(&saved.logs),
            argument(&saved.means),
            attention.bias(),
            attention.table(),
            saved.mask.iter().map(Mask::argument).collect(),
            argument(&targets[0]),
            argument(&targets[1]),
            attention.shape(),
            strides(&saved.grad),
            is_interleaved(value),
            plan,
            element(query.dtype),
        );
    }
    targets
}

fn argument(tensor: &CubeTensor) -> BufferArg {
    BufferSlice::of(tensor).buffer_arg()
}

/// Returns a cube for each tile of `rows` rows of each of the heads, in each row of the batch.
fn cubes(attention: &Attention<'_>, rows: usize, heads: usize, plan: &Plan) -> CubeCount {
    let tiles = rows.div_ceil(plan.rows());
    CubeCount::Static(tiles as u32, heads as u32, attention.batch as u32)
}
