//! Attention and its gradients against the definition in f64.

use burn::tensor::{Bool, DType, Device, FloatDType, Tensor, TensorData};
use fsdp_runtime::nn::{AttentionOptions, DropoutConfig, attention};
use proptest::prelude::*;

use super::support::{device, devices, dtypes, product_dtype, tensor};
use crate::compare::assert_same_bits;

/// An attention of random numbers.
#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    width: usize,
    value_width: usize,
    causal: bool,
    masked: bool,
    scale: Option<f64>,
}

const PLAIN: Case = Case {
    batch: 2,
    heads: 3,
    queries: 150,
    keys: 150,
    width: 16,
    value_width: 16,
    causal: false,
    masked: false,
    scale: None,
};

/// Query, key, value, and the weights of the output in the loss.
type Elements = [Vec<f32>; 4];

impl Case {
    fn shapes(&self) -> [[usize; 4]; 4] {
        let Self { batch, heads, queries, keys, width, value_width, .. } = *self;
        let of = |length, width| [batch, heads, length, width];
        [of(queries, width), of(keys, width), of(keys, value_width), of(queries, value_width)]
    }

    /// Returns elements that are exact in every dtype.
    fn elements(&self) -> Elements {
        let element = |seed: usize, at: usize| {
            ((at * 7919 + seed * 104_729 + at / 97 * 31) % 257) as f32 / 64.0 - 2.0
        };
        let mut seed = 0;
        self.shapes().map(|shape| {
            seed += 1;
            (0..shape.iter().product()).map(|at| element(seed, at)).collect()
        })
    }

    /// Returns whether a key is padding: the last ones, more in later rows of the batch, all in the
    /// row 2.
    fn is_padding(&self, batch: usize, key: usize) -> bool {
        let hidden = [self.keys / 3, self.keys / 2 + 1, self.keys][batch % 3];
        self.masked && key + hidden >= self.keys
    }

    fn options(&self, device: &Device) -> AttentionOptions {
        let mut options = AttentionOptions::new().with_causal(self.causal);
        if let Some(scale) = self.scale {
            options = options.with_scale(scale);
        }
        if !self.masked {
            return options;
        }
        let keys = (0..self.batch).flat_map(|row| (0..self.keys).map(move |key| (row, key)));
        let mask: Vec<bool> = keys.map(|(row, key)| self.is_padding(row, key)).collect();
        let mask = TensorData::new(mask, [self.batch, self.keys]);
        options.with_padding_mask(Tensor::<2, Bool>::from_data(mask, device))
    }

    /// Returns the output, and the gradients of query, key and value.
    fn run(&self, device: &Device, dtype: FloatDType) -> [Vec<f64>; 4] {
        let elements = self.elements();
        let device = device.clone().autodiff();
        let mut shapes = self.shapes().into_iter();
        let [query, key, value, weights] = elements.map(|elements| {
            let shape = shapes.next().expect("four shapes");
            tensor(&elements, &device, dtype).reshape(shape).require_grad()
        });
        let output = attention(query.clone(), key.clone(), value.clone(), self.options(&device));
        assert_eq!((output.dims(), output.dtype()), (weights.dims(), DType::from(dtype)));
        let loss = (output.clone() * weights.detach()).sum();
        let gradients = loss.backward();
        let [query, key, value] =
            [query, key, value].map(|tensor| numbers(&tensor.grad(&gradients).expect("one")));
        [numbers(&output.inner()), query, key, value]
    }

