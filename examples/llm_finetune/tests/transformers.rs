//! What `--save` writes, as transformers and PEFT read it: logits, text and chat template.
//!
//! The tests need a Python with transformers and PEFT (`PYTHON`, default `python3`). `LLM_DIR` names the
//! directory of a real model. Without these they are skipped.
//!
//! ```text
//! LLM_DIR=SmolLM2/ cargo test --release --example llm_finetune transformers
//! ```

use std::path::{Path, PathBuf};

use burn::tensor::{Int, Tensor, TensorData};
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::nn::AttentionOptions;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, from_pretrained};
use serde::Deserialize;

use super::runs::{path, run};
use crate::common::device::DeviceName;
use crate::common::lora::load_adapters;
use crate::common::python::{python_with, run_script};
use crate::data::{Message, Role};
use crate::job::Model;
use crate::model::Rows;

const QUESTION: &str = "What is 2 + 3?";

/// What the script prints.
#[derive(Deserialize)]
struct Theirs {
    /// Ids of the question, rendered by the template.
    ids: Vec<u32>,
    /// Logits at the last position.
    logits: Vec<f32>,
}

fn python() -> Option<String> {
    python_with("torch, transformers, peft")
}

/// Returns the logits that transformers computes after the question, with adapters if there are any.
fn theirs(python: &str, model: &Path, adapters: Option<&Path>) -> Theirs {
    let paths: Vec<_> =
        [Some(model), adapters].into_iter().flatten().map(Path::as_os_str).collect();
    let arguments = [&[QUESTION.as_ref()], &paths[..]].concat();
    let output = run_script(python, "llm_finetune/fixtures/logits_of.py", &arguments);
    serde_json::from_slice(&output).expect("the script prints JSON")
}

/// Returns the ids of the question and the logits after it.
fn ours(model: &Path, adapters: Option<&Path>) -> (Vec<u32>, Vec<f32>) {
    let (model, adapters) = (model.to_path_buf(), adapters.map(Path::to_path_buf));
    let read = Model::read(Some(&model)).unwrap();
    let ids = read.tokenizer.encode_prompt(&[Message::new(Role::User, QUESTION)]).unwrap();
    let (prompt, device) = (ids.clone(), DeviceName::Flex.resolve().unwrap());
    let logits = launch(LaunchOptions::new(2).with_device(device), move |worker| {
        let plain = read.config.init(512, worker.device());
        let plain = match &adapters {
            Some(folder) => LoraConfig::from_peft(folder)?.apply(plain)?,
            None => plain,
        };
        let load = LoadOptions::new().with_new_adapters();
        let (mut sharded, _) = from_pretrained(plain, &worker, FsdpOptions::new(), &model, &load)?;
        if let Some(folder) = &adapters {
            load_adapters(&mut sharded, folder)?;
        }
        let (sharded, device) = (sharded.valid(), worker.device().clone().inner());
        let ints = |numbers: Vec<i32>| {
            let data = TensorData::new(numbers, [1, prompt.len()]);
            Tensor::<2, Int>::from_data(data, &device)
        };
        let rows = Rows {
            ids: ints(prompt.iter().map(|id| *id as i32).collect()),
            positions: ints((0..prompt.len() as i32).collect()),
            sight: AttentionOptions::new().with_causal(true),
        };
        let logits = sharded.forward(rows).try_into_data()?.try_into_vec_as::<f32>()?;
        Ok::<_, anyhow::Error>(logits[logits.len() - read.config.vocab_size..].to_vec())
    });
    (ids, logits.unwrap().swap_remove(0))
}

fn assert_same(python: &str, model: &Path, adapters: Option<&Path>) {
    let theirs = theirs(python, model, adapters);
    let (ids, logits) = ours(model, adapters);
    assert_eq!(ids, theirs.ids, "{}", model.display());
    assert_eq!(logits.len(), theirs.logits.len());
    for (found, expected) in logits.iter().zip(&theirs.logits) {
        let bound = 1e-4 * expected.abs().max(1.0);
        assert!((found - expected).abs() < bound, "{}: {found} {expected}", model.display());
    }
}

#[test]
fn saved_models_and_adapters_are_read_by_transformers_and_peft() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    let full = place("full");
    run(&["--steps", "3", "--save", path(&full)]).unwrap();
    assert_same(&python, &full, None);

    let tune = ["--model", path(&full), "--steps", "3", "--learning-rate", "1e-2"];
    let ranks =
        ["--lora", "4", "--lora-rslora", "--lora-ranks", "k_proj=2", "--lora-alphas", "q_proj=3"];
    let modules = ["--lora-exclude", "down_proj", "--lora-modules-to-save", "norm"];
    for (name, more) in [("adapters", &[][..]), ("merged", &["--merge-adapters"])] {
        let saved = place(name);
        run(&[&tune[..], &ranks, &modules, &["--save", path(&saved)], more].concat()).unwrap();
    }
    assert_same(&python, &full, Some(&place("adapters")));
    assert_same(&python, &place("merged"), None);
    // Both runs trained the same adapters.
    let (_, adapted) = ours(&full, Some(&place("adapters")));
    let (_, merged) = ours(&place("merged"), None);
    assert!(adapted.iter().zip(&merged).all(|(a, b)| (a - b).abs() < 1e-4));
}

#[test]
fn the_logits_of_a_real_model_are_those_of_transformers() {
    let Some(model) = std::env::var_os("LLM_DIR").map(PathBuf::from) else {
        eprintln!("skipped: LLM_DIR names no directory of a model");
        return;
    };
    let Some(python) = python() else { return };
    assert_same(&python, &model, None);
}
