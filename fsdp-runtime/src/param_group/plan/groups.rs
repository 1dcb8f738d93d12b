//! Groups of fields, under `#[fsdp(unit = "name")]`, at the positions of a traversal.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use crate::module::{Child, FsdpModule, ModulePath, ParamVisitor, Split};

/// A group of fields of one struct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// Name of the group.
    pub(super) name: &'static str,
    /// Module path of the struct, followed by the group's name.
    pub(super) path: String,
}

/// The current position of a traversal, and the groups of the fields that lead to it.
#[derive(Debug, Default)]
pub(super) struct Position {
    path: ModulePath,
    groups: Vec<Option<Group>>,
}

impl Position {
    /// Enters a field, or an element of a container in a field, which is in the field's group.
    pub(super) fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        let group = match child.group {
            Some(name) => Some(Group { name, path: self.path.join(&[name.to_string()]) }),
            None => self.group().cloned(),
        };
        self.groups.push(group);
        self.path.enter(child, index);
    }

    /// Leaves the field that was entered last.
    pub(super) fn exit(&mut self) {
        self.groups.pop();
        self.path.exit();
    }

    /// Returns the module path with the segments `below` appended.
    pub(super) fn join(&self, below: &[String]) -> String {
        self.path.join(below)
    }

    /// Returns how the field, or the one around it, is split over tensor parallel ranks.
    pub(super) fn split(&self) -> Option<Split> {
        self.path.split()
    }

    /// Returns the group, if the position is in one.
    pub(super) fn group(&self) -> Option<&Group> {
        self.groups.last()?.as_ref()
    }
}

/// Returns the number of elements of the parameters of each group in a module, by the group's path.
pub(super) fn group_sizes<M: FsdpModule>(module: &M) -> BTreeMap<String, usize> {
    let mut sizes = GroupSizes::default();
    module.visit_params(&mut sizes);
    sizes.found
}

#[derive(Default)]
struct GroupSizes {
    position: Position,
    found: BTreeMap<String, usize>,
}

impl ParamVisitor for GroupSizes {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        self.position.enter(child, index);
    }

    fn exit(&mut self) {
        self.position.exit();
    }

    fn field_unit<M: Module>(&mut self, _: &M) -> bool {
        self.position.group().is_some()
    }

    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(group) = self.position.group() {
            let size = self.found.entry(group.path.clone()).or_default();
            *size += param.lazy_shape().num_elements();
        }
    }
}
