//! A Llama of Burn's own modules trains at 1 to 4 ranks, in f32 and in bf16, recomputed and not.

mod model;

use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use self::model::{Block, Llama, TOKENS, VOCABULARY};
use crate::support::compare::{Within, assert_close, assert_same_bits, assert_same_state};
use crate::support::on_ranks;

const STEPS: usize = 4;

const BF16: MixedPrecisionPolicy = MixedPrecisionPolicy::new()
    .with_param_dtype(FloatDType::BF16)
    .with_reduce_dtype(FloatDType::F32)
    .with_output_dtype(FloatDType::F32);

const PRECISIONS: [MixedPrecisionPolicy; 2] = [MixedPrecisionPolicy::new(), BF16];

const RECOMPUTED: ActivationCheckpointing = ActivationCheckpointing::Units(unit_types![Block]);

/// Returns two rows of tokens, and the token after each.
fn batch(number: usize, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let token = |row: usize, at: usize| ((7 * number + 5 * row + at * at) % VOCABULARY) as i32;
    let rows = |from: usize| -> Vec<i32> {
        (0..2).flat_map(|row| (from..from + TOKENS).map(move |at| token(row, at))).collect()
    };
    let tensor = |from| {
        let flat = Tensor::<1, Int>::from_data(rows(from).as_slice(), device);
        flat.reshape([2, TOKENS])
    };
    (tensor(0), tensor(1))
}

/// What a run ends with on rank 0.
struct Outcome {
    /// Loss of rank 0 in each step.
    losses: Vec<f32>,
    state: FullState,
}

impl Outcome {
    fn assert_same(&self, other: &Self, what: &str) {
        assert_same_bits(&self.losses, &other.losses, format_args!("losses, {what}"));
        assert_same_state(&self.state, &other.state, what);
    }
}

/// Trains on `world` ranks, each with batches of its own.
fn train(world: usize, options: FsdpOptions) -> Outcome {
    let ranks = on_ranks(world, move |worker| {
        let device = worker.device();
        let options = options.clone().with_seed(3);
        let mut model = fully_shard(Llama::new(3, device), worker, options)?;
        let mut optimizer = AdamWConfig::new().init();
        let criterion = CrossEntropyLossConfig::new().init(device);
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let (tokens, next) =
                batch(step * worker.world().size() + worker.rank().index(), device);
            let logits = model.forward(tokens).reshape([-1, VOCABULARY as i32]);
            let loss = criterion.forward(logits, next.reshape([-1]));
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = model.backward(loss)?;
            model = optimizer.step(1e-2, model, gradients);
        }
        assert_eq!(model.rope.freq_complex.dtype(), DType::F32);
        let state = model.state().full(Recipient::All)?;
        Ok(Outcome { losses, state })
    });
    ranks.into_iter().next().expect("one value for each rank")
}

fn options(policy: MixedPrecisionPolicy) -> FsdpOptions {
    FsdpOptions::new().with_mixed_precision(policy)
}

#[test]
fn strategies_and_recomputation_change_no_bit_at_1_to_4_ranks() {
    for policy in PRECISIONS {
        for world in 1..=4 {
            let sharded = train(world, options(policy));
            assert!(sharded.losses.iter().all(|loss| loss.is_finite()), "{:?}", sharded.losses);
            let what = format!("{policy:?} on {world} ranks");
            let replicated = options(policy).with_strategy(ShardingStrategy::NoShard);
            train(world, replicated).assert_same(&sharded, &format!("{what}, NO_SHARD"));
            let recomputed = options(policy).with_activation_checkpointing(RECOMPUTED);
            train(world, recomputed).assert_same(&sharded, &format!("{what}, recomputed"));
        }
    }
}

#[test]
fn bf16_follows_f32() {
    let [full, half] = PRECISIONS.map(|policy| train(2, options(policy)).losses);
    assert_ne!(full, half, "half precision was used");
    assert!(full[STEPS - 1] < full[0], "the loss falls: {full:?}");
    assert_close(&half, &full, Within::Relative(0.02), "losses in bf16");
}

/// No table is saved, and no parameter in another dtype.
#[test]
fn the_state_holds_parameters_in_f32_and_no_table() {
    let state = train(2, options(BF16)).state;
    assert!(!state.is_empty());
    for (path, data) in &state {
        assert_eq!(data.dtype(), DType::F32, "`{path}`");
        assert!(!path.starts_with("rope") && !path.starts_with("mask"), "`{path}`");
    }
}
