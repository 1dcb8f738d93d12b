//! The reparameterization through which `Param::val()` finds the full parameter.
//!
//! Burn stores a parameter's *base* and, where a reparameterization is attached, asks it for the
//! *effective value* on every `val()`. A sharded parameter's base is this rank's shard (or, for
//! one that stays whole, the parameter itself), and [`Sharded`] asks the schedule of its model for
//! the value. All run-time state hangs on this: a unit's hooks find it through its own parameters,
//! without any global.

use std::cell::RefCell;
use std::fmt::{self, Debug};
use std::sync::{Arc, Weak};

use burn::module::{
    Content, Devices, LoraAdapter, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor, Param, Reparameterization, Reparameterizer,
};
use burn::tensor::{Device, DispatchTensor, Tensor};

use crate::error::{Error, raise};
use crate::module::Draw;

/// A place in a sharded model: parameter `entry` of unit `unit`, both counted in layout order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ParamIndex {
    pub(crate) unit: usize,
    pub(crate) entry: usize,
}

/// A forward of one unit, from its `pre_forward` to its `post_backward`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct CallId(pub(crate) u64);

/// Passes each tensor of kept inputs through a map, runs the forward, and returns its tensors.
pub(crate) type Run<O> =
    Box<dyn FnOnce(&mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> O + Send>;

/// A forward to be run again, once.
pub(crate) struct KeptForward {
    pub(crate) run: Run<Vec<DispatchTensor>>,
    /// What it drew the first time.
    pub(crate) draws: Vec<Draw>,
}

impl fmt::Debug for KeptForward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptForward").field("draws", &self.draws.len()).finish_non_exhaustive()
    }
}

/// What hooks and parameters ask of a sharded model's schedule, whatever its backend.
pub(crate) trait Runtime: Debug + Send + Sync {
    /// Whether a hooked forward is under way: the first one reads the shards of all below it.
    fn is_open(&self) -> bool;
    /// Whether a field makes it a unit, so that its hooks stand around calls.
    fn is_field_unit(&self, unit: usize) -> bool;
    /// A shard read from the module, to gather from.
    fn collect(&self, place: ParamIndex, base: DispatchTensor);
    /// Starts a hooked forward; `None` within another one of the same unit.
    fn pre_forward(
        &self,
        unit: usize,
        inputs: Vec<DispatchTensor>,
    ) -> Result<Option<CallId>, Error>;
    /// An input of a unit's forward, as the unit's own code is to have it.
    fn map_input(&self, unit: usize, input: DispatchTensor) -> DispatchTensor;
    /// Whether a call is to record nothing, and run again in backward; it records nothing from here
    /// on. `inputs`: all that its forward takes.
    fn checkpoint(&self, call: CallId, inputs: Vec<DispatchTensor>) -> bool;
    /// An input of a checkpointed call, without its graph.
    fn detach_input(&self, call: CallId, input: DispatchTensor) -> DispatchTensor;
    /// What stands in for a detached input until backward: itself, unless it rests on the host.
    fn keep_input(&self, call: CallId, input: DispatchTensor) -> DispatchTensor;
    /// The forward of a checkpointed call has run; this runs it again.
    fn keep_forward(&self, call: CallId, forward: KeptForward);
    /// An output of the unit, made to unshard the unit before its gradient goes on.
    fn hook_output(self: Arc<Self>, call: CallId, output: DispatchTensor) -> DispatchTensor;
    /// Ends a hooked forward.
    fn post_forward(&self, call: CallId) -> Result<(), Error>;
    /// Ends a hooked forward that panicked.
    fn abandon(&self, call: CallId);
    /// The effective value of a parameter, given its base.
    fn materialize(
        self: Arc<Self>,
        place: ParamIndex,
        base: DispatchTensor,
    ) -> Result<DispatchTensor, Error>;
}

/// The reparameterization of a sharded parameter.
#[derive(Module, Debug)]
pub struct Sharded {
    #[module(skip)]
    pub(crate) runtime: Arc<dyn Runtime>,
    #[module(skip)]
    pub(crate) place: ParamIndex,
    /// The adapter of a parameter under LoRA, whose factors are sharded parameters themselves.
    pub(crate) lora: Option<LoraAdapter>,
    trace: Trace,
}

impl Reparameterization for Sharded {
    const NAME: &'static str = "fsdp";

    /// # Panics
    ///
    /// Unwinds with the [`Error`] where a collective fails; `launch` returns it.
    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let full = match self.runtime.clone().materialize(self.place, base.into_dispatch()) {
            Ok(value) => Tensor::from_dispatch(value),
            Err(error) => raise(error),
        };
        match &self.lora {
            Some(lora) => lora.apply(full),
            None => full,
        }
    }
}

impl Sharded {
    pub(crate) fn new(runtime: Arc<dyn Runtime>, place: ParamIndex) -> Self {
        let trace = Trace { runtime: runtime.clone(), place };
        Self { runtime, place, lora: None, trace }
    }

    /// With the adapter of a parameter under LoRA, its factors sharded already.
    pub(crate) fn with_lora(self, lora: LoraAdapter) -> Self {
        Self { lora: Some(lora), ..self }
    }

    /// The one whose parameter Burn's own traversal has just visited. Burn shows visitors the bare
    /// parameter, and what is attached to it as a module after it.
    pub(crate) fn visited() -> Option<Self> {
        let (runtime, place) = VISITED.take()?;
        Some(Self::new(runtime.upgrade()?, place))
    }

    /// The place of a parameter, where it is sharded.
    pub(crate) fn of<const D: usize>(param: &Param<Tensor<D>>) -> Option<&Self> {
        param.reparameterization::<Self>()
    }

    /// The LoRA adapter of a parameter, sharded or not.
    pub(crate) fn lora_of<const D: usize>(param: &Param<Tensor<D>>) -> Option<&LoraAdapter> {
        Self::of(param).and_then(|sharded| sharded.lora.as_ref()).or_else(|| param.adapter())
    }

    /// Attaches it to a parameter, in place of what the parameter has.
    pub(crate) fn put_on<const D: usize>(self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, base, mapper) = param.consume();
        Param::from_mapped_value(id, base, mapper).apply_reparameterization(Put(self))
    }
}

/// Attaches one reparameterization to one parameter.
struct Put(Sharded);

impl Reparameterizer for Put {
    type Reparam = Sharded;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Sharded>) {
        (param, Some(self.0.clone()))
    }
}

thread_local! {
    static VISITED: RefCell<Option<(Weak<dyn Runtime>, ParamIndex)>> = const { RefCell::new(None) };
}

/// A module without parameters that says when it is visited.
#[derive(Clone, Debug)]
struct Trace {
    runtime: Arc<dyn Runtime>,
    place: ParamIndex,
}

impl Module for Trace {
    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, _: &Device) -> Self {
        self
    }

    fn to_device(self, _: &Device) -> Self {
        self
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, _: &mut V) {
        VISITED.set(Some((Arc::downgrade(&self.runtime), self.place)));
    }

    fn map<M: ModuleMapper>(self, _: &mut M) -> Self {
        self
    }
}

impl ModuleDisplayDefault for Trace {
    fn content(&self, _: Content) -> Option<Content> {
        None
    }
}

impl ModuleDisplay for Trace {}
