//! Rule: the hooked methods of a unit under `#[fsdp_unit(checkpoint)]` can be recomputed.

use super::text::{Text, same};
use crate::error::NotRecomputable;
use crate::module::{Forward, HookedForward};

/// Checks that an input of a unit under `#[fsdp_unit(checkpoint)]` can be saved until backward.
/// `hooked` are the hooked methods of the block that has the method `forward`.
#[track_caller]
pub const fn can_be_recomputed<U: HookedForward>(hooked: &[Forward], forward: &str, input: &str) {
    if !U::RECOMPUTED {
        return;
    }
    if let Some(reason) = reason(hooked, forward, input) {
        Text::new("unit ")
            .code(U::LAYOUT.ty)
            .then(" is under `#[fsdp_unit(checkpoint)]`, but ")
            .code(input)
            .then(" of its ")
            .code(forward)
            .then(" ")
            .then(reason.advice())
            .fail();
    }
}

/// Returns the reason why `input` of the method `forward` cannot be saved; `None` if it can be
/// saved.
const fn reason(forwards: &[Forward], forward: &str, input: &str) -> Option<NotRecomputable> {
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
