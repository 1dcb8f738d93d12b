//! `fsdp config`: asks Accelerate's questions, and writes the answers to a configuration file.
//!
//! Order of the files, each of which uses only those before it: `ask.rs` (what a question is),
//! `terminal.rs` (questions on a terminal), `questions.rs` (which questions are asked), and this
//! file.

mod ask;
mod questions;
mod terminal;

use std::path::PathBuf;
use std::process::ExitCode;

use fsdp_runtime::config::Config;

use self::terminal::Terminal;
use crate::console;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write the defaults without asking questions
    #[arg(long)]
    default: bool,

    /// File to write [default: fsdp/default_config.yaml in the cache directory]
    #[arg(long, value_name = "FILE", visible_alias = "config_file")]
    output: Option<PathBuf>,
}

/// Exits with 0 once the file is written, even if this version cannot run the configuration yet.
pub(crate) fn run(args: &Args) -> ExitCode {
    let Some(path) = args.output.clone().or_else(default_path) else {
        console::err("neither XDG_CACHE_HOME nor HOME is set; name the file with --output FILE");
        return ExitCode::FAILURE;
    };
    let answers = if args.default {
        Ok(questions::defaults())
    } else {
        questions::ask_all(&mut Terminal::new())
    };
    let config = match answers {
        Ok(config) => config,
        Err(error) => {
            console::err(format_args!("{error}; `fsdp config --default` asks no questions"));
            return ExitCode::FAILURE;
        }
    };
    if let Err(error) = config.write(&path) {
        console::err(error);
        return ExitCode::FAILURE;
    }
    console::out(format_args!("written to {}", path.display()));
    // Reading the file back gives the error the line numbers of the file.
    if let Ok((config, _)) = Config::read(&path)
        && let Err(error) = config.check()
    {
        console::err(format_args!("this version cannot run this configuration yet: {error}"));
    }
    ExitCode::SUCCESS
}

/// Returns the file that `fsdp config` writes and `fsdp launch` reads if no path is given:
/// `$XDG_CACHE_HOME/fsdp/default_config.yaml`, or the same below `$HOME/.cache`. `None` if neither
/// variable is set.
pub(crate) fn default_path() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(cache.join("fsdp").join("default_config.yaml"))
}
