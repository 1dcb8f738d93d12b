//! The kernels on a CubeCL device against their twins on Flex and against plain tensor operations.
//!
//! The device is Burn's `cpu` runtime, or the default one where `BURN_DEVICE` names it (`cuda`,
//! `wgpu`) or `cpu` is not compiled in. Without a CubeCL feature the comparisons say so and pass.
#![cfg(feature = "flex")]

mod kernels {
    pub mod support;

    mod copies;
    mod large;
    mod masks;
    mod means;
    mod norms;
    mod random;
    mod steps;
    mod wrong_use;
}
