//! Matrices that are split over tensor parallel ranks have the results of whole ones.

use std::path::Path;

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{MergeOptions, merge};
use fsdp_runtime::errors::{ScheduleError, ShardError};
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear, LinearConfig,
    LinearCrossEntropyOptions, LmHead, LmHeadConfig, RmsNorm, RmsNormConfig, attention,
};
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, SavePretrained, from_pretrained};

use crate::split_llama::{
    Block, HIDDEN, LENGTH, Net, ROWS, Setup, causal, compare, ids, resumed, train, variants,
};
use crate::support::on_ranks;

#[test]
fn losses_are_those_of_whole_matrices() {
    let alone = train(&Setup::new(1, 1));
    assert!(alone.losses[19] < alone.losses[0] - 0.1, "{:?}", alone.losses);
    for (data, tensor) in [(1, 2), (2, 2), (1, 4), (4, 2), (2, 1)] {
        compare(&alone, &Setup::new(data, tensor));
    }
}

#[test]
fn strategies_and_recomputation_change_nothing() {
    let alone = train(&Setup::new(1, 1));
    let setup = |options: FsdpOptions| Setup { options, ..Setup::new(2, 2) };
    for options in variants(&FsdpOptions::new().with_seed(3), 1) {
        compare(&alone, &setup(options));
    }
}

/// Outside of split layers each rank has a part of the positions.
#[test]
fn sequence_parallel_changes_nothing() {
    let base = || FsdpOptions::new().with_seed(3).with_sequence_parallel(true);
    let layers = ActivationCheckpointing::Units(unit_types![Block]);
    let recomputed = base().with_activation_checkpointing(layers);
    let alone = train(&Setup::new(1, 1));
    for (mesh, options) in [
        ([1, 1, 2], base()),
        ([2, 1, 2], recomputed.clone()),
        ([1, 1, 4], base().with_strategy(ShardingStrategy::NoShard)),
        ([1, 2, 2], recomputed),
        ([2, 1, 1], base()),
    ] {
        compare(&alone, &Setup { options, ..Setup::mesh(mesh) });
    }
    let lora = || Some(LoraConfig::new(4).with_alpha(8.0));
    let setup = |mesh| Setup { lora: lora(), tied: true, steps: 6, ..Setup::mesh(mesh) };
    let alone = train(&setup([1, 1, 1]));
    for mesh in [[1, 1, 2], [1, 2, 2]] {
        compare(&alone, &Setup { options: base(), ..setup(mesh) });
    }
    let runs = [0; 2].map(|_| {
        train(&Setup { options: base(), steps: 3, micro_batches: 2, ..Setup::mesh([2, 1, 2]) })
    });
    assert!(runs[0].losses == runs[1].losses && runs[0].full == runs[1].full);
}

#[test]
fn activations_of_norms_are_parts_under_sequence_parallel() {
    let measured = [false, true].map(|sequence| {
        let ranks = on_ranks(2, move |worker| {
            let device = worker.device();
            let options = FsdpOptions::new().with_seed(1).with_tensor_parallel(2);
            let options = options.with_sequence_parallel(sequence);
            let layers = ActivationCheckpointing::Units(unit_types![Block]);
            let options = options.with_activation_checkpointing(layers);
            let net = fully_shard(Net::new(false, device), worker, options)?;
            let ids = ids(0, 0..ROWS, device);
            let targets = ids.clone().narrow(1, 1, LENGTH).flatten(0, 1);
            let loss = net.forward_loss(ids.narrow(1, 0, LENGTH), targets, causal());
            let kept = net.stats().memory().activations.now;
            net.backward(loss)?;
            Ok(kept)
        });
        ranks[0]
    });
    let [whole, parts] = measured;
    // The inputs of the two blocks, in f32, of which each rank keeps a half.
    let inputs = 2 * ROWS * LENGTH * HIDDEN * 4;
    assert_eq!(whole - parts, inputs / 2);
}

