//! Tests of whole runs.

use std::path::PathBuf;

use anyhow::bail;
use fsdp_runtime::memory::MemoryError;

use super::*;
use crate::arch::Arch;
use crate::sharding::{ActivationPolicy, Precision};

/// Returns a folder for word pieces beside this program, so that they are learned once in all tests.
fn bpe_cache() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    program.with_file_name("word-pieces-of-tests")
}

/// Runs three updates.
fn run_with(flags: &str) -> Result<Summary> {
    let shape = "--quiet --tokens-per-sample 32 --max-update 3 --warmup-updates 0 --lr 1e-3";
    let flags = shape.split_whitespace().chain(flags.split(' '));
    let cli = Cli::parse_from(std::iter::once("gpt_pretrain").chain(flags));
    run_cli(&Cli { bpe_cache: Some(bpe_cache()), ..cli })
}

pub fn run_cli(cli: &Cli) -> Result<Summary> {
    match run(cli)? {
        Outcome::Finished(summary) => Ok(*summary),
        _ => bail!("rank 0 is here, and nobody pressed Ctrl-C"),
    }
}

#[test]
fn the_losses_do_not_depend_on_the_number_of_ranks() {
    let one = run_with("--world-size 1 --batch-size 4").unwrap();
    let two = run_with("--world-size 2 --batch-size 2").unwrap();
    let accumulated = run_with("--world-size 2 --batch-size 1 --update-freq 2").unwrap();
    assert_eq!((one.updates, one.losses.len()), (3, 3));
    assert!(one.losses[0] > one.losses[2], "{:?}", one.losses);
    for other in [&two, &accumulated] {
        assert_eq!(other.losses.len(), 3);
        for (a, b) in one.losses.iter().zip(&other.losses) {
            assert!((a - b).abs() < 1e-5, "{:?} {:?}", one.losses, other.losses);
        }
        let perplexity = |summary: &Summary| summary.held_out_perplexity.unwrap();
        let (a, b) = (perplexity(&one), perplexity(other));
        assert!((a / b - 1.0).abs() < 1e-4, "{a} {b}");
    }
    assert!(
        one.held_out_perplexity.unwrap() < 512.0 && one.bigram_perplexity.unwrap() < 100.0,
        "{one}"
    );
}

/// Tensor parallel ranks have parts of the blocks, context parallel ranks parts of the samples. The end of the held-out
/// text that they cannot share is left out.
#[test]
fn the_losses_do_not_depend_on_how_ranks_share_the_work() {
    let one = run_with("--world-size 1 --batch-size 4 --generate the").unwrap();
    for flags in [
        "--world-size 2 --tp 2 --batch-size 4",
        "--world-size 2 --cp 2 --batch-size 4",
        "--world-size 8 --tp 2 --cp 2 --batch-size 2 --checkpoint-activations",
    ] {
        let other = run_with(&format!("{flags} --generate the")).unwrap();
        for (a, b) in one.losses.iter().zip(&other.losses) {
            assert!((a - b).abs() < 1e-5, "{flags}: {:?} {:?}", one.losses, other.losses);
        }
        let perplexity = |summary: &Summary| summary.held_out_perplexity.unwrap();
        let (a, b) = (perplexity(&one), perplexity(&other));
        assert!((a / b - 1.0).abs() < 1e-4, "{flags}: {a} {b}");
        assert_eq!(other.generated.len(), 1, "{flags}");
        assert_eq!(other.generated[0].text, one.generated[0].text, "{flags}");
    }
    let error = run_with("--world-size 3 --tp 3").unwrap_err();
    assert!(error.to_string().contains("--tp 3: the model has 4 heads"), "{error:#}");
    let error = run_with("--world-size 2 --tp 4").unwrap_err();
    let expected = "2 ranks cannot be split into groups of 4 tensor parallel ranks";
    assert!(format!("{error:#}").contains(expected), "{error:#}");
    let error = run_with("--world-size 3 --cp 3").unwrap_err();
    assert!(error.to_string().contains("is no multiple of 6"), "{error:#}");
}

