//! Checkpoints of optimizers that need whole matrices. The state of a matrix is on the rank that
//! owns it, and is loaded by the owner in any other world.

use std::path::{Path, PathBuf};

use burn::optim::ModuleOptimizer;
use fsdp_runtime::checkpoint::{Checkpoint, Manifest, Restore};
use fsdp_runtime::errors::CheckpointError;
use fsdp_runtime::optim::WholeParam;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, Rank};

use crate::support::checkpoint::sharded;
use crate::support::compare::{Parameters, Within, assert_parameters_close};
use crate::support::whole_param::{OPTIMIZERS, adafactor, lamb};
use crate::support::{self, Net, batch, loss, of_rank_0, on_ranks};

const SAVED: usize = 4;
const STEPS: usize = 8;
const LEARNING_RATE: f64 = 1e-3;
/// The rounding of a few steps in another world.
const WITHIN: Within = Within::Scaled(1e-6);

/// A part of a run. All ranks have the same rows, so that gradients are the same in any world.
#[derive(Clone)]
struct Part {
    world: usize,
    options: FsdpOptions,
    optimizer: fn() -> ModuleOptimizer,
    /// Whether the optimizer is wrapped in [`WholeParam`].
    whole: bool,
    from: Option<PathBuf>,
    save: Option<PathBuf>,
}

impl Part {
    fn new(world: usize, optimizer: fn() -> ModuleOptimizer) -> Self {
        let options = FsdpOptions::new();
        Self { world, options, optimizer, whole: true, from: None, save: None }
    }

    fn with_strategy(mut self, strategy: ShardingStrategy) -> Self {
        self.options = self.options.with_strategy(strategy);
        if strategy.is_hybrid() {
            self.options = self.options.with_shard_size(2);
        }
        self
    }

    fn plain(self) -> Self {
        Self { whole: false, ..self }
    }

    fn save(self, path: &Path) -> Self {
        Self { save: Some(path.into()), ..self }
    }

    fn from(self, path: &Path) -> Self {
        Self { from: Some(path.into()), ..self }
    }

    /// Runs up to step [`SAVED`] where it saves, else up to [`STEPS`]. Returns the full parameters.
    fn run(self) -> Parameters {
        let ranks = on_ranks(self.world, move |worker| {
            let seed = if self.from.is_some() { 99 } else { 7 };
            let mut net = sharded(worker, 0.0, self.options.clone().with_seed(seed))?;
            let (mut whole, mut plain) = (WholeParam::new((self.optimizer)()), (self.optimizer)());
            let mut first = 0;
            if let Some(path) = &self.from {
                let restore = Restore::new().with_model("net", &mut net);
                let restore = match self.whole {
                    true => restore.with_whole_optimizer("own", &mut whole),
                    false => restore.with_optimizer("own", &mut plain),
                };
                first = restore.load(worker, path)?.progress.step as usize;
            }
            for step in first..if self.save.is_some() { SAVED } else { STEPS } {
                let (tokens, labels) = batch(step, 0..4, worker.device());
                let grads = net.backward(loss(net.forward(tokens), labels))?;
                net = match self.whole {
                    true => whole.step(LEARNING_RATE, net, grads)?,
                    false => plain.step(LEARNING_RATE, net, grads),
                };
            }
            if let Some(path) = &self.save {
                let checkpoint = Checkpoint::new(SAVED as u64).with_model("net", &net);
                let checkpoint = match self.whole {
                    true => checkpoint.with_whole_optimizer("own", &whole),
                    false => checkpoint.with_optimizer("own", &plain),
                };
                checkpoint.save(worker, path)?;
            }
            let state = net.state().full(Recipient::All)?;
            Ok(state.into_iter().map(|(path, data)| (path, data.iter().collect())).collect())
        });
        ranks.into_iter().next().unwrap()
    }
}

