//! Products as cuBLASLt has them: matrices whose columns are contiguous.
//!
//! A matrix with contiguous rows is the transposed one of a matrix with contiguous columns. So the rows of
//! `x · w` are the columns of `wᵀ · xᵀ`: the second factor of a product is the first of the call.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use crate::contract::takes;

/// What a call does with the sums of products before it writes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Epilogue {
    /// Nothing.
    None,
    /// Adds a number to each row of the call's target.
    Bias,
    /// Writes the sums with the bias to a second target, and their GELU in the tanh approximation to the
    /// first.
    BiasAndGelu,
    /// Writes the sums of the rows of `op(A)` as well.
    SumsOfA,
}

/// `D = epilogue(op(A) · op(B) + D)`, for a batch of matrices with contiguous columns. Strides count
/// elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Call {
    /// Rows of D, columns of D, and the length of its sums.
    pub(super) dims: [usize; 3],
    /// Whether A and B are transposed.
    pub(super) transposed: [bool; 2],
    /// Distance of the columns of A, B and D.
    pub(super) leading: [usize; 3],
    /// Number of products in one call, and the distance of their matrices.
    pub(super) batch: usize,
    pub(super) batch_strides: [usize; 3],
    /// Number of calls, and the distance of their matrices.
    pub(super) calls: usize,
    pub(super) call_strides: [usize; 3],
    /// Dtype of A and B, and that of D.
    pub(super) dtypes: [DType; 2],
    /// Whether D is added to.
    pub(super) adds: bool,
    pub(super) epilogue: Epilogue,
}

/// The factors of a call, in its order.
pub(super) struct Operands {
    pub(super) a: CubeTensor,
    pub(super) b: CubeTensor,
}

/// Most calls for one product. More are a product of contiguous copies.
const MOST_CALLS: usize = 16;

impl Call {
    /// Returns the call that multiplies two tensors `[.., rows, columns]`, to a contiguous tensor of
    /// `output`. Factors whose layout the library lacks are copied. Returns `None` for dtypes and sizes
    /// that the library lacks.
    pub(super) fn of(factors: &[CubeTensor; 2], output: DType) -> Option<(Self, Operands)> {
        let [x, w] = factors;
        let dtype = x.dtype;
        let narrow = matches!(dtype, DType::BF16 | DType::F16);
        let is_known = takes(dtype) && (output == dtype || (narrow && output == DType::F32));
        let dims = x.shape().num_dims();
        if w.dtype != dtype || !is_known || dims < 2 || w.shape().num_dims() != dims {
            return None;
        }
        let [rows, inner] = [x.shape()[dims - 2], x.shape()[dims - 1]];
        let columns = w.shape()[dims - 1];
        let batch: Vec<usize> = x.shape()[..dims - 2].to_vec();
        let same = w.shape()[..dims - 2] == batch[..] && w.shape()[dims - 2] == inner;
        let numel = [rows, inner, columns].iter().chain(&batch).product::<usize>();
        if !same || numel == 0 || [rows, inner, columns].iter().any(|&n| n > i32::MAX as usize) {
            return None;
        }
        let whole = [rows * columns, columns];
        let [a, b] = [w, x].map(Factor::of);
        let batches = Batches::of(&batch, [&a, &b].map(Factor::batch_strides), whole[0])
            .filter(|batches| batches.calls <= MOST_CALLS);
        let (a, b, batches) = match batches {
            Some(batches) => (a, b, batches),
            None => {
                let [a, b] = [a, b].map(Factor::copied);
                let strides = [&a, &b].map(Factor::batch_strides);
                let batches = Batches::of(&batch, strides, whole[0])?;
                (a, b, batches)
            }
        };
        let call = Self {
            dims: [columns, rows, inner],
            transposed: [a.transposed, b.transposed],
            leading: [a.leading, b.leading, whole[1]],
            batch: batches.batch,
            batch_strides: batches.batch_strides,
            calls: batches.calls,
            call_strides: batches.call_strides,
            dtypes: [dtype, output],
            adds: false,
            epilogue: Epilogue::None,
        };
        let operands = Operands { a: a.tensor, b: b.tensor };
        let fits = [(&operands.a, 0), (&operands.b, 1)]
            .iter()
            .all(|(tensor, at)| call.elements(*at) * dtype.size() <= bytes(tensor));
        assert!(fits, "the factors are within their buffers");
        Some((call, operands))
    }

    /// Returns rows and columns of matrix `at` of A, B and D in memory.
    pub(super) fn stored(&self, at: usize) -> [usize; 2] {
        let [m, n, k] = self.dims;
        match (at, self.transposed) {
            (0, [false, _]) => [m, k],
            (0, [true, _]) => [k, m],
            (1, [_, false]) => [k, n],
            (1, [_, true]) => [n, k],
            _ => [m, n],
        }
    }

