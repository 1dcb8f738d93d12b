//! Generation of `visit_params` and `map_params`, which read and rebuild a struct's fields in
//! layout order.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::Index;

use super::span::at;
use crate::parse::{Content, Field, Module};

/// Generates `visit_params` and `map_params`, with one call for each field.
pub(super) fn methods(module: &Module<'_>) -> TokenStream {
    let reads = module.layout_fields().enumerate().map(|(index, field)| read(field, index));
    let mut indices = 0..;
    let rebuilt = module.fields.iter().map(|field| {
        let member = &field.member;
        let value = match field.content.is_in_layout() {
            true => rebuild(field, indices.next().unwrap_or_default()),
            false => quote!(self.#member),
        };
        quote!(#member: #value)
    });
    quote! {
        fn visit_params<__V: __fsdp::ParamVisitor>(&self, __fsdp_visitor: &mut __V) {
            let __fsdp_children = Self::LAYOUT.children;
            #(#reads)*
        }

        fn map_params<__M: __fsdp::ParamMapper>(self, __fsdp_mapper: &mut __M) -> Self {
            let __fsdp_children = Self::LAYOUT.children;
            Self { #(#rebuilt),* }
        }
    }
}

/// Reads a field; `index` is its place in the layout. For a field under `unit, leaf`, the runtime
/// decides by the field's type whether it is a list of units.
fn read(field: &Field<'_>, index: usize) -> TokenStream {
    let (member, index) = (&field.member, Index::from(index));
    if let (Content::Leaf, Some(_)) = (field.content, &field.unit) {
        return quote! {{
            use __fsdp::SingleUnit as _;
            __fsdp::LeafUnits(&self.#member).visit_units(&__fsdp_children[#index], __fsdp_visitor);
        }};
    }
    let visit = function(field, quote!(visit_leaf_field), quote!(visit_field));
    quote!(#visit(&self.#member, &__fsdp_children[#index], __fsdp_visitor);)
}

/// Rebuilds a field; `index` is its place in the layout.
fn rebuild(field: &Field<'_>, index: usize) -> TokenStream {
    let (member, index) = (&field.member, Index::from(index));
    let map = function(field, quote!(map_leaf_field), quote!(map_field));
    quote!(#map(self.#member, &__fsdp_children[#index], __fsdp_mapper))
}

/// Returns the function that handles a field: `leaf` for a leaf, else `method` of the field's type.
/// The method is reached through the same path as the field's `LAYOUT`, so that the compiler
/// reports an unknown type once.
fn function(field: &Field<'_>, leaf: TokenStream, method: TokenStream) -> TokenStream {
    let ty = &field.original.ty;
    match field.content {
        Content::Leaf => quote!(__fsdp::#leaf),
        _ => quote_spanned!(at(ty)=> <#ty as __fsdp::FsdpModule>::#method),
    }
}
