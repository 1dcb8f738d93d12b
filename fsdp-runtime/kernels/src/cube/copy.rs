//! Copies with a cast: tensors into one flat buffer, and parts of such a buffer into tensors.
//! Tensors that share the buffer share launches.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::device::rounds_in_integers;
use super::launch::{Job, launches};
use super::rounding::narrowed;
use super::span::spans;
use super::tensors::{contiguous, element, empty};
use super::tile::{Tile, begin, end, own_tile};

/// Largest number of tensors that share a launch. The compiled kernel contains its body once for
/// each.
const MAX_TENSORS: usize = 16;

/// Tensors in one allocation begin at multiples of this number of elements, 128 bytes in half
/// precision.
const ALIGNMENT: usize = 64;

/// Converts elements to another dtype; if `divide`, divides them in f32 first.
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

/// Copies several tensors into one buffer; if `divide`, divided in f32.
#[cube(launch_unchecked)]
fn pack_kernel<I: Float, O: Float, N: Size>(
    sources: &Sequence<Box<[Vector<I, N>]>>,
    target: &mut [Vector<O, N>],
    source_firsts: &Sequence<usize>,
    target_firsts: &Sequence<usize>,
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
                let element = sources[part][source_firsts[part] + index];
                target[target_firsts[part] + index] =
                    converted::<I, O, N>(element, divisor, divide, integers);
                index += comptime!(tile.lanes);
            }
        }
        // A tile of this part is done: its index wraps below 0 and exceeds the counts of all later
        // parts.
        at -= tiles[part];
    }
}

/// Copies several parts of one buffer to separate tensors; if `divide`, divided in f32.
#[cube(launch_unchecked)]
fn unpack_kernel<I: Float, O: Float, N: Size>(
    source: &[Vector<I, N>],
    targets: &mut Sequence<Box<[Vector<O, N>]>>,
    source_firsts: &Sequence<usize>,
    target_firsts: &Sequence<usize>,
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
                let element = source[source_firsts[part] + index];
                targets.index_mut(part)[target_firsts[part] + index] =
                    converted::<I, O, N>(element, divisor, divide, integers);
                index += comptime!(tile.lanes);
            }
        }
        at -= tiles[part];
    }
}

/// Copies the first slice of each job to the job's second slice.
///
/// If there is a `divisor`, elements are divided by it in f32. They are rounded to the dtype of the
/// second slice. The second slices of all jobs are in one buffer.
fn gather_into(client: &Client, jobs: &[Job], divisor: Option<f32>) {
    for launch in launches(client, jobs, Some(1), MAX_TENSORS) {
        let (count, dim) = launch.grid(client);
        let dtypes = [0, 1].map(|slice: usize| launch.first_job().slices[slice].dtype);
        // SAFETY: `launches` checked that the buffers hold the jobs' elements; the kernel accesses
        // only those of the launch's spans.
        unsafe {
            pack_kernel::launch_unchecked(
                client,
                count,
                dim,
                launch.width,
                launch.buffers(0),
                launch.shared_buffer(1),
                launch.firsts(0),
                launch.shared_firsts(1),
                launch.counts(),
                launch.tiles(),
                divisor.unwrap_or(1.0),
                divisor.is_some(),
                rounds_in_integers(client, dtypes[1]),
                launch.tile,
                dtypes.map(element),
            );
        }
    }
}

/// Copies `numel` elements: divided in f32 by `divisor` if there is one, then rounded to the dtype
/// of `target`.
pub fn copy(
    client: &Client,
    source: &BufferSlice,
    target: &BufferSlice,
    numel: usize,
    divisor: Option<f32>,
) {
    let job = Job { slices: vec![source.clone(), target.clone()], numel };
    gather_into(client, &[job], divisor);
}

/// Sets `count` vectors of `target`, from index `to` on, to `value`.
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

