//! Attention and its gradients against the definition in f64.

mod case;
mod masks;

use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::nn::{AttentionOptions, DropoutConfig, attention};
use proptest::prelude::*;

use self::case::{Case, PLAIN, bounds, numbers};
use super::support::{device, devices, dtypes, product_dtype, tensor};
use crate::compare::assert_same_bits;

#[test]
fn output_and_gradients_are_exact() {
    let cases = [
        PLAIN,
        Case { causal: true, ..PLAIN },
        Case { masked: true, batch: 3, ..PLAIN },
        Case { masked: true, causal: true, batch: 3, ..PLAIN },
        Case { scale: Some(0.7), value_width: 5, ..PLAIN },
        Case { queries: 40, keys: 300, causal: true, ..PLAIN },
        Case { queries: 300, keys: 40, causal: true, ..PLAIN },
        // The first query comes before the first key, and the last block has one query.
        Case { queries: 129, keys: 128, causal: true, ..PLAIN },
        Case { queries: 1, keys: 1, width: 1, value_width: 1, ..PLAIN },
    ];
    let flex = Device::flex();
    for dtype in dtypes(&flex).chain([FloatDType::F64]) {
        for case in cases {
            case.assert_exact(&flex, dtype, bounds(dtype, &flex));
        }
    }
}

/// Emulated devices compile kernels for each shape and dtype, which takes seconds, so there are few.
#[test]
fn output_and_gradients_are_exact_on_the_device() {
    let Some(device) = device() else { return };
    let small = Case { batch: 1, heads: 2, queries: 140, keys: 140, ..PLAIN };
    let both = Case { masked: true, causal: true, batch: 3, heads: 1, ..small };
    for (case, dtype) in [(both, FloatDType::F32), (small, FloatDType::F16)] {
        if dtypes(&device).any(|supported| supported == dtype) {
            case.assert_exact(&device, dtype, bounds(product_dtype(&device, dtype), &device));
        }
    }
}

#[test]
fn heads_of_64_over_several_tiles_are_exact() {
    let case = Case { batch: 1, queries: 700, keys: 700, width: 64, value_width: 64, ..PLAIN };
    for causal in [false, true] {
        let dtype = FloatDType::F32;
        Case { causal, ..case }.assert_exact(&Device::flex(), dtype, [1e-5, 1e-2]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_shape_is_exact(
        (batch, heads) in (1usize..4, 1usize..4),
        (queries, keys) in (1usize..300, 1usize..600),
        (width, value_width) in (1usize..70, 1usize..70),
        (causal, masked) in any::<(bool, bool)>(),
    ) {
        let case = Case {
            batch, heads, queries, keys, width, value_width, causal, masked, ..PLAIN
        };
        // Where one weight is nearly 1, gradients are small differences of numbers of the inputs' size.
        case.assert_exact(&Device::flex(), FloatDType::F32, [1e-5, 1.0]);
    }
}

#[test]
fn a_query_without_keys_has_output_and_gradient_0() {
    for device in devices() {
        // Of f32 only on emulated devices, as above.
        let of_device = |dtype: &FloatDType| device == Device::flex() || *dtype == FloatDType::F32;
        for dtype in dtypes(&device).filter(of_device) {
            // The row 2 of the batch is all padding; and of 300 queries the first 260 come before the
            // first key.
            let padded = Case { batch: 3, masked: true, ..PLAIN };
            let early = Case { queries: 300, keys: 40, causal: true, ..PLAIN };
            for (case, rows) in [(padded, 2 * 3 * 150..3 * 3 * 150), (early, 0..260)] {
                let [output, query, ..] = case.run(&device, dtype);
                let range = rows.start * 16..rows.end * 16;
                for of_rows in [&output[range.clone()], &query[range]] {
                    assert!(of_rows.iter().all(|x| *x == 0.0), "{case:?} {dtype:?} {device:?}");
                }
                assert!(output.iter().chain(&query).all(|x| x.is_finite()));
            }
        }
    }
}

#[test]
fn a_nan_is_not_hidden() {
    let device = Device::flex();
    let heads = |at: usize, wrong: f32| {
        let mut elements = vec![0.5; 300 * 8];
        elements[at] = wrong;
        tensor(&elements, &device, FloatDType::F32).reshape([1, 1, 300, 8])
    };
    let ones = || heads(0, 0.5);
    let options = AttentionOptions::new;
    let all_nan = |output: Tensor<4>| numbers(&output).iter().all(|x| x.is_nan());
    assert!(all_nan(attention(ones(), heads(299 * 8, f32::NAN), ones(), options())));
    let of_query = numbers(&attention(heads(17 * 8, f32::NAN), ones(), ones(), options()));
    for (at, output) in of_query.iter().enumerate() {
        assert_eq!(output.is_nan(), at / 8 == 17, "{at}");
    }
}

/// Runs on one to five threads, and on one twice. With more than two threads for a head, backward has
/// several tasks for it.
#[test]
fn the_bits_do_not_depend_on_the_threads() {
    let several = Case { causal: true, masked: true, queries: 300, keys: 600, ..PLAIN };
    let one_head = Case { batch: 1, heads: 1, ..several };
    let cases =
        [several, one_head, Case { causal: false, ..one_head }, Case { queries: 700, ..one_head }];
    for case in cases {
        let on_threads = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| case.run(&Device::flex(), FloatDType::F32))
        };
        let one = on_threads(1);
        for threads in [1, 2, 3, 5] {
            for (found, expected) in on_threads(threads).iter().zip(&one) {
                assert_same_bits(found, expected, format_args!("{threads} threads, {case:?}"));
            }
        }
    }
}

