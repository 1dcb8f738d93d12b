//! Rows that are split over context parallel ranks have the results of whole ones.

use burn::module::Module;
use burn::tensor::{Tensor, activation};
use fsdp_runtime::Error;
use fsdp_runtime::errors::{MeshError, ScheduleError, ShardError};
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::nn::{
    AttentionOptions, Linear, LinearConfig, RotaryEncoding, RotaryEncodingConfig, attention,
};
use fsdp_runtime::prelude::*;

use crate::split_llama::{Block, Setup, Sight, compare, train};
use crate::support::on_ranks;

#[test]
fn losses_are_those_of_whole_rows() {
    let sights = [Sight::Causal, Sight::All, Sight::Window, Sight::Packed, Sight::Padded];
    for sight in sights {
        let steps = if sight == Sight::Causal { 20 } else { 4 };
        let setup = |mesh| Setup { sight, steps, ..Setup::mesh(mesh) };
        let alone = train(&setup([1, 1, 1]));
        for mesh in [[1, 2, 1], [2, 2, 1], [1, 4, 1]] {
            compare(&alone, &setup(mesh));
        }
    }
}

#[test]
fn strategies_recomputation_and_accumulation_change_nothing() {
    let base = || FsdpOptions::new().with_seed(3);
    let setup = |options: FsdpOptions| Setup { options, steps: 6, ..Setup::mesh([2, 2, 1]) };
    let alone = train(&Setup { data: 1, context: 1, ..setup(base()) });
    let layers = ActivationCheckpointing::Units(unit_types![Block]);
    for options in [
        base().with_strategy(ShardingStrategy::NoShard),
        base().with_strategy(ShardingStrategy::ShardGradOp),
        base().with_strategy(ShardingStrategy::HybridShard).with_shard_size(2),
        base().with_activation_checkpointing(layers),
    ] {
        compare(&alone, &setup(options));
    }
    compare(&alone, &Setup { micro_batches: 2, ..setup(base()) });
    let lora = Some(LoraConfig::new(4).with_alpha(8.0));
    let of_one = Setup { lora: lora.clone(), data: 1, context: 1, ..setup(base()) };
    compare(&train(&of_one), &Setup { lora, ..setup(base()) });
}

/// Every factoring of eight ranks in those that take different rows, parts of rows, and parts of matrices.
#[test]
fn all_meshes_of_eight_ranks_have_the_results_of_one() {
    let setup = |mesh| Setup { steps: 4, sight: Sight::Packed, ..Setup::mesh(mesh) };
    let alone = train(&setup([1, 1, 1]));
    for data in [1, 2, 4, 8] {
        for context in [1, 2, 4] {
            let tensor = 8 / data / context;
            if data * context * tensor == 8 && tensor <= 4 {
                compare(&alone, &setup([data, context, tensor]));
            }
        }
    }
}

#[test]
fn two_runs_have_the_same_bits() {
    let runs = [0; 2].map(|_| train(&Setup { steps: 3, ..Setup::mesh([1, 2, 2]) }));
    let [first, second] = &runs;
    assert_eq!(first.losses, second.losses);
    assert!(first.full == second.full);
}

/// Attention of one layer, and what it is made of.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Layer {
    inner: Linear,
    rotary: RotaryEncoding,
    #[module(skip)]
    of_burn: bool,
}

#[fsdp_unit]
impl Layer {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let heads = self.rotary.forward(self.inner.forward(x)).unsqueeze_dim::<4>(1);
        let mixed = match self.of_burn {
            true => {
                let scores = heads.clone().matmul(heads.clone().transpose());
                activation::softmax(scores, 3).matmul(heads)
            }
            false => attention(heads.clone(), heads.clone(), heads, AttentionOptions::new()),
        };
        mixed.squeeze_dim(1)
    }
}

/// Returns the error of a step of a layer on two ranks, which have `length` positions each.
fn error(of_burn: bool, length: usize) -> Error {
    let mut ranks = on_ranks(2, move |worker| {
        let device = worker.device();
        let layer = Layer {
            inner: LinearConfig::new(4, 4).init(device),
            rotary: RotaryEncodingConfig::new(64, 4).init(device),
            of_burn,
        };
        let options = FsdpOptions::new().with_seed(1).with_context_parallel(2);
        let net = fully_shard(layer, worker, options)?;
        let step = || net.backward(net.forward(Tensor::ones([1, length, 4], device)).mean());
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(step));
        Ok(match caught {
            Ok(result) => result.unwrap_err(),
            Err(panic) => *panic.downcast::<Error>().expect("a typed error"),
        })
    });
    ranks.pop().expect("two ranks")
}

#[test]
fn attention_that_sees_only_its_own_part_is_an_error() {
    assert_eq!(error(true, 8), ScheduleError::NoContextAttention.into());
    assert!(matches!(
        error(false, 7),
        Error::Shard(ShardError::Mesh(MeshError::UnevenRows { length: 14, .. }))
    ));
}

#[test]
fn numbers_of_ranks_that_do_not_divide_are_named() {
    let ranks = on_ranks(3, |worker| {
        let device = worker.device();
        let layer = Layer {
            inner: LinearConfig::new(4, 4).init(device),
            rotary: RotaryEncodingConfig::new(64, 4).init(device),
            of_burn: false,
        };
        let options = FsdpOptions::new().with_context_parallel(2);
        Ok(fully_shard(layer, worker, options).unwrap_err().to_string())
    });
    let expected = "3 data parallel ranks cannot be split into groups of 2 context parallel ranks";
    assert!(ranks[0].contains(expected), "{}", ranks[0]);
}
