//! Kernels on Flex: vectorised loops over blocks that fit the cache, on all threads of the current
//! rayon pool.

mod dropout;
mod float;
mod kernels;
mod loops;
mod new_tensor;
mod prefetch;
mod sums;

pub(in crate::backend) use self::float::with_float_type;
pub(crate) use self::loops::{each, indexed};
pub(crate) use self::new_tensor::{Uninit, new_tensor};
