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
use burn::tensor::{DType, Shape, TensorData};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{ShardBackend, Value, dispatch, numel};
use crate::norm::Norm;

/// A slot's device buffer.
#[derive(Debug)]
pub(crate) struct Memory {
    device: CubeDevice,
    handle: Handle,
    numel: usize,
    /// Written by the last reader's stream; the next writer reads it.
    token: Mutex<Handle>,
}

impl Memory {
    fn token(&self) -> std::sync::MutexGuard<'_, Handle> {
        self.token.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Elements `[offset, offset + numel)` as a handle.
    fn part(&self, offset: usize, numel: usize) -> Handle {
        let bytes = |elements: usize| (elements * size_of::<f32>()) as u64;
        let end = self.handle.size_in_used() - bytes(offset + numel);
        self.handle.clone().offset_start(bytes(offset)).offset_end(end)
    }
}

#[cube(launch_unchecked)]
fn copy_kernel(source: &[f32], target: &mut [f32], _after: &[f32]) {
    if ABSOLUTE_POS < source.len() {
        target[ABSOLUTE_POS] = source[ABSOLUTE_POS];
    }
}

#[cube(launch_unchecked)]
fn fill_kernel(target: &mut [f32], value: f32) {
    if ABSOLUTE_POS < target.len() {
        target[ABSOLUTE_POS] = value;
    }
}

/// Cubes of 256 units, enough for one unit an element.
fn grid(client: &cubecl::client::Client, numel: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, numel);
    (cubecl::calculate_cube_count_elemwise(client, numel, dim), dim)
}

fn fill(client: &cubecl::client::Client, target: Handle, numel: usize, value: f32) {
    if numel == 0 {
        return;
    }
    let (count, dim) = grid(client, numel);
    // SAFETY: the kernel stays within `target`, which holds `numel` elements.
    unsafe {
        fill_kernel::launch_unchecked(
            client,
            count,
            dim,
            BufferArg::from_raw_parts(target, numel),
            value,
        );
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
    type Host = Vec<f32>;

    dispatch!(Cube);

    fn alloc(device: &CubeDevice, numel: usize) -> Memory {
        let client = device.client();
        let numel = numel.max(1);
        let handle = client.empty(numel * size_of::<f32>());
        fill(&client, handle.clone(), numel, 0.0);
        let token = client.empty(size_of::<f32>());
        fill(&client, token.clone(), 1, 0.0);
        Memory { device: device.clone(), handle, numel, token: Mutex::new(token) }
    }

    fn view(memory: &Memory, offset: usize, shape: Shape) -> CubeTensor {
        let handle = memory.part(offset, shape.num_elements());
        let client = memory.device.client();
        CubeTensor::new_contiguous(client, memory.device.clone(), shape, handle, DType::F32)
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
        // SAFETY: both buffers hold `numel` elements, and the kernel stays within them.
        unsafe {
            copy_kernel::launch_unchecked(
                &client,
                count,
                dim,
                BufferArg::from_raw_parts(source.handle, numel),
                BufferArg::from_raw_parts(memory.part(offset, numel), numel),
                BufferArg::from_raw_parts(after, 1),
            );
        }
    }

    fn poison(memory: &Memory, numel: usize) {
        fill(&memory.device.client(), memory.part(0, numel), numel, f32::NAN);
    }

    fn release(memory: &Memory) {
        let client = memory.device.client();
        let token = client.empty(size_of::<f32>());
        fill(&client, token.clone(), 1, 0.0);
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

    fn to_host(tensor: CubeTensor) -> Option<TensorData> {
        let (shape, numel) = (tensor.shape(), numel::<Cube>(&tensor));
        let flat = Self::into_dispatch(Value::Plain(flat(tensor, 0..numel)));
        let data = burn::tensor::Tensor::<1>::from_dispatch(flat).into_data();
        let (bytes, _, dtype) = data.into_parts();
        Some(TensorData::from_bytes(bytes, shape, dtype))
    }

    #[cfg(feature = "mpi")]
    fn host_memory(_: &Memory) -> Option<NonNull<f32>> {
        None
    }

    #[cfg(feature = "mpi")]
    fn host(tensor: CubeTensor) -> Vec<f32> {
        let numel = numel::<Cube>(&tensor);
        let tensor = Self::into_dispatch(Value::Plain(flat(tensor, 0..numel)));
        burn::tensor::Tensor::<1>::from_dispatch(tensor).into_data().iter::<f32>().collect()
    }

    fn fragment(tensor: CubeTensor, range: Range<usize>, shape: Shape) -> CubeTensor {
        let part = burn_cubecl::kernel::into_contiguous(flat(tensor, range));
        let (client, device) = (part.client.clone(), part.device.clone());
        let numel = shape.num_elements();
        let copy = Memory {
            handle: client.empty(numel.max(1) * size_of::<f32>()),
            token: Mutex::new(part.handle.clone()),
            device,
            numel: numel.max(1),
        };
        Self::write(&copy, 0, part);
        CubeTensor::new_contiguous(client, copy.device.clone(), shape, copy.handle, DType::F32)
    }

    fn mean(parts: &[CubeTensor], range: Range<usize>, divisor: usize, shape: Shape) -> CubeTensor {
        let sum = parts
            .iter()
            .map(|part| flat(part.clone(), range.clone()))
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
