//! Settings of products of matrices.

use std::sync::atomic::{AtomicBool, Ordering};

static TF32: AtomicBool = AtomicBool::new(true);

/// Sets whether products of f32 matrices on CUDA devices may be computed in TF32, which has 10 bits of
/// precision in place of 23 and is about eight times faster. The sums are in f32 in any case.
///
/// It is on by default, as CubeCL's own products take TF32 wherever a GPU has it. The setting holds for the
/// process, and for the products that this crate issues: those of linear layers, attention and the
/// loss over a vocabulary. Other products are Burn's.
pub fn set_tf32(allowed: bool) {
    TF32.store(allowed, Ordering::Relaxed);
}

/// Returns what [`set_tf32`] has set.
pub fn allows_tf32() -> bool {
    TF32.load(Ordering::Relaxed)
}
