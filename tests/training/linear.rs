//! Linear layers of this crate in sharded models: the losses of Burn's layers, on every strategy, with
//! adapters, and from every storage type.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::options::MixedPrecisionPolicy;
use fsdp_runtime::prelude::*;

use crate::support::compare::{Within, assert_close, assert_same_bits};
use crate::support::{of_rank_0, on_ranks};

const WIDTH: usize = 24;
const HIDDEN: usize = 40;
const STEPS: usize = 4;
/// Rows of all ranks.
const ROWS: usize = 12;
const ADAPTERS: usize = 3;

/// Defines the same model of Burn's layers and of this crate's.
macro_rules! model {
    ($name:ident: $linear:path, $config:path, |$up:ident, $x:ident| $activated:expr) => {
        mod $name {
            use burn::module::Module;
            use burn::tensor::{Device, Tensor};
            use fsdp_runtime::lora::LoraConfig;
            use fsdp_runtime::optim::AdamWConfig;
            use fsdp_runtime::prelude::*;
            use $config as Config;
            use $linear as Layer;

            use super::{HIDDEN, STEPS, WIDTH, rows};

            #[derive(Module, Debug)]
            #[fsdp_unit]
            pub struct Block {
                pub up: Layer,
                down: Layer,
            }

            #[fsdp_unit]
            impl Block {
                pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
                    let ($up, $x) = (&self.up, x.clone());
                    let wide = $activated;
                    x + self.down.forward(wide)
                }
            }

            #[derive(Module, Debug)]
            #[fsdp_unit(root)]
            pub struct Net {
                pub blocks: Vec<Block>,
                head: Layer,
            }

            #[fsdp_unit]
            impl Net {
                pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
                    let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
                    self.head.forward(x)
                }
            }

            impl Net {
                pub fn new(device: &Device) -> Self {
                    let layer = |from, to| Config::new(from, to).init(device);
                    let block = |_| Block { up: layer(WIDTH, HIDDEN), down: layer(HIDDEN, WIDTH) };
                    Self { blocks: (0..2).map(block).collect(), head: layer(WIDTH, 3) }
                }
            }

            /// Trains, and returns the mean loss of all rows in each step.
            pub fn losses(
                worker: &Worker,
                options: FsdpOptions,
                lora: Option<LoraConfig>,
            ) -> Result<Vec<f64>, fsdp_runtime::Error> {
                let mut net = Net::new(worker.device());
                if let Some(lora) = lora {
                    net = lora.apply(net)?;
                }
                let mut net = fully_shard(net, worker, options.with_seed(7))?;
                let mut optimizer = AdamWConfig::new().init();
                let mut losses = Vec::new();
                for step in 0..STEPS {
                    let loss = net.forward(rows(worker, step)).powi_scalar(2).mean();
                    let mut value = [f64::from(loss.clone().into_scalar::<f32>())];
                    worker.all_reduce_sum(&mut value)?;
                    losses.push(value[0] / worker.world().size() as f64);
                    let grads = net.backward(loss)?;
                    net = optimizer.step(1e-2, net, grads);
                }
                Ok(losses)
            }
        }
    };
}

model!(burns: burn::nn::Linear, burn::nn::LinearConfig, |up, x| fsdp_runtime::nn::gelu(up.forward(x)));
model!(ours: fsdp_runtime::nn::Linear, fsdp_runtime::nn::LinearConfig, |up, x| {
    up.forward_activated(x, fsdp_runtime::nn::LinearActivation::Gelu)
});

/// Returns for each of two steps the sums of the magnitudes of the factors' gradients, by
/// the paths of the factors.
fn gradient_sizes(
    worker: &Worker,
    options: FsdpOptions,
    lora: &LoraConfig,
) -> Result<Vec<Vec<(String, f64)>>, Error> {
    let net = lora.apply(ours::Net::new(worker.device()))?;
    let mut net = fully_shard(net, worker, options.with_seed(7))?;
    let mut optimizer = AdamWConfig::new().init();
    let mut sizes = Vec::new();
    for step in 0..2 {
        let loss = net.forward(rows(worker, step)).powi_scalar(2).mean();
        let grads = net.backward(loss)?;
        let mut of_step = Vec::new();
        for (path, id) in factors(&*net) {
            // A rank whose shard is empty has no gradient.
            let gradient = grads.get::<2>(id);
            let sum = |gradient: Tensor<2>| gradient.abs().sum().into_scalar::<f32>();
            let mut size = [gradient.map_or(0.0, |gradient| f64::from(sum(gradient)))];
            worker.all_reduce_sum(&mut size)?;
            of_step.push((path, size[0]));
        }
        sizes.push(of_step);
        net = optimizer.step(1e-2, net, grads);
    }
    Ok(sizes)
}

