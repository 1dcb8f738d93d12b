//! Linear layers of this crate in sharded models: the losses of Burn's layers, on every strategy, with
//! adapters, and from every storage type.

use burn::module::Module;
use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::options::MixedPrecisionPolicy;
use fsdp_runtime::prelude::*;

use crate::support::compare::{Within, assert_close, assert_same_bits};
use crate::support::of_rank_0;

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
                up: Layer,
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
                blocks: Vec<Block>,
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
        for lora in [None, lora()] {
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
            let net = fully_shard(Single::new(worker.device()), worker, options)?;
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
    fn new(device: &Device) -> Self {
        Self { layer: fsdp_runtime::nn::LinearConfig::new(1, 1).with_bias(false).init(device) }
    }
}
