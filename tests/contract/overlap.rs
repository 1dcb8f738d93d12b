//! `test_fully_shard_overlap`: the next unit is gathered while this one computes.
//!
//! No test reads a clock. One rank stays within a unit until another rank is in the next one, which
//! only an all-gather that runs during the computation allows.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::prelude::*;

use super::mlp::{WIDTH, input};

/// A gate that one rank opens while another waits for it.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    /// Waits for two seconds. Returns whether the gate was opened.
    fn wait(&self) -> bool {
        let guard = self.0.0.lock().unwrap();
        let wait = self.0.1.wait_timeout_while(guard, Duration::from_secs(2), |open| !*open);
        *wait.unwrap().0
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Unit {
    linear: Linear,
}

#[fsdp_unit]
impl Unit {
    fn forward(&self, x: Tensor<2>, body: &dyn Fn()) -> Tensor<2> {
        body();
        self.linear.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Chain {
    units: Vec<Unit>,
}

#[fsdp_unit]
impl Chain {
    fn forward(&self, x: Tensor<2>, bodies: &[&dyn Fn()]) -> Tensor<2> {
        self.units.iter().zip(bodies).fold(x, |x, (unit, body)| unit.forward(x, *body))
    }
}

fn chain(device: &Device) -> Chain {
    let unit = |_| Unit { linear: LinearConfig::new(WIDTH, WIDTH).init(device) };
    Chain { units: (0..3).map(unit).collect() }
}

/// Returns whether rank 0 enters the second unit while rank 1 is in the first.
fn overlaps(options: FsdpOptions) -> bool {
    let gate = Gate::default();
    let launched =
        LaunchOptions::new(2).with_device(Device::flex()).with_timeout(Duration::from_secs(20));
    let ranks = launch(launched, move |worker| {
        let rank = worker.rank().index();
        let model = fully_shard(chain(worker.device()), &worker, options.clone().with_seed(1))?;
        let x = input(rank, 0, 2, worker.device());
        let met = std::cell::Cell::new(None);
        let first = || {
            if rank == 1 {
                met.set(Some(gate.wait()));
            }
        };
        let second = || {
            if rank == 0 {
                gate.open();
            }
        };
        model.forward(x, &[&first, &second, &|| ()]);
        Ok::<_, fsdp_runtime::Error>(met.get())
    });
    let met = ranks.expect("the ranks succeed");
    met[1].expect("rank 1 has been in its first unit")
}

#[test]
fn the_next_unit_is_gathered_while_one_computes() {
    assert!(overlaps(FsdpOptions::new()));
}

/// Copies from host memory are part of the all-gather.
#[test]
fn the_next_unit_is_copied_from_the_host_while_one_computes() {
    for policy in [OffloadPolicy::Params { pin_memory: true }, OffloadPolicy::OptimizerOnly] {
        assert!(overlaps(FsdpOptions::new().with_offload(policy)), "{policy:?}");
    }
    let without = FsdpOptions::new().with_forward_prefetch(false);
    assert!(!overlaps(without.with_offload(OffloadPolicy::Params { pin_memory: true })));
}

#[test]
fn without_prefetch_a_unit_is_gathered_when_needed() {
    assert!(!overlaps(FsdpOptions::new().with_forward_prefetch(false)));
}