#[test]
fn adapters_have_the_results_of_whole_ones() {
    let lora = || Some(LoraConfig::new(4).with_alpha(8.0));
    let alone = train(&Setup { lora: lora(), ..Setup::new(1, 1) });
    for (data, tensor) in [(1, 2), (2, 2), (1, 4)] {
        compare(&alone, &Setup { lora: lora(), ..Setup::new(data, tensor) });
    }
}

#[test]
fn two_runs_have_the_same_bits() {
    let [first, second] = [0; 2].map(|_| train(&Setup { steps: 4, ..Setup::new(2, 2) }));
    assert_eq!(first.losses, second.losses);
    assert!(first.full == second.full);
}

#[test]
fn a_tied_table_is_split_once() {
    let alone = train(&Setup { tied: true, ..Setup::new(1, 1) });
    for (data, tensor) in [(1, 2), (2, 4)] {
        compare(&alone, &Setup { tied: true, ..Setup::new(data, tensor) });
    }
}

/// Returns the logits of a model that is loaded from a folder.
fn logits(folder: &Path, data: usize, tensor: usize) -> Vec<f32> {
    let folder = folder.to_path_buf();
    let mut ranks = on_ranks(data * tensor, move |worker| {
        let options = FsdpOptions::new().with_tensor_parallel(tensor);
        let net = Net::new(false, worker.device());
        let (net, _) = from_pretrained(net, worker, options, &folder, &LoadOptions::new())?;
        let ids = ids(0, 0..2, worker.device());
        Ok(net.forward(ids).into_data().iter::<f32>().collect::<Vec<_>>())
    });
    ranks.pop().unwrap()
}

/// The files have whole matrices, whatever the mesh.
#[test]
fn what_one_mesh_saves_another_one_loads() {
    let home = tempfile::tempdir().unwrap();
    let mut expected: Option<Vec<f32>> = None;
    for (data, tensor) in [(1, 1), (2, 2), (1, 4)] {
        let folder = home.path().join(format!("{data}-{tensor}"));
        let to = folder.clone();
        on_ranks(data * tensor, move |worker| {
            let options = FsdpOptions::new().with_seed(5).with_tensor_parallel(tensor);
            let net = fully_shard(Net::new(false, worker.device()), worker, options)?;
            net.state().save_pretrained(&to, &SavePretrained::new())
        });
        let found = logits(&folder, 1, 1);
        let expected = expected.get_or_insert(found.clone());
        assert!(found == *expected, "the saved weights of {data} x {tensor}");
        for (data, tensor) in [(2, 1), (1, 2), (2, 4)] {
            let loaded = logits(&folder, data, tensor);
            let close = loaded.iter().zip(&*expected).all(|(a, b)| (a - b).abs() < 1e-5);
            assert!(close, "loaded at {data} x {tensor}");
        }
    }
}

#[test]
fn sizes_that_cannot_be_split_are_named() {
    let ranks = on_ranks(3, |worker| {
        let options = FsdpOptions::new().with_tensor_parallel(3);
        Ok(fully_shard(Net::new(false, worker.device()), worker, options).unwrap_err())
    });
    let expected = "`words.weight` has size 40 in dimension 0, along which 3 tensor parallel ranks cannot \
        split it in equal parts; set `tensor_parallel` to one of 1, 2, 4, 5, 8, 10, 20, 40";
    assert!(ranks[0].to_string().contains(expected), "{}", ranks[0]);
    let ranks = on_ranks(3, |worker| {
        let options = FsdpOptions::new().with_tensor_parallel(2);
        Ok(fully_shard(Net::new(false, worker.device()), worker, options).unwrap_err())
    });
    let expected = "3 ranks cannot be split into groups of 2 tensor parallel ranks";
    assert!(ranks[0].to_string().contains(expected), "{}", ranks[0]);
}

