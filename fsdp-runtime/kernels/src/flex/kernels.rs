//! Implementation of [`Kernels`] for Flex.

use std::borrow::Cow;
use std::ops::Range;

use burn::backend::flex::{FlexDevice, FlexTensor};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};
use burn_std::Scalar;
use rayon::prelude::*;

use super::float::{KernelFloat, contiguous, slice, with_float_type};
use super::loops::{convert, convert_over, divide};
use super::new_tensor::{TASK, Uninit, new_tensor};
use super::product::Threads;
use super::rank_mean::rank_mean;
use super::{
    attention, cross_entropy, decode, dropout, gelu, linear, normalization, product,
    random_rounding, rotary, softmax, sums, swiglu, table,
};
use crate::StorageType;
use crate::attention::{AttentionRule, AttentionTensors, composed};
use crate::batched_steps::StepBatch;
use crate::codes;
use crate::contract::{self, AdamTensors, Kernels, RankMean, Sums, dropout_kernels, takes};
use crate::cross_entropy::{self as chunks, LossResults, LossRule, LossTensors};
use crate::linear::LinearActivation;
use crate::mask::{MaskPart, MaskSource};
use crate::norm::Norm;
use crate::normalization::{
    NormalizationGrads, NormalizationRule, NormalizationTensors, Normalized,
};
use crate::random_rounding::RandomRounding;
use crate::rotary::{RotaryRule, RotaryTensors};
use crate::update_rules::{self, AdamStep, SgdStep};

/// Returns the tensor if it is contiguous and no other tensor shares its memory, else a copy.
fn exclusive(tensor: FlexTensor) -> FlexTensor {
    let tensor = contiguous(tensor);
    if tensor.is_unique() {
        return tensor;
    }
    with_float_type!(tensor.dtype(), |E| {
        let elements = slice::<E>(&tensor);
        new_tensor(tensor.shape(), |at, copy: &mut Uninit<E>| {
            convert(&elements[at..][..copy.len()], copy)
        })
    })
}

/// Returns the elements of a tensor that [`exclusive`] returned.
fn slice_mut<E: KernelFloat>(tensor: &mut FlexTensor) -> &mut [E] {
    let (start, end) = tensor.layout().contiguous_offsets().expect("a contiguous tensor");
    &mut tensor.storage_mut::<E>()[start..end]
}

/// Copies elements `range` of a contiguous tensor: divided in f32 by `divisor` if there is one,
/// then rounded to `dtype`.
fn converted(
    source: &FlexTensor,
    range: Range<usize>,
    shape: Shape,
    dtype: DType,
    divisor: Option<f32>,
) -> FlexTensor {
    with_float_type!(source.dtype(), |I| with_float_type!(dtype, |O| {
        let source = &slice::<I>(source)[range];
        new_tensor(shape, |at, target: &mut Uninit<O>| {
            let source = &source[at..][..target.len()];
            match divisor {
                None => convert(source, target),
                Some(divisor) => divide(source, target, divisor),
            }
        })
    }))
}

/// Copy of part of a tensor into a buffer, as one task of the thread pool.
pub(super) struct CopyTask<'a, O> {
    source: &'a FlexTensor,
    /// Index of the first element to copy.
    from: usize,
    /// Destination, whose length is the number of elements to copy.
    target: &'a mut [O],
}

/// Returns tasks that copy all elements of a contiguous tensor to `target`, rounded to its type.
pub(super) fn copy_tasks<'a, O>(
    source: &'a FlexTensor,
    target: &'a mut [O],
) -> impl Iterator<Item = CopyTask<'a, O>> {
    let tasks = target.chunks_mut(TASK).enumerate();
    tasks.map(move |(task, target)| CopyTask { source, from: task * TASK, target })
}

impl<O: KernelFloat> CopyTask<'_, O> {
    /// Runs all tasks, on all threads of the current rayon pool.
    pub(super) fn run_all(tasks: Vec<Self>) {
        tasks.into_par_iter().with_min_len(8).for_each(Self::run);
    }

    fn run(self) {
        with_float_type!(self.source.dtype(), |I| {
            let source = &slice::<I>(self.source)[self.from..][..self.target.len()];
            convert_over(source, self.target);
        });
    }
}

