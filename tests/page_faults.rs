//! A launch tells glibc's allocator to keep freed pages, so that the same block costs page faults only
//! once, and to have huge pages.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::fs;

use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::prelude::*;

/// Bytes of a block, above the largest that glibc can be told not to map on its own.
const BLOCK: usize = 48 << 20;
const PAGE: usize = 4096;
const BLOCKS: usize = 10;

/// Returns the page faults of this process without input or output.
fn page_faults() -> usize {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    // The fields after the name in parentheses; the tenth field of all is `minflt`.
    let fields = stat.rsplit(')').next().unwrap();
    fields.split_whitespace().nth(7).unwrap().parse().unwrap()
}

/// Allocates, fills and frees blocks on a rank. Returns the page faults of all but the first block.
fn faults_of_blocks(options: LaunchOptions) -> usize {
    let faults = launch(options.with_device(Device::flex()), |_| {
        let fill = || drop(std::hint::black_box(vec![1_u8; BLOCK]));
        fill();
        let before = page_faults();
        (1..BLOCKS).for_each(|_| fill());
        Ok::<_, Error>(page_faults() - before)
    });
    faults.unwrap()[0]
}

/// One test, as the setting is one of the whole process.
#[test]
fn a_tuned_launch_keeps_freed_pages_and_has_huge_ones() {
    let options = LaunchOptions::new(1);
    let untuned = faults_of_blocks(options.clone().with_malloc_tuning(false));
    let tuned = faults_of_blocks(options);
    // A huge page takes one fault for 512 pages.
    let pages = (BLOCKS - 1) * BLOCK / PAGE;
    assert!(untuned >= pages / 512, "{untuned} faults without the setting");
    assert!(tuned < pages / 100, "{tuned} faults, {untuned} without the setting, {pages} pages");
    assert!(tuned < untuned / 4, "{tuned} faults, {untuned} without the setting");

    let asked = launch(LaunchOptions::new(1).with_device(Device::flex()), |_| {
        let block = std::hint::black_box(vec![1_u8; BLOCK]);
        Ok::<_, Error>(asked_for_huge_pages(block.as_ptr().addr() + BLOCK / 2))
    });
    assert_ne!(asked.unwrap()[0], Some(false), "no huge pages for a tuned launch");
}

/// Returns whether the system has been asked for huge pages for the mapping with this address; `None`
/// where its kernel has none.
fn asked_for_huge_pages(address: usize) -> Option<bool> {
    let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    if enabled.contains("[never]") {
        return None;
    }
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut is_inside = false;
    for line in maps.lines() {
        let number = |text: &str| usize::from_str_radix(text, 16).ok();
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        if let Some((Some(start), Some(end))) = range.map(|(a, b)| (number(a), number(b))) {
            is_inside = (start..end).contains(&address);
        } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| is_inside) {
            return Some(flags.split_whitespace().any(|flag| flag == "hg"));
        }
    }
    panic!("no mapping has the address {address:#x}");
}
