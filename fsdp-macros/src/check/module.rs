//! Rules on a struct under `#[fsdp_unit]` or `#[derive(FsdpModule)]`.

use proc_macro2::{Ident, TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Data, Type, TypeParamBound, WherePredicate};

use crate::errors::Errors;
use crate::parse::{Content, FSDP, Field, Module, derives, is_named};

/// Checks that the item is a struct. A layout lists fields that all exist at once.
pub(super) fn is_a_struct(module: &Module<'_>, errors: &mut Errors) {
    let name = &module.original.ident;
    match &module.original.data {
        Data::Struct(_) => {}
        Data::Enum(_) if module.unit.is_some() => errors.push(
            name,
            format!(
                "an enum cannot be a unit, because its variant is not known at compile time; write \
                 `#[fsdp_unit]` on the modules in its variants, and `#[fsdp(leaf)]` on fields of \
                 type `{name}`, or make `{name}` a struct with an `Option` for each variant"
            ),
        ),
        Data::Enum(_) => errors.push(
            name,
            format!(
                "`FsdpModule` cannot be derived for an enum, because its variant is not known at \
                 compile time; remove it here and write `#[fsdp(leaf)]` on fields of type \
                 `{name}`, or make `{name}` a struct with an `Option` for each variant"
            ),
        ),
        Data::Union(_) => errors.push(
            name,
            format!("a union cannot be a Burn module; make `{name}` a struct of its parts"),
        ),
    }
}

/// Checks that each type parameter in a field of the layout has a bound by which its own layout is
/// known, and that no parameter is a backend or a lifetime.
pub(super) fn has_bounds(module: &Module<'_>, errors: &mut Errors) {
    let generics = &module.original.generics;
    if let Some(lifetime) = generics.lifetimes().next() {
        let message = "a module cannot borrow anything, because Burn moves it between devices and \
                       threads; hold the value itself";
        errors.push(lifetime, message);
    }
    for param in generics.type_params() {
        let bounds = bounds_of(module, &param.ident);
        let name = &param.ident;
        if name == "B" || bounds.iter().any(|bound| bound.contains("Backend")) {
            let message = format!(
                "remove `{name}`: since 0.22, Burn's modules and tensors have no backend parameter"
            );
            errors.push(param, message);
            continue;
        }
        let is_known = bounds.iter().any(|bound| LAYOUT_BOUNDS.contains(&bound.as_str()));
        let fields = module.layout_fields().filter(|field| field.content == Content::Module);
        let holds = fields.filter(|field| names(&field.original.ty, name)).count() > 0;
        if holds && !is_known {
            let message = format!(
                "the layout of `{name}` is not known; write the bound `{name}: FsdpModule` here and \
                 on the `impl` block (`#[derive(Module)]` also needs `ModuleDisplay`)"
            );
            errors.push(param, message);
        }
    }
}

/// Traits of a type whose layout is known.
const LAYOUT_BOUNDS: &[&str] = &["FsdpModule", "FsdpUnit", "HookedForward"];

/// Returns the last words of the traits that bound a type parameter, of the struct or in its `where`
/// clause.
fn bounds_of(module: &Module<'_>, param: &Ident) -> Vec<String> {
    let generics = &module.original.generics;
    let own = generics.type_params().filter(|own| own.ident == *param);
    let own = own.flat_map(|own| &own.bounds);
    let predicates = generics.where_clause.iter().flat_map(|clause| &clause.predicates);
    let later = predicates.filter_map(|predicate| match predicate {
        WherePredicate::Type(predicate) if is_named_type(&predicate.bounded_ty, param) => {
            Some(&predicate.bounds)
        }
        _ => None,
    });
    let name = |bound: &TypeParamBound| match bound {
        TypeParamBound::Trait(bound) => Some(bound.path.segments.last()?.ident.to_string()),
        _ => None,
    };
    own.chain(later.flatten()).filter_map(name).collect()
}

fn is_named_type(ty: &Type, param: &Ident) -> bool {
    matches!(ty, Type::Path(path) if path.path.is_ident(param))
}

/// Returns whether a type names a type parameter.
fn names(ty: &Type, param: &Ident) -> bool {
    fn search(tokens: TokenStream, param: &Ident) -> bool {
        tokens.into_iter().any(|token| match token {
            TokenTree::Ident(ident) => ident == *param,
            TokenTree::Group(group) => search(group.stream(), param),
            _ => false,
        })
    }
    search(ty.to_token_stream(), param)
}

/// Checks the order of the item's macros. `#[derive(Module)]` comes first, so that it sees Burn's
/// attributes on the fields. Only one of the two macros of this crate is written. A unit's
/// arguments are in `#[fsdp_unit(..)]`.
pub(super) fn has_macros_in_order(module: &Module<'_>, errors: &mut Errors) {
    let attrs = &module.original.attrs;
    if module.unit.is_some() {
        if let Some(derive) = derives(attrs, "Module") {
            let message = "`#[derive(Module)]` must be above `#[fsdp_unit]`; move this line up";
            errors.push(derive, message);
        }
        for attr in attrs.iter().filter(|attr| is_named(attr, &[FSDP])) {
            let message = "the arguments of a unit belong in `#[fsdp_unit(..)]`; move them there";
            errors.push(attr, message);
        }
    }
    if let Some(attr) = module.fsdp_unit() {
        let message = if module.unit.is_some() {
            "`#[fsdp_unit]` is written twice; keep one, with the arguments of both"
        } else {
            "`#[fsdp_unit]` implements `FsdpModule` too; remove `FsdpModule` from the derive"
        };
        errors.push(attr, message);
    }
}

/// Checks that fields of one type have different keys. (Fields of different types may share a
/// prefix: the runtime's `have_distinct_keys` checks those.)
pub(super) fn has_distinct_keys(module: &Module<'_>, errors: &mut Errors) {
    let fields: Vec<_> = module
        .layout_fields()
        .filter(|field| field.content == Content::Module && !field.key_or_name().is_empty())
        .collect();
    for (i, second) in fields.iter().enumerate() {
        let key = second.key_or_name();
        let is_equal = |first: &&&Field<'_>| {
            first.key_or_name() == key
                && have_same_parameters(&first.original.ty, &second.original.ty)
        };
        let Some(first) = fields[..i].iter().find(is_equal) else {
            continue;
        };
        let message = format!(
            "fields `{}` and `{}` have one checkpoint key, `{key}`; give each its own",
            first.name(),
            second.name()
        );
        match second.key.as_ref().or(first.key.as_ref()) {
            Some(literal) => errors.push(literal, message),
            None => errors.push(&second.original.ty, message),
        }
    }
}

/// Returns whether the spelling of two types shows that they have parameters of the same names:
/// both are a `Param`, or they are spelled alike.
fn have_same_parameters(first: &Type, second: &Type) -> bool {
    let is_param = |ty: &Type| match ty {
        Type::Path(path) => path.path.segments.last().is_some_and(|last| last.ident == "Param"),
        _ => false,
    };
    is_param(first) && is_param(second)
        || first.to_token_stream().to_string() == second.to_token_stream().to_string()
}
