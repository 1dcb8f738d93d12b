//! Search for attributes on an item, and the argument lists in them.

use proc_macro2::TokenStream;
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::{Attribute, Meta, Path, Token};

use crate::errors::Errors;

/// The helper attribute: on fields, and on types under one of the derive macros.
pub(crate) const FSDP: &str = "fsdp";
/// The attribute macro of units.
pub(crate) const FSDP_UNIT: &str = "fsdp_unit";

/// Returns whether an attribute has one of these names.
pub(crate) fn is_named(attr: &Attribute, names: &[&str]) -> bool {
    names.iter().any(|name| attr.path().is_ident(name))
}

/// Returns the attribute that derives `trait_name`, if there is one.
pub(crate) fn derives<'a>(attrs: &'a [Attribute], trait_name: &str) -> Option<&'a Attribute> {
    attrs.iter().filter(|attr| is_named(attr, &["derive"])).find(|attr| {
        attr.parse_args_with(Punctuated::<Path, Token![,]>::parse_terminated).is_ok_and(|paths| {
            paths
                .iter()
                .any(|path| path.segments.last().is_some_and(|last| last.ident == trait_name))
        })
    })
}

/// Returns the arguments of every `#[fsdp(..)]` among `attrs`.
pub(super) fn helper_arguments(attrs: &[Attribute], errors: &mut Errors) -> Vec<Meta> {
    let mut metas = Vec::new();
    for attr in attrs.iter().filter(|attr| is_named(attr, &[FSDP])) {
        match &attr.meta {
            Meta::List(arguments) => {
                metas.extend(argument_list(arguments.tokens.clone(), errors));
            }
            _ => errors.push(attr, "`#[fsdp(..)]` needs arguments in parentheses"),
        }
    }
    metas
}

/// Splits the tokens between an attribute's parentheses into arguments.
pub(super) fn argument_list(args: TokenStream, errors: &mut Errors) -> Vec<Meta> {
    match Punctuated::<Meta, Token![,]>::parse_terminated.parse2(args) {
        Ok(metas) => metas.into_iter().collect(),
        Err(error) => {
            errors.add(error);
            Vec::new()
        }
    }
}
