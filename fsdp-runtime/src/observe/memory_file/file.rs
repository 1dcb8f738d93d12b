//! [`MemoryFile`]: a record of memory over time that is written when it ends, however it ends.

use std::fmt;
use std::path::{Path, PathBuf};

use super::form::{Form, MemoryFileError};
use crate::fully_shard::Stats;
use crate::param_group::memory::{MemoryForecast, MemoryHandle, MemoryTimeline};

/// Number of changes that a file has at most, unless the program says otherwise.
const MAX_SAMPLES: usize = 20_000;

/// A record of a model's memory on one rank over time, and the file that it is written to.
///
/// [`Stats::memory_file`](crate::model::Stats::memory_file) starts it. [`finish`](Self::finish) writes the
/// file. If the value is dropped before, because an error or a panic ended the rank, the file is
/// written then. The value does not keep the model alive.
#[derive(Debug)]
#[must_use = "the record ends when this value is dropped"]
pub struct MemoryFile {
    handle: MemoryHandle,
    path: PathBuf,
    title: String,
    forecast: Option<MemoryForecast>,
    is_written: bool,
}

impl MemoryFile {
    /// Starts a record for a file.
    pub(crate) fn start(handle: MemoryHandle, path: &Path) -> Result<Self, MemoryFileError> {
        Form::of(path)?;
        handle.start_timeline(MAX_SAMPLES);
        let title = "memory over time".to_string();
        Ok(Self { handle, path: path.into(), title, forecast: None, is_written: false })
    }

    /// Sets the title. The default is `memory over time`.
    pub fn with_title(mut self, title: impl Into<String>) -> Self {
        self.title = title.into();
        self
    }

    /// Adds the forecast, which is a line in pictures.
    pub fn with_forecast(mut self, forecast: MemoryForecast) -> Self {
        self.forecast = Some(forecast);
        self
    }

    /// Starts the record anew, with the newest `max_samples` changes in place of 20,000.
    pub fn with_max_samples(self, max_samples: usize) -> Self {
        self.handle.start_timeline(max_samples);
        self
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the record so far. Returns `None` if
    /// [`stop_memory_timeline`](crate::model::Stats::stop_memory_timeline) has ended it.
    pub fn timeline(&self) -> Option<MemoryTimeline> {
        self.handle.timeline()
    }

    /// Ends the record and writes the file. If `outcome` is an error, the file has its text.
    ///
    /// # Errors
    ///
    /// [`MemoryFileError`] if the file cannot be written, or if the record was ended before.
    pub fn finish<T, E: fmt::Display>(
        mut self,
        outcome: &Result<T, E>,
    ) -> Result<(), MemoryFileError> {
        self.write(outcome.as_ref().err().map(ToString::to_string))
    }

    fn write(&mut self, failure: Option<String>) -> Result<(), MemoryFileError> {
        self.is_written = true;
        let timeline = self.handle.timeline();
        self.handle.stop_timeline();
        let timeline =
            timeline.ok_or_else(|| MemoryFileError::NotRecorded { path: self.path.clone() })?;
        let timeline = MemoryTimeline { failure, ..timeline };
        timeline.write(&self.path, &self.title, self.forecast.as_ref())
    }
}

impl Drop for MemoryFile {
    /// Writes the file, unless it is written. An error is logged.
    fn drop(&mut self) {
        if self.is_written {
            return;
        }
        // A forward reports an error by unwinding, so that the program cannot pass it on.
        let failure = match self.handle.check_limit() {
            Err(error) => error.to_string(),
            Ok(()) if std::thread::panicking() => "the rank panicked, or its forward failed".into(),
            Ok(()) => "the rank ended before the record did".into(),
        };
        if let Err(error) = self.write(Some(failure)) {
            tracing::error!(target: "fsdp", %error, "the memory over time was not written");
        }
    }
}

impl<M> Stats<'_, M> {
    /// Starts a record of memory over time, as [`start_memory_timeline`](Self::start_memory_timeline)
    /// does, that is written to a file when it ends: with [`MemoryFile::finish`], or when the returned
    /// value is dropped. The extension is `.svg`, `.html` or `.json`.
    ///
    /// # Errors
    ///
    /// [`MemoryFileError`] for another extension, and for a picture without the feature `plot`.
    pub fn memory_file(&self, path: impl AsRef<Path>) -> Result<MemoryFile, MemoryFileError> {
        MemoryFile::start(self.model.schedule.memory_handle(), path.as_ref())
    }
}
