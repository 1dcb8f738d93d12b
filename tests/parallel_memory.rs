//! Activations that tensor, sequence and context parallel ranks keep for backward, counted by the allocator, are those
//! of the plan.
//!
//! One test in a binary of its own: the counters cover the whole process.

#[path = "../fsdp-runtime/tests/support/allocator.rs"]
mod allocator;

use allocator::Counting;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use fsdp_runtime::nn::{
    AttentionOptions, Linear, LinearConfig, RmsNorm, RmsNormConfig, attention, swiglu,
};
use fsdp_runtime::plan::{Batch, ParallelWork, StepPlan};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, Mesh};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const LAYERS: usize = 4;
const HIDDEN: usize = 128;
const HEADS: usize = 8;
const KEY_HEADS: usize = 4;
const WIDTH: usize = 16;
const WIDE: usize = 384;
const ROWS: usize = 2;
const LENGTH: usize = 256;

/// A layer as in Llama, without positions.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Layer {
    attention_norm: RmsNorm,
    #[fsdp(column)]
    query: Linear,
    #[fsdp(column)]
    key: Linear,
    #[fsdp(column)]
    value: Linear,
    #[fsdp(row)]
    output: Linear,
    norm: RmsNorm,
    #[fsdp(column)]
    gate: Linear,
    #[fsdp(column)]
    up: Linear,
    #[fsdp(row)]
    down: Linear,
}

#[fsdp_unit]
impl Layer {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let norm = || RmsNormConfig::new(HIDDEN).init(device);
        Self {
            attention_norm: norm(),
            query: linear(HIDDEN, HEADS * WIDTH),
            key: linear(HIDDEN, KEY_HEADS * WIDTH),
            value: linear(HIDDEN, KEY_HEADS * WIDTH),
            output: linear(HEADS * WIDTH, HIDDEN),
            norm: norm(),
            gate: linear(HIDDEN, WIDE),
            up: linear(HIDDEN, WIDE),
            down: linear(WIDE, HIDDEN),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let heads = |x: Tensor<3>| {
            let [rows, length, width] = x.dims();
            x.reshape([rows, length, width / WIDTH, WIDTH]).swap_dims(1, 2)
        };
        let normed = self.attention_norm.forward(x.clone());
        let layers = [&self.query, &self.key, &self.value];
        let [query, key, value] = Linear::forward_each(layers, normed).map(heads);
        let mixed = attention(query, key, value, AttentionOptions::new().with_causal(true));
        let [rows, heads, length, _] = mixed.dims();
        let mixed = mixed.swap_dims(1, 2).reshape([rows, length, heads * WIDTH]);
        let x = x + self.output.forward(mixed);
        let layers = [&self.gate, &self.up];
        let [gate, up] = Linear::forward_each(layers, self.norm.forward(x.clone()));
        x + self.down.forward(swiglu(gate, up))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Layers {
    layers: Vec<Layer>,
}

#[fsdp_unit]
impl Layers {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.layers.iter().fold(x, |x, layer| layer.forward(x))
    }
}

/// Returns the bytes that all ranks keep for backward, and those of the plan.
fn kept(world: usize, options: &FsdpOptions) -> [usize; 2] {
    let options = options.clone();
    let ranks = launch(LaunchOptions::new(world).with_device(Device::flex()), move |worker| {
        let device = worker.device();
        let net = Layers { layers: (0..LAYERS).map(|_| Layer::new(device)).collect() };
        let mesh = Mesh::new(worker.rank(), worker.world());
        let (queries, keys) = (HEADS * WIDTH, KEY_HEADS * WIDTH);
        // On Flex the output of attention is the input of the layer after it, without a copy.
        let saved = 4 * HIDDEN + 2 * queries + 2 * keys + HEADS + 3 * WIDE;
        let parallel = ParallelWork::new(2 * HIDDEN, 2 * HIDDEN)
            .with_exchanges(2, HIDDEN)
            .with_key_values(2 * keys);
        let plan = StepPlan::new(&net, mesh, &options)?
            .with_activations("Layer", saved, HIDDEN)
            .with_parallel_work("Layer", parallel);
        let work = plan.work(Batch::new(ROWS, LENGTH));
        let expected: usize = work.iter().map(|unit| unit.activations).sum();

        let net = fully_shard(net, &worker, options.clone())?;
        let mesh = net.stats().mesh();
        let positions = LENGTH / mesh.context_size().size();
        let parts = if mesh.splits_sequence() { mesh.tensor_size().size() } else { 1 };
        let x = Tensor::<3>::ones([ROWS, positions / parts, HIDDEN], device);
        let meet = || worker.all_reduce_sum(&mut [0.0]);
        net.backward(net.forward(x.clone()).mean())?;
        // The system may stop another thread before it has freed what it has read: the least of several counts.
        let mut least = usize::MAX;
        for _ in 0..3 {
            meet()?;
            let before = ALLOCATOR.settled();
            meet()?;
            let output = net.forward(x.clone());
            meet()?;
            least = least.min(ALLOCATOR.settled().saturating_sub(before));
            meet()?;
            net.backward(output.mean())?;
        }
        Ok::<_, Error>([least, expected])
    });
    let ranks = ranks.unwrap();
    [ranks[0][0], ranks.iter().map(|[_, expected]| expected).sum()]
}

#[test]
fn activations_of_parts_are_those_of_the_plan() {
    let options = FsdpOptions::new().with_seed(1);
    let ring = options.clone().with_context_exchange(ContextExchange::Ring);
    let one = kept(1, &options);
    for (world, options) in [
        (2, options.clone().with_tensor_parallel(2)),
        (4, options.clone().with_tensor_parallel(4)),
        (2, options.clone().with_tensor_parallel(2).with_sequence_parallel(true)),
        (4, options.clone().with_tensor_parallel(4).with_sequence_parallel(true)),
        (2, options.clone().with_context_parallel(2)),
        (2, ring.with_context_parallel(2)),
        (4, options.with_context_parallel(2).with_tensor_parallel(2).with_sequence_parallel(true)),
    ] {
        let what = format!("{world} ranks, {options:?}");
        let [found, expected] = kept(world, &options);
        let error = found as f64 / expected as f64 - 1.0;
        println!("{found} bytes, {expected} in the plan: {:.1} %", 100.0 * error);
        assert!(error.abs() < 0.05, "{found} bytes, not {expected}: {what}");
        // What ranks hold whole is held several times.
        assert!(found as f64 >= 0.95 * one[0] as f64, "{found} bytes, {one:?} on one rank: {what}");
    }
    assert!((one[0] as f64 / one[1] as f64 - 1.0).abs() < 0.05, "{one:?}");
}
