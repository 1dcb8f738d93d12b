//! The cross-entropy of a linear layer's output, and its gradients, against Burn's in f64.

use burn::nn::loss::Reduction;
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use fsdp_runtime::nn::{LinearCrossEntropyOptions, WeightLayout, linear_cross_entropy};
use proptest::prelude::*;

use super::support::{device, devices, dtypes, product_dtype, tensor};
use crate::compare::assert_same_bits;

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    width: usize,
    classes: usize,
    layout: WeightLayout,
    has_bias: bool,
    ignore: Option<i64>,
    smoothing: f64,
    sums: bool,
    chunk: Option<usize>,
}

const PLAIN: Case = Case {
    rows: 50,
    width: 24,
    classes: 300,
    layout: WeightLayout::Embedding,
    has_bias: false,
    ignore: None,
    smoothing: 0.0,
    sums: false,
    chunk: None,
};

impl Case {
    /// Returns hidden values, weight and bias that are exact in every dtype.
    fn elements(&self) -> [Vec<f32>; 3] {
        let element = |seed: usize, at: usize| {
            ((at * 7919 + seed * 104_729 + at / 97 * 31) % 257) as f32 / 128.0 - 1.0
        };
        let lengths = [self.rows * self.width, self.width * self.classes, self.classes];
        [1, 2, 3].map(|seed| (0..lengths[seed - 1]).map(|at| element(seed, at)).collect())
    }

    /// Every fifth row is ignored, if there is an ignored target.
    fn targets(&self) -> Vec<i64> {
        let target = |row: usize| match self.ignore {
            Some(ignored) if row % 5 == 3 => ignored,
            _ => (row * 7919 % self.classes) as i64,
        };
        (0..self.rows).map(target).collect()
    }

    fn weight_shape(&self) -> [usize; 2] {
        match self.layout {
            WeightLayout::Linear => [self.width, self.classes],
            _ => [self.classes, self.width],
        }
    }

    /// Returns the loss and the gradients of hidden values, weight and bias.
    fn run(
        &self,
        device: &Device,
        dtype: DType,
        loss: impl Fn(&Self, Tensor<2>, Tensor<2>, Option<Tensor<1>>, Tensor<1, Int>) -> Tensor<1>,
    ) -> Vec<Vec<f64>> {
        let device = device.clone().autodiff();
        let [hidden, weight, bias] = self.elements().map(|elements| {
            Tensor::<1>::from_data(
                TensorData::new(elements.clone(), [elements.len()]),
                (&device, dtype),
            )
        });
        let hidden = hidden.reshape([self.rows, self.width]).require_grad();
        let weight = weight.reshape(self.weight_shape()).require_grad();
        let bias = self.has_bias.then(|| bias.require_grad());
        let targets = TensorData::new(self.targets(), [self.rows]);
        let targets = Tensor::<1, Int>::from_data(targets, &device);
        let loss = loss(self, hidden.clone(), weight.clone(), bias.clone(), targets);
        assert_eq!(loss.dims(), [1]);
        // A factor, as gradient accumulation and loss scaling have.
        let gradients = loss.clone().mul_scalar(3.0).backward();
        let mut results = vec![numbers(&loss.inner())];
        results.extend([hidden, weight].map(|tensor| numbers(&tensor.grad(&gradients).unwrap())));
        results.extend(bias.map(|bias| numbers(&bias.grad(&gradients).unwrap())));
        results
    }

    fn ours(
        &self,
        hidden: Tensor<2>,
        weight: Tensor<2>,
        bias: Option<Tensor<1>>,
        targets: Tensor<1, Int>,
    ) -> Tensor<1> {
        let mut options = LinearCrossEntropyOptions::new()
            .with_layout(self.layout)
            .with_label_smoothing(self.smoothing);
        if let Some(bias) = bias {
            options = options.with_bias(bias);
        }
        if let Some(target) = self.ignore {
            options = options.with_ignore_index(target);
        }
        if let Some(rows) = self.chunk {
            options = options.with_chunk_rows(rows);
        }
        if self.sums {
            options = options.with_reduction(Reduction::Sum);
        }
        linear_cross_entropy(hidden, weight, targets, options)
    }

