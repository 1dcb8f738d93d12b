//! The figures of `strategies.md`, computed. `UPDATE_GUIDE=1 cargo test --test guide` rewrites
//! them.

use std::{env, fs};

use burn::tensor::{Device, FloatDType};
use fsdp_runtime::memory::MemoryForecast;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Mesh, Rank, WorldSize};

use super::gpt::Gpt;
use super::{page, path};

/// The lines around a computed table.
const MARKS: [(&str, &str); 2] = [
    ("<!-- computed: strategies -->\n", "<!-- end -->"),
    ("<!-- computed: options -->\n", "<!-- end -->"),
];

fn forecast(options: &FsdpOptions, world: usize) -> MemoryForecast {
    let world = WorldSize::new(world).expect("a world");
    let mesh = Mesh::new(Rank::ZERO, world);
    MemoryForecast::new(&Gpt::new(&Device::flex()), mesh, options)
        .expect("a forecast")
        .with_optimizer(2)
}

/// Returns bytes in GiB, with two digits.
fn gib(bytes: usize) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 30))
}

/// Returns one row: the label, each kind, and the total.
fn row(label: &str, world: usize, forecast: &MemoryForecast, host: bool) -> String {
    let parameters = forecast.shards + forecast.replicated;
    let kinds = [parameters, forecast.gathered, forecast.gradients, forecast.optimizer];
    let kinds: Vec<String> = kinds.into_iter().map(gib).collect();
    let mut cells =
        format!("| {label} | {world} | {} | **{}** |", kinds.join(" | "), gib(forecast.total()));
    if host {
        cells.push_str(&format!(" {} |", gib(forecast.host.total())));
    }
    cells
}

fn strategies() -> String {
    let mut table = String::from(
        "| strategy | ranks | parameters | gather buffers | gradients | AdamW | total |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for (strategy, name) in ShardingStrategy::ALL {
        let options = FsdpOptions::new().with_strategy(strategy).with_shard_size(8);
        let worlds: &[usize] = match strategy {
            ShardingStrategy::NoShard => &[8],
            _ if strategy.is_hybrid() => &[64],
            _ => &[1, 8, 64],
        };
        for &world in worlds {
            let line = row(&format!("`{name}`"), world, &forecast(&options, world), false);
            table.push_str(&format!("{line}\n"));
        }
    }
    table
}

fn options() -> String {
    let mut table = String::from(
        "| options | ranks | parameters | gather buffers | gradients | AdamW | total | on the host |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    let full = FsdpOptions::new;
    let bf16 = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    let rows = [
        ("`FULL_SHARD`", full()),
        ("`with_mixed_precision`, bf16", full().with_mixed_precision(bf16)),
        (
            "`ReshardAfterForward::To(2)`",
            full().with_reshard_after_forward(ReshardAfterForward::To(2)),
        ),
        ("`WrapPolicy::NoWrap`", full().with_wrap(WrapPolicy::NoWrap)),
        ("`with_gather_buffers(1)`", full().with_gather_buffers(1)),
        (
            "`OffloadPolicy::Params`",
            full().with_offload(OffloadPolicy::Params { pin_memory: true }),
        ),
        ("`OffloadPolicy::OptimizerOnly`", full().with_offload(OffloadPolicy::OptimizerOnly)),
        (
            "`OffloadPolicy::Params`, bf16",
            full()
                .with_offload(OffloadPolicy::Params { pin_memory: true })
                .with_mixed_precision(bf16),
        ),
    ];
    for (label, options) in rows {
        table.push_str(&format!("{}\n", row(label, 8, &forecast(&options, 8), true)));
    }
    table
}

#[test]
fn the_tables_of_memory_are_the_forecast() {
    let page = page("strategies");
    let mut updated = page.clone();
    for ((start, end), table) in MARKS.into_iter().zip([strategies(), options()]) {
        let from = updated.find(start).unwrap_or_else(|| panic!("no {start}")) + start.len();
        let until = from + updated[from..].find(end).expect("an end");
        updated.replace_range(from..until, &format!("\n{table}\n"));
    }
    if env::var_os("UPDATE_GUIDE").is_some() {
        fs::write(path("fsdp-runtime/docs/strategies.md"), &updated).expect("a page");
    }
    assert!(page == updated, "strategies.md has other figures; UPDATE_GUIDE=1 rewrites the page");
}

/// The page shows `gpt.rs`, the model of the tables, as it is.
#[test]
fn the_page_shows_the_model_of_the_tables() {
    assert!(page("strategies").contains(include_str!("gpt.rs")), "the page's block is not gpt.rs");
    let options = FsdpOptions::new().with_strategy(ShardingStrategy::NoShard);
    let parameters = forecast(&options, 1).shards + forecast(&options, 1).replicated;
    assert_eq!(format!("{:.2}", parameters as f64 / 4e9), "1.41");
}
