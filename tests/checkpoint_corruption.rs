//! Damaged checkpoints: each loads exactly what was saved, or gives a typed error. None panics,
//! hangs, or makes an allocation larger than the folder's files.
//!
//! A binary of its own, whose allocator counts.

#[path = "../fsdp-runtime/tests/support/allocator.rs"]
mod allocator;
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use allocator::Counting;
use burn::optim::ModuleOptimizer;
use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Manifest, Restore, seal};
use fsdp_runtime::errors::{CheckpointError, RankPanic};
use fsdp_runtime::prelude::*;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use support::Net;
use support::checkpoint::{optimizer, schedule, sharded, train_step};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

/// The counters cover the whole process, so that tests run one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Ranks that save.
const SAVED_BY: usize = 3;
/// Ranks that load.
const LOADED_BY: usize = 2;

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn loading() -> LaunchOptions {
    LaunchOptions::new(LOADED_BY).with_device(Device::flex()).with_timeout(Duration::from_secs(30))
}

/// The state that a load sets.
#[derive(PartialEq)]
struct Loaded {
    /// Parameters and optimizer state, as [`elements`] returns them.
    elements: Vec<u8>,
    /// Everything else, as text.
    other: String,
}

/// Returns the full parameters and the full state of the optimizer: their names, and the bytes of
/// their elements.
fn elements(net: &Fsdp<Net>, optimizer: &ModuleOptimizer) -> Result<Vec<u8>, Error> {
    let mut all = Vec::new();
    for (path, data) in &net.state().full(Recipient::All)? {
        all.extend([path.as_bytes(), data.as_bytes()].concat());
    }
    for (path, state) in net.state().full_optimizer(optimizer, Recipient::All)?.parameters {
        all.extend(format!("{path} {:?}", state.scalars).into_bytes());
        state.tensors.values().for_each(|data| all.extend(data.as_bytes()));
    }
    Ok(all)
}

/// Saves a valid checkpoint of a model, an optimizer and a scheduler. Returns the [`elements`] of
/// the model and the optimizer.
fn save(folder: &Path) -> Vec<u8> {
    let folder = folder.to_path_buf();
    let mut ranks =
        launch(LaunchOptions::new(SAVED_BY).with_device(Device::flex()), move |worker| {
            let mut net = sharded(&worker, 0.1, FsdpOptions::new().with_seed(1))?;
            let (mut own, mut rate) = (optimizer(), schedule());
            for step in 0..2 {
                train_step(&worker, &mut net, &mut own, &mut rate, step)?;
            }
            Checkpoint::new(2)
                .with_data_position(1, 5)
                .with_loss_scale(1024.0)
                .with_value("note", "text")
                .with_model("net", &net)
                .with_optimizer("adamw", &own)
                .with_scheduler("rate", &rate)
                .save(&worker, &folder)?;
            elements(&net, &own)
        })
        .expect("the checkpoint is saved");
    ranks.swap_remove(0)
}

