//! Cross-entropy of a linear layer's output in chunks of rows, for f32. The logits of a chunk are
//! replaced by their gradients in their own memory.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::{Shape, TensorData};
use multiversion::multiversion;
use rayon::prelude::*;

use super::attention::exp_or_zero;
use super::float::slice;
use super::product::Threads::Pool;
use super::product::{Matrix, append_product, multiply, new_product};
use super::rows::{row_max, row_sum};
use crate::cross_entropy::{LossResults, LossRule, LossTensors};

/// Implements [`Kernels::linear_cross_entropy`](crate::Kernels::linear_cross_entropy),
/// for f32. The factor of the gradients is 1.
///
/// # Panics
///
/// If a target is neither a class nor ignored.
pub(super) fn forward(
    tensors: &LossTensors<FlexTensor>,
    rule: &LossRule,
) -> LossResults<FlexTensor> {
    let tensors = tensors.each_ref().map(FlexTensor::to_contiguous);
    let [rows, width] = tensors.hidden.shape().dims();
    let classes = tensors.weight.shape()[usize::from(!rule.embedding)];
    let targets = targets(slice(&tensors.targets), classes, rule);
    let counted = targets.iter().flatten().count();
    let problem = Problem {
        hidden: slice(&tensors.hidden),
        weight: slice(&tensors.weight),
        bias: tensors.bias.as_ref().map(slice),
        targets: &targets,
        sizes: [width, classes],
        scale: if rule.mean { 1.0 / counted.max(1) as f32 } else { 1.0 },
        rule,
    };
    let shapes = [tensors.hidden.shape(), tensors.weight.shape(), Shape::from([classes])];
    let mut gradients = Gradients {
        hidden: rule.gradients[0].then(|| Vec::with_capacity(rows * width)),
        weight: None,
        bias: rule.gradients[2].then(|| vec![0.0; classes]),
    };
    let mut logits = Vec::new();
    let mut loss = 0f64;
    for start in (0..rows).step_by(rule.chunk) {
        let range = start..(start + rule.chunk).min(rows);
        loss += problem.run(range, &mut logits, &mut gradients);
    }
    let number = |number: f32| FlexTensor::from_data(TensorData::new(vec![number], [1]));
    let Gradients { hidden, weight, bias } = gradients;
    let gradients = [hidden, weight, bias].into_iter().zip(shapes);
    let gradients = gradients.filter_map(|(gradient, shape)| {
        gradient.map(|gradient| FlexTensor::from_data(TensorData::new(gradient, shape)))
    });
    let loss = (loss * f64::from(problem.scale)) as f32;
    LossResults { loss: number(loss), factor: number(1.0), gradients: gradients.collect() }
}

/// Returns the class of each row, or `None` for rows that do not count.
fn targets(targets: &[f32], classes: usize, rule: &LossRule) -> Vec<Option<usize>> {
    let class = |(row, &target): (usize, &f32)| {
        if rule.ignored == Some(target) {
            return None;
        }
        let is_class = target >= 0.0 && (target as usize) < classes;
        assert!(is_class, "the target of row {row} is {target}, not one of {classes} classes");
        Some(target as usize)
    };
    targets.iter().enumerate().map(class).collect()
}

/// Elements of the gradients that are wanted, of the rows so far.
struct Gradients {
    hidden: Option<Vec<f32>>,
    /// `None` before the first rows, too.
    weight: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
}

/// A loss on contiguous tensors.
struct Problem<'a> {
    hidden: &'a [f32],
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    targets: &'a [Option<usize>],
    /// Width and number of classes.
    sizes: [usize; 2],
    /// Factor of the gradients.
    scale: f32,
    rule: &'a LossRule,
}

impl Problem<'_> {
    /// Returns the sum of the losses of the next rows, and adds their gradients.
    fn run(&self, range: Range<usize>, logits: &mut Vec<f32>, gradients: &mut Gradients) -> f64 {
        let ([width, classes], rows) = (self.sizes, range.len());
        let elements = range.start * width..range.end * width;
        let hidden = Matrix::new(&self.hidden[elements], [rows, width], width);
        // `[width, classes]`
        let weight = match self.rule.embedding {
            true => Matrix::new(self.weight, [classes, width], width).transposed(),
            false => Matrix::new(self.weight, [width, classes], classes),
        };
        logits.clear();
        let logits = append_product(logits, [hidden, weight]);
        let rows_of = logits.par_chunks_mut(classes).zip(&self.targets[range]);
        let losses: Vec<f64> = rows_of.map(|(logits, target)| self.row(logits, *target)).collect();
        if let Some(of_bias) = &mut gradients.bias {
            add_rows(of_bias, logits);
        }
        let slopes = Matrix::new(logits, [rows, classes], classes);
        if let Some(of_hidden) = &mut gradients.hidden {
            append_product(of_hidden, [slopes, weight.transposed()]);
        }
        if self.rule.gradients[1] {
            let (factors, stride) = match self.rule.embedding {
                true => ([slopes.transposed(), hidden], width),
                false => ([hidden.transposed(), slopes], classes),
            };
            match &mut gradients.weight {
                None => gradients.weight = Some(new_product(factors)),
                Some(of_weight) => multiply(Pool, (of_weight, stride), true, 1.0, factors),
            }
        }
        // The order does not depend on the threads.
        losses.into_iter().sum()
    }

    /// Returns the loss of a row, and replaces its logits by their gradients.
    fn row(&self, logits: &mut [f32], target: Option<usize>) -> f64 {
        let Some(target) = target else {
            logits.fill(0.0);
            return 0.0;
        };
        if let Some(bias) = self.bias {
            logits.iter_mut().zip(bias).for_each(|(logit, bias)| *logit += bias);
        }
        row_loss(logits, target, self.rule.smoothing as f32, self.scale)
    }
}

/// Adds rows to `sums`.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn add_rows(sums: &mut [f32], rows: &[f32]) {
    for row in rows.chunks_exact(sums.len()) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
}

/// Returns the loss of a row, and replaces its logits by their gradients times `scale`.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn row_loss(logits: &mut [f32], target: usize, smoothing: f32, scale: f32) -> f64 {
    let (top, of_target) = (row_max(logits), logits[target]);
    let even = smoothing / logits.len() as f32;
    let of_all = if smoothing == 0.0 { 0.0 } else { row_sum(logits) };
    logits.iter_mut().for_each(|logit| *logit = exp_or_zero(*logit - top));
    let sum = row_sum(logits);
    let factor = scale / sum;
    logits.iter_mut().for_each(|power| *power = *power * factor - even * scale);
    logits[target] -= (1.0 - smoothing) * scale;
    let expected =
        f64::from(1.0 - smoothing) * f64::from(of_target) + f64::from(even) * f64::from(of_all);
    f64::from(top) + f64::from(sum).ln() - expected
}
