//! `fsdp config`: asks Accelerate's questions, and writes the answers to a configuration file.
//! `fsdp config update` rewrites an older file.
//!
//! Order of the files, each of which uses only those before it: `ask.rs` (what a question is),
//! `terminal.rs` (questions on a terminal), `questions.rs` (which questions are asked), and this
//! file.

mod ask;
mod questions;
mod terminal;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

use fsdp_runtime::config::{self, Config};

use self::terminal::Terminal;
use crate::console;

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    /// Write the defaults without asking questions
    #[arg(long)]
    default: bool,

    /// File to write [default: fsdp/default_config.yaml in the cache directory]
    #[arg(long, value_name = "FILE", visible_alias = "config_file")]
    output: Option<PathBuf>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Rewrites an older file in today's keys, and keeps the rest of it
    Update {
        /// File to rewrite [default: fsdp/default_config.yaml in the cache directory]
        #[arg(long, value_name = "FILE", alias = "config_file")]
        config_file: Option<PathBuf>,
    },
}

/// Exits with 0 once the file is written, even if this version cannot run the configuration yet.
pub(crate) fn run(args: &Args) -> ExitCode {
    let (file, flag) = match &args.command {
        Some(Command::Update { config_file }) => (config_file, "--config-file"),
        None => (&args.output, "--output"),
    };
    let Some(path) = file.clone().or_else(default_path) else {
        console::err(format_args!(
            "neither XDG_CACHE_HOME nor HOME is set; name the file with {flag} FILE"
        ));
        return ExitCode::FAILURE;
    };
    if args.command.is_some() {
        return update(&path);
    }
    let answers =
        if args.default { questions::defaults() } else { questions::ask_all(&mut Terminal::new()) };
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

/// Rewrites a file in today's keys. Prints the changes.
fn update(path: &Path) -> ExitCode {
    let cannot = |action: &str, error: io::Error| {
        console::err(format_args!("{}: cannot be {action}: {error}", path.display()));
        ExitCode::FAILURE
    };
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => return cannot("read", error),
    };
    let (text, updates) = match config::update(&text, path) {
        Ok(updated) => updated,
        Err(error) => {
            console::err(error);
            return ExitCode::FAILURE;
        }
    };
    if updates.is_empty() {
        console::out(format_args!("{}: has today's keys already", path.display()));
        return ExitCode::SUCCESS;
    }
    if let Err(error) = fs::write(path, text) {
        return cannot("written", error);
    }
    updates.iter().for_each(console::out);
    console::out(format_args!("updated {}", path.display()));
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
