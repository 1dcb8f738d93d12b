//! Rules: a tie path leads to exactly one weight, and both places of a tie lie in the same unit.

use super::text::{Text, same};
use crate::module::{Child, Kind, Node};

/// Checks that a path of a tie leads to a `Param`, or to a module with exactly one matrix.
#[track_caller]
pub const fn leads_to_a_weight(layout: &'static Node, path: &str) {
    let start = Text::new("tie path ").code(path).then(": ");
    let node = match resolve(layout, path) {
        Ok(place) => place.node,
        Err(UnknownField { holder, segment }) => return fail_at(start, holder, segment),
    };
    match node.kind {
        Kind::Param { .. } => {}
        Kind::Leaf => start
            .then("FSDP does not know what is under `#[fsdp(leaf)]` when compiling; tie weights of modules that derive `FsdpModule`")
            .fail(),
        Kind::Fixed => start.then("only float parameters can be tied; this one is not").fail(),
        _ => match num_matrices(node) {
            1 => {}
            0 => start.code(node.ty).then(" holds no matrix; name the place of a weight").fail(),
            _ => {
                let mut one = Text::new(path);
                first_matrix(node, &mut one);
                start
                    .code(node.ty)
                    .then(" holds several matrices; name one of them, such as ")
                    .code(one.as_str())
                    .fail()
            }
        },
    }
}

/// Checks that both places of a tie lie in the same unit. Each unit is gathered and resharded on
/// its own, so a weight cannot belong to two.
#[track_caller]
pub const fn lie_in_one_unit(layout: &'static Node, first: &str, second: &str) {
    let (Ok(a), Ok(b)) = (resolve(layout, first), resolve(layout, second)) else {
        return;
    };
    let (a_unit, b_unit) = (first.split_at(a.unit_len).0, second.split_at(b.unit_len).0);
    let is_one_unit = match (a.group, b.group) {
        (Some(a), Some(b)) => {
            let (a_holder, b_holder) =
                (first.split_at(a.holder_len).0, second.split_at(b.holder_len).0);
            same(a.name, b.name) && same(a_holder, b_holder)
        }
        (None, None) => same(a_unit, b_unit),
        _ => false,
    };
    if is_one_unit {
        return;
    }
    let text = Text::new("a tied weight must lie in one unit, but ");
    let text = a.describe(text.code(first), layout, a_unit).then(" and ");
    let text = b.describe(text.code(second), layout, b_unit);
    let (a_type, b_type) = (!a_unit.is_empty() && !a.field, !b_unit.is_empty() && !b.field);
    let text = text.then("; ");
    let text = if a_type || b_type {
        text.then("write `#[derive(FsdpModule)]` in place of `#[fsdp_unit]` on ")
    } else {
        text
    };
    let text = match (a_type, b_type) {
        (true, true) if same(a.unit.ty, b.unit.ty) => text.code(a.unit.ty).then(", "),
        (true, true) => text.code(a.unit.ty).then(" and ").code(b.unit.ty).then(", "),
        (true, false) => text.code(a.unit.ty).then(", "),
        (false, true) => text.code(b.unit.ty).then(", "),
        (false, false) => text,
    };
    let text = if a.field {
        text.then("remove `#[fsdp(unit)]` at ").code(a_unit).then(", ")
    } else {
        text
    };
    let text = if b.field {
        text.then("remove `#[fsdp(unit)]` at ").code(b_unit).then(", ")
    } else {
        text
    };
    text.then("or hold the weight once, in a module that uses it for both").fail()
}

/// Checks that both places of a tie are split over tensor parallel ranks, or neither. They hold one weight.
#[track_caller]
pub const fn are_split_alike(layout: &'static Node, first: &str, second: &str) {
    let (Ok(a), Ok(b)) = (resolve(layout, first), resolve(layout, second)) else {
        return;
    };
    if a.split == b.split {
        return;
    }
    let (split, whole) = if a.split { (first, second) } else { (second, first) };
    Text::new("a tied weight has one part on each tensor parallel rank, and ")
        .code(split)
        .then(" is split, but ")
        .code(whole)
        .then(" is not; write `#[fsdp(vocab)]` on both fields, or on neither")
        .fail()
}

/// The target of a path.
#[derive(Clone, Copy)]
struct PathTarget {
    node: &'static Node,
    /// Innermost unit on the path, or the declaring type if there is none.
    unit: &'static Node,
    /// Length in bytes of the part of the path that leads to `unit`.
    unit_len: usize,
    /// Whether `unit` is a unit because of `#[fsdp(unit)]` on a field, not because of its type.
    field: bool,
    /// The group of that field, if it is under `#[fsdp(unit = "name")]`.
    group: Option<PathGroup>,
    /// Whether the place is split over tensor parallel ranks.
    split: bool,
}

/// A group of fields on a path.
#[derive(Clone, Copy)]
struct PathGroup {
    name: &'static str,
    /// Length in bytes of the part of the path that leads to the struct with the fields.
    holder_len: usize,
}

impl PathTarget {
    /// Appends the unit that the place lies in, for a message. `unit_path` is the path to that
    /// unit.
    const fn describe(&self, text: Text, layout: &Node, unit_path: &str) -> Text {
        match (unit_path.is_empty(), layout.is_unit(), self.group) {
            (false, _, Some(PathGroup { name, .. })) => {
                text.then(" lies in the unit ").code(name).then(" of ").code(unit_path)
            }
            (false, _, None) => {
                text.then(" lies in unit ").code(self.unit.ty).then(" (").code(unit_path).then(")")
            }
            (true, true, _) => text.then(" lies in unit ").code(layout.ty).then(" itself"),
            (true, false, _) => text.then(" lies in the unit around ").code(layout.ty),
        }
    }
}

