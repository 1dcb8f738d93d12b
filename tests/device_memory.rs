//! The memory of a sharded model on a device, by the report of CubeCL's own allocator: it agrees
//! with the runtime's accounting and with the forecast.
//!
//! A binary of its own: the report covers the whole process.
#![cfg(feature = "cpu")]

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use fsdp_runtime::memory::{DeviceUsage, MemoryForecast};
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, Mesh};

const WORLD: usize = 2;
const BLOCKS: usize = 3;

/// No matrix product, of which CubeCL would compile and time many variants.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    scale: Param<Tensor<2>>,
    shift: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Block {
    /// `[1, columns]` to `[1, columns]`, or `[rows, columns]` to `[rows, columns]`.
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let is_row = x.dims()[0] == 1;
        let x = x * self.scale.val() + self.shift.val();
        if is_row { x.sum_dim(0) } else { x }
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Stack {
    blocks: Vec<Block>,
}

#[fsdp_unit]
impl Stack {
    fn forward(&self, x: Tensor<2>) -> Tensor<1> {
        self.blocks.iter().fold(x, |x, block| block.forward(x)).mean()
    }
}

/// A model and its batch.
#[derive(Clone, Copy, Debug)]
struct Job {
    /// Shape of each parameter.
    matrix: [usize; 2],
    /// Shape of a block's input.
    input: [usize; 2],
}

/// A model whose activations are much smaller than its parameters.
const WIDE: Job = Job { matrix: [256, 256], input: [1, 256] };
/// A model whose activations are half as large as its parameters.
const LONG: Job = Job { matrix: [256, 64], input: [256, 64] };

impl Job {
    /// Returns the bytes of a block's gather buffer, of scalars, and of the rounding of sizes.
    ///
    /// With engine `local` a rank holds the shards that others have sent to it until the next
    /// collective. Copies from the host among them are counted by their owners, which have released
    /// them.
    fn tolerance(&self) -> usize {
        2 * self.matrix.iter().product::<usize>() * 4 + 16 * 1024
    }

    /// Returns the bytes of a block's input.
    fn input(&self) -> usize {
        self.input.iter().product::<usize>() * 4
    }

    fn init(&self, device: &Device) -> Stack {
        let param = || Initializer::Zeros.init(self.matrix, device);
        let block = |_| Block { scale: param(), shift: param() };
        Stack { blocks: (0..BLOCKS).map(block).collect() }
    }
}

/// Bytes on the device at one moment.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// By the allocator's report, without what was in use before the model.
    reported: usize,
    /// By the accounting of all ranks together, without gradients that the optimizer has taken.
    counted: usize,
}

/// Memory and results of rank 0.
#[derive(Clone, Debug)]
struct Run {
    /// After sharding, a forward, a backward and an optimizer step.
    samples: [Sample; 4],
    forecast: MemoryForecast,
}

/// Takes a sample while no rank computes.
fn sample(worker: &Worker, before: usize, counted: usize) -> Result<Sample, Error> {
    let mut counted = [counted as f64];
    worker.all_reduce_sum(&mut counted)?;
    worker.device().sync().expect("the device has run its work");
    worker.barrier()?;
    let reported = DeviceUsage::of(worker.device()).expect("a CubeCL device").in_use;
    worker.barrier()?;
    Ok(Sample { reported: reported.saturating_sub(before), counted: counted[0] as usize })
}