#[test]
fn tensor_parallel_ranks_with_different_batches_are_an_error() {
    let ranks = on_ranks(2, |worker| {
        let options = FsdpOptions::new().with_seed(1).with_tensor_parallel(2);
        let net = fully_shard(Net::new(false, worker.device()), worker, options)?;
        // By the worker's rank, and by words alone: the table adds up what the ranks find.
        let ids = ids(0, worker.rank().index()..worker.rank().index() + 1, worker.device());
        let targets = ids.clone().narrow(1, 1, LENGTH).flatten(0, 1);
        Ok(caught(|| net.forward_loss(ids.narrow(1, 0, LENGTH), targets, causal())))
    });
    let expected = Error::from(ScheduleError::DifferentInputs);
    assert_eq!(ranks, [Some(expected.clone()), Some(expected)]);
}

/// Returns the error that a forward unwinds with.
fn caught<T>(forward: impl FnOnce() -> T) -> Option<Error> {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(forward));
    caught.err().map(|panic| *panic.downcast::<Error>().expect("a typed error"))
}

/// Attention whose length is that of its input, and a head.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Careless {
    #[fsdp(vocab)]
    words: Embedding,
    #[fsdp(column)]
    query: Linear,
    #[fsdp(row)]
    output: Linear,
    head: LmHead,
    /// Whether the length is that of the input.
    #[module(skip)]
    reads_input: bool,
}

#[fsdp_unit]
impl Careless {
    fn forward_loss(&self, ids: Tensor<2, Int>) -> Tensor<1> {
        let x = self.words.forward(ids.clone());
        let query = self.query.forward(x.clone());
        let [rows, length, _] = if self.reads_input { x.dims() } else { query.dims() };
        let query = query.reshape([rows as i32, -1, length as i32, 4]);
        let mixed = attention(query.clone(), query.clone(), query, causal());
        let mixed = self.output.forward(mixed.reshape([rows as i32, -1, 8]));
        let [_, positions, _] = mixed.dims();
        let targets = ids.narrow(1, 0, positions).flatten(0, 1);
        self.head.cross_entropy(mixed.flatten(0, 1), targets, LinearCrossEntropyOptions::new())
    }
}

/// Returns the error of a step of a careless model under sequence parallel.
fn careless(reads_input: bool, length: usize) -> Error {
    let mut ranks = on_ranks(2, move |worker| {
        let device = worker.device();
        let net = Careless {
            words: EmbeddingConfig::new(40, 8).init(device),
            query: LinearConfig::new(8, 16).init(device),
            output: LinearConfig::new(16, 8).init(device),
            head: LmHeadConfig::new(8, 40).init(device),
            reads_input,
        };
        let options = FsdpOptions::new().with_seed(1).with_tensor_parallel(2);
        let net = fully_shard(net, worker, options.with_sequence_parallel(true))?;
        let ids = ids(0, 0..2, device).narrow(1, 0, length);
        let step = || net.backward(net.forward_loss(ids)).unwrap_err();
        Ok(match std::panic::catch_unwind(std::panic::AssertUnwindSafe(step)) {
            Ok(error) => error,
            Err(panic) => *panic.downcast::<Error>().expect("a typed error"),
        })
    });
    ranks.swap_remove(0)
}

#[test]
fn code_that_sequence_parallel_would_make_wrong_is_an_error() {
    let error = careless(true, 8);
    let expected = ScheduleError::PartOfSequence { length: 8, positions: 4 };
    assert_eq!(error, expected.into());
    // The head is whole, and the loss is that of this rank's positions.
    let error = careless(false, 8);
    assert!(matches!(error, Error::Schedule(ScheduleError::DifferentLosses { .. })), "{error}");
    let text = careless(true, 7).to_string();
    assert!(text.contains("rows of 7 positions cannot be split over 2 tensor"), "{text}");
}

/// A norm between split layers without `shared`.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Unshared {
    #[fsdp(column)]
    up: Linear,
    norm: RmsNorm,
    #[fsdp(row)]
    down: Linear,
}

#[fsdp_unit]
impl Unshared {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [rows, length, _] = x.dims();
        let up = self.up.forward(x).reshape([rows as i32, length as i32, -1, 4]);
        self.down.forward(self.norm.forward(up).reshape([rows as i32, length as i32, -1]))
    }
}

