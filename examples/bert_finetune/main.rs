//! BERT fine-tuning with FSDP for Burn, end to end on real text.
//!
//! ```text
//! cargo run --release --example bert_finetune            # spam from mail, a small BERT, two ranks
//! cargo run --release --example bert_finetune -- --help
//! cargo run --release --example bert_finetune -- --pretrained MiniLM-L6/ --data mrpc/
//! ```
//!
//! `model.rs` is the model and its annotations, `train.rs` what each rank runs. The rest is what any
//! such program needs: text (`data.rs`), word pieces (`tokenize.rs`), batches (`batch.rs`), scores
//! (`metrics.rs`), checkpoints (`saving.rs`), a report (`report.rs`), what goes with saved weights
//! (`export.rs`), and the file that `fsdp launch` passes on (`settings.rs`).

mod allocator;
mod batch;
mod cli;
mod config;
mod data;
mod device;
mod export;
mod metrics;
mod model;
mod report;
mod saving;
mod settings;
mod tokenize;
mod train;
#[cfg(test)]
mod transformers;

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use fsdp_runtime::Rank;
use fsdp_runtime::prelude::*;

use crate::cli::Cli;
use crate::config::BertConfig;
use crate::data::Corpus;
use crate::export::Export;
use crate::report::Summary;
use crate::saving::handle_interrupts;
use crate::settings::Settings;
use crate::tokenize::BertTokenizer;
use crate::train::{Job, train};

fn main() -> Result<()> {
    start(&Cli::parse())
}

fn start(cli: &Cli) -> Result<()> {
    allocator::keep_pages();
    let settings = Settings::of(cli)?;
    settings.device.resolve_or_exit();
    let summary = match run(cli, settings)? {
        Ended::With(summary) => summary,
        Ended::Elsewhere => return Ok(()),
        // What a shell calls a program that Ctrl-C ended.
        Ended::Interrupted => std::process::exit(130),
    };
    if !(cli.json && cli.quiet) {
        println!("{summary}");
    }
    if cli.json {
        println!("{}", serde_json::to_string(&summary)?);
    }
    Ok(())
}

/// How a run ended.
enum Ended {
    /// With a summary, in the process that has rank 0.
    With(Box<Summary>),
    /// Well, in a process of another rank.
    Elsewhere,
    /// By Ctrl-C.
    Interrupted,
}

fn run(cli: &Cli, settings: Settings) -> Result<Ended> {
    let device = settings.device.resolve()?;
    let job = prepare(cli, &settings)?;
    if job.saving.directory.is_some() {
        handle_interrupts()?;
    }
    let of_ranks = launch(settings.launch.with_device(device), move |worker: Worker| {
        let summary = train(&job, &worker)?;
        Ok::<_, anyhow::Error>((worker.rank(), summary))
    })?;
    // All ranks end after the same step.
    Ok(match of_ranks.into_iter().next() {
        Some((_, None)) => Ended::Interrupted,
        Some((Rank::ZERO, Some(summary))) => Ended::With(Box::new(summary)),
        _ => Ended::Elsewhere,
    })
}

/// Reads text, tokenizer and model configuration: all that can be wrong before a rank starts.
fn prepare(cli: &Cli, settings: &Settings) -> Result<Job> {
    let recipe = cli.recipe();
    let corpus = match &cli.data {
        Some(path) => Corpus::read(path)?,
        None => Corpus::embedded()?,
    };
    let (tokenizer, config) = match &cli.pretrained {
        Some(directory) => (
            BertTokenizer::read(directory, recipe.max_length)?,
            BertConfig::read(&directory.join("config.json"))?,
        ),
        None => {
            let tokenizer = BertTokenizer::train(&corpus.train, recipe.max_length)?;
            let config = BertConfig::small(tokenizer.vocab_size(), recipe.max_length);
            (tokenizer, config)
        }
    };
    config.check_input(tokenizer.vocab_size(), recipe.max_length)?;
    let about = format!(
        "{}: {} examples to train on, {} held out, {} classes, {} word pieces",
        corpus.name,
        corpus.train.len(),
        corpus.test.len(),
        corpus.classes,
        tokenizer.vocab_size()
    );
    let pretrained = cli.pretrained.as_deref();
    let export =
        |folder: &PathBuf| Export::new(folder, &config, corpus.classes, &tokenizer, pretrained);
    Ok(Job {
        about,
        export: cli.save_pretrained.as_ref().map(export).transpose()?,
        config: config.with_dropout(cli.dropout),
        weights: cli.pretrained.clone(),
        classes: corpus.classes,
        pad: tokenizer.pad(),
        train: tokenizer.encode(&corpus.train)?,
        test: tokenizer.encode(&corpus.test)?,
        strategy: settings.strategy,
        options: settings.options.clone(),
        scaler: settings.scaler.clone(),
        saving: cli.save_plan(),
        recipe,
        quiet: cli.quiet,
    })
}