/// Returns the paths and the ids of the factors of a model's adapters.
fn factors(net: &impl Module) -> Vec<(String, ParamId)> {
    #[derive(Default)]
    struct Factors(Vec<String>, Vec<(String, ParamId)>);
    impl ModuleVisitor for Factors {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_string());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.0.iter().any(|name| name == "lora") {
                self.1.push((self.0.join("."), param.id));
            }
        }
    }
    let mut factors = Factors::default();
    net.visit(&mut factors);
    factors.1
}

/// Returns this rank's rows of a step.
fn rows(worker: &Worker, step: usize) -> Tensor<2> {
    let (rank, of_rank) = (worker.rank().index(), ROWS / worker.world().size());
    let element = |at: usize| ((at * 7919 + step * 104_729) % 257) as f32 / 128.0 - 1.0;
    let all: Vec<f32> = (0..ROWS * WIDTH).map(element).collect();
    let own = &all[rank * of_rank * WIDTH..][..of_rank * WIDTH];
    Tensor::<1>::from_data(own, worker.device()).reshape([of_rank, WIDTH])
}

fn lora() -> Option<LoraConfig> {
    Some(LoraConfig::new(ADAPTERS).with_alpha(6.0))
}

/// Returns the losses with this crate's layers.
fn losses(world: usize, options: &FsdpOptions, lora: Option<LoraConfig>) -> Vec<f64> {
    let options = options.clone();
    of_rank_0(world, move |worker| ours::losses(worker, options.clone(), lora.clone()))
}

/// Returns the losses with Burn's layers.
fn losses_of_burn(world: usize, options: &FsdpOptions, lora: Option<LoraConfig>) -> Vec<f64> {
    let options = options.clone();
    of_rank_0(world, move |worker| burns::losses(worker, options.clone(), lora.clone()))
}

fn storages() -> [StoragePolicy; 4] {
    let frozen = |storage| StoragePolicy::new().with_frozen(storage);
    [
        StoragePolicy::new(),
        frozen(StorageType::Bf16),
        frozen(StorageType::INT8),
        frozen(StorageType::NF4),
    ]
}

#[test]
fn losses_are_those_of_burns_layers() {
    for world in [1, 3] {
        let options = FsdpOptions::new();
        let expected = losses_of_burn(world, &options, None);
        assert!(expected[STEPS - 1] < expected[0], "training has an effect: {expected:?}");
        let found = losses(world, &options, None);
        assert_close(&found, &expected, Within::Relative(1e-5), format!("world {world}"));
    }
}

#[test]
fn adapters_have_the_losses_of_burns_layers_from_every_storage_type() {
    for world in [1, 2] {
        for storage in storages() {
            let options = FsdpOptions::new().with_storage(storage);
            let expected = losses_of_burn(world, &options, lora());
            assert!(expected[STEPS - 1] < expected[0], "training has an effect: {expected:?}");
            let found = losses(world, &options, lora());
            let what = format!("{storage:?} on {world} ranks");
            assert_close(&found, &expected, Within::Relative(1e-5), what);
        }
    }
}

#[test]
fn strategies_and_recomputation_agree_bit_for_bit() {
    let recomputed = || {
        let units = ActivationCheckpointing::Units(unit_types![ours::Block]);
        FsdpOptions::new().with_activation_checkpointing(units)
    };
    for storage in storages() {
        let dropped = lora().map(|lora| lora.with_dropout(0.3).with_rslora(true));
        for lora in [None, lora(), dropped] {
            let with =
                |options: FsdpOptions| losses(2, &options.with_storage(storage), lora.clone());
            let full = with(FsdpOptions::new());
            for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
                let found = with(FsdpOptions::new().with_strategy(strategy));
                assert_same_bits(&found, &full, format!("{strategy}, {storage:?}, {lora:?}"));
            }
            let offload = OffloadPolicy::Params { pin_memory: false };
            let found = with(FsdpOptions::new().with_offload(offload));
            assert_same_bits(&found, &full, format!("offload, {storage:?}, {lora:?}"));
            let what = format!("recomputed, {storage:?}, {lora:?}");
            assert_same_bits(&with(recomputed()), &full, what);
        }
    }
}