/// Loads a checkpoint. Returns all that a load sets, or the error of each rank.
fn load(folder: &Path) -> Result<Loaded, Vec<Error>> {
    let folder = folder.to_path_buf();
    let ranks = launch(loading(), move |worker| {
        let mut net = sharded(&worker, 0.1, FsdpOptions::new().with_seed(9))?;
        let before = net.state().full(Recipient::All)?;
        let (mut own, mut rate) = (optimizer(), schedule());
        let restore = Restore::new()
            .with_model("net", &mut net)
            .with_optimizer("adamw", &mut own)
            .with_scheduler("rate", &mut rate);
        let restored = match restore.load(&worker, &folder) {
            Ok(restored) => restored,
            Err(error) => {
                // A load that fails has changed nothing.
                assert_eq!(net.state().full(Recipient::All)?, before);
                assert!(net.state().full_optimizer(&own, Recipient::All)?.parameters.is_empty());
                return Ok::<_, Error>(Err(error));
            }
        };
        let other = format!("{:?} {:?}", restored, rate.step().base());
        Ok(Ok(Loaded { elements: elements(&net, &own)?, other }))
    });
    let ranks = match ranks {
        Ok(ranks) => ranks,
        Err(error) => {
            assert!(error.source.downcast_ref::<RankPanic>().is_none(), "{error}");
            panic!("the process group ended: {error}");
        }
    };
    let (loaded, errors): (Vec<_>, Vec<_>) = ranks.into_iter().partition(Result::is_ok);
    assert!(loaded.is_empty() || errors.is_empty(), "every rank loads, or no rank does");
    if !errors.is_empty() {
        return Err(errors.into_iter().filter_map(Result::err).collect());
    }
    let mut loaded: Vec<_> = loaded.into_iter().filter_map(Result::ok).collect();
    assert!(loaded.windows(2).all(|pair| pair[0] == pair[1]));
    Ok(loaded.swap_remove(0))
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().flatten().map(|e| e.path()).collect();
    files.sort();
    files
}

/// Damages a folder in one way. Returns what was done.
fn damage(folder: &Path, random: &mut StdRng) -> String {
    let files = files(folder);
    let file = files.choose(random).unwrap().clone();
    let name = file.file_name().unwrap().to_string_lossy().into_owned();
    let mut bytes = fs::read(&file).unwrap();
    match random.random_range(0..8) {
        0 => {
            let len = random.random_range(0..bytes.len());
            bytes.truncate(len);
            fs::write(&file, bytes).unwrap();
            format!("truncate {name} to {len}")
        }
        1 | 2 => {
            // Half of the flips hit the first bytes, where the header lies.
            let end = if random.random() { bytes.len() } else { bytes.len().min(4000) };
            let at = random.random_range(0..end);
            bytes[at] ^= 1 << random.random_range(0..8);
            fs::write(&file, bytes).unwrap();
            format!("flip a bit of {name} at {at}")
        }
        3 => {
            fs::remove_file(&file).unwrap();
            format!("remove {name}")
        }
        4 => {
            fs::rename(&file, file.with_extension("bak")).unwrap();
            format!("rename {name}")
        }
        5 => {
            let other = files.choose(random).unwrap().clone();
            let theirs = fs::read(&other).unwrap();
            fs::write(&file, theirs).unwrap();
            fs::write(&other, bytes).unwrap();
            format!("swap {name} and {}", other.display())
        }
        6 => {
            let more: Vec<u8> = (0..random.random_range(1..100)).map(|_| random.random()).collect();
            bytes.extend(&more);
            fs::write(&file, bytes).unwrap();
            format!("append {} bytes to {name}", more.len())
        }
        _ => {
            let manifest = folder.join("manifest.json");
            let text = fs::read_to_string(&manifest).unwrap();
            let edited = edit(&text, random);
            fs::write(&manifest, &edited).unwrap();
            "edit the manifest".into()
        }
    }
}

