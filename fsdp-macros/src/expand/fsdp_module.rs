//! `impl FsdpModule` and `impl FsdpUnit`.

use proc_macro2::TokenStream;
use quote::quote;

use crate::parse::{Module, Unit};

/// Generates `impl FsdpModule`, with `body` as the layout and its traversal, and for a unit
/// `impl FsdpUnit`.
pub(super) fn implementation(module: &Module<'_>, body: TokenStream) -> TokenStream {
    let name = &module.original.ident;
    let (generics, arguments, _) = module.original.generics.split_for_impl();
    // Only an item with an error is generic. Its own bounds may not be enough for Burn.
    let bound = (!module.is_one_type()).then(|| quote!(where #name #arguments: __fsdp::BurnModule));
    let unit =
        module.unit.map(|_| quote!(impl #generics __fsdp::FsdpUnit for #name #arguments #bound {}));
    let checkpoint = module.unit.filter(|unit| unit.checkpoint).map(|_| {
        quote!(
            const RECOMPUTED: ::core::primitive::bool = true;
        )
    });
    let forwards = module.unit.filter(|_| module.is_one_type()).map(|_| {
        quote!(
            const FORWARDS: &'static [__fsdp::Forward] = {
                use __fsdp::Fallback as _;
                __fsdp::Probe::<#name>::HOOKED
            };
        )
    });
    quote! {
        impl #generics __fsdp::FsdpModule for #name #arguments #bound {
            #body
            #checkpoint
            #forwards
        }
        #unit
    }
}

/// Generates an implementation without fields, for an item whose fields cannot be listed: the error
/// about the item is then the only one.
pub(super) fn opaque(module: &Module<'_>) -> TokenStream {
    let name = module.original.ident.to_string();
    let kind = match module.unit {
        Some(Unit { root, .. }) => quote!(__fsdp::Kind::Unit { root: #root }),
        None => quote!(__fsdp::Kind::Leaf),
    };
    let body = quote! {
        const LAYOUT: __fsdp::Node = __fsdp::Node::plain(#name, #kind);

        fn visit_params<__V: __fsdp::ParamVisitor>(&self, _: &mut __V) {}

        fn map_params<__M: __fsdp::ParamMapper>(self, _: &mut __M) -> Self {
            self
        }
    };
    implementation(module, body)
}