#[test]
fn dropout_of_adapters_has_an_effect_in_training_only() {
    let with = |prob| lora().map(|lora| lora.with_dropout(prob));
    let options = FsdpOptions::new();
    let plain = losses(2, &options, lora());
    assert_same_bits(&losses(2, &options, with(0.0)), &plain, "a probability of 0");
    let dropped = losses(2, &options, with(0.5));
    assert_eq!(dropped[0], plain[0], "the second factor is zero at first");
    assert!(dropped[2..].iter().zip(&plain[2..]).all(|(a, b)| a != b), "{dropped:?} {plain:?}");
    assert_same_bits(&losses(2, &options, with(0.5)), &dropped, "a second run");
    on_ranks(2, |worker| {
        let net = lora().unwrap().with_dropout(0.5).apply(Single::new(WIDTH, worker.device()))?;
        let mut net = fully_shard(net, worker, FsdpOptions::new().with_seed(7))?;
        let mut optimizer = AdamWConfig::new().init();
        for step in 0..2 {
            let loss = net.forward(rows(worker, step)).powi_scalar(2).mean();
            let grads = net.backward(loss)?;
            net = optimizer.step(1e-1, net, grads);
        }
        let x = rows(worker, 9);
        let elements = |tensor: Tensor<2>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
        let valid = net.valid();
        let expected = elements(valid.forward(x.clone().inner()));
        assert_same_bits(&elements(valid.forward(x.clone().inner())), &expected, "evaluation");
        let plain = net.gathered(|net| elements(net.clone().valid().forward(x.clone().inner())))?;
        assert_close(&plain, &expected, Within::Absolute(1e-5), "the merged model");
        const CALLS: usize = 1000;
        let (mut mean, mut furthest) = (vec![0.0; expected.len()], 0.0f32);
        for _ in 0..CALLS {
            let output = net.forward(x.clone());
            net.backward(output.clone().sum())?;
            for ((mean, x), expected) in mean.iter_mut().zip(elements(output)).zip(&expected) {
                *mean += x / CALLS as f32;
                furthest = furthest.max((x - expected).abs());
            }
        }
        assert!(furthest > 0.3, "masks have an effect: {furthest}");
        // The standard deviation of a mean of 1,000 is a 32nd of that of one.
        assert_close(&mean, &expected, Within::Absolute(f64::from(furthest) / 20.0), "the mean");
        Ok(())
    });
}

/// The second factor of every adapter has a gradient in the first step, and the first factor from the
/// second step on, as the second is zero before.
#[test]
fn every_adapter_has_gradients() {
    let config = || {
        lora()
            .unwrap()
            .with_rslora(true)
            .with_dropout(0.1)
            .with_rank_pattern([("up", 5), ("blocks.1.down", 1)])
            .with_alpha_pattern([("head", 1.0)])
    };
    for storage in storages() {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
            let options = FsdpOptions::new().with_storage(storage).with_strategy(strategy);
            let sizes =
                of_rank_0(2, move |worker| gradient_sizes(worker, options.clone(), &config()));
            assert_eq!(sizes.len(), 2);
            for (step, sizes) in sizes.iter().enumerate() {
                assert_eq!(sizes.len(), 2 * 5, "two factors of each layer");
                for (path, size) in sizes {
                    let expected = step > 0 || path.ends_with(".b");
                    assert_eq!(*size > 0.0, expected, "step {step}, {path}: {size}, {storage:?}");
                }
            }
        }
    }
}

#[test]
fn worlds_agree() {
    for lora in [None, lora()] {
        let one = losses(1, &FsdpOptions::new(), lora.clone());
        for world in [2, 3, 4] {
            let found = losses(world, &FsdpOptions::new(), lora.clone());
            assert_close(&found, &one, Within::Relative(1e-5), format!("world {world}, {lora:?}"));
        }
    }
}

/// The sum of the gradients of the rows is 1 + 2⁻⁹, which bf16 rounds to 1.
#[test]
fn gradients_are_not_rounded_to_the_dtype_of_the_parameters_before_the_reduction() {
    let policy = MixedPrecisionPolicy::new()
        .with_param_dtype(FloatDType::BF16)
        .with_reduce_dtype(FloatDType::F32);
    for world in [1, 2] {
        let gradient = of_rank_0(world, move |worker| {
            let options = FsdpOptions::new()
                .with_strategy(ShardingStrategy::NoShard)
                .with_mixed_precision(policy);
            let net = fully_shard(Single::new(1, worker.device()), worker, options)?;
            let rows = [1.0, 2.0f32.powi(-9)];
            let rows = Tensor::<1>::from_data(rows, worker.device()).reshape([2, 1]);
            let grads = net.backward(net.forward(rows).sum())?;
            let gradient = grads.get::<2>(net.layer.weight.id).expect("a gradient of the weight");
            Ok(gradient.into_data().iter::<f32>().collect::<Vec<_>>())
        });
        assert_eq!(gradient, [1.0 + 2.0f32.powi(-9)], "world {world}");
    }
}

/// A layer of one weight.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Single {
    layer: fsdp_runtime::nn::Linear,
}

#[fsdp_unit]
impl Single {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layer.forward(x)
    }
}

impl Single {
    fn new(width: usize, device: &Device) -> Self {
        Self {
            layer: fsdp_runtime::nn::LinearConfig::new(width, width).with_bias(false).init(device),
        }
    }
}