    /// Computes what [`run`](Self::run) should find.
    fn expected(&self) -> [Vec<f64>; 4] {
        let Self { batch, heads, queries, keys, width, value_width, .. } = *self;
        let elements = self
            .elements()
            .map(|elements| -> Vec<f64> { elements.into_iter().map(f64::from).collect() });
        let [query, key, value, weights] = &elements;
        let scale = self.scale.unwrap_or_else(|| 1.0 / (width as f64).sqrt());
        let mut results = [weights, query, key, value].map(|like| vec![0.0; like.len()]);
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for head in 0..batch * heads {
            for row in head * queries..(head + 1) * queries {
                let position = (row - head * queries + keys) as i64 - queries as i64;
                let sees = |at: &usize| {
                    !self.is_padding(head / heads, *at) && (!self.causal || *at as i64 <= position)
                };
                let seen: Vec<usize> = (0..keys).filter(sees).collect();
                let of_key = |at: usize| (head * keys + at) * width..(head * keys + at + 1) * width;
                let of_value = |at: usize| {
                    (head * keys + at) * value_width..(head * keys + at + 1) * value_width
                };
                let of_query = row * width..(row + 1) * width;
                let of_output = row * value_width..(row + 1) * value_width;
                let scores: Vec<f64> = (seen.iter())
                    .map(|&at| scale * dot(&query[of_query.clone()], &key[of_key(at)]))
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let powers: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
                let sum: f64 = powers.iter().sum();
                let slopes: Vec<f64> = (seen.iter())
                    .map(|&at| dot(&weights[of_output.clone()], &value[of_value(at)]))
                    .collect();
                let mean = dot(&powers, &slopes) / sum;
                for ((&at, power), slope) in seen.iter().zip(&powers).zip(&slopes) {
                    let share = power / sum;
                    for index in 0..value_width {
                        let of_output = row * value_width + index;
                        results[0][of_output] += share * value[of_value(at).start + index];
                        results[3][of_value(at).start + index] += share * weights[of_output];
                    }
                    let slope = share * (slope - mean) * scale;
                    for index in 0..width {
                        results[1][row * width + index] += slope * key[of_key(at).start + index];
                        results[2][of_key(at).start + index] += slope * query[row * width + index];
                    }
                }
            }
        }
        results
    }

    /// Asserts that output and gradients are those of the definition, relative to the largest, or to
    /// `least` where all are smaller.
    #[track_caller]
    fn assert_exact(&self, device: &Device, dtype: FloatDType, [share, least]: [f64; 2]) {
        let names = ["output", "query's gradient", "key's gradient", "value's gradient"];
        let found = self.run(device, dtype).into_iter().zip(self.expected());
        for ((found, expected), name) in found.zip(names) {
            assert_eq!(found.len(), expected.len());
            assert!(!found.is_empty());
            let largest = expected.iter().fold(least, |largest: f64, x| largest.max(x.abs()));
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let close = (found - expected).abs() <= share * largest;
                assert!(
                    close,
                    "element {at} of the {name} is {found}, not {expected}, of at most {largest}: \
                     {self:?} in {dtype:?} on {device:?}"
                );
            }
        }
    }
}

fn numbers(tensor: &Tensor<4>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

/// Returns the share of the largest element by which an element may differ, and the least such element.
/// Burn's products of bf16 and f16 are rounded, and so are scores and weights. A gradient is a difference
/// of such products.
fn bounds(dtype: FloatDType) -> [f64; 2] {
    match dtype {
        FloatDType::F64 => [1e-10, 1e-2],
        FloatDType::F32 => [1e-5, 1e-2],
        FloatDType::F16 => [1e-2, 1.0],
        _ => [6e-2, 1.0],
    }
}

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
            case.assert_exact(&flex, dtype, bounds(dtype));
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
            case.assert_exact(&device, dtype, bounds(product_dtype(&device, dtype)));
        }
    }
}

#[test]
fn heads_of_64_over_several_tiles_are_exact() {
    let case = Case { batch: 1, queries: 700, keys: 700, width: 64, value_width: 64, ..PLAIN };
    for causal in [false, true] {
        let dtype = FloatDType::F32;
        Case { causal, ..case }.assert_exact(&Device::flex(), dtype, bounds(dtype));
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
            batch, heads, queries, keys, width, value_width, causal, masked, scale: None,
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
#[should_panic = "the key must have the batch, heads and width of the query"]
fn a_key_of_other_heads_is_an_error() {
    let heads = |heads| Tensor::<4>::ones([1, heads, 5, 8], &Device::flex());
    attention(heads(4), heads(2), heads(2), AttentionOptions::new());
}

#[test]
#[should_panic = "the padding mask must be `[batch, key_length]`"]
fn a_mask_of_another_length_is_an_error() {
    let heads = || Tensor::<4>::ones([1, 2, 5, 8], &Device::flex());
    let mask = Tensor::<2>::zeros([1, 4], &Device::flex()).equal_elem(1.0);
    attention(heads(), heads(), heads(), AttentionOptions::new().with_padding_mask(mask));
}
