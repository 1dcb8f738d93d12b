//! Products of matrices, on the kernel that Flex itself uses (crate `gemm`). Processors with AMX, or with an instruction
//! for bf16, have kernels of their own. Without them, matrices of bf16 and f16 are converted block by block.
//!
//! A product is written to memory that nothing wrote before. Burn's product of Flex fills its memory with
//! zeros and copies it to aligned memory first.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
#[path = "no_amx.rs"]
mod amx;
mod column_blocks;
mod narrow;
mod pairs;
mod parts;
mod turned;

use std::borrow::Cow;
use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape, TensorData};
use half::{bf16, f16};
use rayon::prelude::*;

use self::column_blocks::for_each_block;
pub(super) use self::parts::Threads;
use self::parts::{Target, for_each_part, keeps_bits};
use self::turned::{is_faster_turned, multiply_turned};
use super::float::{KernelFloat, with_float_type};
use super::loops::convert;
use super::new_tensor::{TASK, Uninit, new_tensor};

/// A matrix in memory: element (r, c) is at `r · row_stride + c · column_stride`.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a, E = f32> {
    elements: &'a [E],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, E: Copy> Matrix<'a, E> {
    /// Returns the matrix whose rows begin every `stride` elements.
    ///
    /// # Panics
    ///
    /// If the matrix exceeds the elements.
    pub(super) fn new(elements: &'a [E], [rows, columns]: [usize; 2], stride: usize) -> Self {
        check_len(elements.len(), [rows, columns], stride);
        Self { elements, rows, columns, row_stride: stride, column_stride: 1 }
    }

    /// Returns the rows in the range, which is not empty.
    fn rows(self, rows: Range<usize>) -> Self {
        Self { elements: &self.elements[rows.start * self.row_stride..], rows: rows.len(), ..self }
    }

    /// Returns the columns in the range, which is not empty.
    fn columns(self, columns: Range<usize>) -> Self {
        self.transposed().rows(columns).transposed()
    }

    /// Returns the transposed matrix, of the same elements.
    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

impl<'a> Matrix<'a> {
    /// Returns the elements of each row.
    ///
    /// # Panics
    ///
    /// If the elements of a row are not consecutive.
    pub(super) fn iter_rows(self) -> impl Iterator<Item = &'a [f32]> {
        assert_eq!(self.column_stride, 1, "rows of consecutive elements");
        (0..self.rows).map(move |row| &self.elements[row * self.row_stride..][..self.columns])
    }
}

/// Returns the matrix of an f32 tensor with two dimensions, of any strides that are not negative.
///
/// # Panics
///
/// If a stride is negative.
pub(super) fn matrix(tensor: &FlexTensor) -> Matrix<'_> {
    strided(tensor, memory(tensor))
}

/// Returns the memory between the first and the last element of a tensor with two dimensions.
///
/// # Panics
///
/// If a stride is negative.
fn memory<E: KernelFloat>(tensor: &FlexTensor) -> &[E] {
    let ([rows, columns], [row_stride, column_stride]) = (tensor.shape().dims(), strides(tensor));
    let elements = &tensor.storage::<E>()[tensor.layout().start_offset()..];
    if rows * columns == 0 {
        return &[];
    }
    &elements[..=(rows - 1) * row_stride + (columns - 1) * column_stride]
}

fn strides(tensor: &FlexTensor) -> [usize; 2] {
    let strides = tensor.layout().strides();
    [0, 1].map(|at| usize::try_from(strides[at]).expect("strides of a matrix"))
}

/// Returns the matrix with the shape and the strides of `tensor` in `elements`, as many as [`memory`] has.
fn strided<'a, E>(tensor: &FlexTensor, elements: &'a [E]) -> Matrix<'a, E> {
    let ([rows, columns], [row_stride, column_stride]) = (tensor.shape().dims(), strides(tensor));
    Matrix { elements, rows, columns, row_stride, column_stride }
}

/// Returns the matrices of tensors with two dimensions.
fn factors<E: KernelFloat>(tensors: [&FlexTensor; 2]) -> [Matrix<'_, E>; 2] {
    tensors.map(|tensor| strided(tensor, memory(tensor)))
}

