//! Products of bf16 matrices by the processor's instruction for them (`VDPBF16PS` of AVX-512), which multiplies two
//! pairs of elements and adds both products to a sum in f32. It takes as long as a multiplication of f32.
//!
//! The factors are packed for it block by block: pairs of elements that are multiplied with each other are
//! neighbours, and so are the pairs of the rows, or columns, that a tile of the result has. The instruction takes
//! elements and sums below 2^-126 for zero.

use std::cell::RefCell;

use half::bf16;
use multiversion::multiversion;

use super::parts::{Target, Threads, new_in_parts, ranges, write_row};
use super::{Matrix, converted};
use crate::flex::float::KernelFloat;

/// Rows of a tile of the result.
const ROWS: usize = 12;
/// Columns of a tile of the result.
const COLUMNS: usize = 32;
/// Largest inner size of a block: that of the sums which stay in registers.
const INNER: usize = 2048;
/// Rows of a block, whose pairs stay in the processor's second cache.
const BLOCK_ROWS: usize = 10 * ROWS;
/// Columns of a block.
const BLOCK_COLUMNS: usize = 8 * COLUMNS;

/// Sums of a tile of the result.
type Tile = [[f32; COLUMNS]; ROWS];
/// Computes the sums of a tile, given as many groups of pairs of rows as of columns.
type Multiply = fn(&[[u32; ROWS]], &[[u32; COLUMNS]], &mut Tile);

/// Returns whether the processor has the instruction.
pub(super) fn are_multiplied() -> bool {
    instruction().is_some()
}