#[test]
fn state_of_whole_matrices_loads_at_other_worlds_and_strategies() {
    use ShardingStrategy::{HybridShard, NoShard};
    for (name, optimizer) in OPTIMIZERS {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("whole");
        let part = |world| Part::new(world, optimizer);
        let expected = part(2).run();
        part(2).save(&path).run();
        assert_eq!(part(2).from(&path).run(), expected, "{name}, the same world");
        for (next, what) in [
            (part(3), "3 ranks"),
            (part(1), "1 rank"),
            (part(2).with_strategy(NoShard), "NO_SHARD"),
            (part(2).with_strategy(NoShard).plain(), "NO_SHARD, without the wrapper"),
            (part(4).with_strategy(HybridShard), "HYBRID_SHARD"),
        ] {
            assert_parameters_close(
                &next.from(&path).run(),
                &expected,
                WITHIN,
                format_args!("{name}, {what}"),
            );
        }
        // Full moments are loaded by owners too.
        for (first, what) in [
            (part(2).with_strategy(NoShard).plain(), "from NO_SHARD"),
            (part(4).with_strategy(HybridShard), "from HYBRID_SHARD"),
        ] {
            let path = folder.path().join(what);
            first.save(&path).run();
            assert_parameters_close(
                &part(3).from(&path).run(),
                &expected,
                WITHIN,
                format_args!("{name}, {what}"),
            );
        }
    }
}

#[test]
fn each_owner_writes_the_state_of_its_matrices() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adafactor");
    Part::new(2, adafactor).save(&path).run();
    let owners =
        on_ranks(2, |worker| Ok(WholeParam::owners(&sharded(worker, 0.0, FsdpOptions::new())?)));
    let text = std::fs::read(path.join("manifest.json")).unwrap();
    let manifest = Manifest::parse(&text, "manifest.json").unwrap();
    let state = &manifest.optimizers["own"].models["net"];
    assert!(!owners[0].is_empty());
    for (name, owner) in &owners[0] {
        let shape = &manifest.models["net"].tensors[name].shape;
        let mut factored = 0;
        for tensor in state[name].tensors.values() {
            let files: Vec<usize> = tensor.pieces.iter().map(|piece| piece.file).collect();
            assert_eq!(files, [owner.index()], "`{name}`");
            factored += usize::from(tensor.shape != *shape);
        }
        assert!(factored > 0, "`{name}` has factors, not moments of its shape");
    }
    assert!(owners[0].values().any(|owner| *owner == Rank::ZERO));
    assert!(owners[0].values().any(|owner| *owner != Rank::ZERO));
}

/// The moments of LAMB have the shape of their parameter, so that they can be sharded.
#[test]
fn moments_of_whole_matrices_are_loaded_as_shards_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, cut) = (folder.path().join("whole"), folder.path().join("cut"));
    Part::new(2, lamb).save(&whole).run();
    let again = cut.clone();
    on_ranks(3, move |worker| {
        let mut net = sharded(worker, 0.0, FsdpOptions::new())?;
        let mut plain = lamb();
        Restore::new()
            .with_model("net", &mut net)
            .with_optimizer("own", &mut plain)
            .load(worker, &whole)?;
        Checkpoint::new(SAVED as u64)
            .with_model("net", &net)
            .with_optimizer("own", &plain)
            .save(worker, &again)
    });
    let expected = Part::new(2, lamb).run();
    assert_parameters_close(
        &Part::new(2, lamb).from(&cut).run(),
        &expected,
        WITHIN,
        "through shards",
    );
}

/// A full state is gathered from the owners, and loaded by the owners in another world.
#[test]
fn full_states_of_whole_matrices_load_at_another_world() {
    fn run(
        worker: &Worker,
        net: Fsdp<Net>,
        own: &mut WholeParam,
        steps: std::ops::Range<usize>,
    ) -> Result<Fsdp<Net>, Error> {
        steps.into_iter().try_fold(net, |net, step| {
            let (tokens, labels) = batch(step, 0..4, worker.device());
            let grads = net.backward(loss(net.forward(tokens), labels))?;
            own.step(LEARNING_RATE, net, grads)
        })
    }
    for (name, optimizer) in OPTIMIZERS {
        let expected = Part::new(2, optimizer).run();
        let states = on_ranks(2, move |worker| {
            let mut own = WholeParam::new(optimizer());
            let net = sharded(worker, 0.0, FsdpOptions::new().with_seed(7))?;
            let net = run(worker, net, &mut own, 0..SAVED)?;
            let only = own.full_state(&net, Recipient::Only(Rank::ZERO))?;
            assert_eq!(only.parameters.is_empty(), worker.rank() != Rank::ZERO);
            Ok((net.state().full(Recipient::All)?, own.full_state(&net, Recipient::All)?))
        });
        assert_eq!(states[0], states[1], "{name}");
        for world in [1, 3] {
            let (model, state) = states[0].clone();
            let found = on_ranks(world, move |worker| {
                let mut own = WholeParam::new(optimizer());
                let mut net = sharded(worker, 0.0, FsdpOptions::new())?;
                net.state_mut().load_full(&model, Recipient::All)?;
                own.load_full_state(&net, &state)?;
                assert_eq!(own.full_state(&net, Recipient::All)?, state, "{name} {world}");
                let state =
                    run(worker, net, &mut own, SAVED..STEPS)?.state().full(Recipient::All)?;
                Ok(state.into_iter().map(|(path, data)| (path, data.iter().collect())).collect())
            });
            assert_parameters_close(
                &found[0],
                &expected,
                WITHIN,
                format_args!("{name}, {world} ranks"),
            );
        }
    }
}

