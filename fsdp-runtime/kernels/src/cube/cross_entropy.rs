//! Cross-entropy of a linear layer's output in chunks of rows. A kernel replaces the logits of a chunk by
//! their gradients, in their own memory and dtype.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel;
use burn_cubecl::tensor::CubeTensor;

use super::buffer_slice::BufferSlice;
use super::copy::{copy, exclusive};
use super::cross_entropy_kernels::{LossOptions, LossRowsLaunch, loss_kernel, row_losses_kernel};
use super::device::rounds_in_integers;
use super::rows::Team;
use super::span::row_span;
use super::tensors::{contiguous, element, empty};
use crate::contract::Kernels;
use crate::cross_entropy::{LossResults, LossRule, LossTensors};

/// Number of elements that divides the length of the buffer of a bias: more than a vector has on any
/// device.
const BIAS_MULTIPLE: usize = 256;
/// Target that no row has: targets are whole numbers.
const NO_TARGET: f32 = 0.5;

/// Implements [`Kernels::linear_cross_entropy`](crate::Kernels::linear_cross_entropy), for f32, bf16 and
/// f16.
pub(super) fn forward(
    tensors: &LossTensors<CubeTensor>,
    rule: &LossRule,
) -> LossResults<CubeTensor> {
    let LossTensors { hidden, weight, bias, targets } = tensors;
    let dtype = hidden.dtype;
    let weight = if rule.embedding { transposed(weight) } else { weight.clone() };
    let rows = hidden.shape()[0];
    let losses = RowLosses::new(targets.clone(), bias.clone(), rule);
    let mut gradients = Gradients::default();
    for start in (0..rows).step_by(rule.chunk) {
        let hidden = rows_of(hidden, start..(start + rule.chunk).min(rows));
        let logits = CubeBackend::product([hidden.clone(), weight.clone()], dtype);
        let slopes = losses.compute(logits, start);
        gradients.add(slopes, hidden, &weight, rule);
    }
    let [loss, factor] = losses.finish();
    LossResults { loss, factor, gradients: gradients.finish() }
}

/// Returns a matrix transposed, without a copy.
fn transposed(matrix: &CubeTensor) -> CubeTensor {
    CubeBackend::float_transpose(matrix.clone())
}

/// Returns the rows in the range. They are copied only where they cannot be a view.
fn rows_of(matrix: &CubeTensor, range: Range<usize>) -> CubeTensor {
    let [rows, width] = matrix.shape().dims();
    match range.len() == rows {
        true => matrix.clone(),
        false => kernel::slice(matrix.clone(), &[range, 0..width]),
    }
}

/// Returns a matrix that can be written in place, and the number of elements from one row to the next:
/// the matrix itself if no other tensor shares its memory, else a copy.
///
/// Devices may pad the rows of a product, so that each begins at an aligned address.
fn exclusive_rows(matrix: CubeTensor) -> (CubeTensor, usize) {
    let [rows, len] = matrix.shape().dims();
    if let [stride, 1] = matrix.meta.strides()[..]
        && stride >= len
        && matrix.can_mut()
        && rows * stride <= BufferSlice::of(&matrix).len()
    {
        return (matrix, stride);
    }
    (exclusive(matrix), len)
}

/// The losses of rows.
pub(super) struct RowLosses<'a> {
    /// `[rows]`, in f32.
    targets: CubeTensor,
    /// A copy that begins at an aligned address and has a multiple of [`BIAS_MULTIPLE`] elements, so that
    /// the width of vectors does not depend on it.
    bias: Option<CubeTensor>,
    /// The loss of each row, then for each row 1 if it counts and 0 if not: `[2, rows]`, in f32.
    results: CubeTensor,
    rule: &'a LossRule,
}

impl<'a> RowLosses<'a> {
    /// Allocates the losses of rows with these targets.
    ///
    /// # Panics
    ///
    /// If the targets are not in f32.
    pub(super) fn new(targets: CubeTensor, bias: Option<CubeTensor>, rule: &'a LossRule) -> Self {
        assert_eq!(targets.dtype, DType::F32, "targets are in f32");
        let bias = bias.map(|bias| {
            let bias = contiguous(bias);
            let classes = bias.shape().num_elements();
            let shape = Shape::from([classes.next_multiple_of(BIAS_MULTIPLE)]);
            let padded = empty(&bias, shape, bias.dtype);
            let slices = [&bias, &padded].map(BufferSlice::of);
            copy(&bias.client, &slices[0], &slices[1], classes, None);
            padded
        });
        let results = Shape::from([2, targets.shape().num_elements()]);
        let results = empty(&targets, results, DType::F32);
        Self { targets: contiguous(targets), bias, results, rule }
    }

