//! Products of matrices.
//!
//! On CUDA devices they are calls of cuBLASLt, which CubeCL's own products do not reach in speed, and which
//! needs no tuning. The calls run on the device's thread of CubeCL and on the stream of the calling thread:
//! they are in order with kernels as kernels are with each other, and nothing waits on the host. Without the
//! library, and for layouts that it does not take, Burn's products run.

#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a library reads the calls"))]
mod call;
#[cfg(feature = "cpu")]
mod counted;
#[cfg(feature = "cuda")]
mod cublaslt;
#[cfg(all(test, feature = "cpu", feature = "flex"))]
mod stand_in;
#[cfg(all(test, feature = "cpu", feature = "flex"))]
mod tests;

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

use self::call::{Call, Epilogue, Operands};
#[cfg(feature = "cpu")]
pub use self::counted::count_products;
#[cfg(feature = "cuda")]
pub use self::cublaslt::{CUBLASLT, CUBLASLT_LIBRARY, CublasLtError, cublaslt_version};
use super::copy::exclusive;
use super::device::compute_capability;
use super::linear;
use super::tensors::{contiguous, empty};
use crate::accesses;
use crate::linear::LinearActivation;

/// Buffers of a call: the factors as [`Call`] names them, the target, and what the epilogue reads or writes.
struct Buffers {
    a: CubeTensor,
    b: CubeTensor,
    target: CubeTensor,
    bias: Option<CubeTensor>,
    before: Option<CubeTensor>,
    sums: Option<CubeTensor>,
}

impl Buffers {
    fn new(Operands { a, b }: Operands, target: CubeTensor) -> Self {
        Self { a, b, target, bias: None, before: None, sums: None }
    }

    /// Returns the buffers that a call reads, but for a target that is added to.
    fn read(&self) -> impl Iterator<Item = &CubeTensor> {
        [&self.a, &self.b].into_iter().chain(&self.bias)
    }

    /// Returns the buffers that a call writes.
    fn written(&self) -> impl Iterator<Item = &CubeTensor> {
        [&self.target].into_iter().chain(&self.before).chain(&self.sums)
    }
}

/// Returns whether products on the device are calls of a library, which take a bias and an activation.
pub(super) fn by_library(device: &CubeDevice) -> bool {
    #[cfg(all(test, feature = "cpu", feature = "flex"))]
    if stand_in::is_on() && matches!(device, CubeDevice::Cpu(_)) {
        return true;
    }
    #[cfg(feature = "cpu")]
    if matches!(device, CubeDevice::Cpu(_)) {
        return counted::is_on();
    }
    #[cfg(feature = "cuda")]
    if let CubeDevice::Cuda(device) = device {
        return cublaslt::serves(device);
    }
    let _ = device;
    false
}

/// Issues a call. Returns whether the library takes it.
fn issue(call: &Call, buffers: &Buffers) -> bool {
    let issued = issue_on(&buffers.target.device, call, buffers);
    if issued {
        accesses::read(buffers.read());
        accesses::written(buffers.written().map(|tensor| &tensor.handle));
    }
    issued
}

fn issue_on(device: &CubeDevice, call: &Call, buffers: &Buffers) -> bool {
    #[cfg(all(test, feature = "cpu", feature = "flex"))]
    if stand_in::is_on() && matches!(device, CubeDevice::Cpu(_)) {
        return stand_in::issue(call, buffers);
    }
    #[cfg(feature = "cpu")]
    if matches!(device, CubeDevice::Cpu(_)) {
        return counted::issue(call);
    }
    #[cfg(feature = "cuda")]
    if let CubeDevice::Cuda(device) = device {
        return cublaslt::issue(device, call, buffers);
    }
    let _ = (device, call, buffers);
    false
}

/// Implements [`Kernels::product`](crate::Kernels::product).
pub(super) fn product(factors: [CubeTensor; 2], dtype: DType) -> CubeTensor {
    library_product(&factors, dtype, &Epilogue::None, None).map_or_else(
        || {
            let [a, b] = factors;
            matmul(a, b, None, MatmulStrategy::default(), dtype)
                .expect("every device has a product of matrices")
        },
        |(product, _)| product,
    )
}

