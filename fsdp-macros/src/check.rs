//! The rules one annotated item must obey on its own, one function each.
//!
//! Rules that need the layout of other types are `const` checks in the runtime's `check.rs`.

use quote::ToTokens;
use syn::{Data, Type};

use crate::ast::{Content, FORWARD, Field, Forward, Hooked, Module, Receiver};
use crate::attr::{self, FSDP};
use crate::error::{Errors, did_you_mean, one_of};

/// Checks a struct.
pub fn module(module: &Module<'_>, errors: &mut Errors) {
    is_a_struct(module, errors);
    is_not_generic(module, errors);
    stands_in_order(module, errors);
    for field in &module.fields {
        is_always_there(field, errors);
        has_one_role(field, errors);
        has_a_use_for_its_arguments(field, errors);
    }
    has_distinct_keys(module, errors);
    has_sound_ties(module, errors);
}

/// Checks an `impl` block.
pub fn hooks(hooked: &Hooked<'_>, errors: &mut Errors) {
    is_inherent(hooked, errors);
    is_of_one_type(hooked, errors);
    for forward in &hooked.forwards {
        takes_shared_self(forward, errors);
        is_plain(forward, errors);
    }
    has_a_forward(hooked, errors);
}

/// Checks a struct or an enum under `#[derive(UnitValue)]`.
pub fn value(item: &syn::DeriveInput, errors: &mut Errors) {
    if let Data::Union(_) = item.data {
        let message = "`UnitValue` cannot be derived for a union; make it a struct or an enum";
        errors.push(&item.ident, message);
    }
}

/// Only a struct has fields that are all there at once, which is what a layout lists.
fn is_a_struct(module: &Module<'_>, errors: &mut Errors) {
    let name = &module.original.ident;
    match &module.original.data {
        Data::Struct(_) => {}
        Data::Enum(_) if module.unit.is_some() => errors.push(
            name,
            format!(
                "an enum cannot be a unit, as what it holds is not known when the program \
                 compiles; write `#[fsdp_unit]` on the modules in its variants, and \
                 `#[fsdp(leaf)]` on fields of type `{name}`, or make `{name}` a struct with an \
                 `Option` for each variant"
            ),
        ),
        Data::Enum(_) => errors.push(
            name,
            format!(
                "`FsdpModule` cannot be derived for an enum, as what it holds is not known when \
                 the program compiles; remove it here and write `#[fsdp(leaf)]` on fields of type \
                 `{name}`, or make `{name}` a struct with an `Option` for each variant"
            ),
        ),
        Data::Union(_) => errors.push(
            name,
            format!("a union cannot be a Burn module; make `{name}` a struct of its parts"),
        ),
    }
}

/// The layout is a constant of one type, checked where that type is declared.
fn is_not_generic(module: &Module<'_>, errors: &mut Errors) {
    let generics = &module.original.generics;
    let Some(first) = generics.params.first() else {
        return;
    };
    let backend = generics.type_params().find(|param| {
        let bounds = param.bounds.to_token_stream().to_string();
        param.ident == "B" || bounds.contains("Backend")
    });
    let name = &module.original.ident;
    let advice = match (first, backend) {
        (_, Some(backend)) => format!(
            "remove `{}`: since 0.22, Burn's modules and tensors have no backend parameter",
            backend.ident
        ),
        (syn::GenericParam::Type(param), None) => format!(
            "write the module that `{}` stands for in its place, and one struct for each if there \
             are several",
            param.ident
        ),
        (_, None) => format!("write one struct for each `{name}` that is used"),
    };
    let what = if module.unit.is_some() { "a unit" } else { "an `FsdpModule`" };
    errors.push(
        &generics.params,
        format!(
            "{what} cannot be generic, as its layout is settled where it is declared; {advice}"
        ),
    );
}

