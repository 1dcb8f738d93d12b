//! The peak of memory while a model is constructed, saved, loaded and merged, counted by the
//! allocator.
//!
//! One test in a binary of its own: the counters cover the whole process, of which ranks are
//! threads.

#[path = "../fsdp-runtime/tests/support/allocator.rs"]
mod allocator;
#[path = "../fsdp-runtime/tests/support/mlp.rs"]
mod mlp;

use std::path::Path;

use allocator::Counting;
use burn::module::Module;
use burn::tensor::Device;
use fsdp_runtime::checkpoint::{MergeOptions, merge};
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, SavePretrained, from_pretrained};
use fsdp_runtime::{Error, Rank};
use mlp::{Mlp, Sizes};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const SIZES: Sizes = Sizes { blocks: 12, width: 256, hidden: 1024, outputs: 4 };
const WORLD: usize = 4;
/// Bytes of a matrix.
const MATRIX: usize = SIZES.width * SIZES.hidden * size_of::<f32>();
/// Bytes of the matrices of a unit.
const UNIT: usize = 2 * MATRIX;
/// Bytes of threads, channels, names and descriptions of parameters, all ranks together: about 1 MiB,
/// in allocations of at most 8 KiB. The margin is less than a matrix.
const SMALL: usize = 3 << 19;

/// Runs `f` on all ranks. Returns the peak in bytes beyond what was live before, and each rank's
/// value.
fn peak<T: Send + 'static>(
    f: impl Fn(&Worker) -> Result<T, Error> + Send + Sync + 'static,
) -> (usize, Vec<T>) {
    let launched = LaunchOptions::new(WORLD).with_device(Device::flex());
    let before = ALLOCATOR.reset_peak();
    let ranks = launch(launched, move |worker| f(&worker)).expect("the ranks succeed");
    (ALLOCATOR.peak() - before, ranks)
}

/// Returns the bytes that a rank holds of the model as long as it lives: its shards and its gather
/// buffers.
fn held(net: &Fsdp<Mlp>) -> usize {
    net.stats().sharded_bytes() + net.stats().gather_buffer_bytes()
}

fn construct(options: FsdpOptions) -> (usize, usize) {
    let (peak, ranks) = peak(move |worker| {
        Ok(held(&fully_shard(SIZES.init(worker.device()), worker, options.clone())?))
    });
    (peak, ranks.iter().sum())
}

/// Constructs a frozen model whose matrices are stored in 4 bits, from Burn's initialiser or from files
/// of weights.
fn construct_codes(folder: Option<&Path>) -> (usize, usize) {
    let folder = folder.map(Path::to_path_buf);
    let storage = StoragePolicy::new().with_frozen(StorageType::NF4);
    let (peak, ranks) = peak(move |worker| {
        let options = FsdpOptions::new().with_seed(1).with_storage(storage);
        let net = SIZES.init(worker.device()).freeze();
        let net = match &folder {
            Some(path) => from_pretrained(net, worker, options, path, &LoadOptions::new())?.0,
            None => fully_shard(net, worker, options)?,
        };
        let codes = net.stats().memory().shards.now;
        assert!(codes * 7 < SIZES.blocks * UNIT / WORLD, "{codes} bytes of codes");
        Ok(held(&net))
    });
    (peak, ranks.iter().sum())
}

/// Asserts that a peak is at most the bytes that all ranks hold and those of `units` units.
fn within(what: &str, (peak, held): (usize, usize), units: usize) {
    let bound = held + units * UNIT + SMALL;
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    println!("{what}: {:.1} MiB at most, {:.1} MiB held", mib(peak), mib(held));
    assert!(peak >= held, "{what}: shards are counted: {peak} {held}");
    assert!(peak <= bound, "{what}: {:.1} MiB, at most {:.1}", mib(peak), mib(bound));
}

/// Returns options under which shards lie in one memory, or do not.
fn options(in_place: bool) -> FsdpOptions {
    FsdpOptions::new().with_gather_in_place(in_place)
}

