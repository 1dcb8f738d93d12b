//! `fsdp plan`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::support::{Fsdp, Run};

fn plan(args: &str) -> Run {
    let args: Vec<&str> = std::iter::once("plan").chain(args.split_whitespace()).collect();
    Fsdp::new(&args).run()
}

fn json(args: &str) -> Value {
    let run = plan(&format!("{args} --json"));
    assert_eq!(run.code, Some(0), "{run:?}");
    serde_json::from_str(&run.stdout).unwrap_or_else(|error| panic!("{error}: {run:?}"))
}

#[test]
fn a_plan_has_a_row_for_each_number_of_ranks() {
    let run = plan("llama3-8b --world 8,64 --length 8192 --recompute units");
    assert_eq!(run.code, Some(0), "{run:?}");
    for part in ["8.03 B parameters in 33 units", "h100", "fits", "activations", "total"] {
        assert!(run.stdout.contains(part), "{part}: {}", run.stdout);
    }
    let plans = json("llama3-8b --world 8,64 --length 8192 --recompute units");
    let plans = plans["plans"].as_array().unwrap();
    let shards = |at: usize| plans[at]["memory_bytes"]["shards"].as_u64().unwrap();
    assert_eq!(plans.len(), 2);
    assert!(shards(0).abs_diff(8 * shards(1)) < 1 << 20, "an eighth of the shards");
    // Each layer but the last is gathered twice, and the outermost unit once.
    assert_eq!(plans[0]["collectives"].as_u64(), Some((2 * 33 - 2 + 2 * 33) as u64));
    let between = |at: usize| plans[at]["traffic"]["all_gather"]["bytes_between"].as_u64();
    assert_eq!(between(0), Some(0));
    assert!(between(1) > Some(0));
}

#[test]
fn a_plan_of_sixteen_thousand_ranks() {
    let plan = json("llama3-405b --world 16384 --length 8192");
    let total = plan["plans"][0]["memory_bytes"]["total"].as_u64().unwrap();
    assert!(plan["parameters"].as_u64() > Some(400_000_000_000));
    assert!(total > 1 << 30, "{total}");
}

#[test]
fn a_folder_is_planned_by_its_layers() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let tensor = |name: &str, rows: usize, at: usize| {
        let (begin, end) = (at * 4 * 64, (at + rows) * 4 * 64);
        format!(r#""{name}":{{"dtype":"F32","shape":[{rows},64],"data_offsets":[{begin},{end}]}}"#)
    };
    let header = format!(
        "{{{},{},{}}}",
        tensor("embeddings.weight", 100, 0),
        tensor("layers.0.up.weight", 64, 100),
        tensor("layers.1.up.weight", 64, 164)
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    let plan = json(&format!("{} --world 4", folder.path().display()));
    assert_eq!(plan["units"].as_u64(), Some(3));
    assert_eq!(plan["parameters"].as_u64(), Some((100 + 128) * 64));
}

/// Adapters are all that is trained: 41,943,040 parameters of rank 16 in Llama 3 8B.
#[test]
fn adapters_leave_room_on_a_small_device() {
    let base = "llama3-8b --world 1 --device l4 --length 2048 --recompute units --fused-loss";
    let of = |flags: &str| json(&format!("{base} {flags}"));
    let (full, lora, small) = (of(""), of("--lora 16"), of("--lora 16 --quantize nf4"));
    let bytes = |plan: &Value, kind: &str| plan["plans"][0]["memory_bytes"][kind].as_u64().unwrap();
    let fits = |plan: &Value| plan["plans"][0]["fits"].as_bool().unwrap();
    assert_eq!([fits(&full), fits(&lora), fits(&small)], [false, false, true]);
    let count = |plan: &Value| plan["parameters"].as_u64().unwrap();
    assert_eq!(count(&lora) - count(&full), 41_943_040);
    assert_eq!(bytes(&lora, "optimizer"), 2 * 4 * 41_943_040);
    assert!(bytes(&small, "shards") < bytes(&lora, "shards") / 6, "{small}");
    let seconds = |plan: &Value| plan["plans"][0]["compute_seconds"].as_f64().unwrap();
    assert!(seconds(&lora) < 0.8 * seconds(&full), "{lora}");
    let run = plan("llama3-8b --quantize nf4");
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("--lora"), "{run:?}");
}

#[test]
fn the_search_lists_settings_with_reasons() {
    let run = plan("llama3-8b --world 16 --batch 2 --length 8192 --search");
    assert_eq!(run.code, Some(0), "{run:?}");
    for part in ["settings fit", "1. ", "GiB stay free", "next cheaper device, a100"] {
        assert!(run.stdout.contains(part), "{part}: {}", run.stdout);
    }
    let run = plan("llama3-405b --device l4 --world 8 --search");
    assert!(run.stdout.contains("nothing fits"), "{run:?}");
}