/// A quiet run writes its lines to the file, each a JSON object, and their numbers to the event file.
#[test]
fn the_log_file_and_tensorboard_get_the_log_lines() {
    let folder = tempfile::tempdir().unwrap();
    let (path, board) = (folder.path().join("train.log"), folder.path().join("board"));
    let flags = format!("--log-interval 1 --max-valid-steps 1 --log-file {}", path.display());
    let flags = format!("{flags} --tensorboard {}", board.display());
    run_with(&format!("--world-size 2 --batch-size 1 {flags}")).unwrap();
    let text = std::fs::read_to_string(path).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let with = |key: &str| lines.iter().filter(|line| line.get(key).is_some()).count();
    let found = ["loss", "valid_loss", "train_loss"].map(with);
    assert_eq!((lines.len(), found), (5, [3, 1, 1]), "{text}");
    let numbers = crate::common::tensorboard::read(&board);
    let steps = |name: &str| {
        numbers.iter().filter(|(_, found, _)| found == name).map(|(step, ..)| *step).collect()
    };
    let steps: [Vec<i64>; 3] = ["train_inner/loss", "valid/ppl", "train/gnorm"].map(steps);
    assert_eq!(steps, [vec![1, 2, 3], vec![3], vec![3]]);
    let logged = lines[0]["loss"].as_str().unwrap().parse::<f32>().unwrap();
    assert!(numbers.contains(&(1, "train_inner/loss".into(), logged)), "{numbers:?}");
}

/// All kinds of memory but activations, which are not counted.
#[test]
fn the_forecast_is_what_the_run_then_holds() {
    for flags in [
        "--world-size 2",
        "--world-size 1 --strategy NO_SHARD",
        "--world-size 2 --no-reshard-after-forward",
        "--world-size 2 --update-freq 2",
        "--world-size 2 --bf16",
        "--world-size 2 --cpu-offload",
        "--world-size 2 --cpu-offload --bf16 --update-freq 2",
    ] {
        let flags = format!("{flags} --batch-size 1 --max-valid-steps 1");
        let Summary { memory, host_memory, forecast, .. } = run_with(&flags).unwrap();
        let exact = [
            (memory.shards.peak, forecast.shards),
            (memory.replicated.peak, forecast.replicated),
            (memory.gathered.peak, forecast.gathered),
            (memory.gradients.peak, forecast.gradients),
            (host_memory.shards.peak, forecast.host.shards),
            (host_memory.gradients.peak, forecast.host.gradients),
        ];
        for (found, expected) in exact {
            assert_eq!(found, expected, "{flags}\n{memory}\n{host_memory}\n{forecast}");
        }
        let found = (memory.optimizer.now + host_memory.optimizer.now) as f64;
        let expected = (forecast.optimizer + forecast.host.optimizer) as f64;
        assert!((found / expected - 1.0).abs() < 0.02, "{flags}\n{memory}\n{forecast}");
    }
}

#[test]
fn half_precision_follows_f32_and_offload_is_the_same() {
    let shape = "--world-size 2 --batch-size 2 --max-valid-steps 1";
    let full = run_with(shape).unwrap();
    assert_eq!(full.losses.len(), 3);
    let offloaded = run_with(&format!("{shape} --cpu-offload")).unwrap();
    assert_eq!(offloaded.losses, full.losses);
    for flag in ["--bf16", "--fp16"] {
        let half = run_with(&format!("{shape} {flag}")).unwrap();
        assert_eq!((half.skipped_updates, half.updates, half.losses.len()), (0, 3, 3), "{flag}");
        assert_ne!(half.losses, full.losses, "{flag}");
        for (a, b) in half.losses.iter().zip(&full.losses) {
            assert!((a / b - 1.0).abs() < 0.02, "{flag}: {:?} {:?}", half.losses, full.losses);
        }
    }
    // Overflows take batches of their own, so that the same number of updates sees later batches.
    let overflow = run_with(&format!("{shape} --fp16 --fp16-init-scale 1e8")).unwrap();
    assert!((1..20).contains(&overflow.skipped_updates), "{}", overflow.skipped_updates);
    assert_eq!((overflow.updates, overflow.losses.len()), (3, 3));
    for (a, b) in overflow.losses.iter().zip(&full.losses) {
        assert!((a / b - 1.0).abs() < 0.1, "{:?} {:?}", overflow.losses, full.losses);
    }
    let endless = run_with(&format!("{shape} --fp16 --fp16-init-scale 1e8 --min-loss-scale 9e7"));
    assert!(format!("{:#}", endless.unwrap_err()).contains("--min-loss-scale"));
}

