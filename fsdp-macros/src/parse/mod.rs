//! Parsed items. They borrow from `syn`'s tree, so that every part keeps the user's span.
//!
//! Parsing is lenient: an argument that cannot be read is reported and left out, so that the rest
//! of the item can still be checked and expanded.

mod arguments;
mod attributes;
mod burn;
mod crate_path;
mod impl_block;
mod module;
mod unit_value;
mod values;

pub(crate) use arguments::Split;
pub(crate) use attributes::{FSDP, FSDP_UNIT, derives, is_named};
pub(crate) use crate_path::CratePath;
pub(crate) use impl_block::{Forward, ImplBlock, Receiver, is_forward};
pub(crate) use module::{Content, Field, Module, Unit};
pub(crate) use unit_value::Value;
pub(crate) use values::Tie;
