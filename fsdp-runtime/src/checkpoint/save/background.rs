//! A save that runs on a thread of each rank while training continues.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::contents::Checkpoint;
use super::elements::write_elements;
use super::manifest_part::{missing_part, write_part};
use super::outline::outline;
use super::sink::{FileSink, MemorySink};
use super::steps::{CheckpointRoot, begin, commit};
use crate::checkpoint::io_error::io_error;
use crate::checkpoint::manifest::Manifest;
use crate::checkpoint::ranks::Ranks;
use crate::error::{CheckpointError, Error};

/// Maximum time for which rank 0 waits for the other ranks' files after finishing its own file.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum time for which a manager that is dropped waits for its background save.
const DROP_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two checks whether files exist or a thread has ended.
const POLL: Duration = Duration::from_millis(5);

/// A save in the background.
#[derive(Debug)]
pub(super) struct BackgroundSave {
    tmp: PathBuf,
    root: PathBuf,
    /// Receives the outcome of this rank's file.
    written: Receiver<Result<(), CheckpointError>>,
    /// Returns the outcome of the manifest, on rank 0; `None` if the thread could not be started.
    thread: Option<JoinHandle<Result<(), CheckpointError>>>,
    cancel: Arc<AtomicBool>,
}

impl BackgroundSave {
    /// Copies the elements that this rank writes to host memory, and starts the thread that writes
    /// them. Every rank calls it.
    pub(super) fn start(
        checkpoint: &Checkpoint<'_>,
        ranks: &Ranks,
        target: &Path,
        root: &CheckpointRoot,
    ) -> Result<Self, Error> {
        let (tmp, differing) = begin(checkpoint, ranks, target, Some(root))?;
        let outline = outline(checkpoint, ranks);
        let mut copy = MemorySink::default();
        let copied = write_elements(checkpoint, &differing, &mut copy).map(|()| copy);
        let cancel = Arc::new(AtomicBool::new(false));
        let (sender, written) = sync_channel(1);
        let job = Job {
            tmp: tmp.clone(),
            target: target.to_path_buf(),
            root: root.clone(),
            rank: ranks.index(),
            world: ranks.mesh.world.size(),
            cancel: cancel.clone(),
        };
        let report = sender.clone();
        let thread = std::thread::Builder::new()
            .name(format!("fsdp-save-{}", ranks.index()))
            .spawn(move || job.run(outline, copied, &sender))
            .map_err(io_error("start a thread to write", &root.path));
        // The other ranks write meanwhile, and learn of the error in `finish`.
        let thread = thread.map_err(|error| report.send(Err(error))).ok();
        Ok(Self { tmp, root: root.path.clone(), written, thread, cancel })
    }

    /// Returns whether this rank has nothing left to do.
    pub(super) fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the save and returns the outcome. Every rank calls it.
    pub(super) fn finish(self, ranks: &Ranks) -> Result<(), Error> {
        let panicked = |file: &Path| CheckpointError::Io {
            action: "write",
            file: file.display().to_string(),
            kind: std::io::ErrorKind::Other,
            reason: "the thread that wrote it panicked".into(),
        };
        let written = self.written.recv().unwrap_or_else(|_| Err(panicked(&self.root)));
        let written = ranks.agree("the files of a checkpoint", written);
        if written.is_err() {
            self.cancel.store(true, Ordering::Relaxed);
        }
        let join = |thread: JoinHandle<_>| thread.join();
        let joined = self.thread.map_or(Ok(Ok(())), join);
        let committed = joined.unwrap_or_else(|_| Err(panicked(&self.root)));
        if ranks.leads() && (written.is_err() || committed.is_err()) {
            // Frees a full disk for the next save. Where this fails, the rest is recognised as
            // torn.
            let _ = fs::remove_dir_all(&self.tmp);
        }
        written?;
        ranks.agree("the manifest of a checkpoint", committed)
    }

    /// Waits for the save for a short time, without any collective, and logs an error.
    pub(super) fn abandon(self) {
        let written = self.written.recv();
        let until = Instant::now() + DROP_TIMEOUT;
        while !self.is_finished() && Instant::now() < until {
            std::thread::sleep(POLL);
        }
        self.cancel.store(true, Ordering::Relaxed);
        let committed = self.thread.map_or(Ok(Ok(())), JoinHandle::join);
        if let (Ok(Err(error)), _) | (_, Ok(Err(error))) = (written, committed) {
            tracing::error!(target: "fsdp", %error, "the last checkpoint was not saved");
        }
    }
}

/// The work of a background save's thread.
struct Job {
    tmp: PathBuf,
    target: PathBuf,
    root: CheckpointRoot,
    rank: usize,
    world: usize,
    /// Set to end the wait for other ranks' files.
    cancel: Arc<AtomicBool>,
}

impl Job {
    /// Writes this rank's file and reports the outcome to `written`; rank 0 then completes the
    /// checkpoint and returns that outcome.
    fn run(
        self,
        outline: Manifest,
        copied: Result<MemorySink, CheckpointError>,
        written: &SyncSender<Result<(), CheckpointError>>,
    ) -> Result<(), CheckpointError> {
        let outcome = self.write(outline, copied);
        let failed = outcome.is_err();
        // The send fails where the manager was dropped; nobody needs the outcome then.
        let _ = written.send(outcome);
        if failed || self.rank != 0 {
            return Ok(());
        }
        let complete = self.await_parts();
        if complete.is_err() {
            // Where this fails, the rest of the folder is recognised as torn.
            let _ = fs::remove_dir_all(&self.tmp);
        }
        complete.and_then(|()| commit(&self.tmp, &self.target, self.world, Some(&self.root)))
    }

    fn write(
        &self,
        outline: Manifest,
        copied: Result<MemorySink, CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let mut sink = FileSink::create(&self.tmp, self.rank, outline)?;
        copied?.drain(&mut sink)?;
        write_part(&self.tmp, self.rank, &sink.finish()?)
    }

    /// Waits until every rank has written its part of the manifest, until the save is cancelled, or
    /// until [`TIMEOUT`].
    fn await_parts(&self) -> Result<(), CheckpointError> {
        let begun = Instant::now();
        while let Some(rank) = missing_part(&self.tmp, self.world) {
            let waited = begun.elapsed();
            if waited > TIMEOUT || self.cancel.load(Ordering::Relaxed) {
                let folder = self.tmp.display().to_string();
                return Err(CheckpointError::Timeout { rank, folder, waited });
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}
