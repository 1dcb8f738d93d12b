//! Modules that the wrap policy makes units of.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use crate::module::opaque::visit_leaf;
use crate::module::{FsdpModule, ParamVisitor, UnitType};
use crate::options::WrapPolicy;

/// Returns whether the policy makes a unit of a module whose type is under `#[fsdp_unit]`.
pub(super) fn wraps<M: FsdpModule>(policy: WrapPolicy, module: &M) -> bool {
    match policy {
        WrapPolicy::Annotated => true,
        WrapPolicy::TransformerBased(units) => units.contains(&UnitType::of_module::<M>()),
        WrapPolicy::Named(names) => names.contains(&M::LAYOUT.ty),
        WrapPolicy::SizeBased { min_num_params } => {
            let mut size = Size { min: min_num_params, sums: vec![0] };
            module.visit_params(&mut size);
            size.sums[0] >= min_num_params
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
            let mut size = Size { min: 0, sums: vec![0] };
            visit_leaf(module, &mut size);
            size.sums[0] >= min_num_params
        }
    }
}

/// Counts the elements of a module's parameters, without those of nested units that have at least
/// `min` elements and so become units of their own.
struct Size {
    min: usize,
    /// Elements of the module and of each nested unit that the traversal is in, outermost first.
    sums: Vec<usize>,
}

impl ParamVisitor for Size {
    fn unit<M: FsdpModule>(&mut self, _: &M) -> bool {
        self.sums.push(0);
        true
    }

    fn field_unit<M: Module>(&mut self, _: &M) -> bool {
        self.sums.push(0);
        true
    }

    fn unit_end(&mut self) {
        let own = self.sums.pop().unwrap_or_default();
        if own < self.min
            && let Some(enclosing) = self.sums.last_mut()
        {
            *enclosing += own;
        }
    }

    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(sum) = self.sums.last_mut() {
            *sum += param.lazy_shape().num_elements();
        }
    }
}
