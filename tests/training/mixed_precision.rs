//! Mixed precision: parameters are gathered and used in half precision, and their shards stay in
//! f32.

use std::sync::Mutex;

use burn::module::{Module, Param};
use burn::nn::{
    BatchNorm, BatchNormConfig, Linear, LinearConfig, PositionalEncoding, PositionalEncodingConfig,
};
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use fsdp_runtime::optim::GradScalerConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::compare::assert_state_differs;
use crate::support::{Block, Net, Run, batch, loss, of_rank_0, on_ranks};

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
        assert_ne!(half.losses, full.losses, "half precision was used");
        half.assert_close(&full, 0.02);
    }
}

#[test]
fn half_the_bytes_are_gathered_and_shards_stay_in_f32() {
    let full = run(2, MixedPrecisionPolicy::new()).launch();
    let half = run(2, BF16).launch();
    assert_eq!(2 * half.gather_buffer_bytes, full.gather_buffer_bytes);
    assert_eq!(2 * half.peak_unsharded_bytes, full.peak_unsharded_bytes);
    assert_eq!(half.sharded_bytes, full.sharded_bytes);
    let mut counts = half.counts;
    counts.sent_bytes *= 2;
    assert_eq!(counts, full.counts);
}

#[test]
fn resharding_to_a_part_changes_no_bit() {
    let whole = run(4, BF16).launch();
    let to = ReshardAfterForward::To(2);
    let part = run(4, BF16);
    let part =
        Run { options: part.options.clone().with_reshard_after_forward(to), ..part }.launch();
    part.assert_bitwise(&whole);
}

/// Asserts that all parameters of a full state are in f32.
fn assert_in_f32(state: &FullState) {
    assert!(!state.is_empty());
    for (path, data) in state {
        assert_eq!(data.dtype(), DType::F32, "`{path}`");
    }
}

#[test]
fn gradients_parameters_and_optimizer_state_are_f32() {
    let found = on_ranks(2, |worker| {
        let options = FsdpOptions::new().with_seed(1).with_mixed_precision(BF16);
        let mut net = fully_shard(Net::new(2, 0.0, worker.device()), worker, options)?;
        let (tokens, labels) = batch(0, 0..4, worker.device());
        let logits = net.forward(tokens);
        assert_eq!(logits.dtype(), DType::F32, "the output's dtype");
        let grads = net.backward(loss(logits, labels))?;
        let weight = &net.blocks[0].up.weight;
        let gradient = grads.get::<2>(weight.id).map(|gradient| gradient.dtype());
        assert_eq!(weight.base().dtype(), DType::F32);
        assert_eq!(weight.val().dtype(), DType::F32, "outside any forward");
        let mut optimizer = AdamWConfig::new().init();
        net = optimizer.step(1e-2, net, grads);
        assert_in_f32(&net.state().full(Recipient::All)?);
        Ok(gradient)
    });
    // A rank may have no shard of the weight, and then has no gradient of it.
    let found: Vec<DType> = found.into_iter().flatten().collect();
    assert!(!found.is_empty() && found.iter().all(|dtype| *dtype == DType::F32), "{found:?}");
}