/// The error of a path that does not exist: `holder` has no field `segment`.
#[derive(Clone, Copy)]
struct UnknownField<'a> {
    holder: &'static Node,
    segment: &'a str,
}

/// Follows a path from the declaring type.
const fn resolve<'a>(layout: &'static Node, path: &'a str) -> Result<PathTarget, UnknownField<'a>> {
    let mut place = PathTarget {
        node: layout,
        unit: layout,
        unit_len: 0,
        field: false,
        group: None,
        split: false,
    };
    // Whether the elements of the containers that come next are units.
    let mut each = false;
    let mut group = None;
    let mut start = 0;
    while start <= path.len() {
        let end = segment_end(path, start);
        let segment = path.split_at(end).0.split_at(start).1;
        let Some(child) = step(place.node, segment) else {
            return Err(UnknownField { holder: place.node, segment });
        };
        place.node = through_options(child.node);
        each |= child.unit;
        place.split |= child.split.is_some();
        if let Some(name) = child.group {
            group = Some(PathGroup { name, holder_len: start.saturating_sub(1) });
        }
        let is_container = matches!(place.node.kind, Kind::List | Kind::Tuple);
        if place.node.is_unit() || each && !is_container {
            place = PathTarget { unit: place.node, unit_len: end, field: each, group, ..place };
            each = false;
            group = None;
        }
        start = end + 1;
    }
    Ok(place)
}

/// Returns the end of the segment that begins at byte `start`.
const fn segment_end(path: &str, start: usize) -> usize {
    let bytes = path.as_bytes();
    let mut end = start;
    while end < bytes.len() && bytes[end] != b'.' {
        end += 1;
    }
    end
}

/// Returns the child of `node` that a segment names.
const fn step(node: &'static Node, segment: &str) -> Option<&'static Child> {
    if matches!(node.kind, Kind::List) {
        return if is_index(segment) { Some(&node.children[0]) } else { None };
    }
    let mut i = 0;
    while i < node.children.len() {
        if same(node.children[i].name, segment) || is_raw(node.children[i].name, segment) {
            return Some(&node.children[i]);
        }
        i += 1;
    }
    None
}

/// Returns whether `name` is `segment` as a raw identifier, such as `r#type`.
const fn is_raw(name: &str, segment: &str) -> bool {
    match name.split_at_checked(2) {
        Some((prefix, rest)) => same(prefix, "r#") && same(rest, segment),
        None => false,
    }
}

/// Returns whether a segment is a list index.
const fn is_index(segment: &str) -> bool {
    let bytes = segment.as_bytes();
    let mut i = 0;
    while i < bytes.len() && bytes[i].is_ascii_digit() {
        i += 1;
    }
    i == bytes.len() && i > 0
}

/// Returns the content of an `Option`, through all levels of nesting; any other node is returned
/// unchanged.
const fn through_options(mut node: &'static Node) -> &'static Node {
    while matches!(node.kind, Kind::Optional) {
        node = node.children[0].node;
    }
    node
}

/// Fails with a message that lists the fields of `holder`, which has no field `segment`.
#[track_caller]
const fn fail_at(start: Text, holder: &'static Node, segment: &str) {
    let text = match holder.kind {
        Kind::List => start
            .then("a list has no field ")
            .code(segment)
            .then("; name one of its elements by index, such as `0`"),
        Kind::Leaf => start
            .code(segment)
            .then(" is under `#[fsdp(leaf)]`, where FSDP does not look when compiling; tie weights of modules that derive `FsdpModule`"),
        _ if holder.children.is_empty() => start
            .code(holder.ty)
            .then(" holds nothing called ")
            .code(segment)
            .then("; end the path before it"),
        _ => {
            let mut text = start
                .code(holder.ty)
                .then(" has no field ")
                .code(segment)
                .then("; it has ");
            let mut i = 0;
            while i < holder.children.len() {
                let comma = if i > 0 { ", " } else { "" };
                text = text.then(comma).code(holder.children[i].name);
                i += 1;
            }
            text
        }
    };
    text.fail()
}

/// Returns the number of parameters of two or more dimensions in a module, without those of nested
/// units. A list counts as two elements, as its length is unknown.
const fn num_matrices(node: &Node) -> usize {
    let mut total = is_matrix(node) as usize;
    let mut i = 0;
    while i < node.children.len() {
        let child = &node.children[i];
        if !child.unit && !child.node.is_unit() {
            total += num_matrices(child.node);
        }
        i += 1;
    }
    if matches!(node.kind, Kind::List) { total * 2 } else { total }
}

/// Appends the path from `node` to its first matrix, and returns whether there is one.
const fn first_matrix(node: &Node, path: &mut Text) -> bool {
    if is_matrix(node) {
        return true;
    }
    let mut i = 0;
    while i < node.children.len() {
        let child = &node.children[i];
        let len = path.len();
        path.push_segment(if matches!(node.kind, Kind::List) { "0" } else { child.name });
        if !child.unit && !child.node.is_unit() && first_matrix(child.node, path) {
            return true;
        }
        path.truncate(len);
        i += 1;
    }
    false
}

/// Returns whether a node is a parameter of two or more dimensions.
const fn is_matrix(node: &Node) -> bool {
    matches!(node.kind, Kind::Param { rank } if rank >= 2)
}
