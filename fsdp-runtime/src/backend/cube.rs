//! [`ShardBackend`] for Burn's CubeCL backend.
//!
//! A gather buffer is one device allocation. A view is a handle to the allocation with offsets.
//!
//! Fences order the streams of different threads ([`fence`](super::fence)). A gather buffer has a
//! fence of its own: [`release`](ShardBackend::release) replaces it, and the next
//! [`write`](ShardBackend::write) waits for it.

use std::ops::Range;
#[cfg(feature = "mpi")]
use std::ptr::NonNull;
use std::sync::Mutex;

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{Bytes, DType, Shape, TensorData};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::server::Handle;
use fsdp_kernels::cube::{BufferSlice, contiguous, copy, decode_into, empty, fill, pack_into};
#[cfg(feature = "nccl")]
use fsdp_kernels::cube::{Lent, lend, on_device_thread};
use fsdp_kernels::{Kernels, Norm, cast, takes};

use super::fence::Fence;
use super::host_data::owned_bytes;
#[cfg(feature = "nccl")]
use super::shard_backend::DeviceMemory;
use super::shard_backend::{ShardBackend, numel};
#[cfg(test)]
use super::stream_order::{self, record};
use crate::error::IgnorePoison;
use crate::layout::StorageType;

/// Device allocation of a gather buffer.
#[derive(Debug)]
pub(crate) struct Memory {
    device: CubeDevice,
    handle: Handle,
    /// Number of elements, at least 1.
    numel: usize,
    dtype: DType,
    /// Marks the last reads. The next writer waits for it.
    last_reads: Mutex<Fence>,
}

impl Memory {
    fn last_reads(&self) -> std::sync::MutexGuard<'_, Fence> {
        self.last_reads.lock().ignore_poison()
    }

    /// Returns the elements from `start` on.
    fn slice(&self, start: usize) -> BufferSlice {
        BufferSlice { handle: self.handle.clone(), start, dtype: self.dtype }
    }
}

/// Returns elements `range` of the flattened tensor.
fn flat(tensor: CubeTensor, range: Range<usize>) -> CubeTensor {
    let numel = numel::<CubeBackend>(&tensor);
    let tensor = CubeBackend::float_reshape(tensor, Shape::from([numel]));
    if range == (0..numel) {
        return tensor;
    }
    CubeBackend::float_slice(tensor, &[burn::tensor::Slice::from(range)])
}

/// Returns the tensor's elements in order, read from the device, or in place on CubeCL's CPU device.
fn read(tensor: CubeTensor) -> Bytes {
    let tensor = contiguous(tensor);
    #[cfg(test)]
    stream_order::reads(&tensor.handle);
    // `into_data` would be lazy: its bytes hold the device allocation for their whole life.
    let handle = BufferSlice::of(&tensor).into_handle(tensor.shape().num_elements());
    tensor.client.read_one(handle).expect("a computed tensor can be read")
}

/// Returns a buffer of CubeCL's CPU device for an imitation of NCCL, after all work on it has run.
#[cfg(all(test, feature = "nccl", feature = "cpu"))]
fn host_buffer(memory: &Memory) -> Result<DeviceMemory, String> {
    type Server = <cubecl::cpu::CpuRuntime as cubecl_runtime::runtime::Runtime>::Server;
    <CubeBackend as burn::backend::Backend>::sync(&memory.device)
        .map_err(|error| error.to_string())?;
    let buffer = memory.device.client().get_resource::<Server>(memory.handle.clone());
    let buffer = buffer.map_err(|error| error.to_string())?;
    let start = buffer.resource().read().as_ptr().expose_provenance() as u64;
    Ok(DeviceMemory { start, stream: 0, _held: Box::new(buffer) })
}

impl ShardBackend for CubeBackend {
    type Fence = Fence;
    type Memory = Memory;
    #[cfg(feature = "mpi")]
    type Host = burn::tensor::Bytes;
    const IN_HOST_MEMORY: bool = false;

    fn alloc(device: &CubeDevice, numel: usize, dtype: DType) -> Memory {
        let client = device.client();
        let numel = numel.max(1);
        let handle = client.empty(numel * dtype.size());
        fill(&client, &BufferSlice { handle: handle.clone(), start: 0, dtype }, numel, 0.0);
        #[cfg(test)]
        stream_order::writes(&handle);
        let last_reads = Mutex::new(Fence::new(device));
        Memory { device: device.clone(), handle, numel, dtype, last_reads }
    }

