//! The target `yaml_update` of `fsdp-runtime/tests/outside_bytes/targets.rs`.
#![no_main]

#[path = "../../tests/outside_bytes/targets.rs"]
mod targets;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| targets::read("yaml_update", bytes));
