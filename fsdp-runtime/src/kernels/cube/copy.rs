//! Copies with a cast: fragments into a send buffer, gradients into a reduce buffer, and many small
//! tensors into one buffer and out again.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Run, contiguous, element, empty, exclusive, grid, spans, widest};
use crate::kernels::SMALL;

/// Tensors that share a launch, at most.
const GROUP: usize = 16;

/// `_after` is read by nothing: it orders the launch after what last wrote it.
#[cube(launch_unchecked)]
fn copy_kernel<I: Float, O: Float, N: Size>(
    source: &[Vector<I, N>],
    target: &mut [Vector<O, N>],
    _after: &[f32],
    from: usize,
    to: usize,
    count: usize,
    divisor: f32,
    #[comptime] divide: bool,
    #[define(I, O)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < count {
        let element = source[from + ABSOLUTE_POS];
        if comptime!(divide) {
            let quotient = Vector::<f32, N>::cast_from(element) / Vector::new(divisor);
            target[to + ABSOLUTE_POS] = Vector::cast_from(quotient);
        } else {
            target[to + ABSOLUTE_POS] = Vector::cast_from(element);
        }
    }
}

/// Copies `numel` elements, divided by `divisor` in f32 if given, rounded to the target's dtype.
/// Ordered after the launch that last wrote `after`.
pub(crate) fn copy(
    client: &Client,
    source: &Run,
    target: &Run,
    numel: usize,
    divisor: Option<f32>,
    after: Option<Handle>,
) {
    let after = after.unwrap_or_else(|| source.handle.clone());
    for span in spans(client, &[source, target], numel) {
        let (count, dim) = span.grid(client);
        let (read, from) = span.argument(source);
        let (write, to) = span.argument(target);
        // SAFETY: `spans` has checked that both buffers hold the elements; the kernel touches
        // `count` vectors of each, and nothing of `after`.
        unsafe {
            copy_kernel::launch_unchecked(
                client,
                count,
                dim,
                span.width,
                read,
                write,
                BufferArg::from_raw_parts(after.clone(), 1),
                from,
                to,
                span.count,
                divisor.unwrap_or(1.0),
                divisor.is_some(),
                [element(source.dtype), element(target.dtype)],
            );
        }
    }
}

#[cube(launch_unchecked)]
fn fill_kernel<F: Float, N: Size>(
    target: &mut [Vector<F, N>],
    to: usize,
    count: usize,
    value: InputScalar,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < count {
        target[to + ABSOLUTE_POS] = Vector::new(value.get::<F>());
    }
}

/// Sets `numel` elements to `value`.
pub(crate) fn fill(client: &Client, target: &Run, numel: usize, value: f32) {
    for span in spans(client, &[target], numel) {
        let (count, dim) = span.grid(client);
        let (write, to) = span.argument(target);
        let dtype = element(target.dtype);
        // SAFETY: `spans` has checked that the buffer holds the elements, of which the kernel
        // touches `count` vectors.
        unsafe {
            fill_kernel::launch_unchecked(
                client,
                count,
                dim,
                span.width,
                write,
                to,
                span.count,
                InputScalar::new(value, dtype),
                dtype,
            );
        }
    }
}

/// Copies several tensors to their places in one buffer: one unit a vector, those of all in a row.
/// `_after` is as above.
#[cube(launch_unchecked)]
fn pack_kernel<I: Float, O: Float, N: Size>(
    sources: &Sequence<Box<[Vector<I, N>]>>,
    target: &mut [Vector<O, N>],
    _after: &[f32],
    places: &Sequence<usize>,
    counts: &Sequence<usize>,
    #[define(I, O)] _dtypes: [ElemType; 2],
) {
    let mut index = ABSOLUTE_POS;
    #[unroll]
    for part in 0..sources.len() {
        let count = counts[part];
        if index < count {
            target[places[part] + index] = Vector::cast_from(sources[part][index]);
        }
        // Below 0 it wraps, beyond every count.
        index -= count;
    }
}

/// Copies several parts of one buffer to tensors of their own, divided in f32 if asked.
#[cube(launch_unchecked)]
fn unpack_kernel<I: Float, O: Float, N: Size>(
    source: &[Vector<I, N>],
    targets: &mut Sequence<Box<[Vector<O, N>]>>,
    places: &Sequence<usize>,
    counts: &Sequence<usize>,
    divisor: f32,
    #[comptime] divide: bool,
    #[define(I, O)] _dtypes: [ElemType; 2],
) {
    let mut index = ABSOLUTE_POS;
    #[unroll]
    for part in 0..targets.len() {
        let count = counts[part];
        if index < count {
            let element = source[places[part] + index];
            if comptime!(divide) {
                let quotient = Vector::<f32, N>::cast_from(element) / Vector::new(divisor);
                targets.index_mut(part)[index] = Vector::cast_from(quotient);
            } else {
                targets.index_mut(part)[index] = Vector::cast_from(element);
            }
        }
        index -= count;
    }
}

/// A part of a buffer, and the tensor that goes there or comes from there.
struct Part {
    own: Run,
    shared: Run,
    numel: usize,
}

/// Small parts of one dtype that are cut into vectors of one width and share a launch.
struct Group {
    width: usize,
    parts: Vec<Part>,
}

impl Group {
    fn tensors<S: FromIterator<BufferArg>>(&self) -> S {
        let argument = |part: &Part| {
            // SAFETY: `groups` has checked that the tensor holds as many elements.
            unsafe { BufferArg::from_raw_parts(part.own.handle.clone(), part.numel) }
        };
        self.parts.iter().map(argument).collect()
    }

