//! Recomputation: the forward of a unit runs a second time in backward, from saved inputs.
//!
//! `forward` is called by generated code, with inputs in the form of `kept_inputs`; `saved_call` holds the data that a call saves from forward to
//! backward.

mod forward;
mod kept_inputs;
mod saved_call;

pub use self::forward::{
    ForwardRecording, ProbeSavable, ProbeUnsavable, SavableInputs, UnsavableInputs,
    check_recomputable, post_forward_recompute,
};
pub use self::kept_inputs::{ByValue, InputList, KeepInputs, KeptReference};
pub(crate) use self::saved_call::{RecomputeTask, SavedCall, SavedInput, SavedOutput};
