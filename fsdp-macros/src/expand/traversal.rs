//! `walk` and `attach`: a read and a rebuild of a struct's fields in layout order.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::Index;

use super::span::at;
use crate::parse::{Content, Field, Module};

/// Generates `walk` and `attach`, with one call for each field.
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
        fn walk<__W: __fsdp::Walk>(&self, __fsdp_walk: &mut __W) {
            let __fsdp_children = Self::LAYOUT.children;
            #(#reads)*
        }

        fn attach<__A: __fsdp::Attach>(self, __fsdp_attach: &mut __A) -> Self {
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
            __fsdp::LeafUnits(&self.#member).walk(&__fsdp_children[#index], __fsdp_walk);
        }};
    }
    let walk = function(field, quote!(walk_leaf), quote!(walk_field));
    quote!(#walk(&self.#member, &__fsdp_children[#index], __fsdp_walk);)
}

/// Rebuilds a field; `index` is its place in the layout.
fn rebuild(field: &Field<'_>, index: usize) -> TokenStream {
    let (member, index) = (&field.member, Index::from(index));
    let attach = function(field, quote!(attach_leaf), quote!(attach_field));
    quote!(#attach(self.#member, &__fsdp_children[#index], __fsdp_attach))
}

/// Returns the function that handles a field: `leaf` for a leaf, else `method` of the field's type.
/// The method is reached through the same path as the field's `LAYOUT`, so that the compiler reports
/// an unknown type once.
fn function(field: &Field<'_>, leaf: TokenStream, method: TokenStream) -> TokenStream {
    let ty = &field.original.ty;
    match field.content {
        Content::Leaf => quote!(__fsdp::#leaf),
        _ => quote_spanned!(at(ty)=> <#ty as __fsdp::FsdpModule>::#method),
    }
}