/// Trains two steps. The samples are those of the second.
fn train(worker: &Worker, job: Job, options: &FsdpOptions) -> Result<Run, Error> {
    let device = worker.device();
    let input = Tensor::<2>::ones(job.input, device);
    let before = sample(worker, 0, 0)?.reported;
    let module = job.init(device);
    let mesh = Mesh::new(worker.rank(), worker.world());
    let forecast = MemoryForecast::new(&module, mesh, options)?.with_optimizer(2);
    let mut model = fully_shard(module, worker, options.clone())?;
    let mut optimizer = AdamWConfig::new().init();
    let mut samples = [sample(worker, before, model.stats().memory().total.now)?; 4];
    for _ in 0..2 {
        let output = model.forward(input.clone());
        samples[1] = sample(worker, before, model.stats().memory().total.now)?;
        let gradients = model.backward(output)?;
        samples[2] = sample(worker, before, model.stats().memory().total.now)?;
        model = optimizer.step(1e-3, model, gradients);
        model.stats().record_optimizer(&optimizer).expect("a record");
        let memory = model.stats().memory();
        samples[3] = sample(worker, before, memory.total.now - memory.gradients.now)?;
    }
    Ok(Run { samples, forecast })
}

fn run(job: Job, options: FsdpOptions) -> Run {
    let once = || {
        let options = options.clone();
        let device = LaunchOptions::new(WORLD).with_device(Device::cpu());
        let ranks = launch(device, move |worker| train(&worker, job, &options));
        ranks.expect("the run succeeds").swap_remove(0)
    };
    // The first run leaves CubeCL's caches behind.
    once();
    once()
}

/// Asserts that the report and the accounting differ by at most one gather buffer at every moment,
/// that no sample exceeds the forecast, and that a model without gradients takes what the forecast
/// says. `activations` are the bytes of block inputs that a rank keeps on the device.
fn assert_agrees(job: Job, options: FsdpOptions, activations: usize) -> Run {
    let (run, tolerance) = (run(job, options), job.tolerance());
    let forecast = run.forecast.with_activations(activations);
    println!("{:#?}\n{forecast}", run.samples);
    for Sample { reported, counted } in run.samples {
        assert!(reported.abs_diff(counted) <= tolerance, "{reported} bytes, {counted} counted");
        let most = WORLD * forecast.total() + tolerance;
        assert!(reported <= most, "{reported} bytes, forecast {most}");
    }
    let model = WORLD * (forecast.shards + forecast.replicated + forecast.gathered);
    let [sharded, after_forward, ..] = run.samples.map(|sample| sample.reported);
    assert!(sharded.abs_diff(model) <= tolerance, "{sharded} bytes, forecast {model}");
    // The samples are those of the second step.
    let kept = model + WORLD * (forecast.optimizer + activations);
    assert!(after_forward.abs_diff(kept) <= tolerance, "{after_forward} bytes, forecast {kept}");
    run
}

#[test]
fn full_shard() {
    let run = assert_agrees(WIDE, FsdpOptions::new(), 0);
    let step = run.samples[3];
    let forecast = run.forecast;
    let rest = forecast.shards + forecast.replicated + forecast.gathered + forecast.optimizer;
    assert!(
        step.reported.abs_diff(WORLD * rest) <= WIDE.tolerance(),
        "{step:?}, forecast {rest} a rank"
    );
}

#[test]
fn offloaded_parameters() {
    let run = assert_agrees(
        WIDE,
        FsdpOptions::new().with_offload(OffloadPolicy::Params { pin_memory: false }),
        0,
    );
    // Gather buffers are left.
    let rest = run.forecast.gathered + run.forecast.replicated;
    assert!(run.samples[3].reported <= WORLD * rest + WIDE.tolerance(), "{:?}", run.samples);
}

#[test]
fn offloaded_activations() {
    let options = FsdpOptions::new().with_activation_checkpointing(ActivationCheckpointing::All);
    let kept = assert_agrees(LONG, options.clone(), BLOCKS * LONG.input());
    let offloaded = assert_agrees(LONG, options.with_offload_activations(true), 0);
    let freed = kept.samples[1].reported.saturating_sub(offloaded.samples[1].reported);
    let inputs = WORLD * BLOCKS * LONG.input();
    assert!(freed + LONG.tolerance() >= inputs, "{freed} bytes freed, {inputs} of inputs");
}
