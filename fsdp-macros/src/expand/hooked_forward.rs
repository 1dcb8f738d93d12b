//! Generation of `impl HookedForward`, by which the struct's checks find the hooks of the `impl`
//! block.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::ImplItemFn;

use super::own_types::OwnTypes;
use super::recompute;
use super::span::at;
use crate::parse::{ImplBlock, is_named};

/// Generates `impl HookedForward`, and checks of the hooked methods.
pub(super) fn implementation(block: &ImplBlock<'_>) -> TokenStream {
    let ty = &block.original.self_ty;
    let conditions = block.original.attrs.iter().filter(|attr| is_named(attr, &["cfg"]));
    let conditions = quote!(#(#conditions)*);
    let field_units = block.field_units.then(|| {
        quote!(
            const HOOKS_FIELD_UNITS: ::core::primitive::bool = true;
        )
    });
    let methods = methods(block);
    let outer = block.type_params();
    let forwards = methods.iter().map(|method| recompute::list_element(method, &outer));
    // A constant outside of the implementation does not see the parameters of a generic type.
    let checked = methods.iter().filter(|_| block.is_of_one_type());
    let checks = checked.flat_map(|method| recompute::checks(method, ty, &outer));
    let (generics, _, bounds) = block.original.generics.split_for_impl();
    quote_spanned! {at(ty)=>
        #conditions
        impl #generics __fsdp::HookedForward for #ty #bounds {
            #field_units
            const HOOKED: &'static [__fsdp::Forward] = {
                use __fsdp::Fallback as _;
                &[#(#forwards),*]
            };
        }
        #(#conditions #checks)*
    }
}

/// Generates the checks of the hooked methods of a further block, which another block's
/// `HookedForward` does not list.
pub(super) fn checks(block: &ImplBlock<'_>) -> TokenStream {
    if !block.is_of_one_type() {
        return TokenStream::new();
    }
    let ty = &block.original.self_ty;
    let conditions = block.original.attrs.iter().filter(|attr| is_named(attr, &["cfg"]));
    let conditions = quote!(#(#conditions)*);
    let methods = methods(block);
    let outer = block.type_params();
    let forwards = methods.iter().map(|method| recompute::list_element(method, &outer));
    let checks = methods.iter().flat_map(|method| recompute::further_checks(method, ty, &outer));
    quote_spanned! {at(ty)=>
        #conditions
        const __FSDP_HOOKED: &'static [__fsdp::Forward] = {
            use __fsdp::Fallback as _;
            &[#(#forwards),*]
        };
        #(#conditions #checks)*
    }
}

/// Returns the hooked methods, with signatures that mean the same outside of the block.
fn methods(block: &ImplBlock<'_>) -> Vec<ImplItemFn> {
    let mut own_types = OwnTypes::of(block.original);
    let qualified = |mut method: ImplItemFn| {
        if let Some(own_types) = &mut own_types {
            own_types.qualify_signature(&mut method.sig);
        }
        method
    };
    block.hooked().cloned().map(qualified).collect()
}
