//! Products by the tile instructions of AMX (Intel's processors from Sapphire Rapids on), which add 16 × 16 sums of 16
//! pairs of bf16 products at once.
//!
//! Matrices of bf16 are multiplied as they are. An element of f16 is the sum of two numbers of bf16. An element of f32
//! is the sum of three, a, b, c, whose magnitudes differ by 2⁸ or more. Of the nine products of two such sums, the six
//! that exceed 2⁻²⁴ of the whole are added: aa, ab, ba, ac, ca, bb. What is left out is less than what a multiplication
//! of f32 rounds. Products are added to each other before they are added to the sum of an element, so that the sums that
//! are rounded are smaller than if products were added to it one by one.
//!
//! Numbers, products and sums below 2⁻¹²⁶ are zero: elements of f32, and products of two, lose bits below 2⁻¹⁰³. A
//! product with an element of f16 or f32 that is infinite, or with one of f32 of 3.396 · 10³⁸ or more, is NaN.
//!
//! The environment variable `FSDP_AMX` turns AMX off if it is `0`.

mod instructions;
mod pack;

use std::arch::x86_64::_MM_HINT_ET0;
use std::cell::RefCell;
use std::ops::Range;

use multiversion::multiversion;

pub(super) use self::instructions::is_available;
use self::instructions::{BLOCK, LANES, Registers, Sums, Tile, multiply};
use self::pack::{Order, Planes, pack, tiles};
use super::parts::{Target, Threads, keeps_bits, new_in_parts, ranges, write_row};
use super::{Matrix, converted};
use crate::flex::float::KernelFloat;
use crate::flex::loops::convert_over;
use crate::flex::prefetch::prefetch_lines;

/// Largest inner size of a block of one plane.
const INNER: usize = 1152;
/// Largest inner size of a block whose sums are rounded to a smaller type, so that one block has all terms.
const ROUNDED: usize = 2048;

/// Tiles of a block of the factor that is packed first. They stay in the processor's second cache.
const RESIDENT: usize = 1152;

/// Tiles of a block of the other factor.
const OTHER: usize = 384;