/// Replaces one digit, inserts digits, or removes up to 40 bytes.
fn edit(text: &str, random: &mut StdRng) -> String {
    let mut bytes = text.as_bytes().to_vec();
    let digits: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at].is_ascii_digit()).collect();
    match random.random_range(0..3) {
        0 => {
            let at = *digits.choose(random).unwrap();
            bytes[at] = b'0' + random.random_range(0..10u8);
        }
        1 => {
            let at = *digits.choose(random).unwrap();
            bytes.splice(at..at, std::iter::repeat_n(b'9', random.random_range(1..25)));
        }
        _ => {
            let at = random.random_range(0..bytes.len());
            let end = (at + random.random_range(1..40)).min(bytes.len());
            bytes.drain(at..end);
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Saves a valid checkpoint at `folder` and loads it. Returns the bytes in its files, the largest
/// allocation that a load may make, and what a load sets.
fn save_valid(folder: &Path) -> (u64, usize, Loaded) {
    let saved = save(folder);
    let total = files(folder).iter().map(|file| fs::metadata(file).unwrap().len()).sum();
    ALLOCATOR.take_largest();
    let expected = load(folder).unwrap_or_else(|errors| panic!("{errors:?}"));
    assert!(!saved.is_empty() && expected.elements == saved, "a load restores what was saved");
    // A launch itself allocates stacks and queues. Only what a damaged file adds counts.
    let largest = ALLOCATOR.take_largest();
    assert!(largest > 0, "allocations are counted");
    (total, largest.max(2 * total as usize), expected)
}

/// Returns whether one rank has a typed error of the checkpoint.
fn is_typed(errors: &[Error]) -> bool {
    errors.iter().any(|error| matches!(error, Error::Checkpoint(_)))
}

#[test]
fn two_hundred_corruptions_load_the_same_or_give_a_typed_error() {
    let _alone = alone();
    let home = tempfile::tempdir().unwrap();
    let valid = home.path().join("valid");
    let (total, bound, expected) = save_valid(&valid);
    let mut random = StdRng::seed_from_u64(20_240_917);
    let (mut same, mut refused) = (0, 0);
    for number in 0..200 {
        let folder = home.path().join(format!("damaged-{number}"));
        copy(&valid, &folder);
        let how = damage(&folder, &mut random);
        ALLOCATOR.take_largest();
        match load(&folder) {
            Ok(found) => {
                assert!(found == expected, "{how}: another state was loaded");
                same += 1;
            }
            Err(errors) => {
                assert!(is_typed(&errors), "{how}: {errors:?}");
                refused += 1;
            }
        }
        let largest = ALLOCATOR.take_largest();
        assert!(largest <= bound, "{how}: an allocation of {largest} bytes for {total} in files");
        fs::remove_dir_all(&folder).unwrap();
    }
    assert!(refused > 150 && same > 0, "{refused} refused, {same} loaded the same");
}

/// Edits with a new checksum pass the first check, and reach what reads the manifest.
#[test]
fn edits_with_a_valid_checksum_never_panic_nor_allocate_beyond_the_files() {
    let _alone = alone();
    let home = tempfile::tempdir().unwrap();
    let valid = home.path().join("valid");
    let (total, bound, _) = save_valid(&valid);
    let path = valid.join("manifest.json");
    let text = fs::read(&path).unwrap();
    let body = Manifest::parse(&text, "manifest.json").unwrap().to_body();
    let mut random = StdRng::seed_from_u64(5);
    let (mut loaded, mut refused) = (0, 0);
    for _ in 0..100 {
        let edited = edit(&body, &mut random);
        fs::write(&path, seal(&edited)).unwrap();
        ALLOCATOR.take_largest();
        match load(&valid) {
            Ok(_) => loaded += 1,
            Err(errors) => {
                assert!(is_typed(&errors), "{edited}: {errors:?}");
                let by_checksum = |error: &Error| {
                    let Error::Checkpoint(CheckpointError::Damaged { file, .. }) = error else {
                        return false;
                    };
                    file.ends_with("manifest.json")
                };
                refused += usize::from(!errors.iter().any(by_checksum));
            }
        }
        let largest = ALLOCATOR.take_largest();
        assert!(largest <= bound, "an allocation of {largest} bytes for {total} in files");
    }
    println!("{loaded} loaded, {refused} refused for another reason than the checksum");
    assert!(loaded + refused > 90 && refused > 0, "{loaded} loaded, {refused} refused");
}

/// Returns the error of the rank that found the damage.
fn error(folder: &Path) -> CheckpointError {
    let errors = load(folder).err().expect("a damaged checkpoint is refused");
    let found = errors.into_iter().find_map(|error| match error {
        Error::Checkpoint(error) => Some(error),
        _ => None,
    });
    found.expect("one rank has the typed error")
}

#[test]
fn every_kind_of_damage_has_an_error_that_names_the_file() {
    let _alone = alone();
    let home = tempfile::tempdir().unwrap();
    let valid = home.path().join("valid");
    save(&valid);
    let damaged = |change: &dyn Fn(&Path)| {
        let folder = home.path().join("damaged");
        let _ = fs::remove_dir_all(&folder);
        copy(&valid, &folder);
        change(&folder);
        error(&folder)
    };
    let named = |error: &CheckpointError, file: &str| {
        assert!(error.to_string().contains(file), "{error}");
    };

    let missing =
        damaged(&|folder| fs::remove_file(folder.join("rank-00001.safetensors")).unwrap());
    assert!(matches!(missing, CheckpointError::MissingFile { .. }), "{missing}");
    named(&missing, "rank-00001.safetensors");

    let torn = damaged(&|folder| fs::remove_file(folder.join("manifest.json")).unwrap());
    assert!(matches!(torn, CheckpointError::Torn { .. }), "{torn}");

    let flipped = damaged(&|folder| {
        let file = folder.join("rank-00002.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 0x10;
        fs::write(file, bytes).unwrap();
    });
    assert!(matches!(flipped, CheckpointError::Damaged { .. }), "{flipped}");
    named(&flipped, "rank-00002.safetensors");

    let foreign = damaged(&|folder| {
        fs::remove_dir_all(folder).unwrap();
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("model.safetensors"), "x").unwrap();
    });
    assert!(matches!(foreign, CheckpointError::NotAManifest { .. }), "{foreign}");
    let foreign = damaged(&|folder| fs::write(folder.join("manifest.json"), "{\"a\": 1}").unwrap());
    assert!(matches!(foreign, CheckpointError::NotAManifest { .. }), "{foreign}");

    let later = damaged(&|folder| {
        let file = folder.join("manifest.json");
        let text = fs::read_to_string(&file).unwrap();
        fs::write(file, text.replace("\"version\":3,", "\"version\":7,\"new\":[],")).unwrap();
    });
    assert!(
        matches!(later, CheckpointError::LaterVersion { found: 7, supported: 4, .. }),
        "{later}"
    );

    let edited = damaged(&|folder| {
        let file = folder.join("manifest.json");
        let text = fs::read_to_string(&file).unwrap();
        fs::write(file, text.replace("\"step\":2", "\"step\":3")).unwrap();
    });
    assert!(matches!(edited, CheckpointError::Damaged { .. }), "{edited}");
    named(&edited, "manifest.json");

    let absent = error(&home.path().join("absent"));
    assert!(
        matches!(absent, CheckpointError::Io { kind: std::io::ErrorKind::NotFound, .. }),
        "{absent}"
    );
}

/// The error is on every rank, and the next save works.
#[test]
fn a_file_that_cannot_be_written_is_an_error_on_every_rank() {
    let _alone = alone();
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("run");
    // A file where the root should be: no folder can be created there.
    fs::write(&root, "in the way").unwrap();
    let blocked = root.clone();
    let errors = launch(loading(), move |worker| {
        let net = sharded(&worker, 0.0, FsdpOptions::new())?;
        let mut manager = CheckpointManager::new(&blocked, &worker);
        let error = manager.save(&Checkpoint::new(1).with_model("net", &net)).unwrap_err();
        worker.barrier()?;
        if worker.is_rank_zero() {
            fs::remove_file(&blocked).unwrap();
        }
        worker.barrier()?;
        manager.save(&Checkpoint::new(2).with_model("net", &net))?;
        Ok::<_, Error>(error)
    })
    .expect("the process group is still whole");
    assert!(matches!(&errors[0], Error::Checkpoint(CheckpointError::Io { .. })), "{}", errors[0]);
    assert!(errors[0].to_string().contains("run"), "{}", errors[0]);
    assert!(errors[1].to_string().starts_with("rank 0 failed"), "{}", errors[1]);
    assert!(root.join("step-00000002/manifest.json").exists());
}
