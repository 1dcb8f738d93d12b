//! Tests of `--pretrained`. One compares the ids, logits and greedy text with those of
//! PyTorch/transformers. It needs a Python with transformers (`PYTHON`, default `python3`), and is
//! skipped without one.

use std::path::Path;
use std::process::Command;

use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::Parser;
use fsdp_runtime::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Deserialize;

use crate::cli::Cli;
use crate::common::python::python_with;
use crate::generate::Generator;
use crate::job::{Job, Setup};

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
    let output = Command::new(python)
        .arg("examples/gpt_pretrain/transformers_gpt2.py")
        .args([file.as_os_str(), folder.as_os_str(), prompt.as_ref()])
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
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
        let input: Vec<i32> = ids[..128].iter().map(|id| *id as i32).collect();
        let input = Tensor::<2, Int>::from_data(TensorData::new(input, [2, 64]), &device);
        let logits: Vec<f32> = model.forward(input).try_into_data()?.try_into_vec_as()?;
        let _gathered = model.unshard()?;
        let args = &job.generate;
        let generator = Generator { model: &model, bpe: &bpe, positions: 64, args, device };
        let start = bpe.encode("Call me")?;
        let greedy = generator.next_ids(start, &mut StdRng::seed_from_u64(0))?;
        Ok::<_, anyhow::Error>((logits, greedy))
    })
    .unwrap();
    for (logits, greedy) in ranks {
        assert_eq!(logits.len(), expected.logits.len());
        let differences = logits.iter().zip(&expected.logits).map(|(a, b)| (a - b).abs());
        let furthest = differences.fold(0.0, f32::max);
        let largest = expected.logits.iter().fold(0.0f32, |a, b| a.max(b.abs()));
        println!("largest difference of a logit: {furthest:.1e}, of up to {largest}");
        assert!(furthest <= 1e-4 && largest > 1.0, "{furthest} {largest}");
        // The end of a text ends the text here, where the script goes on.
        let end = expected.greedy.iter().position(|id| *id == 0).unwrap_or(30);
        assert_eq!(greedy, expected.greedy[..end]);
    }
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
