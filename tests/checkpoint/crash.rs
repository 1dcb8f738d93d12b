//! Crashes in the middle of a save: a recorded sequence of file operations is replayed up to every
//! point, and the folder then holds the old checkpoint or the new one.
//!
//! `strace` records the operations of a program that saves two checkpoints. A crash loses what was
//! not on disk, for which there are three models ([`Crash`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Restore};
use fsdp_runtime::errors::LaunchError;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::checkpoint::{optimizer, schedule, sharded, train_step};
use crate::support::compare::assert_same_state;
use crate::support::has_strace;

/// Environment variable: the folder in which the program that is started again saves.
const FOLDER: &str = "FSDP_TEST_CRASH";
/// Environment variable: set for a save in the background.
const BACKGROUND: &str = "FSDP_TEST_CRASH_BACKGROUND";
/// Name of the folder that the program creates between its two saves.
const BETWEEN: &str = "between";
const CALLS: &str = "trace=openat,write,pwrite64,lseek,fsync,fdatasync,ftruncate,close,\
                     rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir";
const WORLD: usize = 2;

/// A file operation. Paths are relative to the folder of the test.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Operation {
    Create(PathBuf),
    Write { file: PathBuf, at: usize, bytes: Vec<u8> },
    Sync(PathBuf),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    MakeFolder(PathBuf),
}

/// What a crash loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Crash {
    /// Nothing: operations reach the disk in their order.
    Nothing,
    /// The contents that a file has got since it was last synced. Names reach the disk in order.
    Contents,
    /// Also the names that a folder has got or lost since the folder was last synced.
    ContentsAndNames,
}

/// A file or a folder.
#[derive(Clone, Debug)]
enum Node {
    File { now: Vec<u8>, synced: Vec<u8> },
    Folder { now: BTreeMap<String, usize>, synced: BTreeMap<String, usize> },
}

/// A file system in memory. Nodes have numbers, which names refer to; 0 is the folder of the test.
#[derive(Clone, Debug)]
struct Disk(Vec<Node>);

impl Disk {
    fn new() -> Self {
        Self(vec![Node::Folder { now: BTreeMap::new(), synced: BTreeMap::new() }])
    }

    fn names(&mut self, folder: usize) -> &mut BTreeMap<String, usize> {
        match &mut self.0[folder] {
            Node::Folder { now, .. } => now,
            Node::File { .. } => panic!("a file has no names in it"),
        }
    }

    fn find(&mut self, path: &Path) -> usize {
        path.iter().fold(0, |folder, name| self.names(folder)[name.to_str().unwrap()])
    }

    /// Returns the folder of a path, and the name in it.
    fn place(&mut self, path: &Path) -> (usize, String) {
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        (self.find(path.parent().unwrap()), name)
    }

    fn add(&mut self, path: &Path, node: Node) {
        let (folder, name) = self.place(path);
        self.0.push(node);
        let number = self.0.len() - 1;
        self.names(folder).insert(name, number);
    }

    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Create(path) => {
                let (folder, name) = self.place(path);
                match self.names(folder).get(&name).copied() {
                    None => self.add(path, Node::File { now: Vec::new(), synced: Vec::new() }),
                    Some(number) => {
                        let Node::File { now, .. } = &mut self.0[number] else { panic!() };
                        now.clear();
                    }
                }
            }
            Operation::MakeFolder(path) => {
                self.add(path, Node::Folder { now: BTreeMap::new(), synced: BTreeMap::new() });
            }
            Operation::Write { file, at, bytes } => {
                let number = self.find(file);
                let Node::File { now, .. } = &mut self.0[number] else { panic!() };
                now.resize(now.len().max(at + bytes.len()), 0);
                now[*at..at + bytes.len()].copy_from_slice(bytes);
            }
            Operation::Sync(path) => {
                let number = self.find(path);
                match &mut self.0[number] {
                    Node::File { now, synced } => synced.clone_from(now),
                    Node::Folder { now, synced } => synced.clone_from(now),
                }
            }
            Operation::Rename(from, to) => {
                let (folder, name) = self.place(from);
                let number = self.names(folder).remove(&name).unwrap();
                let (folder, name) = self.place(to);
                self.names(folder).insert(name, number);
            }
            Operation::Remove(path) => {
                let (folder, name) = self.place(path);
                self.names(folder).remove(&name).unwrap();
            }
        }
    }

    /// Writes what a crash leaves of the folder `number` to `to`.
    fn write(&self, number: usize, to: &Path, crash: Crash) {
        match &self.0[number] {
            Node::File { now, synced } => {
                fs::write(to, if crash == Crash::Nothing { now } else { synced }).unwrap();
            }
            Node::Folder { now, synced } => {
                fs::create_dir_all(to).unwrap();
                let left = if crash == Crash::ContentsAndNames { synced } else { now };
                left.iter().for_each(|(name, node)| self.write(*node, &to.join(name), crash));
            }
        }
    }
}

