//! Modules of other crates as units, by `#[fsdp(unit)]` on the field. They compute, train and are
//! gathered as units under `#[fsdp_unit]` are.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::{Linear, LinearConfig, Lstm, LstmConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor, TensorData, Tolerance};
use fsdp_runtime::Error;
use fsdp_runtime::errors::ScheduleError;
use fsdp_runtime::model::{Counts, HookedForward};
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::compare::{Within, assert_close, assert_same_bits, assert_same_state};
use crate::support::ranks::launch_options;
use crate::support::trace::record;
use crate::support::{of_rank_0, on_ranks};

const WIDTH: usize = 16;
/// A multiple of 32: Burn's `linear` then saves a reshaped view of its weight for backward.
const LENGTH: usize = 32;

/// Stands for a module of another crate, without a layout.
#[derive(Module, Debug)]
struct Foreign {
    gate: Linear,
    value: Linear,
}

impl Foreign {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        gelu(self.gate.forward(x.clone())) * self.value.forward(x)
    }

    fn forward_into(&self, x: impl Into<Tensor<3>>) -> Tensor<3> {
        self.forward(x.into())
    }

    fn forward_opaque(&self, x: Tensor<3>) -> Opaque {
        Opaque(self.value.forward(x))
    }
}

/// A type that is not a `UnitValue`.
struct Opaque(Tensor<3>);

/// A unit with a unit in a field.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    up: Linear,
    #[fsdp(unit)]
    down: Linear,
}

#[fsdp_unit(field_units)]
impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        x.clone() + self.down.forward(gelu(self.up.forward(x)))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Net {
    #[fsdp(unit)]
    first: Linear,
    #[fsdp(unit)]
    attention: MultiHeadAttention,
    blocks: Vec<Block>,
    #[fsdp(unit)]
    layers: Vec<Linear>,
    #[fsdp(unit)]
    pair: (Linear, Option<Linear>),
    #[fsdp(unit)]
    none: Option<Linear>,
    #[fsdp(unit, leaf)]
    foreign: Vec<Foreign>,
    #[fsdp(unit)]
    lstm: Lstm,
    head: Linear,
}

#[fsdp_unit(field_units)]
impl Net {
    fn forward(&self, x: Tensor<3>) -> Tensor<2> {
        let x = self.first.forward(x);
        let mut x = self.attention.forward(MhaInput::self_attn(x.clone())).context + x;
        for block in &self.blocks {
            x = block.forward(x);
        }
        // Nested calls, and more units than there are gather buffers.
        let x = self.layers[2].forward(gelu(self.layers[1].forward(self.layers[0].forward(x))));
        let x = self.layers.iter().skip(3).fold(x, |x, layer| layer.forward(x).tanh());
        let x = self.rest(x.clone()).unwrap_or(x);
        let x = match &self.none {
            Some(none) => none.forward(x),
            None => x,
        };
        let parts = vec![self.foreign[0].forward(x.clone()), self.foreign[1].forward(x)];
        let x = parts.into_iter().reduce(|sum, part| sum + part).expect("two parts");
        let (x, _) = self.lstm.forward(x, None);
        self.head.forward(x.mean_dim(1).squeeze_dim(1))
    }

    /// A method that is not hooked, whose calls are.
    fn rest(&self, x: Tensor<3>) -> Option<Tensor<3>> {
        let y = self.pair.0.forward(x);
        Some(self.pair.1.as_ref()?.forward(y.clone()) + y)
    }
}

fn linear(device: &Device) -> Linear {
    LinearConfig::new(WIDTH, WIDTH).init(device)
}

fn foreign(device: &Device) -> Foreign {
    Foreign { gate: linear(device), value: linear(device) }
}

impl Net {
    fn new(device: &Device) -> Self {
        let block = |_| Block { up: linear(device), down: linear(device) };
        Self {
            first: linear(device),
            attention: MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(0.0).init(device),
            blocks: (0..2).map(block).collect(),
            layers: (0..5).map(|_| linear(device)).collect(),
            pair: (linear(device), Some(linear(device))),
            none: None,
            foreign: (0..2).map(|_| foreign(device)).collect(),
            lstm: LstmConfig::new(WIDTH, WIDTH, true).init(device),
            head: LinearConfig::new(WIDTH, 3).init(device),
        }
    }
}

