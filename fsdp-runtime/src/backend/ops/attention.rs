//! Attention as one operation, which saves its inputs, its output and one number for each query.
//!
//! Among context parallel ranks the operation gets the keys and values of whole rows, and saves this rank's part.
//! Backward gets them again, and adds up their gradients over the ranks. Either they are gathered, or the ranks pass
//! them on in a ring ([`ring`]).

mod ring;

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::{DispatchTensor, Shape, Tensor};
use fsdp_kernels::{AttentionRule, AttentionTensors, Float, Kernels, Tracked, wide};

pub(crate) use self::ring::{narrowed, of_part};
use super::arguments::{Taken, register_gradients, take_all};
use super::error::KernelError;
use super::saved::Saved;
use crate::backend::model_backend::{FloatTensor, ModelBackend, with_backend};
use crate::error::{Error, raise};
use crate::layout::ContextPart;

/// Tensors that are on their way from the rank before: waits for them.
pub(crate) type Arriving<B> = Box<dyn FnOnce() -> Result<Vec<Float<B>>, Error>>;

/// The context parallel ranks, as attention sees them.
pub(crate) trait ContextRanks<B: ModelBackend>: Debug + Send + Sync {
    /// Returns this rank's part of rows, of which it has as many keys, if the ranks pass keys and values on in a
    /// ring, and `None` if they gather them.
    fn ring(&self, keys: usize) -> Result<Option<ContextPart>, Error>;
    /// Sends tensors, which have the same shapes on all ranks, to the next rank of the ring.
    fn pass_on(&self, tensors: Vec<Float<B>>) -> Result<Arriving<B>, Error>;
    /// Returns key and value of whole rows, given those of this rank's part: `[batch, key_heads, length, width]`.
    fn join(&self, parts: [Float<B>; 2]) -> Result<[Float<B>; 2], Error>;
    /// Returns this rank's parts of the sums of two tensors over the ranks, which have whole rows.
    fn sum_parts(&self, whole: [Float<B>; 2]) -> Result<[Float<B>; 2], Error>;
}

/// Context parallel ranks, or `None` if this rank has whole rows.
type Ranks<B> = Option<Arc<dyn ContextRanks<B>>>;

/// Applies attention, and records it for backward if a tensor is tracked. `bias` is added to the scores
/// of each key, `[batch, keys]`, and has no gradient.
///
/// Returns `None` for devices without kernels, for dtypes that the device does not support, for tensors
/// without elements, and if query, key and value do not agree in device and dtype.
pub(crate) fn attention_tracked(
    [query, key, value]: [&Tensor<4>; 3],
    bias: Option<Tensor<2>>,
    rule: &AttentionRule,
) -> Option<Tensor<4>> {
    let (device, dtype) = (query.device(), query.dtype());
    let agrees = |tensor: &&Tensor<4>| {
        let has_elements = tensor.shape().num_elements() > 0;
        has_elements && tensor.dtype() == dtype && tensor.device() == device
    };
    if ![query, key, value].iter().all(agrees) {
        return None;
    }
    let output: Result<Tensor<4>, KernelError> = with_backend!(device, |B, inner| {
        let refused = || KernelError::Dtype { dtype, device: format!("{device:?}") };
        let supported = <B as burn::backend::Backend>::supports_dtype(&inner, dtype);
        let take = |tensor| <B as ModelBackend>::from_dispatch(tensor).ok_or_else(refused);
        supported.then_some(()).ok_or_else(refused).and_then(|()| {
            let tensors = [query, key, value].map(|tensor| tensor.clone().into_dispatch());
            let tensors = take_all::<B>(tensors);
            let bias = bias.map(|bias| take(bias.into_dispatch())).transpose()?;
            let bias = bias.map(FloatTensor::into_inner);
            let output = tensors.map(|tensors| apply::<B>(tensors, bias, rule, None));
            let output = output.ok_or_else(refused)?.unwrap_or_else(|error| raise(error));
            Ok(Tensor::from_dispatch(B::into_dispatch(output)))
        })
    });
    output.ok()
}