/// Implements [`Kernels::product`](crate::Kernels::product) for matrices of f32, bf16 and f16. Sums are in
/// f32.
pub(super) fn product([a, b]: [&FlexTensor; 2], dtype: DType) -> FlexTensor {
    let shape = Shape::from([a.shape()[0], b.shape()[1]]);
    if a.dtype() == b.dtype() && a.dtype() != DType::F32 && amx::is_available() {
        return with_float_type!(dtype, |E| {
            let product = match a.dtype() {
                DType::BF16 => amx::new_product::<bf16, E, 1>(factors([a, b])),
                _ => amx::new_product::<f16, E, 2>(factors([a, b])),
            };
            FlexTensor::from_data(TensorData::new(product, shape))
        });
    }
    if a.dtype() == DType::BF16 && b.dtype() == DType::BF16 && pairs::are_multiplied() {
        return with_float_type!(dtype, |E| FlexTensor::from_data(TensorData::new(
            pairs::new_product::<E>(factors([a, b])),
            shape
        )));
    }
    if a.dtype() == b.dtype()
        && a.dtype() != DType::F32
        && let Some(product) =
            with_float_type!(a.dtype(), |I| product_in_blocks::<I>([a, b], dtype))
    {
        return product;
    }
    let [a, b] = [a, b].map(Wide::new);
    let sums = new_product([&a, &b].map(Wide::matrix));
    if dtype == DType::F32 {
        return FlexTensor::from_data(TensorData::new(sums, shape));
    }
    with_float_type!(dtype, |E| new_tensor(shape, |at, part: &mut Uninit<E>| {
        convert(&sums[at..][..part.len()], part)
    }))
}

/// Returns the product of matrices of bf16 or f16 that are converted block by block, where this saves time.
fn product_in_blocks<I: KernelFloat>([a, b]: [&FlexTensor; 2], dtype: DType) -> Option<FlexTensor> {
    let factors = factors::<I>([a, b]);
    let shape = Shape::from([a.shape()[0], b.shape()[1]]);
    narrow::is_faster(factors).then(|| {
        with_float_type!(dtype, |O| FlexTensor::from_data(TensorData::new(
            narrow::new_product::<I, O>(factors),
            shape
        )))
    })
}

/// Returns the elements of `a · b`.
pub(super) fn new_product(factors: [Matrix<'_>; 2]) -> Vec<f32> {
    let mut sums = Vec::new();
    append_product(&mut sums, factors);
    sums
}

/// Appends the elements of `a · b` to `sums`, and returns them.
pub(super) fn append_product<'a>(sums: &'a mut Vec<f32>, [a, b]: [Matrix<'_>; 2]) -> &'a mut [f32] {
    let (len, numel) = (sums.len(), a.rows * b.columns);
    sums.reserve_exact(numel);
    let target = &mut sums.spare_capacity_mut()[..numel];
    multiply_into(Threads::Pool, (target, b.columns), false, 1.0, [a, b]);
    // SAFETY: a product that is not added writes all its elements.
    unsafe { sums.set_len(len + numel) };
    &mut sums[len..]
}

/// A matrix as f32.
struct Wide<'a> {
    tensor: Cow<'a, FlexTensor>,
    /// The elements of its memory, unless they are f32.
    elements: Option<Vec<f32>>,
}

impl<'a> Wide<'a> {
    /// Returns the matrix of a tensor of f32, bf16 or f16 with two dimensions.
    fn new(tensor: &'a FlexTensor) -> Self {
        let is_wide = tensor.dtype() == DType::F32;
        // A matrix of few columns of a larger one has more memory than elements.
        let has_gaps = |tensor: &FlexTensor| {
            let extent = tensor.shape().dims::<2>().into_iter().zip(strides(tensor));
            let extent: usize = extent.map(|(size, stride)| (size.max(1) - 1) * stride).sum();
            extent >= 2 * tensor.shape().num_elements()
        };
        let tensor = match !is_wide && has_gaps(tensor) {
            true => Cow::Owned(tensor.to_contiguous()),
            false => Cow::Borrowed(tensor),
        };
        let elements = (!is_wide)
            .then(|| with_float_type!(tensor.dtype(), |E| converted(memory::<E>(&tensor))));
        Self { tensor, elements }
    }

    fn matrix(&self) -> Matrix<'_> {
        match &self.elements {
            Some(elements) => strided(&self.tensor, elements),
            None => matrix(&self.tensor),
        }
    }
}

/// Returns the elements as another type, converted on all threads of the current pool.
fn converted<I: KernelFloat, O: KernelFloat>(elements: &[I]) -> Vec<O> {
    let mut converted = Vec::with_capacity(elements.len());
    let target = &mut converted.spare_capacity_mut()[..elements.len()];
    let parts = target.par_chunks_mut(TASK).zip(elements.par_chunks(TASK));
    parts.for_each(|(target, elements)| {
        convert(elements, target);
    });
    // SAFETY: `convert` wrote every element of each part.
    unsafe { converted.set_len(elements.len()) };
    converted
}

/// Checks that a matrix of contiguous rows lies within `len` elements.
fn check_len(len: usize, [rows, columns]: [usize; 2], stride: usize) {
    let end = if rows == 0 { 0 } else { (rows - 1) * stride + columns };
    assert!(columns <= stride || rows <= 1, "rows of {columns} elements every {stride} elements");
    assert!(end <= len, "a matrix of {rows} rows exceeds {len} elements");
}

