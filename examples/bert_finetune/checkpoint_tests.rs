//! Tests of the checkpoints of a run: Ctrl-C, resuming, and what is kept.

use burn::tensor::Device;
use clap::Parser;
use fsdp_runtime::checkpoint::Manifest;
use fsdp_runtime::optim::GradScalerConfig;
use fsdp_runtime::prelude::*;

use crate::batch::Padding;
use crate::bert_config::BertConfig;
use crate::cli::Cli;
use crate::job::{Dataset, Job};
use crate::summary::Summary;
use crate::tokenizer::Encoded;
use crate::train::train;

/// Examples in a step, over all ranks.
const GLOBAL: usize = 12;

/// Returns examples of arbitrary word pieces.
fn examples(count: usize) -> Vec<Encoded> {
    let example = |row: usize| {
        let ids = (0..6 + row % 9).map(|at| ((row * 31 + at * 7) % 60) as u32 + 4).collect();
        Encoded { ids, types: vec![0; 6 + row % 9], label: row % 2 }
    };
    (0..count).map(example).collect()
}

fn job(world: usize, strategy: ShardingStrategy, flags: &[&str]) -> Job {
    let batch = (GLOBAL / world).to_string();
    let flags = [&["bert_finetune", "--steps", "9", "--batch-size", &batch], flags].concat();
    let cli = Cli::parse_from(flags);
    let config = BertConfig {
        hidden_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        intermediate_size: 32,
        ..BertConfig::small(64, 16)
    };
    Job {
        dataset: Dataset {
            description: String::new(),
            // Nine steps end in the third epoch.
            train: examples(4 * GLOBAL + 5),
            test: examples(7),
            classes: 2,
            padding: Padding::to_longest(0),
        },
        config: config.with_dropout(Some(0.0)),
        pretrained: None,
        lora: None,
        adapters: None,
        strategy,
        options: FsdpOptions::new(),
        scaler: None,
        recipe: cli.recipe(),
        checkpoints: cli.checkpoint_plan(),
        export: None,
        quiet: true,
        log_file: cli.log.open().unwrap(),
        board: cli.board.open().unwrap(),
        memory: cli.memory.start().unwrap(),
    }
}

fn run(world: usize, job: Job) -> Summary {
    let options = LaunchOptions::new(world).with_device(Device::flex());
    let mut ranks = launch(options, move |worker| train(&job, &worker)).unwrap();
    ranks.swap_remove(0).expect("nobody pressed Ctrl-C")
}

#[test]
fn a_run_resumes_at_another_world_size_and_strategy() {
    use ShardingStrategy::{FullShard, NoShard, ShardGradOp};
    let all = run(2, job(2, FullShard, &[])).losses;
    assert_eq!(all.len(), 9);
    for (world, strategy) in
        [(2, FullShard), (3, FullShard), (1, FullShard), (4, ShardGradOp), (2, NoShard)]
    {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().to_str().unwrap();
        let first = ["--save-dir", folder, "--save-every", "2", "--stop-after", "5"];
        let first = run(2, job(2, FullShard, &first)).losses;
        assert_eq!(first, all[..5]);
        // The newest checkpoint in the directory is loaded.
        let rest = run(world, job(world, strategy, &["--resume", folder])).losses;
        assert_eq!(rest.len(), 4, "{world} {strategy}");
        for (found, expected) in rest.iter().zip(&all[5..]) {
            let what = format!("{world} {strategy}: {rest:?} {all:?}");
            assert!((found - expected).abs() <= 1e-6, "{what}");
        }
    }
}

/// A quiet run writes its lines to the file, and its numbers to the event file.
#[test]
fn the_log_file_and_tensorboard_get_what_the_run_says() {
    let home = tempfile::tempdir().unwrap();
    let (path, board) = (home.path().join("run.log"), home.path().join("board"));
    let flags = ["--log-file", path.to_str().unwrap()];
    let flags = [&flags[..], &["--tensorboard", board.to_str().unwrap()]].concat();
    run(2, job(2, ShardingStrategy::FullShard, &flags));
    let text = std::fs::read_to_string(path).unwrap();
    assert_eq!(text.matches("\nepoch ").count(), 3, "{text}");
    assert!(text.contains("train loss ") && text.contains("accuracy "), "{text}");
    let numbers = crate::common::tensorboard::read(&board);
    let count = |name: &str| numbers.iter().filter(|(_, found, _)| found == name).count();
    let counts = ["train/loss", "train/lr", "valid/f1", "train/epoch_loss"].map(count);
    assert_eq!(counts, [9, 9, 3, 3], "{numbers:?}");
}

/// Every rank has a file, with the forecast and the steps, the last of which evaluates.
#[test]
fn the_files_of_memory_over_time_have_the_steps() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("memory.json");
    let flags = ["--memory-timeline", path.to_str().unwrap()];
    run(2, job(2, ShardingStrategy::FullShard, &flags));
    for name in ["memory.json", "memory-rank1.json"] {
        let text = std::fs::read_to_string(home.path().join(name)).unwrap();
        let file: serde_json::Value = serde_json::from_str(&text).unwrap();
        let marks = file["marks"].as_array().unwrap();
        assert_eq!(marks.iter().filter(|mark| mark["event"] == "step").count(), 9);
        let device = &file["device"];
        let optimizer = |of: &str| device[of]["optimizer"].as_u64().unwrap();
        assert_eq!(optimizer("now"), optimizer("forecast"), "{device}");
        assert!(optimizer("now") > 0 && file["failure"].is_null());
    }
}

#[test]
fn a_run_that_resumes_from_one_checkpoint_saves_beside_it() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().to_str().unwrap();
    run(1, job(1, ShardingStrategy::FullShard, &["--save-dir", folder, "--stop-after", "3"]));
    let first = home.path().join("step-00000003");
    let flags = ["--resume", first.to_str().unwrap(), "--save-every", "1", "--stop-after", "5"];
    let flags = [&flags[..], &["--keep-last", "1"]].concat();
    run(1, job(1, ShardingStrategy::FullShard, &flags));
    let names = std::fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.collect();
    names.sort();
    assert_eq!(names, ["step-00000005"]);
}

/// The loss scale is saved and restored. A step whose gradients overflow changes no parameter.
#[test]
fn a_run_in_float16_resumes_with_its_loss_scale() {
    // The gradients overflow in the first steps, until the scale has shrunk.
    const LOSS_SCALE: f32 = 1e7;
    let policy = MixedPrecisionPolicy::new().with_param_dtype(burn::tensor::FloatDType::F16);
    let half = |flags: &[&str]| {
        let job = job(2, ShardingStrategy::FullShard, flags);
        let policy = policy.with_output_dtype(burn::tensor::FloatDType::F32);
        let options = FsdpOptions::new().with_mixed_precision(policy);
        let scaler = Some(GradScalerConfig::new().with_init_scale(LOSS_SCALE));
        Job { options, scaler, ..job }
    };
    let all = run(2, half(&[])).losses;
    assert!(all.len() == 9 && all.iter().all(|loss| loss.is_finite()), "{all:?}");
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().to_str().unwrap();
    run(2, half(&["--save-dir", folder, "--stop-after", "5"]));
    let manifest = home.path().join("step-00000005").join("manifest.json");
    let manifest = std::fs::read(manifest).unwrap();
    let manifest = Manifest::parse(&manifest, "manifest.json").unwrap();
    let scale = manifest.progress.loss_scale.expect("a scale");
    assert!(scale < LOSS_SCALE, "some steps overflowed: {scale}");
    assert_eq!(run(2, half(&["--resume", folder])).losses, all[5..]);
}
