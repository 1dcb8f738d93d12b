//! Optimizers that need whole matrices have the results on sharded models that they have on
//! unsharded ones.

use std::collections::BTreeMap;

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::constant::ConstantLr;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::optim::{AdafactorConfig, GradientsParams, LambConfig, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Device, Tensor, TensorData};
use fsdp_runtime::optim::WholeParam;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, Rank};

use crate::support::compare::{Parameters, Within, assert_parameters_close};
use crate::support::whole_param::{OPTIMIZERS, adafactor, lamb, muon};
use crate::support::{HIDDEN, Net, WIDTH, batch, loss, of_rank_0, on_ranks};

const STEPS: usize = 20;
const BLOCKS: usize = 2;
const LEARNING_RATE: f64 = 1e-3;
/// Rounding of 20 steps.
const WITHIN: Within = Within::Scaled(1e-6);

/// The optimizer of a rank.
enum Stepper {
    /// Burn's optimizer.
    Plain(ModuleOptimizer),
    Whole(WholeParam),
}

impl Stepper {
    fn step(&mut self, net: Fsdp<Net>, grads: GradientsParams) -> Result<Fsdp<Net>, Error> {
        match self {
            Self::Plain(optimizer) => Ok(optimizer.step(LEARNING_RATE, net, grads)),
            Self::Whole(optimizer) => optimizer.step(LEARNING_RATE, net, grads),
        }
    }
}

fn sharded(worker: &Worker, options: FsdpOptions) -> Result<Fsdp<Net>, Error> {
    fully_shard(Net::new(BLOCKS, 0.0, worker.device()), worker, options.with_seed(7))
}

fn gradients(
    net: &Fsdp<Net>,
    step: usize,
    first: usize,
    device: &Device,
) -> Result<GradientsParams, Error> {
    let (tokens, labels) = batch(step, first..first + 4, device);
    net.backward(loss(net.forward(tokens), labels))
}

fn parameters(net: &Fsdp<Net>) -> Result<Parameters, Error> {
    let state = net.state().full(Recipient::All)?;
    assert!(!state.is_empty());
    Ok(state.into_iter().map(|(path, data)| (path, data.iter::<f32>().collect())).collect())
}

/// Trains for [`STEPS`] steps, with rows of its own on each rank or the same rows on all.
fn train(
    world: usize,
    options: FsdpOptions,
    same_rows: bool,
    stepper: impl Fn() -> Stepper + Send + Sync + 'static,
) -> Parameters {
    let ranks = on_ranks(world, move |worker| {
        let mut net = sharded(worker, options.clone())?;
        let mut stepper = stepper();
        let first = if same_rows { 0 } else { worker.rank().index() * 4 };
        for step in 0..STEPS {
            let grads = gradients(&net, step, first, worker.device())?;
            net = stepper.step(net, grads)?;
        }
        parameters(&net)
    });
    assert!(ranks.iter().all(|rank| *rank == ranks[0]));
    ranks.into_iter().next().unwrap()
}

/// Reads the parameters of an unsharded model by path.
#[derive(Default)]
struct Read {
    path: Vec<String>,
    found: Parameters,
}

impl ModuleVisitor for Read {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let elements = param.val().into_data().iter::<f32>().collect();
        self.found.insert(self.path.join("."), elements);
    }
}

/// Trains with plain Burn. Returns the parameters before and after.
fn plain(optimizer: fn() -> ModuleOptimizer) -> (Parameters, Parameters) {
    let ranks = on_ranks(1, move |worker| {
        let device = worker.device();
        let start = sharded(worker, FsdpOptions::new().with_strategy(ShardingStrategy::NoShard))?;
        let begin = parameters(&start)?;
        let mut net = (*start).clone().materialize();
        let mut optimizer = optimizer();
        for step in 0..STEPS {
            let (tokens, labels) = batch(step, 0..4, device);
            let grads = loss(net.forward(tokens), labels).backward();
            let grads = GradientsParams::from_grads(grads, &net);
            net = optimizer.step(LEARNING_RATE, net, grads);
        }
        let mut read = Read::default();
        net.visit(&mut read);
        Ok((begin, read.found))
    });
    ranks.into_iter().next().unwrap()
}

#[test]
fn whole_matrices_give_the_results_of_plain_burn() {
    for (name, optimizer) in OPTIMIZERS {
        let (begin, expected) = plain(optimizer);
        assert!(!expected.is_empty());
        for (path, end) in &expected {
            assert_ne!(begin[path], *end, "{name} moves `{path}`");
        }
        for world in [1, 2, 3] {
            let whole = move || Stepper::Whole(WholeParam::new(optimizer()));
            let found = train(world, FsdpOptions::new(), true, whole);
            let what = format_args!("{name} on {world} ranks");
            assert_parameters_close(&found, &expected, WITHIN, what);
        }
    }
}