    /// Computes the loss with Burn's operations. Burn's own loss takes no f64 under smoothing. An ignored
    /// target is a class here.
    fn burns(
        &self,
        hidden: Tensor<2>,
        weight: Tensor<2>,
        bias: Option<Tensor<1>>,
        targets: Tensor<1, Int>,
    ) -> Tensor<1> {
        let is_linear = self.layout == WeightLayout::Linear;
        let weight = if is_linear { weight } else { weight.transpose() };
        let logits = hidden.matmul(weight);
        let logits = match bias {
            Some(bias) => logits + bias.unsqueeze(),
            None => logits,
        };
        let shares = log_softmax(logits, 1);
        let of_target = shares.clone().gather(1, targets.clone().unsqueeze_dim(1));
        let of_all = shares.mean_dim(1).mul_scalar(self.smoothing);
        let losses = of_target.mul_scalar(1.0 - self.smoothing) + of_all;
        let losses = losses.squeeze_dim::<1>(1).neg();
        let losses = match self.ignore {
            Some(target) => losses.mask_fill(targets.equal_elem(target), 0.0),
            None => losses,
        };
        let counted = self.targets().iter().filter(|&&target| Some(target) != self.ignore).count();
        let sum = losses.sum();
        // A tensor as the divisor: the gradient of `div_scalar` is rounded to f32.
        let divisor = if self.sums { 1.0 } else { counted as f64 };
        let divisor = Tensor::full([1], divisor, (&sum.device(), sum.dtype()));
        sum / divisor
    }

    /// Asserts that loss and gradients are Burn's, relative to the largest element.
    #[track_caller]
    fn assert_exact(&self, device: &Device, dtype: FloatDType) {
        let share = match product_dtype(device, dtype) {
            FloatDType::F64 => 1e-10,
            FloatDType::F32 => 1e-5,
            FloatDType::F16 => 1e-2,
            _ => 4e-2,
        };
        let found = self.run(device, dtype.into(), Self::ours);
        let expected = self.run(&Device::flex(), DType::F64, Self::burns);
        assert_eq!(found.len(), expected.len());
        for (which, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.len(), expected.len());
            let largest = expected.iter().fold(1e-3f64, |largest, x| largest.max(x.abs()));
            for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
                assert!(
                    (found - expected).abs() <= share * largest,
                    "element {at} of result {which} is {found}, not {expected}: \
                     {self:?} in {dtype:?} on {device:?}"
                );
            }
        }
    }
}

fn numbers<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

#[test]
fn loss_and_gradients_are_burns() {
    let linear = WeightLayout::Linear;
    let cases = [
        PLAIN,
        Case { layout: linear, has_bias: true, ..PLAIN },
        Case { ignore: Some(7), ..PLAIN },
        Case { smoothing: 0.1, ..PLAIN },
        Case { smoothing: 0.2, ignore: Some(7), has_bias: true, sums: true, ..PLAIN },
        Case { chunk: Some(1), ..PLAIN },
        Case { chunk: Some(7), layout: linear, smoothing: 0.1, ignore: Some(7), ..PLAIN },
        Case { rows: 1, width: 1, classes: 2, ..PLAIN },
    ];
    let flex = Device::flex();
    for dtype in dtypes(&flex).chain([FloatDType::F64]) {
        for case in cases {
            case.assert_exact(&flex, dtype);
        }
    }
}

/// Emulated devices compile kernels for each shape and dtype, which takes seconds, so there are few.
#[test]
fn loss_and_gradients_are_burns_on_the_device() {
    let Some(device) = device() else { return };
    let all = Case {
        chunk: Some(20),
        smoothing: 0.1,
        ignore: Some(7),
        has_bias: true,
        layout: WeightLayout::Linear,
        ..PLAIN
    };
    // Rows that no vector divides, with a last chunk of ten.
    let odd = Case { classes: 301, ..all };
    let cases = [
        (all, FloatDType::F32),
        (PLAIN, FloatDType::F16),
        (odd, FloatDType::F32),
        (odd, FloatDType::F16),
        (Case { layout: WeightLayout::Embedding, ..odd }, FloatDType::BF16),
    ];
    for (case, dtype) in cases {
        if dtypes(&device).any(|supported| supported == dtype) {
            case.assert_exact(&device, dtype);
        }
    }
}

