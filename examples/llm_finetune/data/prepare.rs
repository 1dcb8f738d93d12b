//! Tokenizes data files once, in parallel, into a file of tokens.
//!
//! A template that writes the date of today gives the tokens the date of the day when they were
//! made.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::cache_file::{CacheFile, CacheWriter};
use super::encode::{EncodeOptions, Encoded, encode};
use super::reason::Reason;
use super::record::Record;
use super::report::Report;
use super::source::Source;
use super::tokenizer::ChatTokenizer;

/// Version of the conversion of rows to tokens. A new one makes new files.
const VERSION: u32 = 1;
/// Rows that are converted together. They are in memory at once.
const ROWS: usize = 4096;

/// What to tokenize, and how.
#[derive(Clone, Debug)]
pub struct PrepareOptions {
    /// Data, in order.
    pub sources: Vec<Source>,
    /// Folder of the files of tokens. Without one, the tokens are in a temporary file, which is
    /// deleted when the data set is dropped.
    pub cache: Option<PathBuf>,
    /// How rows become tokens.
    pub encode: EncodeOptions,
    /// Whether the first row that is not valid ends the program.
    pub strict: bool,
    /// Whether no progress bar is shown.
    pub quiet: bool,
}

/// Whether the tokens were there already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheUse {
    /// A file of tokens was read.
    Hit,
    /// No file was there, and one was made.
    Built,
    /// A file was there, but could not be used for this reason. A new one was made.
    Rebuilt(String),
}

/// What is wrong with the data as a whole.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A row that is not valid, under `strict`.
    #[error("{0} (the first row that is not valid ends the program, because of --strict)")]
    Strict(String),
    /// Data without a row.
    #[error("no rows in {0}")]
    NoRows(String),
    /// Data of which no row can be used.
    #[error("none of the {rows} rows can be used:\n{report}")]
    AllRejected {
        /// Number of rows.
        rows: u64,
        /// Counts by reason.
        report: Report,
    },
}

/// Reads the file of tokens for these options, or makes it.
///
/// # Errors
///
/// If the data cannot be read, the file cannot be written, no row can be used, or a row is not
/// valid under `strict`.
pub fn prepare(
    options: &PrepareOptions,
    tokenizer: &ChatTokenizer,
) -> Result<(CacheFile, Report, CacheUse)> {
    let names: Vec<_> = options.sources.iter().map(Source::name).collect();
    let key = key(options, tokenizer)?;
    let path = options.cache.as_ref().map(|folder| folder.join(file_name(&key)));
    let mut used = CacheUse::Built;
    let mut lock = None;
    if let (Some(path), Some(folder)) = (&path, &options.cache) {
        if !path.exists() {
            let cannot = || format!("cannot create {}", folder.display());
            std::fs::create_dir_all(folder).with_context(cannot)?;
            lock = Lock::of(path);
        }
        // Another process may have made it while this one waited for the lock.
        if path.exists() {
            match CacheFile::open(path, &key) {
                Ok(file) => {
                    let report = file.report().clone().with_files(names);
                    check(&report, options)?;
                    return Ok((file, report, CacheUse::Hit));
                }
                Err(error) => {
                    let reason = format!("{:#}", anyhow::Error::from(error));
                    eprintln!("Warning: {} is made again: {reason}", path.display());
                    used = CacheUse::Rebuilt(reason);
                }
            }
        }
    }
    let folder = options.cache.as_deref();
    let writer = CacheWriter::new(folder).with_context(|| cannot_write(folder))?;
    let (writer, report) = tokenize(options, tokenizer, writer, names)?;
    check(&report, options)?;
    let file =
        writer.finish(&report, &key, path.as_deref()).with_context(|| cannot_write(folder))?;
    drop(lock);
    Ok((file, report, used))
}

/// A lock on a file of tokens, which is released when it is dropped.
struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Waits until no other process makes the file of tokens `tokens`. Without a lock, as on a file system that
    /// has none, each process makes the file.
    fn of(tokens: &Path) -> Option<Self> {
        let path = tokens.with_extension("lock");
        let file = File::create(&path).ok()?;
        file.lock().ok()?;
        Some(Self { file, path })
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // A process that waits has the file open, and finds the tokens when it gets the lock.
        let _ = std::fs::remove_file(&self.path);
        let _ = self.file.unlock();
    }
}

