//! The kernels' twins on Flex: vectorised loops over blocks that stay in the cache, on all threads
//! of the current rayon pool.

mod number;
mod sums;

use std::ops::Range;

use burn::backend::flex::{FlexDevice, FlexTensor};
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};
use rayon::prelude::*;

use self::number::{BLOCK, Number, TASK, with_number};
use super::{AdamTensors, Kernels, MaskSource, Sums};
use crate::norm::Norm;
use crate::optim::{AdamStep, SgdStep, kernel};

/// The elements of a contiguous tensor.
fn slice<E: Number>(tensor: &FlexTensor) -> &[E] {
    tensor.as_slice().expect("a contiguous tensor of this dtype")
}

/// The tensor with its elements side by side.
fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// The tensor itself where its elements lie side by side and nothing shares them, else a copy.
fn exclusive(tensor: FlexTensor) -> FlexTensor {
    let tensor = contiguous(tensor);
    if tensor.is_unique() {
        return tensor;
    }
    with_number!(tensor.dtype(), |E| {
        FlexTensor::from_data(TensorData::new(slice::<E>(&tensor).to_vec(), tensor.shape()))
    })
}

/// The elements of a tensor that [`exclusive`] has made.
fn slice_mut<E: Number>(tensor: &mut FlexTensor) -> &mut [E] {
    let (start, end) = tensor.layout().contiguous_offsets().expect("a contiguous tensor");
    &mut tensor.storage_mut::<E>()[start..end]
}

/// Copies, dividing in f32 if asked, and rounds.
fn convert<I: Number, O: Number>(source: &[I], target: &mut [O], divisor: Option<f32>) {
    let block = |(source, target): (&[I], &mut [O])| {
        let (mut wide, mut divided) = ([0f32; BLOCK], [0f32; BLOCK]);
        let wide = I::widened(source, &mut wide);
        match divisor {
            None => O::round(wide, target),
            Some(divisor) => {
                let divided = &mut divided[..wide.len()];
                number::divide(wide, divided, divisor);
                O::round(divided, target);
            }
        }
    };
    let task = |(source, target): (&[I], &mut [O])| {
        source.chunks(BLOCK).zip(target.chunks_mut(BLOCK)).for_each(block);
    };
    source.par_chunks(TASK).zip(target.par_chunks_mut(TASK)).for_each(task);
}

fn convert_any(
    source: &FlexTensor,
    range: Range<usize>,
    target: &mut FlexTensor,
    at: usize,
    divisor: Option<f32>,
) {
    let len = range.len();
    with_number!(source.dtype(), |I| with_number!(target.dtype(), |O| {
        convert(&slice::<I>(source)[range], &mut slice_mut::<O>(target)[at..at + len], divisor);
    }));
}

impl Kernels for Flex {
    fn zeros(_: &FlexDevice, shape: Shape) -> FlexTensor {
        let zeros = vec![0f32; shape.num_elements()];
        FlexTensor::from_data(TensorData::new(zeros, shape))
    }

    fn pack(parts: Vec<(FlexTensor, usize)>, buffer: FlexTensor) -> FlexTensor {
        let mut buffer = exclusive(buffer);
        for (tensor, at) in parts {
            let tensor = contiguous(tensor);
            let numel = tensor.shape().num_elements();
            convert_any(&tensor, 0..numel, &mut buffer, at, None);
        }
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
            let range = at..at + shape.num_elements();
            let mut target = FlexTensor::empty(shape, dtype);
            convert_any(&buffer, range, &mut target, 0, divisor);
            target
        };
        parts.into_iter().map(part).collect()
    }

    fn cast(tensor: FlexTensor, dtype: DType, divisor: Option<f32>) -> FlexTensor {
        let tensor = contiguous(tensor);
        let mut target = FlexTensor::empty(tensor.shape(), dtype);
        with_number!(tensor.dtype(), |I| with_number!(dtype, |O| {
            convert(slice::<I>(&tensor), slice_mut::<O>(&mut target), divisor);
        }));
        target
    }

    fn rank_mean(
        parts: &[FlexTensor],
        range: Range<usize>,
        divisor: usize,
        shape: Shape,
    ) -> FlexTensor {
        let parts: Vec<_> = parts.iter().cloned().map(contiguous).collect();
        let mut target = FlexTensor::empty(shape, DType::F32);
        with_number!(parts[0].dtype(), |I| {
            let parts: Vec<&[I]> =
                parts.iter().map(|part| &slice::<I>(part)[range.clone()]).collect();
            let block = |(index, sum): (usize, &mut [f32])| {
                let mut wide = [0f32; BLOCK];
                let at = index * BLOCK..index * BLOCK + sum.len();
                sum.copy_from_slice(I::widened(&parts[0][at.clone()], &mut wide));
                for part in &parts[1..] {
                    number::add(sum, I::widened(&part[at.clone()], &mut wide));
                }
                if divisor > 1 {
                    number::divide_by(sum, divisor as f32);
                }
            };
            let sums = slice_mut::<f32>(&mut target);
            sums.par_chunks_mut(BLOCK).enumerate().with_min_len(TASK / BLOCK).for_each(block);
        });
        target
    }

    fn sums(parts: &[(FlexTensor, Range<usize>)], norm: Norm) -> Vec<Sums> {
        let sums = |(tensor, range): &(FlexTensor, Range<usize>)| {
            let tensor = contiguous(tensor.clone());
            with_number!(tensor.dtype(), |E| sums::sums(&slice::<E>(&tensor)[range.clone()], norm))
        };
        parts.iter().map(sums).collect()
    }

    fn unscale(tensors: Vec<FlexTensor>, factor: f32, norm: Norm) -> (Vec<FlexTensor>, Vec<Sums>) {
        let unscale = |tensor: FlexTensor| {
            let mut tensor = exclusive(tensor);
            let sums = with_number!(tensor.dtype(), |E| {
                sums::unscale(slice_mut::<E>(&mut tensor), factor, norm)
            });
            (tensor, sums)
        };
        tensors.into_iter().map(unscale).unzip()
    }

    fn mask(_: &FlexDevice, source: &MaskSource, shape: Shape, dtype: DType) -> FlexTensor {
        let mask = crate::nn::dropout::mask(source, shape.num_elements());
        let mask = FlexTensor::from_data(TensorData::new(mask, shape));
        if dtype == DType::F32 { mask } else { Self::cast(mask, dtype, None) }
    }

    fn adam(
        step: &AdamStep,
        grad: FlexTensor,
        tensors: AdamTensors<FlexTensor>,
    ) -> AdamTensors<FlexTensor> {
        let grad = contiguous(grad);
        let mut tensors = tensors.map(exclusive);
        kernel::adam(
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
    ) -> (FlexTensor, Option<FlexTensor>) {
        let grad = contiguous(grad);
        let (mut param, mut velocity) = (exclusive(param), velocity.map(exclusive));
        kernel::sgd(step, slice_mut(&mut param), slice(&grad), velocity.as_mut().map(slice_mut));
        (param, velocity)
    }
}
