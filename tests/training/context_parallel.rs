//! Rows that are split over context parallel ranks have the results of whole ones.

use burn::module::Module;
use burn::tensor::{Device, Tensor, activation};
use fsdp_runtime::errors::{MeshError, ScheduleError, ShardError};
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::memory::MemoryForecast;
use fsdp_runtime::nn::{
    AttentionOptions, Linear, LinearConfig, RotaryEncoding, RotaryEncodingConfig, attention,
};
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, Mesh};

use crate::split_llama::{Block, Net, Setup, Sight, compare, gradients, resumed, train, variants};
use crate::support::on_ranks;

#[test]
fn losses_are_those_of_whole_rows() {
    let sights = [Sight::Causal, Sight::All, Sight::Window, Sight::Packed, Sight::Padded];
    for sight in sights {
        let steps = if sight == Sight::Causal { 20 } else { 4 };
        let setup = |mesh| Setup { sight, steps, ..Setup::mesh(mesh) };
        let alone = train(&setup([1, 1, 1]));
        for mesh in [[1, 2, 1], [2, 2, 1], [1, 4, 1]] {
            for exchange in [ContextExchange::Gather, ContextExchange::Ring] {
                let options = FsdpOptions::new().with_seed(3).with_context_exchange(exchange);
                compare(&alone, &Setup { options, ..setup(mesh) });
            }
        }
    }
}

/// An element of a tensor has one mask, whichever rank has it: of whole values, of columns, of attention weights, and
/// of the inputs of adapters.
#[test]
fn dropout_masks_are_those_of_whole_tensors() {
    for sight in [Sight::Causal, Sight::Packed] {
        let lora = LoraConfig::new(4).with_alpha(8.0).with_dropout(0.2);
        let setup = |mesh| Setup {
            sight,
            dropout: 0.2,
            lora: Some(lora.clone()),
            steps: 4,
            ..Setup::mesh(mesh)
        };
        let alone = train(&setup([1, 1, 1]));
        let without = train(&Setup { dropout: 0.0, ..setup([1, 1, 1]) });
        assert!((alone.losses[1] - without.losses[1]).abs() > 1e-3);
        for mesh in [[1, 1, 2], [1, 2, 1], [1, 1, 4], [1, 4, 1], [1, 2, 4]] {
            for (sequence, exchange) in
                [(false, ContextExchange::Ring), (true, ContextExchange::Gather)]
            {
                let layers = ActivationCheckpointing::Units(unit_types![Block]);
                let options = FsdpOptions::new().with_seed(3).with_context_exchange(exchange);
                let options = options.with_sequence_parallel(sequence);
                let recomputed = options.clone().with_activation_checkpointing(layers);
                let options = if mesh == [1, 2, 1] { recomputed } else { options };
                compare(&alone, &Setup { options, ..setup(mesh) });
            }
        }
    }
}

#[test]
fn strategies_recomputation_and_accumulation_change_nothing() {
    let base = || FsdpOptions::new().with_seed(3);
    let setup = |options: FsdpOptions| Setup { options, steps: 6, ..Setup::mesh([2, 2, 1]) };
    let alone = train(&Setup { data: 1, context: 1, ..setup(base()) });
    for options in variants(&base(), 2) {
        compare(&alone, &setup(options));
    }
    compare(&alone, &Setup { micro_batches: 2, ..setup(base()) });
    let lora = Some(LoraConfig::new(4).with_alpha(8.0));
    let of_one = Setup { lora: lora.clone(), data: 1, context: 1, ..setup(base()) };
    compare(&train(&of_one), &Setup { lora, ..setup(base()) });
}

/// Returns every factoring of eight ranks in those that take different rows, parts of rows, and parts of matrices.
fn meshes_of_eight() -> impl Iterator<Item = [usize; 3]> {
    let sizes = [1, 2, 4, 8];
    let pairs = sizes.into_iter().flat_map(move |data| sizes.map(|context| [data, context]));
    let within = pairs.filter(|[data, context]| data * context <= 8);
    within.map(|[data, context]| [data, context, 8 / data / context])
}

#[test]
fn all_meshes_of_eight_ranks_have_the_results_of_one() {
    let layers = ActivationCheckpointing::Units(unit_types![Block]);
    let options = || FsdpOptions::new().with_seed(3).with_sequence_parallel(true);
    let recomputed = options().with_activation_checkpointing(layers);
    let setup = |mesh| Setup { sight: Sight::Packed, ..Setup::mesh(mesh) };
    let alone = train(&setup([1, 1, 1]));
    for mesh in meshes_of_eight() {
        let ring = recomputed.clone().with_context_exchange(ContextExchange::Ring);
        compare(&alone, &Setup { options: recomputed.clone(), ..setup(mesh) });
        if mesh[1] > 1 {
            compare(&alone, &Setup { options: ring, ..setup(mesh) });
        }
    }
}

