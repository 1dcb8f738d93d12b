//! Tests of whole runs.

use anyhow::Context;
use fsdp_runtime::MemoryError;

use super::*;
use crate::arch::Arch;

/// Runs three updates.
fn run_with(flags: &str) -> Result<Summary> {
    let shape = "--quiet --bpe-cache none --tokens-per-sample 32 --max-update 3 \
                 --warmup-updates 0 --lr 1e-3";
    let flags = shape.split_whitespace().chain(flags.split(' '));
    let summary = run(&Cli::parse_from(std::iter::once("gpt_pretrain").chain(flags)))?;
    summary.context("rank 0 is here")
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
        let (a, b) = (one.held_out_perplexity, other.held_out_perplexity);
        assert!((a / b - 1.0).abs() < 1e-4, "{a} {b}");
    }
    assert!(one.held_out_perplexity < 512.0 && one.bigram_perplexity < 100.0, "{one}");
}

/// A quiet run writes its lines to the file, each a JSON object.
#[test]
fn the_log_file_gets_the_log_lines() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.log");
    let flags = format!("--log-interval 1 --max-valid-steps 1 --log-file {}", path.display());
    run_with(&format!("--world-size 2 --batch-size 1 {flags}")).unwrap();
    let text = std::fs::read_to_string(path).unwrap();
    let updates: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(updates.len(), 3, "{text}");
    assert!(updates.iter().all(|line| line.get("loss").is_some()), "{text}");
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
        run(&Cli::parse_from(flags)).unwrap().expect("rank 0 is here")
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
    let summary = run(&Cli::parse_from(["gpt_pretrain"])).unwrap().expect("rank 0 is here");
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
    let shape = "gpt_pretrain --quiet --bpe-cache none --tokens-per-sample 32 --max-update 2 \
                 --batch-size 1 --max-valid-steps 1";
    let with = |flags: &str| {
        let cli = Cli::parse_from(shape.split_whitespace().chain(flags.split_whitespace()));
        run(&Cli { arch, ..cli }).map(|summary| summary.expect("rank 0 is here"))
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

#[test]
fn a_text_without_a_block_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "too short\nfor anything\n").unwrap();
    let error = run_with(&format!("--data {}", file.path().display())).unwrap_err();
    assert!(format!("{error:#}").contains("--tokens-per-sample"), "{error:#}");
}