#[test]
fn a_whole_parameter_between_parts_is_named() {
    let ranks = on_ranks(2, |worker| {
        let device = worker.device();
        let net = Unshared {
            up: LinearConfig::new(8, 8).init(device),
            norm: RmsNormConfig::new(4).init(device),
            down: LinearConfig::new(8, 8).init(device),
        };
        let options = FsdpOptions::new().with_seed(1).with_tensor_parallel(2);
        let net = fully_shard(net, worker, options)?;
        let loss = net.forward(Tensor::ones([2, 3, 8], device)).powf_scalar(2.0).mean();
        Ok(net.backward(loss).unwrap_err())
    });
    let expected = Error::from(ScheduleError::SplitGradient { path: "norm.gamma".into() });
    assert_eq!(ranks, [expected.clone(), expected]);
}

/// What a careless layer does with a rank's part of the heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    /// Reshapes by the number of all heads.
    AllHeads,
    /// Drops elements with a layer that says nothing of parts.
    Unmarked,
    /// Drops weights of attention with such a layer.
    UnmarkedInAttention,
    /// Drops elements of whole values with a layer for columns.
    Marked,
}

/// Attention of two layers of dropout.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Mistaken {
    #[fsdp(column)]
    query: Linear,
    #[fsdp(column)]
    of_columns: Dropout,
    #[fsdp(row)]
    output: Linear,
    plain: Dropout,
    #[module(skip)]
    mistake: Option<Mistake>,
}

#[fsdp_unit]
impl Mistaken {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let is = |mistake| self.mistake == Some(mistake);
        let [rows, length, _] = x.dims();
        let query = self.query.forward(x);
        let heads = if is(Mistake::AllHeads) { 4 } else { query.dims()[2] / 4 };
        let query = query.reshape([rows, length, heads, 4]).swap_dims(1, 2);
        let layer = |is_wrong| if is_wrong { &self.plain } else { &self.of_columns };
        let options = causal().with_dropout(layer(is(Mistake::UnmarkedInAttention)));
        let mixed = attention(query.clone(), query.clone(), query, options);
        let mixed = layer(is(Mistake::Unmarked)).forward(mixed).swap_dims(1, 2);
        let output = self.output.forward(mixed.reshape([rows, length, heads * 4]));
        let wrong = if is(Mistake::Marked) { &self.of_columns } else { &self.plain };
        wrong.forward(output)
    }
}

/// Returns the error of a step with a mistake.
fn mistaken(mistake: Option<Mistake>) -> Option<Error> {
    let mut ranks = on_ranks(2, move |worker| {
        let device = worker.device();
        let dropout = || DropoutConfig::new(0.5).init();
        let net = Mistaken {
            query: LinearConfig::new(8, 16).init(device),
            of_columns: dropout(),
            output: LinearConfig::new(16, 8).init(device),
            plain: dropout(),
            mistake,
        };
        let options = FsdpOptions::new().with_seed(1).with_tensor_parallel(2);
        let net = fully_shard(net, worker, options)?;
        let x = Tensor::ones([2, 3, 8], device);
        let step = || net.backward(net.forward(x).powf_scalar(2.0).mean());
        Ok(match std::panic::catch_unwind(std::panic::AssertUnwindSafe(step)) {
            Ok(result) => result.err(),
            Err(panic) => Some(*panic.downcast::<Error>().expect("a typed error")),
        })
    });
    ranks.swap_remove(0)
}