/// Implements [`Kernels::add_product`](crate::Kernels::add_product).
pub(super) fn add_product(target: CubeTensor, factors: [CubeTensor; 2]) -> CubeTensor {
    let mut target = target;
    if by_library(&target.device)
        && let Some((mut call, operands)) = Call::of(&factors, target.dtype)
    {
        call.adds = true;
        target = exclusive(target);
        let buffers = Buffers::new(operands, target.clone());
        if issue(&call, &buffers) {
            return target;
        }
    }
    let product = product(factors, target.dtype);
    CubeBackend::float_add(target, product)
}

/// Implements [`Kernels::biased_product`](crate::Kernels::biased_product).
pub(super) fn biased_product(
    factors: [CubeTensor; 2],
    bias: Option<CubeTensor>,
    activation: LinearActivation,
) -> (CubeTensor, Option<CubeTensor>) {
    let dtype = factors[0].dtype;
    if activation == LinearActivation::GeluTanh
        && bias.is_some()
        && fuses_gelu(&factors[0])
        && let Some((output, before)) =
            library_product(&factors, dtype, &Epilogue::BiasAndGelu, bias.clone())
    {
        return (output, before);
    }
    let epilogue = if bias.is_some() { Epilogue::Bias } else { Epilogue::None };
    let sums = match library_product(&factors, dtype, &epilogue, bias.clone()) {
        Some((sums, _)) => sums,
        None => linear::forward(product(factors, dtype), bias, LinearActivation::Identity),
    };
    match activation {
        LinearActivation::Identity => (sums, None),
        _ => (linear::forward(sums.clone(), None, activation), Some(sums)),
    }
}

/// Returns whether an epilogue with GELU is faster than a kernel after the product. Before Hopper it is slower, as
/// llm.c has measured.
fn fuses_gelu(tensor: &CubeTensor) -> bool {
    compute_capability(&tensor.client).is_none_or(|capability| capability >= 90)
}

/// Returns the product with its epilogue, and the sums before the activation if the epilogue has one.
/// Returns `None` if the library does not take the factors.
fn library_product(
    factors: &[CubeTensor; 2],
    dtype: DType,
    epilogue: &Epilogue,
    bias: Option<CubeTensor>,
) -> Option<(CubeTensor, Option<CubeTensor>)> {
    if !by_library(&factors[0].device) {
        return None;
    }
    let (mut call, operands) = Call::of(factors, dtype)?;
    call.epilogue = *epilogue;
    if !call.is_taken() {
        return None;
    }
    let new = || empty(&factors[0], output_shape(factors), dtype);
    let mut buffers = Buffers::new(operands, new());
    buffers.before = (*epilogue == Epilogue::BiasAndGelu).then(new);
    buffers.bias = bias.map(contiguous);
    issue(&call, &buffers).then_some((buffers.target, buffers.before))
}

/// Implements [`Kernels::affine_gradients`](crate::Kernels::affine_gradients). Returns `None` if the
/// library does not take the factors.
pub(super) fn affine_gradients(
    input: &CubeTensor,
    grad: &CubeTensor,
    dtype: DType,
) -> Option<[CubeTensor; 2]> {
    if !by_library(&grad.device) {
        return None;
    }
    let factors = [CubeBackend::float_transpose(input.clone()), grad.clone()];
    let (mut call, operands) = Call::of(&factors, dtype)?;
    call.epilogue = Epilogue::SumsOfA;
    if !call.is_taken() {
        return None;
    }
    let mut buffers = Buffers::new(operands, empty(grad, output_shape(&factors), dtype));
    buffers.sums = Some(empty(grad, Shape::from([grad.shape()[1]]), dtype));
    issue(&call, &buffers)
        .then_some(buffers)
        .and_then(|buffers| Some([buffers.target, buffers.sums?]))
}

/// Returns the shape of a product.
fn output_shape([a, b]: &[CubeTensor; 2]) -> Shape {
    let mut shape = a.shape();
    let last = shape.num_dims() - 1;
    shape[last] = b.shape()[last];
    shape
}
