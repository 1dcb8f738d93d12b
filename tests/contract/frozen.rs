//! `test_fully_shard_frozen`: parameters without gradients, and LoRA adapters beside them.

use burn::module::{Lora, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::Tensor;
use fsdp_runtime::prelude::*;

use super::mlp::{Block, Mlp, gradient, input, loss, on, sharded, unsharded};

fn freeze(block: Block) -> Block {
    block.freeze()
}

/// Freezes each block for which `frozen` says so.
fn interleaved(model: Mlp, frozen: impl Fn(usize) -> bool) -> Mlp {
    let blocks = model.blocks.into_iter().enumerate();
    let blocks = blocks.map(|(i, block)| if frozen(i) { freeze(block) } else { block }).collect();
    Mlp { blocks, ..model }
}

fn train(strategy: ShardingStrategy, slots: usize, world: usize) -> Vec<u32> {
    on(world, move |worker| {
        let model = interleaved(Mlp::new(5, worker.device()), |i| i % 2 == 1 || i == 2);
        let options =
            FsdpOptions::new().with_strategy(strategy).with_gather_buffers(slots).with_seed(4);
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
    .swap_remove(0)
}

/// Frozen units between trainable ones: gathered for backward, never reduced.
#[test]
fn train_mixed_requires_grad_across_units() {
    for world in [2, 3] {
        let expected = train(ShardingStrategy::NoShard, 2, world);
        for slots in [1, 2, 3] {
            assert_eq!(train(ShardingStrategy::FullShard, slots, world), expected, "{slots}");
        }
        assert_eq!(train(ShardingStrategy::ShardGradOp, 2, world), expected);
    }
}

#[test]
fn frozen_units_are_not_reduced_and_hold_no_gradient() {
    let ranks = on(2, |worker| {
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

/// Biases alone, the matrices of the same units frozen.
#[test]
fn train_bias_only() {
    let run = |strategy| {
        on(2, move |worker| {
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
                assert!(gradients.get::<2>(model.blocks[0].up.weight.id).is_none());
                model = optimizer.step(1e-2, model, gradients);
            }
            Ok(losses)
        })
    };
    let losses = run(ShardingStrategy::FullShard);
    assert_eq!(losses, run(ShardingStrategy::NoShard));
    assert!(f32::from_bits(losses[0][0]).is_finite());
}

/// Frozen for one step, trained in the next.
#[test]
fn requires_grad_changes_between_steps() {
    let run = |strategy| {
        on(2, move |worker| {
            let mut model = sharded(3, worker, FsdpOptions::new().with_strategy(strategy))?;
            let mut optimizer = SgdConfig::new().init();
            let mut losses = Vec::new();
            for step in 0..4 {
                model = if step % 2 == 1 { model.freeze() } else { model.unfreeze() };
                if step % 2 == 1 {
                    // Something must train.
                    let head = model.head.bias.as_ref().expect("a bias").id;
                    model = model.map_require_grad(head);
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

/// Lets one parameter of a frozen model train.
trait MapRequireGrad: Sized {
    fn map_require_grad(self, id: ParamId) -> Self;
}

impl<M: Module> MapRequireGrad for M {
    fn map_require_grad(self, id: ParamId) -> Self {
        struct One(ParamId);
        impl ModuleMapper for One {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                if param.id == self.0 { param.set_require_grad(true) } else { param }
            }
        }
        self.map(&mut One(id))
    }
}

/// Adapters are applied before sharding: the bases are sharded and frozen, the factors trained.
#[test]
fn lora() {
    let ranks = on(2, |worker| {
        let device = worker.device();
        // One set of values on every rank, factors included.
        let plain = unsharded(Mlp::new(2, device), worker, FsdpOptions::new())?;
        device.seed(9 + worker.rank().index() as u64);
        let adapted = plain.apply_lora(Lora::new(2, 4.0));
        let mut model = fully_shard(adapted, worker, FsdpOptions::new().with_seed(4))?;
        let state = model.state().full(Recipient::All)?;
        let factor = &state["blocks.0.up.weight.lora.a"];
        assert_eq!(factor.shape().as_slice(), [super::mlp::WIDTH, 2]);
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
    assert_eq!(ranks[0].2 + ranks[1].2, total_fragments(&ranks));
    for (start, end, _) in ranks {
        assert!(end < start, "the adapters learn: {start} {end}");
    }
}

fn total_fragments(ranks: &[(f32, f32, usize)]) -> usize {
    use super::mlp::{HIDDEN, WIDTH};
    assert_eq!(ranks.len(), 2);
    let adapted = |rows: usize, columns: usize| rows * columns + 2 * (rows + columns);
    4 * (2 * (adapted(WIDTH, HIDDEN) + adapted(HIDDEN, WIDTH)) + adapted(WIDTH, 3))
}

/// The gradients of the factors are those of plain Burn.
#[test]
fn lora_gradients_are_those_of_plain_burn() {
    let ranks = on(2, |worker| {
        let device = worker.device();
        let plain = unsharded(Mlp::new(2, device), worker, FsdpOptions::new())?;
        let adapted = plain.apply_lora(Lora::new(2, 4.0));
        let model =
            fully_shard(adapted.clone(), worker, FsdpOptions::new().with_sync_module_states(true))?;
        // Rank 0's factors went to everyone.
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
    let parts = ranks.iter().flat_map(|(mine, _)| mine.clone().unwrap_or_default());
    let got: Vec<f32> = parts.collect();
    let want = ranks[0].1.clone().expect("a gradient");
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(&want) {
        assert!((got - want).abs() < 1e-6 * want.abs().max(1.0), "{got} {want}");
    }
}

/// The factors of the second block's `down`, as Burn's visitors find them.
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
