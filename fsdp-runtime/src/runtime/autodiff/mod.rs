//! The autodiff operations that carry gradients back into shards.

mod gather;
mod hooks;

pub(crate) use self::gather::{MAX_ORDERING_INPUTS, gather, pre_backward};
pub(crate) use self::hooks::{BackwardHooks, Depth, State, zero};
