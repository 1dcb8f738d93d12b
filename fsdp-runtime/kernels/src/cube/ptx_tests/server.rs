//! A CubeCL server that compiles the kernels it is asked to launch, and runs none.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::sync::{Arc, Mutex};

use burn_std::Bytes;
use burn_std::device::{DeviceId, DeviceService, ServerUtilitiesHandle, ServiceId};
use burn_std::id::StreamId;
use cubecl::client::Client;
use cubecl::cuda::{CUDA_MAX_BINDINGS, CudaRuntime};
use cubecl::dry_run::LaunchMode;
use cubecl::features::{Features, MatmulFeatures, MmaConfig, Plane};
use cubecl::future::DynFut;
use cubecl::ir::nvidia::SmArch;
use cubecl::ir::{
    DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties,
};
use cubecl::logging::ServerLogger;
use cubecl::prelude::{CubeCount, KernelId};
use cubecl::profile::{ProfileDuration, TimingMethod};
use cubecl::server::{
    BufferBinding, CopyDescriptor, Handle, IoError, KernelArguments, MemoryLayout,
    MemoryLayoutDescriptor, MemoryLayoutPolicy, ProfileError, ProfilingToken, Server,
    ServerCommunication, ServerError, ServerUtilities,
};
use cubecl::zspace::Strides;
use cubecl::{Compiler, CubeKernel, MemoryAllocationMode, StreamMemoryReport, define_kernel};
use cubecl_llvm::nvptx::ptx_version::PtxVersion;
use cubecl_llvm::shared::lowered_features::{GpuTarget, restrict_features};
use cubecl_llvm::{LlvmTarget, PlironArtifact, PlironCompiler, PlironOptions};
use cubecl_runtime::memory_management::ManagedMemoryHandle;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::ServerStorage;
use cubecl_runtime::storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId};

use crate::ignore_poison::IgnorePoison;

/// CUDA version of the driver that the PTX is for: 12.8, the first that loads PTX for sm_100.
const DRIVER: i32 = 12080;

/// PTX of a kernel, or why there is none.
pub(super) type Ptx = Result<String, String>;

/// Kernels that a [`PtxServer`] was asked to launch.
#[derive(Debug, Default)]
pub(super) struct Launched {
    /// PTX of each kernel, compiled at its first launch.
    pub(super) ptx: HashMap<KernelId, Ptx>,
    /// Kernels launched since the set was last emptied.
    pub(super) recent: HashSet<KernelId>,
}

/// Compiles kernels as CubeCL's CUDA server does, with the same compiler, options and device
/// properties. Its memory has no bytes: writes are dropped, and reads return zeros.
#[derive(Debug)]
struct PtxServer {
    options: PlironOptions,
    utilities: Arc<ServerUtilities>,
    launched: Arc<Mutex<Launched>>,
}

/// Returns a client of a device with compute capability `arch`, such as 90, and the kernels that it
/// launches. At most one client for each `arch` may be created in a process.
pub(super) fn client(arch: u32) -> (Client, Arc<Mutex<Launched>>) {
    // No runtime of CubeCL has this number.
    let device = DeviceId { type_id: u16::MAX, index_id: arch as u16 };
    let (utilities, _) = ServerUtilities::init(
        ServiceId::of::<PtxServer>(device),
        "cuda",
        properties(arch),
        CudaRuntime::target_properties(),
        Arc::new(ServerLogger::default()),
        Contiguous,
    );
    let launched = Arc::default();
    let server = PtxServer {
        options: PlironOptions {
            sm_arch: Some(SmArch::new(arch, true)),
            ptx_version: PtxVersion::for_driver(DRIVER),
            grid_constants: true,
            ..PlironOptions::default()
        },
        utilities: Arc::new(utilities),
        launched: Arc::clone(&launched),
    };
    (Client::init(device, server), launched)
}

/// Returns the properties that CubeCL reports for an NVIDIA GPU, as far as kernels without atomics
/// depend on them.
fn properties(arch: u32) -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: CUDA_MAX_BINDINGS,
        max_shared_memory_size: 163 << 10,
        max_cube_count: (i32::MAX as u32, u16::MAX.into(), u16::MAX.into()),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(108),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: usize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let features = Features {
        plane: Plane::Ops | Plane::Sync | Plane::NonUniformControlFlow,
        memory_reinterpret: true,
        alignment: true,
        device_memory_scope: true,
        matmul: matrix_instructions(),
        ..Features::default()
    };
    let identity = DeviceIdentity {
        name: format!("compiler for sm_{arch}"),
        fingerprint: format!("ptx_sm{arch}"),
        physical: None,
    };
    let memory = MemoryDeviceProperties::new(16 << 30, 512);
    let mut properties =
        DeviceProperties::new(features, memory, hardware, TimingMethod::Device, identity);
    restrict_features(&mut properties, GpuTarget::Nvptx);
    properties
}

