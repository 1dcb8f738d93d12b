//! Checks that a hooked method can be recomputed in backward: those of its signature, and calls of
//! the runtime's checks of its types.
//!
//! An input of a type that each caller chooses, or that is borrowed in another way than as a reference
//! to a value of a known type, cannot be kept until backward; the signature shows that. The runtime
//! checks whether a type can be cloned and its tensors found, and whether the value behind a reference
//! holds parameters.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::visit::{self, Visit};
use syn::{ImplItemFn, ReturnType, Signature, Type};

use super::references::target;
use super::signature::{argument_names, argument_types, generic_params};
use super::span::at;
use crate::parse::is_named;

/// Returns whether no part of the signature prevents the method from being recomputed. `outer` are the
/// type parameters of the method's block, here and below.
pub(super) fn is_possible(method: &ImplItemFn, outer: &[&Ident]) -> bool {
    parts(&method.sig, outer).iter().all(|part| part.reason.is_none())
}

/// Generates the method's `Forward` under the method's `#[cfg]`, as an element of a list.
pub(super) fn list_element(method: &ImplItemFn, outer: &[&Ident]) -> TokenStream {
    let conditions = method.attrs.iter().filter(|attr| is_named(attr, &["cfg"]));
    let description = description(method, outer);
    quote!(#(#conditions)* #description)
}

/// Generates the method's `Forward`: its name, and for each part of its signature, what prevents
/// recomputing it.
pub(super) fn description(method: &ImplItemFn, outer: &[&Ident]) -> TokenStream {
    let method_name = method.sig.ident.to_string();
    let parts = parts(&method.sig, outer);
    let rows = parts.iter().map(|Part { name, input, reason, span }| {
        let reason = match (reason, input) {
            (Some(reason), _) => {
                let reason = reason.variant();
                quote!(::core::option::Option::Some(__fsdp::NotRecomputable::#reason))
            }
            (None, Some(PartType::Value(ty))) => {
                quote_spanned!(*span=> __fsdp::Probe::<#ty>::NOT_RECOMPUTABLE)
            }
            (None, Some(PartType::Reference(ty))) => quote_spanned! {*span=>
                __fsdp::not_kept(__fsdp::Probe::<#ty>::CAN_BE_CLONED, __fsdp::Probe::<#ty>::LAYOUT)
            },
            (None, None) => quote!(::core::option::Option::None),
        };
        quote!((#name, #reason))
    });
    quote!(__fsdp::Forward { name: #method_name, inputs: &[#(#rows),*] })
}

/// Generates one check for each part of the method's signature, spanned at that part.
pub(super) fn checks(method: &ImplItemFn, unit: &Type, outer: &[&Ident]) -> Vec<TokenStream> {
    checks_in((method, outer), unit, quote!(<#unit as __fsdp::HookedForward>::HOOKED))
}

/// Generates the checks of a method of a further block, whose `Forward`s are in a constant.
pub(super) fn further_checks(
    method: &ImplItemFn,
    unit: &Type,
    outer: &[&Ident],
) -> Vec<TokenStream> {
    checks_in((method, outer), unit, quote!(__FSDP_HOOKED))
}

fn checks_in(
    (method, outer): (&ImplItemFn, &[&Ident]),
    unit: &Type,
    hooked: TokenStream,
) -> Vec<TokenStream> {
    let method_name = method.sig.ident.to_string();
    let conditions: Vec<_> = method.attrs.iter().filter(|attr| is_named(attr, &["cfg"])).collect();
    let check = |Part { name, span, .. }: Part<'_>| {
        quote_spanned! {span=>
            #(#conditions)*
            const _: () = __fsdp::can_be_recomputed::<#unit>(#hooked, #method_name, #name);
        }
    };
    parts(&method.sig, outer).into_iter().map(check).collect()
}

/// A part of a signature that may prevent recomputing.
struct Part<'a> {
    /// Name of the part in error messages.
    name: String,
    /// The type of an input, for the runtime to check.
    input: Option<PartType<'a>>,
    reason: Option<NotRecomputable>,
    span: Span,
}

/// The type of an input.
enum PartType<'a> {
    /// The type of an input by value.
    Value(&'a Type),
    /// The type of the value behind a reference.
    Reference(&'a Type),
}

/// Reason why a part of a signature prevents recomputing: a variant of the runtime's
/// `NotRecomputable`.
#[derive(Clone, Copy)]
enum NotRecomputable {
    /// An input holds a reference, or is one whose value cannot be cloned.
    Borrowed,
    /// An input has a type that each caller chooses.
    Generic,
    /// The return value is a reference, holds one, or is of a type that each caller chooses.
    Output,
}

impl NotRecomputable {
    fn variant(self) -> Ident {
        format_ident!(
            "{}",
            match self {
                Self::Borrowed => "Borrowed",
                Self::Generic => "Generic",
                Self::Output => "Output",
            }
        )
    }
}

fn parts<'a>(sig: &'a Signature, outer: &[&Ident]) -> Vec<Part<'a>> {
    let generic = generic_params(sig);
    let input = |(index, (name, ty)): (usize, (Ident, &'a Type))| {
        let name = name.to_string();
        // A pattern has no name of the user's.
        let name = if name.starts_with("__fsdp_") { format!("input {}", index + 1) } else { name };
        let (input, reason) = match target(ty, sig, outer) {
            Some(target) => (PartType::Reference(target), None),
            None => (PartType::Value(ty), reason(ty, &generic)),
        };
        Part { name, input: Some(input), reason, span: at(ty) }
    };
    let mut parts: Vec<_> =
        argument_names(sig).into_iter().zip(argument_types(sig)).enumerate().map(input).collect();
    if let ReturnType::Type(_, ty) = &sig.output
        && reason(ty, &generic).is_some()
    {
        let name = "the return value".to_string();
        parts.push(Part { name, input: None, reason: Some(NotRecomputable::Output), span: at(ty) });
    }
    if let Some(first) = generic.first()
        && parts.iter().all(|part| part.reason.is_none())
    {
        // A generic parameter that only the body uses.
        let name = first.to_string();
        parts.push(Part {
            name,
            input: None,
            reason: Some(NotRecomputable::Generic),
            span: at(first),
        });
    }
    parts
}

/// Returns what prevents keeping a value of a type, as far as the type's spelling shows.
fn reason(ty: &Type, generic: &[&Ident]) -> Option<NotRecomputable> {
    let mut search = ObstacleSearch { generic, found: None };
    visit::visit_type(&mut search, ty);
    search.found
}

struct ObstacleSearch<'a> {
    /// The generic parameters of the method.
    generic: &'a [&'a Ident],
    found: Option<NotRecomputable>,
}

/// `Borrowed` takes precedence over `Generic`.
impl Visit<'_> for ObstacleSearch<'_> {
    fn visit_type_reference(&mut self, _: &syn::TypeReference) {
        self.found = Some(NotRecomputable::Borrowed);
    }

    fn visit_lifetime(&mut self, lifetime: &syn::Lifetime) {
        if lifetime.ident != "static" {
            self.found = Some(NotRecomputable::Borrowed);
        }
    }

    fn visit_type_impl_trait(&mut self, _: &syn::TypeImplTrait) {
        self.found.get_or_insert(NotRecomputable::Generic);
    }

    fn visit_ident(&mut self, name: &Ident) {
        if self.generic.contains(&name) {
            self.found.get_or_insert(NotRecomputable::Generic);
        }
    }
}
