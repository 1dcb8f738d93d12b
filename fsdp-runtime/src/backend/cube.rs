//! CubeCL: a slot is one device buffer; a view of it is a handle with offsets.
//!
//! A stream waits for the producer of each handle it reads, but nothing makes the writer of a slot
//! wait for earlier readers on another stream. [`release`](ShardBackend::release) therefore launches
//! a one-element kernel on the reader's stream, and the next copy into the slot reads its output.

use std::ops::Range;
#[cfg(feature = "mpi")]
use std::ptr::NonNull;
use std::sync::Mutex;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Backend, Cube, TensorMetadata};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
#[cfg(feature = "nccl")]
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{ShardBackend, Value, cast, dispatch, numel};
use crate::norm::Norm;

/// A slot's device buffer.
#[derive(Debug)]
pub(crate) struct Memory {
    device: CubeDevice,
    handle: Handle,
    numel: usize,
    dtype: DType,
    /// Written by the last reader's stream; the next writer reads it.
    token: Mutex<Handle>,
}

impl Memory {
    fn token(&self) -> std::sync::MutexGuard<'_, Handle> {
        self.token.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Elements `[offset, offset + numel)` as a handle.
    fn part(&self, offset: usize, numel: usize) -> Handle {
        let bytes = |elements: usize| (elements * self.dtype.size()) as u64;
        let end = self.handle.size_in_used() - bytes(offset + numel);
        self.handle.clone().offset_start(bytes(offset)).offset_end(end)
    }
}

#[cube(launch_unchecked)]
fn copy_kernel<E: Int>(source: &[E], target: &mut [E], _after: &[f32]) {
    if ABSOLUTE_POS < source.len() {
        target[ABSOLUTE_POS] = source[ABSOLUTE_POS];
    }
}

#[cube(launch_unchecked)]
fn fill_kernel<E: Int>(target: &mut [E], value: E) {
    if ABSOLUTE_POS < target.len() {
        target[ABSOLUTE_POS] = value;
    }
}

/// Cubes of 256 units, enough for one unit an element.
fn grid(client: &cubecl::client::Client, numel: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, numel);
    (cubecl::calculate_cube_count_elemwise(client, numel, dim), dim)
}

/// Sets every bit, or none, of `numel` elements of the given size in bytes.
fn fill(client: &cubecl::client::Client, target: Handle, numel: usize, size: usize, bits: bool) {
    if numel == 0 {
        return;
    }
    let (count, dim) = grid(client, numel);
    macro_rules! launch {
        ($int:ty) => {{
            let value = if bits { <$int>::MAX } else { 0 };
            let target = BufferArg::from_raw_parts(target, numel);
            fill_kernel::launch_unchecked::<$int>(client, count, dim, target, value);
        }};
    }
    // SAFETY: the kernel stays within `target`, which holds `numel` elements of this size.
    unsafe {
        match size {
            2 => launch!(u16),
            _ => launch!(u32),
        }
    }
}

fn flat(tensor: CubeTensor, range: Range<usize>) -> CubeTensor {
    let numel = numel::<Cube>(&tensor);
    let tensor = Cube::float_reshape(tensor, Shape::from([numel]));
    if range == (0..numel) {
        return tensor;
    }
    Cube::float_slice(tensor, &[burn::tensor::Slice::from(range)])
}

impl ShardBackend for Cube {
    type Memory = Memory;
    #[cfg(feature = "mpi")]
    type Host = Vec<u8>;

    dispatch!(Cube);

    fn alloc(device: &CubeDevice, numel: usize, dtype: DType) -> Memory {
        let client = device.client();
        let numel = numel.max(1);
        let handle = client.empty(numel * dtype.size());
        fill(&client, handle.clone(), numel, dtype.size(), false);
        let token = client.empty(size_of::<f32>());
        fill(&client, token.clone(), 1, size_of::<f32>(), false);
        Memory { device: device.clone(), handle, numel, dtype, token: Mutex::new(token) }
    }

    fn view(memory: &Memory, offset: usize, shape: Shape) -> CubeTensor {
        let handle = memory.part(offset, shape.num_elements());
        let client = memory.device.client();
        CubeTensor::new_contiguous(client, memory.device.clone(), shape, handle, memory.dtype)
    }

    fn write(memory: &Memory, offset: usize, source: CubeTensor) {
        let numel = numel::<Cube>(&source);
        if numel == 0 {
            return;
        }
        assert!(offset + numel <= memory.numel, "a gather stays within its slot");
        let source = burn_cubecl::kernel::into_contiguous(source);
        let client = memory.device.client();
        let (count, dim) = grid(&client, numel);
        let after = memory.token().clone();
        macro_rules! launch {
            ($int:ty) => {{
                let source = BufferArg::from_raw_parts(source.handle, numel);
                let target = BufferArg::from_raw_parts(memory.part(offset, numel), numel);
                let after = BufferArg::from_raw_parts(after, 1);
                copy_kernel::launch_unchecked::<$int>(&client, count, dim, source, target, after);
            }};
        }
        // SAFETY: both buffers hold `numel` elements of this size, and the kernel stays within them.
        unsafe {
            match memory.dtype.size() {
                2 => launch!(u16),
                _ => launch!(u32),
            }
        }
    }

