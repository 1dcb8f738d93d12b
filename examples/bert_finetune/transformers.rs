//! Tests that compare the model's logits with those of PyTorch/transformers, for weights loaded
//! from transformers, and for weights and adapters exported to it and to PEFT after training.
//!
//! The tests need a Python with transformers (`PYTHON`, default `python3`). Some start from a
//! pretrained BERT, whose directory `BERT_DIR` names. Without these they are skipped.
//!
//! ```text
//! BERT_DIR=MiniLM-L6/ cargo test --release --example bert_finetune transformers
//! ```

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use clap::Parser;
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, from_pretrained};

use crate::batch::{Padded, Padding};
use crate::bert_config::BertConfig;
use crate::cli::Cli;
use crate::common::python::{python_with, run_script};
use crate::corpus::{Corpus, Example};
use crate::model::BertInput;
use crate::tokenizer::BertTokenizer;

const PAIRS: usize = 32;
const MAX_LENGTH: usize = 128;

/// Returns sentence pairs of many lengths: some are truncated, and most are padded.
fn pairs() -> Vec<Example> {
    let corpus = Corpus::embedded().expect("the embedded corpus is valid");
    let text = |index: usize| corpus.test[index].first.clone();
    let start =
        |text: String, words: usize| text.split(' ').take(words).collect::<Vec<_>>().join(" ");
    (0..PAIRS)
        .map(|i| Example {
            label: 0,
            first: start(text(2 * i), 3 + 3 * i),
            second: Some(start(text(2 * i + 1), 5 + 2 * i)),
        })
        .collect()
}

/// Returns the directory of a pretrained BERT, if there is one.
fn bert_dir() -> Option<PathBuf> {
    let bert = std::env::var_os("BERT_DIR").map(PathBuf::from);
    if bert.is_none() {
        eprintln!("skipped: BERT_DIR names no directory of a pretrained BERT");
    }
    bert
}

/// Returns a Python that has transformers, if there is one.
fn python() -> Option<String> {
    python_with("torch, transformers")
}

/// Writes one pair per line, separated by a tab.
fn write_pairs(file: &Path, pairs: &[Example]) {
    let line =
        |pair: &Example| format!("{}\t{}", pair.first, pair.second.as_deref().unwrap_or_default());
    std::fs::write(file, pairs.iter().map(line).collect::<Vec<_>>().join("\n")).unwrap();
}

/// Returns the logits that transformers computes for the pairs. The script saves its model in
/// `folder`.
fn reference(python: &str, bert: &Path, pairs: &[Example], folder: &Path) -> Vec<Vec<f64>> {
    let file = folder.join("pairs.tsv");
    write_pairs(&file, pairs);
    let length = MAX_LENGTH.to_string();
    let arguments = [bert.as_os_str(), file.as_os_str(), folder.as_os_str(), length.as_ref()];
    let output = run_script(python, "bert_finetune/transformers_logits.py", &arguments);
    serde_json::from_slice(&output).expect("the script prints JSON")
}

