//! Whole runs of the tiny model: worlds, packing, resuming, adapters.

use std::path::{Path, PathBuf};

use clap::Parser;
use serde_json::{Map, Value, json};

use crate::cli::Cli;
use crate::common::checkpoints::Outcome;
use crate::summary::Summary;

/// Runs the program with short rows and no cache.
pub fn run(flags: &[&str]) -> anyhow::Result<Summary> {
    let base = "llm_finetune --quiet --device flex --token-cache none --eval-fraction 0.02 --max-length 96";
    let flags: Vec<&str> = base.split(' ').chain(flags.iter().copied()).collect();
    let cli = Cli::parse_from(flags);
    match crate::run(&cli, cli.launch_settings()?)? {
        Outcome::Finished(summary) => Ok(*summary),
        _ => anyhow::bail!("the run was interrupted"),
    }
}

/// Runs the program with flags that are separated by spaces.
fn summary(flags: &str) -> Summary {
    run(&flags.split(' ').collect::<Vec<_>>()).unwrap()
}

fn assert_close(found: f64, expected: f64, what: &str) {
    assert!((found / expected - 1.0).abs() < 1e-5, "{what}: {found} {expected}");
}

/// Returns a path as text.
pub fn path(folder: &Path) -> &str {
    folder.to_str().unwrap()
}

/// The loss is the mean over all counted tokens, wherever the rows are.
#[test]
fn losses_are_those_of_one_rank() {
    let one = summary("--world-size 1 --batch-size 8 --steps 3");
    assert_eq!(one.losses.len(), 3);
    for flags in [
        "--world-size 2 --batch-size 4 --steps 3",
        "--world-size 4 --batch-size 2 --steps 3 --strategy NO_SHARD",
        "--world-size 2 --batch-size 1 --accumulate 4 --steps 3",
        "--world-size 2 --batch-size 4 --steps 3 --recompute",
        "--world-size 2 --batch-size 4 --steps 3 --pad-to-max-length",
    ] {
        let other = summary(flags);
        for (found, expected) in other.losses.iter().zip(&one.losses) {
            assert_close(*found, *expected, flags);
        }
        assert_close(other.perplexity.unwrap(), one.perplexity.unwrap(), flags);
    }
}

/// A file of Accelerate names the class of transformers. It may set what the command line leaves open.
#[test]
fn files_of_accelerate_name_the_layers_of_transformers() {
    let plain = summary("--world-size 2 --batch-size 4 --steps 2");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fsdp.yaml");
    for class in ["Llama", "Mistral", "Qwen2", "Qwen3"] {
        let text = format!(
            "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: 'no'\nfsdp_config:\n  \
             fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  \
             fsdp_transformer_layer_cls_to_wrap: {class}DecoderLayer\n"
        );
        std::fs::write(&file, text).unwrap();
        let found = run(&["--config", path(&file), "--batch-size", "4", "--steps", "2"]).unwrap();
        assert_eq!((found.world_size, &found.losses), (2, &plain.losses), "{class}");
    }
    let text = std::fs::read_to_string(&file).unwrap().replace("Qwen3", "Gemma");
    std::fs::write(&file, text).unwrap();
    let error = format!("{:#}", run(&["--config", path(&file)]).unwrap_err());
    assert!(error.contains("GemmaDecoderLayer"), "{error}");
}

/// Tensor parallel ranks have parts of the heads, of the feed-forward block and of the vocabulary.
#[test]
fn losses_of_split_matrices_are_those_of_whole_ones() {
    let one = summary("--world-size 1 --batch-size 8 --steps 3");
    for flags in [
        "--world-size 2 --tp 2 --batch-size 8",
        "--world-size 4 --tp 2 --batch-size 4",
        "--world-size 4 --tp 2 --cp 2 --batch-size 8 --sequence-parallel",
    ] {
        let other = summary(&format!("{flags} --steps 3 --recompute"));
        for (found, expected) in other.losses.iter().zip(&one.losses) {
            assert_close(*found, *expected, flags);
        }
        assert_close(other.perplexity.unwrap(), one.perplexity.unwrap(), flags);
        let ratio = other.sharded_bytes_per_rank as f64 / one.sharded_bytes_per_rank as f64;
        assert!(ratio < 0.55, "{flags}: {ratio}");
    }
    let error = run(&["--world-size", "3", "--tp", "3", "--steps", "1"]).unwrap_err();
    assert!(error.to_string().contains("--tp 3: the model has"), "{error:#}");
}