#[test]
fn a_wrong_name_is_an_error_that_lists_the_right_ones() {
    for (args, part) in [
        ("llama9-8b", "llama3-8b"),
        ("gpt2 --device tpu", "rtx4090"),
        ("gpt2 --between carrier", "400g"),
        ("gpt2 --world 0", "at least 1"),
        ("gpt2 --world 6 --strategy HYBRID_SHARD --shard-size 4", "groups of 4"),
        ("gpt2 --efficiency 1.5", "at most 1"),
        ("gpt2 --html /nowhere/plan.html", "/nowhere/plan.html"),
        ("", "<MODEL>"),
    ] {
        let run = plan(args);
        assert_ne!(run.code, Some(0), "{args}");
        assert!(run.stderr.contains(part), "{args}: {run:?}");
    }
    let list = plan("--list");
    assert!(list.stdout.contains("datasheet") && list.stdout.contains("gpt3-175b"), "{list:?}");
}

/// A measured step gives the efficiency with which it takes that time.
#[test]
fn a_measured_step_calibrates() {
    let plans = json("gpt3-1.3b --world 8,16 --measured 200");
    let step = plans["plans"][0]["step_seconds"].as_f64().unwrap();
    assert!((step - 0.2).abs() < 1e-4, "{step}");
    let efficiency = plans["cluster"]["accelerator"]["efficiency"].as_f64().unwrap();
    assert!(efficiency > 0.001 && efficiency < 1.0, "{efficiency}");
}

/// Script that a copy of the page runs: it writes what the browser has drawn to the title.
const PROBE: &str = "<script>onload = () => { \
    const drawn = (of) => [...document.querySelectorAll(of)].filter((it) => { \
        const box = it.getBoundingClientRect(); return box.width > 0 && box.height > 0; }).length; \
    document.title = ['#schedule rect', 'svg polygon', '#scaling circle'].map(drawn).join(' '); \
    }</script></body>";

fn chromium() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let path = std::env::var_os("PATH")?;
    let files = std::env::split_paths(&path).flat_map(|dir| names.map(|name| dir.join(name)));
    files.into_iter().find(|file| file.is_file())
}

/// Runs headless Chromium on a file, and returns its output and its log.
fn browse(chromium: &Path, profile: &Path, flags: &[&str], page: &Path) -> (String, String) {
    let output = Command::new("timeout")
        .arg("60")
        .arg(chromium)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .args(flags)
        .arg(format!("file://{}", page.display()))
        .output()
        .expect("Chromium starts");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (text(output.stdout), text(output.stderr))
}

/// The page is drawn by a browser, without an error and without the network. Without Chromium the
/// test checks the text alone.
#[test]
fn a_browser_draws_the_page() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("plan.html");
    let run = plan(&format!("gpt3-1.3b --world 8,16,64 --html {}", page.display()));
    assert_eq!(run.code, Some(0), "{run:?}");
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(!text.contains("href=") && !text.contains("<script"), "the page is complete");
    let Some(chromium) = chromium() else {
        eprintln!("there is no Chromium, so that the page is not drawn");
        return;
    };
    let probed = folder.path().join("probed.html");
    std::fs::write(&probed, text.replace("</body>", PROBE)).unwrap();
    let profile = folder.path().join("profile");
    let (dom, log) = browse(&chromium, &profile, &["--dump-dom"], &probed);
    assert!(!log.contains("CONSOLE"), "{log}");
    let title = dom.split("<title>").nth(1).and_then(|rest| rest.split('<').next());
    let drawn: Vec<usize> =
        title.unwrap_or("").split(' ').filter_map(|count| count.parse().ok()).collect();
    assert_eq!(drawn.len(), 3, "{log}");
    assert!(drawn[0] > 100, "bars of the schedule: {drawn:?}");
    assert!(drawn[1] >= 4, "areas of the memory: {drawn:?}");
    assert_eq!(drawn[2], 3, "points of the scaling");
    let picture = folder.path().join("plan.png");
    let flags = [&*format!("--screenshot={}", picture.display()), "--window-size=1100,1600"];
    browse(&chromium, &profile, &flags, &page);
    let bytes = std::fs::read(&picture).expect("a screenshot");
    assert!(bytes.starts_with(b"\x89PNG") && bytes.len() > 20_000, "{} bytes", bytes.len());
}
