//! Values of single parameters: their initialisation, the part that a rank stores, and checksums.

use std::sync::Mutex;

use burn::module::{Param, ParamId, ParamMapper as ValueMapper};
use burn::tensor::{DType, Shape, Tensor};

use crate::backend::{Float, ShardBackend, cast, encoded};
use crate::error::IgnorePoison;
use crate::layout::mix;
use crate::param_group::ParamSpec;

/// A parameter taken apart, without its value.
pub(super) struct EmptyParam<const D: usize> {
    pub(super) id: ParamId,
    /// Whether the value is a leaf of the autodiff graph.
    pub(super) requires_grad: bool,
    pub(super) mapper: ValueMapper<Tensor<D>>,
}

/// Takes a parameter apart, and initialises it first if it has no value.
///
/// With a `seed`, parameter number `number` of the model is initialised from a seed derived from
/// both.
pub(super) fn initialise<const D: usize>(
    param: Param<Tensor<D>>,
    seed: Option<u64>,
    number: usize,
) -> (ParamId, Tensor<D>, ValueMapper<Tensor<D>>) {
    /// Burn has one random generator for each process. No other rank of the process, and no other
    /// model that is initialised at the same time, may use it between seeding and initialisation.
    static GENERATOR: Mutex<()> = Mutex::new(());
    if param.is_initialized() {
        return param.consume();
    }
    let _generator = GENERATOR.lock().ignore_poison();
    if let Some(seed) = seed {
        param.lazy_device().seed(mix(seed ^ mix(number as u64)));
    }
    param.consume()
}

/// Returns an f32 tensor filled with one value.
pub(super) fn filled<B: ShardBackend>(shape: &[usize], value: f32, device: &B::Device) -> Float<B> {
    B::float_full(Shape::from(shape.to_vec()), value.into(), device, DType::F32.into())
}

/// Returns the tensor that this rank stores for a parameter, filled with one value. In the words of
/// codes, NaN gives NaN.
pub(super) fn filled_base<B: ShardBackend>(
    spec: &ParamSpec,
    value: f32,
    device: &B::Device,
) -> Float<B> {
    cast::<B>(filled::<B>(&spec.base_shape(), value, device), spec.storage.dtype())
}

/// Returns the tensor that this rank stores for a parameter, given the full parameter of the module in f32. An
/// empty shard has zeros.
pub(super) fn part<B: ShardBackend>(
    full: Float<B>,
    spec: &ParamSpec,
    device: &B::Device,
) -> Float<B> {
    let full = match &spec.split {
        Some(split) => {
            let part = B::float_slice(full, &split.slices(&spec.shape));
            // The part is copied: a view would keep the whole parameter alive.
            B::copy_range(part, 0..spec.numel(), Shape::from(spec.shape.clone()))
        }
        None => full,
    };
    match spec.range().is_empty() {
        true => filled_base::<B>(spec, 0.0, device),
        false => encoded::<B>(full, spec.range(), spec.storage, spec.base_shape().into(), device),
    }
}

/// Returns a checksum of a tensor's elements, which depends on their order.
pub(super) fn checksum<B: ShardBackend>(tensor: &Float<B>) -> u64 {
    let data = B::to_data(tensor.clone());
    data.iter::<f32>().fold(0, |hash, element| mix(hash ^ u64::from(element.to_bits())))
}
