//! The plain module of a sharded model with LoRA adapters.

use burn::module::{Lora, Module};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::compare::{Within, assert_close};
use crate::support::mlp::{Mlp, Sizes, loss};
use crate::support::on_ranks;
use crate::support::transformer::Numbered;

const SIZES: Sizes = Sizes { blocks: 2, width: 64, hidden: 96, outputs: 64 };
const RANK: usize = 4;
const ALPHA: f64 = 8.0;
const PATH: &str = "blocks.1.up.weight";

fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// Returns the base of the adapted matrix, and the base with its adapter added.
fn expected(state: &FullState) -> [Vec<f64>; 2] {
    let matrix = |path: String| Tensor::<2>::from_data(state[&path].clone(), &Device::flex());
    let [base, a, b] = ["", ".lora.a", ".lora.b"].map(|end| matrix(format!("{PATH}{end}")));
    let merged = base.clone() + a.matmul(b) * (ALPHA / RANK as f64);
    [base, merged].map(numbers)
}

/// Trains adapters for two steps, so that both factors have values.
fn trained(worker: &Worker, options: FsdpOptions) -> Result<Fsdp<Mlp>, Error> {
    let device = worker.device();
    let model = SIZES.init(device).map(&mut Numbered(0)).apply_lora(Lora::new(RANK, ALPHA));
    let mut model = fully_shard(model, worker, options)?;
    let mut optimizer = AdamWConfig::new().init();
    for _ in 0..2 {
        let loss = loss(model.forward(Tensor::ones([2, SIZES.width], device) * 0.1));
        let grads = model.backward(loss)?;
        model = optimizer.step(1e-2, model, grads);
    }
    Ok(model)
}

/// Checks that a plain module has the adapters in its weights, and nowhere else.
fn check(plain: &Mlp, [base, merged]: &[Vec<f64>; 2], output: &[f64], what: &str) {
    let weight = &plain.blocks[1].up.weight;
    assert!(weight.adapter().is_none(), "{what}");
    let found = numbers(weight.val());
    assert_close(&found, merged, Within::Absolute(1e-6), what);
    let largest = found.iter().zip(base).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
    assert!(largest > 1e-3, "{what}: the adapter is not zero");
    assert_eq!(plain.num_params(), SIZES.init(&Device::flex()).num_params(), "{what}");
    let x = Tensor::ones([2, SIZES.width], &weight.device()) * 0.1;
    assert_close(&numbers(plain.forward(x)), output, Within::Absolute(1e-5), what);
}

#[test]
fn into_plain_and_gathered_merge_adapters() {
    let codes = StoragePolicy::new().with_frozen(StorageType::NF4);
    for storage in [StoragePolicy::new(), codes, codes.with_trained(StorageType::Bf16)] {
        for world in [1, 2, 3] {
            for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
                on_ranks(world, move |worker| {
                    let options = FsdpOptions::new().with_storage(storage).with_strategy(strategy);
                    let model = trained(worker, options)?;
                    let expected = expected(&model.state().full(Recipient::All)?);
                    let device = worker.device().clone().inner();
                    let x = Tensor::ones([2, SIZES.width], &device) * 0.1;
                    let output = numbers(model.valid().forward(x));
                    let what = format!("{storage:?} {strategy} on {world}");
                    model.gathered(|plain| check(plain, &expected, &output, &what))?;
                    let whole = model.clone().into_plain_on(fsdp_runtime::Rank::ZERO)?;
                    assert_eq!(whole.is_some(), worker.is_rank_zero());
                    whole.iter().for_each(|plain| check(plain, &expected, &output, &what));
                    check(&model.into_plain()?, &expected, &output, &what);
                    Ok(())
                });
            }
        }
    }
}