fn save_and_load(folder: &Path, in_place: bool) {
    let path = folder.to_path_buf();
    let (saving, ranks) = peak(move |worker| {
        let net = fully_shard(SIZES.init(worker.device()), worker, options(in_place).with_seed(1))?;
        worker.barrier()?;
        if worker.is_rank_zero() {
            ALLOCATOR.reset_peak();
        }
        worker.barrier()?;
        net.state().save_pretrained(&path, &SavePretrained::new())?;
        Ok(held(&net))
    });
    // One parameter, its gather, and the writer's buffer.
    within("saving", (saving, ranks.iter().sum()), 1);

    let (full, ranks) = peak(move |worker| {
        let net = fully_shard(SIZES.init(worker.device()), worker, options(in_place).with_seed(1))?;
        let state = net.state().full(Recipient::Only(Rank::ZERO))?;
        let result: usize = state.values().map(|data| data.as_bytes().len()).sum();
        // Every rank holds its shards until all have taken part.
        worker.barrier()?;
        Ok(held(&net) + result)
    });
    within("the full state on rank 0", (full, ranks.iter().sum()), 1);

    let path = folder.to_path_buf();
    let (loading, ranks) = peak(move |worker| {
        let mut net = fully_shard(SIZES.init(worker.device()), worker, options(in_place))?;
        net.state_mut().load_safetensors(&path, &LoadOptions::new())?;
        Ok(held(&net))
    });
    within("loading", (loading, ranks.iter().sum()), 2);

    let path = folder.to_path_buf();
    let (loading, ranks) = peak(move |worker| {
        let options = options(in_place);
        let net = SIZES.init(worker.device());
        let (net, _) = from_pretrained(net, worker, options, &path, &LoadOptions::new())?;
        Ok(held(&net))
    });
    // Each rank reads its shard, and never a full parameter.
    // In one memory, each rank has the part that it moves there twice.
    within("from_pretrained", (loading, ranks.iter().sum()), 1 + usize::from(in_place));
}

/// A checkpoint of two ranks is loaded into a model on four ranks that was not initialised.
fn load_checkpoint(folder: &Path, in_place: bool) {
    let path = folder.join("checkpoint");
    let saved = path.clone();
    launch(LaunchOptions::new(2).with_device(Device::flex()), move |worker| {
        let net =
            fully_shard(SIZES.init(worker.device()), &worker, options(in_place).with_seed(1))?;
        net.state().save(&saved)
    })
    .expect("the ranks succeed");
    let (loading, ranks) = peak(move |worker| {
        let options = options(in_place).with_deferred_init(true);
        let mut net = fully_shard(SIZES.init(worker.device()), worker, options)?;
        net.state_mut().load(&path)?;
        Ok(held(&net))
    });
    // Each rank may hold a part of a matrix as it was read and as it is kept, all ranks at once.
    within("load_state after deferred_init", (loading, ranks.iter().sum()), 2);
}

/// A merge runs without ranks, and holds one tensor and the writer's buffer.
fn merge_checkpoint(folder: &Path) {
    let before = ALLOCATOR.reset_peak();
    let output = folder.join("merged");
    let merged = merge(folder.join("checkpoint"), &output, &MergeOptions::new()).unwrap();
    assert!(merged.bytes as usize > SIZES.blocks * UNIT);
    let peak = ALLOCATOR.peak() - before;
    println!("merging: {:.1} MiB at most", peak as f64 / (1 << 20) as f64);
    assert!((MATRIX..=MATRIX + SMALL).contains(&peak), "merging: {peak} bytes");
}

#[test]
fn construction_holds_shards_and_one_unit() {
    let all = (SIZES.blocks * UNIT) as f64 / (1 << 20) as f64;
    println!("{} units of {} MiB: {all:.1} MiB", SIZES.blocks, UNIT >> 20);
    for in_place in [false, true] {
        println!("shards in one memory: {in_place}");
        let options = || options(in_place);
        within("rank 0 initialises", construct(options().with_seed(1)), 2);
        within("rank 0 initialises, unseeded", construct(options()), 2);
        within(
            "no rank initialises",
            construct(options().with_deferred_init(true)),
            in_place.into(),
        );
        // Every rank initialises one parameter at a time: a matrix, and the tensor that it is drawn
        // into.
        let every = options().with_seed(1).with_sync_module_states(false);
        // In one memory the places of all shards are held from the start, so that a third matrix shows as
        // well: the copy whose checksum is taken.
        let copies = if in_place { WORLD / 2 } else { 0 };
        within("every rank initialises", construct(every), WORLD + copies);
        let folder = tempfile::tempdir().unwrap();
        save_and_load(folder.path(), in_place);
        load_checkpoint(folder.path(), in_place);
        if !in_place {
            within("rank 0 initialises codes", construct_codes(None), 2);
            // Scales in 8 bits depend on the whole matrix, which every rank reads.
            within("codes of a file", construct_codes(Some(folder.path())), WORLD / 2 + 1);
            merge_checkpoint(folder.path());
        }
    }
}
