//! Where log lines go, and in which form.

use std::time::SystemTime;

use anyhow::Result;
use clap::ValueEnum;

use crate::common::log_file::LogFile;

/// Form of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Numbers alone, as JSON objects on standard output, and notes on standard error
    #[default]
    Bare,
    /// fairseq's lines: date, level, logger, and numbers as a JSON object
    Json,
    /// fairseq's lines: date, level, logger, and numbers in words
    Simple,
    /// Notes only
    None,
}

/// Writes the log of a run. Ranks other than rank 0 have a silent one.
#[derive(Clone, Debug, Default)]
pub struct Logger {
    format: LogFormat,
    /// Whether lines are printed.
    prints: bool,
    file: LogFile,
}

impl Logger {
    /// Returns the logger of rank 0. Under `quiet` it writes to the file only.
    pub fn new(format: LogFormat, quiet: bool, file: LogFile) -> Self {
        Self { format, prints: !quiet, file }
    }

    /// Writes a note. `logger` is the part of fairseq that writes the like.
    pub fn note(&self, logger: &str, text: &str) {
        match self.format {
            LogFormat::Bare => {
                if self.prints {
                    eprintln!("{text}");
                }
                // The file has the numbers alone.
            }
            _ => self.out(&stamped(logger, text)),
        }
    }

    /// Writes the numbers of a log line, of which the first is the epoch.
    ///
    /// # Errors
    ///
    /// If a number cannot be serialized.
    pub fn numbers(&self, logger: &str, line: &impl serde::Serialize) -> Result<()> {
        match self.format {
            LogFormat::Bare => self.out(&serde_json::to_string(line)?),
            LogFormat::Json => self.out(&stamped(logger, &serde_json::to_string(line)?)),
            LogFormat::Simple => {
                self.out(&stamped(logger, &in_words(&serde_json::to_string(line)?)))
            }
            LogFormat::None => {}
        }
        Ok(())
    }

    fn out(&self, line: &str) {
        if self.prints {
            println!("{line}");
        }
        self.file.line(line);
    }
}

/// Returns fairseq's line, with the date in UTC.
fn stamped(logger: &str, text: &str) -> String {
    let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let date = date.replace('T', " ").replace('Z', "");
    format!("{date} | INFO | {logger} | {text}")
}

/// Formats a JSON object of numbers as fairseq's `--log-format simple` does:
/// `epoch 001 | loss 9.25 | ppl 608.87`.
fn in_words(json: &str) -> String {
    let bare = json.trim_matches(['{', '}']).replace('"', "");
    let word = |part: &str| match part.split_once(':') {
        Some(("epoch", number)) => format!("epoch {number:0>3}"),
        Some((name, number)) => format!("{name} {number}"),
        None => part.to_string(),
    };
    bare.split(',').map(word).collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
mod tests {
    use serde::Serialize;

    use super::*;

    #[derive(Serialize)]
    struct Line {
        epoch: usize,
        loss: String,
    }

    #[test]
    fn lines_begin_with_date_level_and_logger() {
        let line = stamped("train_inner", "{}");
        let parts: Vec<_> = line.split(" | ").collect();
        assert_eq!(parts[1..], ["INFO", "train_inner", "{}"]);
        let (date, time) = parts[0].split_once(' ').unwrap();
        assert_eq!((date.len(), time.len()), ("2021-03-08".len(), "12:31:36".len()), "{line}");
        assert!(date.starts_with("20") && time.split(':').count() == 3, "{line}");
    }

    #[test]
    fn each_format_has_its_lines() {
        let folder = tempfile::tempdir().unwrap();
        let written = |format: &str| {
            use clap::Parser;
            let path = folder.path().join(format);
            let path = path.to_str().unwrap();
            let flags = ["gpt_pretrain", "--log-format", format, "--log-file", path];
            let cli = crate::cli::Cli::parse_from(flags);
            let logger = Logger::new(cli.log_format, true, cli.log.open().unwrap());
            logger.note("fairseq_cli.train", "begin");
            logger.numbers("valid", &Line { epoch: 3, loss: "9.5".into() }).unwrap();
            std::fs::read_to_string(path).unwrap()
        };
        assert_eq!(written("bare"), "{\"epoch\":3,\"loss\":\"9.5\"}\n");
        let json = written("json");
        assert!(json.contains(" | INFO | fairseq_cli.train | begin\n"), "{json}");
        assert!(json.ends_with(" | INFO | valid | {\"epoch\":3,\"loss\":\"9.5\"}\n"), "{json}");
        let simple = written("simple");
        assert!(simple.ends_with(" | INFO | valid | epoch 003 | loss 9.5\n"), "{simple}");
        let none = written("none");
        assert_eq!(none.lines().count(), 1, "{none}");
    }
}
