//! Grouped queries, windows and packed rows.

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use fsdp_runtime::nn::{AttentionOptions, attention};
use proptest::prelude::*;

use super::case::{Case, PLAIN, bounds};
use crate::compare::assert_same_bits;
use crate::kernels::support::{device, devices, dtypes, product_dtype};

/// Rules, lengths and widths in combinations. No tile divides the lengths.
fn cases() -> Vec<Case> {
    let grouped = Case { heads: 4, group: 4, causal: true, ..PLAIN };
    let packed = Case { heads: 4, group: 2, causal: true, packed: true, ..PLAIN };
    let window = Case { heads: 2, group: 1, causal: true, window: Some(23), ..PLAIN };
    let of_length = |length: usize, case: Case| Case { queries: length, keys: length, ..case };
    let of_width = |width: usize, case: Case| Case { width, value_width: width, ..case };
    vec![
        of_width(64, grouped),
        Case { group: 2, masked: true, batch: 3, ..of_length(37, of_width(80, grouped)) },
        Case { queries: 40, keys: 300, group: 2, ..grouped },
        Case { causal: false, masked: true, ..of_length(130, of_width(32, grouped)) },
        of_length(300, of_width(80, packed)),
        Case { causal: false, group: 1, ..of_length(130, packed) },
        Case { masked: true, batch: 3, group: 4, ..of_length(300, of_width(32, packed)) },
        Case { window: Some(9), ..of_length(300, packed) },
        Case { window: Some(9), causal: false, ..of_length(37, of_width(128, packed)) },
        of_length(700, window),
        Case { causal: false, ..of_length(300, of_width(256, window)) },
        Case { causal: false, queries: 20, keys: 600, window: Some(300), group: 2, ..window },
        // The first queries come before the first key.
        Case { queries: 300, keys: 40, ..window },
        Case { window: Some(1), ..of_length(130, window) },
        Case { window: Some(usize::MAX), masked: true, group: 2, ..of_length(130, window) },
        of_length(1, packed),
    ]
}

#[test]
fn groups_windows_and_packed_rows_are_exact() {
    let flex = Device::flex();
    for dtype in dtypes(&flex).chain([FloatDType::F64]) {
        for case in cases() {
            case.assert_exact(&flex, dtype, bounds(dtype, &flex));
        }
    }
}

/// Emulated devices compile kernels for each shape and dtype, which takes seconds, so there are few.
#[test]
fn groups_windows_and_packed_rows_are_exact_on_the_device() {
    let Some(device) = device() else { return };
    let grouped = Case { batch: 1, heads: 4, group: 2, queries: 140, keys: 140, ..PLAIN };
    let packed = Case { batch: 2, causal: true, packed: true, masked: true, ..grouped };
    let window = Case { window: Some(23), keys: 300, ..grouped };
    // Blocks of queries that see neither the first keys nor the last.
    let long = Case { queries: 1100, keys: 1100, heads: 2, width: 32, ..window };
    let cases = [
        (Case { causal: true, ..grouped }, FloatDType::F32),
        (packed, FloatDType::F32),
        (packed, FloatDType::F16),
        (window, FloatDType::F32),
        (Case { causal: true, ..long }, FloatDType::F32),
        (Case { packed: true, window: None, ..long }, FloatDType::F32),
    ];
    for (case, dtype) in cases {
        if dtypes(&device).any(|supported| supported == dtype) {
            case.assert_exact(&device, dtype, bounds(product_dtype(&device, dtype), &device));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_combination_is_exact(
        (batch, key_heads, group) in (1usize..4, 1usize..3, 1usize..5),
        (queries, keys) in (1usize..300, 1usize..600),
        width in 1usize..70,
        window in prop::option::of(1usize..700),
        (causal, masked, packed) in any::<(bool, bool, bool)>(),
    ) {
        let queries = if packed { keys } else { queries };
        let heads = key_heads * group;
        let case = Case {
            batch, heads, group, queries, keys, width, window, causal, masked, packed, ..PLAIN
        };
        // Where one weight is nearly 1, gradients are small differences of numbers of the inputs' size.
        case.assert_exact(&Device::flex(), FloatDType::F32, [1e-5, 1.0]);
    }
}

/// With more threads than heads of the key, backward has several tasks for one.
#[test]
fn the_bits_of_groups_do_not_depend_on_the_threads() {
    let grouped = Case { batch: 1, heads: 3, group: 3, queries: 300, keys: 600, ..PLAIN };
    let packed = Case { packed: true, queries: 600, causal: true, ..grouped };
    let cases = [grouped, packed, Case { window: Some(200), heads: 6, ..grouped }];
    let flex = Device::flex();
    for dtype in dtypes(&flex) {
        for case in cases {
            let on_threads = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| case.run(&flex, dtype))
            };
            let one = on_threads(1);
            for threads in [1, 2, 3, 5] {
                for (found, expected) in on_threads(threads).iter().zip(&one) {
                    let what = format_args!("{threads} threads, {dtype:?}, {case:?}");
                    assert_same_bits(found, expected, what);
                }
            }
        }
    }
}

