//! The sharded model whose forward runs on this thread, for functions that exchange activations between ranks.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;

use super::runtime::Runtime;
use crate::error::{ShardError, raise};
use crate::layout::{ContextPart, WorldSize};

thread_local! {
    /// Models with split rows whose forwards run on this thread, outermost first.
    static RUNNING: RefCell<Vec<Arc<dyn Runtime>>> = const { RefCell::new(Vec::new()) };
}

/// A forward that runs on this thread, until it is dropped.
#[derive(Debug)]
pub(crate) struct RunningForward {
    /// A guard belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl RunningForward {
    /// Marks a forward of a model as running. Returns `None` for a model whose ranks have whole rows.
    pub(crate) fn begin(runtime: &Arc<dyn Runtime>) -> Option<Self> {
        let mesh = runtime.ranks();
        if mesh.context_size() == WorldSize::ONE && !mesh.splits_sequence() {
            return None;
        }
        RUNNING.with_borrow_mut(|running| running.push(runtime.clone()));
        Some(Self { thread: PhantomData })
    }

    /// Returns this rank's part of the rows of which it has `positions`, and the model whose forward runs on this
    /// thread, if that has context parallel ranks. Unwinds with the error if no part has as many positions.
    pub(crate) fn part(positions: usize) -> Option<(ContextPart, Arc<dyn Runtime>)> {
        let runtime = Self::current()?;
        let mesh = runtime.ranks();
        if mesh.context_size() == WorldSize::ONE {
            return None;
        }
        match mesh.context_part(positions * mesh.context_size().size()) {
            Ok(part) => Some((part, runtime)),
            Err(error) => raise(ShardError::from(error).into()),
        }
    }

    /// Returns the model with split rows whose forward runs on this thread, if one does.
    pub(crate) fn current() -> Option<Arc<dyn Runtime>> {
        RUNNING.with_borrow(|running| running.last().cloned())
    }
}

impl Drop for RunningForward {
    fn drop(&mut self) {
        RUNNING.with_borrow_mut(Vec::pop);
    }
}
