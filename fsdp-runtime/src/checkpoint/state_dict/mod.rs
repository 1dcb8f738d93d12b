//! State dicts in memory, in three forms that are distinct types.
//!
//! [`FullState`] is the full tensors. [`ShardedState`] is this rank's elements of the full tensors.
//! [`LocalState`] is this rank's tensors in the shapes in which they are stored, for the same
//! layout only. Each form exists for models, by module path, and for optimizers
//! ([`OptimizerState`]). [`StateDictOptions`] select the parameters of a full or a sharded state,
//! and may allow missing and unexpected ones. For files, and to load at another world size, use
//! [`checkpoint`](crate::checkpoint).
//!
//! Imports: recipient, layout, options, report ← selection, tensors ← compare ← model, model_load,
//! optimizer_tensors ← optimizer_local ← optimizer_gather ← optimizer.

mod compare;
mod layout;
mod model;
mod model_load;
mod optimizer;
mod optimizer_gather;
mod optimizer_local;
mod optimizer_tensors;
mod options;
mod recipient;
mod report;
mod selection;
mod tensors;

pub use self::optimizer_tensors::{LocalTensor, OptimizerState, ParameterState};
pub use self::options::StateDictOptions;
pub use self::recipient::Recipient;
pub use self::tensors::{FullState, LocalState, ShardedState, ShardedTensor};