/// Returns whether the product of f32 matrices is computed by AMX. The answer does not depend on the number of rows, of
/// which a batch may have any, unless the product has so few rows and columns that `gemm` has another order for it too.
pub(super) fn is_faster([a, b]: [Matrix<'_>; 2]) -> bool {
    keeps_bits([a.rows, b.columns]) && b.columns.min(a.columns) >= LANES && is_available()
}

/// Returns the elements of `a · b`, computed on all threads of the current pool. The bits depend on the elements and
/// on the inner size.
///
/// # Panics
///
/// If the processor does not have AMX, or if the inner sizes differ.
pub(super) fn new_product<I: Planes<PLANES>, O: KernelFloat, const PLANES: usize>(
    [a, b]: [Matrix<'_, I>; 2],
) -> Vec<O> {
    assert!(is_available(), "AMX");
    assert_eq!(a.columns, b.rows, "the inner sizes of a product");
    if a.columns > ROUNDED && is_rounded::<O>() {
        // The sums of several blocks are added before they are rounded.
        return converted(&new_product::<I, f32, PLANES>([a, b]));
    }
    let numel = a.rows * b.columns;
    if a.columns == 0 || numel == 0 {
        return vec![O::zeroed(); numel];
    }
    // SAFETY: parts have no element in common, and `multiply_part` writes all elements of its part.
    unsafe {
        new_in_parts(Threads::Pool, [a, b], |target, factors| {
            multiply_part(target, false, 1.0, factors);
        })
    }
}

/// Returns whether sums are rounded to the type.
fn is_rounded<E>() -> bool {
    size_of::<E>() < size_of::<f32>()
}

/// Packed factors of a thread, kept from one product to the next.
#[derive(Default)]
struct Packed {
    resident: Vec<Tile>,
    others: Vec<Tile>,
}

thread_local! {
    static PACKED: RefCell<Packed> = RefCell::default();
}

/// Writes `scale · a · b`, or adds it, on the calling thread.
///
/// # Panics
///
/// If the processor does not have AMX.
///
/// # Safety
///
/// The rows of the target lie in memory that nothing else uses. They are initialised if `adds` is true.
pub(super) unsafe fn multiply_part<I: Planes<PLANES>, O: KernelFloat, const PLANES: usize>(
    target: Target<O>,
    adds: bool,
    scale: f32,
    [a, b]: [Matrix<'_, I>; 2],
) {
    assert!(is_available(), "AMX");
    // SAFETY: the processor has AMX.
    let registers = unsafe { Registers::new() };
    let mut sums = Sums([[0.0; BLOCK]; BLOCK]);
    let mut multiply_block = |adds: bool, [row, column]: [usize; 2], factors: [&[Tile]; 2]| {
        let shape = [(a.rows - row).min(BLOCK), (b.columns - column).min(BLOCK)];
        let target = target.part(row, column);
        prefetch(target, shape);
        let is_f32 = !is_rounded::<O>();
        if is_f32 && scale == 1.0 && shape == [BLOCK; 2] {
            let rows = (target.start.cast(), target.stride);
            // SAFETY: as the caller promises.
            unsafe { multiply::<PLANES>(&registers, factors, rows, adds) };
            return;
        }
        // The terms of an element are added in the same order in blocks that are not whole.
        let continues = adds && is_f32 && scale == 1.0;
        // SAFETY: the sums have the elements of a block. The target is that of the caller.
        unsafe {
            if continues {
                read(target, shape, &mut sums);
            }
            let rows = (sums.0.as_flattened_mut().as_mut_ptr(), BLOCK);
            multiply::<PLANES>(&registers, factors, rows, continues);
            write(&mut sums, target, shape, adds && !continues, scale);
        }
    };
    let inner_size = if is_rounded::<O>() { ROUNDED } else { INNER / PLANES };
    PACKED.with_borrow_mut(|Packed { resident, others }| {
        for inner in even_ranges(a.columns, inner_size) {
            let adds = adds || inner.start > 0;
            let of_group = tiles::<PLANES>(1, inner.len());
            let (rows, columns) = (a.columns(inner.clone()), b.rows(inner).transposed());
            // Rows of the factor that is packed block by block.
            let size = (RESIDENT / of_group).max(1) * BLOCK;
            let size_of_other = (OTHER / of_group).max(1) * BLOCK;
            // Rows that are packed if those of `first` are packed block by block, and those of `second` for each block.
            let packings = |first: usize, second: usize| first + second * first.div_ceil(size);
            let of_rows = packings(a.rows, b.columns) < packings(b.columns, a.rows);
            let (first, second) = if of_rows { (rows, columns) } else { (columns, rows) };
            let (order, other) = match of_rows {
                true => (Order::Rows, Order::Pairs),
                false => (Order::Pairs, Order::Rows),
            };
            for block in ranges(first.rows, size) {
                let resident = of_len(resident, tiles::<PLANES>(block.len(), first.columns));
                // SAFETY: the processor has AVX-512, as it has AMX.
                unsafe { pack(first.rows(block.clone()), order, resident) };
                for range in ranges(second.rows, size_of_other) {
                    let others = of_len(others, tiles::<PLANES>(range.len(), second.columns));
                    // SAFETY: as above.
                    unsafe { pack(second.rows(range.clone()), other, others) };
                    let (starts, rows, columns) = match of_rows {
                        true => ([block.start, range.start], &*resident, &*others),
                        false => ([range.start, block.start], &*others, &*resident),
                    };
                    // Blocks that are neighbours in memory follow each other.
                    for (at_row, rows) in rows.chunks_exact(of_group).enumerate() {
                        for (at_column, columns) in columns.chunks_exact(of_group).enumerate() {
                            let at = [starts[0] + at_row * BLOCK, starts[1] + at_column * BLOCK];
                            multiply_block(adds, at, [rows, columns]);
                        }
                    }
                }
            }
        }
    });
}

/// Prefetches a block of the target, to be written.
fn prefetch<E>(target: Target<E>, [rows, columns]: [usize; 2]) {
    for row in 0..rows {
        prefetch_lines::<_MM_HINT_ET0, E>(target.part(row, 0).start, columns);
    }
}

/// Returns as many tiles, which may have been written before.
fn of_len(tiles: &mut Vec<Tile>, len: usize) -> &mut [Tile] {
    if tiles.len() < len {
        tiles.resize(len, Tile([[0; LANES]; LANES]));
    }
    &mut tiles[..len]
}

/// Returns ranges of at most `size`, a multiple of [`BLOCK`], of about the same length.
fn even_ranges(count: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    let parts = count.div_ceil(size).max(1);
    ranges(count, count.div_ceil(parts).next_multiple_of(BLOCK))
}

/// Reads sums of a block.
///
/// # Safety
///
/// The rows of the target are initialised, and nothing else writes them.
unsafe fn read<E: KernelFloat>(target: Target<E>, [rows, columns]: [usize; 2], sums: &mut Sums) {
    for (row, sums) in sums.0.iter_mut().take(rows).enumerate() {
        // SAFETY: as the caller promises.
        let elements = unsafe { std::slice::from_raw_parts(target.part(row, 0).start, columns) };
        convert_over(elements, &mut sums[..columns]);
    }
}

/// Writes the sums of a block times `scale`, rounded to the type of the target, or adds them.
///
/// # Safety
///
/// As for [`multiply_part`].
#[multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"), dispatcher = "direct")]
unsafe fn write<E: KernelFloat>(
    sums: &mut Sums,
    target: Target<E>,
    [rows, columns]: [usize; 2],
    adds: bool,
    scale: f32,
) {
    for (row, sums) in sums.0.iter_mut().take(rows).enumerate() {
        if scale != 1.0 {
            sums.iter_mut().for_each(|sum| *sum *= scale);
        }
        // SAFETY: as the caller promises.
        unsafe { write_row(&sums[..columns], target.part(row, 0), adds) };
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::multiply_as_it_is;
    use super::super::tests::{SIZES, element, elements, matrix, with_widened};
    use super::*;

    /// Returns the product, added to ones if `adds` is true.
    fn product_of<E: Planes<PLANES>, const PLANES: usize>(
        factors: [Matrix<'_, E>; 2],
        adds: bool,
        scale: f32,
    ) -> Vec<f32> {
        let [a, b] = factors;
        let mut product = vec![1f32; a.rows * b.columns];
        let target = Target { start: product.as_mut_ptr(), stride: b.columns };
        // SAFETY: the vector has room for the product.
        unsafe { multiply_part(target, adds, scale, factors) };
        product
    }

    /// Returns the product of the same elements by the kernel for f32, added to ones if `adds` is true.
    fn product_in_f32<E: KernelFloat>(
        factors: [Matrix<'_, E>; 2],
        adds: bool,
        scale: f32,
    ) -> Vec<f32> {
        with_widened(factors, |[a, b]| {
            let mut product = vec![1f32; a.rows * b.columns];
            let target = Target { start: product.as_mut_ptr(), stride: b.columns };
            // SAFETY: the vector has room for the product.
            unsafe { multiply_as_it_is(target, adds, scale, [a, b]) };
            product
        })
    }

    /// Returns the largest errors of products of all layouts by AMX and by the kernel for f32, over the sums of the
    /// magnitudes of their terms.
    fn errors<E: Planes<PLANES>, const PLANES: usize>(narrow: impl Fn(f32) -> E) -> [f64; 2] {
        let mut largest = [0f64; 2];
        for [rows, inner, columns] in SIZES {
            let all = |len: usize, scale: f32| -> Vec<E> {
                // All bits of the numbers vary.
                let vary = |(at, element): (usize, f32)| element * scale / (1.0 + at as f32 * 0.37);
                elements(len).into_iter().enumerate().map(vary).map(&narrow).collect()
            };
            let (a, b) = (all(rows * inner, 1.0), all(inner * columns, 0.5));
            for (transposed_a, transposed_b) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let a = matrix(&a, [rows, inner], transposed_a);
                let b = matrix(&b, [inner, columns], transposed_b);
                for (adds, scale) in [(false, 1.0), (true, 0.5)] {
                    let found =
                        [product_of([a, b], adds, scale), product_in_f32([a, b], adds, scale)];
                    for number in 0..rows * columns {
                        let (row, column) = (number / columns, number % columns);
                        let terms =
                            (0..inner).map(|i| element(a, [row, i]) * element(b, [i, column]));
                        let before = if adds { 1.0 } else { 0.0 };
                        let sum = before + f64::from(scale) * terms.clone().sum::<f64>();
                        let size = before + f64::from(scale) * terms.map(f64::abs).sum::<f64>();
                        for (largest, found) in largest.iter_mut().zip(&found) {
                            *largest = largest.max((f64::from(found[number]) - sum).abs() / size);
                        }
                    }
                }
            }
        }
        largest
    }

    #[test]
    fn products_have_the_precision_of_f32() {
        if !is_available() {
            return;
        }
        let [of_f16, in_f32] = errors(f16::from_f32);
        assert!(of_f16 <= in_f32, "f16: {of_f16:e}, in f32: {in_f32:e}");
        let [of_bf16, in_f32] = errors(bf16::from_f32);
        assert!(of_bf16 <= in_f32, "bf16: {of_bf16:e}, in f32: {in_f32:e}");
        let [of_f32, in_f32] = errors::<f32, 3>(|element| element);
        assert!(of_f32 <= in_f32, "f32: {of_f32:e}, in f32: {in_f32:e}");
    }

    /// Checks that parts on several threads have the bits of the whole, and that rounded sums are those of f32.
    fn check_bits<E: Planes<PLANES> + PartialEq, const PLANES: usize>(narrow: impl Fn(f32) -> E) {
        for [rows, inner, columns] in SIZES {
            let all = |len: usize| -> Vec<E> { elements(len).into_iter().map(&narrow).collect() };
            let (a, b) = (all(rows * inner), all(inner * columns));
            for transposed in [false, true] {
                let a = matrix(&a, [rows, inner], transposed);
                let b = matrix(&b, [inner, columns], transposed);
                let whole = product_of([a, b], false, 1.0);
                let rounded: Vec<E> = whole.iter().map(|&sum| E::narrow(sum)).collect();
                for threads in [1, 2, 3] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                    let name = format!("{rows} x {inner} x {columns} on {threads} threads");
                    pool.expect("a pool").install(|| {
                        assert_eq!(new_product::<E, f32, PLANES>([a, b]), whole, "{name}");
                        assert!(new_product::<E, E, PLANES>([a, b]) == rounded, "{name}");
                    });
                }
            }
        }
    }

    #[test]
    fn parts_have_the_bits_of_the_whole() {
        if !is_available() {
            return;
        }
        check_bits(bf16::from_f32);
        check_bits(f16::from_f32);
        check_bits::<f32, 3>(|element| element);
    }

    #[test]
    fn products_without_terms_or_elements_are_computed() {
        if !is_available() {
            return;
        }
        for [rows, inner, columns] in [[3, 0, 4], [0, 5, 4], [3, 5, 0], [0, 0, 0]] {
            let (a, b) = (vec![bf16::ONE; rows * inner], vec![bf16::ONE; inner * columns]);
            let factors = [matrix(&a, [rows, inner], false), matrix(&b, [inner, columns], false)];
            assert_eq!(new_product::<_, bf16, 1>(factors), vec![bf16::ZERO; rows * columns]);
        }
    }

    /// Checks that a NaN makes those elements NaN that depend on it.
    fn check_nan<E: Planes<PLANES>, const PLANES: usize>(nan: E) {
        let narrowed =
            |len: usize| -> Vec<E> { elements(len).into_iter().map(E::narrow).collect() };
        let (mut a, b) = (narrowed(40 * 70), narrowed(70 * 40));
        a[3 * 70 + 65] = nan;
        let factors = [matrix(&a, [40, 70], false), matrix(&b, [70, 40], false)];
        for (at, element) in product_of(factors, false, 1.0).into_iter().enumerate() {
            assert_eq!(element.is_nan(), at / 40 == 3, "{at}");
        }
    }

    #[test]
    fn a_nan_stays_where_it_is() {
        if !is_available() {
            return;
        }
        // NaNs with bits that rounding would carry into the sign are among them.
        for nan in [f32::NAN, f32::from_bits(0x7FFF_FFFF), f32::from_bits(0xFFFF_FFFF)] {
            check_nan(nan);
        }
        check_nan(bf16::NAN);
        check_nan(f16::NAN);
    }

    /// Large, small and denormal elements of f32 keep their bits as far as the module says.
    #[test]
    fn elements_of_any_magnitude_are_multiplied() {
        if !is_available() {
            return;
        }
        for (element, error) in [
            (3.0e38_f32, 2e-7),
            (-1.234_567_9e30, 2e-7),
            (1.234_567_9e-30, 2e-7),
            (1.234_567_9e-36, 1e-3),
            (f32::MIN_POSITIVE / 4.0, 1.0),
        ] {
            let (a, b) = (vec![element; 32 * 32], vec![1.0 / 32.0; 32 * 32]);
            let factors = [matrix(&a, [32, 32], false), matrix(&b, [32, 32], false)];
            for found in product_of(factors, false, 1.0) {
                assert!(((found - element) / element).abs() <= error, "{found:e}, not {element:e}");
            }
        }
    }
}
