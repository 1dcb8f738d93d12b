//! A union as a unit.

use fsdp_runtime::fsdp_unit;

#[fsdp_unit]
pub union Bits {
    float: f32,
    word: u32,
}

fn main() {}
