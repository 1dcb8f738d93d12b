//! Inputs of a call, as generated code passes them to the hooks: their tensors are collected, then
//! cast.
//!
//! For an input of a concrete type, a probe asks at compile time whether the type is a `UnitValue`.
//! A type parameter has no answer: inside the generic method the compiler knows the parameter's
//! bounds only. The probe would take a caller's tensor for a value without tensors. An input of a
//! *generic type* therefore requires `UnitValue`. A reference has a probe of its own, which looks at
//! the type behind it.

use proc_macro2::{Ident, TokenStream};
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{GenericParam, Signature, Type, TypeParamBound, WherePredicate};

use super::references::target;
use super::signature::{argument_names, argument_types};

/// An input of a call.
pub(super) enum Input {
    /// A place that holds the input. The place is written several times.
    Probed(TokenStream),
    /// A variable of a generic type, located at that type: the compiler reports there that the type
    /// is not a `UnitValue`.
    Generic(Ident),
    /// A variable that is a reference to a value of a known type.
    Reference(Ident),
}

impl Input {
    /// Returns the arguments of a method after the receiver; `outer` are the type parameters of its
    /// block.
    pub(super) fn of_method(sig: &Signature, outer: &[&Ident]) -> Vec<Self> {
        let generic_types = GenericTypes::of(sig, outer);
        let input = |(mut name, ty): (Ident, &Type)| {
            if target(ty, sig, outer).is_some() {
                return Self::Reference(name);
            }
            if !generic_types.contain(ty) {
                return Self::Probed(quote!(#name));
            }
            // The name still resolves as the user's.
            name.set_span(name.span().located_at(ty.span()));
            Self::Generic(name)
        };
        argument_names(sig).into_iter().zip(argument_types(sig)).map(input).collect()
    }

    /// Generates the statement that adds the input's tensors to `__fsdp_inputs`.
    pub(super) fn collect(&self) -> TokenStream {
        match self {
            Self::Probed(place) => quote!((&__fsdp::ValueProbe(&#place)).collect(__fsdp_inputs);),
            Self::Generic(name) => {
                let collect = quote_spanned!(name.span()=> collect);
                let input = quote_spanned!(name.span()=> &#name);
                quote!(__fsdp::KnownTensors.#collect(#input, __fsdp_inputs);)
            }
            Self::Reference(name) => {
                quote!((&&&&__fsdp::ReferenceProbe(#name)).kind().collect(#name, __fsdp_inputs);)
            }
        }
    }

    /// Generates the expression of the input, cast for `__fsdp_call`. For a reference it is the
    /// runtime's `Reference`, which lends the value.
    pub(super) fn map(&self) -> TokenStream {
        match self {
            Self::Probed(place) => {
                quote!((&__fsdp::ValueProbe(&#place)).kind().map(&__fsdp_call, #place))
            }
            Self::Generic(name) => {
                let map = quote_spanned!(name.span()=> map);
                quote!(__fsdp::KnownTensors.#map(&__fsdp_call, #name))
            }
            Self::Reference(name) => {
                quote!((&&&&__fsdp::ReferenceProbe(#name)).kind().map(&__fsdp_call, #name))
            }
        }
    }
}

/// The generic types of a method: `impl Trait`, and types that name a type parameter of the method or
/// of its block.
///
/// Types of closures are left out, because a closure is never a `UnitValue`: `impl Fn(..)`, and
/// type parameters bounded by `Fn`, `FnMut`, `FnOnce` or an `async` form of these.
struct GenericTypes<'a> {
    params: Vec<&'a Ident>,
}

impl<'a> GenericTypes<'a> {
    fn of(sig: &'a Signature, outer: &[&'a Ident]) -> Self {
        let params = sig.generics.params.iter().filter_map(|param| match param {
            GenericParam::Type(param) if !has_closure(&param.bounds) => Some(&param.ident),
            _ => None,
        });
        let where_clause = sig.generics.where_clause.iter().flat_map(|clause| &clause.predicates);
        let is_closure = |param: &Ident| {
            where_clause.clone().any(|predicate| match predicate {
                WherePredicate::Type(predicate) => {
                    is_param(&predicate.bounded_ty, param) && has_closure(&predicate.bounds)
                }
                _ => false,
            })
        };
        let own = params.filter(|param| !is_closure(param));
        Self { params: own.chain(outer.iter().copied()).collect() }
    }

    /// Returns whether `ty` is a generic type whose values may be `UnitValue`s.
    fn contain(&self, ty: &Type) -> bool {
        let mut search = GenericSearch { params: &self.params, found: false };
        search.visit_type(ty);
        search.found
    }
}

fn is_param(ty: &Type, param: &Ident) -> bool {
    matches!(ty, Type::Path(path) if path.path.is_ident(param))
}

/// Returns whether one of `bounds` is a trait of closures.
fn has_closure<'a>(bounds: impl IntoIterator<Item = &'a TypeParamBound>) -> bool {
    bounds.into_iter().any(|bound| match bound {
        TypeParamBound::Trait(bound) => bound
            .path
            .segments
            .last()
            .is_some_and(|last| CLOSURES.iter().any(|name| last.ident == name)),
        _ => false,
    })
}

const CLOSURES: &[&str] = &["Fn", "FnMut", "FnOnce", "AsyncFn", "AsyncFnMut", "AsyncFnOnce"];

/// A search for a generic type in a type. References, pointers, trait objects and `PhantomData` are
/// left out, because none of them is ever a `UnitValue` with tensors.
struct GenericSearch<'a> {
    params: &'a [&'a Ident],
    found: bool,
}

impl Visit<'_> for GenericSearch<'_> {
    fn visit_type_path(&mut self, ty: &syn::TypePath) {
        let segments = &ty.path.segments;
        if segments.last().is_some_and(|last| last.ident == "PhantomData") {
            return;
        }
        // `T`, or a type `T::Item` that belongs to it.
        self.found |= segments.first().is_some_and(|first| self.params.contains(&&first.ident));
        visit::visit_type_path(self, ty);
    }

    fn visit_type_impl_trait(&mut self, ty: &syn::TypeImplTrait) {
        self.found |= !has_closure(&ty.bounds);
    }

    fn visit_type_reference(&mut self, _: &syn::TypeReference) {}

    fn visit_type_ptr(&mut self, _: &syn::TypePtr) {}

    fn visit_type_bare_fn(&mut self, _: &syn::TypeBareFn) {}

    fn visit_type_trait_object(&mut self, _: &syn::TypeTraitObject) {}
}

#[cfg(test)]
mod tests {
    use quote::ToTokens;
    use syn::{FnArg, Signature, parse_quote};

    use super::GenericTypes;

    /// Returns the types of the arguments that are generic, as tokens.
    fn generic_types(sig: &Signature) -> Vec<String> {
        let generic_types = GenericTypes::of(sig, &[]);
        let types = sig.inputs.iter().filter_map(|input| match input {
            FnArg::Typed(input) => Some(&*input.ty),
            FnArg::Receiver(_) => None,
        });
        types
            .filter(|ty| generic_types.contain(ty))
            .map(|ty| ty.to_token_stream().to_string())
            .collect()
    }

    #[test]
    fn a_type_is_generic_if_it_names_a_type_parameter() {
        let sig = parse_quote! {
            fn forward<'a, const D: usize, T: Module, U>(
                &self,
                a: T,
                b: Tensor<D>,
                c: Vec<(usize, U)>,
                d: [T; 2],
                e: T::Output,
                f: <U as Layer>::Output,
                g: impl Into<Tensor<D>>,
                h: Option<impl Clone>,
                i: other::T,
                j: Cache<'a, D>,
            )
        };
        let expected = [
            "T",
            "Vec < (usize , U) >",
            "[T ; 2]",
            "T :: Output",
            "< U as Layer > :: Output",
            "impl Into < Tensor < D > >",
            "Option < impl Clone >",
        ];
        assert_eq!(generic_types(&sig), expected);
    }

    #[test]
    fn a_type_that_is_never_a_unit_value_is_not_generic() {
        let sig = parse_quote! {
            fn forward<T, F: Fn(T) -> T, G, H>(
                &self,
                a: &T,
                b: &mut [T],
                c: *const T,
                d: fn(T) -> T,
                e: Box<dyn Fn(T) -> T>,
                f: F,
                g: Option<G>,
                h: H,
                i: impl for<'a> std::ops::FnMut(&'a T) -> T + Clone,
                j: PhantomData<T>,
            )
            where
                G: Clone + FnOnce() -> T,
                H: AsyncFn() -> T,
        };
        assert_eq!(generic_types(&sig), [] as [&str; 0]);
    }
}