/// Each rank has rows of its own. Gradients of `FULL_SHARD` have the bits of `NO_SHARD`, and so
/// must the parameters after a step.
#[test]
fn whole_matrices_have_the_bits_of_no_shard() {
    for (name, optimizer) in OPTIMIZERS {
        for world in [2, 3] {
            let none = FsdpOptions::new().with_strategy(ShardingStrategy::NoShard);
            let expected = train(world, none.clone(), false, move || Stepper::Plain(optimizer()));
            let whole = move || Stepper::Whole(WholeParam::new(optimizer()));
            assert_eq!(train(world, FsdpOptions::new(), false, whole), expected, "{name} {world}");
            assert_eq!(train(world, none, false, whole), expected, "{name} {world}, NO_SHARD");
        }
    }
}

/// On Flex the host computes as the device does, in every bit.
#[test]
fn whole_matrices_of_an_offloaded_model_have_the_same_bits() {
    for (name, optimizer) in OPTIMIZERS {
        let whole = move || Stepper::Whole(WholeParam::new(optimizer()));
        let expected = train(2, FsdpOptions::new(), false, whole);
        for policy in [OffloadPolicy::Params { pin_memory: true }, OffloadPolicy::OptimizerOnly] {
            let found = train(2, FsdpOptions::new().with_offload(policy), false, whole);
            assert_eq!(found, expected, "{name} {policy:?}");
        }
    }
}

/// The wrapper is needed: the norm of a shard is not the norm of its matrix.
#[test]
fn without_the_wrapper_lamb_has_other_results() {
    let expected = train(2, FsdpOptions::new(), true, || Stepper::Whole(WholeParam::new(lamb())));
    let unchecked = FsdpOptions::new().with_optimizer_check(false);
    let found = train(2, unchecked, true, || Stepper::Plain(lamb()));
    assert!(found.keys().eq(expected.keys()));
    assert_ne!(found, expected);
}

#[test]
fn owners_are_within_each_shard_group_of_a_hybrid_mesh() {
    let hybrid = FsdpOptions::new().with_strategy(ShardingStrategy::HybridShard).with_shard_size(2);
    let owned = hybrid.clone();
    let owners =
        on_ranks(4, move |worker| Ok(WholeParam::owners(&sharded(worker, owned.clone())?)));
    let ranks = |owners: &BTreeMap<String, Rank>| {
        let mut ranks: Vec<usize> = owners.values().map(|rank| rank.index()).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    };
    assert_eq!(owners.iter().map(ranks).collect::<Vec<_>>(), [[0, 1], [0, 1], [2, 3], [2, 3]]);
    let (_, expected) = plain(lamb);
    let found = train(4, hybrid, true, || Stepper::Whole(WholeParam::new(lamb())));
    assert_parameters_close(&found, &expected, WITHIN, "a hybrid mesh");
}

#[test]
fn only_owners_hold_state_and_load_it_again() {
    let ranks = on_ranks(2, |worker| {
        let mut net = sharded(worker, FsdpOptions::new())?;
        let mut optimizer = WholeParam::new(lamb());
        let first = worker.rank().index() * 4;
        for step in 0..2 {
            let grads = gradients(&net, step, first, worker.device())?;
            net = optimizer.step(LEARNING_RATE, net, grads)?;
        }
        let record = optimizer.to_record().into_bytes().expect("a record can be written");
        let held = record.len();
        let record = OptimizerRecord::from_bytes(record).expect("and read");
        let numel: usize = {
            let state = net.state().full(Recipient::All)?;
            let owners = WholeParam::owners(&net);
            let owned = |path: &str| owners.get(path).is_none_or(|rank| *rank == worker.rank());
            let own = state.iter().filter(|(path, _)| owned(path));
            own.map(|(_, data): (_, &TensorData)| data.num_elements()).sum()
        };
        // A step with the optimizer, and one with another that loaded its state, from the same
        // parameters.
        let mut loaded = WholeParam::new(lamb()).load_record(record);
        let (a, b) = (net.clone(), net);
        let grads = |net: &Fsdp<Net>| gradients(net, 2, first, worker.device());
        let (grads_a, grads_b) = (grads(&a)?, grads(&b)?);
        let a = parameters(&optimizer.step(LEARNING_RATE, a, grads_a)?)?;
        let b = parameters(&loaded.step(LEARNING_RATE, b, grads_b)?)?;
        Ok((held, numel, a, b))
    });
    for (held, numel, a, b) in &ranks {
        // Two moments of f32 an element, and at most 20 kB of names and numbers.
        let moments = 2 * 4 * numel;
        assert!(moments > 0);
        assert!((moments..moments + 20_000).contains(held), "{held} {moments}");
        assert_eq!(a, b);
    }
    let shares: Vec<usize> = ranks.iter().map(|(_, numel, ..)| *numel).collect();
    let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
    assert!(*most as f64 <= 1.2 * *least as f64, "balanced: {shares:?}");
}

