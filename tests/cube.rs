//! Parity on Burn's `cpu` device: CubeCL's runtime, kernels and streams. A small step takes seconds
//! there, so that models are small and runs are few.
#![cfg(feature = "cpu")]

mod support;

use std::sync::Mutex;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{LearningRate, Optimizer, Sgd, SgdConfig, SgdState};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use fsdp_runtime::errors::ShardError;
use fsdp_runtime::memory::DeviceUsage;
use fsdp_runtime::model::Counts;
use fsdp_runtime::optim::WholeParam;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;
use fsdp_runtime::{Error, kernels};
use support::compare::{Parameters, Within, assert_parameters_close};
use support::{Net, Outcome, Run, batch, loss, parity};

/// Three units in two gather buffers, so that a gather overwrites the memory that an earlier unit
/// read.
fn small(device: Device) -> Run {
    let clip = Some(0.5);
    Run { device, blocks: 2, steps: 2, rows_per_rank: 1, dropout: 0.1, clip, ..Run::new(2) }
}

/// Asserts the same bits, or nearly the same losses with autotune: it chooses matrix products by
/// their time, and so the order of sums differs from run to run.
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
    parity::assert_clipped(&full, parity::CLIP);
    assert_same(&small(Device::cpu()).launch(), &full);
}

#[test]
fn the_same_global_batch_gives_the_same_losses_on_any_number_of_cubecl_ranks() {
    let run = Run { blocks: 1, steps: 2, dropout: 0.0, clip: None, ..small(Device::cpu()) };
    parity::worlds_agree(&run, &[2]);
}

#[test]
fn a_base_of_codes_trains_on_a_cubecl_device() {
    for storage in [StorageType::Bf16, StorageType::INT8, StorageType::NF4] {
        let policy = StoragePolicy::new().with_frozen(storage);
        let plain = small(Device::cpu());
        let full =
            Run { frozen: true, options: plain.options.clone().with_storage(policy), ..plain };
        let outcome = full.launch();
        assert_same(&outcome, &full.clone().with_strategy(ShardingStrategy::NoShard).launch());
        let offload = OffloadPolicy::Params { pin_memory: true };
        let options = full.options.clone().with_offload(offload);
        Run { options, ..full.clone() }.launch().assert_close(&outcome, 1e-6);
    }
}

/// Parameters in bf16, and all-gathers and reductions in 8 bits.
#[test]
fn trained_parameters_in_bf16_and_codes_train_on_a_cubecl_device() {
    let half = StoragePolicy::new().with_trained(StorageType::Bf16);
    let plain = small(Device::cpu());
    let options = |quantized: Option<usize>| {
        let options = plain.options.clone().with_storage(half);
        options.with_quantized_gathers(quantized).with_quantized_reductions(quantized)
    };
    for quantized in [None, Some(64)] {
        let full = Run { options: options(quantized), ..plain.clone() };
        let outcome = full.launch();
        assert_same(&outcome, &full.clone().with_strategy(ShardingStrategy::ShardGradOp).launch());
        // Steps on the host round as on the device, but for the last bits of what they round.
        let offload = OffloadPolicy::Params { pin_memory: true };
        let options = full.options.clone().with_offload(offload);
        Run { options, ..full.clone() }.launch().assert_close(&outcome, 1e-3);
    }
    let full = Run { options: options(None), ..plain.clone() };
    let none = full.clone().with_strategy(ShardingStrategy::NoShard).launch();
    assert_same(&full.launch(), &none);
}

/// Shards, gradients and optimizer state are in host memory, where Flex computes the optimizer's
/// step.
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

