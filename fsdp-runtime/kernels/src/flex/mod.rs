//! Kernels on Flex: vectorised loops over blocks that fit the cache, on all threads of the current
//! rayon pool.

mod attention;
mod cross_entropy;
mod decode;
mod dropout;
mod exp;
mod float;
mod gelu;
mod host_copies;
mod kernels;
mod known_rows;
mod linear;
mod loops;
mod new_tensor;
mod nf4;
mod normalization;
mod prefetch;
mod product;
mod random_rounding;
mod rank_mean;
mod rotary;
mod rows;
mod softmax;
mod sums;
mod swiglu;
mod table;

pub use self::decode::decode_into;
pub use self::host_copies::{cast_when_copied, copy_of_bytes};
