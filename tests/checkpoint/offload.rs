//! Checkpoints of what rests on the host.

use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

use crate::support::checkpoint::{Part, bits, resumed, same_bits};

/// Where parameters and moments rest is no part of a checkpoint.
#[test]
fn a_run_goes_on_under_another_policy_with_every_bit() {
    let policies = [
        OffloadPolicy::None,
        OffloadPolicy::Params { pin_memory: true },
        OffloadPolicy::OptimizerOnly,
    ];
    let part = |policy| {
        let options = FsdpOptions::new().with_seed(7).with_offload(policy);
        Part::new(2).dropout(0.1).options(options).optimizer(|| AdamWConfig::new().init())
    };
    let (losses, state) = part(OffloadPolicy::None).until(8).launch();
    for first in policies {
        for second in policies {
            let (found, found_state) = resumed(part(first).until(4), part(second).until(8));
            assert_eq!(bits(&found), bits(&losses), "{first:?} to {second:?}");
            assert!(same_bits(&found_state, &state), "{first:?} to {second:?}");
        }
    }
}
