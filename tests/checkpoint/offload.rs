//! Checkpoints of offloaded models.

use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

use crate::support::checkpoint::{Part, resumed};
use crate::support::compare::{assert_same_bits, assert_same_state};

/// The storage device of parameters and moments is no part of a checkpoint.
#[test]
fn a_run_resumes_under_another_offload_policy_bit_for_bit() {
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
            let what = format!("{first:?} to {second:?}");
            assert_same_bits(&found, &losses, &what);
            assert_same_state(&found_state, &state, &what);
        }
    }
}