/// Context parallel ranks have parts of each row. The conversations are packed, so that a rank may have parts of
/// several, and rows that count on another rank alone.
#[test]
fn losses_of_split_rows_are_those_of_whole_ones() {
    let one = summary("--world-size 1 --batch-size 8 --steps 3");
    for flags in [
        "--world-size 2 --cp 2 --batch-size 8",
        "--world-size 4 --cp 2 --batch-size 4",
        "--world-size 3 --cp 3 --batch-size 8 --recompute",
        "--world-size 4 --cp 2 --tp 2 --batch-size 8",
    ] {
        let other = summary(&format!("{flags} --steps 3"));
        for (found, expected) in other.losses.iter().zip(&one.losses) {
            assert_close(*found, *expected, flags);
        }
        assert_close(other.perplexity.unwrap(), one.perplexity.unwrap(), flags);
    }
    let flags = "--world-size 5 --cp 5 --steps 1 --pad-to-max-length";
    let error = run(&flags.split(' ').collect::<Vec<_>>()).unwrap_err();
    assert!(error.to_string().contains("share a row need a multiple of 10"), "{error:#}");
}

/// The held-out conversations are the same, in rows of their own or packed.
#[test]
fn packed_conversations_have_the_loss_that_they_have_alone() {
    let flags = "--world-size 2 --batch-size 2 --steps 1 --packing";
    let alone = summary(&format!("{flags} none"));
    for packing in ["first-fit", "in-order"] {
        let packed = summary(&format!("{flags} {packing}"));
        let (found, expected) = (packed.perplexity_before, alone.perplexity_before);
        assert_close(found.unwrap(), expected.unwrap(), packing);
    }
}

/// Also in the middle of an epoch, with the numbers of early stopping.
#[test]
fn a_resumed_run_ends_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    let flags =
        ["--batch-size", "4", "--steps", "6", "--eval-every", "2", "--packing", "first-fit"];
    let with = |more: &[&str]| run(&[&flags, more].concat()).unwrap();
    let whole = with(&["--save", path(&place("whole"))]);
    let checkpoints = place("checkpoints");
    let save = ["--save-dir", path(&checkpoints), "--resume", "auto"];
    let first = with(&[&save[..], &["--stop-after", "3"]].concat());
    let second = with(&[&save[..], &["--save", path(&place("resumed"))]].concat());
    assert_eq!((first.losses.len(), second.losses.len()), (3, 3));
    assert_eq!([first.losses, second.losses].concat(), whole.losses);
    assert_eq!(second.perplexity, whole.perplexity);
    let weights = |name: &str| std::fs::read(place(name).join("model.safetensors")).unwrap();
    assert!(weights("whole") == weights("resumed"), "the same weights");
}

/// A saved model is read back, gets adapters, and these are read back too.
#[test]
fn adapters_are_trained_on_a_saved_model() {
    let folder = tempfile::tempdir().unwrap();
    let (model, adapters) = (folder.path().join("model"), folder.path().join("adapters"));
    let trained = run(&["--steps", "3", "--save", path(&model), "--save-dtype", "f32"]).unwrap();
    let tune = ["--model", path(&model), "--steps", "3"];
    let lora = ["--lora", "4", "--learning-rate", "1e-2", "--save", path(&adapters)];
    let tuned = run(&[&tune[..], &lora].concat()).unwrap();
    // New adapters change nothing.
    assert_eq!(tuned.perplexity_before, trained.perplexity);
    assert!(tuned.perplexity < tuned.perplexity_before, "{tuned}");
    for file in ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"] {
        assert!(adapters.join(file).is_file(), "{file}");
    }
    let again = run(&[&tune[..], &["--adapters", path(&adapters)]].concat()).unwrap();
    assert_eq!(again.perplexity_before, tuned.perplexity);
    // The weights with the adapters added are a model of their own.
    let merged = folder.path().join("merged");
    let merge = ["--adapters", path(&adapters), "--stop-after", "1", "--learning-rate", "1e-30"];
    let save = ["--save", path(&merged), "--merge-adapters"];
    run(&[&tune[..], &merge, &save].concat()).unwrap();
    let plain = run(&["--model", path(&merged), "--steps", "1"]).unwrap();
    assert_close(plain.perplexity_before.unwrap(), tuned.perplexity.unwrap(), "merged");
    let stored = run(&[&tune[..], &lora, &["--quantize", "nf4"]].concat()).unwrap();
    assert!(stored.sharded_bytes_per_rank < tuned.sharded_bytes_per_rank / 3);
}

