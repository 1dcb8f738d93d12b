//! The state of a sharded model, as seen through [`Fsdp::state`] and [`Fsdp::state_mut`].

use crate::fully_shard::Fsdp;

/// The state of a sharded model: state dicts in memory, and files that are written from it.
///
/// [`Fsdp::state`] returns it.
#[derive(Debug)]
pub struct State<'a, M> {
    pub(super) model: &'a Fsdp<M>,
}

/// The state of a sharded model, to be replaced by a loaded one.
///
/// [`Fsdp::state_mut`] returns it.
#[derive(Debug)]
pub struct StateMut<'a, M> {
    pub(super) model: &'a mut Fsdp<M>,
}

impl<M> Fsdp<M> {
    /// Returns the state of the model and of its optimizers: state dicts, checkpoints, pretrained
    /// weights.
    pub fn state(&self) -> State<'_, M> {
        State { model: self }
    }

    /// Returns the state of the model, to load another one into it.
    pub fn state_mut(&mut self) -> StateMut<'_, M> {
        StateMut { model: self }
    }
}
