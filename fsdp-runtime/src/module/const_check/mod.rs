//! Rules over the static layout tree, as `const fn`s that generated code calls in constants.
//!
//! A rule that is broken fails the constant with a message that names the paths involved; each is
//! `#[track_caller]`, so the compiler points at the caller, whose tokens lie where the user wrote.
//! What one item can be checked for on its own is in `fsdp-macros`.

mod keys;
mod recompute;
mod text;
mod ties;

use core::marker::PhantomData;

pub use burn::module::Module as BurnModule;

use crate::module::{FsdpModule, HookedForward, Kind, Node};
use text::Text;

pub use keys::{have_distinct_keys, num_keys};
pub use recompute::{MayNotRecompute, NotHooked, can_be_recomputed};
pub use ties::{leads_to_a_weight, lie_in_one_unit};

/// A type under `#[derive(Module)]`. Asked for before the traits that need it, for its message.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a Burn module",
    label = "no `#[derive(Module)]` on this type",
    note = "write `#[derive(Module, Debug)]` on it, above `#[fsdp_unit]` where that is written"
)]
pub trait DerivesModule {}

#[diagnostic::do_not_recommend]
impl<M: BurnModule> DerivesModule for M {}

/// A unit must have a hooked `forward`, or nothing gathers it; and the calls of the field units below
/// it are hooked in the same block.
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

/// A field under `#[fsdp(unit)]` must hold a module with parameters that is no unit and holds none.
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

/// A unit must have parameters of its own, unless it is the root, and hold no root.
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

/// A field under `#[module(skip)]` must hold no unit. `types`: what it is made of.
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

/// A field under `#[fsdp(leaf)]` must hold no unit. `types`: what it is made of.
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

/// Finds the layout of a type that may have none: `Probe::<T>::LAYOUT` is the constant here where
/// `T` is an [`FsdpModule`], as an inherent one goes first, else that of [`NoLayout`].
pub struct Probe<T: ?Sized>(PhantomData<T>);

impl<T: FsdpModule> Probe<T> {
    /// The type's layout.
    pub const LAYOUT: Option<&'static Node> = Some(&T::LAYOUT);
}

/// What [`Probe`] finds for a type that is no [`FsdpModule`].
pub trait NoLayout {
    /// Nothing.
    const LAYOUT: Option<&'static Node> = None;
}

impl<T: ?Sized> NoLayout for Probe<T> {}

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

/// A root below `node` with no other unit between, and the path to it.
const fn nested_root(node: &Node, path: &mut Text) -> Option<&'static Node> {
    let mut i = 0;
    while i < node.children.len() {
        let child = &node.children[i];
        let len = path.len();
        path.push_segment(if matches!(node.kind, Kind::List) { "{}" } else { child.name });
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

/// What a node holds, or each element of it where it is an `Option` or a list.
const fn element(mut node: &Node) -> &Node {
    while matches!(node.kind, Kind::Optional | Kind::List) {
        node = node.children[0].node;
    }
    node
}

/// Whether there is a field unit below `node` with no unit between, and the path to it.
const fn first_field_unit(node: &Node, path: &mut Text) -> bool {
    let mut i = 0;
    while i < node.children.len() {
        let child = &node.children[i];
        let len = path.len();
        path.push_segment(if matches!(node.kind, Kind::List) { "{}" } else { child.name });
        if child.unit || !child.node.is_unit() && first_field_unit(child.node, path) {
            return true;
        }
        path.truncate(len);
        i += 1;
    }
    false
}

/// Whether a module has parameters to gather, nested units aside.
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
