//! The layout of factors that the tile instructions read.

use std::arch::x86_64::{
    __m512i, _MM_HINT_T0, _mm512_loadu_si512, _mm512_permutex2var_epi32, _mm512_setzero_si512,
    _mm512_storeu_si512,
};

use half::{bf16, f16};

use super::instructions::{BLOCK, DEPTH, LANES, Tile};
use crate::flex::float::KernelFloat;
use crate::flex::prefetch::prefetch_lines;
use crate::flex::product::Matrix;

/// An element as a sum of numbers of bf16, one for each plane.
pub(in super::super) trait Planes<const PLANES: usize>: KernelFloat {
    /// Returns the numbers, the largest first, as the upper halves of 32 bits.
    fn planes(self) -> [u32; PLANES];
}

impl Planes<1> for bf16 {
    #[inline(always)]
    fn planes(self) -> [u32; 1] {
        [u32::from(self.to_bits()) << 16]
    }
}

impl Planes<2> for f16 {
    /// Two numbers have the 11 significant bits. A NaN and an infinite element have a last number that is NaN.
    #[inline(always)]
    fn planes(self) -> [u32; 2] {
        let wide = self.wide();
        let first = f32::from_bits(wide.to_bits() & UPPER);
        [first, wide - first].map(f32::to_bits)
    }
}

/// The bits of an f32 that bf16 has.
const UPPER: u32 = 0xFFFF_0000;

impl Planes<3> for f32 {
    /// The numbers have 8 significant bits each. Their sum is the element, unless one of them is so small that it is
    /// taken for zero. The last number of a NaN and of an element beyond 3.39 · 10³⁸ is NaN.
    #[inline(always)]
    fn planes(self) -> [u32; 3] {
        let nearest = |number: f32| f32::from_bits(number.to_bits().wrapping_add(0x8000) & UPPER);
        let first = nearest(self);
        let rest = self - first;
        let second = nearest(rest);
        [first, second, rest - second].map(f32::to_bits)
    }
}

/// How the pairs of elements lie in a tile.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Order {
    /// The pairs of a row are neighbours: a tile of a first factor.
    Rows,
    /// The pairs of the same inner position are neighbours: a tile of a second factor, given as the transposed matrix.
    Pairs,
}

/// Returns the number of tiles of a packed matrix.
pub(super) fn tiles<const PLANES: usize>(rows: usize, inner: usize) -> usize {
    rows.div_ceil(BLOCK) * inner.div_ceil(DEPTH) * 2 * PLANES
}

/// Packs the rows of a matrix in groups of [`BLOCK`]. What is missing of a group and of the inner size is zero.
///
/// # Panics
///
/// If `packed` does not have as many tiles as the matrix needs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn pack<E: Planes<PLANES>, const PLANES: usize>(
    matrix: Matrix<'_, E>,
    order: Order,
    packed: &mut [Tile],
) {
    assert_eq!(packed.len(), tiles::<PLANES>(matrix.rows, matrix.columns), "tiles of a matrix");
    let (groups, steps) = (matrix.rows.div_ceil(BLOCK), matrix.columns.div_ceil(DEPTH));
    // Memory is read in the order of its addresses.
    let block = |number: usize| match matrix.column_stride == 1 {
        true => (number / steps, number % steps),
        false => (number % groups, number / groups),
    };
    for number in 0..groups * steps {
        prefetch_block(matrix, block(number + AHEAD));
        let (group, step) = block(number);
        let tiles = &mut packed[(group * steps + step) * 2 * PLANES..][..2 * PLANES];
        for half in 0..2 {
            pack_half(matrix, [group * BLOCK + half * LANES, step * DEPTH], order, tiles, half);
        }
    }
}

/// Blocks of [`BLOCK`] rows and [`DEPTH`] elements of each that are prefetched.
const AHEAD: usize = 2;

/// Prefetches a block of a matrix.
#[inline(always)]
fn prefetch_block<E: Copy>(matrix: Matrix<'_, E>, (group, step): (usize, usize)) {
    let Matrix { elements, row_stride, column_stride, .. } = matrix;
    let start =
        elements.as_ptr().wrapping_add(group * BLOCK * row_stride + step * DEPTH * column_stride);
    // Elements of a row, or of a column, are consecutive.
    let distance = row_stride.max(column_stride);
    for line in 0..BLOCK.max(DEPTH) {
        prefetch_lines::<_MM_HINT_T0, E>(start.wrapping_add(line * distance), DEPTH);
    }
}

