//! The hooks around the call of a *field unit*: a module whose type is not under `#[fsdp_unit]`, as
//! it is another crate's, in a field under `#[fsdp(unit)]`.
//!
//! Its `forward` cannot be annotated, so `#[fsdp_unit(field_units)]` puts the hooks around the calls
//! in an `impl` block: which unit the receiver is, its inputs as they are evaluated, `pre_forward`
//! when the last of them is there, `post_forward` on what the call returns. A receiver that is no
//! field unit is called as ever. So is a field unit that is called elsewhere: its parameters are then
//! gathered one by one, each into memory of its own.

use std::any::type_name;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Reparameterization};

use crate::error::ScheduleError;
use crate::error::raise;
use crate::module::UnitValue;
use crate::module::{Runtime, Sharded};
use crate::runtime::hooks::{Call, Inputs, MapInputs, Open, map_input, post_forward};

/// One call of a method in a block under `#[fsdp_unit(field_units)]`.
#[derive(Debug)]
pub struct FieldCall {
    /// The field unit that the receiver is.
    unit: Option<(Arc<dyn Runtime>, usize)>,
    module: &'static str,
    inputs: Inputs,
    call: Call,
}

impl FieldCall {
    fn of<M: Module>(module: &M) -> Self {
        let mut owner = Owner::None;
        module.visit(&mut owner);
        let unit = match owner {
            // Outside of any hooked forward nobody has read the shards.
            Owner::Unit(runtime, unit) if runtime.is_field_unit(unit) && runtime.is_open() => {
                Some((runtime, unit))
            }
            _ => None,
        };
        Self { unit, module: type_name::<M>(), ..Self::none() }
    }

    fn none() -> Self {
        Self { unit: None, module: "", inputs: Inputs::default(), call: Call(None) }
    }

    /// Shows an input.
    pub fn input(&mut self, collect: impl FnOnce(&mut Inputs)) {
        if self.unit.is_some() {
            collect(&mut self.inputs);
        }
    }

    /// Unshards the unit.
    ///
    /// # Panics
    ///
    /// Unwinds with the typed error where a collective fails.
    pub fn pre_forward(&mut self) {
        let Some((runtime, unit)) = &self.unit else { return };
        match runtime.pre_forward(*unit, std::mem::take(&mut self.inputs.0)) {
            Ok(id) => {
                let (runtime, unit) = (runtime.clone(), *unit);
                self.call = Call(id.map(|id| Open { runtime, unit, id }));
            }
            Err(error) => raise(error),
        }
    }
}

/// An input is mapped where it is evaluated, which may be before `pre_forward`.
impl MapInputs for FieldCall {
    fn map_input<T: UnitValue>(&self, input: T) -> T {
        match &self.unit {
            Some((runtime, unit)) => map_input(&**runtime, *unit, input),
            None => input,
        }
    }
}

/// The unit that all parameters of a module belong to.
enum Owner {
    None,
    Unit(Arc<dyn Runtime>, usize),
    Several,
}

impl ModuleVisitor for Owner {
    fn exit_module(&mut self, name: &str, container: &str) {
        if container != "Reparameterization" || name != Sharded::NAME {
            return;
        }
        let Some(Sharded { runtime, place, .. }) = Sharded::visited() else { return };
        match self {
            Self::None => *self = Self::Unit(runtime, place.unit),
            Self::Unit(_, unit) if *unit == place.unit => {}
            _ => *self = Self::Several,
        }
    }
}

/// The receiver of a call. Generated code calls `field_call` on four references to it: for a module
/// that finds [`CallModule`], for a reference to one [`CallReference`], for a reference to that
/// [`CallElement`], and for any other type [`CallOther`], each one reference further away.
#[derive(Debug)]
pub struct Receiver<'a, T: ?Sized>(pub &'a T);

/// Modules.
pub trait CallModule {
    /// The call, before its inputs are evaluated.
    fn field_call(&self) -> FieldCall;
}

impl<M: Module> CallModule for &&&Receiver<'_, M> {
    fn field_call(&self) -> FieldCall {
        FieldCall::of(self.0)
    }
}

/// References to modules, as loops have them.
pub trait CallReference {
    /// The call, before its inputs are evaluated.
    fn field_call(&self) -> FieldCall;
}

impl<M: Module> CallReference for &&Receiver<'_, &M> {
    fn field_call(&self) -> FieldCall {
        FieldCall::of(*self.0)
    }
}

/// References to references, as the closures of an iterator may have them.
pub trait CallElement {
    /// The call, before its inputs are evaluated.
    fn field_call(&self) -> FieldCall;
}

impl<M: Module> CallElement for &Receiver<'_, &&M> {
    fn field_call(&self) -> FieldCall {
        FieldCall::of(**self.0)
    }
}

/// Anything else.
pub trait CallOther {
    /// A call without hooks.
    fn field_call(&self) -> FieldCall;
}

impl<T: ?Sized> CallOther for Receiver<'_, T> {
    fn field_call(&self) -> FieldCall {
        FieldCall::none()
    }
}

/// What a call returned. Generated code calls `kind` on a reference to it: for a [`UnitValue`] that
/// finds [`ReturnsValue`], for any other type [`ReturnsOther`], one reference further away.
#[derive(Debug)]
pub struct Output<'a, T>(pub &'a T);

/// Outputs whose tensors are known.
pub trait ReturnsValue {
    /// How the call ends.
    fn kind(&self) -> Value;
}

impl<T: UnitValue> ReturnsValue for Output<'_, T> {
    fn kind(&self) -> Value {
        Value
    }
}

/// Outputs of any other type.
pub trait ReturnsOther {
    /// How the call ends.
    fn kind(&self) -> Opaque;
}

impl<T> ReturnsOther for &Output<'_, T> {
    fn kind(&self) -> Opaque {
        Opaque
    }
}

/// A call that returns a [`UnitValue`].
#[derive(Debug)]
pub struct Value;

impl Value {
    /// Reshards the unit, and makes its output's gradient unshard it again.
    ///
    /// # Panics
    ///
    /// Unwinds with the typed error where a collective fails.
    pub fn post_forward<O: UnitValue>(self, call: FieldCall, output: O) -> O {
        post_forward(call.call, output)
    }
}

/// A call that returns what FSDP does not know the tensors of.
#[derive(Debug)]
pub struct Opaque;

impl Opaque {
    /// Nothing, unless the call was one of a field unit.
    ///
    /// # Panics
    ///
    /// Unwinds with [`ScheduleError::OpaqueOutput`] after the call of a field unit: its backward
    /// would not unshard it.
    pub fn post_forward<O>(self, call: FieldCall, output: O) -> O {
        if call.call.0.is_some() {
            let (module, output) = (call.module, type_name::<O>());
            raise(ScheduleError::OpaqueOutput { module, output }.into());
        }
        output
    }
}