/// Parses the output of `strace -f -y -xx`: the operations on files below `home` that succeeded, and
/// the index of the one that creates the folder [`BETWEEN`].
fn parse(text: &str, home: &Path) -> (Vec<Operation>, usize) {
    let (mut operations, mut unfinished) = (Vec::new(), BTreeMap::new());
    // The position in each open file, by its number. Threads share the numbers.
    let mut positions: BTreeMap<u32, usize> = BTreeMap::new();
    for line in text.lines() {
        let (thread, call) = line.split_once(' ').unwrap();
        let call = call.trim_start();
        if let Some(begin) = call.strip_suffix(" <unfinished ...>") {
            unfinished.insert(thread, begin);
            continue;
        }
        let call = match call.split_once(" resumed>") {
            Some((_, rest)) => format!("{}{rest}", unfinished.remove(thread).unwrap()),
            None => call.to_string(),
        };
        let Some((call, result)) = call.rsplit_once(" = ") else { continue };
        let (name, arguments) = call.trim_end().split_once('(').unwrap();
        let arguments = arguments.strip_suffix(')').unwrap();
        if !result.starts_with('-') {
            operation(name, arguments, result, home, &mut positions, &mut operations);
        }
    }
    assert!(unfinished.is_empty(), "{unfinished:?}");
    let between = Operation::MakeFolder(BETWEEN.into());
    let between = operations.iter().position(|operation| *operation == between).unwrap();
    (operations, between)
}

/// Adds the operation of one call, if it is one on a file below `home`.
fn operation(
    name: &str,
    arguments: &str,
    result: &str,
    home: &Path,
    positions: &mut BTreeMap<u32, usize>,
    operations: &mut Vec<Operation>,
) {
    let below = |path: &Path| path.strip_prefix(home).ok().map(Path::to_path_buf);
    let paths: Vec<PathBuf> = strings(arguments)
        .into_iter()
        .map(|bytes| PathBuf::from(String::from_utf8_lossy(&bytes).into_owned()))
        .collect();
    let descriptor = || arguments.split('<').next().unwrap().parse::<u32>().unwrap();
    // With -y a descriptor is `5</path>`.
    let open_file = || below(&hex_path(arguments.split_once('<')?.1.split_once('>')?.0));
    // The path of a call that may have a descriptor of a folder before its name.
    let named = || match (arguments.starts_with("AT_FDCWD"), paths.first()?) {
        (_, path) if path.is_absolute() => below(path),
        (true, _) => None,
        (false, path) => Some(open_file()?.join(path)),
    };
    let found = match name {
        "openat" => {
            let number = result.split('<').next().unwrap().parse().unwrap();
            positions.insert(number, 0);
            let creates = arguments.contains("O_CREAT") || arguments.contains("O_TRUNC");
            named().filter(|_| creates).map(Operation::Create)
        }
        "write" => {
            let position = positions.entry(descriptor()).or_default();
            let (at, bytes) = (*position, strings(arguments).remove(0));
            let written: usize = result.trim().parse().unwrap();
            *position += written;
            assert!(open_file().is_none() || bytes.len() >= written, "-s is too small");
            open_file().map(|file| Operation::Write { file, at, bytes: bytes[..written].to_vec() })
        }
        "lseek" => {
            positions.insert(descriptor(), result.trim().parse().unwrap());
            None
        }
        "fsync" | "fdatasync" => open_file().map(Operation::Sync),
        "rename" | "renameat" | "renameat2" => {
            below(&paths[0]).zip(below(&paths[1])).map(|(from, to)| Operation::Rename(from, to))
        }
        "unlink" | "unlinkat" | "rmdir" => named().map(Operation::Remove),
        "mkdir" | "mkdirat" => named().map(Operation::MakeFolder),
        "close" => None,
        // A copy of a file's end, or another way to write: not part of a save.
        _ => {
            assert!(open_file().is_none(), "{name}({arguments}) is not replayed");
            None
        }
    };
    operations.extend(found.filter(|operation| *operation != Operation::MakeFolder("".into())));
}

