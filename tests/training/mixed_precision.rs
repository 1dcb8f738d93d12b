//! Parameters gathered and computed with in half precision, over shards in f32.

use std::sync::Mutex;

use burn::module::{Module, Param};
use burn::nn::{
    BatchNorm, BatchNormConfig, Linear, LinearConfig, PositionalEncoding, PositionalEncodingConfig,
};
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{FullState, GradScalerConfig};

use crate::support::{self, Block, Net, Run, batch, loss};

const BF16: MixedPrecisionPolicy = MixedPrecisionPolicy::new()
    .with_param_dtype(FloatDType::BF16)
    .with_reduce_dtype(FloatDType::F32)
    .with_output_dtype(FloatDType::F32);

const F16: MixedPrecisionPolicy = MixedPrecisionPolicy::new()
    .with_param_dtype(FloatDType::F16)
    .with_output_dtype(FloatDType::F32);

fn run(world: usize, policy: MixedPrecisionPolicy) -> Run {
    let run = Run { dropout: 0.1, clip: Some(0.5), ..Run::new(world) };
    Run { options: run.options.clone().with_mixed_precision(policy), ..run }
}

#[test]
fn strategies_agree_bit_for_bit_in_half_precision() {
    for policy in [BF16, BF16.with_reduce_dtype(FloatDType::BF16), F16] {
        for world in [1, 2, 3] {
            let full = run(world, policy).launch();
            for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
                run(world, policy).with_strategy(strategy).launch().assert_bitwise(&full);
            }
            assert!(full.losses.iter().all(|loss| loss.is_finite()));
        }
    }
}

#[test]
fn losses_follow_those_of_f32() {
    let full = run(2, MixedPrecisionPolicy::new()).launch();
    for policy in [BF16, F16] {
        let half = run(2, policy).launch();
        assert_ne!(half.losses, full.losses, "half precision took part");
        half.assert_close(&full, 0.02);
    }
}

#[test]
fn half_the_bytes_are_gathered_and_fragments_stay_in_f32() {
    let full = run(2, MixedPrecisionPolicy::new()).launch();
    let half = run(2, BF16).launch();
    assert_eq!(2 * half.gather_buffer_bytes, full.gather_buffer_bytes);
    assert_eq!(2 * half.peak_unsharded_bytes, full.peak_unsharded_bytes);
    assert_eq!(half.sharded_bytes, full.sharded_bytes);
    let counts = fsdp_runtime::Counts { sent_bytes: 2 * half.counts.sent_bytes, ..half.counts };
    assert_eq!(counts, full.counts);
}

#[test]
fn a_part_that_is_kept_after_forward_changes_no_bit() {
    let whole = run(4, BF16).launch();
    let to = ReshardAfterForward::To(2);
    let part = run(4, BF16);
    let part =
        Run { options: part.options.clone().with_reshard_after_forward(to), ..part }.launch();
    part.assert_bitwise(&whole);
}

/// Runs on two ranks and returns what rank 0 found.
fn on_two_ranks<T: Send + 'static>(
    f: impl Fn(&Worker) -> Result<T, fsdp_runtime::Error> + Clone + Send + Sync + 'static,
) -> T {
    let options = LaunchOptions::new(2).with_device(Device::flex());
    launch(options, move |worker| f(&worker)).expect("the run succeeds").swap_remove(0)
}

fn dtypes(state: &FullState) -> Vec<DType> {
    state.values().map(|data| data.dtype()).collect()
}

#[test]
fn gradients_parameters_and_optimizer_state_are_f32() {
    on_two_ranks(|worker| {
        let options = FsdpOptions::new().with_seed(1).with_mixed_precision(BF16);
        let mut net = fully_shard(Net::new(2, 0.0, worker.device()), worker, options)?;
        let (tokens, labels) = batch(0, 0..4, worker.device());
        let logits = net.forward(tokens);
        assert_eq!(logits.dtype(), DType::F32, "the output's type");
        let grads = net.backward(loss(logits, labels))?;
        let weight = &net.blocks[0].up.weight;
        if let Some(gradient) = grads.get::<2>(weight.id) {
            assert_eq!(gradient.dtype(), DType::F32);
        }
        assert!(!grads.is_empty());
        assert_eq!(weight.base().dtype(), DType::F32);
        assert_eq!(weight.val().dtype(), DType::F32, "outside any forward");
        let mut optimizer = AdamWConfig::new().init();
        net = optimizer.step(1e-2, net, grads);
        let state = net.state().full(Recipient::All)?;
        assert!(dtypes(&state).iter().all(|dtype| *dtype == DType::F32));
        Ok(())
    });
}

