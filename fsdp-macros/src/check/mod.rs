//! Rules that one annotated item must obey on its own, one function each.
//!
//! Rules that need the layout of other types are `const` checks in the runtime crate.

mod field;
mod group;
mod impl_block;
mod module;
mod split;
mod tie;
mod unit_value;

use proc_macro2::Span;

use crate::errors::Errors;
use crate::parse::{ImplBlock, Module, Value};

/// Checks a struct under `#[fsdp_unit]` or `#[derive(FsdpModule)]`.
pub(crate) fn module(module: &Module<'_>, errors: &mut Errors) {
    module::is_a_struct(module, errors);
    module::has_bounds(module, errors);
    module::has_macros_in_order(module, errors);
    for field in &module.fields {
        field::is_unconditional(field, errors);
        field::has_one_role(field, errors);
        field::has_parameters_for_its_arguments(field, errors);
    }
    module::has_distinct_keys(module, errors);
    group::are_valid(module, errors);
    split::are_valid(module, errors);
    tie::are_valid(module, errors);
}

/// Checks an `impl` block under `#[fsdp_unit]`.
pub(crate) fn impl_block(block: &ImplBlock<'_>, errors: &mut Errors) {
    for forward in &block.forwards {
        impl_block::takes_shared_self(forward, errors);
        impl_block::is_not_marked_twice(forward, errors);
        impl_block::is_neither_async_nor_const(forward, errors);
    }
    impl_block::has_a_hooked_method(block, errors);
}

/// Checks a type under `#[derive(UnitValue)]`.
pub(crate) fn unit_value(value: &Value<'_>, errors: &mut Errors) {
    unit_value::is_not_a_union(value, errors);
    unit_value::has_no_field_arguments(value, errors);
}

/// Reports `#[fsdp_unit]` on an item that is neither a type nor an `impl` block.
pub(crate) fn misplaced_unit(errors: &mut Errors) {
    errors.add(syn::Error::new(
        Span::call_site(),
        "`#[fsdp_unit]` belongs on a struct, below `#[derive(Module)]`, and on the `impl` block that \
         holds the struct's `forward`",
    ));
}
