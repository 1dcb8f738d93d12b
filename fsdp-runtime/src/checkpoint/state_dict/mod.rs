//! State dicts in memory, in three forms that are distinct types.
//!
//! [`FullState`] is the full tensors. [`ShardedState`] is this rank's elements of the full tensors.
//! [`LocalState`] is this rank's tensors in the shapes in which they are stored, for the same
//! layout only. Each form exists for models, by module path, and for optimizers
//! ([`OptimizerState`]). For files, and to load at another world size, use
//! [`checkpoint`](crate::checkpoint).
//!
//! Imports: recipient, layout ← tensors ← compare ← model, optimizer_tensors ← optimizer_local ←
//! optimizer_gather ← optimizer.

mod compare;
mod layout;
mod model;
mod optimizer;
mod optimizer_gather;
mod optimizer_local;
mod optimizer_tensors;
mod recipient;
mod tensors;

pub use self::optimizer_tensors::{LocalTensor, OptimizerState, ParameterState};
pub use self::recipient::Recipient;
pub use self::tensors::{FullState, LocalState, ShardedState, ShardedTensor};
