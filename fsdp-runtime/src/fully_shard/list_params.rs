//! A list of parameters of a sharded module that a mapper treats in a way of its own.

use std::collections::HashMap;

use burn::module::{Module, Param, ParamId};
use burn::tensor::Tensor;

use crate::module::opaque::visit_leaf;
use crate::module::{ParamIndex, ParamVisitor, Sharded};

/// Returns the sharded and replicated parameters of a module that `is_listed` accepts. One that is tied to another has
/// the other's id, and comes later.
pub(super) fn list_params<M: Module>(
    module: &M,
    is_listed: impl Fn(ParamIndex) -> bool,
) -> HashMap<ParamId, ParamIndex> {
    let mut list = ListParams { is_listed, found: HashMap::new() };
    visit_leaf(module, &mut list);
    list.found
}

/// The visitor behind [`list_params`].
struct ListParams<F> {
    is_listed: F,
    found: HashMap<ParamId, ParamIndex>,
}

impl<F: Fn(ParamIndex) -> bool> ParamVisitor for ListParams<F> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(index) = Sharded::of(param).map(|sharded| sharded.index) else { return };
        if (self.is_listed)(index) {
            self.found.insert(param.id, index);
        }
    }
}
