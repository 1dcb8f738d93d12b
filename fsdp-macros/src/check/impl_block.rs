//! Rules on an `impl` block under `#[fsdp_unit]` and its `forward` methods.

use crate::errors::Errors;
use crate::parse::{Forward, ImplBlock, Receiver, is_forward};

/// Checks that `forward`, and a method under `#[fsdp(forward)]`, takes `&self`. The hooks read the
/// unit's shards from outside, while other code may refer to the unit too.
pub(super) fn takes_shared_self(forward: &Forward<'_>, errors: &mut Errors) {
    let sig = &forward.original.sig;
    if !forward.is_required() {
        return;
    }
    let name = &sig.ident;
    match forward.receiver {
        Receiver::Shared => {}
        Receiver::Exclusive => errors.push(
            sig.receiver(),
            format!(
                "`{name}` must take `&self`, not `&mut self`: a unit's parameters must not change \
                 while it runs; keep what changes in an argument, a return value or a `Mutex`"
            ),
        ),
        Receiver::Owned => errors.push(
            sig.receiver(),
            format!(
                "`{name}` must take `&self`, not the unit itself: the backward needs the unit's \
                 parameters again"
            ),
        ),
        Receiver::Absent if forward.marked.is_some() => errors.push(
            &sig.ident,
            format!(
                "`{name}` must take `&self`, because its hooks gather the parameters of `self`; \
                 remove `#[fsdp(forward)]` from a function that uses no parameters"
            ),
        ),
        Receiver::Absent => errors.push(
            &sig.ident,
            "`forward` must take `&self`, because its hooks gather the parameters of `self`; give a \
             function that uses no parameters another name",
        ),
    }
}

/// Checks that `#[fsdp(forward)]` is not on a method that is hooked by its name.
pub(super) fn is_not_marked_twice(forward: &Forward<'_>, errors: &mut Errors) {
    let name = forward.original.sig.ident.to_string();
    if let Some(marked) = forward.marked.as_ref().filter(|_| is_forward(&name)) {
        let message = format!("`{name}` is hooked by its name; remove `#[fsdp(forward)]`");
        errors.push(marked, message);
    }
}

/// Checks that a hooked method is neither `async` nor `const`. The hooks run once before and once
/// after the body, on the calling thread.
pub(super) fn is_neither_async_nor_const(forward: &Forward<'_>, errors: &mut Errors) {
    let sig = &forward.original.sig;
    if forward.receiver != Receiver::Shared {
        return;
    }
    let name = &sig.ident;
    if let Some(keyword) = &sig.asyncness {
        errors.push(
            keyword,
            format!(
                "`{name}` of a unit cannot be `async`, because its parameters would be freed before \
                 it has run; remove `async`, and await outside of it"
            ),
        );
    }
    if let Some(keyword) = &sig.constness {
        errors.push(
            keyword,
            format!(
                "`{name}` of a unit cannot be `const`, because it gathers parameters; remove `const`"
            ),
        );
    }
}

/// Checks that the block has a hooked method. Without one the attribute would have no effect. A
/// `forward` with the wrong receiver is reported by [`takes_shared_self`].
pub(super) fn has_a_hooked_method(block: &ImplBlock<'_>, errors: &mut Errors) {
    let is_reported =
        |forward: &Forward<'_>| forward.receiver == Receiver::Shared || forward.is_required();
    if !block.forwards.iter().any(is_reported) {
        errors.push(
            &block.original.self_ty,
            "no method here can be hooked; write `#[fsdp_unit]` above the `impl` block that holds \
             `pub fn forward(&self, ..)`, or another method named `forward_..` or under \
             `#[fsdp(forward)]` that takes `&self`",
        );
    }
}
