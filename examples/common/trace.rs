//! The file of `--trace`, which shows what each rank does over time.

use std::ffi::OsStr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::Args;
use fsdp_runtime::errors::LaunchError;
use fsdp_runtime::launch::env::RankEnv;
use fsdp_runtime::trace::FsdpTrace;

/// What to trace.
#[derive(Args, Clone, Debug)]
pub struct TraceArgs {
    /// File to write a trace of the run to, for Perfetto, and the steps to record, such as
    /// trace.json:10-12 [default: all steps]; processes write a file each
    #[arg(long, value_name = "FILE[:FIRST-LAST]")]
    trace: Option<Target>,
}

/// A file and the steps that it gets.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    path: PathBuf,
    steps: RangeInclusive<u64>,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = || Self { path: text.into(), steps: 1..=u64::MAX };
        let Some((path, range)) = text.rsplit_once(':') else { return Ok(all()) };
        let Some((first, last)) = range.split_once('-') else { return Ok(all()) };
        let (Ok(first), Ok(last)) = (first.parse(), last.parse()) else { return Ok(all()) };
        if first == 0 || last < first {
            return Err(format!("steps count from 1, and {first}-{last} holds none"));
        }
        Ok(Self { path: path.into(), steps: first..=last })
    }
}

/// A trace that is being recorded, or none.
#[derive(Debug)]
pub struct RunTrace(Option<(FsdpTrace, PathBuf)>);

impl TraceArgs {
    /// Returns whether a trace is asked for.
    pub fn is_on(&self) -> bool {
        self.trace.is_some()
    }

    /// Starts to record, if a file is given. Call it before `launch`.
    ///
    /// # Errors
    ///
    /// If the program has a subscriber of `tracing` already.
    pub fn start(&self) -> Result<RunTrace> {
        let Some(Target { path, steps }) = &self.trace else { return Ok(RunTrace(None)) };
        let trace = FsdpTrace::new().with_steps(steps.clone());
        trace.install().context("--trace")?;
        let path = match RankEnv::read()? {
            None => path.clone(),
            Some(place) => {
                let part = |part: Option<&OsStr>| {
                    part.map_or_else(String::new, |text| text.to_string_lossy().into_owned())
                };
                let (stem, extension) = (part(path.file_stem()), part(path.extension()));
                path.with_file_name(format!("{stem}-rank{}.{extension}", place.rank))
            }
        };
        Ok(RunTrace(Some((trace, path))))
    }
}

impl RunTrace {
    /// Writes the file, also after a run that has failed, and returns the result of the run.
    ///
    /// # Errors
    ///
    /// If the file of a run that has not failed cannot be written.
    pub fn finish<T>(&self, result: Result<T, LaunchError>) -> Result<Result<T, LaunchError>> {
        let written = self.0.as_ref().map_or(Ok(()), |(trace, path)| trace.write(path));
        if result.is_ok() {
            written.context("--trace")?;
        }
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_the_last_colon() {
        let parse = |text: &str| text.parse::<Target>();
        let target = |path: &str, steps| Ok(Target { path: path.into(), steps });
        assert_eq!(parse("trace.json"), target("trace.json", 1..=u64::MAX));
        assert_eq!(parse("trace.json:3-5"), target("trace.json", 3..=5));
        assert_eq!(parse("C:\\trace.json"), target("C:\\trace.json", 1..=u64::MAX));
        assert!(parse("trace.json:5-3").unwrap_err().contains("5-3"));
        assert!(parse("trace.json:0-3").is_err());
    }
}
