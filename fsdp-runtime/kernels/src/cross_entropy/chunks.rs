//! Cross-entropy of a linear layer's output in chunks of rows, made of Burn's operations.
//!
//! Sums and gradients are in f32, or in f64 for tensors of f64.

use std::ops::Range;

use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice, TensorData};
use burn_std::Scalar;

use super::{LossResults, LossRule, LossTensors};
use crate::tensor::{Float, wide};

/// Implements [`Kernels::linear_cross_entropy`](crate::Kernels::linear_cross_entropy).
pub(crate) fn forward<B: Backend>(
    tensors: &LossTensors<Float<B>>,
    rule: &LossRule,
) -> LossResults<Float<B>> {
    let LossTensors { hidden, weight, bias, targets } = tensors;
    let (dtype, device) = (wide(hidden.dtype()), hidden.device());
    let zeros = |shape| B::float_zeros(shape, &device, dtype.into());
    let weight = if rule.embedding { B::float_transpose(weight.clone()) } else { weight.clone() };
    let [rows, classes] = [hidden.shape()[0], weight.shape()[1]];
    let mut sums = Sums::<B> {
        loss: zeros(Shape::from([1])),
        counted: zeros(Shape::from([1])),
        hidden: Vec::new(),
        weight: rule.gradients[1].then(|| zeros(tensors.weight.shape())),
        bias: rule.gradients[2].then(|| zeros(Shape::from([1, classes]))),
    };
    let bias = bias
        .clone()
        .map(|bias| B::float_cast(B::float_reshape(bias, Shape::from([1, classes])), dtype.into()));
    let numbers: Vec<f32> = (0..classes).map(|class| class as f32).collect();
    let numbers = TensorData::new(numbers, [1, classes]).convert_dtype(dtype);
    let numbers = B::float_from_data(numbers, &device);
    for start in (0..rows).step_by(rule.chunk) {
        let range = start..(start + rule.chunk).min(rows);
        let targets = B::float_cast(rows_of::<B>(targets, &range), dtype.into());
        let targets = B::float_reshape(targets, Shape::from([range.len(), 1]));
        let hidden = rows_of::<B>(hidden, &range);
        let logits = B::float_cast(B::float_matmul(hidden.clone(), weight.clone()), dtype.into());
        let logits = match &bias {
            Some(bias) => B::float_add(logits, bias.clone()),
            None => logits,
        };
        let slopes = sums.add_losses(logits, targets, &numbers, rule);
        sums.add_gradients(slopes, hidden, &weight, rule);
    }
    sums.finish(rule)
}

/// Returns the rows in the range.
fn rows_of<B: Backend>(tensor: &Float<B>, range: &Range<usize>) -> Float<B> {
    let shape = tensor.shape();
    let slice = |at| if at == 0 { range.clone().into() } else { (0..shape[at]).into() };
    let slices: Vec<Slice> = (0..shape.num_dims()).map(slice).collect();
    B::float_slice(tensor.clone(), &slices)
}

/// Returns 1 for elements that are 0, and 0 for elements of magnitude 1 or more.
fn is_zero<B: Backend>(tensor: Float<B>) -> Float<B> {
    let nonzero = B::float_clamp(B::float_abs(tensor), Scalar::from(0.0), Scalar::from(1.0));
    B::float_add_scalar(B::float_neg(nonzero), Scalar::from(1.0))
}

/// Sums over the chunks.
struct Sums<B: Backend> {
    loss: Float<B>,
    /// Number of rows that count.
    counted: Float<B>,
    /// Gradients of the hidden values of each chunk.
    hidden: Vec<Float<B>>,
    weight: Option<Float<B>>,
    /// `[1, classes]`
    bias: Option<Float<B>>,
}

impl<B: Backend> Sums<B> {
    /// Adds the losses of a chunk, and returns the gradients of its logits.
    fn add_losses(
        &mut self,
        logits: Float<B>,
        targets: Float<B>,
        numbers: &Float<B>,
        rule: &LossRule,
    ) -> Float<B> {
        let [_, classes] = logits.shape().dims();
        let counts = match rule.ignored {
            // Classes and the ignored target are whole numbers.
            Some(ignored) => {
                let other = B::float_sub_scalar(targets.clone(), Scalar::from(ignored));
                B::float_clamp(B::float_abs(other), Scalar::from(0.0), Scalar::from(1.0))
            }
            None => B::float_add_scalar(
                B::float_mul_scalar(targets.clone(), Scalar::from(0.0)),
                Scalar::from(1.0),
            ),
        };
        let top = B::float_max_dim(logits.clone(), 1);
        let powers = B::float_exp(B::float_sub(logits.clone(), top.clone()));
        let sum = B::float_sum_dim(powers.clone(), 1);
        let shares = B::float_div(powers, sum.clone());
        let expected = is_zero::<B>(B::float_sub(numbers.clone(), targets));
        let expected = B::float_mul_scalar(expected, Scalar::from(1.0 - rule.smoothing));
        let even = Scalar::from(rule.smoothing / classes as f64);
        let expected = B::float_add_scalar(expected, even);
        let of_target = B::float_sum_dim(B::float_mul(expected.clone(), logits), 1);
        let losses = B::float_sub(B::float_add(B::float_log(sum), top), of_target);
        let losses = B::float_sum(B::float_mul(losses, counts.clone()));
        let shape = Shape::from([1]);
        self.loss = B::float_add(self.loss.clone(), B::float_reshape(losses, shape.clone()));
        let counted = B::float_reshape(B::float_sum(counts.clone()), shape);
        self.counted = B::float_add(self.counted.clone(), counted);
        B::float_mul(B::float_sub(shares, expected), counts)
    }

    /// Adds the gradients of a chunk, given those of its logits.
    fn add_gradients(
        &mut self,
        slopes: Float<B>,
        hidden: Float<B>,
        weight: &Float<B>,
        rule: &LossRule,
    ) {
        let wide = slopes.dtype();
        if let Some(bias) = self.bias.take() {
            self.bias = Some(B::float_add(bias, B::float_sum_dim(slopes.clone(), 0)));
        }
        let slopes = B::float_cast(slopes, hidden.dtype().into());
        if rule.gradients[0] {
            let gradient = B::float_matmul(slopes.clone(), B::float_transpose(weight.clone()));
            self.hidden.push(B::float_cast(gradient, wide.into()));
        }
        if let Some(sum) = self.weight.take() {
            let factors = if rule.embedding { [slopes, hidden] } else { [hidden, slopes] };
            let [a, b] = factors;
            let gradient = B::float_matmul(B::float_transpose(a), b);
            self.weight = Some(B::float_add(sum, B::float_cast(gradient, wide.into())));
        }
    }

    fn finish(self, rule: &LossRule) -> LossResults<Float<B>> {
        // Without rows that count the sums are 0, and so is the mean.
        let counted = B::float_clamp_min(self.counted, Scalar::from(1.0));
        let one = B::float_div(counted.clone(), counted.clone());
        let (loss, factor) = match rule.mean {
            true => (B::float_div(self.loss, counted.clone()), B::float_div(one, counted)),
            false => (self.loss, one),
        };
        let hidden = rule.gradients[0].then(|| B::float_cat(self.hidden, 0));
        let bias = self.bias.map(|bias| {
            let classes = bias.shape()[1];
            B::float_reshape(bias, Shape::from([classes]))
        });
        let gradients = [hidden, self.weight, bias].into_iter().flatten().collect();
        LossResults { loss, factor, gradients }
    }
}