/// Heads are usually views of rows that hold all heads.
#[test]
fn views_have_the_bits_of_their_copies() {
    let device = Device::flex().autodiff();
    let rows = |seed: usize| {
        let elements: Vec<f32> = Case { heads: 4, ..PLAIN }.elements()[seed].clone();
        tensor(&elements, &device, FloatDType::F32).reshape([2, 150, 4, 16]).require_grad()
    };
    let run = |copies: bool| {
        let tensors = [0, 1, 2].map(rows);
        let [query, key, value] = tensors.clone().map(|tensor| {
            let view = tensor.swap_dims(1, 2);
            if copies { view.mul_scalar(1.0) } else { view }
        });
        let output = attention(query, key, value, AttentionOptions::new());
        let weights = rows(3).detach().swap_dims(1, 2);
        let gradients = (output.clone() * weights).sum().backward();
        let [query, key, value] =
            tensors.map(|tensor| numbers(&tensor.grad(&gradients).expect("a gradient")));
        [numbers(&output.inner()), query, key, value]
    };
    for (found, expected) in run(false).iter().zip(&run(true)) {
        assert_same_bits(found, expected, "views");
    }
}

#[test]
fn only_tracked_tensors_have_gradients() {
    let device = Device::flex().autodiff();
    let heads = || Tensor::<4>::ones([1, 2, 30, 8], &device);
    let key = heads().require_grad();
    let (query, value) = (heads(), heads());
    let output = attention(query.clone(), key.clone(), value.clone(), AttentionOptions::new());
    let gradients = output.sum().backward();
    assert!(key.grad(&gradients).is_some());
    assert!(query.grad(&gradients).is_none() && value.grad(&gradients).is_none());
    let untracked = attention(query, heads(), value, AttentionOptions::new());
    assert!(!untracked.is_require_grad());
}

#[test]
fn a_tensor_without_elements_has_an_output_without() {
    for device in devices() {
        let heads = |length| Tensor::<4>::ones([1, 2, length, 8], &device);
        let options = AttentionOptions::new;
        assert_eq!(attention(heads(0), heads(5), heads(5), options()).dims(), [1, 2, 0, 8]);
    }
}

/// With equal scores and the unit matrix as the values, the output is the mask over the number of keys.
#[test]
fn dropout_drops_weights_and_scales_the_others() {
    for device in devices() {
        let device = device.autodiff();
        let (queries, keys) = (300, 200);
        let query = Tensor::<4>::zeros([1, 2, queries, 4], &device);
        let key = Tensor::<4>::ones([1, 2, keys, 4], &device);
        let value = Tensor::<2>::eye(keys, &device).reshape([1, 1, keys, keys]).repeat_dim(1, 2);
        let dropout = DropoutConfig::new(0.25).init();
        let mask = |tensors: [Tensor<4>; 3]| {
            let options = AttentionOptions::new().with_dropout(&dropout);
            let [query, key, value] = tensors;
            numbers(&attention(query, key, value, options))
        };
        let tensors = [query, key, value];
        let (first, second) = (mask(tensors.clone()), mask(tensors.clone()));
        let kept = 1.0 / keys as f64 / 0.75;
        let is_exact = product_dtype(&device, FloatDType::F32) == FloatDType::F32;
        let most = if is_exact { 1e-5 } else { 1e-3 };
        for weight in &first {
            assert!(*weight == 0.0 || (weight / kept - 1.0).abs() < most, "{weight} {device:?}");
        }
        let zeros = |mask: &[f64]| mask.iter().filter(|&&weight| weight == 0.0).count() as f64;
        let share = zeros(&first) / first.len() as f64;
        assert!((share - 0.25).abs() < 0.005, "{share}");
        // Masks of two calls are independent, and so are those of two heads.
        let both = |a: &[f64], b: &[f64]| {
            let zeros = a.iter().zip(b).filter(|(a, b)| **a == 0.0 && **b == 0.0).count();
            zeros as f64 / a.len() as f64
        };
        assert!((both(&first, &second) - 0.0625).abs() < 0.005);
        let (head, other) = first.split_at(queries * keys);
        assert!((both(head, other) - 0.0625).abs() < 0.005);
        let (block, other) = (&head[..128 * keys], &head[128 * keys..256 * keys]);
        assert!((both(block, other) - 0.0625).abs() < 0.005);
        assert_eq!(zeros(&mask(tensors.map(Tensor::inner))), 0.0, "without autodiff");
    }
}

#[test]
#[should_panic = "the value must have the batch, heads and length of the key"]
fn a_value_of_another_length_is_an_error() {
    let heads = |length| Tensor::<4>::ones([1, 2, length, 8], &Device::flex());
    attention(heads(5), heads(5), heads(6), AttentionOptions::new());
}

#[test]
#[should_panic = "the key must have the batch and width of the query"]
fn a_key_of_another_width_is_an_error() {
    let heads = |width| Tensor::<4>::ones([1, 2, 5, width], &Device::flex());
    attention(heads(4), heads(2), heads(2), AttentionOptions::new());
}

#[test]
#[should_panic = "the heads of the key must divide those of the query: 3 do not divide 4"]
fn key_heads_that_do_not_divide_the_heads_are_an_error() {
    let heads = |heads| Tensor::<4>::ones([1, heads, 5, 8], &Device::flex());
    attention(heads(4), heads(3), heads(3), AttentionOptions::new());
}

#[test]
#[should_panic = "the padding mask must be `[batch, key_length]`"]
fn a_mask_of_another_length_is_an_error() {
    let heads = || Tensor::<4>::ones([1, 2, 5, 8], &Device::flex());
    let mask = Tensor::<2>::zeros([1, 4], &Device::flex()).equal_elem(1.0);
    attention(heads(), heads(), heads(), AttentionOptions::new().with_padding_mask(mask));
}
