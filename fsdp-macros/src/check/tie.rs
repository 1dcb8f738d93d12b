//! Rules on the `tie` arguments of a module.

use syn::LitStr;

use crate::errors::{Errors, did_you_mean, one_of};
use crate::parse::{Content, Field, Module, Tie};

/// Checks that each tie names two different places, each below a field of the struct, and is
/// declared once.
pub(super) fn are_valid(module: &Module<'_>, errors: &mut Errors) {
    for (i, tie) in module.ties.iter().enumerate() {
        let places = [tie.first.value(), tie.second.value()];
        if places[0] == places[1] {
            let message = "this ties a place to itself; name the two places that hold the weight";
            errors.push(&tie.second, message);
        }
        let is_equal = |other: &Tie| {
            let others = [other.first.value(), other.second.value()];
            places.iter().all(|place| others.contains(place))
        };
        if module.ties[..i].iter().any(is_equal) {
            errors.push(&tie.first, "this tie is declared twice; remove one");
        }
        for path in [&tie.first, &tie.second] {
            begins_with_a_field(module, path, errors);
        }
    }
}

/// Checks that a path begins with a field whose structure is known at compile time.
fn begins_with_a_field(module: &Module<'_>, path: &LitStr, errors: &mut Errors) {
    let value = path.value();
    let first = value.split('.').next().unwrap_or_default();
    let field = module.fields.iter().find(|field| field.name().trim_start_matches("r#") == first);
    let message = match field.map(|field| field.content) {
        Some(Content::Module) => return,
        Some(Content::Leaf) => format!(
            "`{first}` is under `#[fsdp(leaf)]`, so its fields are not known at compile time; tie \
             weights of modules that derive `FsdpModule`"
        ),
        Some(Content::Skipped) => {
            format!("`{first}` is under `#[module(skip)]` and holds no parameters to tie")
        }
        Some(Content::Constant) => {
            format!("`{first}` is a plain value and holds no parameters to tie")
        }
        None => unknown_field(module, first),
    };
    errors.push(path, message);
}

fn unknown_field(module: &Module<'_>, given: &str) -> String {
    let names: Vec<_> = module.layout_fields().map(Field::name).collect();
    let names = || names.iter().map(|name| name.trim_start_matches("r#"));
    let advice = match did_you_mean(given, names()) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => format!("a path begins with {}", one_of(names())),
    };
    format!("`{}` has no field `{given}`; {advice}", module.original.ident)
}
