//! The kernels on CubeCL devices, one `#[cube]` kernel a file, and what their launchers share.
//!
//! A launcher cuts its elements into at most two [`Span`]s: one of the widest vectors the device
//! loads at once, one of the single elements that remain. Where a buffer's offset is not a multiple
//! of the vector, and the device asks for that, the vectors are narrower.
//!
//! CubeCL joins a product and a sum into one operation of one rounding. Where that must not be,
//! because the twin on Flex rounds twice, the product passes through [`rounded`].

mod batch;
pub(crate) mod copy;
mod dropout;
mod kernels;
mod mean;
pub(crate) mod optim;
mod sums;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Elements of one buffer, from element `at` on.
#[derive(Clone)]
pub(crate) struct Run {
    pub(crate) handle: Handle,
    pub(crate) at: usize,
    pub(crate) dtype: DType,
}

impl Run {
    /// A contiguous tensor's elements.
    pub(crate) fn of(tensor: &CubeTensor) -> Self {
        Self { handle: tensor.handle.clone(), at: 0, dtype: tensor.dtype }
    }

    /// The elements from `at` on, counted from the run's first.
    pub(crate) fn from(mut self, at: usize) -> Self {
        self.at += at;
        self
    }

    /// Bytes from the start of the allocation to element `index`.
    fn bytes_before(&self, index: usize) -> u64 {
        let inside = (self.at + index) * self.dtype.size();
        self.handle.offset_start.unwrap_or(0) + inside as u64
    }

    /// Elements there are.
    fn capacity(&self) -> usize {
        self.len().saturating_sub(self.at)
    }

    /// Elements of the buffer.
    fn len(&self) -> usize {
        self.handle.size_in_used() as usize / self.dtype.size()
    }

    /// The whole buffer as a kernel's argument.
    fn argument(&self) -> BufferArg {
        // SAFETY: the length is that of the handle.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.len()) }
    }
}

/// Vectors of one width, side by side.
pub(crate) struct Span {
    /// The first element.
    pub(crate) start: usize,
    /// Elements of a vector.
    pub(crate) width: usize,
    /// Vectors.
    pub(crate) count: usize,
    /// Whether a vector may begin anywhere.
    anywhere: bool,
}

impl Span {
    /// A run's buffer as a kernel's argument, and the vector of it that the span begins with.
    pub(crate) fn argument(&self, run: &Run) -> (BufferArg, usize) {
        let first = run.at + self.start;
        if !self.anywhere {
            return (run.argument(), first / self.width);
        }
        let handle = run.handle.clone().offset_start((first * run.dtype.size()) as u64);
        (Run { handle, ..run.clone() }.argument(), 0)
    }

    /// One unit a vector.
    pub(crate) fn grid(&self, client: &Client) -> (CubeCount, CubeDim) {
        grid(client, self.count)
    }
}

/// Whether units run in turn, a few of them side by side.
fn on_cpu(client: &Client) -> bool {
    client.properties().hardware.num_cpu_cores.is_some()
}

/// Whether CubeCL's compiler for CPUs can round to bf16: by an instruction, or else it calls a function
/// that does not exist.
pub(crate) fn cpu_rounds_to_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    true
}

/// Whether a kernel must round to this dtype in integers.
fn in_integers(client: &Client, dtype: DType) -> bool {
    dtype == DType::BF16 && on_cpu(client) && !cpu_rounds_to_bf16()
}

/// Rounded to the nearest, ties to even. `integers` is what [`in_integers`] says.
#[cube]
fn narrowed<O: Float, N: Size>(wide: Vector<f32, N>, #[comptime] integers: bool) -> Vector<O, N> {
    if comptime!(integers) {
        let bits = Vector::<u32, N>::reinterpret(wide);
        // Half of the last place kept, less one where that is even already.
        let half =
            Vector::<u32, N>::new(0x7FFFu32) + ((bits >> Vector::new(16u32)) & Vector::new(1u32));
        // Rounding could take a NaN to infinity.
        let magnitude = bits & Vector::new(0x7FFF_FFFFu32);
        let number = magnitude.less_than(&Vector::<u32, N>::new(0x7F80_0001u32));
        let rounded = select_many(number, bits + half, bits | Vector::new(0x40_0000u32));
        Vector::<O, N>::reinterpret(Vector::<u16, N>::cast_from(rounded >> Vector::new(16u32)))
    } else {
        Vector::cast_from(wide)
    }
}