impl Kernels for Flex {
    fn zeros(_: &FlexDevice, shape: Shape) -> FlexTensor {
        let zeros = vec![0f32; shape.num_elements()];
        FlexTensor::from_data(TensorData::new(zeros, shape))
    }

    fn pack(parts: Vec<(FlexTensor, usize)>, buffer: FlexTensor) -> FlexTensor {
        let mut buffer = exclusive(buffer);
        let parts = parts.into_iter().map(|(tensor, at)| (contiguous(tensor), at));
        let mut parts: Vec<_> = parts.collect();
        parts.sort_by_key(|(_, at)| *at);
        with_float_type!(buffer.dtype(), |O| {
            // Splits the buffer from its start. `rest` is what follows element `rest_start`.
            let (mut rest, mut rest_start) = (slice_mut::<O>(&mut buffer), 0);
            let mut copies = Vec::with_capacity(parts.len());
            for (source, at) in &parts {
                let from_part = std::mem::take(&mut rest).split_at_mut(at - rest_start).1;
                let (part, after) = from_part.split_at_mut(source.shape().num_elements());
                rest_start = at + part.len();
                rest = after;
                copies.extend(copy_tasks(source, part));
            }
            CopyTask::run_all(copies);
        });
        buffer
    }

    fn unpack(
        buffer: FlexTensor,
        parts: Vec<(usize, Shape)>,
        dtype: DType,
        divisor: Option<f32>,
    ) -> Vec<FlexTensor> {
        let buffer = contiguous(buffer);
        let part = |(at, shape): (usize, Shape)| {
            converted(&buffer, at..at + shape.num_elements(), shape, dtype, divisor)
        };
        parts.into_par_iter().with_min_len(8).map(part).collect()
    }

    fn cast(tensor: FlexTensor, dtype: DType, divisor: Option<f32>) -> FlexTensor {
        let tensor = contiguous(tensor);
        let shape = tensor.shape();
        converted(&tensor, 0..shape.num_elements(), shape, dtype, divisor)
    }

    fn decode(codes: FlexTensor, storage: StorageType, shape: Shape, dtype: DType) -> FlexTensor {
        with_float_type!(dtype, |E| decode::new::<E>(&codes, storage, shape))
    }

    fn encode_int8(tensor: FlexTensor, range: Range<usize>, block: usize) -> FlexTensor {
        let tensor = contiguous(tensor);
        let len = range.len();
        let elements = match tensor.dtype() {
            DType::F32 => Cow::Borrowed(&slice::<f32>(&tensor)[range]),
            dtype => {
                let bytes = with_float_type!(dtype, |E| {
                    bytemuck::cast_slice::<E, u8>(&slice::<E>(&tensor)[range])
                });
                Cow::Owned(codes::widened_elements(bytes, dtype).expect("a float dtype"))
            }
        };
        let words = codes::encode(&elements, &(0..len), StorageType::Int8 { block });
        let shape = Shape::from([words.len()]);
        FlexTensor::from_data(codes::words_data(words, shape))
    }

    fn rank_means(means: Vec<RankMean<FlexTensor>>) -> Vec<FlexTensor> {
        means.into_iter().map(rank_mean).collect()
    }

    fn sums(parts: &[(FlexTensor, Range<usize>)], norm: Norm) -> Vec<Sums> {
        let sums = |(tensor, range): &(FlexTensor, Range<usize>)| {
            let tensor = contiguous(tensor.clone());
            with_float_type!(tensor.dtype(), |E| {
                sums::sums(&slice::<E>(&tensor)[range.clone()], norm)
            })
        };
        parts.iter().map(sums).collect()
    }

    fn unscale(tensors: Vec<FlexTensor>, factor: f32, norm: Norm) -> (Vec<FlexTensor>, Vec<Sums>) {
        let unscale = |tensor: FlexTensor| {
            let mut tensor = exclusive(tensor);
            let sums = with_float_type!(tensor.dtype(), |E| {
                sums::unscale(slice_mut::<E>(&mut tensor), factor, norm)
            });
            (tensor, sums)
        };
        tensors.into_iter().map(unscale).unzip()
    }

