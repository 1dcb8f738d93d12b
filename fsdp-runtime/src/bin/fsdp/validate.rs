//! `fsdp validate`: what is wrong with a file, and which of its keys have no effect.

use std::path::PathBuf;
use std::process::ExitCode;

use fsdp_runtime::config::Config;

use crate::{print, say};

#[derive(clap::Args)]
pub struct Args {
    /// The configuration file
    file: PathBuf,
}

pub fn run(args: &Args) -> ExitCode {
    let (config, notes) = match Config::read(&args.file) {
        Ok(read) => read,
        Err(error) => {
            say(error);
            return ExitCode::FAILURE;
        }
    };
    for note in &notes {
        print(note);
    }
    if let Err(error) = config.check() {
        say(error);
        return ExitCode::FAILURE;
    }
    print(format_args!("{}: valid", args.file.display()));
    let names = &config.fsdp.transformer_layer_cls_to_wrap;
    if !names.is_empty() {
        let names = names.join(", ");
        print(format_args!("the program checks when it starts that these are units: {names}"));
    }
    ExitCode::SUCCESS
}
