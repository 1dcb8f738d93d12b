//! `test_fully_shard_frozen`: frozen parameters, and LoRA adapters beside them.

use burn::module::{Lora, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::Tensor;
use fsdp_runtime::prelude::*;

use super::mlp::{
    HIDDEN, Mlp, OUTPUTS, WIDTH, full_gradient, gradient, input, loss, of_rank_0, on_ranks,
    sharded, unsharded,
};
use crate::support::compare::{Within, assert_close};

/// Freezes the blocks whose index is `frozen`.
fn interleaved(model: Mlp, frozen: impl Fn(usize) -> bool) -> Mlp {
    let blocks = model.blocks.into_iter().enumerate();
    let blocks = blocks.map(|(i, block)| if frozen(i) { block.freeze() } else { block }).collect();
    Mlp { blocks, ..model }
}

fn train(strategy: ShardingStrategy, gather_buffers: usize, world: usize) -> Vec<u32> {
    of_rank_0(world, move |worker| {
        let model = interleaved(Mlp::new(5, worker.device()), |i| i % 2 == 1 || i == 2);
        let options = FsdpOptions::new()
            .with_strategy(strategy)
            .with_gather_buffers(gather_buffers)
            .with_seed(4);
        let mut model = fully_shard(model, worker, options)?;
        let mut optimizer = AdamWConfig::new().init();
        let mut losses = Vec::new();
        for step in 0..4 {
            let output =
                loss(model.forward(input(worker.rank().index(), step, 32, worker.device())));
            losses.push(output.clone().into_scalar::<f32>().to_bits());
            let gradients = model.backward(output)?;
            for (index, block) in model.blocks.iter().enumerate() {
                let trains = !(index % 2 == 1 || index == 2);
                let bias = block.up.bias.as_ref().expect("a bias").id;
                assert_eq!(gradients.get::<1>(bias).is_some(), trains, "block {index}");
            }
            model = optimizer.step(1e-2, model, gradients);
        }
        Ok(losses)
    })
}

/// Frozen units between trainable ones are gathered for backward, and never reduced.
#[test]
fn train_mixed_requires_grad_across_units() {
    for world in [2, 3] {
        let expected = train(ShardingStrategy::NoShard, 2, world);
        for gather_buffers in [1, 2, 3] {
            assert_eq!(
                train(ShardingStrategy::FullShard, gather_buffers, world),
                expected,
                "{gather_buffers}"
            );
        }
        assert_eq!(train(ShardingStrategy::ShardGradOp, 2, world), expected);
    }
}

#[test]
fn frozen_units_are_not_reduced_and_have_no_gradient() {
    let ranks = on_ranks(2, |worker| {
        let trained = |frozen: fn(usize) -> bool| {
            let model = interleaved(Mlp::new(4, worker.device()), frozen);
            let model = fully_shard(model, worker, FsdpOptions::new().with_seed(4))?;
            model.backward(loss(model.forward(input(0, 0, 4, worker.device()))))?;
            Ok::<_, fsdp_runtime::Error>((
                model.stats().counts(),
                model.stats().memory().gradients.now,
            ))
        };
        Ok((trained(|_| false)?, trained(|i| i != 3)?))
    });
    let ((all, all_bytes), (few, few_bytes)) = ranks[0];
    assert_eq!((all.reduce_scatters, few.reduce_scatters), (5, 2));
    assert!(few_bytes < all_bytes / 2, "{few_bytes} {all_bytes}");
}

/// The biases train, the matrices of the same units are frozen.
#[test]
fn train_bias_only() {
    let run = |strategy| {
        on_ranks(2, move |worker| {
            let mut model = Mlp::new(3, worker.device());
            for block in &mut model.blocks {
                block.up.weight = block.up.weight.clone().set_require_grad(false);
                block.down.weight = block.down.weight.clone().set_require_grad(false);
            }
            let options = FsdpOptions::new().with_strategy(strategy).with_seed(4);
            let mut model = fully_shard(model, worker, options)?;
            let mut optimizer = SgdConfig::new().init();
            let mut losses = Vec::new();
            for step in 0..4 {
                let x = input(worker.rank().index(), step, 32, worker.device());
                let output = loss(model.forward(x));
                losses.push(output.clone().into_scalar::<f32>().to_bits());
                let gradients = model.backward(output)?;
                for block in &model.blocks {
                    assert!(gradients.get::<2>(block.up.weight.id).is_none());
                    let bias = block.up.bias.as_ref().expect("a bias").id;
                    assert!(gradients.get::<1>(bias).is_some());
                }
                model = optimizer.step(1e-2, model, gradients);
            }
            Ok(losses)
        })
    };
    let losses = run(ShardingStrategy::FullShard);
    assert_eq!(losses, run(ShardingStrategy::NoShard));
    assert!(f32::from_bits(losses[0][0]).is_finite());
}

/// Units are frozen in every other step.
#[test]
fn requires_grad_changes_between_steps() {
    let run = |strategy| {
        on_ranks(2, move |worker| {
            let mut model = sharded(3, worker, FsdpOptions::new().with_strategy(strategy))?;
            let mut optimizer = SgdConfig::new().init();
            let mut losses = Vec::new();
            for step in 0..4 {
                model = if step % 2 == 1 { model.freeze() } else { model.unfreeze() };
                if step % 2 == 1 {
                    // One parameter trains, so that the loss has a graph.
                    let head = model.head.bias.as_ref().expect("a bias").id;
                    model = model.unfreeze_one(head);
                }
                let output =
                    loss(model.forward(input(worker.rank().index(), step, 4, worker.device())));
                losses.push(output.clone().into_scalar::<f32>().to_bits());
                let gradients = model.backward(output)?;
                let bias = model.blocks[1].up.bias.as_ref().expect("a bias").id;
                assert_eq!(gradients.get::<1>(bias).is_some(), step % 2 == 0);
                model = optimizer.step(1e-2, model, gradients);
            }
            Ok(losses)
        })
    };
    assert_eq!(run(ShardingStrategy::FullShard), run(ShardingStrategy::NoShard));
}

/// Unfreezes one parameter.
trait UnfreezeOne: Sized {
    fn unfreeze_one(self, id: ParamId) -> Self;
}

impl<M: Module> UnfreezeOne for M {
    fn unfreeze_one(self, id: ParamId) -> Self {
        struct One(ParamId);
        impl ModuleMapper for One {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                if param.id == self.0 { param.set_require_grad(true) } else { param }
            }
        }
        self.map(&mut One(id))
    }
}

