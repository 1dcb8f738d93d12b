//! Questions that a constant asks of a type: does it implement a trait, and if so, what is a
//! constant of that trait?

use core::marker::PhantomData;

pub use burn::module::Module as BurnModule;

use crate::error::NotRecomputable;
use crate::module::{Forward, FsdpModule, HookedForward, Node, UnitValue};

/// A type under `#[derive(Module)]`. Generated code requires it before the traits that depend on
/// it, so that the compiler shows the message below.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a Burn module",
    label = "no `#[derive(Module)]` on this type",
    note = "write `#[derive(Module, Debug)]` on it, above `#[fsdp_unit]` where that is written"
)]
pub trait DerivesModule {}

#[diagnostic::do_not_recommend]
impl<M: BurnModule> DerivesModule for M {}

/// Query of a constant of the type `T`, which may or may not have it.
///
/// `Probe::<T>::LAYOUT` is the inherent constant below if `T` is an [`FsdpModule`], and otherwise
/// the one of [`Fallback`], as inherent constants take precedence over those of traits. The other
/// constants work in the same way.
pub struct Probe<T: ?Sized>(PhantomData<T>);

impl<T: FsdpModule> Probe<T> {
    /// Layout of the type.
    pub const LAYOUT: Option<&'static Node> = Some(&T::LAYOUT);
}

impl<T: HookedForward> Probe<T> {
    /// Hooked methods of the unit.
    pub const HOOKED: &'static [Forward] = T::HOOKED;
}

impl<T: UnitValue + Clone + Send + 'static> Probe<T> {
    /// `None`: values of the type can be saved until backward.
    pub const NOT_RECOMPUTABLE: Option<NotRecomputable> = None;
}

impl<T: Clone + Send + 'static> Probe<T> {
    /// `true`: a clone of a value of the type can be kept until backward.
    pub const CAN_BE_CLONED: bool = true;
}

/// The constants of [`Probe`] for a type that lacks the trait in question.
pub trait Fallback {
    /// `None`: the type is not an [`FsdpModule`].
    const LAYOUT: Option<&'static Node> = None;
    /// Empty: the type has no block of hooks.
    const HOOKED: &'static [Forward] = &[];
    /// The reason why values of the type cannot be saved until backward.
    const NOT_RECOMPUTABLE: Option<NotRecomputable> = Some(NotRecomputable::Unknown);
    /// `false`: values of the type cannot be cloned, sent to other threads, or kept for any time.
    const CAN_BE_CLONED: bool = false;
}

impl<T: ?Sized> Fallback for Probe<T> {}
