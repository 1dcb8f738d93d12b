//! Implementation of [`Kernels`] for CubeCL devices.

use std::ops::Range;

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

use super::attention::RowKernels;
use super::copy::exclusive;
use super::optim::CubeSteps;
use super::tensors::contiguous;
use super::{
    copy, cross_entropy, decode, dropout, encode, flash, gelu, linear, mean, normalization, optim,
    product, random_rounding, rotary, softmax, sums, swiglu, table,
};
use crate::StorageType;
use crate::accesses;
use crate::attention::{self, AttentionRule, AttentionTensors, composed};
use crate::batched_steps::StepBatch;
use crate::contract::{self, AdamTensors, Kernels, RankMean, Sums, dropout_kernels, takes};
use crate::cross_entropy::{LossResults, LossRule, LossTensors};
use crate::linear::LinearActivation;
use crate::mask::{MaskPart, MaskSource};
use crate::norm::Norm;
use crate::normalization::{
    NormalizationGrads, NormalizationRule, NormalizationTensors, Normalized,
};
use crate::random_rounding::RandomRounding;
use crate::rotary::{RotaryRule, RotaryTensors};
use crate::update_rules::{AdamStep, SgdStep};

impl Kernels for CubeBackend {
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
        accesses::read([&tensor]);
        let cast = copy::cast(tensor, dtype, divisor);
        accesses::written([&cast.handle]);
        cast
    }

    fn cast_all(tensors: Vec<CubeTensor>, dtype: DType) -> Vec<CubeTensor> {
        accesses::read(&tensors);
        let casts = copy::cast_all(tensors, dtype);
        accesses::written(casts.iter().map(|cast| &cast.handle));
        casts
    }

    fn decode(codes: CubeTensor, storage: StorageType, shape: Shape, dtype: DType) -> CubeTensor {
        accesses::read([&codes]);
        let elements = decode::decode(codes, storage, shape, dtype);
        accesses::written([&elements.handle]);
        elements
    }

    fn encode_int8(tensor: CubeTensor, range: Range<usize>, block: usize) -> CubeTensor {
        accesses::read([&tensor]);
        let codes = encode::encode_int8(tensor, range, block);
        accesses::written([&codes.handle]);
        codes
    }

    fn rank_means(means: Vec<RankMean<CubeTensor>>) -> Vec<CubeTensor> {
        accesses::read(means.iter().flat_map(|mean| &mean.parts).map(|(part, _)| part));
        let means = mean::means(means);
        accesses::written(means.iter().map(|mean| &mean.handle));
        means
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

    fn dropout_part(tensor: CubeTensor, source: &MaskSource, part: &MaskPart) -> CubeTensor {
        dropout::dropout_part(tensor, source, part)
    }

    fn round_at_random(tensor: CubeTensor, rounding: &RandomRounding) -> CubeTensor {
        accesses::read([&tensor]);
        let rounded = random_rounding::round(tensor, rounding);
        accesses::written([&rounded.handle]);
        rounded
    }

    fn gelu(tensor: CubeTensor) -> CubeTensor {
        gelu::forward(tensor)
    }

    fn gelu_backward(tensor: CubeTensor, grad: CubeTensor) -> CubeTensor {
        gelu::backward(tensor, grad)
    }

    fn biased(
        product: CubeTensor,
        bias: Option<CubeTensor>,
        activation: LinearActivation,
    ) -> CubeTensor {
        linear::forward(product, bias, activation)
    }

    fn biased_backward(
        product: CubeTensor,
        bias: Option<CubeTensor>,
        grad: CubeTensor,
        activation: LinearActivation,
    ) -> CubeTensor {
        linear::backward(product, bias, grad, activation)
    }

    fn product(factors: [CubeTensor; 2], dtype: DType) -> CubeTensor {
        product::product(factors, dtype)
    }

    fn by_library(device: &CubeDevice) -> bool {
        product::by_library(device)
    }

    fn biased_product(
        factors: [CubeTensor; 2],
        bias: Option<CubeTensor>,
        activation: LinearActivation,
    ) -> (CubeTensor, Option<CubeTensor>) {
        product::biased_product(factors, bias, activation)
    }

    fn affine_gradients(input: CubeTensor, grad: CubeTensor, dtype: DType) -> [CubeTensor; 2] {
        product::affine_gradients(&input, &grad, dtype)
            .unwrap_or_else(|| contract::affine_gradients::<Self>(input, grad, dtype))
    }

    fn add_product(target: CubeTensor, factors: [CubeTensor; 2]) -> CubeTensor {
        product::add_product(target, factors)
    }

    fn table_gradient(grad: CubeTensor, ids: CubeTensor, shape: Shape) -> CubeTensor {
        accesses::read([&grad, &ids]);
        let gradient = table::gradient(grad, ids, shape);
        accesses::written([&gradient.handle]);
        gradient
    }

    fn swiglu(gate: CubeTensor, up: CubeTensor) -> CubeTensor {
        swiglu::forward(gate, up)
    }

    fn swiglu_backward(gate: CubeTensor, up: CubeTensor, grad: CubeTensor) -> [CubeTensor; 2] {
        swiglu::backward(gate, up, grad)
    }

    fn normalize(
        tensors: NormalizationTensors<CubeTensor>,
        rule: &NormalizationRule,
    ) -> Normalized<CubeTensor> {
        normalization::forward(tensors, rule)
    }

    fn normalize_backward(
        tensors: NormalizationGrads<CubeTensor>,
        rule: &NormalizationRule,
    ) -> Vec<CubeTensor> {
        normalization::backward(tensors, rule)
    }

    fn rotate(tensors: RotaryTensors<CubeTensor>, rule: &RotaryRule) -> CubeTensor {
        rotary::rotate(tensors, rule)
    }

    fn softmax(tensor: CubeTensor) -> CubeTensor {
        softmax::forward(tensor)
    }

    fn softmax_backward(result: CubeTensor, grad: CubeTensor) -> CubeTensor {
        softmax::backward(result, grad)
    }

    fn tiled_attention(
        tensors: &AttentionTensors<CubeTensor>,
        rule: &AttentionRule,
    ) -> [CubeTensor; 2] {
        if let Some(results) = flash::forward(tensors, rule) {
            return results;
        }
        match takes(tensors.query.dtype) {
            true => attention::forward(tensors, rule, &RowKernels),
            false => composed::forward::<Self>(tensors, rule, dropout_kernels()),
        }
    }

    fn tiled_attention_backward(
        tensors: &AttentionTensors<CubeTensor>,
        results: &[CubeTensor; 2],
        grad: &CubeTensor,
        rule: &AttentionRule,
    ) -> [CubeTensor; 3] {
        if let Some(grads) = flash::backward(tensors, results, grad, rule) {
            return grads;
        }
        match takes(tensors.query.dtype) {
            true => attention::backward(tensors, results, grad, rule, &RowKernels),
            false => composed::backward::<Self>(tensors, results, grad, rule, dropout_kernels()),
        }
    }

    fn linear_cross_entropy(
        tensors: &LossTensors<CubeTensor>,
        rule: &LossRule,
    ) -> LossResults<CubeTensor> {
        match takes(tensors.hidden.dtype) {
            true => cross_entropy::forward(tensors, rule),
            false => crate::cross_entropy::forward::<Self>(tensors, rule),
        }
    }

    fn adam(
        step: &AdamStep,
        grad: CubeTensor,
        tensors: AdamTensors<CubeTensor>,
        batch: Option<&StepBatch>,
    ) -> AdamTensors<CubeTensor> {
        let tensors = tensors.map(exclusive);
        accesses::read([&grad]);
        accesses::written([&tensors.param.handle]);
        let deferred = batch.map(StepBatch::steps::<CubeSteps>);
        optim::adam(step, contiguous(grad), &tensors, deferred.as_deref());
        tensors
    }

    fn sgd(
        step: &SgdStep,
        grad: CubeTensor,
        param: CubeTensor,
        velocity: Option<CubeTensor>,
        batch: Option<&StepBatch>,
    ) -> (CubeTensor, Option<CubeTensor>) {
        let (param, velocity) = (exclusive(param), velocity.map(exclusive));
        accesses::read([&grad]);
        accesses::written([&param.handle]);
        let deferred = batch.map(StepBatch::steps::<CubeSteps>);
        optim::sgd(step, &param, contiguous(grad), velocity.as_ref(), deferred.as_deref());
        (param, velocity)
    }
}
