//! The gradient of an embedding's table against sums in f64.

use burn::module::{Param, ParamId};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use fsdp_runtime::nn::Embedding;

use super::rows::{assert_rounded, matrix};
use super::support::{devices, dtypes, elements_of};

const ROWS: usize = 40;

/// Returns the rows of the ids, and the gradient of the table of the rows' sum weighted by `weights`.
fn with_gradient(table: Tensor<2>, ids: &[i32], weights: Tensor<2>) -> [Vec<f64>; 2] {
    let table = Tensor::<2>::from_inner(table).require_grad();
    let ids = TensorData::new(ids.to_vec(), [1, ids.len()]);
    let ids = Tensor::<2, Int>::from_data(ids, &table.device());
    let layer =
        Embedding { weight: Param::initialized(ParamId::new(), table.clone()), padding_idx: None };
    let rows = layer.forward(ids).squeeze_dim::<2>(0);
    let gradients = (rows.clone() * Tensor::from_inner(weights)).sum().backward();
    let gradient = table.grad(&gradients).expect("a gradient");
    [elements_of(&rows.inner()), elements_of(&gradient)]
}

/// Returns what [`with_gradient`] should, in f64.
fn expected(table: &Tensor<2>, ids: &[i32], weights: &Tensor<2>) -> [Vec<f64>; 2] {
    let (width, table, weights) = (table.dims()[1], elements_of(table), elements_of(weights));
    let row = |id: i32| id as usize * width..(id as usize + 1) * width;
    let rows = ids.iter().flat_map(|&id| table[row(id)].to_vec()).collect();
    let mut gradient = vec![0.0; table.len()];
    for (&id, weights) in ids.iter().zip(weights.chunks_exact(width)) {
        gradient[row(id)].iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
    }
    [rows, gradient]
}

fn check(device: &Device, dtype: FloatDType, ids: &[i32], width: usize) {
    let what = format!("{device:?} {dtype:?} {} ids, width {width}", ids.len());
    let table = matrix([ROWS, width], 2.0, 1, device, dtype);
    // Sums of these are exact in f32.
    let weights = matrix([ids.len(), width], 1.0, 2, device, dtype);
    let found = with_gradient(table.clone(), ids, weights.clone());
    let [rows, gradient] = expected(&table, ids, &weights);
    assert_eq!(found[0], rows, "{what}");
    assert_rounded(&found[1], &gradient, dtype, &what);
    if dtype == FloatDType::F32 {
        assert_eq!(found[1], gradient, "{what}: sums of few bits are exact");
    }
}

#[test]
fn gradients_of_equal_ids_are_added() {
    for device in devices() {
        for dtype in dtypes(&device) {
            // Flex has a kernel for f32; Burn's operation rounds each sum.
            if dtype != FloatDType::F32 && device == Device::flex() {
                continue;
            }
            for width in [1, 7, 64, 100] {
                check(&device, dtype, &[3], width);
                check(&device, dtype, &[39, 0, 39, 5, 0, 39], width);
                let many: Vec<i32> = (0..517).map(|at| at * at % 37).collect();
                check(&device, dtype, &many, width);
                check(&device, dtype, &[7; 300], width);
            }
        }
    }
}
