//! A rank's GPU, the CUDA streams on which the rank's collectives run, and marks on them.
//!
//! The CUDA context is the device's primary one, which CubeCL and NCCL use too. A rank may run its
//! collectives on any thread, so every collective first makes the context current on its thread.

use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};

#[cfg(test)]
use super::fake;
use super::sys::cudaStream_t;
use crate::collectives::cuda::{CudaError, require_device};

/// A rank's GPU.
#[derive(Debug)]
pub(super) enum Gpu {
    /// A GPU, with a stream for collectives that wait on the host.
    Cuda { context: Arc<CudaContext>, own: Arc<CudaStream> },
    /// No GPU: the tests' NCCL works in host memory.
    #[cfg(test)]
    Host,
}

/// A stream of the rank's GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream(cudaStream_t);

/// A place on a stream: what was put there before it.
#[derive(Debug)]
pub(super) enum Mark {
    /// An event that the stream records.
    Cuda(CudaEvent),
    /// What the tests' NCCL was given.
    #[cfg(test)]
    Host(fake::Issued),
}

/// Converts an error of the driver.
fn refused(call: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Driver { call, code: error.0 as i32 }
}

impl Stream {
    /// Returns CubeCL's stream, given as a number.
    pub(super) fn of_cubecl(stream: u64) -> Self {
        Self(std::ptr::with_exposed_provenance_mut(stream as usize))
    }

    /// Returns the stream's handle, for NCCL.
    pub(super) fn handle(self) -> cudaStream_t {
        self.0
    }
}

impl Gpu {
    /// Opens the GPU with this index.
    pub(super) fn open(index: usize) -> Result<Self, CudaError> {
        require_device(index)?;
        let context = CudaContext::new(index).map_err(refused("cuDevicePrimaryCtxRetain"))?;
        let own = context.new_stream().map_err(refused("cuStreamCreate"))?;
        Ok(Self::Cuda { context, own })
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

    /// Returns the stream of collectives that wait on the host.
    pub(super) fn own_stream(&self) -> Stream {
        match self {
            Self::Cuda { own, .. } => Stream(own.cu_stream().cast()),
            #[cfg(test)]
            Self::Host => Stream(std::ptr::null_mut()),
        }
    }

    /// Marks what was put on the stream until now.
    ///
    /// # Safety
    ///
    /// The stream belongs to this GPU.
    pub(super) unsafe fn mark(&self, stream: Stream) -> Result<Mark, CudaError> {
        match self {
            Self::Cuda { context, .. } => {
                let event = context.new_event(None).map_err(refused("cuEventCreate"))?;
                let stream: CUstream = stream.0.cast();
                // SAFETY: the event was just created in the context that it makes current; the caller
                // promises that the stream belongs to it.
                unsafe { cudarc::driver::result::event::record(event.cu_event(), stream) }
                    .map_err(refused("cuEventRecord"))?;
                Ok(Mark::Cuda(event))
            }
            #[cfg(test)]
            Self::Host => Ok(Mark::Host(fake::issued())),
        }
    }
}

impl Mark {
    /// Returns whether the GPU has completed what was put on the stream before the mark. The GPU's
    /// context is current.
    pub(super) fn is_reached(&self) -> Result<bool, CudaError> {
        match self {
            Self::Cuda(event) => event.try_is_complete().map_err(refused("cuEventQuery")),
            #[cfg(test)]
            Self::Host(issued) => Ok(issued.is_done()),
        }
    }
}
