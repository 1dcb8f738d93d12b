//! The conversations of a run: those to train on and those held out, as tokens in rows.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::cli::{Cli, PackingName};
use crate::common::cache_folder::cache_folder;
use crate::data::{
    CacheUse, ChatTokenizer, Dataset, EncodeOptions, HostBatch, Packing, PrepareOptions, RowLength,
    Rows, Source, bigram_perplexity, split,
};
use crate::tiny;

/// Number of counted tokens from which on no bigram model is made.
const BIGRAM_TOKENS: usize = 2_000_000;

/// Conversations in rows.
#[derive(Debug)]
pub struct Split {
    /// Tokens.
    dataset: Dataset,
    /// Conversations of each row.
    pub rows: Rows,
    pad: u32,
    length: RowLength,
}

/// The conversations of a run.
#[derive(Debug)]
pub struct Conversations {
    /// Conversations to train on.
    pub train: Split,
    /// Conversations to evaluate on, if there are any.
    pub eval: Option<Split>,
    /// Lines about the data, to be shown to the user.
    pub description: String,
    /// Perplexity of a bigram model on the held-out conversations.
    pub bigram_perplexity: Option<f64>,
}

impl Split {
    /// Returns rows as a batch; a row of padding for no rows.
    ///
    /// # Errors
    ///
    /// If a row is longer than the batch.
    pub fn batch(&self, rows: &[usize]) -> Result<HostBatch> {
        HostBatch::new(&self.dataset, &self.rows, rows, self.pad, self.length)
    }
}

/// Reads the conversations that the arguments name, as tokens.
/// Rows are cut in `blocks` of equal length.
///
/// # Errors
///
/// If a file cannot be read, or none of its conversations can be used; with `--strict`, if one cannot.
pub fn read(
    cli: &Cli,
    tokenizer: &ChatTokenizer,
    max_length: usize,
    blocks: usize,
) -> Result<Conversations> {
    let files = |files: &[PathBuf]| files.iter().cloned().map(Source::File).collect::<Vec<_>>();
    let args = &cli.data;
    let (name, sources) = match args.data.is_empty() {
        true => ("embedded conversations", vec![tiny::conversations()]),
        false => ("--data", files(&args.data)),
    };
    let prepare = |sources| {
        let encode = EncodeOptions {
            max_length,
            truncate: args.truncate,
            train_on_prompt: args.train_on_prompt,
        };
        let (cache, strict, quiet) =
            (cache_folder(args.token_cache.as_deref()), args.strict, cli.output.quiet);
        Dataset::prepare(&PrepareOptions { sources, cache, encode, strict, quiet }, tokenizer)
    };
    let all = prepare(sources).context(name)?;
    let mut description = describe(name, &all);
    let (train, eval) = match (args.eval_data.is_empty(), args.eval_fraction > 0.0) {
        (false, _) => {
            let eval = prepare(files(&args.eval_data)).context("--eval-data")?;
            description.push_str(&describe("--eval-data", &eval));
            (all, Some(eval))
        }
        (true, true) => {
            let (train, eval) =
                split(&all, args.eval_fraction, cli.training.seed).context("--eval-fraction")?;
            (train, Some(eval))
        }
        (true, false) => (all, None),
    };
    let bigram = eval.as_ref().filter(|_| train.counted() < BIGRAM_TOKENS);
    let bigram_perplexity = bigram.map(|eval| bigram_perplexity(&train, eval));
    let length = match args.pad_to_max_length {
        true => {
            ensure!(
                max_length.is_multiple_of(blocks),
                "--max-length {max_length} with --pad-to-max-length: the ranks that share a row need a multiple of \
                 {blocks}"
            );
            RowLength::Fixed(max_length)
        }
        false => RowLength::Longest(row_multiple(blocks)),
    };
    let packing = match args.packing {
        PackingName::None => Packing::None,
        PackingName::FirstFit => Packing::FirstFit,
        PackingName::InOrder => Packing::InOrder,
    };
    let in_rows = |dataset: Dataset| {
        let rows = Rows::new(&dataset, packing, max_length)?;
        Ok::<_, anyhow::Error>(Split { rows, pad: tokenizer.pad_id(), length, dataset })
    };
    let (train, eval) = (in_rows(train)?, eval.map(in_rows).transpose()?);
    let held_out = eval.as_ref().map_or(0, |eval| eval.dataset.len());
    write!(
        description,
        "{} conversations to train on in {} rows, {held_out} held out",
        train.dataset.len(),
        train.rows.len()
    )?;
    Ok(Conversations { train, eval, description, bigram_perplexity })
}

/// Returns the least multiple of 8 that is a multiple of the number of blocks of a row.
fn row_multiple(blocks: usize) -> usize {
    (1..=blocks).map(|at| 8 * at).find(|length| length.is_multiple_of(blocks)).unwrap_or(8)
}

/// Returns lines about conversations and those that are not used.
fn describe(name: &str, dataset: &Dataset) -> String {
    let cache = match dataset.cache_use() {
        CacheUse::Hit => ", from the cache",
        CacheUse::Built => "",
        CacheUse::Rebuilt(reason) => &format!(", tokenized again: {reason}"),
    };
    let (count, tokens, counted) = (dataset.len(), dataset.tokens(), dataset.counted());
    let mut text = format!(
        "{name}: {count} conversations of {tokens} tokens, {counted} of them counted{cache}\n"
    );
    if dataset.report().rejected() > 0 {
        text.push_str(&format!("{}\n", dataset.report()));
    }
    text
}
