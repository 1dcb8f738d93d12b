//! Reports which buffers the kernels of CubeCL devices read and write, for a test that checks their
//! order between streams, and how many bytes, for a test that adds them up.

use std::sync::OnceLock;

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;

/// Functions that are called on the thread that issues a kernel, before its launch for the buffers
/// that it reads, and after it for those that it writes.
#[derive(Clone, Copy, Debug)]
pub struct Observer {
    /// Called with a buffer that is read.
    pub reads: fn(&Handle),
    /// Called with a buffer that is written.
    pub writes: fn(&Handle),
}

static OBSERVER: OnceLock<Observer> = OnceLock::new();

/// Sets the observer of the process. A second call has no effect.
pub fn observe(observer: Observer) {
    OBSERVER.get_or_init(|| observer);
}

static BYTES: OnceLock<fn(u64)> = OnceLock::new();

/// Hands the number of bytes that each argument of a kernel has to `add`, from now on until the process ends, on
/// the thread that is about to launch the kernel. Of a slice of a longer buffer, only the bytes of the slice
/// count. A second call has no effect.
pub fn observe_bytes(add: fn(u64)) {
    BYTES.get_or_init(|| add);
}

/// Reports an argument of a kernel that is about to be launched.
pub(crate) fn bound(elements: usize, dtype: DType) {
    if let Some(add) = BYTES.get() {
        add((elements * dtype.size()) as u64);
    }
}

/// Reports that the calling thread's stream reads tensors.
pub(crate) fn read<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) {
    if let Some(observer) = OBSERVER.get() {
        tensors.into_iter().for_each(|tensor| (observer.reads)(&tensor.handle));
    }
}

/// Reports that the calling thread's stream writes buffers.
pub(crate) fn written<'a>(buffers: impl IntoIterator<Item = &'a Handle>) {
    if let Some(observer) = OBSERVER.get() {
        buffers.into_iter().for_each(observer.writes);
    }
}