#[test]
fn the_loss_repeats_on_the_device() {
    let Some(device) = device() else { return };
    let layout = WeightLayout::Linear;
    let case = Case { chunk: Some(20), smoothing: 0.1, has_bias: true, layout, ..PLAIN };
    let run = || case.run(&device, DType::F32, Case::ours);
    for (found, expected) in run().iter().zip(&run()) {
        assert_same_bits(found, expected, "a second run");
    }
}

/// Returns the loss of hidden values of width 1 and class weights, and the gradient of the hidden values.
fn of_numbers(device: &Device, hidden: &[f32], weight: &[f32], targets: &[i64]) -> (f64, Vec<f64>) {
    let device = device.clone().autodiff();
    let hidden = tensor(hidden, &device, FloatDType::F32).unsqueeze_dim::<2>(1).require_grad();
    let weight = tensor(weight, &device, FloatDType::F32).unsqueeze_dim::<2>(1);
    let targets = TensorData::new(targets.to_vec(), [targets.len()]);
    let targets = Tensor::<1, Int>::from_data(targets, &device);
    let options = LinearCrossEntropyOptions::new().with_ignore_index(-100);
    let loss = linear_cross_entropy(hidden.clone(), weight, targets, options);
    let gradients = loss.backward();
    (numbers(&loss.inner())[0], numbers(&hidden.grad(&gradients).unwrap()))
}

#[test]
fn large_logits_have_a_finite_loss() {
    for device in devices() {
        let weight = [1e4, -1e4, 0.0, 1e4];
        let (loss, gradient) = of_numbers(&device, &[1.0, -1.0, 1.0], &weight, &[0, 1, 2]);
        // ln 2, 0 and 10,000 + ln 2.
        let expected = (10_000.0 + 2.0 * 2f64.ln()) / 3.0;
        assert!((loss / expected - 1.0).abs() < 1e-6, "{loss} on {device:?}");
        for (found, expected) in gradient.iter().zip([0.0, 0.0, 10_000.0 / 3.0]) {
            assert!((found - expected).abs() < 4.0, "{found} {expected} on {device:?}");
        }
    }
}

#[test]
fn a_row_that_does_not_count_may_be_no_number() {
    for device in devices() {
        let of = |target| {
            of_numbers(&device, &[1.0, f32::NAN, 0.5], &[0.5, -0.5, 0.25, 0.0], &[0, target, 2])
        };
        assert!(of(1).0.is_nan(), "{device:?}");
        let (loss, gradient) = of(-100);
        assert!(loss.is_finite(), "{loss} on {device:?}");
        assert!(gradient[0].is_finite() && gradient[2].is_finite(), "{gradient:?} on {device:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_shape_has_burns_loss(
        (rows, width, classes) in (1usize..80, 1usize..70, 9usize..400),
        (is_linear, has_bias, ignores, sums) in any::<(bool, bool, bool, bool)>(),
        smoothing in prop_oneof![Just(0.0), 0.01..0.9],
        chunk in prop_oneof![Just(None), (1usize..90).prop_map(Some)],
    ) {
        let layout = if is_linear { WeightLayout::Linear } else { WeightLayout::Embedding };
        let ignore = ignores.then_some(8);
        let case = Case { rows, width, classes, layout, has_bias, ignore, smoothing, sums, chunk };
        case.assert_exact(&Device::flex(), FloatDType::F32);
    }
}

#[test]
fn the_loss_has_the_bits_of_one_chunk_on_any_number_of_threads() {
    let case = Case { rows: 90, classes: 2000, chunk: Some(20), has_bias: true, ..PLAIN };
    let on_threads = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| case.run(&Device::flex(), DType::F32, Case::ours))
    };
    let one = on_threads(1);
    for threads in [1, 2, 5] {
        for (found, expected) in on_threads(threads).iter().zip(&one) {
            assert_same_bits(found, expected, format_args!("{threads} threads"));
        }
    }
}

