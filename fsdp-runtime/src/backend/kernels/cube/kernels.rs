//! The launchers behind the signature they share with their twins.

use std::ops::Range;

use burn::backend::Cube;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;

use super::{contiguous, copy, dropout, exclusive, mean, optim, sums};
use crate::backend::Norm;
use crate::backend::kernels::{AdamStep, SgdStep};
use crate::backend::kernels::{AdamTensors, Kernels, MaskSource, Sums};

impl Kernels for Cube {
    fn pack(parts: Vec<(CubeTensor, usize)>, buffer: CubeTensor) -> CubeTensor {
        copy::pack(parts, buffer)
    }

    fn unpack(
        buffer: CubeTensor,
        parts: Vec<(usize, Shape)>,
        dtype: DType,
        divisor: Option<f32>,
    ) -> Vec<CubeTensor> {
        copy::unpack(buffer, parts, dtype, divisor)
    }

    fn cast(tensor: CubeTensor, dtype: DType, divisor: Option<f32>) -> CubeTensor {
        copy::cast(tensor, dtype, divisor)
    }

    fn rank_mean(
        parts: &[CubeTensor],
        range: Range<usize>,
        divisor: usize,
        shape: Shape,
    ) -> CubeTensor {
        mean::mean(parts, range, divisor, shape)
    }

    fn sums(parts: &[(CubeTensor, Range<usize>)], norm: Norm) -> Vec<Sums> {
        sums::sums(parts, norm)
    }

    fn unscale(tensors: Vec<CubeTensor>, factor: f32, norm: Norm) -> (Vec<CubeTensor>, Vec<Sums>) {
        sums::unscale(tensors, factor, norm)
    }

    fn dropout(tensor: CubeTensor, source: &MaskSource) -> CubeTensor {
        dropout::dropout(tensor, source)
    }

    fn adam(
        step: &AdamStep,
        grad: CubeTensor,
        tensors: AdamTensors<CubeTensor>,
        later: bool,
    ) -> AdamTensors<CubeTensor> {
        let tensors = tensors.map(exclusive);
        optim::adam(step, contiguous(grad), &tensors, later);
        tensors
    }

    fn sgd(
        step: &SgdStep,
        grad: CubeTensor,
        param: CubeTensor,
        velocity: Option<CubeTensor>,
        later: bool,
    ) -> (CubeTensor, Option<CubeTensor>) {
        let (param, velocity) = (exclusive(param), velocity.map(exclusive));
        optim::sgd(step, &param, contiguous(grad), velocity.as_ref(), later);
        (param, velocity)
    }
}
