//! Generation of `impl HookedForward`, by which the struct's checks find the hooks of the `impl`
//! block.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};

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
    let forwards = block.hooked().map(recompute::description);
    let checks = block.hooked().flat_map(|method| recompute::checks(method, ty));
    quote_spanned! {at(ty)=>
        #conditions
        impl __fsdp::HookedForward for #ty {
            #field_units
            const HOOKED: &'static [__fsdp::Forward] = {
                use __fsdp::Fallback as _;
                &[#(#forwards),*]
            };
        }
        #(#conditions #checks)*
    }
}
