//! The gradient of a table whose rows were looked up.

use burn::backend::flex::FlexTensor;
use burn::tensor::{Shape, TensorData};
use rayon::prelude::*;

use super::float::KernelFloat;
use super::known_rows::{is_faster, with_rows};
use super::new_tensor::TASK;

/// Implements [`Kernels::table_gradient`](crate::Kernels::table_gradient). Sums are in the type of the
/// gradients.
///
/// # Panics
///
/// If an id is no row of the table.
pub(super) fn gradient<E: KernelFloat>(grads: &[E], ids: &[f32], shape: Shape) -> FlexTensor {
    let [rows, width] = shape.dims();
    let numbers: Vec<usize> = ids
        .iter()
        .map(|&id| {
            let is_row = id >= 0.0 && (id as usize) < rows;
            assert!(is_row, "id {id} is no row of a table of {rows} rows");
            id as usize
        })
        .collect();
    let add_rows = |table: &mut [E]| {
        for (grads, &number) in grads.chunks_exact(width).zip(&numbers) {
            let row = &mut table[number * width..][..width];
            for (sum, grad) in row.iter_mut().zip(grads) {
                *sum = E::narrow(sum.wide() + grad.wide());
            }
        }
    };
    if is_faster::<E>(numbers.len(), [rows, width])
        && let Ok(table) = with_rows([rows, width], numbers.clone(), add_rows)
    {
        return table;
    }
    let mut table = Vec::with_capacity(rows * width);
    // Fresh pages go to the threads that touch them first.
    let parts = table.spare_capacity_mut()[..rows * width].par_chunks_mut(TASK);
    parts.for_each(|part| {
        part.iter_mut().for_each(|element| {
            element.write(E::zeroed());
        });
    });
    // SAFETY: every element of each part was written.
    unsafe { table.set_len(rows * width) };
    add_rows(&mut table);
    FlexTensor::from_data(TensorData::new(table, shape))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_of_a_row_are_added_and_other_rows_are_zero() {
        let grads = [1f32, 2.0, 10.0, 20.0, 100.0, 200.0];
        let table = gradient(&grads, &[3.0, 0.0, 3.0], Shape::from([5, 2]));
        let expected = [10f32, 20.0, 0.0, 0.0, 0.0, 0.0, 101.0, 202.0, 0.0, 0.0];
        assert_eq!(table.as_slice::<f32>(), Some(&expected[..]));
    }

    #[test]
    #[should_panic(expected = "id 5 is no row of a table of 5 rows")]
    fn an_id_beyond_the_table_is_refused() {
        gradient(&[1f32], &[5.0], Shape::from([5, 1]));
    }
}