#[test]
#[ignore = "minutes: cargo test --release --example gpt_pretrain -- --ignored"]
fn half_precision_ends_where_f32_does() {
    let run = |flags: &str| {
        let shape = "gpt_pretrain --quiet --max-update 200 --max-valid-steps 1";
        let flags = shape.split(' ').chain(flags.split_whitespace());
        run_cli(&Cli::parse_from(flags)).unwrap()
    };
    let mean = |summary: &Summary| summary.losses[180..].iter().sum::<f64>() / 20.0;
    let full = mean(&run(""));
    for (flags, skips) in
        [("--bf16", 0..1), ("--fp16", 0..1), ("--fp16 --fp16-init-scale 1e8", 1..20)]
    {
        let half = run(flags);
        let found = mean(&half);
        eprintln!("{flags}: {found}, f32: {full}, {} skipped", half.skipped_updates);
        assert!((found / full - 1.0).abs() < 0.02, "{flags}: {found} {full}");
        assert!(skips.contains(&half.skipped_updates), "{flags}: {}", half.skipped_updates);
    }
}

#[test]
#[ignore = "minutes: cargo test --release --example gpt_pretrain -- --ignored"]
fn the_main_run_ends_below_a_bigram_model() {
    let summary = run_cli(&Cli::parse_from(["gpt_pretrain"])).unwrap();
    assert!(summary.held_out_perplexity < summary.bigram_perplexity, "{summary}");
}

#[test]
fn recomputation_changes_no_loss() {
    let shape = "--world-size 2 --batch-size 2 --max-valid-steps 1 --dropout 0.1";
    let losses = |flags: &str| run_with(&format!("{shape} {flags}")).unwrap().losses;
    let kept = losses("--bf16");
    assert_eq!(losses("--bf16 --checkpoint-activations"), kept);
    assert_eq!(losses("--bf16 --offload-activations --cpu-offload"), kept);
}

/// With offload and recomputation a quarter of the memory of the unsharded model and its AdamW
/// state is enough. Without them it is not.
#[test]
fn a_model_trains_in_a_quarter_of_its_own_size() {
    let arch =
        Arch { name: "deep", fairseq: None, layers: 24, width: 64, heads: 2, vocabulary: 512 };
    let shape = "gpt_pretrain --quiet --tokens-per-sample 32 --max-update 2 --batch-size 1 \
                 --max-valid-steps 1";
    let with = |flags: &str| {
        let cli = Cli::parse_from(shape.split_whitespace().chain(flags.split_whitespace()));
        run_cli(&Cli { arch, bpe_cache: Some(bpe_cache()), ..cli })
    };
    let whole = with("--world-size 1 --strategy NO_SHARD").unwrap().forecast;
    let limit = (whole.replicated + whole.optimizer) / 4;
    let limited = |flags: &str| with(&format!("--memory-limit {limit} {flags}"));
    for world in ["--world-size 1", "--world-size 2"] {
        let error = limited(world).unwrap_err();
        assert!(error.downcast_ref::<MemoryError>().is_some(), "{error}");
        let fits = limited(&format!("{world} --cpu-offload --checkpoint-activations")).unwrap();
        assert!(fits.forecast.total() <= limit, "{limit}\n{}", fits.forecast);
        let peaks = fits.forecast.gathered..=fits.forecast.total();
        assert!(peaks.contains(&fits.memory.total.peak), "{}\n{}", fits.memory, fits.forecast);
        assert!(!fits.losses.is_empty() && fits.losses.iter().all(|loss| loss.is_finite()));
    }
}

#[test]
fn a_run_that_does_not_fit_is_refused_with_the_table() {
    let error = run_with("--memory-limit 1MiB").unwrap_err();
    let MemoryError::DoesNotFit { available, forecast } =
        error.downcast_ref().expect("a typed error")
    else {
        panic!("{error}");
    };
    assert_eq!(*available, 1 << 20);
    assert!(forecast.total() > 1 << 20);
    let message = format!("{error:?}");
    assert!(message.contains("activations") && message.contains("more ranks"), "{message}");
}

