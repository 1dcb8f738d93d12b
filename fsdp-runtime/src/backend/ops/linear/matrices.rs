//! Rows of tensors, and sums of products of matrices. Nothing is lowered.

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use fsdp_kernels::{Float, Kernels};

use crate::backend::model_backend::{ModelBackend, Raw};
use crate::backend::ops::dropout::drop_elements;
use crate::module::Mask;

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

/// Returns the product of two matrices in `dtype`, each transposed first if its flag says so.
pub(super) fn product<B: ModelBackend>(
    [a, b]: [Float<B>; 2],
    transposed: [bool; 2],
    dtype: DType,
) -> Float<B> {
    let size = |matrix: &Float<B>, transposed: bool, at: usize| {
        matrix.shape()[if transposed { 1 - at } else { at }]
    };
    if a.dtype() == dtype && !Raw::<B>::has_product(&a.device()) {
        let [a, b] = [(a, transposed[0]), (b, transposed[1])]
            .map(|(matrix, is)| if is { B::float_transpose(matrix) } else { matrix });
        return B::float_matmul(a, b);
    }
    let shape = Shape::from([size(&a, transposed[0], 0), size(&b, transposed[1], 1)]);
    let mut outputs = B::defer(vec![a, b], vec![(shape, dtype)], move |buffers| {
        let factors = <[_; 2]>::try_from(buffers).expect("two matrices");
        let mut is = transposed.into_iter();
        let factors = factors.map(|matrix| match is.next() {
            Some(true) => Raw::<B>::float_transpose(matrix),
            _ => matrix,
        });
        vec![Raw::<B>::product(factors, dtype)]
    });
    outputs.pop().expect("`defer` returns one tensor for each output")
}

/// Returns a matrix with a mask applied, if there is one.
pub(super) fn masked<B: ModelBackend>(matrix: Float<B>, mask: Option<Mask>) -> Float<B> {
    match mask {
        Some(mask) => drop_elements::<B>(matrix, &mask),
        None => matrix,
    }
}

/// Factors of a product, whether the second is transposed first, and the mask of the product.
pub(super) struct Factors<B: ModelBackend> {
    pub(super) matrices: [Float<B>; 2],
    pub(super) transposed: bool,
    pub(super) mask: Option<Mask>,
}

impl<B: ModelBackend> Factors<B> {
    /// Returns the product.
    fn product(self) -> Float<B> {
        let dtype = self.matrices[0].dtype();
        masked::<B>(product::<B>(self.matrices, [false, self.transposed], dtype), self.mask)
    }
}

/// Returns `target + a · b`.
pub(super) fn add_product<B: ModelBackend>(target: Float<B>, factors: Factors<B>) -> Float<B> {
    if factors.mask.is_some() {
        return B::float_add(target, factors.product());
    }
    let output = (target.shape(), target.dtype());
    let Factors { matrices: [a, b], transposed, .. } = factors;
    let mut sums = B::defer(vec![target, a, b], vec![output], move |buffers| {
        let [target, a, b] = <[_; 3]>::try_from(buffers).expect("three matrices");
        let b = if transposed { Raw::<B>::float_transpose(b) } else { b };
        vec![Raw::<B>::add_product(target, [a, b])]
    });
    sums.pop().expect("`defer` returns one tensor for each output")
}

/// Returns a sum plus products of matrices, or the sum of the products. There is a product.
pub(super) fn sum_of_products<B: ModelBackend>(
    sum: Option<Float<B>>,
    factors: Vec<Factors<B>>,
) -> Float<B> {
    let sum = factors.into_iter().fold(sum, |sum, factors| {
        Some(match sum {
            None => factors.product(),
            Some(sum) => add_product::<B>(sum, factors),
        })
    });
    sum.expect("at least one product")
}
