//! Handles to the state of a sharded model, returned by [`Fsdp::state`] and [`Fsdp::state_mut`].
//! The methods are in the files of the formats.

use crate::fully_shard::Fsdp;

/// Read access to the state of a sharded model: methods that return state dicts or write files.
///
/// [`Fsdp::state`] returns it.
#[derive(Debug)]
pub struct State<'a, M> {
    pub(super) model: &'a Fsdp<M>,
}

/// Write access to the state of a sharded model: methods that load state dicts or files.
///
/// [`Fsdp::state_mut`] returns it.
#[derive(Debug)]
pub struct StateMut<'a, M> {
    pub(super) model: &'a mut Fsdp<M>,
}

impl<M> Fsdp<M> {
    /// Returns read access to the state of the model and its optimizers: to take state dicts, and
    /// to write checkpoints and pretrained weights.
    pub fn state(&self) -> State<'_, M> {
        State { model: self }
    }

    /// Returns write access to the state of the model: to load state dicts, checkpoints and
    /// pretrained weights.
    pub fn state_mut(&mut self) -> StateMut<'_, M> {
        StateMut { model: self }
    }
}
