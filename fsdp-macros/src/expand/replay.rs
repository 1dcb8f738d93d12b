//! What a hooked `forward` tells of being run again in backward, for units that are checkpointed.
//!
//! Here stands what its signature says: what is borrowed, or of a type that each caller chooses,
//! cannot be kept until then. Whether a type can be copied, and its tensors found, the runtime asks
//! of the type.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::visit::{self, Visit};
use syn::{FnArg, GenericParam, ImplItemFn, ReturnType, Type};

use super::at;
use super::forward::{argument_names, is};

/// Whether the method hands over what it takes to run it again.
pub fn is_replayed(method: &ImplItemFn) -> bool {
    parts(method).iter().all(|part| part.obstacle.is_none())
}

/// Names as nested pairs, `(a, (b, ()))`: tuples of any length.
pub fn nested(names: &[Ident]) -> TokenStream {
    names.iter().rev().fold(quote!(()), |rest, name| quote!((#name, #rest)))
}

/// The method's name, and what stands in the way of each part of its signature.
pub fn description(method: &ImplItemFn) -> TokenStream {
    let method_name = method.sig.ident.to_string();
    let parts = parts(method);
    let rows = parts.iter().map(|Part { name, ty, obstacle, span }| {
        let obstacle = match (obstacle, ty) {
            (Some(obstacle), _) => {
                let obstacle = format_ident!("{obstacle}");
                quote!(::core::option::Option::Some(__fsdp::NotRecomputable::#obstacle))
            }
            (None, Some(ty)) => quote_spanned!(*span=> __fsdp::Probe::<#ty>::NOT_RECOMPUTABLE),
            (None, None) => quote!(::core::option::Option::None),
        };
        quote!((#name, #obstacle))
    });
    let conditions = method.attrs.iter().filter(|attr| is(attr, &["cfg"]));
    quote! {
        #(#conditions)*
        __fsdp::Forward { name: #method_name, inputs: &[#(#rows),*] }
    }
}

/// The checks of a method, one for each part of its signature and in its place.
pub fn checks(method: &ImplItemFn, unit: &Type) -> Vec<TokenStream> {
    let method_name = method.sig.ident.to_string();
    let conditions: Vec<_> = method.attrs.iter().filter(|attr| is(attr, &["cfg"])).collect();
    let check = |Part { name, span, .. }: Part<'_>| {
        quote_spanned! {span=>
            #(#conditions)*
            const _: () = __fsdp::can_be_recomputed::<#unit>(#method_name, #name);
        }
    };
    parts(method).into_iter().map(check).collect()
}

/// A part of a signature: an input, or what else stands in the way.
struct Part<'a> {
    name: String,
    /// The type to ask, of an input.
    ty: Option<&'a Type>,
    /// What stands in the way, as the runtime calls it.
    obstacle: Option<&'static str>,
    span: Span,
}

fn parts(method: &ImplItemFn) -> Vec<Part<'_>> {
    let sig = &method.sig;
    let generic: Vec<&Ident> = sig
        .generics
        .params
        .iter()
        .filter_map(|param| match param {
            GenericParam::Type(param) => Some(&param.ident),
            GenericParam::Const(param) => Some(&param.ident),
            GenericParam::Lifetime(_) => None,
        })
        .collect();
    let types = sig.inputs.iter().filter_map(|input| match input {
        FnArg::Typed(input) => Some(&*input.ty),
        FnArg::Receiver(_) => None,
    });
    let input = |(index, (name, ty)): (usize, (Ident, _))| {
        let name = name.to_string();
        // A pattern has no name.
        let name = if name.starts_with("__fsdp_") { format!("input {}", index + 1) } else { name };
        Part { name, ty: Some(ty), obstacle: obstacle(ty, &generic), span: at(ty) }
    };
    let names = argument_names(sig);
    let mut parts: Vec<_> = names.into_iter().zip(types).enumerate().map(input).collect();
    if let ReturnType::Type(_, ty) = &sig.output
        && obstacle(ty, &generic).is_some()
    {
        let name = "the return value".to_string();
        parts.push(Part { name, ty: None, obstacle: Some("Output"), span: at(ty) });
    }
    if let Some(first) = generic.first()
        && parts.iter().all(|part| part.obstacle.is_none())
    {
        // One that stands in the body alone.
        let name = first.to_string();
        parts.push(Part { name, ty: None, obstacle: Some("Generic"), span: at(first) });
    }
    parts
}

/// What stands in the way of keeping a value of a type, as far as its spelling tells.
fn obstacle(ty: &Type, generic: &[&Ident]) -> Option<&'static str> {
    struct Found<'a> {
        generic: &'a [&'a Ident],
        obstacle: Option<&'static str>,
    }
    impl Visit<'_> for Found<'_> {
        fn visit_type_reference(&mut self, _: &syn::TypeReference) {
            self.obstacle = Some("Borrowed");
        }

        fn visit_lifetime(&mut self, lifetime: &syn::Lifetime) {
            if lifetime.ident != "static" {
                self.obstacle = Some("Borrowed");
            }
        }

        fn visit_type_impl_trait(&mut self, _: &syn::TypeImplTrait) {
            self.obstacle.get_or_insert("Generic");
        }

        fn visit_ident(&mut self, name: &Ident) {
            if self.generic.contains(&name) {
                self.obstacle.get_or_insert("Generic");
            }
        }
    }
    let mut found = Found { generic, obstacle: None };
    visit::visit_type(&mut found, ty);
    found.obstacle
}
