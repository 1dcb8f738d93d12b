//! A rank's GPU, and the CUDA stream on which the rank's collectives run.
//!
//! The CUDA context is the device's primary one, which CubeCL and NCCL use too. A rank may run its
//! collectives on any thread, so every collective first makes the context current on its thread.

use std::ffi::c_uint;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUresult, CUstreamWaitValue_flags, cuStreamQuery, cuStreamWaitValue32_v2,
};
use cudarc::driver::{CudaContext, CudaStream, DriverError};

use super::ready_word::Ready;
use super::sys::cudaStream_t;
use crate::collectives::cuda::{CudaError, require_device};

/// The stream on which a rank's collectives run.
#[derive(Debug)]
pub(super) enum CollectiveStream {
    /// A stream of a GPU.
    Cuda { context: Arc<CudaContext>, stream: Arc<CudaStream> },
    /// No stream: the tests' NCCL works in host memory.
    #[cfg(test)]
    Host,
}

/// Converts an error of the driver.
fn refused(call: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Driver { call, code: error.0 as i32 }
}

impl CollectiveStream {
    /// Creates a stream on the GPU with this index.
    pub(super) fn new(index: usize) -> Result<Self, CudaError> {
        require_device(index)?;
        let context = CudaContext::new(index).map_err(refused("cuDevicePrimaryCtxRetain"))?;
        let stream = context.new_stream().map_err(refused("cuStreamCreate"))?;
        Ok(Self::Cuda { context, stream })
    }

    /// Returns the unique identifier of the GPU.
    pub(super) fn uuid(&self) -> Result<[u8; 16], CudaError> {
        match self {
            Self::Cuda { context, .. } => {
                let uuid = context.uuid().map_err(refused("cuDeviceGetUuid"))?;
                Ok(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]))
            }
            #[cfg(test)]
            Self::Host => Ok([0; 16]),
        }
    }

    /// Makes the GPU's context current on this thread.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        match self {
            Self::Cuda { context, .. } => {
                context.bind_to_thread().map_err(refused("cuCtxSetCurrent"))
            }
            #[cfg(test)]
            Self::Host => Ok(()),
        }
    }

    /// Returns the stream's handle, for NCCL.
    pub(super) fn handle(&self) -> cudaStream_t {
        match self {
            Self::Cuda { stream, .. } => stream.cu_stream().cast(),
            #[cfg(test)]
            Self::Host => std::ptr::null_mut(),
        }
    }

    /// Makes later work on the stream wait until a word of device memory has certain bits.
    pub(super) fn wait_for(&self, ready: Ready) -> Result<(), CudaError> {
        match self {
            Self::Cuda { stream, .. } => {
                let flags = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as c_uint;
                // SAFETY: the stream lives as long as `self`; the caller keeps the word, which is
                // aligned as a buffer of CubeCL, until the work that follows has run.
                let code = unsafe {
                    cuStreamWaitValue32_v2(stream.cu_stream(), ready.at, ready.bits, flags)
                };
                match code {
                    CUresult::CUDA_SUCCESS => Ok(()),
                    error => Err(refused("cuStreamWaitValue32")(DriverError(error))),
                }
            }
            #[cfg(test)]
            Self::Host => {
                let word = std::ptr::with_exposed_provenance::<u32>(ready.at as usize);
                // SAFETY: the caller keeps the word, which is in host memory in tests.
                let found = unsafe { word.read() };
                assert_eq!(found, ready.bits, "work in host memory has run when it was issued");
                Ok(())
            }
        }
    }

    /// Returns whether the GPU has completed all work queued on the stream.
    pub(super) fn is_done(&self) -> Result<bool, CudaError> {
        match self {
            Self::Cuda { stream, .. } => {
                // SAFETY: the stream lives as long as `self`.
                match unsafe { cuStreamQuery(stream.cu_stream()) } {
                    CUresult::CUDA_SUCCESS => Ok(true),
                    CUresult::CUDA_ERROR_NOT_READY => Ok(false),
                    error => Err(refused("cuStreamQuery")(DriverError(error))),
                }
            }
            #[cfg(test)]
            Self::Host => Ok(true),
        }
    }
}