/// Adapters are applied before sharding. The frozen bases are sharded too, and the factors train.
#[test]
fn lora() {
    let ranks = on_ranks(2, |worker| {
        let device = worker.device();
        // The bases have the same values on every rank. Each rank draws factors of its own.
        let plain = unsharded(Mlp::new(2, device), worker, FsdpOptions::new())?;
        device.seed(9 + worker.rank().index() as u64);
        let adapted = plain.apply_lora(Lora::new(2, 4.0));
        let mut model = fully_shard(adapted, worker, FsdpOptions::new().with_seed(4))?;
        let state = model.state().full(Recipient::All)?;
        let factor = &state["blocks.0.up.weight.lora.a"];
        assert_eq!(factor.shape().as_slice(), [WIDTH, 2]);
        let before = state["blocks.0.up.weight"].clone();
        let x = |step| input(worker.rank().index(), step, 32, device);
        let start = loss(model.forward(x(0))).into_scalar::<f32>();
        let mut optimizer = AdamWConfig::new().init();
        for step in 0..8 {
            let gradients = model.backward(loss(model.forward(x(step))))?;
            assert!(gradients.get::<2>(model.blocks[0].up.weight.id).is_none(), "frozen");
            model = optimizer.step(3e-2, model, gradients);
        }
        let after = model.state().full(Recipient::All)?;
        assert_eq!(after["blocks.0.up.weight"].as_bytes(), before.as_bytes());
        assert_ne!(
            after["blocks.0.up.weight.lora.b"].as_bytes(),
            state["blocks.0.up.weight.lora.b"].as_bytes()
        );
        let end = loss(model.forward(x(0))).into_scalar::<f32>();
        Ok((start, end, model.stats().memory().shards.now))
    });
    assert_eq!(ranks[0].2 + ranks[1].2, adapted_bytes());
    for (start, end, _) in ranks {
        assert!(end < start, "training the adapters lowers the loss: {start} {end}");
    }
}

/// Returns the bytes of the matrices of two blocks and the head, each with factors of rank 2.
fn adapted_bytes() -> usize {
    let adapted = |rows: usize, columns: usize| rows * columns + 2 * (rows + columns);
    let block = adapted(WIDTH, HIDDEN) + adapted(HIDDEN, WIDTH);
    size_of::<f32>() * (2 * block + adapted(WIDTH, OUTPUTS))
}

/// The gradients of the factors are those of plain Burn.
#[test]
fn lora_gradients_are_those_of_plain_burn() {
    let ranks = on_ranks(2, |worker| {
        let device = worker.device();
        let plain = unsharded(Mlp::new(2, device), worker, FsdpOptions::new())?;
        let adapted = plain.apply_lora(Lora::new(2, 4.0));
        let model =
            fully_shard(adapted.clone(), worker, FsdpOptions::new().with_sync_module_states(true))?;
        // Under `sync_module_states` every rank has rank 0's factors.
        let reference = adapted;
        let x = || input(0, 0, 4, device);
        let ours = model.backward(loss(model.forward(x())))?;
        let theirs =
            GradientsParams::from_grads(loss(reference.forward(x())).backward(), &reference);
        let adapter = reference.blocks[1].down.weight.adapter().expect("adapted");
        let theirs = gradient(&theirs, &adapter.b);
        let mut mine = None;
        factors(&model, &mut |name, param| {
            if name == "b" {
                mine = gradient(&ours, param);
            }
        });
        Ok((mine, theirs))
    });
    let found = full_gradient(ranks.iter().map(|(mine, _)| mine));
    let expected = ranks[0].1.as_ref().expect("a gradient");
    assert_close(&found, expected, Within::Scaled(1e-6), "the factor's gradient");
}

/// Calls `found` with the name of each factor of the second block's `down`, as Burn's visitors find
/// them.
fn factors(model: &Fsdp<Mlp>, found: &mut dyn FnMut(&str, &Param<Tensor<2>>)) {
    struct Visitor<'a> {
        path: Vec<String>,
        found: &'a mut dyn FnMut(&str, &Param<Tensor<2>>),
    }
    impl ModuleVisitor for Visitor<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_string());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let param: &dyn std::any::Any = param;
            if self.path.iter().any(|name| name == "lora")
                && let Some(param) = param.downcast_ref()
            {
                let name = self.path.last().cloned().unwrap_or_default();
                (self.found)(&name, param);
            }
        }
    }
    model.blocks[1].down.visit(&mut Visitor { path: Vec::new(), found });
}
