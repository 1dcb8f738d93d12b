//! Methods that are hooked by `#[fsdp(forward)]`, in the unit's own block, in further ones and in
//! those of traits.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::prelude::*;

use crate::support::compare::{Within, assert_close};
use crate::support::on_ranks;

const WIDTH: usize = 8;

/// A trait with a type, a constant, and methods with and without a body.
trait Layer {
    type Input;
    const FACTOR: f64;

    fn apply(&self, input: Self::Input) -> Result<Tensor<2>, String>;

    fn twice(&self, x: Tensor<2>) -> Tensor<2>;

    fn name(&self) -> &'static str;
}

/// A unit whose only block is that of a trait.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Scaled {
    inner: Linear,
}

#[fsdp_unit]
impl Layer for Scaled {
    type Input = (Tensor<2>, usize);
    const FACTOR: f64 = 0.5;

    #[fsdp(forward)]
    fn apply(&self, (x, times): Self::Input) -> Result<Tensor<2>, String> {
        if times == 0 {
            return Err(format!("{} times", self.name()));
        }
        let x = Ok::<_, String>(x)?;
        Ok(self.inner.forward(x) * (Self::FACTOR * times as f64))
    }

    #[fsdp(forward)]
    fn twice(&self, x: Tensor<2>) -> Tensor<2> {
        self.inner.forward(self.inner.forward(x))
    }

    fn name(&self) -> &'static str {
        "no"
    }
}

/// A unit with methods of any name, and a further block.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Codec {
    down: Linear,
    up: Linear,
}

#[fsdp_unit]
impl Codec {
    #[fsdp(forward)]
    fn encode(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(x)
    }

    #[fsdp(forward)]
    fn decode(&self, code: Tensor<2>) -> Tensor<2> {
        self.up.forward(code)
    }
}

trait Reconstruct {
    fn reconstruct(&self, x: Tensor<2>) -> Tensor<2>;
}

#[fsdp_unit(more)]
impl Reconstruct for Codec {
    #[fsdp(forward)]
    fn reconstruct(&self, x: Tensor<2>) -> Tensor<2> {
        self.up.forward(self.down.forward(x))
    }
}

#[fsdp_unit(more)]
impl Codec {
    #[fsdp(forward)]
    fn norm(&self) -> Tensor<1> {
        self.up.weight.val().powf_scalar(2.0).sum()
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Model {
    scaled: Scaled,
    codec: Codec,
    head: Linear,
}

#[fsdp_unit]
impl Model {
    #[fsdp(forward)]
    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = self.scaled.twice(self.scaled.apply((x, 3)).expect("three times"));
        let x = self.codec.decode(self.codec.encode(x.clone())) + self.codec.reconstruct(x);
        self.head.forward(x).powf_scalar(2.0).mean() + self.codec.norm() * 0.01
    }
}

impl Model {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            scaled: Scaled { inner: linear(WIDTH, WIDTH) },
            codec: Codec { down: linear(WIDTH, 4), up: linear(4, WIDTH) },
            head: linear(WIDTH, 3),
        }
    }
}

/// Returns the loss and the norm of the gradients, and the numbers of all-gathers of units and of
/// single parameters.
fn step(strategy: ShardingStrategy, world: usize) -> ([f64; 2], [usize; 2]) {
    on_ranks(world, move |worker| {
        let device = worker.device();
        let options = FsdpOptions::new().with_strategy(strategy).with_seed(5);
        let model = fully_shard(Model::new(device), worker, options)?;
        let refused = model.scaled.apply((Tensor::ones([2, WIDTH], device), 0));
        assert_eq!(refused.unwrap_err(), "no times");
        let loss = model.loss(Tensor::ones([2, WIDTH], device));
        let value = f64::from(loss.clone().into_scalar::<f32>());
        let mut gradients = model.backward(loss)?;
        let norm = model.clip_grad_norm(&mut gradients, 1e9)?;
        let counts = model.stats().counts();
        Ok(([value, norm], [counts.all_gathers, counts.single_gathers]))
    })
    .swap_remove(0)
}

#[test]
fn marked_methods_gather_their_unit_and_compute_as_unsharded_ones() {
    let (expected, _) = step(ShardingStrategy::NoShard, 1);
    for world in [1, 2, 3] {
        let (found, [gathers, single]) = step(ShardingStrategy::FullShard, world);
        assert_close(&found, &expected, Within::Relative(1e-5), format!("{world} ranks"));
        assert!(gathers > 0, "units are gathered");
        assert_eq!(single, 0, "no parameter is gathered by itself");
    }
}
