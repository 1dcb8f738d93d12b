//! The indices of a vector's elements.

use cubecl::prelude::*;

/// Returns the numbers from 0 up.
#[cube]
pub(super) fn iota<N: Size>() -> Vector<u32, N> {
    let mut iota = Vector::<u32, N>::empty();
    #[unroll]
    for lane in 0..N::value() {
        iota.insert(lane, comptime!(lane as u32));
    }
    iota
}