/// Accumulation, adapters, a tied head, and bf16.
#[test]
fn options_hold_on_all_meshes_of_eight_ranks() {
    let bf16 = MixedPrecisionPolicy::new().with_param_dtype(burn::tensor::FloatDType::BF16);
    let options = || FsdpOptions::new().with_seed(3);
    let setup = |mesh: [usize; 3]| Setup {
        // A rank of eight has one row.
        micro_batches: if mesh[0] == 8 { 1 } else { 2 },
        lora: Some(LoraConfig::new(4).with_alpha(8.0)),
        tied: true,
        steps: 3,
        ..Setup::mesh(mesh)
    };
    let alone = train(&setup([1, 1, 1]));
    let narrow = |mesh| Setup { options: options().with_mixed_precision(bf16), ..setup(mesh) };
    for mesh in meshes_of_eight() {
        compare(&alone, &setup(mesh));
        let rounded = train(&narrow(mesh));
        for (found, expected) in rounded.losses.iter().zip(&alone.losses) {
            assert!((found / expected - 1.0).abs() < 2e-2, "{mesh:?}: {found}, not {expected}");
        }
    }
}

/// Any mesh continues the run of another one, with the optimizer's state.
#[test]
fn a_checkpoint_of_parts_resumes_on_another_mesh() {
    let home = tempfile::tempdir().unwrap();
    let expected = resumed([1, 1, 1], 0..4, None, None);
    let saved = home.path().join("saved");
    resumed([2, 2, 2], 0..2, None, Some(&saved));
    for mesh in [[1, 1, 1], [1, 4, 1], [2, 1, 4], [1, 2, 2]] {
        let losses = resumed(mesh, 2..4, Some(&saved), None);
        for (found, expected) in losses.iter().zip(&expected[2..]) {
            assert!((found - expected).abs() < 1e-5, "{mesh:?}: {found}, not {expected}");
        }
    }
}

/// The bytes that a rank stores are those of the forecast.
#[test]
fn memory_is_that_of_the_forecast() {
    for [data, context, tensor] in [[2, 1, 1], [1, 2, 2], [2, 2, 2], [1, 1, 8]] {
        let ranks = on_ranks(data * context * tensor, move |worker| {
            let options = FsdpOptions::new().with_seed(1).with_tensor_parallel(tensor);
            let options = options.with_context_parallel(context);
            let net = Net::new(false, worker.device());
            let mesh = Mesh::new(worker.rank(), worker.world());
            let forecast = MemoryForecast::new(&net, mesh, &options)?.with_optimizer(2);
            let mut net = fully_shard(net, worker, options)?;
            let mut optimizer = AdamWConfig::new().init();
            let gradients = gradients(&net, worker, 0)?.1;
            net = optimizer.step(1e-3, net, gradients);
            net.stats().record_optimizer(&optimizer)?;
            let memory = net.stats().memory();
            let found = [memory.shards, memory.replicated, memory.optimizer, memory.gradients];
            let MemoryForecast { shards, replicated, optimizer, gradients, .. } = forecast;
            Ok((found.map(|it| it.peak), [shards, replicated, optimizer, gradients]))
        });
        for (found, expected) in ranks {
            let differs = |(a, b): (&usize, &usize)| a.abs_diff(*b) as f64 > 0.05 * *b as f64;
            let close = !found.iter().zip(&expected).any(differs);
            assert!(close, "{data} x {context} x {tensor}: {found:?}, not {expected:?}");
        }
    }
}

/// A rank that does not come to the exchange of its group is named.
#[test]
fn a_stopped_context_parallel_rank_is_named() {
    let timeout = std::time::Duration::from_secs(1);
    for exchange in [ContextExchange::Gather, ContextExchange::Ring] {
        let options = LaunchOptions::new(4).with_device(Device::flex()).with_timeout(timeout);
        let error = launch(options, move |worker: Worker| {
            let options = FsdpOptions::new().with_seed(1).with_context_parallel(2);
            let options = options.with_context_exchange(exchange);
            let net = fully_shard(Net::new(false, worker.device()), &worker, options)?;
            if worker.rank() == 3 {
                std::thread::sleep(3 * timeout);
            }
            gradients(&net, &worker, 0).map(|_| ())
        });
        let text = error.unwrap_err().to_string();
        assert!(text.contains("rank 3 did not join within"), "{text}");
    }
}

#[test]
fn two_runs_have_the_same_bits() {
    for exchange in [ContextExchange::Gather, ContextExchange::Ring] {
        let options = FsdpOptions::new().with_seed(3).with_context_exchange(exchange);
        let setup = Setup { options, dropout: 0.1, steps: 3, ..Setup::mesh([1, 2, 2]) };
        let [first, second] = [0; 2].map(|_| train(&setup));
        assert_eq!(first.losses, second.losses);
        assert!(first.full == second.full);
    }
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