/// What a unit's forward saw: its input's type and its parameters'.
static SEEN: Mutex<Vec<(&'static str, DType, DType, DType)>> = Mutex::new(Vec::new());

#[derive(Module, Debug)]
#[fsdp_unit]
struct Spy {
    linear: Linear,
}

#[fsdp_unit]
impl Spy {
    fn new(device: &Device) -> Self {
        Self { linear: LinearConfig::new(6, 6).init(device) }
    }

    pub fn forward(&self, name: &'static str, x: Tensor<2>, scale: &Tensor<1>) -> Tensor<2> {
        let (weight, bias) = (self.linear.weight.val(), self.linear.bias.as_ref().map(Param::val));
        let bias = bias.expect("a bias").dtype();
        SEEN.lock().unwrap().push((name, x.dtype(), weight.dtype(), bias));
        self.linear.forward(x.cast(weight.dtype())).mul_scalar(scale.dims()[0] as f32)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Precise {
    linear: Linear,
}

#[fsdp_unit]
impl Precise {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        assert_eq!(x.dtype(), DType::F32, "cast to the type of this unit's parameters");
        self.linear.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Pair {
    first: Spy,
    second: Spy,
    precise: Precise,
}

#[fsdp_unit]
impl Pair {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let scale = Tensor::ones([1], &x.device());
        let x = self.first.forward("first", x, &scale);
        self.precise.forward(self.second.forward("second", x, &scale))
    }
}

#[test]
fn inputs_are_cast_to_each_units_own_type() {
    on_two_ranks(|worker| {
        let device = worker.device();
        let pair = Pair {
            first: Spy::new(device),
            second: Spy::new(device),
            precise: Precise { linear: LinearConfig::new(6, 6).init(device) },
        };
        let options = FsdpOptions::new()
            .with_seed(1)
            .with_mixed_precision(BF16)
            .with_mixed_precision_for(unit_types![Precise], MixedPrecisionPolicy::new());
        let pair = fully_shard(pair, worker, options)?;
        let x = Tensor::<2>::ones([3, 6], device).require_grad();
        let y = pair.forward(x.clone());
        assert_eq!(y.dtype(), DType::F32);
        let grads = pair.backward(y.sum())?;
        assert!(grads.get::<2>(pair.first.linear.weight.id).is_some());
        Ok(())
    });
    let half = DType::BF16;
    for (name, x, weight, bias) in SEEN.lock().unwrap().iter() {
        assert_eq!((*x, *weight, *bias), (half, half, half), "{name}");
    }
    assert_eq!(SEEN.lock().unwrap().len(), 4);
}

#[test]
fn a_unit_of_its_own_precision_has_buffers_of_its_own() {
    let bytes = |options: FsdpOptions| {
        on_two_ranks(move |worker| {
            let net = Net::new(4, 0.0, worker.device());
            Ok(fully_shard(net, worker, options.clone())?.stats().gather_buffer_bytes())
        })
    };
    let half = FsdpOptions::new().with_mixed_precision(BF16);
    let blocks =
        half.clone().with_mixed_precision_for(unit_types![Block], MixedPrecisionPolicy::new());
    assert!(bytes(half.clone()) < bytes(blocks.clone()));
    let full = FsdpOptions::new();
    assert!(bytes(blocks) < bytes(full) + bytes(half));
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Scaled {
    first: Linear,
    second: Linear,
    scale: Param<Tensor<1>>,
}

#[fsdp_unit]
impl Scaled {
    fn new(device: &Device) -> Self {
        let half = |weight: Tensor<2>| weight.cast(DType::BF16);
        let linear = || {
            let linear = LinearConfig::new(6, 6).with_bias(false).init(device);
            Linear { weight: linear.weight.map(half), ..linear }
        };
        let scale = Param::from_tensor(Tensor::ones([6], device));
        Self { first: linear(), second: linear(), scale }
    }

    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        assert_eq!(x.dtype(), DType::BF16);
        let x = self.second.forward(self.first.forward(x));
        x.cast(DType::F32) * self.scale.val().unsqueeze()
    }
}

/// Without a policy: matrices in half precision beside a vector in f32, as a checkpoint may have them.
/// Matrices of several types in one unit are in `mixed_dtypes.rs`.
#[test]
fn parameters_are_computed_with_in_the_type_they_come_in_and_rest_in_f32() {
    on_two_ranks(|worker| {
        let device = worker.device();
        let model = Scaled::new(device);
        let expected = model.first.weight.val().cast(DType::F32).into_data();
        let mut model = fully_shard(model, worker, FsdpOptions::new())?;
        let state = model.state().full(Recipient::All)?;
        assert!(dtypes(&state).iter().all(|dtype| *dtype == DType::F32));
        if worker.rank().index() == 0 {
            assert_eq!(state.get("first.weight"), Some(&expected), "rank 0's values, exactly");
        }
        let grads = model.backward(model.forward(Tensor::ones([2, 6], device)).sum())?;
        model = AdamWConfig::new().init().step(1e-3, model, grads);
        let after = model.state().full(Recipient::All)?;
        assert!(!support::checkpoint::same_bits(&state, &after));
        // Two matrices of 36 elements, each from a multiple of 64 on.
        assert_eq!(model.stats().gather_buffer_bytes(), (64 + 36) * DType::BF16.size());
        Ok(())
    });
}

/// Matrices that stay whole say what inputs become, as those that are gathered do.
#[test]
fn inputs_take_the_type_of_matrices_that_stay_whole() {
    on_two_ranks(|worker| {
        let device = worker.device();
        let model =
            fully_shard(Scaled::new(device), worker, FsdpOptions::new().with_persist_below(100))?;
        assert_eq!(model.stats().gather_buffer_bytes(), 0);
        model.backward(model.forward(Tensor::ones([2, 6], device)).sum())?;
        Ok(())
    });
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Normed {
    linear: Linear,
    norm: BatchNorm,
    position: Option<PositionalEncoding>,
}

#[fsdp_unit]
impl Normed {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.norm.forward(self.linear.forward(x));
        self.position.iter().fold(x, |x, position| position.forward(x))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Outer {
    linear: Linear,
    normed: Normed,
}

#[fsdp_unit]
impl Outer {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.normed.forward(self.linear.forward(x))
    }
}

/// Their f32 tensors do not mix with activations in half precision.
#[test]
fn what_computes_in_f32_must_lie_in_a_unit_that_does() {
    on_two_ranks(|worker| {
        let device = worker.device();
        let model = |position: bool| {
            let linear = || LinearConfig::new(6, 6).init(device);
            let position = position.then(|| PositionalEncodingConfig::new(6).init(device));
            let norm = BatchNormConfig::new(4).init(device);
            Outer { linear: linear(), normed: Normed { linear: linear(), norm, position } }
        };
        let half = FsdpOptions::new().with_mixed_precision(BF16);
        let error = fully_shard(model(false), worker, half.clone()).unwrap_err().to_string();
        for part in ["normed.norm.running_mean", "BF16", "`normed`", "mixed_precision_for"] {
            assert!(error.contains(part), "{error}");
        }
        let f32 = MixedPrecisionPolicy::new();
        let apart = half.with_mixed_precision_for(unit_types![Normed], f32);
        for position in [false, true] {
            let model = fully_shard(model(position), worker, apart.clone())?;
            model.backward(model.forward(Tensor::ones([2, 4, 6], device)).sum())?;
        }
        Ok(())
    });
}

#[test]
fn a_type_that_is_no_unit_of_the_model_cannot_have_a_policy_or_be_wrapped() {
    let error = on_two_ranks(|worker| {
        let shard = |options| {
            let net = Net::new(1, 0.0, worker.device());
            fully_shard(net, worker, options).map(|_| ()).unwrap_err().to_string()
        };
        Ok([
            shard(FsdpOptions::new().with_mixed_precision_for(unit_types![Block, Normed], BF16)),
            shard(FsdpOptions::new().with_wrap(WrapPolicy::TransformerBased(unit_types![Normed]))),
            shard(FsdpOptions::new().with_wrap(WrapPolicy::Named(&["Block", "Normd"]))),
        ])
    });
    for (error, (option, name)) in error.iter().zip([
        ("mixed_precision_for", "`Normed`"),
        ("wrap", "`Normed`"),
        ("wrap", "`Normd`"),
    ]) {
        for part in [option, name, "the units of this model are `Net`, `Embed`, `Block`"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[test]
fn a_type_the_device_cannot_compute_is_refused_when_the_model_is_sharded() {
    let policy = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::F64);
    let error = on_two_ranks(move |worker| {
        let options = FsdpOptions::new().with_mixed_precision(policy);
        Ok(fully_shard(Net::new(1, 0.0, worker.device()), worker, options).err())
    });
    let error = error.expect("f64 is refused").to_string();
    assert!(error.contains("param_dtype") && error.contains("BF16"), "{error}");
}

/// An overflow that only one rank sees skips the step on all of them, and shrinks the scale.
#[test]
fn an_overflow_in_f16_on_one_rank_skips_the_step_on_all() {
    let (scales, skipped, change) = on_two_ranks(|worker| {
        let options = FsdpOptions::new().with_seed(1).with_mixed_precision(F16);
        let mut net = fully_shard(Net::new(2, 0.0, worker.device()), worker, options)?;
        let mut optimizer = SgdConfig::new().init();
        let mut scaler = GradScalerConfig::new().with_init_scale(1024.0).init()?;
        let (mut scales, mut skipped, mut change) = (Vec::new(), 0, Vec::new());
        for step in 0..4 {
            let (tokens, labels) = batch(step, 0..4, worker.device());
            let mut loss = scaler.scale(loss(net.forward(tokens), labels));
            if step == 1 && worker.rank().index() == 1 {
                // Beyond what f16 can hold on its way.
                loss = loss.mul_scalar(1e8);
            }
            let before = net.state().full(Recipient::All)?;
            match scaler.unscale(&net, net.backward(loss)?)? {
                Unscaled::Finite(grads) => net = optimizer.step(0.1, net, grads),
                Unscaled::Overflow => skipped += 1,
            }
            let after = net.state().full(Recipient::All)?;
            change.push(!support::checkpoint::same_bits(&before, &after));
            scales.push(scaler.loss_scale());
        }
        Ok((scales, skipped, change))
    });
    assert_eq!(scales, [1024.0, 512.0, 512.0, 512.0]);
    assert_eq!((skipped, change), (1, vec![true, false, true, true]));
}
