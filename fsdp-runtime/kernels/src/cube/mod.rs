//! Kernels on CubeCL devices: `#[cube]` functions, and the functions that launch them.
//!
//! A launch splits the elements of a tensor into at most two `Span`s: the widest
//! vectors that the device loads at once, then the remaining single elements. The vectors are
//! narrower where the device requires aligned vectors and a buffer offset is not a multiple of
//! their width.
//!
//! CubeCL's compilers may fuse a product with a sum into one operation that rounds once. Where a
//! kernel must give the bits of its Flex implementation, which rounds twice, products pass through
//! `rounding::rounded`.
//!
//! "Thread" means a thread of a kernel, which CubeCL calls a unit.

mod attention;
mod attention_kernels;
mod buffer_slice;
mod copy;
mod cross_entropy;
mod cross_entropy_kernels;
mod decode;
mod device;
mod dropout;
mod encode;
mod flash;
mod gelu;
mod iota;
mod kernels;
mod launch;
#[cfg(feature = "cuda")]
mod lend;
mod linear;
mod mean;
mod normalization;
mod normalization_kernels;
mod optim;
mod philox;
mod product;
#[cfg(all(test, feature = "cuda"))]
mod ptx_tests;
mod random_rounding;
mod rotary;
mod rounding;
mod rows;
mod softmax;
mod span;
mod sum_kernels;
mod sums;
mod swiglu;
mod table;
mod tensors;
mod tile;

pub use self::buffer_slice::BufferSlice;
pub use self::copy::{copy, fill, pack_into};
pub use self::decode::decode_into;
#[cfg(feature = "cpu")]
pub use self::device::cpu_rounds_to_bf16;
#[cfg(feature = "cuda")]
pub use self::lend::{Lent, lend, on_device_thread};
#[cfg(feature = "cpu")]
pub use self::product::count_products;
#[cfg(feature = "cuda")]
pub use self::product::{CUBLASLT, CUBLASLT_LIBRARY, CublasLtError, cublaslt_version};
pub use self::tensors::{contiguous, empty};
