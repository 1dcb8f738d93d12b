//! Rows of tensors, and sums of products of matrices. Nothing is lowered.

use burn::backend::TensorMetadata;
use burn::tensor::Shape;
use fsdp_kernels::{Float, Kernels};

use crate::backend::model_backend::ModelBackend;

/// Returns a tensor `[.., columns]` as the matrix of its rows.
pub(super) fn rows<B: ModelBackend>(tensor: Float<B>) -> Float<B> {
    let shape = tensor.shape();
    let columns = shape[shape.num_dims() - 1];
    let rows = shape.num_elements() / columns;
    B::float_reshape(tensor, Shape::from([rows, columns]))
}

/// Returns a matrix of rows in the shape `shape`, but for the last dimension.
pub(super) fn in_shape<B: ModelBackend>(matrix: Float<B>, mut shape: Shape) -> Float<B> {
    let last = shape.num_dims() - 1;
    shape[last] = matrix.shape()[1];
    B::float_reshape(matrix, shape)
}

/// Returns `target + a · b`.
pub(super) fn add_product<B: ModelBackend>(target: Float<B>, [a, b]: [Float<B>; 2]) -> Float<B> {
    let output = (target.shape(), target.dtype());
    let mut sums = B::defer(vec![target, a, b], vec![output], |buffers| {
        let [target, a, b] = <[_; 3]>::try_from(buffers).expect("three matrices");
        vec![B::Raw::add_product(target, [a, b])]
    });
    sums.pop().expect("`defer` returns one tensor for each output")
}

/// Returns a sum plus products of matrices, or the sum of the products. There is a product.
pub(super) fn sum_of_products<B: ModelBackend>(
    sum: Option<Float<B>>,
    factors: Vec<[Float<B>; 2]>,
) -> Float<B> {
    let sum = factors.into_iter().fold(sum, |sum, [a, b]| {
        Some(match sum {
            None => B::float_matmul(a, b),
            Some(sum) => add_product::<B>(sum, [a, b]),
        })
    });
    sum.expect("at least one product")
}
