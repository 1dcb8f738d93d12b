//! The kernels' twins on Flex: vectorised loops over blocks that stay in the cache, on all threads
//! of the current rayon pool.

mod dropout;
pub(crate) mod made;
pub(crate) mod number;
mod sums;

use std::ops::Range;

use burn::backend::flex::{FlexDevice, FlexTensor};
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};
use rayon::prelude::*;

use self::made::{TASK, made};
use self::number::{Number, Room, convert, convert_over, divide, with_number};
use super::{AdamTensors, Kernels, MaskSource, Sums};
use crate::backend::Norm;
use crate::backend::kernels::{AdamStep, SgdStep, update_rules};

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
        let elements = slice::<E>(&tensor);
        made(tensor.shape(), |at, copy: &mut Room<E>| convert(&elements[at..][..copy.len()], copy))
    })
}

/// The elements of a tensor that [`exclusive`] has made.
fn slice_mut<E: Number>(tensor: &mut FlexTensor) -> &mut [E] {
    let (start, end) = tensor.layout().contiguous_offsets().expect("a contiguous tensor");
    &mut tensor.storage_mut::<E>()[start..end]
}

/// The range of a tensor's elements in memory of their own.
fn converted(
    source: &FlexTensor,
    range: Range<usize>,
    shape: Shape,
    dtype: DType,
    divisor: Option<f32>,
) -> FlexTensor {
    with_number!(source.dtype(), |I| with_number!(dtype, |O| {
        let source = &slice::<I>(source)[range];
        made(shape, |at, target: &mut Room<O>| {
            let source = &source[at..][..target.len()];
            match divisor {
                None => convert(source, target),
                Some(divisor) => divide(source, target, divisor),
            }
        })
    }))
}

/// Elements of a tensor, from one of them on, and the place that they go to.
struct Copy<'a, O> {
    source: &'a FlexTensor,
    from: usize,
    target: &'a mut [O],
}

impl<O: Number> Copy<'_, O> {
    fn run(self) {
        with_number!(self.source.dtype(), |I| {
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
        with_number!(buffer.dtype(), |O| {
            let (mut rest, mut begin) = (slice_mut::<O>(&mut buffer), 0);
            let mut copies = Vec::with_capacity(parts.len());
            for (source, at) in &parts {
                let after = std::mem::take(&mut rest).split_at_mut(at - begin).1;
                let (place, after) = after.split_at_mut(source.shape().num_elements());
                begin = at + place.len();
                rest = after;
                for (task, target) in place.chunks_mut(TASK).enumerate() {
                    copies.push(Copy { source, from: task * TASK, target });
                }
            }
            copies.into_par_iter().with_min_len(8).for_each(Copy::run);
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

    fn rank_mean(
        parts: &[FlexTensor],
        range: Range<usize>,
        divisor: usize,
        shape: Shape,
    ) -> FlexTensor {
        let parts: Vec<_> = parts.iter().cloned().map(contiguous).collect();
        with_number!(parts[0].dtype(), |I| {
            let parts: Vec<&[I]> =
                parts.iter().map(|part| &slice::<I>(part)[range.clone()]).collect();
            made(shape, |at, sums| {
                let range = at..at + sums.len();
                let parts: Vec<&[I]> = parts.iter().map(|part| &part[range.clone()]).collect();
                number::mean(&parts, sums, divisor as f32)
            })
        })
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

    fn dropout(tensor: FlexTensor, source: &MaskSource) -> FlexTensor {
        let tensor = contiguous(tensor);
        with_number!(tensor.dtype(), |E| {
            let elements = slice::<E>(&tensor);
            made(tensor.shape(), |at, dropped| {
                dropout::dropout(&elements[at..][..dropped.len()], dropped, source, at)
            })
        })
    }

    fn adam(
        step: &AdamStep,
        grad: FlexTensor,
        tensors: AdamTensors<FlexTensor>,
        _: bool,
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
        _: bool,
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