    fn dropout(tensor: FlexTensor, source: &MaskSource) -> FlexTensor {
        let tensor = contiguous(tensor);
        with_float_type!(tensor.dtype(), |E| {
            let elements = slice::<E>(&tensor);
            new_tensor(tensor.shape(), |at, dropped| {
                dropout::dropout(&elements[at..][..dropped.len()], dropped, source, at)
            })
        })
    }

    fn dropout_part(tensor: FlexTensor, source: &MaskSource, part: &MaskPart) -> FlexTensor {
        let mut tensor = exclusive(tensor);
        with_float_type!(tensor.dtype(), |E| {
            dropout::drop_part(slice_mut::<E>(&mut tensor), source, part);
        });
        tensor
    }

    fn round_at_random(tensor: FlexTensor, rounding: &RandomRounding) -> FlexTensor {
        let tensor = contiguous(tensor);
        let elements = slice::<f32>(&tensor);
        new_tensor(tensor.shape(), |at, rounded| {
            random_rounding::round(&elements[at..][..rounded.len()], rounded, rounding, at)
        })
    }

    fn gelu(tensor: FlexTensor) -> FlexTensor {
        gelu::forward(&tensor)
    }

    fn gelu_backward(tensor: FlexTensor, grad: FlexTensor) -> FlexTensor {
        gelu::backward(&tensor, &grad)
    }

    fn biased(
        product: FlexTensor,
        bias: Option<FlexTensor>,
        activation: LinearActivation,
    ) -> FlexTensor {
        let bias = bias.map(contiguous);
        with_float_type!(product.dtype(), |E| match (activation, &bias) {
            (LinearActivation::Identity, None) => product,
            (LinearActivation::Identity, Some(bias)) => {
                let mut product = exclusive(product);
                linear::add_bias(slice_mut::<E>(&mut product), slice(bias));
                product
            }
            _ => linear::forward::<E>(&contiguous(product), bias.as_ref(), activation),
        })
    }

    fn biased_backward(
        product: FlexTensor,
        bias: Option<FlexTensor>,
        grad: FlexTensor,
        activation: LinearActivation,
    ) -> FlexTensor {
        let (product, bias, grad) = (contiguous(product), bias.map(contiguous), contiguous(grad));
        with_float_type!(grad.dtype(), |E| {
            linear::backward::<E>(&product, bias.as_ref(), &grad, activation)
        })
    }

    fn column_sums(matrix: FlexTensor) -> FlexTensor {
        let matrix = contiguous(matrix);
        with_float_type!(matrix.dtype(), |E| linear::column_sums::<E>(&matrix))
    }

    fn product(factors: [FlexTensor; 2], dtype: DType) -> FlexTensor {
        let [a, b] = &factors;
        let are_matrices = a.shape().num_dims() == 2;
        if are_matrices && [a.dtype(), b.dtype(), dtype].into_iter().all(takes) {
            return product::product([a, b], dtype);
        }
        contract::product::<Self>(factors, dtype)
    }

    fn has_product(_: &FlexDevice) -> bool {
        true
    }

    fn add_product(target: FlexTensor, [a, b]: [FlexTensor; 2]) -> FlexTensor {
        if [target.dtype(), a.dtype(), b.dtype()] != [DType::F32; 3] {
            let product = Self::product([a, b], target.dtype());
            return Self::float_add(target, product);
        }
        let mut target = exclusive(target);
        let columns = target.shape()[1];
        let elements = (slice_mut(&mut target), columns);
        product::multiply(Threads::Pool, elements, true, 1.0, [&a, &b].map(product::matrix));
        target
    }

    fn table_gradient(grad: FlexTensor, ids: FlexTensor, shape: Shape) -> FlexTensor {
        let [grad, ids] = [grad, ids].map(contiguous);
        with_float_type!(grad.dtype(), |E| table::gradient(slice::<E>(&grad), slice(&ids), shape))
    }

