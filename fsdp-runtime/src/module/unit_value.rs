//! Values that hold tensors: the inputs and outputs of a unit's forward.

use burn::nn::LstmState;
use burn::nn::attention::MhaOutput;
use burn::tensor::{Bool, DispatchTensor, Int, Tensor};
#[cfg(feature = "train")]
use burn::train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};

/// A value whose tensors FSDP can reach: an input or the output of a unit's `forward`.
///
/// Float tensors of any shape implement the trait, and so do integer and Boolean tensors, numbers,
/// strings, and `Option`, `Result`, `Vec`, `Box`, arrays and tuples of such values. Derive it for a
/// struct or an enum of such values with `#[derive(UnitValue)]`.
///
/// FSDP hooks the gradient of every float tensor in the output, so that the unit is gathered before
/// its backward. The float tensors in the inputs tell FSDP when that backward is over, and are cast
/// under mixed precision. An input of another type works too, but its tensors are ignored for both.
///
/// # Errors
///
/// A `forward` that returns any other type does not compile, nor does one that takes an input of a
/// generic type, such as `x: T` or `x: impl Into<Tensor<2>>`, without the bound `UnitValue`.
///
/// # Example
///
/// ```
/// use burn::tensor::Tensor;
/// use fsdp_runtime::UnitValue;
///
/// #[derive(UnitValue, Clone)]
/// struct Attended {
///     /// Shape `[batch, tokens, features]`.
///     context: Tensor<3>,
///     /// Shape `[batch, heads, tokens, tokens]`.
///     weights: Option<Tensor<4>>,
/// }
///
/// let context = Tensor::zeros([2, 8, 16], &Default::default());
/// let mut tensors = 0;
/// Attended { context, weights: None }.visit_tensors(&mut |_| tensors += 1);
/// assert_eq!(tensors, 1);
/// ```
#[diagnostic::on_unimplemented(
    message = "FSDP does not know which tensors `{Self}` holds",
    label = "not a `UnitValue`",
    note = "a unit's `forward` returns tensors, or `Option`, `Result`, `Vec`, arrays or tuples of them; for a struct of your own, write `#[derive(UnitValue)]` on it",
    note = "an input of a generic type needs the bound: write `T: Into<Tensor<2>> + UnitValue`, or take a reference if the input holds no tensors"
)]
pub trait UnitValue: Sized {
    /// Replaces every float tensor by the result of `map`, in the order of
    /// [`visit_tensors`](Self::visit_tensors).
    fn map_tensors(self, map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self;
    /// Passes a handle of every float tensor to `visit`, in declaration order.
    fn visit_tensors(&self, visit: &mut dyn FnMut(DispatchTensor));
}

impl<const D: usize> UnitValue for Tensor<D> {
    fn map_tensors(self, map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        Tensor::from_dispatch(map(self.into_dispatch()))
    }

    fn visit_tensors(&self, visit: &mut dyn FnMut(DispatchTensor)) {
        visit(self.clone().into_dispatch());
    }
}

/// Implements [`UnitValue`] for types without float tensors.
macro_rules! without_tensors {
    ($([$($generics:tt)*] $ty:ty),+ $(,)?) => {$(
        impl<$($generics)*> UnitValue for $ty {
            fn map_tensors(self, _: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
                self
            }

            fn visit_tensors(&self, _: &mut dyn FnMut(DispatchTensor)) {}
        }
    )+};
}
without_tensors!(
    [const D: usize] Tensor<D, Int>, [const D: usize] Tensor<D, Bool>,
    [] (), [] bool, [] char, [] String, ['a] &'a str, [] f64, [] f32, [] usize, [] u64, [] u32,
    [] u16, [] u8, [] isize, [] i64, [] i32, [] i16, [] i8,
);

/// Implements [`UnitValue`] for containers that have `map` and `iter`.
macro_rules! container {
    ($([$($generics:tt)*] $ty:ty, $map:ident;)+) => {$(
        impl<$($generics)*> UnitValue for $ty {
            fn map_tensors(self, map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
                self.$map(|value| value.map_tensors(map))
            }

            fn visit_tensors(&self, visit: &mut dyn FnMut(DispatchTensor)) {
                self.iter().for_each(|value| value.visit_tensors(visit));
            }
        }
    )+};
}
container!(
    [T: UnitValue] Option<T>, map;
    [T: UnitValue, E] Result<T, E>, map;
    [T: UnitValue, const N: usize] [T; N], map;
);

impl<T: UnitValue> UnitValue for Vec<T> {
    fn map_tensors(self, map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        self.into_iter().map(|value| value.map_tensors(map)).collect()
    }

    fn visit_tensors(&self, visit: &mut dyn FnMut(DispatchTensor)) {
        self.iter().for_each(|value| value.visit_tensors(visit));
    }
}

impl<T: UnitValue> UnitValue for Box<T> {
    fn map_tensors(self, map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        Self::new((*self).map_tensors(map))
    }

    fn visit_tensors(&self, visit: &mut dyn FnMut(DispatchTensor)) {
        (**self).visit_tensors(visit);
    }
}

/// Implements [`UnitValue`] for structs of Burn's that a `forward` returns.
macro_rules! burn_outputs {
    ($([$($generics:tt)*] $ty:ty { $($field:ident),+ };)+) => {$(
        impl<$($generics)*> UnitValue for $ty {
            fn map_tensors(mut self, map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
                $(self.$field = self.$field.map_tensors(map);)+
                self
            }

            fn visit_tensors(&self, visit: &mut dyn FnMut(DispatchTensor)) {
                $(self.$field.visit_tensors(visit);)+
            }
        }
    )+};
}
burn_outputs!(
    [] MhaOutput { weights, context };
    [const D: usize] LstmState<D> { cell, hidden };
);
#[cfg(feature = "train")]
burn_outputs!(
    [] ClassificationOutput { loss, output, targets };
    [] MultiLabelClassificationOutput { loss, output, targets };
    [] RegressionOutput { loss, output, targets };
    [] SequenceOutput { loss, logits, predictions, targets };
);

macro_rules! tuples {
    ($($name:ident $index:tt),+) => {
        impl<$($name: UnitValue),+> UnitValue for ($($name,)+) {
            fn map_tensors(self, map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
                ($(self.$index.map_tensors(map),)+)
            }

            fn visit_tensors(&self, visit: &mut dyn FnMut(DispatchTensor)) {
                $(self.$index.visit_tensors(visit);)+
            }
        }
    };
}
tuples!(A 0);
tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, D 3);
tuples!(A 0, B 1, C 2, D 3, E 4);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5);