    fn poison(memory: &Memory, numel: usize) {
        // All bits set is NaN in every float type.
        let size = memory.dtype.size();
        fill(&memory.device.client(), memory.part(0, numel), numel, size, true);
    }

    fn release(memory: &Memory) {
        let client = memory.device.client();
        let token = client.empty(size_of::<f32>());
        fill(&client, token.clone(), 1, size_of::<f32>(), false);
        *memory.token() = token;
    }

    fn complete(device: &CubeDevice) {
        // A fault of the device surfaces on the next read of a buffer it left unwritten.
        let _ = Cube::sync(device);
    }

    fn detach(memory: &Memory, tensor: CubeTensor) -> CubeTensor {
        // Clones of a handle share its descriptor.
        let (theirs, ours) = (&tensor.handle.memory, &memory.handle.memory);
        if !std::ptr::eq(theirs.descriptor(), ours.descriptor()) {
            return tensor;
        }
        let (numel, shape) = (numel::<Cube>(&tensor), tensor.shape());
        Self::fragment(tensor, 0..numel, shape)
    }

    #[cfg(feature = "mpi")]
    fn host_memory(_: &Memory) -> Option<NonNull<u8>> {
        None
    }

    #[cfg(feature = "mpi")]
    fn host(tensor: CubeTensor) -> Vec<u8> {
        let numel = numel::<Cube>(&tensor);
        let tensor = Self::into_dispatch(Value::Plain(flat(tensor, 0..numel)));
        burn::tensor::Tensor::<1>::from_dispatch(tensor).into_data().as_bytes().to_vec()
    }

    #[cfg(feature = "nccl")]
    fn device_memory(memory: &Memory) -> Result<super::DeviceMemory, String> {
        type Server = <CudaRuntime as cubecl_runtime::runtime::Runtime>::Server;
        let CubeDevice::Cuda(_) = &memory.device else {
            return Err(format!("NCCL needs CUDA devices, and {:?} is none", memory.device));
        };
        let client = memory.device.client();
        let resource = |handle: Handle| {
            let resource = client.get_resource::<Server>(handle);
            resource.map_err(|error| format!("CubeCL: {error}"))
        };
        // To ask for a buffer makes this thread's stream wait for the one that wrote it: the token's
        // has read the slot, the slot's has written it.
        let token = resource(memory.token().clone())?;
        let held = resource(memory.handle.clone())?;
        Ok(super::DeviceMemory { start: held.resource().ptr, _held: Box::new((token, held)) })
    }

    fn fragment(tensor: CubeTensor, range: Range<usize>, shape: Shape) -> CubeTensor {
        let part = burn_cubecl::kernel::into_contiguous(flat(tensor, range));
        let (client, device) = (part.client.clone(), part.device.clone());
        let (numel, dtype) = (shape.num_elements(), part.dtype);
        let copy = Memory {
            handle: client.empty(numel.max(1) * dtype.size()),
            dtype,
            token: Mutex::new(part.handle.clone()),
            device,
            numel: numel.max(1),
        };
        Self::write(&copy, 0, part);
        CubeTensor::new_contiguous(client, copy.device.clone(), shape, copy.handle, dtype)
    }

    fn mean(parts: &[CubeTensor], range: Range<usize>, divisor: usize, shape: Shape) -> CubeTensor {
        let sum = parts
            .iter()
            .map(|part| cast::<Cube>(flat(part.clone(), range.clone()), DType::F32))
            .reduce(Cube::float_add)
            .expect("a group has at least one rank");
        let mean = match divisor {
            1 if parts.len() == 1 => return Self::fragment(sum, 0..range.len(), shape),
            1 => sum,
            _ => Cube::float_div_scalar(sum, (divisor as f32).into()),
        };
        Cube::float_reshape(mean, shape)
    }

    fn norm_sums(parts: &[(CubeTensor, Range<usize>)], norm: Norm) -> Vec<f64> {
        if parts.is_empty() {
            return Vec::new();
        }
        let sum = |(tensor, range): &(CubeTensor, Range<usize>)| {
            let part = flat(tensor.clone(), range.clone());
            match norm {
                Norm::One => Cube::float_sum(Cube::float_abs(part)),
                Norm::Two => Cube::float_sum(Cube::float_mul(part.clone(), part)),
                Norm::Inf if range.is_empty() => Cube::float_sum(part),
                Norm::Inf => Cube::float_max(Cube::float_abs(part)),
                Norm::P(p) => {
                    Cube::float_sum(Cube::float_powf_scalar(Cube::float_abs(part), p.into()))
                }
            }
        };
        let sums = Cube::float_cat(parts.iter().map(sum).collect(), 0);
        let data =
            burn::tensor::Tensor::<1>::from_dispatch(Self::into_dispatch(Value::Plain(sums)));
        data.into_data().iter::<f64>().collect()
    }
}