fn input(step: usize, rank: usize, device: &Device) -> Tensor<3> {
    let value = |i: usize| ((i * 37 + step * 11 + rank * 5) % 23) as f32 * 0.1 - 1.0;
    let data = (0..2 * LENGTH * WIDTH).map(value).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(data, [2, LENGTH, WIDTH]), device)
}

fn loss(logits: Tensor<2>) -> Tensor<1> {
    (logits - 0.5).powf_scalar(2.0).mean()
}

/// What rank 0 has at the end of a run.
struct Outcome {
    losses: Vec<f32>,
    state: FullState,
    counts: Counts,
}

const STEPS: usize = 3;

fn train<M: HookedForward + 'static>(
    world: usize,
    options: FsdpOptions,
    model: fn(&Device) -> M,
    forward: fn(&M, Tensor<3>) -> Tensor<2>,
) -> Outcome {
    of_rank_0(world, move |worker| {
        let device = worker.device();
        let mut net = fully_shard(model(device), worker, options.clone().with_seed(5))?;
        let mut optimizer = AdamWConfig::new().init();
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let loss = loss(forward(&net, input(step, worker.rank().index(), device)));
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = net.backward(loss)?;
            net = optimizer.step(1e-2, net, grads);
        }
        let counts = net.stats().counts();
        Ok(Outcome { losses, state: net.state().full(Recipient::All)?, counts })
    })
}

fn assert_same(found: &Outcome, expected: &Outcome) {
    assert!(expected.losses.iter().all(|loss| loss.is_finite()), "{:?}", expected.losses);
    assert_same_bits(&found.losses, &expected.losses, "losses");
    assert_same_state(&found.state, &expected.state, "parameters");
}

#[test]
fn full_shard_equals_no_shard_bit_for_bit() {
    for world in [1, 2, 3] {
        let run = |strategy| {
            train(world, FsdpOptions::new().with_strategy(strategy), Net::new, Net::forward)
        };
        let (full, none) = (run(ShardingStrategy::FullShard), run(ShardingStrategy::NoShard));
        assert_same(&full, &none);
        assert_eq!(
            full.counts.single_gathers, 0,
            "every field unit is gathered with one all-gather"
        );
        // The root; `first`, `attention` and `lstm`; a pair; two blocks, each with a unit in it;
        // five layers; two modules of another crate. An empty `Option` is no unit.
        let units = 1 + 3 + 2 + 4 + 5 + 2;
        assert_eq!(full.counts.reduce_scatters, STEPS * units);
        assert_eq!(none.counts.reduce_scatters, STEPS * units);
    }
}

#[test]
fn losses_are_those_of_plain_burn() {
    let plain = of_rank_0(1, |worker| {
        let device = worker.device();
        // The weights that the sharded run starts from.
        let options = FsdpOptions::new().with_strategy(ShardingStrategy::NoShard).with_seed(5);
        let start = fully_shard(Net::new(device), worker, options)?;
        let mut net = (*start).clone().materialize();
        let mut optimizer = AdamWConfig::new().init();
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let loss = loss(net.forward(input(step, 0, device)));
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            net = optimizer.step(1e-2, net, grads);
        }
        Ok(losses)
    });
    let sharded = train(1, FsdpOptions::new(), Net::new, Net::forward);
    assert_close(&sharded.losses, &plain, Within::Relative(1e-5), "losses");
}

/// A unit around one linear layer: what `#[fsdp(unit)]` saves writing.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Wrapped {
    inner: Linear,
}

#[fsdp_unit]
impl Wrapped {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.inner.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Annotated {
    layers: Vec<Wrapped>,
    head: Linear,
}

#[fsdp_unit]
impl Annotated {
    fn forward(&self, x: Tensor<3>) -> Tensor<2> {
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x).tanh());
        self.head.forward(x.mean_dim(1).squeeze_dim(1))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Fields {
    #[fsdp(unit)]
    layers: Vec<Linear>,
    head: Linear,
}

#[fsdp_unit(field_units)]
impl Fields {
    fn forward(&self, x: Tensor<3>) -> Tensor<2> {
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x).tanh());
        self.head.forward(x.mean_dim(1).squeeze_dim(1))
    }

    /// `forward` with calls in a form that is not hooked.
    fn forward_unhooked(&self, x: Tensor<3>) -> Tensor<2> {
        let x = self.layers.iter().fold(x, |x, layer| Linear::forward(layer, x).tanh());
        self.head.forward(x.mean_dim(1).squeeze_dim(1))
    }
}

