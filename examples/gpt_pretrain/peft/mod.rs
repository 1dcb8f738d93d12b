//! Adapters in the form of Hugging Face's PEFT for GPT-2.
//!
//! GPT-2 has one layer, `c_attn`, for queries, keys and values, where the model here has three. Its
//! adapter is made of theirs: the first factors lie on top of each other, and the second ones on a
//! diagonal, so that its rank is the sum of theirs. Rank and alpha of such layers are in PEFT's
//! `rank_pattern` and `alpha_pattern`. In the other direction, each of the three gets the rows of the
//! adapter that it depends on.
//!
//! [`import`] and [`export`] convert folders: the runtime loads and saves adapters with the names of
//! the model here.

mod adapter;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use fsdp_runtime::Rank;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::SaveAdapters;
use serde_json::json;
use tempfile::TempDir;

use self::adapter::{Adapter, Matrix, Scales, is_named, read, write};
use crate::common::tokenizers::read_files;
use crate::model::Gpt;
use crate::pretrained::names;

/// First segment of GPT-2's modules below its head.
const TRANSFORMER: &str = "transformer.";
/// Files of GPT-2's word pieces.
const TOKENIZER: [&str; 5] = [
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
];
/// Linear layers of a block of GPT-2.
const MODULES: [&str; 4] = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"];

/// Directory to save adapters in, and the pretrained model that they belong to.
#[derive(Clone, Debug)]
pub struct AdapterExport {
    folder: PathBuf,
    /// Directory of the pretrained model.
    base: PathBuf,
    /// Names and contents of the tokenizer's files.
    files: Vec<(String, Vec<u8>)>,
    /// Number of blocks of the model.
    layers: usize,
}

impl AdapterExport {
    /// Creates the directory and reads the tokenizer's files.
    ///
    /// It is called before training, so that a wrong path is found before the work is done.
    ///
    /// # Errors
    ///
    /// If the directory cannot be created, or if a file of the tokenizer cannot be read.
    pub fn new(folder: &Path, base: &Path, layers: usize) -> Result<Self> {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        let files = read_files(base, &TOKENIZER)?;
        Ok(Self { folder: folder.into(), base: base.into(), files, layers })
    }

    /// Saves the adapters of a model. Every rank calls it; rank 0 writes the files.
    ///
    /// # Errors
    ///
    /// If a file cannot be written, or if a peer fails.
    pub fn save(&self, model: &Fsdp<Gpt>, worker: &Worker) -> Result<()> {
        let options = SaveAdapters::new()
            .with_task_type("CAUSAL_LM")
            .with_base_model(self.base.display().to_string());
        let saved = tempfile::tempdir()?;
        model.state().save_adapters(saved.path(), &options)?;
        if worker.rank() != Rank::ZERO {
            return Ok(());
        }
        export(saved.path(), &self.folder, self.layers)?;
        self.files.iter().try_for_each(|(name, contents)| {
            let path = self.folder.join(name);
            std::fs::write(&path, contents)
                .with_context(|| format!("cannot write {}", path.display()))
        })
    }
}

/// Converts adapters of the model here, in `saved`, to those of a GPT-2 with `layers` blocks, and
/// writes them to `folder`.
///
/// # Errors
///
/// If the files in `saved` cannot be read, or those in `folder` cannot be written.
fn export(saved: &Path, folder: &Path, layers: usize) -> Result<()> {
    let (mut adapters, mut config) = read(saved)?;
    let has_patterns = |key: &str| config[key].as_object().is_some_and(|it| !it.is_empty());
    ensure!(
        !has_patterns("rank_pattern") && !has_patterns("alpha_pattern"),
        "adapters of several ranks or alphas have no form of GPT-2's; train without --lora-ranks"
    );
    let scale = Scales::new(&config)?.base;
    let mut merged = BTreeMap::new();
    for layer in 0..layers {
        for module in MODULES {
            let name = format!("h.{layer}.{module}");
            let parts = parts(&name).into_iter().map(|part| adapters.remove(&part)).collect();
            if let Some(adapter) = Adapter::merged(parts) {
                merged.insert(format!("{TRANSFORMER}{name}"), adapter);
            }
        }
    }
    if let Some(other) = adapters.keys().next() {
        bail!("{other} is no linear layer of GPT-2");
    }
    let targets = targets(merged.keys(), layers);
    let ranks = ranks(&merged, &targets);
    let rank = ranks.values().copied().min().unwrap_or(0);
    let others = || ranks.iter().filter(|(_, other)| **other != rank);
    let alpha = |rank: usize| scale * rank as f64;
    config["r"] = rank.into();
    config["lora_alpha"] = alpha(rank).into();
    config["rank_pattern"] = others().map(|(name, rank)| (name.clone(), json!(rank))).collect();
    config["alpha_pattern"] =
        others().map(|(name, rank)| (name.clone(), json!(alpha(*rank)))).collect();
    // The alphas are those of scales that are divided by the rank.
    config["use_rslora"] = false.into();
    config["target_modules"] = targets.into_iter().collect();
    config["fan_in_fan_out"] = true.into();
    write(folder, &merged, &config)
}