/// Returns the strings in the arguments of a call, which `-xx` writes as `"\x61\x62"`.
fn strings(arguments: &str) -> Vec<Vec<u8>> {
    let quoted = arguments.split('"').skip(1).step_by(2);
    quoted.map(bytes).collect()
}

/// Returns a path, which `-xx` may write as `\x61\x62` too.
fn hex_path(text: &str) -> PathBuf {
    let text = match text.starts_with("\\x") {
        true => String::from_utf8_lossy(&bytes(text)).into_owned(),
        false => text.to_string(),
    };
    PathBuf::from(text)
}

fn bytes(text: &str) -> Vec<u8> {
    let digits = text.split("\\x").skip(1);
    digits.map(|digits| u8::from_str_radix(digits, 16).unwrap()).collect()
}

/// Saves two checkpoints of one step each, of which the newer one replaces the older.
#[test]
#[ignore = "started by the test below, under strace"]
fn two_saves() {
    let home = PathBuf::from(std::env::var_os(FOLDER).expect("started by the test below"));
    let background = std::env::var_os(BACKGROUND).is_some();
    launch(LaunchOptions::new(WORLD).with_device(Device::flex()), move |worker| {
        let mut net = sharded(&worker, 0.0, FsdpOptions::new().with_seed(1))?;
        let (mut optimizer, mut schedule) = (optimizer(), schedule());
        // The folder of the run does not exist yet.
        let mut manager = CheckpointManager::new(home.join("runs/a"), &worker)
            .with_keep_last(1)
            .with_background(background);
        for step in 0..2 {
            train_step(&worker, &mut net, &mut optimizer, &mut schedule, step)?;
            let checkpoint = Checkpoint::new(step as u64 + 1)
                .with_model("net", &net)
                .with_optimizer("adamw", &optimizer);
            manager.save(&checkpoint)?;
            manager.finish()?;
            worker.barrier()?;
            if step == 0 && worker.is_rank_zero() {
                fs::create_dir(home.join(BETWEEN)).unwrap();
            }
            worker.barrier()?;
        }
        Ok::<_, Error>(())
    })
    .expect("the ranks succeed");
}

/// Loads the newest checkpoint of the run that is in `folder`. Returns its step and the model, or
/// `None` if there is none.
fn load(folder: &Path) -> Result<Option<(u64, FullState)>, LaunchError> {
    let root = folder.join("runs/a");
    let options = LaunchOptions::new(WORLD).with_device(Device::flex());
    let mut loaded = launch(options, move |worker| {
        let manager = CheckpointManager::new(&root, &worker);
        let Some(newest) = manager.latest()? else { return Ok(None) };
        let mut net = sharded(&worker, 0.0, FsdpOptions::new().with_seed(9))?;
        let mut optimizer = optimizer();
        let restore = Restore::new().with_model("net", &mut net);
        let restored = restore.with_optimizer("adamw", &mut optimizer).load(&worker, newest)?;
        Ok::<_, Error>(Some((restored.progress.step, net.state().full(Recipient::All)?)))
    })?;
    Ok(loaded.swap_remove(0))
}