    /// Returns the number of elements from the first to the last of matrix `at` of A, B and D.
    pub(super) fn elements(&self, at: usize) -> usize {
        let [rows, columns] = self.stored(at);
        (self.calls - 1) * self.call_strides[at]
            + (self.batch - 1) * self.batch_strides[at]
            + (columns - 1) * self.leading[at]
            + rows
    }

    /// Returns whether the library has the epilogue for these sizes. A second target needs rows of whole
    /// vectors. cuBLAS before 12.8 update 1 adds a wrong bias where D has one row or column, and before 12.3
    /// update 1 sums wrong rows of factors that have one column.
    pub(super) fn is_taken(&self) -> bool {
        let [rows, columns, inner] = self.dims;
        let is_one = self.batch * self.calls == 1;
        match self.epilogue {
            Epilogue::None => true,
            Epilogue::Bias => is_one && rows > 1 && columns > 1,
            Epilogue::SumsOfA => is_one && inner > 1,
            Epilogue::BiasAndGelu => is_one && rows.is_multiple_of(8) && columns > 1,
        }
    }
}

/// Returns the number of bytes of a tensor's buffer from its first element on.
fn bytes(tensor: &CubeTensor) -> usize {
    tensor.handle.size_in_used() as usize
}

/// A factor, with the layout of its matrices.
struct Factor {
    tensor: CubeTensor,
    /// Whether the rows of the tensor's matrices are not contiguous, but the columns are.
    transposed: bool,
    /// Distance of the rows, or of the columns if they are contiguous.
    leading: usize,
}

impl Factor {
    fn of(tensor: &CubeTensor) -> Self {
        let matrix = Layout::of(tensor);
        match matrix {
            Some(Layout { transposed, leading }) => {
                Self { tensor: tensor.clone(), transposed, leading }
            }
            None => Self::of_rows(tensor.clone()),
        }
    }

    /// Returns the factor as a contiguous copy.
    fn copied(self) -> Self {
        Self::of_rows(self.tensor)
    }

    fn of_rows(tensor: CubeTensor) -> Self {
        let tensor = super::super::tensors::contiguous(tensor);
        let columns = tensor.shape()[tensor.shape().num_dims() - 1];
        Self { tensor, transposed: false, leading: columns }
    }

    /// Returns the strides of the dimensions before the matrices.
    fn batch_strides(&self) -> Vec<usize> {
        let dims = self.tensor.shape().num_dims();
        self.tensor.meta.strides()[..dims - 2].to_vec()
    }
}

/// Layout of the matrices of a tensor, if the library has it.
struct Layout {
    transposed: bool,
    leading: usize,
}

impl Layout {
    fn of(tensor: &CubeTensor) -> Option<Self> {
        let dims = tensor.shape().num_dims();
        let [rows, columns] = [tensor.shape()[dims - 2], tensor.shape()[dims - 1]];
        let strides = tensor.meta.strides();
        let [row_stride, column_stride] = [strides[dims - 2], strides[dims - 1]];
        let leading = |stride: usize, count: usize, len: usize| match count {
            1 => Some(len),
            _ => Some(stride).filter(|&stride| stride >= len),
        };
        if column_stride == 1 || columns == 1 {
            let leading = leading(row_stride, rows, columns);
            if let Some(leading) = leading {
                return Some(Self { transposed: false, leading });
            }
        }
        if row_stride == 1 || rows == 1 {
            let leading = leading(column_stride, columns, rows)?;
            return Some(Self { transposed: true, leading });
        }
        None
    }
}

/// How the dimensions before the matrices become batches and calls.
struct Batches {
    batch: usize,
    batch_strides: [usize; 3],
    calls: usize,
    call_strides: [usize; 3],
}

impl Batches {
    /// Returns the batches of tensors with these dimensions and strides. The target is contiguous, with
    /// `matrix` elements in each matrix. Returns `None` if more than one dimension would be left to calls.
    fn of(dims: &[usize], strides: [Vec<usize>; 2], matrix: usize) -> Option<Self> {
        let [a, b] = strides;
        let mut batch = 1;
        let mut batch_strides = [0; 3];
        let mut at = dims.len();
        while at > 0 {
            let (dim, here) = (dims[at - 1], [a[at - 1], b[at - 1]]);
            let continues =
                batch == 1 || (0..2).all(|factor| here[factor] == batch_strides[factor] * batch);
            if dim != 1 && !continues {
                break;
            }
            if dim != 1 {
                if batch == 1 {
                    batch_strides = [here[0], here[1], matrix];
                }
                batch *= dim;
            }
            at -= 1;
        }
        let left: Vec<usize> = (0..at).filter(|&at| dims[at] != 1).collect();
        let (calls, call_strides) = match left[..] {
            [] => (1, [0; 3]),
            [at] => (dims[at], [a[at], b[at], matrix * batch]),
            _ => return None,
        };
        Some(Self { batch, batch_strides, calls, call_strides })
    }
}
