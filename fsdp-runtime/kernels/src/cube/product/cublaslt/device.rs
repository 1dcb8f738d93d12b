//! Calls on the thread of a device.
//!
//! CubeCL gives each device a thread, on which it launches kernels in the order in which threads submit
//! them. A call is a task of that thread too. It resolves the addresses of its buffers as a launch does:
//! the stream of the calling thread first waits for the streams on which they were allocated. If a factor
//! carries the failure of the kernel that should have written it, or the call fails, then so do reads of
//! the target.

use std::ffi::c_void;
use std::sync::Arc;

use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::server::{BufferBinding, ServerError};
use cubecl_common::device::Device;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_environment::backtrace::BackTrace;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::id::KernelId;
use cubecl_runtime::runtime::Runtime;
use cubecl_server::stream::{ExecuteScope, WriteScoped};

use super::library::CublasLtError;
use super::plan::{Addresses, Handles, Plan};
use crate::cube::product::Buffers;
use crate::cube::product::call::Call;

type Server = <CudaRuntime as Runtime>::Server;

/// A call with everything that the device's thread needs.
pub(super) struct Issue {
    handles: &'static Handles,
    plan: Arc<Plan>,
    call: Call,
    a: BufferBinding,
    b: BufferBinding,
    target: BufferBinding,
    bias: Option<BufferBinding>,
    before: Option<BufferBinding>,
    sums: Option<BufferBinding>,
}

/// Names products in CubeCL's reports of failures.
struct Product;

impl Issue {
    pub(super) fn new(
        handles: &'static Handles,
        plan: Arc<Plan>,
        call: &Call,
        buffers: &Buffers,
    ) -> Self {
        let binding = |tensor: &burn_cubecl::tensor::CubeTensor| tensor.handle.clone().binding();
        Self {
            handles,
            plan,
            call: *call,
            a: binding(&buffers.a),
            b: binding(&buffers.b),
            target: binding(&buffers.target),
            bias: buffers.bias.as_ref().map(binding),
            before: buffers.before.as_ref().map(binding),
            sums: buffers.sums.as_ref().map(binding),
        }
    }

    /// Gives the call to the device's thread.
    pub(super) fn submit(self, device: &CudaDevice) {
        let stream = StreamId::current();
        DeviceHandle::<Server>::new(device.to_id()).submit(move |server| self.run(server, stream));
    }

    /// Runs the call. A failure is that of the target's buffer.
    fn run(self, server: &mut Server, stream: StreamId) {
        let reads: Vec<BufferBinding> =
            [&self.a, &self.b].into_iter().chain(&self.bias).cloned().collect();
        let writes: Vec<BufferBinding> =
            [&self.target].into_iter().chain(&self.before).chain(&self.sums).cloned().collect();
        // A target that is added to is read as well.
        let added = self.call.adds.then_some(&self.target);
        let kernel = KernelId::new::<Product>();
        let trusted = reads.iter().chain(added);
        let scope = ExecuteScope::launching(server, kernel, stream, trusted, writes.clone());
        let _ = scope.execute(|server| self.enqueue(server, stream, &reads, &writes));
    }

    fn enqueue(
        &self,
        server: &mut Server,
        stream: StreamId,
        reads: &[BufferBinding],
        writes: &[BufferBinding],
    ) -> Result<(), ServerError> {
        let failed = |error: CublasLtError| ServerError::Generic {
            reason: format!("{error}, for {:?}", self.call),
            backtrace: BackTrace::capture(),
        };
        self.handles.make_current().map_err(failed)?;
        let mut streams = server.write_streams().resolve(stream, reads.iter().chain(writes))?;
        let mut address = |binding: &BufferBinding| {
            let memory = &mut streams.get(&binding.stream).memory_management_gpu;
            let BufferBinding { memory: of, offset_start, offset_end, .. } = binding.clone();
            memory.get_resource(of, offset_start, offset_end).map(|resource| resource.ptr)
        };
        let first = Addresses {
            a: address(&self.a)?,
            b: address(&self.b)?,
            d: address(&self.target)?,
            bias: self.bias.as_ref().or(self.sums.as_ref()).map(&mut address).transpose()?,
            before: self.before.as_ref().map(&mut address).transpose()?,
        };
        let stream = streams.current().sys.cast::<c_void>();
        for number in 0..self.call.calls {
            let step = |at: usize| {
                let dtype = self.call.dtypes[usize::from(at == 2)];
                (number * self.call.call_strides[at] * dtype.size()) as u64
            };
            let addresses = Addresses {
                a: first.a + step(0),
                b: first.b + step(1),
                d: first.d + step(2),
                ..first
            };
            // SAFETY: this is the device's thread, with the context made current above. `Call::of` checked
            // that the matrices are within their buffers, which are in order on this stream.
            unsafe { self.handles.run(&self.plan, self.call.adds, &addresses, stream) }
                .map_err(failed)?;
        }
        Ok(())
    }
}
