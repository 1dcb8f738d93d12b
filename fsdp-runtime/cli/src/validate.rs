//! `fsdp validate`: prints the errors of a configuration file, and the keys without effect.

use std::path::PathBuf;
use std::process::ExitCode;

use fsdp_runtime::config::Config;

use crate::console;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Configuration file to check
    file: PathBuf,
}

/// Exits with 0 if the file is valid, with 1 otherwise.
pub(crate) fn run(args: &Args) -> ExitCode {
    let (config, notes) = match Config::read(&args.file) {
        Ok(read) => read,
        Err(error) => {
            console::err(error);
            return ExitCode::FAILURE;
        }
    };
    for note in &notes {
        console::out(note);
    }
    if let Err(error) = config.check() {
        console::err(error);
        return ExitCode::FAILURE;
    }
    console::out(format_args!("{}: valid", args.file.display()));
    let names = &config.fsdp.transformer_layer_cls_to_wrap;
    if !names.is_empty() {
        let names = names.join(", ");
        console::out(format_args!(
            "not checked here: whether the model has these units: {names}; the program checks them \
             when it starts"
        ));
    }
    ExitCode::SUCCESS
}