/// Returns the matrix instructions that the crate's kernels use.
fn matrix_instructions() -> MatmulFeatures {
    let halves = [FloatKind::F16, FloatKind::BF16].map(ElemType::Float);
    let cd_type = ElemType::Float(FloatKind::F32);
    let product = |half| MmaConfig { a_type: half, b_type: half, cd_type, m: 16, n: 8, k: 16 };
    MatmulFeatures {
        mma: halves.into_iter().map(product).collect(),
        ldmatrix: halves.into_iter().collect(),
        ..MatmulFeatures::default()
    }
}

/// Gives each allocation one contiguous tensor.
struct Contiguous;

impl MemoryLayoutPolicy for Contiguous {
    fn apply(
        &self,
        service: ServiceId,
        stream: StreamId,
        descriptors: &[MemoryLayoutDescriptor],
    ) -> (Handle, Vec<MemoryLayout>) {
        let [descriptor] = descriptors else { panic!("one tensor at a time is allocated") };
        let numel: usize = descriptor.shape.iter().product();
        assert_eq!(descriptor.shape.len(), 1, "buffers have one dimension");
        let handle = Handle::new(service, stream, (numel * descriptor.elem_size) as u64);
        (handle.clone(), vec![MemoryLayout::new(handle, Strides::from([1]))])
    }
}

impl PtxServer {
    fn compile(&self, kernel: &dyn CubeKernel) -> Ptx {
        let mut compiler = PlironCompiler { target: LlvmTarget::Nvptx };
        let definition = define_kernel(kernel).map_err(|error| error.to_string())?;
        match compiler.compile(definition, &self.options) {
            Ok(PlironArtifact::NvptxCode(module)) => {
                let bytes: Vec<u8> = module.ptx.iter().map(|&byte| byte as u8).collect();
                let text = CStr::from_bytes_until_nul(&bytes).map_err(|error| error.to_string())?;
                // The launch gives the memory, so the assembler does not know of it.
                let shared = module.shared_memory_size;
                Ok(format!("{}\n// {shared} bytes smem", text.to_string_lossy()))
            }
            Ok(_) => Err("the compiler returned no PTX".into()),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl Server for PtxServer {
    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        _: CubeCount,
        _: KernelArguments,
        _: StreamId,
        _: LaunchMode,
    ) {
        let id = kernel.id();
        let mut launched = self.launched.lock().ignore_poison();
        if !launched.ptx.contains_key(&id) {
            launched.ptx.insert(id.clone(), self.compile(&*kernel));
        }
        launched.recent.insert(id);
    }

    fn read(
        &mut self,
        descriptors: Vec<CopyDescriptor>,
        _: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let zeros = |descriptor: CopyDescriptor| {
            let bytes = descriptor.shape.iter().product::<usize>() * descriptor.elem_size;
            Bytes::from_bytes_vec(vec![0; bytes])
        };
        let zeros = descriptors.into_iter().map(zeros).collect();
        Box::pin(std::future::ready(Ok(zeros)))
    }

    fn initialize_memory(
        &mut self,
        _: ManagedMemoryHandle,
        _: u64,
        _: StreamId,
    ) -> Result<(), ServerError> {
        Ok(())
    }

    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}

    fn sync(&mut self, _: Vec<BufferBinding>, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn check(&mut self, _: Vec<BufferBinding>, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn logger(&self) -> Arc<ServerLogger> {
        Arc::clone(&self.utilities.logger)
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        Arc::clone(&self.utilities)
    }

    fn memory_report(&mut self, _: StreamId) -> Option<StreamMemoryReport> {
        None
    }

    fn memory_cleanup(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        unreachable!("nothing runs that could be timed")
    }

    fn end_profile(
        &mut self,
        _: StreamId,
        _: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        unreachable!("nothing runs that could be timed")
    }

    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}
}

impl DeviceService for PtxServer {
    fn init(_: DeviceId) -> Self {
        unreachable!("`client` registers the server")
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        Arc::clone(&self.utilities) as ServerUtilitiesHandle
    }
}

impl ServerCommunication for PtxServer {}

/// [`Client::init`] takes only servers whose buffers have addresses.
impl ServerStorage for PtxServer {
    type Storage = NoStorage;

    fn get_resource(
        &mut self,
        _: BufferBinding,
        _: StreamId,
    ) -> Result<ManagedResource<()>, ServerError> {
        unreachable!("buffers have no memory")
    }
}

/// Storage that is never created.
enum NoStorage {}

impl ComputeStorage for NoStorage {
    type Resource = ();

    fn alignment(&self) -> usize {
        match *self {}
    }

    fn get(&mut self, _: &StorageHandle) -> Result<(), IoError> {
        match *self {}
    }

    fn alloc(&mut self, _: u64) -> Result<StorageHandle, IoError> {
        match *self {}
    }

    fn dealloc(&mut self, _: StorageId) {
        match *self {}
    }

    fn flush(&mut self) {
        match *self {}
    }

    fn bytes_allocated(&self) -> u64 {
        match *self {}
    }
}