/// Writes a directory without weights, whose words are the numbers below `vocabulary`, and rows of `length` words.
/// Returns the path of the rows. The comparisons with PyTorch write such directories too (`benches/gpu/llama.py`).
fn folder_without_weights(folder: &Path, vocabulary: usize, length: usize) -> PathBuf {
    let words: Map<String, Value> =
        (0..vocabulary).map(|number| (number.to_string(), number.into())).collect();
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "0"},
    });
    let config = json!({
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": length,
    });
    let row = |at: usize| {
        let words = (0..length).map(|word| (word * (word + at) % vocabulary).to_string());
        format!("{}\n", json!({"text": words.collect::<Vec<_>>().join(" ")}))
    };
    let rows = folder.join("rows.jsonl");
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(&rows, (0..100).map(row).collect::<String>()).unwrap();
    rows
}

#[test]
fn a_directory_without_weights_gives_a_new_model() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder_without_weights(folder.path(), 64, 96);
    let flags = ["--model", path(folder.path()), "--data", path(&rows), "--batch-size", "2"];
    let with = |more: &[&str]| run(&[&flags, more].concat());
    let new = with(&["--steps", "2", "--world-size", "1"]).unwrap();
    let layer = 2 * 32 * (32 + 16) + 3 * 32 * 48 + 2 * 32;
    assert_eq!(new.num_params, 2 * 64 * 32 + 2 * layer + 32);
    // Logits of matrices with a standard deviation of 0.02 are small: all words are about as likely.
    assert!((new.losses[0] - 64_f64.ln()).abs() < 0.05, "{:?}", new.losses);
    assert_eq!(new.step_seconds.len(), 2);
    assert!(new.step_seconds.iter().all(|seconds| *seconds > 0.0));
    let other = with(&["--steps", "2", "--world-size", "1", "--seed", "1"]).unwrap();
    assert_ne!(other.losses, new.losses);
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    let error = format!("{:#}", with(&["--steps", "2"]).unwrap_err());
    assert!(error.contains("cannot read") && error.contains("tokenizer.json"), "{error}");
}

#[test]
fn the_run_ends_when_the_loss_no_longer_falls() {
    let flags = "--steps 40 --batch-size 1 --eval-every 1 --patience 2 --learning-rate 0.5";
    let ended = summary(flags);
    assert!(ended.steps < 40, "{} steps", ended.steps);
}

/// The answer of a model does not depend on the number of ranks, which generate different numbers of tokens.
#[test]
fn answers_do_not_depend_on_the_ranks() {
    let texts = |ranks: &str| {
        let ranks: Vec<&str> = ranks.split(' ').collect();
        let messages = ["--generate", "What is 2 + 3?", "--generate", "Hello", "--generate", "Bye"];
        let sampling = ["--steps", "1", "--max-new-tokens", "5", "--temperature", "0.1"];
        let flags = [&ranks[..], &messages, &sampling];
        let answers = run(&flags.concat()).unwrap().answers;
        answers.into_iter().map(|answer| answer.text).collect::<Vec<_>>()
    };
    let one = texts("--world-size 1 --batch-size 4");
    assert_eq!(one.len(), 3);
    assert_eq!(texts("--world-size 2 --batch-size 2"), one);
    assert_eq!(texts("--world-size 4 --batch-size 4 --tp 2 --sequence-parallel --cp 2"), one);
}
