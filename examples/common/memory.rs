//! The files of `--memory-timeline`, which show the memory of each rank over time.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use fsdp_runtime::Rank;
use fsdp_runtime::errors::LaunchError;
use fsdp_runtime::memory::{MemoryFile, MemoryForecast, MemoryTimeline};
use fsdp_runtime::prelude::*;

/// Where memory over time is written to.
#[derive(Args, Clone, Debug)]
pub struct MemoryArgs {
    /// File to write the memory of rank 0 over time to: a picture (.svg), a page (.html) or data (.json);
    /// the other ranks add their number to its name
    #[arg(long, value_name = "FILE")]
    memory_timeline: Option<PathBuf>,
}

/// Memory over time of the ranks of this process. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct RunMemory {
    path: Option<PathBuf>,
    /// Peak of each rank that has ended, with its largest holders.
    peaks: Arc<Mutex<BTreeMap<Rank, String>>>,
}

impl MemoryArgs {
    /// Returns what to record.
    ///
    /// # Errors
    ///
    /// If the file's extension is none of those above, so that the run ends before it begins.
    pub fn start(&self) -> Result<RunMemory> {
        if let Some(path) = &self.memory_timeline {
            MemoryTimeline::check_path(path).context("--memory-timeline")?;
        }
        Ok(RunMemory { path: self.memory_timeline.clone(), peaks: Arc::default() })
    }
}

impl RunMemory {
    /// Returns whether memory is recorded.
    pub fn is_on(&self) -> bool {
        self.path.is_some()
    }

    /// Starts the record of a rank.
    ///
    /// # Errors
    ///
    /// If the file's extension is unknown.
    pub fn record<M>(
        &self,
        model: &Fsdp<M>,
        worker: &Worker,
        forecast: Option<MemoryForecast>,
    ) -> Result<RankMemory> {
        let (rank, world) = (worker.rank(), worker.world());
        let mut file = None;
        if let Some(path) = &self.path {
            let started = model.stats().memory_file(of_rank(path, rank))?;
            let started = started.with_title(format!("Memory of rank {rank} of {world}"));
            file = Some(match forecast {
                Some(forecast) => started.with_forecast(forecast),
                None => started,
            });
        }
        Ok(RankMemory { file, rank, run: self.clone() })
    }

    /// Writes the forecast of a run that was refused, and returns the error with the largest holders.
    pub fn refused(&self, forecast: &MemoryForecast, error: anyhow::Error) -> anyhow::Error {
        let Some(path) = &self.path else { return error };
        let failure = Some(error.to_string().lines().next().unwrap_or_default().to_string());
        let mut timeline = MemoryTimeline::of_forecast(forecast);
        timeline.failure = failure;
        let named = format!("forecast of the device at its peak, {}", timeline.device_peak());
        match timeline.write(path, "Forecast of a rank's memory", Some(forecast)) {
            Ok(()) => error.context(format!("{named}; see {}", path.display())),
            Err(unwritten) => error.context(format!("{named}; {unwritten}")),
        }
    }

    /// Returns the result of the run. A lack of memory is an error with the largest holders of the rank
    /// that failed first.
    ///
    /// # Errors
    ///
    /// The error of the run.
    pub fn finish<T>(&self, result: Result<T, LaunchError>) -> Result<T, anyhow::Error> {
        result.map_err(|error| {
            let peak = lock(&self.peaks).get(&error.rank).cloned();
            match peak.filter(|_| error.is_out_of_memory()) {
                Some(peak) => {
                    let rank = error.rank;
                    anyhow!(error).context(format!("memory of rank {rank} at its peak, {peak}"))
                }
                None => error.into(),
            }
        })
    }
}

/// The record of one rank, which is written when it is dropped at the latest.
#[derive(Debug)]
pub struct RankMemory {
    file: Option<MemoryFile>,
    rank: Rank,
    run: RunMemory,
}

impl RankMemory {
    /// Writes the file, with the error of `outcome` if there is one.
    ///
    /// # Errors
    ///
    /// If the file cannot be written and `outcome` is no error.
    pub fn finish<T, E: Display>(mut self, outcome: &Result<T, E>) -> Result<()> {
        self.note_peak();
        let written = self.file.take().map_or(Ok(()), |file| file.finish(outcome));
        match outcome {
            Ok(_) => written.context("--memory-timeline"),
            Err(_) => Ok(()),
        }
    }

    fn note_peak(&self) {
        if let Some(timeline) = self.file.as_ref().and_then(MemoryFile::timeline) {
            lock(&self.run.peaks).insert(self.rank, timeline.device_peak().to_string());
        }
    }
}

impl Drop for RankMemory {
    fn drop(&mut self) {
        self.note_peak();
    }
}

fn lock(peaks: &Mutex<BTreeMap<Rank, String>>) -> MutexGuard<'_, BTreeMap<Rank, String>> {
    peaks.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the path of a rank's file.
fn of_rank(path: &Path, rank: Rank) -> PathBuf {
    if rank == Rank::ZERO {
        return path.into();
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{stem}-rank{rank}.{extension}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_files_of_their_own() {
        let path = Path::new("run.1/memory.html");
        let rank =
            |index: usize| fsdp_runtime::WorldSize::new(3).unwrap().ranks().nth(index).unwrap();
        assert_eq!(of_rank(path, rank(0)), path);
        assert_eq!(of_rank(path, rank(2)), Path::new("run.1/memory-rank2.html"));
    }

    #[test]
    fn an_unknown_extension_ends_the_run_before_it_begins() {
        let args = MemoryArgs { memory_timeline: Some("memory.png".into()) };
        let error = format!("{:#}", args.start().unwrap_err());
        assert!(error.contains("--memory-timeline") && error.contains(".html"), "{error}");
        assert!(!MemoryArgs { memory_timeline: None }.start().unwrap().is_on());
    }
}
