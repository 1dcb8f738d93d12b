//! The start of thread ranks on Flex.

use std::time::Duration;

use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::prelude::*;

/// How long a collective waits for the other ranks. A test whose ranks wait for each other forever
/// fails after this time.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns options of a launch of `world` thread ranks on Flex.
pub fn launch_options(world: usize) -> LaunchOptions {
    LaunchOptions::new(world).with_device(Device::flex()).with_timeout(TIMEOUT)
}

/// Runs `rank` on `world` thread ranks, all of which must succeed. Returns one value for each, in
/// rank order.
#[track_caller]
pub fn on_ranks<T: Send + 'static>(
    world: usize,
    rank: impl Fn(&Worker) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let values = launch(launch_options(world), move |worker| rank(&worker));
    let values = values.expect("the ranks succeed");
    assert_eq!(values.len(), world, "a launch returns one value for each rank");
    values
}

/// Runs `rank` on `world` thread ranks, all of which must succeed. Returns the value of rank 0.
#[track_caller]
pub fn of_rank_0<T: Send + 'static>(
    world: usize,
    rank: impl Fn(&Worker) -> Result<T, Error> + Send + Sync + 'static,
) -> T {
    on_ranks(world, rank).swap_remove(0)
}
