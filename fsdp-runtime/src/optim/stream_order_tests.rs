//! Tests that fences order the streams of a rank's own thread, of its communication thread, and of
//! other ranks, in the schedule of a real run.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_macros::fsdp_unit;

use super::AdamWConfig;
use crate::backend::stream_order::{Waits, violations};
use crate::options::{
    GradientAccumulation, MixedPrecisionPolicy, OffloadPolicy, ReshardAfterForward,
};
use crate::{Error, FsdpOptions, LaunchOptions, Worker, fully_shard, launch};

#[derive(Module, Debug)]
#[fsdp_unit(crate = "crate")]
struct Block {
    linear: Linear,
}

#[fsdp_unit(crate = "crate")]
impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.linear.forward(x).tanh()
    }
}

/// Three units in two gather buffers, so that a gather overwrites what an earlier unit read.
#[derive(Module, Debug)]
#[fsdp_unit(root, crate = "crate")]
struct Net {
    blocks: Vec<Block>,
    head: Linear,
}

#[fsdp_unit(crate = "crate")]
impl Net {
    fn forward(&self, x: Tensor<2>) -> Tensor<1> {
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.head.forward(x).powf_scalar(2.0).mean()
    }
}

/// Trains two steps of two micro-batches. Nothing reads a result, which would wait for the device.
fn train(worker: &Worker, options: &FsdpOptions) -> Result<(), Error> {
    let device = worker.device();
    let linear = |n| LinearConfig::new(24, n).init(device);
    let blocks = (0..3).map(|_| Block { linear: linear(24) }).collect();
    let mut net = fully_shard(Net { blocks, head: linear(4) }, worker, options.clone())?;
    let mut optimizer = AdamWConfig::new().init();
    let input = Tensor::<2>::ones([3, 24], device);
    for _ in 0..2 {
        net.accumulate(net.forward(input.clone()))?;
        let gradients = net.backward(net.forward(input.clone()))?;
        // A gather of one parameter, from which no reduction follows before the step.
        drop(net.head.weight.val());
        net = optimizer.step(1e-3, net, gradients);
    }
    Ok(())
}

fn found(missing: Option<Waits>, options: &FsdpOptions) -> Vec<String> {
    violations(missing, || {
        let launched = LaunchOptions::new(2).with_device(Device::cpu());
        let options = options.clone();
        launch(launched, move |worker| train(&worker, &options)).unwrap();
    })
}

/// As [`found`], with NCCL in host memory, whose collectives are on the streams of the communication
/// threads.
#[cfg(feature = "nccl")]
fn found_over_nccl(missing: Option<Waits>, options: &FsdpOptions) -> Vec<String> {
    violations(missing, || {
        let options = options.clone();
        let program = move |worker: &Worker| train(worker, &options);
        crate::launch::two_ranks_on_host(&Device::cpu(), program).unwrap();
    })
}

fn options() -> [FsdpOptions; 5] {
    let plain = FsdpOptions::new();
    [
        plain.clone(),
        // Some processors cannot round to bf16 on CubeCL's CPU device. All can round to f16.
        plain
            .clone()
            .with_mixed_precision(MixedPrecisionPolicy::new().with_param_dtype(FloatDType::F16)),
        plain.clone().with_gradient_accumulation(GradientAccumulation::HoldUnsharded),
        plain.clone().with_reshard_after_forward(ReshardAfterForward::To(1)),
        plain.with_offload(OffloadPolicy::Params { pin_memory: false }),
    ]
}

#[test]
fn fences_order_every_access_of_shards_gradients_and_gather_buffers() {
    for options in options() {
        let found = found(None, &options);
        assert!(found.is_empty(), "{options:?}\n{}", found.join("\n"));
    }
}

#[test]
fn the_record_shows_each_fence_that_is_missing() {
    let waits = |file, on_comm_thread| Waits { file, on_comm_thread };
    let [plain, .., offloaded] = options();
    for (missing, options) in [
        // Shards after an optimizer's step, and gradients, from the rank's own thread.
        (waits("collectives/device_work.rs", true), &plain),
        // The shards of other ranks, and reduced gradients, from the communication thread.
        (waits("collectives/device_work.rs", false), &plain),
        // Shards and gradients, from the communication threads of other ranks.
        (waits("collectives/local.rs", true), &plain),
        // A gather buffer after the last reads, to the communication thread.
        (waits("backend/cube.rs", true), &offloaded),
    ] {
        let found = found(Some(missing), options);
        assert!(!found.is_empty(), "without the waits of {missing:?} nothing is found");
    }
}

#[test]
#[cfg(feature = "nccl")]
fn fences_order_collectives_of_nccl_on_the_streams_of_cubecl() {
    for options in options() {
        let found = found_over_nccl(None, &options);
        assert!(found.is_empty(), "{options:?}\n{}", found.join("\n"));
    }
}

#[test]
#[cfg(feature = "nccl")]
fn the_record_shows_each_fence_that_is_missing_around_nccl() {
    let waits = |file, on_comm_thread| Waits { file, on_comm_thread };
    let [plain, ..] = options();
    for missing in [
        // Shards after an optimizer's step, and gradients, before the collective.
        waits("collectives/device_work.rs", true),
        // Gathered parameters and reduced gradients, after it.
        waits("collectives/device_work.rs", false),
        // A gather buffer after its last reads.
        waits("backend/cube.rs", true),
    ] {
        let found = found_over_nccl(Some(missing), &plain);
        assert!(!found.is_empty(), "without the waits of {missing:?} nothing is found");
    }
}