    fn places<S: FromIterator<usize>>(&self) -> S {
        self.parts.iter().map(|part| part.shared.at / self.width).collect()
    }

    fn counts<S: FromIterator<usize>>(&self) -> S {
        self.parts.iter().map(|part| part.numel / self.width).collect()
    }
}

/// The small parts in groups, and the others.
fn groups(client: &Client, parts: impl Iterator<Item = Part>) -> (Vec<Group>, Vec<Part>) {
    let (mut small, mut large) = (Vec::new(), Vec::new());
    for part in parts.filter(|part| part.numel > 0) {
        if part.numel >= SMALL {
            large.push(part);
            continue;
        }
        assert!(
            part.numel <= part.own.capacity() && part.numel <= part.shared.capacity(),
            "a part of {} elements at {} stays within its buffer",
            part.numel,
            part.shared.at
        );
        let runs = [&part.own, &part.shared];
        small.push((widest(client, &runs, &[part.numel, part.shared.at]), part));
    }
    // Stable, so that a launch's parts are those of every run of the program.
    small.sort_by_key(|(width, part)| (*width, part.own.dtype.name()));
    let mut groups: Vec<Group> = Vec::new();
    let mut previous = None;
    for (width, part) in small {
        let key = (width, part.own.dtype);
        match groups.last_mut() {
            Some(group) if previous == Some(key) && group.parts.len() < GROUP => {
                group.parts.push(part);
            }
            _ => groups.push(Group { width, parts: vec![part] }),
        }
        previous = Some(key);
    }
    (groups, large)
}

/// The tensors' elements, each from its offset in the buffer on, rounded to the buffer's dtype; the
/// rest of the buffer stays as it is. In the buffer's own memory where nothing shares it.
pub(crate) fn pack(parts: Vec<(CubeTensor, usize)>, buffer: CubeTensor) -> CubeTensor {
    let buffer = exclusive(buffer);
    pack_into(&buffer.client, parts, &Run::of(&buffer), None);
    buffer
}

/// As [`pack`], whoever looks into the buffer. Ordered after the launch that last wrote `after`.
pub(crate) fn pack_into(
    client: &Client,
    parts: Vec<(CubeTensor, usize)>,
    target: &Run,
    after: Option<Handle>,
) {
    let part = |(tensor, at): (CubeTensor, usize)| {
        let tensor = contiguous(tensor);
        let numel = tensor.shape().num_elements();
        Part { own: Run::of(&tensor), shared: target.clone().from(at), numel }
    };
    let (groups, large) = groups(client, parts.into_iter().map(part));
    for Part { own, shared, numel } in &large {
        copy(client, own, shared, *numel, None, after.clone());
    }
    for group in groups {
        let (count, dim) = grid(client, group.counts::<Vec<_>>().iter().sum());
        let first = &group.parts[0].own;
        let dtypes = [first.dtype, target.dtype].map(element);
        let after = after.clone().unwrap_or_else(|| first.handle.clone());
        // SAFETY: `groups` has checked that each part lies within both its buffers; the kernel
        // touches nothing of `after`.
        unsafe {
            pack_kernel::launch_unchecked(
                client,
                count,
                dim,
                group.width,
                group.tensors(),
                BufferArg::from_raw_parts(target.handle.clone(), target.capacity()),
                BufferArg::from_raw_parts(after, 1),
                group.places(),
                group.counts(),
                dtypes,
            );
        }
    }
}

/// Tensors of their own of the given shapes, each from its offset in the buffer on: divided by
/// `divisor` in f32 if given, rounded to `dtype`.
pub(crate) fn unpack(
    buffer: CubeTensor,
    parts: Vec<(usize, Shape)>,
    dtype: DType,
    divisor: Option<f32>,
) -> Vec<CubeTensor> {
    let buffer = contiguous(buffer);
    let client = buffer.client.clone();
    let source = Run::of(&buffer);
    let tensors: Vec<(CubeTensor, usize)> =
        parts.into_iter().map(|(at, shape)| (empty(&buffer.device, shape, dtype), at)).collect();
    let part = |(tensor, at): &(CubeTensor, usize)| {
        let numel = tensor.shape().num_elements();
        Part { own: Run::of(tensor), shared: source.clone().from(*at), numel }
    };
    let (groups, large) = groups(&client, tensors.iter().map(part));
    for Part { own, shared, numel } in &large {
        copy(&client, shared, own, *numel, divisor, None);
    }
    for group in groups {
        let (count, dim) = grid(&client, group.counts::<Vec<_>>().iter().sum());
        // SAFETY: `groups` has checked that each part lies within both its buffers.
        unsafe {
            unpack_kernel::launch_unchecked(
                &client,
                count,
                dim,
                group.width,
                BufferArg::from_raw_parts(source.handle.clone(), source.capacity()),
                group.tensors(),
                group.places(),
                group.counts(),
                divisor.unwrap_or(1.0),
                divisor.is_some(),
                [source.dtype, dtype].map(element),
            );
        }
    }
    tensors.into_iter().map(|(tensor, _)| tensor).collect()
}

/// The tensor's elements, divided by `divisor` in f32 if given, rounded to `dtype`.
pub(crate) fn cast(tensor: CubeTensor, dtype: DType, divisor: Option<f32>) -> CubeTensor {
    let tensor = contiguous(tensor);
    let target = empty(&tensor.device, tensor.shape(), dtype);
    let numel = tensor.shape().num_elements();
    copy(&tensor.client, &Run::of(&tensor), &Run::of(&target), numel, divisor, None);
    target
}
