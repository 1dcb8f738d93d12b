//! Attention whose keys and values context parallel ranks pass on in a ring. A rank has those of two ranks at a
//! time, the present ones and those that arrive, in place of whole rows.
//!
//! In forward each rank computes its queries with the present keys, and merges the results by their statistics. In
//! backward the gradients of keys and values travel with them: each rank adds its part, and the last one sends them
//! to the rank that they belong to.
//!
//! Source: Liu, Zaharia and Abbeel, [*Ring Attention*](https://arxiv.org/abs/2310.01889), 2023.

use std::ops::Range;

use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice};
use fsdp_kernels::{AttentionRule, AttentionTensors, Float, WeightPlaces, wide};

use super::{Arriving, ContextRanks, backward as backward_of_part, forward as forward_of_part};
use crate::backend::model_backend::{ModelBackend, cast_model};
use crate::error::Error;
use crate::layout::ContextPart;

/// Returns the output and the row statistics.
pub(super) fn forward<B: ModelBackend>(
    tensors: AttentionTensors<Float<B>>,
    rule: &AttentionRule,
    ranks: &dyn ContextRanks<B>,
    own: ContextPart,
) -> Result<[Float<B>; 2], Error> {
    let dtype = tensors.query.dtype();
    let mut sums = None;
    for_each_part::<B>(tensors, ranks, own, |tensors, part| {
        let of_part = rule_of(rule, part);
        // A rank computes its own part even where no query sees a key.
        if sums.is_some() && !sees_keys(&of_part) {
            return Ok(());
        }
        let [output, statistics] = forward_of_part::<B>(tensors, of_part);
        let output = cast_model::<B>(output, wide(dtype));
        let results = [output, statistics].map(by_query::<B>);
        sums = Some(match sums.take() {
            Some(sums) => merged::<B>([sums, results]),
            None => results,
        });
        Ok(())
    })?;
    let [output, statistics] = sums.expect("a rank computes its own part");
    Ok([cast_model::<B>(output, dtype), statistics].map(by_query::<B>))
}

/// Swaps heads and queries. Heads of a query lie together in the sums, so that the layer after attention takes them
/// without a copy.
fn by_query<B: ModelBackend>(tensor: Float<B>) -> Float<B> {
    B::float_swap_dims(tensor, 1, 2)
}

/// Returns the gradients of query, key and value, given the results and the gradient of the output.
pub(super) fn backward<B: ModelBackend>(
    tensors: AttentionTensors<Float<B>>,
    results: &[Float<B>; 2],
    grad: &Float<B>,
    rule: &AttentionRule,
    ranks: &dyn ContextRanks<B>,
    own: ContextPart,
) -> Result<[Float<B>; 3], Error> {
    let dtype = grad.dtype();
    let query_shape = tensors.query.shape();
    let mut of_query: Option<Float<B>> = None;
    // Gradients of the present keys and values, of the ranks before.
    let mut arriving: Option<Arriving<B>> = None;
    for_each_part::<B>(tensors, ranks, own, |tensors, part| {
        let shapes = [tensors.key.shape(), tensors.value.shape()];
        let of_part = rule_of(rule, part);
        let found = sees_keys(&of_part).then(|| {
            let grads = backward_of_part::<B>(tensors, results, grad, of_part);
            grads.map(|tensor| cast_model::<B>(tensor, wide(dtype)))
        });
        let earlier = arriving.take().map(|arrive| arrive()).transpose()?;
        let of_keys = match (found, earlier) {
            (Some([query, key, value]), earlier) => {
                of_query = Some(added::<B>(of_query.take(), query));
                let [of_key, of_value] = earlier.map_or([None, None], |earlier| {
                    <[_; 2]>::try_from(earlier).expect("two tensors were sent").map(Some)
                });
                vec![added::<B>(of_key, key), added::<B>(of_value, value)]
            }
            (None, Some(earlier)) => earlier,
            (None, None) => shapes.map(|shape| zeros::<B>(shape, grad)).into(),
        };
        arriving = Some(ranks.pass_on(of_keys)?);
        Ok(())
    })?;
    let arrive = arriving.expect("a ring has ranks");
    let [key, value] = <[_; 2]>::try_from(arrive()?).expect("two tensors were sent");
    let query = of_query.unwrap_or_else(|| zeros::<B>(query_shape, grad));
    Ok([query, key, value].map(|tensor| cast_model::<B>(tensor, dtype)))
}

