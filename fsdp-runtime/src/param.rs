//! The reparameterization through which `Param::val()` finds the full parameter.
//!
//! Burn stores a parameter's *base* and, where a reparameterization is attached, asks it for the
//! *effective value* on every `val()`. A sharded parameter's base is this rank's fragment (or, for
//! one that stays whole, the parameter itself), and [`Sharded`] asks the schedule of its model for
//! the value. All run-time state hangs on this: a unit's hooks find it through its own parameters,
//! without any global.

use std::fmt::Debug;
use std::sync::Arc;

use burn::module::{Module, Param, Reparameterization};
use burn::tensor::{DispatchTensor, Tensor};

use crate::error::Error;

/// A place in a sharded model: parameter `entry` of unit `unit`, both counted in layout order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) unit: usize,
    pub(crate) entry: usize,
}

/// A forward of one unit, from its `pre_forward` to its `post_backward`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct CallId(pub(crate) u64);

/// What hooks and parameters ask of a sharded model's schedule, whatever its backend.
pub(crate) trait Runtime: Debug + Send + Sync {
    /// Whether a hooked forward is under way: the first one reads the fragments of all below it.
    fn is_open(&self) -> bool;
    /// A fragment read from the module, to gather from.
    fn collect(&self, place: Place, base: DispatchTensor);
    /// Starts a hooked forward; `None` within another one of the same unit.
    fn pre_forward(
        &self,
        unit: usize,
        inputs: Vec<DispatchTensor>,
    ) -> Result<Option<CallId>, Error>;
    /// An output of the unit, made to unshard the unit before its gradient goes on.
    fn hook_output(self: Arc<Self>, call: CallId, output: DispatchTensor) -> DispatchTensor;
    /// Ends a hooked forward.
    fn post_forward(&self, call: CallId) -> Result<(), Error>;
    /// Ends a hooked forward that panicked.
    fn abandon(&self, call: CallId);
    /// The effective value of a parameter, given its base.
    fn materialize(
        self: Arc<Self>,
        place: Place,
        base: DispatchTensor,
    ) -> Result<DispatchTensor, Error>;
}

/// The reparameterization of a sharded parameter.
#[derive(Module, Debug)]
pub struct Sharded {
    #[module(skip)]
    pub(crate) runtime: Arc<dyn Runtime>,
    #[module(skip)]
    pub(crate) place: Place,
}

impl Reparameterization for Sharded {
    const NAME: &'static str = "fsdp";

    /// # Panics
    ///
    /// Unwinds with the [`Error`] where a collective fails; `launch` returns it.
    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        match self.runtime.clone().materialize(self.place, base.into_dispatch()) {
            Ok(value) => Tensor::from_dispatch(value),
            Err(error) => raise(error),
        }
    }
}

impl Sharded {
    /// The place of a parameter, where it is sharded.
    pub(crate) fn of<const D: usize>(param: &Param<Tensor<D>>) -> Option<&Self> {
        param.reparameterization::<Self>()
    }
}

/// Ends this rank with a typed error from where only a panic can: the caller is Burn's or the
/// user's code. [`Fsdp::backward`](crate::Fsdp::backward) and [`launch`](crate::launch) turn it
/// back into the error; the panic hook is not run, as nothing is wrong with the program.
pub(crate) fn raise(error: Error) -> ! {
    std::panic::resume_unwind(Box::new(error))
}