fn cannot_write(folder: Option<&Path>) -> String {
    match folder {
        Some(folder) => format!("cannot write a file of tokens to {}", folder.display()),
        None => "cannot write a temporary file of tokens".into(),
    }
}

fn file_name(key: &[u8; 32]) -> String {
    let hex: String = key[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("tokens-{hex}.bin")
}

/// Returns the SHA-256 over all that the tokens depend on.
fn key(options: &PrepareOptions, tokenizer: &ChatTokenizer) -> Result<[u8; 32]> {
    let mut hash = Sha256::new();
    hash.update(VERSION.to_le_bytes());
    hash.update(tokenizer.fingerprint());
    // `generation_config.json` may name the token that ends a text.
    hash.update(tokenizer.eos_ids().first().map_or(-1, |id| i64::from(*id)).to_le_bytes());
    let EncodeOptions { max_length, truncate, train_on_prompt } = options.encode;
    hash.update((max_length as u64).to_le_bytes());
    hash.update([u8::from(truncate), u8::from(train_on_prompt)]);
    for source in &options.sources {
        hash.update(digest(source).with_context(|| format!("cannot read {}", source.name()))?);
    }
    Ok(hash.finalize().into())
}

fn digest(source: &Source) -> Result<[u8; 32]> {
    let (mut hash, mut contents) = (Sha256::new(), source.open()?);
    let mut part = vec![0; 1 << 20];
    loop {
        match contents.read(&mut part)? {
            0 => return Ok(hash.finalize().into()),
            bytes => hash.update(&part[..bytes]),
        }
    }
}

/// Checks that the data can be used.
fn check(report: &Report, options: &PrepareOptions) -> Result<(), DataError> {
    if let Some(first) = report.first().filter(|_| options.strict) {
        return Err(DataError::Strict(first));
    }
    match (report.accepted(), report.rejected()) {
        (0, 0) => {
            let names: Vec<_> = options.sources.iter().map(Source::name).collect();
            let names = if names.is_empty() { "no file".into() } else { names.join(", ") };
            Err(DataError::NoRows(names))
        }
        (0, rows) => Err(DataError::AllRejected { rows, report: report.clone() }),
        _ => Ok(()),
    }
}

fn tokenize(
    options: &PrepareOptions,
    tokenizer: &ChatTokenizer,
    mut writer: CacheWriter,
    names: Vec<String>,
) -> Result<(CacheWriter, Report)> {
    let mut report = Report::new(names);
    let sizes = options.sources.iter().map(Source::bytes).sum::<Result<u64>>()?;
    let bar = progress_bar(sizes, options.quiet);
    for (index, source) in options.sources.iter().enumerate() {
        let mut records = source.records()?;
        loop {
            let rows: Vec<Record> = records.by_ref().take(ROWS).collect::<Result<_>>()?;
            if rows.is_empty() {
                break;
            }
            let encode_row = |row: &Record| -> Result<Encoded, Reason> {
                encode(tokenizer, &row.parse()?, &options.encode)
            };
            let encoded: Vec<_> = rows.par_iter().map(encode_row).collect();
            for (row, encoded) in rows.iter().zip(encoded) {
                match encoded {
                    Ok(encoded) => {
                        report.accept();
                        writer
                            .push(&encoded)
                            .with_context(|| cannot_write(options.cache.as_deref()))?;
                    }
                    Err(reason) => report.reject(index, row.line, &reason),
                }
            }
            if options.strict && report.rejected() > 0 {
                return Ok((writer, report));
            }
            bar.inc(rows.iter().map(|row| row.bytes).sum());
        }
    }
    Ok((writer, report))
}

fn progress_bar(bytes: u64, quiet: bool) -> ProgressBar {
    let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar =
        ProgressBar::with_draw_target(Some(bytes), target).with_finish(ProgressFinish::AndClear);
    let template = "Tokenizing {bar:30} {bytes}/{total_bytes} {eta}";
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.set_style(style),
        Err(error) => debug_assert!(false, "the progress bar's template: {error}"),
    }
    bar
}