/// `derive` comes first, so that it sees Burn's attributes and `#[fsdp_unit]` sees what is left; one
/// of the two macros is enough; a unit's arguments stand in the attribute that makes it one.
fn stands_in_order(module: &Module<'_>, errors: &mut Errors) {
    let attrs = &module.original.attrs;
    if module.unit.is_some() {
        if let Some(derive) = attr::derives(attrs, "Module") {
            let message = "`#[derive(Module)]` must stand above `#[fsdp_unit]`; move this line up";
            errors.push(derive, message);
        }
        for attr in attrs.iter().filter(|attr| attr.path().is_ident(FSDP)) {
            let message = "the arguments of a unit stand in `#[fsdp_unit(..)]`; move these there";
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

/// An attribute macro sees a field before the compiler has decided whether it exists. (A derive sees
/// what is left, so there no such field remains.)
fn is_always_there(field: &Field<'_>, errors: &mut Errors) {
    if let Some(condition) = field.condition() {
        errors.push(
            condition,
            "a field of a unit cannot depend on a `#[cfg]`; move it into a struct under \
             `#[derive(Module, FsdpModule)]`, where it can, and hold that",
        );
    }
}

/// A field is passed by, or looked into when sharding, or looked into when compiling.
fn has_one_role(field: &Field<'_>, errors: &mut Errors) {
    if let (Some(leaf), Content::Skipped) = (&field.leaf, field.content) {
        errors.push(
            leaf,
            "`leaf` and `#[module(skip)]` exclude each other: Burn never visits a skipped field; \
             keep `leaf` if it holds parameters, else `#[module(skip)]`",
        );
    }
    if let (Some(unit), Content::Skipped) = (&field.unit, field.content) {
        errors.push(
            unit,
            "`unit` and `#[module(skip)]` exclude each other: Burn never visits a skipped field; \
             keep `unit` if it holds parameters, else `#[module(skip)]`",
        );
    }
}

/// What is not in the layout has no key and no parameters.
fn has_a_use_for_its_arguments(field: &Field<'_>, errors: &mut Errors) {
    let why = match field.content {
        Content::Skipped => "a field under `#[module(skip)]`",
        Content::Constant => "a plain value",
        Content::Module | Content::Leaf => return,
    };
    if let Some(key) = &field.key {
        errors.push(key, format!("{why} has no parameters to name; remove this key"));
    }
    if let (Some(leaf), Content::Constant) = (&field.leaf, field.content) {
        errors.push(leaf, format!("{why} has no parameters; remove `leaf`"));
    }
    if let (Some(unit), Content::Constant) = (&field.unit, field.content) {
        errors.push(unit, format!("{why} has no parameters to gather; remove `unit`"));
    }
}

/// Two fields of one type under one key are one parameter too many. (Of different types they may
/// share a prefix; the runtime's `check::keys` decides.)
fn has_distinct_keys(module: &Module<'_>, errors: &mut Errors) {
    let fields: Vec<_> = module
        .layout_fields()
        .filter(|field| field.content == Content::Module && !field.key_or_name().is_empty())
        .collect();
    for (i, second) in fields.iter().enumerate() {
        let key = second.key_or_name();
        let alike = |first: &&&Field<'_>| {
            first.key_or_name() == key && same_parameters(&first.original.ty, &second.original.ty)
        };
        let Some(first) = fields[..i].iter().find(alike) else {
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

/// Whether two types have parameters of the same names, as far as their spelling tells.
fn same_parameters(first: &Type, second: &Type) -> bool {
    let is_param = |ty: &Type| matches!(ty, Type::Path(path) if path.path.segments.last().is_some_and(|s| s.ident == "Param"));
    is_param(first) && is_param(second)
        || first.to_token_stream().to_string() == second.to_token_stream().to_string()
}

/// A tie names two places, each below a field of the struct, once.
fn has_sound_ties(module: &Module<'_>, errors: &mut Errors) {
    for (i, tie) in module.ties.iter().enumerate() {
        let places = [tie.first.value(), tie.second.value()];
        if places[0] == places[1] {
            let message = "this ties a place to itself; name the two places that hold the weight";
            errors.push(&tie.second, message);
        }
        let again = |other: &crate::attr::Tie| {
            let others = [other.first.value(), other.second.value()];
            places.iter().all(|place| others.contains(place))
        };
        if module.ties[..i].iter().any(again) {
            errors.push(&tie.first, "this tie is declared twice; remove one");
        }
        for path in [&tie.first, &tie.second] {
            starts_at_a_field(module, path, errors);
        }
    }
}

fn starts_at_a_field(module: &Module<'_>, path: &syn::LitStr, errors: &mut Errors) {
    let value = path.value();
    let first = value.split('.').next().unwrap_or_default();
    let field = module.fields.iter().find(|field| field.name().trim_start_matches("r#") == first);
    let name = &module.original.ident;
    match field.map(|field| field.content) {
        Some(Content::Module) => {}
        Some(Content::Leaf) => errors.push(
            path,
            format!(
                "`{first}` is under `#[fsdp(leaf)]`: FSDP does not know its fields when \
                 compiling; tie weights of modules that derive `FsdpModule`"
            ),
        ),
        Some(Content::Skipped) => errors.push(
            path,
            format!("`{first}` is under `#[module(skip)]` and holds no parameters to tie"),
        ),
        Some(Content::Constant) => {
            errors.push(path, format!("`{first}` is a plain value and holds no parameters to tie"));
        }
        None => {
            let names: Vec<_> = module.layout_fields().map(Field::name).collect();
            let names = || names.iter().map(|name| name.trim_start_matches("r#"));
            let advice = match did_you_mean(first, names()) {
                Some(meant) => format!("did you mean `{meant}`?"),
                None => format!("a path begins with {}", one_of(names())),
            };
            errors.push(path, format!("`{name}` has no field `{first}`; {advice}"));
        }
    }
}

/// The body moves to a second method, and a trait's `impl` has room for the trait's methods only.
fn is_inherent(hooked: &Hooked<'_>, errors: &mut Errors) {
    if let Some((_, path, _)) = &hooked.original.trait_ {
        let ty = hooked.original.self_ty.to_token_stream();
        errors.push(
            path,
            format!(
                "the hooks stand on an inherent block; write `#[fsdp_unit]` above `impl {ty}`, \
                 with a `forward` there that this trait's method calls"
            ),
        );
    }
}

/// A unit is one type; see [`is_not_generic`].
fn is_of_one_type(hooked: &Hooked<'_>, errors: &mut Errors) {
    let generics = &hooked.original.generics;
    if !generics.params.is_empty() {
        errors.push(
            &generics.params,
            "a unit cannot be generic; write this block for one type, and one struct for each if \
             there are several",
        );
    }
}

/// The hooks read the unit's shards, from outside and while other code may hold the unit too.
fn takes_shared_self(forward: &Forward<'_>, errors: &mut Errors) {
    let sig = &forward.original.sig;
    if sig.ident != FORWARD {
        return;
    }
    match forward.receiver {
        Receiver::Shared => {}
        Receiver::Exclusive => errors.push(
            sig.receiver(),
            "`forward` must take `&self`, not `&mut self`: a unit's parameters stay where they \
             are while it runs; keep what changes in an argument, a return value or a `Mutex`",
        ),
        Receiver::Owned => errors.push(
            sig.receiver(),
            "`forward` must take `&self`, not the unit itself: its parameters are needed again \
             for the backward",
        ),
        Receiver::Absent => errors.push(
            &sig.ident,
            "`forward` must take `&self`, whose parameters the hooks gather; give a function \
             without parameters of its own another name",
        ),
    }
}

/// The hooks run once before and once after the body, on the thread that calls.
fn is_plain(forward: &Forward<'_>, errors: &mut Errors) {
    let sig = &forward.original.sig;
    if forward.receiver != Receiver::Shared {
        return;
    }
    let name = &sig.ident;
    if let Some(keyword) = &sig.asyncness {
        errors.push(
            keyword,
            format!(
                "`{name}` of a unit cannot be `async`, as its parameters would be freed before it \
                 has run; remove `async` and wait outside"
            ),
        );
    }
    if let Some(keyword) = &sig.constness {
        errors.push(
            keyword,
            format!(
                "`{name}` of a unit cannot be `const`, as it gathers parameters; remove `const`"
            ),
        );
    }
}

/// Without a hooked method, the attribute would do nothing.
fn has_a_forward(hooked: &Hooked<'_>, errors: &mut Errors) {
    let reported = |forward: &Forward<'_>| {
        forward.receiver == Receiver::Shared || forward.original.sig.ident == FORWARD
    };
    if hooked.takes_hooks() && !hooked.forwards.iter().any(reported) {
        errors.push(
            &hooked.original.self_ty,
            "no method here can be hooked; write `#[fsdp_unit]` above the `impl` block that holds \
             `pub fn forward(&self, ..)`, or another method named `forward_..` that takes `&self`",
        );
    }
}
