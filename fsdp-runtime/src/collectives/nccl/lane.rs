//! A GPU and the stream on which a rank's collectives run.
//!
//! The context is the device's primary one, which CubeCL and NCCL use too. Calls come from whichever
//! thread a rank runs its collectives on, so each first makes the context current there.

use std::sync::Arc;

use cudarc::driver::sys::{CUresult, cuStreamQuery};
use cudarc::driver::{CudaContext, CudaStream, DriverError};

use super::sys::cudaStream_t;
use crate::collectives::cuda::{CudaError, require_device};

/// Where collectives run.
#[derive(Debug)]
pub(crate) enum Lane {
    /// A stream of a GPU.
    Cuda { context: Arc<CudaContext>, stream: Arc<CudaStream> },
    /// The calling thread: tests have a NCCL of their own, on the host.
    #[cfg(test)]
    Host,
}

fn refused(call: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Driver { call, code: error.0 as i32 }
}

impl Lane {
    /// A stream of the GPU of that index.
    pub(crate) fn new(index: usize) -> Result<Self, CudaError> {
        require_device(index)?;
        let context = CudaContext::new(index).map_err(refused("cuDevicePrimaryCtxRetain"))?;
        let stream = context.new_stream().map_err(refused("cuStreamCreate"))?;
        Ok(Self::Cuda { context, stream })
    }

    /// What no other GPU has.
    pub(crate) fn uuid(&self) -> Result<[u8; 16], CudaError> {
        match self {
            Self::Cuda { context, .. } => {
                let uuid = context.uuid().map_err(refused("cuDeviceGetUuid"))?;
                Ok(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]))
            }
            #[cfg(test)]
            Self::Host => Ok([0; 16]),
        }
    }

    /// Makes its context current on this thread.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        match self {
            Self::Cuda { context, .. } => {
                context.bind_to_thread().map_err(refused("cuCtxSetCurrent"))
            }
            #[cfg(test)]
            Self::Host => Ok(()),
        }
    }

    /// The stream, as NCCL takes it.
    pub(super) fn stream(&self) -> cudaStream_t {
        match self {
            Self::Cuda { stream, .. } => stream.cu_stream().cast(),
            #[cfg(test)]
            Self::Host => std::ptr::null_mut(),
        }
    }

    /// Whether all that was queued is done.
    pub(super) fn done(&self) -> Result<bool, CudaError> {
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
