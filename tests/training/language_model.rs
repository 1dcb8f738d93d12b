//! Attention in tiles and the loss without all logits, inside of sharded units.

use burn::module::{Module, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_runtime::Error;
use fsdp_runtime::nn::{
    AttentionOptions, Dropout, DropoutConfig, LayerNorm, LayerNormConfig,
    LinearCrossEntropyOptions, WeightLayout, attention, gelu, linear_cross_entropy, recompute,
};
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::compare::{Within, assert_close, assert_same_bits, assert_same_state};
use crate::support::of_rank_0;

const VOCABULARY: usize = 53;
const WIDTH: usize = 24;
const HEADS: usize = 3;
/// More than a tile of queries.
const LENGTH: usize = 140;
const STEPS: usize = 3;

/// Causal self-attention with dropout of its weights.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    norm: LayerNorm,
    qkv: Linear,
    output: Linear,
    up: Linear,
    down: Linear,
    dropout: Dropout,
    /// Whether the wide part of the feed-forward block is recomputed by itself.
    recomputes: bool,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [rows, length, width] = x.dims();
        let parts = self.qkv.forward(self.norm.forward(x.clone())).chunk(3, 2);
        let heads = |at: usize| {
            let part: Tensor<3> = parts[at].clone();
            part.reshape([rows, length, HEADS, width / HEADS]).swap_dims(1, 2)
        };
        let options = AttentionOptions::new().with_causal(true).with_dropout(&self.dropout);
        let context = attention(heads(0), heads(1), heads(2), options);
        let x = x + self.output.forward(context.swap_dims(1, 2).reshape([rows, length, width]));
        let (up, dropout) = (self.up.weight.val(), self.dropout.clone());
        let wide =
            move |(x, up): (Tensor<3>, Tensor<2>)| dropout.forward(gelu(x.matmul(up.unsqueeze())));
        let inputs = (x.clone(), up);
        let wide = if self.recomputes { recompute(inputs, wide) } else { wide(inputs) };
        x + self.down.forward(wide)
    }
}

/// A decoder whose head is tied to its embedding, and has a second head of its own.
#[derive(Module, Debug)]
#[fsdp_unit(root, tie("tokens" = "output"))]
struct Decoder {
    tokens: Embedding,
    output: Param<Tensor<2>>,
    blocks: Vec<Block>,
    head: Linear,
}

#[fsdp_unit]
impl Decoder {
    /// Returns the sum of both heads' losses. `whole` makes all logits, for comparison.
    pub fn forward(&self, ids: Tensor<2, Int>, targets: Tensor<1, Int>, whole: bool) -> Tensor<1> {
        let [rows, length] = ids.dims();
        let x = self.blocks.iter().fold(self.tokens.forward(ids), |x, block| block.forward(x));
        let x = x.reshape([rows * length, WIDTH]);
        let bias = self.head.bias.as_ref().expect("a bias").val();
        if whole {
            let loss = CrossEntropyLossConfig::new().init(&x.device());
            let tied = x.clone().matmul(self.output.val().transpose());
            let own = x.matmul(self.head.weight.val()) + bias.unsqueeze();
            return loss.forward(tied, targets.clone()) + loss.forward(own, targets);
        }
        let options = LinearCrossEntropyOptions::new().with_chunk_rows(50);
        let own = options.clone().with_layout(WeightLayout::Linear).with_bias(bias);
        linear_cross_entropy(x.clone(), self.output.val(), targets.clone(), options)
            + linear_cross_entropy(x, self.head.weight.val(), targets, own)
    }
}

impl Decoder {
    fn new(dropout: f64, recomputes: bool, device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let block = |_| Block {
            norm: LayerNormConfig::new(WIDTH).init(device),
            qkv: linear(WIDTH, 3 * WIDTH),
            output: linear(WIDTH, WIDTH),
            up: linear(WIDTH, 4 * WIDTH),
            down: linear(4 * WIDTH, WIDTH),
            recomputes,
            dropout: DropoutConfig::new(dropout).init(),
        };
        let tokens: Embedding = EmbeddingConfig::new(VOCABULARY, WIDTH).init(device);
        Self {
            output: tokens.weight.clone(),
            tokens,
            blocks: (0..3).map(block).collect(),
            head: linear(WIDTH, VOCABULARY),
        }
    }
}

