//! Saving: what goes into a checkpoint, and the steps in which the ranks write it together.
//!
//! Rank 0 makes a folder beside the final one and tells the others. Each rank writes its file and
//! leaves its part of the manifest there (no rank waits for another's bytes); rank 0 puts the parts
//! together, writes the manifest last and renames the folder. In the background the same two steps
//! run on a thread of each rank, and rank 0's looks for the parts instead of being told; only the
//! outcomes are exchanged later, by `finish`, so that no collective runs beside the training's.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::ModuleOptimizer;
use serde_json::Value;

use super::manifest::{MANIFEST, Manifest, Progress};
use super::model::Model;
use super::own::Differing;
use super::ranks::Ranks;
use super::scalar::Scalars;
use super::sink::{FileSink, MemorySink};
use super::write::{gather_parts, leave_part, missing_part, outline, part_file, parts};
use super::{folder, io, scheduler};
use crate::checkpoint::State;
use crate::error::CheckpointError;
use crate::error::Error;
use crate::fully_shard::Fsdp;
use crate::launch::Worker;
use crate::module::FsdpModule;
use crate::optim::GradScaler;
use crate::optim::WholeParam;

/// How long a background save waits for the other ranks' files, its own being written.
const PATIENCE: Duration = Duration::from_secs(600);

/// What to save: a builder. Every rank names the same things.
#[derive(Default)]
#[must_use]
pub struct Checkpoint<'a> {
    pub(crate) progress: Progress,
    pub(crate) models: BTreeMap<String, &'a dyn Model>,
    pub(crate) optimizers: BTreeMap<String, SavedOptimizer<'a>>,
    pub(crate) schedulers: BTreeMap<String, Scalars>,
    pub(crate) scalers: BTreeMap<String, Scalars>,
    pub(crate) values: BTreeMap<String, String>,
}

/// An optimizer to save.
#[derive(Clone, Copy)]
pub(crate) struct SavedOptimizer<'a> {
    pub(crate) optimizer: &'a ModuleOptimizer,
    /// Whether it steps matrices whole, each on its owner.
    pub(crate) whole: bool,
}

impl std::fmt::Debug for Checkpoint<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.summary())
    }
}

impl<'a> Checkpoint<'a> {
    /// Nothing yet, after `step` optimizer steps.
    pub fn new(step: u64) -> Self {
        Self { progress: Progress { step, ..Progress::default() }, ..Self::default() }
    }

    /// Where the data stand: completed passes, and the sampler's position in this one.
    pub fn with_data_position(mut self, epoch: u64, position: u64) -> Self {
        (self.progress.epoch, self.progress.position) = (epoch, position);
        self
    }

    /// The scale of the loss, where no [`GradScaler`] keeps it.
    pub fn with_loss_scale(mut self, scale: f32) -> Self {
        self.progress.loss_scale = Some(scale);
        self
    }

    /// A model and its randomness.
    pub fn with_model<M: FsdpModule>(
        mut self,
        name: impl Into<String>,
        model: &'a Fsdp<M>,
    ) -> Self {
        self.models.insert(name.into(), model);
        self
    }

    /// An optimizer of any of the models added, before or after.
    pub fn with_optimizer(
        mut self,
        name: impl Into<String>,
        optimizer: &'a ModuleOptimizer,
    ) -> Self {
        self.optimizers.insert(name.into(), SavedOptimizer { optimizer, whole: false });
        self
    }

    /// An optimizer of whole matrices, of any of the models added. The state of each is written by
    /// its owner, and goes to the new owner wherever it is loaded.
    pub fn with_whole_optimizer(
        mut self,
        name: impl Into<String>,
        optimizer: &'a WholeParam,
    ) -> Self {
        let optimizer = optimizer.inner();
        self.optimizers.insert(name.into(), SavedOptimizer { optimizer, whole: true });
        self
    }

