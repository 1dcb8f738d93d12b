//! Heads of tensors `[batch, heads, rows, width]`, whose rows lie anywhere in memory, and the rows that a
//! task writes.
//!
//! A tensor of heads is often a view of a matrix `[batch · rows, heads · width]`, the result of a linear
//! layer. Its heads are read where they are, and results have the order of such a matrix too, so that
//! nothing is copied between a linear layer and attention.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape, TensorData};

use crate::flex::float::KernelFloat;
use crate::flex::loops::convert_over;
use crate::flex::product::Matrix;

/// Returns the tensor, or a copy if the elements of its rows are not consecutive.
pub(super) fn with_rows(tensor: &FlexTensor) -> FlexTensor {
    let ([.., rows, width], strides) = (tensor.shape().dims::<4>(), tensor.layout().strides());
    let are_rows = strides[3] == 1 || width == 1;
    let are_apart = rows == 1 || strides[2] >= width as isize;
    if are_rows && are_apart && strides.iter().all(|&stride| stride >= 0) {
        return tensor.clone();
    }
    tensor.to_contiguous()
}

/// The heads of a tensor.
#[derive(Clone, Copy)]
pub(super) struct Heads<'a, E> {
    elements: &'a [E],
    heads: usize,
    rows: usize,
    width: usize,
    /// Elements from one to the next row of the batch, head and row.
    strides: [usize; 3],
}

impl<'a, E: KernelFloat> Heads<'a, E> {
    /// Returns the heads of a tensor that [`with_rows`] returned.
    pub(super) fn new(tensor: &'a FlexTensor) -> Self {
        let [_, heads, rows, width] = tensor.shape().dims();
        let strides = tensor.layout().strides();
        let strides = [0, 1, 2].map(|at| strides[at] as usize);
        Self {
            elements: &tensor.storage::<E>()[tensor.layout().start_offset()..],
            heads,
            rows,
            width,
            strides,
        }
    }

    /// Returns the rows of the head of this number, counted over all rows of the batch.
    pub(super) fn head(&self, number: usize) -> Rows<'a, E> {
        let [of_batch, of_head, stride] = self.strides;
        let start = number / self.heads * of_batch + number % self.heads * of_head;
        Rows { elements: &self.elements[start..], rows: self.rows, width: self.width, stride }
    }
}

/// Rows of one head.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, E> {
    /// The elements from the first row on.
    elements: &'a [E],
    rows: usize,
    width: usize,
    /// Elements from one row to the next.
    stride: usize,
}

impl<'a, E: KernelFloat> Rows<'a, E> {
    /// Returns the rows in the range.
    pub(super) fn range(&self, rows: &Range<usize>) -> Self {
        assert!(rows.start < rows.end && rows.end <= self.rows, "rows of a head");
        Self { elements: &self.elements[rows.start * self.stride..], rows: rows.len(), ..*self }
    }

    /// Returns the matrix of the rows: their elements themselves if they are f32, else converted in
    /// `scratch`, which grows as needed.
    pub(super) fn matrix<'s>(&self, scratch: &'s mut Vec<f32>) -> Matrix<'s>
    where
        'a: 's,
    {
        let shape = [self.rows, self.width];
        if E::dtype() == DType::F32 {
            let elements: &'a [f32] = bytemuck::cast_slice(self.elements);
            return Matrix::new(elements, shape, self.stride.max(self.width));
        }
        let len = self.rows * self.width;
        if scratch.len() < len {
            scratch.resize(len, 0.0);
        }
        for (row, wide) in self.iter().zip(scratch.chunks_exact_mut(self.width)) {
            E::widened(row, wide);
        }
        Matrix::new(&scratch[..len], shape, self.width)
    }

    /// Returns the elements of each row.
    fn iter(&self) -> impl Iterator<Item = &'a [E]> {
        let Self { elements, rows, width, stride } = *self;
        (0..rows).map(move |row| &elements[row * stride..][..width])
    }
}

