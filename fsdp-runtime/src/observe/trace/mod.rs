//! [`FsdpTrace`]: what ranks do over time, as a file of Trace Event JSON.
//!
//! The crate reports through `tracing`, with the targets `fsdp` and `fsdp::trace`. [`layer`] turns
//! these reports into the records of [`recorder`], which [`json`] writes.

mod json;
mod layer;
mod recorder;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;

use self::layer::TraceLayer;
use self::recorder::Recorder;

/// Records that a trace keeps unless [`FsdpTrace::with_max_records`] sets another number. They take
/// about 50 MB.
const MAX_RECORDS: usize = 1_000_000;

/// The reason why a trace cannot be recorded or written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A program that has installed a subscriber of its own.
    #[error(
        "this program has installed a subscriber of `tracing`; add `FsdpTrace::layer` to that one in \
         place of `FsdpTrace::install`"
    )]
    SubscriberInstalled,
    /// A trace without any rank.
    #[error("no rank was recorded: install the trace before `launch`")]
    NoRanks,
    /// A file that cannot be written.
    #[error("cannot write the trace {}: {reason}", path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        reason: String,
    },
}

/// A record of what the ranks of this process do over time, for Perfetto and for Chrome's
/// `chrome://tracing`.
///
/// Every rank is a process of the picture, with a thread that computes and one that communicates.
/// Spans are the forward and backward of units, collectives with their bytes, waits, the optimizer
/// and checkpoints. Counters show the memory by kind. Arrows lead from the issue of a collective to
/// the wait for it.
///
/// Install it before [`launch`](crate::launch()), and write it after that:
///
/// ```
/// use burn::tensor::Device;
/// use fsdp_runtime::prelude::*;
/// use fsdp_runtime::trace::FsdpTrace;
///
/// let trace = FsdpTrace::new().with_steps(1..=20);
/// trace.install()?;
/// launch(LaunchOptions::new(2).with_device(Device::flex()), |worker| worker.barrier())?;
/// # let folder = std::env::temp_dir().join(format!("fsdp-trace-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// # let path = folder.join("trace.json");
/// trace.write(&path)?;
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
///
/// Processes write a file each. `fsdp trace merge` joins them, and `fsdp trace summary` prints the
/// share of computation and of waits.
#[derive(Clone, Debug)]
pub struct FsdpTrace {
    recorder: Arc<Recorder>,
    steps: RangeInclusive<u64>,
    max_records: usize,
}

impl Default for FsdpTrace {
    fn default() -> Self {
        Self::new()
    }
}

impl FsdpTrace {
    /// Creates a trace of all steps, of at most a million records.
    pub fn new() -> Self {
        Self {
            recorder: Arc::new(Recorder::new(1..=u64::MAX, MAX_RECORDS)),
            steps: 1..=u64::MAX,
            max_records: MAX_RECORDS,
        }
    }

    /// Records the given steps only, counted from 1. A step ends with the optimizer's.
    pub fn with_steps(self, steps: RangeInclusive<u64>) -> Self {
        let recorder = Arc::new(Recorder::new(steps.clone(), self.max_records));
        Self { recorder, steps, ..self }
    }

    /// Sets the number of records to keep. Later ones are dropped and counted.
    pub fn with_max_records(self, max_records: usize) -> Self {
        let recorder = Arc::new(Recorder::new(self.steps.clone(), max_records));
        Self { recorder, max_records, ..self }
    }

    /// Makes the trace the subscriber of `tracing` for the whole process.
    ///
    /// # Errors
    ///
    /// [`TraceError::SubscriberInstalled`] if the program has one.
    pub fn install(&self) -> Result<(), TraceError> {
        let subscriber = tracing_subscriber::registry().with(self.layer());
        tracing::subscriber::set_global_default(subscriber)
            .map_err(|_| TraceError::SubscriberInstalled)
    }

    /// Returns the trace as a layer for a subscriber of the program's own.
    pub fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        let targets = Targets::new().with_target("fsdp", LevelFilter::TRACE);
        TraceLayer::new(self.recorder.clone()).with_filter(targets)
    }

    /// Returns the number of records that were dropped because there was no room.
    pub fn dropped(&self) -> usize {
        self.recorder.dropped()
    }

    /// Writes what was recorded so far as Trace Event JSON. Times are microseconds.
    ///
    /// # Errors
    ///
    /// [`TraceError::NoRanks`] if no rank was recorded, and [`TraceError::Write`] if the file cannot
    /// be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), TraceError> {
        if !self.recorder.has_ranks() {
            return Err(TraceError::NoRanks);
        }
        let path = path.as_ref();
        let written = File::create(path).and_then(|file| {
            let mut file = BufWriter::new(file);
            self.recorder.with_records(|records| json::write(&mut file, records))?;
            file.flush()
        });
        written.map_err(|error| TraceError::Write {
            path: path.to_path_buf(),
            reason: error.to_string(),
        })
    }
}