/// A run that is refused has the forecast in its file, and one that trains has what it counted.
#[test]
fn the_file_of_memory_over_time_has_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(folder.path().join(name)).unwrap()).unwrap()
    };
    let flags = |name: &str| format!("--memory-timeline {}", folder.path().join(name).display());
    let error = run_with(&format!("--memory-limit 1MiB {}", flags("refused.json"))).unwrap_err();
    let text = format!("{error:?}");
    assert!(error.downcast_ref::<MemoryError>().is_some(), "{text}");
    let refused = read("refused.json");
    let largest = refused["device"]["record_peak"]["holders"][0]["kind"].as_str().unwrap();
    assert!(text.starts_with("forecast of the device") && text.contains(largest), "{text}");
    assert!(refused["failure"].as_str().unwrap().contains("a rank needs"), "{refused}");

    let shape = "--world-size 2 --batch-size 1 --max-valid-steps 1";
    let summary = run_with(&format!("{shape} {}", flags("memory.json"))).unwrap();
    let files = [read("memory.json"), read("memory-rank1.json")];
    let peaks = files.each_ref().map(|file| file["device"]["peak"]["total"].as_u64().unwrap());
    assert_eq!(peaks.iter().max(), Some(&(summary.memory.total.peak as u64)));
    let (of_run, of_rank) = (summary.forecast.total() as u64, &files[1]["device"]["forecast"]);
    assert_eq!(of_rank["total"].as_u64(), Some(of_run));
    for file in files {
        let marks = file["marks"].as_array().unwrap();
        assert_eq!(marks.iter().filter(|mark| mark["event"] == "step").count(), 3);
    }
    let error = run_with(&flags("memory.png")).unwrap_err();
    assert!(format!("{error:#}").contains("--memory-timeline"), "{error:#}");
}

#[test]
fn a_text_without_a_block_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "too short\nfor anything\n").unwrap();
    let error = run_with(&format!("--data {}", file.path().display())).unwrap_err();
    assert!(format!("{error:#}").contains("--tokens-per-sample"), "{error:#}");
}

/// Returns the names of the checkpoints in a directory below `root`, sorted.
fn checkpoints(root: &std::path::Path, folder: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(root.join(folder)) else { return Vec::new() };
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    let mut names: Vec<_> = entries.map(|entry| name(entry).into_string().unwrap()).collect();
    names.sort();
    names
}

