//! Parity on Burn's `cpu` device: CubeCL's own runtime, kernels and streams. That runtime takes
//! seconds for a small step, so one set of runs serves every comparison.
#![cfg(feature = "cpu")]

mod support;

use std::sync::Mutex;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{LearningRate, Optimizer, Sgd, SgdConfig, SgdState};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use fsdp_runtime::optim::WholeParam;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, ShardError, kernels};
use support::{Net, Outcome, Run, batch, loss, parity};

/// Three inner units in two buffers, so that a gather overwrites what an earlier unit read.
fn small(device: Device) -> Run {
    let clip = Some(0.5);
    Run { device, blocks: 2, steps: 2, rows_per_rank: 1, dropout: 0.1, clip, ..Run::new(2) }
}

/// The same bits. With autotune, which matrix product runs depends on how long each has taken, so that
/// runs add up in another order.
fn assert_same(one: &Outcome, other: &Outcome) {
    match cfg!(feature = "autotune") {
        true => one.assert_close(other, 1e-6),
        false => one.assert_bitwise(other),
    }
}

#[test]
fn full_shard_equals_no_shard_on_a_cubecl_device() {
    let full = small(Device::cpu()).launch();
    let none = small(Device::cpu()).with_strategy(ShardingStrategy::NoShard).launch();
    assert_same(&full, &none);
    assert!(
        full.norms.iter().any(|&norm| norm > parity::CLIP),
        "clipping took part: {:?}",
        full.norms
    );
    assert!(full.losses.iter().all(|loss| loss.is_finite()));
    assert_same(&small(Device::cpu()).launch(), &full);
}

#[test]
fn the_same_global_batch_gives_the_same_losses_on_any_number_of_cubecl_ranks() {
    let run = Run { blocks: 1, steps: 2, dropout: 0.0, clip: None, ..small(Device::cpu()) };
    parity::worlds_agree(&run, &[2]);
}

