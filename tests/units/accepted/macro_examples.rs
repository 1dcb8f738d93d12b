//! The examples in the macros' documentation. A test of `fsdp-macros` compares them with it.
#![deny(warnings)]

pub mod fsdp_module;
pub mod fsdp_unit;
pub mod generic_unit;
pub mod trait_block;
pub mod unit_value;
