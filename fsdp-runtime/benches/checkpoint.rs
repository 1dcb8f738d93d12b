//! Measures checkpoints of a model of 100 M parameters.
//!
//! - Time of a sharded save, compared with `cp` of the same bytes, both flushed to disk.
//! - Time for which a background save blocks training.
//! - Time and memory of a load.
//!
//! ```text
//! cargo bench --bench checkpoint [-- FOLDER]
//! ```

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Restore};
use fsdp_runtime::prelude::*;

/// The allocator that the README recommends for training: it keeps its pages.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const WIDTH: usize = 1024;
const LAYERS: usize = 96;
const WORLD: usize = 2;
const ROUNDS: usize = 5;

#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    linear: Linear,
}

#[fsdp_unit]
impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.linear.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Net {
    blocks: Vec<Block>,
}

#[fsdp_unit]
impl Net {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.blocks.iter().fold(x, |x, block| block.forward(x))
    }
}

fn model(worker: &Worker) -> Result<Fsdp<Net>, Error> {
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(worker.device());
    let blocks = (0..LAYERS).map(|_| Block { linear: linear() }).collect();
    fully_shard(Net { blocks }, worker, FsdpOptions::new().with_seed(1))
}

/// Returns the model and its optimizer after a step, so that there are moments.
fn trained(worker: &Worker) -> Result<(Fsdp<Net>, ModuleOptimizer), Error> {
    let (mut net, mut optimizer) = (model(worker)?, AdamWConfig::new().init());
    let x = Tensor::<2>::ones([2, WIDTH], worker.device()) * 1e-3;
    let grads = net.backward(net.forward(x).mean())?;
    net = optimizer.step(1e-4, net, grads);
    Ok((net, optimizer))
}

/// Flag of this program that measures a load alone. The number of ranks and the folder follow.
const LOAD: &str = "--load";

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, first, world, root] = &arguments[..]
        && first == LOAD
    {
        let (world, root) = (world.parse().expect("a number of ranks"), PathBuf::from(root));
        let options = LaunchOptions::new(world).with_device(Device::flex());
        launch(options, move |worker| load(&worker, &root)).expect("the ranks succeed");
        return;
    }
    // Cargo adds flags, of which none is a folder.
    let folder = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let home = match folder {
        Some(folder) => tempfile::tempdir_in(folder),
        None => tempfile::tempdir(),
    }
    .expect("a folder to write in");
    let root = home.path().to_path_buf();
    let options = LaunchOptions::new(WORLD).with_device(Device::flex());
    let run = root.clone();
    launch(options, move |worker| measure(&worker, &run)).expect("the ranks succeed");
    // Each load runs in a process of its own, whose memory has not been used before.
    for world in ["1", "4"] {
        let program = std::env::current_exe().expect("this program has a path");
        let status = Command::new(program).args([LOAD, world]).arg(&root).status();
        assert!(status.expect("this program starts again").success(), "the load at world {world}");
    }
}

fn measure(worker: &Worker, root: &Path) -> Result<(), Error> {
    let (net, optimizer) = trained(worker)?;
    let leads = worker.is_rank_zero();
    for moments in [false, true] {
        let mut checkpoint = Checkpoint::new(1).with_model("net", &net);
        if moments {
            checkpoint = checkpoint.with_optimizer("adamw", &optimizer);
        }
        let folder = root.join(if moments { "with-moments" } else { "model" });
        let copied = root.join("copied");
        let (mut saves, mut copies, mut stalls) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            // Both write to a folder that does not exist yet.
            if leads {
                remove(&folder);
                remove(&copied);
            }
            worker.barrier()?;
            let begin = Instant::now();
            checkpoint.save(worker, &folder)?;
            saves.push(begin.elapsed());
            if leads {
                copies.push(copy(&folder, &copied));
            }
            worker.barrier()?;
            let mut manager =
                CheckpointManager::new(root.join("background"), worker).with_background(true);
            stalls.push(manager.save(&checkpoint)?.stall);
            manager.finish()?;
            worker.barrier()?;
            if leads {
                remove(&root.join("background"));
            }
        }
        if leads {
            let (bytes, save, copy) = (size(&folder), median(&mut saves), median(&mut copies));
            println!(
                "{}: {:.0} MB; save {save:.2?}, cp with fsync {copy:.2?}, ratio {:.2}; a background \
                 save holds training up for {:.2?}",
                if moments { "model and AdamW moments" } else { "model" },
                bytes as f64 / 1e6,
                save.as_secs_f64() / copy.as_secs_f64(),
                median(&mut stalls),
            );
        }
    }
    Ok(())
}

/// Loads the model, and then the model with its optimizer. Prints the time, and the memory at its
/// peak.
fn load(worker: &Worker, root: &Path) -> Result<(), Error> {
    let mut net = model(worker)?;
    let mut optimizer = AdamWConfig::new().init();
    let leads = worker.is_rank_zero();
    for moments in [false, true] {
        worker.barrier()?;
        let before = leads.then(reset_peak).unwrap_or_default();
        worker.barrier()?;
        let begin = Instant::now();
        let mut restore = Restore::new().with_model("net", &mut net);
        if moments {
            restore = restore.with_optimizer("adamw", &mut optimizer);
        }
        restore.load(worker, root.join("with-moments"))?;
        worker.barrier()?;
        if leads {
            println!(
                "load of {} at world size {}: {:.2?}; {before} MB before, at most {} MB meanwhile",
                if moments { "model and moments" } else { "model" },
                worker.world(),
                begin.elapsed(),
                status("VmHWM"),
            );
        }
        worker.barrier()?;
    }
    Ok(())
}

/// Copies a folder's files with `cp`, and flushes them to disk.
fn copy(from: &Path, to: &Path) -> Duration {
    fs::create_dir_all(to).expect("a folder to copy to");
    let files: Vec<PathBuf> = fs::read_dir(from).unwrap().flatten().map(|e| e.path()).collect();
    let begin = Instant::now();
    let copied = Command::new("cp").arg("--reflink=never").args(&files).arg(to).status();
    assert!(copied.expect("`cp` runs").success());
    for file in fs::read_dir(to).unwrap().flatten() {
        File::open(file.path()).unwrap().sync_all().unwrap();
    }
    File::open(to).unwrap().sync_all().unwrap();
    begin.elapsed()
}

fn remove(folder: &Path) {
    if folder.exists() {
        fs::remove_dir_all(folder).unwrap();
    }
}

fn size(folder: &Path) -> u64 {
    let files = fs::read_dir(folder).unwrap().flatten();
    files.map(|file| file.metadata().unwrap().len()).sum()
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Starts a new peak, on Linux. Returns resident memory in MB.
fn reset_peak() -> u64 {
    let _ = fs::write("/proc/self/clear_refs", "5");
    status("VmRSS")
}

/// Returns a field of `/proc/self/status` in MB, and 0 where there is none.
fn status(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kilobytes.unwrap_or(0) / 1024
}
