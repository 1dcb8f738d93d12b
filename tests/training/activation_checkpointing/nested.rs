//! Recomputed units that contain units, have several inputs and outputs, are used twice, or are
//! frozen.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::relu;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use fsdp_runtime::model::Counts;
use fsdp_runtime::nn::{Dropout, DropoutConfig};
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use super::{ALL, of_rank_0};
use crate::support::compare::{Parameters, Within, assert_parameters_close, assert_same_state};
use crate::support::trace::{only, record};

const WIDTH: usize = 16;

#[derive(Module, Debug)]
#[fsdp_unit]
struct Inner {
    up: Linear,
    down: Linear,
    dropout: Dropout,
}

#[fsdp_unit]
impl Inner {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let y = self.down.forward(relu(self.up.forward(x.clone())));
        x + self.dropout.forward(y)
    }
}

#[derive(Clone, UnitValue)]
struct Pair {
    x: Tensor<2>,
    memory: Tensor<2>,
    scale: f64,
}

#[derive(Module, Debug)]
#[fsdp_unit(checkpoint)]
struct Outer {
    first: Inner,
    mix: Linear,
    second: Inner,
}

/// Number of forwards of all [`Outer`]s.
static FORWARDS: AtomicUsize = AtomicUsize::new(0);

#[fsdp_unit]
impl Outer {
    fn forward(&self, x: Tensor<2>, mask: Option<Tensor<2, Bool>>) -> Tensor<2> {
        FORWARDS.fetch_add(1, SeqCst);
        let x = self.mix.forward(self.first.forward(x));
        let x = match mask {
            Some(mask) => x.mask_fill(mask, 0.0),
            None => x,
        };
        self.second.forward(x)
    }