/// Applies attention to this rank's queries and the keys and values of all context parallel `ranks`, and records
/// it for backward if a tensor is tracked. `bias` and `rule` are those of whole rows.
///
/// Returns `None` for dtypes that the device does not support, for tensors without elements, and if query, key
/// and value do not agree in device and dtype.
pub(crate) fn attention_among<B: ModelBackend>(
    tensors: [DispatchTensor; 3],
    bias: Option<DispatchTensor>,
    rule: &AttentionRule,
    ranks: Arc<dyn ContextRanks<B>>,
) -> Result<Option<DispatchTensor>, Error> {
    let bias = match bias.map(B::from_dispatch) {
        Some(None) => return Ok(None),
        bias => bias.flatten().map(FloatTensor::into_inner),
    };
    let Some(tensors) = take_all::<B>(tensors) else { return Ok(None) };
    let agree = match &tensors {
        Taken::Plain(tensors) => agree(tensors),
        Taken::Autodiff(tensors, _) => agree(tensors),
    };
    if !agree {
        return Ok(None);
    }
    apply::<B>(tensors, bias, rule, Some(ranks)).map(|output| Some(B::into_dispatch(output)))
}

/// Returns whether tensors have elements of one dtype.
fn agree<T: TensorMetadata>(tensors: &[T]) -> bool {
    let dtype = tensors[0].dtype();
    tensors.iter().all(|tensor| tensor.shape().num_elements() > 0 && tensor.dtype() == dtype)
}

/// Applies attention to query, key and value.
fn apply<B: ModelBackend>(
    tensors: Taken<B>,
    bias: Option<Float<B>>,
    rule: &AttentionRule,
    ranks: Ranks<B>,
) -> Result<FloatTensor<B>, Error> {
    match tensors {
        Taken::Plain(tensors) => {
            let tensors = AttentionTensors::from_vec(tensors.into_iter().chain(bias).collect());
            let [output, _] = forward_among::<B>(tensors, rule, &ranks)?;
            Ok(FloatTensor::Plain(output))
        }
        Taken::Autodiff(tensors, context) => {
            let tensors = <[Tracked<B>; 3]>::try_from(tensors).expect("three tensors were taken");
            let output = record::<B>(tensors, bias, rule.clone(), ranks)?;
            Ok(FloatTensor::Autodiff(output, context))
        }
    }
}

/// Returns the output and the row statistics, with the keys and values of all ranks.
fn forward_among<B: ModelBackend>(
    tensors: AttentionTensors<Float<B>>,
    rule: &AttentionRule,
    ranks: &Ranks<B>,
) -> Result<[Float<B>; 2], Error> {
    let Some(ranks) = ranks else { return Ok(forward::<B>(tensors, rule.clone())) };
    if let Some(part) = ranks.ring(tensors.key.shape()[2])? {
        return ring::forward::<B>(tensors, rule, &**ranks, part);
    }
    let AttentionTensors { query, key, value, bias } = tensors;
    let [key, value] = ranks.join([key, value])?;
    Ok(forward::<B>(AttentionTensors { query, key, value, bias }, rule.clone()))
}

/// Returns the output and the row statistics, without lowering the tensors.
fn forward<B: ModelBackend>(
    tensors: AttentionTensors<Float<B>>,
    rule: AttentionRule,
) -> [Float<B>; 2] {
    let ([batch, heads, queries, _], dtype) = (tensors.query.shape().dims(), tensors.query.dtype());
    let width = tensors.value.shape()[3];
    let outputs = vec![
        (Shape::from([batch, heads, queries, width]), dtype),
        (Shape::from([batch, heads, queries, 1]), wide(dtype)),
    ];
    let results = B::defer(tensors.into_vec(), outputs, move |buffers| {
        B::Raw::tiled_attention(&AttentionTensors::from_vec(buffers), &rule).into()
    });
    results.try_into().expect("`defer` returns one tensor for each output")
}