    fn view(memory: &Memory, offset: usize, shape: Shape) -> CubeTensor {
        let handle = memory.slice(offset).into_handle(shape.num_elements());
        #[cfg(test)]
        stream_order::reads(&handle);
        let client = memory.device.client();
        CubeTensor::new_contiguous(client, memory.device.clone(), shape, handle, memory.dtype)
    }

    fn write(memory: &Memory, parts: Vec<(usize, CubeTensor)>) {
        let part = |(offset, source): (usize, CubeTensor)| {
            assert!(
                offset + numel::<CubeBackend>(&source) <= memory.numel,
                "a write must stay within its gather buffer"
            );
            // Burn casts the dtypes that the kernels do not support.
            let source = match takes(source.dtype) {
                true => source,
                false => cast::<CubeBackend>(source, memory.dtype),
            };
            (source, offset)
        };
        let parts: Vec<_> = parts.into_iter().map(part).collect();
        memory.last_reads().wait();
        #[cfg(test)]
        record(parts.iter().map(|(source, _)| source), [&memory.handle]);
        pack_into(&memory.device.client(), parts, &memory.slice(0));
    }

    fn decode_into(memory: &Memory, codes: CubeTensor, storage: StorageType) {
        let codes = contiguous(codes);
        let records = numel::<CubeBackend>(&codes) / storage.record_words();
        memory.last_reads().wait();
        #[cfg(test)]
        record([&codes], [&memory.handle]);
        let (source, target) = (BufferSlice::of(&codes), memory.slice(0));
        let numel = records * storage.record_len();
        decode_into(&codes.client, &source, storage, &target, numel);
    }

    fn poison(memory: &Memory, numel: usize) {
        #[cfg(test)]
        stream_order::writes(&memory.handle);
        fill(&memory.device.client(), &memory.slice(0), numel, f32::NAN);
    }

    fn release(memory: &Memory) {
        #[cfg(test)]
        stream_order::reads(&memory.handle);
        *memory.last_reads() = Fence::new(&memory.device);
    }

    fn fence(device: &CubeDevice) -> Fence {
        Fence::new(device)
    }

    #[cfg_attr(test, track_caller)]
    fn wait_for(fence: &Fence) {
        fence.wait();
    }

    fn detach(memory: &Memory, tensor: CubeTensor) -> CubeTensor {
        // Clones of a handle share a descriptor.
        let (of_tensor, of_buffer) = (&tensor.handle.memory, &memory.handle.memory);
        if !std::ptr::eq(of_tensor.descriptor(), of_buffer.descriptor()) {
            return tensor;
        }
        let (numel, shape) = (numel::<CubeBackend>(&tensor), tensor.shape());
        Self::copy_range(tensor, 0..numel, shape)
    }

    fn to_data(tensor: CubeTensor) -> TensorData {
        let (shape, dtype) = (tensor.shape(), tensor.dtype);
        TensorData::from_bytes(owned_bytes(read(tensor)), shape, dtype)
    }

    fn with_bytes(tensor: CubeTensor, f: &mut dyn FnMut(&[u8])) {
        f(&read(tensor));
    }

    #[cfg(feature = "mpi")]
    fn host_memory(_: &Memory) -> Option<NonNull<u8>> {
        None
    }

    #[cfg(feature = "mpi")]
    fn host(tensor: CubeTensor) -> burn::tensor::Bytes {
        CubeBackend::to_data(tensor).into_bytes()
    }

    #[cfg(feature = "nccl")]
    fn device_memory(memory: &Memory) -> Result<DeviceMemory, String> {
        memory.last_reads().wait();
        #[cfg(test)]
        stream_order::writes(&memory.handle);
        match &memory.device {
            // The request puts the wait into effect for work outside of CubeCL.
            CubeDevice::Cuda(device) => {
                let Lent { address, stream, held } = lend(device, memory.handle.clone())?;
                Ok(DeviceMemory { start: address, stream, _held: held })
            }
            #[cfg(all(test, feature = "cpu"))]
            CubeDevice::Cpu(_) => host_buffer(memory),
            other => Err(format!("NCCL needs CUDA devices, but {other:?} is none")),
        }
    }

    #[cfg(feature = "nccl")]
    fn alone_on_device<R: Send>(
        device: &CubeDevice,
        f: impl FnOnce() -> R + Send,
    ) -> Result<R, String> {
        match device {
            CubeDevice::Cuda(device) => on_device_thread(device, f),
            _ => Ok(f()),
        }
    }

