//! Rules over the units of the static layout tree.

use super::text::{Text, path_segment};
use crate::module::{HookedForward, Kind, Node};

/// Checks that a unit has the hooks it needs: a hooked `forward`, and, if there are field units
/// below it, hooks around the calls of those in the same block.
#[track_caller]
pub const fn has_hooks<U: HookedForward>() {
    let (unit, mut path) = (U::LAYOUT.ty, Text::new(""));
    match (first_field_unit(&U::LAYOUT, &mut path), U::HOOKS_FIELD_UNITS) {
        (true, true) | (false, false) => {}
        (true, false) => Text::new("")
            .code(path.as_str())
            .then(" is under `#[fsdp(unit)]`, so the hooks of that unit stand around the calls of its `forward`; write `#[fsdp_unit(field_units)]` above `impl ")
            .then(unit)
            .then("`, with these calls in it")
            .fail(),
        (false, true) => Text::new("`field_units` above `impl ")
            .then(unit)
            .then("` has nothing to do, as no field below ")
            .code(unit)
            .then(" is under `#[fsdp(unit)]`; remove it")
            .fail(),
    }
}

/// Checks that a field under `#[fsdp(unit)]` holds a module with parameters that is not a unit and
/// contains none. `layout` is `None` for a type that is not an `FsdpModule`.
#[track_caller]
pub const fn can_be_a_unit(field: &str, layout: Option<&Node>) {
    let Some(layout) = layout else { return };
    let node = element(layout);
    let text = Text::new("field ").code(field);
    if node.is_unit() {
        text.then(" is under `#[fsdp(unit)]`, but ")
            .code(node.ty)
            .then(" is a unit already; remove `unit`")
            .fail();
    }
    if let Some(inner) = find_unit(node) {
        text.then(" is under `#[fsdp(unit)]`, but ")
            .code(node.ty)
            .then(" holds the unit ")
            .code(inner.ty)
            .then("; to gather what is around that one on its own, write `#[fsdp_unit]` on ")
            .code(node.ty)
            .then(" and on the `impl` block that holds its `forward`, and remove `unit` here")
            .fail();
    }
    if matches!(node.kind, Kind::Param { .. }) {
        text.then(" is under `#[fsdp(unit)]`, but a parameter has no `forward` to gather it for; hold it in a module, or remove `unit`")
            .fail();
    }
    if !has_parameters(node) {
        text.then(" is under `#[fsdp(unit)]`, but ")
            .code(node.ty)
            .then(" has no parameters to gather; remove `unit`")
            .fail();
    }
}

/// Checks that a unit contains no root and, unless it is the root itself, has parameters of its
/// own.
#[track_caller]
pub const fn is_a_sound_unit(layout: &Node) {
    let mut path = Text::new("");
    if let Some(inner) = nested_root(layout, &mut path) {
        Text::new("unit ")
            .code(layout.ty)
            .then(" holds the root ")
            .code(inner.ty)
            .then(" (")
            .code(path.as_str())
            .then("), but the root is the outermost unit of a model; write `#[fsdp_unit]` without `root` on ")
            .code(inner.ty)
            .fail();
    }
    if !matches!(layout.kind, Kind::Unit { root: true }) && !has_parameters(layout) {
        Text::new("unit ")
            .code(layout.ty)
            .then(" has no parameters of its own, so there is nothing to gather for it; write `#[derive(FsdpModule)]` in place of `#[fsdp_unit]`, and no `#[fsdp_unit]` on its `impl` block")
            .fail();
    }
}

/// Checks that a field under `#[module(skip)]` contains no unit. `types` holds the layouts of the
/// field's type and of all its generic arguments.
#[track_caller]
pub const fn skips_no_unit(field: &str, types: &[Option<&Node>]) {
    if let Some(unit) = first_unit(types) {
        Text::new("field ")
            .code(field)
            .then(" is under `#[module(skip)]` and holds the unit ")
            .code(unit.ty)
            .then(", whose parameters Burn would not train and FSDP not shard; remove `#[module(skip)]`")
            .fail();
    }
}

/// Checks that a field under `#[fsdp(leaf)]` contains no unit. `types` holds the layouts of the
/// field's type and of all its generic arguments.
#[track_caller]
pub const fn hides_no_unit(field: &str, types: &[Option<&Node>]) {
    if let Some(unit) = first_unit(types) {
        Text::new("field ")
            .code(field)
            .then(" is under `#[fsdp(leaf)]` and holds the unit ")
            .code(unit.ty)
            .then(", which FSDP would not see there; remove `leaf`")
            .fail();
    }
}

/// Returns the first unit in any of the layouts.
const fn first_unit<'a>(types: &[Option<&'a Node>]) -> Option<&'a Node> {
    let mut i = 0;
    while i < types.len() {
        if let Some(node) = types[i]
            && let Some(unit) = find_unit(node)
        {
            return Some(unit);
        }
        i += 1;
    }
    None
}

/// Returns the first unit in a layout tree, field units included.
const fn find_unit(node: &Node) -> Option<&Node> {
    if node.is_unit() {
        return Some(node);
    }
    let mut i = 0;
    while i < node.children.len() {
        if node.children[i].unit {
            return Some(element(node.children[i].node));
        }
        if let Some(unit) = find_unit(node.children[i].node) {
            return Some(unit);
        }
        i += 1;
    }
    None
}

/// Returns a root below `node` with no other unit in between. Appends the path from `node` to it.
const fn nested_root(node: &Node, path: &mut Text) -> Option<&'static Node> {
    let mut i = 0;
    while i < node.children.len() {
        let child = &node.children[i];
        let len = path.len();
        path.push_segment(path_segment(node, child));
        match child.node.kind {
            Kind::Unit { root: true } => return Some(child.node),
            Kind::Unit { root: false } => {}
            _ => {
                if let Some(root) = nested_root(child.node, path) {
                    return Some(root);
                }
            }
        }
        path.truncate(len);
        i += 1;
    }
    None
}

/// Returns the element type of an `Option` or a list, through all levels of nesting; any other node
/// is returned unchanged.
const fn element(mut node: &Node) -> &Node {
    while matches!(node.kind, Kind::Optional | Kind::List) {
        node = node.children[0].node;
    }
    node
}

/// Returns whether there is a field unit below `node` with no other unit in between. Appends the
/// path from `node` to it.
const fn first_field_unit(node: &Node, path: &mut Text) -> bool {
    let mut i = 0;
    while i < node.children.len() {
        let child = &node.children[i];
        let len = path.len();
        path.push_segment(path_segment(node, child));
        if child.unit || !child.node.is_unit() && first_field_unit(child.node, path) {
            return true;
        }
        path.truncate(len);
        i += 1;
    }
    false
}

/// Returns whether a module has parameters of its own, outside of nested units. A leaf counts as
/// having some, as its content is unknown.
const fn has_parameters(node: &Node) -> bool {
    if matches!(node.kind, Kind::Param { .. } | Kind::Leaf) {
        return true;
    }
    let mut i = 0;
    while i < node.children.len() {
        let child = &node.children[i];
        if !child.unit && !child.node.is_unit() && has_parameters(child.node) {
            return true;
        }
        i += 1;
    }
    false
}
