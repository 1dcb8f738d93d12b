//! A weight at two places of a recomputed unit.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::prelude::*;

use super::of_rank_0;

const WIDTH: usize = 12;

#[derive(Module, Debug)]
#[fsdp_unit(checkpoint, tie("up" = "down"))]
struct Block {
    up: Linear,
    down: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.up.forward(x.clone()).matmul(self.down.val().transpose()) + x
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Model {
    blocks: Vec<Block>,
    head: Linear,
}

#[fsdp_unit]
impl Model {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.blocks.iter().fold(x, |x, block| block.forward(x)))
    }
}

impl Model {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device);
        let block = |apart: bool| {
            let up = linear();
            let down = if apart { linear().weight } else { up.weight.clone() };
            Block { up, down }
        };
        Self { blocks: vec![block(false), block(true)], head: linear() }
    }
}

/// Returns the bits of every gradient on rank 0, optionally with an evaluation between forward and
/// backward.
fn gradients(which: ActivationCheckpointing, evaluates: bool) -> Vec<Vec<u32>> {
    of_rank_0(2, move |worker| {
        let device = worker.device();
        let options = FsdpOptions::new().with_seed(4).with_activation_checkpointing(which);
        let model = fully_shard(Model::new(device), worker, options)?;
        let x = || Tensor::<2>::ones([3, WIDTH], device) * (1 + worker.rank().index()) as f32;
        let loss = model.forward(x()).powf_scalar(2.0).mean();
        if evaluates {
            model.valid().forward(x().inner());
        }
        let gradients = model.backward(loss)?;
        let weights = model.blocks.iter().map(|block| &block.up.weight).chain([&model.head.weight]);
        let bits = |weight: &Param<Tensor<2>>| {
            let gradient = gradients.get::<2>(weight.id).expect("a gradient").into_data();
            gradient.iter::<f32>().map(f32::to_bits).collect()
        };
        Ok(weights.map(bits).collect())
    })
}

/// The evaluation reads the same parameters without a graph.
#[test]
fn both_places_of_a_tied_weight_have_their_part_of_the_gradient() {
    let expected = gradients(ActivationCheckpointing::None, false);
    assert_eq!(gradients(ActivationCheckpointing::None, true), expected);
    for evaluates in [false, true] {
        let found = gradients(ActivationCheckpointing::Annotated, evaluates);
        assert_eq!(found, expected, "with an evaluation in between: {evaluates}");
    }
}
