//! Checkpointed units: the same losses, gradients and parameters as without, in every bit, with as
//! many gathers.

mod support;

use fsdp_runtime::prelude::*;
use support::Run;

const STRATEGIES: [ShardingStrategy; 4] = [
    ShardingStrategy::FullShard,
    ShardingStrategy::ShardGradOp,
    ShardingStrategy::NoShard,
    ShardingStrategy::HybridShard,
];

fn run(world: usize, strategy: ShardingStrategy) -> Run {
    let run = Run { dropout: 0.1, clip: Some(0.5), ..Run::new(world) }.strategy(strategy);
    let options = run.options.clone().shard_size(world.min(2));
    Run { options, ..run }
}

fn checkpointed(run: &Run, which: ActivationCheckpointing) -> Run {
    Run { options: run.options.clone().activation_checkpointing(which), ..run.clone() }
}

#[test]
fn losses_and_parameters_are_those_without_in_every_bit() {
    for strategy in STRATEGIES {
        for world in [1, 2] {
            let run = run(world, strategy);
            let plain = run.launch();
            let all = checkpointed(&run, ActivationCheckpointing::All).launch();
            all.assert_bitwise(&plain);
            assert_eq!(all.counts, plain.counts, "{strategy} on {world} ranks");
        }
    }
}