    /// A learning-rate scheduler.
    pub fn with_scheduler(
        mut self,
        name: impl Into<String>,
        scheduler: &ModuleLrScheduler,
    ) -> Self {
        self.schedulers.insert(name.into(), scheduler::scalars(&scheduler.to_record()));
        self
    }

    /// A loss scaler, with all of its state. Its scale is the checkpoint's
    /// [`loss_scale`](Progress::loss_scale) too.
    pub fn with_grad_scaler(mut self, name: impl Into<String>, scaler: &GradScaler) -> Self {
        self.scalers.insert(name.into(), scaler.scalars());
        self.with_loss_scale(scaler.loss_scale())
    }

    /// Anything else, as JSON; rank 0's is kept. A float may come back with another last bit, unless
    /// the program turns on serde_json's `float_roundtrip`.
    pub fn with_value(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.values.insert(name.into(), value.into().to_string());
        self
    }

    /// Writes the checkpoint as `folder`, which appears once it is complete. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] on the rank it happened on, and
    /// [`CollectiveError::PeerFailed`](crate::CollectiveError::PeerFailed) on the others.
    pub fn save(&self, worker: &Worker, folder: impl AsRef<Path>) -> Result<(), Error> {
        save(self, &Ranks::from(worker), folder.as_ref(), None)
    }

    /// A line that must be the same on every rank.
    fn summary(&self) -> String {
        fn names<T>(map: &BTreeMap<String, T>) -> String {
            map.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
        }
        format!(
            "step {}, models [{}], optimizers [{}], schedulers [{}], scalers [{}]",
            self.progress.step,
            names(&self.models),
            names(&self.optimizers),
            names(&self.schedulers),
            names(&self.scalers)
        )
    }
}

impl<M: FsdpModule> State<'_, M> {
    /// Saves the model alone as a checkpoint folder, in which it is called `model`. Every rank
    /// calls it. [`Checkpoint`] takes optimizers and more.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::save`].
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<(), Error> {
        save(
            &Checkpoint::new(0).with_model("model", self.model),
            &Ranks::from(self.model),
            folder.as_ref(),
            None,
        )
    }
}

/// A folder of checkpoints.
#[derive(Clone, Debug)]
struct Home {
    root: PathBuf,
    keep_last: Option<usize>,
}

/// Saves at once.
fn save(
    checkpoint: &Checkpoint<'_>,
    ranks: &Ranks,
    target: &Path,
    home: Option<&Home>,
) -> Result<(), Error> {
    let (tmp, differing) = begin(checkpoint, ranks, target, home)?;
    let write = |mut sink: FileSink| {
        parts(checkpoint, &differing, &mut sink)?;
        leave_part(&tmp, ranks.index(), &sink.finish()?)
    };
    let written = FileSink::create(&tmp, ranks.index(), outline(checkpoint, ranks)).and_then(write);
    let written = ranks.settle("the files of a checkpoint", written);
    let committed = match &written {
        Ok(()) if ranks.leads() => commit(&tmp, target, ranks.mesh.world.size(), home),
        _ => Ok(()),
    };
    if ranks.leads() && (written.is_err() || committed.is_err()) {
        // What this leaves is recognised as torn.
        let _ = fs::remove_dir_all(&tmp);
    }
    written?;
    ranks.settle("the manifest of a checkpoint", committed)
}

/// Agrees on what is saved, finds what of it differs between ranks that could be alike, and makes the
/// folder to write in.
fn begin(
    checkpoint: &Checkpoint<'_>,
    ranks: &Ranks,
    target: &Path,
    home: Option<&Home>,
) -> Result<(PathBuf, Differing), Error> {
    let all = ranks.exchange("what is saved", checkpoint.summary())?;
    for (rank, found) in ranks.mesh.world.ranks().zip(&all) {
        if *found != all[0] {
            let (expected, found) = (all[0].to_string(), found.to_string());
            return Err(CheckpointError::RanksDiffer { rank, expected, found }.into());
        }
    }
    let differing = Differing::find(checkpoint, ranks)?;
    let made = if ranks.leads() { make(target, home) } else { Ok(PathBuf::new()) };
    let made = ranks.settle("a checkpoint's folder", made)?;
    let tmp = ranks.exchange("a checkpoint's folder", made)?[0].to_path_buf();
    Ok((tmp, differing))
}