/// State of whole matrices that is saved as shards, or the other way round, is an error and not cut
/// wrongly.
#[test]
fn state_saved_by_the_wrong_method_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let errors = on_ranks(2, move |worker| {
        let mut net = sharded(worker, 0.0, FsdpOptions::new().with_optimizer_check(false))?;
        let mut whole = WholeParam::new(lamb());
        let (tokens, labels) = batch(0, 0..4, worker.device());
        let grads = net.backward(loss(net.forward(tokens), labels))?;
        net = whole.step(LEARNING_RATE, net, grads)?;
        let plain = Checkpoint::new(1).with_model("net", &net).with_optimizer("own", whole.inner());
        let as_shards = plain.save(worker, &path).unwrap_err();

        let mut plain = lamb();
        let (tokens, labels) = batch(0, 0..4, worker.device());
        let grads = net.backward(loss(net.forward(tokens), labels))?;
        net = plain.step(LEARNING_RATE, net, grads);
        let wrapped = WholeParam::new(plain);
        let checkpoint =
            Checkpoint::new(1).with_model("net", &net).with_whole_optimizer("own", &wrapped);
        let as_whole = checkpoint.save(worker, &path).unwrap_err();
        assert!(!path.exists());
        Ok((as_shards, as_whole))
    });
    let typed = |error: &Error| match error {
        Error::Checkpoint(error) => error.clone(),
        error => panic!("{error}"),
    };
    for (as_shards, as_whole) in &errors {
        let error = typed(as_shards);
        assert!(matches!(error, CheckpointError::NotElementwise { .. }), "{error}");
        assert!(error.to_string().contains("`whole_optimizer`"), "{error}");
        let error = typed(as_whole);
        assert!(matches!(error, CheckpointError::MisplacedState { .. }), "{error}");
    }
}

/// In a matrix with as many columns as there are ranks, a factor `[rows, 1]` is as long as a shard.
#[test]
fn factors_as_long_as_a_shard_are_not_taken_for_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("narrow");
    let net = |worker: &Worker| {
        let mut net = Net::new(1, 0.0, worker.device());
        let wide = burn::nn::LinearConfig::new(support::WIDTH, 2).init(worker.device());
        net.head = wide;
        fully_shard(net, worker, FsdpOptions::new().with_seed(1))
    };
    let saved = path.clone();
    let run = move |world: usize, from: bool| {
        let saved = saved.clone();
        of_rank_0(world, move |worker| {
            let (mut net, mut whole) = (net(worker)?, WholeParam::new(adafactor()));
            if from {
                Restore::new()
                    .with_model("net", &mut net)
                    .with_whole_optimizer("own", &mut whole)
                    .load(worker, &saved)?;
            }
            for step in if from { 2..4 } else { 0..4 } {
                if step == 2 && !from {
                    let checkpoint = Checkpoint::new(2).with_model("net", &net);
                    checkpoint.with_whole_optimizer("own", &whole).save(worker, &saved)?;
                }
                let (tokens, labels) = batch(step, 0..4, worker.device());
                let grads = net.backward(loss(net.forward(tokens), labels % 2))?;
                net = whole.step(LEARNING_RATE, net, grads)?;
            }
            let state = net.state().full(Recipient::All)?;
            let of =
                |(path, data): (String, burn::tensor::TensorData)| (path, data.iter().collect());
            Ok(state.into_iter().map(of).collect::<Parameters>())
        })
    };
    let expected = run(2, false);
    let text = std::fs::read(path.join("manifest.json")).unwrap();
    let manifest = Manifest::parse(&text, "manifest.json").unwrap();
    let state = &manifest.optimizers["own"].models["net"]["head.weight"];
    let rows = support::WIDTH;
    assert!(state.tensors.values().any(|tensor| tensor.shape == [rows, 1]), "{state:?}");
    assert_eq!(run(2, true), expected);
    assert_parameters_close(&run(1, true), &expected, WITHIN, "1 rank");
    assert_parameters_close(&run(3, true), &expected, WITHIN, "3 ranks");
}
