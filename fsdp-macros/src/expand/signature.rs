//! Parts of a hooked method's signature.

use proc_macro2::{Ident, TokenStream};
use quote::{format_ident, quote};
use syn::{FnArg, GenericParam, Pat, PatType, Signature, Type, parse_quote};

/// Returns a name for each argument after the receiver: the user's own, which documentation and
/// editors show; an argument that is a pattern has a generated one, by index.
pub(super) fn argument_names(sig: &Signature) -> Vec<Ident> {
    arguments(sig)
        .enumerate()
        .map(|(index, argument)| match &*argument.pat {
            Pat::Ident(pattern) if pattern.by_ref.is_none() && pattern.subpat.is_none() => {
                pattern.ident.clone()
            }
            _ => format_ident!("__fsdp_{index}"),
        })
        .collect()
}

/// Returns the type of each argument after the receiver.
pub(super) fn argument_types(sig: &Signature) -> impl Iterator<Item = &Type> {
    arguments(sig).map(|argument| &*argument.ty)
}

fn arguments(sig: &Signature) -> impl Iterator<Item = &PatType> {
    sig.inputs.iter().filter_map(|input| match input {
        FnArg::Typed(input) => Some(input),
        FnArg::Receiver(_) => None,
    })
}

/// Returns the signature with each argument's pattern replaced by a name.
pub(super) fn with_argument_names(sig: &Signature, names: &[Ident]) -> Signature {
    let mut sig = sig.clone();
    let typed = sig.inputs.iter_mut().filter_map(|input| match input {
        FnArg::Typed(input) => Some(input),
        FnArg::Receiver(_) => None,
    });
    for (input, name) in typed.zip(names) {
        input.pat = parse_quote!(#name);
    }
    sig
}

/// Returns the method's own type and constant parameters. Lifetimes are left out.
pub(super) fn generic_params(sig: &Signature) -> Vec<&Ident> {
    sig.generics
        .params
        .iter()
        .filter_map(|param| match param {
            GenericParam::Type(param) => Some(&param.ident),
            GenericParam::Const(param) => Some(&param.ident),
            GenericParam::Lifetime(_) => None,
        })
        .collect()
}

/// Returns `::<T, N>` for a call with the method's own generic parameters; lifetimes are inferred.
pub(super) fn turbofish(sig: &Signature) -> Option<TokenStream> {
    let params = generic_params(sig);
    (!params.is_empty()).then(|| quote!(::<#(#params),*>))
}