/// Elements of a new tensor of heads.
pub(super) struct NewHeads<E> {
    elements: Vec<E>,
    shape: [usize; 4],
    /// Whether the rows of a head are farther from each other than the heads of a row.
    by_rows: bool,
}

impl<E: KernelFloat> NewHeads<E> {
    /// Returns zeros in the order of memory of `like`, for rows of `width` elements.
    pub(super) fn like(like: &FlexTensor, width: usize) -> Self {
        let [batch, heads, rows, _] = like.shape().dims();
        let strides = like.layout().strides();
        let by_rows = heads > 1 && rows > 1 && strides[1] < strides[2];
        let elements = vec![E::zeroed(); batch * heads * rows * width];
        Self { elements, shape: [batch, heads, rows, width], by_rows }
    }

    /// Returns the rows of each head, counted over all rows of the batch.
    pub(super) fn heads(&mut self) -> Vec<Vec<&mut [E]>> {
        let [batch, heads, rows, width] = self.shape;
        let mut result: Vec<Vec<&mut [E]>> =
            (0..batch * heads).map(|_| Vec::with_capacity(rows)).collect();
        for (number, row) in self.elements.chunks_exact_mut(width).enumerate() {
            let head = match self.by_rows {
                true => number / (rows * heads) * heads + number % heads,
                false => number / rows,
            };
            result[head].push(row);
        }
        result
    }

    /// Returns the tensor.
    pub(super) fn into_tensor(self) -> FlexTensor {
        let [batch, heads, rows, width] = self.shape;
        let tensor = |elements, shape: [usize; 4]| {
            FlexTensor::from_data(TensorData::new(elements, Shape::from(shape)))
        };
        match self.by_rows {
            true => tensor(self.elements, [batch, rows, heads, width]).transpose(1, 2),
            false => tensor(self.elements, [batch, heads, rows, width]),
        }
    }
}

/// Sums in f32 of which rows of a tensor get the rounded ones.
pub(super) struct Sums<'a, E> {
    rows: Vec<&'a mut [E]>,
    sums: Vec<f32>,
}

impl<'a, E: KernelFloat> Sums<'a, E> {
    /// Returns sums that are 0.
    pub(super) fn new(rows: Vec<&'a mut [E]>) -> Self {
        let sums = vec![0.0; rows.iter().map(|row| row.len()).sum()];
        Self { rows, sums }
    }

    /// Returns the sums, those of one row after those of the other.
    pub(super) fn get(&mut self) -> &mut [f32] {
        &mut self.sums
    }

    /// Writes the sums to the tensor.
    pub(super) fn store(self) {
        let mut sums = self.sums.as_slice();
        for row in self.rows {
            let (own, rest) = sums.split_at(row.len());
            convert_over(own, row);
            sums = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `[batch, rows, heads, width]` as a tensor of heads.
    fn by_rows(shape: [usize; 4]) -> FlexTensor {
        let len = shape.iter().product::<usize>();
        let elements: Vec<f32> = (0..len).map(|at| at as f32).collect();
        FlexTensor::from_data(TensorData::new(elements, Shape::from(shape))).transpose(1, 2)
    }

    #[test]
    fn heads_are_read_and_written_where_they_are() {
        let source = by_rows([2, 5, 3, 4]);
        let expected = source.to_contiguous();
        for tensor in [source, expected.clone()] {
            let read = with_rows(&tensor);
            let heads = Heads::<f32>::new(&read);
            let mut target = NewHeads::<f32>::like(&tensor, 4);
            for (number, rows) in target.heads().into_iter().enumerate() {
                let mut sums = Sums::new(rows);
                for (sum, row) in sums.get().chunks_mut(4).zip(heads.head(number).iter()) {
                    sum.copy_from_slice(row);
                }
                sums.store();
            }
            let target = target.into_tensor();
            assert_eq!(target.layout().strides(), tensor.layout().strides());
            assert_eq!(target.to_contiguous().into_data(), expected.clone().into_data());
        }
    }
}