#[derive(Debug)]
struct Outcome {
    losses: Vec<f64>,
    state: FullState,
}

impl Outcome {
    #[track_caller]
    fn assert_bitwise(&self, other: &Self) {
        assert_same_bits(&self.losses, &other.losses, "losses");
        assert_same_state(&self.state, &other.state, "parameters");
    }
}

/// How a model is trained.
#[derive(Clone, Copy, Debug)]
struct Kind {
    dropout: f64,
    /// Whether the losses make all logits.
    whole: bool,
    /// Whether blocks recompute a part of themselves.
    recomputes: bool,
}

const PLAIN: Kind = Kind { dropout: 0.2, whole: false, recomputes: false };

fn train(world: usize, options: FsdpOptions, kind: Kind) -> Outcome {
    let Kind { dropout, whole, recomputes } = kind;
    of_rank_0(world, move |worker| {
        let device = worker.device();
        let net = Decoder::new(dropout, recomputes, device);
        let mut net = fully_shard(net, worker, options.clone().with_seed(7))?;
        let mut optimizer = AdamWConfig::new().init();
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let row = (worker.rank().index() + step * 5) * 31;
            let ids: Vec<i32> =
                (0..=LENGTH).map(|at| ((row + at * at) % VOCABULARY) as i32).collect();
            let input = TensorData::new(ids[..LENGTH].to_vec(), [1, LENGTH]);
            let targets = TensorData::new(ids[1..].to_vec(), [LENGTH]);
            let input = Tensor::from_data(input, device);
            let loss = net.forward(input, Tensor::from_data(targets, device), whole);
            losses.push(f64::from(loss.clone().into_scalar::<f32>()));
            let gradients = net.backward(loss)?;
            net = optimizer.step(1e-2, net, gradients);
        }
        Ok::<_, Error>(Outcome { losses, state: net.state().full(Recipient::All)? })
    })
}

fn options(strategy: ShardingStrategy) -> FsdpOptions {
    FsdpOptions::new().with_strategy(strategy)
}

#[test]
fn strategies_agree_bit_for_bit() {
    for world in [1, 2, 3] {
        let expected = train(world, options(ShardingStrategy::NoShard), PLAIN);
        assert!(expected.losses.iter().all(|loss| loss.is_finite()), "{:?}", expected.losses);
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp] {
            train(world, options(strategy), PLAIN).assert_bitwise(&expected);
        }
    }
}

/// A recomputed attention draws the masks of its first run.
#[test]
fn recomputation_changes_no_bit() {
    let plain = train(2, options(ShardingStrategy::FullShard), PLAIN);
    let all = options(ShardingStrategy::FullShard)
        .with_activation_checkpointing(ActivationCheckpointing::Units(unit_types![Block]));
    train(2, all, PLAIN).assert_bitwise(&plain);
    let none = train(2, options(ShardingStrategy::FullShard), Kind { dropout: 0.0, ..PLAIN });
    assert_ne!(none.losses, plain.losses, "dropout has an effect");
}

/// The parameter is an input of the recomputed part, and views the gather buffer of its unit.
#[test]
fn a_part_of_a_unit_is_recomputed_to_the_bit() {
    let strategies = [ShardingStrategy::FullShard, ShardingStrategy::NoShard];
    for strategy in strategies {
        let plain = train(2, options(strategy), PLAIN);
        let part = Kind { recomputes: true, ..PLAIN };
        train(2, options(strategy), part).assert_bitwise(&plain);
        let all = options(strategy).with_activation_checkpointing(ActivationCheckpointing::All);
        train(2, all, part).assert_bitwise(&plain);
    }
}

#[test]
fn the_losses_are_those_of_all_logits() {
    let chunks = train(2, options(ShardingStrategy::FullShard), PLAIN);
    let whole = train(2, options(ShardingStrategy::FullShard), Kind { whole: true, ..PLAIN });
    assert_close(&chunks.losses, &whole.losses, Within::Relative(1e-4), "losses");
}
