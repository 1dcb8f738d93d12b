//! `crate = ".."`: generated code names the runtime crate by the path that the user gives, so that
//! another crate can re-export it.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use vendored::fsdp_runtime::Error;
use vendored::fsdp_runtime::model::Counts;
use vendored::fsdp_runtime::prelude::*;

/// Stands for a crate that re-exports the runtime.
mod vendored {
    pub use fsdp_runtime;
}

const WIDTH: usize = 8;

#[derive(Module, Debug)]
#[fsdp_unit(crate = "vendored::fsdp_runtime")]
struct Block {
    up: Linear,
    #[fsdp(unit)]
    down: Linear,
}

#[fsdp_unit(field_units, crate = "vendored::fsdp_runtime")]
impl Block {
    fn forward(&self, x: Tensor<2>) -> Output {
        Output { hidden: self.down.forward(self.up.forward(x)) }
    }

    /// Not recomputable: the input is borrowed.
    fn forward_borrowed(&self, x: &Tensor<2>) -> Output {
        Output { hidden: self.down.forward(self.up.forward(x.clone())) }
    }
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(crate = "vendored::fsdp_runtime")]
struct Head {
    output: Linear,
}

#[derive(UnitValue)]
#[fsdp(crate = "vendored::fsdp_runtime")]
struct Output {
    hidden: Tensor<2>,
}

#[derive(Module, Debug)]
#[fsdp_unit(root, crate = "self::vendored::fsdp_runtime")]
struct Model {
    blocks: Vec<Block>,
    head: Head,
}

#[fsdp_unit(crate = "crate::crate_path::vendored::fsdp_runtime")]
impl Model {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let Output { hidden } = self.blocks[0].forward(x);
        let Output { hidden } = self.blocks[1].forward_borrowed(&hidden);
        self.head.output.forward(hidden)
    }
}

impl Model {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
        let block = || Block { up: linear(), down: linear() };
        Self { blocks: vec![block(), block()], head: Head { output: linear() } }
    }
}

const STEPS: usize = 2;

/// Returns the bits of the losses, and the counts of collectives.
fn train(strategy: ShardingStrategy) -> (Vec<u32>, Counts) {
    let mut ranks = launch(LaunchOptions::new(2).with_device(Device::flex()), move |worker| {
        let device = worker.device();
        let options = FsdpOptions::new().with_strategy(strategy).with_seed(1);
        let mut net = fully_shard(Model::new(device), &worker, options)?;
        let mut optimizer = SgdConfig::new().init();
        let mut losses = Vec::new();
        for _ in 0..STEPS {
            let loss = net.forward(Tensor::ones([2, WIDTH], device)).powf_scalar(2.0).mean();
            losses.push(loss.clone().into_scalar::<f32>().to_bits());
            let grads = net.backward(loss)?;
            net = optimizer.step(1e-2, net, grads);
        }
        Ok::<_, Error>((losses, net.stats().counts()))
    })
    .expect("the run succeeds");
    ranks.swap_remove(0)
}

#[test]
fn a_model_behind_a_reexport_trains() {
    let (full, counts) = train(ShardingStrategy::FullShard);
    let (none, _) = train(ShardingStrategy::NoShard);
    assert_eq!(full, none);
    assert_ne!(full[0], full[1], "the weights changed");
    assert_eq!(counts.reduce_scatters, STEPS * (1 + 2 * 2), "the root, 2 blocks, a field in each");
    assert_eq!(counts.single_gathers, 0);
}
