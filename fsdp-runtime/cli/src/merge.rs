//! `fsdp merge`: converts a checkpoint to safetensors files that transformers loads.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueEnum;
use fsdp_runtime::checkpoint::{MergeOptions, merge};
use fsdp_runtime::pretrained::SaveDtype;

use crate::console;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Checkpoint folder, or a folder of checkpoints, of which the newest complete one is used
    folder: PathBuf,
    /// Folder to write `model.safetensors` to
    output: PathBuf,
    /// Name of the model, if the checkpoint holds several
    #[arg(long)]
    model: Option<String>,
    /// Maximum size of one file in bytes, such as 5GB, 200MB or 1GiB; a larger model is written to
    /// several files and an index
    #[arg(long, value_parser = bytes, default_value = "5GB")]
    max_shard_size: u64,
    /// Name tensors by their module paths instead of their checkpoint keys, and write them in
    /// Burn's layout, untransposed
    #[arg(long)]
    module_paths: bool,
    /// Dtype of the float tensors; by default that in which each is stored, and f32 for parameters
    /// that are stored as codes
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    F32,
    Bf16,
    F16,
}

impl From<Dtype> for SaveDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
            Dtype::F16 => Self::F16,
        }
    }
}

/// Prints the files written and the size of the model. Exits with 1 on an error.
pub(crate) fn run(args: &Args) -> ExitCode {
    let mut options = MergeOptions::new()
        .with_max_shard_size(args.max_shard_size)
        .with_module_paths(args.module_paths);
    if let Some(model) = &args.model {
        options = options.with_model(model);
    }
    if let Some(dtype) = args.dtype {
        options = options.with_dtype(dtype.into());
    }
    let merged = match merge(&args.folder, &args.output, &options) {
        Ok(merged) => merged,
        Err(error) => {
            console::err(error);
            return ExitCode::FAILURE;
        }
    };
    for file in &merged.files {
        console::out(file.display());
    }
    console::out(format_args!(
        "{} tensors, {:.1} MB, of `{}` in {}",
        merged.tensors,
        merged.bytes as f64 / 1e6,
        merged.model,
        merged.checkpoint.display()
    ));
    ExitCode::SUCCESS
}

/// Parses a number of bytes with an optional unit.
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
    let number: u64 = number
        .parse()
        .map_err(|_| format!("expected a number of bytes, such as `5GB`, not `{text}`"))?;
    number.checked_mul(size).ok_or_else(|| format!("{text} is too large"))
}
