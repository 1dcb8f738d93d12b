//! The loaded model's logits against those of PyTorch/transformers.
//!
//! Runs where a BERT lies in the folder `BERT_DIR` and `PYTHON` (`python3`) has transformers:
//!
//! ```text
//! BERT_DIR=MiniLM-L6/ cargo test --release --example bert_finetune transformers
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;

use burn::tensor::Device;
use fsdp_runtime::LoadOptions;
use fsdp_runtime::prelude::*;

use crate::batch::Padded;
use crate::config::BertConfig;
use crate::data::{Corpus, Example};
use crate::model::BertInput;
use crate::tokenize::BertTokenizer;

const PAIRS: usize = 32;
const MAX_LENGTH: usize = 128;

fn pairs() -> Vec<Example> {
    let corpus = Corpus::embedded().expect("the embedded corpus is valid");
    let text = |index: usize| corpus.test[index].first.clone();
    // Of all lengths: some are cut, most are filled up.
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

/// What transformers makes of the pairs; its model is left in `folder`.
fn reference(python: &str, bert: &Path, pairs: &[Example], folder: &Path) -> Vec<Vec<f64>> {
    let file = folder.join("pairs.tsv");
    let line =
        |pair: &Example| format!("{}\t{}", pair.first, pair.second.as_deref().unwrap_or_default());
    std::fs::write(&file, pairs.iter().map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let script =
        concat!(env!("CARGO_MANIFEST_DIR"), "/examples/bert_finetune/transformers_logits.py");
    let output = Command::new(python)
        .args([Path::new(script), bert, &file, folder])
        .arg(MAX_LENGTH.to_string())
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .expect("python was found before");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("the script prints JSON")
}

#[test]
fn untrained_logits_equal_those_of_transformers() {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let Some(bert) = std::env::var_os("BERT_DIR").map(PathBuf::from) else {
        eprintln!("skipped: BERT_DIR names no folder with a pretrained BERT");
        return;
    };
    let imports = Command::new(&python).args(["-c", "import torch, transformers"]).output();
    if !imports.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: {python} cannot import torch and transformers");
        return;
    }

    let folder = tempfile::tempdir().unwrap();
    let pairs = pairs();
    let expected = reference(&python, &bert, &pairs, folder.path());
    let tokenizer = BertTokenizer::read(&bert, MAX_LENGTH).unwrap();
    let encoded = tokenizer.encode(&pairs).unwrap();
    let config = BertConfig::read(&folder.path().join("config.json")).unwrap();
    let (weights, pad) = (folder.path().join("model.safetensors"), tokenizer.pad());
    let options = LaunchOptions::new(2).device(Device::flex());
    let ranks = launch(options, move |worker| {
        let model = config.init(2, worker.device());
        let mut model = fully_shard(model, &worker, FsdpOptions::new())?;
        let report = model.load_safetensors(
            &weights,
            &LoadOptions::new().allow_unexpected("bert.embeddings.position_ids"),
        )?;
        assert!(report.missing.is_empty(), "{report:?}");
        let rows: Vec<usize> = (0..PAIRS).collect();
        let device = worker.device().clone().inner();
        let input = BertInput::new(Padded::new(&encoded, &rows, pad), &device);
        let logits = model.valid().forward(input.ids, input.types, input.padding);
        Ok::<_, fsdp_runtime::Error>(logits.into_data().iter::<f64>().collect::<Vec<_>>())
    })
    .unwrap();
    let expected: Vec<f64> = expected.into_iter().flatten().collect();
    assert!(expected.iter().any(|logit| logit.abs() > 0.05), "{expected:?}");
    for logits in &ranks {
        assert_eq!(logits.len(), 2 * PAIRS);
        let furthest = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("largest difference of a logit: {furthest:.1e}");
        assert!(furthest <= 1e-4, "{furthest}");
    }
}