/// Converts adapters that PEFT, or [`export`], has written for a GPT-2 to those of the model here.
/// They are in the returned folder, which is removed with the value.
///
/// # Errors
///
/// If the files cannot be read, or if they have adapters of other layers than GPT-2's linear ones.
pub fn import(folder: &Path) -> Result<TempDir> {
    let context = || format!("--adapters: {}", folder.display());
    let (adapters, mut config) = read(folder).with_context(context)?;
    let scales = Scales::new(&config).with_context(context)?;
    let (adapters, scale) = (split(&adapters, &scales).with_context(context)?, scales.base);
    let rank = adapters.values().map(Adapter::rank).max().unwrap_or(0);
    config["r"] = rank.into();
    config["lora_alpha"] = (scale * rank as f64).into();
    config["rank_pattern"] = json!({});
    config["alpha_pattern"] = json!({});
    config["use_rslora"] = false.into();
    config["target_modules"] = adapters.keys().cloned().collect();
    config["fan_in_fan_out"] = false.into();
    let target = tempfile::Builder::new().prefix("gpt2-adapters-").tempdir()?;
    write(target.path(), &adapters, &config)?;
    Ok(target)
}

/// Returns the layers of the model here that a linear layer of GPT-2 is made of, in their order; none
/// if it is no linear layer of GPT-2.
fn parts(module: &str) -> Vec<String> {
    let tensors = names(&format!("{module}.weight")).into_iter();
    let linear = tensors.filter(|(.., transposed)| *transposed);
    linear.filter_map(|(name, ..)| Some(name.strip_suffix(".weight")?.to_string())).collect()
}

/// Returns PEFT's names of the adapted modules: those of a block without its number, where all
/// `layers` blocks have the adapter.
fn targets<'a>(
    adapted: impl Iterator<Item = &'a String> + Clone,
    layers: usize,
) -> BTreeSet<String> {
    let target = |name: &String| {
        let module = MODULES.into_iter().find(|module| is_named(name, module));
        let everywhere = module.filter(|module| {
            adapted.clone().filter(|other| is_named(other, module)).count() == layers
        });
        everywhere.map_or_else(|| name.clone(), str::to_string)
    };
    adapted.clone().map(target).collect()
}

/// Returns the ranks of adapters by the names of targets, or of single modules where those of a target
/// have several ranks.
fn ranks(
    adapters: &BTreeMap<String, Adapter>,
    targets: &BTreeSet<String>,
) -> BTreeMap<String, usize> {
    let mut ranks = BTreeMap::new();
    for target in targets {
        let modules = adapters.iter().filter(|(name, _)| is_named(name, target));
        let modules: Vec<_> = modules.map(|(name, it)| (name.clone(), it.rank())).collect();
        let of_first = modules.first().map_or(0, |(_, rank)| *rank);
        match modules.iter().all(|(_, rank)| *rank == of_first) {
            true => ranks.extend([(target.clone(), of_first)]),
            false => ranks.extend(modules),
        }
    }
    ranks
}

/// Returns the adapters of the model here, all of one rank and one scale.
///
/// A part of a layer gets the rows of the first factor that it depends on. Where these are fewer than
/// elsewhere, further rows follow, with columns of zeros in the second factor. A part that depends on
/// no row gets no adapter, unless the whole layer depends on none, as before training.
fn split(
    adapters: &BTreeMap<String, Adapter>,
    scales: &Scales<'_>,
) -> Result<BTreeMap<String, Adapter>> {
    let mut found = Vec::new();
    for (name, adapter) in adapters {
        let parts = parts(name);
        ensure!(!parts.is_empty(), "{name} is no linear layer of GPT-2");
        let outputs = adapter.b.rows().len();
        ensure!(
            outputs.is_multiple_of(parts.len()),
            "{name} has {outputs} outputs, which are no {} equal parts",
            parts.len()
        );
        let factor = scales.of(name, adapter.rank())? / scales.base;
        let height = outputs / parts.len() * adapter.rank();
        let of_parts = adapter.b.elements.chunks_exact(height).zip(parts);
        let of_parts = of_parts.map(|(b, name)| Part { name, adapter, b, factor });
        let used = |part: &Part<'_>| !part.used().is_empty();
        let (some, none): (Vec<_>, Vec<_>) = of_parts.partition(used);
        found.extend(if some.is_empty() { none } else { some });
    }
    let rank = found.iter().map(|part| part.used().len()).max().filter(|rank| *rank > 0);
    let rank = rank.or_else(|| adapters.values().map(Adapter::rank).max()).unwrap_or(0);
    ensure!(rank > 0, "there are no adapters");
    Ok(found.into_iter().map(|part| (part.name.clone(), part.of_rank(rank))).collect())
}

/// Part of the outputs of an adapted layer, which is a layer of the model here.
struct Part<'a> {
    name: String,
    adapter: &'a Adapter,
    /// Rows of the second factor.
    b: &'a [f32],
    /// Scale of the adapter divided by that of all adapters.
    factor: f64,
}

impl Part<'_> {
    /// Returns the rows of the first factor that the part depends on.
    fn used(&self) -> Vec<usize> {
        let rank = self.adapter.rank();
        let column = |at: usize| self.b.iter().skip(at).step_by(rank);
        (0..rank).filter(|at| column(*at).any(|element| *element != 0.0)).collect()
    }

    fn of_rank(&self, rank: usize) -> Adapter {
        let (used, own) = (self.used(), self.adapter.rank());
        let others = (0..own).filter(|at| !used.contains(at)).chain((0..own).cycle());
        let rows: Vec<&[f32]> = self.adapter.a.rows().collect();
        let taken = used.iter().copied().chain(others).take(rank);
        let a = taken.flat_map(|at| rows[at]).copied().collect();
        let element = |row: &[f32], at: usize| {
            let element = used.get(at).map_or(0.0, |column| row[*column]);
            // A factor of 1 keeps the bits.
            (f64::from(element) * self.factor) as f32
        };
        let b = self.b.chunks_exact(own).flat_map(|row| (0..rank).map(move |at| element(row, at)));
        Adapter {
            a: Matrix { columns: self.adapter.a.columns, elements: a },
            b: Matrix { columns: rank, elements: b.collect() },
        }
    }
}
