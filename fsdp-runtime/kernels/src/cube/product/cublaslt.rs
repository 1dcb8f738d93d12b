//! Calls of cuBLASLt.

mod descriptors;
mod device;
mod library;
mod plan;

use std::sync::OnceLock;

use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaDevice;

use self::device::Issue;
pub use self::library::{CUBLASLT, CUBLASLT_LIBRARY, CublasLtError, cublaslt_version};
use self::plan::Handles;
use super::Buffers;
use super::call::{Call, Epilogue};

/// Returns whether products on the device are calls of the library. If they are not, the reason was
/// reported once, as a warning.
pub(super) fn serves(device: &CudaDevice) -> bool {
    handles(device).is_some()
}

/// Issues a call. Returns whether the library takes it.
pub(super) fn issue(device: &CudaDevice, call: &Call, buffers: &Buffers) -> bool {
    let Some(handles) = handles(device) else { return false };
    let alignment = alignment(call, buffers);
    // The heuristic is not told where the bias is, and some kernels read whole vectors of it.
    if call.epilogue != Epilogue::None && u64::from(alignment[2]) < ALIGNMENT {
        return false;
    }
    let Some(plan) = handles.plan(call, alignment) else { return false };
    Issue::new(handles, plan, call, buffers).submit(device);
    true
}

/// Most GPUs of a machine whose products are calls of the library.
const MOST_DEVICES: usize = 64;

/// Returns the library's state for the device, which is created once.
fn handles(device: &CudaDevice) -> Option<&'static Handles> {
    static HANDLES: [OnceLock<Option<Handles>>; MOST_DEVICES] =
        [const { OnceLock::new() }; MOST_DEVICES];
    let new = || match Handles::new(device.index) {
        Ok(handles) => Some(handles),
        Err(CublasLtError::TurnedOff) => None,
        Err(error) => {
            tracing::warn!("products of matrices are CubeCL's, which are slower: {error}");
            None
        }
    };
    HANDLES.get(device.index)?.get_or_init(new).as_ref()
}

/// Most bytes by whose multiples addresses are told apart. The library's kernels need no more, and so a
/// product does not depend on where its tensors lie.
const ALIGNMENT: u64 = 16;

/// Returns the number of bytes of which the addresses of the factors, and those of all targets and the
/// bias, are multiples.
fn alignment(call: &Call, buffers: &Buffers) -> [u32; 3] {
    let of = |at: usize, tensors: &[Option<&CubeTensor>]| {
        let offsets =
            tensors.iter().flatten().map(|tensor| tensor.handle.offset_start.unwrap_or(0));
        let dtype = call.dtypes[usize::from(at == 2)];
        let step = (call.call_strides[at] * dtype.size()) as u64;
        let all = offsets.fold(ALIGNMENT | step, |all, offset| all | offset);
        1 << all.trailing_zeros()
    };
    let Buffers { a, b, target, bias, before, sums } = buffers;
    let others = [Some(target), bias.as_ref(), before.as_ref(), sums.as_ref()];
    [of(0, &[Some(a)]), of(1, &[Some(b)]), of(2, &others)]
}