#[test]
fn rows_that_do_not_count_have_no_loss_and_no_gradient() {
    for device in devices() {
        let device = device.autodiff();
        let hidden = tensor(&[0.5; 4 * 8], &device, FloatDType::F32).reshape([4, 8]).require_grad();
        let weight = tensor(&[0.25; 10 * 8], &device, FloatDType::F32).reshape([10, 8]);
        let targets = |targets: [i64; 4]| Tensor::<1, Int>::from_ints(targets, &device);
        let loss = |all| {
            let options = LinearCrossEntropyOptions::new().with_ignore_index(-100);
            linear_cross_entropy(hidden.clone(), weight.clone(), targets(all), options)
        };
        // Equal logits: the loss of a row is ln 10, however many rows count.
        let some = loss([-100, 3, -100, 4]);
        assert!((numbers(&some.clone().inner())[0] - 10f64.ln()).abs() < 1e-5);
        let gradients = some.backward();
        let gradient = numbers(&hidden.grad(&gradients).unwrap());
        assert!(gradient[..8].iter().chain(&gradient[16..24]).all(|x| *x == 0.0));
        let none = loss([-100; 4]);
        assert_eq!(numbers(&none.clone().inner()), [0.0]);
        let gradients = none.backward();
        assert_eq!(numbers(&hidden.grad(&gradients).unwrap()), [0.0; 32]);
    }
}

#[test]
fn a_batch_mean_counts_every_row() {
    let case = Case { ignore: Some(7), ..PLAIN };
    let loss = |reduction: Reduction| {
        let run = |case: &Case, hidden, weight, _, targets| {
            let options = LinearCrossEntropyOptions::new()
                .with_ignore_index(7)
                .with_reduction(reduction.clone());
            let _ = case;
            linear_cross_entropy(hidden, weight, targets, options)
        };
        case.run(&Device::flex(), DType::F32, run)[0][0]
    };
    let (sum, mean) = (loss(Reduction::Sum), loss(Reduction::BatchMean));
    assert!((sum / 50.0 / mean - 1.0).abs() < 1e-6, "{sum} {mean}");
    assert_eq!(loss(Reduction::Auto), loss(Reduction::Mean));
}

#[test]
fn tensors_without_autodiff_have_the_same_loss() {
    for device in devices() {
        let of = |device: &Device| {
            let hidden = tensor(&PLAIN.elements()[0], device, FloatDType::F32).reshape([50, 24]);
            let weight = tensor(&PLAIN.elements()[1], device, FloatDType::F32).reshape([300, 24]);
            let targets = TensorData::new(PLAIN.targets(), [50]);
            let targets = Tensor::<1, Int>::from_data(targets, device);
            PLAIN.ours(hidden, weight, None, targets)
        };
        let (plain, tracked) = (of(&device), of(&device.clone().autodiff()));
        assert_eq!(numbers(&plain), numbers(&tracked.inner()), "{device:?}");
    }
}

#[test]
fn a_frozen_weight_has_no_gradient() {
    for device in devices() {
        let device = device.autodiff();
        let hidden = Tensor::<2>::ones([4, 8], &device).require_grad();
        let weight = Tensor::<2>::ones([10, 8], &device);
        let targets = Tensor::<1, Int>::from_ints([1, 2, 3, 4], &device);
        let options = LinearCrossEntropyOptions::new();
        let loss = linear_cross_entropy(hidden.clone(), weight.clone(), targets, options);
        let gradients = loss.backward();
        assert!(hidden.grad(&gradients).is_some() && weight.grad(&gradients).is_none());
    }
}

#[test]
#[should_panic = "the target of row 1 is 10, not one of 10 classes"]
fn a_target_that_is_no_class_is_an_error() {
    let device = Device::flex();
    let targets = Tensor::<1, Int>::from_ints([1, 10], &device);
    let (hidden, weight) = (Tensor::ones([2, 8], &device), Tensor::ones([10, 8], &device));
    linear_cross_entropy(hidden, weight, targets, LinearCrossEntropyOptions::new());
}

#[test]
#[should_panic = "the weight must have the width of the hidden values"]
fn a_weight_of_the_other_layout_is_an_error() {
    let device = Device::flex();
    let targets = Tensor::<1, Int>::from_ints([1, 2], &device);
    let (hidden, weight) = (Tensor::ones([2, 8], &device), Tensor::ones([8, 10], &device));
    linear_cross_entropy(hidden, weight, targets, LinearCrossEntropyOptions::new());
}
