//! Rounding in kernels.

use cubecl::prelude::*;

/// Rounds f32 values to the nearest `O`, ties to even. `integers` is the result of
/// `device::rounds_in_integers`; then `O` is bf16.
#[cube]
pub(super) fn narrowed<O: Float, N: Size>(
    wide: Vector<f32, N>,
    #[comptime] integers: bool,
) -> Vector<O, N> {
    if comptime!(integers) {
        let bits = Vector::<u32, N>::reinterpret(wide);
        // Half a unit of the last place of bf16, minus one bit if the last place is even.
        let half =
            Vector::<u32, N>::new(0x7FFFu32) + ((bits >> Vector::new(16u32)) & Vector::new(1u32));
        // Rounding could turn a NaN into infinity, so a NaN keeps its upper bits and becomes quiet.
        let magnitude = bits & Vector::new(0x7FFF_FFFFu32);
        let number = magnitude.less_than(&Vector::<u32, N>::new(0x7F80_0001u32));
        let rounded = select_many(number, bits + half, bits | Vector::new(0x40_0000u32));
        Vector::<O, N>::reinterpret(Vector::<u16, N>::cast_from(rounded >> Vector::new(16u32)))
    } else {
        Vector::cast_from(wide)
    }
}

/// Returns a product that no compiler fuses with the sum that uses it. `zero` is a kernel argument
/// of value 0, which the compiler does not know.
#[cube]
pub(super) fn rounded<N: Size>(product: Vector<f32, N>, zero: u32) -> Vector<f32, N> {
    let bits = Vector::<u32, N>::reinterpret(product);
    Vector::<f32, N>::reinterpret(bits | Vector::new(zero))
}