/// Sets the first `numel` elements of `target` to `value`.
pub fn fill(client: &Client, target: &BufferSlice, numel: usize, value: f32) {
    for span in spans(client, &[target], numel) {
        let (count, dim) = span.grid(client);
        let (write, to) = span.argument(target);
        let dtype = element(target.dtype);
        // SAFETY: `spans` checked that the buffer holds the elements; the kernel writes only the
        // span's vectors.
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

/// Implements [`Kernels::pack`](crate::Kernels::pack).
pub(super) fn pack(parts: Vec<(CubeTensor, usize)>, buffer: CubeTensor) -> CubeTensor {
    let buffer = exclusive(buffer);
    pack_into(&buffer.client, parts, &BufferSlice::of(&buffer));
    buffer
}

/// Copies each tensor into `target` from the given offset on, rounded to the dtype of `target`.
/// Writes the memory of `target` even if tensors share it.
pub fn pack_into(client: &Client, parts: Vec<(CubeTensor, usize)>, target: &BufferSlice) {
    let job = |(tensor, at): (CubeTensor, usize)| {
        let tensor = contiguous(tensor);
        let slices = vec![BufferSlice::of(&tensor), target.clone().skip(at)];
        Job { slices, numel: tensor.shape().num_elements() }
    };
    let jobs: Vec<_> = parts.into_iter().map(job).collect();
    gather_into(client, &jobs, None);
}

/// Implements [`Kernels::unpack`](crate::Kernels::unpack).
pub(super) fn unpack(
    buffer: CubeTensor,
    parts: Vec<(usize, Shape)>,
    dtype: DType,
    divisor: Option<f32>,
) -> Vec<CubeTensor> {
    let buffer = contiguous(buffer);
    let client = buffer.client.clone();
    let source = BufferSlice::of(&buffer);
    let (mut tensors, mut jobs) = (Vec::new(), Vec::new());
    for (at, shape) in parts {
        let numel = shape.num_elements();
        let tensor = empty(&buffer, shape, dtype);
        jobs.push(Job { slices: vec![source.clone().skip(at), BufferSlice::of(&tensor)], numel });
        tensors.push(tensor);
    }
    for launch in launches(&client, &jobs, Some(0), MAX_TENSORS) {
        let (count, dim) = launch.grid(&client);
        // SAFETY: `launches` checked that the buffers hold the jobs' elements; the kernel accesses
        // only those of the launch's spans.
        unsafe {
            unpack_kernel::launch_unchecked(
                &client,
                count,
                dim,
                launch.width,
                launch.shared_buffer(0),
                launch.buffers(1),
                launch.shared_firsts(0),
                launch.firsts(1),
                launch.counts(),
                launch.tiles(),
                divisor.unwrap_or(1.0),
                divisor.is_some(),
                rounds_in_integers(&client, dtype),
                launch.tile,
                [source.dtype, dtype].map(element),
            );
        }
    }
    tensors
}

/// Implements [`Kernels::cast`](crate::Kernels::cast).
pub(super) fn cast(tensor: CubeTensor, dtype: DType, divisor: Option<f32>) -> CubeTensor {
    let tensor = contiguous(tensor);
    let target = empty(&tensor, tensor.shape(), dtype);
    let numel = tensor.shape().num_elements();
    copy(&tensor.client, &BufferSlice::of(&tensor), &BufferSlice::of(&target), numel, divisor);
    target
}

/// Implements [`Kernels::cast_all`](crate::Kernels::cast_all).
pub(super) fn cast_all(tensors: Vec<CubeTensor>, dtype: DType) -> Vec<CubeTensor> {
    let Some(first) = tensors.first() else { return Vec::new() };
    let (client, device) = (first.client.clone(), first.device.clone());
    let mut numel = 0;
    let place = |tensor: CubeTensor| {
        let at = numel;
        numel = (numel + tensor.shape().num_elements()).next_multiple_of(ALIGNMENT);
        (tensor, at)
    };
    let parts: Vec<_> = tensors.into_iter().map(place).collect();
    let buffer = empty(&parts[0].0, Shape::from([numel]), dtype);
    let buffer = BufferSlice::of(&buffer);
    let cast = |(tensor, at): &(CubeTensor, usize)| {
        let shape = tensor.shape();
        let handle = buffer.clone().skip(*at).into_handle(shape.num_elements());
        CubeTensor::new_contiguous(client.clone(), device.clone(), shape, handle, dtype)
    };
    let casts = parts.iter().map(cast).collect();
    pack_into(&client, parts, &buffer);
    casts
}

/// Returns the tensor if it is contiguous and no other tensor shares its memory, else a copy.
pub(super) fn exclusive(tensor: CubeTensor) -> CubeTensor {
    if !tensor.is_contiguous() {
        return contiguous(tensor);
    }
    if tensor.can_mut() {
        return tensor;
    }
    let target = empty(&tensor, tensor.shape(), tensor.dtype);
    let numel = tensor.shape().num_elements();
    copy(&tensor.client, &BufferSlice::of(&tensor), &BufferSlice::of(&target), numel, None);
    target
}

#[cfg(all(test, feature = "cpu", feature = "flex"))]
mod tests {
    use burn::backend::Flex;
    use burn::tensor::TensorData;
    use burn_cubecl::{CubeBackend, CubeDevice};
    use cubecl::device::CpuDevice;

    use crate::Kernels;
    use crate::{cast, to_data};

    use super::*;

    /// Casts tensors of several lengths, more than share a launch.
    fn casts<B: Kernels>(device: &B::Device, from: DType, to: DType) -> Vec<Vec<f32>> {
        let tensor = |index: usize| {
            let len = [5, 64, 70_000, 1, 768][index % 5];
            let element = |at: usize| ((at * 31 + index * 7919) % 6101) as f32 * 0.37 - 900.0;
            let data = TensorData::new((0..len).map(element).collect::<Vec<_>>(), [len]);
            cast::<B>(B::float_from_data(data, device), from)
        };
        let casts = B::cast_all((0..40).map(tensor).collect(), to);
        let elements = |tensor| to_data::<B>(cast::<B>(tensor, DType::F32)).iter().collect();
        casts.into_iter().map(elements).collect()
    }

    #[test]
    fn casts_that_share_launches_have_the_bits_of_flex() {
        let device = CubeDevice::Cpu(CpuDevice);
        for (from, to) in [(DType::F32, DType::F16), (DType::F16, DType::F32)] {
            let found = casts::<CubeBackend>(&device, from, to);
            assert_eq!(found, casts::<Flex>(&Default::default(), from, to), "{from:?}");
        }
        assert!(CubeBackend::cast_all(Vec::new(), DType::F16).is_empty());
    }
}
