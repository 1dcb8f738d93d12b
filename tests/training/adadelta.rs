//! Adadelta on shards has the results of Adadelta on whole parameters.

use fsdp_runtime::optim::AdadeltaConfig;
use fsdp_runtime::prelude::*;

use crate::support::Run;

fn run(world: usize) -> Run {
    let optimizer = || AdadeltaConfig::new().with_weight_decay(0.01).init();
    Run { learning_rate: 1.0, optimizer, ..Run::new(world) }
}

#[test]
fn sharded_and_unsharded_steps_agree_bit_for_bit() {
    for world in [1, 2, 3] {
        let full = run(world).launch();
        full.assert_bitwise(&run(world).with_strategy(ShardingStrategy::NoShard).launch());
        let offload = OffloadPolicy::Params { pin_memory: false };
        let options = run(world).options.with_offload(offload);
        full.assert_bitwise(&Run { options, ..run(world) }.launch());
        assert!(full.losses.iter().all(|loss| loss.is_finite()), "{:?}", full.losses);
    }
}

#[test]
fn the_penalty_has_an_effect() {
    let without = Run { optimizer: || AdadeltaConfig::new().init(), ..run(2) }.launch();
    let with = run(2).launch();
    assert_eq!(with.losses[0], without.losses[0]);
    assert_ne!(with.losses[1..], without.losses[1..]);
}
