//! Buffers and streams of CUDA devices, for libraries beside CubeCL.

use std::any::Any;

use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::server::{Handle, ServerError};
use cubecl_common::device::Device;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::ServerStorage;
use cubecl_server::stream::WriteScoped;

type Server = <CudaRuntime as Runtime>::Server;

/// A buffer of a CUDA device, and the stream on which a library may use it.
pub struct Lent {
    /// Device address of the buffer's first byte.
    pub address: u64,
    /// The `CUstream` of the thread that called [`lend`], as a number. It lives as long as the device.
    pub stream: u64,
    /// Keeps the buffer where it is.
    pub held: Box<dyn Any + Send>,
}

/// Lends a buffer to a library that the calling thread uses.
///
/// All that the thread has launched is on the stream when this returns, and the stream waits for the stream
/// on which the buffer was allocated, as it does before a kernel. Work that the library puts on the stream
/// is in order with the thread's kernels. It must be on the stream before the thread launches the next one.
///
/// # Errors
///
/// Returns CubeCL's error if the device has failed, or if the kernel that should have written the buffer has.
pub fn lend(device: &CudaDevice, buffer: Handle) -> Result<Lent, String> {
    let thread = StreamId::current();
    let lent = DeviceHandle::<Server>::new(device.to_id()).submit_blocking(move |server| {
        let held = server.get_resource(buffer.binding(), thread)?;
        let stream = server.write_streams().resolve(thread, std::iter::empty())?.current().sys;
        let (address, stream) = (held.resource().ptr, stream.expose_provenance() as u64);
        Ok(Lent { address, stream, held: Box::new(held) })
    });
    lent.map_err(|error| format!("CubeCL: {error:?}"))?
        .map_err(|error: ServerError| format!("CubeCL: {error}"))
}

/// Runs `f` on the device's thread, which does nothing else meanwhile: it allocates, frees and launches nothing.
///
/// # Errors
///
/// Says that the device's thread has ended, or what `f` has panicked with.
pub fn on_device_thread<R: Send>(
    device: &CudaDevice,
    f: impl FnOnce() -> R + Send,
) -> Result<R, String> {
    let done = DeviceHandle::<Server>::new(device.to_id()).exclusive(f);
    done.map_err(|error| {
        format!("CubeCL's device thread: {}", error.message().unwrap_or("it has ended"))
    })
}
