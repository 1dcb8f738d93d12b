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
use cubecl::client::Client;
#[cfg(feature = "nccl")]
use cubecl::cuda::CudaRuntime;
use cubecl::server::Handle;

use super::shard_backend::{ShardBackend, Value, cast, dispatch, numel, to_data};
use crate::backend::Norm;
use crate::backend::kernels::cube::{Run, contiguous, copy, empty};
use crate::backend::kernels::{self, Kernels};

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

    /// The elements from `offset` on.
    fn run(&self, offset: usize) -> Run {
        Run { handle: self.handle.clone(), at: offset, dtype: self.dtype }
    }

    /// Elements `[offset, offset + numel)` as a handle.
    fn part(&self, offset: usize, numel: usize) -> Handle {
        let bytes = |elements: usize| (elements * self.dtype.size()) as u64;
        let end = self.handle.size_in_used() - bytes(offset + numel);
        self.handle.clone().offset_start(bytes(offset)).offset_end(end)
    }
}

/// One element, written by whoever calls.
fn token(client: &Client) -> Handle {
    let handle = client.empty(size_of::<f32>());
    copy::fill(client, &Run { handle: handle.clone(), at: 0, dtype: DType::F32 }, 1, 0.0);
    handle
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
        copy::fill(&client, &Run { handle: handle.clone(), at: 0, dtype }, numel, 0.0);
        let token = Mutex::new(token(&client));
        Memory { device: device.clone(), handle, numel, dtype, token }
    }

    fn view(memory: &Memory, offset: usize, shape: Shape) -> CubeTensor {
        let handle = memory.part(offset, shape.num_elements());
        let client = memory.device.client();
        CubeTensor::new_contiguous(client, memory.device.clone(), shape, handle, memory.dtype)
    }

    fn write(memory: &Memory, parts: Vec<(usize, CubeTensor)>) {
        let part = |(offset, source): (usize, CubeTensor)| {
            assert!(offset + numel::<Cube>(&source) <= memory.numel, "a write stays in its slot");
            // What the kernels do not read, Burn casts.
            let source = match kernels::takes(source.dtype) {
                true => source,
                false => cast::<Cube>(source, memory.dtype),
            };
            (source, offset)
        };
        let parts: Vec<_> = parts.into_iter().map(part).collect();
        // Each launch reads the token, and so comes after the last reader's stream.
        let after = memory.token().clone();
        copy::pack_into(&memory.device.client(), parts, &memory.run(0), Some(after));
    }

    fn poison(memory: &Memory, numel: usize) {
        copy::fill(&memory.device.client(), &memory.run(0), numel, f32::NAN);
    }

    fn release(memory: &Memory) {
        *memory.token() = token(&memory.device.client());
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
        Self::copy_range(tensor, 0..numel, shape)
    }

    fn to_host(tensor: CubeTensor) -> Option<TensorData> {
        Some(to_data::<Cube>(tensor))
    }

    #[cfg(feature = "mpi")]
    fn host_memory(_: &Memory) -> Option<NonNull<u8>> {
        None
    }

    #[cfg(feature = "mpi")]
    fn host(tensor: CubeTensor) -> Vec<u8> {
        to_data::<Cube>(tensor).as_bytes().to_vec()
    }

    #[cfg(feature = "nccl")]
    fn device_memory(memory: &Memory) -> Result<super::shard_backend::DeviceMemory, String> {
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
        Ok(super::shard_backend::DeviceMemory {
            start: held.resource().ptr,
            _held: Box::new((token, held)),
        })
    }

    fn copy_range(tensor: CubeTensor, range: Range<usize>, shape: Shape) -> CubeTensor {
        let part = contiguous(flat(tensor, range));
        let copy = empty(&part.device, shape, part.dtype);
        let numel = numel::<Cube>(&part);
        copy::copy(&part.client, &Run::of(&part), &Run::of(&copy), numel, None);
        copy
    }

    fn mean(parts: &[CubeTensor], range: Range<usize>, divisor: usize, shape: Shape) -> CubeTensor {
        Self::rank_mean(parts, range, divisor, shape)
    }

    fn norm_sums(parts: &[(CubeTensor, Range<usize>)], norm: Norm) -> Vec<f64> {
        Self::sums(parts, norm).iter().map(|sums| sums.term(norm)).collect()
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use cubecl::device::CpuDevice;

    use super::*;

    fn numbers(seed: usize, len: usize) -> Vec<f32> {
        (0..len).map(|at| ((at * 31 + seed * 7919) % 61) as f32 * 0.25).collect()
    }

    fn tensor(elements: Vec<f32>, dtype: DType) -> CubeTensor {
        let shape = [elements.len()];
        let device = CubeDevice::Cpu(CpuDevice);
        cast::<Cube>(Cube::float_from_data(TensorData::new(elements, shape), &device), dtype)
    }

    /// More small pieces than share a launch, large ones and an empty one, of several types, into a
    /// buffer that another thread's stream has released.
    #[test]
    fn pieces_are_written_together_each_to_its_place() {
        const GAP: usize = 3;
        let lens = [1, 64, 0, 70_000, 7].into_iter().cycle().take(40);
        let (mut at, mut pieces, mut expected) = (GAP, Vec::new(), vec![-1.0; GAP]);
        for (seed, len) in lens.enumerate() {
            let dtype = [DType::F32, DType::BF16][seed % 2];
            pieces.push((at, tensor(numbers(seed, len), dtype)));
            expected.extend(numbers(seed, len));
            expected.extend([-1.0; GAP]);
            at += len + GAP;
        }
        let numel = expected.len();
        for dtype in [DType::F32, DType::BF16] {
            let memory = Cube::alloc(&CubeDevice::Cpu(CpuDevice), numel, dtype);
            copy::fill(&memory.device.client(), &memory.run(0), numel, -1.0);
            std::thread::scope(|scope| {
                scope.spawn(|| Cube::release(&memory));
            });
            Cube::write(&memory, pieces.clone());
            let view = Cube::view(&memory, 0, Shape::from([numel]));
            let found = to_data::<Cube>(cast::<Cube>(view, DType::F32));
            assert_eq!(found.as_slice::<f32>().unwrap(), expected, "{dtype:?}");
        }
    }
}