/// Packs what a tile of each plane has of a matrix, from a row and an inner position on.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn pack_half<E: Planes<PLANES>, const PLANES: usize>(
    matrix: Matrix<'_, E>,
    [first_row, first_column]: [usize; 2],
    order: Order,
    tiles: &mut [Tile],
    half: usize,
) {
    let rows = matrix.rows.saturating_sub(first_row).min(LANES);
    let columns = (matrix.columns - first_column).min(DEPTH);
    let at = |row: usize, column: usize| {
        (first_row + row) * matrix.row_stride + (first_column + column) * matrix.column_stride
    };
    let write = |tiles: &mut [Tile], line: usize, planes: [[u32; LANES]; PLANES]| {
        for plane in 0..PLANES {
            tiles[2 * plane + half].0[line] = planes[plane];
        }
    };
    let is_whole = rows == LANES && columns == DEPTH;
    // Elements of three planes are transposed before they are divided, pairs of elements as one number.
    let is_transposed_first = size_of::<E>() == size_of::<u32>();
    if is_whole && matrix.column_stride == 1 {
        let row = |row: usize| -> &[E; DEPTH] {
            matrix.elements[at(row, 0)..].first_chunk().expect("a row")
        };
        if order == Order::Rows || !is_transposed_first {
            for line in 0..LANES {
                write(tiles, line, planes_of_row(row(line)));
            }
        } else {
            for part in 0..2 {
                let mut block = [[E::zeroed(); LANES]; LANES];
                for (line, target) in block.iter_mut().enumerate() {
                    target.copy_from_slice(&row(line)[part * LANES..][..LANES]);
                }
                transpose(bytemuck::cast_mut(&mut block));
                for (pair, [first, second]) in block.as_chunks().0.iter().enumerate() {
                    write(tiles, part * LANES / 2 + pair, planes_of_columns(first, second));
                }
            }
        }
    } else if is_whole && matrix.row_stride == 1 {
        let column = |column: usize| -> &[E; LANES] {
            matrix.elements[at(0, column)..].first_chunk().expect("a column")
        };
        if order == Order::Pairs || !is_transposed_first {
            for line in 0..LANES {
                let planes = planes_of_columns(column(2 * line), column(2 * line + 1));
                write(tiles, line, planes);
            }
        } else {
            let mut rows = [[E::zeroed(); DEPTH]; LANES];
            for part in 0..2 {
                let mut block = [[E::zeroed(); LANES]; LANES];
                for (line, target) in block.iter_mut().enumerate() {
                    *target = *column(part * LANES + line);
                }
                transpose(bytemuck::cast_mut(&mut block));
                for (row, block) in rows.iter_mut().zip(&block) {
                    row[part * LANES..][..LANES].copy_from_slice(block);
                }
            }
            for (line, row) in rows.iter().enumerate() {
                write(tiles, line, planes_of_row(row));
            }
        }
    } else {
        for plane in 0..PLANES {
            tiles[2 * plane + half].0 = [[0; LANES]; LANES];
        }
        for row in 0..rows {
            for column in 0..columns {
                let planes = matrix.elements[at(row, column)].planes();
                for plane in 0..PLANES {
                    let tile = &mut tiles[2 * plane + half].0;
                    let pair = match order {
                        Order::Rows => &mut tile[row][column / 2],
                        Order::Pairs => &mut tile[column / 2][row],
                    };
                    *pair |= planes[plane] >> 16 << (16 * (column % 2));
                }
            }
        }
        return;
    }
    let is_in_order = (order == Order::Rows) == (matrix.column_stride == 1);
    if !is_in_order && !is_transposed_first {
        for plane in 0..PLANES {
            transpose(&mut tiles[2 * plane + half].0);
        }
    }
}

/// Returns the planes of elements that are neighbours in pairs.
#[inline(always)]
fn planes_of_row<E: Planes<PLANES>, const PLANES: usize>(
    source: &[E; DEPTH],
) -> [[u32; LANES]; PLANES] {
    let mut planes = [[0u16; DEPTH]; PLANES];
    for (at, element) in source.iter().enumerate() {
        let numbers = element.planes();
        for plane in 0..PLANES {
            planes[plane][at] = (numbers[plane] >> 16) as u16;
        }
    }
    planes.map(bytemuck::cast)
}

/// Returns the planes of pairs of elements, the first and the second of each.
#[inline(always)]
fn planes_of_columns<E: Planes<PLANES>, const PLANES: usize>(
    first: &[E; LANES],
    second: &[E; LANES],
) -> [[u32; LANES]; PLANES] {
    let mut planes = [[0u32; LANES]; PLANES];
    for at in 0..LANES {
        let [first, second] = [first[at].planes(), second[at].planes()];
        for plane in 0..PLANES {
            planes[plane][at] = first[plane] >> 16 | second[plane] & UPPER;
        }
    }
    planes
}

/// Transposes a block: halves of rows, quarters, eighths and single numbers are exchanged.
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose(block: &mut [[u32; LANES]; LANES]) {
    // The functions of arrays that call others are compiled without AVX-512.
    let mut rows = [_mm512_setzero_si512(); LANES];
    for (row, source) in rows.iter_mut().zip(&*block) {
        // SAFETY: a row has the 64 bytes of a register.
        *row = unsafe { _mm512_loadu_si512(source.as_ptr().cast()) };
    }
    exchange::<8>(&mut rows);
    exchange::<4>(&mut rows);
    exchange::<2>(&mut rows);
    exchange::<1>(&mut rows);
    for (target, row) in block.iter_mut().zip(rows) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_si512(target.as_mut_ptr().cast(), row) };
    }
}

/// Exchanges the numbers at odd multiples of `SIZE` in one row with those at even multiples in the row `SIZE` farther.
#[target_feature(enable = "avx512f")]
#[inline]
fn exchange<const SIZE: usize>(rows: &mut [__m512i; LANES]) {
    /// Where the numbers of both rows come from; those of the second row follow those of the first.
    const fn sources(size: usize) -> [[u32; LANES]; 2] {
        let mut sources = [[0; LANES]; 2];
        let mut at = 0;
        while at < LANES {
            let [first, second] =
                if at & size == 0 { [at, at + size] } else { [LANES + at - size, LANES + at] };
            sources[0][at] = first as u32;
            sources[1][at] = second as u32;
            at += 1;
        }
        sources
    }
    let sources = const { sources(SIZE) };
    // SAFETY: a row has the 64 bytes of a register.
    let sources = unsafe {
        [
            _mm512_loadu_si512(sources[0].as_ptr().cast()),
            _mm512_loadu_si512(sources[1].as_ptr().cast()),
        ]
    };
    for at in 0..LANES / 2 {
        let row = at / SIZE * 2 * SIZE + at % SIZE;
        let (upper, lower) = (rows[row], rows[row + SIZE]);
        rows[row] = _mm512_permutex2var_epi32(upper, sources[0], lower);
        rows[row + SIZE] = _mm512_permutex2var_epi32(upper, sources[1], lower);
    }
}
