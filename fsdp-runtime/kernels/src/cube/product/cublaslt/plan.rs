//! Descriptors of calls, and the algorithms that the library's heuristic chooses for them. Nothing is timed.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::CudaContext;

use super::descriptors::{DESC_AUXILIARY, DESC_BIAS, NOT_SUPPORTED, checked, first_taken, refused};
use super::library::{CublasLtError, Heuristic, Library, Opaque, library};
use crate::IgnorePoison;
use crate::cube::product::call::Call;

/// Bytes of scratch memory that an algorithm may use: what the library's documentation advises for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Most algorithms that are asked for. The library may refuse one when it is run (a known issue of cuBLAS 13.5).
const ALGORITHMS: usize = 4;

/// A pointer that the library gave out.
#[derive(Clone, Copy)]
struct Pointer(Opaque);

// SAFETY: the library may be called from any thread; what is behind the pointers changes only in the calls
// on the device's thread.
unsafe impl Send for Pointer {}
// SAFETY: as above.
unsafe impl Sync for Pointer {}

/// What an algorithm depends on.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    call: Call,
    alignment: [u32; 3],
    tf32: bool,
}

/// The library's state for one GPU, which lives as long as the process.
pub(super) struct Handles {
    library: &'static Library,
    handle: Pointer,
    context: Arc<CudaContext>,
    /// `None` for calls that the library does not take.
    plans: Mutex<HashMap<Key, Option<Arc<Plan>>>>,
    /// Address of the scratch memory of each stream.
    workspaces: Mutex<HashMap<usize, u64>>,
}

/// A call with its descriptors and its algorithms. They are never freed: a model has few shapes.
pub(super) struct Plan {
    desc: Pointer,
    a: Pointer,
    b: Pointer,
    d: Pointer,
    /// The fastest first, as the heuristic has them.
    algorithms: Vec<Heuristic>,
    /// Number of the first algorithm that has not been refused.
    first: AtomicUsize,
}

/// Addresses of a call's buffers.
pub(super) struct Addresses {
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) d: u64,
    /// The bias, or the sums that are written in its place.
    pub(super) bias: Option<u64>,
    pub(super) before: Option<u64>,
}

impl Handles {
    /// Creates the state for the GPU with this index.
    pub(super) fn new(index: usize) -> Result<Self, CublasLtError> {
        let library = library()?;
        let context = CudaContext::new(index).map_err(refused("cuDevicePrimaryCtxRetain"))?;
        context.bind_to_thread().map_err(refused("cuCtxSetCurrent"))?;
        let mut handle = null_mut();
        // SAFETY: the function writes a handle; the GPU's context is current.
        checked("cublasLtCreate", unsafe { (library.cublasLtCreate)(&raw mut handle) })?;
        Ok(Self {
            library,
            handle: Pointer(handle),
            context,
            plans: Mutex::default(),
            workspaces: Mutex::default(),
        })
    }

    /// Makes the GPU's context current on this thread.
    pub(super) fn make_current(&self) -> Result<(), CublasLtError> {
        self.context.bind_to_thread().map_err(refused("cuCtxSetCurrent"))
    }

    /// Returns the plan of a call, given the alignments of A, B and all other buffers in bytes. Returns
    /// `None` if the library has no algorithm for it.
    pub(super) fn plan(&self, call: &Call, alignment: [u32; 3]) -> Option<Arc<Plan>> {
        let tf32 = crate::products::allows_tf32();
        let mut plans = self.plans.lock().ignore_poison();
        let key = Key { call: *call, alignment, tf32 };
        if let Some(plan) = plans.get(&key) {
            return plan.clone();
        }
        let plan = match self.new_plan(call, alignment, tf32) {
            Ok(plan) => Some(Arc::new(plan)),
            Err(error) => {
                let is_alike = |(other, plan): (&Key, &Option<Arc<Plan>>)| {
                    let Call { dtypes, epilogue, .. } = other.call;
                    plan.is_none() && (dtypes, epilogue) == (call.dtypes, call.epilogue)
                };
                let message =
                    format!("cuBLASLt does not take {call:?}, kernels do its work: {error}");
                match plans.iter().any(is_alike) {
                    true => tracing::debug!("{message}"),
                    false => tracing::warn!("{message}"),
                }
                None
            }
        };
        plans.insert(key, plan.clone());
        plan
    }

