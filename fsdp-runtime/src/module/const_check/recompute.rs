//! Rule: the hooked methods of a unit under `#[fsdp_unit(checkpoint)]` can be recomputed.

use super::text::{Text, same};
use crate::error::NotRecomputable;
use crate::module::{Forward, HookedForward, Kind, Node};

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

/// Returns the reason why the value behind a reference cannot be kept until backward: its type has no
/// clones that can be kept, or its layout has a parameter. `layout` is `None` for a type that is not an
/// `FsdpModule`.
pub const fn not_kept(can_be_cloned: bool, layout: Option<&Node>) -> Option<NotRecomputable> {
    match layout {
        _ if !can_be_cloned => Some(NotRecomputable::Borrowed),
        Some(layout) if holds_parameters(layout) => Some(NotRecomputable::Parameters),
        _ => None,
    }
}

/// Returns whether a float parameter or a unit is in a layout tree. The content of a leaf is unknown
/// here: a leaf counts as having none, and is looked at when it is kept.
const fn holds_parameters(node: &Node) -> bool {
    if node.is_unit() || matches!(node.kind, Kind::Param { .. }) {
        return true;
    }
    let mut i = 0;
    while i < node.children.len() {
        if holds_parameters(node.children[i].node) {
            return true;
        }
        i += 1;
    }
    false
}
