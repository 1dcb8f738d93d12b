//! The kernels on a CubeCL device, compared with the same kernels on Flex and with plain tensor
//! operations.
//!
//! The device is Burn's `cpu` runtime, or the default one where `BURN_DEVICE` names it (`cuda`,
//! `wgpu`) or `cpu` is not compiled in. Without a CubeCL feature these comparisons are skipped with
//! a message, and the kernels on Flex are compared with plain tensor operations alone.
#![cfg(feature = "flex")]

#[path = "support/compare.rs"]
mod compare;

mod kernels {
    pub mod support;

    mod attention;
    mod codes;
    mod copies;
    mod cross_entropy;
    mod embedding;
    mod gelu;
    mod large;
    mod layer_norm;
    mod linear;
    mod masks;
    mod means;
    mod norms;
    mod random;
    mod residual_norms;
    mod rms_norm;
    mod rotary;
    mod rows;
    mod softmax;
    mod steps;
    mod swiglu;
    mod wrong_use;
}
