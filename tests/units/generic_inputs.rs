//! Inputs of generic types: they order the gathers and are cast as inputs of concrete types are.
//! What a closure captures is not.

use std::cell::RefCell;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use fsdp_runtime::model::Counts;
use fsdp_runtime::prelude::*;

use crate::support::on_ranks;

const WIDTH: usize = 16;
const STEPS: usize = 3;

/// A type of the user's that is an input.
#[derive(UnitValue)]
struct Hidden(Tensor<2>);

impl From<Hidden> for Tensor<2> {
    fn from(Hidden(hidden): Hidden) -> Self {
        hidden
    }
}

/// Stands for a module of another crate.
#[derive(Module, Debug)]
struct Foreign {
    inner: Linear,
}

impl Foreign {
    fn forward<T: Into<Tensor<2>>>(&self, x: T) -> Tensor<2> {
        self.inner.forward(seen(x.into()))
    }
}

thread_local! {
    /// Dtypes that the forwards of this rank saw.
    static SEEN: RefCell<Vec<DType>> = const { RefCell::new(Vec::new()) };
}

/// Records the dtype of `x`.
fn seen(x: Tensor<2>) -> Tensor<2> {
    SEEN.with_borrow_mut(|seen| seen.push(x.dtype()));
    x
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    up: Linear,
    #[fsdp(unit, leaf)]
    foreign: Foreign,
}

#[fsdp_unit(field_units)]
impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.foreign.forward(self.up.forward(seen(x)).tanh())
    }

    fn forward_any<T: Into<Tensor<2>> + UnitValue>(&self, x: T) -> Tensor<2> {
        self.passed(self.up.forward(seen(x.into())).tanh())
    }

    fn forward_impl(&self, x: Option<impl Into<Tensor<2>> + UnitValue>) -> Option<Tensor<2>> {
        Some(self.passed(Hidden(self.up.forward(seen(x?.into())).tanh())))
    }

    /// The closure captures a tensor.
    fn forward_with<F: FnOnce() -> Tensor<2>>(&self, x: Tensor<2>, y: F) -> Tensor<2> {
        let x = seen(x);
        let y = seen(y()).cast(x.dtype());
        self.up.forward(x + y)
    }

    /// Not hooked; the call in it is.
    fn passed<T: Into<Tensor<2>> + UnitValue>(&self, x: T) -> Tensor<2> {
        self.foreign.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Net {
    blocks: Vec<Block>,
    head: Linear,
}

#[fsdp_unit]
impl Net {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.head.forward(x)
    }

    /// As `forward`, through inputs of generic types.
    fn forward_generic(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.blocks[0].forward_any(x);
        let x = self.blocks[1].forward_any(Hidden(x));
        let x = self.blocks[2].forward_impl(Some(Hidden(x))).expect("an output");
        self.head.forward(x)
    }

    fn forward_captured(&self, x: Tensor<2>) -> Tensor<2> {
        let captured = x.clone().cast(DType::F32);
        self.blocks[0].forward_with(x, || captured)
    }
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
        let block = |_| Block { up: linear(), foreign: Foreign { inner: linear() } };
        Self { blocks: (0..3).map(block).collect(), head: linear() }
    }
}

fn input(rank: usize, device: &Device) -> Tensor<2> {
    let value = |i: usize| ((i * 37 + rank * 5) % 23) as f32 * 0.1 - 1.0;
    let data = (0..4 * WIDTH).map(value).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(data, [4, WIDTH]), device)
}

fn options(param_dtype: Option<FloatDType>) -> FsdpOptions {
    let options = FsdpOptions::new().with_seed(5);
    match param_dtype {
        Some(dtype) => {
            options.with_mixed_precision(MixedPrecisionPolicy::new().with_param_dtype(dtype))
        }
        None => options,
    }
}

/// What a training run ended with, on rank 0.
#[derive(Debug, PartialEq)]
struct Outcome {
    /// Bits of the losses.
    losses: Vec<u32>,
    counts: Counts,
    /// Dtypes that the forwards saw.
    seen: Vec<DType>,
}

fn train(dtype: Option<FloatDType>, forward: fn(&Net, Tensor<2>) -> Tensor<2>) -> Outcome {
    let mut ranks = on_ranks(2, move |worker| {
        let device = worker.device();
        let mut net = fully_shard(Net::new(device), worker, options(dtype))?;
        let mut optimizer = AdamWConfig::new().init();
        let mut losses = Vec::new();
        for _ in 0..STEPS {
            let x = input(worker.rank().index(), device).require_grad();
            let loss = forward(&net, x).cast(DType::F32).powf_scalar(2.0).mean();
            losses.push(loss.clone().into_scalar::<f32>().to_bits());
            let grads = net.backward(loss)?;
            net = optimizer.step(1e-2, net, grads);
        }
        Ok(Outcome { losses, counts: net.stats().counts(), seen: SEEN.take() })
    });
    ranks.swap_remove(0)
}

#[test]
fn a_generic_input_trains_and_is_cast_as_a_concrete_one() {
    for (dtype, seen) in [(None, DType::F32), (Some(FloatDType::BF16), DType::BF16)] {
        let concrete = train(dtype, Net::forward);
        assert_eq!(train(dtype, Net::forward_generic), concrete);
        assert_eq!(concrete.seen, [seen; STEPS * 3 * 2], "the inputs of blocks and fields");
        let counts = concrete.counts;
        assert_eq!(counts.reduce_scatters, STEPS * (1 + 3 * 2), "the root, 3 blocks, 3 fields");
        assert_eq!(counts.single_gathers, 0);
        assert_ne!(concrete.losses[0], concrete.losses[1], "the weights changed");
    }
}

#[test]
fn a_tensor_that_a_closure_captures_is_not_cast() {
    let seen = on_ranks(1, |worker| {
        let device = worker.device();
        let net = fully_shard(Net::new(device), worker, options(Some(FloatDType::BF16)))?;
        net.forward_captured(input(0, device));
        Ok(SEEN.take())
    });
    assert_eq!(seen, [[DType::BF16, DType::F32]]);
}