fn annotated(device: &Device) -> Annotated {
    let layers = (0..6).map(|_| Wrapped { inner: linear(device) }).collect();
    Annotated { layers, head: LinearConfig::new(WIDTH, 3).init(device) }
}

fn fields(device: &Device) -> Fields {
    let layers = (0..6).map(|_| linear(device)).collect();
    Fields { layers, head: LinearConfig::new(WIDTH, 3).init(device) }
}

#[test]
fn a_field_unit_is_gathered_as_an_annotated_one_is() {
    let annotated = train(2, FsdpOptions::new(), annotated, Annotated::forward);
    let fields = train(2, FsdpOptions::new(), fields, Fields::forward);
    assert_same_bits(&fields.losses, &annotated.losses, "losses");
    assert_eq!(fields.counts, annotated.counts);
    assert_eq!(fields.counts.reduce_scatters, STEPS * 7);
    // The paths differ by the wrapping struct's field.
    let weights = |outcome: &Outcome| {
        outcome.state.values().map(|data| data.as_bytes().to_vec()).collect::<Vec<_>>()
    };
    assert_eq!(fields.state.len(), 2 * 7);
    assert!(weights(&fields) == weights(&annotated));
}

#[test]
fn a_call_without_hooks_gathers_each_weight_alone_and_trains_the_same() {
    let hooked = train(2, FsdpOptions::new(), fields, Fields::forward);
    let unhooked = train(2, FsdpOptions::new(), fields, Fields::forward_unhooked);
    assert_same(&unhooked, &hooked);
    assert_eq!(unhooked.counts.single_gathers, STEPS * 6, "one weight each");
}

/// A call whose argument is a field of the result of another call.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Nested {
    #[fsdp(unit)]
    attention: MultiHeadAttention,
    #[fsdp(unit)]
    after: Linear,
    head: Linear,
}

#[fsdp_unit(field_units)]
impl Nested {
    fn forward(&self, x: Tensor<3>) -> Tensor<2> {
        let x = self.after.forward(self.attention.forward(MhaInput::self_attn(x)).context);
        self.head.forward(x.mean_dim(1).squeeze_dim(1))
    }
}

fn nested(device: &Device) -> Nested {
    let attention = MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(0.0);
    let head = LinearConfig::new(WIDTH, 3).init(device);
    Nested { attention: attention.init(device), after: linear(device), head }
}

#[test]
fn an_argument_that_is_a_field_of_a_call_runs_once() {
    let full = train(2, FsdpOptions::new(), nested, Nested::forward);
    let none = FsdpOptions::new().with_strategy(ShardingStrategy::NoShard);
    assert_same(&full, &train(2, none, nested, Nested::forward));
    assert_eq!(full.counts.single_gathers, 0);
    assert_eq!(full.counts.reduce_scatters, STEPS * 3);
    // The root and the last unit stay gathered for their backward.
    assert_eq!(full.counts.all_gathers, STEPS * (3 + 1));
}

#[test]
fn a_wrap_policy_of_types_wraps_no_field() {
    let options = FsdpOptions::new().with_wrap(WrapPolicy::TransformerBased(unit_types![Block]));
    let full = train(2, options.clone(), Net::new, Net::forward);
    let none = options.with_strategy(ShardingStrategy::NoShard);
    assert_same(&full, &train(2, none, Net::new, Net::forward));
    assert_eq!(full.counts.reduce_scatters, STEPS * 3, "the root and two blocks");
    assert_eq!(full.counts.single_gathers, 0);
}

#[test]
fn a_wrap_policy_of_sizes_wraps_fields_of_that_size() {
    let weights = WIDTH * WIDTH + WIDTH;
    for (min_num_params, units) in [(weights, 1 + 6), (weights + 1, 1)] {
        let options = FsdpOptions::new().with_wrap(WrapPolicy::SizeBased { min_num_params });
        let sized = train(2, options, fields, Fields::forward);
        assert_eq!(sized.counts.reduce_scatters, STEPS * units);
        assert_eq!(sized.counts.single_gathers, 0);
    }
}

