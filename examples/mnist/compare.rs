//! Compares DDP with FSDP as one unit, with size-based wrapping, and with CPU offload.

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::cli::Cli;
use crate::common::report;
use crate::run;
use crate::sharding::Sharding;
use crate::summary::Summary;
use crate::train::Job;

/// Results of the four ways. `Display` formats the table, and serde the object of `--json`.
#[derive(Clone, Debug, Serialize)]
struct Comparison {
    modes: Vec<Mode>,
}

/// Result of one way.
#[derive(Clone, Debug, Serialize)]
struct Mode {
    /// Name of the picture's file, without its extension.
    file: &'static str,
    /// Name, to be shown to the user.
    name: &'static str,
    #[serde(flatten)]
    summary: Summary,
}

/// Trains in all four ways, one after the other. Prints the wrapped models and the table, and
/// writes the table and the pictures.
///
/// # Errors
///
/// If a run fails, or a file cannot be written.
pub fn compare(cli: &Cli) -> Result<()> {
    let mut modes = Vec::new();
    for (file, name, sharding) in Sharding::COMPARED {
        if !cli.output.quiet {
            println!("== {name}");
        }
        let job = Job::new(cli, sharding)?;
        // Another process runs rank 0, and prints the result.
        let Some(summary) = run(cli, job)? else { continue };
        if !cli.output.quiet {
            println!("{}\n", summary.wrapped);
        }
        modes.push(Mode { file, name, summary });
    }
    if modes.is_empty() {
        return Ok(());
    }
    let comparison = Comparison { modes };
    comparison.write(&cli.out)?;
    report::print_summary(&comparison, cli.output)
}

impl Comparison {
    /// Writes the table and the pictures of memory over time.
    fn write(&self, folder: &Path) -> Result<()> {
        let failed = || format!("cannot write the comparison to {}", folder.display());
        fs::create_dir_all(folder).with_context(failed)?;
        fs::write(folder.join("compare.md"), format!("{self}\n")).with_context(failed)?;
        for mode in &self.modes {
            if let Some(picture) = mode.picture() {
                let name = format!("memory-{}.svg", mode.file);
                fs::write(folder.join(name), picture).with_context(failed)?;
            }
        }
        Ok(())
    }
}

impl Mode {
    /// Draws memory over time as SVG. Returns `None` without the feature `plot`, or where nothing
    /// was recorded.
    fn picture(&self) -> Option<String> {
        #[cfg(feature = "plot")]
        if let Some(timeline) = &self.summary.timeline {
            let title = format!("{}: memory of one rank in the first steps", self.name);
            return Some(timeline.to_svg(&title, Some(&self.summary.forecast)));
        }
        None
    }
}

/// Formats the comparison as a table in Markdown.
impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut heads = vec!["peak MiB per rank".to_string(), "seconds".into(), "accuracy".into()];
        let kinds = self.modes.iter().flat_map(|mode| mode.summary.memory.kinds()).take(6);
        heads.extend(kinds.map(|(kind, _)| kind.to_string()));
        let rows = self.modes.iter().map(|Mode { name, summary, .. }| {
            let mib = |bytes: usize| format!("{:.2}", bytes as f64 / f64::from(1 << 20));
            let mut row = vec![name.to_string(), format!("{:.1}", summary.seconds)];
            row.push(format!("{:.4}", summary.accuracy));
            row.extend(summary.memory.kinds().map(|(_, bytes)| mib(bytes)));
            row
        });
        let rows: Vec<Vec<String>> = std::iter::once(heads).chain(rows).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
        for (index, row) in rows.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
                if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            write!(f, "| {} |", cells.collect::<Vec<_>>().join(" | "))?;
            if index == 0 {
                let rule = |(column, width): (usize, &usize)| match column {
                    0 => "-".repeat(width + 2),
                    _ => format!("{}:", "-".repeat(width + 1)),
                };
                let rules: Vec<String> = widths.iter().enumerate().map(rule).collect();
                write!(f, "\n|{}|", rules.join("|"))?;
            }
        }
        Ok(())
    }
}