    /// Several tracked inputs and outputs, one of which no loss uses.
    fn forward_pair(&self, pair: Pair, mask: Tensor<2, Bool>) -> (Pair, Option<Tensor<2>>) {
        FORWARDS.fetch_add(1, SeqCst);
        let Pair { x, memory, scale } = pair;
        let x = self.first.forward(x.clone()) + self.mix.forward(memory.clone()).mul_scalar(scale);
        let x = x.mask_fill(mask, 0.0);
        let unused = self.mix.forward(x.clone());
        let x = self.second.forward(x);
        (Pair { memory: memory + x.clone(), x, scale }, Some(unused))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Model {
    before: Inner,
    outers: Vec<Outer>,
    after: Inner,
    head: Linear,
    pairs: bool,
}

#[fsdp_unit]
impl Model {
    fn forward(&self, x: Tensor<2>) -> Tensor<1> {
        let mask = x.clone().greater_elem(0.9);
        let x = self.before.forward(x);
        let x = match self.pairs {
            true => {
                let mut pair = Pair { x: x.clone().mul_scalar(0.5), memory: x, scale: 0.25 };
                for outer in &self.outers {
                    pair = outer.forward_pair(pair, mask.clone()).0;
                }
                pair.x + pair.memory
            }
            // The last unit runs twice.
            false => {
                let outers = self.outers.iter().chain(self.outers.last());
                outers.fold(x, |x, outer| outer.forward(x, Some(mask.clone())))
            }
        };
        let x = self.after.forward(x);
        self.head.forward(x).powf_scalar(2.0).mean()
    }
}

/// A variant of the model.
#[derive(Clone, Copy, Debug, Default)]
struct Shape {
    /// Whether some layers and an inner unit are frozen.
    frozen: bool,
    /// Whether the units have several inputs and outputs.
    pairs: bool,
}

fn model(Shape { frozen, pairs }: Shape, device: &Device) -> Model {
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
    let inner = || Inner {
        up: LinearConfig::new(WIDTH, 2 * WIDTH + 3).init(device),
        down: LinearConfig::new(2 * WIDTH + 3, WIDTH).init(device),
        dropout: DropoutConfig::new(0.2).init(),
    };
    let outer = |index| {
        let mix = if frozen && index == 0 { linear().freeze() } else { linear() };
        let first = if frozen { inner().freeze() } else { inner() };
        Outer { first, mix, second: inner() }
    };
    let outers = (0..2).map(outer).collect();
    Model { before: inner(), outers, after: inner(), head: linear(), pairs }
}

fn input(rank: usize, step: usize, device: &Device) -> Tensor<2> {
    let at = |i: usize| ((i * 37 + rank * 1009 + step * 7919) % 101) as f32 / 50.0 - 1.0;
    let data: Vec<f32> = (0..6 * WIDTH).map(at).collect();
    Tensor::from_data(TensorData::new(data, [6, WIDTH]), device)
}

/// Returns the bits of losses and gradient norms, and the parameters after three steps.
fn train(world: usize, shape: Shape, options: FsdpOptions) -> (Vec<u64>, FullState, Counts) {
    of_rank_0(world, move |worker| {
        let device = worker.device();
        let mut model = fully_shard(model(shape, device), worker, options.clone().with_seed(5))?;
        let mut optimizer = AdamWConfig::new().init();
        let mut bits = Vec::new();
        for step in 0..3 {
            let loss = model.forward(input(worker.rank().index(), step, device));
            bits.push(u64::from(loss.clone().into_scalar::<f32>().to_bits()));
            let mut gradients = model.backward(loss)?;
            bits.push(model.clip_grad_norm(&mut gradients, 0.1)?.to_bits());
            model = optimizer.step(1e-2, model, gradients);
        }
        Ok((bits, model.state().full(Recipient::All)?, model.stats().counts()))
    })
}

fn assert_same(found: &(Vec<u64>, FullState, Counts), expected: &(Vec<u64>, FullState, Counts)) {
    assert_eq!(found.0, expected.0, "losses and gradient norms");
    assert_same_state(&found.1, &expected.1, "parameters");
}

/// Returns the elements of a state by path.
fn elements(state: &FullState) -> Parameters {
    state.iter().map(|(path, data)| (path.clone(), data.iter::<f32>().collect())).collect()
}

#[test]
fn inner_units_are_recomputed_with_the_unit_around_them() {
    let none = ActivationCheckpointing::None;
    for frozen in [false, true] {
        let shape = Shape { frozen, ..Shape::default() };
        for (world, gather_buffers) in [(1, 2), (2, 1), (2, 2), (2, 3)] {
            let options = FsdpOptions::new().with_gather_buffers(gather_buffers);
            let plain = train(world, shape, options.clone().with_activation_checkpointing(none));
            for which in [ActivationCheckpointing::Annotated, ALL] {
                let kept =
                    train(world, shape, options.clone().with_activation_checkpointing(which));
                assert_same(&kept, &plain);
                let counts =
                    |run: &(_, _, Counts)| (run.2.reduce_scatters, run.2.added_gather_buffers);
                assert_eq!(
                    counts(&kept),
                    counts(&plain),
                    "{shape:?} in {gather_buffers} gather_buffers"
                );
            }
        }
    }
}

/// The gradient of an input that is used twice is a sum, which checkpointing adds up in another
/// order.
#[test]
fn several_inputs_and_outputs_have_the_same_gradients_up_to_rounding() {
    for frozen in [false, true] {
        let shape = Shape { frozen, pairs: true };
        for world in [1, 2] {
            let run = |which| {
                train(world, shape, FsdpOptions::new().with_activation_checkpointing(which))
            };
            let plain = run(ActivationCheckpointing::None);
            for which in [ActivationCheckpointing::Annotated, ALL] {
                let kept = run(which);
                assert_eq!(kept.0[0], plain.0[0], "the first loss");
                let (kept_elements, plain_elements) = (elements(&kept.1), elements(&plain.1));
                let within = Within::Absolute(1e-5);
                assert_parameters_close(&kept_elements, &plain_elements, within, "parameters");
                assert_eq!(kept.2.reduce_scatters, plain.2.reduce_scatters);
            }
        }
    }
}

#[test]
fn every_strategy_and_prefetch_has_the_same_bits() {
    for pairs in [false, true] {
        let run = |options| train(2, Shape { pairs, frozen: true }, options);
        let expected = run(FsdpOptions::new().with_strategy(ShardingStrategy::NoShard));
        for options in [
            FsdpOptions::new(),
            FsdpOptions::new().with_strategy(ShardingStrategy::ShardGradOp),
            FsdpOptions::new().with_backward_prefetch(BackwardPrefetch::Post),
            FsdpOptions::new()
                .with_backward_prefetch(BackwardPrefetch::None)
                .with_forward_prefetch(false),
        ] {
            assert_same(&run(options), &expected);
        }
    }
}

/// A unit that the wrap policy leaves out is recomputed with the unit that it belongs to.
#[test]
fn a_wrap_policy_that_leaves_out_inner_units_changes_no_bit() {
    let wrap = WrapPolicy::TransformerBased(unit_types![Outer]);
    let run = |which| {
        let options = FsdpOptions::new().with_wrap(wrap).with_activation_checkpointing(which);
        train(2, Shape::default(), options)
    };
    let plain = run(ActivationCheckpointing::None);
    let kept = run(ActivationCheckpointing::Annotated);
    assert_same(&kept, &plain);
    assert_eq!(kept.2, plain.2);
}

#[test]
fn a_recompute_gathers_inner_units_once_more_and_no_other() {
    let lines = |which| {
        of_rank_0(2, move |worker| {
            let options = FsdpOptions::new().with_seed(5).with_activation_checkpointing(which);
            let model = fully_shard(model(Shape::default(), worker.device()), worker, options)?;
            let step = |at| model.backward(model.forward(input(0, at, worker.device())));
            step(0)?;
            let (result, lines) = record(|| step(1));
            result?;
            Ok((only(&lines, &["unshard", "recompute"]), model.stats().counts().mis_prefetches))
        })
    };
    let count = |lines: &[String], line: &str| lines.iter().filter(|found| *found == line).count();
    let (plain, wrong) = lines(ActivationCheckpointing::None);
    let (kept, wrong_kept) = lines(ActivationCheckpointing::Annotated);
    assert_eq!(wrong_kept, wrong, "prefetches");
    for unit in ["before", "after", "outers.0", "outers.1"] {
        let line = format!("unshard {unit}");
        assert!(count(&plain, &line) > 0, "{unit}: {plain:?}");
        assert_eq!(count(&kept, &line), count(&plain, &line), "{unit}");
    }
    let first = "unshard outers.0.first";
    assert_eq!((count(&plain, first), count(&kept, first)), (2, 3));
    let recomputed: Vec<_> = only(&kept, &["recompute"]);
    let expected = ["outers.1", "outers.1", "outers.0"];
    assert_eq!(recomputed, expected.map(|unit| format!("recompute {unit}")));
}

#[test]
fn an_unsharded_model_runs_as_written() {
    let device = Device::flex().autodiff();
    device.seed(5);
    let model = model(Shape::default(), &device);
    let before = FORWARDS.load(SeqCst);
    let loss = model.forward(input(0, 0, &device));
    let forwards = FORWARDS.load(SeqCst) - before;
    // Other tests may run at the same time, and add forwards of their own.
    assert!(forwards >= 3);
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    assert!(grads.get::<2>(model.outers[0].mix.weight.id).is_some());
}