/// The numbers of one document of a packed row are replaced. All other documents keep their bits.
#[test]
fn a_document_does_not_depend_on_the_others_of_its_row() {
    const WIDTH: usize = 8;
    let case = Case { batch: 2, heads: 2, queries: 600, keys: 600, packed: true, ..PLAIN };
    let changed = 6;
    let run = |device: &Device, causal: bool, factor: f32| {
        let device = device.clone().autodiff();
        let elements = |heads: usize, seed: usize| {
            let number = |at: usize| {
                let (row, position) = (at / (heads * 600 * WIDTH), at / WIDTH % 600);
                let number = ((at * 7919 + seed * 104_729) % 257) as f32 / 64.0 - 2.0;
                let is_changed = row == 0 && case.document(row, position) == changed;
                if is_changed { factor * number } else { number }
            };
            let elements: Vec<f32> = (0..2 * heads * 600 * WIDTH).map(number).collect();
            let elements = TensorData::new(elements, [2, heads, 600, WIDTH]);
            Tensor::<4>::from_data(elements, &device).require_grad()
        };
        let tensors = [elements(4, 1), elements(2, 2), elements(2, 3)];
        let [query, key, value] = tensors.clone();
        let options = Case { causal, ..case }.options(&device);
        let output = attention(query, key, value, options);
        let gradients = output.clone().powi_scalar(2).sum().backward();
        let mut results = vec![output.inner()];
        results.extend(tensors.iter().map(|tensor| tensor.grad(&gradients).unwrap()));
        // The rows of the documents that did not change, and those of the one that did.
        let mut rows = [Vec::new(), Vec::new()];
        for result in results {
            let heads = result.dims()[1];
            for (at, number) in result.to_data().iter::<f64>().enumerate() {
                let (row, position) = (at / (heads * 600 * WIDTH), at / WIDTH % 600);
                let is_changed = row == 0 && case.document(row, position) == changed;
                rows[usize::from(is_changed)].push(number);
            }
        }
        rows
    };
    for device in devices() {
        for causal in [true, false] {
            let [others, own] = run(&device, causal, 1.0);
            let [others_again, own_again] = run(&device, causal, 1.5);
            assert_same_bits(&others_again, &others, format_args!("others on {device:?}"));
            assert_ne!(own, own_again);
        }
    }
}

#[test]
fn documents_that_fill_tiles_have_the_bits_that_they_have_alone() {
    // Eight documents of 256 positions.
    let case = Case { batch: 1, heads: 2, queries: 2048, keys: 2048, causal: true, ..PLAIN };
    let device = Device::flex();
    let elements = case.elements();
    let of_document = |at: usize| {
        let rows = at * 256 * 16..(at + 1) * 256 * 16;
        let part = |elements: &Vec<f32>| {
            let heads = elements.chunks(2048 * 16).flat_map(|head| head[rows.clone()].to_vec());
            TensorData::new(heads.collect::<Vec<f32>>(), [1, 2, 256, 16])
        };
        let [query, key, value] =
            [0, 1, 2].map(|at| Tensor::<4>::from_data(part(&elements[at]), &device));
        attention(query, key, value, AttentionOptions::new().with_causal(true))
    };
    let alone = Tensor::cat((0..8).map(of_document).collect(), 2);
    let whole = |at: usize| {
        Tensor::<4>::from_data(TensorData::new(elements[at].clone(), [1, 2, 2048, 16]), &device)
    };
    let numbers = TensorData::new((0..2048).map(|at| at / 256).collect::<Vec<i32>>(), [1, 2048]);
    let options = AttentionOptions::new().with_causal(true).with_segment_data(&numbers);
    let packed = attention(whole(0), whole(1), whole(2), options);
    let numbers = |tensor: Tensor<4>| tensor.into_data().iter::<f64>().collect::<Vec<_>>();
    assert_same_bits(&numbers(packed), &numbers(alone), "documents alone and in a row");
}

#[test]
#[should_panic = "a window must have at least one key"]
fn a_window_of_no_key_is_an_error() {
    let _ = AttentionOptions::new().with_window(0);
}

#[test]
#[should_panic = "row 1 has segment 4 before position 1 and again at position 2"]
fn a_segment_in_two_parts_is_an_error() {
    let numbers = Tensor::<2, Int>::from_data([[4, 4, 5], [4, 5, 4]], &Device::flex());
    let _ = AttentionOptions::new().with_segments(numbers);
}

#[test]
#[should_panic = "segments have the shape [batch, length], not [6]"]
fn segments_without_rows_are_an_error() {
    let numbers = TensorData::from([0, 0, 1, 1, 1, 2]);
    let _ = AttentionOptions::new().with_segment_data(&numbers);
}

#[test]
#[should_panic = "the segments must be `[batch, length]`"]
fn segments_of_another_length_are_an_error() {
    let heads = || Tensor::<4>::ones([1, 2, 5, 8], &Device::flex());
    let numbers = Tensor::<2, Int>::zeros([1, 4], &Device::flex());
    attention(heads(), heads(), heads(), AttentionOptions::new().with_segments(numbers));
}

#[test]
#[should_panic = "with segments, there must be as many queries as keys"]
fn segments_with_other_lengths_of_queries_and_keys_are_an_error() {
    let heads = |length| Tensor::<4>::ones([1, 2, length, 8], &Device::flex());
    let numbers = Tensor::<2, Int>::zeros([1, 5], &Device::flex());
    attention(heads(4), heads(5), heads(5), AttentionOptions::new().with_segments(numbers));
}