/// Shards, gradients and optimizer state rest on the host, where Flex steps them.
#[test]
fn offload_from_a_cubecl_device_changes_no_loss() {
    let plain = small(Device::cpu());
    let expected = plain.launch();
    for policy in [OffloadPolicy::Params { pin_memory: true }, OffloadPolicy::OptimizerOnly] {
        let options = plain.options.clone().with_offload(policy);
        Run { options, ..plain.clone() }.launch().assert_close(&expected, 1e-6);
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Shifted {
    linear: Linear,
    own: Linear,
    table: Tensor<2>,
}

#[fsdp_unit]
impl Shifted {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.own.forward(self.linear.forward(x)) + self.table.clone()
    }
}

/// What is not managed goes to the device that computes: tables, and ignored parameters as leaves.
#[test]
fn a_model_that_is_offloaded_may_be_built_on_the_host() {
    launch(LaunchOptions::new(1).with_device(Device::cpu()), |worker| {
        let flex = Device::flex().autodiff();
        let linear = || LinearConfig::new(4, 4).init(&flex);
        let (own, table) = (linear(), Tensor::ones([2, 4], &flex));
        // One that has its value already.
        let own = Linear { weight: own.weight.map(|it| it.ones_like().require_grad()), ..own };
        let ids = [own.weight.id, own.bias.as_ref().expect("a bias").id];
        let options = FsdpOptions::new().with_offload(OffloadPolicy::Params { pin_memory: false });
        let options = options.with_ignored_params(ids);
        let model = fully_shard(Shifted { linear: linear(), own, table }, &worker, options)?;
        let x = Tensor::ones([2, 4], worker.device());
        let gradients = model.backward(model.forward(x).sum())?;
        let own = gradients.get::<2>(ids[0]).expect("an ignored parameter has a gradient");
        assert_eq!(own.device(), Device::cpu());
        let sharded = gradients.get::<2>(model.linear.weight.id).expect("so has another");
        assert_eq!(sharded.device(), Device::flex());
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// Burn's SGD, which tells the device of all that it steps.
#[derive(Clone)]
struct Told(Sgd);

static STEPPED: Mutex<Vec<Device>> = Mutex::new(Vec::new());

impl Optimizer for Told {
    type State<const D: usize> = SgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<SgdState<D>>,
    ) -> (Tensor<D>, Option<SgdState<D>>) {
        STEPPED.lock().unwrap().extend([tensor.device(), grad.device()]);
        self.0.step(lr, tensor, grad, state)
    }

    fn to_device<const D: usize>(state: SgdState<D>, device: &Device) -> SgdState<D> {
        Sgd::to_device(state, device)
    }
}

/// Whole matrices are stepped where shards rest, and the optimizer's state lies there with them.
#[test]
fn whole_matrices_of_an_offloaded_model_are_stepped_on_the_host() {
    let after = |policy| {
        let options = LaunchOptions::new(2).with_device(Device::cpu());
        let ranks = launch(options, move |worker| {
            let options = FsdpOptions::new().with_seed(7).with_offload(policy);
            let mut net = fully_shard(Net::new(1, 0.0, worker.device()), &worker, options)?;
            let mut sgd = WholeParam::new(Told(SgdConfig::new().build()));
            let rows = worker.rank().index()..worker.rank().index() + 1;
            let (tokens, labels) = batch(0, rows, worker.device());
            let grads = net.backward(loss(net.forward(tokens), labels))?;
            net = sgd.step(1e-1, net, grads)?;
            net.state().full(Recipient::All)
        });
        (ranks.unwrap().swap_remove(0), std::mem::take(&mut *STEPPED.lock().unwrap()))
    };
    let (plain, devices) = after(OffloadPolicy::None);
    assert!(!devices.is_empty() && devices.iter().all(|device| *device == Device::cpu()));
    let (offloaded, devices) = after(OffloadPolicy::Params { pin_memory: true });
    assert!(!devices.is_empty() && devices.iter().all(|device| *device == Device::flex()));
    for (path, expected) in &plain {
        for (a, b) in offloaded[path].iter::<f32>().zip(expected.iter::<f32>()) {
            assert!((a - b).abs() <= 1e-6 * a.abs().max(1.0), "`{path}`: {a} {b}");
        }
    }
}

#[test]
fn sharded_training_equals_plain_burn_on_a_cubecl_device() {
    parity::equals_plain_burn(&Run { dropout: 0.0, clip: None, ..small(Device::cpu()) });
}

/// The inputs of checkpointed units go to the host and come back.
#[test]
fn checkpointed_units_train_alike_on_a_cubecl_device() {
    let plain = small(Device::cpu());
    let options = plain.options.clone().with_activation_checkpointing(ActivationCheckpointing::All);
    let kept = Run { options: options.clone(), ..plain.clone() }.launch();
    let offloaded =
        Run { options: options.with_offload_activations(true), ..plain.clone() }.launch();
    let plain = plain.launch();
    assert_same(&kept, &plain);
    assert_same(&offloaded, &plain);
    assert_eq!(offloaded.counts, plain.counts);
}

/// The input of each of two blocks, in f32: the embeddings', which are integers, stay where they are.
#[test]
fn offloaded_activations_take_no_room_on_the_device() {
    let bytes = 2 * support::LENGTH * support::WIDTH * 4;
    launch(LaunchOptions::new(1).with_device(Device::cpu()), move |worker| {
        for offload in [false, true] {
            let all = ActivationCheckpointing::All;
            let options = FsdpOptions::new().with_activation_checkpointing(all);
            let options = options.with_offload_activations(offload);
            let net = fully_shard(Net::new(2, 0.0, worker.device()), &worker, options)?;
            let (tokens, labels) = batch(0, 0..1, worker.device());
            let loss = loss(net.forward(tokens), labels);
            let held = || (net.stats().memory().activations, net.stats().host_memory().activations);
            let (here, there) = held();
            assert_eq!((here.now, there.now), if offload { (0, bytes) } else { (bytes, 0) });
            net.backward(loss)?;
            let (here, there) = held();
            assert_eq!((here.now, there.now), (0, 0));
            assert_eq!((here.peak, there.peak), if offload { (0, bytes) } else { (bytes, 0) });
        }
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn a_model_in_a_type_that_the_processor_does_not_round_to_is_refused() {
    if kernels::computes(&Device::cpu(), FloatDType::BF16) {
        return eprintln!("skipped: this processor rounds to bf16");
    }
    let options = LaunchOptions::new(1).with_device(Device::cpu());
    let ranks = launch(options, |worker| {
        let device = worker.device();
        let mut net = Net::new(1, 0.0, device);
        let half = |it: Tensor<2>| {
            let data = it.to_data().convert::<burn::tensor::bf16>();
            Tensor::from_data(data, (device, DType::BF16)).require_grad()
        };
        let weight = net.blocks[0].up.weight.clone();
        net.blocks[0].up.weight = weight.map(half);
        Ok::<_, Error>(fully_shard(net, &worker, FsdpOptions::new()).map(drop).unwrap_err())
    });
    let error = ranks.unwrap().remove(0);
    let Error::Shard(ShardError::DtypeNotComputed { path, .. }) = &error else { panic!("{error}") };
    assert_eq!(path, "blocks.0.up.weight");
    assert!(error.to_string().contains("supported: F32, F16"), "{error}");
}

/// Gathered and computed with in half precision.
#[test]
fn half_precision_trains_on_a_cubecl_device() {
    let full = Run { dropout: 0.0, clip: None, ..small(Device::cpu()) };
    // What this processor rounds to.
    let bf16 = kernels::computes(&Device::cpu(), FloatDType::BF16);
    let dtype = if bf16 { FloatDType::BF16 } else { FloatDType::F16 };
    let policy = MixedPrecisionPolicy::new().with_param_dtype(dtype);
    let options =
        full.options.clone().with_mixed_precision(policy.with_output_dtype(FloatDType::F32));
    let half = Run { options, ..full.clone() }.launch();
    let full = full.launch();
    half.assert_close(&full, 2e-2);
    assert_ne!(half.losses, full.losses, "products were in half precision");
    assert_eq!(2 * half.gather_buffer_bytes, full.gather_buffer_bytes, "half the bytes");
}