    /// Computes the losses of the rows from `first` on, given their logits. Returns the gradients of the
    /// logits, or anything if the rule asks for no gradient.
    ///
    /// # Panics
    ///
    /// If there are fewer targets, or fewer elements of the bias than classes.
    pub(super) fn compute(&self, logits: CubeTensor, first: usize) -> CubeTensor {
        let Self { targets, bias, results, rule } = self;
        let (logits, stride) = exclusive_rows(logits);
        let (client, dtype) = (logits.client.clone(), logits.dtype);
        let [rows, classes] = logits.shape().dims();
        let slice = BufferSlice::of(&logits);
        let span = row_span(&client, &[&slice], &[], rows * stride, stride);
        let count = classes.div_ceil(span.width);
        let all = targets.shape().num_elements();
        let [targets, results] = [targets, results].map(BufferSlice::of);
        assert!(first + rows <= all && all <= targets.len(), "a target for each row");
        assert!(2 * all <= results.len(), "two results for each row");
        let bias: Vec<_> = bias.iter().map(BufferSlice::of).collect();
        let padded = count * span.width;
        assert!(bias.iter().all(|bias| padded <= bias.len()), "a bias for each class");
        let options = LossOptions {
            smoothing: rule.smoothing != 0.0,
            slopes: rule.gradients.contains(&true),
            tail: padded > classes,
        };
        let shape = LossRowsLaunch::new(
            rows,
            first,
            all,
            count,
            stride / span.width,
            classes as u32,
            rule.ignored.unwrap_or(NO_TARGET),
            (1.0 - rule.smoothing) as f32,
            (rule.smoothing / classes as f64) as f32,
            f32::NEG_INFINITY,
        );
        let team = Team::of_long_rows(&client, count, span.width);
        let (cubes, dim) = team.grid(&client, rows);
        // SAFETY: `row_span` checked that the buffer holds the rows, and the assertions that the others
        // have elements for each row or class; the kernel accesses only these.
        unsafe {
            row_losses_kernel::launch_unchecked(
                &client,
                cubes,
                dim,
                span.width,
                span.argument(&slice).0,
                bias.iter().map(BufferSlice::buffer_arg).collect(),
                targets.buffer_arg(),
                results.buffer_arg(),
                shape,
                options,
                team,
                rounds_in_integers(&client, dtype),
                element(dtype),
            );
        }
        logits
    }

    /// Returns the loss and the factor of its gradients, `[1]` each, in f32.
    pub(super) fn finish(self) -> [CubeTensor; 2] {
        let Self { targets, results, rule, .. } = self;
        let client = results.client.clone();
        let rows = targets.shape().num_elements();
        let numbers = [(); 2].map(|()| empty(&results, Shape::from([1]), DType::F32));
        let [loss, factor] = numbers.each_ref().map(|number| BufferSlice::of(number).buffer_arg());
        let results = BufferSlice::of(&results);
        assert!(2 * rows <= results.len(), "two results for each row");
        let team = Team::of_long_rows(&client, rows, 1);
        let (cubes, dim) = team.grid(&client, 1);
        // SAFETY: the assertion checked that the buffer has two results for each row, and the outputs
        // have an element; the kernel accesses only these.
        unsafe {
            loss_kernel::launch_unchecked(
                &client,
                cubes,
                dim,
                1,
                results.buffer_arg(),
                loss,
                factor,
                rows,
                rule.mean,
                team,
            );
        }
        numbers
    }
}

/// Gradients of the chunks so far, in f32.
#[derive(Default)]
struct Gradients {
    /// Those of the hidden values of each chunk.
    hidden: Vec<CubeTensor>,
    weight: Option<CubeTensor>,
    bias: Option<CubeTensor>,
}

impl Gradients {
    /// Adds the gradients of a chunk, given those of its logits. `weight` is `[width, classes]`.
    fn add(
        &mut self,
        slopes: CubeTensor,
        hidden: CubeTensor,
        weight: &CubeTensor,
        rule: &LossRule,
    ) {
        let [wants_hidden, wants_weight, wants_bias] = rule.gradients;
        if wants_hidden {
            let factors = [slopes.clone(), transposed(weight)];
            self.hidden.push(CubeBackend::product(factors, DType::F32));
        }
        if wants_bias {
            let sums = CubeBackend::column_sums(slopes.clone());
            self.bias = Some(match self.bias.take() {
                Some(earlier) => CubeBackend::float_add(earlier, sums),
                None => sums,
            });
        }
        if wants_weight {
            let factors = match rule.embedding {
                true => [transposed(&slopes), hidden],
                false => [transposed(&hidden), slopes],
            };
            self.weight = Some(match self.weight.take() {
                Some(sum) => CubeBackend::add_product(sum, factors),
                None => CubeBackend::product(factors, DType::F32),
            });
        }
    }

