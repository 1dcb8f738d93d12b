//! Host time that the schedule adds to each unit, and that its layout takes. Neither may grow with
//! the number of units, and the schedule's not with the number of ranks.
//!
//! `cargo bench --bench layout`

use std::hint::black_box;
use std::time::Instant;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::__private::FlatLayout;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, WorldSize};

const RUNS: usize = 9;

/// A unit that computes almost nothing.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Tiny {
    weight: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Tiny {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x + self.weight.val()
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Stack {
    units: Vec<Tiny>,
}

#[fsdp_unit]
impl Stack {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.units.iter().fold(x, |x, unit| unit.forward(x))
    }
}

fn stack(units: usize, device: &Device) -> Stack {
    let weight = |_| Tiny { weight: Param::from_tensor(Tensor::ones([4, 4], device)) };
    Stack { units: (0..units).map(weight).collect() }
}

/// Returns the median time of `f` in microseconds for each unit.
fn median(units: usize, mut f: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..RUNS + 2)
        .map(|_| {
            let begin = Instant::now();
            f();
            begin.elapsed().as_secs_f64() * 1e6 / units as f64
        })
        .skip(2)
        .collect();
    times.sort_by(f64::total_cmp);
    times[RUNS / 2]
}

/// Microseconds of forward and backward for each unit: unsharded, and sharded on one rank.
fn passes(units: usize) -> (f64, f64) {
    let run = move |worker: Worker| {
        let device = worker.device();
        let x = || Tensor::<2>::ones([4, 4], device);
        let plain = stack(units, device);
        let unsharded = median(units, || drop(plain.forward(x()).sum().backward()));
        let sharded = fully_shard(plain, &worker, FsdpOptions::new())?;
        let time = median(units, || {
            let loss = sharded.forward(x()).sum();
            sharded.backward(loss).expect("one rank waits for none");
        });
        Ok::<_, Error>((unsharded, time))
    };
    let ranks = launch(LaunchOptions::new(1).with_device(Device::flex()), run);
    ranks.expect("one rank waits for none")[0]
}

/// Microseconds for each unit to lay out and shard the matrices of a BERT layer.
fn layout(units: usize, world: usize) -> f64 {
    let world = WorldSize::new(world).expect("at least one rank");
    let matrices = [384 * 384, 384 * 384, 384 * 384, 384 * 384, 384 * 1536, 1536 * 384];
    let rank = world.ranks().last().expect("at least one rank");
    median(units, || {
        for _ in 0..units {
            let layout = FlatLayout::new(black_box(matrices), world);
            for matrix in 0..layout.len() {
                black_box(layout.shard_of(matrix, rank));
            }
        }
    })
}

fn main() {
    println!("forward and backward on one rank, microseconds a unit");
    println!("{:>8}{:>12}{:>12}{:>12}", "units", "unsharded", "sharded", "added");
    for units in [1, 10, 100, 1000] {
        let (unsharded, sharded) = passes(units);
        println!("{units:>8}{unsharded:>12.2}{sharded:>12.2}{:>12.2}", sharded - unsharded);
    }
    println!("\nlayout, microseconds a unit");
    println!(
        "{:>8}{:>12}{:>12}{:>12}{:>12}",
        "units", "world 1", "world 8", "world 128", "world 1024"
    );
    for units in [1, 10, 100, 1000] {
        let [a, b, c, d] = [1, 8, 128, 1024].map(|world| layout(units, world));
        println!("{units:>8}{a:>12.3}{b:>12.3}{c:>12.3}{d:>12.3}");
    }
}
