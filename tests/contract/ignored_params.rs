//! `test_fully_shard_ignore_params`: ignored parameters are neither sharded nor reduced.

use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use fsdp_runtime::errors::ShardError;
use fsdp_runtime::prelude::*;

use super::mlp::{Mlp, WIDTH, input, loss, on_ranks};

#[test]
fn ignored_params_are_not_sharded_and_keep_each_ranks_gradient() {
    let ranks = on_ranks(2, |worker| {
        let model = Mlp::new(2, worker.device());
        let id = model.blocks[1].up.weight.id;
        let whole = model.blocks[1].up.weight.dims();
        let options = FsdpOptions::new().with_seed(3).with_ignored_params([id]);
        let mut model = fully_shard(model, worker, options)?;
        assert_eq!(model.blocks[1].up.weight.base().dims(), whole);
        // The full state holds them, as PyTorch's does.
        let state = model.state().full(Recipient::All)?;
        assert_eq!(state["blocks.1.up.weight"].shape().as_slice(), whole);
        let x = input(worker.rank().index(), 0, 4, worker.device());
        let gradients = model.backward(loss(model.forward(x)))?;
        let own = gradients.get::<2>(id).expect("its own gradient");
        assert_eq!(own.dims(), whole);
        let before = model.blocks[1].up.weight.val().into_data();
        model = SgdConfig::new().init().step(0.1, model, gradients);
        assert_ne!(before.as_bytes(), model.blocks[1].up.weight.val().into_data().as_bytes());
        Ok(own.into_data().iter::<f32>().map(f32::to_bits).collect::<Vec<_>>())
    });
    assert_ne!(ranks[0], ranks[1], "each rank has its own gradient");
}

#[test]
fn an_id_of_no_parameter_is_an_error() {
    let errors = on_ranks(2, |worker| {
        let options = FsdpOptions::new().with_ignored_params([ParamId::new()]);
        let model = Mlp::new(1, worker.device());
        Ok(fully_shard(model, worker, options).map(|_| ()).unwrap_err().to_string())
    });
    assert!(errors.iter().all(|error| error.contains("ignored_params")), "{errors:?}");
}

/// Each rank has its own gradient of an ignored parameter, but all ranks must find the same norm.
#[test]
fn clipping_neither_counts_nor_scales_ignored_gradients() {
    let [without, with] = [1.0, 1e3].map(|factor| {
        on_ranks(2, move |worker| {
            let mut model = Mlp::new(2, worker.device());
            // Ranks draw ignored parameters in no fixed order, so that its values are set here.
            let weight = model.blocks[1].up.weight.clone();
            model.blocks[1].up.weight = weight.map(|it| it.full_like(0.1).require_grad());
            let id = model.blocks[1].up.weight.id;
            let options = FsdpOptions::new().with_seed(3).with_ignored_params([id]);
            let model = fully_shard(model, worker, options)?;
            let x = input(worker.rank().index(), 0, 4, worker.device());
            let mut gradients = model.backward(loss(model.forward(x)))?;
            let own = gradients.remove::<2>(id).expect("its own gradient") * factor;
            gradients.register(id, own.clone());
            let norm = model.clip_grad_norm(&mut gradients, 1e-3)?;
            let after = gradients.get::<2>(id).expect("still there");
            assert_eq!(own.into_data(), after.into_data());
            // The other gradients have the norm that was asked for.
            let after = model.clip_grad_norm(&mut gradients, f64::INFINITY)?;
            assert!((after / 1e-3 - 1.0).abs() < 1e-2, "{after}");
            Ok(norm.to_bits())
        })
    });
    assert_eq!(without, with);
    assert_eq!(with[0], with[1]);
}

#[test]
fn micro_batches_add_up_ignored_gradients() {
    on_ranks(2, |worker| {
        let model = Mlp::new(2, worker.device());
        let id = model.blocks[1].up.weight.id;
        let options = FsdpOptions::new().with_seed(3).with_ignored_params([id]);
        let model = fully_shard(model, worker, options)?;
        let batch =
            |step| loss(model.forward(input(worker.rank().index(), step, 4, worker.device())));
        let of =
            |gradients: burn::optim::GradientsParams| gradients.get::<2>(id).expect("a gradient");
        let (first, second) = (of(model.backward(batch(0))?), of(model.backward(batch(1))?));
        let expected = first + second.clone();
        model.accumulate(batch(0))?;
        let sum = of(model.backward(batch(1))?);
        assert_eq!(sum.into_data(), expected.into_data());
        let alone = of(model.backward(batch(1))?);
        assert_eq!(alone.into_data(), second.into_data(), "the gradients before it are gone");
        Ok(())
    });
}

#[derive(Module, Debug)]
#[fsdp_unit(root, tie("first" = "second"), tie("third" = "fourth"))]
struct Tied {
    first: Linear,
    second: Param<Tensor<2>>,
    third: Option<Linear>,
    fourth: Linear,
}

#[fsdp_unit]
impl Tied {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.first.forward(x).matmul(self.second.val())
    }
}

impl Tied {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device);
        let (first, third, fourth) = (linear(), Some(linear()), linear());
        Self { second: first.weight.clone(), first, third, fourth }
    }
}

#[test]
fn a_tied_weight_cannot_be_ignored() {
    on_ranks(1, |worker| {
        let refused = |model: Tied, id| {
            let options = FsdpOptions::new().with_ignored_params([id]);
            fully_shard(model, worker, options).map(|_| ()).unwrap_err()
        };
        let tie = |ignored: &str, other: &str| {
            let (ignored, other) = (ignored.to_string(), other.to_string());
            fsdp_runtime::Error::from(ShardError::IgnoredTie { ignored, other })
        };
        // Clones share one id.
        let clones = Tied::new(worker.device());
        let id = clones.second.id;
        assert_eq!(refused(clones, id), tie("second", "first.weight"));
        let apart = || {
            let second = LinearConfig::new(WIDTH, WIDTH).init(worker.device()).weight;
            Tied { second, ..Tied::new(worker.device()) }
        };
        // A tie to a field that is absent in this model has no effect.
        let alone = Tied { third: None, ..Tied::new(worker.device()) };
        let options = FsdpOptions::new().with_ignored_params([alone.fourth.weight.id]);
        fully_shard(alone, worker, options)?;
        let (one, other) = (apart(), apart());
        let (first, second) = (one.first.weight.id, other.second.id);
        assert_eq!(refused(one, first), tie("first.weight", "second"));
        assert_eq!(refused(other, second), tie("second", "first"));
        Ok(())
    });
}
