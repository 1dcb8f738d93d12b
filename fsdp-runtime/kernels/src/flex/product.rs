//! Products of small matrices, on the kernel that Flex itself uses (crate `gemm`).

use burn::backend::flex::FlexTensor;

/// A matrix in memory: element (r, c) is at `r · row_stride + c · column_stride`.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    elements: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Returns the matrix whose rows begin every `stride` elements.
    ///
    /// # Panics
    ///
    /// If the matrix exceeds the elements.
    pub(super) fn new(elements: &'a [f32], [rows, columns]: [usize; 2], stride: usize) -> Self {
        check_len(elements.len(), [rows, columns], stride);
        Self { elements, rows, columns, row_stride: stride, column_stride: 1 }
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

/// Returns the matrix of an f32 tensor with two dimensions, of any strides that are not negative.
///
/// # Panics
///
/// If a stride is negative.
pub(super) fn matrix(tensor: &FlexTensor) -> Matrix<'_> {
    let layout = tensor.layout();
    let stride = |at: usize| usize::try_from(layout.strides()[at]).expect("strides of a matrix");
    let [rows, columns] = layout.shape().dims();
    let (row_stride, column_stride) = (stride(0), stride(1));
    let elements = &tensor.storage::<f32>()[layout.start_offset()..];
    let last = rows.saturating_sub(1) * row_stride + columns.saturating_sub(1) * column_stride;
    assert!(rows * columns == 0 || last < elements.len(), "a matrix exceeds its tensor");
    Matrix { elements, rows, columns, row_stride, column_stride }
}

/// Checks that a matrix of contiguous rows lies within `len` elements.
fn check_len(len: usize, [rows, columns]: [usize; 2], stride: usize) {
    let end = if rows == 0 { 0 } else { (rows - 1) * stride + columns };
    assert!(columns <= stride || rows <= 1, "rows of {columns} elements every {stride} elements");
    assert!(end <= len, "a matrix of {rows} rows exceeds {len} elements");
}

/// Threads that compute a product. The bits are the same.
#[derive(Clone, Copy)]
pub(super) enum Threads {
    /// The calling thread.
    One,
    /// All threads of the current pool.
    Pool,
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
    [a, b]: [Matrix<'_>; 2],
) {
    assert_eq!(a.columns, b.rows, "the inner sizes of a product");
    check_len(target.len(), [a.rows, b.columns], stride);
    let [stride, a_rows, a_columns, b_rows, b_columns] =
        [stride, a.row_stride, a.column_stride, b.row_stride, b.column_stride]
            .map(|stride| stride as isize);
    let threads = match threads {
        Threads::One => gemm::Parallelism::None,
        Threads::Pool => gemm::Parallelism::Rayon(0),
    };
    // SAFETY: `check_len` checked that the target holds the result, and the constructors of `Matrix` that
    // its elements hold the matrix; transposing keeps the set of positions. The target is borrowed
    // mutably, so it overlaps neither factor.
    unsafe {
        gemm::gemm(
            a.rows,
            b.columns,
            a.columns,
            target.as_mut_ptr(),
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
            threads,
        );
    }
}
