//! A launch tells glibc's allocator to keep freed pages: the same block costs page faults only once.
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

#[test]
fn a_freed_block_is_used_again_without_page_faults() {
    let options = LaunchOptions::new(1);
    let untuned = faults_of_blocks(options.clone().with_malloc_tuning(false));
    let tuned = faults_of_blocks(options);
    // A huge page takes one fault for 512 pages.
    let pages = (BLOCKS - 1) * BLOCK / PAGE;
    assert!(untuned >= pages / 512, "{untuned} faults without the setting");
    assert!(tuned < pages / 100, "{tuned} faults, {untuned} without the setting, {pages} pages");
    assert!(tuned < untuned / 4, "{tuned} faults, {untuned} without the setting");
}
