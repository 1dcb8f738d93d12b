//! The accounting of what linear layers, attention, the loss of a linear layer and `recompute` save for
//! backward.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Int, Tensor};
use fsdp_runtime::nn::{
    self, AttentionOptions, LinearActivation, LinearCrossEntropyOptions, attention,
    attention_bytes, gelu, linear_bytes, linear_cross_entropy, linear_cross_entropy_bytes,
    recompute,
};
use fsdp_runtime::prelude::*;

use crate::support::on_ranks;

const BATCH: usize = 2;
const HEADS: usize = 3;
const LENGTH: usize = 20;
const WIDTH: usize = 8;
const CLASSES: usize = 50;
const FEATURES: usize = HEADS * WIDTH;
const FLOAT: usize = size_of::<f32>();
/// The result before the activation.
const WIDE: usize = BATCH * LENGTH * FEATURES * FLOAT;
/// Query, key, value, output, and a number for each query.
const ATTENTION: usize = BATCH * HEADS * LENGTH * (4 * WIDTH + 1) * FLOAT;
/// The gradients of hidden values and weight.
const LOSS: usize = (BATCH * LENGTH + CLASSES) * FEATURES * FLOAT;
/// The inputs of the recomputed function.
const RECOMPUTE: usize = BATCH * LENGTH * FEATURES * FLOAT;

#[derive(Module, Debug)]
#[fsdp_unit]
struct Attend {
    wide: nn::Linear,
    query: Linear,
    key: Linear,
    value: Linear,
}

#[fsdp_unit]
impl Attend {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.wide.forward_activated(x, LinearActivation::Gelu);
        let heads = |linear: &Linear| {
            linear.forward(x.clone()).reshape([BATCH, LENGTH, HEADS, WIDTH]).swap_dims(1, 2)
        };
        let [query, key, value] = [&self.query, &self.key, &self.value].map(heads);
        let context = attention(query, key, value, AttentionOptions::new());
        let context = context.swap_dims(1, 2).reshape([BATCH, LENGTH, FEATURES]);
        recompute(context, gelu)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Model {
    attend: Attend,
    head: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Model {
    fn forward(&self, x: Tensor<3>, targets: Tensor<1, Int>) -> Tensor<1> {
        let hidden = self.attend.forward(x).reshape([BATCH * LENGTH, FEATURES]);
        let options = LinearCrossEntropyOptions::new();
        linear_cross_entropy(hidden, self.head.val(), targets, options)
    }
}

fn model(worker: &Worker, options: FsdpOptions) -> Result<Fsdp<Model>, fsdp_runtime::Error> {
    let device = worker.device();
    let linear = || LinearConfig::new(FEATURES, FEATURES).init(device);
    let wide = linear().into();
    let attend = Attend { wide, query: linear(), key: linear(), value: linear() };
    let head = Param::from_tensor(Tensor::<2>::ones([CLASSES, FEATURES], device) * 0.1);
    fully_shard(Model { attend, head }, worker, options)
}

fn forward(model: &Model, worker: &Worker) -> Tensor<1> {
    let device = worker.device();
    let x = Tensor::ones([BATCH, LENGTH, FEATURES], device);
    model.forward(x, Tensor::zeros([BATCH * LENGTH], device))
}

#[test]
fn what_operations_save_counts_until_their_backward() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        on_ranks(2, move |worker| {
            let model = model(worker, FsdpOptions::new().with_seed(1).with_strategy(strategy))?;
            let now = || model.stats().memory().activations.now;
            assert_eq!(now(), 0);
            let loss = forward(&model, worker);
            assert_eq!(now(), WIDE + ATTENTION + LOSS + RECOMPUTE);
            model.backward(loss)?;
            assert_eq!(now(), 0);
            let peak = model.stats().memory().activations.peak;
            assert!((WIDE + ATTENTION + LOSS + RECOMPUTE..).contains(&peak), "{peak}");
            Ok(())
        });
    }
}

#[test]
fn the_bytes_for_a_forecast_are_those_that_count() {
    let heads = [BATCH, HEADS, LENGTH, WIDTH];
    assert_eq!(attention_bytes(heads, heads, DType::F32), ATTENTION);
    let (rows, activation) = (BATCH * LENGTH, LinearActivation::Gelu);
    assert_eq!(linear_bytes(rows, FEATURES, activation, 0, DType::F32), WIDE);
    assert_eq!(linear_bytes(rows, FEATURES, LinearActivation::Identity, 4, DType::BF16), rows * 8);
    let hidden = [rows, FEATURES];
    assert_eq!(linear_cross_entropy_bytes(hidden, CLASSES, DType::F32), LOSS);
    let half = attention_bytes(heads, [BATCH, HEADS, 2 * LENGTH, WIDTH], DType::BF16);
    assert_eq!(half, BATCH * HEADS * LENGTH * (6 * WIDTH * 2 + 4));
    // Three heads of the query share one of the key.
    let grouped = attention_bytes([BATCH, 3 * HEADS, LENGTH, WIDTH], heads, DType::F32);
    assert_eq!(grouped, BATCH * HEADS * LENGTH * ((3 + 1) * 2 * WIDTH + 3) * FLOAT);
}

/// A recomputed unit saves its input in forward, and its operations save theirs in the recomputation.
#[test]
fn a_recomputed_unit_counts_what_its_second_run_saves() {
    on_ranks(2, |worker| {
        let all = ActivationCheckpointing::All;
        let options = FsdpOptions::new().with_seed(1).with_activation_checkpointing(all);
        let model = model(worker, options)?;
        let x = Tensor::ones([BATCH, LENGTH, FEATURES], worker.device()).require_grad();
        let targets = Tensor::zeros([BATCH * LENGTH], worker.device());
        let loss = model.forward(x, targets);
        let input = BATCH * LENGTH * FEATURES * FLOAT;
        assert_eq!(model.stats().memory().activations.now, input + LOSS);
        model.backward(loss)?;
        let memory = model.stats().memory();
        assert_eq!(memory.activations.now, 0);
        // The loss has freed its gradients when the unit is recomputed.
        assert_eq!(memory.activations.peak, input + (WIDE + ATTENTION + RECOMPUTE).max(LOSS));
        Ok(())
    });
}

/// Without a graph nothing is saved.
#[test]
fn evaluation_saves_nothing() {
    on_ranks(2, |worker| {
        let model = model(worker, FsdpOptions::new().with_seed(1))?;
        let valid = model.valid();
        let device = worker.device().clone().inner();
        let x = Tensor::ones([BATCH, LENGTH, FEATURES], &device);
        valid.forward(x, Tensor::zeros([BATCH * LENGTH], &device));
        assert_eq!(model.stats().memory().activations.peak, 0);
        Ok(())
    });
}
