//! `fsdp merge`: the model of a checkpoint, as what transformers loads.

use std::path::PathBuf;
use std::process::ExitCode;

use fsdp_runtime::checkpoint::{MergeOptions, merge};

use crate::{print, say};

#[derive(clap::Args)]
pub struct Args {
    /// The checkpoint, or a folder of checkpoints, of which the newest complete one is taken
    folder: PathBuf,
    /// The folder to write `model.safetensors` to
    output: PathBuf,
    /// The model's name, where the checkpoint holds several
    #[arg(long)]
    model: Option<String>,
    /// The most bytes in one file, such as 5GB, 200MB or 1GiB; a larger model has several and an
    /// index
    #[arg(long, value_parser = bytes, default_value = "5GB")]
    max_shard_size: u64,
    /// Name tensors by their module paths and write them as they lie in the module
    #[arg(long)]
    module_paths: bool,
}

pub fn run(args: &Args) -> ExitCode {
    let mut options = MergeOptions::new()
        .with_max_shard_size(args.max_shard_size)
        .with_module_paths(args.module_paths);
    if let Some(model) = &args.model {
        options = options.with_model(model);
    }
    let merged = match merge(&args.folder, &args.output, &options) {
        Ok(merged) => merged,
        Err(error) => {
            say(error);
            return ExitCode::FAILURE;
        }
    };
    for file in &merged.files {
        print(file.display());
    }
    print(format_args!(
        "{} tensors, {:.1} MB, of `{}` in {}",
        merged.tensors,
        merged.bytes as f64 / 1e6,
        merged.model,
        merged.checkpoint.display()
    ));
    ExitCode::SUCCESS
}

/// A number of bytes, with a unit or without.
fn bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 8] = [
        ("KIB", 1 << 10),
        ("MIB", 1 << 20),
        ("GIB", 1 << 30),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("B", 1),
        ("", 1),
    ];
    let upper = text.trim().to_ascii_uppercase();
    let with = |(unit, size): &(&str, u64)| Some((upper.strip_suffix(unit)?.trim_end(), *size));
    let (number, size) = UNITS.iter().find_map(with).unwrap_or((&upper, 1));
    let number: u64 = number.parse().map_err(|_| format!("use bytes, or such as `5GB`: {text}"))?;
    number.checked_mul(size).ok_or_else(|| format!("{text} is too large"))
}