/// What each forward of [`Spy`] saw: the dtypes of its input, its matrix and its vector.
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
        assert_eq!(x.dtype(), DType::F32, "cast to the dtype of this unit's parameters");
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
fn inputs_are_cast_to_the_dtype_of_each_unit() {
    of_rank_0(2, |worker| {
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
    let seen = SEEN.lock().unwrap();
    assert_eq!(seen.len(), 4, "two units on two ranks");
    for (name, x, weight, bias) in seen.iter() {
        assert_eq!((*x, *weight, *bias), (half, half, half), "{name}");
    }
}

#[test]
fn a_unit_with_its_own_precision_has_its_own_buffers() {
    let bytes = |options: FsdpOptions| {
        of_rank_0(2, move |worker| {
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

/// No policy, and matrices in half precision beside a vector in f32, as a checkpoint may have them.
/// Matrices of several dtypes in one unit are in `mixed_dtypes.rs`.
#[test]
fn parameters_are_used_in_the_dtype_they_are_built_in_and_their_shards_are_f32() {
    of_rank_0(2, |worker| {
        let device = worker.device();
        let model = Scaled::new(device);
        let expected = model.first.weight.val().cast(DType::F32).into_data();
        let mut model = fully_shard(model, worker, FsdpOptions::new())?;
        let state = model.state().full(Recipient::All)?;
        assert_in_f32(&state);
        if worker.is_rank_zero() {
            assert_eq!(state.get("first.weight"), Some(&expected), "rank 0's values, exactly");
        }
        let grads = model.backward(model.forward(Tensor::ones([2, 6], device)).sum())?;
        model = AdamWConfig::new().init().step(1e-3, model, grads);
        let after = model.state().full(Recipient::All)?;
        assert_state_differs(&state, &after, "a step");
        // Two matrices of 36 elements, each of which starts at a multiple of 64. Each of the two
        // ranks owns a multiple of 8 elements.
        assert_eq!(model.stats().gather_buffer_bytes(), 2 * 56 * DType::BF16.size());
        Ok(())
    });
}

/// Replicated matrices set the dtype of inputs, as sharded ones do.
#[test]
fn inputs_are_cast_to_the_dtype_of_replicated_matrices() {
    of_rank_0(2, |worker| {
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

/// The f32 tensors of these modules do not mix with activations in half precision.
#[test]
fn a_module_that_computes_in_f32_must_be_in_a_unit_of_f32() {
    of_rank_0(2, |worker| {
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
fn a_type_that_is_no_unit_of_the_model_is_refused_in_options() {
    let errors = of_rank_0(2, |worker| {
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
    let expected = [("mixed_precision_for", "`Normed`"), ("wrap", "`Normed`"), ("wrap", "`Normd`")];
    for (error, (option, name)) in errors.iter().zip(expected) {
        for part in [option, name, "the units of this model are `Net`, `Embed`, `Block`"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[test]
fn a_dtype_that_the_device_does_not_support_is_refused_at_construction() {
    let policy = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::F64);
    let error = of_rank_0(2, move |worker| {
        let options = FsdpOptions::new().with_mixed_precision(policy);
        Ok(fully_shard(Net::new(1, 0.0, worker.device()), worker, options).err())
    });
    let error = error.expect("f64 is refused").to_string();
    assert!(error.contains("param_dtype") && error.contains("BF16"), "{error}");
}

/// An overflow that only one rank sees skips the step on all ranks, and lowers the scale.
#[test]
fn an_overflow_in_f16_on_one_rank_skips_the_step_on_all() {
    let (scales, skipped, change) = of_rank_0(2, |worker| {
        let options = FsdpOptions::new().with_seed(1).with_mixed_precision(F16);
        let mut net = fully_shard(Net::new(2, 0.0, worker.device()), worker, options)?;
        let mut optimizer = SgdConfig::new().init();
        let mut scaler = GradScalerConfig::new().with_init_scale(1024.0).init()?;
        let (mut scales, mut skipped, mut change) = (Vec::new(), 0, Vec::new());
        for step in 0..4 {
            let (tokens, labels) = batch(step, 0..4, worker.device());
            let mut loss = scaler.scale(loss(net.forward(tokens), labels));
            if step == 1 && worker.rank().index() == 1 {
                // Gradients of this loss are too large for f16.
                loss = loss.mul_scalar(1e8);
            }
            let before = net.state().full(Recipient::All)?;
            match scaler.unscale(&net, net.backward(loss)?)? {
                Unscaled::Finite(grads) => net = optimizer.step(0.1, net, grads),
                Unscaled::Overflow => skipped += 1,
            }
            let after = net.state().full(Recipient::All)?;
            let changed =
                before.iter().any(|(path, data)| data.as_bytes() != after[path].as_bytes());
            change.push(changed);
            scales.push(scaler.loss_scale());
        }
        Ok((scales, skipped, change))
    });
    assert_eq!(scales, [1024.0, 512.0, 512.0, 512.0]);
    assert_eq!((skipped, change), (1, vec![true, false, true, true]));
}
