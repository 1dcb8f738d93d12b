//! The autodiff operations that carry gradients back into shards.
//!
//! Order of the files, from the bottom up: `hooks`, `record`, `gather`, `pre_backward`,
//! `recompute`, `tensor_parallel`.

mod gather;
mod hooks;
mod pre_backward;
mod recompute;
mod record;
mod tensor_parallel;

pub(super) use self::gather::gather;
pub(super) use self::hooks::{BackwardHooks, Depth, OpState, zero};
pub(super) use self::pre_backward::pre_backward;
pub(super) use self::recompute::{output, recompute, seed, tracked_on_device};
pub(super) use self::record::MAX_ORDERING_INPUTS;
pub(super) use self::tensor_parallel::{Axis, TensorRanks, exchange};