fn make(target: &Path, home: Option<&Home>) -> Result<PathBuf, CheckpointError> {
    if let Some(home) = home {
        folder::clean(&home.root)?;
    }
    folder::check_target(target)?;
    let tmp = folder::beside(target);
    fs::create_dir_all(&tmp).map_err(io("create", &tmp))?;
    Ok(tmp)
}

/// Writes the manifest, which makes the folder a checkpoint, and gives it its name.
fn commit(
    tmp: &Path,
    target: &Path,
    world: usize,
    home: Option<&Home>,
) -> Result<(), CheckpointError> {
    let manifest: Manifest = gather_parts(tmp, world)?;
    for rank in 0..world {
        let part = tmp.join(part_file(rank));
        fs::remove_file(&part).map_err(io("delete", &part))?;
    }
    let path = tmp.join(MANIFEST);
    let mut file = fs::File::create_new(&path).map_err(io("create", &path))?;
    file.write_all(manifest.to_text().as_bytes()).map_err(io("write", &path))?;
    file.sync_all().map_err(io("write", &path))?;
    folder::publish(tmp, target)?;
    match home {
        Some(Home { root, keep_last: Some(keep) }) => folder::prune(root, *keep, target),
        _ => Ok(()),
    }
}

/// What a save cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The checkpoint; in the background, what it will be once it is complete.
    pub folder: PathBuf,
    /// How long training stood still: the whole save, or the copy, and the wait for the save before.
    pub stall: Duration,
}

/// A run's checkpoints: a folder `step-00000012` each, below one root.
///
/// One run at a time writes below a root: what another one's save left there is cleaned up.
#[derive(Debug)]
#[must_use]
pub struct CheckpointManager {
    home: Home,
    ranks: Ranks,
    background: bool,
    pending: Option<Pending>,
}

/// A save in the background.
#[derive(Debug)]
struct Pending {
    tmp: PathBuf,
    written: Receiver<Result<(), CheckpointError>>,
    thread: JoinHandle<Result<(), CheckpointError>>,
    cancel: Arc<AtomicBool>,
}

impl CheckpointManager {
    /// The checkpoints below `root`, which the first save creates.
    pub fn new(root: impl Into<PathBuf>, worker: &Worker) -> Self {
        let home = Home { root: root.into(), keep_last: None };
        Self { home, ranks: Ranks::from(worker), background: false, pending: None }
    }

    /// Keeps `count` checkpoints, at least one: the one just saved, and those of the highest steps.
    /// The others are deleted once a new one is complete.
    pub fn with_keep_last(mut self, count: usize) -> Self {
        self.home.keep_last = Some(count.max(1));
        self
    }

    /// Whether saves copy what they need and write it while training goes on.
    pub fn with_background(mut self, background: bool) -> Self {
        self.background = background;
        self
    }

    /// The root folder.
    pub fn root(&self) -> &Path {
        &self.home.root
    }

    pub(crate) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Saves as the folder of the checkpoint's step. In the background, waits for the save before,
    /// copies, and returns; [`finish`](Self::finish) tells how it ended. Every rank calls it.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::save`], and those of the save before.
    pub fn save(&mut self, checkpoint: &Checkpoint<'_>) -> Result<Saved, Error> {
        let begun = Instant::now();
        self.finish()?;
        let target = self.home.root.join(folder::step_folder(checkpoint.progress.step));
        if self.background {
            self.pending = Some(self.start(checkpoint, &target)?);
        } else {
            save(checkpoint, &self.ranks, &target, Some(&self.home))?;
        }
        Ok(Saved { folder: target, stall: begun.elapsed() })
    }

