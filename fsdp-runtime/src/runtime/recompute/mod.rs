//! Recomputation: the forward of a unit runs again in backward, from its inputs alone.

mod forward;
mod kept;
mod ops;

pub use self::forward::*;
pub(crate) use self::kept::{Arrived, KeptCall, KeptInput, Taken};
pub(crate) use self::ops::*;