#[test]
fn code_that_takes_a_part_of_the_heads_for_all_is_an_error_with_the_layer() {
    assert_eq!(mistaken(None), None);
    let error = mistaken(Some(Mistake::AllHeads)).unwrap();
    let text = error.to_string();
    assert!(matches!(error, Error::Schedule(ScheduleError::PanicBetweenParts { .. })), "{text}");
    for part in ["after `query.weight`, a `column` layer", "each of 2 tensor parallel ranks"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn dropout_that_does_not_know_its_values_is_an_error() {
    let of_parts = || Some(ScheduleError::DropoutOfParts { path: "plain".into() }.into());
    assert_eq!(mistaken(Some(Mistake::Unmarked)), of_parts());
    assert_eq!(mistaken(Some(Mistake::UnmarkedInAttention)), of_parts());
    let of_whole = ScheduleError::DropoutOfWhole { path: "of_columns".into() };
    assert_eq!(mistaken(Some(Mistake::Marked)), Some(of_whole.into()));
}

/// An element is rounded with the same random bits, whichever rank has it. Sums in another order round few elements
/// otherwise.
#[test]
fn random_rounding_is_that_of_whole_matrices() {
    let policy = StoragePolicy::new().with_trained(StorageType::Bf16);
    let setup = |mesh, seed| {
        let options = FsdpOptions::new().with_seed(seed).with_storage(policy);
        Setup { options, steps: 1, ..Setup::mesh(mesh) }
    };
    let bits = |setup: &Setup| -> Vec<u32> {
        let full = train(setup).full;
        full.iter().flat_map(|(_, numbers)| numbers.iter().map(|number| number.to_bits())).collect()
    };
    let alone = bits(&setup([1, 1, 1], 3));
    for mesh in [[1, 1, 2], [2, 1, 4], [1, 2, 2]] {
        let found = bits(&setup(mesh, 3));
        let others = found.iter().zip(&alone).filter(|(a, b)| a != b).count();
        assert!(others * 100 < alone.len(), "{mesh:?}: {others} of {} differ", alone.len());
    }
}

#[test]
fn calls_that_take_whole_matrices_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record.bpk");
    let ranks = on_ranks(2, move |worker| {
        let options = FsdpOptions::new().with_tensor_parallel(2);
        let net = fully_shard(Net::new(false, worker.device()), worker, options)?;
        let saved = net.state().save_burnpack(&path).unwrap_err();
        Ok([saved, net.into_plain().unwrap_err()])
    });
    for error in ranks.iter().flatten() {
        assert!(matches!(error, Error::Shard(ShardError::SplitMatrices { .. })), "{error}");
    }
    let ranks = on_ranks(2, |worker| {
        let net = Whole { layer: LinearConfig::new(8, 8).init(worker.device()) };
        let options = FsdpOptions::new().with_tensor_parallel(2);
        Ok(fully_shard(net, worker, options).unwrap_err())
    });
    assert!(matches!(&ranks[0], Error::Shard(ShardError::NothingToSplit { .. })), "{}", ranks[0]);
}

/// A model without a split layer.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Whole {
    layer: Linear,
}

#[fsdp_unit]
impl Whole {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.layer.forward(x)
    }
}

/// Any mesh continues the run of another one, with the optimizer's state.
#[test]
fn a_checkpoint_of_one_mesh_resumes_on_another() {
    let home = tempfile::tempdir().unwrap();
    let expected = resumed([1, 1, 1], 0..6, None, None);
    for mesh in [[1, 1], [2, 2], [1, 4], [4, 2]] {
        let saved = home.path().join(format!("{}-{}", mesh[0], mesh[1]));
        resumed([mesh[0], 1, mesh[1]], 0..3, None, Some(&saved));
        for other in [[1, 1], [2, 1], [2, 2], [1, 4], [2, 4]] {
            let losses = resumed([other[0], 1, other[1]], 3..6, Some(&saved), None);
            for (found, expected) in losses.iter().zip(&expected[3..]) {
                let error = (found - expected).abs() / expected.abs();
                assert!(error < 1e-4, "{mesh:?} to {other:?}: {found}, not {expected}");
            }
        }
    }
    // Without code of the model.
    let merged = [[1, 1], [2, 2]].map(|mesh| {
        let saved = home.path().join(format!("{}-{}", mesh[0], mesh[1]));
        let output = home.path().join(format!("merged-{}", mesh[0]));
        merge(&saved, &output, &MergeOptions::new()).unwrap();
        std::fs::read(output.join("model.safetensors")).unwrap()
    });
    assert_eq!(merged[0].len(), merged[1].len());
}
