//! Peak resident memory of loading and saving a model of 100 M parameters on four thread ranks.
//!
//! ```text
//! cargo bench --bench memory
//! ```
//!
//! Each phase runs in a process of its own, which reads its peak from Linux's `/proc`. Nothing is
//! asserted here: `tests/construction_memory.rs` asserts bounds on what an allocator counts.

use std::path::{Path, PathBuf};
use std::process::Command;

use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, SavePretrained, from_pretrained};

#[path = "../tests/support/mlp.rs"]
mod mlp;
#[path = "common/resident.rs"]
mod resident;

use mlp::{Mlp, Sizes};
use resident::resident;

const WIDTH: usize = 768;
const HIDDEN: usize = 6 * WIDTH;
const SIZES: Sizes = Sizes { blocks: 14, width: WIDTH, hidden: HIDDEN, outputs: 2 };
const WORLD: usize = 4;

/// Starts a new peak.
fn reset_peak() {
    // A kernel without this file keeps the peak since the start of the process.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Runs one phase on its ranks, and prints its peak.
fn phase(name: &str, path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let world = if name == "write" { 1 } else { WORLD };
    let (name, path) = (name.to_string(), path.to_path_buf());
    let (start, _) = resident().ok_or("no /proc to read")?;
    let launched = LaunchOptions::new(world).with_device(Device::flex());
    launch(launched, move |worker| rank(&worker, &name, &path, start))?;
    Ok(())
}

fn rank(worker: &Worker, name: &str, path: &Path, start: f64) -> Result<(), Error> {
    let device = worker.device();
    let first = worker.is_rank_zero();
    let peak = |what: &str, since: f64, bound: f64| {
        if let Some((_, peak)) = resident().filter(|_| first) {
            let used = peak - since;
            println!("{what:46} {used:7.0} MB of at most {bound:7.0} MB");
        }
    };
    let options = FsdpOptions::new().with_seed(1);
    let load = LoadOptions::new();
    let begin = || -> Result<f64, Error> {
        worker.barrier()?;
        if first {
            reset_peak();
        }
        let now = resident().map_or(0.0, |(now, _)| now);
        worker.barrier()?;
        Ok(now)
    };
    let model: Fsdp<Mlp> = match name {
        "from_pretrained" => from_pretrained(SIZES.init(device), worker, options, path, &load)?.0,
        "load_safetensors" => {
            let mut model = fully_shard(SIZES.init(device), worker, options)?;
            model.state_mut().load_safetensors(path, &load)?;
            model
        }
        _ => fully_shard(SIZES.init(device), worker, options)?,
    };
    worker.barrier()?;
    let mb = |bytes: usize| bytes as f64 / 1e6;
    let unit = mb((2 * WIDTH * HIDDEN + WIDTH + HIDDEN) * 4);
    let all = mb(model.stats().num_params() * 4);
    // The shards of all ranks, and two units and 64 MB for each rank.
    let bound = all + WORLD as f64 * (2.0 * unit + 64.0);
    match name {
        "write" => model.state().save_pretrained(path, &SavePretrained::new())?,
        "fully_shard" | "from_pretrained" | "load_safetensors" => peak(name, start, bound),
        "save_pretrained" => {
            let now = begin()?;
            model.state().save_pretrained(path.join("saved"), &SavePretrained::new())?;
            worker.barrier()?;
            peak("save_pretrained, beyond the shards", now, unit);
        }
        "save_burnpack" => {
            let now = begin()?;
            model.state().save_burnpack(path.join("saved.bpk"))?;
            worker.barrier()?;
            peak("save_burnpack, beyond the shards", now, unit);
        }
        _ => {
            let now = begin()?;
            let first = Recipient::Only(worker.world().ranks().next().expect("rank 0"));
            let state = model.state().full(first)?;
            worker.barrier()?;
            peak("the full state on rank 0, beyond the shards", now, all + unit);
            drop(state);
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, name, path] = &arguments[..]
        && !name.starts_with('-')
    {
        return phase(name, &PathBuf::from(path));
    }
    let folder = tempfile::tempdir()?;
    let params = SIZES.blocks * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) + 2 * WIDTH + 2;
    println!("{:.1} M parameters on {WORLD} thread ranks, in one process", params as f64 / 1e6);
    for name in [
        "write",
        "fully_shard",
        "from_pretrained",
        "load_safetensors",
        "save_pretrained",
        "save_burnpack",
        "full_state",
    ] {
        let status = Command::new(std::env::current_exe()?)
            .args([name.as_ref(), folder.path().as_os_str()])
            .status()?;
        if !status.success() {
            return Err(format!("{name}: {status}").into());
        }
    }
    Ok(())
}
