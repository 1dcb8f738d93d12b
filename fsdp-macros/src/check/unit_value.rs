//! Rules on a type under `#[derive(UnitValue)]`.

use syn::Data;

use crate::errors::Errors;
use crate::parse::Value;

/// Checks that the type is no union: which field of a union is set is not known, so its tensors
/// cannot be found.
pub(super) fn is_not_a_union(value: &Value<'_>, errors: &mut Errors) {
    if let Data::Union(_) = value.original.data {
        let message = "`UnitValue` cannot be derived for a union; make it a struct or an enum";
        errors.push(&value.original.ident, message);
    }
}

/// Checks that no field has an attribute `#[fsdp(..)]`, which is for the fields of modules.
pub(super) fn has_no_field_arguments(value: &Value<'_>, errors: &mut Errors) {
    for attr in value.misplaced_attributes() {
        let message = "the fields of a `UnitValue` take no arguments; remove this attribute";
        errors.push(attr, message);
    }
}