    fn swiglu(gate: FlexTensor, up: FlexTensor) -> FlexTensor {
        swiglu::forward(&gate, &up)
    }

    fn swiglu_backward(gate: FlexTensor, up: FlexTensor, grad: FlexTensor) -> [FlexTensor; 2] {
        swiglu::backward(&gate, &up, &grad)
    }

    fn normalize(
        tensors: NormalizationTensors<FlexTensor>,
        rule: &NormalizationRule,
    ) -> Normalized<FlexTensor> {
        normalization::forward(&tensors, rule)
    }

    fn normalize_backward(
        tensors: NormalizationGrads<FlexTensor>,
        rule: &NormalizationRule,
    ) -> Vec<FlexTensor> {
        normalization::backward(&tensors, rule)
    }

    fn rotate(tensors: RotaryTensors<FlexTensor>, rule: &RotaryRule) -> FlexTensor {
        rotary::rotate(&tensors, rule)
    }

    fn softmax(tensor: FlexTensor) -> FlexTensor {
        softmax::forward(&tensor)
    }

    fn softmax_backward(result: FlexTensor, grad: FlexTensor) -> FlexTensor {
        softmax::backward(&result, &grad)
    }

    fn tiled_attention(
        tensors: &AttentionTensors<FlexTensor>,
        rule: &AttentionRule,
    ) -> [FlexTensor; 2] {
        match tensors.query.dtype() {
            dtype if takes(dtype) => {
                with_float_type!(dtype, |E| attention::forward::<E>(tensors, rule))
            }
            _ => composed::forward::<Self>(tensors, rule, dropout_kernels()),
        }
    }

    fn tiled_attention_backward(
        tensors: &AttentionTensors<FlexTensor>,
        results: &[FlexTensor; 2],
        grad: &FlexTensor,
        rule: &AttentionRule,
    ) -> [FlexTensor; 3] {
        match grad.dtype() {
            dtype if takes(dtype) => with_float_type!(dtype, |E| {
                attention::backward::<E>(tensors, results, grad, rule)
            }),
            _ => composed::backward::<Self>(tensors, results, grad, rule, dropout_kernels()),
        }
    }

    fn linear_cross_entropy(
        tensors: &LossTensors<FlexTensor>,
        rule: &LossRule,
    ) -> LossResults<FlexTensor> {
        match tensors.hidden.dtype() {
            DType::F32 => cross_entropy::forward(tensors, rule),
            _ => chunks::forward::<Self>(tensors, rule),
        }
    }

    /// Returns the tensor itself if the factor is 1.
    fn scale(tensor: FlexTensor, factor: FlexTensor, dtype: DType) -> FlexTensor {
        let number = factor.into_data().iter::<f64>().next().expect("one factor");
        let product = if number == 1.0 {
            tensor
        } else {
            Self::float_mul_scalar(tensor, Scalar::from(number))
        };
        Self::float_cast(product, dtype.into())
    }

    fn adam(
        step: &AdamStep,
        grad: FlexTensor,
        tensors: AdamTensors<FlexTensor>,
        _: Option<&StepBatch>,
    ) -> AdamTensors<FlexTensor> {
        let grad = contiguous(grad);
        let mut tensors = tensors.map(exclusive);
        update_rules::adam(
            step,
            slice_mut(&mut tensors.param),
            slice(&grad),
            slice_mut(&mut tensors.moment_1),
            slice_mut(&mut tensors.moment_2),
            tensors.max.as_mut().map(slice_mut),
        );
        tensors
    }

    fn sgd(
        step: &SgdStep,
        grad: FlexTensor,
        param: FlexTensor,
        velocity: Option<FlexTensor>,
        _: Option<&StepBatch>,
    ) -> (FlexTensor, Option<FlexTensor>) {
        let grad = contiguous(grad);
        let (mut param, mut velocity) = (exclusive(param), velocity.map(exclusive));
        update_rules::sgd(
            step,
            slice_mut(&mut param),
            slice(&grad),
            velocity.as_mut().map(slice_mut),
        );
        (param, velocity)
    }
}
