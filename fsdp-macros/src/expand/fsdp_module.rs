//! `impl FsdpModule` and `impl FsdpUnit`.

use proc_macro2::TokenStream;
use quote::quote;

use crate::parse::{Module, Unit};

/// Generates `impl FsdpModule`, with `body` as the layout and its traversal, and for a unit
/// `impl FsdpUnit`.
pub(super) fn implementation(module: &Module<'_>, body: TokenStream) -> TokenStream {
    implementation_with(module, body, None)
}

/// Generates what [`implementation`] does, with the constant of [`forwards`] last.
pub(super) fn implementation_with(
    module: &Module<'_>,
    body: TokenStream,
    forwards: Option<TokenStream>,
) -> TokenStream {
    let name = &module.original.ident;
    let (generics, arguments, where_clause) = module.original.generics.split_for_impl();
    // The bounds of a generic item may not be enough for Burn.
    let bound = match where_clause {
        _ if module.is_one_type() => None,
        Some(clause) => {
            let predicates = clause.predicates.iter();
            Some(quote!(where #(#predicates,)* #name #arguments: __fsdp::BurnModule + 'static))
        }
        None => Some(quote!(where #name #arguments: __fsdp::BurnModule + 'static)),
    };
    let unit =
        module.unit.map(|_| quote!(impl #generics __fsdp::FsdpUnit for #name #arguments #bound {}));
    let checkpoint = module.unit.filter(|unit| unit.checkpoint).map(|_| {
        quote!(
            const RECOMPUTED: ::core::primitive::bool = true;
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

/// Generates the constant with the hooked methods of a unit.
pub(super) fn forwards(module: &Module<'_>) -> Option<TokenStream> {
    module.unit?;
    let name = &module.original.ident;
    let (_, arguments, _) = module.original.generics.split_for_impl();
    Some(quote!(
        const FORWARDS: &'static [__fsdp::Forward] = {
            use __fsdp::Fallback as _;
            __fsdp::Probe::<#name #arguments>::HOOKED
        };
    ))
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
    let forwards = forwards(module).filter(|_| module.is_one_type());
    implementation_with(module, body, forwards)
}