/// Returns what is in a folder: paths below it, in order, with the bytes of files.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            let bytes = if path.is_dir() { Vec::new() } else { fs::read(&path).unwrap() };
            found.push((path.strip_prefix(folder).unwrap().to_path_buf(), bytes));
            if path.is_dir() {
                folders.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Records the operations of the two saves. Returns them with the index of the first of the second.
fn record(background: bool) -> (Vec<Operation>, usize) {
    let home = tempfile::tempdir().unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut strace = Command::new("strace");
    strace.args(["-f", "-y", "-xx", "-s", "10000000", "-e", CALLS, "-e", "signal=none", "-o"]);
    strace.arg(log.path()).arg(std::env::current_exe().unwrap());
    strace.args(["--exact", "crash::two_saves", "--ignored"]).env(FOLDER, home.path());
    if background {
        strace.env(BACKGROUND, "1");
    }
    let output = strace.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let text = fs::read_to_string(log.path()).unwrap();
    let calls: String =
        text.lines().filter(|line| !line.contains(" +++ ")).map(|l| format!("{l}\n")).collect();
    parse(&calls, &home.path().canonicalize().unwrap())
}

#[test]
fn every_prefix_of_a_save_leaves_the_old_checkpoint_or_the_new_one() {
    if !has_strace() {
        return eprintln!("skipped: strace cannot run here");
    }
    for background in [false, true] {
        let (operations, between) = record(background);
        let mut disk = Disk::new();
        operations[..between].iter().for_each(|operation| disk.apply(operation));
        let folder = tempfile::tempdir().unwrap();
        let mut states = BTreeMap::new();
        for (step, until) in [(1, between), (2, operations.len())] {
            let whole = folder.path().join(format!("whole-{step}"));
            let mut disk = Disk::new();
            operations[..until].iter().for_each(|operation| disk.apply(operation));
            disk.write(0, &whole, Crash::Nothing);
            let (found, state) = load(&whole).unwrap().expect("a checkpoint");
            assert_eq!(found, step);
            states.insert(step, state);
        }
        let mut seen = BTreeSet::new();
        // What is left after a crash is often what another crash leaves.
        let mut loaded: BTreeMap<Vec<(PathBuf, Vec<u8>)>, u64> = BTreeMap::new();
        for cut in between..=operations.len() {
            for crash in [Crash::Nothing, Crash::Contents, Crash::ContentsAndNames] {
                let left = folder.path().join(format!("{cut}-{crash:?}"));
                disk.write(0, &left, crash);
                let after = operations[..cut].last();
                let what = format!("{crash:?} after {cut} of {}, {after:?}", operations.len());
                let step = *loaded.entry(contents(&left)).or_insert_with(|| {
                    let found = load(&left).unwrap_or_else(|error| panic!("{what}: {error}"));
                    let (step, state) = found.unwrap_or_else(|| panic!("{what}: no checkpoint"));
                    let expected =
                        states.get(&step).unwrap_or_else(|| panic!("{what}: step {step}"));
                    assert_same_state(&state, expected, &what);
                    step
                });
                seen.insert((format!("{crash:?}"), step));
                fs::remove_dir_all(&left).unwrap();
            }
            if let Some(operation) = operations.get(cut) {
                disk.apply(operation);
            }
        }
        // Both checkpoints are seen in each model of a crash.
        assert_eq!(seen.len(), 6, "{seen:?}");
        // The models notice a save that syncs nothing: the contents are lost, or the names.
        for (crash, is_found) in [(Crash::Contents, true), (Crash::ContentsAndNames, false)] {
            let mut disk = Disk::new();
            let unsynced = operations.iter().filter(|o| !matches!(o, Operation::Sync(_)));
            unsynced.for_each(|operation| disk.apply(operation));
            let left = folder.path().join(format!("unsynced-{crash:?}"));
            disk.write(0, &left, crash);
            assert_eq!(load(&left).is_err(), is_found, "{crash:?}");
            assert!(!matches!(load(&left), Ok(Some(_))), "{crash:?}");
        }
        println!("{} operations, {} cuts", operations.len(), operations.len() + 1 - between);
    }
}

/// A crash in the first save leaves no checkpoint, or the first one.
#[test]
fn every_prefix_of_the_first_save_leaves_none_or_a_whole_one() {
    if !has_strace() {
        return eprintln!("skipped: strace cannot run here");
    }
    let (operations, between) = record(false);
    let folder = tempfile::tempdir().unwrap();
    let mut disk = Disk::new();
    let mut found = 0;
    for (cut, operation) in operations.iter().enumerate().take(between + 1) {
        for crash in [Crash::Nothing, Crash::Contents, Crash::ContentsAndNames] {
            let left = folder.path().join(format!("{cut}-{crash:?}"));
            disk.write(0, &left, crash);
            found += usize::from(load(&left).unwrap().is_some_and(|(step, _)| step == 1));
            fs::remove_dir_all(&left).unwrap();
        }
        disk.apply(operation);
    }
    // At the end of the save it is there in each model.
    assert!(found >= 3, "{found}");
}