    fn copy_range(tensor: CubeTensor, range: Range<usize>, shape: Shape) -> CubeTensor {
        let part = contiguous(flat(tensor, range));
        let target = empty(&part, shape, part.dtype);
        #[cfg(test)]
        record([&part], [&target.handle]);
        let numel = numel::<CubeBackend>(&part);
        copy(&part.client, &BufferSlice::of(&part), &BufferSlice::of(&target), numel, None);
        target
    }

    fn norm_sums(parts: &[(CubeTensor, Range<usize>)], norm: Norm) -> Vec<f64> {
        Self::sums(parts, norm).iter().map(|sums| sums.term(norm)).collect()
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use cubecl::device::CpuDevice;
    use fsdp_kernels::codes;

    use super::*;

    fn numbers(seed: usize, len: usize) -> Vec<f32> {
        (0..len).map(|at| ((at * 31 + seed * 7919) % 61) as f32 * 0.25).collect()
    }

    /// Compares codes that are decoded to a new tensor, and to a buffer, with the reference.
    #[test]
    fn codes_are_decoded_to_the_bits_of_the_reference() {
        let device = CubeDevice::Cpu(CpuDevice);
        let numel = 5 * 1024 + 77;
        for storage in [
            StorageType::INT8,
            StorageType::NF4,
            StorageType::Nf4 { block: 64, double_quant: false },
            StorageType::Nf4 { block: 512, double_quant: true },
        ] {
            let words = codes::encode(&numbers(3, numel), &(0..numel), storage);
            let expected = codes::decoded_elements(bytemuck::cast_slice(&words), storage, numel);
            let (len, records) = (words.len(), words.len() / storage.record_words());
            let data = codes::words_data(words, Shape::from([len]));
            let codes = CubeBackend::float_from_data(data, &device);
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let expected = match dtype {
                    DType::F32 => expected.clone(),
                    DType::BF16 => {
                        expected.iter().map(|it| half::bf16::from_f32(*it).to_f32()).collect()
                    }
                    _ => expected.iter().map(|it| half::f16::from_f32(*it).to_f32()).collect(),
                };
                let shape = Shape::from([numel]);
                let new = CubeBackend::decode(codes.clone(), storage, shape.clone(), dtype);
                let memory = CubeBackend::alloc(&device, records * storage.record_len(), dtype);
                CubeBackend::decode_into(&memory, codes.clone(), storage);
                for found in [new, CubeBackend::view(&memory, 0, shape)] {
                    let found = CubeBackend::to_data(cast::<CubeBackend>(found, DType::F32));
                    assert_eq!(found.as_slice::<f32>().unwrap(), expected, "{storage}, {dtype:?}");
                }
            }
        }
    }

    fn tensor(elements: Vec<f32>, dtype: DType) -> CubeTensor {
        let shape = [elements.len()];
        let device = CubeDevice::Cpu(CpuDevice);
        cast::<CubeBackend>(
            CubeBackend::float_from_data(TensorData::new(elements, shape), &device),
            dtype,
        )
    }

    /// Writes more small tensors than share a launch, with large and empty ones between them, of
    /// two dtypes, into a buffer that another thread released.
    #[test]
    fn write_copies_each_tensor_to_its_offset() {
        const GAP: usize = 3;
        let lens = [1, 64, 0, 70_000, 7].into_iter().cycle().take(40);
        let (mut at, mut parts, mut expected) = (GAP, Vec::new(), vec![-1.0; GAP]);
        for (seed, len) in lens.enumerate() {
            let dtype = [DType::F32, DType::BF16][seed % 2];
            parts.push((at, tensor(numbers(seed, len), dtype)));
            expected.extend(numbers(seed, len));
            expected.extend([-1.0; GAP]);
            at += len + GAP;
        }
        let numel = expected.len();
        for dtype in [DType::F32, DType::BF16] {
            let memory = CubeBackend::alloc(&CubeDevice::Cpu(CpuDevice), numel, dtype);
            fill(&memory.device.client(), &memory.slice(0), numel, -1.0);
            std::thread::scope(|scope| {
                scope.spawn(|| CubeBackend::release(&memory));
            });
            CubeBackend::write(&memory, parts.clone());
            // A rank alone has no parts of others to write.
            CubeBackend::write(&memory, Vec::new());
            let view = CubeBackend::view(&memory, 0, Shape::from([numel]));
            let found = CubeBackend::to_data(cast::<CubeBackend>(view, DType::F32));
            assert_eq!(found.as_slice::<f32>().unwrap(), expected, "{dtype:?}");
        }
    }
}