    fn new_plan(
        &self,
        call: &Call,
        alignment: [u32; 3],
        tf32: bool,
    ) -> Result<Plan, CublasLtError> {
        let library = self.library;
        self.make_current()?;
        let desc = library.descriptor(call, tf32)?;
        let [a, b, d] =
            [library.layout(call, 0)?, library.layout(call, 1)?, library.layout(call, 2)?];
        let preference = library.preference(WORKSPACE, alignment)?;
        let mut found = [Heuristic::default(); ALGORITHMS];
        let mut count: c_int = 0;
        // SAFETY: the descriptors and layouts were created above, and the results fit.
        let status = unsafe {
            (library.cublasLtMatmulAlgoGetHeuristic)(
                self.handle.0,
                desc,
                a,
                b,
                d,
                d,
                preference,
                ALGORITHMS as c_int,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        // SAFETY: the preference was created above, and is not used again.
        unsafe { (library.cublasLtMatmulPreferenceDestroy)(preference) };
        checked("cublasLtMatmulAlgoGetHeuristic", status)?;
        let found = found.into_iter().take(count as usize);
        let algorithms: Vec<_> = found.filter(|algorithm| algorithm.state == 0).collect();
        if algorithms.is_empty() {
            checked("cublasLtMatmulAlgoGetHeuristic", NOT_SUPPORTED)?;
        }
        let [desc, a, b, d] = [desc, a, b, d].map(Pointer);
        Ok(Plan { desc, a, b, d, algorithms, first: AtomicUsize::new(0) })
    }

    /// Runs a plan on a stream.
    ///
    /// # Safety
    ///
    /// The caller is the device's thread and has made the GPU's context current. The addresses are those of
    /// buffers on the GPU that hold the plan's matrices, and are valid in the order of the stream.
    pub(super) unsafe fn run(
        &self,
        plan: &Plan,
        adds: bool,
        addresses: &Addresses,
        stream: *mut c_void,
    ) -> Result<(), CublasLtError> {
        if let Some(bias) = addresses.bias {
            self.library.describe(plan.desc.0, DESC_BIAS, &bias)?;
        }
        if let Some(before) = addresses.before {
            self.library.describe(plan.desc.0, DESC_AUXILIARY, &before)?;
        }
        let (one, beta) = (1f32, f32::from(u8::from(adds)));
        let Addresses { a, b, d, .. } = *addresses;
        let first = plan.first.load(Ordering::Relaxed);
        let run = |algorithm: &Heuristic| {
            let workspace = if algorithm.workspace > 0 { self.workspace(stream)? } else { 0 };
            // SAFETY: the caller vouches for the addresses and the context; the plan's descriptors live as long
            // as the process.
            let status = unsafe {
                (self.library.cublasLtMatmul)(
                    self.handle.0,
                    plan.desc.0,
                    (&raw const one).cast(),
                    a,
                    plan.a.0,
                    b,
                    plan.b.0,
                    (&raw const beta).cast(),
                    d,
                    plan.d.0,
                    d,
                    plan.d.0,
                    algorithm.algorithm.as_ptr().cast(),
                    workspace,
                    algorithm.workspace,
                    stream,
                )
            };
            checked("cublasLtMatmul", status)
        };
        let taken = first_taken(&plan.algorithms, first, run)?;
        plan.first.store(taken, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the scratch memory of a stream, whose calls run one after the other.
    fn workspace(&self, stream: *mut c_void) -> Result<u64, CublasLtError> {
        let mut workspaces = self.workspaces.lock().ignore_poison();
        if let Some(&workspace) = workspaces.get(&(stream as usize)) {
            return Ok(workspace);
        }
        // SAFETY: the GPU's context is current. The memory is never freed.
        let workspace = unsafe { cudarc::driver::result::malloc_sync(WORKSPACE) };
        let workspace = workspace.map_err(refused("cuMemAlloc"))?;
        workspaces.insert(stream as usize, workspace);
        Ok(workspace)
    }
}
