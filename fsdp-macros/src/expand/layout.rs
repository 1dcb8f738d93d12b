//! `LAYOUT`: the static layout tree of a struct.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};

use super::span::at;
use crate::parse::{Content, Field, Module, Split, Tie, Unit};

/// Generates `const LAYOUT: Node = ..;`.
pub(super) fn constant(module: &Module<'_>) -> TokenStream {
    let name = module.original.ident.to_string();
    let kind = match module.unit {
        Some(Unit { root, .. }) => quote!(__fsdp::Kind::Unit { root: #root }),
        None => quote!(__fsdp::Kind::Module),
    };
    let children = module.layout_fields().map(child);
    let ties = module.ties.iter().map(tie);
    quote! {
        const LAYOUT: __fsdp::Node = __fsdp::Node {
            ty: #name,
            kind: #kind,
            children: &[#(#children),*],
            ties: &[#(#ties),*],
        };
    }
}

fn child(field: &Field<'_>) -> TokenStream {
    let name = field.name();
    let key = match field.key() {
        Some(key) => quote!(::core::option::Option::Some(#key)),
        None => quote!(::core::option::Option::None),
    };
    let ty = &field.original.ty;
    let node = match field.content {
        Content::Leaf => quote!(__fsdp::LEAF),
        _ => quote_spanned!(at(ty)=> <#ty as __fsdp::FsdpModule>::LAYOUT),
    };
    let unit = field.unit.is_some();
    let group = match &field.group {
        Some(group) => quote!(::core::option::Option::Some(#group)),
        None => quote!(::core::option::Option::None),
    };
    let split = match field.split() {
        Some((Split::Column, _)) => {
            let gather = field.gather.is_some();
            quote!(::core::option::Option::Some(__fsdp::Split::Column { gather: #gather }))
        }
        Some((Split::Row, _)) => quote!(::core::option::Option::Some(__fsdp::Split::Row)),
        Some((Split::Vocab, _)) => quote!(::core::option::Option::Some(__fsdp::Split::Vocab)),
        Some((Split::Shared, _)) => quote!(::core::option::Option::Some(__fsdp::Split::Shared)),
        None => quote!(::core::option::Option::None),
    };
    quote! {
        __fsdp::Child {
            name: #name,
            key: #key,
            transposed: false,
            unit: #unit,
            group: #group,
            split: #split,
            node: &#node,
        }
    }
}

fn tie(tie: &Tie) -> TokenStream {
    let Tie { first, second, if_shared } = tie;
    quote!(__fsdp::Tie { first: #first, second: #second, if_shared: #if_shared })
}