/// Writes `scale · a · b` to the rows of `target`, which begin every `stride` elements, or adds it to
/// them. The bits depend only on the elements and the shapes.
///
/// # Panics
///
/// If the shapes do not fit, or if the result exceeds `target`.
pub(super) fn multiply(
    threads: Threads,
    (target, stride): (&mut [f32], usize),
    adds: bool,
    scale: f32,
    factors: [Matrix<'_>; 2],
) {
    // SAFETY: `MaybeUninit<f32>` has the layout of f32, and a product writes only numbers.
    let target = unsafe { &mut *(std::ptr::from_mut(target) as *mut Uninit<f32>) };
    multiply_into(threads, (target, stride), adds, scale, factors);
}

/// Computes [`multiply`]. The rows of `target` may be uninitialised if `adds` is false.
fn multiply_into(
    threads: Threads,
    (target, stride): (&mut Uninit<f32>, usize),
    adds: bool,
    scale: f32,
    [a, b]: [Matrix<'_>; 2],
) {
    assert_eq!(a.columns, b.rows, "the inner sizes of a product");
    check_len(target.len(), [a.rows, b.columns], stride);
    let target = Target { start: target.as_mut_ptr().cast(), stride };
    // SAFETY: `check_len` checked that the target holds the result. It is borrowed mutably.
    unsafe {
        match threads {
            Threads::Pool if amx::is_faster([a, b]) => {
                multiply_by_amx(target, adds, scale, [a, b]);
            }
            _ => multiply_by_gemm(threads, target, adds, scale, [a, b]),
        }
    }
}

/// Writes a product, or adds it, by AMX on all threads of the current pool.
///
/// # Safety
///
/// The rows of the target lie in memory that nothing else uses. They are initialised if `adds` is true.
unsafe fn multiply_by_amx(target: Target, adds: bool, scale: f32, factors: [Matrix<'_>; 2]) {
    for_each_part(Threads::Pool, factors, |[row, column], factors| {
        // SAFETY: as the caller promises; parts have no element in common.
        unsafe { amx::multiply_part(target.part(row, column), adds, scale, factors) };
    });
}

/// Writes a product, or adds it, by the crate `gemm`.
///
/// # Safety
///
/// As for [`multiply_by_amx`].
unsafe fn multiply_by_gemm(
    threads: Threads,
    target: Target,
    adds: bool,
    scale: f32,
    [a, b]: [Matrix<'_>; 2],
) {
    // `gemm` adds a product to the target block by block, which gives other bits than adding it whole.
    let turned = !adds && is_faster_turned(a, b);
    let [a, b] = if turned { [b.transposed(), a.transposed()] } else { [a, b] };
    for_each_part(threads, [a, b], |[row, column], factors| {
        // SAFETY: as the caller promises; parts have no element in common.
        unsafe {
            match turned {
                true => multiply_turned(target.part(column, row), scale, factors),
                false => multiply_part(target.part(row, column), adds, scale, factors),
            }
        }
    });
}

/// Computes [`multiply_by_gemm`] on the calling thread.
///
/// # Safety
///
/// As for [`multiply_by_amx`].
unsafe fn multiply_part(target: Target, adds: bool, scale: f32, [a, b]: [Matrix<'_>; 2]) {
    let multiply_block = |first: usize, block: Matrix<'_>| {
        // SAFETY: as the caller promises, for the columns of the block.
        unsafe { multiply_as_it_is(target.part(0, first), adds, scale, [a, block]) };
    };
    match keeps_bits([a.rows, b.columns]) {
        true => for_each_block(a, b, multiply_block),
        false => multiply_block(0, b),
    }
}

/// Computes [`multiply_part`] with the factors where they are.
///
/// # Safety
///
/// As for [`multiply_part`].
unsafe fn multiply_as_it_is(target: Target, adds: bool, scale: f32, [a, b]: [Matrix<'_>; 2]) {
    let [stride, a_rows, a_columns, b_rows, b_columns] =
        [target.stride, a.row_stride, a.column_stride, b.row_stride, b.column_stride]
            .map(|stride| stride as isize);
    // SAFETY: as the caller promises, for the target. The constructors of `Matrix` checked that its elements
    // hold the matrix; transposing keeps the set of positions.
    unsafe {
        gemm::gemm(
            a.rows,
            b.columns,
            a.columns,
            target.start,
            1,
            stride,
            adds,
            a.elements.as_ptr(),
            a_columns,
            a_rows,
            b.elements.as_ptr(),
            b_columns,
            b_rows,
            1.0,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::parts::part_shape;
    use super::*;

    pub(in crate::flex::product) fn elements(len: usize) -> Vec<f32> {
        (0..len).map(|at| ((at * 7919) % 1013) as f32 * 0.001 - 0.5).collect()
    }

    /// Rows, inner sizes and columns of products.
    pub(in crate::flex::product) const SIZES: [[usize; 3]; 9] = [
        [1, 1, 1],
        [5, 3, 33],
        [12, 64, 32],
        [500, 129, 70],
        [31, 2500, 40],
        [13, 1024, 1100],
        [260, 2049, 65],
        [64, 96, 48],
        [1500, 40, 33],
    ];

    /// Returns an element of a matrix.
    pub(in crate::flex::product) fn element<E: KernelFloat>(
        matrix: Matrix<'_, E>,
        [row, column]: [usize; 2],
    ) -> f64 {
        matrix.elements[row * matrix.row_stride + column * matrix.column_stride].wide().into()
    }

    /// Calls `f` with the factors as f32, in the layouts that they have.
    pub(in crate::flex::product) fn with_widened<E: KernelFloat, R>(
        factors: [Matrix<'_, E>; 2],
        f: impl FnOnce([Matrix<'_>; 2]) -> R,
    ) -> R {
        let elements = factors.map(|matrix| -> Vec<f32> {
            matrix.elements.iter().map(|element| element.wide()).collect()
        });
        f([0, 1].map(|at| {
            let Matrix { rows, columns, row_stride, column_stride, .. } = factors[at];
            Matrix { elements: &elements[at], rows, columns, row_stride, column_stride }
        }))
    }

    /// Returns a matrix of these sizes, whose rows or columns are consecutive elements.
    pub(in crate::flex::product) fn matrix<E: Copy>(
        elements: &[E],
        [rows, columns]: [usize; 2],
        transposed: bool,
    ) -> Matrix<'_, E> {
        match transposed {
            true => Matrix::new(elements, [columns, rows], rows).transposed(),
            false => Matrix::new(elements, [rows, columns], columns),
        }
    }

    /// Returns the product of matrices of these sizes, computed by as many threads, added to ones.
    fn product_of(
        [rows, inner, columns]: [usize; 3],
        threads: usize,
        transposed: bool,
        by_gemm: bool,
    ) -> Vec<f32> {
        let (a, b) = (elements(rows * inner), elements(inner * columns));
        let factors =
            [matrix(&a, [rows, inner], transposed), matrix(&b, [inner, columns], transposed)];
        // Rows of the target are farther apart than they are long.
        let mut target = vec![1f32; rows * (columns + 3)];
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let start = Target { start: target.as_mut_ptr(), stride: columns + 3 };
        pool.install(|| match by_gemm {
            // SAFETY: the vector has room for the product.
            true => unsafe { multiply_by_gemm(Threads::Pool, start, true, 0.5, factors) },
            false => multiply(Threads::Pool, (&mut target, columns + 3), true, 0.5, factors),
        });
        target
    }

    #[test]
    fn parts_have_the_bits_of_the_whole() {
        for sizes in [
            [130, 700, 200],
            [1, 900, 9000],
            [2500, 900, 7],
            [66, 1200, 130],
            [130, 1024, 330],
            [66, 768, 700],
            [3, 20_000, 70],
        ] {
            for (transposed, by_gemm) in
                [(false, false), (true, false), (false, true), (true, true)]
            {
                let whole = product_of(sizes, 1, transposed, by_gemm);
                for threads in [2, 3, 8] {
                    let parts = product_of(sizes, threads, transposed, by_gemm);
                    assert_eq!(parts, whole, "{sizes:?} on {threads} threads");
                }
            }
        }
    }

    #[test]
    fn products_without_terms_or_elements_are_computed() {
        for [rows, inner, columns] in [[3, 0, 4], [0, 5, 4], [3, 5, 0], [0, 0, 0]] {
            let (a, b) = (elements(rows * inner), elements(inner * columns));
            let factors = [matrix(&a, [rows, inner], false), matrix(&b, [inner, columns], false)];
            assert_eq!(new_product(factors), vec![0.0; rows * columns]);
        }
    }

    #[test]
    fn parts_cover_the_product_and_are_no_more_than_threads() {
        for [rows, columns] in [[256, 768], [768, 3072], [7, 50_257], [5000, 3]] {
            for threads in [1, 2, 6, 16] {
                let [of_rows, of_columns] = part_shape(threads, [rows, 4096, columns]);
                let parts = rows.div_ceil(of_rows) * columns.div_ceil(of_columns);
                assert!((1..=threads).contains(&parts), "{parts} parts on {threads} threads");
            }
        }
        assert_eq!(part_shape(8, [100, 8, 100]), [100, 100]);
    }
}
