//! Tests of `--pretrained`. Some compare ids, logits and greedy text with those of
//! PyTorch/transformers, and adapters with PEFT. They need a Python with these (`PYTHON`, default
//! `python3`), and are skipped without one.

use std::path::Path;

use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::Parser;
use fsdp_runtime::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Deserialize;

use crate::cli::Cli;
use crate::common::python::{python_with, run_script};
use crate::generate::Generator;
use crate::job::{Job, Setup};
use crate::model::Gpt;

/// White space, contractions, numbers and characters of several bytes, between lines of the book.
const ODD: &str = "\n\n \n  The whale's way -- isn't it?\t12,345.6 \u{a0}\u{2003}x\r\n\r\n\n — “鯨” 🐋 \n\
    \u{3000}\n <|endoftext|>We'll  end   \n ";

#[derive(Deserialize)]
struct Expected {
    ids: Vec<u32>,
    logits: Vec<f32>,
    greedy: Vec<u32>,
}

fn text() -> String {
    let book = crate::text::Text::embedded().unwrap().held_out;
    let mut text = String::new();
    for line in book.lines().take(200) {
        text += line;
        text += "\n";
    }
    text + ODD
}

/// Runs the script, which saves a model in `folder`.
fn script(python: &str, folder: &Path, prompt: &str) -> Expected {
    let file = folder.join("text.txt");
    std::fs::write(&file, text()).unwrap();
    let arguments = [file.as_os_str(), folder.as_os_str(), prompt.as_ref()];
    let output = run_script(python, "gpt_pretrain/transformers_gpt2.py", &arguments);
    serde_json::from_slice(&output).unwrap()
}

fn job(folder: &Path, flags: &str) -> Job {
    let folder = folder.to_str().unwrap();
    let data = format!("{folder}/text.txt");
    let first = ["gpt_pretrain", "--quiet", "--pretrained", folder, "--data", &data];
    let cli = Cli::parse_from(first.into_iter().chain(flags.split_whitespace()));
    Job::new(&cli, Setup::new(&cli).unwrap(), false).unwrap()
}

#[test]
fn ids_logits_and_text_are_those_of_transformers() {
    let Some(python) = python_with("torch, transformers, tokenizers") else { return };
    let folder = tempfile::tempdir().unwrap();
    let expected = script(&python, folder.path(), "Call me");
    let job = job(folder.path(), "--generate x --temperature 0 --max-new-tokens 30");
    let bpe = job.bpe.clone().unwrap();
    let ids = bpe.encode(&text()).unwrap();
    assert_eq!(ids, expected.ids);
    // In the chunks of `preprocess` too, where no line is longer than a chunk.
    let file = folder.path().join("text.txt");
    let mut reader = crate::reader::ChunkReader::open(&[file], true).unwrap();
    let chunks = reader.chunks(10_000, 4000, None).unwrap();
    assert!(chunks.len() > 3, "{}", chunks.len());
    let in_chunks: Vec<u32> = chunks.iter().flat_map(|text| bpe.encode(text).unwrap()).collect();
    assert_eq!(in_chunks, expected.ids);

    let options = LaunchOptions::new(2).with_device(Device::flex());
    let ranks = launch(options, move |worker| {
        let model = job.shard(&worker, false)?.valid();
        let device = worker.device().clone().inner();
        let logits = first_logits(&model, &ids, &device)?;
        let _gathered = model.unshard()?;
        let args = &job.generate;
        let generator = Generator { model: &model, bpe: &bpe, positions: 64, args, device };
        let start = bpe.encode("Call me")?;
        let greedy = generator.next_ids(start, &mut StdRng::seed_from_u64(0))?;
        Ok::<_, anyhow::Error>((logits, greedy))
    })
    .unwrap();
    for (logits, greedy) in ranks {
        let furthest = largest_difference(&logits, &expected.logits);
        let largest = expected.logits.iter().fold(0.0f32, |a, b| a.max(b.abs()));
        println!("largest difference of a logit: {furthest:.1e}, of up to {largest}");
        assert!(furthest <= 1e-4 && largest > 1.0, "{furthest} {largest}");
        // The end of a text ends the text here, where the script goes on.
        let end = expected.greedy.iter().position(|id| *id == 0).unwrap_or(30);
        assert_eq!(greedy, expected.greedy[..end]);
    }
}

/// Returns the logits of the first two samples of 64 word pieces.
fn first_logits(model: &Fsdp<Gpt>, ids: &[u32], device: &Device) -> anyhow::Result<Vec<f32>> {
    let input: Vec<i32> = ids[..128].iter().map(|id| *id as i32).collect();
    let input = Tensor::<2, Int>::from_data(TensorData::new(input, [2, 64]), device);
    Ok(model.forward(input).try_into_data()?.try_into_vec_as()?)
}