/// Returns the elements of `a · b`, computed on all threads of the current pool. The bits depend on the elements and
/// on the inner size.
///
/// # Panics
///
/// If the processor does not have the instruction, or if the inner sizes differ.
pub(super) fn new_product<E: KernelFloat>(factors: [Matrix<'_, bf16>; 2]) -> Vec<E> {
    let multiply = instruction().expect("the processor multiplies pairs");
    product_by(multiply, Threads::Pool, factors)
}

fn product_by<E: KernelFloat>(
    multiply: Multiply,
    threads: Threads,
    [a, b]: [Matrix<'_, bf16>; 2],
) -> Vec<E> {
    assert_eq!(a.columns, b.rows, "the inner sizes of a product");
    let numel = a.rows * b.columns;
    if a.columns == 0 || numel == 0 {
        return vec![E::zeroed(); numel];
    }
    if a.columns > INNER && size_of::<E>() < size_of::<f32>() {
        // The sums of several blocks are added before they are rounded.
        return converted(&product_by::<f32>(multiply, threads, [a, b]));
    }
    // SAFETY: parts have no element in common, and `multiply_part` writes all elements of its part.
    unsafe {
        new_in_parts(threads, [a, b], |target, factors| multiply_part(multiply, target, factors))
    }
}

/// Packed pairs of a thread, kept from one product to the next.
#[derive(Default)]
struct Packed {
    rows: Vec<[u32; ROWS]>,
    columns: Vec<[u32; COLUMNS]>,
}

thread_local! {
    static PACKED: RefCell<Packed> = RefCell::default();
}

/// Writes a part of a product.
///
/// # Safety
///
/// The rows of the target, as many as `a` has, lie in memory that nothing else uses.
unsafe fn multiply_part<E: KernelFloat>(
    multiply: Multiply,
    target: Target<E>,
    [a, b]: [Matrix<'_, bf16>; 2],
) {
    PACKED.with_borrow_mut(|packed| {
        for inner in ranges(a.columns, INNER) {
            let a = a.columns(inner.clone());
            let b = b.rows(inner.clone());
            for columns in ranges(b.columns, BLOCK_COLUMNS) {
                pack(b.columns(columns.clone()).transposed(), &mut packed.columns);
                for rows in ranges(a.rows, BLOCK_ROWS) {
                    pack(a.rows(rows.clone()), &mut packed.rows);
                    let block = target.part(rows.start, columns.start);
                    let shape = [rows.len(), columns.len()];
                    // SAFETY: as the caller promises. The first block of the inner size writes what others add to.
                    unsafe { multiply_block(multiply, packed, block, shape, inner.start > 0) };
                }
            }
        }
    });
}

/// Writes the product of a packed block, or adds it.
///
/// # Safety
///
/// The rows of the target lie in memory that nothing else uses. They are initialised if `adds` is true.
unsafe fn multiply_block<E: KernelFloat>(
    multiply: Multiply,
    packed: &Packed,
    target: Target<E>,
    [rows, columns]: [usize; 2],
    adds: bool,
) {
    let [of_rows, of_columns] = [rows.div_ceil(ROWS), columns.div_ceil(COLUMNS)];
    let [row_pairs, column_pairs] =
        [packed.rows.len() / of_rows, packed.columns.len() / of_columns];
    assert_eq!(row_pairs, column_pairs, "pairs of the inner size");
    let mut tile = [[0.0; COLUMNS]; ROWS];
    for (at_column, b) in packed.columns.chunks_exact(column_pairs).enumerate() {
        let first_column = at_column * COLUMNS;
        let width = COLUMNS.min(columns - first_column);
        for (at_row, a) in packed.rows.chunks_exact(row_pairs).enumerate() {
            multiply(a, b, &mut tile);
            let first_row = at_row * ROWS;
            let shape = [ROWS.min(rows - first_row), width];
            // SAFETY: as the caller promises.
            unsafe { write_tile(&tile, target.part(first_row, first_column), shape, adds) };
        }
    }
}

/// Writes the sums of a tile, rounded to the type of the target, or adds them.
///
/// # Safety
///
/// As for [`multiply_block`].
#[multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"), dispatcher = "direct")]
unsafe fn write_tile<E: KernelFloat>(
    tile: &Tile,
    target: Target<E>,
    [rows, width]: [usize; 2],
    adds: bool,
) {
    for (row, sums) in tile.iter().take(rows).enumerate() {
        // SAFETY: as the caller promises.
        unsafe { write_row(&sums[..width], target.part(row, 0), adds) };
    }
}

/// Packs the rows of a matrix in groups of `LANES`: pair `p` of the rows of group `g` is number
/// `g · pairs + p`. What is missing of a group and of a pair is zero.
fn pack<const LANES: usize>(matrix: Matrix<'_, bf16>, packed: &mut Vec<[u32; LANES]>) {
    let pairs = matrix.columns.div_ceil(2);
    packed.resize(matrix.rows.div_ceil(LANES) * pairs, [0; LANES]);
    for (at, group) in packed.chunks_exact_mut(pairs).enumerate() {
        let rows = at * LANES..((at + 1) * LANES).min(matrix.rows);
        pack_group(matrix.rows(rows), group);
    }
}

/// Packs at most `LANES` rows.
#[multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"), dispatcher = "direct")]
fn pack_group<const LANES: usize>(rows: Matrix<'_, bf16>, group: &mut [[u32; LANES]]) {
    /// Pairs of a row that are copied at once: a line of the cache.
    const AT_ONCE: usize = 16;
    let bits = |row: usize, column: usize| {
        u32::from(rows.elements[row * rows.row_stride + column * rows.column_stride].to_bits())
    };
    let whole = rows.columns / 2;
    if rows.rows < LANES {
        group.fill([0; LANES]);
    }
    if rows.column_stride == 1 {
        for first in (0..whole).step_by(AT_ONCE) {
            let group = &mut group[first..(first + AT_ONCE).min(whole)];
            for row in 0..rows.rows {
                let start = row * rows.row_stride + 2 * first;
                let source = rows.elements[start..][..2 * group.len()].as_chunks::<2>().0;
                for (pairs, source) in group.iter_mut().zip(source) {
                    pairs[row] = pair(source[0], source[1]);
                }
            }
        }
    } else if rows.row_stride == 1 && rows.rows == LANES {
        for (at, pairs) in group[..whole].iter_mut().enumerate() {
            let column = |column: usize| -> &[bf16; LANES] {
                let elements = &rows.elements[column * rows.column_stride..];
                elements.first_chunk().expect("a column of the matrix")
            };
            let (first, second) = (column(2 * at), column(2 * at + 1));
            for lane in 0..LANES {
                pairs[lane] = pair(first[lane], second[lane]);
            }
        }
    } else {
        for (at, pairs) in group[..whole].iter_mut().enumerate() {
            for (row, pair) in pairs[..rows.rows].iter_mut().enumerate() {
                *pair = bits(row, 2 * at) | bits(row, 2 * at + 1) << 16;
            }
        }
    }
    if rows.columns % 2 == 1 {
        group[whole] = [0; LANES];
        for (row, pair) in group[whole][..rows.rows].iter_mut().enumerate() {
            *pair = bits(row, rows.columns - 1);
        }
    }
}

#[inline(always)]
fn pair(first: bf16, second: bf16) -> u32 {
    u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16
}

/// Returns the instruction, if the processor has it.
fn instruction() -> Option<Multiply> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16") {
        // SAFETY: the processor has what the function needs.
        return Some(|a, b, tile| unsafe { multiply_by_instruction(a, b, tile) });
    }
    None
}

/// Computes a tile with the instruction.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply_by_instruction(a: &[[u32; ROWS]], b: &[[u32; COLUMNS]], tile: &mut Tile) {
    use std::arch::x86_64::*;

    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    for (a, b) in a.iter().zip(b) {
        let of_half = |half: usize| {
            let pairs = b.as_ptr().wrapping_add(16 * half);
            // SAFETY: both halves of the columns have 16 pairs. `__m512bh` has the layout of `__m512i`.
            unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(pairs.cast())) }
        };
        let columns = [of_half(0), of_half(1)];
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: as above.
            let pair: __m512bh =
                unsafe { std::mem::transmute(_mm512_set1_epi32(a[row].cast_signed())) };
            for (sums, columns) in sums.iter_mut().zip(columns) {
                *sums = _mm512_dpbf16_ps(*sums, pair, columns);
            }
        }
    }
    for (target, sums) in tile.iter_mut().zip(sums) {
        for (half, sums) in sums.into_iter().enumerate() {
            // SAFETY: both halves of a row have 16 elements.
            unsafe { _mm512_storeu_ps(target.as_mut_ptr().add(16 * half), sums) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{SIZES, element, elements, matrix};
    use super::*;

    /// Computes a tile as the instruction does.
    fn multiply_by_loops(a: &[[u32; ROWS]], b: &[[u32; COLUMNS]], tile: &mut Tile) {
        let number = |bits: u32| f32::from_bits(bits << 16);
        *tile = [[0.0; COLUMNS]; ROWS];
        for (a, b) in a.iter().zip(b) {
            for (row, &a) in tile.iter_mut().zip(a) {
                for (sum, &b) in row.iter_mut().zip(b) {
                    *sum = number(a >> 16).mul_add(number(b >> 16), *sum);
                    *sum = number(a).mul_add(number(b), *sum);
                }
            }
        }
    }

    fn narrow(len: usize, scale: f32) -> Vec<bf16> {
        elements(len).into_iter().map(|element| bf16::from_f32(element * scale)).collect()
    }

    fn check(multiply: Multiply) {
        for [rows, inner, columns] in SIZES {
            let (a, b) = (narrow(rows * inner, 1.0), narrow(inner * columns, 0.5));
            for (transposed_a, transposed_b) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let a = matrix(&a, [rows, inner], transposed_a);
                let b = matrix(&b, [inner, columns], transposed_b);
                let found = product_by::<f32>(multiply, Threads::One, [a, b]);
                for (number, found) in found.iter().enumerate() {
                    let (row, column) = (number / columns, number % columns);
                    let terms = (0..inner).map(|i| element(a, [row, i]) * element(b, [i, column]));
                    let sum: f64 = terms.clone().sum();
                    // The bound of the error of as many sums in f32.
                    let bound = inner as f64 * 2f64.powi(-24) * terms.map(f64::abs).sum::<f64>();
                    assert!(
                        (f64::from(*found) - sum).abs() <= bound,
                        "{found}, not {sum}, at {number} of {rows} x {inner} x {columns}"
                    );
                }
                for threads in [2, 3] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                    let parts = pool
                        .expect("a pool")
                        .install(|| product_by::<f32>(multiply, Threads::Pool, [a, b]));
                    assert_eq!(parts, found, "{rows} x {inner} x {columns} on {threads} threads");
                }
                let rounded: Vec<bf16> = found.into_iter().map(bf16::from_f32).collect();
                assert_eq!(product_by::<bf16>(multiply, Threads::One, [a, b]), rounded);
            }
        }
    }

    #[test]
    fn products_are_exact_to_rounding_and_the_same_on_several_threads() {
        check(multiply_by_loops);
        if let Some(multiply) = instruction() {
            check(multiply);
        }
    }

    #[test]
    fn the_instruction_has_the_bits_of_loops() {
        let Some(multiply) = instruction() else { return };
        let (a, b) = (narrow(40 * 300, 1.0), narrow(300 * 70, 2.0));
        let factors = [matrix(&a, [40, 300], false), matrix(&b, [300, 70], false)];
        let [found, expected] = [multiply, multiply_by_loops]
            .map(|multiply| product_by::<f32>(multiply, Threads::One, factors));
        assert_eq!(found, expected);
    }

    #[test]
    fn a_nan_stays_where_it_is() {
        let multiply = instruction().unwrap_or(multiply_by_loops);
        let (mut a, b) = (narrow(20 * 9, 1.0), narrow(9 * 40, 1.0));
        a[3 * 9 + 8] = bf16::NAN;
        let found: Vec<f32> = product_by(
            multiply,
            Threads::One,
            [matrix(&a, [20, 9], false), matrix(&b, [9, 40], false)],
        );
        for (at, element) in found.into_iter().enumerate() {
            assert_eq!(element.is_nan(), at / 40 == 3, "{at}");
        }
    }
}
