//! The most memory that construction, loading and saving take, counted by the allocator.
//!
//! One test in a binary of its own: the counter is the process's, and ranks are its threads.

#[path = "support/peak.rs"]
mod peak;

use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, activation::relu};
use fsdp_runtime::checkpoint::{MergeOptions, merge};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, LoadOptions, Rank, SavePretrained, from_pretrained};
use peak::{LIVE, PEAK};

const WIDTH: usize = 256;
const HIDDEN: usize = 1024;
const BLOCKS: usize = 12;
const WORLD: usize = 4;
const MATRIX: usize = WIDTH * HIDDEN * 4;
const UNIT: usize = 2 * MATRIX;
/// Threads, channels, names: everything that does not grow with the parameters.
const SMALL: usize = 1 << 20;

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
    Net { blocks: (0..BLOCKS).map(block).collect(), head: LinearConfig::new(WIDTH, 4).init(device) }
}

/// Bytes beyond what was live before, at the most, while `f` runs; and what all ranks hold after.
fn peak<T: Send + 'static>(
    f: impl Fn(&Worker) -> Result<T, Error> + Send + Sync + 'static,
) -> (usize, Vec<T>) {
    let launched = LaunchOptions::new(WORLD).with_device(Device::flex());
    let before = LIVE.load(SeqCst);
    PEAK.store(before, SeqCst);
    let ranks = launch(launched, move |worker| f(&worker)).expect("the ranks succeed");
    (PEAK.load(SeqCst) - before, ranks)
}

/// What four ranks hold of the model for good, their gather buffers included.
fn held(net: &Fsdp<Net>) -> usize {
    net.stats().sharded_bytes() + net.stats().gather_buffer_bytes()
}

fn construct(options: FsdpOptions) -> (usize, usize) {
    let (peak, ranks) =
        peak(move |worker| Ok(held(&fully_shard(net(worker.device()), worker, options.clone())?)));
    (peak, ranks.iter().sum())
}

fn within(what: &str, (peak, held): (usize, usize), units: usize) {
    let bound = held + units * UNIT + SMALL;
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    println!("{what}: {:.1} MiB at most, {:.1} MiB held", mib(peak), mib(held));
    assert!(peak >= held, "{what}: the counter sees the shards: {peak} {held}");
    assert!(peak <= bound, "{what}: {:.1} MiB, at most {:.1}", mib(peak), mib(bound));
}

fn save_and_load(folder: &Path) {
    let path = folder.to_path_buf();
    let (saving, ranks) = peak(move |worker| {
        let net = fully_shard(net(worker.device()), worker, FsdpOptions::new().with_seed(1))?;
        worker.barrier()?;
        if worker.rank().index() == 0 {
            PEAK.store(LIVE.load(SeqCst), SeqCst);
        }
        worker.barrier()?;
        net.state().save_pretrained(&path, &SavePretrained::new())?;
        Ok(held(&net))
    });
    // One parameter, its gather, and the writer's buffer; all ranks take part.
    within("saving", (saving, ranks.iter().sum()), 1);

    let (full, ranks) = peak(|worker| {
        let net = fully_shard(net(worker.device()), worker, FsdpOptions::new().with_seed(1))?;
        let state = net.state().full(Recipient::Only(Rank::ZERO))?;
        let result: usize = state.values().map(|data| data.as_bytes().len()).sum();
        // All ranks hold theirs to the end.
        worker.barrier()?;
        Ok(held(&net) + result)
    });
    within("the full state on rank 0", (full, ranks.iter().sum()), 1);

    let path = folder.to_path_buf();
    let (loading, ranks) = peak(move |worker| {
        let mut net = fully_shard(net(worker.device()), worker, FsdpOptions::new())?;
        net.state_mut().load_safetensors(&path, &LoadOptions::new())?;
        Ok(held(&net))
    });
    within("loading", (loading, ranks.iter().sum()), 2);

    let path = folder.to_path_buf();
    let (loading, ranks) = peak(move |worker| {
        let options = FsdpOptions::new();
        let net = net(worker.device());
        let (net, _) = from_pretrained(net, worker, options, &path, &LoadOptions::new())?;
        Ok(held(&net))
    });
    // A shard a rank, and never a full parameter.
    within("from_pretrained", (loading, ranks.iter().sum()), 1);
}

/// A checkpoint of two ranks goes into a model on four that none of them initialised.
fn load_checkpoint(folder: &Path) {
    let path = folder.join("checkpoint");
    let saved = path.clone();
    launch(LaunchOptions::new(2).with_device(Device::flex()), move |worker| {
        let net = fully_shard(net(worker.device()), &worker, FsdpOptions::new().with_seed(1))?;
        net.state().save(&saved)
    })
    .expect("the ranks succeed");
    let (loading, ranks) = peak(move |worker| {
        let options = FsdpOptions::new().with_deferred_init(true);
        let mut net = fully_shard(net(worker.device()), worker, options)?;
        net.state_mut().load(&path)?;
        Ok(held(&net))
    });
    // A rank holds what it has read of a matrix beside what it makes of it, and all may at once.
    within("load_state after deferred_init", (loading, ranks.iter().sum()), 2);
}

/// Without ranks: one tensor, and the writer's buffer.
fn merge_checkpoint(folder: &Path) {
    let before = LIVE.load(SeqCst);
    PEAK.store(before, SeqCst);
    let output = folder.join("merged");
    let merged = merge(folder.join("checkpoint"), &output, &MergeOptions::new()).unwrap();
    assert!(merged.bytes as usize > BLOCKS * UNIT);
    let peak = PEAK.load(SeqCst) - before;
    println!("merging: {:.1} MiB at most", peak as f64 / (1 << 20) as f64);
    assert!((MATRIX..=MATRIX + SMALL).contains(&peak), "merging: {peak} bytes");
}

#[test]
fn construction_holds_fragments_and_one_unit() {
    let all = (BLOCKS * UNIT) as f64 / (1 << 20) as f64;
    println!("{BLOCKS} units of {} MiB: {all:.1} MiB", UNIT >> 20);
    within("rank 0 initialises", construct(FsdpOptions::new().with_seed(1)), 2);
    within("rank 0 initialises, unseeded", construct(FsdpOptions::new()), 2);
    within("no rank initialises", construct(FsdpOptions::new().with_deferred_init(true)), 0);
    // Every rank initialises a parameter at a time: a matrix a rank, and the draw.
    let every = FsdpOptions::new().with_seed(1).with_sync_module_states(false);
    within("every rank initialises", construct(every), WORLD);
    let folder = tempfile::tempdir().unwrap();
    save_and_load(folder.path());
    load_checkpoint(folder.path());
    merge_checkpoint(folder.path());
}