/// Calls `f` with each rank's part of the keys and values, and with the part. This rank's own comes first. While `f`
/// computes, the next part arrives.
fn for_each_part<B: ModelBackend>(
    tensors: AttentionTensors<Float<B>>,
    ranks: &dyn ContextRanks<B>,
    own: ContextPart,
    mut f: impl FnMut(AttentionTensors<Float<B>>, ContextPart) -> Result<(), Error>,
) -> Result<(), Error> {
    let AttentionTensors { query, mut key, mut value, bias } = tensors;
    let mut parts = own.around().peekable();
    while let Some(part) = parts.next() {
        let next = match parts.peek() {
            Some(_) => Some(ranks.pass_on(vec![key.clone(), value.clone()])?),
            None => None,
        };
        let bias = bias.as_ref().map(|bias| of_part::<B>(bias, 1, part));
        f(AttentionTensors { query: query.clone(), key, value, bias }, part)?;
        let Some(arrive) = next else { break };
        [key, value] = <[_; 2]>::try_from(arrive()?).expect("two tensors were sent");
    }
    Ok(())
}

/// Returns the rule for a part of the keys. A segment of a query has the keys of the part that the query sees.
fn rule_of(rule: &AttentionRule, part: ContextPart) -> AttentionRule {
    let segments = rule.segments.as_ref();
    let places = rule.places.map(|places| WeightPlaces { keys: part.places(), ..places });
    let segments = segments.map(|segments| segments.renumbered(|key| part.before(key)));
    AttentionRule { segments, places, ..rule.clone() }
}

/// Returns whether some query sees a key under a rule that says so by segments only.
fn sees_keys(rule: &AttentionRule) -> bool {
    rule.segments.as_ref().is_none_or(|segments| segments.has_keys())
}

/// Returns a part of a tensor that has whole rows along dimension `dim`.
pub(crate) fn of_part<B: Backend>(whole: &Float<B>, dim: usize, part: ContextPart) -> Float<B> {
    B::float_cat(part.blocks().map(|block| narrowed::<B>(whole, dim, block)).into(), dim)
}

/// Returns a part of a tensor along one dimension.
pub(crate) fn narrowed<B: Backend>(tensor: &Float<B>, dim: usize, range: Range<usize>) -> Float<B> {
    let dims = tensor.shape();
    let range = |(at, &size): (usize, &usize)| if at == dim { range.clone() } else { 0..size };
    let slices: Vec<_> = dims.iter().enumerate().map(range).map(Slice::from).collect();
    B::float_slice(tensor.clone(), &slices)
}

/// Returns the results of attention with the keys of two, each an output in f32 or f64 and row statistics, by query.
fn merged<B: ModelBackend>(results: [[Float<B>; 2]; 2]) -> [Float<B>; 2] {
    let [[a, log_a], [b, log_b]] = results;
    let logs = B::float_cat(vec![log_a, log_b], 3);
    let top = B::float_max_dim(logs.clone(), 3);
    let powers = B::float_exp(B::float_sub(logs.clone(), top.clone()));
    let log = B::float_add(top, B::float_log(B::float_sum_dim(powers, 3)));
    let shares = B::float_exp(B::float_sub(logs, log.clone()));
    let share = |at: usize| narrowed::<B>(&shares, 3, at..at + 1);
    let sum = B::float_add(B::float_mul(a, share(0)), B::float_mul(b, share(1)));
    [sum, log]
}

fn added<B: ModelBackend>(sum: Option<Float<B>>, tensor: Float<B>) -> Float<B> {
    match sum {
        Some(sum) => B::float_add(sum, tensor),
        None => tensor,
    }
}

/// Returns zeros in the dtype of sums for a tensor like `like`.
fn zeros<B: ModelBackend>(shape: Shape, like: &Float<B>) -> Float<B> {
    B::float_zeros(shape, &like.device(), wide(like.dtype()).into())
}
