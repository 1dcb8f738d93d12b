//! Whether the hooked methods of a unit can be run again, as `#[fsdp_unit(checkpoint)]` asks.

use super::Probe;
use super::text::{Text, same};
use crate::error::NotRecomputable;
use crate::module::UnitValue;
use crate::module::{Forward, HookedForward};

/// An input of a unit under `#[fsdp_unit(checkpoint)]` must be there again in backward.
#[track_caller]
pub const fn can_be_recomputed<U: HookedForward>(forward: &str, input: &str) {
    if !U::CHECKPOINT {
        return;
    }
    if let Some(obstacle) = obstacle(U::HOOKED, forward, input) {
        Text::new("unit ")
            .code(U::LAYOUT.ty)
            .then(" is under `#[fsdp_unit(checkpoint)]`, but ")
            .code(input)
            .then(" of its ")
            .code(forward)
            .then(" ")
            .then(obstacle.advice())
            .fail();
    }
}

const fn obstacle(forwards: &[Forward], forward: &str, input: &str) -> Option<NotRecomputable> {
    let mut i = 0;
    while i < forwards.len() {
        let Forward { name, inputs } = forwards[i];
        let mut j = 0;
        while same(name, forward) && j < inputs.len() {
            if same(inputs[j].0, input) {
                return inputs[j].1;
            }
            j += 1;
        }
        i += 1;
    }
    None
}

impl<T: UnitValue + Clone + Send + 'static> Probe<T> {
    /// Nothing: a value of the type can be kept until backward.
    pub const NOT_RECOMPUTABLE: Option<NotRecomputable> = None;
}

/// What [`Probe`] finds for a type whose values cannot be kept until backward.
pub trait MayNotRecompute {
    /// Why.
    const NOT_RECOMPUTABLE: Option<NotRecomputable> = Some(NotRecomputable::Unknown);
}

impl<T: ?Sized> MayNotRecompute for Probe<T> {}

/// What [`Probe`] finds for a struct without a block of hooks.
pub trait NotHooked {
    /// Nothing.
    const HOOKED: &'static [Forward] = &[];
}

impl<T: ?Sized> NotHooked for Probe<T> {}

impl<T: HookedForward> Probe<T> {
    /// The hooked methods.
    pub const HOOKED: &'static [Forward] = T::HOOKED;
}
