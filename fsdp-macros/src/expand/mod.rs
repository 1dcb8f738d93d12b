//! Generated code: data and calls into the runtime crate, never algorithms.
//!
//! Everything except the hooked methods is in `const _: () = { .. };`. In generated code `__fsdp`
//! is the runtime's `__private`, and all other names that a user could see begin with `__fsdp_`.
//! Tokens that the compiler reports where the macro is used wrongly have the span of what the user
//! wrote.

mod const_checks;
mod expressions;
mod field_calls;
mod fsdp_module;
mod hooked_forward;
mod hooks;
mod inputs;
mod item;
mod layout;
mod own_types;
mod recompute;
mod references;
mod signature;
mod span;
mod traversal;
mod unit_value;

use proc_macro2::TokenStream;
use quote::quote;
use syn::Data;

use crate::parse::{CratePath, ImplBlock, Module, Value};

pub(crate) use item::without_own_attributes;

/// Generates the traits of a struct. After an error, when `is_valid` is false, only what other
/// items use is generated, without checks that could report more errors about the same mistake.
pub(crate) fn module(module: &Module<'_>, is_valid: bool) -> TokenStream {
    // A borrowing type implements nothing, since a module is `'static`.
    if module.is_also_a_unit() || module.original.generics.lifetimes().next().is_some() {
        return TokenStream::new();
    }
    let generated = match &module.original.data {
        Data::Union(_) => return TokenStream::new(),
        Data::Enum(_) => fsdp_module::opaque(module),
        Data::Struct(_) if !module.has_known_fields() || !is_valid && !module.is_one_type() => {
            fsdp_module::opaque(module)
        }
        Data::Struct(_) => {
            let layout = layout::constant(module);
            let methods = traversal::methods(module);
            let forwards = fsdp_module::forwards(module);
            if !module.is_one_type() {
                let checks = const_checks::checks_of_generic(module);
                let body = quote!(#layout #methods #forwards #checks);
                return in_const_block(
                    &module.crate_path,
                    fsdp_module::implementation(module, body),
                );
            }
            let body = quote!(#layout #methods);
            let implementation = fsdp_module::implementation_with(module, body, forwards);
            let burn_check = is_valid.then(|| const_checks::derives_burn_module(module));
            let checks = is_valid.then(|| const_checks::checks(module));
            quote!(#burn_check #implementation #checks)
        }
    };
    in_const_block(&module.crate_path, generated)
}

/// Generates an `impl` block with its hooks, and the trait that marks its type as hooked.
pub(crate) fn impl_block(block: &ImplBlock<'_>) -> TokenStream {
    let hooked = hooks::block(block);
    let generated = match block.more {
        true => hooked_forward::checks(block),
        false => hooked_forward::implementation(block),
    };
    let generated = in_const_block(&block.crate_path, generated);
    quote!(#hooked #generated)
}

/// Generates `impl UnitValue`.
pub(crate) fn unit_value(value: &Value<'_>) -> TokenStream {
    match &value.original.data {
        Data::Union(_) => TokenStream::new(),
        Data::Struct(_) | Data::Enum(_) => {
            in_const_block(&value.crate_path, unit_value::implementation(value.original))
        }
    }
}

fn in_const_block(crate_path: &CratePath, generated: TokenStream) -> TokenStream {
    let import = crate_path.import();
    quote! {
        const _: () = {
            #import
            #generated
        };
    }
}
