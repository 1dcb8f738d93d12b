//! The traits of a struct, the walks over its fields, and the calls to the runtime's `const` checks.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::{GenericArgument, Index, PathArguments, Type};

use super::at;
use crate::ast::{Content, Field, Module, Root};

/// `impl FsdpModule`, and for a unit `impl FsdpUnit`.
pub fn implementation(module: &Module<'_>, body: TokenStream) -> TokenStream {
    let name = &module.original.ident;
    let (generics, arguments, _) = module.original.generics.split_for_impl();
    // Only of an item with an error; its own bounds may not be enough for Burn.
    let bound = (!module.original.generics.params.is_empty())
        .then(|| quote!(where #name #arguments: __fsdp::BurnModule));
    let unit =
        module.unit.map(|_| quote!(impl #generics __fsdp::FsdpUnit for #name #arguments #bound {}));
    let checkpoint = module.checkpoint.then(|| {
        quote!(
            const CHECKPOINT: ::core::primitive::bool = true;
        )
    });
    let is_one_type = module.original.generics.params.is_empty();
    let forwards = module.unit.filter(|_| is_one_type).map(|_| {
        quote!(
            const FORWARDS: &'static [__fsdp::Forward] = {
                use __fsdp::NotHooked as _;
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

/// Asks for `#[derive(Module)]` where the compiler looks first, as a type without it has many
/// errors and this is the one that says what to write.
pub fn derives_module(module: &Module<'_>) -> TokenStream {
    let name = &module.original.ident;
    quote_spanned!(at(name)=> trait __FsdpDerived where #name: __fsdp::DerivesModule {})
}

/// An implementation that knows nothing of the fields, so that the error about the item is the only
/// one.
pub fn opaque(module: &Module<'_>) -> TokenStream {
    let name = module.original.ident.to_string();
    let kind = match module.unit {
        Some(Root(root)) => quote!(__fsdp::Kind::Unit { root: #root }),
        None => quote!(__fsdp::Kind::Leaf),
    };
    let body = quote! {
        const LAYOUT: __fsdp::Node = __fsdp::Node::plain(#name, #kind);

        fn walk<__W: __fsdp::Walk>(&self, _: &mut __W) {}

        fn attach<__A: __fsdp::Attach>(self, _: &mut __A) -> Self {
            self
        }
    };
    implementation(module, body)
}

/// `walk` and `attach`, one call a field.
pub fn walks(module: &Module<'_>) -> TokenStream {
    let reads = module.layout_fields().enumerate().map(|(index, field)| {
        let (member, index) = (&field.member, Index::from(index));
        if let (Content::Leaf, Some(_)) = (field.content, &field.unit) {
            return quote! {{
                use __fsdp::SingleUnit as _;
                __fsdp::LeafUnits(&self.#member).walk(&__fsdp_children[#index], __fsdp_walk);
            }};
        }
        let walk = function(field, quote!(walk_leaf), quote!(walk_field));
        quote!(#walk(&self.#member, &__fsdp_children[#index], __fsdp_walk);)
    });
    let mut indices = (0..).map(Index::from);
    let rebuilt = module.fields.iter().map(|field| {
        let member = &field.member;
        if !field.content.is_in_layout() {
            return quote!(#member: self.#member);
        }
        let attach = function(field, quote!(attach_leaf), quote!(attach_field));
        let index = indices.next();
        quote!(#member: #attach(self.#member, &__fsdp_children[#index], __fsdp_attach))
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

/// What handles a field: a function for a leaf, else a method of its type. The method is named like
/// the field's `LAYOUT`, so that the compiler shows the error about an unknown type once.
fn function(field: &Field<'_>, leaf: TokenStream, method: TokenStream) -> TokenStream {
    let ty = &field.original.ty;
    match field.content {
        Content::Leaf => quote!(__fsdp::#leaf),
        _ => quote_spanned!(at(ty)=> <#ty as __fsdp::FsdpModule>::#method),
    }
}

/// The checks that need the layout of other types. Each is a constant of its own, so that all that
/// fail are shown.
pub fn checks(module: &Module<'_>) -> TokenStream {
    let name = &module.original.ident;
    let general = quote_spanned! {at(name)=>
        const __FSDP_LAYOUT: &__fsdp::Node = &<#name as __fsdp::FsdpModule>::LAYOUT;
        const _: () = __fsdp::have_distinct_keys::<{ __fsdp::num_keys(__FSDP_LAYOUT) }>(__FSDP_LAYOUT);
    };
    let units: Vec<_> = module.layout_fields().filter(|field| field.unit.is_some()).collect();
    let unit = module.unit.map(|_| {
        // What is wrong with its hooks may be that they miss a unit in a field.
        let hooks = units.first().and_then(|field| field.unit.as_ref()).map_or(at(name), at);
        let hooks = quote_spanned!(hooks=> const _: () = __fsdp::has_hooks::<#name>(););
        quote_spanned! {at(name)=>
            const _: () = __fsdp::is_a_sound_unit(__FSDP_LAYOUT);
            #hooks
        }
    });
    let units = units.into_iter().filter_map(field_unit);
    let ties = module.ties.iter().map(|tie| {
        let (first, second) = (&tie.first, &tie.second);
        let places = [first, second].map(|path| {
            quote_spanned!(at(path)=> const _: () = __fsdp::leads_to_a_weight(__FSDP_LAYOUT, #path);)
        });
        quote_spanned! {at(second)=>
            #(#places)*
            const _: () = __fsdp::lie_in_one_unit(__FSDP_LAYOUT, #first, #second);
        }
    });
    let unseen = module.fields.iter().filter_map(unseen_unit);
    quote!(#general #unit #(#units)* #(#ties)* #(#unseen)*)
}

/// A field under `unit` must hold what can be one, as far as FSDP looks into it.
fn field_unit(field: &Field<'_>) -> Option<TokenStream> {
    let (unit, ty, name) = (field.unit.as_ref()?, &field.original.ty, field.name());
    let check = quote_spanned! {at(unit)=>
        const _: () = {
            use __fsdp::NoLayout as _;
            __fsdp::can_be_a_unit(#name, __fsdp::Probe::<#ty>::LAYOUT)
        };
    };
    (field.content == Content::Module).then_some(check)
}

/// A field that FSDP does not look into must hold no unit.
fn unseen_unit(field: &Field<'_>) -> Option<TokenStream> {
    let check = match field.content {
        Content::Skipped => quote!(skips_no_unit),
        Content::Leaf => quote!(hides_no_unit),
        Content::Module | Content::Constant => return None,
    };
    let ty = &field.original.ty;
    let mut types = Vec::new();
    named_types(ty, &mut types);
    let name = field.name();
    Some(quote_spanned! {at(ty)=>
        const _: () = {
            use __fsdp::NoLayout as _;
            __fsdp::#check(#name, &[#(__fsdp::Probe::<#types>::LAYOUT),*])
        };
    })
}

/// A type and all types it is made of: `Box<Block>` is no FSDP module, but `Block` may be.
fn named_types<'a>(ty: &'a Type, types: &mut Vec<&'a Type>) {
    match ty {
        Type::Path(path) => {
            if path.path.is_ident("Self") {
                return;
            }
            types.push(ty);
            let arguments = path.path.segments.iter().map(|segment| &segment.arguments);
            for arguments in arguments {
                let PathArguments::AngleBracketed(arguments) = arguments else {
                    continue;
                };
                for argument in &arguments.args {
                    if let GenericArgument::Type(ty) = argument {
                        named_types(ty, types);
                    }
                }
            }
        }
        Type::Tuple(tuple) => tuple.elems.iter().for_each(|ty| named_types(ty, types)),
        Type::Array(array) => named_types(&array.elem, types),
        Type::Paren(paren) => named_types(&paren.elem, types),
        Type::Reference(reference) => named_types(&reference.elem, types),
        _ => {}
    }
}
