//! The state dicts of optimizers. They are keyed by module path, since parameter ids differ between
//! runs.

use std::collections::BTreeMap;

use burn::tensor::TensorData;

use super::layout::LocalLayout;
use crate::checkpoint::scalar::Scalars;

/// State of an optimizer by module path. `T` is the form of the tensors: [`TensorData`] for full
/// tensors, [`ShardedTensor`](crate::state::ShardedTensor) for this rank's elements, [`LocalTensor`] for
/// this rank's tensors in the shapes in which they are stored.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerState<T> {
    /// State of each parameter that has any, by module path.
    pub parameters: BTreeMap<String, ParameterState<T>>,
    /// Layout to which a local state is bound; `None` for the other forms.
    pub(super) layout: Option<LocalLayout>,
}

impl<T> Default for OptimizerState<T> {
    fn default() -> Self {
        Self { parameters: BTreeMap::new(), layout: None }
    }
}

/// State that an optimizer holds for one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterState<T> {
    /// Numbers by name, such as the count of steps.
    pub scalars: Scalars,
    /// Tensors by name, such as the moments of Adam.
    pub tensors: BTreeMap<String, T>,
}

/// A tensor of an optimizer's state in the shape in which this rank stores it. It is meaningful
/// only within the [`OptimizerState`] that holds it, which has the layout.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalTensor(pub(super) TensorData);

impl LocalTensor {
    /// Returns the values in the shape in which this rank stores them.
    pub fn data(&self) -> &TensorData {
        &self.0
    }
}