#[test]
fn the_wrapping_names_the_types_of_fields() {
    let units = of_rank_0(1, |worker| {
        let net = fully_shard(Net::new(worker.device()), worker, FsdpOptions::new())?;
        let units = net.stats().wrapping().units;
        Ok(units.into_iter().map(|unit| (unit.path, unit.ty)).collect::<Vec<_>>())
    });
    for unit in [("blocks.1.down", "Linear"), ("pair.1", "Linear"), ("foreign.0", "Foreign")] {
        assert!(units.iter().any(|(path, ty)| (path.as_str(), *ty) == unit), "{units:?}");
    }
}

#[test]
fn evaluation_has_the_outputs_of_the_trained_model() {
    on_ranks(2, |worker| {
        let device = worker.device();
        let net = fully_shard(Net::new(device), worker, FsdpOptions::new().with_seed(5))?;
        let train = net.forward(input(0, 0, device)).into_data();
        let valid = net.valid().forward(input(0, 0, &device.clone().inner()));
        assert!(!valid.is_autodiff());
        train.assert_approx_eq::<f32>(&valid.into_data(), Tolerance::relative(1e-5));
        Ok(())
    });
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Hidden {
    #[fsdp(unit, leaf)]
    foreign: Foreign,
    head: Linear,
}

#[fsdp_unit(field_units)]
impl Hidden {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let Opaque(x) = self.foreign.forward_opaque(x);
        self.head.forward(x)
    }
}

#[test]
fn an_output_of_an_unknown_type_is_an_error() {
    let error = launch(launch_options(2), |worker| {
        let device = worker.device();
        let model = Hidden { foreign: foreign(device), head: linear(device) };
        let net = fully_shard(model, &worker, FsdpOptions::new())?;
        net.forward(input(0, 0, device));
        Ok::<_, Error>(())
    })
    .expect_err("the tensors of `Opaque` are not known");
    let error = error.source.downcast_ref::<Error>().expect("a typed error");
    let Error::Schedule(ScheduleError::OpaqueOutput { module, output }) = error else {
        panic!("{error}");
    };
    assert!(module.ends_with("Foreign") && output.ends_with("Opaque"), "{module} {output}");
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Generic {
    #[fsdp(unit, leaf)]
    foreign: Foreign,
}

#[fsdp_unit(field_units)]
impl Generic {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.foreign.forward(x)
    }

    /// Passes a variable to a unit whose type the macro cannot know.
    fn forward_made<T: Into<Tensor<3>>>(&self, make: &dyn Fn() -> T) -> Tensor<3> {
        let x = make();
        self.foreign.forward_into(x)
    }
}

#[test]
fn a_tensor_whose_type_generic_code_hides_is_an_error() {
    let error = launch(launch_options(2), |worker| {
        let device = worker.device();
        let net = Generic { foreign: foreign(device) };
        let net = fully_shard(net, &worker, FsdpOptions::new())?;
        net.forward(input(0, 0, device));
        net.forward_made(&|| input(0, 0, device));
        Ok::<_, Error>(())
    })
    .expect_err("a tensor would be neither cast nor hooked");
    let error = error.source.downcast_ref::<Error>().expect("a typed error");
    let Error::Schedule(ScheduleError::OpaqueInput { unit, input }) = error else {
        panic!("{error}");
    };
    assert!(unit == "`foreign`" && input.contains("Tensor<3"), "{unit} {input}");
}

/// A field unit inside a checkpointed unit is recomputed with that unit.
#[test]
fn checkpointing_all_units_leaves_out_field_units_with_a_warning() {
    on_ranks(1, |worker| {
        let options =
            FsdpOptions::new().with_activation_checkpointing(ActivationCheckpointing::All);
        let net = Net::new(worker.device());
        let (model, lines) = record(|| fully_shard(net, worker, options));
        model?;
        let warned: Vec<_> =
            lines.iter().filter(|line| line.contains("is not recomputed")).collect();
        let [warned] = &warned[..] else { panic!("{lines:?}") };
        for unit in ["first", "attention", "layers.4", "pair.1", "foreign.0", "lstm"] {
            assert!(warned.contains(unit), "{unit}: {warned}");
        }
        assert!(!warned.contains("blocks"), "{warned}");
        Ok(())
    });
}
