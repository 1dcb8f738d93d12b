//! The memory of a sharded model on a device, by the report of CubeCL's own allocator: it agrees with
//! the runtime's accounting and with the forecast.
//!
//! A binary of its own: the report covers the whole process.
#![cfg(feature = "cpu")]

#[path = "support/mlp.rs"]
mod mlp;

use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Tensor};
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{DeviceUsage, Error, Memory, MemoryForecast};
use mlp::{Sizes, loss};

const SIZES: Sizes = Sizes { blocks: 3, width: 256, hidden: 512, outputs: 4 };
const WORLD: usize = 2;
const ROWS: usize = 512;
/// Bytes of a block's gather buffer.
const BUFFER: usize = 2 * SIZES.width * SIZES.hidden * 4;
/// Bytes of a block's input.
const INPUT: usize = ROWS * SIZES.width * 4;

/// Bytes on the device at one moment.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// By the allocator's report, without what was in use before the model.
    reported: usize,
    /// By the accounting of all ranks together.
    counted: usize,
}

/// What rank 0 has seen.
#[derive(Clone, Debug)]
struct Run {
    /// After sharding, a forward, a backward and an optimizer step.
    samples: [Sample; 4],
    /// The accounting at the end.
    memory: Memory,
    forecast: MemoryForecast,
}

/// Takes a sample while no rank computes.
fn sample(worker: &Worker, before: usize, memory: Memory) -> Result<Sample, Error> {
    let mut counted = [memory.total.now as f64];
    worker.all_reduce_sum(&mut counted)?;
    worker.device().sync().expect("the device has run its work");
    worker.barrier()?;
    let reported = DeviceUsage::of(worker.device()).expect("a CubeCL device").in_use;
    worker.barrier()?;
    Ok(Sample { reported: reported.saturating_sub(before), counted: counted[0] as usize })
}

/// Trains two steps. The samples are those of the second.
fn train(worker: &Worker, options: &FsdpOptions) -> Result<Run, Error> {
    let device = worker.device();
    let input = Tensor::<2>::ones([ROWS, SIZES.width], device);
    let before = sample(worker, 0, Memory::default())?.reported;
    let module = SIZES.init(device);
    let mesh = Mesh::new(worker.rank(), worker.world());
    let forecast = MemoryForecast::new(&module, mesh, options)?.with_optimizer(2);
    let mut model = fully_shard(module, worker, options.clone())?;
    let mut optimizer = AdamWConfig::new().init();
    let mut samples = [sample(worker, before, model.stats().memory())?; 4];
    for _ in 0..2 {
        let output = loss(model.forward(input.clone()));
        samples[1] = sample(worker, before, model.stats().memory())?;
        let gradients = model.backward(output)?;
        samples[2] = sample(worker, before, model.stats().memory())?;
        model = optimizer.step(1e-3, model, gradients);
        model.stats().record_optimizer(&optimizer).expect("a record");
        samples[3] = sample(worker, before, model.stats().memory())?;
    }
    Ok(Run { samples, memory: model.stats().memory(), forecast })
}

fn run(options: FsdpOptions) -> Run {
    let once = || {
        let options = options.clone();
        let device = LaunchOptions::new(WORLD).with_device(Device::cpu());
        let ranks = launch(device, move |worker| train(&worker, &options));
        ranks.expect("the run succeeds").swap_remove(0)
    };
    // The first run leaves CubeCL's caches behind.
    once();
    once()
}

/// Asserts that the report and the accounting differ by less than one gather buffer at every moment,
/// and that no sample exceeds the forecast.
fn assert_agrees(options: FsdpOptions) -> Run {
    let run = run(options);
    println!("{run:#?}");
    for Sample { reported, counted } in run.samples {
        assert!(reported.abs_diff(counted) <= BUFFER, "{reported} bytes, {counted} counted");
        let forecast = WORLD * run.forecast.total() + BUFFER;
        assert!(reported <= forecast, "{reported} bytes, forecast {forecast}");
    }
    run
}

#[test]
fn full_shard() {
    let run = assert_agrees(FsdpOptions::new());
    let step = run.samples[3];
    let forecast = run.forecast;
    let rest = forecast.shards + forecast.replicated + forecast.gathered + forecast.optimizer;
    assert!(step.reported.abs_diff(WORLD * rest) <= BUFFER, "{step:?}, forecast {rest} a rank");
}

#[test]
fn offloaded_parameters() {
    let run =
        assert_agrees(FsdpOptions::new().with_offload(OffloadPolicy::Params { pin_memory: false }));
    // Gather buffers are left.
    let rest = run.forecast.gathered + run.forecast.replicated;
    assert!(run.samples[3].reported <= WORLD * rest + BUFFER, "{:?}", run.samples);
}

#[test]
fn offloaded_activations() {
    let options = FsdpOptions::new().with_activation_checkpointing(ActivationCheckpointing::All);
    let kept = run(options.clone());
    let offloaded = assert_agrees(options.with_offload_activations(true));
    let freed = kept.samples[1].reported.saturating_sub(offloaded.samples[1].reported);
    let inputs = WORLD * SIZES.blocks * INPUT;
    assert!(freed + BUFFER >= inputs, "{freed} bytes freed, {inputs} of inputs");
}
