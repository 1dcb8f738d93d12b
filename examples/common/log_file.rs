//! The file of `--log-file`, which gets a copy of the log lines.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result};
use clap::Args;
use fsdp_runtime::launch::env::RankEnv;

use super::report;

/// Where log lines are written to as well.
#[derive(Args, Clone, Debug)]
pub struct LogArgs {
    /// File to append the log lines to as well, also under --quiet
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,
}

/// A file for log lines, or none. Clones write to the same file.
#[derive(Clone, Debug, Default)]
pub struct LogFile(Option<Arc<Mutex<File>>>);

impl LogArgs {
    /// Opens the file, if one is given and this process runs rank 0.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened for writing.
    pub fn open(&self) -> Result<LogFile> {
        let Some(path) = &self.log_file else { return Ok(LogFile::default()) };
        if !report::reports(RankEnv::read()?.as_ref()) {
            return Ok(LogFile::default());
        }
        let file = File::options().append(true).create(true).open(path);
        let file = file.with_context(|| format!("--log-file: cannot open {}", path.display()))?;
        Ok(LogFile(Some(Arc::new(Mutex::new(file)))))
    }
}

impl LogFile {
    /// Appends a line. A line that cannot be written is reported on standard error: a full disk
    /// must not end the training.
    pub fn line(&self, line: &str) {
        let Some(file) = &self.0 else { return };
        let mut file = file.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // One call, so that the lines of several runs that append to one file do not mix.
        if let Err(error) = file.write_all(format!("{line}\n").as_bytes()) {
            eprintln!("--log-file: {error}: {line}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_appended() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.log");
        let args = LogArgs { log_file: Some(path.clone()) };
        args.open().unwrap().line("one");
        let second = args.open().unwrap();
        second.clone().line("two");
        second.line("three");
        assert_eq!(std::fs::read_to_string(path).unwrap(), "one\ntwo\nthree\n");
        LogArgs { log_file: None }.open().unwrap().line("nowhere");

        let missing = LogArgs { log_file: Some(folder.path().join("no/such/folder.log")) };
        let error = format!("{:#}", missing.open().unwrap_err());
        assert!(error.contains("--log-file: cannot open") && error.contains("no/such"), "{error}");
    }
}