    /// Waits for the save in the background, if there is one. Every rank calls it.
    ///
    /// # Errors
    ///
    /// Those of that save.
    pub fn finish(&mut self) -> Result<(), Error> {
        let Some(pending) = self.pending.take() else { return Ok(()) };
        let ended = |file: &Path| CheckpointError::Io {
            action: "write",
            file: file.display().to_string(),
            kind: std::io::ErrorKind::Other,
            reason: "the thread that wrote it panicked".into(),
        };
        let written = pending.written.recv().unwrap_or_else(|_| Err(ended(&self.home.root)));
        let written = self.ranks.settle("the files of a checkpoint", written);
        if written.is_err() {
            pending.cancel.store(true, Ordering::Relaxed);
        }
        let committed = pending.thread.join().unwrap_or_else(|_| Err(ended(&self.home.root)));
        if self.ranks.leads() && (written.is_err() || committed.is_err()) {
            // On a full disk, room for the next. What this leaves is recognised as torn.
            let _ = fs::remove_dir_all(&pending.tmp);
        }
        written?;
        self.ranks.settle("the manifest of a checkpoint", committed)
    }

    fn start(&self, checkpoint: &Checkpoint<'_>, target: &Path) -> Result<Pending, Error> {
        let ranks = &self.ranks;
        let (tmp, differing) = begin(checkpoint, ranks, target, Some(&self.home))?;
        let (rank, world, leads) = (ranks.index(), ranks.mesh.world.size(), ranks.leads());
        let outline = outline(checkpoint, ranks);
        let mut copy = MemorySink::default();
        let copied = parts(checkpoint, &differing, &mut copy).map(|()| copy);
        let cancel = Arc::new(AtomicBool::new(false));
        let (sender, written) = sync_channel(1);
        let pending_tmp = tmp.clone();
        let (target, home, cancelled) = (target.to_path_buf(), self.home.clone(), cancel.clone());
        let work = move || {
            let write = || {
                let mut sink = FileSink::create(&tmp, rank, outline)?;
                copied?.drain(&mut sink)?;
                leave_part(&tmp, rank, &sink.finish()?)
            };
            let outcome = write();
            let failed = outcome.is_err();
            // Nobody listens where the manager was dropped.
            let _ = sender.send(outcome);
            if failed || !leads {
                return Ok(());
            }
            let complete = await_parts(&tmp, world, &cancelled);
            if complete.is_err() {
                // What this leaves is recognised as torn.
                let _ = fs::remove_dir_all(&tmp);
            }
            complete.and_then(|()| commit(&tmp, &target, world, Some(&home)))
        };
        let thread = std::thread::Builder::new()
            .name(format!("fsdp-save-{rank}"))
            .spawn(work)
            .map_err(io("start a thread to write", &self.home.root))?;
        Ok(Pending { tmp: pending_tmp, written, thread, cancel })
    }
}

impl Drop for CheckpointManager {
    /// Ends a save in the background without a word to the other ranks.
    fn drop(&mut self) {
        let Some(pending) = self.pending.take() else { return };
        let written = pending.written.recv();
        let until = Instant::now() + Duration::from_secs(5);
        while !pending.thread.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        pending.cancel.store(true, Ordering::Relaxed);
        let committed = pending.thread.join();
        if let (Ok(Err(error)), _) | (_, Ok(Err(error))) = (written, committed) {
            tracing::error!(target: "fsdp", %error, "the last checkpoint was not saved");
        }
    }
}

/// Waits until every rank has left its part, or until told not to wait any longer.
fn await_parts(tmp: &Path, world: usize, cancel: &AtomicBool) -> Result<(), CheckpointError> {
    let begun = Instant::now();
    while let Some(rank) = missing_part(tmp, world) {
        let waited = begun.elapsed();
        if waited > PATIENCE || cancel.load(Ordering::Relaxed) {
            let folder = tmp.display().to_string();
            return Err(CheckpointError::Timeout { rank, folder, waited });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
