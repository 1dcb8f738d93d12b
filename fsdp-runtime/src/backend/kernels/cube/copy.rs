//! Copies with a cast: shards into a send buffer, gradients into a reduce buffer, and out of
//! them again. Tensors that go into one buffer or come out of it share launches.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::batch::{Job, Tile, batches, begin, end, own_tile};
use super::{Run, contiguous, element, empty, exclusive, in_integers, narrowed, spans};

/// Tensors that share a launch, at most: the kernel's body is there once for each.
const MOST: usize = 16;

/// Elements divided in f32 if asked, in another dtype.
#[cube]
fn converted<I: Float, O: Float, N: Size>(
    elements: Vector<I, N>,
    divisor: f32,
    #[comptime] divide: bool,
    #[comptime] integers: bool,
) -> Vector<O, N> {
    if comptime!(divide) {
        narrowed(Vector::<f32, N>::cast_from(elements) / Vector::new(divisor), integers)
    } else if comptime!(integers) {
        narrowed(Vector::<f32, N>::cast_from(elements), integers)
    } else {
        Vector::cast_from(elements)
    }
}

/// Copies several tensors to their places in one buffer, divided in f32 if asked. `_after` is read by
/// nothing: it orders the launch after what last wrote it.
#[cube(launch_unchecked)]
fn pack_kernel<I: Float, O: Float, N: Size>(
    sources: &Sequence<Box<[Vector<I, N>]>>,
    target: &mut [Vector<O, N>],
    _after: &[f32],
    firsts: &Sequence<usize>,
    places: &Sequence<usize>,
    counts: &Sequence<usize>,
    tiles: &Sequence<usize>,
    divisor: f32,
    #[comptime] divide: bool,
    #[comptime] integers: bool,
    #[comptime] tile: Tile,
    #[define(I, O)] _dtypes: [ElemType; 2],
) {
    let mut at = own_tile(tile);
    #[unroll]
    for part in 0..counts.len() {
        if at < tiles[part] {
            let end = end(at, counts[part], tile);
            let mut index = begin(at, tile);
            while index < end {
                let element = sources[part][firsts[part] + index];
                target[places[part] + index] =
                    converted::<I, O, N>(element, divisor, divide, integers);
                index += comptime!(tile.lanes);
            }
        }
        // Below 0 it wraps, beyond every count.
        at -= tiles[part];
    }
}

/// Copies several parts of one buffer to tensors of their own, divided in f32 if asked.
#[cube(launch_unchecked)]
fn unpack_kernel<I: Float, O: Float, N: Size>(
    source: &[Vector<I, N>],
    targets: &mut Sequence<Box<[Vector<O, N>]>>,
    places: &Sequence<usize>,
    firsts: &Sequence<usize>,
    counts: &Sequence<usize>,
    tiles: &Sequence<usize>,
    divisor: f32,
    #[comptime] divide: bool,
    #[comptime] integers: bool,
    #[comptime] tile: Tile,
    #[define(I, O)] _dtypes: [ElemType; 2],
) {
    let mut at = own_tile(tile);
    #[unroll]
    for part in 0..counts.len() {
        if at < tiles[part] {
            let end = end(at, counts[part], tile);
            let mut index = begin(at, tile);
            while index < end {
                let element = source[places[part] + index];
                targets.index_mut(part)[firsts[part] + index] =
                    converted::<I, O, N>(element, divisor, divide, integers);
                index += comptime!(tile.lanes);
            }
        }
        at -= tiles[part];
    }
}

/// Copies each job's first run to its second, which is part of one buffer for all, divided by
/// `divisor` in f32 if given, rounded to the target's dtype. Ordered after the launch that last wrote
/// `after`.
fn gather(client: &Client, jobs: &[Job<2>], divisor: Option<f32>, after: Option<Handle>) {
    for batch in batches(client, jobs, Some(1), MOST) {
        let (count, dim) = batch.grid(client);
        let [source, target] = &batch.first().runs;
        let after = after.clone().unwrap_or_else(|| source.handle.clone());
        // SAFETY: `batches` has checked that the buffers hold the jobs' elements, of which the kernel
        // touches those of the batch's spans, and nothing of `after`.
        unsafe {
            pack_kernel::launch_unchecked(
                client,
                count,
                dim,
                batch.width,
                batch.buffers(0),
                batch.shared(1),
                BufferArg::from_raw_parts(after, 1),
                batch.firsts(0),
                batch.places(1),
                batch.counts(),
                batch.tiles(),
                divisor.unwrap_or(1.0),
                divisor.is_some(),
                in_integers(client, target.dtype),
                batch.tile,
                [source.dtype, target.dtype].map(element),
            );
        }
    }
}

/// Copies `numel` elements, divided by `divisor` in f32 if given, rounded to the target's dtype.
pub(crate) fn copy(
    client: &Client,
    source: &Run,
    target: &Run,
    numel: usize,
    divisor: Option<f32>,
) {
    gather(client, &[Job { runs: [source.clone(), target.clone()], numel }], divisor, None);
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
    let job = |(tensor, at): (CubeTensor, usize)| {
        let tensor = contiguous(tensor);
        let runs = [Run::of(&tensor), target.clone().from(at)];
        Job { runs, numel: tensor.shape().num_elements() }
    };
    let jobs: Vec<_> = parts.into_iter().map(job).collect();
    gather(client, &jobs, None, after);
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
    let (mut tensors, mut jobs) = (Vec::new(), Vec::new());
    for (at, shape) in parts {
        let numel = shape.num_elements();
        let tensor = empty(&buffer.device, shape, dtype);
        jobs.push(Job { runs: [source.clone().from(at), Run::of(&tensor)], numel });
        tensors.push(tensor);
    }
    for batch in batches(&client, &jobs, Some(0), MOST) {
        let (count, dim) = batch.grid(&client);
        // SAFETY: `batches` has checked that the buffers hold the jobs' elements, of which the kernel
        // touches those of the batch's spans.
        unsafe {
            unpack_kernel::launch_unchecked(
                &client,
                count,
                dim,
                batch.width,
                batch.shared(0),
                batch.buffers(1),
                batch.places(0),
                batch.firsts(1),
                batch.counts(),
                batch.tiles(),
                divisor.unwrap_or(1.0),
                divisor.is_some(),
                in_integers(&client, dtype),
                batch.tile,
                [source.dtype, dtype].map(element),
            );
        }
    }
    tensors
}

/// The tensor's elements, divided by `divisor` in f32 if given, rounded to `dtype`.
pub(crate) fn cast(tensor: CubeTensor, dtype: DType, divisor: Option<f32>) -> CubeTensor {
    let tensor = contiguous(tensor);
    let target = empty(&tensor.device, tensor.shape(), dtype);
    let numel = tensor.shape().num_elements();
    copy(&tensor.client, &Run::of(&tensor), &Run::of(&target), numel, divisor);
    target
}
