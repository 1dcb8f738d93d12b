//! Calls of the runtime's `const` checks: the rules that need the layout of other types.
//!
//! Each check is a constant of its own, so that the compiler reports all that fail.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::{GenericArgument, PathArguments, Type};

use super::span::at;
use crate::parse::{Content, Field, Module, Split, Tie};

/// Generates code that requires `#[derive(Module)]`. It is generated first, where the compiler
/// looks first: a type without the derive has many errors, and the one from here says what to
/// write.
pub(super) fn derives_burn_module(module: &Module<'_>) -> TokenStream {
    let name = &module.original.ident;
    quote_spanned!(at(name)=> trait __FsdpDerived where #name: __fsdp::DerivesModule {})
}

/// Generates the checks of a struct.
pub(super) fn checks(module: &Module<'_>) -> TokenStream {
    let name = &module.original.ident;
    let keys = quote_spanned! {at(name)=>
        const __FSDP_LAYOUT: &__fsdp::Node = &<#name as __fsdp::FsdpModule>::LAYOUT;
        const _: () = __fsdp::have_distinct_keys::<{ __fsdp::num_keys(__FSDP_LAYOUT) }>(__FSDP_LAYOUT);
    };
    let unit = module.unit.map(|_| unit(module));
    let field_units = module.layout_fields().filter_map(field_unit);
    let ties = module.ties.iter().map(tie);
    let hidden_units = module.fields.iter().filter_map(hidden_unit);
    let splits = module.layout_fields().filter_map(split);
    quote!(#keys #unit #(#field_units)* #(#ties)* #(#hidden_units)* #(#splits)*)
}

/// Generates the checks of a generic struct, as a constant of its implementation of `FsdpModule`. The
/// compiler evaluates it for each type that a program shards.
pub(super) fn checks_of_generic(module: &Module<'_>) -> TokenStream {
    let name = &module.original.ident;
    let unit = module.unit.map(|_| {
        quote_spanned! {at(name)=>
            __fsdp::is_a_sound_unit(__FSDP_LAYOUT);
            __fsdp::has_hooks::<Self>();
        }
    });
    let field_units = module.layout_fields().filter_map(field_unit);
    let ties = module.ties.iter().map(tie);
    let hidden_units = module.fields.iter().filter_map(hidden_unit);
    let splits = module.layout_fields().filter_map(split);
    let checks = quote!(#(#field_units)* #(#ties)* #(#hidden_units)* #(#splits)*);
    // Constants within the constant do not see the type parameters; statements do.
    let checks = as_statements(checks);
    quote_spanned! {at(name)=>
        const CHECKED: () = {
            let __FSDP_LAYOUT = <Self as __fsdp::FsdpModule>::STATIC_LAYOUT;
            __fsdp::have_distinct_keys_of_generic(__FSDP_LAYOUT);
            #unit
            #checks
        };
    }
}

/// Turns `const _: () = ..;` into `let () = ..;`.
fn as_statements(checks: TokenStream) -> TokenStream {
    let file: syn::File = syn::parse_quote!(#checks);
    let statements = file.items.into_iter().map(|item| match item {
        syn::Item::Const(check) => {
            let value = check.expr;
            quote!(let () = #value;)
        }
        other => quote!(#other),
    });
    quote!(#(#statements)*)
}

/// Generates the check that a unit has parameters of its own and a hooked `forward`.
fn unit(module: &Module<'_>) -> TokenStream {
    let name = &module.original.ident;
    // The check fails where the block hooks no calls of a field unit: the error is shown there.
    let field_unit = module.layout_fields().find_map(|field| field.unit.as_ref());
    let has_hooks = quote_spanned! {field_unit.map_or(at(name), at)=>
        const _: () = __fsdp::has_hooks::<#name>();
    };
    quote_spanned! {at(name)=>
        const _: () = __fsdp::is_a_sound_unit(__FSDP_LAYOUT);
        #has_hooks
    }
}

/// Generates the check that a field under `unit` has a module that can be a unit, as far as its
/// layout is known.
fn field_unit(field: &Field<'_>) -> Option<TokenStream> {
    let (unit, ty, name) = (field.unit.as_ref()?, &field.original.ty, field.name());
    let check = quote_spanned! {at(unit)=>
        const _: () = {
            use __fsdp::Fallback as _;
            __fsdp::can_be_a_unit(#name, __fsdp::Probe::<#ty>::LAYOUT)
        };
    };
    (field.content == Content::Module).then_some(check)
}

/// Generates the check that a field under `column`, `row` or `vocab` has a layer that can be split.
fn split(field: &Field<'_>) -> Option<TokenStream> {
    let (split, _) = field.split()?;
    let ty = &field.original.ty;
    let layer = match split {
        Split::Column if field.gather.is_none() => quote!(SplitColumns),
        Split::Column | Split::Row => quote!(SplitLinear),
        Split::Vocab => quote!(SplitVocabulary),
        Split::Shared => return None,
    };
    Some(quote_spanned! {at(ty)=>
        const _: () = {
            const fn can_be_split<T: __fsdp::#layer>() {}
            can_be_split::<#ty>()
        };
    })
}

/// Generates the check that the two places of a tie are weights and lie in one unit.
fn tie(Tie { first, second, .. }: &Tie) -> TokenStream {
    let places = [first, second].map(|path| {
        quote_spanned!(at(path)=> const _: () = __fsdp::leads_to_a_weight(__FSDP_LAYOUT, #path);)
    });
    quote_spanned! {at(second)=>
        #(#places)*
        const _: () = __fsdp::lie_in_one_unit(__FSDP_LAYOUT, #first, #second);
        const _: () = __fsdp::are_split_alike(__FSDP_LAYOUT, #first, #second);
    }
}

/// Generates the check that a field that FSDP does not traverse contains no unit.
fn hidden_unit(field: &Field<'_>) -> Option<TokenStream> {
    let check = match field.content {
        Content::Skipped => quote!(skips_no_unit),
        Content::Leaf => quote!(hides_no_unit),
        Content::Module | Content::Constant => return None,
    };
    let ty = &field.original.ty;
    let mut types = Vec::new();
    push_named_types(ty, &mut types);
    let name = field.name();
    Some(quote_spanned! {at(ty)=>
        const _: () = {
            use __fsdp::Fallback as _;
            __fsdp::#check(#name, &[#(__fsdp::Probe::<#types>::LAYOUT),*])
        };
    })
}

/// Adds a type to `types`, with all types named in it: `Box<Block>` is no `FsdpModule`, but `Block`
/// may be one.
fn push_named_types<'a>(ty: &'a Type, types: &mut Vec<&'a Type>) {
    match ty {
        Type::Path(path) => {
            if path.path.is_ident("Self") {
                return;
            }
            types.push(ty);
            for segment in &path.path.segments {
                let PathArguments::AngleBracketed(arguments) = &segment.arguments else {
                    continue;
                };
                for argument in &arguments.args {
                    if let GenericArgument::Type(ty) = argument {
                        push_named_types(ty, types);
                    }
                }
            }
        }
        Type::Tuple(tuple) => tuple.elems.iter().for_each(|ty| push_named_types(ty, types)),
        Type::Array(array) => push_named_types(&array.elem, types),
        Type::Paren(paren) => push_named_types(&paren.elem, types),
        Type::Reference(reference) => push_named_types(&reference.elem, types),
        _ => {}
    }
}