/// Cubes enough for `units`.
pub(crate) fn grid(client: &Client, units: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, units);
    (cubecl::calculate_cube_count_elemwise(client, units, dim), dim)
}

/// The widest vectors that all runs can be cut into, and these numbers of elements.
fn widest(client: &Client, runs: &[&Run], numbers: &[usize]) -> usize {
    let anywhere = client.features().unaligned_io;
    let size = runs.iter().map(|run| run.dtype.size()).max().unwrap_or(size_of::<f32>());
    let begins = |run: &&Run, width: usize| {
        let vector = (width * run.dtype.size()) as u64;
        run.bytes_before(0).is_multiple_of(vector) && run.at.is_multiple_of(width)
    };
    let fits = |&width: &usize| {
        (anywhere || runs.iter().all(|run| begins(run, width)))
            && numbers.iter().all(|number| number.is_multiple_of(width))
    };
    client.io_optimized_vector_sizes(size).find(fits).unwrap_or(1)
}

/// The spans that `numel` elements of all runs are cut into: vectors, then single elements.
///
/// # Panics
///
/// Where a run has fewer elements.
pub(crate) fn spans(client: &Client, runs: &[&Run], numel: usize) -> Vec<Span> {
    spans_within(client, runs, numel, 0)
}

/// As [`spans`]; each block of so many elements is whole vectors.
pub(crate) fn spans_within(
    client: &Client,
    runs: &[&Run],
    numel: usize,
    block: usize,
) -> Vec<Span> {
    for run in runs {
        assert!(
            numel <= run.capacity(),
            "a kernel stays within its buffers: {numel} elements of {}",
            run.capacity()
        );
    }
    let anywhere = client.features().unaligned_io;
    let width = widest(client, runs, &[block]);
    let body = numel / width * width;
    let vectors = Span { start: 0, width, count: body / width, anywhere };
    let rest = Span { start: body, width: 1, count: numel - body, anywhere };
    [vectors, rest].into_iter().filter(|span| span.count > 0).collect()
}

/// CubeCL's name of a float dtype.
///
/// # Panics
///
/// For anything but f32, bf16 and f16.
pub(crate) fn element(dtype: DType) -> ElemType {
    ElemType::Float(match dtype {
        DType::F32 => FloatKind::F32,
        DType::BF16 => FloatKind::BF16,
        DType::F16 => FloatKind::F16,
        other => panic!("kernels take f32, bf16 and f16, not {other:?}"),
    })
}

/// A new tensor whose elements are not set.
pub(crate) fn empty(device: &CubeDevice, shape: Shape, dtype: DType) -> CubeTensor {
    let client = device.client();
    let handle = client.empty(shape.num_elements().max(1) * dtype.size());
    CubeTensor::new_contiguous(client, device.clone(), shape, handle, dtype)
}

/// The tensor with its elements side by side.
pub(crate) fn contiguous(tensor: CubeTensor) -> CubeTensor {
    burn_cubecl::kernel::into_contiguous(tensor)
}

/// The tensor itself where its elements lie side by side and nothing shares them, else a copy.
pub(crate) fn exclusive(tensor: CubeTensor) -> CubeTensor {
    if tensor.is_contiguous() {
        if tensor.can_mut() {
            return tensor;
        }
        let target = empty(&tensor.device, tensor.shape(), tensor.dtype);
        let numel = tensor.shape().num_elements();
        copy::copy(&tensor.client, &Run::of(&tensor), &Run::of(&target), numel, None);
        return target;
    }
    contiguous(tensor)
}

/// A product that no compiler joins with the sum it goes into: `zero` is 0, which they do not know.
#[cube]
pub(crate) fn rounded<N: Size>(product: Vector<f32, N>, zero: u32) -> Vector<f32, N> {
    let bits = Vector::<u32, N>::reinterpret(product);
    Vector::<f32, N>::reinterpret(bits | Vector::new(zero))
}
