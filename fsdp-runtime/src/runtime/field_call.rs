//! The hooks around the call of a *field unit*: a module in a field under `#[fsdp(unit)]`, whose
//! own type is not under `#[fsdp_unit]`, for example because it is from another crate.
//!
//! The `forward` of such a module cannot be annotated. `#[fsdp_unit(field_units)]` therefore hooks
//! the calls in an `impl` block. The code around a call finds the unit of the receiver and collects
//! the inputs as they are evaluated. It calls `pre_forward` after the last input, and passes the
//! result to `post_forward`. A call is not changed if the receiver is no field unit. If a field
//! unit is called outside of such a block, its parameters are gathered one by one, each into new
//! memory.

use std::any::type_name;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Reparameterization};

use super::hooks::{Call, post_forward};
use super::values::{Inputs, KnownTensors, MapInputs, UnknownTensors, map_input, refuse_input};
use crate::error::{ScheduleError, raise};
use crate::module::{Runtime, Sharded, UnitValue};

/// One call of a method in a block under `#[fsdp_unit(field_units)]`.
#[derive(Debug)]
pub struct FieldCall {
    /// Schedule and index of the receiver's unit; `None` if the receiver is not a field unit.
    unit: Option<(Arc<dyn Runtime>, usize)>,
    /// Parameters of the receiver, by their numbers in the unit.
    params: Vec<usize>,
    /// Type of the receiver, for messages.
    module: &'static str,
    inputs: Inputs,
    call: Call,
}

impl FieldCall {
    /// Creates the call of a method of `module`.
    fn of<M: Module>(module: &M) -> Self {
        let mut owner = Owner::None;
        module.visit(&mut owner);
        let (unit, params) = match owner {
            // Outside of any hooked forward no shards were registered.
            Owner::Unit(runtime, unit, params)
                if runtime.is_field_unit(unit) && runtime.in_forward() =>
            {
                (Some((runtime, unit)), params)
            }
            _ => (None, Vec::new()),
        };
        Self { unit, params, module: type_name::<M>(), ..Self::none() }
    }

    /// Creates a call without hooks.
    fn none() -> Self {
        let (inputs, call) = (Inputs::default(), Call(None));
        Self { unit: None, params: Vec::new(), module: "", inputs, call }
    }

    /// Collects the tensors of an input.
    pub fn input(&mut self, collect: impl FnOnce(&mut Inputs)) {
        if self.unit.is_some() {
            collect(&mut self.inputs);
        }
    }

    /// Gathers the receiver's unit, if it is one.
    ///
    /// # Panics
    ///
    /// Unwinds with the typed error if a collective fails.
    pub fn pre_forward(&mut self) {
        let Some((runtime, unit)) = &self.unit else { return };
        let inputs = std::mem::take(&mut self.inputs);
        self.call = Call::start(runtime.clone(), *unit, &self.params, inputs);
    }
}

/// Casts each input where it is evaluated, which may be before `pre_forward`.
impl MapInputs for FieldCall {
    fn map_input<T: UnitValue>(&self, input: T) -> T {
        match &self.unit {
            Some((runtime, unit)) => map_input(&**runtime, *unit, input),
            None => input,
        }
    }

    fn refuse_input(&self, ty: &'static str) {
        if let Some((runtime, unit)) = &self.unit {
            refuse_input(&**runtime, *unit, ty);
        }
    }
}

/// The unit that owns all parameters of a module.
enum Owner {
    /// The module has no sharded parameter.
    None,
    /// One unit owns all sharded parameters of the module, which have these numbers in the unit.
    Unit(Arc<dyn Runtime>, usize, Vec<usize>),
    /// Several units own the sharded parameters of the module.
    Several,
}

impl ModuleVisitor for Owner {
    fn exit_module(&mut self, name: &str, container: &str) {
        if container != "Reparameterization" || name != Sharded::NAME {
            return;
        }
        let Some(Sharded { runtime, index, .. }) = Sharded::visited() else { return };
        match self {
            Self::None => *self = Self::Unit(runtime, index.unit, vec![index.param]),
            Self::Unit(_, unit, params) if *unit == index.unit => params.push(index.param),
            _ => *self = Self::Several,
        }
    }
}

/// The receiver of a call.
///
/// Generated code calls `field_call` on four references to this struct. Method resolution finds
/// [`CallModule`] for a module, [`CallReference`] for a reference to a module, and [`CallElement`]
/// for a reference to such a reference. It finds [`CallOther`] for any other type. Each trait takes
/// one reference less than the one before.
#[derive(Debug)]
pub struct Receiver<'a, T: ?Sized>(pub &'a T);

/// Receivers that are modules.
pub trait CallModule {
    /// Starts the call, before the inputs are evaluated.
    fn field_call(&self) -> FieldCall;
}

impl<M: Module> CallModule for &&&Receiver<'_, M> {
    fn field_call(&self) -> FieldCall {
        FieldCall::of(self.0)
    }
}

/// Receivers that are references to modules, such as the variable of a loop.
pub trait CallReference {
    /// Starts the call, before the inputs are evaluated.
    fn field_call(&self) -> FieldCall;
}

impl<M: Module> CallReference for &&Receiver<'_, &M> {
    fn field_call(&self) -> FieldCall {
        FieldCall::of(*self.0)
    }
}

/// Receivers that are references to references, such as the argument of an iterator's closure.
pub trait CallElement {
    /// Starts the call, before the inputs are evaluated.
    fn field_call(&self) -> FieldCall;
}

impl<M: Module> CallElement for &Receiver<'_, &&M> {
    fn field_call(&self) -> FieldCall {
        FieldCall::of(**self.0)
    }
}

/// Receivers of any other type.
pub trait CallOther {
    /// Starts a call without hooks.
    fn field_call(&self) -> FieldCall;
}

impl<T: ?Sized> CallOther for Receiver<'_, T> {
    fn field_call(&self) -> FieldCall {
        FieldCall::none()
    }
}

impl KnownTensors {
    /// Reshards the unit, and hooks the output so that the output's gradient gathers the unit
    /// again.
    ///
    /// # Panics
    ///
    /// Unwinds with the typed error if a collective fails.
    pub fn post_forward<O: UnitValue>(self, call: FieldCall, output: O) -> O {
        post_forward(call.call, output)
    }
}

impl UnknownTensors {
    /// Returns the output unchanged, unless the receiver is a field unit.
    ///
    /// # Panics
    ///
    /// Unwinds with [`ScheduleError::OpaqueOutput`] after the call of a field unit: the output's
    /// gradient could not gather the unit.
    pub fn post_forward<O>(self, call: FieldCall, output: O) -> O {
        if call.call.0.is_some() {
            let (module, output) = (call.module, type_name::<O>());
            raise(ScheduleError::OpaqueOutput { module, output }.into());
        }
        output
    }
}
