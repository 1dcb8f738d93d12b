//! A training step of one rank without tensors and without peers: the sequence of collectives and of
//! computations that the schedule issues.
//!
//! [`Rehearsal`] takes the decisions of `schedule::decide`, which the schedule takes in training. It
//! assumes that units run forward in layout order, each once in a pass, and that every trained
//! parameter receives a gradient.
//!
//! Imports point one way: action <- forward <- backward.

mod action;
mod backward;
mod forward;

pub(crate) use self::action::{Action, Part, Peers};
pub(crate) use self::forward::Rehearsal;
