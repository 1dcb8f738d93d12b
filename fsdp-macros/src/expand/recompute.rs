//! Checks that a hooked method can be recomputed in backward: those of its signature, and calls of
//! the runtime's checks of its types.
//!
//! An input that is borrowed, or of a type that each caller chooses, cannot be kept until backward;
//! the signature shows that. The runtime checks whether a type can be cloned and its tensors found.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::visit::{self, Visit};
use syn::{ImplItemFn, ReturnType, Signature, Type};

use super::signature::{argument_names, argument_types, generic_params};
use super::span::at;
use crate::parse::is_named;

/// Returns whether no part of the signature prevents the method from being recomputed.
pub(super) fn is_possible(method: &ImplItemFn) -> bool {
    parts(&method.sig).iter().all(|part| part.reason.is_none())
}

/// Generates the method's `Forward` under the method's `#[cfg]`, as an element of a list.
pub(super) fn list_element(method: &ImplItemFn) -> TokenStream {
    let conditions = method.attrs.iter().filter(|attr| is_named(attr, &["cfg"]));
    let description = description(method);
    quote!(#(#conditions)* #description)
}

/// Generates the method's `Forward`: its name, and for each part of its signature, what prevents
/// recomputing it.
pub(super) fn description(method: &ImplItemFn) -> TokenStream {
    let method_name = method.sig.ident.to_string();
    let parts = parts(&method.sig);
    let rows = parts.iter().map(|Part { name, ty, reason, span }| {
        let reason = match (reason, ty) {
            (Some(reason), _) => {
                let reason = reason.variant();
                quote!(::core::option::Option::Some(__fsdp::NotRecomputable::#reason))
            }
            (None, Some(ty)) => quote_spanned!(*span=> __fsdp::Probe::<#ty>::NOT_RECOMPUTABLE),
            (None, None) => quote!(::core::option::Option::None),
        };
        quote!((#name, #reason))
    });
    quote!(__fsdp::Forward { name: #method_name, inputs: &[#(#rows),*] })
}

/// Generates one check for each part of the method's signature, spanned at that part.
pub(super) fn checks(method: &ImplItemFn, unit: &Type) -> Vec<TokenStream> {
    checks_in(method, unit, quote!(<#unit as __fsdp::HookedForward>::HOOKED))
}

/// Generates the checks of a method of a further block, whose `Forward`s are in a constant.
pub(super) fn further_checks(method: &ImplItemFn, unit: &Type) -> Vec<TokenStream> {
    checks_in(method, unit, quote!(__FSDP_HOOKED))
}

fn checks_in(method: &ImplItemFn, unit: &Type, hooked: TokenStream) -> Vec<TokenStream> {
    let method_name = method.sig.ident.to_string();
    let conditions: Vec<_> = method.attrs.iter().filter(|attr| is_named(attr, &["cfg"])).collect();
    let check = |Part { name, span, .. }: Part<'_>| {
        quote_spanned! {span=>
            #(#conditions)*
            const _: () = __fsdp::can_be_recomputed::<#unit>(#hooked, #method_name, #name);
        }
    };
    parts(&method.sig).into_iter().map(check).collect()
}

/// A part of a signature that may prevent recomputing.
struct Part<'a> {
    /// Name of the part in error messages.
    name: String,
    /// The type of an input, for the runtime to check.
    ty: Option<&'a Type>,
    reason: Option<NotRecomputable>,
    span: Span,
}

/// Reason why a part of a signature prevents recomputing: a variant of the runtime's
/// `NotRecomputable`.
#[derive(Clone, Copy)]
enum NotRecomputable {
    /// An input is a reference, or holds one.
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

fn parts(sig: &Signature) -> Vec<Part<'_>> {
    let generic = generic_params(sig);
    let input = |(index, (name, ty)): (usize, (Ident, _))| {
        let name = name.to_string();
        // A pattern has no name of the user's.
        let name = if name.starts_with("__fsdp_") { format!("input {}", index + 1) } else { name };
        Part { name, ty: Some(ty), reason: reason(ty, &generic), span: at(ty) }
    };
    let mut parts: Vec<_> =
        argument_names(sig).into_iter().zip(argument_types(sig)).enumerate().map(input).collect();
    if let ReturnType::Type(_, ty) = &sig.output
        && reason(ty, &generic).is_some()
    {
        let name = "the return value".to_string();
        parts.push(Part { name, ty: None, reason: Some(NotRecomputable::Output), span: at(ty) });
    }
    if let Some(first) = generic.first()
        && parts.iter().all(|part| part.reason.is_none())
    {
        // A generic parameter that only the body uses.
        let name = first.to_string();
        parts.push(Part {
            name,
            ty: None,
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
