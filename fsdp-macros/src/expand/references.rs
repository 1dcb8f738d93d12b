//! Inputs that are references to values of a known type, such as `rope: &RotaryEncoding`.
//!
//! The runtime can cast the tensors behind such a reference, and keep a clone of the value for a
//! forward that is recomputed in backward. The hidden method gets a reference to the caller's value or
//! to that copy, so the reference must have a lifetime that nothing else depends on.

use proc_macro2::{Ident, TokenStream};
use quote::quote;
use syn::visit::{self, Visit};
use syn::{ReturnType, Signature, Type, TypeReference};

use super::signature::{argument_names, argument_types, generic_params};

/// Returns the type behind a reference, if `ty` is a shared reference with an elided lifetime to a type
/// that holds no reference and names no type parameter. `outer` are the type parameters of the block.
///
/// Slices and trait objects are left out: they cannot be cloned.
pub(super) fn target<'a>(ty: &'a Type, sig: &Signature, outer: &[&Ident]) -> Option<&'a Type> {
    let Type::Reference(TypeReference { lifetime, mutability: None, elem, .. }) = ty else {
        return None;
    };
    let elided = lifetime.as_ref().is_none_or(|lifetime| lifetime.ident == "_");
    let mut params = generic_params(sig);
    params.extend(outer);
    let mut search = TypeSearch { params, allows_self: false, fits: elided };
    search.visit_type(elem);
    search.fits.then_some(&**elem)
}

/// Generates the arguments of a call of the hidden method: names, and for references what the
/// variables of these names lend.
pub(super) fn lent_arguments(sig: &Signature, outer: &[&Ident]) -> Vec<TokenStream> {
    let lent = |(name, ty): (Ident, &Type)| match target(ty, sig, outer) {
        Some(_) => quote!(#name.get()),
        None => quote!(#name),
    };
    argument_names(sig).into_iter().zip(argument_types(sig)).map(lent).collect()
}

/// Returns whether a method's output may borrow from `self`, or `self` has a lifetime with a name. Such
/// a method can only run on the caller's own module.
pub(super) fn may_borrow_self(sig: &Signature) -> bool {
    let receiver = sig.receiver().and_then(|receiver| receiver.reference.as_ref());
    if receiver.is_some_and(|(_, lifetime)| lifetime.is_some()) {
        return true;
    }
    let ReturnType::Type(_, ty) = &sig.output else { return false };
    let mut search = TypeSearch { params: Vec::new(), allows_self: true, fits: true };
    search.visit_type(ty);
    !search.fits
}

/// A search for what a value of a type may borrow, or for a type that each caller chooses.
struct TypeSearch<'a> {
    /// Generic parameters of the method and type parameters of its block.
    params: Vec<&'a Ident>,
    /// Whether `Self` is a type like any other. It is not where the type is named outside of the block.
    allows_self: bool,
    /// Whether nothing was found.
    fits: bool,
}

impl Visit<'_> for TypeSearch<'_> {
    fn visit_type(&mut self, ty: &Type) {
        match ty {
            Type::Path(_) | Type::Tuple(_) | Type::Array(_) | Type::Paren(_) | Type::Group(_) => {
                visit::visit_type(self, ty);
            }
            _ => self.fits = false,
        }
    }

    fn visit_lifetime(&mut self, lifetime: &syn::Lifetime) {
        self.fits &= lifetime.ident == "static";
    }

    fn visit_ident(&mut self, name: &Ident) {
        let is_self = name == "Self" && !self.allows_self;
        self.fits &= !is_self && !self.params.contains(&name);
    }
}