/// Tensors that FSDP does not manage are moved to the compute device: tables, and ignored
/// parameters as leaves.
#[test]
fn a_model_that_is_offloaded_may_be_built_on_the_host() {
    launch(LaunchOptions::new(1).with_device(Device::cpu()), |worker| {
        let flex = Device::flex().autodiff();
        let linear = || LinearConfig::new(4, 4).init(&flex);
        let (own, table) = (linear(), Tensor::ones([2, 4], &flex));
        // A parameter that is already initialised.
        let own = Linear { weight: own.weight.map(|it| it.ones_like().require_grad()), ..own };
        let ids = [own.weight.id, own.bias.as_ref().expect("a bias").id];
        let options = FsdpOptions::new().with_offload(OffloadPolicy::Params { pin_memory: false });
        let options = options.with_ignored_params(ids);
        let model = fully_shard(Shifted { linear: linear(), own, table }, &worker, options)?;
        let x = Tensor::ones([2, 4], worker.device());
        let gradients = model.backward(model.forward(x).sum())?;
        let own = gradients.get::<2>(ids[0]).expect("an ignored parameter has a gradient");
        assert_eq!(own.device(), Device::cpu());
        let sharded =
            gradients.get::<2>(model.linear.weight.id).expect("a sharded parameter has a gradient");
        assert_eq!(sharded.device(), Device::flex());
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// Burn's SGD, which records the devices of the tensors that it steps.
#[derive(Clone)]
struct Recording(Sgd);

static STEPPED: Mutex<Vec<Device>> = Mutex::new(Vec::new());

impl Optimizer for Recording {
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

/// Whole matrices are stepped on the storage device of the shards, and the optimizer's state is
/// there too.
#[test]
fn whole_matrices_of_an_offloaded_model_are_stepped_on_the_host() {
    let after = |policy| {
        let options = LaunchOptions::new(2).with_device(Device::cpu());
        let ranks = launch(options, move |worker| {
            let options = FsdpOptions::new().with_seed(7).with_offload(policy);
            let mut net = fully_shard(Net::new(1, 0.0, worker.device()), &worker, options)?;
            let mut sgd = WholeParam::new(Recording(SgdConfig::new().build()));
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
    let elements = |state: FullState| -> Parameters {
        state.into_iter().map(|(path, data)| (path, data.iter().collect())).collect()
    };
    let (offloaded, plain) = (elements(offloaded), elements(plain));
    assert_parameters_close(&offloaded, &plain, Within::Scaled(1e-6), "offloaded");
}

#[test]
fn sharded_training_equals_plain_burn_on_a_cubecl_device() {
    parity::equals_plain_burn(&Run { dropout: 0.0, clip: None, ..small(Device::cpu()) });
}

/// The inputs of recomputed units are copied to the host and back.
#[test]
fn checkpointing_changes_no_bit_on_a_cubecl_device() {
    let plain = small(Device::cpu());
    let options = plain.options.clone().with_activation_checkpointing(ActivationCheckpointing::All);
    let kept = Run { options: options.clone(), ..plain.clone() }.launch();
    let offloaded =
        Run { options: options.with_offload_activations(true), ..plain.clone() }.launch();
    let plain = plain.launch();
    assert_same(&kept, &plain);
    assert_same(&offloaded, &plain);
    // Offload takes the inputs out of the queue of Burn's fusion.
    let collectives = |mut counts: Counts| {
        (counts.drains, counts.lowerings) = (0, 0);
        counts
    };
    assert_eq!(collectives(offloaded.counts), collectives(plain.counts));
}

/// The inputs of two blocks are offloaded. The inputs of the embeddings are integers, which are
/// not.
#[test]
fn offloaded_activations_take_no_memory_on_the_device() {
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
fn a_model_in_a_dtype_that_the_processor_does_not_support_is_refused() {
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

/// Parameters are gathered and used in half precision.
#[test]
fn half_precision_trains_on_a_cubecl_device() {
    let full = Run { dropout: 0.0, clip: None, ..small(Device::cpu()) };
    // The dtype that this processor supports.
    let bf16 = kernels::computes(&Device::cpu(), FloatDType::BF16);
    let dtype = if bf16 { FloatDType::BF16 } else { FloatDType::F16 };
    let policy = MixedPrecisionPolicy::new().with_param_dtype(dtype);
    let options =
        full.options.clone().with_mixed_precision(policy.with_output_dtype(FloatDType::F32));
    let half = Run { options, ..full.clone() }.launch();
    let full = full.launch();
    half.assert_close(&full, 2e-2);
    assert_ne!(half.losses, full.losses, "half precision was used");
    assert_eq!(2 * half.gather_buffer_bytes, full.gather_buffer_bytes, "half the bytes");
}

/// Twenty steps on the device are those on Flex, so that they are equal with Burn's fusion and
/// without.
#[test]
fn twenty_steps_on_a_cubecl_device_are_those_on_flex() {
    let run = |device| Run {
        device,
        steps: 20,
        numbered: true,
        learning_rate: 1e-3,
        clip: Some(0.3),
        optimizer: || fsdp_runtime::optim::AdamWConfig::new().init(),
        ..small(Device::flex())
    };
    let full = run(Device::cpu()).launch();
    full.assert_close(&run(Device::flex()).launch(), 5e-6);
    let none = run(Device::cpu()).with_strategy(ShardingStrategy::NoShard).launch();
    full.assert_close(&none, 1e-6);
}

/// Under Burn's fusion the rank's thread launches what it has recorded at the units' boundaries
/// only.
#[test]
fn drains_and_lowerings_are_few() {
    const UNITS: usize = 4;
    let counts = |steps| Run { steps, ..small(Device::cpu()) }.launch().counts;
    let (one, three) = (counts(1), counts(3));
    let drains = (three.drains - one.drains) as f64 / (2 * UNITS) as f64;
    let lowerings = (three.lowerings - one.lowerings) as f64 / (2 * UNITS) as f64;
    println!("a step and unit: {drains} drains, {lowerings} of them lowerings");
    if !cfg!(feature = "fusion") {
        return assert_eq!((drains, lowerings), (0.0, 0.0));
    }
    assert!(drains <= 6.0 && lowerings <= 4.0, "{drains} drains, {lowerings} lowerings");
    assert!(lowerings > 0.0);
}

/// The allocator's own report, not the runtime's accounting, for two ranks that share the device. (A
/// single rank without offload has no gather buffers, so that its two numbers differ by less.)
#[test]
fn an_offloaded_model_takes_no_memory_on_the_device() {
    let in_use = |policy| {
        let options = LaunchOptions::new(2).with_device(Device::cpu());
        let ranks = launch(options, move |worker| {
            let device = worker.device().clone();
            // No rank computes while one of them asks.
            let now = || {
                device.sync().expect("the device is there");
                worker.barrier()?;
                let in_use = DeviceUsage::of(&device).expect("a CubeCL device").in_use;
                worker.barrier()?;
                Ok::<_, Error>(in_use)
            };
            let before = now()?;
            let options = FsdpOptions::new().with_offload(policy);
            let linear = LinearConfig::new(512, 512).with_bias(false).init(worker.device());
            let own = LinearConfig::new(512, 512).with_bias(false).init(worker.device());
            let table = Tensor::zeros([1, 512], worker.device());
            let model = fully_shard(Shifted { linear, own, table }, &worker, options)?;
            let x = Tensor::ones([1, 512], worker.device());
            model.backward(model.forward(x).sum())?;
            let after = now()?;
            drop(model);
            println!("{policy:?}: {before} bytes before, {after} with the model");
            Ok::<_, Error>(after)
        });
        ranks.unwrap().remove(0)
    };
    let offload = OffloadPolicy::Params { pin_memory: false };
    // The first runs leave caches behind.
    in_use(OffloadPolicy::None);
    in_use(offload);
    let (plain, offloaded) = (in_use(OffloadPolicy::None), in_use(offload));
    let params = 2 * 512 * 512 * 4;
    assert!(plain >= offloaded + params, "{plain} and {offloaded} bytes, {params} of parameters");
}

/// Queues, tensors and buffers of a launch end with it.
#[test]
fn launches_leave_no_memory_in_use() {
    let run = Run { blocks: 1, steps: 1, ..small(Device::cpu()) };
    let in_use = || {
        Device::cpu().sync().expect("the device is there");
        DeviceUsage::of(&Device::cpu()).expect("a CubeCL device").in_use
    };
    run.launch();
    run.launch();
    let first = in_use();
    for _ in 0..20 {
        run.launch();
    }
    // The threads of a launch and CubeCL's own release the last handles a moment later.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while in_use() > first && std::time::Instant::now() < deadline {
        std::thread::yield_now();
    }
    let last = in_use();
    assert!(last <= first, "{first} bytes before 20 launches, {last} after");
}

/// SGD in a parameter's own memory, after work that takes the device a while.
#[derive(Clone)]
struct Slow(fsdp_runtime::optim::Sgd);

impl Optimizer for Slow {
    type State<const D: usize> = <fsdp_runtime::optim::Sgd as Optimizer>::State<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let ones = Tensor::<2>::ones([256, 256], &tensor.device());
        let zero = (0..4).fold(ones.clone(), |product, _| product.matmul(ones.clone()) / 256.0);
        let zero = (zero.slice([0..1, 0..1]) - 1.0).reshape([1; D]);
        self.0.step(lr, tensor, grad + zero, state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        fsdp_runtime::optim::Sgd::to_device(state, device)
    }
}

/// A gather on one rank's stream reads what a late update on another rank's stream has written.
#[test]
fn a_gather_comes_after_a_slow_update() {
    let fast = Run {
        steps: 3,
        learning_rate: 0.1,
        clip: None,
        optimizer: || fsdp_runtime::optim::SgdConfig::new().init(),
        ..small(Device::cpu())
    };
    let slow = Run {
        optimizer: || Slow(fsdp_runtime::optim::SgdConfig::new().build()).into(),
        ..fast.clone()
    };
    let (fast, slow) = (fast.launch(), slow.launch());
    slow.assert_close(&fast, 1e-6);
}