/// Returns the largest difference of two lists, which have equal lengths.
fn largest_difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Adapters on frozen weights in fewer bits train, and the loss begins where that of the plain
/// weights does.
#[test]
fn adapters_are_trained_on_quantised_weights() {
    let Some(python) = python_with("torch, transformers, tokenizers") else { return };
    let folder = tempfile::tempdir().unwrap();
    script(&python, folder.path(), "Call me");
    let path = folder.path().to_str().unwrap();
    let data = format!("{path}/text.txt");
    let run = |flags: &str| {
        let first = ["gpt_pretrain", "--quiet", "--pretrained", path, "--data", &data];
        let shape = "--world-size 2 --batch-size 4 --max-update 8 --lr 1e-2 --device flex";
        let flags = shape.split_whitespace().chain(flags.split_whitespace());
        crate::tests::run_cli(&Cli::parse_from(first.into_iter().chain(flags))).unwrap()
    };
    let plain = run("--lora 4");
    assert!(plain.losses[7] < plain.losses[0], "{:?}", plain.losses);
    let whole = run("");
    assert!((whole.losses[0] - plain.losses[0]).abs() < 1e-5, "adapters start at zero");
    for (storage, tolerance) in [("bf16", 0.05), ("int8", 0.1), ("nf4", 0.6)] {
        let coded = run(&format!("--lora 4 --quantize {storage}"));
        let (found, expected) = (coded.losses[0], plain.losses[0]);
        assert!((found - expected).abs() < tolerance, "{storage}: {found} {expected}");
        assert_ne!(coded.losses, plain.losses, "{storage}");
        assert!(coded.losses[7] < coded.losses[0], "{storage}: {:?}", coded.losses);
        let (bytes, of_plain) = (coded.memory.shards.peak, plain.memory.shards.peak);
        assert!(bytes < of_plain * 2 / 3, "{storage}: {bytes} {of_plain}");
    }
}

/// Output of `peft_gpt2.py`.
#[derive(Deserialize)]
struct Reloaded {
    missing: Vec<String>,
    unexpected: Vec<String>,
    mismatched: Vec<String>,
    logits: Vec<f32>,
    changed: Vec<f32>,
}

/// Asserts that the model with adapters in a folder has these logits for the first two samples.
fn assert_logits(base: &Path, adapters: &Path, expected: &[f32]) {
    let job = job(base, &format!("--adapters {}", adapters.display()));
    let ids = job.bpe.clone().unwrap().encode(&text()).unwrap();
    let options = LaunchOptions::new(2).with_device(Device::flex());
    let ranks = launch(options, move |worker| {
        let model = job.shard(&worker, false)?.valid();
        first_logits(&model, &ids, &worker.device().clone().inner())
    });
    for logits in ranks.unwrap() {
        let furthest = largest_difference(&logits, expected);
        println!("largest difference of a logit: {furthest:.1e}");
        assert!(furthest <= 2e-5, "{furthest}");
    }
}

/// PEFT loads exported adapters onto a GPT-2, and those that it saves load here.
#[test]
fn adapters_trained_and_saved_load_in_peft() {
    let Some(python) = python_with("torch, transformers, tokenizers, peft") else { return };
    let home = tempfile::tempdir().unwrap();
    let folder = |name: &str| home.path().join(name);
    let (base, adapters, changed) = (folder("base"), folder("adapters"), folder("changed"));
    std::fs::create_dir(&base).unwrap();
    let plain = script(&python, &base, "Call me").logits;
    let file = base.join("text.txt");
    for targets in ["query,value", "query,key,attention.output,up,down", "blocks.1.attention.key"] {
        let flags = format!("--lora 3 --lora-targets {targets} --max-update 4 --lr 3e-2");
        let flags = format!("{flags} --batch-size 2 --world-size 2 --device flex");
        let job = ["gpt_pretrain", "--quiet", "--pretrained", base.to_str().unwrap()];
        let paths = ["--data", file.to_str().unwrap(), "--save-adapters"];
        let job = job.into_iter().chain(paths).chain([adapters.to_str().unwrap()]);
        crate::tests::run_cli(&Cli::parse_from(job.chain(flags.split_whitespace()))).unwrap();
        let arguments = [&base, &adapters, &file, &changed].map(|path| path.as_os_str());
        let output = run_script(&python, "gpt_pretrain/peft_gpt2.py", &arguments);
        let theirs: Reloaded = serde_json::from_slice(&output).unwrap();
        let names = [&theirs.missing, &theirs.unexpected, &theirs.mismatched];
        assert!(names.iter().all(|names| names.is_empty()), "{targets}: {names:?}");
        for logits in [&theirs.logits, &theirs.changed] {
            let moved = logits.iter().zip(&plain).map(|(a, b)| (a - b).abs());
            assert!(moved.fold(0.0, f32::max) > 0.05, "{targets}: adapters have an effect");
        }
        assert_logits(&base, &adapters, &theirs.logits);
        assert_logits(&base, &changed, &theirs.changed);
    }
}

#[test]
fn samples_longer_than_the_model_takes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9,
        "n_positions": 16}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let path = folder.path().to_str().unwrap();
    let cli = Cli::parse_from(["gpt_pretrain", "--pretrained", path, "--tokens-per-sample", "17"]);
    let error = Setup::new(&cli).unwrap_err().to_string();
    assert!(error.contains("--tokens-per-sample 17") && error.contains("16"), "{error}");
}
