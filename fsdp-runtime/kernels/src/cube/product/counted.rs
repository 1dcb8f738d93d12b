//! Products that are counted and not made: on CubeCL's CPU device, for a test that counts what a step issues on a
//! device with cuBLASLt.

use std::sync::OnceLock;

use super::call::Call;

static COUNT: OnceLock<fn(usize)> = OnceLock::new();

/// Hands the number of a library's calls for each product on CubeCL's CPU device to `count`, from now on until the
/// process ends. No product is made, so their results are undefined. A second call has no effect.
pub fn count_products(count: fn(usize)) {
    COUNT.get_or_init(|| count);
}

/// Returns whether products are counted.
pub(super) fn is_on() -> bool {
    COUNT.get().is_some()
}

/// Counts a call. Returns whether products are counted.
pub(super) fn issue(call: &Call) -> bool {
    COUNT.get().map(|count| count(call.calls)).is_some()
}
