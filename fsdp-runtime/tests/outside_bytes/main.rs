//! Every reader of bytes from outside, on changed inputs: none panics, no allocation is larger than
//! twice the input and 1 MiB, and all together are at most twice the input and 2 MiB at any moment.
//!
//! This is a fuzzer without coverage, which needs no nightly compiler: it changes seeds at random.
//! `fsdp-runtime/fuzz` has the same targets for `cargo fuzz`.
//!
//! | variable | meaning |
//! |---|---|
//! | `FUZZ_EXECUTIONS` | executions of each target; 2000 by default |
//! | `FUZZ_SECONDS` | seconds for each target, in place of a number of executions |
//! | `FUZZ_SEED` | number that the changes depend on; 1 by default |
//! | `FUZZ_TARGET` | the only target to run |
//! | `FUZZ_SHARE` | a share of the targets: `0/2` or `1/2` for one half each, in processes side by side |
//!
//! An input that fails is written to the folder of temporary files, and belongs in
//! `corpus/<target>/` once the reader is mended: all files there are inputs and seeds.

#[path = "../support/allocator.rs"]
mod allocator;
mod mutate;
mod seeds;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use allocator::Counting;
use mutate::Mutator;
use targets::{TARGETS, Target};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

/// Bytes of an allocation beyond twice the input. serde reserves as much for a list whose length it
/// was told, and no more.
const ALLOWANCE: usize = 1 << 20;
/// Size of the largest inputs.
const LARGEST: usize = 16 << 10;

/// Returns a variable as a number.
fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} is `{value}`, not a number")))
}

/// Returns the share of the targets to run: every how many of them, from which on.
fn share() -> (usize, usize) {
    let Ok(text) = std::env::var("FUZZ_SHARE") else { return (0, 1) };
    let numbers = text.split_once('/').map(|(at, of)| (at.parse(), of.parse()));
    match numbers {
        Some((Ok(at), Ok(of))) if at < of => (at, of),
        _ => panic!("FUZZ_SHARE is `{text}`, not a share such as 0/2"),
    }
}

/// Runs a target on an input. Returns what is wrong, if anything.
fn run(target: &Target, input: &[u8]) -> Option<String> {
    let before = ALLOCATOR.reset_peak();
    ALLOCATOR.take_largest();
    let outcome = catch_unwind(AssertUnwindSafe(|| (target.read)(input)));
    let (together, largest) = (ALLOCATOR.peak() - before, ALLOCATOR.take_largest());
    if let Err(panic) = outcome {
        return Some(format!("it panics: {}", text_of(&*panic)));
    }
    let allowed = 2 * input.len() + ALLOWANCE;
    (largest > allowed || together > allowed + ALLOWANCE).then(|| {
        let length = input.len();
        format!("it allocates {together} bytes for {length} bytes, {largest} of them at once")
    })
}

/// Returns the text of a panic.
fn text_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text")
}

/// Returns the inputs in `corpus` that a target failed on once.
fn regressions(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/outside_bytes/corpus").join(target.name);
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

/// Runs a target on its seeds and on changes of them. Returns the number of executions.
fn fuzz(target: &Target) -> u64 {
    let mut inputs = seeds::of(target.name);
    assert!(!inputs.is_empty(), "{} has no seed", target.name);
    for (path, input) in regressions(target) {
        if let Some(fault) = run(target, &input) {
            panic!("{} on {}: {fault}", target.name, path.display());
        }
        inputs.push(input);
    }
    let executions = number("FUZZ_EXECUTIONS").unwrap_or(2000);
    let until = number("FUZZ_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut mutator = Mutator::new(number("FUZZ_SEED").unwrap_or(1), inputs, target.words);
    let mut done = 0;
    loop {
        let ended = match until {
            Some(until) => done % 256 == 0 && Instant::now() >= until,
            None => done >= executions,
        };
        if ended {
            return done;
        }
        let input = mutator.next(done, LARGEST);
        done += 1;
        if let Some(fault) = run(target, &input) {
            let file = std::env::temp_dir().join(format!("fuzz-{}-{done}", target.name));
            std::fs::write(&file, &input).unwrap();
            panic!("{} on {}: {fault}", target.name, file.display());
        }
    }
}

#[test]
fn no_reader_of_outside_bytes_panics_or_allocates_beyond_its_input() {
    let only = std::env::var("FUZZ_TARGET").ok();
    let chosen = |target: &&Target| only.as_ref().is_none_or(|only| only == target.name);
    let (at, of) = share();
    // Panics that are caught are reported once, with the input.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = catch_unwind(|| {
        let mut total = 0;
        for target in TARGETS.iter().skip(at).step_by(of).filter(chosen) {
            let started = Instant::now();
            let executions = fuzz(target);
            total += executions;
            let seconds = started.elapsed().as_secs_f64();
            eprintln!("{:24} {executions:>10} executions in {seconds:.1} s", target.name);
        }
        total
    });
    std::panic::set_hook(hook);
    match outcome {
        Ok(total) => assert!(total > 0, "there is no target {only:?}"),
        Err(panic) => panic!("{}", text_of(&*panic)),
    }
}

#[test]
fn seeds_are_accepted_by_their_readers_and_changes_reach_both_outcomes() {
    for target in TARGETS {
        let seeds = seeds::of(target.name);
        assert!(seeds.iter().any(|seed| (target.read)(seed)), "{}", target.name);
        let mut mutator = Mutator::new(7, seeds, target.words);
        let accepted = (0..500).filter(|&at| (target.read)(&mutator.next(at, LARGEST))).count();
        assert!(accepted > 0, "{}: no change of a seed is read", target.name);
        assert!(accepted < 500, "{}: every change of a seed is read", target.name);
    }
}

#[test]
fn the_harness_finds_a_panic_and_an_allocation() {
    let target = |read: fn(&[u8]) -> bool| Target { name: "test", read, words: &[] };
    let panics = target(|bytes| {
        assert!(bytes.len() < 3, "three bytes");
        true
    });
    assert_eq!(run(&panics, b"ab"), None);
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let found = run(&panics, b"abc");
    std::panic::set_hook(hook);
    assert_eq!(found.as_deref(), Some("it panics: three bytes"));
    let allocates = target(|bytes| {
        let allocated = vec![1u8; ALLOWANCE + 2 * bytes.len() + 1];
        std::hint::black_box(allocated).is_empty()
    });
    assert!(run(&allocates, b"ab").unwrap().contains("bytes for 2 bytes"));
}
