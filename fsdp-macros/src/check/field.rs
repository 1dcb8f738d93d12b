//! Rules on a field of a module.

use crate::errors::Errors;
use crate::parse::{Content, Field};

/// Checks that a field of a unit is not under `#[cfg]`. `#[fsdp_unit]` sees a field before the
/// compiler has evaluated its `#[cfg]`. (A derive macro sees only the fields that remain.)
pub(super) fn is_unconditional(field: &Field<'_>, errors: &mut Errors) {
    if let Some(condition) = field.condition() {
        errors.push(
            condition,
            "a field of a unit cannot depend on a `#[cfg]`; move the field into a struct under \
             `#[derive(Module, FsdpModule)]`, where `#[cfg]` is allowed, and hold that struct here",
        );
    }
}

/// Checks that a field has not both `#[module(skip)]` and `leaf` or `unit`. These two need a
/// module, which `#[module(skip)]` hides from Burn.
pub(super) fn has_one_role(field: &Field<'_>, errors: &mut Errors) {
    if field.content != Content::Skipped {
        return;
    }
    for (argument, name) in [(&field.leaf, "leaf"), (&field.unit, "unit")] {
        if let Some(argument) = argument {
            errors.push(
                argument,
                format!(
                    "`{name}` and `#[module(skip)]` exclude each other: Burn never visits a skipped \
                     field; keep `{name}` if the field holds parameters, else `#[module(skip)]`"
                ),
            );
        }
    }
}

/// Checks that a field with a key, `leaf` or `unit` has parameters. A field that is not part of the
/// layout has none.
pub(super) fn has_parameters_for_its_arguments(field: &Field<'_>, errors: &mut Errors) {
    let what = match field.content {
        Content::Skipped => "a field under `#[module(skip)]`",
        Content::Constant => "a plain value",
        Content::Module | Content::Leaf => return,
    };
    if let Some(key) = &field.key {
        errors.push(key, format!("{what} has no parameters to name; remove this key"));
    }
    if let (Some(leaf), Content::Constant) = (&field.leaf, field.content) {
        errors.push(leaf, format!("{what} has no parameters; remove `leaf`"));
    }
    if let (Some(unit), Content::Constant) = (&field.unit, field.content) {
        errors.push(unit, format!("{what} has no parameters to gather; remove `unit`"));
    }
}