#[test]
fn untrained_logits_equal_those_of_transformers() {
    let (Some(bert), Some(python)) = (bert_dir(), python()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let pairs = pairs();
    let expected = reference(&python, &bert, &pairs, folder.path());
    let tokenizer = BertTokenizer::read(&bert, MAX_LENGTH).unwrap();
    let encoded = tokenizer.encode(&pairs).unwrap();
    let config = BertConfig::read(&folder.path().join("config.json")).unwrap();
    let weights = folder.path().join("model.safetensors");
    let padding = Padding::to_longest(tokenizer.pad());
    let options = LaunchOptions::new(2).with_device(Device::flex());
    let ranks = launch(options, move |worker| {
        let model = config.init(2, worker.device());
        let mut model = fully_shard(model, &worker, FsdpOptions::new())?;
        let report = model.state_mut().load_safetensors(
            &weights,
            &LoadOptions::new().with_allowed_unexpected("bert.embeddings.position_ids"),
        )?;
        assert!(report.missing.is_empty(), "{report:?}");
        let rows: Vec<usize> = (0..PAIRS).collect();
        let device = worker.device().clone().inner();
        let input = BertInput::new(Padded::new(&encoded, &rows, padding), &device);
        let logits = model.valid().forward(input.ids, input.types, input.padding);
        Ok::<_, fsdp_runtime::Error>(logits.into_data().iter::<f64>().collect::<Vec<_>>())
    })
    .unwrap();
    assert_close(&ranks, expected);
}

/// Checks that every rank's logits are those of transformers, up to 1e-4.
fn assert_close(ranks: &[Vec<f64>], expected: Vec<Vec<f64>>) {
    let expected: Vec<f64> = expected.into_iter().flatten().collect();
    assert!(expected.iter().any(|logit| logit.abs() > 0.05), "{expected:?}");
    assert_eq!(expected.len(), 2 * PAIRS);
    for logits in ranks {
        assert_eq!(logits.len(), 2 * PAIRS);
        let furthest = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("largest difference of a logit: {furthest:.1e}");
        assert!(furthest <= 1e-4, "{furthest}");
    }
}

/// Output of `transformers_reload.py` and `peft_reload.py`.
#[derive(serde::Deserialize)]
struct Reloaded {
    missing: Vec<String>,
    unexpected: Vec<String>,
    mismatched: Vec<String>,
    ids: Vec<Vec<u32>>,
    logits: Vec<Vec<f64>>,
}

/// Trains a few steps and saves the model, or the adapters, in `folder`.
fn train_and_save(folder: &Path, flags: &[&str]) {
    let mut arguments = vec!["bert_finetune", "--steps", "6", "--quiet", "--seed", "3"];
    arguments.extend(["--save-pretrained", folder.to_str().unwrap()]);
    arguments.extend(flags);
    let cli = Cli::parse_from(arguments);
    crate::run(&cli, cli.launch_settings().unwrap()).unwrap();
}

/// Runs a script that loads the exported files in `folders`, and returns its output for the pairs.
fn reload(python: &str, name: &str, folders: &[&Path], pairs: &[Example]) -> Reloaded {
    let home = tempfile::tempdir().unwrap();
    let (file, length) = (home.path().join("pairs.tsv"), MAX_LENGTH.to_string());
    write_pairs(&file, pairs);
    let mut arguments: Vec<&OsStr> = folders.iter().map(|folder| folder.as_os_str()).collect();
    arguments.extend([file.as_os_str(), length.as_ref()]);
    let output = run_script(python, &format!("bert_finetune/{name}"), &arguments);
    let theirs: Reloaded = serde_json::from_slice(&output).expect("the script prints JSON");
    assert!(theirs.missing.is_empty(), "missing: {:?}", theirs.missing);
    assert!(theirs.unexpected.is_empty(), "unexpected: {:?}", theirs.unexpected);
    assert!(theirs.mismatched.is_empty(), "mismatched: {:?}", theirs.mismatched);
    theirs
}

/// Compares the logits of a model in `folder`, with the adapters in another folder if it has any,
/// with those of another framework.
fn compare(folder: PathBuf, adapters: Option<PathBuf>, pairs: &[Example], theirs: Reloaded) {
    let exported = adapters.as_ref().unwrap_or(&folder);
    let tokenizer = BertTokenizer::read(exported, MAX_LENGTH).unwrap();
    let encoded = tokenizer.encode(pairs).unwrap();
    assert_eq!(encoded.len(), theirs.ids.len());
    for (ours, theirs) in encoded.iter().zip(&theirs.ids) {
        assert_eq!(ours.ids, theirs[..ours.ids.len()], "one tokenizer");
    }
    let config = BertConfig::read(&folder.join("config.json")).unwrap();
    let padding = Padding::to_longest(tokenizer.pad());
    let ranks = launch(LaunchOptions::new(2).with_device(Device::flex()), move |worker| {
        let model = config.init(2, worker.device());
        let (options, load) = (FsdpOptions::new(), LoadOptions::new().with_new_adapters());
        let model = match &adapters {
            Some(adapters) => LoraConfig::from_peft(adapters)?.apply(model)?,
            None => model,
        };
        let (mut model, _) = from_pretrained(model, &worker, options, &folder, &load)?;
        if let Some(adapters) = &adapters {
            model.state_mut().load_adapters(adapters)?;
        }
        let rows: Vec<usize> = (0..PAIRS).collect();
        let device = worker.device().clone().inner();
        let input = BertInput::new(Padded::new(&encoded, &rows, padding), &device);
        let logits = model.valid().forward(input.ids, input.types, input.padding);
        Ok::<_, fsdp_runtime::Error>(logits.into_data().iter::<f64>().collect::<Vec<_>>())
    })
    .unwrap();
    assert_close(&ranks, theirs.logits);
}

/// Trains a few steps with `--save-pretrained`, and compares the logits of the exported model,
/// loaded here, with those of the one loaded in transformers.
fn save_and_compare(python: &str, flags: &[&str]) {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("model");
    train_and_save(&folder, flags);
    let pairs = pairs();
    let theirs = reload(python, "transformers_reload.py", &[&folder], &pairs);
    compare(folder, None, &pairs, theirs);
}

/// PEFT loads exported adapters onto the base model, and its logits are those of the adapters loaded
/// here. A run continues from them.
#[test]
fn adapters_trained_and_saved_load_in_peft() {
    adapters_load_in_peft(&["--lora-targets", "query,value,up"]);
}

/// PEFT reads dropout, the scale and the ranks.
#[test]
fn adapters_with_settings_load_in_peft() {
    let settings = ["--lora-dropout", "0.1", "--lora-rslora", "--lora-ranks", "value=2,up=6"];
    adapters_load_in_peft(&[&["--lora-targets", "query,value,up"], &settings[..]].concat());
    adapters_load_in_peft(&["--lora-targets", "all-linear"]);
}

fn adapters_load_in_peft(settings: &[&str]) {
    let Some(python) = python_with("torch, transformers, peft") else { return };
    let home = tempfile::tempdir().unwrap();
    let (base, adapters) = (home.path().join("base"), home.path().join("adapters"));
    train_and_save(&base, &[]);
    let flags = ["--pretrained", base.to_str().unwrap(), "--lora", "4", "--learning-rate", "1e-2"];
    train_and_save(&adapters, &[&flags[..], settings].concat());
    let pairs = pairs();
    let theirs = reload(&python, "peft_reload.py", &[&base, &adapters], &pairs);
    let read = |folder: &Path| std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    let continued = home.path().join("continued");
    let more = ["--adapters", adapters.to_str().unwrap(), "--learning-rate", "1e-30"];
    train_and_save(&continued, &[&flags[..2], &more].concat());
    assert_eq!(read(&continued), read(&adapters), "the rate is too small to change a bit");
    compare(base, Some(adapters), &pairs, theirs);
}

#[test]
fn a_model_trained_from_scratch_and_saved_loads_in_transformers() {
    let Some(python) = python() else { return };
    save_and_compare(&python, &[]);
}

#[test]
fn a_pretrained_model_fine_tuned_and_saved_loads_in_transformers() {
    let (Some(bert), Some(python)) = (bert_dir(), python()) else { return };
    save_and_compare(&python, &["--pretrained", bert.to_str().unwrap()]);
}