/// Writes a text of about 30 samples of 32 word pieces, and returns its path.
fn short_text(folder: &std::path::Path) -> String {
    let words = ["the", "white", "whale", "swims", "below", "seven", "dark", "waves"];
    let line = |at: usize| {
        let word = |step: usize| words[(at * at + step * (at % 5 + 1)) % words.len()];
        (0..9).map(word).collect::<Vec<_>>().join(" ") + "\n"
    };
    let text: String = (0..120).map(line).collect();
    let path = folder.join("text.txt");
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

/// Stops in the second epoch, in which updates have two batches.
#[test]
fn a_run_resumes_with_the_bits_of_one_that_did_not_stop() {
    let home = tempfile::tempdir().unwrap();
    let text = short_text(home.path());
    let run = |folder: &str, flags: &str| {
        let folder = home.path().join(folder);
        let common = "--batch-size 2 --dropout 0.1 --update-freq 1,2 --total-num-update 20";
        let flags = format!("{common} --save-dir {} {flags}", folder.display());
        run_with(&format!("{flags} --data {text}")).unwrap()
    };
    for precision in ["", " --fp16 --fp16-init-scale 1e7"] {
        let name = |name: &str| format!("{name}{}", precision.len());
        let whole =
            run(&name("whole"), &format!("--no-save --world-size 2 --max-update 14{precision}"));
        assert_eq!(whole.losses.len(), 14);
        let root = home.path().join(name("killed"));
        let first = "--save-interval-updates 2 --keep-interval-updates 2 --world-size 2";
        let flags = format!("{first} --max-update 9{precision}");
        let first = run(&name("killed"), &flags);
        assert_eq!(first.losses, whole.losses[..9]);
        assert_eq!(checkpoints(&root, "updates").len(), 2);
        assert!(!checkpoints(&root, "epochs").is_empty(), "there is more than one epoch");
        let ends = [checkpoints(&root, "last"), checkpoints(&root, "epochs")].concat();
        assert!(ends.contains(&"step-00000009".to_string()), "{ends:?}");
        // The newest checkpoint below --save-dir is loaded without a flag.
        let flags = format!("--no-save --max-update 14{precision}");
        let rest = run(&name("killed"), &format!("--world-size 2 {flags}"));
        assert_eq!(rest.losses, whole.losses[9..], "{precision}");
        assert_eq!((rest.updates, rest.skipped_updates), (14, whole.skipped_updates));
        assert_eq!(rest.held_out_perplexity, whole.held_out_perplexity);
        let strategy =
            "--world-size 1 --batch-size 4 --strategy NO_SHARD --no-save --max-update 14";
        let restore = format!("--restore-file {}", root.display());
        let alone = format!("--data {text} --dropout 0.1 --update-freq 1,2 --total-num-update 20");
        let other = run_with(&format!("{strategy} {restore} {alone}{precision}"));
        if precision.is_empty() {
            for (a, b) in other.unwrap().losses.iter().zip(&whole.losses[9..]) {
                // Dropout has a stream for each rank.
                assert!((a - b).abs() < 0.2, "{a} {b}");
            }
        }
    }
}

#[test]
fn checkpoints_of_epochs_are_kept_apart() {
    let home = tempfile::tempdir().unwrap();
    let (text, root) = (short_text(home.path()), home.path().join("run"));
    let flags = format!(
        "--world-size 1 --batch-size 8 --data {text} --save-dir {} --save-interval-updates 1 \
         --keep-last-epochs 2",
        root.display()
    );
    let updates = run_with(&format!("{flags} --max-update 100000 --max-epoch 3")).unwrap().updates;
    let epochs = checkpoints(&root, "epochs");
    assert_eq!(epochs.len(), 2, "{epochs:?}");
    assert!(epochs[1].ends_with(&updates.to_string()), "{epochs:?} {updates}");
    assert!(!checkpoints(&root, "updates").is_empty());
    assert!(checkpoints(&root, "last").is_empty(), "the end of the run is that of an epoch");
    let missing = format!("{flags} --restore-file {}", home.path().join("none").display());
    let error = format!("{:#}", run_with(&missing).unwrap_err());
    assert!(error.contains("--restore-file") && error.contains("none"), "{error}");
}

/// The command of fairseq's README for one GPU, without the environment.
const FAIRSEQ_COMMAND: &str = r#"
    fairseq-train data-bin/wikitext-103-roberta-bpe-bin \
    --ddp-backend fully_sharded --fp16 --fp16-init-scale 4 \
    --cpu-offload --checkpoint-activations \
    --task language_modeling --tokens-per-sample 2048 --batch-size 8 \
    --arch transformer_lm_gpt3_13 \
    --optimizer cpu_adam --adam-betas "(0.9,0.98)" \
    --lr 0.0001 --lr-scheduler polynomial_decay --warmup-updates 5 --total-num-update 10 \
    --max-update 10 --no-save --log-format json --log-interval 1
"#;

/// Splits a command as a shell does that has no more than quotes and continued lines.
fn fairseqs_command() -> Vec<String> {
    let words = FAIRSEQ_COMMAND.split_whitespace().filter(|word| *word != "\\");
    words.map(|word| word.trim_matches('"').to_string()).collect()
}

#[test]
fn fairseqs_command_is_understood() {
    let cli = Cli::try_parse_from(fairseqs_command()).unwrap();
    let (recipe, sharding) = (cli.recipe(), cli.sharding());
    assert_eq!(cli.data(), [std::path::Path::new("data-bin/wikitext-103-roberta-bpe-bin")]);
    assert_eq!((cli.arch.name, recipe.adam_betas), ("13B", (0.9, 0.98)));
    assert_eq!((recipe.updates(|_| 1000), recipe.schedule(10).total), (10, 10));
    assert_eq!(sharding.strategy, ShardingStrategy::FullShard);
    let scales = Precision::Fp16 { init_scale: 4.0, min_scale: 1e-4 };
    assert_eq!(sharding.precision, scales);
    assert!(sharding.cpu_offload && !cli.checkpoints.saves());
    assert_eq!(sharding.activations, ActivationPolicy::Recompute);
    // What fairseq prints or documents as its defaults.
    assert_eq!((recipe.weight_decay, recipe.clip_norm, recipe.dropout), (0.0, 0.0, 0.0));
    let bare = Cli::parse_from(["gpt_pretrain", "--arch", "transformer_lm_gpt3_13"]).recipe();
    assert_eq!((bare.adam_betas, bare.adam_eps, bare.seed), ((0.9, 0.999), 1e-8, 1));
    assert_eq!((bare.log_interval, bare.warmup_updates), (100, 0));
    assert_eq!(bare.update_freq, [1]);
}

/// Runs fairseq's command on a small model and a small text, and compares the log lines with those
/// of fairseq's README.
#[test]
fn fairseqs_command_writes_fairseqs_lines() {
    let home = tempfile::tempdir().unwrap();
    let (text, log) = (home.path().join("wiki.txt"), home.path().join("log"));
    std::fs::write(&text, crate::text::Text::embedded().unwrap().train).unwrap();
    let folder = home.path().join("data-bin/wikitext-103-roberta-bpe-bin");
    let preprocess =
        ["gpt_pretrain", "preprocess", "--vocabulary", "400", "--quiet"].map(String::from);
    let paths = ["--trainpref", text.to_str().unwrap(), "--destdir", folder.to_str().unwrap()];
    let paths = paths.map(String::from);
    start(&Cli::parse_from([&preprocess[..], &paths].concat())).unwrap();
    let more = ["--device", "flex", "--world-size", "2", "--quiet", "--max-valid-steps", "1"];
    let more = [&more[..], &["--log-file", log.to_str().unwrap()]].concat();
    let more: Vec<String> = more.into_iter().map(String::from).collect();
    let cli = Cli::parse_from([fairseqs_command(), more].concat());
    let arch = Arch { layers: 1, width: 8, heads: 1, vocabulary: 400, ..cli.arch };
    let shape = Cli { arch, input: vec![folder], tokens_per_sample: Some(64), ..cli };
    let summary = run_cli(&Cli { batch_size: Some(2), ..shape }).unwrap();
    assert_eq!(summary.losses.len(), 10);

    let text = std::fs::read_to_string(log).unwrap();
    let lines: Vec<[&str; 4]> = text
        .lines()
        .map(|line| line.splitn(4, " | ").collect::<Vec<_>>().try_into().expect(line))
        .collect();
    let of = |logger: &str| -> Vec<&str> {
        lines.iter().filter(|line| line[2] == logger).map(|line| line[3]).collect()
    };
    let keys = |text: &str| -> Vec<String> {
        let line: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text).unwrap();
        line.keys().cloned().collect()
    };
    let sorted = |names: &str| -> Vec<String> {
        let mut names: Vec<_> = names.split(' ').map(String::from).collect();
        names.sort();
        names
    };
    let inner = "bsz epoch gb_free gnorm loss loss_scale lr num_updates ppl train_wall update ups \
                 wall wpb wps";
    assert_eq!(of("train_inner").len(), 10);
    for line in of("train_inner") {
        assert_eq!(keys(line), sorted(inner));
    }
    assert!(
        of("train_inner")[0].contains(r#""bsz":"4","num_updates":"1","lr":"2e-05","#),
        "{text}"
    );
    assert!(of("train_inner")[9].contains(r#""num_updates":"10","lr":"0","#), "{text}");
    let valid = "epoch valid_bsz valid_loss valid_num_updates valid_ppl valid_wpb valid_wps";
    assert_eq!(keys(of("valid")[0]), sorted(valid));
    let of_epoch = sorted(inner).into_iter().filter(|key| key != "update");
    let prefixed = |key: String| if key == "epoch" { key } else { format!("train_{key}") };
    let mut expected: Vec<_> = of_epoch.map(prefixed).collect();
    expected.sort();
    assert_eq!(keys(of("train")[0]), expected);
    let notes = of("fairseq_cli.train").join("\n");
    let params = crate::common::report::grouped(summary.num_params);
    for part in [
        format!("num. model params: {params} (num. trained: {params})"),
        "training on 2 devices (GPUs/TPUs)".into(),
        "max tokens per GPU = None and batch size per GPU = 2".into(),
        "Stopping training due to num_updates: 10 >= max_update: 10".into(),
        "begin validation on \"valid\" subset".into(),
        "end of epoch 1 (average epoch stats below)".into(),
        "done training in ".into(),
    ] {
        assert!(notes.contains(&part), "{part}\n{text}");
    }
}

/// The notice of an overflow has the new scale, as Python writes it.
#[test]
fn an_overflow_is_noted_with_the_new_scale() {
    let home = tempfile::tempdir().unwrap();
    let log = home.path().join("log");
    let flags = "--world-size 1 --batch-size 2 --max-valid-steps 1 --fp16 --fp16-init-scale 1e8";
    let flags = format!("{flags} --log-format json --log-file {}", log.display());
    let summary = run_with(&flags).unwrap();
    let text = std::fs::read_to_string(log).unwrap();
    let notice = "fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient, setting loss \
                  scale to: ";
    let scales: Vec<&str> =
        text.lines().filter_map(|line| Some(line.split_once(notice)?.1)).collect();
    assert_eq!(scales.len(), summary.skipped_updates, "{text}");
    assert_eq!(scales[..2], ["50000000.0", "25000000.0"]);
}
