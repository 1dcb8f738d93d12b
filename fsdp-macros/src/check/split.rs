//! Rules on layers that are split over tensor parallel ranks.

use syn::Type;

use crate::errors::Errors;
use crate::parse::{Content, Field, Module, Split};

/// Checks the fields under `column`, `row` and `vocab` of a struct, each alone and in their order.
pub(super) fn are_valid(module: &Module<'_>, errors: &mut Errors) {
    for field in &module.fields {
        has_one_split(field, errors);
        has_a_layer(field, errors);
        gathers_columns(field, errors);
    }
    are_in_order(module, errors);
}

fn has_one_split(field: &Field<'_>, errors: &mut Errors) {
    if let [(first, _), (second, path), ..] = &field.splits[..] {
        errors.push(
            path,
            format!(
                "`{}` and `{}` exclude each other: a matrix is split along one dimension, or whole; remove one",
                first.name(),
                second.name()
            ),
        );
    }
}

/// Checks that a field under a split holds a layer whose type FSDP knows.
fn has_a_layer(field: &Field<'_>, errors: &mut Errors) {
    let Some((split, path)) = field.split() else { return };
    let name = split.name();
    let message = match field.content {
        Content::Module if field.unit.is_some() => format!(
            "`{name}` and `unit` exclude each other: a split layer belongs to the unit that sums its \
             outputs; remove `unit`"
        ),
        Content::Module => return,
        Content::Leaf => format!(
            "`{name}` and `leaf` exclude each other: FSDP does not know which layers are in a leaf; \
             hold the `fsdp_runtime::nn::Linear` in a field of its own"
        ),
        Content::Skipped => {
            format!("a field under `#[module(skip)]` has no parameters to split; remove `{name}`")
        }
        Content::Constant => format!("a plain value has no parameters to split; remove `{name}`"),
    };
    errors.push(path, message);
}

fn gathers_columns(field: &Field<'_>, errors: &mut Errors) {
    let Some(gather) = &field.gather else { return };
    if !matches!(field.split(), Some((Split::Column, _))) {
        errors.push(
            gather,
            "`gather` is for a layer that each rank has a part of the outputs of; write \
             `#[fsdp(column, gather)]`, or remove `gather`",
        );
    }
}

/// Returns whether a type is that of a dropout layer, which takes columns and returns columns, as far as its name says.
fn drops_columns(ty: &Type) -> bool {
    let Type::Path(path) = ty else { return false };
    path.path.segments.last().is_some_and(|segment| segment.ident == "Dropout")
}

/// Checks that outputs which are split over ranks come back together: a `column` field comes before a
/// `row` field, and a `row` field after a `column` field.
fn are_in_order(module: &Module<'_>, errors: &mut Errors) {
    let mut open = None;
    let mut has_column = false;
    for field in &module.fields {
        match field.split() {
            Some((Split::Column, _)) if drops_columns(&field.original.ty) => {}
            Some((Split::Column, path)) if field.gather.is_none() => {
                open = open.or(Some((field, path)));
                has_column = true;
            }
            Some((Split::Row, path)) => {
                if !has_column {
                    let name = field.name();
                    errors.push(
                        path,
                        format!(
                            "`{name}` takes inputs that are split over ranks, and no field before it \
                             makes them; write `#[fsdp(column)]` on the layers whose outputs \
                             `{name}` takes, or remove `row`"
                        ),
                    );
                }
                open = None;
            }
            _ => {}
        }
    }
    if let Some((field, path)) = open {
        let name = field.name();
        errors.push(
            path,
            format!(
                "the outputs of `{name}` are split over ranks, and no field after it takes them; write \
                 `#[fsdp(row)]` on the layer that does, or `#[fsdp(column, gather)]` here"
            ),
        );
    }
}