    /// Returns the gradients that were asked for, in the order of the rule.
    fn finish(mut self) -> Vec<CubeTensor> {
        let hidden = match self.hidden.len() {
            0 | 1 => self.hidden.pop(),
            _ => Some(CubeBackend::float_cat(self.hidden, 0)),
        };
        [hidden, self.weight, self.bias].into_iter().flatten().collect()
    }
}

/// The kernels on given logits, against f64.
#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::tensor::TensorData;
    use burn_cubecl::CubeDevice;
    use burn_std::Metadata;

    use super::*;
    use crate::{cast, to_data};

    /// Target of rows that do not count.
    const IGNORED: f32 = -100.0;

    /// Rows of logits and what is expected of them.
    #[derive(Clone, Debug)]
    struct Case {
        logits: Vec<Vec<f32>>,
        bias: Option<Vec<f32>>,
        targets: Vec<f32>,
        smoothing: f64,
        /// Number of elements between the rows.
        padding: usize,
        /// Rows of a launch.
        chunk: usize,
        dtype: DType,
    }

    impl Case {
        /// Returns seven rows of multiples of 1/64 up to 2, which are exact in f16. Row 2 does not count,
        /// and the target of row 4 is no class.
        fn new(classes: usize) -> Self {
            let logit = |row: usize| {
                move |at: usize| ((at * 7919 + row * 104_729) % 257) as f32 / 64.0 - 2.0
            };
            let logits = (0..7).map(|row| (0..classes).map(logit(row)).collect()).collect();
            let last = classes as f32 - 1.0;
            let targets = vec![0.0, last, IGNORED, 3.0, last + 1.0, 5.0, 1.0];
            let dtype = DType::F32;
            Self { logits, bias: None, targets, smoothing: 0.0, padding: 0, chunk: 7, dtype }
        }

        fn rule(&self) -> LossRule {
            LossRule {
                embedding: true,
                ignored: Some(IGNORED),
                smoothing: self.smoothing,
                mean: true,
                chunk: self.chunk,
                gradients: [true; 3],
            }
        }

        /// Returns the loss, the factor, and the gradients of each row's logits.
        fn run(&self) -> ([f32; 2], Vec<Vec<f32>>) {
            let device = CubeDevice::Cpu(cubecl::device::CpuDevice);
            let tensor = |numbers: Vec<f32>| {
                let data = TensorData::new(numbers.clone(), [numbers.len()]);
                CubeBackend::float_from_data(data, &device)
            };
            let typed = |numbers| cast::<CubeBackend>(tensor(numbers), self.dtype);
            let (classes, rule) = (self.logits[0].len(), self.rule());
            let bias = self.bias.clone().map(typed);
            let losses = RowLosses::new(tensor(self.targets.clone()), bias, &rule);
            let mut slopes = Vec::new();
            for (number, rows) in self.logits.chunks(self.chunk).enumerate() {
                let padding = vec![f32::NAN; self.padding];
                let padded = rows.iter().flat_map(|row| row.iter().chain(&padding));
                let mut logits = typed(padded.copied().collect());
                let strides = [classes + self.padding, 1];
                logits.meta = Box::new(Metadata::new([rows.len(), classes], strides));
                let found = losses.compute(logits, number * self.chunk);
                let data = to_data::<CubeBackend>(cast::<CubeBackend>(found, DType::F32));
                let numbers: Vec<f32> = data.iter().collect();
                slopes.extend(numbers.chunks(classes).map(<[f32]>::to_vec));
            }
            let number = |tensor| to_data::<CubeBackend>(tensor).iter().next().expect("a number");
            (losses.finish().map(number), slopes)
        }

        /// Returns the loss of a row and the gradients of its logits in f64.
        fn row(&self, row: usize) -> (f64, Vec<f64>) {
            let target = self.targets[row];
            if target == IGNORED {
                return (0.0, vec![0.0; self.logits[row].len()]);
            }
            let zeros = vec![0.0; self.logits[row].len()];
            let bias = self.bias.as_ref().unwrap_or(&zeros);
            let logits = self.logits[row].iter().zip(bias);
            let logits: Vec<f64> =
                logits.map(|(x, bias)| f64::from(*x) + f64::from(*bias)).collect();
            let top = logits.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = logits.iter().map(|x| (x - top).exp()).sum();
            let even = self.smoothing / logits.len() as f64;
            let slope = |(at, x): (usize, &f64)| {
                let is_target = at as f32 == target;
                let expected = even + if is_target { 1.0 - self.smoothing } else { 0.0 };
                let expected_logit = if expected == 0.0 { 0.0 } else { expected * x };
                (expected_logit, (x - top).exp() / sum - expected)
            };
            let (of_target, slopes): (Vec<f64>, Vec<f64>) =
                logits.iter().enumerate().map(slope).unzip();
            (sum.ln() + top - of_target.iter().sum::<f64>(), slopes)
        }

        /// Asserts that the results are those in f64, but for the rounding of the dtype.
        #[track_caller]
        fn assert_exact(&self) {
            let rounding = if self.dtype == DType::F32 { 2e-6 } else { 1e-3 };
            let ([loss, factor], slopes) = self.run();
            let counted = self.targets.iter().filter(|target| **target != IGNORED).count() as f64;
            let expected: f64 = (0..slopes.len()).map(|row| self.row(row).0).sum();
            let expected = expected / counted;
            assert!((f64::from(factor) * counted - 1.0).abs() < 1e-6, "{factor} {self:?}");
            let error = (f64::from(loss) - expected).abs();
            assert!(error <= 4e-6 * expected.abs().max(1.0), "{loss} {expected} {self:?}");
            assert_eq!(slopes.len(), self.logits.len());
            for (row, found) in slopes.iter().enumerate() {
                let expected = self.row(row).1;
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(expected) {
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error <= rounding, "{found} {expected} in row {row} of {self:?}");
                }
            }
        }
    }

    #[test]
    fn losses_and_gradients_are_exact() {
        let bias = |classes| Some((0..classes).map(|at| at as f32 / 32.0 - 0.25).collect());
        for dtype in [DType::F32, DType::F16] {
            // Vectors of one logit, of several, and a last one with padding.
            for (classes, padding) in [(13, 0), (16, 0), (13, 3), (530, 14)] {
                let plain = Case { padding, dtype, ..Case::new(classes) };
                let (bias, smoothing) = (bias(classes.min(16)).filter(|_| classes <= 16), 0.1);
                plain.assert_exact();
                Case { chunk: 3, bias, smoothing, ..plain }.assert_exact();
            }
        }
    }

    #[test]
    fn large_logits_do_not_overflow() {
        for (dtype, size) in [(DType::F32, 1e4), (DType::F16, 61_440.0)] {
            let mut case = Case { dtype, ..Case::new(16) };
            // Exact in f16, and equal but for the sign in the rows with odd numbers.
            let signs =
                |row: usize, at: usize| if row % 2 == 1 && at % 2 == 1 { -1.0 } else { 1.0 };
            for (row, logits) in case.logits.iter_mut().enumerate() {
                let sized = |(at, x): (usize, &mut f32)| *x = size * signs(row, at);
                logits.iter_mut().enumerate().for_each(sized);
            }
            case.assert_exact();
            // Ascending, so that each logit is the largest so far, and descending.
            for (row, logits) in case.logits.iter_mut().enumerate() {
                let step = size / 8.0;
                let sized = |(at, x): (usize, &mut f32)| *x = (at as f32 - 7.5) * step;
                logits.iter_mut().enumerate().for_each(sized);
                if row % 2 == 1 {
                    logits.reverse();
                }
            }
            case.assert_exact();
        }
    }

    #[test]
    fn only_rows_that_count_are_not_a_number() {
        for classes in [13, 16] {
            let mut case = Case { smoothing: 0.0, ..Case::new(classes) };
            case.logits[2][1] = f32::NAN;
            // The gradients are those without this class.
            case.logits[3][7] = f32::NEG_INFINITY;
            case.assert_exact();
            for (number, wrong) in [(1, f32::NAN), (9, f32::INFINITY), (0, f32::INFINITY)] {
                let mut case = case.clone();
                case.logits[5][number] = wrong;
                let ([loss, factor], slopes) = case.run();
                assert!(loss.is_nan() && factor.is_finite(), "{loss} {factor}");
                assert!(slopes[5][number].is_nan(), "{wrong} {:?}", slopes[5]);
                let others = slopes.iter().enumerate().filter(|(row, _)| *row != 5);
                assert!(others.flat_map(|(_, slopes)| slopes).all(|x| x.is_finite()));
            }
        }
    }
}
