//! Products that are counted and not made: on CubeCL's CPU device, for a test that counts what a step issues on a
//! device with cuBLASLt.

use std::sync::OnceLock;

use super::call::Call;

/// Calls of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountedProduct {
    /// Number of calls.
    pub calls: usize,
    /// Rows, columns and length of the sums of each product.
    pub dims: [usize; 3],
    /// Number of products of all calls.
    pub products: usize,
}

static COUNT: OnceLock<fn(CountedProduct)> = OnceLock::new();

/// Hands products on CubeCL's CPU device to `count`, from now on until the process ends. None of them is made, so
/// their results are undefined. A second call has no effect.
pub fn count_products(count: fn(CountedProduct)) {
    COUNT.get_or_init(|| count);
}

/// Returns whether products are counted.
pub(super) fn is_on() -> bool {
    COUNT.get().is_some()
}

/// Counts a call. Returns whether products are counted.
pub(super) fn issue(call: &Call) -> bool {
    let counted =
        CountedProduct { calls: call.calls, dims: call.dims, products: call.calls * call.batch };
    COUNT.get().map(|count| count(counted)).is_some()
}
