//! Rules on the groups of a struct: fields under `#[fsdp(unit = "name")]` with one name.

use syn::LitStr;

use crate::errors::{Errors, did_you_mean};
use crate::parse::{Content, Field, Module};

/// Checks that each group has several fields, and a name that is no field's.
pub(super) fn are_valid(module: &Module<'_>, errors: &mut Errors) {
    for field in &module.fields {
        let Some(group) = &field.group else { continue };
        has_a_path_of_its_own(module, group, errors);
        if field.content.is_in_layout() && num_fields(module, &group.value()) == 1 {
            errors.push(group, alone(module, field, &group.value()));
        }
    }
}

/// Checks that a group's name is not that of a field: the unit's module path ends with the name.
fn has_a_path_of_its_own(module: &Module<'_>, group: &LitStr, errors: &mut Errors) {
    let name = group.value();
    let is_named = |field: &&Field<'_>| field.name().trim_start_matches("r#") == name;
    if module.fields.iter().any(|field| is_named(&field)) {
        let message = format!(
            "`{}` has a field `{name}`, so the module path of the group would be that field's; give \
             the group another name",
            module.original.ident
        );
        errors.push(group, message);
    }
}

/// Returns the number of fields with parameters in a group.
fn num_fields(module: &Module<'_>, group: &str) -> usize {
    let in_group = |field: &&Field<'_>| field.group.as_ref().is_some_and(|it| it.value() == group);
    module.layout_fields().filter(in_group).count()
}

/// Returns the message for a group of one field.
fn alone(module: &Module<'_>, field: &Field<'_>, group: &str) -> String {
    let others = module.fields.iter().filter(|other| other.content != Content::Skipped);
    let names: Vec<String> =
        others.filter_map(|other| other.group.as_ref()).map(LitStr::value).collect();
    let others = names.iter().map(String::as_str).filter(|name| *name != group);
    match did_you_mean(group, others) {
        Some(meant) => format!(
            "`{}` is the only field of the group `{group}`; did you mean `{meant}`?",
            field.name()
        ),
        None => format!(
            "`{}` is the only field of the group `{group}`; write `unit`, or give another field the \
             same name",
            field.name()
        ),
    }
}
