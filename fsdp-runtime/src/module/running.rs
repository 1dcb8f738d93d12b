//! The sharded model whose forward runs on this thread, for functions that exchange activations between ranks.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;

use fsdp_kernels::Places;

use super::random::{DrawnMask, Mask};
use super::runtime::{ParamIndex, Runtime};
use crate::error::{ScheduleError, ShardError, raise};
use crate::layout::{ContextPart, WorldSize};

thread_local! {
    /// Models with split rows or matrices whose forwards run on this thread, outermost first.
    static RUNNING: RefCell<Vec<Running>> = const { RefCell::new(Vec::new()) };
}

/// A model, and where its forward is.
#[derive(Clone)]
pub(crate) struct Running {
    runtime: Arc<dyn Runtime>,
    /// The last split layer of this forward, if it has returned a part of its outputs.
    part_of: Option<ParamIndex>,
}

impl Running {
    /// Continues this forward on the present thread.
    pub(crate) fn resume(&self) -> RunningForward {
        RUNNING.with_borrow_mut(|running| running.push(self.clone()));
        RunningForward { thread: PhantomData }
    }
}

/// A forward that runs on this thread, until it is dropped.
#[derive(Debug)]
pub(crate) struct RunningForward {
    /// A guard belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl RunningForward {
    /// Marks a forward of a model as running. Returns `None` for a model whose ranks have whole rows and
    /// matrices.
    pub(crate) fn begin(runtime: &Arc<dyn Runtime>) -> Option<Self> {
        let mesh = runtime.ranks();
        if mesh.context_size() == WorldSize::ONE && mesh.tensor_size() == WorldSize::ONE {
            return None;
        }
        Some(Running { runtime: runtime.clone(), part_of: None }.resume())
    }

    /// Returns the model with split rows or matrices whose forward runs on this thread, and where it is, to continue
    /// it elsewhere.
    pub(crate) fn state() -> Option<Running> {
        RUNNING.with_borrow(|running| running.last().cloned())
    }

    /// Notes the last split layer, if it returns a part of its outputs.
    pub(super) fn note_part(part_of: Option<ParamIndex>) {
        RUNNING.with_borrow_mut(|running| {
            if let Some(running) = running.last_mut() {
                running.part_of = part_of;
            }
        });
    }

    /// Returns the path of the last split layer of the forward that runs on this thread, and the number of ranks that
    /// have a part of its outputs, if it has returned a part.
    pub(crate) fn part_of() -> Option<(String, WorldSize)> {
        let Running { runtime, part_of } = Self::state()?;
        Some((runtime.param_path(part_of?), runtime.ranks().tensor_size()))
    }

    /// Checks that a dropout layer has the values of its field: a part of columns, or whole ones. Unwinds with the
    /// error if not.
    fn check_values(drawn: &DrawnMask) {
        let Some(Running { runtime, part_of }) = Self::state() else { return };
        let has_part = part_of.is_some();
        let of_several = runtime.ranks().tensor_size() != WorldSize::ONE;
        if of_several && drawn.is_layer() && drawn.has_columns() != has_part {
            let path = drawn.path().to_string();
            raise(match has_part {
                true => ScheduleError::DropoutOfParts { path }.into(),
                false => ScheduleError::DropoutOfWhole { path }.into(),
            })
        }
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

    /// Returns a drawn mask for a tensor of these dimensions.
    pub(crate) fn mask(drawn: &DrawnMask, dims: &[usize]) -> Mask {
        Self::check_values(drawn);
        drawn.of(dims, Self::current().is_some())
    }

    /// Returns the places of this rank's heads, of which there are `own`, for a mask that attention has drawn.
    pub(crate) fn heads(drawn: &DrawnMask, own: usize) -> Places {
        Self::check_values(drawn);
        drawn.columns(own)
    }

    /// Returns the model with split rows or matrices whose forward runs on this thread, if one does.
    pub(crate) fn current() -> Option<Arc<dyn Runtime>> {
        Some(Self::state()?.runtime)
    }
}

impl Drop for RunningForward {
    fn drop(&mut self) {
        RUNNING.with_borrow_mut(Vec::pop);
    }
}