/// Parameter groups and learning rates refer to paths of the unsharded model, and a gradient is
/// clipped by the norm of the whole matrix.
#[test]
fn groups_learning_rates_and_clipping_are_those_of_the_unsharded_model() {
    fn optimizer() -> ModuleOptimizer {
        let clipping = GradientClippingConfig::Norm(1e-3).init();
        let up = ParamGroup::from_predicate("up.weight");
        LambConfig::new().with_use_trust_ratio(false).init().with_group(
            up,
            AdafactorConfig::new().build(),
            Some(clipping),
        )
    }
    let run = |strategy, whole: bool| {
        of_rank_0(2, move |worker| {
            let mut net = sharded(worker, FsdpOptions::new().with_strategy(strategy))?;
            let head = ParamGroup::from_path("head.weight");
            let mut schedule = ModuleLrScheduler::new(ConstantLr::new(1e-3))
                .with_group(head, ConstantLr::new(0.0));
            let mut plain = optimizer();
            let mut wrapped = WholeParam::new(optimizer());
            let before = parameters(&net)?;
            for step in 0..3 {
                let first = worker.rank().index() * 4;
                let grads = gradients(&net, step, first, worker.device())?;
                net = match whole {
                    true => wrapped.step(schedule.step(), net, grads)?,
                    false => plain.step(schedule.step(), net, grads),
                };
            }
            Ok((before, parameters(&net)?))
        })
    };
    let expected = run(ShardingStrategy::NoShard, false);
    let found = run(ShardingStrategy::FullShard, true);
    assert_eq!(found, expected);
    assert_eq!(found.0["head.weight"], found.1["head.weight"], "its learning rate is 0");
    assert_ne!(found.0["blocks.0.up.weight"], found.1["blocks.0.up.weight"]);
}

#[test]
fn frozen_matrices_do_not_change() {
    let ranks = on_ranks(3, |worker| {
        let net = sharded(worker, FsdpOptions::new())?;
        let mut net = net.freeze_group(ParamGroup::from_predicate("embed"));
        let before = parameters(&net)?;
        let mut optimizer = WholeParam::new(adafactor());
        for step in 0..2 {
            let grads = gradients(&net, step, 0, worker.device())?;
            net = optimizer.step(LEARNING_RATE, net, grads)?;
        }
        assert!(!net.embed.word.weight.base().is_require_grad());
        assert!(net.blocks[0].up.weight.base().is_require_grad());
        Ok((before, parameters(&net)?))
    });
    for (before, after) in ranks {
        assert!(before.keys().any(|path| path.starts_with("embed")));
        for (path, value) in &before {
            assert_eq!(*value == after[path], path.starts_with("embed"), "`{path}`");
        }
    }
}

#[test]
fn an_owner_holds_one_whole_matrix_and_its_gradient() {
    let ranks = on_ranks(2, |worker| {
        let net = sharded(worker, FsdpOptions::new())?;
        let grads = gradients(&net, 0, 0, worker.device())?;
        let before = net.stats().memory();
        let net = WholeParam::new(muon()).step(LEARNING_RATE, net, grads)?;
        let after = net.stats().memory();
        assert_eq!(after.gathered.now, before.gathered.now, "the gathered matrices are freed");
        assert_eq!(after.gradients.now, before.gradients.now);
        Ok(after.gathered.peak - before.gathered.now)
    });
    let largest = WIDTH * HIDDEN * size_of::<f32>();
    assert_eq!(ranks.iter().max(), Some(&largest), "one at a time: {ranks:?}");
    assert!(ranks.iter().all(|more| *more > 0), "{ranks:?}");
}

#[test]
fn a_gradient_that_one_rank_lacks_is_an_error_on_all() {
    let errors = on_ranks(2, |worker| {
        let net = sharded(worker, FsdpOptions::new())?;
        let mut grads = gradients(&net, 0, 0, worker.device())?;
        if worker.rank().index() == 1 {
            let removed = grads.remove::<2>(net.embed.word.weight.id);
            assert!(removed.is_some(), "rank 1 has a shard");
        }
        Ok(WholeParam::new(lamb()).step(LEARNING_RATE, net, grads).err().map(|e| e.to_string()))
    });
    for error in errors {
        let error = error.expect("an error");
        assert!(error.contains("`embed.word.weight`") && error.contains("rank 1"), "{error}");
    }
}
