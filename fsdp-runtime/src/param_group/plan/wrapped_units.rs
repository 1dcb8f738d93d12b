//! Modules that the wrap policy makes units of.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::groups::Position;
use crate::module::opaque::visit_leaf;
use crate::module::{Child, FsdpModule, ParamVisitor, UnitType};
use crate::options::WrapPolicy;

/// Returns whether the policy makes a unit of a module whose type is under `#[fsdp_unit]`.
pub(super) fn wraps<M: FsdpModule>(policy: WrapPolicy, module: &M) -> bool {
    match policy {
        WrapPolicy::Annotated => true,
        WrapPolicy::TransformerBased(units) => units.contains(&UnitType::of_module::<M>()),
        WrapPolicy::Named(names) => names.contains(&M::LAYOUT.ty),
        WrapPolicy::SizeBased { min_num_params } => {
            let mut size = Size::new(min_num_params);
            module.visit_params(&mut size);
            size.end() >= min_num_params
        }
        WrapPolicy::NoWrap => false,
    }
}

/// Returns whether the policy makes a unit of a module in a field under `#[fsdp(unit)]`.
///
/// Policies that list types exclude it, because they can only list types under `#[fsdp_unit]`.
pub(super) fn wraps_field<M: Module>(policy: WrapPolicy, module: &M) -> bool {
    match policy {
        WrapPolicy::Annotated => true,
        WrapPolicy::TransformerBased(_) | WrapPolicy::Named(_) | WrapPolicy::NoWrap => false,
        WrapPolicy::SizeBased { min_num_params } => {
            let mut size = Size::new(0);
            visit_leaf(module, &mut size);
            size.end() >= min_num_params
        }
    }
}

/// Returns whether the policy makes one unit of a group of fields with `size` elements. Its modules
/// are otherwise part of the enclosing unit.
pub(super) fn wraps_group(policy: WrapPolicy, size: usize) -> bool {
    match policy {
        WrapPolicy::Annotated => true,
        WrapPolicy::TransformerBased(_) | WrapPolicy::Named(_) | WrapPolicy::NoWrap => false,
        WrapPolicy::SizeBased { min_num_params } => size >= min_num_params,
    }
}

/// Counts the elements of a module's parameters, without those of nested units that have at least
/// `min` elements and so become units of their own.
struct Size {
    min: usize,
    /// The module, and each nested unit that the traversal is in, outermost first.
    units: Vec<UnitSize>,
    position: Position,
}

/// Elements of a unit.
#[derive(Default)]
struct UnitSize {
    /// Elements of the unit's own parameters.
    own: usize,
    /// Elements of each group of fields in the unit, by path.
    groups: BTreeMap<String, usize>,
}

impl UnitSize {
    /// Returns the elements of the unit with those of the groups that are smaller than `min`.
    fn total(self, min: usize) -> usize {
        self.own + self.groups.into_values().filter(|size| *size < min).sum::<usize>()
    }
}

impl Size {
    fn new(min: usize) -> Self {
        Self { min, units: vec![UnitSize::default()], position: Position::default() }
    }

    /// Returns the elements of the module.
    fn end(self) -> usize {
        self.units.into_iter().next().unwrap_or_default().total(self.min)
    }
}

impl ParamVisitor for Size {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        self.position.enter(child, index);
    }

    fn exit(&mut self) {
        self.position.exit();
    }

    fn unit<M: FsdpModule>(&mut self, _: &M) -> bool {
        self.units.push(UnitSize::default());
        true
    }

    fn field_unit<M: Module>(&mut self, _: &M) -> bool {
        self.units.push(UnitSize::default());
        true
    }

    fn unit_end(&mut self) {
        let ended = self.units.pop().unwrap_or_default().total(self.min);
        let Some(enclosing) = self.units.last_mut() else { return };
        if let Some(group) = self.position.group() {
            *enclosing.groups.entry(group.path.clone()).or_default() += ended;
        } else if ended < self.min {
            enclosing.own += ended;
        }
    }

    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(unit) = self.units.last_mut() {
            unit.own += param.lazy_shape().num_elements();
        }
    }
}
