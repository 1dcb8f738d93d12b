//! Rules on an `impl` block under `#[fsdp_unit]` and its `forward` methods.

use quote::ToTokens;

use crate::errors::Errors;
use crate::parse::{FORWARD, Forward, ImplBlock, Receiver};

/// Checks that the block is not one of a trait. A hooked method's body moves to a second method,
/// which a trait's block cannot contain.
pub(super) fn is_inherent(block: &ImplBlock<'_>, errors: &mut Errors) {
    if let Some((_, path, _)) = &block.original.trait_ {
        let ty = block.original.self_ty.to_token_stream();
        errors.push(
            path,
            format!(
                "`#[fsdp_unit]` cannot hook the methods of a trait; write it above `impl {ty}`, with \
                 a `forward` there that this trait's method calls"
            ),
        );
    }
}

/// Checks that the block is of one type, since a unit's layout is a constant.
pub(super) fn is_not_generic(block: &ImplBlock<'_>, errors: &mut Errors) {
    if !block.is_of_one_type() {
        errors.push(
            &block.original.generics.params,
            "a unit cannot be generic; write this block for one type, and one struct for each if \
             there are several",
        );
    }
}

/// Checks that `forward` takes `&self`. The hooks read the unit's shards from outside, while other
/// code may refer to the unit too.
pub(super) fn takes_shared_self(forward: &Forward<'_>, errors: &mut Errors) {
    let sig = &forward.original.sig;
    if sig.ident != FORWARD {
        return;
    }
    match forward.receiver {
        Receiver::Shared => {}
        Receiver::Exclusive => errors.push(
            sig.receiver(),
            "`forward` must take `&self`, not `&mut self`: a unit's parameters must not change \
             while it runs; keep what changes in an argument, a return value or a `Mutex`",
        ),
        Receiver::Owned => errors.push(
            sig.receiver(),
            "`forward` must take `&self`, not the unit itself: the backward needs the unit's \
             parameters again",
        ),
        Receiver::Absent => errors.push(
            &sig.ident,
            "`forward` must take `&self`, because its hooks gather the parameters of `self`; give a \
             function that uses no parameters another name",
        ),
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
    let is_reported = |forward: &Forward<'_>| {
        forward.receiver == Receiver::Shared || forward.original.sig.ident == FORWARD
    };
    if block.takes_hooks() && !block.forwards.iter().any(is_reported) {
        errors.push(
            &block.original.self_ty,
            "no method here can be hooked; write `#[fsdp_unit]` above the `impl` block that holds \
             `pub fn forward(&self, ..)`, or another method named `forward_..` that takes `&self`",
        );
    }
}
