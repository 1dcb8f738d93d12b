//! Peak resident memory of loading and saving a model of 100 M parameters on four thread ranks.
//!
//! ```text
//! cargo bench --bench memory
//! ```
//!
//! Each phase runs in a process of its own, which reads its peak from Linux's `/proc`. Nothing is
//! asserted here; `tests/construction_memory.rs` counts the same with an allocator.

use std::path::{Path, PathBuf};
use std::process::Command;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, activation::relu};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, LoadOptions, SavePretrained, from_pretrained};

const WIDTH: usize = 768;
const HIDDEN: usize = 6 * WIDTH;
const BLOCKS: usize = 14;
const WORLD: usize = 4;

#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    up: Linear,
    down: Linear,
}

#[fsdp_unit]
impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.down.forward(relu(self.up.forward(x)))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Net {
    blocks: Vec<Block>,
    head: Linear,
}

#[fsdp_unit]
impl Net {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.blocks.iter().fold(x, |x, block| block.forward(x)))
    }
}

fn net(device: &Device) -> Net {
    let block = |_| Block {
        up: LinearConfig::new(WIDTH, HIDDEN).init(device),
        down: LinearConfig::new(HIDDEN, WIDTH).init(device),
    };
    Net { blocks: (0..BLOCKS).map(block).collect(), head: LinearConfig::new(WIDTH, 2).init(device) }
}

/// Resident memory now and at its peak, in MB.
fn resident() -> Option<(f64, f64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name))?;
        let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib * 1024.0 / 1e6)
    };
    Some((field("VmRSS:")?, field("VmHWM:")?))
}

/// Begins a new peak.
fn reset_peak() {
    // Where the kernel lacks it, the peak is that since the start of the process.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// What a phase of one process did.
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
    let first = worker.rank().index() == 0;
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
    let model = match name {
        "from_pretrained" => from_pretrained(net(device), worker, options, path, &load)?.0,
        "load_safetensors" => {
            let mut model = fully_shard(net(device), worker, options)?;
            model.state_mut().load_safetensors(path, &load)?;
            model
        }
        _ => fully_shard(net(device), worker, options)?,
    };
    worker.barrier()?;
    let mb = |bytes: usize| bytes as f64 / 1e6;
    let unit = mb((2 * WIDTH * HIDDEN + WIDTH + HIDDEN) * 4);
    let all = mb(model.num_params() * 4);
    // Shards of all ranks, two units and 64 MB for each.
    let bound = all + WORLD as f64 * (2.0 * unit + 64.0);
    match name {
        "write" => model.state().save_pretrained(path, &SavePretrained::new())?,
        "fully_shard" | "from_pretrained" | "load_safetensors" => peak(name, start, bound),
        "save_pretrained" => {
            let now = begin()?;
            model.state().save_pretrained(path.join("saved"), &SavePretrained::new())?;
            worker.barrier()?;
            peak("save_pretrained, beyond what is held", now, unit);
        }
        "save_burnpack" => {
            let now = begin()?;
            model.state().save_burnpack(path.join("saved.bpk"))?;
            worker.barrier()?;
            peak("save_burnpack, beyond what is held", now, unit);
        }
        _ => {
            let now = begin()?;
            let first = Recipient::Only(worker.world().ranks().next().expect("rank 0"));
            let state = model.state().full(first)?;
            worker.barrier()?;
            peak("the full state on rank 0, beyond what is held", now, all + unit);
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
    let params = BLOCKS * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) + 2 * WIDTH + 2;
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