/// Returns the gradients of query, key and value, given the results and the gradient of the output, without lowering
/// the tensors.
fn backward<B: ModelBackend>(
    tensors: AttentionTensors<Float<B>>,
    results: &[Float<B>; 2],
    grad: &Float<B>,
    rule: AttentionRule,
) -> [Float<B>; 3] {
    let outputs = [&tensors.query, &tensors.key, &tensors.value]
        .map(|tensor| (tensor.shape(), tensor.dtype()));
    let mut inputs: Vec<_> = results.iter().chain([grad]).cloned().collect();
    inputs.extend(tensors.into_vec());
    let gradients = B::defer(inputs, outputs.into(), move |mut buffers| {
        let tensors = AttentionTensors::from_vec(buffers.split_off(3));
        let [output, statistics, grad] = <[_; 3]>::try_from(buffers).expect("three buffers");
        B::Raw::tiled_attention_backward(&tensors, &[output, statistics], &grad, &rule).into()
    });
    gradients.try_into().expect("`defer` returns one tensor for each output")
}

/// Returns the gradients of query, key and value, given that of the output, with the keys and values of all ranks.
fn backward_among<B: ModelBackend>(
    state: State<B>,
    grad: &Float<B>,
) -> Result<[Float<B>; 3], Error> {
    let State { tensors, results, rule, ranks, saved: _saved } = state;
    let Some(ranks) = ranks else { return Ok(backward::<B>(tensors, &results, grad, rule)) };
    if let Some(part) = ranks.ring(tensors.key.shape()[2])? {
        return ring::backward::<B>(tensors, &results, grad, &rule, &*ranks, part);
    }
    let AttentionTensors { query, key, value, bias } = tensors;
    let [key, value] = ranks.join([key, value])?;
    let tensors = AttentionTensors { query, key, value, bias };
    let [query, key, value] = backward::<B>(tensors, &results, grad, rule);
    let [key, value] = ranks.sum_parts([key, value])?;
    Ok([query, key, value])
}

/// Applies attention and records it as one autodiff operation.
fn record<B: ModelBackend>(
    tensors: [Tracked<B>; 3],
    bias: Option<Float<B>>,
    rule: AttentionRule,
    ranks: Ranks<B>,
) -> Result<Tracked<B>, Error> {
    let nodes = tensors.each_ref().map(|tensor| tensor.node());
    let tensors = tensors.into_iter().map(Tracked::<B>::into_primitive).chain(bias);
    let tensors = AttentionTensors::from_vec(tensors.collect());
    let results = forward_among::<B>(tensors.clone(), &rule, &ranks)?;
    let output = results[0].clone();
    let op = Backward::<B, 3>::prepare::<NoCheckpointing>(Attention, nodes);
    Ok(match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => {
            let inputs = tensors.clone().into_vec();
            let saved = Saved::tensors::<B>(inputs.iter().chain(&results));
            op.finish(State { tensors, results, rule, ranks, saved }, output)
        }
        OpsKind::UnTracked(op) => op.finish(output),
    })
}

/// Inputs and results of attention, and how it is computed.
#[derive(Clone, Debug)]
struct State<B: ModelBackend> {
    tensors: AttentionTensors<Float<B>>,
    /// Output and row statistics.
    results: [Float<B>; 2],
    rule: AttentionRule,
    ranks: Ranks<B>,
    saved: Saved,
}

/// Backward of attention. The parents are query, key and value.
#[derive(Debug)]
struct Attention;

impl<B: ModelBackend> Backward<B, 3> for Attention {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        register_gradients::<B, _, _, 3>(ops, grads, |state, grad| {
            backward_among::<B>(state, &grad).unwrap_or_else(|error| raise(error)).map(Some)
        });
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{DType, Device, Distribution};

    use super::*;
    use crate::backend::ops::{KeyRanges, MaskSource, Places, Segments, WeightPlaces};

    const SOURCE: MaskSource = MaskSource { key: [5, 6], counter: [7, 8], prob: 0.3 };

    fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
        tensor.into_data().iter::<f64>().collect()
    }

    fn rule(causal: bool) -> AttentionRule {
        AttentionRule { causal, dropout: Some(SOURCE), ..AttentionRule::new(0.3) }
    }

    /// Returns the mask of `[batch, heads, queries, keys]` weights: equal scores, and the unit matrix as
    /// the values.
    fn mask(shape: [usize; 4], device: &Device, dtype: DType) -> Vec<f64> {
        mask_of(&rule(false), shape, device, dtype)
    }

    fn mask_of(
        rule: &AttentionRule,
        [batch, heads, queries, keys]: [usize; 4],
        device: &Device,
        dtype: DType,
    ) -> Vec<f64> {
        let options = (device, dtype);
        let [query, key] =
            [queries, keys].map(|length| Tensor::<4>::zeros([batch, heads, length, 2], options));
        let value = Tensor::<2>::eye(keys, device).cast(dtype).reshape([1, 1, keys, keys]);
        let value = value.repeat_dim(0, batch).repeat_dim(1, heads);
        let output = attention_tracked([&query, &key, &value], None, rule).unwrap();
        numbers(output.mul_scalar(keys as f64))
    }

    /// The tiles of f32 and bf16, the blocks of f64, and CubeCL devices.
    #[test]
    fn the_mask_is_the_same_in_every_form() {
        for shape in [[2, 3, 200, 300], [1, 2, 130, 256], [1, 1, 3, 5]] {
            let tiles = mask(shape, &Device::flex(), DType::F32);
            let narrow = mask(shape, &Device::flex(), DType::BF16);
            for (at, (a, b)) in tiles.iter().zip(&narrow).enumerate() {
                assert!((a - b).abs() < 2e-2, "{a} {b} at {at} of {shape:?} in bf16");
            }
            let mut others = vec![mask(shape, &Device::flex(), DType::F64)];
            #[cfg(feature = "cpu")]
            others.push(mask(shape, &Device::cpu(), DType::F32));
            for other in others.drain(..) {
                assert_eq!(tiles.len(), other.len());
                for (at, (a, b)) in tiles.iter().zip(&other).enumerate() {
                    assert!((a - b).abs() < 1e-4, "{a} {b} at {at} of {shape:?}");
                }
            }
            let zeros = tiles.iter().filter(|&&x| x == 0.0).count() as f64 / tiles.len() as f64;
            assert!(tiles.len() < 1000 || (zeros - 0.3).abs() < 0.01, "{zeros}");
        }
    }

    /// Weights of some heads, queries and keys have the masks that they have among all.
    #[test]
    fn a_part_has_the_mask_of_all_weights() {
        let [batch, heads, queries, keys] = [2, 4, 300, 520];
        let places = WeightPlaces {
            heads: Places::blocks(heads, [2..4, 4..4]),
            queries: Places::blocks(queries, [20..170, 250..290]),
            keys: Places::blocks(keys, [0..130, 300..490]),
        };
        let part = [batch, places.heads.len(), places.queries.len(), places.keys.len()];
        let rule = AttentionRule { places: Some(places), ..rule(false) };
        let whole = mask([batch, heads, queries, keys], &Device::flex(), DType::F32);
        let mut expected = Vec::new();
        for row in 0..batch {
            for head in 0..part[1] {
                let head = (row * heads + places.heads.at(head)) * queries;
                for query in (0..part[2]).map(|query| places.queries.at(query)) {
                    let of_key = |key| whole[(head + query) * keys + places.keys.at(key)];
                    expected.extend((0..part[3]).map(of_key));
                }
            }
        }
        let devices = [
            (Device::flex(), DType::F32),
            (Device::flex(), DType::BF16),
            (Device::flex(), DType::F64),
            #[cfg(feature = "cpu")]
            (Device::cpu(), DType::F32),
        ];
        for (device, dtype) in devices {
            let found = mask_of(&rule, part, &device, dtype);
            assert_eq!(found.len(), expected.len());
            let differ = |(a, b): (&f64, &f64)| (a - b).abs() > 2e-2;
            let at = found.iter().zip(&expected).position(differ);
            assert_eq!(at, None, "{dtype:?} on {device:?}");
        }
    }

    /// Returns tensors of `[rows, heads, length, 8]`, where the query has four heads and the others have
    /// `key_heads`.
    fn tensors([queries, keys]: [usize; 2], key_heads: usize, dtype: DType) -> [Tensor<4>; 3] {
        let device = Device::flex().autodiff();
        device.seed(3);
        let tensor = |heads: usize, length: usize| {
            let distribution = Distribution::Normal(0.0, 1.0);
            Tensor::<4>::random([2, heads, length, 8], distribution, (&device, dtype))
                .require_grad()
        };
        [tensor(4, queries), tensor(key_heads, keys), tensor(key_heads, keys)]
    }

    /// Computes attention by Burn's operations, given the dropout mask, with the keys of a group repeated.
    fn plain(
        [query, key, value]: [Tensor<4>; 3],
        rule: &AttentionRule,
        mask: Tensor<4>,
    ) -> Tensor<4> {
        let [rows, heads, queries, _] = query.dims();
        let [_, key_heads, keys, width] = key.dims();
        let repeat = |tensor: Tensor<4>| {
            let tensor = tensor.reshape([rows, key_heads, 1, keys * width]);
            tensor.repeat_dim(2, heads / key_heads).reshape([rows, heads, keys, width])
        };
        let window = rule.window.unwrap_or(usize::MAX) as i128;
        let sees = |row: usize, query: usize, key: usize| {
            let after = key as i128 + queries as i128 - query as i128 - keys as i128;
            let of_segment = |segments: &Segments| segments.around(row, query).contains(&key);
            (!rule.causal || after <= 0)
                && after.abs() < window
                && rule.segments.as_ref().is_none_or(of_segment)
        };
        let each = (0..rows).flat_map(|row| (0..queries).map(move |query| (row, query)));
        let hidden: Vec<f32> = each
            .flat_map(|(row, query)| (0..keys).map(move |key| (row, query, key)))
            .map(|(row, query, key)| if sees(row, query, key) { 0.0 } else { -1e30 })
            .collect();
        let hidden = burn::tensor::TensorData::new(hidden, [rows, 1, queries, keys]);
        let hidden = Tensor::<4>::from_data(hidden, (&query.device(), query.dtype()));
        let scores = query.matmul(repeat(key).transpose()).mul_scalar(rule.scale) + hidden;
        (burn::tensor::activation::softmax(scores, 3) * mask).matmul(repeat(value))
    }

    /// The same mask again in backward: the gradients are those of Burn's operations with the mask that
    /// forward had. A window and segments leave out tiles, but not numbers of the mask's elements.
    #[test]
    fn backward_has_the_mask_of_forward() {
        let numbers_of_segments = (0..600).map(|at| i64::from(at % 300 > 170 + at / 300 * 40));
        let segments = Segments::new(&numbers_of_segments.collect::<Vec<_>>(), 300).ok();
        let causal = rule(true);
        let window = AttentionRule { window: Some(70), ..causal.clone() };
        let packed = AttentionRule { segments, ..causal.clone() };
        let cases = [
            (rule(false), [150, 300], 4, DType::F32),
            (causal.clone(), [150, 300], 4, DType::F32),
            (causal, [150, 300], 2, DType::F64),
            (window.clone(), [150, 600], 2, DType::F32),
            (AttentionRule { causal: false, ..window }, [150, 600], 1, DType::F64),
            (packed.clone(), [300, 300], 1, DType::F32),
            (packed, [300, 300], 2, DType::F64),
        ];
        for (rule, lengths @ [queries, keys], key_heads, dtype) in cases {
            let tensors = tensors(lengths, key_heads, dtype);
            let shape = [2, 4, queries, keys];
            let mask = mask(shape, &Device::flex(), DType::F32);
            let mask = burn::tensor::TensorData::new(mask, shape);
            let mask = Tensor::<4>::from_data(mask, (&tensors[0].device(), dtype));
            let expected = plain(tensors.clone(), &rule, mask);
            let found = attention_tracked(tensors.each_ref(), None, &rule).unwrap();
            let results = [found, expected].map(|output| {
                let gradients = output.clone().powi_scalar(2).sum().backward();
                let grads = tensors.each_ref().map(|tensor| tensor.grad(&gradients).unwrap());
                [output.inner()].into_iter().chain(grads).flat_map(numbers).collect::<Vec<_>>()
            });
            let [found, expected] = &results;
            assert_eq!(found.len(), expected.len());
            for (at, (a, b)) in found.iter().zip(expected).enumerate() {
                let close = (a - b).abs() < 2e-5 * b.abs().max(1.0);
                assert!(close, "{a} {b} at {at}, {rule:?}, {key_heads} key heads, {dtype:?}");
            }
        }
    }

    /// The queries of a context parallel rank see the keys of whole rows by a range each: results and gradients are
    /// those of the same queries among all.
    #[test]
    fn some_queries_of_a_row_have_the_results_that_they_have_among_all() {
        let numbers_of_segments: Vec<i64> = (0..320).map(|at| i64::from(at % 160 > 70)).collect();
        let segments = Segments::new(&numbers_of_segments, 160).ok();
        let causal = AttentionRule { causal: true, ..AttentionRule::new(0.3) };
        let window = AttentionRule { window: Some(21), ..causal.clone() };
        let packed = AttentionRule { segments, ..causal.clone() };
        let cases = [
            (Device::flex(), DType::F32),
            (Device::flex(), DType::F64),
            #[cfg(feature = "cpu")]
            (Device::cpu(), DType::F32),
        ];
        // Two blocks, of which no tile has the length.
        let own: Vec<usize> = (20..60).chain(100..140).collect();
        for (device, dtype) in cases {
            let bias = Tensor::<2>::zeros([2, 160], (&device, dtype));
            let bias = bias.slice_fill([1..2, 3..9], f32::NEG_INFINITY);
            for rule in [&causal, &window, &packed] {
                let device = device.clone().autodiff();
                let of_flex = tensors([160, 160], 2, dtype);
                let all = of_flex.map(|tensor| {
                    Tensor::<4>::from_data(tensor.into_data(), (&device, dtype)).require_grad()
                });
                let indices: Vec<i64> = own.iter().map(|at| *at as i64).collect();
                let indices = Tensor::<1, burn::tensor::Int>::from_ints(&indices[..], &device);
                let ranges = KeyRanges::new(rule, [160, 160]);
                let of_row = |row: usize| own.iter().map(move |query| (row, *query));
                let table = (0..2).flat_map(of_row).map(|(row, query)| {
                    let seen = ranges.of_query(row, query);
                    [seen.start as u32, seen.end as u32]
                });
                let table = Segments::of_ranges(table.collect(), own.len());
                let of_part = AttentionRule { segments: Some(table), ..AttentionRule::new(0.3) };
                let bias = Some(bias.clone());
                let whole = attention_tracked(all.each_ref(), bias.clone(), rule).unwrap();
                let part = all[0].clone().select(2, indices.clone());
                let part = attention_tracked([&part, &all[1], &all[2]], bias, &of_part).unwrap();
                let results = [whole.select(2, indices), part].map(|output| {
                    let gradients = output.clone().powi_scalar(2).sum().backward();
                    let grads = all.each_ref().map(|tensor| tensor.grad(&gradients).unwrap());
                    [output.inner()].into_iter().chain(grads).flat_map(numbers).collect::<Vec<_>>()
                });
                let [whole, part] = &results;
                for (at, (a, b)) in part.iter().zip(whole).enumerate() {
                    let close = (a - b).abs() < 2e-5 * b.abs().max(1.0);
                    assert!(close, "{a} {b} at {at}, {rule:?}, {device:?}, {dtype:?}");
                }
            }
        }
    }
}
